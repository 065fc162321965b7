"""`measure_step`: a step of a job on the processes of torchrun, action by action, beside the same as predicted.

An interval is an action of a stage (F, B, I, W, OPT) on a device, its waiting for peers inside. On one host all
processes have one clock; of several each one's time counts from a barrier before the step, which they leave within a
message's time of each other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from shardplan.errors import BackendError
from shardplan.execution.record import Record
from shardplan.execution.run import TIMEOUT, run_recorded
from shardplan.hardware.topology import Topology
from shardplan.simulation.interval import Interval
from shardplan.simulation.jobs.job_timeline import JobTimeline, simulate_job
from shardplan.simulation.jobs.timing import issued_of
from shardplan.simulation.timeline import Timeline
from shardplan.strategy.partition.job import Job


class ActionTimes(NamedTuple):
    """The actions of a kind on a stage: how many were measured, and the median seconds of one, on either side."""

    stage: int
    kind: str
    times: int
    predicted_seconds: float
    measured_seconds: float


def measure_step(job: Job, given: Mapping[str, np.ndarray], timeout: float = TIMEOUT) -> Timeline:
    """Run a step on the processes of torchrun, and return what every device did when; each process gets all of it.

    A step before this one has connected them. Raises as `run`, and `BackendError` where no process did anything.
    """
    import torch.distributed as dist

    record = Record()
    dist.barrier()
    origin = time.monotonic()
    run_recorded(job, given, "torch", timeout, record)
    mine = list(_spans(job, record))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), origin, mine))
    hosts = {host for host, _, _ in every}
    shifts = [at if len(hosts) > 1 else 0.0 for _, at, _ in every]
    rows = [
        (device, stage, kind, a - shift, b - shift)
        for shift, (_, _, found) in zip(shifts, every, strict=True)
        for device, stage, kind, a, b in found
    ]
    if not rows:
        raise BackendError("no process has a device of the job; legal is a launch of as many as it has devices")
    start = min(a for *_, a, _ in rows)
    intervals = [Interval(device, "compute", a - start, b - start, f"{stage}{kind}", kind)
                 for device, stage, kind, a, b in sorted(rows, key=lambda r: r[3])]  # fmt: skip
    return Timeline(tuple(intervals), source="measured", title="torch backend, a step")


def _spans(job: Job, record: Record) -> Iterator[tuple[int, int, str, float, float]]:
    """The actions of this process: device, stage, kind, start and end on its own clock."""
    named = {id(job.programs[key]): key for key in job.programs}
    for program, one in record.runs:
        if id(program) in named and one.spans:
            stage, kind = named[id(program)]
            yield one.spans[0].device, stage, kind, one.spans[0].start, one.spans[-1].end


def seconds_to_issue(job: Job, links: Topology, measured: Timeline) -> float:
    """Return what a host takes for an op, by a measured step: the median of its actions' seconds over their ops.

    Small sizes take no other time, so beside the links this is all that there is to know of these processes: waiting
    for a core is in it where there are more processes than cores.
    """
    line = simulate_job(job, links)
    issued = {f"{stage}{kind}": issued_of(one.nodes) or 1 for (stage, kind), one in line.compiled.maps.items()}
    return median(i.seconds / issued[i.name] for i in measured.intervals)


def predict_step(job: Job, links: Topology, issue_seconds: float) -> JobTimeline:
    """Return the step as predicted on measured links by hosts that do one op after another."""
    return simulate_job(job, links, overlap=False, launch=issue_seconds)


def action_times(predicted: JobTimeline, measured: Timeline) -> list[ActionTimes]:
    """Return for every stage and kind of action the median seconds of both sides."""
    found: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
    for run in predicted.swept.ranks:
        for (stage, kind, _), begin, done in zip(run.actions, run.begin.tolist(), run.done.tolist(), strict=True):
            if np.isfinite([begin, done]).all():
                found.setdefault((stage, kind), ([], []))[0].append(done - begin)
    for i in measured.intervals:
        key = int(i.name.removesuffix(i.kind)), i.kind
        found.setdefault(key, ([], []))[1].append(i.seconds)
    return [ActionTimes(stage, kind, len(b), median(a or [0.0]), median(b or [0.0]))
            for (stage, kind), (a, b) in sorted(found.items())]  # fmt: skip
