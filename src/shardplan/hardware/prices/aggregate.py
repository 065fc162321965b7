"""Collectives whose load follows from how many members each unit holds, without listing flows.

All-to-all; reductions inside switches; and rings and trees of a library that orders members itself (`spread`). Groups,
members and bytes are as in `traffic`; in order of ids, the members in one unit are neighbours at every level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.prices.fabric import Fabric, Floats, Ints, Load

# Pairs of units that are listed one by one on a ring, torus or mesh (some arrays of 32 MB); above, traffic is summed
# dim by dim, which costs the same for any number of pairs.
_LISTED = 1 << 22
_BLOCK = 1 << 24  # numbers in the tables of one block of rows of such a sum: 128 MB


def units_spanned(members: Ints, fabric: Fabric) -> Ints:
    """Return the number of distinct units of every group at every level: [L, G]."""
    ordered = np.sort(members, axis=1)
    rows: list[Ints] = []
    for wires in fabric.wires:
        # Device ids are mixed radix, so that sorted ids have sorted units.
        units = ordered // wires.stride
        rows.append(1 + np.count_nonzero(units[:, 1:] != units[:, :-1], axis=1))
    return np.array(rows)


def _runs(units: Ints, k: int) -> tuple[Ints, Ints]:
    """Number the runs of equal units in rows of k: the run of every member, and the members of every run."""
    fresh = np.ones(units.shape, dtype=bool)
    fresh[1:] = units[1:] != units[:-1]
    fresh[::k] = True  # a run ends with its row, though the next row start in the same unit
    run = np.cumsum(fresh) - 1
    return run, np.bincount(run)


def all_to_all(members: Ints, nbytes: Floats, fabric: Fabric) -> tuple[Floats, Load, Floats]:
    """Price the pairwise all-to-all: every member sends B/k to every other, on the rails of their devices.

    Returns:
        Hops over each level of every member, [L, members]: one a partner; the load; bytes for each level, [L].
    """
    k = members.shape[1]
    device = np.sort(members, axis=1).reshape(-1)
    part = np.repeat(nbytes / k, k)
    load: list[Floats | None] = []
    hops = np.zeros((len(fabric.wires), len(device)))
    together = np.full(len(device), k)  # members of the group in the same unit as this one, one level further out
    for j, wires in enumerate(fabric.wires):
        unit = device // wires.stride
        run, size = _runs(unit, k)
        inside = size[run]
        hops[j] = together - inside
        if wires.level.link == "switch":
            out = part * (k - inside)
            load.append(fabric.port_load(j, (device, out), (device, out)) if bool((inside < k).any()) else None)
        elif bool(hops[j].any()):
            heads = np.flatnonzero(np.diff(run, prepend=-1))
            load.append(_linked(j, heads // k, unit[heads], size, part[heads], fabric))
        else:
            load.append(None)
        together = inside
    return hops, tuple(load), (part * hops).sum(axis=1)


def other_nodes(members: Ints, fabric: Fabric) -> Floats:
    """Return how many other nodes of its group every member finds across each level up to the nodes': [far, members].

    Members are in order of ids, as in `all_to_all`.
    """
    k = members.shape[1]
    device = np.sort(members, axis=1).reshape(-1)
    found = np.zeros((fabric.far, len(device)))
    if fabric.far:
        head = np.flatnonzero(np.diff(_runs(device // fabric.wires[fabric.far - 1].stride, k)[0], prepend=-1))
        together = np.bincount(head // k)[np.arange(len(device)) // k]
        for j in range(fabric.far):
            run = _runs(device // fabric.wires[j].stride, k)[0]
            inside = np.bincount(run[head])[run]
            found[j] = together - inside
            together = inside
    return found


def _linked(j: int, group: Ints, unit: Ints, members: Ints, part: Floats, fabric: Fabric) -> Floats:
    """The load of the traffic of (group, unit) pairs, in order, between the children of one parent.

    `members` are the members of the group in the unit, `part` is what one of them sends another; all [pairs].
    """
    level = fabric.wires[j].level
    parent = unit // level.size
    fresh = np.concatenate([[True], (group[1:] != group[:-1]) | (parent[1:] != parent[:-1])])
    starts = np.flatnonzero(fresh)
    width = np.diff(np.concatenate([starts, [len(unit)]]))
    if int((width * width).sum()) <= _LISTED or level.link == "full":
        # Every pair with every pair of its group and parent: `first` repeated, `second` counting from the pair's start.
        each = np.repeat(width, width)
        first = np.repeat(np.arange(len(unit)), each)
        offset = np.arange(len(first)) - np.repeat(np.cumsum(each) - each, each)
        second = np.repeat(np.repeat(starts, width), each) + offset
        keep = first != second
        first, second = first[keep], second[keep]
        return fabric.link_load(j, unit[first], unit[second], part[first] * members[first] * members[second])
    row = np.cumsum(fresh) - 1  # one row for each group and parent
    child, parents = unit % level.size, parent[starts]
    dims = range(len(level.extents))
    return np.concatenate([_summed(j, dim, row, parents, child, members, part, fabric) for dim in dims])


def _summed(
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


def in_network_legal(members: Ints, fabric: Fabric) -> bool:
    """Say whether every level that a group spans reduces in the network, so that `in_network` applies."""
    if not any(wires.level.reduces for wires in fabric.wires):
        return False
    spans = [bool(row.any()) for row in np.diff(units_spanned(members, fabric), axis=0, prepend=1) > 0]
    return all(wires.level.reduces for wires, spanned in zip(fabric.wires, spans, strict=True) if spanned)


def in_network(members: Ints, nbytes: Floats, fabric: Fabric) -> tuple[Floats, Load, Floats]:
    """Price an all-reduce that switches perform: B goes up from every unit and comes down to it.

    Returns:
        Hops over each level, up and down, [L, G]; the load; bytes for each level, up and down, [L].
    """
    k = members.shape[1]
    device = np.sort(members, axis=1).reshape(-1)
    spanned = units_spanned(members, fabric)
    spans = np.diff(spanned, axis=0, prepend=1) > 0
    load: list[Floats | None] = []
    moved = np.zeros(len(fabric.wires))
    for j, wires in enumerate(fabric.wires):
        unit = device // wires.stride
        run, size = _runs(unit, k)
        heads = np.flatnonzero(np.diff(run, prepend=-1))
        heads = heads[spanned[j][heads // k] > 1]  # a group inside one unit does not leave it
        group = heads // k
        moved[j] = 2 * float((nbytes[group] * spans[j][group]).sum())
        if wires.level.link != "switch" or not heads.size:
            load.append(None)
            continue
        out = np.where(spanned[j][np.arange(len(device)) // k] > 1, np.repeat(nbytes, k) / size[run], 0.0)
        load.append(fabric.port_load(j, (device, out), (device, out)))
    return 2 * spans.astype(np.float64), tuple(load), moved


@dataclass(frozen=True, slots=True, eq=False)
class Crossings:
    """How often the walk of every group through its nodes leaves each unit, by level outside a node's own."""

    edges: Floats  # crossings of units of each level by a closed walk [L, G]
    times: tuple[tuple[Ints, Ints] | None, ...]  # by level keys group * units + unit, and how often it is left

    def sum_edges(self, volume: Floats) -> Floats:
        """Return the bytes whose two ends first differ at each level, where every edge carries `volume`, [G]: [L]."""
        return np.diff(self.edges @ volume, prepend=0.0)


def walked(members: Ints, fabric: Fabric) -> Crossings:
    """Walk every group's nodes in the order of their first members, and inside a node and further in without detour.

    Source: NCCL orders a communicator's nodes by their first rank (`src/init.cc`), and joins them in that order.
    """
    groups = len(members)
    spanned = units_spanned(members, fabric)
    edges = np.where(spanned > 1, spanned, 0).astype(np.float64)
    times: list[tuple[Ints, Ints] | None] = [None] * len(fabric.wires)
    if fabric.far > 1:
        wires = fabric.wires[fabric.far - 1]
        number = (np.arange(groups)[:, None] * wires.units + members // wires.stride).reshape(-1)
        keys, first = np.unique(number, return_index=True)
        order = np.lexsort((first, keys // wires.units))
        group, node = keys[order] // wires.units, keys[order] % wires.units
        after = np.arange(1, len(group) + 1)
        last = np.flatnonzero(np.diff(group, append=-1))
        after[last] = np.concatenate([[0], last[:-1] + 1])
        for j in range(fabric.far - 1):
            unit = node * wires.stride // fabric.wires[j].stride
            leaves = unit != unit[after]
            edges[j] = np.bincount(group, leaves, groups)
            times[j] = np.unique(group[leaves] * fabric.wires[j].units + unit[leaves], return_counts=True)
    return Crossings(edges, tuple(times))


def spread(members: Ints, near: Floats, far: Floats, fabric: Fabric, crossings: Crossings) -> Load:
    """Return the load when every unit that a group crosses gives out and takes in some bytes: `near` or `far`, [G].

    Over ports they are dealt out to the members in the unit, each on its rail, and count as often as the group's walk
    leaves the unit; over links they are dealt out to all links between the members' units (`_rings`).
    """
    k = members.shape[1]
    device = np.sort(members, axis=1).reshape(-1)
    group = np.repeat(np.arange(len(members)), k)
    load: list[Floats | None] = []
    for j, wires in enumerate(fabric.wires):
        unit = device // wires.stride
        run, size = _runs(unit, k)
        inside = size[run]
        volume = far if j < fabric.far else near
        if not bool((inside < k).any()):
            load.append(None)
        elif wires.level.link == "switch":
            out = np.where(inside < k, volume[group] / inside, 0.0)
            walk = crossings.times[j]
            if walk is not None:
                at = np.searchsorted(walk[0], group * wires.units + unit)
                out[inside < k] *= walk[1][at[inside < k]]
            load.append(fabric.port_load(j, (device, out), (device, out)))
        else:
            heads = np.flatnonzero(np.diff(run, prepend=-1))
            load.append(_rings(j, group[heads], unit[heads], volume, fabric))
    return tuple(load)


def _rings(j: int, group: Ints, unit: Ints, volume: Floats, fabric: Fabric) -> Floats | None:
    """The load of rings over all links between children of one parent that (group, unit) pairs name, in order.

    On a `full` level every ordered pair carries an equal part. On a ring, torus or mesh one ring goes each way along
    every dim in which a group has several units, with an equal part of the bytes for every dim, or two where it closes
    around the dim; units that are no grid, or a line of several dims, are one ring in their order, each way.
    """
    level = fabric.wires[j].level
    parent = unit // level.size
    row = np.cumsum(np.concatenate([[True], (group[1:] != group[:-1]) | (parent[1:] != parent[:-1])])) - 1
    count = np.bincount(row)
    if int(count.max()) < 2:
        return None
    if level.link == "full":
        width = count[row]
        first = np.repeat(np.arange(len(unit)), width)
        starts = np.concatenate([[0], np.cumsum(count)[:-1]])[row]
        second = np.repeat(starts, width) + np.arange(len(first)) - np.repeat(np.cumsum(width) - width, width)
        keep = first != second
        first, second = first[keep], second[keep]
        return fabric.link_load(j, unit[first], unit[second], volume[group[first]] / (width[first] - 1))
    place = np.array(np.unravel_index(unit % level.size, level.extents))
    rows = np.arange(len(count))
    kinds = np.array([_distinct(row, x, rows) for x in place])  # distinct coordinates of every row [dims, rows]
    grid = kinds.prod(axis=0) == count
    sender: list[Ints] = []
    receiver: list[Ints] = []
    weight: list[Floats] = []
    for dim in range(len(level.extents)):
        line = row
        for other, extent in enumerate(level.extents):
            line = line * extent + (place[other] if other != dim else 0)
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
    after = np.arange(1, len(order) + 1)
    last = np.flatnonzero(np.diff(line[order], append=-1)) if len(order) else np.zeros(0, dtype=np.int64)
    after[last] = np.concatenate([[0], last[:-1] + 1])[: len(last)]
    keep = after != np.arange(len(order))
    sender.append(order[keep])
    receiver.append(order[after[keep]])
