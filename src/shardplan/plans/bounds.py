"""Lower bounds in seconds: what no point-to-point algorithm can beat, whatever it does.

Cut, count and gather bounds. They hold for algorithms whose messages go between the devices concerned. Where a level
reduces in the network, reductions have no count bound; the others still hold. Of collectives, members are device ids,
int64 [G, k], and nbytes is B, what a member holds before, float64 [G]; their bounds are of bandwidth only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.hardware.aggregate import units_spanned
from shardplan.hardware.fabric import Fabric, Floats, Ints

# Cells times boxes up to which the volume of a union is computed exactly: 8 MB of booleans. Above it, a coarser bound.
_EXACT = 8_000_000
# Rows (a group in a parent) times arcs of a ring that are tried: arrays of 32 MB at most. Above it no ring is cut.
_ARCS = 1 << 22


def entry_bytes(src_boxes: Ints, dst_boxes: Ints, unit_of: Ints, itemsize: float = 1.0) -> Floats:
    """Return the bytes that must enter each unit: the union of its destination boxes minus that of its source boxes.

    Args:
        src_boxes: (start, stop) of every dim for every device, [n, ndim, 2]; an empty box where it holds nothing.
        dst_boxes: The same for what each device must hold.
        unit_of: The number of each device's unit, [n].
        itemsize: Bytes of an element.

    Returns:
        Bytes for every unit, [max(unit_of) + 1]: exact by coordinate compression where the grid is small, else a lower
        bound (the largest over devices of what its destination box holds beyond the unit's source boxes, by count).
    """
    n, ndim = src_boxes.shape[:2]
    if n == 0:
        return np.zeros(0)
    entry = np.zeros(int(unit_of.max()) + 1)
    volume = _volume(dst_boxes)
    if np.unique(unit_of).size == n:  # one device a unit: no union to take
        entry[unit_of] = volume - _volume(_meet(src_boxes, dst_boxes))
        return entry * itemsize
    boxes, number = np.unique(
        np.concatenate([src_boxes, dst_boxes]).reshape(2 * n, ndim * 2), axis=0, return_inverse=True
    )
    boxes, number = boxes.reshape(-1, ndim, 2), number.reshape(-1)
    # One row for each distinct box of a unit, ordered by unit.
    source = np.unique(unit_of * len(boxes) + number[:n])
    target = np.unique(unit_of * len(boxes) + number[n:])
    edges = [np.unique(boxes[:, d]) for d in range(ndim)]
    cells = math.prod(max(len(edge) - 1, 1) for edge in edges)
    units = np.unique(unit_of)
    if cells * (len(source) + len(target)) <= _EXACT and ndim:
        inside = np.ones((len(boxes), 1), dtype=bool)
        size = np.ones(1)
        for d, edge in enumerate(edges):
            low = edge[:-1]
            covers = (boxes[:, d, :1] <= low) & (low < boxes[:, d, 1:])
            inside = (inside[:, :, None] & covers[:, None, :]).reshape(len(boxes), -1)
            size = (size[:, None] * np.diff(edge)[None, :]).reshape(-1)
        has, needs = (_union(keys, len(boxes), inside) for keys in (source, target))
        entry[units] = (needs & ~has) @ size
        return entry * itemsize
    # What a unit's source boxes hold of a destination box is at most what they hold together, and at most what of it
    # lies inside the box around them all.
    sizes = _volume(boxes)
    held = np.bincount(source // len(boxes), sizes[source % len(boxes)], len(entry))
    around = _surround(src_boxes, unit_of, len(entry))
    known = np.minimum(held[unit_of], _volume(_meet(around[unit_of], dst_boxes)))
    np.maximum.at(entry, unit_of, volume - known)
    return np.maximum(entry, 0.0) * itemsize


def _volume(boxes: Ints) -> Floats:
    return np.maximum(boxes[..., 1] - boxes[..., 0], 0).astype(np.float64).prod(axis=-1)


def _meet(one: Ints, other: Ints) -> Ints:
    return np.stack([np.maximum(one[..., 0], other[..., 0]), np.minimum(one[..., 1], other[..., 1])], axis=-1)


def _union(keys: Ints, width: int, inside: np.ndarray) -> np.ndarray:
    """The cells that are in a box of every unit: [units, cells].

    `keys` are unit * width + box, in order; `inside` says of every box which cells it has, [boxes, cells].
    """
    unit = keys // width
    starts = np.flatnonzero(np.diff(unit, prepend=-1))
    return np.logical_or.reduceat(inside[keys % width], starts, axis=0)


def _surround(boxes: Ints, unit_of: Ints, units: int) -> Ints:
    """The smallest box around the non-empty boxes of every unit."""
    full = _volume(boxes) > 0
    around = np.zeros((units, boxes.shape[1], 2), dtype=np.int64)
    around[..., 0] = np.iinfo(np.int64).max // 2  # without a box: empty, and half, so that differences do not overflow
    np.minimum.at(around[..., 0], unit_of[full], boxes[full][..., 0])
    np.maximum.at(around[..., 1], unit_of[full], boxes[full][..., 1])
    return around


def lower_bound_seconds(src_boxes: Ints, dst_boxes: Ints, itemsize: float, ids: Ints, fabric: Fabric) -> float:
    """Return a lower bound in seconds of any movement between two sets of boxes.

    It is the largest over units of the bytes that must enter, over the unit's capacity, plus one latency and the
    launch; 0 if nothing must move. `ids` are the device ids of the rows, [n]; boxes and `itemsize` are as for
    `entry_bytes`.
    """
    return batch_lower_bound_seconds([(src_boxes, dst_boxes, itemsize)], ids, fabric)


def batch_lower_bound_seconds(moves: Sequence[tuple[Ints, Ints, float]], ids: Ints, fabric: Fabric) -> float:
    """Return a lower bound in seconds of several movements that share the wires; see `lower_bound_seconds`.

    `moves` are triples of source boxes, destination boxes and bytes of an element, all of the devices `ids`.
    """
    at = fabric.topology_ids(ids)
    worst, outermost = 0.0, -1
    for j, wires in enumerate(fabric.wires):
        unit, row = np.unique(at // wires.stride, return_inverse=True)
        entry = np.zeros(len(unit))
        for src_boxes, dst_boxes, itemsize in moves:
            entry = entry + entry_bytes(src_boxes, dst_boxes, row.reshape(-1), itemsize)
        if bool((entry > 0).any()):
            outermost = j if outermost < 0 else outermost
            worst = max(worst, most_over(entry, fabric.capacity(j)[unit]))
    if outermost < 0:
        return 0.0
    # Some message crosses level `outermost` or one further out.
    return fabric.launch + float(fabric.latencies()[: outermost + 1].min()) + worst


def most_over(load: Floats, capacity: Floats) -> float:
    """Return the largest load over capacity; what carries nothing needs none (a ring of one has no links)."""
    return float(np.divide(load, capacity, out=np.zeros(len(load)), where=load > 0).max(initial=0.0))


Share = Callable[[Ints, int], NDArray[np.floating[Any]]]  # of members in a unit and of a group, to bytes over B


def all_reduce_bound(members: Ints, nbytes: Floats, fabric: Fabric) -> float:
    """Return the bound of all-reduces at once: B crosses every cut of a group each way, 2(n-1)B a level in total.

    Source: cut: every unit must be entered; count: n - 1 merges and n - 1 deliveries an element.
    """
    reduces = any(wires.level.reduces for wires in fabric.wires)
    return _bound(
        members, nbytes, fabric, lambda c, _: np.ones(len(c)), lambda c, _: np.ones(len(c)), 0 if reduces else 2
    )


def reduce_scatter_bound(members: Ints, nbytes: Floats, fabric: Fabric) -> float:
    """Return the bound of reduce-scatters at once: a unit with c of k members takes in cB/k and gives out (k-c)B/k.

    Source: the gather bound reversed.
    """
    reduces = any(wires.level.reduces for wires in fabric.wires)
    return _bound(members, nbytes, fabric, lambda c, k: c / k, lambda c, k: (k - c) / k, 0 if reduces else 1)


def all_gather_bound(members: Ints, nbytes: Floats, fabric: Fabric) -> float:
    """Return the bound of all-gathers at once: a unit with c of k members takes in (k-c)B and gives out cB.

    Source: ForestColl, arXiv 2402.06787.
    """
    k = np.asarray(members).shape[1]
    return _bound(members, nbytes, fabric, lambda c, k: (k - c) * 1.0, lambda c, _: c * 1.0, k)


def _bound(members: Ints, nbytes: Floats, fabric: Fabric, enter: Share, leave: Share, total: float) -> float:
    """The worst cut of units and arcs, and of each level (n-1) * total * B over the units' summed capacity."""
    at = np.sort(fabric.topology_ids(members), axis=1)
    groups, k = at.shape
    if k < 2 or not groups:
        return 0.0
    spanned = units_spanned(at, fabric)
    worst = 0.0
    for j, wires in enumerate(fabric.wires):
        unit = (at // wires.stride).reshape(-1)
        keys, count = np.unique(np.repeat(np.arange(groups), k) * wires.units + unit, return_counts=True)
        group, unit = keys // wires.units, keys % wires.units
        split = count < k  # a unit that holds a whole group need not be crossed by it
        if not bool(split.any()):
            continue
        capacity = fabric.capacity(j)
        for share in (enter, leave):
            load = np.bincount(unit[split], (share(count, k) * nbytes[group])[split], wires.units).astype(np.float64)
            worst = max(worst, most_over(load, capacity))
        crossing = float(((spanned[j] - 1) * total * nbytes).sum())
        worst = max(worst, crossing / summed_capacity(fabric, j, np.unique(unit[split])))
        if wires.level.link == "ring" and len(keys) * wires.level.size**2 <= _ARCS:
            worst = max(worst, _arcs(fabric, j, group, unit, count, nbytes, k, enter, leave))
    return worst


def summed_capacity(fabric: Fabric, j: int, units: Ints) -> float:
    """Return the bytes a second of all ways between these units of level j together."""
    own = fabric.capacity(j)[units]
    level = fabric.wires[j].level
    if level.link == "switch" or j == 0:
        return float(own.sum())
    # What enters a parent serves all its children, but is counted once.
    outer = fabric.capacity(j - 1)
    parents = units // level.size
    return float((own - outer[parents]).sum() + outer[np.unique(parents)].sum())


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
    capacity = np.full(fabric.wires[j].units // level.size, 2 * level.bandwidth * level.uplinks)  # an arc has two ends
    if j > 0:
        capacity = capacity + fabric.capacity(j - 1)
    worst = 0.0
    inside = held.copy()  # the members on the arc that starts at each unit; arcs of one unit are cuts of units
    for length in range(2, level.size):
        inside = inside + np.roll(held, -(length - 1), axis=1)
        for share in (enter, leave):
            bytes_cut = share(inside.reshape(-1), k).reshape(inside.shape) * nbytes[owner][:, None]
            bytes_cut[(inside == 0) | (inside == k)] = 0.0
            load = np.zeros((len(capacity), level.size))
            np.add.at(load, parent, bytes_cut)
            worst = max(worst, float((load / capacity[:, None]).max()))
    return worst
