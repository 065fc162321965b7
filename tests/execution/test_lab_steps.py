"""Steps of jobs in the lab: compute slept, messages over its links; and a job as bytes."""

import pytest

import shardplan as sp
from execution.lab_here import needs_lab
from execution.slept_cases import TOPOLOGY, job_of
from shardplan.errors import BackendError, TopologyError
from shardplan.execution.jobs import parts
from shardplan.execution.lab import Cluster, Lab
from shardplan.execution.lab.cluster import BUCKET
from shardplan.execution.lab.job_bytes import pack_job, unpack_job
from shardplan.execution.lab.steps import measure_steps
from shardplan.simulation.jobs.job_timeline import simulate_job

LATE = 1.0  # seconds: other tests may keep the processors busy
NAMES = ("data", "tensor", "pipeline")


@needs_lab
def test_steps_sleep_and_send() -> None:
    """Each is slept for what it computes, takes that and more, and sends over the links what a real one would."""
    cluster = Cluster(Cluster.of("1x2", (1000.0, 100.0)).topology, bucket=8192)
    jobs = [(name, job_of(name)) for name in NAMES]
    with Lab(cluster, most_late=LATE) as lab:
        found = measure_steps(lab, jobs, TOPOLOGY, repetitions=2)
        with pytest.raises(BackendError, match="device 3; legal are ranks, 0 to 1"):
            four = sp.partition(sp.Model.load("mlp", layers=2, hidden=4), sp.Strategy(data=4))
            measure_steps(lab, [("four", four)], TOPOLOGY)
        with pytest.raises(BackendError, match="repetitions=0; legal are 1 and more"):
            measure_steps(lab, jobs, TOPOLOGY, repetitions=0)
    for (name, job), m in zip(jobs, found, strict=True):
        line = simulate_job(job, TOPOLOGY, overlap=False, contention=True, rendezvous=True)
        assert m.title == name and len(m.repetitions) == 2 and m.load >= 0
        assert len(m.slept) == 2 and 0.05 < max(m.slept) <= m.min_seconds <= m.seconds
        assert m.min_seconds > 0.95 * line.seconds
        assert all(sum(r.edge_bytes) > 1000 and r.cpu_share > 0 for r in m.repetitions)


def test_engines_of_libraries_run_no_steps() -> None:
    with pytest.raises(BackendError, match="legal are ring, tree and direct"):
        measure_steps(Lab(Cluster.of("1x2", (10.0, 10.0)), engine="gloo"), [], TOPOLOGY)


def test_a_job_as_bytes_is_the_same_job() -> None:
    """All that runs of it: its identity, and who takes part."""
    for name in NAMES:
        job = job_of(name)
        again = unpack_job(pack_job(job))
        assert parts(again).digest == parts(job).digest and parts(again).order == parts(job).order
        assert again.movements == {} and again.batch == job.batch and again.results == job.results


def test_a_bucket_is_told_to_every_link() -> None:
    """And no packet is larger than it; a bucket of less than two packets, or more than a queue, is refused."""
    few = Cluster(Cluster.of("1x2", (10.0, 10.0)).topology, bucket=4096)
    told = "\n".join(batch for _, _, batch in few.commands())
    assert "burst 4096 " in told and "gso_max_size 3276" in told and f"burst {BUCKET}" not in told
    for bucket in (100, 1 << 30):
        with pytest.raises(TopologyError, match="legal are 3000 to 1048576 bytes"):
            Cluster(few.topology, bucket=bucket)
