"""The answer of a search: what its seconds go to, who is a tie, why others lost, and what would change it."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models import published_counts as published
from typer.testing import CliRunner

from shardplan import Infeasible, Model, Strategy, Topology, search
from shardplan.cli import app
from shardplan.report.plan import answer_text, strategy_words
from shardplan.simulation.closed.causes import step_causes
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import like_fit, machine_fit, machine_of, shipped, shipped_fit
from shardplan.simulation.searching.answer import (
    DEGREES,
    TIE,
    Judge,
    PlanAnswer,
    _changed_topologies,
    answer_plan,
    find_changes,
    training_flops,
)
from shardplan.simulation.searching.certifier import RefusedPlan
from shardplan.simulation.searching.plans import RankedPlan
from shardplan.simulation.searching.space import StrategySpace

SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "seq": 128, "vocab": 1000}
GPT = Model.load("gpt", positions=128, precision="bf16", **SIZES)
BOX = Topology.load("dgx-a100-80g", nodes=1)
TWO = Topology.load("dgx-h100", nodes=2)
SPACE = StrategySpace.of(GPT, 16, 32, precision="bf16")
FORM = ClosedForm(GPT, TWO, machine_fit("dgx-h100").parameters)


def answered(model: Model, topology: Topology, batch: int, top: int = 5, goal: str = "step", **more: Any) -> PlanAnswer:
    found = search(model, topology, batch, top=60, **more)
    assert found.certifier is not None
    return answer_plan(found, Judge(model, topology, machine_of(topology), found.certifier), top, goal)


@functools.cache
def small() -> PlanAnswer:
    return answered(GPT, BOX, 16)


@given(st.lists(st.integers(0, SPACE.count - 1), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_causes_add_up_and_none_is_of_what_there_is_not(indices: list[int]) -> None:
    """Whatever the strategy, seconds of causes are those of the step, and an axis of one device costs nothing."""
    every = [SPACE.one(k) for k in indices]
    c = Configurations({name: np.concatenate([one.columns[name] for one in every]) for name in every[0].columns})
    found = step_causes(FORM, c)
    assert np.allclose(sum(found.values()), FORM(c).seconds, rtol=1e-9)
    assert all((x >= -1e-12 * FORM(c).seconds).all() for x in found.values())
    for name, cause in (("tensor", "tensor"), ("context", "context"), ("pipeline", "stage messages")):
        assert not found[cause][c.columns[name] == 1].any()
    assert not found["recompute"][c.columns["recompute"] == 0].any()
    assert (found["tensor"][(c.columns["tensor"] > 1)] > 0).all()
    assert not found["bubble"][(c.columns["pipeline"] == 1)].round(9).any()


def test_a_cause_is_what_its_links_cost() -> None:
    """Of tensor parallelism inside nodes, slower links inside nodes cost the tensor movements as many times more."""
    c = Configurations.of([Strategy(tensor=8, data=2, global_batch=32, precision="bf16")])
    levels = (TWO.levels[0], replace(TWO.levels[1], bandwidth=TWO.levels[1].bandwidth / 1000))
    slow = step_causes(FORM.on(replace(TWO, levels=levels), FORM.parameters), c)
    plain = step_causes(FORM, c)
    assert slow["tensor"][0] > 1.5 * plain["tensor"][0]
    assert slow["compute"][0] == pytest.approx(plain["compute"][0], rel=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_flops_are_those_of_the_formula(name: str) -> None:
    model = (
        Model.load(name, precision="bf16", capacity_factor=1.0) if "moe" in name else Model.load(name, precision="bf16")
    )
    wanted = published.general_flops(published.presets()[name], 1, causal_half=True, router=True)
    assert training_flops(model) == pytest.approx(wanted, rel=4e-3)
    assert training_flops(model.resize(batch=3)) == pytest.approx(training_flops(model), rel=1e-4)


def test_the_answer_is_certified_and_all_that_are_told_differ() -> None:
    answer = small()
    degrees = [tuple(getattr(one.plan.strategy, name) for name in DEGREES) for one in answer.plans]
    assert len(set(degrees)) == len(degrees) == 5
    for one in answer.plans:
        assert one.held == answer.judge.certifier.peak(one.plan.strategy) and one.held.nbytes <= BOX.device.memory
        assert one.interval[0] < one.plan.seconds < one.interval[1]
        assert sum(s for _, s in one.causes) == pytest.approx(one.plan.seconds)
        assert one.tokens_per_second == pytest.approx(16 * 128 / one.plan.seconds) and 0 < one.mfu < 1


def test_ties_come_first_by_room_then_by_words_then_by_where_intervals_end() -> None:
    answer = small()
    quickest = answer.found.best.seconds
    near = [one.plan.seconds <= quickest * (1 + TIE) for one in answer.plans]
    assert near == [True] * answer.tied + [False] * (len(near) - answer.tied)
    keys = [(one.plan.peak_bytes > 0.9 * BOX.device.memory, len(str(one.to_dict()["text"]).split()), one.interval[1])
            for one in answer.plans]  # fmt: skip
    assert keys[: answer.tied] == sorted(keys[: answer.tied])
    later = [one.plan.seconds for one in answer.plans[answer.tied :]]
    assert later == sorted(later)
    assert all(one.lost.startswith("a tie") == tied for one, tied in list(zip(answer.plans, near, strict=True))[1:])


def test_of_two_ties_the_more_certain_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one class say as much and have room: of intervals that end the earlier the slower they are, the slower."""
    plain = small()
    judge, first = plain.judge, plain.plans[0].plan
    ends = [one.interval[1] for one in plain.plans]
    assert judge.upper_ends([one.plan for one in plain.plans]) == pytest.approx(ends)
    # Another of the same degrees that says as much, and takes longer.
    other = first._replace(strategy=replace(first.strategy, attention="flash1"), seconds=first.seconds * 1.02)
    first = first._replace(strategy=replace(first.strategy, attention="flash2"))
    found = replace(plain.found, candidates=(first, other), front=(first,))
    assert answer_plan(found, judge).plans[0].plan.strategy == first.strategy

    def reversing(self: Judge, plans: list[RankedPlan]) -> list[float]:
        return [1 / one.seconds for one in plans]

    monkeypatch.setattr(Judge, "upper_ends", reversing)
    assert answer_plan(found, judge).plans[0].plan.strategy == other.strategy


def test_room_is_preferred_where_a_tie_is_tight() -> None:
    """With a memory that the quickest just fits into, what holds a tenth less comes first."""
    first = small().plans[0]
    box = replace(BOX, device=replace(BOX.device, memory=first.held.nbytes * 1.01))
    best = answered(GPT, box, 16).plans[0]
    assert best.held.nbytes <= 0.9 * box.device.memory and best.plan.seconds <= first.plan.seconds * (1 + TIE)


def test_of_least_memory_the_answer_has_the_least() -> None:
    answer = answered(GPT, BOX, 16, goal="memory")
    held = [one.plan.peak_bytes for one in answer.plans]
    assert held == sorted(held) and held[0] < small().plans[0].plan.peak_bytes
    assert held[0] == min(one.peak_bytes for one in answer.found.pareto) and answer.plans[1].lost.endswith(" more")


def test_what_would_change_the_answer_changes_it() -> None:
    """Of each change that is told the answer is searched again there, and is neither that one nor a tie with it."""
    wide = Model.load("gpt", layers=4, hidden=2048, heads=16, seq=1024, vocab=1000, precision="bf16")
    slow = replace(TWO, levels=(replace(TWO.levels[0], bandwidth=TWO.levels[0].bandwidth / 2), TWO.levels[1]))
    answer = answered(wide, slow, 16)
    told = find_changes(answer)
    assert told and all(": " in text for text in told)
    for text in told:
        if text.startswith("double the bandwidth between nodes"):
            levels = (replace(slow.levels[0], bandwidth=slow.levels[0].bandwidth * 2), slow.levels[1])
            assert f"{answer.found.again(replace(slow, levels=levels)).strategy.data}" in text
    tiny = replace(BOX, device=replace(BOX.device, memory=small().plans[0].held.nbytes * 1.5))
    assert any("half the memory: " in text for text in find_changes(answered(GPT, tiny, 16)))


def test_more_of_anything_is_searched_for() -> None:
    """What is quicker with more than there is, no search of what there is can know."""
    answer, asked = answered(GPT, TWO, 16), list[Topology]()
    again = answer.found.again
    watched = replace(answer.found, again=lambda other: asked.append(other) or again(other))
    find_changes(replace(answer, found=watched))
    more = [other for times, _, other in _changed_topologies(TWO) if times > 1]
    assert more and all(other in asked for other in more)


def test_what_is_not_searched_again_would_not_be_another() -> None:
    """With half of a link or of the memory fewer searches find the same changes as one for each."""
    asked: list[str] = []
    least = answered(GPT, BOX, 16, goal="memory").plans[0].held.nbytes
    tiny, tight = (replace(BOX, device=replace(BOX.device, memory=nbytes))
                   for nbytes in (small().plans[0].held.nbytes * 1.5, least * 1.05))  # fmt: skip
    for where in (TWO, tiny, tight):
        answer = answered(GPT, where, 16)
        told = find_changes(answer)
        for _, text, other in _changed_topologies(where):
            try:
                best = answer.found.again(other).seconds
            except Infeasible:
                best = 0.0
            (still,) = answer.judge.prices_on(other, [answer.plans[0].plan])
            fits = answer.plans[0].held.nbytes <= other.device.memory
            changes = not fits or still > best * (1 + TIE)
            assert changes == any(line.startswith(f"{text}: ") for line in told), text
            asked += [text] if changes else []
    assert {text.split()[0] for text in asked} == {"half", "double"}


def test_a_machine_that_nobody_measured_is_known_less() -> None:
    """Where the host is no bound: of its seconds these steps say nothing on either machine."""
    answer = small()
    known, unknown = answer.judge.machine, like_fit(BOX, {name: shipped_fit(name) for name in shipped()}, BOX.name)
    quick = replace(known.parameters, launch=1e-9, eager=1e-9)
    measured, judge = (
        Judge(GPT, BOX, replace(fit, parameters=quick), answer.judge.certifier) for fit in (known, unknown)
    )
    mine, its = (x.judge(answer.plans[0].plan).interval for x in (measured, judge))
    assert math.log(its[1] / its[0]) > math.log(mine[1] / mine[0])
    assert answer.judge.has_measurements and not judge.has_measurements
    told = " ".join(answer_text(replace(answer, judge=judge)).split())
    assert f"no step was measured on such a machine, which is taken to be as {', '.join(unknown.taken)}" in told


def test_nothing_that_fits_is_said() -> None:
    with pytest.raises(Infeasible, match=r"none of .* strategies"):
        answered(GPT, replace(BOX, device=replace(BOX.device, memory=1e6)), 16)


def test_the_answer_is_one_screen() -> None:
    answer = replace(small(), notes=("x" * 50 + " " + "y" * 60,), changes=("half the memory: " + "data=8 " * 20,))
    lines = answer_text(answer).splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines) <= 50
    bar = next(line for line in lines if line.strip().startswith("[")).strip()
    assert len(bar) == 62


def test_what_certificates_refuse_is_a_line_a_reason() -> None:
    answer, one = small(), Strategy(data=8)
    assert "refused" not in answer_text(answer)
    refused = [RefusedPlan(one, "needs much", n) for n in (84e9, 81e9, 82e9)] + [RefusedPlan(one, "no job")]
    certifier = replace(answer.judge.certifier, refused=refused)
    told = answer_text(replace(answer, found=replace(answer.found, certifier=certifier))).splitlines()
    assert [x for x in told if "refused" in x] == [
        "1 refused by its certificate: no job",
        "3 refused by their certificates: 81 GB to 84 GB, and a device has 80 GB",
    ]


def test_a_strategy_in_words_says_each_choice() -> None:
    one = Strategy(data=2, tensor=4, pipeline=2, context=2, zero=3, fsdp=True, schedule="interleaved", interleave=2,
                   sequence_parallel=True, recompute="selective", global_batch=8)  # fmt: skip
    said = strategy_words(one)
    for word in ("2 replicas", "parameters", "tensors over 4, sequence too", "sequence over 2 (ulysses)",
                 "2 pipeline stages of 2 chunks (interleaved)", "attention computed again"):  # fmt: skip
        assert word in said


ASKED = ["plan", "gpt2", "--on", "dgx-a100-80g", "--nodes", "1", "--batch", "16"]


def run(*more: str) -> Any:
    return CliRunner().invoke(app, [*ASKED, *more, "--json"])


def test_the_command_takes_what_is_asked(tmp_path: Path) -> None:
    params = tmp_path / "slow.toml"
    params.write_text('machine = "x"\nsource = "y"\n[parameters]\nproduct = 0.01\n[fit]\nnames = []\ncovariance = []\n')
    plain = json.loads(run("--seq", "256", "--top", "3").stdout)
    assert len(plain["answer"]) == 3 and plain["answer"][0]["lost"] == ""
    slow = json.loads(run("--seq", "256", "--params", str(params), "--fix", "tp=2 dp=4").stdout)
    best = slow["answer"][0]
    assert (best["strategy"]["tensor"], best["strategy"]["data"]) == (2, 4)
    assert best["seconds"] > plain["answer"][0]["seconds"]
    held = json.loads(run("--memory", "40GB", "--reserve", "50%", "--goal", "memory").stdout)
    assert held["goal"] == "memory" and held["answer"][0]["peak_bytes"] < 20e9


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--reserve", "100%"], "--reserve '100%'; legal is a number of percent"),
        (["--memory", "0GB"], "--memory '0GB'; legal is more than 0 bytes"),
        (["--fix", "tp=2", "--fit", "tp=8"], "--fit looks at one strategy"),
        (["--goal", "tokens", "--fix", "tp=2"], "--fix with --goal tokens"),
        (["--goal", "quick"], "quick"),
        (["--goal", "quick"], "legal: step, memory, latency, tokens"),
        (["--precision", "fp7"], "legal: fp32, bf16, fp16, fp8, nvfp4"),
        (["--fit", "tp=8", "--prompt", "4"], "--fit looks at one strategy"),
        (["--goal", "tokens", "--placements"], "--placements with --goal tokens; legal is --goal step or memory"),
        (["--goal", "latency", "--precision", "fp8"], "--precision fp8 with --goal latency"),
        (["--prompt", "4"], "--prompt with --goal step"),
    ],
)
def test_the_command_refuses(more: list[str], reason: str) -> None:
    found = run(*more)
    assert found.exit_code != 0 and reason in str(found.exception)


def test_a_strategy_that_is_judged_says_what_bounds_it() -> None:
    told = json.loads(run("--fit", "tp=8").stdout)
    assert told["fits"] and told["causes"]["tensor"] > 0 and told["strategy"] == "tensor=8 precision=bf16"
    text = CliRunner().invoke(app, [*ASKED, "--fit", "tp=8"]).stdout
    assert text.startswith("fits: ") and "bound by" in text and "MFU" in text
