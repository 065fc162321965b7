"""Plans handed over: they come back as they were, run where they can be run here, and say what cannot be said."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shardplan import ParseError, Schedule, Strategy, Topology
from shardplan.cli import app
from shardplan.launches.handover.folder import write_folder
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.megatron import mapping_of, write_megatron
from shardplan.launches.handover.scripts import audit_plan
from shardplan.launches.handover.specs import tensor_cuts, write_jax, write_torch
from shardplan.launches.handover.torchtitan import write_torchtitan
from shardplan.simulation.simulate import simulate
from shardplan.simulation.timeline import load_timelines
from shardplan.strategy.schedules.table import schedule
from shardplan.strategy.strategy_text import parse_strategy

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "seq": 8, "vocab": 32}
BOX = Topology.load("dgx-h100", nodes=1)
FOUR = Topology.load("dgx-h100", nodes=1).resize(gpus=4)


def handed(text: str, topology: Topology = BOX, **more: Any) -> HandedPlan:
    strategy = parse_strategy(text, topology.size, global_batch=16)
    return HandedPlan("tiny", "llama", {**SIZES, **more}, topology, strategy)


@pytest.mark.parametrize(
    "text", ["tp=2 pp=2 vpp=1 sp zero=1", "fsdp shard=2 recompute=full", "pp=2 schedule=zb-h1", "dp=8"]
)
def test_a_plan_comes_back_as_it_was(text: str, tmp_path: Path) -> None:
    plan = replace(handed(text), predicted={"seconds": 1.5, "held": [{"what": "x", "bytes": 3}]})
    write_folder(tmp_path / "out", plan)
    again = HandedPlan.load(tmp_path / "out")
    assert again == plan == HandedPlan.load(tmp_path / "out" / "plan.json")
    assert again.model.parameters == plan.model.parameters
    if plan.strategy.shard is None:  # what the closed form has no column for
        one, other = (simulate(p.model, p.strategy, p.topology, "closed").seconds for p in (plan, again))
        assert one == other


def test_a_schedule_of_ones_own_comes_back(tmp_path: Path) -> None:
    own = Schedule(schedule("1f1b", 2, 4).ranks, 4, name="mine")
    plan = handed("dp=8")
    plan = replace(plan, strategy=Strategy(pipeline=2, data=4, global_batch=16, schedule=own))
    write_folder(tmp_path, plan)
    assert HandedPlan.load(tmp_path) == plan
    said = list(csv.reader((tmp_path / "torchtitan" / "schedule.csv").read_text().splitlines()))
    assert [[c for c in row if c] for row in said] == [[str(a) for a in row if a] for row in own.ranks]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "x"}, "format 'x'; legal is 'shardplan handed plan 1'"),
        ({"order": ["data"]}, "order is .*; legal are pipeline, data, context, tensor in any order"),
        ({"strategy": {"width": 2}}, "a strategy has no width"),
        ({"fields": 3}, "fields is 3; legal is a dict"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        HandedPlan.parse(json.dumps(json.loads(handed("dp=8").to_json()) | change))


@pytest.mark.parametrize("nodes", [1, 4])
def test_scripts_are_bash_and_well_placed(nodes: int, tmp_path: Path) -> None:
    plan = handed("tp=4", Topology.load("dgx-h100", nodes=nodes))
    write_folder(tmp_path, plan)
    for name in ("slurm.sh", "torchrun.sh"):
        subprocess.run(["bash", "-n", tmp_path / name], check=True)
        text = (tmp_path / name).read_text()
        assert f"--nnodes {nodes} --nproc-per-node 8" in text
    assert f"#SBATCH --nodes={nodes}\n" in (tmp_path / "slurm.sh").read_text()
    assert audit_plan(plan).verdict == "canonical"


def test_the_numbering_of_megatron_is_the_plans_or_none() -> None:
    """The flag stands only where it is needed: of axes of one device the place says nothing."""
    swapped = ("data", "pipeline", "context", "tensor")
    usual, odd = ("pipeline", "data", "context", "tensor"), ("tensor", "data", "context", "pipeline")
    cases = (
        ("tp=2 pp=2", swapped, True),
        ("tp=2 pp=2", usual, False),
        ("tp=2", swapped, False),
        ("tp=2 pp=2", odd, None),
    )
    for text, order, wanted in cases:
        plan = replace(handed(text), order=order)
        made = write_megatron(plan)
        assert ("--use-tp-pp-dp-mapping" in made.files["arguments.txt"]) == bool(wanted)
        assert (mapping_of(plan) is None) == (wanted is None) == any("the order tensor" in x for x in made.lines)


def test_what_cannot_be_said_is_a_line_and_what_runs_is_another_strategy() -> None:
    plan = handed("tp=2 zero=1 recompute=selective context_kind=ulysses")
    titan, megatron = write_torchtitan(plan), write_megatron(plan)
    assert any(x.startswith("zero=1 without fsdp") for x in titan.lines)
    assert (titan.runs.fsdp, titan.runs.zero, titan.runs.recompute) == (True, 2, "selective_op")
    assert all(f"# cannot be said: {x}\n" in titan.files["plan_config.py"] for x in titan.lines)
    assert megatron.runs == plan.strategy and not megatron.lines
    assert "--recompute-granularity selective" in megatron.files["arguments.txt"]
    uneven = write_megatron(handed("pp=2 zero=1", layers=5))
    assert "--pipeline-model-parallel-layout 'Ett" in uneven.files["arguments.txt"]


def test_how_experts_are_served_is_said_or_a_line() -> None:
    """Megatron has options for it; torchtitan's overrides have none, and what runs there is as by default."""
    strategy = Strategy(data=2, context=2, expert=2, expert_from="context", dispatch="levels", expert_products="loop",
                        fsdp=True, context_kind="gather")  # fmt: skip
    plan = HandedPlan("", "mixtral-8x7b", {"layers": 2}, FOUR, strategy)
    titan, arguments = write_torchtitan(plan), write_megatron(plan).files["arguments.txt"]
    assert {"dispatch=levels", "expert_products=loop"} <= {*titan.lines}
    assert (titan.runs.dispatch, titan.runs.expert_products) == (None, None)
    assert any(x.startswith("experts over devices of context first") for x in titan.lines)
    assert "--moe-enable-deepep" in arguments and "--moe-grouped-gemm" not in arguments


@pytest.mark.parametrize("text", ["fsdp", "tp=2 fsdp", "fsdp zero=2 tp=2"])
def test_torch_runs_it_and_the_loss_is_the_same(text: str, tmp_path: Path) -> None:
    """Three steps on four processes, and on one: parameters are updated alike, and each holds its part."""
    write_folder(tmp_path, handed(text, FOUR))
    child = [sys.executable, str(Path(__file__).with_name("handover_child.py"))]
    every = [subprocess.Popen([*child, str(k), "4", str(tmp_path / "store"), str(tmp_path / "torch" / "plan.py")],
                              stderr=subprocess.PIPE, text=True) for k in range(4)]  # fmt: skip
    said = [one.communicate(timeout=120)[1] for one in every]
    assert [one.returncode for one in every] == [0] * 4, said[0][-2000:]


def test_jax_compiles_it_and_one_sum_is_all_that_moves() -> None:
    """The MLP of a layer by the plan's specs, forward on 8 devices: one all-reduce, and nothing else."""
    code = (
        "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
        "import re, sys, jax, jax.numpy as jnp\nfrom jax.sharding import NamedSharding as N\n"
        "space = {}\nexec(sys.stdin.read(), space)\nmesh, P = space['make_mesh'](), space['PARAMETERS']\n"
        "name = 'model.layers.{layer}.mlp.%s_proj.weight'\n"
        "specs = [P[name % n] for n in ('gate', 'up', 'down')]\n"
        "x = N(mesh, jax.sharding.PartitionSpec(*space['BATCH'], None))\n"
        "def mlp(x, gate, up, down): return (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T\n"
        "step = jax.jit(mlp, in_shardings=(x, *(N(mesh, s) for s in specs)), out_shardings=x)\n"
        "text = step.lower(*(jnp.zeros(s) for s in ((4, 8, 16), (24, 16), (24, 16), (16, 24)))).compile().as_text()\n"
        "print(sorted(re.findall(r'= \\S+ (all-[a-z]+|reduce-scatter|collective-permute)\\(', text)))\n"
    )
    written = write_jax(handed("tp=4")).files["specs.py"]
    found = subprocess.run([sys.executable, "-c", code], input=written, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "['all-reduce']", found.stderr[-2000:]


def test_cuts_of_a_checkpoint_are_those_of_the_job() -> None:
    """The part of a stored tensor that a device has is as large as its part of our value."""
    for text in ("tp=4 zero=3", "tp=2 fsdp", "tp=8 zero=3"):
        plan = handed(text, heads=8, hidden=32)
        cuts, odd = tensor_cuts(plan.model, plan.strategy)
        sizes, layouts = plan.strategy.axes(plan.model), plan.strategy.layouts(plan.model)
        mesh = plan.strategy.mesh(plan.model)
        assert not odd
        for name, p in plan.model.parameters.items():
            held = layouts.held_layout(name, plan.model.dims[name], mesh)
            t = layouts.stored_type(name, plan.model.dims[name], plan.model.program.types[name], mesh, held)
            parts = int(np.prod([sizes[a] for axes in cuts[p.file].stored for a in axes]))
            assert parts == int(np.prod([sizes[a] for axes in t.layout.dims for a in axes]))


def test_the_command_writes_it_all(tmp_path: Path) -> None:
    out = tmp_path / "launch"
    asked = [
        "plan",
        "gpt2",
        "--on",
        "dgx-h100",
        "--nodes",
        "1",
        "--batch",
        "16",
        "--fit",
        "tp=2 pp=2",
        "--out",
        str(out),
    ]
    pytest.importorskip("plotly")
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == {
        "plan.json", "torchtitan/plan_config.py", "torchtitan/overrides.txt", "megatron/arguments.txt", "torch/plan.py",
        "jax/specs.py", "slurm.sh", "torchrun.sh", "trace.json", "report.html"}  # fmt: skip
    plan, (line,) = HandedPlan.load(out), load_timelines(out / "trace.json")
    assert line.seconds == pytest.approx(plan.predicted["seconds"], rel=0.1) and line.devices == (0, 1)
    assert "launched by its scripts it is canonical" in " ".join(found.stdout.split())
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, [*asked[:-1], str(tmp_path / "file")])
    assert "it is a file; legal is a folder" in str(refused.exception)


def test_torch_says_what_it_leaves_to_the_module() -> None:
    made = write_torch(handed("pp=2 tp=2 sp zero=1"))
    assert [x.split(":")[0].split("=")[0] for x in made.lines] == ["zero", "pipeline", "sequence_parallel"]
    # Rows of a weight `[out, in]` are cut where its product opens a pair, and columns where one closes it.
    said = dict(re.findall(r'"(?:.*\.)?(\w+)": (\w+)\(', made.files["plan.py"]))
    assert said.pop("embed_tokens") == "RowwiseParallel" and said.pop("lm_head") == "ColwiseParallel"
    assert {n for n, kind in said.items() if kind == "RowwiseParallel"} == {"o_proj", "down_proj"}
    assert {n for n, kind in said.items() if kind == "ColwiseParallel"} == {
        "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}  # fmt: skip
