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
    """By level, innermost first: devices of a child, children, bytes per second of its ports, seconds of a hop.

    `captured` says that no host starts a collective, as in a graph that was captured: it starts as fast as links do.
    """

    unit: tuple[int, ...]
    size: tuple[int, ...]
    rate: tuple[float, ...]
    latency: tuple[float, ...]
    captured: bool = False

    @staticmethod
    def of(topology: Topology, p: Parameters, captured: bool = False) -> LevelRates:
        """Read a topology; its innermost level links devices, the others nodes."""
        unit, sizes, rates, latencies = [1], [], [], []
        for depth, level in enumerate(reversed(topology.levels)):
            part = p.network if depth else 1.0
            sizes.append(level.size)
            rates.append(level.delivered * level.uplinks * part)
            latencies.append(level.latency)
            unit.append(unit[-1] * level.size)
        return LevelRates(tuple(unit[:-1]), tuple(sizes), tuple(rates), tuple(latencies), captured)

    def seconds(self, summed: bool, whole: bool, axes: Group, nbytes: Floats, p: Parameters) -> Floats:
        """Return the seconds of a collective of groups (see `LocalMove`); `nbytes` are of a group's whole value."""
        size: Floats = np.asarray(1.0)
        for n, _ in axes:
            size = size * n
        ring = summed or whole
        slowest: Floats = np.asarray(0.0)  # seconds a byte
        for unit, rate in zip(self.unit, self.rate, strict=True):
            inside = _within(unit, axes)
            # An all-to-all sends on from every device what is for others; a ring passes a child once. As many groups
            # are in a child as it has devices for.
            entering = (1 - inside / size) * (unit / inside if ring else unit / size)
            slowest = np.maximum(slowest, entering / rate)
        times = 1 + (summed and whole)
        rounds = _rounds(size) if ring else np.log2(np.maximum(size, 2.0))
        start = times * self._hops(axes) if self.captured else p.collective * rounds
        return np.where(size > 1, times * slowest * nbytes + start, 0.0)

    def message(self, distance: Floats, nbytes: Floats, p: Parameters) -> Floats:
        """Return the seconds in which every device sends so many bytes to one so many ids further."""
        slowest: Floats = np.zeros(np.broadcast(distance, nbytes).shape)
        for unit, size, rate in zip(self.unit, self.size, self.rate, strict=True):
            leaving = np.minimum(distance, unit)  # devices of a child whose peer is outside of it
            slowest = np.maximum(slowest, np.where(distance < unit * size * 1e9, leaving * nbytes / rate, 0.0))
        return slowest + (self._hops([(np.full_like(slowest, 2.0), distance)]) if self.captured else p.collective)

    def _hops(self, axes: Group) -> Floats:
        """The seconds in which nothing goes once around a group: around each child, then around the children."""
        found: Floats = np.asarray(0.0)
        for unit, children, latency in zip(self.unit, self.size, self.latency, strict=True):
            inside, beyond = _within(unit, axes), _within(unit * children, axes)
            found = found + (np.ceil(beyond / inside) - 1) * latency
        return found


def _within(unit: int, axes: Group) -> Floats:
    """How many of a group are in a child of so many devices."""
    inside: Floats = np.asarray(1.0)
    for n, stride in axes:
        inside = inside * np.minimum(np.maximum(unit / stride, 1.0), n)
    return inside


def _rounds(size: Floats) -> Floats:
    """How many start-ups of a ring follow each other, one for two devices; those of an exchange go on together."""
    return np.maximum(size, 2.0) - 1
