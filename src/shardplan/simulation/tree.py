"""`Tree`: a topology of plain switches as directed links, and which of them a message between two devices crosses.

Every unit of every level hangs on its parent's switch by one full-duplex link: `up` carries what leaves the unit,
`down` what enters it. A message whose outermost differing level is j crosses the up links of the sender's units at
levels L-1, ..., j, then the down links of the receiver's units at levels j, ..., L-1, in this order. With `shared`, the
devices of a unit of the last level but one have no links of their own: they share one half-duplex link, `local`, as
processes on one host share its loopback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardplan.errors import TopologyError
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology

WAYS = ("up", "down", "local")


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """One direction of one link."""

    level: int  # whose unit it belongs to
    unit: int  # its number over the whole level
    way: str  # `up` (out of the unit), `down` (into it) or `local` (inside it, both ways)
    name: str  # such as `node[1] up`
    bandwidth: float  # bytes per second


@dataclass(frozen=True)
class Tree:
    """A topology whose levels are switches with one uplink, as directed edges.

    Raises `TopologyError` where a level is no switch, has several uplinks, or reduces in the network.

    >>> from shardplan.hardware.level import Level
    >>> levels = (Level("node", 2, "switch", 1e7, 0.0), Level("gpu", 2, "switch", 1e8, 0.0))
    >>> tree = Tree(Topology("", levels))
    >>> [tree.edges[k].name for k in tree.path(0, 3)]
    ['gpu[0] up', 'node[0] up', 'node[1] down', 'gpu[3] down']
    """

    topology: Topology
    shared: bool = False  # the devices of an innermost parent share one `local` edge
    edges: tuple[DirectedLink, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what is no tree, and number the edges: level by level, unit by unit, up before down."""
        for level in self.topology.levels:
            _check(level)
        edges: list[DirectedLink] = []
        for j, stride in enumerate(self.topology.strides):
            if self.shared and j == len(self.topology.levels) - 1:
                continue
            edges += [self._edge(j, unit, way) for unit in range(self.topology.size // stride) for way in WAYS[:2]]
        if self.shared:
            edges += [self._local(unit) for unit in range(self.topology.size // self.topology.level_sizes[-1])]
        object.__setattr__(self, "edges", tuple(edges))

    def _edge(self, j: int, unit: int, way: str) -> DirectedLink:
        level = self.topology.levels[j]
        return DirectedLink(
            j, unit, way, f"{level.name}[{unit}] {way}", level.bandwidth * dict(level.degraded).get(unit, 1.0)
        )

    def _local(self, unit: int) -> DirectedLink:
        last = len(self.topology.levels) - 1
        level = self.topology.levels[last]
        parent = self.topology.levels[last - 1].name if last else "all"
        return DirectedLink(last, unit, WAYS[2], f"{parent}[{unit}] local", level.bandwidth)

    @cached_property
    def _index(self) -> dict[tuple[int, int, str], int]:
        return {(e.level, e.unit, e.way): k for k, e in enumerate(self.edges)}

    def path(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Return the indices of the edges that a message crosses, in order; none where the two topology ids are one."""
        strides = self.topology.strides
        depth = len(strides)
        units = [(sender // s, receiver // s) for s in strides]
        first = next((j for j in range(depth) if units[j][0] != units[j][1]), depth)
        if first == depth:
            return ()
        last = depth - 1 if self.shared else depth
        if first == last:
            return (self._index[depth - 1, sender // self.topology.level_sizes[-1], "local"],)
        ups = [self._index[j, units[j][0], "up"] for j in range(last - 1, first - 1, -1)]
        downs = [self._index[j, units[j][1], "down"] for j in range(first, last)]
        return (*ups, *downs)

    def edge_bytes(self, traffic: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
        """Return the bytes over every edge, of traffic given as bytes by (sender, receiver), both topology ids."""
        out = np.zeros(len(self.edges), dtype=np.int64)
        for (sender, receiver), nbytes in traffic.items():
            out[list(self.path(sender, receiver))] += nbytes
        return tuple(out.tolist())


def _check(level: Level) -> None:
    where = f"level {level.name!r}"
    if level.link != "switch":
        raise TopologyError(
            f"{where} is a {level.link}; a tree of links has switches only, since on a {level.link} messages pass "
            "through other units"
        )
    if level.uplinks != 1:
        raise TopologyError(
            f"{where} has {level.uplinks} uplinks; a tree of links has one, since which flow takes which port is not "
            "modelled; give one uplink of the whole bandwidth"
        )
    if level.reduces:
        raise TopologyError(f"{where} reduces in the network; the links of a tree only forward")
