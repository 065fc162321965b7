"""Normal forms of expressions: equal values, their own form, and one for all orders of sums and products."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.canonical.normal_expression import key_of, normal
from tests.canonical.test_canonical import exchanged

from shardplan.core.expression import Expression
from shardplan.core.expression_tree import Binary, Call, Name, Negate, Node, Number
from shardplan.core.namespace import NUMPY

KEYS = {"a": "one", "b": "two", "c": "three"}


def grown(depth: int) -> st.SearchStrategy[Node]:
    leaf = st.sampled_from([Name("a"), Name("b"), Name("c"), Number(2), Number(0.5), Number(-1), Number(3.0)])
    if not depth:
        return leaf
    inner = grown(depth - 1)
    power = st.builds(Binary, st.just("**"), inner, st.sampled_from([Number(2), Number(3), Number(1)]))
    binary = st.builds(Binary, st.sampled_from("+-*"), inner, inner)
    bent = st.sampled_from(["tanh", "sigmoid", "abs"])
    one = st.builds(lambda f, x: Call(f, (x,)), bent, inner)
    two = st.builds(lambda f, x, y: Call(f, (x, y)), st.sampled_from(["maximum", "minimum"]), inner, inner)
    chosen = st.builds(lambda s, p, q, x, y: Call("where", (Binary(s, p, q), x, y)),
                       st.sampled_from(["<", ">", "<=", ">=", "==", "!="]), leaf, leaf, inner, inner)  # fmt: skip
    return st.one_of(leaf, binary, binary, st.builds(Negate, inner), power, one, two, chosen)


def value(node: Node) -> np.ndarray:
    x = [np.asarray(v) for v in (0.3, -0.7, 1.1)]
    names = Expression(node).names
    return np.asarray(Expression(node).evaluate(NUMPY, [x["abc".index(n)] for n in names], np.dtype(np.float64)))


@given(grown(3), st.integers(0, 99))
def test_values_forms_and_orders(node: Node, seed: int) -> None:
    form = normal(node, KEYS, True)
    assert np.allclose(value(node), value(form), rtol=1e-9, atol=1e-9)
    assert normal(form, KEYS, True) == form
    assert normal(exchanged(node, random.Random(seed)), KEYS, True) == form


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (("a / sqrt(b)", "a * b ** -0.5", "rsqrt(b) * a", "a * (1 / sqrt(b))"), "rsqrt(b) * a"),
        (("a * sigmoid(a)", "a / (1 + exp(-a))", "silu(a)"), "silu(a)"),
        (("maximum(a, 0)", "maximum(0.0, a)"), "relu(a)"),
        (("a - b * 2.0", "-2 * b + a"), "a - 2 * b"),
        (("exp(b * log(2.0)) + a", "exp(0.6931471805599453 * b) + a"), "exp(0.6931471805599453 * b) + a"),
        (("where(a >= b, a, 1)", "where(b <= a, a, 1.0)"), "where(b <= a, a, 1)"),
        (("where(a != b, a, 1)", "where(b == a, 1.0, a)"), "where(a == b, 1, a)"),
    ],
)
def test_ways_to_say_a_formula(texts: tuple[str, ...], form: str) -> None:
    assert {str(Expression(normal(Expression.parse(t).root, KEYS, True))) for t in texts} == {form}


def test_integers_are_not_divided() -> None:
    assert str(Expression(normal(Expression.parse("a / 2 * 4").root, KEYS, False))) == "4 * (a / 2)"


def test_keys_and_not_names_give_the_order() -> None:
    node = Expression.parse("a + b").root
    assert str(Expression(normal(node, {"a": "z", "b": "y"}, True))) == "b + a"
    assert key_of(node, {"a": "z", "b": "y"}) == "(+ z y)"
