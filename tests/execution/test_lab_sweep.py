"""Sweeps: the pairs of an experiment, a tiny one measured, kept after every experiment and gone on with."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.lab_draws import CLUSTERS, CROSSED, competing, draw_experiments

from execution.lab_here import needs_lab
from shardplan.errors import BackendError, LayoutError
from shardplan.execution.lab import Unavailable, machine
from shardplan.execution.lab import sweep as sweeping
from shardplan.execution.lab.experiments import Experiment, emulated_topology, pairs
from shardplan.execution.lab.item import Run, WrongResult
from shardplan.execution.lab.measurement import repetition_of
from shardplan.execution.lab.results import Sweep
from shardplan.execution.lab.standard import STANDARD
from shardplan.execution.lab.sweep import estimate, measure_experiments
from shardplan.execution.lab.validate import CROSSOVERS, MANY, SEVERAL, SHAPES, validate

LATE = 5.0  # seconds: bytes are asked for, not times
FAST = (2000.0, 4000.0)  # Mbit/s
FIRST = Experiment("2x2", FAST, "a=2, b=2", ("a",), 2**16, limit=2)
SECOND = Experiment("2x2", ("2*1000", 4000.0), "a=4", ("a",), 2**16, limit=1)


def test_the_standard_sweep_is_what_the_targets_ask_for() -> None:
    clusters = {e.cluster_name for e in STANDARD}
    assert len({e.cluster for e in STANDARD if any(isinstance(r, str) for r in e.rates)}) >= SEVERAL
    assert len({e.name for e in STANDARD}) == len(STANDARD)
    assert len(clusters) >= SHAPES
    assert set(CROSSOVERS) <= clusters
    assert [e.key for e in STANDARD] == sorted((e.key for e in STANDARD), key=[e.key for e in STANDARD].index)


def test_the_standard_sweep_has_many_that_compete() -> None:
    assert competing(STANDARD) >= MANY


def test_the_standard_sweep_is_drawn() -> None:
    """From the first draw on, which does not depend on how many follow; each once, however a mesh is written."""
    first = draw_experiments(fields=1, shapes=CLUSTERS[:1])
    assert first and first[0] in STANDARD
    for one in (
        draw_experiments(seed=1, fields=3, shapes=CLUSTERS[4:5]),
        draw_experiments(seed=1, fields=2, shapes=CROSSED[:1]),
    ):
        assert len(set(one)) == len(one) and competing(one) >= 2
        assert all(len(e.axes) < e.mesh.count("=") or e.mesh.count("=") == 1 for e in one)
    assert draw_experiments(seed=2, fields=2, shapes=CLUSTERS[:1]) != draw_experiments(
        seed=3, fields=2, shapes=CLUSTERS[:1]
    )


def test_pairs_are_all_placements_and_programs() -> None:
    found = pairs(FIRST)
    assert [p.placement.describe() for p in found] == ["a=[1, 2], b=[2, 1]"] * 3 + ["a=[2, 1], b=[1, 2]"] * 3
    assert [p.ops for p in found[:3]] == [("all_reduce",), ("reduce_scatter", "all_gather"), ("reduce", "broadcast")]
    barriers = [p.barrier for p in found[:3]]
    assert barriers == sorted(barriers)
    # two groups of 2, 64 KiB each member, in a ring: once over each inner link, or both groups over the outer one
    assert found[0].barrier == pytest.approx(2**16 / (4e9 / 8 * 1448 / 1514) + 2 * 3e-4)
    assert found[3].barrier == pytest.approx(2 * 2**16 / (2e9 / 8 * 1448 / 1514) + 2 * 3e-4)
    assert 0 < found[0].events < found[0].barrier  # a bucket of 80 KiB takes it all at once
    assert estimate([FIRST], 5) > 6 * 6 * 0.05
    with pytest.raises(LayoutError, match="axes to reduce over are of a, b, got"):
        pairs(Experiment("2x2", FAST, "a=2, b=2", ("c",)))


def test_the_closed_form_has_the_same_constants() -> None:
    slow = emulated_topology(FIRST.build().topology)
    assert [level.latency for level in slow.levels] == [3e-4, 3e-4]
    assert slow.levels[0].bandwidth == pytest.approx(2.5e8 * 1448 / 1514)


@needs_lab
def test_a_tiny_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplan.execution.lab.results.MOST_BUSY", math.inf)  # other tests run beside this one
    path = tmp_path / "result.json"
    kept: list[int] = []
    told: list[tuple[float, float]] = []

    def keep(found: Sweep) -> None:
        kept.append(len(found.experiments))
        found.save(path)

    first = measure_experiments([FIRST], repetitions=1, busy=True, keep=keep, most_late=LATE, floor=False)
    assert kept == [1]
    assert first.floor is None
    found = measure_experiments(
        [FIRST, SECOND],
        repetitions=1,
        busy=True,
        before=Sweep.load(path),
        keep=keep,
        progress=lambda done, total, what: told.append((done, total)),
        most_late=LATE,
    )
    assert kept == [1, 2, 2]  # only the new one, then the noise floor
    assert [d.experiment for d in found.experiments] == [FIRST, SECOND]
    assert [len(d.rows) for d in found.experiments] == [6, 1]
    assert len(found.again) == 1
    assert found.floor is not None
    for d in found.experiments:
        assert not d.error
        for r in d.rows:
            assert r.exact
            assert r.payload > 0
            assert len(r.seconds) == 1 and r.median > 0
            assert r.kernel is not None and r.kernel[0] >= 1.0
    assert told[-1][0] <= told[-1][1] + 1e-9
    found = measure_experiments(
        [FIRST, SECOND],
        repetitions=1,
        busy=True,
        before=replace(found, again=()),
        progress=lambda *x: told.append(x[:2]),
        most_late=LATE,
    )
    assert found.again and told[-1][1] > 0
    loaded = Sweep.load(path)
    assert [len(d.rows) for d in loaded.experiments] == [6, 1]
    assert {"cpu", "cores", "kernel", "arch"} == set(loaded.machine)
    assert validate([loaded]).targets[0].holds
    again = measure_experiments([FIRST, SECOND], repetitions=1, busy=True, before=loaded, most_late=LATE)
    assert again == loaded  # nothing left to do
    with pytest.raises(BackendError, match="the result to go on with is of engine='ring', repetitions=1"):
        measure_experiments([FIRST], repetitions=2, before=loaded)


def test_an_experiment_that_fails_twice_is_kept_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Busy:
        def __init__(self, *_: object, **__: object) -> None:
            started.append("lab")

        def __enter__(self) -> "Busy":
            return self

        def __exit__(self, *_: object) -> None:
            started.append("down")

        def measure(self, *_: object, **__: object) -> None:
            raise BackendError("the machine is too busy")

    monkeypatch.setattr(sweeping, "Lab", Busy)
    found = measure_experiments([SECOND], repetitions=1, busy=True, floor=False)
    assert started == ["lab", "down"] * 2
    assert [(d.rows, d.error) for d in found.experiments] == [((), "the machine is too busy")]
    started.clear()
    assert len(measure_experiments([SECOND], repetitions=1, busy=True, before=found, floor=False).experiments) == 1
    assert started  # it was tried again


def test_a_wrong_result_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> "Wrong":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def measure(self, *_: object, **__: object) -> None:
            raise WrongResult("device 3 differs")

    monkeypatch.setattr(sweeping, "Lab", Wrong)
    with pytest.raises(WrongResult, match="device 3 differs"):
        measure_experiments([SECOND], repetitions=1, busy=True, floor=False)


def test_a_busy_machine_is_refused_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all that its processors do, whoever does it: the ranks' own share says nothing of that."""
    worked = iter((10.0, 10.0 + 0.8 * (os.cpu_count() or 1), 20.0, 20.0 + 0.1 * (os.cpu_count() or 1)))
    monkeypatch.setattr(machine, "busy_seconds", lambda: next(worked))
    instants = iter((0.0, 1.0, 5.0, 6.0))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(instants), sleep=lambda _: None))
    with pytest.raises(Unavailable) as caught:
        measure_experiments([SECOND], repetitions=1)
    assert str(caught.value) == (
        "other processes keep 80% of the processors busy, and cells above 35% do not count; legal is an idle machine, "
        "or busy=True (--busy), which measures all the same"
    )
    machine.require_idle()


def test_the_share_of_a_run_is_of_all_processes() -> None:
    before, until = machine.busy_seconds(), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert machine.busy_seconds() - before >= 0.05
    run = Run(0.0, (), (), 0, busy=1.5, elapsed=2.0)
    assert repetition_of(run).cpu_share == 1.5 / (2.0 * (os.cpu_count() or 1))
