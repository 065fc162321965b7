"""`measure`: a real run of a program as a `Timeline`, of the same type and trace format as a predicted one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardplan.core.pattern import communicates
from shardplan.core.program import Program
from shardplan.errors import BackendError
from shardplan.execution.record import Record, StepSpan
from shardplan.execution.run import BACKENDS, TIMEOUT, run_recorded
from shardplan.simulation.interval import Interval
from shardplan.simulation.predict import step_names
from shardplan.simulation.timeline import Timeline


def measure(program: Program, shards: Any, backend: str, timeout: float = TIMEOUT) -> tuple[Any, Timeline]:
    """Run a program as `run` does, and return its results and what every device did when.

    The timeline is in seconds since the first device began its first step, on one clock: under torch the ranks' offsets
    are measured at the start, and every rank has the intervals of all; else a process has those of its own devices, on
    its own clock. Raises as `run`, and `BackendError` for the reference, which has no time.
    """
    if backend not in BACKENDS or backend == "reference":
        legal = ", ".join(name for name in BACKENDS if name != "reference")
        raise BackendError(f"nothing to measure on the backend {backend!r}; legal are {legal}")
    record = Record()
    results = run_recorded(program, shards, backend, timeout, record)
    return results, timeline_of(program, record.spans, f"{backend} backend")


def timeline_of(program: Program, spans: Sequence[StepSpan], title: str) -> Timeline:
    """Return spans on one clock as a timeline that starts at 0; a step without messages is `compute`, else `comm`."""
    origin = min((s.start for s in spans), default=0.0)
    names = step_names(program)
    intervals: list[Interval] = []
    for s in sorted(spans, key=lambda s: (s.start, s.device, s.step)):
        step = program.steps[s.step]
        local = not communicates(step.op.pattern(*program.step_types(step)[0]))
        intervals.append(
            Interval(
                s.device,
                "compute" if local else "comm",
                s.start - origin,
                s.end - origin,
                names[s.step],
                step.op.name,
                s.step,
                s.received,
            )
        )
    return Timeline(tuple(intervals), source="measured", title=title)


def own_devices(backend: str) -> tuple[int, ...]:
    """Return the device ids of this process under a backend's launcher."""
    match backend:
        case "torch":
            import torch.distributed as dist

            return (dist.get_rank(),)
        case "mpi":
            from mpi4py import MPI

            return (MPI.COMM_WORLD.Get_rank(),)
        case "jax":
            import jax

            return tuple(d.id for d in jax.local_devices())
        case _:
            raise BackendError(f"the backend {backend!r} has all devices in one process")
