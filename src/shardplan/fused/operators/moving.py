"""Blocks of a tensor that every rank has for every rank, put where they belong: an all-to-all, used for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardplan.fused.calls.instance import PutStep, instance
from shardplan.fused.operators.asked import Asked
from shardplan.fused.operators.out import placed, refuse_out, stored
from shardplan.fused.tiles.events import TileBox
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape

if TYPE_CHECKING:
    import torch


def moved(
    asked: Asked,
    op: str,
    key: Any,
    shape: BlockShape,
    g: torch.Tensor,
    from_: Sequence[TileBox],
    varying: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the blocks of all ranks, put together; `from_[d]` is the box of g that goes to rank d.

    Dims of g beyond those of the shape are whole. `out` is as an operator's. Collective; raises as `FusedInstance.run`.
    """
    if asked.kernels is not None:
        refuse_out(op, out)
        return asked.kernels.move(asked, op, shape, g, from_, varying)
    schedule = TileSchedule(order=asked.order)  # type: ignore[arg-type]
    made = instance(asked.heap, op, schedule, "", asked.seconds, placed(op, asked.heap, out))
    more = tuple(g.shape[len(shape.extents[0]) :])
    call = made.call((key, str(g.dtype), more), shape, {"result": g.dtype}, more, varying)

    def put(step: PutStep) -> None:
        step.view.copy_(g[tuple(slice(a, b) for a, b in from_[step.to])])

    return stored(op, made.run(call, put)["result"], out)
