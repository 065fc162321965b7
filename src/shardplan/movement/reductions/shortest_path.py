"""The cheapest reduction of a payload: the exact shortest path over types, for `redistribute`, `reduce` and `place`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.hardware.level_factors import LevelFactor
from shardplan.hardware.prices.alpha_beta import alpha_beta
from shardplan.hardware.topology import Topology
from shardplan.movement.reductions.type_graph import State, TypeEdge, edge_costs, reduction_space


def cheapest_path(
    factors: Sequence[LevelFactor],
    nbytes: float,
    topology: Topology,
    before: State,
    after: State,
    algorithm: str = "auto",
    subsets: bool = False,
) -> list[TypeEdge] | None:
    """Return the edges of the cheapest program from one state to another, or None where there is no way.

    Nothing cheaper exists in the graph. `nbytes` is the payload of a device; `subsets` admits ops over any set of
    factors; `algorithm` is as for `hardware.prices.cost.price`.
    """
    if not factors:
        return []
    space = reduction_space(len(factors), subsets)
    return space.path(before, after, edge_costs(space, factors, nbytes, alpha_beta(topology, algorithm)))


Key = tuple[tuple[tuple[int, int], ...], ...]  # the size and stride of every digit of every factor


def least_seconds(
    choices: Sequence[tuple[LevelFactor, ...]],
    topology: Topology,
    nbytes: float,
    before: str,
    after: str,
    algorithm: str = "auto",
) -> list[float]:
    """Return the seconds of the cheapest program for many sets of factors at once, one for each placement.

    `before` and `after` are one letter, that of every factor; `nbytes` is the payload of a device. 0 without factors.
    """
    prices = alpha_beta(topology, algorithm)
    known: dict[Key, float] = {}
    for depth in sorted({len(factors) for factors in choices} - {0}):
        space = reduction_space(depth)
        fresh = {_key(factors): factors for factors in choices if len(factors) == depth}
        table = np.array([edge_costs(space, factors, nbytes, prices) for factors in fresh.values()])
        reach = space.distances(before * depth, table)[:, space.index[after * depth]]
        known |= zip(fresh, reach.tolist(), strict=True)
    return [known[_key(factors)] if factors else 0.0 for factors in choices]


def _key(factors: tuple[LevelFactor, ...]) -> Key:
    """What the prices of a placement depend on: placements that agree in it are priced once."""
    return tuple(tuple((d.size, d.stride) for d in f.digits) for f in factors)
