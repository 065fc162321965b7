"""Seconds without a topology: one flat switch of 50 GB/s and 5 us a round, each step at its worst device."""

from __future__ import annotations

from itertools import pairwise

from shardplan.core.accounting import Account, books_of
from shardplan.core.program import Program
from shardplan.core.walk import step_patterns, walk
from shardplan.hardware.prices.critical_path import Window, windows

# One 400 Gbit/s network port a device and the latency of a network: to compare plans by, of no cluster in particular.
BANDWIDTH = 50e9  # bytes per second
LATENCY = 5e-6  # seconds per round
DESCRIPTION = "nominal switch, 50 GB/s, 5 us"


def nominal_steps(program: Program, books: Account) -> list[float]:
    """Return the seconds of every step: rounds, those of every chunk counted, and bytes at the worst device."""
    return [
        visit.nested.times * nominal_seconds(visit.nested.body, books_of(visit.nested.body))
        if visit.nested and not visit.nested.at_once
        else latencies * LATENCY + received / BANDWIDTH
        for visit, latencies, received in zip(walk(program), books.latencies, books.step_received, strict=True)
    ]


def nominal_windows(program: Program, books: Account) -> list[Window]:
    """Return when every step runs."""
    return windows(step_patterns(program), nominal_steps(program, books))


def nominal_seconds(program: Program, books: Account) -> float:
    """Return the seconds of a program."""
    pairs = pairwise(program.steps)
    if all(not set(before.results).isdisjoint(step.operands) for before, step in pairs):
        # Each waits for the one before, whoever takes part: messages of 65,536 devices need not be listed.
        return sum(nominal_steps(program, books), 0.0)
    return max((window.end for window in nominal_windows(program, books)), default=0.0)


def nominal_bound(nbytes: int) -> float:
    """Return the least seconds in which a device can receive `nbytes`."""
    return nbytes / BANDWIDTH + (LATENCY if nbytes else 0.0)
