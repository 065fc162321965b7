"""What collectives cost on the levels of a topology, for many groups at once.

A group takes one device of every `stride`, `size` in all; every device is in one, and all groups are at it at once, as
in `hardware.prices`. What enters a child of a level shares the child's ports with the other groups that are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.parameters import Parameters

Floats = np.ndarray


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

    def seconds(self, summed: bool, whole: bool, size: Floats, stride: Floats, nbytes: Floats, p: Parameters) -> Floats:
        """Return the seconds of a collective of groups (see `LocalMove`); `nbytes` are of a group's whole value."""
        slowest: Floats = np.zeros(np.broadcast(size, stride, nbytes).shape)
        for unit, rate in zip(self.unit, self.rate, strict=True):
            inside = np.clip(unit / stride, 1, size)  # of a group, in a child
            # An all-to-all sends on from every device what is for others; a ring passes a child once.
            entering = nbytes * (1 - inside / size) * (1.0 if summed or whole else inside / size)
            groups = unit / inside
            slowest = np.maximum(slowest, np.where(inside < size, entering * groups / rate, 0.0))
        rounds = _rounds(size) if summed or whole else np.log2(np.maximum(size, 2.0))
        return np.where(size > 1, (1 + (summed and whole)) * slowest + p.collective * rounds, 0.0)

    def message(self, distance: Floats, nbytes: Floats, p: Parameters) -> Floats:
        """Return the seconds in which every device sends so many bytes to one so many ids further."""
        slowest: Floats = np.zeros(np.broadcast(distance, nbytes).shape)
        for unit, size, rate in zip(self.unit, self.size, self.rate, strict=True):
            leaving = np.minimum(distance, unit)  # devices of a child whose peer is outside of it
            slowest = np.maximum(slowest, np.where(distance < unit * size * 1e9, leaving * nbytes / rate, 0.0))
        return slowest + p.collective


def _rounds(size: Floats) -> Floats:
    """How many start-ups of a ring follow each other, one for two devices; those of an exchange go on together."""
    return np.maximum(size, 2.0) - 1
