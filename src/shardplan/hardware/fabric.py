"""The resources of a topology, and the load that point-to-point flows put on them.

Resources are directed and full duplex (the cost model of 2110.10548, with routes). A flow whose outermost differing
level is j uses the out-ports of the sender's units at levels j, ..., L-1 and the in-ports of the receiver's. Where
level j itself is a ring, torus or mesh, the flow goes hop by hop over the links between the two children instead, along
the shortest arc of each dim in turn, ties clockwise; links of such a level further in are not used, every device having
its own way out.

A unit with several uplinks: a flow of a group uses port n mod uplinks, the group being the n-th of those that cross
this unit, which is the group's number mod uplinks where groups lie regularly; a single message uses the rail of the
device at its end, the device's number inside the unit mod uplinks. Units with fewer devices than ports give each device
an equal share of them. Parallel links of a ring, torus or mesh act as one.

Devices are topology ids here, levels are numbers j from 0 for the outermost, units are numbered over their whole level.
Arrays over flows are int64 or float64 [n]; bytes are floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Units times groups: up to here who crosses what is a table of 2 MB, summed along its rows; above, keys are sorted.
_DENSE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Point-to-point transfers that run together; all arrays [n]."""

    sender: Ints
    receiver: Ints
    nbytes: Floats
    lane: Ints | None = None  # the number of the group each belongs to; None for messages on rails


class LanePorts(NamedTuple):
    """The ports that groups have at the units they leave and enter, and their part of a group's bytes; all [n]."""

    port_out: Ints
    port_in: Ints
    share_out: Floats
    share_in: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Wires:
    """A level with what is derived from it once."""

    level: Level
    stride: int  # devices in a unit
    units: int  # of the whole level
    factors: Floats | None  # on the bandwidth of every unit [units]; None where no unit is degraded


class Fabric:
    """A topology as directed resources, with the map from device ids to topology ids.

    Args:
        topology: The hardware.
        position: By device id its topology id, -1 where there is none, as `Placement.position()` gives it; None where
            the two are equal.
        launch: Seconds to start any communication step.
        channels: Whether a group with ports to spare uses them all, as NCCL's channels do; else it uses one.

    Raises `TopologyError` where a position is not a device of the topology.

    Source: arXiv 2110.10548, simulator; NCCL's ring order.
    """

    __slots__ = ("channels", "launch", "position", "topology", "wires")

    def __init__(
        self, topology: Topology, position: Ints | None = None, *, launch: float = 0.0, channels: bool = False
    ) -> None:
        self.topology = topology
        self.launch = launch
        self.channels = channels
        self.position = None if position is None else np.asarray(position, dtype=np.int64)
        if self.position is not None:
            topology.checked(self.position[self.position >= 0])
        wires: list[_Wires] = []
        units = 1
        for level, stride in zip(topology.levels, topology.strides, strict=True):
            units *= level.size
            factors: Floats | None = None
            if level.degraded:
                factors = np.ones(units)
                for unit, factor in level.degraded:
                    factors[unit] = factor
            wires.append(_Wires(level, stride, units, factors))
        self.wires = tuple(wires)

    def topology_ids(self, ids: Ints) -> Ints:
        """Return the topology ids of device ids, in the same shape; raises `TopologyError` for an id that has none."""
        array = np.asarray(ids, dtype=np.int64)
        if self.position is None or array.size == 0:
            return self.topology.checked(array)
        if int(array.min()) < 0 or int(array.max()) >= len(self.position) or int(self.position[array].min()) < 0:
            known = set(np.flatnonzero(self.position >= 0).tolist())
            bad = next(int(i) for i in array.reshape(-1) if int(i) not in known)
            raise TopologyError(
                f"device {bad} has no place in topology {self.topology.name!r}: the mesh does not name it"
            )
        return self.position[array]

    def crossed(self, sender: Ints, receiver: Ints) -> Ints:
        """Return the outermost level at which senders and receivers differ, L where they are equal: [n]."""
        level = np.full(sender.shape, len(self.wires), dtype=np.int64)
        for j in range(len(self.wires) - 1, -1, -1):  # outwards, so that the outermost difference is written last
            level[sender // self.wires[j].stride != receiver // self.wires[j].stride] = j
        return level

    def level_bytes(self, flows: Flows) -> Floats:
        """Return the bytes whose outermost level crossed is each of the levels: [L]."""
        depth = len(self.wires)
        load = np.bincount(self.crossed(flows.sender, flows.receiver), flows.nbytes, depth + 1)
        return load[:depth].astype(np.float64)

    def transfer_seconds(self, flows: Flows) -> float:
        """Return the bandwidth term of flows that run together: the largest load over bandwidth of all resources."""
        worst = 0.0
        for j, wires in enumerate(self.wires):
            out, into = flows.sender // wires.stride, flows.receiver // wires.stride
            moving = out != into
            if not moving.any():
                continue
            if wires.level.link != "switch":
                # Links join the children of one parent; what comes from further out has its own way in.
                moving &= out // wires.level.size == into // wires.level.size
            every = bool(moving.all())
            keep = slice(None) if every else np.flatnonzero(moving)  # a slice copies nothing
            out, into, nbytes = out[keep], into[keep], flows.nbytes[keep]
            if not nbytes.size:
                continue
            if wires.level.link != "switch":
                worst = max(worst, self.link_seconds(j, out, into, nbytes))
            elif wires.level.uplinks == 1:
                for unit in (out, into):
                    worst = max(worst, self.port_seconds(j, unit, nbytes))
            elif flows.lane is None:
                for unit, device in ((out, flows.sender[keep]), (into, flows.receiver[keep])):
                    worst = max(worst, self.rail_seconds(j, unit, device, nbytes))
            else:
                lanes = self.lane_ports(j, out, into, flows.lane[keep])
                worst = max(worst, self.port_seconds(j, out, nbytes * lanes.share_out, lanes.port_out))
                worst = max(worst, self.port_seconds(j, into, nbytes * lanes.share_in, lanes.port_in))
        return worst

    def port_seconds(
        self, j: int, unit: Ints, nbytes: Floats, port: Ints | None = None, ports: int | None = None
    ) -> float:
        """Return the seconds of the busiest port when bytes pass one direction of the uplinks of level j's units.

        `port` is a number for each of the bytes, None where a unit has one port. `ports` of a unit share the bandwidth
        of all its uplinks; by default there are as many ports as uplinks.
        """
        wires = self.wires[j]
        ways = (wires.level.uplinks if ports is None else ports) if port is not None else 1
        rate = wires.level.bandwidth * (wires.level.uplinks / ways if port is not None else 1)
        index = unit if port is None else unit * ways + port
        load = np.bincount(index, nbytes, wires.units * ways)
        if wires.factors is not None:
            load = load / np.repeat(wires.factors, ways)
        return float(load.max()) / rate

    def rail_seconds(self, j: int, unit: Ints, device: Ints, nbytes: Floats) -> float:
        """Return the seconds of the busiest port when bytes leave or enter units on the rails of devices in them.

        Level j is a switch; `device` is where the bytes start (or end), a topology id in `unit`.
        """
        wires = self.wires[j]
        ways = min(wires.level.uplinks, wires.stride)
        return self.port_seconds(j, unit, nbytes, device % wires.stride % ways, ways)

    def lane_ports(self, j: int, out: Ints, into: Ints, lane: Ints) -> LanePorts:
        """Return a port for every group at every unit that it crosses; level j is a switch.

        The shares are 1 unless `channels`: of groups fewer than ports each has several, and its bytes are dealt out.
        """
        wires = self.wires[j]
        lanes = int(lane.max()) + 1
        key_out, key_in = out * lanes + lane, into * lanes + lane
        if wires.units * lanes <= _DENSE:
            table = np.zeros(wires.units * lanes, dtype=bool)
            table[key_out] = True
            table[key_in] = True
            # A group's number among those that cross the unit is how many of them come before it.
            crossing = table.reshape(wires.units, lanes).cumsum(axis=1, dtype=np.int64)
            groups = crossing[:, -1]
            nth_out, nth_in = crossing.reshape(-1)[key_out] - 1, crossing.reshape(-1)[key_in] - 1
        else:
            keys = np.unique(np.concatenate([key_out, key_in]))
            groups = np.bincount(keys // lanes, minlength=wires.units)
            first = np.concatenate([[0], np.cumsum(groups)[:-1]])
            nth_out = np.searchsorted(keys, key_out) - first[out]
            nth_in = np.searchsorted(keys, key_in) - first[into]
        ports = wires.level.uplinks
        share = np.ones(wires.units)
        if self.channels:
            share = np.minimum(1.0, np.maximum(groups, 1) / ports)
        return LanePorts(nth_out % ports, nth_in % ports, share[out], share[into])

    def link_seconds(self, j: int, out: Ints, into: Ints, nbytes: Floats) -> float:
        """Return the seconds of the busiest link when bytes go hop by hop between children of one parent.

        Level j is a ring, torus or mesh; `out` and `into` are units, pairwise of one parent.
        """
        level = self.wires[j].level
        start = np.array(np.unravel_index(out % level.size, level.extents))
        end = np.array(np.unravel_index(into % level.size, level.extents))
        parent = out // level.size
        worst = 0.0
        for dim in range(len(level.extents)):
            line = self.line(j, dim, parent, start)
            worst = max(worst, self.line_seconds(j, dim, line, start[dim], end[dim], nbytes))
            start[dim] = end[dim]  # dims are crossed in order: from here on the flow has the receiver's coordinate
        return worst

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

    def line_seconds(self, j: int, dim: int, line: Ints, start: Ints, end: Ints, nbytes: Floats) -> float:
        """Return the seconds of the busiest link when bytes go along lines of one dim, each on its shortest arc.

        `line` is numbered as by `line`, `start` and `end` are coordinates along the dim.
        """
        wires = self.wires[j]
        extent = wires.level.extents[dim]
        lines = wires.units // extent
        cyclic = wires.level.link != "mesh"
        ahead = (end - start) % extent if cyclic else end - start
        forward = (ahead > 0) & (2 * ahead <= extent) if cyclic else ahead > 0  # of two arcs alike the clockwise one
        backward = (ahead != 0) & ~forward
        rate_forward: float | Floats = 1.0
        rate_backward: float | Floats = 1.0
        if wires.factors is not None:
            grid = wires.factors.reshape(-1, *wires.level.extents)
            factor = np.moveaxis(grid, dim + 1, -1).reshape(lines, extent)
            # A link is as fast as the slower of its two ends.
            rate_forward = np.minimum(factor, np.roll(factor, -1, axis=1))
            rate_backward = np.minimum(factor, np.roll(factor, 1, axis=1))
        worst = 0.0
        if forward.any():
            load = _spread(line[forward], start[forward], ahead[forward], nbytes[forward], lines, extent)
            worst = float((load / rate_forward).max())
        if backward.any():
            # A link is numbered by the unit that it leaves: from start back to end these are end + 1, ..., start.
            hops = (start - end)[backward] % extent
            load = _spread(line[backward], (end[backward] + 1) % extent, hops, nbytes[backward], lines, extent)
            worst = max(worst, float((load / rate_backward).max()))
        return worst / (wires.level.bandwidth * wires.level.uplinks)

    def capacity(self, j: int) -> Floats:
        """Return the bytes a second that can enter, or leave, each unit of level j at most: [units].

        A unit on a ring, torus or mesh may also take in what enters its parent.
        """
        wires = self.wires[j]
        own = np.full(wires.units, wires.level.bandwidth * wires.level.uplinks)
        if wires.factors is not None:
            own = own * wires.factors
        if wires.level.link == "switch":
            return own
        # Of a dim with one child there are no links; of two, one pair, used in one direction only (ties clockwise).
        ways = sum(0 if extent == 1 else 2 for extent in wires.level.extents)
        own = own * ways
        return own if j == 0 else own + np.repeat(self.capacity(j - 1), wires.level.size)

    def latencies(self) -> Floats:
        """Return the seconds of latency of the levels, [L]."""
        return np.array([wires.level.latency for wires in self.wires])


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
