"""The resources of a topology, and the load that point-to-point flows put on them.

Resources are directed and full duplex (the cost model of 2110.10548, with routes). A flow whose outermost differing
level is j uses the out-ports of the sender's units at levels j, ..., L-1 and the in-ports of the receiver's. Where
level j itself is a ring, torus or mesh, the flow goes hop by hop over the links between the two children instead, along
the shortest arc of each dim in turn, ties clockwise; links of such a level further in are not used, every device having
its own way out.

A unit with several uplinks: a flow of a group uses port number (place of the group among those that cross this unit)
mod uplinks, which is the group's number mod uplinks where groups lie regularly; a single message uses the rail of the
device at its end, the device's number inside the unit mod uplinks. Units with fewer devices than ports give each device
an equal share of them. Parallel links of a ring, torus or mesh act as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# A table of this many booleans is cheaper than sorting; above it, sort.
_DENSE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Point-to-point transfers that run together.

    Args:
        sender: Topology ids, `[n]`.
        receiver: Topology ids, `[n]`.
        nbytes: Bytes of each, `[n]`.
        lane: Number of the group each belongs to, `[n]`; None for messages on rails.
    """

    sender: Ints
    receiver: Ints
    nbytes: Floats
    lane: Ints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Wires:
    """What is derived once from a level: bandwidth factors of its units, and where it stands."""

    level: Level
    stride: int
    units: int
    factors: Floats | None


class Fabric:
    """A topology as directed resources, with the map from mesh device ids to its devices.

    Args:
        topology: The hardware.
        position: Topology id of each mesh device id, `[n]` with -1 where there is none; None for the identity.
            `Placement.position()` gives it.
        launch: Seconds to start any communication step.
        channels: Whether a group with ports to spare uses them all, as NCCL's channels do; else it uses one.

    Raises:
        TopologyError: A position is not a device of the topology.

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

    def place(self, ids: Ints) -> Ints:
        """Map mesh device ids to topology ids.

        Args:
            ids: Any shape.

        Returns:
            Topology ids, the same shape.

        Raises:
            TopologyError: An id has no place in the topology.
        """
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
        """Find the outermost level at which senders and receivers differ.

        Args:
            sender: Topology ids, `[n]`.
            receiver: Topology ids, `[n]`.

        Returns:
            Level numbers `[n]`, 0 for the outermost; L where they are equal.
        """
        level = np.full(sender.shape, len(self.wires), dtype=np.int64)
        for j in range(len(self.wires) - 1, -1, -1):
            level[sender // self.wires[j].stride != receiver // self.wires[j].stride] = j
        return level

    def level_bytes(self, flows: Flows) -> Floats:
        """Add up bytes by the outermost level they cross.

        Args:
            flows: The transfers.

        Returns:
            Bytes for each level, `[L]`, outermost first.
        """
        depth = len(self.wires)
        load = np.bincount(self.crossed(flows.sender, flows.receiver), flows.nbytes, depth + 1)
        return load[:depth].astype(np.float64)

    def transfer_seconds(self, flows: Flows) -> float:
        """Price the bandwidth term of flows that run together.

        Args:
            flows: The transfers.

        Returns:
            Seconds: the largest load over bandwidth of all resources.
        """
        worst = 0.0
        for j, wires in enumerate(self.wires):
            out, into = flows.sender // wires.stride, flows.receiver // wires.stride
            moving = out != into
            if not moving.any():
                continue
            if wires.level.link != "switch":
                moving &= out // wires.level.size == into // wires.level.size
            every = bool(moving.all())
            keep = slice(None) if every else np.flatnonzero(moving)
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
                port_out, port_in, share_out, share_in = self.lane_ports(j, out, into, flows.lane[keep])
                worst = max(worst, self.port_seconds(j, out, nbytes * share_out, port_out))
                worst = max(worst, self.port_seconds(j, into, nbytes * share_in, port_in))
        return worst

    def port_seconds(
        self, j: int, unit: Ints, nbytes: Floats, port: Ints | None = None, ports: int | None = None
    ) -> float:
        """Price bytes that pass one direction of the uplinks of a level's units.

        Args:
            j: Number of a level.
            unit: Unit numbers, `[n]`.
            nbytes: Bytes of each, `[n]`.
            port: Port numbers, `[n]`; None for the only port.
            ports: Ports that share the uplinks' bandwidth; the level's uplinks by default.

        Returns:
            Seconds on the busiest port.
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
        """Price bytes that leave or enter a level's units on the rails of the devices they start or end at.

        Args:
            j: Number of a level with a switch.
            unit: Unit numbers, `[n]`.
            device: Topology ids in these units, `[n]`.
            nbytes: Bytes of each, `[n]`.

        Returns:
            Seconds on the busiest port.
        """
        wires = self.wires[j]
        ways = min(wires.level.uplinks, wires.stride)
        return self.port_seconds(j, unit, nbytes, device % wires.stride % ways, ways)

    def lane_ports(self, j: int, out: Ints, into: Ints, lane: Ints) -> tuple[Ints, Ints, Floats, Floats]:
        """Give every group that crosses a unit a port there.

        Args:
            j: Number of a level with a switch.
            out: Units left, `[n]`.
            into: Units entered, `[n]`.
            lane: Group numbers, `[n]`.

        Returns:
            Ports at the units left and at those entered, and at each the share of a group's bytes on one of its ports
            (1 unless `channels`); all `[n]`.
        """
        wires = self.wires[j]
        lanes = int(lane.max()) + 1
        key_out, key_in = out * lanes + lane, into * lanes + lane
        if wires.units * lanes <= _DENSE:
            table = np.zeros(wires.units * lanes, dtype=bool)
            table[key_out] = True
            table[key_in] = True
            rank = table.reshape(wires.units, lanes).cumsum(axis=1, dtype=np.int64)
            groups = rank[:, -1]
            ranks = rank.reshape(-1)
            rank_out, rank_in = ranks[key_out] - 1, ranks[key_in] - 1
        else:
            keys = np.unique(np.concatenate([key_out, key_in]))
            groups = np.bincount(keys // lanes, minlength=wires.units)
            first = np.concatenate([[0], np.cumsum(groups)[:-1]])
            rank_out = np.searchsorted(keys, key_out) - first[out]
            rank_in = np.searchsorted(keys, key_in) - first[into]
        ports = wires.level.uplinks
        share = np.ones(wires.units)
        if self.channels:
            share = np.minimum(1.0, np.maximum(groups, 1) / ports)
        return rank_out % ports, rank_in % ports, share[out], share[into]

    def link_seconds(self, j: int, out: Ints, into: Ints, nbytes: Floats) -> float:
        """Price bytes that travel hop by hop between children of one parent, on a ring, torus or mesh.

        Args:
            j: Number of a level.
            out: Units they start at, `[n]`.
            into: Units of the same parents they end at, `[n]`.
            nbytes: Bytes of each, `[n]`.

        Returns:
            Seconds on the busiest link.
        """
        level = self.wires[j].level
        start = np.array(np.unravel_index(out % level.size, level.extents))
        end = np.array(np.unravel_index(into % level.size, level.extents))
        parent = out // level.size
        worst = 0.0
        for dim in range(len(level.extents)):
            line = self.line(j, dim, parent, start)
            worst = max(worst, self.line_seconds(j, dim, line, start[dim], end[dim], nbytes))
            start[dim] = end[dim]
        return worst

    def line(self, j: int, dim: int, parent: Ints, coordinates: Ints) -> Ints:
        """Number the lines of a grid along one dim, over all parents.

        Args:
            j: Number of a level.
            dim: Dim of its shape.
            parent: Parents, `[n]`.
            coordinates: Coordinates of a unit on the line, `[dims, n]`.

        Returns:
            Line numbers, `[n]`.
        """
        number = parent
        for other, extent in enumerate(self.wires[j].level.extents):
            if other != dim:
                number = number * extent + coordinates[other]
        return number

    def line_seconds(self, j: int, dim: int, line: Ints, start: Ints, end: Ints, nbytes: Floats) -> float:
        """Price bytes that travel along lines of one dim, each on its shortest arc.

        Args:
            j: Number of a level.
            dim: Dim of its shape.
            line: Line numbers, `[n]`.
            start: Coordinates they start at, `[n]`.
            end: Coordinates they end at, `[n]`.
            nbytes: Bytes of each, `[n]`.

        Returns:
            Seconds on the busiest link.
        """
        wires = self.wires[j]
        extent = wires.level.extents[dim]
        lines = wires.units // extent
        cyclic = wires.level.link != "mesh"
        ahead = (end - start) % extent if cyclic else end - start
        forward = (ahead > 0) & (2 * ahead <= extent) if cyclic else ahead > 0
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
            hops = (start - end)[backward] % extent
            load = _spread(line[backward], (end[backward] + 1) % extent, hops, nbytes[backward], lines, extent)
            worst = max(worst, float((load / rate_backward).max()))
        return worst / (wires.level.bandwidth * wires.level.uplinks)

    def capacity(self, j: int) -> Floats:
        """Bound the bytes a second that can enter, or leave, each unit of a level.

        Args:
            j: Number of a level.

        Returns:
            Bytes per second, `[units]`. A unit on a ring, torus or mesh also takes what enters its parent.
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
        """List the levels' latencies.

        Returns:
            Seconds, `[L]`.
        """
        return np.array([wires.level.latency for wires in self.wires])


def _spread(line: Ints, first: Ints, hops: Ints, nbytes: Floats, lines: int, extent: int) -> Floats:
    """Load every link from `first` on, `hops` of them around the line: `[lines, extent]`."""
    base = line * (extent + 1)
    last = first + hops
    wrap = last > extent
    edges = [base + first, base + np.minimum(last, extent), base[wrap], base[wrap] + last[wrap] - extent]
    signs = [nbytes, -nbytes, nbytes[wrap], -nbytes[wrap]]
    steps = np.bincount(np.concatenate(edges), np.concatenate(signs), lines * (extent + 1))
    return cast(Floats, np.cumsum(steps.reshape(lines, extent + 1), axis=1)[:, :extent])
