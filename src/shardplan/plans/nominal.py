"""Seconds without a topology: one flat switch of 50 GB/s and 5 us a round, worst device, steps one after another."""

from __future__ import annotations

# One 400 Gbit/s network port a device and the latency of a network: to compare plans by, of no cluster in particular.
BANDWIDTH = 50e9  # bytes per second
LATENCY = 5e-6  # seconds per round
DESCRIPTION = "nominal switch, 50 GB/s, 5 us"


def nominal_step(latencies: int, received: int) -> float:
    """Return the seconds of a step of so many rounds, those of every chunk counted, and bytes at the worst device."""
    return latencies * LATENCY + received / BANDWIDTH


def nominal_bound(nbytes: int) -> float:
    """Return the least seconds in which a device can receive `nbytes`."""
    return nbytes / BANDWIDTH + (LATENCY if nbytes else 0.0)
