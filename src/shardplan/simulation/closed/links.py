"""What collectives cost on the levels of a topology, for many groups at once.

A group lies along axes, each of a size and a stride in devices; every device is in one group, and all groups are at it
at once, as in `hardware.prices`. What enters a child of a level shares the child's ports with the other groups in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.parameters import Parameters

Floats = np.ndarray
Group = Sequence[tuple[Floats, Floats]]  # by axis: its size and its stride


@dataclass(frozen=True, slots=True, eq=False)
class LevelRates:
    """By level, innermost first: devices of a child, children, bytes per second of its ports, seconds of a hop."""

    unit: tuple[int, ...]
    size: tuple[int, ...]
    rate: tuple[float, ...]
    latency: tuple[float, ...]

    @staticmethod
    def of(topology: Topology, p: Parameters) -> LevelRates:
        """Read a topology; its innermost level links devices, the others nodes."""
        unit, sizes, rates, latencies = [1], [], [], []
        for depth, level in enumerate(reversed(topology.levels)):
            part = p.network if depth else 1.0
            sizes.append(level.size)
            rates.append(level.delivered * level.uplinks * part)
            latencies.append(level.latency)
            unit.append(unit[-1] * level.size)
        return LevelRates(tuple(unit[:-1]), tuple(sizes), tuple(rates), tuple(latencies))

    def seconds(self, summed: bool, whole: bool, axes: Group, nbytes: Floats, p: Parameters) -> Floats:
        """Return the seconds of a collective of groups (see `LocalMove`); `nbytes` are of a group's whole value."""
        size: Floats = np.asarray(1.0)
        for n, _ in axes:
            size = size * n
        ring = summed or whole
        slowest: Floats = np.asarray(0.0)  # seconds a byte
        for unit, rate in zip(self.unit, self.rate, strict=True):
            inside: Floats = np.asarray(1.0)  # of a group, in a child
            for n, stride in axes:
                inside = inside * np.minimum(np.maximum(unit / stride, 1.0), n)
            # An all-to-all sends on from every device what is for others; a ring passes a child once. As many groups
            # are in a child as it has devices for.
            entering = (1 - inside / size) * (unit / inside if ring else unit / size)
            slowest = np.maximum(slowest, entering / rate)
        return np.where(size > 1, (1 + (summed and whole)) * slowest * nbytes + p.collective * _rounds(size), 0.0)

    def message(self, distance: Floats, nbytes: Floats, p: Parameters) -> Floats:
        """Return the seconds in which every device sends so many bytes to one so many ids further."""
        slowest: Floats = np.zeros(np.broadcast(distance, nbytes).shape)
        for unit, size, rate in zip(self.unit, self.size, self.rate, strict=True):
            leaving = np.minimum(distance, unit)  # devices of a child whose peer is outside of it
            slowest = np.maximum(slowest, np.where(distance < unit * size * 1e9, leaving * nbytes / rate, 0.0))
        return slowest + p.collective


def _rounds(size: Floats) -> Floats:
    """How many of a collective's start-ups follow each other, one for two devices."""
    return np.log2(np.maximum(size, 2.0))
