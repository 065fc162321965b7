"""Steps of jobs in the lab: compute slept as the devices of a topology would take, messages real, over shaped links.

What is measured is a step's order and what it waits for, not what it computes: values are zeros, and nothing is
verified. State is laid out before the instant at which ranks start, and results stay where they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.errors import BackendError
from shardplan.execution.jobs import parts
from shardplan.execution.lab.item import Item, Run, pack_job
from shardplan.execution.lab.measurement import Repetition, RepetitionStatistics, repetition_of
from shardplan.execution.lab.session import MOST_VOID, REPETITIONS, Lab
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition.job import Job


@dataclass(frozen=True, slots=True)
class StepMeasurement(RepetitionStatistics):
    """Runs of one step."""

    title: str
    repetitions: tuple[Repetition, ...]
    slept: tuple[float, ...]  # seconds of compute that each rank slept in a step, by device id
    voided: int  # runs thrown away because a rank started late
    load: float  # the machine's load average over a minute, at the start


def measure_steps(
    lab: Lab,
    jobs: Sequence[tuple[str, Job]],
    topology: Topology,
    repetitions: int = REPETITIONS,
) -> list[StepMeasurement]:
    """Run a step of every job once, unmeasured, then of all of them in turn, `repetitions` times.

    Args:
        lab: A running cluster; its engine says how collectives are composed. Device k is rank k.
        jobs: Titles, and jobs whose devices are ranks.
        topology: What a device computes and reads a second; its links are not looked at.
        repetitions: Timed runs of each, at least 1; a run that a rank was late for is taken again.

    Returns:
        One measurement a job.

    Raises:
        BackendError: A rank failed or was late again and again, or the engine is gloo's own.
    """
    if lab.engine == "gloo":
        raise BackendError("steps of jobs run on engines of messages; legal are ring, tree and direct")
    if repetitions < 1:
        raise BackendError(f"repetitions={repetitions}; legal are 1 and more")
    keys = [lab.new_key() for _ in jobs]
    runs: list[list[Run]] = [[] for _ in jobs]
    voided, load = [0] * len(jobs), os.getloadavg()[0]
    for key, (title, job) in zip(keys, jobs, strict=True):
        lab.call("load", key, _item(title, job, topology, lab))
        lab.call("run", key, False)
    for _ in range(repetitions):
        for number, key in enumerate(keys):
            run, late, latest = lab.run_on_time(key)
            if run is None:
                raise BackendError(
                    f"{jobs[number][0]}: in {MOST_VOID} runs a rank started late, in the last by {latest * 1e3:.1f} ms "
                    f"(legal are {lab.most_late * 1e3:g} ms); the machine is too busy"
                )
            runs[number].append(run)
            voided[number] += late
    for key in keys:
        lab.call("forget", key)
    return [
        StepMeasurement(title, tuple(map(repetition_of, mine)), _slept_seconds(mine[-1]), late, load)
        for (title, _), mine, late in zip(jobs, runs, voided, strict=True)
    ]


def _item(title: str, job: Job, topology: Topology, lab: Lab) -> Item:
    devices = parts(job).devices
    if max(devices) >= lab.cluster.ranks:
        raise BackendError(f"{title}: device {max(devices)}; legal are ranks, 0 to {lab.cluster.ranks - 1}")
    return Item(title, lab.engine, {d: d for d in devices}, (), job=pack_job(job), topology=topology)


def _slept_seconds(run: Run) -> tuple[float, ...]:
    found = {o.device: o.slept for o in run.outcomes if o.device is not None}
    return tuple(found[d] for d in sorted(found))
