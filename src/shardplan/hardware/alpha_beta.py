"""What a collective over digits of a placement costs, as affine functions of its bytes.

The groups of a collective over some digits lie regularly, so the price depends on the digits' sizes and strides alone;
it is asked for by every program, placement and payload of a search, and worked out once. Where no link is degraded,
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
from shardplan.hardware.cost import offers, price
from shardplan.hardware.fabric import Fabric
from shardplan.hardware.level_factors import Digit
from shardplan.hardware.topology import Topology

Ints = NDArray[np.int64]
Offers = tuple[tuple[float, float], ...]
Place = tuple[int, int]


class AlphaBeta:
    """The prices of collectives on a topology under one algorithm, remembered.

    Args:
        topology: The hardware.
        algorithm: As for `cost.price`.
    """

    __slots__ = ("_known", "algorithm", "fabric")

    def __init__(self, topology: Topology, algorithm: str = "auto") -> None:
        """Start with no prices."""
        self.fabric = Fabric(topology)
        self.algorithm = algorithm
        self._known: dict[tuple[str, tuple[Place, ...], tuple[Place, ...]], Offers] = {}

    def offers(self, kind: str, varies: Sequence[Digit], zero: Sequence[Digit] = ()) -> Offers:
        """Price a collective over the groups along some digits.

        Args:
            kind: all_reduce, reduce_scatter, all_gather, reduce or broadcast.
            varies: The digits along which members differ, in member order.
            zero: Digits at which only coordinate 0 takes part.

        Returns:
            Pairs of seconds at 0 bytes and seconds per byte that a member holds before; the least sum is paid.
        """
        key = kind, tuple((d.size, d.stride) for d in varies), tuple((d.size, d.stride) for d in zero)
        found = self._known.get(key)
        if found is None:
            base = self._first_members(varies, zero)
            found = self._known[key] = offers(kind, base[:, None] + offsets(key[1]), self.fabric, self.algorithm)
        return found

    def seconds(self, kind: str, varies: Sequence[Digit], zero: Sequence[Digit], nbytes: float) -> float:
        """Price a collective whose members all hold `nbytes` before."""
        return min(alpha + rate * nbytes for alpha, rate in self.offers(kind, varies, zero))

    def uneven_seconds(self, kind: str, varies: Sequence[Digit], first: Ints, nbytes: NDArray[np.float64]) -> float:
        """Price a collective whose groups hold different amounts.

        Args:
            kind: As for `offers`.
            varies: The digits along which members differ.
            first: The first member of every group, topology ids `[G]`.
            nbytes: Bytes that a member of each holds before, `[G]`.

        Returns:
            Seconds.
        """
        members = first[:, None] + offsets([(d.size, d.stride) for d in varies])
        return price(Groups(kind, members, nbytes), self.fabric, self.algorithm).seconds

    def _first_members(self, varies: Sequence[Digit], zero: Sequence[Digit]) -> Ints:
        topology = self.fabric.topology
        ids = np.arange(topology.size)
        if not any(level.degraded for level in topology.levels):
            top = min(d.level for d in varies)
            switch = topology.levels[top].link == "switch"
            ids = ids[: topology.strides[top] * (1 if switch else topology.levels[top].size)]
        for d in (*varies, *zero):
            ids = ids[ids // d.stride % d.size == 0]
        return ids


def offsets(digits: Sequence[Place]) -> Ints:
    """Return what each member of a group along digits (size, stride) adds to the first member's topology id, `[k]`."""
    out = np.zeros(1, dtype=np.int64)
    for size, stride in digits:
        out = (out[:, None] + np.arange(size) * stride).reshape(-1)
    return out


@lru_cache(maxsize=64)
def alpha_beta(topology: Topology, algorithm: str = "auto") -> AlphaBeta:
    """Return the prices on a topology, shared by all who ask."""
    return AlphaBeta(topology, algorithm)
