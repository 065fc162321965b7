"""Blocks of a tensor that every rank has for every rank, put where they belong: an all-to-all, used for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardplan.fused.calls.instance import FusedInstance, PutStep, TileCall, instance
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockCuts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A move that all ranks agreed upon, of a tensor whose dims beyond two are `trailing` and whole.

    `made` and `call` are those of CPUs, None where the heap has other kernels.
    """

    op: str
    cuts: BlockCuts
    trailing: tuple[int, ...]
    varying: bool
    made: FusedInstance | None
    call: TileCall | None

    @classmethod
    def of(
        cls,
        asked: CallContext,
        op: str,
        cuts: BlockCuts,
        dtype: torch.dtype,
        trailing: Sequence[int] = (),
        varying: bool = False,
    ) -> BlockMove:
        """Return the move; collective. Raises as `FusedInstance.call`."""
        more = tuple(trailing)
        if asked.kernels is not None:
            return cls(op, cuts, more, varying, None, None)
        made = instance(asked.heap, op, TileSchedule(), "", asked.seconds)
        return cls(op, cuts, more, varying, made, made.call(cuts.shape(), {"result": dtype}, more))

    def run(self, asked: CallContext, g: torch.Tensor) -> torch.Tensor:
        """Return the blocks of all ranks, put together; collective. Raises as `FusedInstance.run`."""
        g = g.contiguous()
        if asked.kernels is not None:
            return asked.kernels.move(asked, self.op, self.cuts, g, self.varying)
        assert self.made is not None and self.call is not None
        boxes = self.cuts.own_boxes(asked.heap.rank)

        def put(step: PutStep) -> None:
            step.view.copy_(g[tuple(slice(a, b) for a, b in boxes[step.to])])

        self.made.seconds = asked.seconds
        return self.made.run(self.call, put)["result"].clone()
