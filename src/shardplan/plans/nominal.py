"""Where there is no topology: the topology `nominal`, one flat switch, as large as device ids are.

Seconds on it are asked of `hardware.prices`, as on any other. What plans are compared by without a topology, bytes and
rounds along the longest path, is the planner's (`movement.redistribution.choice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from shardplan.core.pattern import StepPattern
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import step_patterns
from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.prices.critical_path import longest
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.plans.bounds import boxes_on, moves_bound
from shardplan.plans.starts import Bound

# What a device does there where no work is stated, in every dtype: of the size of an H100's datasheet, of none in
# particular. A settlement weighs work against movement by it; plans have no work, and do not ask it.
DEVICE = DeviceSpec(flops=(("*", 500e12),), memory_bandwidth=2e12)
DESCRIPTION = "nominal switch, 50 GB/s, 5 us"


@lru_cache(maxsize=64)
def nominal_fabric(devices: int) -> Fabric:
    """Return the nominal switch with so many ports; it is shared, and nobody changes it.

    >>> (level,) = nominal_fabric(4).topology.levels
    >>> level.size, level.bandwidth, level.latency
    (4, 50000000000.0, 5e-06)
    """
    return Fabric(Topology.load("nominal", devices=devices))


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


def nominal_bound(
    sources: Sequence[TensorType], destinations: Sequence[TensorType], least: np.ndarray, ids: Sequence[int]
) -> Bound:
    """Return a lower bound of moves whose sources and destinations are paired in order.

    `least` is what each of the devices `ids`, ascending, must receive at the least. Senders count where a move is
    between meshes, uneven or from a root; else nobody must send more than the worst receiver lacks.
    """
    fabric = nominal_fabric(max(1, len(ids)))
    (level,) = fabric.topology.levels
    transfer = float(least.max(initial=0)) / level.bandwidth
    moves = [(s, t) for s, t in zip(sources, destinations, strict=True) if _senders_may_lag(s, t)]
    if moves:
        at = np.asarray(ids)
        boxes = [(boxes_on(s, at), boxes_on(t, at), s.itemsize) for s, t in moves]
        transfer = max(transfer, moves_bound(boxes, np.arange(len(at)), fabric).transfer)
    return Bound(transfer + (level.latency if transfer else 0.0), transfer)


def _senders_may_lag(s: TensorType, t: TensorType) -> bool:
    """Say whether senders may have more to do than receivers; of addends, and tables of boxes, nothing is claimed."""
    if s.layout.partial or t.layout.partial or s.layout.boxes is not None or t.layout.boxes is not None:
        return False
    return s.mesh != t.mesh or bool(s.layout.root) or not (s.all_even and t.all_even)
