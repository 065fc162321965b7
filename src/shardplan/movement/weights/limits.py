"""Limits of a refit: the least seconds in which all its elements can arrive, whoever sends them.

At every level of the hardware, what a unit (a device, a node) needs and does not own must enter it, once: inside it can
be passed on. What some units alone own, and others need, must leave these units, once, over their ways together. So
stages that share no sender count at the same time, and a stage whose owners are few counts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.weights.contents import DimContents, joined
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.owners import FamilyMove, OwnerGroups
from shardplan.plans.bounds import capacity, most_over, summed_capacity
from shardplan.plans.nominal import BANDWIDTH, LATENCY
from shardplan.plans.starts import Bound, started


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a move must bring: blocks of some bytes, who wants each, and who owns each, by device id; int64.

    `wanted` and `owned` have a row (block, device) for each. `apart` says that blocks share no element.
    """

    tensor: str
    nbytes: np.ndarray
    wanted: np.ndarray
    owned: np.ndarray
    apart: bool


def demand_of(move: FamilyMove, source: StoredFamily, ids: tuple[np.ndarray, np.ndarray], itemsize: int) -> Demand:
    """Return what a move must bring, of which `itemsize` bytes an element travel."""
    keys = np.concatenate([move.content, move.cell], axis=1)
    found, block = np.unique(keys, axis=0, return_inverse=True)
    block = block.reshape(-1)
    pairs, row = np.unique(np.stack([block, ids[1][move.target]], axis=1), axis=0, return_inverse=True)
    size = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(size, row.reshape(-1), move.elements * itemsize)
    nbytes = np.zeros(len(found), dtype=np.int64)
    np.maximum.at(nbytes, pairs[:, 0], size)
    owners = OwnerGroups.of(source, move.tensor, move.cells)
    blocks, places = owners.places_of(found[:, move.content.shape[1] :])
    owned = np.stack([blocks, ids[0][places]], axis=1)
    return Demand(move.tensor, nbytes, pairs, owned, all(map(_disjoint, move.contents)))


def _disjoint(contents: DimContents) -> bool:
    start, stop = joined(contents.start, contents.stop)
    return int((contents.stop - contents.start).sum()) == int((stop - start).sum())


def least_seconds(demands: Sequence[Demand], fabric: Fabric | None) -> float:
    """Return a lower bound on the seconds of a refit; without a fabric that of the nominal rate and latency."""
    devices = np.unique(
        np.concatenate([np.zeros(0, np.int64), *(x[:, 1] for d in demands for x in (d.wanted, d.owned))])
    )
    if fabric is None:
        enter, left = _at_level(demands, devices, devices)
        most = max(
            most_over(enter, np.full(len(enter), BANDWIDTH)), *(size / (len(s) * BANDWIDTH) for s, size in left), 0.0
        )
        return most + LATENCY if most else 0.0
    at = fabric.topology_ids(devices)
    worst = [Bound(0.0, 0.0)]
    for j, wires in enumerate(fabric.wires):
        enter, left = _at_level(demands, devices, at // wires.stride)
        own = capacity(fabric, j, at)
        bounds = [most_over(enter, own[: len(enter)])]
        for units, size in left:
            bounds.append(most_over(np.array([float(size)]), summed_capacity(fabric, j, units[None], own)))
        worst.append(started(fabric, j, max(bounds), at))
    return Bound.largest(worst).seconds


Leaving = list[tuple[np.ndarray, int]]


def _at_level(demands: Sequence[Demand], devices: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, Leaving]:
    """The bytes that must enter every unit, and those that must leave some units together."""
    enter: dict[str, np.ndarray] = {}
    leave: dict[str, dict[bytes, int]] = {}
    count = int(unit.max(initial=0)) + 1
    for d in demands:
        wants = np.stack([d.wanted[:, 0], unit[np.searchsorted(devices, d.wanted[:, 1])]], axis=1)
        has = np.stack([d.owned[:, 0], unit[np.searchsorted(devices, d.owned[:, 1])]], axis=1)
        each = wants if d.apart else np.stack([d.wanted[:, 0], d.wanted[:, 1]], axis=1)
        code = np.unique(has[:, 0] * count + has[:, 1])
        lacks = ~np.isin(wants[:, 0] * count + wants[:, 1], code)
        into = np.zeros(count)
        if d.apart:
            pairs = np.unique(wants[lacks], axis=0)
            np.add.at(into, pairs[:, 1], d.nbytes[pairs[:, 0]])
        else:  # blocks overlap: what one device needs is a bound for its unit
            alone = np.zeros(len(devices))
            np.add.at(alone, np.searchsorted(devices, each[lacks][:, 1]), d.nbytes[wants[lacks][:, 0]])
            np.maximum.at(into, unit, alone)
        enter[d.tensor] = np.maximum(enter.get(d.tensor, 0.0), into)
        own = _leaving(np.unique(wants[lacks][:, 0]), code, count, d)
        old = leave.setdefault(d.tensor, {})
        leave[d.tensor] = own if sum(own.values()) > sum(old.values()) else old
    total: dict[bytes, int] = {}
    for own in leave.values():
        for key, size in own.items():
            total[key] = total.get(key, 0) + size
    sets: Leaving = [(np.frombuffer(key, dtype=np.int64), size) for key, size in total.items()]
    if len(sets) > 1:
        sets.append((np.unique(np.concatenate([s for s, _ in sets])), sum(size for _, size in sets)))
    return sum(enter.values(), np.zeros(count)), sets


def _leaving(blocks: np.ndarray, code: np.ndarray, count: int, demand: Demand) -> dict[bytes, int]:
    """The bytes of blocks by the units that own them together."""
    out: dict[bytes, int] = {}
    first = np.searchsorted(code, blocks * count, side="left").tolist()
    stop = np.searchsorted(code, (blocks + 1) * count, side="left").tolist()
    for block, a, b in zip(blocks.tolist(), first, stop, strict=True):
        key = (code[a:b] - block * count).tobytes()
        size = int(demand.nbytes[block])
        out[key] = out.get(key, 0) + size if demand.apart else max(out.get(key, 0), size)
    return out


def busiest(sent: Iterable[int]) -> float:
    """Return the largest over the mean of those that send at all; 1 where nobody does."""
    some = [s for s in sent if s]
    return max(some) / (sum(some) / len(some)) if some else 1.0
