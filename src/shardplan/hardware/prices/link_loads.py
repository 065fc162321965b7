"""The load of links of a ring, torus, mesh or `full` level: all-to-alls and rings between the children of one parent.

Pairs (group, unit) stand in order: those of one group under one parent are neighbours.
"""

from __future__ import annotations

import math

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints

# Pairs of units that are listed one by one on a ring, torus or mesh (some arrays of 32 MB); above, traffic is summed
# dim by dim, which costs the same for any number of pairs.
_LISTED = 1 << 22
_BLOCK = 1 << 24  # numbers in the tables of one block of rows of such a sum: 128 MB


def _partners(row: Ints) -> tuple[Ints, Ints]:
    """Return every ordered pair of different entries of one row, rows being numbered in order: first, second."""
    count = np.bincount(row)
    width = count[row]
    first = np.repeat(np.arange(len(row)), width)
    # `second` counts from where the row of `first` starts.
    starts = np.repeat((np.cumsum(count) - count)[row], width)
    second = starts + nth_of_each(width)
    keep = first != second
    return first[keep], second[keep]


def next_alike(label: Ints) -> Ints:
    """Return for every entry the place of the next one of its label, closing the ring; equal labels are neighbours."""
    after = np.arange(1, len(label) + 1)
    last = np.flatnonzero(np.diff(label, append=-1))
    after[last] = np.concatenate([[0], last[:-1] + 1])[: len(last)]
    return after


def _siblings(group: Ints, parent: Ints) -> Ints:
    """Number the runs of entries of one group under one parent, in order."""
    return np.cumsum(np.concatenate([[True], (group[1:] != group[:-1]) | (parent[1:] != parent[:-1])])) - 1


def all_to_all_load(j: int, group: Ints, unit: Ints, members: Ints, part: Floats, fabric: Fabric) -> Floats:
    """Return the load of all-to-alls of (group, unit) pairs, in order, between the children of one parent.

    `members` are the members of the group in the unit, `part` is what one of them sends another; all [pairs].
    """
    level = fabric.wires[j].level
    parent = unit // level.size
    row = _siblings(group, parent)
    if int((np.bincount(row) ** 2).sum()) <= _LISTED or level.link == "full":
        first, second = _partners(row)
        return fabric.link_load(j, unit[first], unit[second], part[first] * members[first] * members[second])
    child, parents = unit % level.size, parent[np.flatnonzero(np.diff(row, prepend=-1))]
    dims = range(len(level.extents))
    return np.concatenate([_dim_load(j, dim, row, parents, child, members, part, fabric) for dim in dims])


def _dim_load(
    j: int, dim: int, row: Ints, parents: Ints, child: Ints, members: Ints, part: Floats, fabric: Fabric
) -> Floats:
    """The load of one dim in an all-to-all, the dims being crossed in order.

    On a line of dim `dim` the coordinates of earlier dims are already the receiver's, those of later ones still the
    sender's. So what goes from one coordinate to another on a line is a product of sums: over the senders that agree in
    the later coordinates (`late`), and over the receivers that agree in the earlier ones (`early`).
    """
    extents = fabric.wires[j].level.extents
    before, extent, after = math.prod(extents[:dim]), extents[dim], math.prod(extents[dim + 1 :])
    here = child // after % extent
    seconds = np.zeros(2 * fabric.wires[j].units)
    loads: dict[int, Floats] = {}  # by parent: bytes from (coordinate, late) to (early, coordinate), over its groups
    block = max(1, _BLOCK // (before * extent * after))
    for parent in np.unique(parents):
        rows = np.flatnonzero(parents == parent)
        total = np.zeros((extent * after, before * extent))
        for begin in range(0, len(rows), block):
            chosen = rows[begin : begin + block]
            local = np.full(len(parents), -1)
            local[chosen] = np.arange(len(chosen))
            at = local[row]
            mine = at >= 0
            at, count, x = at[mine], members[mine], here[mine]
            late, early = child[mine] % after, child[mine] // (extent * after)
            width = extent * after
            source = np.bincount(at * width + x * after + late, count * part[mine], len(chosen) * width)
            width = before * extent
            target = np.bincount(at * width + early * extent + x, count, len(chosen) * width)
            total += source.reshape(len(chosen), -1).T @ target.reshape(len(chosen), -1)
        loads[int(parent)] = total.reshape(extent, after, before, extent)
    for parent, total in loads.items():
        start, late, early, end = (index.reshape(-1) for index in np.indices(total.shape))
        nbytes = total.reshape(-1)
        keep = (nbytes > 0) & (start != end)
        line = (parent * before + early) * after + late
        seconds += fabric.line_load(j, dim, line[keep], start[keep], end[keep], nbytes[keep])
    return seconds


def ring_load(j: int, group: Ints, unit: Ints, volume: Floats, fabric: Fabric) -> Floats | None:
    """Return the load of rings over all links between children of one parent that (group, unit) pairs name, in order.

    On a `full` level every ordered pair carries an equal part. On a ring, torus or mesh one ring goes each way along
    every dim in which a group has several units, with an equal part of the bytes for every dim, or two where it closes
    around the dim; units that are no grid, or a line of several dims, are one ring in their order, each way.
    """
    level = fabric.wires[j].level
    row = _siblings(group, unit // level.size)
    count = np.bincount(row)
    if int(count.max()) < 2:
        return None
    if level.link == "full":
        first, second = _partners(row)
        return fabric.link_load(j, unit[first], unit[second], volume[group[first]] / (count[row[first]] - 1))
    place = np.array(np.unravel_index(unit % level.size, level.extents))
    rows = np.arange(len(count))
    kinds = np.array([_distinct(row, x, rows) for x in place])  # distinct coordinates of every row [dims, rows]
    grid = kinds.prod(axis=0) == count
    sender: list[Ints] = []
    receiver: list[Ints] = []
    weight: list[Floats] = []
    for dim in range(len(level.extents)):
        line = fabric.line(j, dim, row, place)
        chosen = np.flatnonzero(grid[row] & (kinds[dim][row] > 1))
        _ring_edges(chosen[np.lexsort((place[dim][chosen], line[chosen]))], line, sender, receiver)
        gap = np.zeros(len(count))
        ahead = (place[dim][receiver[-1]] - place[dim][sender[-1]]) % level.extents[dim]
        np.maximum.at(gap, row[sender[-1]], ahead)
        closes = (2 * gap < level.extents[dim]) & (level.link != "mesh")
        weight.append(np.where(kinds[dim] > 1, np.where(closes, 2.0, 1.0), 0.0) * grid)
    _ring_edges(np.flatnonzero(~grid[row]), row, sender, receiver)
    weight.append(np.where(grid, 0.0, 1.0))
    total = np.sum(weight, axis=0)
    part = np.concatenate([w[row[s]] / (2 * total[row[s]]) for w, s in zip(weight, sender, strict=True)])
    a, b = np.concatenate(sender), np.concatenate(receiver)
    nbytes = np.tile(part * volume[group[a]], 2)
    return fabric.link_load(j, unit[np.concatenate([a, b])], unit[np.concatenate([b, a])], nbytes)


def _distinct(row: Ints, value: Ints, rows: Ints) -> Ints:
    """How many distinct values every row has, [rows]."""
    width = int(value.max()) + 1
    return np.bincount(np.unique(row * width + value) // width, minlength=len(rows))


def _ring_edges(order: Ints, line: Ints, sender: list[Ints], receiver: list[Ints]) -> None:
    """Add the edges of rings through entries in this order, one ring for each line; a line of one has none."""
    after = next_alike(line[order])
    keep = after != np.arange(len(order))
    sender.append(order[keep])
    receiver.append(order[after[keep]])
