"""The cheapest reduction of a payload: the exact shortest path over types, for `redistribute`, `reduce` and `place`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.core.ops import Op
from shardplan.hardware.level_factors import LevelFactor
from shardplan.hardware.prices.alpha_beta import alpha_beta
from shardplan.hardware.topology import Topology
from shardplan.movement.reductions.payload import Payload
from shardplan.movement.reductions.type_graph import State, TypeEdge, edge_costs, reduction_space


def cheapest_path(
    view: Payload, topology: Topology, before: State, after: State, algorithm: str = "auto", subsets: bool = False
) -> list[TypeEdge] | None:
    """Return the edges of the cheapest program from one state to another, or None where there is no way.

    Nothing cheaper exists in the graph. `subsets` admits ops over any set of factors; `algorithm` is as for
    `hardware.prices.cost.price`.
    """
    if not view.factors:
        return []
    space = reduction_space(len(view.factors), subsets)
    costs = edge_costs(space, view.factors, view.nbytes, alpha_beta(topology, algorithm))
    return space.path(before, after, costs)


def reduction_ops(view: Payload, topology: Topology, before: State, after: State) -> list[Op] | None:
    """Return the ops of the cheapest program under the cheapest algorithm of each step; see `cheapest_path`."""
    path = cheapest_path(view, topology, before, after)
    return None if path is None else view.path_ops(path)


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
