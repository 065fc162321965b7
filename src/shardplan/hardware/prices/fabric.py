"""The resources of a topology, and the load that point-to-point flows put on them.

Resources are directed and full duplex (the cost model of 2110.10548, with routes): of a `switch` level every port of
every unit, out and in; of a ring, torus, mesh or `full` level every link between two children of one parent. A flow
whose outermost differing level is j uses the out-ports of the sender's units at levels j, ..., L-1 and the in-ports of
the receiver's. Where level j itself is linked, the flow goes over the links between the two children instead: straight
on a `full` level, else hop by hop along the shortest arc of each dim in turn, ties clockwise; links of such a level
further in are not used, every device having its own way out.

A *load* is by level the seconds that every resource is busy, None where a level carries nothing; loads of what runs at
once add. The uplinks of a unit are dealt out to its devices, neighbours first, so that each has its *rail*: a flow uses
the rail of its sender out of a unit, and of its receiver into one. Units with fewer devices than uplinks give each
device an equal share of them. Parallel links of two children act as one. Over a level of rails a device has the way of
its NIC, and a flow crosses it wherever its ends have other ways and lie in other nodes, in one unit too.

Devices are topology ids here, levels are numbers j from 0 for the outermost, units are numbered over their whole level.
Arrays over flows are int64 or float64 [n]; bytes are floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.prices.library import Library, library
from shardplan.hardware.topology import Topology

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Load = tuple[Floats | None, ...]  # by level the seconds of every resource, or None


def busiest(load: Load) -> float:
    """Return the seconds of the busiest resource, 0 where nothing is carried."""
    return max((float(seconds.max()) for seconds in load if seconds is not None and seconds.size), default=0.0)


def add_loads(loads: Iterable[Load]) -> Load:
    """Return the load of what runs at once; of nothing an empty one."""
    total: list[Floats | None] = []
    for load in loads:
        total += [None] * (len(load) - len(total))
        for j, seconds in enumerate(load):
            mine = total[j]
            total[j] = seconds if mine is None else mine if seconds is None else mine + seconds
    return tuple(total)


def scale_load(load: Load, factors: Sequence[float]) -> Load:
    """Return a load with every level's seconds times a factor."""
    return tuple(None if s is None else s * f for s, f in zip(load, factors, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Point-to-point transfers that run together; all arrays [n]."""

    sender: Ints
    receiver: Ints
    nbytes: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Wires:
    """A level with what is derived from it once."""

    level: Level
    stride: int  # devices in a unit
    units: int  # of the whole level
    ways: int  # ports of a unit that devices are dealt to: uplinks, or as many as it has devices
    parallel: float  # ports, or links of two children, that act as one: those of a way
    factors: Floats | None  # on the bandwidth of every unit [units]; None where no unit is degraded
    port_factors: Floats | None  # on the bandwidth of every way of every unit [units * ways]; None where all are 1
    rates: Floats | float  # bytes a second of every resource, or of all


class Fabric:
    """A topology as directed resources, with the map from device ids to topology ids.

    Args:
        topology: The hardware.
        position: By device id its topology id, -1 where there is none, as `Placement.position()` gives it; None where
            the two are equal.
        launch: Seconds to start any communication step; by default the device's.
        period: Devices after which the topology is the same again; by default all of them.

    Raises `TopologyError` where a position is not a device of the topology, and where its library is unknown.

    Source: arXiv 2110.10548, simulator.
    """

    __slots__ = ("far", "launch", "library", "period", "position", "topology", "wires")

    library: Library

    def __init__(
        self, topology: Topology, position: Ints | None = None, *, launch: float | None = None, period: int = 0
    ) -> None:
        self.topology = topology
        self.period = period or topology.size
        self.launch = topology.device.launch if launch is None else launch
        self.library = library(topology.library)
        names = [level.name for level in topology.levels]
        # Levels up to this one are crossed over NICs: a NIC is an uplink of a node.
        self.far = names.index("node") + 1 if "node" in names else len(names) - 1
        self.position = None if position is None else np.asarray(position, dtype=np.int64)
        if self.position is not None:
            topology.check_ids(self.position[self.position >= 0])
        wires: list[_Wires] = []
        units = 1
        for level, stride in zip(topology.levels, topology.strides, strict=True):
            units *= level.size
            ways = min(level.uplinks, topology.strides[len(wires) + 1] if level.rails else stride)
            ways = ways if level.link == "switch" else 1
            factors = np.ones(units) if level.degraded else None
            for unit, factor in level.degraded:
                cast(Floats, factors)[unit] = factor
            parallel = level.uplinks / ways
            ports = _port_factors(level, units, ways)
            rates = level.delivered_rate * parallel * _rate_factors(level, ports, factors)
            wires.append(_Wires(level, stride, units, ways, parallel, factors, ports, rates))
        self.wires = tuple(wires)

    def with_library(self, library: Library) -> Fabric:
        """Return the same fabric under another library model."""
        other = copy(self)
        other.library = library
        return other

    def topology_ids(self, ids: Ints) -> Ints:
        """Return the topology ids of device ids, in the same shape; raises `TopologyError` for an id that has none."""
        array = np.asarray(ids, dtype=np.int64)
        if self.position is None or array.size == 0:
            return self.topology.check_ids(array)
        if int(array.min()) < 0 or int(array.max()) >= len(self.position) or int(self.position[array].min()) < 0:
            known = set(np.flatnonzero(self.position >= 0).tolist())
            bad = next(int(i) for i in array.reshape(-1) if int(i) not in known)
            raise TopologyError(
                f"device {bad} has no place in topology {self.topology.name!r}: the mesh does not name it"
            )
        return self.position[array]

    def blocks(self, ids: Ints) -> tuple[int, ...]:
        """Return the sizes of nested blocks of device ids that are units of levels, smallest first.

        Levels whose units are no such blocks, as a placement may lay them, are left out.
        """
        found: list[int] = []
        for wires in reversed(self.wires):
            unit, block = self.topology_ids(ids) // wires.stride, ids // wires.stride
            pairs = len(np.unique(unit * (1 + block.max(initial=0)) + block))
            if wires.stride > 1 and pairs == len(np.unique(unit)) == len(np.unique(block)) > 1:
                found.append(wires.stride)
        return tuple(found)

    def outermost_level(self, sender: Ints, receiver: Ints) -> Ints:
        """Return the outermost level at which senders and receivers differ, L where they are equal: [n]."""
        level = np.full(sender.shape, len(self.wires), dtype=np.int64)
        for j in range(len(self.wires) - 1, -1, -1):  # outwards, so that the outermost difference is written last
            level[self.crosses(j, sender, receiver)] = j
        return level

    def crosses(self, j: int, sender: Ints, receiver: Ints) -> NDArray[np.bool_]:
        """Return which flows leave their unit of level j, on rails their leaf: [n]."""
        stride = self.wires[j].stride
        if not self.wires[j].level.rails:
            return sender // stride != receiver // stride
        apart = self.rail(j, sender) != self.rail(j, receiver)
        return apart & (sender // self.wires[j + 1].stride != receiver // self.wires[j + 1].stride)

    def level_bytes(self, flows: Flows) -> Floats:
        """Return the bytes whose outermost level crossed is each of the levels: [L]."""
        depth = len(self.wires)
        load = np.bincount(self.outermost_level(flows.sender, flows.receiver), flows.nbytes, depth + 1)
        return load[:depth].astype(np.float64)

    def load(self, flows: Flows) -> Load:
        """Return the load of flows that run together, each on the rails of the devices at its ends."""
        found: list[Floats | None] = []
        for j, wires in enumerate(self.wires):
            out, into = flows.sender // wires.stride, flows.receiver // wires.stride
            moving = self.crosses(j, flows.sender, flows.receiver) if wires.level.rails else out != into
            if wires.level.link != "switch":
                # Links join the children of one parent; what comes from further out has its own way in.
                moving &= out // wires.level.size == into // wires.level.size
            if not moving.any():
                found.append(None)
                continue
            keep = slice(None) if bool(moving.all()) else np.flatnonzero(moving)  # a slice copies nothing
            nbytes = flows.nbytes[keep]
            if wires.level.link == "switch":
                found.append(self.port_load(j, (flows.sender[keep], nbytes), (flows.receiver[keep], nbytes)))
            else:
                found.append(self.link_load(j, out[keep], into[keep], nbytes))
        return tuple(found)

    @property
    def near_rate(self) -> float:
        """The bytes a second that leave a device over the innermost level."""
        level = self.wires[-1].level
        ways = level.size - 1 if level.link == "full" else sum(1 if n == 2 else 2 for n in level.extents if n > 1)
        return level.delivered_rate * level.uplinks * max(1, 1 if level.link == "switch" else ways)

    def port_load(self, j: int, leaving: tuple[Ints, Floats], entering: tuple[Ints, Floats]) -> Floats:
        """Return the seconds of all ports of switch level j, first those out: [2 * units * ways].

        `leaving` and `entering` are devices and the bytes with which they load their rails.
        """
        wires = self.wires[j]
        count = wires.units * wires.ways
        return np.concatenate([np.bincount(self.rail(j, d), n, count) for d, n in (leaving, entering)]) / wires.rates

    def rail(self, j: int, device: Ints) -> Ints:
        """Return the number, over all units of switch level j, of the way that each device has out of its unit."""
        wires = self.wires[j]
        if wires.level.rails:
            return device // wires.stride * wires.ways + self.rail(j + 1, device) % wires.ways
        return device * wires.ways // wires.stride

    def link_load(self, j: int, out: Ints, into: Ints, nbytes: Floats) -> Floats:
        """Return the seconds of all links of level j when bytes go between children of one parent.

        Level j is no switch; `out` and `into` are units, pairwise of one parent. [resources of the level].
        """
        wires = self.wires[j]
        level = wires.level
        if level.link == "full":
            return np.bincount(out * level.size + into % level.size, nbytes, wires.units * level.size) / wires.rates
        start = np.array(np.unravel_index(out % level.size, level.extents))
        end = np.array(np.unravel_index(into % level.size, level.extents))
        parent = out // level.size
        found: list[Floats] = []
        for dim in range(len(level.extents)):
            line = self.line(j, dim, parent, start)
            found.append(self.line_load(j, dim, line, start[dim], end[dim], nbytes))
            start[dim] = end[dim]  # dims are crossed in order: from here on the flow has the receiver's coordinate
        return np.concatenate(found)

    def line(self, j: int, dim: int, parent: Ints, coordinates: Ints) -> Ints:
        """Return the numbers of lines of the grid of level j along one dim, over all parents: [n].

        A line is given by its parent, [n], and the coordinates of a unit on it, [dims, n], of which the one along
        `dim` does not count.
        """
        number = parent
        for other, extent in enumerate(self.wires[j].level.extents):
            if other != dim:
                number = number * extent + coordinates[other]
        return number

    def line_load(self, j: int, dim: int, line: Ints, start: Ints, end: Ints, nbytes: Floats) -> Floats:
        """Return the seconds of all links along one dim when bytes go along its lines, each on its shortest arc.

        `line` is numbered as by `line`, `start` and `end` are coordinates along the dim. [2 * units]: first the links
        clockwise, each numbered by its line and the unit that it leaves, then those the other way.
        """
        wires = self.wires[j]
        extent = wires.level.extents[dim]
        lines = wires.units // extent
        cyclic = wires.level.link != "mesh"
        ahead = (end - start) % extent if cyclic else end - start
        forward = (ahead > 0) & (2 * ahead <= extent) if cyclic else ahead > 0  # of two arcs alike the clockwise one
        backward = (ahead != 0) & ~forward
        there = _spread(line[forward], start[forward], ahead[forward], nbytes[forward], lines, extent)
        # A link is numbered by the unit that it leaves: from start back to end these are end + 1, ..., start.
        hops = (start - end)[backward] % extent
        back = _spread(line[backward], (end[backward] + 1) % extent, hops, nbytes[backward], lines, extent)
        own = slice(2 * wires.units * dim, 2 * wires.units * (dim + 1))
        rates = wires.rates[own] if isinstance(wires.rates, np.ndarray) else wires.rates
        return np.concatenate([there.reshape(-1), back.reshape(-1)]) / rates

    def unit_bytes(self, j: int, seconds: Floats) -> Floats:
        """Return the bytes that leave every unit of level j, [units, its ways or links], from a load of the level.

        What a unit of a ring, torus or mesh passes on counts as well.
        """
        wires = self.wires[j]
        nbytes, extents = seconds * wires.rates, wires.level.extents
        if wires.level.link == "switch":
            return nbytes[: len(nbytes) // 2].reshape(wires.units, -1)
        if wires.level.link == "full":
            return nbytes.reshape(wires.units, -1)
        found: list[Floats] = []
        for dim, part in enumerate(np.split(nbytes, len(extents))):
            # A link is numbered by its line, which has the other dims, and the unit that it leaves.
            grid = part.reshape(2, -1, *extents[:dim], *extents[dim + 1 :], extents[dim])
            found.append(np.moveaxis(grid, -1, dim + 2).reshape(2, -1))
        return np.concatenate(found).T

    def capacity(self, j: int) -> Floats:
        """Return the bytes a second that can enter, or leave, each unit of level j at most: [units].

        A unit of a linked level may also take in what enters its parent. It is what the best row of the library makes
        of the ports.
        """
        wires = self.wires[j]
        own = np.full(
            wires.units, wires.level.delivered_rate * wires.level.uplinks * self.library.best_share(j < self.far)
        )
        if wires.port_factors is not None and wires.level.link == "switch":
            return own * wires.port_factors.reshape(wires.units, -1).mean(axis=1)
        if wires.factors is not None:
            own = own * wires.factors
        if wires.level.link == "switch":
            return own
        # Of a dim with one child there are no links; of two, one pair, used in one direction only (ties clockwise).
        full = wires.level.link == "full"
        ways = wires.level.size - 1 if full else sum(0 if extent == 1 else 2 for extent in wires.level.extents)
        own = own * ways
        return own if j == 0 else own + np.repeat(self.capacity(j - 1), wires.level.size)

    def first_hop(self, outermost: int | None = None) -> float:
        """Return the least seconds in which anything crosses level `outermost` or one further out; None: any level."""
        found = [np.inf]
        for j, latency in enumerate(self.latencies()[: None if outermost is None else outermost + 1].tolist()):
            for row in self.library.rows:
                base, hop = (row.base_far, latency + row.far) if j < self.far else (row.base, latency * row.near)
                found += [] if base is None else [base + hop]
        return self.launch + min(found)

    def latencies(self) -> Floats:
        """Return the seconds of latency of the levels, [L]."""
        return np.array([wires.level.latency for wires in self.wires])


def _port_factors(level: Level, units: int, ways: int) -> Floats | None:
    """The factors on the bandwidth of every way of every unit of a switch level, [units * ways]; None without any."""
    if level.link != "switch" or not (level.degraded or level.slow_ports):
        return None
    ports = np.ones((units, level.uplinks))
    for unit, factor in level.degraded:
        ports[unit] = factor
    for unit, port, factor in level.slow_ports:
        ports[unit, port] *= factor
    # Where devices are fewer than ports, a way is several ports, or parts of them.
    fine = np.repeat(ports, ways, axis=1).reshape(units, ways, level.uplinks)
    return cast(Floats, fine.mean(axis=2).reshape(-1))


def _rate_factors(level: Level, ports: Floats | None, factors: Floats | None) -> Floats | float:
    """The factors on the rate of every resource of a level, 1 where none is slow; `ports` of ways, `factors` of units.

    A link is as fast as the slower of its two ends.
    """
    if level.link == "switch":
        return 1.0 if ports is None else np.tile(ports, 2)
    if factors is None:
        return 1.0
    if level.link == "full":
        grid = factors.reshape(-1, level.size)
        return np.minimum(grid[:, :, None], grid[:, None, :]).reshape(-1)
    grid, found = factors.reshape(-1, *level.extents), list[Floats]()
    for dim in range(1, grid.ndim):
        for turn in (-1, 1):
            found.append(np.moveaxis(np.minimum(grid, np.roll(grid, turn, axis=dim)), dim, -1).reshape(-1))
    return np.concatenate(found)


def _spread(line: Ints, first: Ints, hops: Ints, nbytes: Floats, lines: int, extent: int) -> Floats:
    """Return the load of every link, [lines, extent], when each of the bytes takes `hops` links from `first` on.

    Each adds its bytes where it starts and takes them away where it ends, and the running sum is the load; what goes
    round the end of its line starts again at 0.
    """
    base = line * (extent + 1)
    last = first + hops
    wrap = last > extent
    edges = [base + first, base + np.minimum(last, extent), base[wrap], base[wrap] + last[wrap] - extent]
    signs = [nbytes, -nbytes, nbytes[wrap], -nbytes[wrap]]
    steps = np.bincount(np.concatenate(edges), np.concatenate(signs), lines * (extent + 1))
    return cast(Floats, np.cumsum(steps.reshape(lines, extent + 1), axis=1)[:, :extent])
