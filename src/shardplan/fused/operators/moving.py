"""Blocks of a tensor that every rank has for every rank, put where they belong: an all-to-all, used for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardplan.fused.calls.instance import FusedInstance, PutStep, TileCall, instance
from shardplan.fused.operators.asked import Asked
from shardplan.fused.tiles.events import TileBox
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A move that all ranks agreed upon: `boxes[d]` of this rank's tensor goes to rank d, and is put as `shape` says.

    `made` and `call` are those of CPUs, None where the heap has other kernels.
    """

    op: str
    shape: BlockShape
    boxes: tuple[TileBox, ...]
    varying: bool
    made: FusedInstance | None
    call: TileCall | None

    @classmethod
    def of(
        cls,
        asked: Asked,
        op: str,
        shape: BlockShape,
        forward: BlockShape,
        dtype: torch.dtype,
        trailing: Sequence[int] = (),
        varying: bool = False,
    ) -> BlockMove:
        """Return the move of blocks of `forward` back to who sent them; collective.

        `trailing` are dims of the tensor beyond those of the shape, which are whole. Raises as `FusedInstance.call`.
        """
        boxes = tuple(forward.boxes[s][asked.heap.rank] for s in range(asked.heap.ranks))
        if asked.kernels is not None:
            return cls(op, shape, boxes, varying, None, None)
        schedule = TileSchedule(order=asked.order)  # type: ignore[arg-type]
        made = instance(asked.heap, op, schedule, "", asked.seconds)
        return cls(op, shape, boxes, varying, made, made.call(shape, {"result": dtype}, trailing))

    def run(self, asked: Asked, g: torch.Tensor) -> torch.Tensor:
        """Return the blocks of all ranks, put together; collective. Raises as `FusedInstance.run`."""
        g = g.contiguous()
        if asked.kernels is not None:
            return asked.kernels.move(asked, self.op, self.shape, g, self.boxes, self.varying)
        assert self.made is not None and self.call is not None

        def put(step: PutStep) -> None:
            step.view.copy_(g[tuple(slice(a, b) for a, b in self.boxes[step.to])])

        self.made.seconds = asked.seconds
        return self.made.run(self.call, put)["result"].clone()
