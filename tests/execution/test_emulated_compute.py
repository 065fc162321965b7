"""Steps whose compute is slept: the seconds of the device that is not there, and the messages of a real step."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from torch import device

from execution.slept_cases import CASES, TOPOLOGY, job_of
from execution.torch_launch import printed
from shardplan.core.pattern import AtOnce, InTurn, Local, StepPattern, Work
from shardplan.errors import BackendError
from shardplan.execution.rank_rounds import RankKernel
from shardplan.execution.torch import emulated_compute
from shardplan.execution.torch.emulated_compute import DeviceClock, SleptStep, _sleep_kernel, total_kernel_seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.jobs.timing import COMPUTE

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """What both ranks found, by case."""
    return printed(2, HERE / "slept_child.py")


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_its_device_would(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """The seconds that each rank slept are those that are predicted of its ops; the step takes as long, or longer.

    How much longer is the machine's affair, on which other tests run.
    """
    line = simulate_job(job_of(name), TOPOLOGY, overlap=False, contention=True)
    ranks = len(line.swept.ranks)
    for rank, row in enumerate(found[name]):
        spans = [op for (r, _), ops in line.opened.spans.items() if r == rank % ranks for op in ops]
        computed = sum(s.op.cost.seconds for s in spans if s.op.cost.stream == COMPUTE)
        # Of one whose messages go beside kernels, what the prediction has of it is the longer of the two.
        assert row["busy"] == pytest.approx(computed, rel=0.01 if name == "ring attention" else 1e-9)
        assert row["early"] <= 0
        assert 0.05 < row["busy"] <= row["took"]
    assert max(row["took"] for row in found[name]) > 0.95 * line.seconds


@pytest.mark.parametrize("name", CASES)
def test_its_messages_are_those_of_a_real_step(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    assert all(row["received"] == row["really"] > 0 for row in found[name])


def test_a_clock_takes_work_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is back at once, and sleeps only where it is asked to; what it does meanwhile is not added."""
    now = [5.0]

    class Time:
        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(amount: float) -> None:
            now[0] += amount

    monkeypatch.setattr(emulated_compute, "time", Time)
    clock = DeviceClock()
    clock.give(0.5)
    clock.give(0.25)
    assert now == [5.0] and clock.busy == 0.75
    now[0] += 0.5  # the host is busy
    clock.reach()
    assert now == [5.75]
    clock.reach()  # it is done: nothing to wait for
    assert now == [5.75]
    now[0] += 1.0  # the device has nothing to do
    clock.give(0.25)
    clock.reach()
    assert now == [7.0] and clock.busy == 1.0


def test_a_step_begins_with_ready() -> None:
    with pytest.raises(BackendError, match="is not ready on this rank; call ready"):
        SleptStep(job_of("data"), TOPOLOGY, 1.0).go()


def test_a_step_ends_when_its_device_does() -> None:
    """Also where the last that it was given is behind its last message; and it counts what this step gave alone."""
    step = SleptStep(job_of("data"), TOPOLOGY, 1.0)

    class Run:
        def actions(self) -> None:
            step.clock.give(0.05)

    for _ in range(2):
        step._run = Run()  # type: ignore[assignment]
        step.go()
        assert time.monotonic() >= step.clock.until > 0
        assert step.clock.busy == pytest.approx(0.05)


def test_what_is_computed_between_messages_is_slept_there() -> None:
    clock, nothing = DeviceClock(), RankKernel(lambda *_: [], (), (), ())
    before = time.monotonic()
    _sleep_kernel(clock, 0.03, {}, nothing, device("cpu"))
    assert time.monotonic() - before >= 0.03 == clock.busy


def test_the_kernels_of_a_pattern_follow_each_other() -> None:
    fabric, work = Fabric(TOPOLOGY), Work(2e6, "f32", 0.0)
    one, none = StepPattern(work, np.arange(2)), StepPattern(Local(1e9), np.arange(2))
    assert total_kernel_seconds(
        InTurn(3, (one, StepPattern(AtOnce((one, none)), np.arange(2)))), fabric
    ) == pytest.approx(6.0)
