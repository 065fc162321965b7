"""Seconds without a topology: one flat switch of 50 GB/s and 5 us a round, each step at its worst device.

A step takes the larger of what a device sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from shardplan.core.accounting import Account, books_of
from shardplan.core.pattern import StepPattern
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import step_patterns, walk
from shardplan.hardware.level import DeviceSpec, Level
from shardplan.hardware.prices.critical_path import Window, longest, windows
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.plans.bounds import boxes_on, moves_bound
from shardplan.plans.starts import Bound

# One 400 Gbit/s network port a device and the latency of a network: to compare plans by, of no cluster in particular.
BANDWIDTH = 50e9  # bytes per second
LATENCY = 5e-6  # seconds per round
# What a device does there where no work is stated, in every dtype: of the size of an H100's datasheet, of none in
# particular. A settlement weighs work against movement by it; plans have no work, and do not ask it.
DEVICE = DeviceSpec(flops=(("*", 500e12),), memory_bandwidth=2e12)
DESCRIPTION = "nominal switch, 50 GB/s, 5 us"


def nominal_steps(program: Program, books: Account) -> list[float]:
    """Return the seconds of every step: rounds, those of every chunk counted, and bytes at the worst device."""
    return [
        visit.nested.times * nominal_seconds(visit.nested.body, books_of(visit.nested.body))
        if visit.nested and not visit.nested.at_once
        else latencies * LATENCY + moved / BANDWIDTH
        for visit, latencies, moved in zip(walk(program), books.latencies, books.step_moved, strict=True)
    ]


def nominal_windows(program: Program, books: Account) -> list[Window]:
    """Return when every step runs."""
    return windows(step_patterns(program), nominal_steps(program, books))


@lru_cache(maxsize=8)  # asked for with and without latencies, and with the price of the planner on every placement
def patterns(program: Program) -> tuple[StepPattern, ...]:
    """Return `step_patterns` of a program; remembered."""
    return step_patterns(program)


def longest_path(program: Program, lengths: Sequence[float]) -> float:
    """Return the length of the longest chain of steps that wait for each other, or share a device."""
    if all(not set(before.results).isdisjoint(step.operands) for before, step in pairwise(program.steps)):
        # Each waits for the one before, whoever takes part: messages of 65,536 devices need not be listed.
        return sum(lengths, 0.0)
    return longest(patterns(program), lengths)


def nominal_seconds(program: Program, books: Account) -> float:
    """Return the seconds of a program."""
    return longest_path(program, nominal_steps(program, books))


def nominal_bound(
    sources: Sequence[TensorType], destinations: Sequence[TensorType], least: np.ndarray, ids: Sequence[int]
) -> Bound:
    """Return a lower bound of moves whose sources and destinations are paired in order.

    `least` is what each of the devices `ids`, ascending, must receive at the least. Senders count where a move is
    between meshes or uneven; between even types of one mesh nobody must send more than the worst receiver lacks.
    """
    transfer = float(least.max(initial=0)) / BANDWIDTH
    moves = [(s, t) for s, t in zip(sources, destinations, strict=True) if _lopsided(s, t)]
    if moves:
        switch = Level("device", len(ids), "switch", BANDWIDTH, LATENCY)
        at = np.asarray(ids)
        boxes = [(boxes_on(s, at), boxes_on(t, at), s.itemsize) for s, t in moves]
        transfer = max(transfer, moves_bound(boxes, np.arange(len(at)), Fabric(Topology("", (switch,)))).transfer)
    return Bound(transfer + (LATENCY if transfer else 0.0), transfer)


def _lopsided(s: TensorType, t: TensorType) -> bool:
    """Say whether senders may have more to do than receivers; of addends, and tables of boxes, nothing is claimed."""
    if s.layout.partial or t.layout.partial or s.layout.boxes is not None or t.layout.boxes is not None:
        return False
    return s.mesh != t.mesh or not (s.all_even and t.all_even)
