"""Two sides that know only themselves: each says its text in the store, and every rank plans from both.

The texts stay in the store, so that a rank that was started again finds them. One that is older than what the ranks run
gives a plan of another hash, which the meeting of the ranks refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardplan.errors import LayoutError, TimedOut, excerpt
from shardplan.movement.weights.refit import RefitPlan, refit
from shardplan.movement.weights.weights import Weights


def join_sides(
    weights: Weights,
    side: str,
    rank: int,
    store: Any,
    settings: tuple[Any, Any, Any],
    timeout: float,
    name: str,
    drop: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> RefitPlan:
    """Return the plan of this side and the other; see `Refit.join`, and `shardplan.refit` of what may differ."""
    sides = ("source", "target")
    if side not in sides:
        raise LayoutError(f"side = {excerpt(side)}; legal are {' and '.join(sides)}")
    weights.place(rank)
    texts = PrefixStore(f"shardplan/refit/{name}/sides", store)
    if rank == min(weights.devices):
        texts.set(side, str(weights))
    other = sides[1 - sides.index(side)]
    try:
        texts.wait([other], timedelta(seconds=timeout))
    except (RuntimeError, dist.DistError):
        raise TimedOut(f"refit: the {other}'s side did not arrive within {timeout:g} s") from None
    found = Weights.parse(texts.get(other).decode())
    source, target = (weights, found) if side == "source" else (found, weights)
    limit, topology, only = settings
    return refit(source, target, topology, limit, only, drop=drop, differ=differ)
