"""Replays a program as DistIR's simulator does: one clock a device, ops in the order of the list.

The devices of an op's operands and results first wait for the latest of them, then each adds the op's seconds; live
memory takes the results, then lets go of what was used for the last time. Replicas, and the devices of a tensor group,
do the same at the same time: one of each is replayed. `unrolled` lists the actions of all devices, in DistIR's order.

Source: microsoft/dist-ir 7cfa1b0, `executor/simulator.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.simulation.parity.program import DistirProgram, TimedAction


@dataclass(frozen=True, slots=True)
class DistirResult:
    """What DistIR's simulator says of a configuration: -1 both where it fails, as DistIR writes it, and why."""

    seconds: float
    peak_bytes: int
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class ListedAction:
    """One op of the whole program: its name, its devices, seconds on each, and (device, added, freed) bytes."""

    kind: str
    devices: tuple[int, ...]
    seconds: float
    memory: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block's actions as arrays; the sizes of those that grow with the microbatch stand apart."""

    seconds: np.ndarray
    sizes: np.ndarray  # added, then minus freed, action by action
    growth: np.ndarray

    @classmethod
    def of(cls, actions: tuple[TimedAction, ...]) -> _Piece:
        """The arrays of some actions."""
        both = np.array([[x.added, (-x.freed[0], -x.freed[1])] for x in actions], dtype=np.int64).reshape(-1, 2)
        return cls(np.array([x.seconds for x in actions]), both[:, 0], both[:, 1])


def replayed(program: DistirProgram) -> DistirResult:
    """Return the latest clock and the largest live memory of any device.

    Args:
        program: A graph cut over devices.

    Source: microsoft/dist-ir 7cfa1b0, `executor/simulator.py`.
    """
    first, later = [_Piece.of(x) for x in program.first], [_Piece.of(x) for x in program.actions]
    clock, live = [0.0] * program.pipeline, list(program.initial)
    peak = list(live)
    for step in program.steps:
        for place, block, microbatch in step:
            piece = later[block] if microbatch else first[block]
            # Summed from left to right, as the clock is.
            clock[place] = float(np.add.accumulate(np.append(clock[place], piece.seconds))[-1])
            curve = live[place] + np.cumsum(piece.sizes + microbatch * piece.growth)
            peak[place] = max(peak[place], int(curve.max()))
            live[place] = int(curve[-1])
        for _, block, _ in step:
            for send in program.sends[block]:
                both = max(clock[send.source], clock[send.target]) + send.seconds
                clock[send.source] = clock[send.target] = both
                live[send.target] += send.added
                peak[send.target] = max(peak[send.target], live[send.target])
                live[send.source] -= send.freed
    for place, action in (*program.reductions, *enumerate(program.updates)):
        clock[place] += action.seconds
        peak[place] = max(peak[place], live[place] + action.added[0])
        live[place] += action.added[0] - action.freed[0]
    return DistirResult(max(clock), max(peak))


def unrolled(program: DistirProgram) -> Iterator[ListedAction]:
    """Yield every op of a program on every device, in DistIR's order.

    Args:
        program: A graph cut over devices.

    Source: microsoft/dist-ir 7cfa1b0, `transforms`.
    """
    columns = range(program.tensor)

    def device(i: int, j: int, k: int) -> int:
        return 1 + (i * program.tensor + j) * program.pipeline + k

    def listed(action: TimedAction, devices: list[int], microbatch: int) -> Iterator[ListedAction]:
        added, freed = (x[0] + microbatch * x[1] for x in (action.added, action.freed))
        for some in [devices] if action.joint else [[d] for d in devices]:
            yield ListedAction(action.kind, tuple(some), action.seconds, tuple((d, added, freed) for d in some))

    for i in range(program.data):
        for step in program.steps:
            for place, block, microbatch in step:
                for action in (program.actions if microbatch else program.first)[block]:
                    yield from listed(action, [device(i, j, place) for j in columns], microbatch)
            for _, block, _ in step:
                for j in columns:
                    for send in program.sends[block]:
                        ends = (device(i, j, send.source), device(i, j, send.target))
                        memory = ((ends[1], send.added, 0), (ends[0], 0, send.freed))
                        yield ListedAction("Send", ends, send.seconds, memory)
    for place, action in program.reductions:
        for j in columns:
            yield from listed(action, [device(i, j, place) for i in range(program.data)], 0)
    for i in range(program.data):
        for j in columns:
            for place, action in enumerate(program.updates):
                yield from listed(action, [device(i, j, place)], 0)
