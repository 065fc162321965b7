"""What a line may do with an axis is what the tables and the op's own typing say, found by trying everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op, results_of
from shardplan.core.ops import Cast, Einsum, Elementwise, Expand, ReduceDims, Softmax
from shardplan.core.ops.composed import differs
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError
from shardplan.strategy.partition.choices import (
    Bounds,
    Choice,
    HeldDims,
    Layer,
    Served,
    TypedLine,
    options,
    served,
    sets_of,
)
from shardplan.strategy.partition.flow import Line, line_of
from strategies import rngs

ONE, MESH = Mesh({"one": 1}), Mesh({"x": 2, "y": 3})
Found = frozenset[tuple[tuple[str, ...], tuple[str, ...]]]  # texts of the types of operands and of results
NONE = Bounds({}, {})


class Example(NamedTuple):
    """An op, and the letters of its operands' and results' dims, which are also the names of these dims."""

    op: Op
    operands: tuple[str, ...]
    results: tuple[str, ...]
    dtype: str = "f64"

    def line(self, sizes: dict[str, int]) -> Line:
        types = tuple(TensorType(self.dtype, [sizes[c] for c in dims], (), ONE) for dims in self.operands)
        step = Step(self.op, tuple(map(str, range(len(types)))), tuple(f"r{k}" for k in range(len(self.results))))
        bare = line_of(0, step, types, {})
        sides = zip((*bare.links.operands, *bare.links.results), (*self.operands, *self.results), strict=True)
        names = {f: (c,) for dims, letters in sides for dim, c in zip(dims, letters, strict=True) for f in dim}
        return line_of(0, step, types, names)

    def over(self, axes: Sequence[str]) -> Op:
        """The op with a dim that only its result has over axes."""
        return Expand(self.op.spec, Layout((tuple(axes),))) if isinstance(self.op, Expand) else self.op

    @property
    def made(self) -> set[str]:
        return {c for dims in self.results for c in dims} - {c for dims in self.operands for c in dims}

    @property
    def widens(self) -> bool:
        """Whether it makes more bytes of one operand: that may be moved instead of the result."""
        return len(self.operands) == 1 and (bool(self.made) or (isinstance(self.op, Cast) and self.dtype == "f32"))


SIZES = {"a": 2, "b": 4, "c": 3, "d": 6, "e": 1}
EXAMPLES = (
    Example(Einsum("ab,bc->ac"), ("ab", "bc"), ("ac",)),
    Example(Einsum("ab,bc->abc"), ("ab", "bc"), ("abc",)),
    Example(Einsum("abd,de,e->ab"), ("abd", "de", "e"), ("ab",)),
    Example(Elementwise("a+b"), ("bd", "bd"), ("bd",)),
    Example(Elementwise("a+b"), ("bd", "d"), ("bd",)),
    Example(Elementwise("a*b"), ("bd", "bd"), ("bd",)),
    Example(Elementwise("2*a-b"), ("be", "be"), ("be",)),
    Example(Elementwise("exp(a)"), ("bcd",), ("bcd",)),
    Example(Elementwise("a*b"), ("bd", "bd"), ("bd",), "i32"),
    Example(ReduceDims((1,)), ("bd",), ("b",)),
    Example(ReduceDims((0,), "max"), ("bd",), ("d",)),
    Example(Expand("d -> b=4 d"), ("d",), ("bd",)),
    Example(Softmax(1), ("bd",), ("bd",)),
    Example(Cast("f64"), ("bd",), ("bd",), "f32"),
    Example(Cast("f32"), ("bd",), ("bd",)),
)


def texts(types: Sequence[TensorType]) -> tuple[str, ...]:
    return tuple(map(str, types))


def with_axis(t: TensorType, axis: str, dim: int | None, place: int, partial: bool) -> TensorType:
    dims = [list(axes) for axes in t.layout.dims]
    if dim is not None:
        dims[dim].insert(place, axis)
    sums = (*t.layout.partial, axis) if partial else t.layout.partial
    return TensorType(t.dtype, t.shape, dims, t.mesh, dict.fromkeys(sums, "sum"))


def expected(example: Example, axis: str, groups: Served, bounds: Bounds, now: TypedLine) -> Found:
    """The rule, by trying to put an axis on every letter and to make every set of operands partial."""
    axes_of: dict[str, tuple[str, ...]] = {}
    for types, letters in ((now.operands, example.operands), (now.results, example.results)):
        for t, mine in zip(types, letters, strict=True):
            axes_of |= {c: axes for c, axes in zip(mine, t.layout.dims, strict=True) if axes or c not in axes_of}

    def typed(letter: str, place: int, partial: frozenset[int]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        try:
            given = tuple(
                with_axis(t, axis, mine.find(letter) if letter in mine and letter else None, place, k in partial)
                for k, (t, mine) in enumerate(zip(now.operands, example.operands, strict=True))
            )
            over = {c: list(axes_of[c]) for c in example.made}
            if letter in over:
                over[letter].insert(place, axis)
            made = results_of(example.over(next(iter(over.values()), [])), given)
        except ShardplanError:
            return
        if all(same(given[k], held) for k, held in bounds.operands.items()) and all(
            same(made[k], held) or (axis in made[k].layout.partial and not any(axis in d for d in made[k].layout.dims))
            for k, held in bounds.results.items()
        ):
            yield texts(given), texts(made)

    def same(t: TensorType, held: HeldDims) -> bool:
        return [axis in d for d in t.layout.dims] == [axis in d for d in held.dims]

    out = set[tuple[tuple[str, ...], tuple[str, ...]]]()
    nothing = True
    for group in ["abcdez"] if groups is None else groups:
        taken = set[str]()
        for letter in sorted(set("".join((*example.operands, *example.results)))):
            if letter in group and SIZES[letter] > 1:
                for place in range(len(axes_of[letter]) + 1):
                    found = set(typed(letter, place, frozenset()))
                    taken |= {letter} if found else set()
                    out |= found
        if taken:
            nothing = groups is None or taken <= example.made or example.dtype == "i32" or example.widens
            break
    count = len(example.operands)
    for chosen in itertools.product((False, True), repeat=count):
        if any(chosen) or nothing:
            out |= set(typed("", 0, frozenset(k for k in range(count) if chosen[k])))
    return frozenset(out)


def offered(example: Example, axis: str, groups: Served, bounds: Bounds, now: Choice) -> Found | None:
    line = example.line(SIZES)
    try:
        found = options(Layer(MESH), line, axis, groups, bounds, now)
    except LayoutError:
        return frozenset()
    assert len(dict(found)) == len(found)
    return frozenset((texts(laid.operands), texts(laid.results)) for _, laid in found)


def random_bounds(rng: random.Random, example: Example) -> Bounds:
    """At times an operand and a result that are held over the axes of some of their dims."""

    def held(dims: str) -> HeldDims:
        axes = [rng.choice(((), (), ("x",), ("x", "y"))) for _ in dims]
        return HeldDims(tuple(axes))

    def some(sides: tuple[str, ...]) -> dict[int, HeldDims]:
        return {k: held(dims) for k, dims in enumerate(sides) if rng.random() < 0.2}

    return Bounds(some(example.operands), some(example.results))


@given(rngs())
@settings(max_examples=300)
def test_what_is_offered_is_what_the_rule_says(rng: random.Random) -> None:
    example, layer = rng.choice(EXAMPLES), Layer(MESH)
    line = example.line(SIZES)
    axis, other = rng.choice((("x", "y"), ("y", "x")))
    now = Choice()
    if rng.random() < 0.5:  # the other axis does something, too, as does this one
        every = [[*"abcde"]]
        now = rng.choice(options(layer, line, other, every, NONE, now))[0]
        now = rng.choice(options(layer, line, axis, every, NONE, now))[0]
    before = layer.typed(line, now.without(axis))
    groups = [rng.sample("abcdez", rng.randint(1, 2)) for _ in range(rng.randint(0, 3))] if rng.random() < 0.8 else None
    bounds = random_bounds(rng, example)
    assert offered(example, axis, groups, bounds, now) == expected(example, axis, groups, bounds, before)


def test_a_free_axis_serves_any_dim_but_rows_of_layers() -> None:
    line = EXAMPLES[7].line(SIZES)
    rows = {f: ("layer",) if names == ("c",) else names for f, names in line.names.items()}
    (free,) = served(replace(line, names=rows), None)
    assert {rows[f] for f in free} == {("b",), ("d",)}


def test_two_axes_on_one_dim_come_in_both_orders() -> None:
    example = EXAMPLES[7]
    line = example.line(SIZES)
    ((now, _),) = options(Layer(MESH), line, "x", ["d"], NONE, Choice())
    found = [made for _, (_, _, (made,)) in options(Layer(MESH), line, "y", ["d"], NONE, now)]
    assert texts(found) == ("f64[4, 3, 6@(x,y)]", "f64[4, 3, 6@(y,x)]")  # of equal ones the minor place is the first


def test_an_axis_serves_the_first_group_that_is_allowed() -> None:
    """`b` first, but where the second operand is held whole it serves `a`; where it is held over `c`, `c` alone."""
    example = EXAMPLES[0]
    groups = ["b", "c", "a"]
    whole, cut = HeldDims(((), ())), HeldDims(((), ("x",)))

    def results(held: dict[int, HeldDims]) -> set[str]:
        return {found[0] for _, found in offered(example, "x", groups, Bounds(held, {}), Choice()) or ()}

    assert results({}) == {"f64[2, 3]{+x}"}
    assert results({1: whole}) == {"f64[2@x, 3]", "f64[2, 3]{+x}"}
    assert results({1: cut}) == {"f64[2, 3@x]"}


def test_a_gradient_is_made_as_its_parameter_is_held_or_as_a_sum() -> None:
    example = EXAMPLES[0]
    found = offered(example, "x", ["abc"], Bounds({}, {0: HeldDims((("x",), ()))}), Choice()) or ()
    assert {made for _, (made,) in found} == {"f64[2@x, 3]", "f64[2, 3]{+x}"}


def test_only_what_is_linear_passes_a_partial_sum() -> None:
    def sums(example: Example) -> set[tuple[str, ...]]:
        return {given for given, _ in offered(example, "x", [], NONE, Choice()) or () if any("+x" in t for t in given)}

    add, times, exp = EXAMPLES[3], EXAMPLES[5], EXAMPLES[7]
    assert sums(add) == {("f64[4, 6]{+x}", "f64[4, 6]{+x}")}
    assert sums(times) == {("f64[4, 6]{+x}", "f64[4, 6]"), ("f64[4, 6]", "f64[4, 6]{+x}")}
    assert sums(exp) == set()


def test_ids_may_be_made_on_every_device_and_values_not() -> None:
    values, ids = EXAMPLES[5], EXAMPLES[8]
    assert not differs(TensorType("i32", (), (), ONE))
    whole = ("4, 6]", "4, 6]")
    nothing = [
        any(
            tuple(t.partition("[")[2] for t in given) == whole
            for given, _ in offered(e, "x", ["b"], NONE, Choice()) or ()
        )
        for e in (values, ids)
    ]
    assert nothing == [False, True]


def test_a_line_without_an_option_is_named() -> None:
    """Both operands held over the contracted dim, but its axis is over another dim of one of them."""
    line = EXAMPLES[0].line(SIZES)
    bounds = Bounds({0: HeldDims((("x",), ())), 1: HeldDims((("x",), ()))}, {})
    with pytest.raises(LayoutError) as error:
        options(Layer(MESH), line, "x", ["a", "bc"], bounds, Choice())
    assert str(error.value) == (
        "step 0 (einsum) on f64[2, 4], f64[4, 3]: no dim that the axis x serves (a > b c) lets its parameters lie as "
        "they are held; legal is another line of serve or held"
    )


def test_dims_of_size_1_and_unknown_ones_are_served_by_nothing() -> None:
    line = EXAMPLES[2].line(SIZES)
    assert served(line, ["e", "z"]) == []
    assert [len(factors) for factors in served(line, ["ez", "ab", "zd"])] == [2, 1]


@pytest.mark.parametrize(("count", "sets"), [(0, 0), (1, 1), (4, 15), (5, 6), (9, 10)])
def test_of_many_operands_each_alone_and_all_may_be_partial(count: int, sets: int) -> None:
    found = sets_of(count)
    assert len(set(found)) == len(found) == sets
    assert {frozenset([k]) for k in range(count)} | ({frozenset(range(count))} if count else set()) <= set(found)
