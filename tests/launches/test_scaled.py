"""Plans scaled down: the same kinds of parallelism on small sizes, and a step that equals the whole model's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from execution.torch_launch import torchrun
from shardplan import LayoutError, Model, Schedule, ShardplanError, Strategy, Topology, partition
from shardplan.cli import app
from shardplan.execution import beside_whole
from shardplan.execution.beside_whole import step_beside_whole
from shardplan.launches.handover.folder import write_folder
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.scaled_plan import DEGREES, scale_plan
from shardplan.strategy.schedules.table import schedule
from shardplan.strategy.strategy_text import parse_strategy

BOX = Topology.load("dgx-h100", nodes=4)


def handed(model: str, text: str, topology: Topology = BOX, **fields: Any) -> HandedPlan:
    return HandedPlan("", model, fields, topology, parse_strategy(text, topology.size, global_batch=topology.size * 4))


@pytest.mark.parametrize(
    ("model", "text", "most"),
    [
        ("llama3-8b", "tp=8 sp zero=1", 32),
        ("llama3-70b", "tp=4 pp=4 vpp=2 sp zero=1 recompute=full", 8),
        ("deepseek-v3", "pp=8 ep=4 zero=1 recompute=selective", 4),
        ("qwen3-30b-a3b", "ep=8 tp=2 cp=2 fsdp", 8),
        ("llama3-8b", "cp=4 context_kind=zigzag tp=8 fsdp", 8),
        ("gpt2", "tp=2 pp=2 schedule=zb-v zero=2", 16),
        ("dlrm-kaggle", "ep=8 dp=32", 8),
        ("mlp-xs", "tp=2 pp=4 schedule=zb-h1 fsdp", 8),
    ],
)
def test_a_step_scaled_down_equals_the_whole_models(model: str, text: str, most: int) -> None:
    plan = handed(model, text)
    found = scale_plan(plan, most)
    assert found.strategy.devices <= most
    for name in DEGREES:
        assert (getattr(found.strategy, name) > 1) == (getattr(plan.strategy, name) > 1), name
    for name in ("fsdp", "zero", "sequence_parallel", "recompute", "context_kind", "schedule", "interleave"):
        assert getattr(found.strategy, name) == getattr(plan.strategy, name), name
    one = step_beside_whole(found.model, partition(found.model, found.strategy))
    assert one.is_equal, one
    assert {kind for kind, *_ in one.kinds} >= {"loss", "gradients", "parameters"}


def test_another_model_is_seen() -> None:
    """What is compared is another computation: another order of positions makes other losses and gradients."""
    found = scale_plan(handed("llama3-8b", "cp=4 tp=8 context_kind=zigzag fsdp"), 8)
    other = found.model.resize(seq=found.model.fields["seq"])
    job = partition(found.model, found.strategy)
    assert step_beside_whole(other, job).is_equal
    assert not step_beside_whole(job.model, job).is_equal  # its positions are in the order of the job


@pytest.mark.parametrize("name", ["gradient.layers.weight", "layers.weight"])
def test_a_value_that_one_side_lacks_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load("mlp", layers=2, hidden=4, dtype="f64", optimizer="sgd")
    job = partition(model, Strategy(tensor=2))
    whole = beside_whole.run

    def lacking(*asked: Any) -> dict[str, Any]:
        return {key: value for key, value in whole(*asked).items() if key != name}

    monkeypatch.setattr(beside_whole, "run", lacking)
    found = step_beside_whole(model, job)
    assert not found.is_equal and [who for *_, apart, who in found.kinds if apart == float("inf")] == [name]


def test_what_is_otherwise_than_in_the_plan_is_said() -> None:
    plan = handed("llama3-8b", "dp=4 tp=8 precision=bf16 reduce_dtype=bf16 gradient_dtype=bf16 attention=cudnn")
    lines = scale_plan(plan, 8).lines
    assert {"reduce_dtype=bf16 as None", "gradient_dtype=bf16 as None", "attention=cudnn as None"} <= {*lines}
    cut = HandedPlan("", "llama3-8b", {}, BOX, Strategy(pipeline=2, data=2, global_batch=4, cuts=(20,)))
    assert "cuts=(20,) as None" in scale_plan(cut, 8).lines


@settings(max_examples=60, deadline=None)
@given(*(st.sampled_from((1, 2, 3, 4, 8, 31)) for _ in range(3)), st.sampled_from((2, 4, 8, 64)))
def test_degrees_shrink_to_as_many_devices(data: int, tensor: int, pipeline: int, most: int) -> None:
    s = Strategy(data=data, tensor=tensor, pipeline=pipeline, global_batch=4 * data)
    kinds = [n for n in (data, tensor, pipeline) if n > 1]
    plan = HandedPlan("", "llama3-70b", {}, BOX, s)
    if 2 ** len(kinds) > most:
        with pytest.raises(ShardplanError, match="2 for each kind"):
            scale_plan(plan, most)
        return
    found = scale_plan(plan, most).strategy
    assert found.devices <= most
    assert [getattr(found, n) > 1 for n in DEGREES] == [getattr(s, n) > 1 for n in DEGREES]
    if s.devices <= most:
        assert all(getattr(found, n) == getattr(s, n) for n in DEGREES)


def test_what_is_otherwise_is_said() -> None:
    own = Schedule(schedule("1f1b", 2, 4).ranks, 4, name="mine")
    s = Strategy(pipeline=2, data=16, global_batch=64, schedule=own)
    kept = scale_plan(HandedPlan("", "llama3-8b", {}, BOX, s), 8)
    assert kept.strategy.schedule == own and "degrees: data 16 as 4" in kept.lines
    long = Strategy(pipeline=4, data=8, global_batch=64, schedule=Schedule(schedule("1f1b", 4, 8).ranks, 8, name="x"))
    assert "a schedule of one's own as 1f1b" in scale_plan(HandedPlan("", "llama3-8b", {}, BOX, long), 4).lines
    assert any("computed in f64" in x for x in kept.lines)


def test_the_commands_take_the_folder_and_its_file(tmp_path: Any) -> None:
    """check and show of DIR and of DIR/plan.json; what is no such folder, or has no prediction, is refused."""
    out = tmp_path / "launch"
    runner = CliRunner()
    asked = ["plan", "gpt2", "--on", "dgx-h100", "--nodes", "1", "--batch", "16", "--fit", "tp=2 zero=1"]
    told = runner.invoke(app, [*asked, "--out", str(out)])
    assert told.exit_code == 0, told.output
    for path in (out, out / "plan.json"):
        checked = runner.invoke(app, ["check", str(path), "--devices", "4"])
        assert checked.exit_code == 0 and "ok: loss" in checked.output, checked.output
        shown = runner.invoke(app, ["show", str(path)])
        assert shown.exit_code == 0
        for line in told.output.splitlines():
            if line.startswith(("step  ", "tokens ", "MFU ", "memory ")):
                assert line in shown.output
    assert "PartitionSpecs by parameter" in shown.output
    assert isinstance(runner.invoke(app, ["check", str(tmp_path)]).exception, ShardplanError)
    assert isinstance(runner.invoke(app, ["check", str(out), "--devices", "1"]).exception, ShardplanError)
    assert isinstance(runner.invoke(app, ["run", str(out), "--backend", "jax"]).exception, LayoutError)
    bare = HandedPlan.load(out)
    write_folder(tmp_path / "bare", HandedPlan(bare.title, bare.name, bare.fields, bare.topology, bare.strategy))
    lacks = runner.invoke(app, ["show", str(tmp_path / "bare")])
    assert "what is predicted of a plan lacks" in str(lacks.exception)


def test_it_runs_on_processes_and_its_times_stand_beside_the_predicted(tmp_path: Any) -> None:
    write_folder(tmp_path, handed("llama3-8b", "tp=4 pp=2 zero=1"))
    found = torchrun(8, "-m", "shardplan", "run", str(tmp_path), "--json")
    assert found.returncode == 0, found.stderr[-3000:]
    import json

    told = json.loads(next(x for x in found.stdout.splitlines() if x.startswith("{")))
    assert told["ok"] and told["devices"] == 8 and told["loss"] == pytest.approx(told["whole_loss"], rel=1e-12)
    assert {(a["stage"], a["kind"]) for a in told["actions"]} == {(s, k) for s in (0, 1) for k in ("F", "B", "OPT")}
    assert all(a["measured_seconds"] > 0 and a["predicted_seconds"] > 0 for a in told["actions"])
    assert told["seconds"] > 0 and told["predicted_seconds"] > 0
