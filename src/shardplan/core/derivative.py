"""Derivatives of elementwise expressions, taken on the tree; those of functions stand in their table, `FUNCTIONS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from shardplan.core.expression import Expression
from shardplan.core.expression_tree import FUNCTIONS, Binary, Call, Name, Negate, Node, Number

NOTHING, ONE = Number(0), Number(1)


def derivative(node: Node, name: str) -> Node:
    """Return the derivative of a node in an operand; `NOTHING` where it does not depend on it.

    >>> print(Expression(derivative(Expression.parse("a * exp(2 * a) - b").root, "a")))
    exp(2 * a) + a * (exp(2 * a) * 2)
    """
    match node:
        case Name(x):
            return ONE if x == name else NOTHING
        case Number():
            return NOTHING
        case Negate(operand):
            return _negate(derivative(operand, name))
        case Binary("**", left, Number(k)):
            return times(
                times(Number(k), left if k == 2 else Binary("**", left, Number(k - 1))), derivative(left, name)
            )
        case Binary("/", left, right):
            x = times(derivative(left, name), Binary("/", ONE, right))
            y = times(derivative(right, name), Binary("/", left, Binary("**", right, Number(2))))
            return _sum(x, _negate(y))
        case Binary("*", left, right):
            return _sum(times(derivative(left, name), right), times(left, derivative(right, name)))
        case Binary(symbol, left, right):
            x, y = derivative(left, name), derivative(right, name)
            return NOTHING if symbol not in "+-" else _sum(x, y if symbol == "+" else _negate(y))
        case Call("where", (condition, yes, no)):
            x, y = derivative(yes, name), derivative(no, name)
            return NOTHING if x == y == NOTHING else Call("where", (condition, x, y))
        case Call(function, arguments):
            total: Node = NOTHING
            values = dict(zip("ab", arguments, strict=False))
            for slope, x in zip(FUNCTIONS[function].slopes, arguments, strict=True):
                total = _sum(total, times(substitute(Expression.parse(slope).root, values), derivative(x, name)))
            return total
        case _:
            assert_never(node)


def times(x: Node, y: Node) -> Node:
    """Return a product; what a `where` does not choose is not multiplied, as it may be no number."""
    if NOTHING in (x, y):
        return NOTHING
    if ONE in (x, y):
        return y if x == ONE else x
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Call) and one.function == "where":
            condition, yes, no = one.arguments
            return Call("where", (condition, times(yes, other), times(no, other)))
    return Binary("*", x, y)


def _sum(x: Node, y: Node) -> Node:
    if x == NOTHING:
        return y
    if isinstance(y, Negate):
        return Binary("-", x, y.operand)
    return x if y == NOTHING else Binary("+", x, y)


def _negate(x: Node) -> Node:
    if isinstance(x, Number):
        return NOTHING if x == NOTHING else Number(-x.value)
    return x.operand if isinstance(x, Negate) else Negate(x)


def substitute(node: Node, values: Mapping[str, Node]) -> Node:
    """Return a node with other nodes for its operands."""
    match node:
        case Name(name):
            return values[name]
        case Number():
            return node
        case Negate(operand):
            return Negate(substitute(operand, values))
        case Binary(symbol, left, right):
            return Binary(symbol, substitute(left, values), substitute(right, values))
        case Call(function, arguments):
            return Call(function, tuple(substitute(x, values) for x in arguments))
        case _:
            assert_never(node)
