"""Measured timelines and launched trials, without a launch: what spans become, and what a wrong shard is told."""

import numpy as np
import pytest

import shardplan as sp
from shardplan.core.ops import AllGather, Slice
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.execution import measure as module
from shardplan.execution import trial
from shardplan.execution.measure import LARGE, SMALL, measure, measured_links, own_devices, timeline_of
from shardplan.execution.record import StepSpan
from shardplan.simulation.interval import Interval
from shardplan.simulation.timeline import Timeline

MESH = sp.Mesh(a=2)
T = sp.TensorType.parse("f32[4@a]", MESH)
PROGRAM = Program(
    {"0": T}, [Step(AllGather(0, ("a",)), ("0",), ("1",)), Step(Slice(0, ("a",)), ("1",), ("2",))], ("2",)
)


def test_spans_on_one_clock_start_at_zero() -> None:
    spans = [
        StepSpan(1, 0, 10.5, 11.0, 8),
        StepSpan(0, 0, 10.0, 11.0, 8),
        StepSpan(0, 1, 11.0, 11.25, 0),
        StepSpan(1, 1, 11.0, 12.0, 0),
    ]
    line = timeline_of(PROGRAM, spans, "here")
    assert (line.source, line.title, line.seconds, line.devices) == ("measured", "here", 2.0, (0, 1))
    assert [(i.device, i.step, i.stream, i.start, i.received_bytes) for i in line.intervals] == [
        (0, 0, "comm", 0.0, 8),
        (1, 0, "comm", 0.5, 8),
        (0, 1, "compute", 1.0, 0),
        (1, 1, "compute", 1.0, 0),
    ]
    assert [i.name for i in line.critical_path] == ["all_gather(%0; dim=0, axes=(a))", "slice(%1; dim=0, axes=(a))"]


def test_the_reference_takes_no_time() -> None:
    for backend in ("reference", "abacus"):
        with pytest.raises(sp.BackendError) as error:
            measure(PROGRAM, [], backend)
        assert str(error.value) == f"nothing to measure on the backend {backend!r}; legal are torch, jax, mpi"
    with pytest.raises(sp.BackendError, match=r"^the backend 'reference' has all devices in one process$"):
        own_devices("reference")


def test_a_wrong_shard_is_named() -> None:
    got = np.array([1.0, 5.0], np.float32)
    want = np.array([1.0, 2.0], np.float32)
    trial._compare("output %2, device 1", want, want, ((2, 4),))
    trial._compare("output %2, device 1", want * np.float32(1 + 1e-7), want, ((2, 4),))
    with pytest.raises(sp.BackendError) as error:
        trial._compare("output %2, device 1", got, want, ((2, 4),))
    assert str(error.value) == "output %2, device 1: 5.0 at index (3,), the reference has 2.0"
    with pytest.raises(sp.BackendError) as error:
        trial._compare("output %2, device 1", got[:1], want, ((2, 4),))
    assert str(error.value) == "output %2, device 1: float32 of shape (1,), the reference has float32 (2,)"
    with pytest.raises(sp.BackendError, match=r": 5 at index \(3,\), the reference has 2$"):
        trial._compare("x", got.astype(int), want.astype(int), ((2, 4),))


def test_links_by_the_seconds_of_all_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 devices: 2 rounds of 5 us, and a byte a nanosecond; runs are late by up to 2 ms, the first by a second."""
    late = iter([1.0, 2e-3, 0.0, 1e-3, 1e-3] * 2)

    def fake(program: Program, shards: list[np.ndarray], backend: str, timeout: float) -> tuple[None, Timeline]:
        nbytes = program.input_types[0].shape[0] * 4 // 3
        assert [x.nbytes for x in shards] == [nbytes] and nbytes in (SMALL, LARGE)
        seconds = 2 * (5e-6 + nbytes * 1e-9) + next(late)
        return None, Timeline((Interval(8, "comm", 0.0, seconds, "all_gather(%0)", "all_gather", 0),))

    monkeypatch.setattr(module, "measure", fake)
    monkeypatch.setattr(module, "own_devices", lambda backend: (8,))
    found = measured_links((7, 8, 9), "torch")
    assert found is not None and found.describe() == "device=10"
    assert (found.levels[0].bandwidth, found.levels[0].latency) == pytest.approx((1e9, 5e-6 + SMALL * 1e-9))
    assert measured_links((0,), "torch") is None
