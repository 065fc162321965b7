"""Steps of jobs in the lab: compute slept, messages over its links; and a job as bytes."""

import numpy as np
import pytest

import shardplan as sp
from execution.lab_here import needs_lab
from execution.lab_ops import program_of_every_op
from execution.slept_cases import TOPOLOGY, job_of
from shardplan.core.program import Program
from shardplan.errors import BackendError, TopologyError
from shardplan.execution.jobs import parts
from shardplan.execution.lab import Cluster, Lab
from shardplan.execution.lab.cluster import BUCKET
from shardplan.execution.lab.item import pack_job, unpack_job
from shardplan.execution.lab.steps import measure_steps
from shardplan.execution.trial import computes, first_difference
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


def test_what_is_computed_in_floats_may_be_rounded_and_what_is_moved_may_not() -> None:
    """Neighbours among the integers of bf16 and f16 lie nearer than what rounding is granted."""
    mesh = sp.Mesh(a=2)
    moved = sp.redistribute("bf16[8@a]", "bf16[8]", mesh=mesh).program
    computed = Program.parse(
        "program\nmesh a=2\ninput %0: f32[4@a, 8]\ninput %1: f32[8]\n%2 = rms_norm(%0, %1)\noutput %2"
    )
    assert (computes(moved), computes(computed)) == (False, True)
    want = np.array([1.0, 250.0], np.float32)
    near = want * np.float32(1 + 2e-7)
    assert first_difference(near, want, rounded=False) == (0,)
    assert first_difference(near, want, rounded=True) is None
    assert first_difference(want + np.array([0, 1], np.float32), want, rounded=True) == (1,)
    half = np.array([100], np.float16)
    assert first_difference(half + np.float16(1), half, rounded=True) is None
    assert first_difference(half + np.float16(1), half, rounded=False) == (0,)


@needs_lab
def test_programs_that_compute_in_floats_are_right_in_the_lab() -> None:
    """A norm before a gather, whose sums of squares are rounded in another order than the reference's."""
    text = (
        "program\nmesh a=2\ninput %0: f32[6@a, 40]\ninput %1: f32[40]\n%2 = rms_norm(%0, %1)\n"
        "%3 = all_gather(%2; dim=0, axes=(a))\noutput %3"
    )
    with Lab(Cluster.of("2x1", (1000.0, 4000.0)), most_late=5.0) as lab:
        (found,) = lab.measure([Program.parse(text)], 1)
    assert found.verified


@needs_lab
def test_every_compute_op_is_right_in_the_lab_on_floats() -> None:
    """Each once, on operands that are no integers, cut over six ranks; `opaque` says what it computes to nobody."""
    program, lacking = program_of_every_op()
    assert lacking == {"opaque"}
    with Lab(Cluster.of("2x3", (1000.0, 4000.0)), most_late=5.0) as lab:
        (found,) = lab.measure([program], 1)
    assert found.verified
