"""Every movement of a step is told once, with its seconds and bytes; and a measured step is held against it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardplan as sp
from shardplan.cli import app
from shardplan.core.pattern import communicates
from shardplan.errors import LayoutError, ShardplanError
from shardplan.hardware.topology import Topology
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.measured_row import row_of_plan
from shardplan.report.why import why_text
from shardplan.simulation.accuracy.forecast import forecast
from shardplan.simulation.accuracy.step_rows import read_steps
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import machine_of
from shardplan.simulation.interval import Interval
from shardplan.simulation.jobs.timing import COMPUTE
from shardplan.simulation.step_gap import step_gap
from shardplan.simulation.timeline import Timeline
from shardplan.simulation.why import WhyMovements, why
from shardplan.strategy.asked_model import parse_model
from shardplan.strategy.strategy import Strategy

SIZES: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "seq": 32, "vocab": 96}
BOX = sp.Topology.load("dgx-h100", nodes=1)


def job(family: str = "llama", **said: Any) -> sp.Job:
    sizes = SIZES | ({"experts": 4, "experts_per_token": 2} if family == "moe" else {})
    return sp.partition(sp.Model.load(family, **sizes), sp.Strategy(**{"global_batch": 16, **said}), BOX)


@pytest.mark.parametrize(
    "said",
    [
        {"tensor": 4},
        {"tensor": 2, "sequence_parallel": True, "data": 4, "zero": 1},
        {"data": 8, "fsdp": True, "prefetch": True},
        {"data": 4, "fsdp": True, "bucket": "1 MB", "pipeline": 2},
        {"context": 2, "data": 2, "pipeline": 2, "schedule": "zb-h1"},
        {"data": 4, "expert": 4, "tensor": 2, "family": "moe"},
    ],
)
def test_all_that_is_moved_in_a_step_is_told_once(said: dict[str, Any]) -> None:
    """Seconds and bytes over all movements are those of all collectives of the step, and of messages."""
    made = job(**said)
    found = why(made, BOX)
    line = found.timeline
    seconds, received = 0.0, 0
    runs = made.runs
    for (stage, kind), count in runs.items():
        rank = made.schedule.owners[stage]
        run = line.swept.ranks[rank]
        mine = [i for i, (s, k, _) in enumerate(run.actions) if (s, k) == (stage, kind)]
        ops = [op for op in line.opened.ops(rank, mine[len(mine) // 2]) if communicates(op.op.cost.pattern)]
        seconds += count * sum(op.end - op.start for op in ops)
        received += count * sum(op.op.cost.received_bytes for op in ops)
    here = [m for m in found.movements if m.made.mesh == m.wanted.mesh]
    assert sum(m.seconds * len(m.stages) for m in here) == pytest.approx(seconds, rel=1e-9)
    assert sum(m.received_bytes * len(m.stages) for m in here) == received
    assert all(0 <= m.exposed_seconds <= m.seconds * (1 + 1e-9) for m in here)
    messages = [end - start for start, end, _, _ in line.opened.messages.values()]
    assert sum(m.seconds for m in found.movements if m.made.mesh != m.wanted.mesh) == pytest.approx(sum(messages))
    order = [m.exposed_seconds for m in found.movements]
    assert order == sorted(order, reverse=True)


def large(**said: Any) -> WhyMovements:
    """A job whose products take as long as its movements."""
    sizes = {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq": 2048, "vocab": 4096}
    model = sp.Model.load("llama", **sizes, precision="bf16")
    return why(sp.partition(model, sp.Strategy(global_batch=16, **said), BOX), BOX)


def test_what_products_hide_is_not_exposed() -> None:
    """What is exposed in all movements is what the rank's streams have exposed, and less than what is moved."""
    found = large(data=8, fsdp=True, prefetch=True)
    moved, bare = (sum(getattr(m, name) for m in found.movements) for name in ("seconds", "exposed_seconds"))
    assert bare < 0.8 * moved
    assert bare == pytest.approx(sum(found.timeline.exposed.values()), rel=0.2)


def test_who_asks_and_what_removes_it_is_what_the_job_says() -> None:
    made = job(tensor=4)
    found = why(made, BOX)
    removed = [m for m in found.movements if m.remedy is not None]
    assert removed
    for m in removed:
        (movement,) = (x for x in made.movements[m.stages[0], m.action] if (x.value, x.by) == (m.value, m.asks))
        cheapest = next(a for a in made.alternatives(movement) if a.removes)
        assert m.remedy == cheapest and m.made == movement.plan.program.input_types[0]
    text = why_text(found, 3)
    assert "4 layers" not in text and "wants sum over tensor -> added" in text and "removes  who" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_place_is_asked_for_by_words() -> None:
    found = why(job(tensor=2, pipeline=2), BOX)
    layers = found.select("stage 0 layers all_reduce").movements
    assert layers and all(m.place == "layers" and 0 in m.stages and "all_reduce" in m.ops for m in layers)
    assert found.select("").movements == found.movements
    with pytest.raises(ShardplanError, match=r"no movement is at 'nowhere'; there are stage 0 B layers, "):
        found.select("nowhere")
    with pytest.raises(LayoutError, match="why: 3; legal is a Job"):
        why(3)  # type: ignore[arg-type]


def measured_like(found: WhyMovements, slower: dict[str, float], late: dict[int, float]) -> Timeline:
    """The predicted step as if it were measured, on every device, one op after another with some slower."""
    line, out = found.timeline, list[Interval]()
    stage_of = {d: k for k, mesh in enumerate(line.job.programs.meshes) for d in mesh.devices}
    for device, stage in stage_of.items():
        rank = line.job.schedule.owners[stage]
        at = 0.0
        for i in range(len(line.swept.ranks[rank].actions)):
            for op in line.opened.ops(rank, i):
                talks = op.op.cost.stream != COMPUTE
                kind = op.op.cost.kind
                times = slower.get(kind, 1.0) * (1.0 if talks else late.get(device, 1.0))
                end = at + (op.end - op.start) * times
                stream = "comm 0" if talks else "compute 0"
                out.append(Interval(device, stream, at, end, kind, kind))
                at = end
    return Timeline(tuple(sorted(out, key=lambda i: i.start)), source="measured")


def test_the_gap_is_where_it_was_put() -> None:
    found = why(job(tensor=4, data=2), BOX)
    same = step_gap(found.timeline, measured_like(found, {}, {}))
    assert all(abs(one.gap) < 1e-9 * same.predicted_seconds for one in same.kinds) and not same.stragglers
    slow = step_gap(found.timeline, measured_like(found, {"all_reduce": 3.0}, {}))
    first = slow.kinds[0]
    assert first.kind == "all_reduce" and first.measured_seconds == pytest.approx(3 * first.predicted_seconds)
    assert slow.exposed[1] > slow.exposed[0]
    late = step_gap(found.timeline, measured_like(found, {}, {5: 200.0}))
    assert [one.device for one in late.stragglers] == [5]
    with pytest.raises(ShardplanError, match="nothing was measured"):
        step_gap(found.timeline, Timeline((), source="measured"))
    strange = Timeline((Interval(99, "compute 0", 0.0, 1.0, "x", "einsum"),), source="measured")
    with pytest.raises(ShardplanError, match="rank 99 was measured, and the plan has devices 0 to 7"):
        step_gap(found.timeline, strange)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "launch"
    runner = CliRunner()
    asked = ["plan", "gpt2", "--on", "dgx-h100", "--nodes", "1", "--batch", "16", "--fit", "tp=2 zero=1"]
    assert runner.invoke(app, [*asked, "--out", str(out)]).exit_code == 0
    told = runner.invoke(app, ["why", str(out), "stage 0", "B", "--top", "2"])
    assert told.exit_code == 0 and "all_reduce of %" in told.output and " more, " in told.output
    said = json.loads(runner.invoke(app, ["why", str(out / "plan.json"), "--json"]).output)
    assert said["movements"][0]["exposed_seconds"] == max(m["exposed_seconds"] for m in said["movements"])
    events = [{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7, "ts": 0, "dur": 9e6},
              {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 8, "ts": 9e6, "dur": 1e6}]  # fmt: skip
    traces = []
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events}))
        traces += ["--measured", str(path)]
    gap = runner.invoke(app, ["why", str(out), *traces])
    assert gap.exit_code == 0 and "step      measured 10 s" in gap.output, gap.output
    assert next(x for x in gap.output.splitlines() if x.startswith("all_reduce")).split()[-2:] != ["0", "s"]
    rows, params = tmp_path / "rows.jsonl", tmp_path / "params.toml"
    for number in (1, 2):  # it makes the file, and adds to it
        fed = runner.invoke(app, ["why", str(out), *traces, "--rows", str(rows)])
        assert fed.exit_code == 0 and f"measured/{number} added to {rows}: shardplan calibrate" in " ".join(
            fed.output.split()
        )
    first, second = read_steps(rows)
    assert first.measured.seconds_per_step == second.measured.seconds_per_step == 10.0
    assert first.strategy.tensor == 2 and first.strategy.data == 4 and first.strategy.zero == 1
    fitted = runner.invoke(app, ["calibrate", "--steps", str(rows), "--on", "dgx-h100", "--out", str(params)])
    assert fitted.exit_code == 0, fitted.output
    asked[-2:] = ["--params", str(params)]
    again = json.loads(runner.invoke(app, [*asked, "--fit", "tp=2 zero=1", "--json"]).output)["seconds"]
    before = json.loads((out / "plan.json").read_text())["predicted"]["seconds"]
    assert before < again  # nearer to ten seconds than before
    rows.write_text("no rows\n")
    refused = runner.invoke(app, ["why", str(out), *traces, "--rows", str(rows)]).exception
    assert "line 1" in str(refused) and rows.read_text() == "no rows\n"
    for wrong in (
        ["why", str(tmp_path / "rank0.json")],
        ["why", str(out), "--step", "1"],
        ["why", str(out), "--rows", str(rows)],
    ):
        assert isinstance(runner.invoke(app, wrong).exception, ShardplanError)
    for more in (["--json"], traces):
        refused = runner.invoke(app, ["why", str(out), "--top", "2", *more]).exception
        assert isinstance(refused, ShardplanError) and f"--top 2 with {more[0]}, which" in str(refused)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b,layers=4", "qwen3-8b,layers=4", "mixtral-8x7b,layers=2"])
@pytest.mark.parametrize("degrees", [{"data": 4, "tensor": 2}, {"data": 8, "shard": 2, "fsdp": True}], ids=str)
def test_a_row_of_a_plan_is_predicted_as_the_plan_is(name: str, degrees: dict[str, Any]) -> None:
    """The model that a row says by its sizes, on the row's cluster, takes what the plan was said to take."""
    where = Topology.load("dgx-h100", nodes=1)
    asked = parse_model(name, 1024)
    strategy = Strategy(**degrees, global_batch=16, precision="bf16")
    plan = HandedPlan(asked.title, asked.name, {**asked.fields, "precision": "bf16"}, where, strategy)
    row = row_of_plan(plan, 1.0, "measured/1")
    (one,), skipped = forecast([row])
    told = ClosedForm(plan.model, where, machine_of(where).parameters).seconds(Configurations.of([strategy]))
    assert not skipped and one.seconds_per_step == pytest.approx(float(told[0]), rel=0.01)


def test_what_no_row_can_say_is_refused() -> None:
    where = Topology.load("dgx-h100", nodes=1)
    for model, said, text in (
        ("mlp-xs", {}, "legal are decoders by their sizes"),
        ("qwen3-0.6b", {}, "would be a llama of [0-9,]+ parameters, and it has"),  # tied, which no row says
        ("gpt2-xs", {"recompute": ("einsum",)}, "a row has no recompute by names of ops"),
        (
            "gpt2-xs",
            {"recompute": "full", "recompute_layers": 2},
            "names of ops or layers",
        ),
    ):
        plan = HandedPlan("mine", model, {}, where, Strategy(data=8, **said))
        with pytest.raises(ShardplanError, match=text):
            row_of_plan(plan, 1.0, "measured/1")


def test_a_predicted_step_has_no_measured_devices() -> None:
    """A device that computes no longer than the others is none that is late, whatever it waits for."""
    found = large(tensor=2, data=4)
    line = measured_like(found, {"all_reduce": 5.0}, {})
    shifted = tuple(replace(i, start=i.start + 1.0, end=i.end + 1.0) if i.device == 3 else i for i in line.intervals)
    late = step_gap(found.timeline, Timeline(tuple(sorted(shifted, key=lambda i: i.start)), source="measured"))
    assert not late.stragglers
