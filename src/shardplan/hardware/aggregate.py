"""Collectives that are priced without listing their flows: all-to-all, and all-reduce inside switches.

An all-to-all over k members has k(k-1) pairs a group; its loads follow from how many members each unit holds. Groups,
members and bytes are as in `algorithms`; in order of ids, the members in one unit are neighbours at every level.
"""

from __future__ import annotations

import math

import numpy as np

from shardplan.hardware.algorithms import units_spanned
from shardplan.hardware.fabric import Fabric, Floats, Ints

# Pairs of units that are listed one by one on a ring, torus or mesh (some arrays of 32 MB); above, traffic is summed
# dim by dim, which costs the same for any number of pairs.
_LISTED = 1 << 22
_BLOCK = 1 << 24  # numbers in the tables of one block of rows of such a sum: 128 MB


def _runs(units: Ints, k: int) -> tuple[Ints, Ints]:
    """Number the runs of equal units in rows of k: the run of every member, and the members of every run."""
    fresh = np.ones(units.shape, dtype=bool)
    fresh[1:] = units[1:] != units[:-1]
    fresh[::k] = True  # a run ends with its row, though the next row start in the same unit
    run = np.cumsum(fresh) - 1
    return run, np.bincount(run)


def all_to_all(members: Ints, nbytes: Floats, fabric: Fabric) -> tuple[float, float, Floats]:
    """Price the pairwise all-to-all: every member sends B/k to every other, on the rails of their devices.

    Returns:
        Latency in seconds ((k-1) times that of the outermost level crossed), seconds of the busiest resource, and bytes
        for each level, [L].
    """
    k = members.shape[1]
    device = np.sort(members, axis=1).reshape(-1)
    part = np.repeat(nbytes / k, k)
    worst, moved = 0.0, np.zeros(len(fabric.wires))
    together = np.full(len(device), k)  # members of the group in the same unit as this one, one level further out
    for j, wires in enumerate(fabric.wires):
        unit = device // wires.stride
        run, size = _runs(unit, k)
        inside = size[run]
        moved[j] = float((part * (together - inside)).sum())
        if wires.level.link == "switch":
            if bool((inside < k).any()):
                worst = max(worst, fabric.rail_seconds(j, unit, device, part * (k - inside)))
        elif moved[j] > 0:
            heads = np.flatnonzero(np.diff(run, prepend=-1))
            worst = max(worst, _linked(j, heads // k, unit[heads], size, part[heads], fabric))
        together = inside
    crossed = np.flatnonzero(moved)
    latency = (k - 1) * float(fabric.latencies()[crossed[0]]) if crossed.size else 0.0
    return latency, worst, moved


def _linked(j: int, group: Ints, unit: Ints, members: Ints, part: Floats, fabric: Fabric) -> float:
    """Price the traffic of (group, unit) pairs, in order, between the children of one parent.

    `members` are the members of the group in the unit, `part` is what one of them sends another; all [pairs].
    """
    level = fabric.wires[j].level
    parent = unit // level.size
    fresh = np.concatenate([[True], (group[1:] != group[:-1]) | (parent[1:] != parent[:-1])])
    starts = np.flatnonzero(fresh)
    width = np.diff(np.concatenate([starts, [len(unit)]]))
    if int((width * width).sum()) <= _LISTED:
        # Every pair with every pair of its group and parent: `first` repeated, `second` counting from the pair's start.
        each = np.repeat(width, width)
        first = np.repeat(np.arange(len(unit)), each)
        offset = np.arange(len(first)) - np.repeat(np.cumsum(each) - each, each)
        second = np.repeat(np.repeat(starts, width), each) + offset
        keep = first != second
        first, second = first[keep], second[keep]
        return fabric.link_seconds(j, unit[first], unit[second], part[first] * members[first] * members[second])
    row = np.cumsum(fresh) - 1  # one row for each group and parent
    worst = 0.0
    for dim in range(len(level.extents)):
        worst = max(worst, _summed(j, dim, row, parent[starts], unit % level.size, members, part, fabric))
    return worst


def _summed(
    j: int, dim: int, row: Ints, parents: Ints, child: Ints, members: Ints, part: Floats, fabric: Fabric
) -> float:
    """Price one dim of an all-to-all, the dims being crossed in order.

    On a line of dim `dim` the coordinates of earlier dims are already the receiver's, those of later ones still the
    sender's. So what goes from one coordinate to another on a line is a product of sums: over the senders that agree in
    the later coordinates (`late`), and over the receivers that agree in the earlier ones (`early`).
    """
    extents = fabric.wires[j].level.extents
    before, extent, after = math.prod(extents[:dim]), extents[dim], math.prod(extents[dim + 1 :])
    here = child // after % extent
    worst = 0.0
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
        worst = max(worst, fabric.line_seconds(j, dim, line[keep], start[keep], end[keep], nbytes[keep]))
    return worst


def in_network_legal(members: Ints, fabric: Fabric) -> bool:
    """Say whether every level that a group spans reduces in the network, so that `in_network` applies."""
    if not any(wires.level.reduces for wires in fabric.wires):
        return False
    spans = [bool(row.any()) for row in np.diff(units_spanned(members, fabric), axis=0, prepend=1) > 0]
    return all(wires.level.reduces for wires, spanned in zip(fabric.wires, spans, strict=True) if spanned)


def in_network(members: Ints, nbytes: Floats, fabric: Fabric) -> tuple[float, float, Floats]:
    """Price an all-reduce that switches perform: B goes up from every unit and comes down to it.

    Returns:
        Latency in seconds (up and down each level spanned), seconds of the busiest port, and bytes for each level,
        up and down, [L].
    """
    k = members.shape[1]
    device = np.sort(members, axis=1).reshape(-1)
    spanned = units_spanned(members, fabric)
    spans = np.diff(spanned, axis=0, prepend=1) > 0
    worst, moved = 0.0, np.zeros(len(fabric.wires))
    for j, wires in enumerate(fabric.wires):
        unit = device // wires.stride
        run, _ = _runs(unit, k)
        heads = np.flatnonzero(np.diff(run, prepend=-1))
        heads = heads[spanned[j][heads // k] > 1]  # a group inside one unit does not leave it
        group = heads // k
        moved[j] = 2 * float((nbytes[group] * spans[j][group]).sum())
        if heads.size and wires.level.link == "switch":
            lanes = fabric.lane_ports(j, unit[heads], unit[heads], group)
            worst = max(worst, fabric.port_seconds(j, unit[heads], nbytes[group] * lanes.share_out, lanes.port_out))
    return 2 * float((fabric.latencies() @ spans).max()), worst, moved
