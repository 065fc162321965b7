"""Lower bounds in seconds of collectives: of bandwidth only, at the best rates that any row of the library reaches.

Members are device ids, int64 [G, k], and nbytes is B, what a member holds before, float64 [G]. Where a level reduces in
the network, reductions have no count bound; the others still hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.hardware.prices.aggregate import units_spanned
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.plans.bounds import most_over, summed_capacity

# Rows (a group in a parent) times arcs of a ring that are tried: arrays of 32 MB at most. Above it no ring is cut.
_ARCS = 1 << 22
Share = Callable[[Ints, int], NDArray[np.floating[Any]]]  # of members in a unit and of a group, to bytes over B


def all_reduce_bound(members: Ints, nbytes: Floats, fabric: Fabric) -> float:
    """Return the bound of all-reduces at once: B crosses every cut of a group each way, 2(n-1)B a level in total.

    Source: cut: every unit must be entered; count: n - 1 merges and n - 1 deliveries an element.
    """
    reduces = any(wires.level.reduces for wires in fabric.wires)
    return _reduction_seconds(
        members, nbytes, fabric, lambda c, _: np.ones(len(c)), lambda c, _: np.ones(len(c)), 0 if reduces else 2
    )


def reduce_scatter_bound(members: Ints, nbytes: Floats, fabric: Fabric) -> float:
    """Return the bound of reduce-scatters at once: a unit with c of k members takes in cB/k and gives out (k-c)B/k.

    Source: the gather bound reversed.
    """
    reduces = any(wires.level.reduces for wires in fabric.wires)
    return _reduction_seconds(
        members, nbytes, fabric, lambda c, k: c / k, lambda c, k: (k - c) / k, 0 if reduces else 1
    )


def all_gather_bound(members: Ints, nbytes: Floats, fabric: Fabric) -> float:
    """Return the bound of all-gathers at once: a unit with c of k members takes in (k-c)B and gives out cB.

    Source: ForestColl, arXiv 2402.06787.
    """
    k = np.asarray(members).shape[1]
    return _reduction_seconds(members, nbytes, fabric, lambda c, k: (k - c) * 1.0, lambda c, _: c * 1.0, k)


def _reduction_seconds(
    members: Ints, nbytes: Floats, fabric: Fabric, enter: Share, leave: Share, total: float
) -> float:
    """The worst cut of units and arcs, and of each level (n-1) * total * B over the units' summed capacity."""
    at = np.sort(fabric.topology_ids(members), axis=1)
    groups, k = at.shape
    if k < 2 or not groups:
        return 0.0
    spanned = units_spanned(at, fabric.topology)
    worst = 0.0
    for j, wires in enumerate(fabric.wires):
        unit = (at // wires.stride).reshape(-1)
        keys, count = np.unique(np.repeat(np.arange(groups), k) * wires.units + unit, return_counts=True)
        group, unit = keys // wires.units, keys % wires.units
        split = count < k  # a unit that holds a whole group need not be crossed by it
        if not bool(split.any()):
            continue
        own = fabric.capacity(j)
        for share in (enter, leave):
            load = np.bincount(unit[split], (share(count, k) * nbytes[group])[split], wires.units).astype(np.float64)
            worst = max(worst, most_over(load, own))
        times = float(((spanned[j] - 1) * total * nbytes).sum())
        worst = max(worst, times / float(summed_capacity(fabric, j, np.unique(unit[split]), own)))
        if wires.level.link == "ring" and len(keys) * wires.level.size**2 <= _ARCS:
            worst = max(worst, _arcs(fabric, j, group, unit, count, nbytes, k, enter, leave))
    return worst


def _arcs(
    fabric: Fabric, j: int, group: Ints, unit: Ints, count: Ints, nbytes: Floats, k: int, enter: Share, leave: Share
) -> float:
    """The worst cut of rings at two of their links: an arc of neighbours takes in, and gives out, as a unit does."""
    level = fabric.wires[j].level
    keys, row = np.unique(group * (fabric.wires[j].units // level.size) + unit // level.size, return_inverse=True)
    owner = keys // (fabric.wires[j].units // level.size)
    parent = keys % (fabric.wires[j].units // level.size)
    held = np.zeros((len(keys), level.size), dtype=np.int64)
    held[row.reshape(-1), unit % level.size] = count
    link = level.delivered_rate * level.uplinks * fabric.library.best_share(j < fabric.far)
    own = np.full(fabric.wires[j].units // level.size, 2 * link)  # an arc has two ends
    if j > 0:
        own = own + fabric.capacity(j - 1)
    worst = 0.0
    inside = held.copy()  # the members on the arc that starts at each unit; arcs of one unit are cuts of units
    for length in range(2, level.size):
        inside = inside + np.roll(held, -(length - 1), axis=1)
        for share in (enter, leave):
            bytes_cut = share(inside.reshape(-1), k).reshape(inside.shape) * nbytes[owner][:, None]
            bytes_cut[(inside == 0) | (inside == k)] = 0.0
            load = np.zeros((len(own), level.size))
            np.add.at(load, parent, bytes_cut)
            worst = max(worst, float((load / own[:, None]).max()))
    return worst
