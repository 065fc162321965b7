"""The load of every group of a collective, and of every message, apart: what `fabric` and `traffic` sum up.

Resources are numbered through, level by level in the order of a `Load`. The loads of groups that run together add up to
the load of all of them, heads of trees being given as if they did; the loads of messages to that of their flows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.core.mesh import MOST_DEVICES
from shardplan.core.pattern import Groups
from shardplan.errors import TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.prices.aggregate import GroupLayout
from shardplan.hardware.prices.cost import row_shares
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.hardware.prices.library import LibraryRow
from shardplan.hardware.prices.traffic import ALGORITHMS
from shardplan.hardware.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Rows of loads: an entry says for how long (or per byte) a row is on a resource; by row, then by resource."""

    count: int  # of rows
    row: Ints  # int64 [entries], ascending
    resource: Ints  # int64 [entries]
    seconds: Floats  # float64 [entries]


def resource_starts(fabric: Fabric) -> Ints:
    """Return the number of the first resource of every level, and behind them how many there are: int64 [L + 1]."""
    return np.cumsum([0, *(_planes(fabric, j) * _width(fabric, j) for j in range(len(fabric.wires)))])


def _planes(fabric: Fabric, j: int) -> int:
    """Of how many equal parts the resources of a level consist: ways out and in; of every dim there and back."""
    level = fabric.wires[j].level
    return 1 if level.link == "full" else 2 if level.link == "switch" else 2 * len(level.extents)


def _width(fabric: Fabric, j: int) -> int:
    wires = fabric.wires[j]
    return wires.units * (wires.level.size if wires.level.link == "full" else wires.ways)


def group_loads(pattern: Groups, row: LibraryRow, fabric: Fabric) -> list[Loads]:
    """Return for every round of a collective under a library's row the load of each of its groups, in their order.

    Raises `TopologyError` where there are too many groups on too large a topology to tell them apart.
    """
    members = fabric.topology_ids(pattern.members)
    groups, size = len(members), fabric.topology.size
    if groups * size > MOST_DEVICES:
        raise TopologyError(
            f"{groups} groups on {size} devices; the loads of groups are told apart where their number times that of "
            f"the devices is at most {MOST_DEVICES}"
        )
    order = np.argsort(members.min(axis=1), kind="stable")  # as in a price
    # Every group on a topology of its own: what each puts on its resources is then told from what the others do.
    copies = _side_by_side(fabric.topology, groups)
    members = members[order] + size * np.arange(groups)[:, None]
    nbytes = np.asarray(pattern.nbytes, np.float64)[order]
    rounds = ALGORITHMS[row.algorithm](pattern.kind, GroupLayout(members, copies), nbytes, row)
    shares, starts = row_shares(row, fabric), resource_starts(fabric)
    found: list[Loads] = []
    for one in rounds or ():
        rows: list[Ints] = []
        resources: list[Ints] = []
        values: list[Floats] = []
        for j, seconds in enumerate(one.load[1:]):
            if seconds is None:
                continue
            table = np.moveaxis(seconds.reshape(_planes(fabric, j), groups, -1), 1, 0).reshape(groups, -1)
            group, resource = np.nonzero(table)
            rows.append(order[group])
            resources.append(starts[j] + resource)
            values.append(table[group, resource] * shares[j])
        found.append(_sorted_loads(groups, rows, resources, values))
    return found


def _sorted_loads(count: int, rows: list[Ints], resources: list[Ints], values: list[Floats]) -> Loads:
    if not rows:
        return Loads(count, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    row, resource = np.concatenate(rows), np.concatenate(resources)
    order = np.lexsort((resource, row))
    return Loads(count, row[order], resource[order], np.concatenate(values)[order])


@lru_cache(maxsize=64)
def _side_by_side(topology: Topology, count: int) -> Fabric:
    """Return a fabric of copies of a topology, side by side."""
    units = 1
    levels: list[Level] = [Level("copy", count, "switch", 1.0, 0.0)]
    for level in topology.levels:
        units *= level.size
        shifts = range(0, count * units, units)
        degraded = tuple((u + k, f) for k in shifts for u, f in level.degraded)
        ports = tuple((u + k, port, f) for k in shifts for u, port, f in level.slow_ports)
        name = level.name if level.name == "node" else f"of_{level.name}"
        levels.append(replace(level, name=name, degraded=degraded, slow_ports=ports))
    return Fabric(replace(topology, levels=tuple(levels)), period=topology.size)


def routes(fabric: Fabric, sender: Ints, receiver: Ints) -> Loads:
    """Return the seconds per byte for which messages, given by the topology ids of their ends, are on each resource."""
    rows: list[Ints] = []
    resources: list[Ints] = []
    values: list[Floats] = []
    for j, (wires, first) in enumerate(zip(fabric.wires, resource_starts(fabric).tolist(), strict=False)):
        level = wires.level
        out, into = sender // wires.stride, receiver // wires.stride
        moving = fabric.crosses(j, sender, receiver)
        if level.link != "switch":
            moving &= out // level.size == into // level.size
        row = np.flatnonzero(moving)
        if not row.size:
            continue
        if level.link == "switch":
            ways = np.concatenate([fabric.rail(j, sender[row]), fabric.rail(j, receiver[row]) + _width(fabric, j)])
            row = np.tile(row, 2)
        elif level.link == "full":
            ways = out[row] * level.size + into[row] % level.size
        else:
            row, ways = _hops(fabric, j, row, out[row], into[row])
        rows.append(row)
        resources.append(first + ways)
        values.append(_byte_seconds(fabric, j)[ways])
    return _sorted_loads(len(sender), rows, resources, values)


def _hops(fabric: Fabric, j: int, row: Ints, out: Ints, into: Ints) -> tuple[Ints, Ints]:
    """Return the links of level j that messages between children of one parent take: rows, and numbers in the level."""
    wires = fabric.wires[j]
    level = wires.level
    place = np.array(np.unravel_index(out % level.size, level.extents))
    target = np.unravel_index(into % level.size, level.extents)
    rows: list[Ints] = []
    ways: list[Ints] = []
    for dim, extent in enumerate(level.extents):
        ahead = target[dim] - place[dim]
        if level.link != "mesh":
            ahead %= extent
            ahead = np.where(2 * ahead > extent, ahead - extent, ahead)  # of two arcs alike the clockwise one
        hops = np.abs(ahead)
        each = np.repeat(np.arange(len(row)), hops)
        nth = nth_of_each(hops)
        back = ahead < 0
        leaves = (place[dim][each] + np.where(back[each], -nth, nth)) % extent
        line = fabric.line(j, dim, out // level.size, place)
        rows.append(row[each])
        ways.append((2 * dim + back[each]) * wires.units + line[each] * extent + leaves)
        place[dim] = target[dim]  # dims are crossed in order
    return np.concatenate(rows), np.concatenate(ways)


def _byte_seconds(fabric: Fabric, j: int) -> Floats:
    """Return the seconds that a byte takes on every resource of level j, 0 on links that nothing ever takes."""
    wires = fabric.wires[j]
    level = wires.level
    if level.link == "switch":
        return np.ones(2 * wires.units * wires.ways) / wires.rates
    unit = np.arange(wires.units)
    if level.link == "full":
        out = np.repeat(unit, level.size)
        into = out // level.size * level.size + np.tile(np.arange(level.size), wires.units)
        return fabric.link_load(j, out, into, np.ones(len(out)))
    found: list[Floats] = []
    for dim, extent in enumerate(level.extents):
        line, start = np.arange(wires.units) // extent, unit % extent
        for turn in (1, -1):
            end = start + turn
            inside = np.flatnonzero((end >= 0) & (end < extent) if level.link == "mesh" else extent > 1 + 0 * end)
            both = fabric.line_load(j, dim, line[inside], start[inside], end[inside] % extent, np.ones(len(inside)))
            found.append(both[: wires.units] if turn > 0 else both[wires.units :])
    return np.concatenate(found)
