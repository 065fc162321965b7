"""The command simulate: its table, its object, its trace, and its mistakes."""

import json
from pathlib import Path

import pytest

import shardplan as sp
from shardplan.cli import run_command
from shardplan.simulation.timeline import load_timelines


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan = sp.redistribute("f32[64@x, 64]", "f32[64, 64@x]", topology="dgx-a100", mesh="x=32")
    plan.save(path)
    return path


def test_a_plan_is_simulated_where_it_was_planned(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = plan_file.with_name("trace.json")
    assert run_command(["simulate", str(plan_file), "--json", "--out", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = sp.Plan.load(plan_file)
    timeline = sp.simulate(plan.program, plan.certificate.where)
    assert found["seconds"] == timeline.seconds == pytest.approx(plan.seconds)
    assert list(found) == ["seconds", "peak_bytes", "breakdown", "bubble_seconds", "idle_seconds", "critical_path"]
    assert found["peak_bytes"] == timeline.peak_bytes
    assert [link["step"] for link in found["critical_path"]] == [i.step for i in timeline.critical_path]
    assert load_timelines(trace)[0].devices == timeline.devices


def test_another_topology_may_be_named(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["simulate", str(plan_file), "--topology", "dgx-h100", "--nodes", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("predicted: events, dgx-h100") and sp.Plan.load(plan_file).program.steps[0].op.name in out


def test_a_program_needs_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "program.txt"
    path.write_text(str(sp.redistribute("f32[8@x]", "f32[8]", mesh="x=2").program))
    assert run_command(["simulate", str(path)]) == 2
    assert capsys.readouterr().err.startswith("shardplan: no topology is known to simulate on: give --topology")
