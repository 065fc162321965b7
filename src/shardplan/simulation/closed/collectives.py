"""`CollectivePrices`: what collectives and messages of many groups cost, as `hardware.prices` says, over arrays.

A group lies along axes, each of a size and a stride in device ids; every device is in one group, and all groups are on
the topology's resources at once. What the library takes for it is the least of a few lines in bytes
(`hardware.prices.affine_costs`), found once for every kind and shape of group; thousands of strategies share a
hundred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.hardware.prices.affine_costs import affine_costs, affine_message_costs, least_lines
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.configurations import distinct
from shardplan.simulation.closed.parameters import Parameters

Floats = np.ndarray
Ints = np.ndarray
Group = Sequence[tuple[Floats, Floats]]  # by axis: its size and its stride
Lines = tuple[tuple[float, float], ...]  # seconds at 0 bytes, and seconds a byte
Axes = tuple[tuple[int, int], ...]  # the same of one group, outermost first
# By whether a move sums and whether it makes whole (see `LocalMove`): the collective that does so.
KINDS: Mapping[tuple[bool, bool], str] = {
    (True, True): "all_reduce",
    (True, False): "reduce_scatter",
    (False, True): "all_gather",
    (False, False): "all_to_all",
}


class AffineCosts(NamedTuple):
    """Lines of which the least is paid: seconds at 0 bytes and seconds a byte of a group's whole value, [lines, n]."""

    start: Floats
    slope: Floats

    def seconds(self, nbytes: Floats) -> Floats:
        """Return the seconds of so many bytes, [n] or [rows, n]; nothing is free."""
        least = self.start[0] + self.slope[0] * nbytes
        for start, slope in zip(self.start[1:], self.slope[1:], strict=True):
            np.minimum(least, start + slope * nbytes, out=least)
        return np.where(nbytes > 0, least, 0.0)


def with_network(topology: Topology, p: Parameters) -> Topology:
    """Return a topology whose levels outside the innermost reach what the machine's network does."""
    *outer, inner = topology.levels
    slower = [replace(level, efficiency=min(1.0, level.efficiency * p.network)) for level in outer]
    return replace(topology, levels=(*slower, inner))


@dataclass(slots=True, eq=False)
class CollectivePrices:
    """Prices collectives of groups on one fabric; `known` remembers the lines of each.

    >>> prices = CollectivePrices.of(Topology.load("nominal", devices=8), Parameters(network=1.0))
    >>> group = [(np.array([2, 8]), np.array([4, 1]))]
    >>> prices.lines(False, True, group).seconds(np.array([1e6, 1e6])).round(9).tolist()
    [1.5e-05, 5.25e-05]
    """

    fabric: Fabric
    known: dict[Hashable, Lines] = field(default_factory=dict["Hashable", Lines])

    @staticmethod
    def of(topology: Topology, p: Parameters, captured: bool = False) -> CollectivePrices:
        """Read a topology; `captured` says that no host starts a collective, as in a graph that was captured.

        The same are returned for the same arguments, with what they know: a fit asks for one machine again and again.
        """
        return _collective_prices(topology, p.network, captured)

    def lines(self, summed: bool, whole: bool, axes: Group) -> AffineCosts:
        """Return the cost of a collective of groups (see `LocalMove`), of bytes of a group's whole value."""
        kind = KINDS[summed, whole]

        def of_group(one: tuple[int, ...]) -> Lines:
            key = kind, one
            if key not in self.known:
                pairs = normal_axes(tuple(zip(one[::2], one[1::2], strict=True)))
                size = math.prod(n for n, _ in pairs)
                # A member holds the whole before it is reduced, and its part of what is gathered or exchanged.
                held = 1.0 if summed else 1.0 / size
                offered = self._offered(kind, pairs) if size > 1 else ((0.0, 0.0),)
                self.known[key] = tuple((start, slope * held) for start, slope in offered)
            return self.known[key]

        return _of_each([x for axis in axes for x in axis], of_group)

    def message_lines(self, distance: Floats, stages: Ints, across: bool = False) -> AffineCosts:
        """Return the cost of messages in which every device sends to the one so many ids further, but for a last stage.

        They are of a step from stage to stage in groups of `stages` devices, all of them at once; one stage sends none.
        With `across` the first stage alone sends, to the last.
        """

        def of_distance(one: tuple[int, ...]) -> Lines:
            key, (step, size) = ("message", across, *one), one
            if size == 1:
                return ((0.0, 0.0),)
            if key not in self.known:
                ids = np.arange(_period(self.fabric.topology, size * step), dtype=np.int64)
                hops = size - 1 if across else 1
                sender = ids[(ids // step) % size < size - hops]
                self.known[key] = affine_message_costs(sender, sender + hops * step, self.fabric)
            return self.known[key]

        return _of_each([distance, stages], of_distance)

    def round_lines(self, axes: Group) -> AffineCosts:
        """Return the cost of messages in which every device of a group sends to the next one around it, all at once."""

        def of_group(one: tuple[int, ...]) -> Lines:
            key = "round", one
            if key not in self.known:
                pairs = normal_axes(tuple(zip(one[::2], one[1::2], strict=True)))
                found: Lines = ((0.0, 0.0),)
                if pairs:
                    members = group_members(pairs, self.fabric.topology)
                    found = affine_message_costs(
                        members.reshape(-1), np.roll(members, -1, axis=1).reshape(-1), self.fabric
                    )
                self.known[key] = found
            return self.known[key]

        return _of_each([x for axis in axes for x in axis], of_group)

    def _offered(self, kind: str, axes: Axes) -> Lines:
        key = "collective", kind, axes
        if key not in self.known:
            self.known[key] = affine_costs(kind, group_members(axes, self.fabric.topology), self.fabric)
        return self.known[key]


@lru_cache(maxsize=64)
def _collective_prices(topology: Topology, network: float, captured: bool) -> CollectivePrices:
    delivered = with_network(topology, Parameters(network=network))
    return CollectivePrices(Fabric(delivered, launch=0.0 if captured else None))


def normal_axes(axes: Axes) -> Axes:
    """Return axes outermost first, without those of size 1, neighbours joined."""
    found: list[tuple[int, int]] = []
    for size, stride in sorted((a for a in axes if a[0] > 1), key=lambda a: a[1]):
        end = found[-1][0] * found[-1][1] if found else 0
        if found and stride == end:
            last, first = found.pop()
            found.append((last * size, first))
        else:
            found.append((size, stride))
    return tuple(reversed(found))


def group_members(axes: Axes, topology: Topology) -> Ints:
    """Return the ids of all groups along axes, int64 [groups, members], on as many devices as tell them apart."""
    ids = np.arange(_period(topology, max(size * stride for size, stride in axes)), dtype=np.int64)
    first = ids
    for size, stride in axes:
        first = first[(first // stride) % size == 0]
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return first[:, None] + offsets


def _period(topology: Topology, span: int) -> int:
    """Return the devices after which groups of a span lie alike in the units that they cross, at most all."""
    levels = zip(topology.levels, topology.strides, strict=True)
    whole = math.lcm(span, *(stride for level, stride in levels if stride % span or level.rails))  # leaves are shared
    return min(whole, max(topology.size // span, 1) * span)


def _of_each(columns: Sequence[Floats], lines_of: Callable[[tuple[int, ...]], Lines]) -> AffineCosts:
    """Return the lines of every row of some columns of numbers, worked out once for each that is distinct.

    Columns are [n], or [alternatives, n]: then the lines of all alternatives together.
    """
    shape = np.broadcast_shapes(*(x.shape for x in columns))
    whole = [np.broadcast_to(x, shape).astype(np.int64).reshape(-1) for x in columns]
    places, back = distinct(whole)
    found = [lines_of(one) for one in zip(*(x[places].tolist() for x in whole), strict=True)]
    if len(shape) == 2:
        sets, back = np.unique(np.sort(back.reshape(shape), axis=0), axis=1, return_inverse=True)
        found = [least_lines({line for k in np.unique(one) for line in found[k]}) for one in sets.T]
    most = max(map(len, found))
    table = np.array([[*one, *[one[-1]] * (most - len(one))] for one in found])
    start, slope = table[back.reshape(-1)].T
    return AffineCosts(start, slope)
