"""Layers of which the first of every stage are computed again: what they hold, compute, and say on every fidelity."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from shardplan import Job, LayoutError, Model, Strategy, partition
from shardplan.core.nested import as_nested
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.strategy.partition.memory import holdings
from shardplan.strategy.partition.recomputed_layers import has_rows_behind
from shardplan.strategy.runtimes import runtime_of
from strategy.jobs import stepped

LAYERS = 6
SIZES: dict[str, Any] = {"layers": LAYERS, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "seq": 512,
                         "vocab": 1024, "precision": "bf16"}  # fmt: skip
BOX = sp.Topology.load("dgx-h100", nodes=1)
DEGREES: dict[str, dict[str, Any]] = {
    "tensor 2 x data 2": {"tensor": 2, "data": 2, "zero": 1, "sequence_parallel": True, "global_batch": 8},
    "pipeline 2": {"pipeline": 2, "cuts": (3,), "global_batch": 8},
    "fsdp 4": {"data": 4, "fsdp": True, "global_batch": 8},
    "a stage of fewer": {"pipeline": 2, "cuts": (5,), "schedule": "zb-h1", "global_batch": 8},
}
MOST = {"tensor 2 x data 2": LAYERS, "pipeline 2": 3, "fsdp 4": LAYERS, "a stage of fewer": 5}  # of a stage


@cache
def job(name: str, count: int) -> Job:
    """Of none, of so many, or of all layers."""
    return partition(Model.load("llama", **SIZES), strategy(name, count), BOX)


def strategy(name: str, count: int) -> Strategy:
    again: dict[str, Any] = {"recompute": "full" if count else "none"}
    again |= {"recompute_layers": count} if 0 < count < MOST[name] else {}
    return Strategy(**DEGREES[name], **again)


def peaks(found: Job) -> list[int]:
    return [int(d.max()) for d in holdings(found).during]


def flops(found: Job) -> float:
    """Of all stages, forward and backward."""
    return sum(
        times * op.flops(*types)
        for (_, kind), p in found.programs.items()
        for times, one, types in program_leaves(p)
        if kind != "OPT" and (op := computing(one))
    )


@pytest.mark.parametrize("name", DEGREES)
def test_memory_and_operations_lie_between_the_two_ends(name: str) -> None:
    """Each layer more holds less, but the last, which is computed again while all others' inputs wait."""
    counts = range(MOST[name] + 1)
    held = [max(peaks(job(name, n))) for n in counts]
    assert all(a > b for a, b in zip(held[:-1], held[1:-1], strict=False)), held
    assert held[0] > held[-1] and min(held) >= 0.98 * held[-1]
    work = [flops(job(name, n)) for n in counts]
    if name != "a stage of fewer":
        steps = np.diff(work)
        assert np.allclose(steps, steps[0], rtol=1e-9) and steps[0] > 0
    else:  # both stages at first, then the larger one alone
        steps = np.diff(work)
        assert np.allclose(steps[1:], steps[1], rtol=1e-9) and steps[0] == pytest.approx(2 * steps[1], rel=1e-9)


@pytest.mark.parametrize("name", ["tensor 2 x data 2", "pipeline 2", "fsdp 4"])
def test_the_closed_form_holds_what_the_certificate_says(name: str) -> None:
    model = Model.load("llama", **SIZES)
    form = ClosedForm(model, BOX, Parameters(fragmentation=1.0, context=0.0))
    degrees: dict[str, Any] = DEGREES[name] | {"cuts": None}
    counts = [0, *range(1, MOST[name]), None]
    again: list[dict[str, Any]] = [{} if n == 0 else {"recompute": "full", "recompute_layers": n} for n in counts]
    plain = [Strategy(**degrees, **said) for said in again]
    found = form(Configurations.of(plain))
    certified = [max(holdings(job(name, n), runtime_of(s)).peak_bytes) for n, s in enumerate(plain)]
    ratios = np.array(found.peak_bytes) / np.array(certified)
    assert (np.abs(ratios - 1) <= 0.05).all(), ratios
    assert (np.diff(found.seconds) > 0).all() and (np.diff(found.peak_bytes) < 0).all()
    for k, one in enumerate(plain):  # each alone is what it is among others
        alone = form(Configurations.of([one]))
        assert alone.seconds[0] == pytest.approx(found.seconds[k], rel=1e-12)
        assert alone.peak_bytes[0] == pytest.approx(found.peak_bytes[k], rel=1e-12)


@pytest.mark.parametrize("name", ["tensor 2 x data 2", "pipeline 2", "fsdp 4"])
def test_the_simulation_of_ops_computes_each_layer_again_that_is(name: str) -> None:
    """A layer more costs what a layer costs: neither none of them nor all."""
    seconds = [simulate_job(job(name, n), BOX).seconds for n in range(MOST[name] + 1)]
    steps = np.diff(seconds)
    assert (steps > 0).all() and steps.max() <= 2 * np.median(steps), seconds


def test_rows_are_the_models() -> None:
    """Every stage has the rows of the model's stacks that it computes again, and behind them the others."""
    found = job("a stage of fewer", 2)
    rows = {(p.stage, p.name): p.rows for p in found.parts.values() if p.name.startswith("layers.q")}
    assert rows[0, "layers.q"] == (0, 2) and rows[0, "layers.q..behind"] == (2, 5)
    assert rows[1, "layers.q"] == (5, 6) and (1, "layers.q..behind") not in rows
    assert rows[0, "layers.q..behind.m"] == (2, 5)
    loops = [(op.times, has_rows_behind(s.operands)) for s in found.programs[0, "F"].steps if (op := as_nested(s.op))]
    assert loops == [(2, False), (3, True)]


MIXTURE: dict[str, Any] = {"layers": 5, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 6, "experts": 2, "seq": 4,
                           "experts_per_token": 1, "dense_layers": 2, "dense_ffn": 6, "vocab": 11}  # fmt: skip


@pytest.mark.parametrize(("cuts", "count"), [((3,), 2), ((1,), 1), ((2,), 2)])
def test_stages_of_fewer_layers_and_of_two_kinds(cuts: tuple[int, ...], count: int) -> None:
    """A stage may have layers of one of two loops alone, at either end: a step is what it is without."""
    model = Model.load("moe", **MIXTURE, dtype="f64", optimizer="sgd")
    rng, types = np.random.default_rng(1), model.program.types
    given = {n: rng.normal(0, 0.4, types[n].shape) for n in model.parameters}
    given |= {n: rng.integers(0, 11, (2, 4)).astype(np.int32) for n in ("tokens", "targets")}
    plain = Strategy(pipeline=2, cuts=cuts, global_batch=2)
    want, got = (
        stepped(partition(model, one), given)
        for one in (plain, replace(plain, recompute="full", recompute_layers=count))
    )
    assert want.keys() == got.keys() and all(np.allclose(got[n], x, rtol=1e-12, atol=1e-14) for n, x in want.items())


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"recompute_layers": 2}, "recompute_layers=2 with recompute='none'; legal is None"),
        ({"recompute": "full", "recompute_layers": 0}, "recompute_layers is 0; legal is a whole number of at least 1"),
        ({"recompute": "full", "recompute_layers": 6},
         "recompute_layers=6 of llama: no stage has more layers; legal is 1 to 5, or None"),
        ({"recompute": "full", "recompute_layers": 3, "pipeline": 2, "cuts": (3,), "global_batch": 2},
         "recompute_layers=3: no stage has more layers; legal are fewer, or None for all"),
    ],
)  # fmt: skip
def test_what_is_refused(said: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        partition(Model.load("llama", **SIZES), Strategy(**said))
    assert text in str(caught.value)
