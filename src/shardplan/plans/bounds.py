"""Lower bounds in seconds: what no point-to-point algorithm can beat, whatever it does.

Cut, count and gather bounds, at the best rates that any row of the library reaches, over the ways of the devices that
take part; of moves without addends, that any row reaches which does more than reduce, or, where no device has room for
what a gather makes, any row of messages. An element counts once where it enters, and once out of all its holders
together: whoever has it may pass it on.

An *island* are devices that meshes join, directly or over others. Every op but a send stays on one mesh, so what goes
from island to island goes by sends, at the rates of the library's messages. A set of units that has its islands whole
is entered and left in no other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.core.messages import at_root
from shardplan.core.tensor import TensorType
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.plans.starts import Bound, bound_with_starts

# Pairs of boxes in one unit that are met one by one (arrays of 16 MB); above, a coarser bound.
_PAIRS = 1 << 21


class Tiles(NamedTuple):
    """What devices hold, or want: distinct boxes, which do not overlap, and who has which."""

    boxes: Ints  # (start, stop) of every dim, [boxes, ndim, 2]
    device: Ints  # rows of the devices with a box [m]
    number: Ints  # of its box [m]

    @staticmethod
    def of(boxes: Ints) -> Tiles:
        """Number the boxes of devices, [n, ndim, 2]; an empty one is none."""
        device = np.flatnonzero(_volume(boxes) > 0)
        distinct, number = np.unique(
            boxes[device].reshape(len(device), 2 * boxes.shape[1]), axis=0, return_inverse=True
        )
        return Tiles(distinct.reshape(-1, *boxes.shape[1:]), device, number.reshape(-1))

    def units(self, unit_of: Ints) -> tuple[Ints, Ints]:
        """Return each pair of a unit and a box in it once, by unit."""
        pairs = np.unique(unit_of[self.device] * len(self.boxes) + self.number)
        return pairs // max(1, len(self.boxes)), pairs % max(1, len(self.boxes))


class Crossing(NamedTuple):
    """What must cross the border of units."""

    enter: Floats  # elements wanted in each unit that it does not hold [units]
    leave: Floats  # of every box held, elements wanted outside all units that hold it [boxes]
    holders: Ints  # rows (box, unit), by box [pairs, 2]


def crossing(source: Tiles, target: Tiles, unit_of: Ints) -> Crossing:
    """Return what must cross the border of each unit, and of all units together that hold a box, whatever is relayed.

    `unit_of` is the number of each device's unit, [n]. All that is held is wanted somewhere. It is exact while boxes in
    units are few; else of a unit the largest over its boxes of what it cannot hold of it, and nothing leaves.
    """
    units = int(unit_of.max(initial=-1)) + 1
    at, held = source.units(unit_of)
    place, wanted = target.units(unit_of)
    size, volume = _volume(source.boxes), _volume(target.boxes)
    holders = np.stack([held, at], axis=1)[np.lexsort((at, held))]
    first = np.searchsorted(at, place)
    width = np.searchsorted(at, place, "right") - first
    if int(width.sum()) > _PAIRS:
        return Crossing(_coarse(source, target, unit_of, units), np.zeros(len(size)), holders)
    # Every box wanted with every box held in the same unit.
    row = np.repeat(np.arange(len(place)), width)
    pair = held[np.repeat(first, width) + nth_of_each(width)]
    common = _common(target.boxes[wanted[row]], source.boxes[pair])
    enter = np.bincount(place, volume[wanted], units).astype(np.float64) - np.bincount(place[row], common, units)
    # What every unit that wants it finds among those that hold it need not leave them.
    meet, one, found = np.unique(wanted[row] * len(size) + pair, return_index=True, return_counts=True)
    stays = found == np.bincount(wanted, minlength=len(volume))[meet // max(1, len(size))]
    leave = size - np.bincount(meet[stays] % max(1, len(size)), common[one[stays]], len(size))
    return Crossing(enter, leave, holders)


def _coarse(source: Tiles, target: Tiles, unit_of: Ints, units: int) -> Floats:
    """What a unit holds of a box wanted is at most all it holds, and at most what lies inside the box around that."""
    at, held = source.units(unit_of)
    place, wanted = target.units(unit_of)
    around = np.zeros((units, *source.boxes.shape[1:]), dtype=np.int64)
    around[..., 0] = np.iinfo(np.int64).max // 2  # without a box: empty, and half, so that differences do not overflow
    np.minimum.at(around[..., 0], at, source.boxes[held][..., 0])
    np.maximum.at(around[..., 1], at, source.boxes[held][..., 1])
    total = np.bincount(at, _volume(source.boxes)[held], units)
    boxes = target.boxes[wanted]
    enter = np.zeros(units)
    np.maximum.at(enter, place, _volume(boxes) - np.minimum(total[place], _common(around[place], boxes)))
    return enter


def _volume(boxes: Ints) -> Floats:
    return np.maximum(boxes[..., 1] - boxes[..., 0], 0).astype(np.float64).prod(axis=-1)


def _common(one: Ints, other: Ints) -> Floats:
    """The elements that boxes share, pair by pair; dim by dim, so that no array is larger than the pairs."""
    shared = np.ones(len(one))
    for d in range(one.shape[1]):
        low, high = np.maximum(one[:, d, 0], other[:, d, 0]), np.minimum(one[:, d, 1], other[:, d, 1])
        shared *= np.maximum(high - low, 0)
    return shared


def boxes_on(t: TensorType, ids: np.ndarray) -> np.ndarray:
    """Return what each of `ids` (ascending) holds, [n, 1 + ndim, 2]; the first dim is empty where that is nothing."""
    boxes = np.zeros((len(ids), 1 + t.ndim, 2), dtype=np.int64)
    held = at_root(t)
    rows = np.searchsorted(ids, t.mesh.ids)[held]
    boxes[rows, 0, 1] = 1
    boxes[rows, 1:] = t.boxes()[held]
    return boxes


def moves_bound(
    moves: Sequence[tuple[Ints, Ints, float]],
    ids: Ints,
    fabric: Fabric,
    islands: Ints | None = None,
    in_turn: bool = False,
) -> Bound:
    """Return a lower bound of movements that share the wires; 0 if nothing must move.

    It is the largest over sets of units of the bytes that must enter, or leave, over the capacity of the set, with the
    start of a row. Sets that are entered are units; those left are the units that hold the same boxes, each element
    leaving once out of all its holders together, and all units that hold anything; both also units that have their
    islands whole.

    Args:
        moves: Triples of source boxes, destination boxes, [n, ndim, 2], and bytes of an element. Boxes of a side are
            equal or disjoint, empty where a device has none, and both sides cover the same array.
        ids: The device ids of the rows, [n]: no other device takes part.
        fabric: The resources.
        islands: The number of each row's island, [n]; None: all are of one.
        in_turn: Whether steps follow one another, as those of one tensor do: then what is sent to an island and what is
            gathered there add up.
    """
    at = fabric.topology_ids(ids)
    islands = np.zeros(len(at), dtype=np.int64) if islands is None else islands
    worst = [Bound(0.0, 0.0)]
    tiles = [(Tiles.of(src), Tiles.of(dst), itemsize) for src, dst, itemsize in moves]
    cuts: list[IslandCut] = []
    for j, wires in enumerate(fabric.wires):
        unit, row = np.unique(at // wires.stride, return_inverse=True)
        row = row.reshape(-1)
        found = [(crossing(source, target, row), itemsize) for source, target, itemsize in tiles]
        enter = sum((one.enter * itemsize for one, itemsize in found), np.zeros(len(unit)))
        if not bool((enter > 0).any()):
            continue
        own = capacity(fabric, j, at)
        everywhere = np.unique(row[np.concatenate([source.device for source, _, _ in tiles])])
        away = sum(_wanted_beyond(target, row, everywhere) * itemsize for _, target, itemsize in tiles)
        most = max(
            most_over(enter, own[unit]),
            _leaving(found, unit, j, fabric, own),
            most_over(np.array([away]), summed_capacity(fabric, j, unit[everywhere][None], own)),
        )
        worst += [
            bound_with_starts(fabric, j, most, at),
            *_cut_bounds(tiles, row, unit, enter, _number_islands(row, islands), j, fabric, at, cuts),
        ]
    if in_turn and len(moves) == 1:
        worst.append(_send_then_gather(cuts, fabric.first_hop()))
    return Bound.largest(worst)


class IslandCut(NamedTuple):
    """What one level says of a move to an island."""

    into: float  # bytes sent
    enter: float  # bytes that enter the units of the island, each of them by itself
    sends: float  # seconds of a byte sent, on either side
    gathers: float  # seconds of a byte that enters in any way


def _send_then_gather(cuts: Sequence[IslandCut], start: float) -> Bound:
    """The bound of the sends to an island and the gathers inside, in turn.

    x bytes are sent, all that is new at the least, and what else enters units is gathered: x times the seconds of a
    byte sent, by the slowest level, plus the rest by each level; x is what makes that least.
    """
    if not cuts:
        return Bound(0.0, 0.0)
    sends = max(cut.sends for cut in cuts)
    least = [
        min(cut.into * sends + (cut.enter - cut.into) * cut.gathers, cut.enter * sends)
        for cut in cuts
        if cut.enter >= cut.into
    ]
    most = max(least, default=0.0)
    return Bound(start + most, most) if most > 0 else Bound(0.0, 0.0)


def _number_islands(row: Ints, islands: Ints) -> Ints:
    """Number the smallest sets of units that have their islands whole: of every row its set, [n]."""
    label = islands
    while True:
        joined = label
        for part in (row, islands):
            least = np.full(int(part.max(initial=0)) + 1, len(row) + int(islands.max(initial=0)))
            np.minimum.at(least, part, joined)
            joined = least[part]
        if np.array_equal(joined, label):
            return np.unique(label, return_inverse=True)[1].reshape(-1)
        label = joined


def _cut_bounds(
    tiles: Sequence[tuple[Tiles, Tiles, float]],
    row: Ints,
    unit: Ints,
    enter: Floats,
    label: Ints,
    j: int,
    fabric: Fabric,
    at: Ints,
    cuts: list[IslandCut],
) -> list[Bound]:
    """The bounds of sets that have their islands whole: all that changes the set is sent, once at least.

    What enters the units of a set beyond that is gathered inside, at the best rate of any row. What this level says of
    an island that is entered is added to `cuts`.
    """
    count = int(label.max(initial=0)) + 1
    if count == 1:
        return []
    sends = fabric.with_library(
        replace(fabric.library, rows=tuple(r for r in fabric.library.rows if "messages" in r.ops))
    )
    leave, into = np.zeros((2, count))
    for source, target, itemsize in tiles:
        one, other = label[source.device[0]], label[target.device[0]]
        if one != other:
            leave[one] += _volume(source.boxes).sum() * itemsize
            into[other] += _volume(source.boxes).sum() * itemsize
    of_unit = np.zeros(len(unit), dtype=np.int64)
    of_unit[row] = label
    own, best = capacity(sends, j, at), capacity(fabric, j, at)
    bounds: list[Bound] = []
    every = {int(k): summed_capacity(sends, j, unit[of_unit == k], own) for k in np.flatnonzero(leave + into)}
    slow = 1 / min(float(rate) for rate in every.values()) if every else 0.0
    for k in np.flatnonzero(leave + into):
        mine = unit[of_unit == k]
        rate, fast = every[int(k)], summed_capacity(fabric, j, mine, best)
        if into[k] > 0:
            cuts.append(IslandCut(float(into[k]), float(enter[of_unit == k].sum()), slow, 1 / float(fast)))
        sent = most_over(np.array([max(leave[k], into[k])]), rate)
        rest = most_over(np.array([max(0.0, enter[of_unit == k].sum() - into[k])]), fast)
        both = most_over(np.array([into[k]]), rate) + rest
        bounds += [bound_with_starts(sends, j, sent, at), Bound(fabric.first_hop(j) + both, both)]
    return bounds


def _leaving(found: Sequence[tuple[Crossing, float]], unit: Ints, j: int, fabric: Fabric, own: Floats) -> float:
    """The worst of all sets of units that hold the same boxes: bytes that leave it, over its capacity."""
    sets: dict[int, list[tuple[Ints, Floats]]] = {}  # by the number of units: sets as rows, and bytes of each
    for one, itemsize in found:
        box, holder = one.holders.T
        width = np.bincount(box, minlength=len(one.leave))
        for k in np.unique(width[one.leave > 0]).tolist():
            some = (width == k) & (one.leave > 0)
            sets.setdefault(k, []).append((holder[some[box]].reshape(-1, k), one.leave[some] * itemsize))
    worst = 0.0
    for alike in sets.values():
        rows, number = np.unique(np.concatenate([row for row, _ in alike]), axis=0, return_inverse=True)
        load = np.bincount(number.reshape(-1), np.concatenate([n for _, n in alike])).astype(np.float64)
        worst = max(worst, most_over(load, summed_capacity(fabric, j, unit[rows], own)))
    return worst


def _wanted_beyond(target: Tiles, unit_of: Ints, units: Ints) -> float:
    """The elements that are wanted outside some units."""
    beyond = target.number[~np.isin(unit_of[target.device], units)]
    return float(_volume(target.boxes[np.unique(beyond)]).sum())


def most_over(load: Floats, capacity: Floats) -> float:
    """Return the largest load over capacity; what carries nothing needs none (a ring of one has no links)."""
    return float(np.divide(load, capacity, out=np.zeros(len(load)), where=load > 0).max(initial=0.0))


def capacity(fabric: Fabric, j: int, at: Ints) -> Floats:
    """Return the bytes a second that enter, or leave, each unit of level j at most, if only these devices take part.

    A flow uses the ways of the two devices at its ends, and a collective those of its members. `at` are topology ids;
    [units].
    """
    wires = fabric.wires[j]
    if wires.level.link != "switch":
        return fabric.capacity(j)
    ways = np.unique(fabric.rail(j, at))
    rates = wires.rates[ways] if isinstance(wires.rates, np.ndarray) else np.full(len(ways), wires.rates)
    own = np.bincount(ways // wires.ways, rates, wires.units) * fabric.library.best_share(j < fabric.far)
    return cast(Floats, own)


def summed_capacity(fabric: Fabric, j: int, units: Ints, own: Floats) -> Floats:
    """Return the bytes a second of all ways between units of level j together, [...]; `units` ascend, [..., k].

    `own` are those of every unit.
    """
    own = own[units]
    level = fabric.wires[j].level
    if level.link != "switch" and j > 0:
        # What enters a parent serves all its children, but is counted once.
        parents = units // level.size
        own = own - fabric.capacity(j - 1)[parents] * (np.diff(parents, prepend=-1) == 0)
    return cast(Floats, own.sum(axis=-1))
