"""What steps take at the least to carry some bytes: the start of a row of the library, and the rate of that row.

Few bytes go sooner under a row that starts soon, many under one that reaches more of the rate; a bound that takes the
best of both is beaten by no step, and attained by none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.hardware.prices.library import Library
from shardplan.hardware.topology import Topology

_WEIGHTS = np.linspace(0, 1, 33)  # of the outer of two levels that carry the same bytes


class Bound(NamedTuple):
    """A lower bound of a move."""

    seconds: float
    transfer: float  # without the latency of the first hop, like `Price.transfer`

    @staticmethod
    def largest(bounds: Iterable[Bound]) -> Bound:
        """Return the largest of each; 0 of none."""
        return Bound(*(max(each) for each in zip((0.0, 0.0), *bounds, strict=True)))


def bound_with_starts(fabric: Fabric, j: int, transfer: float, at: Ints) -> Bound:
    """Return the bound of what ways of level j carry in `transfer` seconds at the best rates; 0 of nothing.

    Some way carries no less than all do on average. The steps that use it, in turn or at once, take the start of the
    row among theirs that starts last, and their bytes are dealt out to that row and those that start sooner. Where
    every device that takes part, `at`, has its own ways, these bytes go over those of the innermost level too (of a
    tree, which hands on, half of them), and any mean of the two times is a bound.
    """
    if transfer <= 0:
        return Bound(0.0, 0.0)
    wires, last = fabric.wires[j], len(fabric.wires) - 1
    if j > 0 and wires.level.link != "switch":  # ways of two levels, with a share each
        return Bound(fabric.first_hop(j) + transfer, transfer)
    begin, outer, near = _rows(fabric.topology, fabric.library, fabric.launch, j)
    whole = transfer * fabric.library.best_share(j < fabric.far)
    inner = whole * wires.rates / fabric.wires[last].rates if _own_ways(fabric, j, at) else 0.0
    costs = np.outer(whole / outer, _WEIGHTS) + np.outer(inner / near, 1 - _WEIGHTS)
    return Bound(float((begin + np.minimum.accumulate(costs, axis=0).max(axis=1)).min()), transfer)


@lru_cache(maxsize=256)  # asked for in every certificate
def _rows(topology: Topology, library: Library, launch: float, j: int) -> tuple[Floats, Floats, Floats]:
    """The least start of every row over level j or one further out, ascending, and its shares there and inside."""
    fabric = Fabric(topology, launch=launch)
    found = [(fabric.with_library(replace(library, rows=(row,))).first_hop(j), row) for row in library.rows]
    rows = sorted(((start, row) for start, row in found if start < np.inf), key=lambda one: one[0])
    handed = [0.5 if row.algorithm == "tree" else 1.0 for _, row in rows]
    shares = [[row.share(i < fabric.far) for _, row in rows] for i in (j, len(topology.levels) - 1)]
    return np.array([start for start, _ in rows]), np.array(shares[0]), np.array(shares[1]) / handed


def _own_ways(fabric: Fabric, j: int, at: Ints) -> bool:
    """Whether devices have a way each, of one rate, out of units of level j and of all levels further in."""
    inner = fabric.wires[j:]
    if any(w.level.link != "switch" or isinstance(w.rates, np.ndarray) for w in inner):
        return False
    return all(len(np.unique(fabric.rail(i, at))) == len(at) for i in range(j, len(fabric.wires)))
