"""What a collective over digits of a placement costs, as affine functions of its bytes: alpha + beta * bytes.

The groups of a collective over some digits (`digit_order.Digit`) lie regularly, so the price depends on the digits'
sizes and strides alone; it is asked for by every program, placement and payload of a search, and worked out once. A
placement does not matter here: digits and members are in topology ids. Where no link is degraded,
groups in different units of the levels outside the digits do the same, side by side, and only one unit's are looked at:
outside the outermost digit's parent always, and of the outermost digit's level itself where its link is a switch, whose
ports are each unit's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.core.pattern import Groups
from shardplan.hardware.digit_order import Digit
from shardplan.hardware.prices.cost import offers, price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology

Ints = NDArray[np.int64]
Offers = tuple[tuple[float, float], ...]  # seconds at 0 bytes (alpha) and seconds a byte (beta), one of an algorithm
SizeStride = tuple[int, int]  # of a digit


class AlphaBeta:
    """The prices of collectives on a topology under one algorithm (as for `cost.price`), remembered."""

    __slots__ = ("_known", "algorithm", "fabric")

    def __init__(self, topology: Topology, algorithm: str = "auto") -> None:
        """Start with no prices."""
        self.fabric = Fabric(topology)
        self.algorithm = algorithm
        self._known: dict[tuple[str, tuple[SizeStride, ...], tuple[SizeStride, ...]], Offers] = {}

    def offers(self, kind: str, varies: Sequence[Digit], zero: Sequence[Digit] = ()) -> Offers:
        """Return what each algorithm asks for a collective over the groups along some digits; the least is paid.

        Args:
            kind: As in `Groups.kind`.
            varies: The digits along which members differ, in member order.
            zero: Digits at which only coordinate 0 takes part.

        Returns:
            Pairs of seconds at 0 bytes and seconds per byte that a member holds before.
        """
        key = kind, tuple((d.size, d.stride) for d in varies), tuple((d.size, d.stride) for d in zero)
        found = self._known.get(key)
        if found is None:
            base = self._first_members(varies, zero)
            found = self._known[key] = offers(kind, base[:, None] + offsets(key[1]), self.fabric, self.algorithm)
        return found

    def seconds(self, kind: str, varies: Sequence[Digit], zero: Sequence[Digit], nbytes: float) -> float:
        """Return the seconds of a collective whose members all hold `nbytes` before; the others as for `offers`."""
        return min(alpha + beta * nbytes for alpha, beta in self.offers(kind, varies, zero))

    def uneven_seconds(self, kind: str, varies: Sequence[Digit], first: Ints, nbytes: NDArray[np.float64]) -> float:
        """Return the seconds of a collective whose groups hold different amounts; `kind`, `varies` as for `offers`.

        `first` is the first member of every group, topology ids [G]; a member of it holds `nbytes`, [G], before.
        """
        members = first[:, None] + offsets([(d.size, d.stride) for d in varies])
        return price(Groups(kind, members, nbytes), self.fabric, self.algorithm).seconds

    def _first_members(self, varies: Sequence[Digit], zero: Sequence[Digit]) -> Ints:
        """The first member of every group that is looked at: those of one unit where the others do the same."""
        topology = self.fabric.topology
        ids = np.arange(topology.size)
        if all(level == level.sound() for level in topology.levels):
            top = min(d.level for d in varies)
            switch = topology.levels[top].link == "switch"
            ids = ids[: topology.strides[top] * (1 if switch else topology.levels[top].size)]
        for d in (*varies, *zero):
            ids = ids[ids // d.stride % d.size == 0]
        return ids


def offsets(digits: Sequence[SizeStride]) -> Ints:
    """Return what each member of a group along digits adds to the first member's topology id: int64 [k]."""
    out = np.zeros(1, dtype=np.int64)
    for size, stride in digits:
        out = (out[:, None] + np.arange(size) * stride).reshape(-1)
    return out


@lru_cache(maxsize=64)  # a topology at hand under one algorithm is an entry: a process has a few
def alpha_beta(topology: Topology, algorithm: str = "auto") -> AlphaBeta:
    """Return the prices on a topology, shared by all who ask."""
    return AlphaBeta(topology, algorithm)
