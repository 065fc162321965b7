"""The search against exhaustive Dijkstra over typed op instances (T8), and the graph's costs against the ops' own."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
import shardplan as sp
import strategies as some
from exhaustive import ALL, PORTABLE, TYPED, Graph, Marks
from shardplan.core.accounting import books_of, bound_bytes
from shardplan.core.ops import AllGather, AllToAll, Exchange, Op, Slice
from shardplan.movement.redistribution import choice
from shardplan.movement.redistribution.candidates import is_portable
from shardplan.movement.redistribution.choice import Rules
from shardplan.movement.redistribution.closed_form import closed_form
from shardplan.movement.redistribution.emit import direct, edge
from shardplan.movement.redistribution.problem import Problem, problem
from shardplan.movement.redistribution.search import STEP, Needs, Objective, Rates, narrowest, shortest
from shardplan.movement.redistribution.single_move import choose
from shardplan.movement.redistribution.space import LOCAL, MOVE
from shardplan.plans.pricing import fabric_of

NONE: Marks = (frozenset(), frozenset())


def marks(partial: str = "", root: str = "") -> Marks:
    return frozenset(partial), frozenset(root)


def same_mark(s: sp.TensorType, t: sp.TensorType, m: Marks) -> bool:
    """Whether the ends use exactly the marks of the graph, and none of them at both ends."""
    ends = [set(s.layout.partial) | set(t.layout.partial), set(s.layout.root) | set(t.layout.root)]
    both = set(s.layout.partial) & set(t.layout.partial)
    return ends == [set(m[0]), set(m[1])] and not both


# sizes, shape, allowed marks, questions
ARRAYS: list[tuple[dict[str, int], tuple[int, ...], Marks, int]] = [
    ({"a": 2, "b": 2, "c": 2}, (16, 16), NONE, 60),
    ({"a": 2, "b": 2, "c": 2}, (8, 8, 8), NONE, 12),
    ({"a": 4, "b": 2}, (8, 24), NONE, 50),
    ({"a": 8}, (16, 8), NONE, 50),
    ({"a": 3, "b": 2, "c": 2}, (24, 24), NONE, 50),
    ({"a": 6, "b": 2}, (12, 36), NONE, 50),
    ({"a": 2, "b": 3}, (6, 12, 6), NONE, 40),
    ({"a": 5, "b": 3, "c": 2}, (30, 30), NONE, 40),
    ({"a": 12}, (12, 24), NONE, 40),
    ({"a": 3, "b": 3, "c": 2}, (18, 18), NONE, 40),
    ({"a": 2, "b": 2, "c": 2}, (16, 16), marks("a"), 150),
    ({"a": 2, "b": 2, "c": 2}, (16, 16), marks("ab"), 150),
    ({"a": 2, "b": 2, "c": 2}, (16, 16), marks("a", "b"), 150),
    ({"a": 2, "b": 3}, (12, 12), marks("a"), 100),
    ({"a": 2, "b": 3}, (12, 12), marks("", "b"), 100),
    # arrays so small that some types between even ends are uneven
    ({"a": 2, "b": 2, "c": 2}, (8, 4), NONE, 60),
    ({"a": 2, "b": 3, "c": 2}, (6, 8), NONE, 50),
    ({"a": 2, "b": 2, "c": 2}, (4, 4, 2), NONE, 12),
    ({"a": 3, "b": 2}, (6, 2), marks("a"), 50),
]


def label(x: object) -> str:
    """A test id that does not depend on the order of sets."""
    return "/".join("".join(sorted(m)) for m in x) if isinstance(x, tuple) and isinstance(x[0], frozenset) else str(x)


def one_prime(sizes: dict[str, int]) -> bool:
    return len({p for n in sizes.values() for p in oracle.factors(n)}) == 1


@pytest.mark.parametrize(("sizes", "shape", "allowed", "questions"), ARRAYS, ids=label)
def test_t8_the_planner_is_as_good_as_exhaustive_search(
    sizes: dict[str, int], shape: tuple[int, ...], allowed: Marks, questions: int
) -> None:
    """Between even ends, over all even types: never above typed ops, equal with everything allowed.

    Where tile counts of two primes meet, a round may be charged too much (a counterexample is below): by at most two
    rounds a plan. A status `exact` is held to the letter where it is claimed, uneven types included.
    """
    base = sp.TensorType("f32", shape, (), sp.Mesh(sizes))
    graph = Graph(base, allowed)
    rng = random.Random(str((sizes, shape)))
    asked = 0
    while asked < questions:
        questions -= 1
        s, t = rng.choice(graph.even), rng.choice(graph.even)
        if s == t or not same_mark(s, t, allowed):
            continue
        asked += 1
        bound = oracle.bound(s, t)
        slack = 1e-9 * bound if one_prime(sizes) else 2.001 * oracle.ROUND_CHARGE * bound
        typed = graph.cheapest(s, t, bound, TYPED, even=True)
        for moves in (ALL, PORTABLE):
            best = graph.cheapest(s, t, bound, moves, even=True)
            try:
                plan = sp.redistribute(s, t, portable=moves == PORTABLE)
            except sp.Infeasible:
                assert best == typed == math.inf
                continue
            cost = oracle.cost(plan.program, bound)
            where = f"{s} -> {t} ({moves}): {cost} {plan.certificate.status}, exhaustive {best}, typed {typed}"
            assert cost <= typed * (1 + 1e-9), where
            assert cost <= best + slack, where
            if plan.certificate.status == "exact":
                full = graph.cheapest(s, t, bound, moves)
                assert abs(cost - full) <= slack, f"{where}, with uneven types {full}"
                assert abs(cost - best) <= slack, where
    assert asked >= 5


# Counterexamples that are published; `strict` tells when one is gone.
KNOWN = [
    pytest.param(
        {"a": 2, "b": 3, "c": 2}, "f32[12@a, 12@(b,c)]", "f32[12@b, 12@(c,a)]", True,
        id="rounds of an exchange between coprime tile counts are overestimated on the graph",
        marks=pytest.mark.xfail(strict=True, reason="a receiver that meets two source tiles always holds one of them"),
    ),
    pytest.param(
        {"a": 2, "b": 2, "c": 2}, "f32[16, 16@b]{+a}", "f32[16, 16@c]{+a}", False,
        id="moving addends costs more than reducing, moving and splitting again",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "source", "target", "portable"), KNOWN)
def test_t8_counterexamples(sizes: dict[str, int], source: str, target: str, portable: bool) -> None:
    mesh = sp.Mesh(sizes)
    s, t = sp.TensorType.parse(source, mesh), sp.TensorType.parse(target, mesh)
    allowed = frozenset(s.layout.partial), frozenset(s.layout.root)
    best = Graph(s, allowed).cheapest(s, t, oracle.bound(s, t), PORTABLE if portable else ALL, even=True)
    cost = oracle.cost(sp.redistribute(s, t, portable=portable).program, oracle.bound(s, t))
    assert cost == pytest.approx(best, rel=1e-9)


def whole_axes(mesh: sp.Mesh, ndim: int, n: int, allowed: Marks) -> Problem:
    """A problem whose runs are the whole axes, whatever their primes."""
    spec = [None] * ndim
    s = sp.TensorType("f32", (n,) * ndim, spec, mesh, partial=dict.fromkeys(sorted(allowed[0]), "sum"))
    t = sp.TensorType("f32", (n,) * ndim, spec, mesh, root=tuple(sorted(allowed[1])))
    runs = tuple(mesh.span(a).atoms for a in mesh.axes)
    return Problem(s, t, runs, tuple(True for _ in runs), all(len(r) == 1 for r in runs))


GRAPHS = [
    ({"a": 2, "b": 2, "c": 2}, 2, NONE), ({"a": 2, "b": 2, "c": 2}, 3, NONE), ({"a": 2, "b": 3}, 3, NONE),
    ({"a": 3, "b": 2, "c": 2}, 2, NONE), ({"a": 4, "b": 2}, 2, NONE), ({"a": 4, "b": 2}, 3, NONE),
    ({"a": 5, "b": 6}, 2, NONE), ({"a": 12, "b": 2}, 2, NONE), ({"a": 7}, 3, NONE),
    ({"a": 2, "b": 2, "c": 2}, 2, marks("a")), ({"a": 2, "b": 2, "c": 2}, 1, marks("ab", "c")),
    ({"a": 2, "b": 3}, 2, marks("a", "b")), ({"a": 4, "b": 2}, 2, marks("a")), ({"a": 2, "b": 2}, 2, marks("ab", "ab")),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "ndim", "allowed"), GRAPHS, ids=label)
def test_the_graph_prices_every_edge_as_its_op_does(sizes: dict[str, int], ndim: int, allowed: Marks) -> None:
    n = 2 * math.prod(sizes.values())
    p = whole_axes(sp.Mesh(sizes), ndim, n, allowed)
    graph = p.graph
    types = [p.type(k) for k in range(len(graph.types))]
    assert len(set(types)) == len(types)
    for a, t in enumerate(types):
        assert p.node(t) == a
        assert graph.size[a] == t.local_bytes() / t.nbytes
        row, small_row = graph.edges(a, out=True), graph.edges(a, out=True, portable=True)
        for b, u in enumerate(types):
            column = graph.edges(b, out=False)
            assert (row.bytes[b], row.rounds[b], row.kind[b]) == (column.bytes[a], column.rounds[a], column.kind[a])
            if a == b or not math.isfinite(row.bytes[b]):
                continue
            found, received, moved, rounds = t, 0, 0, 0
            for op in edge(p, a, b):
                received += int(op.received_bytes(found).max())
                moved += oracle.moved(op, found)
                rounds += op.rounds(found)
                (found,) = op.infer(found)
            where = f"{t} -> {u}: {[str(op) for op in edge(p, a, b)]}"
            assert found == u, where
            assert received == pytest.approx(row.bytes[b] * t.nbytes, abs=1e-6), where
            small = edge(p, a, b, portable=True)
            assert all(is_portable(op, t) for op in small) == math.isfinite(small_row.paid[b]), where
            assert row.kind[b] != LOCAL or received == rounds == 0, where
            if row.kind[b] == MOVE and not divides(t, u):
                assert rounds <= row.rounds[b] <= rounds + 1, where
                continue  # receivers of a tile want more of it or less, so that one of its holders may send more
            assert rounds == row.rounds[b], where
            assert moved == received, where
            if math.isfinite(small_row.paid[b]):
                least = sum(oracle.moved(op, x) for op, x in zip(small, along(small, t), strict=True))
                most = small_row.paid[b] * t.nbytes
                assert least == pytest.approx(most, abs=1e-6) if one_prime(sizes) else least >= most - 1e-6, where


def along(ops: list[Op], t: sp.TensorType) -> list[sp.TensorType]:
    """The operand of each of a chain of ops."""
    types = [t]
    for op in ops:
        types += op.infer(types[-1])
    return types[:-1]


def cheapest(prices: np.ndarray) -> np.ndarray:
    """The cost of the cheapest path from every state to every state, where one step costs what the table says."""
    reach = prices.copy()
    np.fill_diagonal(reach, 0.0)
    for k in range(len(reach)):
        reach = np.minimum(reach, reach[:, k, None] + reach[None, k, :])
    return reach


@pytest.mark.parametrize(("sizes", "ndim", "allowed"), [GRAPHS[0], GRAPHS[2], GRAPHS[9]], ids=label)
def test_the_search_finds_the_cheapest_path_and_the_narrowest(sizes: dict[str, int], ndim: int, allowed: Marks) -> None:
    graph = whole_axes(sp.Mesh(sizes), ndim, 2 * math.prod(sizes.values()), allowed).graph
    every = np.arange(len(graph.types))
    objective = Objective(byte=1.0, turn=0.002, step=STEP)
    edges = [graph.edges(a, out=True) for a in every]
    best = cheapest(np.array([objective.price(e) for e in edges]))
    legal = np.array([np.isfinite(e.bytes) for e in edges])
    both = graph.size[:, None] + graph.size[None, :]
    rng = random.Random(0)
    for _ in range(100):
        s, t = rng.sample(range(len(every)), 2)
        path = shortest(graph, s, t, objective, np.ones(len(every), dtype=bool), budget=len(every))
        if path is None:
            assert best[s, t] == math.inf
            continue
        assert path.exact
        assert path.cost == pytest.approx(best[s, t], rel=1e-9)
        needs = Needs(graph.types, np.ones(graph.types.shape), graph.size * 2**20, 0, None, 0.0)
        narrow = narrowest(graph, s, t, needs, np.ones(len(every), dtype=bool), portable=False, budget=len(every))
        assert narrow is not None
        width = max(both[a, b] for a, b in itertools.pairwise(narrow.nodes))
        assert narrow.cost == pytest.approx(width * 2**20, abs=1)
        # No path is left among the steps that are narrower.
        assert cheapest(np.where(legal & (both < width * (1 - 1e-9)), 1.0, np.inf))[s, t] == math.inf


@pytest.mark.parametrize(("sizes", "ndim", "allowed"), [*GRAPHS[:7], *GRAPHS[9:]], ids=label)
@pytest.mark.parametrize("kind", ["bytes", "portable", "rates"])
def test_no_path_is_cheaper_than_its_floor(sizes: dict[str, int], ndim: int, allowed: Marks, kind: str) -> None:
    graph = whole_axes(sp.Mesh(sizes), ndim, 2 * math.prod(sizes.values()), allowed).graph
    every, portable = np.arange(len(graph.types)), kind == "portable"
    rates = (
        Rates(*np.random.default_rng(0).uniform(0.1, 2.0, (4, 2, len(graph.group_size)))) if kind == "rates" else None
    )
    objective = Objective(byte=1.0, turn=0.0 if rates else 0.002, step=STEP, portable=portable, rates=rates)
    edges = [graph.edges(a, out=True, portable=portable) for a in every]
    best = cheapest(np.array([objective.price(e) for e in edges]))
    for a, e in enumerate(edges):
        floor = objective.floor(e, graph, np.array(a), every)
        assert ((floor <= best[a] * (1 + 1e-9)) | (every == a)).all()


EIGHT = sp.Mesh(a=8)
SUM = sp.TensorType("f32", (2**28,), (None,), EIGHT, partial={"a": "sum"}), sp.TensorType("f32", (2**28,), (), EIGHT)


@settings(max_examples=100, deadline=None)
@given(some.pairs(("even", "uneven", "partial", "rooted"), most=16), st.sampled_from((None, "nominal", "dgx-h100")))
@example(SUM, "dgx-h100")  # its switches reduce
def test_what_is_not_counted_is_not_cheaper(pair: tuple[sp.TensorType, sp.TensorType], name: str | None) -> None:
    s, t = pair
    sizes = {"devices": 64} if name == "nominal" else {"nodes": 8}
    fabric = None if name is None else fabric_of(sp.Topology.load(name, **sizes), (s.mesh,))
    rules = Rules(bound_bytes((s,), (t,)), fabric=fabric)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "least_price", lambda program, rules: 0.0)  # pyright: ignore
        every = choose(s, t, rules)
    some_counted = choose(s, t, rules)
    assert every is not None and some_counted is not None
    assert some_counted.program == every.program
    assert choice.least_price(every.program, rules) <= every.price * (1 + 1e-9)


def divides(t: sp.TensorType, u: sp.TensorType) -> bool:
    """Whether in every dim one number of tiles divides the other: then the graph's rounds are exact."""
    for x, y in zip(t.layout.dims, u.layout.dims, strict=True):
        p, q = (math.prod(t.mesh.span(a).size for a in names) for names in (x, y))
        if p % q and q % p:
            return False
    return True


def test_what_is_known_to_be_dearer_than_the_best_is_not_called_exact() -> None:
    """The first counterexample above: the graph estimates the rounds of its exchanges."""
    mesh = sp.Mesh(a=2, b=3, c=2)
    plan = sp.redistribute("f32[12@a, 12@(b,c)]", "f32[12@b, 12@(c,a)]", mesh=mesh, portable=True)
    assert plan.certificate.status == "heuristic"


def test_of_equal_prices_the_simplest_program_is_taken() -> None:
    """Two slices are free, and so is the permute in which every device keeps its own corner."""
    mesh = sp.Mesh(a=2, b=3, c=2)
    plan = sp.redistribute("f32[2, 2, 2]", "f32[2@c, 2, 2@a]", mesh=mesh)
    assert plan.certificate.received_bytes == (0,) * 12 and plan.certificate.rounds == 0
    assert [step.op.name for step in plan.program.steps] == ["permute"]


@pytest.mark.parametrize("apart", [2 * choice.TIE, 1e-6, 1e-3])
def test_prices_decide_before_programs_are_asked_how_simple_they_are(apart: float) -> None:
    """Of two that differ by more than the rounding of a sum the cheaper is taken, whichever comes first."""
    source = sp.TensorType.parse("f32[4, 4]", sp.Mesh(a=2, b=2))
    short = choice.chain([Slice(0, ("a",))], source)
    long = choice.chain([Slice(0, ("a",)), Slice(1, ("b",))], source)
    simple, dear = (choice.Chosen(p, books_of(p), False, price) for p, price in ((short, 1 + apart), (long, 1.0)))

    def taken(*entered: choice.Chosen) -> choice.Chosen | None:
        contest = choice.Contest(choice.Rules(1 << 20))
        for one in entered:
            contest.add(one)
        return contest.winner

    assert taken(simple, dear) is taken(dear, simple) is dear
    equal = replace(simple, price=1 + choice.TIE / 2)
    assert taken(equal, dear) is taken(dear, equal) is equal


def test_the_direct_exchange_runs_over_the_axes_that_move() -> None:
    mesh = sp.Mesh(a=2, b=2, c=2)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[8@a, 8@b]", "f32[8@b, 8]"))
    assert direct(s, t) == [Exchange(t.layout, ("a", "b"))]


def test_the_closed_form_is_minimal() -> None:
    """It moves the axis that can be moved at once, and has as many steps of each kind as its formula says."""
    mesh = sp.Mesh(a=2, b=2, c=3)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[12@(a,b), 12]", "f32[12@a, 12@b]"))
    assert closed_form(s, t) == [AllToAll(0, 1, ("b",))]
    rng = random.Random(0)
    types = Graph(sp.TensorType("f32", (12, 12), (), mesh)).even
    for _ in range(50):
        s, t = rng.choice(types), rng.choice(types)
        ops = closed_form(s, t)
        carried = {
            kind: Counter(mesh.atoms[a].size for op in ops if type(op) is kind for a in mesh.expand(op.axes))
            for kind in (Slice, AllToAll, AllGather)
        }
        for p in (2, 3):  # by how much the multiplicity of a prime in every dim changes
            more = [
                sum(mesh.atoms[a].size == p for a in new) - sum(mesh.atoms[a].size == p for a in old)
                for old, new in zip(s.atoms, t.atoms, strict=True)
            ]
            moved = (sum(map(abs, more)) - abs(sum(more))) // 2
            asked = max(0, sum(more)), moved, max(0, -sum(more))
            assert tuple(carried[kind][p] for kind in (Slice, AllToAll, AllGather)) == asked


def test_a_type_lost_between_uneven_ones_is_found() -> None:
    """Between even ends the graph may not price uneven types as if they were even."""
    mesh = sp.Mesh(a=2, b=2, c=2)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[8@(c,a,b), 4]", "f32[8, 4@(c,b)]"))
    plan = sp.redistribute(s, t, portable=True)
    assert oracle.cost(plan.program, oracle.bound(s, t)) == pytest.approx(40.256)


def test_a_sub_axis_beside_an_unused_one_is_a_run_of_its_own() -> None:
    """An unused atom and the first atom of the first dim are no neighbours."""
    mesh = sp.Mesh(a=8)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("i32[2]{+a}", "i32[2@a.2]{+a.0}"))
    plan = sp.redistribute(s, t)
    plan.certificate.check()
    assert oracle.unsound(plan.program, [t]) is None


def test_runs_keep_what_stands_together_whole() -> None:
    mesh = sp.Mesh(a=64, b=32, c=32)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[65536@(a,b), 1024@c]", "f32[65536@(a,b), 1024]"))
    p = problem(s, t)
    assert p is not None and len(p.runs) <= 8
    plan = sp.redistribute(s, t)
    assert [step.op.name for step in plan.program.steps] == ["all_gather"]


def test_a_deeply_interleaved_pair_is_planned() -> None:
    """More runs than a graph can hold: there is a plan all the same, within the bound."""
    mesh = sp.Mesh(a=32, b=32)
    names = [a.name for a in mesh.atoms]
    rng = random.Random(0)
    for _ in range(5):
        dims = [tuple(rng.sample(names, len(names))), ()]
        other = [(), tuple(rng.sample(names, len(names)))]
        s, t = (sp.TensorType("f32", (1024, 1024), d, mesh) for d in (dims, other))
        plan = sp.redistribute(s, t)
        plan.certificate.check()
        assert plan.certificate.peak_bytes <= oracle.bound(s, t)
        portable = sp.redistribute(s, t, portable=True)
        assert all(is_portable(step.op, t) for step in portable.program.steps)


TRAPS = [
    ({"x": 4, "y": 2}, "f32[8@y, 16, 8@x]", "f32[8, 16@(x,y), 8]"),  # jax issue 21562
    ({"x": 3, "y": 2}, "f32[6@x, 6@y]", "f32[6@y, 6@x]"),  # pytorch issue 134646
    ({"a": 2, "b": 3, "c": 2}, "f32[48@(c,a), 48@b]", "f32[48@(b,a), 48@c]"),  # Shardy ends in [48@(a,b), 48@c]
    ({"a": 3, "b": 4, "c": 2}, "f32[48, 48@(c,a), 48@b]", "f32[48, 48@(b,a), 48@c]"),  # Shardy: size 3 != 6
]


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("sizes", "source", "target"), TRAPS)
def test_traps(sizes: dict[str, int], source: str, target: str, portable: bool) -> None:
    mesh = sp.Mesh(sizes)
    s, t = sp.TensorType.parse(source, mesh), sp.TensorType.parse(target, mesh)
    plan = sp.redistribute(s, t, portable=portable)
    plan.certificate.check()
    assert oracle.unsound(plan.program, [t]) is None
    assert plan.certificate.peak_bytes <= oracle.bound(s, t)
    if not portable:
        assert plan.certificate.gap == 1.0


def test_the_free_form_case_is_one_cutting_permute() -> None:
    mesh = sp.Mesh(a=2, b=3, c=2)
    s, t = (sp.TensorType.parse(x, mesh) for x in ("f32[48, 48, 48@a]", "f32[48, 48@a, 48@(b,c)]"))
    for portable in (False, True):
        plan = sp.redistribute(s, t, portable=portable)
        assert [step.op.name for step in plan.program.steps] == ["permute"]
        assert max(plan.certificate.received_bytes) == 4 * 9216 == max(plan.certificate.lower_bound_bytes)


def test_portable_plans_have_no_wide_exchange() -> None:
    rng = random.Random(5)
    graph = Graph(sp.TensorType("f32", (24, 24), (), sp.Mesh(a=3, b=2, c=2)))
    for _ in range(100):
        s, t = rng.sample(graph.types, 2)
        for step in sp.redistribute(s, t, portable=True).program.steps:
            if isinstance(step.op, Exchange):
                assert 2 * math.prod(s.mesh.span(a).size for a in step.op.axes) <= s.mesh.size and step.op.axes
