"""Seconds without a topology: one flat switch of 50 GB/s and 5 us a round, worst device, steps one after another."""

from __future__ import annotations

from collections.abc import Sequence

BANDWIDTH = 50e9  # bytes per second
LATENCY = 5e-6  # seconds per round
DESCRIPTION = "nominal switch, 50 GB/s, 5 us"


def nominal_seconds(rounds: Sequence[int], received: Sequence[int]) -> float:
    """Return the seconds of steps with these rounds and these bytes received at the worst device."""
    return sum(r * LATENCY + b / BANDWIDTH for r, b in zip(rounds, received, strict=True))


def nominal_bound(nbytes: int) -> float:
    """Return the least seconds in which a device can receive `nbytes`."""
    return nbytes / BANDWIDTH + (LATENCY if nbytes else 0.0)
