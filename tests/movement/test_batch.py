"""Batches: one plan, live bytes of all tensors, packed collectives, limits."""

import pytest
from hypothesis import given, settings

import oracle
import shardplan as sp
import strategies as some
from benchmarks import suites
from shardplan.core.accounting import account
from shardplan.core.ops import AllToAll
from shardplan.core.program import Step
from shardplan.core.walk import posted_steps
from shardplan.hardware.level import Level
from shardplan.movement.redistribute import plan_kept

Batch = tuple[list[sp.TensorType], list[sp.TensorType]]


@settings(max_examples=150, deadline=None)
@given(some.batches())
def test_a_batch_is_one_sound_plan(batch: Batch) -> None:
    sources, destinations = batch
    plan = sp.redistribute(sources, destinations)
    plan.certificate.check()
    assert len(plan.program.inputs) == len(plan.program.outputs) == len(sources)
    assert oracle.unsound(plan.program, destinations) is None
    assert plan.certificate.peak_bytes == oracle.live_peak(plan.program)
    for x in plan.program.types.values():
        assert x.local_bytes() <= plan.certificate.bound_bytes


@settings(max_examples=100, deadline=None)
@given(some.batches())
def test_even_batches_stay_within_the_bound(batch: Batch) -> None:
    """Shrinking tensors first, growing ones last; proved where all devices hold equal sizes."""
    sources, destinations = batch
    if not all(t.all_even for t in (*sources, *destinations)) or len({t.mesh for t in (*sources, *destinations)}) > 1:
        return
    c = sp.redistribute(sources, destinations).certificate
    assert c.bound_bytes == max(sum(t.local_bytes() for t in side) for side in batch)
    assert c.peak_bytes <= c.bound_bytes


@settings(max_examples=60, deadline=None)
@given(some.batches(most=8, tensors=4) | some.marked_batches())
def test_a_batch_within_a_limit(batch: Batch) -> None:
    sources, destinations = batch
    free = sp.redistribute(sources, destinations)
    limits = [free.certificate.workspace_bytes]
    try:
        sp.redistribute(sources, destinations, memory_limit=1)
    except sp.Infeasible as error:
        assert error.least_bytes is not None
        limits.append(error.least_bytes)
    for limit in limits:
        plan = sp.redistribute(sources, destinations, memory_limit=max(1, limit))
        plan.certificate.check()
        assert plan.certificate.workspace_bytes <= max(1, limit)
        assert oracle.unsound(plan.program, destinations) is None


@pytest.mark.parametrize("source", ["i32[4, 4@y]", "i32[4@x, 4]", "i32[4, 4]{root:x}"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_rooted_tensor_in_a_batch_takes_no_less_direct_move(source: str, keep: bool) -> None:
    """One direct move stands for no root: what is planned for the tensor alone serves under a limit, too."""
    mesh = sp.Mesh(x=2, y=2)
    s, t = (sp.TensorType.parse(text, mesh) for text in (source, "i32[4@y, 4]{root:x}"))
    u, v = (sp.TensorType.parse(text, mesh) for text in ("i32[8@x, 8]", "i32[8, 8@x]"))
    with pytest.raises(sp.Infeasible) as refused:
        plan_kept([s, u], [t, v], memory_limit=1, keep=keep)
    assert refused.value.least_bytes is not None
    plan = plan_kept([s, u], [t, v], memory_limit=refused.value.least_bytes, keep=keep)
    plan.certificate.check()
    assert oracle.unsound(plan.program, [t, v]) is None if not keep else plan.program.outputs[2:] == ("in0", "in1")


@settings(max_examples=30, deadline=None)
@given(some.pairs())
def test_a_batch_of_one_is_the_plan_of_its_tensor(pair: tuple[sp.TensorType, sp.TensorType]) -> None:
    s, t = pair
    limits: list[int | None] = [None, sp.redistribute(s, t).certificate.workspace_bytes]
    try:
        sp.redistribute(s, t, memory_limit=1)
    except sp.Infeasible as error:
        limits.append(error.least_bytes)
    for limit in limits:
        if limit != 0:
            assert sp.redistribute([s], [t], memory_limit=limit) == sp.redistribute(s, t, memory_limit=limit)


def test_a_tensor_may_take_a_narrower_way_than_alone() -> None:
    """Where one step with all its buffers does not fit, several that free what they had before do."""
    mesh = sp.Mesh(a=4)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[64@a, 64]", "f32[64, 64@a]"))
    with pytest.raises(sp.Infeasible) as refused:
        sp.redistribute([s, s], [t, t], memory_limit=1)
    alone, other = 8256, s.local_bytes()
    assert refused.value.least_bytes == alone + other
    plan = sp.redistribute([s, s], [t, t], memory_limit=alone + other)
    plan.certificate.check()
    assert oracle.unsound(plan.program, [t, t]) is None
    with pytest.raises(sp.Infeasible, match=f"the least that works is {alone} bytes"):
        sp.redistribute(s, t, memory_limit=1)


def test_equal_plans_are_packed() -> None:
    mesh = sp.Mesh(a=4)
    s, t = sp.TensorType("i32", (8, 8), ("a", None), mesh), sp.TensorType("i32", (8, 8), (None, "a"), mesh)
    plan = sp.redistribute([s] * 20, [t] * 20)
    assert len(plan.program.steps) == 1 and len(plan.program.steps[0].operands) == 20
    assert oracle.unsound(plan.program, [t] * 20) is None


def test_tensors_move_together_as_far_as_a_limit_allows() -> None:
    """All at once they need twice their bytes, one by one they pay for rounds sixteen times; in fours they fit."""
    mesh = sp.Mesh(a=4)
    s, t = sp.TensorType("f32", (64, 64), ("a", None), mesh), sp.TensorType("f32", (64, 64), (None, "a"), mesh)
    fours = [
        Step(AllToAll(0, 1, ("a",), chunks=8), [f"s{k}" for k in four], [f"t{k}" for k in four])
        for four in (range(first, first + 4) for first in range(0, 16, 4))
    ]
    by_hand = sp.Program({f"s{k}": s for k in range(16)}, fours, [f"t{k}" for k in range(16)])
    limit = 25 * s.local_bytes()
    assert account(by_hand).workspace_bytes <= limit < 2 * 16 * s.local_bytes()
    plan = sp.redistribute([s] * 16, [t] * 16, memory_limit=limit)
    bound = plan.certificate.bound_bytes
    assert oracle.cost(plan.program, bound) <= oracle.cost(by_hand, bound) * (1 + 1e-9)


NODES = sp.Topology(
    "nodes", (sp.hardware.Level("node", 12, "switch", 1e9, 1e-7), sp.hardware.Level("gpu", 4, "switch", 4e9, 1e-7))
)


def stages(target: str, tensors: int, **axes: int) -> Batch:
    """Tensors of eight stages of four devices, which all go to sixteen others."""
    serving = sp.Mesh(axes, devices=range(32, 48))
    training = [sp.Mesh({"ep": 4}, devices=range(4 * k, 4 * k + 4)) for k in range(8)]
    sources = [sp.TensorType.parse("i32[48@ep, 4096]", mesh) for mesh in training for _ in range(tensors)]
    return sources, [sp.TensorType.parse(target, serving)] * len(sources)


def test_addends_that_are_reduced_level_by_level_share_messages() -> None:
    """What only names dims anew takes a tensor at a time; what sends takes all that are alike."""
    levels = (Level("node", 2, "switch", 1e6, 3e-4), Level("rank", 4, "switch", 4e6, 3e-4))
    mesh, topology = sp.Mesh(data=8), sp.Topology("slow", levels)
    shapes = ("64", "64", "8, 8", "8, 8")
    sources = [sp.TensorType.parse(f"i32[{shape}]{{+data}}", mesh) for shape in shapes]
    destinations = [sp.TensorType.parse(f"i32[{shape.replace(', ', '@data, ', 1)}]", mesh) if "," in shape
                    else sp.TensorType.parse(f"i32[{shape}@data]", mesh) for shape in shapes]  # fmt: skip
    plan = sp.redistribute(sources, destinations, topology)
    plan.certificate.check()
    assert oracle.unsound(plan.program, destinations) is None
    named = [step.op.name for step in plan.program.steps]
    assert named.count("reshape") == 8 and "together" in named


def test_different_moves_on_one_mesh_are_one_step() -> None:
    mesh = sp.Mesh(a=4)
    sources = [sp.TensorType.parse(t, mesh) for t in ("i32[8@a, 8]", "i32[8@a]")]
    destinations = [sp.TensorType.parse(t, mesh) for t in ("i32[8, 8@a]", "i32[8]")]
    plan = sp.redistribute(sources, destinations)
    plan.certificate.check()
    assert [step.op.name for step in plan.program.steps] == ["together"]
    assert oracle.unsound(plan.program, destinations) is None


def test_stages_send_together() -> None:
    """One after another each stage's four devices would send while the others wait: four times as long."""
    sources, destinations = stages("i32[48@ep, 4096]", 2, ep=16)
    plan = sp.redistribute(sources, destinations, topology=NODES)
    plan.certificate.check()
    assert [step.op.name for step in plan.program.steps] == ["together"]
    assert plan.seconds <= 1.01 * plan.certificate.lower_bound_seconds
    assert oracle.unsound(plan.program, destinations) is None


def test_waves_gather_while_the_next_are_sent() -> None:
    """Every node fetches each element once; its devices gather what they have while the next is on its way."""
    sources, destinations = stages("i32[48@ep, 4096]", 8, ep=4, dp=4)
    plan = sp.redistribute(sources, destinations, topology=NODES)
    plan.certificate.check()
    moves = [[inner.op.name for inner in posted_steps(step)] for step in plan.program.steps]
    assert {"send", "all_gather"} in map(set, moves)
    assert plan.certificate.level_bytes[0] == sum(t.nbytes for t in sources)
    assert plan.seconds <= 1.2 * plan.certificate.lower_bound_seconds
    assert oracle.unsound(plan.program, destinations) is None


def test_moves_posted_together_come_in_chunks() -> None:
    """Under a limit waves still run side by side: their buffers shrink, where packs alone would wait for each other."""
    sources, destinations = stages("i32[48@ep, 4096]", 8, ep=4, dp=4)
    free = sp.redistribute(sources, destinations, topology=NODES)
    limit = int(0.9 * free.certificate.workspace_bytes)
    plan = sp.redistribute(sources, destinations, topology=NODES, memory_limit=limit)
    plan.certificate.check()
    assert plan.seconds <= 1.01 * free.seconds
    assert any(step.op.chunks > 1 and len(posted_steps(step)) > 1 for step in plan.program.steps)
    assert oracle.unsound(plan.program, destinations) is None


def test_a_swap_of_addends_keeps_the_bound() -> None:
    """The side that reduces first makes the other wait, so that both send at once."""
    a, b = sp.Mesh({"x": 2}, devices=(0, 1)), sp.Mesh({"x": 2}, devices=(2, 3))
    sources = [sp.TensorType.parse("i32[72, 24]", a), sp.TensorType.parse("i32[7, 24]{+x}", b)]
    destinations = [sp.TensorType.parse("i32[72, 24]", b), sp.TensorType.parse("i32[7, 24]", a)]
    plan = sp.redistribute(sources, destinations)
    plan.certificate.check()
    assert plan.certificate.peak_bytes <= plan.certificate.bound_bytes
    assert oracle.unsound(plan.program, destinations) is None


@pytest.mark.parametrize("gathers", [True, False])
def test_tensors_of_a_batch_move_as_one_of_their_size_would(gathers: bool) -> None:
    """By levels each alone is faster, as that spares rounds; all of them share rounds, and one step is faster."""
    where, mesh, axes = sp.Topology.load("dgx-h100", nodes=4), sp.Mesh(data=8, context=4), ("data", "context")
    rows = [8, 1024, 1024, 2048, 8192, 8192, 8192]

    def ends(n: int) -> tuple[sp.TensorType, sp.TensorType]:
        cut, whole = (sp.TensorType("bf16", (2048, n), spec, mesh) for spec in ((axes,), ()))
        sums = sp.TensorType("bf16", (2048, n), (), mesh, partial=dict.fromkeys(axes, "sum"))
        return (cut, whole) if gathers else (sums, cut)

    sources, destinations = zip(*map(ends, rows), strict=True)
    plan, alone = sp.redistribute(sources, destinations, where), sp.redistribute(*ends(1024), where)
    plan.certificate.check()
    assert len(alone.program.steps) > len(plan.program.steps) == 1
    one = sp.redistribute(*ends(sum(rows)), where).certificate.seconds
    assert plan.certificate.seconds == pytest.approx(one, rel=1e-9)


def test_an_empty_batch_and_a_batch_of_identities() -> None:
    mesh = sp.Mesh(a=2)
    t = sp.TensorType("i32", (4,), ("a",), mesh)
    plan = sp.redistribute([t, t], [t, t])
    plan.certificate.check()
    assert plan.program.steps == () and plan.certificate.status == "floor"
    assert sp.redistribute([], []).program.steps == ()


@pytest.mark.parametrize("case", tuple(suites.problems("R", 0, 99)), ids=lambda c: str(c)[:30])
def test_real_moves_at_their_real_size(case: suites.Case) -> None:
    """Planned and certified, not run: every tensor of a 7B and of a mixture-of-experts model among them."""
    s, t, how = case
    c = sp.redistribute(s, t, **how).certificate
    c.check()
    assert c.peak_bytes <= c.bound_bytes
    assert c.gap <= 1.02, "up to the charge of its rounds a real move receives the least"


def test_a_large_batch() -> None:
    for s, t, _ in suites.problems("B", 8, 3, most_devices=8, most_multiple=1):
        assert isinstance(t, list)
        plan = sp.redistribute(s, t)
        plan.certificate.check()
        assert oracle.unsound(plan.program, t) is None
