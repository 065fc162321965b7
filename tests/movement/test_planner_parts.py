"""What plans are made of, each part beside a computation apart: tiles that meet, runs, placements, batches, states."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from shardplan.core.accounting import account
from shardplan.core.reference import collect, distribute, run_reference
from shardplan.core.tensor import TensorType
from shardplan.errors import Infeasible
from shardplan.hardware.placement import placements
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.batches.schedules import sharing
from shardplan.movement.batches.tiles import _rate
from shardplan.movement.placing.place import Ranking
from shardplan.movement.redistribute import plan_kept
from shardplan.movement.redistribution.problem import _neighbours, problem
from shardplan.movement.redistribution.reducing_candidates import is_settled, reducing
from shardplan.movement.redistribution.space import _meeting
from shardplan.movement.reductions.instructions import Grouping, Instruction
from shardplan.movement.reductions.type_graph import step_state

NODES = sp.Topology.load("dgx-a100", nodes=2)


def typed(text: str, mesh: sp.Mesh) -> TensorType:
    return TensorType.parse(text, mesh)


def within(nodes: int, gpus: int) -> sp.Topology:
    """The preset's levels with other counts."""
    return replace(NODES, levels=tuple(replace(x, size=n) for x, n in zip(NODES.levels, (nodes, gpus), strict=True)))


def test_tiles_that_meet_are_counted_one_by_one() -> None:
    for a, b in product(range(1, 13), repeat=2):
        tiles = [[(x * b, (x + 1) * b) for x in range(a)], [(y * a, (y + 1) * a) for y in range(b)]]
        met = [sum(x[0] < y[1] and y[0] < x[1] for x in tiles[0]) for y in tiles[1]]
        most, missing = _meeting(a, b)
        assert most == max(met)
        if a % b and b % a:
            assert missing == max((n for n in met if n < a), default=0), (a, b)


def test_atoms_that_no_dim_has_stand_beside_none() -> None:
    mesh = sp.Mesh({"a": 8, "b": 4})
    for text in ("f32[8@a.1, 8@b]", "f32[8@(b.1,a.1), 8]", "f32[8, 8@a.2]{+b.1}", "f32[8@b, 8]{root:a.1}"):
        t = typed(text, mesh)
        numbers = _neighbours(t)
        used = {a for run in t.atoms for a in run} | set(mesh.expand((*t.layout.partial, *t.layout.root)))
        for x, y in product(range(len(numbers)), repeat=2):
            together = any((x, y) in zip(run, run[1:], strict=False) for run in t.atoms)
            if x != y and (x in used) != (y in used):
                assert numbers[x] + 1 != numbers[y], (text, x, y)
            if together:
                assert numbers[x] + 1 == numbers[y]


def test_a_graph_without_some_axes_is_not_said_to_hold_every_type() -> None:
    mesh = sp.Mesh(dict.fromkeys("abcdefgh", 2))
    for text, other in (("f32[256@a, 256]", "f32[256, 256@a]"), ("f32[256@(a,b), 256]", "f32[256, 256@(a,b)]")):
        found = problem(typed(text, mesh), typed(other, mesh))
        assert found is not None and len(found.runs) < len(mesh.axes) and not found.fine
    small = sp.Mesh(a=2, b=2)
    found = problem(typed("f32[8@a, 8]", small), typed("f32[8, 8@a]", small))
    assert found is not None and len(found.runs) == 2 and found.fine


def test_what_lies_at_a_root_may_still_be_planned_otherwise() -> None:
    mesh = sp.Mesh(a=2, b=2)
    assert is_settled(typed("f32[8]{+a,+b}", mesh)) and is_settled(typed("f32[8@a]{+b}", mesh))
    assert not is_settled(typed("f32[8@a]{root:b}", mesh)) and not is_settled(typed("f32[8]{+a}", mesh))


def test_the_slowest_level_between_two_meshes_gives_the_rate() -> None:
    fabric = Fabric(NODES)
    inside, outside = (
        [typed("f32[8@a]", sp.Mesh({"a": 4}, devices=ids)) for ids in pair]
        for pair in (([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 3], [8, 9, 10, 11]))
    )
    each = [float(fabric.capacity(j).max()) / wire.stride for j, wire in enumerate(fabric.wires)]
    assert each[0] < each[1], "a node has less outwards for each device than within"
    assert _rate(*outside, fabric) == each[0]
    assert _rate(*inside, fabric) == each[1]
    assert _rate(*inside, None) == 1.0


def test_groups_that_share_devices_by_way_of_others_are_one() -> None:
    """Beside a search through the devices, one pack after another."""
    rng = random.Random(3)
    for _ in range(200):
        meshes = [rng.sample(range(12), rng.randint(1, 3)) for _ in range(rng.randint(1, 7))]
        packs: list[Any] = []
        for k, ids in enumerate(meshes):
            end = SimpleNamespace(mesh=SimpleNamespace(devices=tuple(ids)))
            packs.append([SimpleNamespace(source=end, target=end, number=k)])
        wanted: set[frozenset[int]] = set()
        for k in range(len(meshes)):
            reached, devices = {k}, set(meshes[k])
            while more := {j for j, ids in enumerate(meshes) if j not in reached and not devices.isdisjoint(ids)}:
                reached |= more
                devices |= {d for j in more for d in meshes[j]}
            wanted.add(frozenset(reached))
        found = [frozenset(pack[0].number for pack in group) for group in sharing(packs)]
        assert len(found) == len(wanted) and set(found) == wanted


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("f32[12@a, 4]{R:b}", "f32[12, 4@(a,b)]"), ("f32[12, 4@b]{R:a}", "f32[12@b, 4]"),
     ("f32[12@a, 4]{R:b}", "f32[12, 4@a]{R:b}"), ("f32[12, 4]{R:a,b}", "f32[12@a, 4]{R:b}"),
     ("f32[12@b, 4]{R:a}", "f32[12@a, 4]{+b}")],
)  # fmt: skip
def test_addends_are_reduced_as_what_they_are(reduction: str, source: str, target: str) -> None:
    """On the mesh itself, and on one in another order; within the least limit, too."""

    def text(said: str) -> str:
        sums = said.replace("R:a,b", "+a,+b").replace("R:", "+")
        return sums if reduction == "sum" else said.replace("R:", f"{reduction}:")

    x = np.random.default_rng(0).integers(-9, 9, (12, 4)).astype(np.float32)
    mesh = sp.Mesh(a=2, b=2)
    for other in (mesh, sp.Mesh({"a": 2, "b": 2}, devices=[0, 2, 1, 3])):
        s, t = typed(text(source), mesh), typed(text(target), other)
        with pytest.raises(Infeasible, match="the least that works is") as error:
            sp.redistribute(s, t, memory_limit=1)
        for limit in (None, error.value.least_bytes):
            plan = sp.redistribute(s, t, memory_limit=limit)
            np.testing.assert_array_equal(collect(run_reference(plan.program, [distribute(x, s)])[0], t), x)


def test_another_reduction_over_the_same_devices_is_another_one() -> None:
    """Maxima over a and b become addends over p of a mesh of other names, whose devices are those of a."""
    s, t = typed("f32[8]{max:a,b}", sp.Mesh(a=2, b=2)), typed("f32[8]{+p}", sp.Mesh(p=2, q=2))
    x = np.arange(-4, 4, dtype=np.float32)
    plan = sp.redistribute(s, t)
    np.testing.assert_array_equal(collect(run_reference(plan.program, [distribute(x, s)])[0], t), x)
    assert plan.program.output_types == (t,)


def test_tensors_of_two_dtypes_are_two_payloads() -> None:
    mesh = sp.Mesh(a=4)
    sources, targets = ([typed(f"{d}[8{cut}]", mesh) for d in ("f32", "i32", "f32")] for cut in ("@a", ""))
    plan = sp.redistribute(sources, targets)
    given = [np.arange(8, dtype=np.float32), np.arange(8, dtype=np.int32) - 3, -np.arange(8, dtype=np.float32)]
    found = run_reference(plan.program, [distribute(x, t) for x, t in zip(given, sources, strict=True)])
    for x, shards, t in zip(given, found, targets, strict=True):
        got = collect(shards, t)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)
    gathered = re.findall(r"= all_gather\(.*\): (.*)", str(plan.program))
    dtypes = [[text.partition("[")[0] for text in line.split("; ")] for line in gathered]
    assert sorted(dtypes) == [["f32", "f32"], ["i32"]]


def test_large_tensors_that_shrink_come_first() -> None:
    mesh = sp.Mesh(a=2)
    for sizes in ((4096, 64), (64, 4096), (64, 4096, 512)):
        plan = sp.redistribute([typed(f"f32[{n}]", mesh) for n in sizes], [typed(f"f32[{n}@a]", mesh) for n in sizes])
        order = [
            int(name) for name in re.findall(r"%in(\d)", "".join(re.findall(r"slice\(([^;]*);", str(plan.program))))
        ]
        assert order == sorted(range(len(sizes)), key=lambda k: -sizes[k])


def test_without_a_limit_nothing_is_listed_as_kept() -> None:
    mesh = sp.Mesh(a=4)
    pairs = [[typed(f"f32[8{cut}]", mesh)] * 2 for cut in ("@a", "")]
    for keep in (True, [True, False], [True, True]):
        assert len(plan_kept(*pairs, keep=keep).program.outputs) == 2
        assert plan_kept(*pairs, keep=keep).program == plan_kept(*pairs, keep=False).program
    assert len(plan_kept(*pairs, memory_limit=1000, keep=True).program.outputs) == 4


def test_a_least_that_chunks_do_not_lower_is_told_once() -> None:
    mesh = sp.Mesh(a=2, b=2, c=4)
    with pytest.raises(Infeasible) as error:
        sp.redistribute(typed("i32[8@c]", mesh), typed("i32[8@a]", mesh), memory_limit=9)
    assert str(error.value).endswith("no plan; the least that works is 20 bytes")
    assert error.value.least_bytes == error.value.absolute_least_bytes == 20


def test_whole_factors_are_not_broadcast_again() -> None:
    for state in ("U", "UU", "UR", "RU"):
        for digits in product((False, True), repeat=len(state)):
            varies = tuple(k for k, on in enumerate(digits) if on)
            if varies and {state[k] for k in varies} == {"U"}:
                assert step_state(state, Instruction(Grouping(varies), "broadcast")) is None
    assert step_state("R", Instruction(Grouping((0,)), "broadcast")) == ("R", "U")
    assert step_state("UR", Instruction(Grouping((0, 1)), "broadcast")) == ("UR", "UU")


def test_the_gain_of_placing_hangs_on_no_order_of_rows() -> None:
    found = sp.place(sp.Mesh(a=2, b=8), NODES, {"a": 1e8, "b": 1e9})
    stock = [row.stock_seconds for row in found]
    assert max(stock) > min(stock)
    for rows in (tuple(found), tuple(found)[::-1]):
        assert Ranking(rows).placement_gain == max(stock) / min(stock)


def test_what_comes_from_several_peers_is_staged() -> None:
    """The narrowest way, portable and with the source kept; what it needs is what its program takes."""
    mesh = sp.Mesh(a=2, b=4, c=2)
    ends = typed("i32[8@(a,b), 8, 2]", mesh), typed("i32[8@c, 8@b, 2@a]", mesh)
    plan = plan_kept(*ends, memory_limit=128, portable=True, keep=True)
    assert account(plan.program).workspace_bytes <= 128
    with pytest.raises(Infeasible, match="the least that works is 128 bytes"):
        plan_kept(*ends, memory_limit=127, portable=True, keep=True)


def test_of_programs_of_one_price_the_shorter_come_first() -> None:
    """A ring reduces in two halves for the price of the whole, up to the last digits of a sum."""
    level = sp.Topology.load("dgx-a100", nodes=1).levels[-1]
    for sizes, rates in (((3, 4), (3e9, 4e9)), ((4, 2), (1e11, 1e9)), ((2, 3, 4), (1e9, 8e9, 1e11))):
        rows = zip(sizes, rates, strict=True)
        levels = tuple(replace(level, name=f"l{n}", size=n, bandwidth=r, latency=1e-6) for n, r in rows)
        placement = next(iter(placements(sp.Mesh(a=math.prod(sizes)), sp.Topology("t", levels))))
        found = sp.reductions(placement, "a", 10**8, limit=None, top=40, algorithm="ring")
        assert len(found) == 40
        keys = [(float(f"{row.seconds:.12g}"), len(row.instructions)) for row in found]
        assert keys == sorted(keys) and len({seconds for seconds, _ in keys}) < len(keys)


def test_what_lies_at_a_root_is_a_reduction_to_be_planned() -> None:
    """Over two nodes of four, whether the addends were ever there or not."""
    mesh, fabric = sp.Mesh(a=8), Fabric(within(2, 4))
    for source, target in (("f32[64]{root:a}", "f32[64]"), ("f32[64]{+a}", "f32[64]{root:a}")):
        s, t = typed(source, mesh), typed(target, mesh)
        (found,) = reducing(s, t, fabric, None)
        for op in found.ops:
            (s,) = op.infer(s)
        assert s == t


def test_a_factor_is_scattered_on_the_dim_that_is_just_that_large() -> None:
    """Over levels of 2, 2 and 4: the dim of 2 takes the factor of 2, and leaves the one of 12 to that of 4."""
    level = NODES.levels[-1]
    levels = tuple(replace(level, name=f"l{k}", size=n, bandwidth=1e9 * 10**k) for k, n in enumerate((2, 2, 4)))
    s, t = (typed(f"f32[2, 12]{mark}", sp.Mesh(a=16)) for mark in ("{+a}", ""))
    (found,) = reducing(s, t, Fabric(sp.Topology("t", levels)), None)
    assert [op.name for op in found.ops] == ["reduce_scatter"] * 2 + ["all_reduce"] + ["all_gather"] * 2
    assert [op.dim for op in found.ops if op.name != "all_reduce"] == [1, 0, 0, 1]


@pytest.mark.parametrize("text", ["f32[4@a]", "f32[4, 4@(b,a)]", "f32[4]{+a}", "f32[4@b]{root:a}"])
def test_what_does_not_move_is_portable(text: str) -> None:
    t = typed(text, sp.Mesh(a=2, b=2))
    assert sp.redistribute(t, t, portable=True).program.steps == ()
    moving = typed("f32[8@a, 8]", t.mesh), typed("f32[8, 8]", t.mesh)
    both = sp.redistribute([t, moving[0]], [t, moving[1]], portable=True)
    assert [step.op.name for step in both.program.steps] == ["all_gather"]
