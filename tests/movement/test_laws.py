"""The laws of the specification, section 7, on random pairs; the whole sample of section 8 is at the end."""

import math
import random
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import oracle
import shardplan as sp
import shardplan.core.ops as ops_module
import strategies as some
from benchmarks import suites
from shardplan.core.ops import AllGather, Exchange, Permute, Slice
from shardplan.core.program import Program
from shardplan.core.step import Step

Pair = tuple[sp.TensorType, sp.TensorType]
MARKED = ("even", "uneven", "partial", "rooted")
BOTH = st.booleans()


def plan_of(s: sp.TensorType, t: sp.TensorType, **how: bool) -> sp.Plan:
    """The plan, or no example where no portable one exists."""
    try:
        return sp.redistribute(s, t, **how)
    except sp.Infeasible:
        if how.get("portable"):
            assume(False)
        raise


@settings(max_examples=250, deadline=None)
@given(some.pairs(MARKED), BOTH, st.integers(0, 99))
def test_t1_t3_t12_every_device_has_its_box(pair: Pair, portable: bool, seed: int) -> None:
    s, t = pair
    plan = plan_of(s, t, portable=portable)
    plan.certificate.check()
    assert oracle.unsound(plan.program, [t], seed) is None
    assert sp.same(plan.program.output_types[0], t)
    for x in plan.program.types.values():
        assert max(oracle.volume(oracle.box(x, k)) for k in range(x.mesh.size)) * x.itemsize <= oracle.bound(s, t)
    assert plan.certificate.peak_bytes <= oracle.bound(s, t) == plan.certificate.bound_bytes


@settings(max_examples=100, deadline=None)
@given(some.types())
def test_t12_the_identity_is_empty(t: sp.TensorType) -> None:
    plan = sp.redistribute(t, t)
    assert plan.program.steps == () and plan.seconds == 0.0 and plan.certificate.status == "floor"


def element_counts(t: sp.TensorType) -> list[int]:
    return [oracle.volume(oracle.box(t, k)) for k in range(t.mesh.size)]


@settings(max_examples=250, deadline=None)
@given(some.pairs(("even",)), BOTH)
def test_t4_nothing_is_gathered_and_later_dropped(pair: Pair, portable: bool) -> None:
    s, t = pair
    plan = plan_of(s, t, portable=portable)
    types = [s, *plan.certificate.types]
    sizes = [x.local_bytes() for x in types]
    assert all(b <= a for a, b in pairwise(sizes[: sizes.index(min(sizes)) + 1])), "the local size first falls"
    assert all(a <= b for a, b in pairwise(sizes[sizes.index(min(sizes)) :])), "then it rises"
    gathers = [k for k, step in enumerate(plan.program.steps) if isinstance(step.op, AllGather)]
    slices = [k for k, step in enumerate(plan.program.steps) if isinstance(step.op, Slice)]
    assert not gathers or not slices or max(slices) < min(gathers)
    gathered = sum(
        int(step.op.received_bytes(types[k]).max()) for k, step in enumerate(plan.program.steps) if k in gathers
    )
    growth = sum(types[k + 1].local_bytes() - types[k].local_bytes() for k in gathers)
    assert gathered == growth


@settings(max_examples=250, deadline=None)
@given(some.pairs(("even", "even", "uneven")), BOTH)
def test_t5_at_most_one_permute(pair: Pair, portable: bool) -> None:
    plan = plan_of(*pair, portable=portable)
    assert sum(isinstance(step.op, Permute) for step in plan.program.steps) <= 1


@settings(max_examples=250, deadline=None)
@given(st.one_of(some.pairs(("even", "uneven")), some.cross_pairs(marked=False)))
def test_t6_no_device_receives_less_than_it_lacks(pair: Pair) -> None:
    s, t = pair
    c = sp.redistribute(s, t).certificate
    least = oracle.lower_bound(s, t)
    devices = sorted({*s.mesh.devices, *t.mesh.devices})
    assert list(c.lower_bound_bytes) == [least.get(d, 0) for d in devices]
    assert all(got >= low for got, low in zip(c.received_bytes, c.lower_bound_bytes, strict=True))
    assert c.total_lower_bound_bytes == sum(c.lower_bound_bytes)
    assert c.lower_bound_seconds <= c.seconds * (1 + 1e-12)
    if s.mesh == t.mesh and not sp.same(s, t):
        direct = Program({"0": s}, [Step(Exchange(t.layout), ("0",), ("1",))], ("1",))
        assert direct.steps[0].op.received_bytes(s).tolist() == [least[d] for d in s.mesh.devices]


def closed_form(s: sp.TensorType, t: sp.TensorType) -> Program:
    """T7: max(0, F-E) slices, (sum|e-f| - |F-E|)/2 all-to-alls, one permute, max(0, E-F) gathers, prime by prime.

    Written from the specification: which prime sub-axis is moved does not matter, as the permute puts every tile right.
    """
    mesh, ops = s.mesh, list[ops_module.Op]()
    dims = [[mesh.atoms[a].name for a in run] for run in s.atoms]
    size = {a.name: a.size for a in mesh.atoms}
    free = [n for n in size if not any(n in d for d in dims)]
    goal = [[size[mesh.atoms[a].name] for a in run] for run in t.atoms]
    gather: list[tuple[int, int]] = []
    for p in sorted(set(size.values())):
        e, f = [sum(size[n] == p for n in d) for d in dims], [g.count(p) for g in goal]
        while sum(e) < sum(f):
            d = next(k for k in range(len(e)) if e[k] < f[k])
            name = next(n for n in free if size[n] == p)
            free.remove(name)
            dims[d].append(name)
            ops.append(ops_module.Slice(d, (name,)))
            e[d] += 1
        while sum(e) - sum(f) > len([x for x in gather if x[1] == p]):
            kept = [k for k in range(len(e)) if e[k] > f[k] + gather.count((k, p))]
            gather.append((kept[0], p))
    # all-to-alls move a suffix, so a dim may first need its suffix brought to the end: a permute does both at once
    counts = [[size[n] for n in d] for d in dims]
    for p in sorted(set(size.values())):
        while True:
            have = [c.count(p) for c in counts]
            want = [g.count(p) + gather.count((d, p)) for d, g in enumerate(goal)]
            over = [d for d in range(len(have)) if have[d] > want[d]]
            if not over:
                break
            under = next(d for d in range(len(have)) if have[d] < want[d])
            k = max(i for i, n in enumerate(dims[over[0]]) if size[n] == p)
            name = dims[over[0]].pop(k)
            tail = dims[over[0]][k:]
            if tail:  # the sub-axis is no suffix: the permute that makes it one
                whole = [*dims[over[0]], name]
                layout = [whole if d == over[0] else x for d, x in enumerate(dims)]
                ops.append(ops_module.Permute(typed(s, layout).layout))
            dims[under].append(name)
            ops.append(ops_module.AllToAll(over[0], under, (name,)))
            counts = [[size[n] for n in d] for d in dims]
    final = [[mesh.atoms[a].name for a in run] for run in t.atoms]
    rest = [n for n in size if not any(n in d for d in final)]
    spare: dict[int, list[str]] = {}
    for d, p in gather:
        name = next(n for n in rest if size[n] == p)
        rest.remove(name)
        spare.setdefault(d, []).append(name)
    middle = [[*x, *spare.get(d, [])] for d, x in enumerate(final)]
    if not sp.same(typed(s, dims), typed(s, middle)):
        ops.append(ops_module.Permute(typed(s, middle).layout))
    ops += [ops_module.AllGather(d, tuple(names)) for d, names in spare.items()]
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]
    return Program({"0": s}, steps, (str(len(ops)),))


def typed(s: sp.TensorType, dims: list[list[str]]) -> sp.TensorType:
    return sp.TensorType(s.dtype, s.shape, [tuple(d) for d in dims], s.mesh)


@settings(max_examples=200, deadline=None)
@given(some.pairs(("even",), least=2))
def test_t7_t13_never_costlier_than_the_closed_form(pair: Pair) -> None:
    s, t = pair
    program, bound = closed_form(s, t), oracle.bound(s, t)
    assert sp.same(program.output_types[0], t)
    assert oracle.unsound(program, list(program.output_types)) is None
    assert all(x.local_bytes() <= bound for x in program.types.values())
    assert oracle.cost(plan_of(s, t).program, bound) <= oracle.cost(program, bound) * (1 + 1e-9)
    try:
        portable = sp.redistribute(s, t, portable=True)
    except sp.Infeasible as error:
        raise AssertionError("the closed form is portable") from error
    assert oracle.cost(portable.program, bound) <= oracle.cost(program, bound) * (1 + 1e-9)


def gather_then_slice(s: sp.TensorType, t: sp.TensorType) -> Program:
    ops: list[object] = []
    for d, (a, b) in enumerate(zip(s.layout.dims, t.layout.dims, strict=True)):
        if a != b and a:
            ops.append(AllGather(d, a))
    for d, (a, b) in enumerate(zip(s.layout.dims, t.layout.dims, strict=True)):
        if a != b and b:
            ops.append(Slice(d, b))
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]  # type: ignore[arg-type]
    return Program({"0": s}, steps, (str(len(ops)),))


@settings(max_examples=250, deadline=None)
@given(some.pairs(("even", "even", "uneven")))
def test_t13_never_costlier_than_the_plain_ways(pair: Pair) -> None:
    s, t = pair
    bound, cost = oracle.bound(s, t), oracle.cost(sp.redistribute(s, t).program, oracle.bound(s, t))
    direct = Program({"0": s}, [Step(Exchange(t.layout), ("0",), ("1",))], ("1",))
    assert cost <= oracle.cost(direct, bound) * (1 + 1e-9)
    plain = gather_then_slice(s, t)
    assert sp.same(plain.output_types[0], t)
    if all(x.local_bytes() <= bound for x in plain.types.values()):
        assert cost <= oracle.cost(plain, bound) * (1 + 1e-9)
    try:
        portable = sp.redistribute(s, t, portable=True)
    except sp.Infeasible:
        return
    assert cost <= oracle.cost(portable.program, bound) * (1 + 1e-9)


def renamed(t: sp.TensorType, new: sp.Mesh, name: dict[str, str], order: list[int]) -> sp.TensorType:
    dims = [tuple(name.get(a, a) for a in t.layout.dims[d]) for d in order]
    return sp.TensorType(t.dtype, [t.shape[d] for d in order], dims, new)


@settings(max_examples=120, deadline=None)
@given(some.pairs(("even",)), some.rngs(), BOTH)
def test_t9_names_and_the_order_of_dims_do_not_matter(pair: Pair, rng: random.Random, portable: bool) -> None:
    s, t = pair
    mesh = s.mesh
    assume(not any(mesh.parts))
    assume(all(mesh.span(a).whole for x in pair for d in x.layout.dims for a in d))
    names = rng.sample([f"x{k}" for k in range(len(mesh.axes))], len(mesh.axes))
    table = dict(zip(mesh.axes, names, strict=True))
    new = sp.Mesh(dict(zip(names, mesh.sizes, strict=True)), devices=mesh.devices)
    order = rng.sample(range(s.ndim), s.ndim)
    u, v = (renamed(x, new, table, order) for x in pair)
    bound = oracle.bound(s, t)
    here, there = plan_of(s, t, portable=portable), plan_of(u, v, portable=portable)
    if here.certificate.status == there.certificate.status == "heuristic":
        return
    assert oracle.cost(here.program, bound) == pytest.approx(oracle.cost(there.program, bound), rel=1e-9)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(some.pairs(("even",)), some.rngs())
def test_t9_splitting_an_axis_does_not_matter(pair: Pair, rng: random.Random) -> None:
    s, t = pair
    mesh = s.mesh
    wide = [a for a, n in mesh.shape.items() if len(suites.atoms(sp.Mesh(x=n))) > 1]
    assume(wide and not any(mesh.parts))
    assume(all(mesh.span(a).whole for x in pair for d in x.layout.dims for a in d))
    axis = rng.choice(wide)
    n = mesh.shape[axis]
    p = suites.cuts(sp.Mesh(x=n), (suites.atoms(sp.Mesh(x=n))[0],))
    fine = mesh.split(axis, major=p, minor=n // p)
    u, v = (x.with_layout(x.layout, fine) for x in pair)
    bound = oracle.bound(s, t)
    here, there = sp.redistribute(s, t), sp.redistribute(u, v)
    assert oracle.cost(here.program, bound) == pytest.approx(oracle.cost(there.program, bound), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(some.pairs(("even",)), some.rngs(), BOTH)
def test_t10_a_detour_is_never_cheaper(pair: Pair, rng: random.Random, portable: bool) -> None:
    """With a middle type no larger than the ends, and the charge of the whole question: then the bound is one."""
    s, t = pair
    bound = oracle.bound(s, t)
    names = suites.pick_names(rng, s.mesh.axes, s.ndim)
    try:
        m = sp.TensorType(s.dtype, s.shape, names, s.mesh)
    except sp.LayoutError:
        assume(False)
    assume(m.all_even and m.local_bytes() <= min(s.local_bytes(), t.local_bytes()))
    plan = plan_of(s, t, portable=portable)
    legs = [plan_of(s, m, portable=portable), plan_of(m, t, portable=portable)]
    detour = sum(oracle.cost(leg.program, bound) for leg in legs)
    if plan.certificate.status != "heuristic":
        assert oracle.cost(plan.program, bound) <= detour * (1 + 1e-9)


@pytest.mark.parametrize(
    ("source", "target"),
    [("i32[4@a, 4@c]{+b}", "i32[4, 4@a]"), ("i32[4@a, 4@c]{+b}", "i32[4@c, 4@a]"),
     ("i32[4@a, 4@c]", "i32[4@c, 4@a]{max:b}"), ("i32[2]{+b}", "i32[2@(a,b)]"), ("i32[2]{root:b}", "i32[2@(a,b)]"),
     ("i32[4@a, 4@c]{+b}", "i32[4@c, 4]{max:b}")],
)  # fmt: skip
def test_marks_of_size_one_say_nothing(source: str, target: str) -> None:
    mesh = sp.Mesh(a=2, b=1, c=2)
    s, t = sp.TensorType.parse(source, mesh), sp.TensorType.parse(target, mesh)
    plan = sp.redistribute(s, t)
    plan.certificate.check()
    assert oracle.unsound(plan.program, [t]) is None


ONCE = """
import shardplan as sp
from benchmarks.suites import problems
for suite in ("s16", "P", "N", "V", "M", "B"):
    for s, t, kw in problems(suite, 3, 6, most_multiple=1, most_tensors=9):
        print(sp.redistribute(s, t, **kw).program)
"""


def test_plans_are_equal_in_every_process() -> None:
    """Pitfall 13: every rank plans for itself."""
    texts = set()
    for seed in ("1", "2"):
        child = subprocess.run(
            [sys.executable, "-c", ONCE], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
        )  # fmt: skip
        texts.add(child.stdout)
    assert len(texts) == 1 and len(texts.pop()) > 1000


# The sample of section 8: (suite, seed, problems, options), cut into chunks that run side by side.
SMALL = {"most_devices": 26, "most_multiple": 1}
CHUNKS = [
    *(("s8", k, 100) for k in range(4)), *(("s16", k, 75) for k in range(4)), *(("U", k, 80) for k in range(4)),
    *(("P", k, 80) for k in range(4)), *(("S", k, 80) for k in range(4)), *(("N", k, 80) for k in range(6)),
    *(("V", k, 60) for k in range(6)), *(("M", k, 80) for k in range(5)), *(("B", k, 20) for k in range(4)),
    *(("L", k, 50) for k in range(4)), ("R", 0, 99), ("X", 0, 99),
]  # fmt: skip


def test_the_sample_is_large_enough() -> None:
    assert sum(n for *_, n in CHUNKS if n != 99) >= 3000


@pytest.mark.parametrize(("suite", "seed", "count"), CHUNKS, ids=[f"{s}-{k}" for s, k, _ in CHUNKS])
def test_sample(suite: str, seed: int, count: int) -> None:
    """0 wrong on the reference, 0 above the bound, 0 failing certificates."""
    solved = 0
    for s, t, how in suites.problems(suite, seed, count, most_tensors=24, **SMALL):
        solved += 1
        if suite == "R" and not isinstance(s, list) and not isinstance(t, list):
            s, t = suites.shrunk(s, t)
        elif suite == "R":
            continue  # the models: see test_batch
        try:
            plan = sp.redistribute(s, t, **how)
        except sp.Infeasible as error:
            assert suite == "L" and error.least_bytes is not None and error.least_bytes > how["memory_limit"]
            how = {"memory_limit": error.least_bytes}
            plan = sp.redistribute(s, t, **how)
        c = plan.certificate
        c.check()
        ends = [t] if isinstance(t, sp.TensorType) else t
        where = f"{s} on {getattr(s, 'mesh', '')} -> {t} on {getattr(t, 'mesh', '')} {how}"
        assert oracle.unsound(plan.program, ends, seed) is None, where
        if "memory_limit" in how:
            assert c.workspace_bytes <= how["memory_limit"], where
        else:
            assert c.peak_bytes <= c.bound_bytes, where
        if not isinstance(s, list) and not isinstance(t, list):
            assert c.bound_bytes == oracle.bound(s, t), where
            assert math.isfinite(c.gap) or max(c.lower_bound_bytes) == 0, where
    assert solved == count or suite in suites.LISTS
