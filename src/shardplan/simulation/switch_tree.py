"""`Tree`: a topology of plain switches as directed links, and which of them a message between two devices crosses.

Every unit of every level hangs on its parent's switch by full-duplex links, one an uplink: `up` carries what leaves the
unit, `down` what enters it. A message whose outermost differing level is j crosses up links of the sender's units at
levels L-1, ..., j, then down links of the receiver's units at levels j, ..., L-1, in this order. Of several uplinks it
takes the rail of the device at its own end, as a `Fabric` has it; units with fewer devices than uplinks have a link a
device, of all that is dealt to it. With `shared`, the devices of a unit of the last level but one have no links of
their own: they share one half-duplex link, `local`, as processes on one host share its loopback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardplan.errors import TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology

WAYS = ("up", "down", "local")


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """One direction of one link."""

    level: int  # whose unit it belongs to
    unit: int  # its number over the whole level
    port: int  # its number among the links of the unit
    way: str  # `up` (out of the unit), `down` (into it) or `local` (inside it, both ways)
    name: str  # such as `node[1] up`, or `node[1].3 up` of several
    bandwidth: float  # bytes per second


@dataclass(frozen=True)
class Tree:
    """A topology whose levels are switches, as directed edges.

    Raises `TopologyError` where a level is no switch, or reduces in the network, and where links are `shared` and a
    level has several uplinks: the devices of a host have one address, by which they cannot be told apart.

    >>> from shardplan.hardware.level import Level
    >>> levels = (Level("node", 2, "switch", 1e7, 0.0, uplinks=2), Level("gpu", 2, "switch", 1e8, 0.0))
    >>> tree = Tree(Topology("", levels))
    >>> [tree.edges[k].name for k in tree.path(0, 3)]
    ['gpu[0] up', 'node[0].0 up', 'node[1].1 down', 'gpu[3] down']
    """

    topology: Topology
    shared: bool = False  # the devices of an innermost parent share one `local` edge
    edges: tuple[DirectedLink, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what is no tree, and number the edges: level by level, link by link, up before down."""
        for level in self.topology.levels:
            _check(level, self.shared)
        edges: list[DirectedLink] = []
        for j, wires in enumerate(self.fabric.wires[: len(self.topology.levels) - self.shared]):
            rates = np.broadcast_to(wires.rates, 2 * wires.units * wires.ways)
            for port in range(wires.units * wires.ways):
                unit, own = divmod(port, wires.ways)
                name = f"{wires.level.name}[{unit}]" + (f".{own}" if wires.ways > 1 else "")
                for back, way in enumerate(WAYS[:2]):
                    rate = float(rates[back * wires.units * wires.ways + port])
                    edges.append(DirectedLink(j, unit, own, way, f"{name} {way}", rate))
        if self.shared:
            edges += [self._local(unit) for unit in range(self.topology.size // self.topology.level_sizes[-1])]
        object.__setattr__(self, "edges", tuple(edges))

    def _local(self, unit: int) -> DirectedLink:
        last = len(self.topology.levels) - 1
        level = self.topology.levels[last]
        parent = self.topology.levels[last - 1].name if last else "all"
        return DirectedLink(last, unit, 0, WAYS[2], f"{parent}[{unit}] local", level.delivered_rate)

    @cached_property
    def fabric(self) -> Fabric:
        """The resources of the topology, which say the rails."""
        return Fabric(self.topology)

    @cached_property
    def _index(self) -> dict[tuple[int, int, int, str], int]:
        return {(e.level, e.unit, e.port, e.way): k for k, e in enumerate(self.edges)}

    def rail(self, j: int, device: int) -> tuple[int, int]:
        """Return the unit of level j that a device, a topology id, is in, and by which of its links it leaves that."""
        way = int(self.fabric.rail(j, np.array(device)))
        return divmod(way, self.fabric.wires[j].ways)

    def path(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Return the indices of the edges that a message crosses, in order; none where the two topology ids are one."""
        depth = len(self.topology.levels)
        first = int(self.fabric.outermost_level(np.array(sender), np.array(receiver)))
        if first == depth:
            return ()
        last = depth - 1 if self.shared else depth
        if first == last:
            return (self._index[depth - 1, sender // self.topology.level_sizes[-1], 0, "local"],)
        ups = [self._index[j, *self.rail(j, sender), "up"] for j in range(last - 1, first - 1, -1)]
        downs = [self._index[j, *self.rail(j, receiver), "down"] for j in range(first, last)]
        return (*ups, *downs)

    def edge_bytes(self, traffic: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
        """Return the bytes over every edge, of traffic given as bytes by (sender, receiver), both topology ids."""
        out = np.zeros(len(self.edges), dtype=np.int64)
        for (sender, receiver), nbytes in traffic.items():
            out[list(self.path(sender, receiver))] += nbytes
        return tuple(out.tolist())


def _check(level: Level, shared: bool) -> None:
    where = f"level {level.name!r}"
    if level.link != "switch":
        raise TopologyError(
            f"{where} is a {level.link}; a tree of links has switches only, since on a {level.link} messages pass "
            "through other units"
        )
    if shared and level.uplinks != 1:
        raise TopologyError(
            f"{where} has {level.uplinks} uplinks; where the devices of a node share one link they have one address, "
            "so which uplink each takes cannot be said; use leaves of their own, or one uplink of the whole bandwidth"
        )
    if level.reduces:
        raise TopologyError(f"{where} reduces in the network; the links of a tree only forward")
