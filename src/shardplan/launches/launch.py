"""Launches: where an existing job put its mesh, and how the rings of its groups pass from unit to unit.

A ring passes as the topology's library makes it: in the order of a group's members, or, of a library that orders
members itself, from node to node in the order of their first members and inside a node without detour.
A launch is one array, mesh coordinate -> topology device id; readers (`hostfile`, `megatron`, `frameworks`) all
make it. What it is as a placement is found in `verdict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.core import validation
from shardplan.core.mesh import Mesh
from shardplan.errors import TopologyError, excerpt
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.aggregate import GroupLayout, units_spanned
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Launch:
    """A mesh on the devices where it runs.

    Invariants: the mesh has as many devices as the topology, and every device of it stands once; else `TopologyError`.

    >>> launch = Launch(Mesh(data=4, tensor=2), Topology.load("nominal"), (0, 2, 4, 6, 1, 3, 5, 7))
    >>> launch.groups(("tensor",)).tolist()
    [[0, 2], [4, 6], [1, 3], [5, 7]]
    """

    mesh: Mesh  # its device ids are the ranks (or a framework's device numbers), in mesh order
    topology: Topology
    ids: tuple[int, ...]  # topology ids in mesh order
    hosts: tuple[str, ...] = ()  # names of the hosts in the order of the topology's units; empty where unknown
    by_rank: bool = False  # groups list their members by rank, as torch's `new_group` does, and not by coordinate

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh) or not isinstance(self.topology, Topology):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"a launch of {excerpt(self.mesh)} on {excerpt(self.topology)}; legal are a Mesh and a Topology"
            )
        ids = validation.items("the ids of a launch", self.ids, "topology ids", TopologyError)
        ids = tuple(validation.integer("a topology id", i, TopologyError) for i in ids)
        object.__setattr__(self, "ids", ids)
        topology, count = self.topology, len(self.ids)
        if count != self.mesh.size:
            raise TopologyError(f"{count} device ids for mesh {self.mesh}; legal is one for each of {self.mesh.size}")
        if count != topology.size:
            raise TopologyError(
                f"mesh {self.mesh} has {count} devices, topology {topology.name!r} has {topology.size} "
                f"({topology.describe()}); a launch covers its topology: give the topology the launch's size, as in "
                f"Topology.load(..., {topology.levels[0].name}s=...)"
                + (" or with --nodes" if topology.levels[0].name == "node" else "")
            )
        topology.check_ids(self.ids)
        if len(set(self.ids)) != count:
            twice = next(d for k, d in enumerate(self.ids) if d in self.ids[:k])
            first, second = [k for k, d in enumerate(self.ids) if d == twice][:2]
            raise TopologyError(
                f"device {twice} stands at the coordinates {self.mesh.coordinates(first)} and "
                f"{self.mesh.coordinates(second)} of mesh {self.mesh}; each device stands once"
            )

    @staticmethod
    def of(placement: Placement) -> Launch:
        """Return the launch of a placement as its `device_mesh()` says."""
        return Launch(placement.mesh, placement.topology, tuple(placement.device_mesh().reshape(-1).tolist()))

    @property
    def array(self) -> Ints:
        """Topology ids in the mesh's shape."""
        return np.array(self.ids, dtype=np.int64).reshape(self.mesh.sizes)

    def places(self, axes: Sequence[str]) -> Ints:
        """Return the groups over axes as places in mesh order, int64 [groups, k], in member order.

        Groups vary over the axes, the first major. Raises `LayoutError` for an axis that the mesh has not.
        """
        places = self.mesh.group_places(axes)
        if self.by_rank:
            ranks = self.mesh.ids[places]
            places = np.take_along_axis(places, np.argsort(ranks, axis=1), axis=1)
        return places

    def groups(self, axes: Sequence[str]) -> Ints:
        """Return the groups over axes as topology ids, int64 [groups, k], in member order; raises as `places`."""
        return np.array(self.ids, dtype=np.int64)[self.places(axes)]

    def device_of_rank(self) -> dict[int, int]:
        """Return the topology id of every rank."""
        return dict(zip(self.mesh.devices, self.ids, strict=True))


@dataclass(frozen=True, slots=True)
class Ring:
    """How the groups over some axes pass from unit to unit, closing the ring."""

    axes: tuple[str, ...]  # major first
    crossings: tuple[int, ...]  # for each level, the pairs of neighbours in different units, over all groups
    contiguous: tuple[int, ...]  # the same if every group visited a unit once: the least possible

    @property
    def detours(self) -> tuple[int, ...]:
        """Crossings too many, for each level."""
        return tuple(a - b for a, b in zip(self.crossings, self.contiguous, strict=True))


def sharing(groups: Ints, topology: Topology) -> tuple[int, ...]:
    """Return for each level the most groups that leave one of its units, and so share its uplinks.

    Those have members inside the unit and outside it; `groups` are topology ids, int64 [groups, k].

    >>> sharing(np.arange(16).reshape(2, 8).T, Topology.load("dgx-a100", nodes=2))
    (8, 1)
    """
    return tuple(
        _most_alike(groups[spans > 1] // stride)
        for stride, spans in zip(topology.strides, units_spanned(groups, topology), strict=True)
    )


def crowding(groups: Ints, fabric: Fabric) -> tuple[int, ...]:
    """Return for each level the most groups that leave a unit by one of its ports, or by its links.

    Those have a member with its rail there; `groups` are topology ids, int64 [groups, k].

    >>> crowding(np.arange(16).reshape(2, 8).T, Fabric(Topology.load("dgx-a100", nodes=2)))
    (1, 1)
    """
    most: list[int] = []
    for j, (wires, spans) in enumerate(zip(fabric.wires, units_spanned(groups, fabric.topology), strict=True)):
        leaving = groups[spans > 1]
        most.append(_most_alike(fabric.rail(j, leaving) if wires.level.link == "switch" else leaving // wires.stride))
    return tuple(most)


def _most_alike(where: Ints) -> int:
    """The most rows, [groups, k], that have the same number in them."""
    width = int(where.max(initial=0)) + 1
    pairs = np.unique(where + np.arange(len(where))[:, None] * width)
    return int(np.bincount(pairs % width, minlength=1).max())


def ring_of(launch: Launch, axes: Sequence[str], listed: bool = False) -> Ring:
    """Return how often the rings over axes (major first) cross each level, beside the least possible.

    They are those of the topology's library; where `listed`, in the order of members whatever the library makes of it.
    Raises `LayoutError` for an axis that the mesh has not.
    """
    topology, groups = launch.topology, launch.groups(axes)
    fabric = Fabric(topology)
    if listed or fabric.library.member_order:
        edges = [np.count_nonzero(g != np.roll(g, -1, axis=1)) for g in (groups // s for s in topology.strides)]
    else:
        edges = GroupLayout(groups, fabric).walk.edges.sum(axis=1)
    return Ring(
        tuple(axes), tuple(map(int, edges)), tuple(int(u[u > 1].sum()) for u in units_spanned(groups, topology))
    )


def detour_text(ring: Ring, topology: Topology, first: int = 0) -> str:
    """Say where rings pass between units too often, at the outermost level from `first` on; empty if nowhere."""
    for j, level in list(enumerate(topology.levels))[first:]:
        if ring.detours[j]:
            return (
                f"the rings over {quote_axes(ring.axes)} pass between {plural(level.name)} {ring.crossings[j]} times, "
                f"{ring.contiguous[j]} would do"
            )
    return ""


def article(noun: str) -> str:
    """Return a noun with its article, as it is spoken: a NIC, an uplink, a unit.

    >>> article("uplink of a rack"), article("node")
    ('an uplink of a rack', 'a node')
    """
    return f"{'an' if noun[0].lower() in 'aeiou' and not noun.startswith('uni') else 'a'} {noun}"


def count_units(number: int | str, name: str) -> str:
    """Return a number of units of a level in words; a text is a range of numbers.

    >>> count_units(1, "pod"), count_units("2 to 3", "switch")
    ('1 pod', '2 to 3 switches')
    """
    return f"{number} {name if str(number) == '1' else plural(name)}"


def plural(name: str) -> str:
    """Return what several units of a level are called."""
    if name.endswith("is"):  # chassis
        return name
    return f"{name}es" if name.endswith(("s", "x", "ch", "sh")) else f"{name}s"


def quote_axes(axes: Sequence[str]) -> str:
    """Return names of axes as they stand in a sentence."""
    return ", ".join(f"`{axis}`" for axis in axes)
