"""Collectives whose load follows from how many members each unit holds, without listing flows.

All-to-all; reductions inside switches; and rings and trees of a library that orders members itself (`unit_load`).
Groups, members and bytes are as in `traffic`; in order of ids, the members in one unit are neighbours at every level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.hardware.prices.fabric import Fabric, Floats, Ints, Load
from shardplan.hardware.prices.link_loads import all_to_all_load, next_alike, ring_load
from shardplan.hardware.topology import Topology


def units_spanned(members: Ints, topology: Topology) -> Ints:
    """Return the distinct units of every group at every level: [L, G]; `members` are topology ids, [G, k].

    >>> units_spanned(np.array([[0, 1, 8], [2, 3, 4]]), Topology.load("dgx-a100", nodes=2)).tolist()
    [[2, 1], [3, 3]]
    """
    ordered = np.sort(members, axis=1)
    # Ids are mixed radix, so that sorted ids have sorted units.
    units = [ordered // stride for stride in topology.strides]
    return np.array([1 + np.count_nonzero(np.diff(u, axis=1), axis=1) for u in units])


class _Inside(NamedTuple):
    """The members of all groups at one level, in the order of `GroupLayout.device`."""

    unit: Ints
    run: Ints  # the number of the run of members of one group in one unit
    size: Ints  # of every run
    inside: Ints  # members of its run, for every member


class GroupLayout:
    """Groups on a topology, and what algorithms ask of them, each found once; of levels see `fabric`."""

    def __init__(self, members: Ints, fabric: Fabric) -> None:
        self.members, self.fabric = members, fabric
        self.k = members.shape[1]
        # In order of ids the members of a group in one unit are neighbours, at every level.
        self.device = np.sort(members, axis=1).reshape(-1)
        self.group = np.repeat(np.arange(len(members)), self.k)
        self.spanned = units_spanned(members, fabric.topology)
        self.fresh = np.diff(self.spanned, axis=0, prepend=1)  # units beyond those one level further out [L, G]

    @cached_property
    def levels(self) -> list[_Inside]:
        """The members at every level."""
        found: list[_Inside] = []
        for wires in self.fabric.wires:
            unit = self.device // wires.stride
            changes = np.diff(unit, prepend=-1) != 0
            changes[:: self.k] = True  # a run ends with its group, though the next one start in the same unit
            run = np.cumsum(changes) - 1
            size = np.bincount(run)
            found.append(_Inside(unit, run, size, size[run]))
        return found

    def count_within(self, j: int) -> Ints:
        """How many members every member reaches without crossing level j, itself too, in the order of `device`."""
        if not self.fabric.wires[j].level.rails:
            return self.levels[j].inside
        leaf, node = self.leaf_runs(j), self.levels[j + 1]
        both = _number_pairs(leaf, node.run)
        return np.bincount(leaf)[leaf] + node.inside - np.bincount(both)[both]

    def leaf_runs(self, j: int) -> Ints:
        """Number the members of one group on one leaf of level j, one of rails, in the order of `device`."""
        return _number_pairs(self.group, self.fabric.rail(j, self.device))

    def times_left(self, j: int) -> Ints:
        """How often its group's walk leaves the unit that each member is in at level j, one above nodes.

        In the order of `device`.
        """
        found = self.walk.times[j]
        assert found is not None
        keys, times = (np.append(x, 0) for x in found)
        key = self.group * self.fabric.wires[j].units + self.levels[j].unit
        at = np.searchsorted(found[0], key)
        return np.where(keys[at] == key, times[at], 0)

    @cached_property
    def strays(self) -> dict[int, Floats]:
        """What `stray_parts` finds, by level of rails."""
        return {j: self.stray_parts(j) for j, wires in enumerate(self.fabric.wires) if wires.level.rails}

    def stray_parts(self, j: int) -> Floats:
        """Return what part of what its node sends on a walk each member sends from leaf to leaf of one unit of level j.

        Members of a node share what it sends, each on its rail, and those stray whose rail some node of the unit lacks.
        Level j is one of rails; [members], in the order of `device`.
        """
        node, unit = self.levels[j + 1], self.levels[j]
        head = np.flatnonzero(np.diff(node.run, prepend=-1))
        nodes = np.bincount(unit.run[head])[unit.run]
        leaf = self.leaf_runs(j)
        on = _number_pairs(leaf, node.run)
        first = np.unique(on, return_index=True)[1]
        there = np.bincount(leaf[first])[leaf]  # nodes that have a member on this leaf
        return np.where(there < nodes, (nodes - self.times_left(j)) / nodes / node.inside, 0.0)

    @cached_property
    def nodes(self) -> Ints:
        """How many nodes every group spans, [G]."""
        return self.spanned[self.fabric.far - 1] if self.fabric.far else np.ones(len(self.members), dtype=np.int64)

    @cached_property
    def members_per_node(self) -> tuple[Ints, Ints]:
        """The least and the most members that every group has in a node, [G]."""
        if not self.fabric.far:
            whole = np.full(len(self.members), self.k)
            return whole, whole
        count = self.levels[self.fabric.far - 1].inside.reshape(-1, self.k)
        return count.min(axis=1), count.max(axis=1)

    @cached_property
    def reduces(self) -> tuple[list[bool], list[bool]]:
        """Whether each level that groups span reduces: those over nodes, and those inside one."""
        said = [w.level.reduces for w, new in zip(self.fabric.wires, self.fresh, strict=True) if bool((new > 0).any())]
        outer = int((self.fresh[: self.fabric.far] > 0).any(axis=1).sum())
        return said[:outer], said[outer:]

    @cached_property
    def walk(self) -> Crossings:
        """The walk of every group through its nodes."""
        return ring_crossings(self)

    def walk_bytes(self, volume: Floats) -> Floats:
        """Return the bytes that cross each level on a walk whose edges carry `volume`, [G]: [L]."""
        moved = self.walk.sum_edges(volume)
        for j, parts in self.strays.items():
            stray = float(volume[self.group] @ parts)
            moved[j : j + 2] += stray, -stray
        return moved


def all_to_all(laid: GroupLayout, nbytes: Floats) -> tuple[Floats, Load, Floats]:
    """Price the pairwise all-to-all: every member sends B/k to every other, on the rails of their devices.

    Returns:
        Hops over each level of every member, [L, members]: one a partner; the load; bytes for each level, [L].
    """
    k, device, fabric = laid.k, laid.device, laid.fabric
    part = np.repeat(nbytes / k, k)
    load: list[Floats | None] = []
    hops = np.zeros((len(fabric.wires), len(device)))
    together = np.full(len(device), k)  # members of the group in the same unit as this one, one level further out
    for j, (wires, (unit, run, size, _)) in enumerate(zip(fabric.wires, laid.levels, strict=True)):
        inside = laid.count_within(j)
        hops[j] = together - inside
        if wires.level.link == "switch":
            out = part * (k - inside)
            load.append(fabric.port_load(j, (device, out), (device, out)) if bool((inside < k).any()) else None)
        elif bool(hops[j].any()):
            heads = np.flatnonzero(np.diff(run, prepend=-1))
            load.append(all_to_all_load(j, heads // k, unit[heads], size, part[heads], fabric))
        else:
            load.append(None)
        together = inside
    return hops, tuple(load), (part * hops).sum(axis=1)


def other_nodes(laid: GroupLayout) -> Floats:
    """Return how many other nodes of its group every member finds across each level up to the nodes': [far, members].

    Members are in order of ids, as in `all_to_all`.
    """
    far = laid.fabric.far
    found = np.zeros((far, len(laid.device)))
    if far:
        head = np.flatnonzero(np.diff(laid.levels[far - 1].run, prepend=-1))
        together = laid.nodes[laid.group]
        for j in range(far):
            run = laid.levels[j].run
            inside = np.bincount(run[head])[run]
            if laid.fabric.wires[j].level.rails:
                inside = _nodes_beside(laid, j, head)
            found[j] = together - inside
            together = inside
    return found


def _nodes_beside(laid: GroupLayout, j: int, head: Ints) -> Ints:
    """How many nodes every member reaches whole without crossing level j, one of rails: its own, and those on its leaf.

    `head` are the first members in their nodes.
    """
    node, leaf = laid.levels[laid.fabric.far - 1].run, laid.leaf_runs(j)
    one = np.minimum.reduceat(leaf, head) == np.maximum.reduceat(leaf, head)  # nodes with all members on one leaf
    whole = np.bincount(leaf[head[one]], minlength=int(leaf.max()) + 1)[leaf]
    return np.where(one[node], whole, whole + 1)


def _number_pairs(one: Ints, other: Ints) -> Ints:
    """Number pairs of two numbers, equal for equal pairs."""
    return np.unique(one * (1 + other.max(initial=0)) + other, return_inverse=True)[1].reshape(-1)


def in_network(laid: GroupLayout, nbytes: Floats) -> tuple[Floats, Load, Floats]:
    """Price an all-reduce that switches perform: B goes up from every unit and comes down to it.

    Returns:
        Hops over each level, up and down, [L, G]; the load; bytes for each level, up and down, [L].
    """
    k, device, fabric = laid.k, laid.device, laid.fabric
    spans = laid.fresh > 0
    load: list[Floats | None] = []
    moved = np.zeros(len(fabric.wires))
    for j, (wires, (_, run, _, inside)) in enumerate(zip(fabric.wires, laid.levels, strict=True)):
        heads = np.flatnonzero(np.diff(run, prepend=-1))
        heads = heads[laid.spanned[j][heads // k] > 1]  # a group inside one unit does not leave it
        group = heads // k
        moved[j] = 2 * float((nbytes[group] * spans[j][group]).sum())
        if wires.level.link != "switch" or not heads.size:
            load.append(None)
            continue
        out = np.where(laid.spanned[j][laid.group] > 1, nbytes[laid.group] / inside, 0.0)
        load.append(fabric.port_load(j, (device, out), (device, out)))
    return 2 * spans.astype(np.float64), tuple(load), moved


@dataclass(frozen=True, slots=True, eq=False)
class Crossings:
    """How often the walk of every group through its nodes leaves each unit, by level outside a node's own."""

    edges: Floats  # crossings of units of each level by a closed walk [L, G]
    times: tuple[tuple[Ints, Ints] | None, ...]  # by level keys group * units + unit, and how often it is left

    def sum_edges(self, volume: Floats) -> Floats:
        """Return the bytes whose two ends first differ at each level, where every edge carries `volume`, [G]: [L]."""
        return np.diff(self.edges @ volume, prepend=0.0)


def ring_crossings(laid: GroupLayout) -> Crossings:
    """Walk every group's nodes in the order of their first members, and inside a node and further in without detour.

    Source: NCCL orders a communicator's nodes by their first rank (`src/init.cc`), and joins them in that order.
    """
    members, fabric = laid.members, laid.fabric
    groups = len(members)
    edges = np.where(laid.spanned > 1, laid.spanned, 0).astype(np.float64)
    times: list[tuple[Ints, Ints] | None] = [None] * len(fabric.wires)
    if fabric.far > 1:
        wires = fabric.wires[fabric.far - 1]
        number = (np.arange(groups)[:, None] * wires.units + members // wires.stride).reshape(-1)
        keys, first = np.unique(number, return_index=True)
        order = np.lexsort((first, keys // wires.units))
        group, node = keys[order] // wires.units, keys[order] % wires.units
        after = next_alike(group)
        for j in range(fabric.far - 1):
            unit = node * wires.stride // fabric.wires[j].stride
            leaves = unit != unit[after]
            edges[j] = np.bincount(group, leaves, groups)
            times[j] = np.unique(group[leaves] * fabric.wires[j].units + unit[leaves], return_counts=True)
    return Crossings(edges, tuple(times))


def unit_load(laid: GroupLayout, near: Floats, far: Floats) -> Load:
    """Return the load when every unit that a group crosses gives out and takes in some bytes: `near` or `far`, [G].

    Over ports they are dealt out to the members in the unit, each on its rail, and count as often as the group's walk
    leaves the unit; over links they are dealt out to all links between the members' units (`ring_load`).
    """
    k, device, group, fabric = laid.k, laid.device, laid.group, laid.fabric
    load: list[Floats | None] = []
    for j, (wires, (unit, run, _, inside)) in enumerate(zip(fabric.wires, laid.levels, strict=True)):
        volume = far if j < fabric.far else near
        strays = laid.strays.get(j)
        if not bool((inside < k).any()) and (strays is None or not bool(strays.any())):
            load.append(None)
        elif wires.level.link == "switch":
            out = np.where(inside < k, volume[group] / inside, 0.0)
            if j < fabric.far - 1:
                out *= laid.times_left(j)
            if strays is not None:
                out += volume[group] * strays
            load.append(fabric.port_load(j, (device, out), (device, out)))
        else:
            heads = np.flatnonzero(np.diff(run, prepend=-1))
            load.append(ring_load(j, group[heads], unit[heads], volume, fabric))
    return tuple(load)
