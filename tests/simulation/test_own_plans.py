"""A schedule and tables of one's own are checked, certified, timed, and stand among what was searched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardplan as sp
from shardplan.cli import run_command
from shardplan.cli.statuses import IMPOSSIBLE, MISTAKE
from shardplan.simulation.closed.machines import machine_of
from shardplan.simulation.searching.answer import Judge, answer_plan
from shardplan.simulation.searching.certifier import even_cuts
from shardplan.simulation.searching.own_plans import OwnParts, judge_own, step_seconds
from shardplan.simulation.steps import derate
from shardplan.strategy.schedules import schedule

BOX = sp.Topology.load("dgx-a100-80g", nodes=1)
MODEL = sp.Model.load("gpt", layers=8, hidden=512, heads=8, seq=256, vocab=4096, precision="bf16")
ASKED = ["plan", "gpt,layers=8,hidden=512,heads=8,seq=256,vocab=4096", "--on", "dgx-a100-80g", "--nodes", "1",
         "--batch", "32", "--top", "3"]  # fmt: skip


@pytest.fixture(scope="module")
def judged() -> tuple[Judge, list[Any]]:
    found = sp.search(MODEL, BOX, 32, top=10)
    assert found.certifier is not None
    judge = Judge(MODEL, BOX, machine_of(BOX), found.certifier)
    return judge, [one.plan for one in answer_plan(found, judge, 3).plans]


def test_a_schedule_that_has_a_name_is_timed_and_certified_as_by_its_name(judged: tuple[Judge, list[Any]]) -> None:
    judge, ours = judged
    own = OwnParts({}, schedule("1f1b", 4, 8), None, "schedule x.csv")
    found = judge_own(judge, own, 32, "bf16", ours)
    assert [one.seconds for one in found.plans] == sorted(one.seconds for one in found.plans)
    assert all(s.pipeline == 4 and s.microbatches == 8 for s in (one.strategy for one in found.plans))
    for one in found.plans:
        named = replace(one.strategy, schedule="1f1b")
        named = replace(named, cuts=even_cuts(MODEL, named))
        assert one.seconds == pytest.approx(step_seconds(judge, named), rel=1e-9)
        assert one.peak_bytes == judge.certifier.peak(replace(named, cuts=None)).nbytes
    assert found.place == 1 + sum(o.seconds < found.plans[0].seconds for o in found.ours)
    assert {o.strategy for o in found.ours} == {o.strategy for o in ours}


def test_events_take_a_schedule_of_ones_own() -> None:
    """As they take it by its name; and a step of it op by op is that of its job."""
    s = sp.Strategy(data=2, pipeline=4, microbatch=2, global_batch=32, precision="bf16", schedule="zb-h1")
    own = replace(s, schedule=schedule("zb-h1", 4, 8), interleave=None)
    assert sp.simulate(MODEL, own, BOX).seconds == sp.simulate(MODEL, s, BOX).seconds
    looped = replace(s, schedule=schedule("looped-bfs", 4, 8, 2), interleave=None)
    assert looped.interleave == 2
    assert sp.simulate(MODEL, looped, BOX).seconds > 0


def test_tables_of_the_strategy_are_as_without_them(judged: tuple[Judge, list[Any]]) -> None:
    judge, ours = judged
    plain = sp.Strategy(data=4, tensor=2, microbatch=2, global_batch=32, precision="bf16")
    fixed = {"data": 4, "tensor": 2, "microbatch": 2}
    found = judge_own(judge, OwnParts(fixed, None, plain.layouts(MODEL), "layouts x"), 32, "bf16", ours)
    (one,) = found.plans
    assert one.peak_bytes == judge.certifier.peak(one.strategy).nbytes
    where = derate(BOX, judge.machine.parameters)
    assert one.seconds == sp.simulate(sp.partition(MODEL, one.strategy, where), where).seconds


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, tables = tmp_path / "mine.csv", tmp_path / "tables.txt"
    schedule("zb-h1", 4, 8).to_csv(csv)
    tables.write_text(str(sp.Strategy(data=4, tensor=2, microbatch=2, global_batch=32).layouts(MODEL)))
    assert run_command([*ASKED, "--fix", str(csv)]) == 0
    told = capsys.readouterr().out
    assert "yours     schedule" in told and "checked and certified: place" in " ".join(told.split())
    assert "yours: data=2 pipeline=4" in told and "schedule=mine.csv" in told
    assert max(map(len, told.splitlines())) <= 80 or str(tmp_path) in told
    assert run_command([*ASKED, "--fix", f"tp=2 layouts={tables}", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["own"]
    assert own["own"] and 1 <= own["place"] <= len(own["own"]) + len(own["ours"])
    assert all(one["strategy"]["tensor"] == 2 for one in (*own["own"], *own["ours"]))


@pytest.mark.parametrize(
    ("words", "text", "status", "said"),
    [
        (["--fix", "schedule=none.csv"], None, MISTAKE, "none.csv is no schedule"),
        (["--fix", "layouts=none.txt"], None, MISTAKE, "none.txt"),
        (["--fix", "layouts={}"], "", MISTAKE, "has no table; legal are serve, stored, held"),
        (["--fix", "layouts={}"], "serve\n  data batch\n", MISTAKE, "line 2 of layouts"),
        (["--fix", "schedule={}.csv"], "0F0,0B0,0F1\n", MISTAKE, "0B1"),
        (["--fix", "pp=2 schedule={}.csv"], "0F0,0B0\n", MISTAKE, "pipeline=2 with schedule"),
        (["--fix", "schedule={}.csv"], "0F0,0B0\n1F0,1B0\n2F0,2B0\n", MISTAKE, "of 3 ranks and 1 microbatches"),
        (["--fix", "schedule={}.csv", "--goal", "memory"], "0F0,0B0\n", MISTAKE, "legal is --goal step"),
        (["--fix", "layouts={}"], "serve\n  sideways: batch\n", MISTAKE, "has the axis 'sideways'; legal are"),
        (["--fix", "layouts={}"], "serve\n  tensor: nothing\n", IMPOSSIBLE, "is legal and fits; the first, data="),
        (["--fix", "layouts={} layouts={}"], "serve\n  data: batch\n", MISTAKE, "layouts is said twice"),
        (["--fix", "schedule={}.csv", "--fit", "tp=8"], "0F0,0B0\n", MISTAKE, "--fit looks at one strategy"),
    ],
)
def test_what_is_refused(
    words: list[str], text: str | None, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with the status that says whose fault it is."""
    path = tmp_path / "file"
    if text is not None:
        for one in (path, path.with_suffix(".csv")):
            one.write_text(text)
    assert run_command([*ASKED, *(word.replace("{}", str(path)) for word in words)]) == status
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("shardplan: "), error
