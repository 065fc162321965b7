"""Device ids are places on a topology: nothing moves them, and a plan says in a line what moving them would gain."""

from __future__ import annotations

import random
import re
import shlex
from dataclasses import replace

import pytest
from tests.replay import Replay
from typer.testing import CliRunner

import shardplan as sp
from shardplan.cli import app
from shardplan.hardware.level import Level
from shardplan.movement.better_placement import GAIN
from shardplan.plans.pricing import occupied_units

PRESETS = ("dgx-h100", "dgx-a100", "gcp-v100x8")
SHARDED = "bf16[53248@tp,16384]{+dp}", "bf16[53248@tp,16384]"
EVEN = "bf16[49152@tp,16384]{+dp}", "bf16[49152@tp,16384]"


def nodes(number: int, preset: str = "dgx-h100") -> sp.Topology:
    return sp.Topology.load(preset, nodes=number)


def drawn(rng: random.Random) -> tuple[list[str], tuple[int, int, int]]:
    """Two types of 16 devices, and the sizes of their axes."""
    sizes = rng.choice([(2, 8, 1), (4, 4, 1), (2, 2, 4), (8, 2, 1), (16, 1, 1)])
    shape, ends = (48 * 64, 16 * rng.choice((1, 1000)), 48), list[str]()
    for _ in range(2):
        where = [rng.randrange(4) for _ in sizes]
        dims = [
            f"{n}@({','.join(a for a, w in zip('abc', where, strict=True) if w == k)})" for k, n in enumerate(shape)
        ]
        ends.append("f32[" + ", ".join(d.replace("@()", "") for d in dims) + "]")
    free = [a for a in "abc" if not re.search(rf"\b{a}\b", ends[0])]
    if free and rng.random() < 0.4:
        ends[0] += "{+" + free[0] + "}"
        if re.search(rf"\b{free[0]}\b", ends[1]) and rng.random() < 0.5:
            ends[1] = re.sub(rf"@\({free[0]}\)|,{free[0]}\b|\b{free[0]},", "", ends[1])
    return ends, sizes


@pytest.mark.parametrize("preset", PRESETS)
def test_unused_nodes_change_nothing(preset: str) -> None:
    """Behind the mesh, or in front of it: the same steps, seconds and bound, on units that are slow or not."""
    rng = random.Random(preset)
    for _ in range(20):
        ends, sizes = drawn(rng)
        slow = ((1, 0.5),) if rng.random() < 0.5 else ()
        first, more = rng.randrange(3), rng.randrange(1, 4)
        plans: list[sp.Plan] = []
        for start, count in ((0, 2), (0, 2 + more), (first, 2 + first), (first, 2 + first + more)):
            topology = nodes(count, preset)
            outer = replace(topology.levels[0], degraded=tuple((start + unit, factor) for unit, factor in slow))
            topology = replace(topology, levels=(outer, *topology.levels[1:]))
            mesh = sp.Mesh(dict(zip("abc", sizes, strict=True)), devices=range(8 * start, 8 * start + 16))
            plans.append(sp.redistribute(*ends, topology, mesh=mesh))
            plans[-1].certificate.check()
        for plan in plans[1:]:
            assert [s.op.name for s in plan.program.steps] == [s.op.name for s in plans[0].program.steps], ends
            assert plan.seconds == pytest.approx(plans[0].seconds, rel=1e-9), ends
            assert plan.certificate.level_bytes == pytest.approx(plans[0].certificate.level_bytes)
            bounds = [p.certificate.lower_bound_seconds for p in (plan, plans[0])]
            assert bounds[0] == pytest.approx(bounds[1], rel=1e-9), ends


def test_ids_are_places() -> None:
    """`tp` is in a node by its ids, so sums over `dp` cross nodes, however many there are; in another order not."""
    seconds: dict[int, float] = {}
    for count in (4, 5, 9):
        plan = sp.redistribute(*SHARDED, nodes(count), mesh="dp=4,tp=8")
        topology = nodes(count)
        assert plan.certificate.where == topology
        seconds[count] = float(Replay(topology, list(range(topology.size))).seconds(plan.program))
        assert plan.seconds == pytest.approx(seconds[count], rel=1e-9)
    assert len(set(seconds.values())) == 1
    turned = sp.Mesh({"dp": 4, "tp": 8}, devices=[4 * t + d for d in range(4) for t in range(8)])
    assert sp.redistribute(*SHARDED, nodes(5), mesh=turned).seconds < seconds[4] / 5


def test_the_line_is_the_best_of_all_placements() -> None:
    """Beside a plan on each placement; it is said from 10 % on, and never below."""
    rng, said = random.Random(7), 0
    for _ in range(40):
        ends, sizes = drawn(rng)
        mesh, topology = sp.Mesh(dict(zip("abc", sizes, strict=True))), nodes(2, rng.choice(PRESETS))
        plan = sp.redistribute(*ends, topology, mesh=mesh)
        best = min(
            (sp.redistribute(*ends, p, mesh=mesh) for p in sp.placements(mesh, topology)), key=lambda p: p.seconds
        )
        assert plan.seconds >= best.seconds * (1 - 1e-9)
        if 0 < best.seconds * GAIN * (1 + 1e-9) <= plan.seconds:
            said += 1
            assert str(plan).endswith(plan.better) and f" {best.certificate.where.describe()} would take" in plan.better
        elif plan.seconds <= best.seconds * GAIN * (1 - 1e-9):
            assert not plan.better and "better" not in str(plan)
    assert 5 <= said <= 35


def test_a_gain_below_the_bound_is_not_said() -> None:
    """A batch whose largest tensor gains much elsewhere, and the whole little: a small one pays for it there."""
    levels = Level("node", 2, "switch", 1e9, 0.0), Level("gpu", 4, "switch", 1e11, 0.0)
    mesh, topology = sp.Mesh(y=4, x=2), sp.Topology("two nodes", levels)
    for rows in (1100, 1200, 1300, 1500, 2000, 4000):
        ends = [f"f32[{4 * rows}@y, 64]", "f32[4096@x, 64]"], [f"f32[{4 * rows}, 64]", "f32[4096, 64]"]
        plan = sp.redistribute(*ends, topology, mesh=mesh)
        there = min(sp.redistribute(*ends, p, mesh=mesh).seconds for p in sp.placements(mesh, topology))
        assert bool(plan.better) == (plan.seconds >= GAIN * there), (rows, plan.seconds / there)


def test_the_innermost_unit_that_holds_the_axis_is_named() -> None:
    """It leaves the pods, and the nodes too."""
    levels = (
        Level("pod", 2, "switch", 1e9, 1e-6),
        Level("node", 2, "switch", 1e10, 1e-6),
        Level("gpu", 2, "switch", 1e11, 1e-6),
    )
    topology = sp.Topology("t", levels)
    plan = sp.redistribute("f32[4096@a, 4096]", "f32[4096, 4096]", topology, mesh="a=2,b=2,c=2")
    assert "placing a inside one node: a=[1, 1, 2]," in plan.better
    plan = sp.redistribute("f32[4096@(a,b), 4096]", "f32[4096, 4096]", topology, mesh="a=2,b=2,c=2")
    assert "placing a inside one " in plan.better


def test_the_units_of_some_devices() -> None:
    """From the first to the last, slow ones by their number among them; a ring keeps all its children."""
    slow = replace(nodes(9), levels=(replace(nodes(9).levels[0], degraded=((4, 0.5), (7, 0.25))), nodes(9).levels[1]))
    part, start = occupied_units(slow, range(3 * 8, 6 * 8))
    assert (part.level_sizes, part.levels[0].degraded, start) == ((3, 8), ((1, 0.5),), 24)
    part, start = occupied_units(slow, [34, 37])
    assert (part.level_sizes, part.levels[0].degraded, start) == ((1, 4), ((0, 0.5),), 34)
    ring = sp.Topology("r", (Level("pod", 4, "switch", 1e9, 0.0), Level("chip", 8, "ring", 1e9, 0.0)))
    assert occupied_units(ring, [18, 19])[0].level_sizes == (1, 8) and occupied_units(ring, [18, 19])[1] == 16


def test_the_best_is_not_the_first() -> None:
    """Columns lie across pods; the first better placement has them inside a pod, the best inside a node."""
    levels = tuple(Level(name, 2, "switch", b, 1e-6) for name, b in (("pod", 1e9), ("node", 1e10), ("gpu", 1e11)))
    mesh, topology = sp.Mesh({"a": 2, "b": 2, "c": 2}, devices=[0, 4, 1, 5, 2, 6, 3, 7]), sp.Topology("t", levels)
    plan = sp.redistribute("f32[4096@c, 4096]", "f32[4096, 4096]", topology, mesh=mesh)
    assert "placing c inside one node: a=[1, 2, 1], b=[2, 1, 1], c=[1, 1, 2]" in plan.better


def test_the_command_of_the_line_runs() -> None:
    plan = sp.redistribute(*SHARDED, nodes(40), mesh="dp=4,tp=8")
    assert plan.better == (
        "better     placing dp inside one node: dp=[1, 4], tp=[4, 2] would take 946 us: `shardplan place "
        "--mesh dp=4,tp=8 --traffic dp=all_reduce:218103808B*1 --topology dgx-h100`"
    )
    command = shlex.split(plan.better.split("`")[1])
    assert command[0] == "shardplan"
    done = CliRunner().invoke(app, command[1:])
    assert "946 us" in done.stdout.splitlines()[0] + done.stdout.splitlines()[1], done.stdout
    later = sp.Mesh({"dp": 4, "tp": 8}, devices=range(16, 48))
    assert sp.redistribute(*SHARDED, nodes(40), mesh=later).better == plan.better
    small = sp.redistribute(*SHARDED, nodes(40), mesh="dp=2,tp=8")
    assert small.better.endswith("--topology dgx-h100 --nodes 2`")
    own = replace(nodes(4), name="ours")
    assert sp.redistribute(*SHARDED, own, mesh="dp=4,tp=8").better.endswith("--topology FILE`")
    split = "f32[3072]{+a}", "f32[3072]"
    levels = sp.redistribute(
        *split, nodes(2), mesh=sp.Mesh({"a": 8, "b": 2}, devices=[*range(0, 16, 2), *range(1, 16, 2)])
    )
    assert levels.better == "" or "--mesh a=8,b=2 --traffic a=all_reduce:12288B*1" in levels.better
    one = sp.redistribute("f32[1]{+a}", "f32[1]", sp.Topology.load("dgx-a100").resize(node=3, gpu=4), mesh="a=12")
    assert not one.better or "--traffic a=all_reduce:4B*1" in one.better
    mixed = sp.redistribute("f32[48@(a,b), 48]", "f32[48@(b,a), 48]", nodes(2), mesh="a=2,b=8")
    assert not mixed.better or " place PLAN " in mixed.better


def test_where_nothing_is_better_nothing_is_said() -> None:
    """Without a topology, on a placement, in a part of a unit, between other devices, and where all is well."""
    mesh, topology = sp.Mesh(dp=4, tp=8), nodes(4)
    one = next(iter(sp.placements(mesh, topology)))
    plans = [
        sp.redistribute(*SHARDED, mesh=mesh),
        sp.redistribute(*SHARDED, one, mesh=mesh),
        sp.redistribute(*EVEN, nodes(4), mesh="dp=2,tp=12"),
        sp.redistribute(*EVEN, nodes(4), mesh="dp=2,tp=6"),
        sp.redistribute("f32[64@tp]", "f32[64]", topology, mesh=mesh),
    ]
    assert [bool(plan.better) for plan in plans] == [False, False, True, False, False]


def test_a_batch_is_placed_by_its_largest_tensor() -> None:
    """A small gather along one axis, a large one along the other: it is said that the large one would go inside."""
    levels = Level("node", 2, "switch", 1e9, 0.0), Level("gpu", 4, "switch", 1e11, 0.0)
    mesh, topology = sp.Mesh(y=4, x=2), sp.Topology("two nodes", levels)
    moves = ("f32[64@x, 64]", "f32[64, 64]"), ("f32[4096@y, 64]", "f32[4096, 64]")
    for order in (moves, moves[::-1]):
        plan = sp.redistribute(*map(list, zip(*order, strict=True)), topology, mesh=mesh)
        assert plan.certificate.where == topology
        assert "placing y inside one node: y=[1, 4], x=[2, 1] would take" in plan.better
        placement = next(p for p in sp.placements(mesh, topology) if p.matrix == ((1, 4), (2, 1)))
        there = sp.redistribute(*map(list, zip(*order, strict=True)), placement, mesh=mesh)
        assert there.seconds * GAIN < plan.seconds
        limit = plan.certificate.workspace_bytes
        assert sp.redistribute(*map(list, zip(*order, strict=True)), topology, limit, mesh=mesh).better


def test_it_is_worked_out_once_and_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import shardplan.movement.better_placement as module

    asked: list[int] = []
    inner = module.better_plan
    monkeypatch.setattr(module, "better_plan", lambda *args: (asked.append(1), inner(*args))[1])
    plan = sp.redistribute("bf16[4096@tp,16384]{+dp}", "bf16[4096@tp,16384]", nodes(4), mesh="dp=4,tp=8")
    plan.certificate.check()
    assert not asked
    assert plan.better and str(plan).endswith(plan.better) and len(asked) == 1
