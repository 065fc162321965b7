"""Where a chain of layers is cut into pipeline stages.

The cut is exact: of all cuts whose stages fit into memory one whose heaviest stage is as light as can be, and of these
the most even one (least sum of squares). Where none fits it is the best of those whose fullest stage is least full.
Memory is what a stage holds between actions: state, and what is saved for as many microbatches as are in flight there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from shardplan.strategy.schedules.schedule import Schedule


def in_flight_of_stages(found: Schedule) -> tuple[int, ...]:
    """Return of each stage the most forwards whose B or W is not done."""
    most, now = [0] * found.stages, [0] * found.stages
    for row in found.ranks:
        for leaf in (leaf for a in row if a is not None for leaf in a.leaves):
            now[leaf.stage] += {"F": 1, "B": -1, "W": -1}.get(leaf.kind, 0)
            most[leaf.stage] = max(most[leaf.stage], now[leaf.stage])
    return tuple(most)


def balanced(
    weights: Sequence[float], stages: int, held: np.ndarray | None = None, room: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the first layer of each stage; `held` are bytes [stage, layer], `room` those of a device of each stage.

    There are at least as many layers as stages.

    >>> balanced([2, 1, 1, 1, 3], 2), balanced([1, 1, 1, 1], 2, np.array([[3] * 4, [1] * 4]), [3, 9])
    ((0, 3), (0, 1))
    """
    n = len(weights)
    order = np.arange(n + 1)
    parts = order[:, None] < order[None, :]

    def summed(each: Sequence[float] | np.ndarray) -> np.ndarray:
        ends = np.concatenate([[0.0], np.cumsum(np.asarray(each, dtype=float))])
        return np.where(parts, ends[None, :] - ends[:, None], math.inf)

    every = summed(weights)
    costs = np.broadcast_to(every, (stages, n + 1, n + 1))
    if held is not None:
        full = np.array([summed(row) / most for row, most in zip(held, room, strict=True)])
        fits = np.maximum(1.0, _chained(full, np.maximum)[0])
        costs = np.where(full <= fits, every, math.inf)
    most, _ = _chained(costs, np.maximum)
    even = np.where(costs <= most, (costs / (most or 1.0)) ** 2, math.inf)
    return _chained(even, np.add)[1]


def _chained(costs: np.ndarray, join: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> tuple[float, tuple[int, ...]]:
    """The least that a chain of stages costs, `costs` being [stage, begin, end], and where each stage begins."""
    best = np.full(costs.shape[1], math.inf)
    best[0] = 0.0
    before: list[np.ndarray] = []
    for cost in costs:
        tried = join(best[:, None], cost)
        before.append(tried.argmin(0))
        best = tried.min(0)
    starts = [costs.shape[1] - 1]
    for back in reversed(before):
        starts.append(int(back[starts[-1]]))
    return float(best[-1]), tuple(starts[:0:-1])
