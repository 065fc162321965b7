"""Blocks from every rank to every rank, as all ranks agreed to move them: made by an operator, or as they are.

Operators give what stores a tile; what lies there already goes as it is, as gradients do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardplan.fused.calls.instance import FusedInstance, PutStep, TileCall, instance
from shardplan.fused.heap.symmetric import SymmetricTensor
from shardplan.fused.operators.call_context import CallContext, count_tiles
from shardplan.fused.tiles.events import TileBox
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockCuts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A call that all ranks agreed upon, of blocks whose dims beyond two are `trailing` and whole.

    `own` are the boxes of each destination's block in what this rank has, `made` and `call` the instance and its steps:
    of CPUs, none where the heap has other kernels. `said` is what an operator keeps beside it.
    """

    op: str
    cuts: BlockCuts
    trailing: tuple[int, ...]
    varying: bool
    own: tuple[TileBox, ...] = ()
    made: FusedInstance | None = None
    call: TileCall | None = None
    said: Any = None

    @classmethod
    def of(
        cls,
        asked: CallContext,
        op: str,
        cuts: BlockCuts,
        dtype: torch.dtype,
        trailing: Sequence[int] = (),
        varying: bool = False,
        least: int = 0,
        out: SymmetricTensor | None = None,
        said: Any = None,
    ) -> BlockMove:
        """Return the call, in tiles of at least so many rows, or one; collective. Raises as `FusedInstance.call`."""
        given = (op, cuts, tuple(trailing), varying)
        if asked.kernels is not None:
            return cls(*given, said=said)
        tiles = count_tiles(asked.tiles, cuts.mean_rows(), least) if least else 1
        made = instance(asked.heap, op, TileSchedule(tiles=tiles), "", asked.seconds, out)
        call = made.call(cuts.shape(), {"result": dtype}, tuple(trailing))
        return cls(*given, cuts.own_boxes(asked.heap.rank), made, call, said)

    def run_tiles(self, asked: CallContext, put: Callable[[PutStep], None], **more: Any) -> torch.Tensor:
        """Run an epoch on CPUs, and return this rank's result where it came; raises as `FusedInstance.run`."""
        assert self.made is not None and self.call is not None
        self.made.seconds = asked.seconds
        return self.made.run(self.call, put, **more)["result"]

    def own_rows(self, step: PutStep, rank: int) -> slice:
        """Return which of this rank's rows a tile is made of, `rank` being this one."""
        ahead = self.own[step.to][0][0] - self.cuts.shape().boxes[rank][step.to][0][0]
        return slice(step.box[0][0] + ahead, step.box[0][1] + ahead)

    def run(self, asked: CallContext, g: torch.Tensor) -> torch.Tensor:
        """Return the blocks of all ranks, put together; collective. Raises as `FusedInstance.run`."""
        g = g.contiguous()
        if asked.kernels is not None:
            return asked.kernels.move(asked.seconds, self.op, self.cuts, g, self.varying)

        def put(step: PutStep) -> None:
            step.view.copy_(g[tuple(slice(a, b) for a, b in self.own[step.to])])

        return self.run_tiles(asked, put).clone()
