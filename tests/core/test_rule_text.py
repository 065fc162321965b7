"""Rules as text: what they say, what they refuse and where, and that a reshape of any dims equals numpy's."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from shardplan.core.factor_rule import factor_names
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Reshape
from shardplan.core.rule_text import MARKS, parse_rule, rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError, TypingError

M = Mesh(x=2, y=3)


def typed(*texts: str) -> list[TensorType]:
    return [TensorType.parse(t, M) for t in texts]


@pytest.mark.parametrize(
    ("text", "operands", "sizes", "rule"),
    [
        ("[v h] [b s] -> [b s h] | sum: v", ("f32[10, 4]", "i32[6, 5]"), {},
         "([v,h],[b,s])->([b,s,h]) {b=6,s=5,h=4,v=10}"),
        ("[i j]->[i] [i]|max: j", ("f32[10, 4]",), {}, "([i,j])->([i],[i]) {i=10,j=4} max={j}"),
        ("[i j] -> [] | min: i | fixed: j", ("f32[10, 4]",), {},
         "([i,j])->([]) {i=10,j=4} min={i} need_replication={j}"),
        ("[(b s) h] [b] -> [b s h]", ("f32[12, 4]", "f32[3]"), {}, "([bs,h],[b])->([b,s,h]) {b=3,s=4,h=4}"),
        ("[(a=3 b)] -> [(b a)]", ("f32[12]",), {}, "([ab])->([ba]) {b=4,a=3}"),
        ("[one=1 i] -> [i k]", ("f32[1, 4]",), {"k": 7}, "([one,i])->([i,k]) {i=4,k=7,one=1} need_replication={one}"),
        ("-> [i]", (), {"i": 5}, "()->([i]) {i=5}"),
    ],
)  # fmt: skip
def test_what_a_text_says(text: str, operands: tuple[str, ...], sizes: dict[str, int], rule: str) -> None:
    assert str(rule_of("op", text, typed(*operands), **sizes)) == rule


@pytest.mark.parametrize(
    ("text", "operands", "message"),
    [
        ("[i] [i] -> [i]", ("f32[4]",), "op takes 2 operands, not 1"),
        ("[i] -> [i]", ("f32[4, 2]",), "op: operand 0, f32[4, 2], has 2 dims; legal is 1"),
        ("[i] [i] -> [i]", ("f32[4]", "f32[5]"), "op: operand 1, f32[5], has i=5; legal is 4"),
        ("[(a=3 b)] -> [a b]", ("f32[10]",), "op: operand 0, f32[10], has a dim (a b)=10, which a=3 does not divide"),
        ("[(a b)] [a] [b] -> [a b]", ("f32[10]", "f32[5]", "f32[3]"),
         "op: operand 0, f32[10], has a dim (a b)=10, which a=5 x b=3 does not make"),
        ("[(a b)] -> [a b]", ("f32[10]",),
         "op: operand 0, f32[10], has a dim (a b)=10, of which the sizes of a, b are unknown; legal is one"),
        ("[i] -> [i k]", ("f32[4]",), "op: the factor k of the result is in no operand; legal is to give its size"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(text: str, operands: tuple[str, ...], message: str) -> None:
    with pytest.raises(TypingError) as caught:
        rule_of("op", text, typed(*operands))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("[i j]", "expected '->' in a rule, between operands and results", 5),
        ("[i] ->", "a rule has at least one result, as in [i j] -> [j i]", 6),
        ("[i,j] -> [i]", "expected a factor, as in [i (j k)]", 2),
        ("[i ()] -> [i]", "expected a factor, as in [i (j k)]", 4),
        ("[i] -> [i] | mean: i", "unknown mark 'mean'; legal are sum, max, min, fixed", 17),
        ("[i] -> [i] | sum i", "expected ':' in the mark sum", 17),
        ("[i] -> [i] | sum: i", "the factor i is reduced, but in a result", 19),
        ("[i] -> [i] | fixed: k", "the factor k is in no operand", 21),
        ("[i j] -> [i] | sum: j | max: j", "the factor j is marked twice", 30),
        ("[i j] -> [i]", "the factor j is in no result; legal is to mark it", 12),
        ("[i] -> [i i]", "the factor i is twice in a result", 12),
        ("[i=0] -> [i]", "the factor i has the size 0", 4),
        ("[i=2 i=3] -> [i]", "the factor i has the size 2 and 3", 8),
        ("[i] -> [i] .", "unexpected text after the rule", 11),
    ],
)
def test_malformed_texts_point_at_the_character(text: str, message: str, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        parse_rule(text)
    assert str(caught.value).startswith(message + "\n")
    assert caught.value.position == column


@st.composite
def rules(draw: st.DrawFn) -> tuple[str, list[list[int]], dict[str, tuple[int, str | None]]]:
    """A text, the shapes of its operands, and the size and mark of every factor."""
    names = factor_names(draw(st.integers(1, 6)))
    factors = {n: (draw(st.integers(2, 5)), draw(st.sampled_from((None, *MARKS)))) for n in names}
    operands = [list(names)] + [
        draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) for _ in range(draw(st.integers(0, 2)))
    ]
    kept = [n for n in names if factors[n][1] is None]
    gap = draw(st.sampled_from(["", "  "]))
    left = " ".join(f"[{gap}{' '.join(dims)}{gap}]" for dims in operands)
    marks = "".join(f"{gap}|{m}:{gap}{n}" for n, (_, m) in factors.items() if m)
    return f"{left}->{gap}[{' '.join(kept)}]{marks}", [[factors[n][0] for n in d] for d in operands], factors


@given(rules())
def test_a_rule_has_the_factors_that_its_text_has(
    made: tuple[str, list[list[int]], dict[str, tuple[int, str | None]]],
) -> None:
    text, shapes, factors = made
    rule = rule_of("op", text, [TensorType("f32", shape, (), M) for shape in shapes])
    found = {f.name: (f.size, "fixed" if f.kind == "replicate" else f.reduction) for f in rule.factors}
    assert found == factors
    assert [f.kind == "pass" for f in rule.factors] == [factors[f.name][1] is None for f in rule.factors]


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A spec, and the shapes before and after: the same factors in groups of two kinds, and ones anywhere."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    names = [f"{name}={n}" for name, n in zip(factor_names(len(sizes)), sizes, strict=True)]
    sides: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for side in "lr":
        groups: list[list[int]] = [[0]]
        for k in range(1, len(sizes)):
            groups[-1].append(k) if draw(st.booleans()) else groups.append([k])
        dims = [(f"({' '.join(names[k] for k in g)})", math.prod(sizes[k] for k in g)) for g in groups]
        for k in range(draw(st.integers(0, 1))):
            dims.insert(draw(st.integers(0, len(dims))), (f"{side}{k}=1", 1))
        sides.append(" ".join(text for text, _ in dims))
        shapes.append(tuple(n for _, n in dims))
    return " -> ".join(sides), shapes[0], shapes[1]


@settings(max_examples=300)
@given(reshapes(), st.data())
def test_a_reshape_keeps_the_order_of_elements(
    made: tuple[str, tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    spec, before, after = made
    dims: list[list[str]] = [[] for _ in before]
    partial: dict[str, str] = {}
    for axis in data.draw(st.permutations(M.axes)):
        d = data.draw(st.integers(-2, len(before) - 1))
        if d >= 0:
            dims[d].append(axis)
        elif d == -1:
            partial[axis] = "sum"
    t = TensorType("i64", before, [tuple(d) for d in dims], M, partial=partial)
    op = Reshape(spec)
    try:
        (u,) = op.infer(t)
    except LayoutError:
        return
    array = np.arange(math.prod(before)).reshape(before)
    (shards,) = op.reference([oracle.spread(array, t, np.random.default_rng(0))], [t])
    assert u.shape == after
    assert oracle.wrong(shards, u, array.reshape(after)) is None


def test_a_reshape_does_not_transpose() -> None:
    for spec in ("a b -> b a", "(a=2 b) c -> a c b"):
        with pytest.raises(TypingError, match="does not keep the order of its factors; an einsum transposes"):
            Reshape(spec)
    with pytest.raises(ParseError, match="expected"):
        Reshape("a b")
