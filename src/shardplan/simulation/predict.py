"""The closed form of a program: its steps one after another, with a barrier between them, as `hardware` prices them.

A step takes its priced seconds on every device that takes part in it: a member of one of its groups, a sender or
receiver of one of its messages, or any device of its mesh where nothing is communicated. Memory is the liveness of
`core.accounting`, device by device: the values live during a step, operands and results among them, plus the staging of
the worst device on those that take part; after it, what is still live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from shardplan.core.accounting import account, holds
from shardplan.core.pattern import AtOnce, Groups, InTurn, Local, Messages, Pattern, Work, communicates
from shardplan.core.program import Program
from shardplan.core.text import op_text
from shardplan.hardware.cost import seconds
from shardplan.hardware.placement import Placement
from shardplan.plans.nominal import DESCRIPTION, nominal_step
from shardplan.plans.pricing import Where, fabric_of
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.timeline import Timeline, TimelineError


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """When a step runs, on which stream of which devices (ascending ids), and what each device receives, by id."""

    start: float
    end: float
    stream: str
    devices: np.ndarray
    received: dict[int, int]


def predict(program: Program, where: Where | None = None, most_devices: int = 64) -> Timeline:
    """Return the closed form of a program: step after step, all devices waiting for the slowest.

    Args:
        program: Any program.
        where: A topology whose ids are the device ids, a placement that places them, or None for the nominal switch of
            plans without a topology.
        most_devices: The devices drawn: so many of the smallest ids (by default as many as are still told apart), and,
            where it is not among them, one that takes part in each step and the one that holds most. Makespan,
            breakdown and peak do not depend on it.

    Returns:
        One interval a step and device, caused by the step before; its makespan is `plans.pricing.priced`'s seconds.

    Raises:
        TopologyError: A device that is not on `where`.
        TimelineError: `most_devices` is less than 1.

    Source: arXiv 2112.01075 and 2110.10548 price programs so; see `hardware.cost`.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllGather
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (1000,), ("x",), Mesh(x=2))
    >>> line = predict(Program({"0": t}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",)))
    >>> [(i.device, i.name, i.received_bytes) for i in line.intervals]
    [(0, 'all_gather(%0; dim=0, axes=(x))', 2000), (1, 'all_gather(%0; dim=0, axes=(x))', 2000)]
    >>> line.peak_bytes
    6000
    """
    if most_devices < 1:
        raise TimelineError(f"a timeline of at most {most_devices} devices; draw at least 1")
    fabric = None if where is None else fabric_of(where, program.meshes)
    clock = 0.0
    slots: list[_Slot] = []
    books = account(program)
    for step, latencies, most in zip(program.steps, books.latencies, books.step_received, strict=True):
        operands, results = program.step_types(step)
        pattern, ids = step.op.pattern(*operands), step.op.devices(*results)
        start, received = clock, dict(zip(ids.tolist(), step.op.received(*operands).tolist(), strict=True))
        clock += nominal_step(latencies, most) if fabric is None else seconds(pattern, fabric)
        stream = "comm" if communicates(pattern) else "compute"
        slots.append(_Slot(start, clock, stream, taking_part(pattern, ids), received))
    rows = live(program, [slot.devices for slot in slots])
    drawn = set(program.devices[:most_devices])
    drawn |= {int(slot.devices[0]) for slot in slots if drawn.isdisjoint(slot.devices.tolist())}
    if program.devices:
        drawn.add(program.devices[int(np.argmax(rows.max(axis=0)))])
    topology = where.topology if isinstance(where, Placement) else where
    return Timeline(
        tuple(_intervals(program, slots, drawn)),
        curves(program, rows, np.repeat([[0.0], *([slot.end] for slot in slots)], len(program.devices), axis=1), drawn),
        title=f"closed form, {(topology.name or 'topology') if topology else DESCRIPTION}",
    )


def step_names(program: Program) -> tuple[str, ...]:
    """Return the name that the intervals of each step bear: its op with operands and attributes."""
    meshes = {m: f"m{k}" for k, m in enumerate(program.meshes)}
    return tuple(op_text(step.op, step.operands, meshes) for step in program.steps)


def taking_part(pattern: Pattern, devices: np.ndarray) -> np.ndarray:
    """Return the ids that take part in a step with this pattern on these devices, ascending."""
    match pattern:
        case Groups():
            ids = pattern.members.reshape(-1)
        case Messages():
            ids = np.concatenate([pattern.sender, pattern.receiver])
        case InTurn() | AtOnce():
            ids = np.concatenate([taking_part(part, devices) for part in pattern.parts])
        case Local() | Work():
            ids = devices
        case _:
            assert_never(pattern)
    return np.unique(ids if ids.size else devices)


def _intervals(program: Program, slots: list[_Slot], drawn: set[int]) -> list[Interval]:
    """The intervals of the drawn devices, step by step."""
    made: list[Interval] = []
    before: dict[int, int] = {}  # by device the index of its interval in the step before
    for number, (step, name, slot) in enumerate(zip(program.steps, step_names(program), slots, strict=True)):
        now: dict[int, int] = {}
        for device in (d for d in slot.devices.tolist() if d in drawn):
            # All intervals of a step end together: a device's own is as critical as any, else the first.
            causes = (before.get(device, min(before.values())),) if before else ()
            now[device] = len(made)
            made.append(
                Interval(
                    device=device,
                    stream=slot.stream,
                    start=slot.start,
                    end=slot.end,
                    name=name,
                    kind=step.op.name,
                    step=number,
                    received_bytes=slot.received.get(device, 0),
                    causes=causes,
                )
            )
        before = now
    return made


def live(program: Program, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bytes on every device before the first step, and during and after each: [1 + 2 steps, devices].

    It is `core.accounting.holds` with the staging on those that take part alone, whose ids `parts` says by step, where
    an account adds it everywhere.
    """
    ids = np.asarray(program.devices, dtype=np.int64)
    start, found = holds(program, program.devices)
    rows = np.zeros((1 + 2 * len(found), len(ids)), dtype=np.int64)
    rows[0] = start
    for number, (step, hold, part) in enumerate(zip(program.steps, found, parts, strict=True)):
        during, after = rows[2 * number + 1 : 2 * number + 3]
        during[:], after[:] = hold.during, hold.after
        during[np.searchsorted(ids, part)] += step.op.staging(*program.step_types(step)[0])
    return rows


def curves(program: Program, rows: np.ndarray, clocks: np.ndarray, drawn: Iterable[int]) -> tuple[MemoryCurve, ...]:
    """Return the curves of some devices, where `live` says the bytes; a sample that changes nothing is left out.

    `clocks` has the seconds at which a device starts its first step and ends each: [1 + steps, devices].
    """
    at = np.repeat(clocks, 2, axis=0)[:-1]
    columns = {device: k for k, device in enumerate(program.devices)}
    found: list[MemoryCurve] = []
    for device in sorted(drawn):
        column = columns[device]
        nbytes = rows[:, column]
        keep = np.flatnonzero(np.diff(nbytes, prepend=-1))
        found.append(MemoryCurve(device, tuple(zip(at[keep, column].tolist(), nbytes[keep].tolist(), strict=True))))
    return tuple(found)
