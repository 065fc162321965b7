"""The event simulation of a program: devices at their own pace, collectives sharing ports and links fairly.

A task, such as a group in its collective, starts when all its devices have come to it, and a device goes on when all
its tasks of a step have ended; there is no other barrier. The moves of a `together` are tasks of one step. What is
under way at once shares the resources (`engine`), whatever step it belongs to. Messages one by one, as the lab's engine
sends them, are timed by `replay`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.core.pattern import StepPattern, communicates
from shardplan.core.program import Program
from shardplan.core.walk import step_patterns
from shardplan.errors import ShardplanError, excerpt
from shardplan.hardware.prices.fabric import Floats
from shardplan.plans.pricing import Where, fabric_of, where_of
from shardplan.simulation.engine_tasks import clocks
from shardplan.simulation.interval import Interval
from shardplan.simulation.predict import curves, live, step_names
from shardplan.simulation.timeline import Timeline


def simulate(program: Program, placement: Where | str, algorithm: str = "auto") -> Timeline:
    """Return the timeline of a program: every device at its own pace, groups and messages sharing links.

    Args:
        program: Any program.
        placement: A placement that places its devices, or a topology (or its text) whose ids are the device ids.
        algorithm: `auto` for the library's cheapest row of every step, or an algorithm of the library.

    Returns:
        One interval a step and device that takes part in it, waiting included, caused by the device's one before. Where
        all devices take part in a step and nothing else is under way, it takes its price.

    Raises:
        TopologyError: A device is not on the topology; an unknown algorithm.
        TimelineError: The program is too long to follow it step by step.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllGather
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (1000,), ("x",), Mesh(x=2))
    >>> p = Program({"0": t}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",))
    >>> round(simulate(p, "nominal").seconds * 1e6, 3)
    5.04
    """
    if not isinstance(program, Program):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardplanError(f"the program is {excerpt(program)}; legal is a Program, such as plan.program, or a Job")
    where = where_of("the placement", placement)
    if where is None:
        raise ShardplanError("the placement is None; legal are a placement, a topology, and a topology's text")
    fabric = fabric_of(where, program.meshes)
    steps = step_patterns(program)
    return _timeline(program, steps, clocks(program, steps, fabric, algorithm), fabric.topology.name)


def _timeline(program: Program, patterns: Sequence[StepPattern], clocks: Floats, topology: str) -> Timeline:
    """The intervals of all devices, step by step; `clocks` says when each has ended each step, [steps, devices]."""
    ids = np.asarray(program.devices, dtype=np.int64)
    made: list[Interval] = []
    before: dict[int, int] = {}  # by device its last interval
    starts = np.concatenate([np.zeros((1, len(ids))), clocks])
    for number, (step, name, one) in enumerate(zip(program.steps, step_names(program), patterns, strict=True)):
        operands, results = program.step_types(step)
        received = dict(
            zip(step.op.devices(*results).tolist(), step.op.received_bytes(*operands).tolist(), strict=True)
        )
        stream, kind = "comm" if communicates(one.pattern) else "compute", step.op.name
        ends = starts[number : number + 2, np.searchsorted(ids, one.devices)].tolist()
        for device, start, end in zip(one.devices.tolist(), *ends, strict=True):
            causes = (before[device],) if device in before else ()
            before[device] = len(made)
            made.append(Interval(device, stream, start, end, name, kind, number, received.get(device, 0), causes))
    rows = live(program, [one.devices for one in patterns])
    memory = curves(program, np.repeat(starts, 2, axis=0)[:-1], rows, program.devices)
    return Timeline(tuple(made), memory, title=f"events, {topology or 'topology'}")
