"""What the lab's commands print and draw: on a stored result, and, where the machine can, on real links."""

import json
import math
from pathlib import Path

import pytest

import shardplan as sp
from execution.lab_here import needs_lab
from shardplan.cli.lab import (
    _subjects,
    in_order,
    lab_run_command,
    lab_sweep_command,
    lab_validate_command,
    ranks_in_order,
    read_leaf,
    read_rates,
)
from shardplan.core.ops import AllGather
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import LayoutError, ParseError, TopologyError
from shardplan.execution.lab import CONSTANTS, Cluster, Measurement
from shardplan.execution.lab.measurement import Repetition
from shardplan.execution.lab.results import Sweep
from shardplan.hardware.placement import Placement
from shardplan.report.lab_text import run_answer, sweep_text
from shardplan.report.text import json_text
from shardplan.simulation.replay import replayed
from shardplan.simulation.scripts import script_of
from shardplan.simulation.timeline import Timeline

STORED = Path(__file__).parents[1] / "execution" / "lab_results" / "small.json"
LATE = 5.0


def program(mesh: sp.Mesh) -> Program:
    t = sp.TensorType.parse("i32[64@x, 4]", mesh)
    return Program({"0": t}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",))


def test_validate_prints_scores_targets_and_misses(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "points.png"
    found = lab_validate_command([STORED], png=picture)
    lines = found.text.splitlines()
    assert lines[0].startswith("1 experiments, 6 pairs, noise floor 3.67%")
    assert any(line.split()[:3] == ["events,", "per", "placement"] for line in lines)
    assert any(line.startswith("payload on every link") and line.endswith("NO") for line in lines)
    assert any(line.startswith("  payload: 2x4 ns 200/1000; a=2, b=4 over a; 1 MiB") for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = json.loads(json_text(found.object))
    assert [s["model"] for s in shown["summaries"]] == ["events", "barrier", "events", "barrier"]
    assert shown["summaries"][0]["top"][3] == {"k": 10, "fields": 0, "share": None, "tied_share": None, "chance": None}
    assert len(shown["scores"]) == 6
    assert found.status == 0


def test_a_sweep_as_text() -> None:
    text = sweep_text(Sweep.load(STORED), "small.json")
    assert text.splitlines()[1].split("  ")[0] == "2x4 ns 200/1000; a=2, b=4 over a; 1 MiB"
    assert "5 of 6" in text
    assert text.endswith("written  small.json")


def test_options_are_read() -> None:
    assert read_rates("2x4", None) == (200.0, 1000.0)
    with pytest.raises(LayoutError, match="cluster 3x3 has no default rates; give --rates"):
        read_rates("3x3", None)
    with pytest.raises(ParseError, match="--rates 'fast'"):
        read_rates("2x4", "fast")
    with pytest.raises(LayoutError, match="--leaf 'vm'; legal are ns, lo"):
        read_leaf("vm")
    with pytest.raises(LayoutError, match="--rates, --mesh and --axes need --cluster"):
        lab_sweep_command(mesh="a=8")
    with pytest.raises(LayoutError, match="lab run takes a program or plan file, two types with --mesh"):
        lab_run_command([])
    with pytest.raises(LayoutError, match="two types need --mesh"):
        lab_run_command(["f32[8]", "f32[8]"])
    with pytest.raises(ParseError, match=r"cannot read nowhere\.txt: No such file"):
        lab_run_command(["nowhere.txt"])
    with pytest.raises(ParseError, match="--mesh: "):
        lab_run_command([], reduce="a", mesh="=")


def test_devices_are_ranks_in_order() -> None:
    cluster = Cluster.of("2x2", (200, 1000))
    place = ranks_in_order(program(sp.Mesh({"x": 2}, devices=[8, 9])), cluster)
    assert place.position()[[8, 9]].tolist() == [0, 1]
    assert place.mesh.size == 4
    wide = sp.Mesh(x=8)
    with pytest.raises(TopologyError, match="the program runs on 8 devices, the cluster has 4 ranks"):
        ranks_in_order(program(wide), cluster)
    with pytest.raises(TopologyError, match="has 8 devices"):
        in_order(wide, cluster)
    place = in_order(sp.Mesh(a=2, b=2), cluster)
    assert place.matrix == ((2, 1), (1, 2))


@needs_lab
def test_run_a_program_a_plan_and_a_reduction(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cluster = Cluster.of("2x2", (2000, 4000))
    file = tmp_path / "program.txt"
    file.write_text(str(program(sp.Mesh({"x": 2}, devices=[8, 9]))))
    common = {"cluster": "2x2", "rates": "2000,4000", "repetitions": 1, "most_late": LATE}
    found = lab_run_command([str(file)], png=tmp_path / "run.png", **common)  # type: ignore[arg-type]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "cluster  2x2 at 2000/4000 Mbit/s, leaf=ns, ring engine, 1 repetitions" in found.text
    (one,) = found.object["programs"]
    assert one["verified"]
    assert {x["link"]: x["payload_bytes"] for x in one["links"]}["rank[0] up"] == 32 * 4 * 4
    mesh = sp.Mesh(a=2, b=2)
    # a plan for a placement on another topology of these sizes keeps that placement: a is inside a node
    inside = Placement(mesh, cluster.topology, ((1, 2), (2, 1)))
    plan = sp.reduce(inside, ("a",), 2**16)
    plan.save(tmp_path / "plan.json")
    found = lab_run_command([str(tmp_path / "plan.json")], **common)  # type: ignore[arg-type]
    links = {x["link"]: x["payload_bytes"] for x in found.object["programs"][0]["links"]}
    assert links["node[0] up"] == 0
    assert links["rank[0] up"] == 2**16
    found = lab_run_command([], reduce="a,b", mesh="a=2,b=2", nbytes="64KiB", **common)  # type: ignore[arg-type]
    assert found.object["programs"][0]["title"].startswith("best of ")
    assert len(found.object["programs"]) <= 2


@needs_lab
def test_sweep_and_validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplan.execution.lab.results.MOST_BUSY", math.inf)  # other tests run beside this one
    said: list[str] = []
    out = tmp_path / "sweep.json"
    found = lab_sweep_command(
        cluster="2x2",
        rates="2000,4000",
        mesh="a=4",
        nbytes="64KiB",
        limit=1,
        repetitions=1,
        out=out,
        busy=True,
        most_late=LATE,
        say=said.append,
    )
    assert said == ["1 experiments of 1 to measure, about 0 minutes; result in sweep.json"]
    assert found.object["experiments"][0]["pairs"][0]["exact"]
    assert lab_validate_command([out]).object["pairs"] == 1
    monkeypatch.setattr("shardplan.execution.lab.results.MOST_BUSY", 0.0)
    with pytest.raises(
        ParseError, match=r"^every pair was measured with more than .* of the processors busy; run 'shard"
    ):
        lab_validate_command([out])


def measurement(edges: dict[str, tuple[int, int]]) -> Measurement:
    """One repetition of nothing; by link the payload, which is also what was predicted, and what the kernel counted."""
    payload, kernel = zip(*edges.values(), strict=True)
    once, line = Repetition(1.0, 0.0, 0.0, 0, kernel), Timeline((), source="measured")
    return Measurement("x", "ring", tuple(edges), (once,), False, 0, True, {}, payload, {}, payload, {}, 0.0, line)


def test_the_busiest_link_of_every_level_and_direction_is_printed() -> None:
    edges = {"node[0] up": (10, 11), "node[1] up": (20, 22), "node[0] down": (20, 21), "node[1] down": (10, 12)}
    found = run_answer(Cluster.of("2x2", (200, 1000)), [Timeline(())], [measurement(edges)])
    start = next(k for k, line in enumerate(found.text.splitlines()) if line.startswith("busiest link"))
    assert [line.split() for line in found.text.splitlines()[start + 1 :]] == [
        ["node[1]", "up", "20", "20", "22"],
        ["node[0]", "down", "20", "20", "21"],
    ]


def test_the_best_reduction_is_the_fastest_predicted() -> None:
    """Ranks that share a loopback: the barrier form, which knows links with two directions only, prefers another."""
    cluster = Cluster.of("2x2", (1000, 200), "lo")
    place = in_order(sp.Mesh(a=4), cluster)
    programs = [r.program for r in sp.reductions(place, ("a",), 2**16, limit=3, algorithm="ring") if r.program]
    seconds = [replayed(script_of(p), place, shared=True, constants=CONSTANTS).seconds for p in programs]
    best, flat = _subjects([], "a", "a=4", cluster, "64KiB", False, "ring")
    assert best.predict(cluster, "ring").seconds == min(seconds) < 0.6 * seconds[0]
    assert (best.title.split(":")[0], flat.title) == (f"best of {len(programs)}", "flat all_reduce")
