"""The closed form of a program: each step as early as those that it waits for let it, as `hardware` prices them.

A step takes its priced seconds on every device that takes part in it (`core.pattern.taking_part`), and waits as in
`prices.critical_path`. Memory is the liveness of `core.accounting`, device by device: the values live during a step,
operands and results among them, plus the staging of the worst device on those that take part; after it, what is still
live. A device that takes no part in a step has done its own by the end of the last in which it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.core.accounting import live_bytes
from shardplan.core.pattern import communicates
from shardplan.core.program import Program
from shardplan.core.text import op_text
from shardplan.core.walk import step_patterns
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.critical_path import Window
from shardplan.plans.nominal import DESCRIPTION
from shardplan.plans.pricing import Where, fabric_of, step_windows
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.timeline import Timeline, TimelineError


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """When a step runs, on which stream of which devices (ascending ids), and what each device receives, by id."""

    window: Window
    stream: str
    devices: np.ndarray
    received: dict[int, int]


def predict(program: Program, where: Where | None = None, most_devices: int = 64) -> Timeline:
    """Return the closed form of a program: steps that share no device and no port overlap.

    Args:
        program: Any program.
        where: A topology whose ids are the device ids, a placement that places them, or None for the nominal switch of
            plans without a topology.
        most_devices: The devices drawn: so many of the smallest ids (by default as many as are still told apart), and,
            where it is not among them, one that takes part in each step and the one that holds most. Makespan,
            breakdown and peak do not depend on it.

    Returns:
        One interval a step and device, caused by the last step waited for; its makespan is the program's price.

    Raises:
        TopologyError: A device that is not on `where`.
        TimelineError: `most_devices` is less than 1.

    Source: arXiv 2112.01075 and 2110.10548 price programs so; see `hardware.prices.cost`.

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
    slots: list[_Slot] = []
    _, windows = step_windows(program, fabric_of(where, program.meshes))
    for step, one, window in zip(program.steps, step_patterns(program), windows, strict=True):
        operands, results = program.step_types(step)
        received = zip(step.op.devices(*results).tolist(), step.op.received_bytes(*operands).tolist(), strict=True)
        stream = "comm" if communicates(one.pattern) else "compute"
        slots.append(_Slot(window, stream, one.devices, dict(received)))
    rows = live(program, [slot.devices for slot in slots])
    drawn = set(program.devices[:most_devices])
    drawn |= {int(slot.devices[0]) for slot in slots if drawn.isdisjoint(slot.devices.tolist())}
    if program.devices:
        drawn.add(program.devices[int(np.argmax(rows.max(axis=0)))])
    topology = where.topology if isinstance(where, Placement) else where
    return Timeline(
        tuple(_intervals(program, slots, drawn)),
        curves(program, _clocks(program, slots), rows, drawn),
        title=f"closed form, {(topology.name or 'topology') if topology else DESCRIPTION}",
    )


def step_names(program: Program) -> tuple[str, ...]:
    """Return the name that the intervals of each step bear: its op with operands and attributes."""
    meshes = {m: f"m{k}" for k, m in enumerate(program.meshes)}
    return tuple(op_text(step.op, step.operands, meshes) for step in program.steps)


def _intervals(program: Program, slots: list[_Slot], drawn: set[int]) -> list[Interval]:
    """The intervals of the drawn devices, step by step."""
    made: list[Interval] = []
    drawn_of: list[dict[int, int]] = []  # by step and device the index of its interval
    for number, (step, name, slot) in enumerate(zip(program.steps, step_names(program), slots, strict=True)):
        now: dict[int, int] = {}
        drawn_of.append(now)
        before = {} if slot.window.cause is None else drawn_of[slot.window.cause]
        for device in (d for d in slot.devices.tolist() if d in drawn):
            # All intervals of a step end together: a device's own is as critical as any, else the first.
            causes = (before.get(device, min(before.values())),) if before else ()
            now[device] = len(made)
            made.append(
                Interval(
                    device=device,
                    stream=slot.stream,
                    start=slot.window.start,
                    end=slot.window.end,
                    name=name,
                    kind=step.op.name,
                    step=number,
                    received_bytes=slot.received.get(device, 0),
                    causes=causes,
                )
            )
    return made


def live(program: Program, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bytes on every device before the first step, and during and after each: [1 + 2 steps, devices].

    It is `core.accounting.live_bytes` with the staging on those that take part alone, whose ids `parts` says by step,
    where an account adds it everywhere.
    """
    ids = np.asarray(program.devices, dtype=np.int64)
    start, found = live_bytes(program, program.devices)
    rows = np.zeros((1 + 2 * len(found), len(ids)), dtype=np.int64)
    rows[0] = start
    for number, (step, hold, part) in enumerate(zip(program.steps, found, parts, strict=True)):
        during, after = rows[2 * number + 1 : 2 * number + 3]
        during[:], after[:] = hold.during, hold.after
        during[np.searchsorted(ids, part)] += step.op.staging(*program.step_types(step)[0])
    return rows


def curves(program: Program, clocks: np.ndarray, rows: np.ndarray, drawn: Iterable[int]) -> tuple[MemoryCurve, ...]:
    """Return the curves of some devices; a sample that changes nothing is left out.

    `clocks` has the seconds at which the bytes of `rows` begin, as `live` gives them: both [1 + 2 steps, devices].
    """
    columns = {device: k for k, device in enumerate(program.devices)}
    changes = np.ones(rows.shape, dtype=bool)
    changes[1:] = rows[1:] != rows[:-1]
    found: list[MemoryCurve] = []
    for device in sorted(drawn):
        column = columns[device]
        keep = changes[:, column]
        samples = zip(clocks[keep, column].tolist(), rows[keep, column].tolist(), strict=True)
        found.append(MemoryCurve(device, tuple(samples)))
    return tuple(found)


def _clocks(program: Program, slots: list[_Slot]) -> np.ndarray:
    """When every device has what `live` says, [1 + 2 steps, devices]: those that take part at a step's two ends."""
    ids = np.asarray(program.devices, dtype=np.int64)
    clocks = np.zeros((1 + 2 * len(slots), len(ids)))
    for number, slot in enumerate(slots):
        clocks[2 * number + 1 : 2 * number + 3] = clocks[2 * number]
        ends = np.array([[slot.window.start], [slot.window.end]])
        clocks[2 * number + 1 : 2 * number + 3, np.searchsorted(ids, slot.devices)] = ends
    return clocks
