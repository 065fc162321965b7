"""Settled seconds are the least: beside all options of random programs, and beside an integer programme on models."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, reject, settings

import shardplan.strategy.partition.partition as partition_module
import shardplan.strategy.partition.settle as settle_module
from shardplan import Job, Layouts, Model, Strategy, partition
from shardplan.core.dim_names import dim_names
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Einsum, Elementwise, ReduceDims, Repeat, Softmax
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition import elimination
from shardplan.strategy.partition.flow import Key, LineBlock, flow
from shardplan.strategy.partition.memory import certify
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.problem import Cut, SettleProblem
from shardplan.strategy.partition.settle import TIE, Settled, settle
from strategies import rngs
from strategy.jobs import model
from strategy.settling import Walk, all_totals, every, programmed, single

SIZES = {"b": 6, "s": 500, "h": 768, "f": 2000, "g": 3}
ONE = Mesh({"one": 1})
MACHINE = Topology.load("dgx-h100", nodes=2)
MOST = 200_000  # combinations of options that are all tried


class Case(NamedTuple):
    """A program on one device, and what is asked of it."""

    block: LineBlock
    mesh: Mesh
    serve: dict[str, tuple[tuple[str, ...], ...]]
    given: dict[str, TensorType]
    wanted: dict[Key, TensorType]
    held: dict[str, Layout]
    gradients: dict[Key, Layout]
    cut: Cut | None

    def settled(self, prices: Prices) -> Settled:
        problem = SettleProblem(self.block, self.mesh, self.given, self.wanted, self.held, self.gradients, self.cut)
        return settle(problem, self.serve, self.mesh.axes, prices)

    def walk(self) -> Walk:
        return Walk(self.block, self.given, self.wanted, self.held, self.gradients, self.cut)


class WrittenProgram:
    """A program that grows: `dims` has the letters of its values, which are the names of their dims."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.steps = rng, list[Step]()
        self.inputs, self.weights, self.dims = dict[str, TensorType](), set[str](), dict[str, str]()

    def input(self, name: str, dims: str, rows: int = 0) -> str:
        shape = [*([rows] if rows else []), *(SIZES[c] for c in dims)]
        self.inputs[name] = TensorType("f32", shape, (), ONE)
        self.dims[name] = dims
        return name

    def op(self, op: Einsum | Elementwise | ReduceDims, operands: list[str], dims: str) -> str:
        name = f"v{len(self.steps)}"
        self.steps.append(Step(op, tuple(operands), (name,)))
        self.dims[name] = dims
        return name

    def product(self, x: str, old: str, new: str) -> str:
        """A value times a weight: a dim becomes another."""
        dims = self.dims[x]
        weight = self.input(f"w{len(self.inputs)}", old + new)
        self.weights.add(weight)
        return self.op(Einsum(f"{dims},{old}{new}->{dims.replace(old, new)}"), [x, weight], dims.replace(old, new))

    def any(self, values: list[str]) -> str:
        """A step on some values."""
        x = self.rng.choice(values)
        dims = self.dims[x]
        alike = [v for v in values if self.dims[v] == dims]
        free = [c for c in "hfg" if c not in dims]
        how = self.rng.choice(("product", "product", "both", "one", "gradient", "sum"))
        if how == "product" and free and (old := [c for c in dims if c in "hfg"]):
            return self.product(x, self.rng.choice(old), self.rng.choice(free))
        if how == "both":
            return self.op(Elementwise(self.rng.choice(("a+b", "a*b"))), [x, self.rng.choice(alike)], dims)
        if how == "sum" and len(dims) > 1:
            d = self.rng.randrange(len(dims))
            return self.op(ReduceDims((d,)), [x], dims[:d] + dims[d + 1 :])
        if how == "gradient":
            other = self.rng.choice(values)
            common = set(dims) & set(self.dims[other]) & set("bs")
            result = "".join(dict.fromkeys(c for c in dims + self.dims[other] if c not in common))
            if result:
                return self.op(Einsum(f"{dims},{self.dims[other]}->{result}"), [x, other], result)
        return self.op(Elementwise(self.rng.choice(("2*a", "exp(a)"))), [x], dims)

    def made(self) -> list[str]:
        return [r for step in self.steps for r in step.results]


def body_of(rng: random.Random, dims: str, rows: bool) -> tuple[Program, str, list[str]]:
    """A body that carries a value through a product with a row of a weight: the dims of what it stacks, and of rows."""
    w = WrittenProgram(rng)
    x = w.input("x", dims)
    given = [x]
    if rows:
        given.append(w.input("saved", dims))
    weight = w.input("row", "hf")
    stacked = w.op(Einsum(f"{dims},hf->{dims.replace('h', 'f')}"), [x, weight], dims.replace("h", "f"))
    if rng.random() < 0.5:
        stacked = w.op(Elementwise("exp(a)"), [stacked], w.dims[stacked])
    back = w.op(Einsum(f"{w.dims[stacked]},hf->{dims}"), [stacked, weight], dims)
    out = w.op(Elementwise("a*b" if rows else "a+b"), [back, "saved" if rows else x], dims)
    keep = rng.choice((stacked, back))
    return Program(w.inputs, w.steps, (out, keep)), w.dims[keep], ["hf"]


def random_case(rng: random.Random, repeat: bool) -> Case:
    """A program of up to eight steps, at times with a repeat and one that reads what it stacked."""
    w, degree = WrittenProgram(rng), rng.choice((2, 3, 4))
    mesh = Mesh({"x": degree})
    values = [w.input("i0", "".join(rng.sample("bs", rng.randint(1, 2))) + "h")]
    cut = None
    for _ in range(rng.randint(0, 2) if repeat else rng.randint(3, 6)):
        values.append(w.any(values))
    if repeat:
        dims, n = w.dims["i0"], 3
        body, kept, _ = body_of(rng, dims, rows=False)
        weight = w.input("stack", "hf", n)
        w.weights.add(weight)
        ends = ("carried", "stacked")
        w.steps.append(Step(Repeat(n, body, 1, 1), ("i0", weight), ends))
        w.dims |= {"carried": dims}
        values.append("carried")
        if kept == dims and rng.random() < 0.7:
            again, _, _ = body_of(rng, dims, rows=True)
            w.steps.append(
                Step(Repeat(n, again, 1, 2, reverse=True), ("carried", "stacked", weight), ("back", "other"))
            )
            w.dims |= {"back": dims}
            cut = Cut(len(w.steps) - 1, ("carried", "stacked"))
            values.append("back")
    for _ in range(rng.randint(0, 2)):
        values.append(w.any(values))
    made = w.made()
    assume(made)
    if cut is None and rng.random() < 0.4:
        number = rng.randrange(len(w.steps))
        before = {r for step in w.steps[:number] for r in step.results}
        later = {o for step in w.steps[number:] for o in step.operands}
        cut = Cut(number, tuple(sorted(before & later)))
    program = Program(w.inputs, w.steps, (values[-1],) if values[-1] in made else (made[-1],))
    names = {n: tuple(("layer",) if t.ndim > len(w.dims[n]) else ()) + tuple(w.dims[n]) for n, t in program.inputs}
    block = flow(program, dim_names(program, names))
    dims = {n: len(t.shape) for n, t in program.inputs}

    def layout(ndim: int, first: int = 0, sums: float = 0.0) -> Layout:
        out: list[tuple[str, ...]] = [()] * ndim
        if rng.random() < sums:
            return Layout(tuple(out), ("x",), "sum")
        if ndim > first and rng.random() < 0.5:
            out[rng.randrange(first, ndim)] = ("x",)
        return Layout(tuple(out))

    held = {n: layout(dims[n], int(n == "stack")) for n in sorted(w.weights) if rng.random() < 0.5}
    types = {n: t.with_layout(held.get(n) or layout(dims[n], int(n == "stack")), mesh) for n, t in program.inputs}
    top = [r for step in w.steps if not isinstance(step.op, Repeat) for r in step.results]
    wanted = {
        ((), r): program.types[r].with_layout(layout(program.types[r].ndim, 0, 0.3), mesh)
        for r in top
        if rng.random() < 0.3
    }
    gradients = {((), r): layout(program.types[r].ndim) for r in top if rng.random() < 0.15}
    letters = ["b", "s", "h", "f", "g"]
    serve = {"x": tuple(tuple(rng.sample(letters, rng.randint(1, 2))) for _ in range(rng.randint(0, 3)))}
    return Case(block, mesh, serve if rng.random() < 0.7 else {}, types, wanted, held, gradients, cut)


def assert_least(case: Case) -> None:
    prices = Prices(Fabric(MACHINE))
    walk = case.walk()
    found = single(walk, case.mesh, "x", case.serve.get("x"), prices)
    if not all(found.values()):
        with pytest.raises(LayoutError):
            case.settled(prices)
        return
    if math.prod(len(mine) for mine in found.values()) > MOST:
        reject()
    least = float(all_totals(walk, found, prices).min())
    if math.isinf(least):
        with pytest.raises(LayoutError, match="no movement leads"):
            case.settled(prices)
        return
    assert case.settled(prices).seconds == pytest.approx(least, rel=1e-12)


@given(rngs())
@settings(max_examples=100)
def test_settled_seconds_are_the_least_of_all_options(rng: random.Random) -> None:
    assert_least(random_case(rng, repeat=False))


@given(rngs())
@settings(max_examples=100)
def test_settled_seconds_are_the_least_with_repeats(rng: random.Random) -> None:
    assert_least(random_case(rng, repeat=True))


@given(rngs())
@settings(max_examples=50)
def test_a_value_with_many_users_goes_from_one_to_the_next(rng: random.Random) -> None:
    """What costs one wide table otherwise is a chain of narrow ones, of the same least seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settle_module, "WIDE", rng.choice((1, 8)))
        assert_least(random_case(rng, repeat=rng.random() < 0.5))


def test_what_hangs_together_too_much_has_axes_in_the_order_of_the_mesh() -> None:
    """What both passes keep of replicas in rows: all orders of two axes in all dims would be a table of too many."""
    model = Model.load("llama3-8b", layers=2, seq=4096, precision="bf16")
    kept = Strategy(data=16, shard=8, fsdp=True, zero=2, recompute="full", global_batch=16)
    job = partition(model, kept)
    dims = {dim for p in job.programs.shared for t in p.types.values() for dim in t.layout.dims}
    assert ("replica", "data") in dims and ("data", "replica") not in dims


def test_a_body_in_a_body_runs_as_often_as_both_say() -> None:
    program = Program.parse("""program
  mesh one=1
  input %h: f32[4, 6]
  %r = repeat(%h; n=3, carried=1) {
    input %h: f32[4, 6]
    %q = repeat(%h; n=2, carried=1) {
      input %h: f32[4, 6]
      %e = elementwise(%h; expr="exp(a)"): f32[4, 6]
      output %e
    }: f32[4, 6]
    output %q
  }: f32[4, 6]
  output %r""")
    blocks = [*flow(program, dim_names(program, {"h": ("b", "f")})).every()]
    assert [(block.path, block.times) for block in blocks] == [((), 1), ((0,), 3), ((0, 0), 6)]


def test_what_is_saved_has_no_more_bytes_than_what_was_made() -> None:
    """A value that is wanted whole before and after the cut is gathered twice: what is saved is the part of it."""
    t = TensorType("f32", (6, 768), (), ONE)
    steps = [Step(Elementwise("exp(a)"), ("x",), ("v",)), *(Step(Softmax(0), ("v",), (r,)) for r in ("p", "q"))]
    program = Program({"x": t}, steps, ("p", "q"))
    block, mesh = flow(program, dim_names(program, {"x": ("b", "h")})), Mesh({"x": 2})
    given = {"x": t.with_layout(Layout((("x",), ())), mesh)}
    case = Case(block, mesh, {"x": (("b",),)}, given, {}, {}, {}, Cut(2, ("v",)))
    assert_least(case)
    prices = Prices(Fabric(MACHINE))
    found = case.settled(prices)
    assert found.saved(((), "v")) == (given["x"],)
    assert found.seconds > 2 * prices.move(given["x"], t.with_layout(Layout(()), mesh))


def test_what_is_saved_may_lie_as_it_was_made() -> None:
    """Six heads over four devices, beside a sequence over two and heads over two: only that is no more bytes."""
    settled = partition(model("llama", heads=6, kv_heads=6), Strategy(context=2, tensor=2), MACHINE).settled
    inner = [key for key in settled.saves if key[0]]  # of bodies; outside them a name is what is saved after the cut
    assert inner
    for key in inner:
        assert settled.saved(key)[0].local_bytes() <= settled.type_of(key).local_bytes()


# --- several axes, beside an integer programme

LAYERS = 2
BIG: dict[str, dict[str, Any]] = {
    "llama3-8b": {"seq": 2048},
    "gpt3-xl": {},
    "mixtral-8x7b": {"seq": 1024},
    "mlp-medium": {},
}
COMPOSITIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3-8b", {"data": 2, "tensor": 2}),
    ("llama3-8b", {"data": 2, "tensor": 4, "sequence_parallel": True}),
    ("llama3-8b", {"data": 2, "context": 2, "fsdp": True}),
    ("llama3-8b", {"data": 2, "context": 2, "tensor": 2, "sequence_parallel": True, "fsdp": True}),
    ("gpt3-xl", {"data": 2, "tensor": 4, "sequence_parallel": True, "zero": 1}),
    ("gpt3-xl", {"context": 2, "tensor": 2, "context_kind": "gather"}),
    ("mlp-medium", {"data": 2, "tensor": 4, "zero": 2}),
    ("mixtral-8x7b", {"data": 4, "expert": 2}),
    ("mixtral-8x7b", {"data": 4, "expert": 2, "tensor": 2, "zero": 1}),
    ("llama", {"data": 2, "tensor": 2}),  # of a few elements: seconds are those of starting
    ("gpt", {"data": 3, "tensor": 2, "zero": 2}),
    ("odd", {"data": 2, "context": 3, "fsdp": True}),
)


class Found(NamedTuple):
    """What `partition` settled of a model under a strategy, and what it made of it."""

    case: Case
    prices: Prices
    job: Job


def partitioned(
    model: Model,
    strategy: Strategy,
    layouts: Layouts | None = None,
    *,
    held: bool = True,
    topo: Topology | None = MACHINE,
) -> Found:
    """Partition a model; at times as if nothing said how parameters are held."""
    seen: list[Any] = []

    def problem(*given: Any) -> SettleProblem:
        seen.append(given if held else (*given[:4], {}, {}, *given[6:]))
        return SettleProblem(*seen[0])

    def settled(found: SettleProblem, serve: Any, order: Any, prices: Prices) -> Settled:
        seen.extend((serve, prices))
        return settle(found, serve, order, prices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_module, "SettleProblem", problem)
        patch.setattr(partition_module, "settle", settled)
        job = partition(model, strategy, topo, layouts=layouts)
    (block, mesh, *rest), serve, prices = seen
    return Found(Case(block, mesh, serve, *rest), prices, job)


@cache
def composed(k: int) -> Found:
    """Two layers of a preset's size, with eight sequences in a microbatch; or a small model."""
    name, degrees = COMPOSITIONS[k]
    found = Model.load(name, layers=LAYERS, batch=8, **BIG[name]) if name in BIG else model(name, layers=LAYERS)
    return partitioned(found, Strategy(**degrees, microbatch=8 // degrees.get("data", 1) if name in BIG else 1))


NAMED = [pytest.param(k, id=f"{name} {degrees}") for k, (name, degrees) in enumerate(COMPOSITIONS)]


@pytest.mark.parametrize("k", NAMED)
def test_several_axes_are_within_a_percent_of_an_integer_programme(k: int) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    case, prices, job = composed(k)
    walk = case.walk()
    low, high = programmed(walk, every(walk, case.mesh, case.serve, prices), prices)
    assert high <= low * 1.001
    assert low * (1 - 1e-6) <= job.settled.seconds <= high * 1.01


@pytest.mark.parametrize("k", NAMED)
def test_what_is_written_costs_what_was_settled(k: int) -> None:
    case, prices, job = composed(k)
    last = job.settled.sweeps[-2 * len(case.mesh.axes) :]
    assert len(last) == 2 * len(case.mesh.axes)  # nothing changed in a whole sweep
    assert last[-1] == pytest.approx(last[len(last) // 2 - 1], rel=1e-9)
    options = job.settled.options.items()
    seconds = sum((o.seconds + TIE * sum(t.local_bytes() for t in o.made)) * maker.times for maker, o in options)
    for (_, kind), movements in job.movements.items():
        for one in movements if kind != "OPT" else ():
            for there, made in zip(one.plan.program.input_types, one.plan.program.output_types, strict=True):
                seconds += prices.move(there, made) * one.times  # also of what goes together: it was settled alone
                assert there != made
    assert seconds == pytest.approx(job.settled.seconds, rel=1e-9)


@cache
def fsdp(tokens: int, topo: Topology | None, *, strict: bool) -> Job:
    """FSDP over 8 devices; where it is not strict, the axis is free and weights may be operands in any layout."""
    whole, strategy = Model.load("llama3-8b", layers=2, batch=8, seq=tokens // 8), Strategy(data=8, fsdp=True)
    tables = strategy.layouts(whole)
    free = Layouts((), tables.stored, tables.held)
    return partitioned(whole, strategy, tables if strict else free, held=strict, topo=topo).job


def movements(job: Job) -> Counter[tuple[str, tuple[str, ...]]]:
    """The movements of a job, by value and names of ops."""
    every = [one for found in job.movements.values() for one in found]
    return Counter((one.value, tuple(step.op.name for step in one.plan.program.steps)) for one in every)


def test_strict_fsdp_moves_the_same_however_many_tokens_come() -> None:
    few, many = (fsdp(tokens, MACHINE, strict=True) for tokens in (512, 32_768))
    assert movements(few) == movements(many)


@pytest.mark.parametrize("topo", [MACHINE, None], ids=["dgx-h100", "nominal"])
def test_free_fsdp_moves_what_is_smaller_and_repeats_no_work(topo: Topology | None) -> None:
    """Of few tokens activations, weights staying where they are; of many weights, as strict FSDP. No work is free."""
    few, many = (fsdp(tokens, topo, strict=False) for tokens in (512, 32_768))
    weights = {"q", "k", "v", "o", "gate", "up", "down"}
    assert movements(few) != movements(many)
    for job, tokens, gathered in ((few, 512, False), (many, 32_768, True)):
        strict = fsdp(tokens, topo, strict=True)
        moved = [one for found in job.movements.values() for one in found]
        wanted = [pair for one in moved
                  for pair in zip(one.value.split(", "), one.plan.program.output_types, strict=True)]  # fmt: skip
        whole = {value for value, t in wanted if value in weights and t.layout == Layout(((),) * t.ndim)}
        assert whole == (weights if gathered else set())
        assert job.settled.seconds < strict.settled.seconds * 1.001
        assert certify(job).flops[0] < 1.02 * certify(strict).flops[0]


@pytest.mark.parametrize(
    ("said", "settled"), [({"tensor": 2}, 1), ({"data": 2, "tensor": 2}, 3), ({"data": 2, "fsdp": True}, 1)], ids=str
)
def test_an_axis_is_settled_again_only_where_another_changed(
    said: dict[str, Any], settled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of several knows what all others do, and that the first finds the same again."""
    eliminated: list[int] = []

    def counted(found: Any) -> Any:
        eliminated.append(len(found))
        return elimination.least(found)

    monkeypatch.setattr(settle_module, "least", counted)
    job = partition(model("llama"), Strategy(**said))
    assert len(eliminated) == settled
    axes = len(job.programs.meshes[0].axes)
    assert job.settled.sweeps[-axes:] == pytest.approx((job.settled.seconds,) * axes, rel=1e-9)


def test_what_hangs_together_too_widely_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "MOST", 10)
    with pytest.raises(LayoutError) as error:
        partition(model("llama"), Strategy(tensor=2))
    assert str(error.value) == "serve, tensor: too many options hang together; legal are fewer dims"
