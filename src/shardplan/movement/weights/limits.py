"""Limits of a refit: the least seconds in which all its elements can arrive, from owners, by receivers.

At every level of the hardware, what a unit (a device, a node) needs and does not own must enter it, once: inside it can
be passed on. What some devices alone own, and units without an owner need, must leave once, over the ways of these
devices: others carry nothing. So stages that share no sender count at the same time, and a stage with few owners counts
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.weights.contents import DimContents, merge_intervals
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.owners import FamilyMove, OwnerGroups
from shardplan.plans.bounds import capacity, most_over, summed_capacity
from shardplan.plans.starts import Bound, bound_with_starts


@dataclass(frozen=True, slots=True, eq=False)
class RefitDemand:
    """What a move must bring: blocks of some bytes, who wants each, and who owns each, by device id; int64.

    `wanted` and `owned` have a row (block, device) for each. `apart` says that blocks share no element.
    """

    tensor: str
    nbytes: np.ndarray
    wanted: np.ndarray
    owned: np.ndarray
    apart: bool


def demand_of(
    move: FamilyMove,
    relay: FamilyMove | None,
    source: StoredFamily,
    ids: tuple[np.ndarray, np.ndarray],
    itemsize: int,
) -> RefitDemand:
    """Return what a move must bring, with what receivers pass on; `itemsize` bytes an element travel."""
    both = [move] if relay is None else [move, relay]
    keys = np.concatenate([np.concatenate([m.content, m.cell], axis=1) for m in both])
    target, elements = (np.concatenate([getattr(m, name) for m in both]) for name in ("target", "elements"))
    found, block = np.unique(keys, axis=0, return_inverse=True)
    block = block.reshape(-1)
    pairs, row = np.unique(np.stack([block, ids[1][target]], axis=1), axis=0, return_inverse=True)
    size = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(size, row.reshape(-1), elements * itemsize)
    nbytes = np.zeros(len(found), dtype=np.int64)
    np.maximum.at(nbytes, pairs[:, 0], size)
    owners = OwnerGroups.of(source, move.tensor, move.cells)
    blocks, places = owners.places_of(found[:, move.content.shape[1] :])
    owned = np.stack([blocks, ids[0][places]], axis=1)
    return RefitDemand(move.tensor, nbytes, pairs, owned, all(map(_disjoint, move.contents)))


def _disjoint(contents: DimContents) -> bool:
    start, stop = merge_intervals(contents.start, contents.stop)
    return int((contents.stop - contents.start).sum()) == int((stop - start).sum())


def least_seconds(demands: Sequence[RefitDemand], fabric: Fabric) -> float:
    """Return a lower bound on the seconds of a refit."""
    ids = [x[:, 1] for d in demands for x in (d.wanted, d.owned)]
    devices = np.unique(np.concatenate([np.zeros(0, np.int64), *ids]))
    # By messages, as every refit moves: a collective may reach more of a rate.
    rows = fabric.library.serving("messages", "auto")
    fabric = fabric.with_library(replace(fabric.library, rows=tuple(rows)))
    at = fabric.topology_ids(devices)
    worst = [Bound(0.0, 0.0)]
    for j, wires in enumerate(fabric.wires):
        enter, left = _at_level(demands, devices, at // wires.stride)
        own = capacity(fabric, j, at)
        bounds = [most_over(enter, own[: len(enter)])]
        for owners, size in left:
            units = np.unique(at[owners] // wires.stride)
            rate = capacity(fabric, j, at[owners])[units].sum()
            if wires.level.link != "switch":
                rate = summed_capacity(fabric, j, units[None], own)[0]
            bounds.append(size / float(rate) if size else 0.0)
        worst.append(bound_with_starts(fabric, j, max(bounds), at))
    return Bound.largest(worst).seconds


Leaving = list[tuple[np.ndarray, int]]
_MOST_SETS = 1024  # of owners; with more, each alone and all together


def _at_level(demands: Sequence[RefitDemand], devices: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, Leaving]:
    """The bytes that must enter every unit, and those that must leave owners which have them alone."""
    enter: dict[str, np.ndarray] = {}
    leave: dict[str, dict[bytes, int]] = {}
    count = int(unit.max(initial=0)) + 1
    for d in demands:
        wanting, owning = (np.searchsorted(devices, x[:, 1]) for x in (d.wanted, d.owned))
        wants, has = d.wanted[:, 0] * count + unit[wanting], d.owned[:, 0] * count + unit[owning]
        lacks = ~np.isin(wants, has)
        into = np.zeros(count)
        if d.apart:
            pairs = np.unique(wants[lacks])
            np.add.at(into, pairs % count, d.nbytes[pairs // count])
        else:  # blocks overlap: what one device needs is a bound for its unit
            alone = np.zeros(len(devices))
            np.add.at(alone, wanting[lacks], d.nbytes[d.wanted[lacks, 0]])
            np.maximum.at(into, unit, alone)
        enter[d.tensor] = np.maximum(enter.get(d.tensor, 0.0), into)
        code = np.unique(d.owned[:, 0] * len(devices) + owning)
        own = _leaving(np.unique(d.wanted[lacks, 0]), code, len(devices), d)
        old = leave.setdefault(d.tensor, {})
        leave[d.tensor] = own if sum(own.values()) > sum(old.values()) else old
    total: dict[bytes, int] = {}
    for own in leave.values():
        for key, size in own.items():
            total[key] = total.get(key, 0) + size
    return sum(enter.values(), np.zeros(count)), _owner_set_bytes(total)


def _owner_set_bytes(total: Mapping[bytes, int]) -> Leaving:
    """The bytes that sets of owners have between them: each with the sets that lie in it, and all."""
    known = [(frozenset(np.frombuffer(key, dtype=np.int64).tolist()), size) for key, size in total.items()]
    sets: Leaving = []
    for owners, size in known:
        if len(known) <= _MOST_SETS:
            size = sum(other for inner, other in known if inner <= owners)
        sets.append((np.array(sorted(owners), dtype=np.int64), size))
    if len(sets) > 1:
        sets.append((np.array(sorted(frozenset().union(*(o for o, _ in known))), dtype=np.int64), sum(total.values())))
    return sets


def _leaving(blocks: np.ndarray, code: np.ndarray, count: int, demand: RefitDemand) -> dict[bytes, int]:
    """The bytes of blocks by the owners that have them together."""
    out: dict[bytes, int] = {}
    first = np.searchsorted(code, blocks * count, side="left").tolist()
    stop = np.searchsorted(code, (blocks + 1) * count, side="left").tolist()
    for block, a, b in zip(blocks.tolist(), first, stop, strict=True):
        key = (code[a:b] - block * count).tobytes()
        size = int(demand.nbytes[block])
        out[key] = out.get(key, 0) + size if demand.apart else max(out.get(key, 0), size)
    return out
