"""The normal form of elementwise expressions: sums and products have no order, and what one formula says in many ways.

- A sum is a list of terms, a product a list of factors: flat, ordered by what their operands are, numbers folded into
  one: the last term, the first factor. `-a` is `-1 * a`, `a - b` adds it, and of floats `a / 4` is `0.25 * a`.
- Of floats `a ** 2` and `a ** 3` are products, `a ** 0.5` and `a ** -0.5` roots, `a / sqrt(b)` is `a * rsqrt(b)`, and
  a function of numbers is a number.
- `maximum(a, 0)` is `relu(a)`, `a * sigmoid(a)` is `silu(a)`, and `a / (1 + exp(-b))` is `a * sigmoid(b)`.
- Comparisons are `<`, `<=` and `==`.

Values are equal up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import assert_never

import numpy as np

from shardplan.core.expression_tree import Binary, Call, Name, Negate, Node, Number, evaluate
from shardplan.core.namespace import NUMPY

_MOST_WHOLE = 1 << 53  # up to here a whole float is written as an integer
_COMMUTE = ("maximum", "minimum")


def normal(node: Node, keys: Mapping[str, str], floating: bool) -> Node:
    """Return a node in normal form; `keys` say of each operand what it is, whatever it is called.

    >>> from shardplan.core.expression import Expression
    >>> print(Expression(normal(Expression.parse("(b - -2 * a) / 4 + 1 - 3 * b").root, {"a": "x", "b": "y"}, True)))
    0.25 * (2 * a + b) - 3 * b + 1
    """
    return _said(_normal(node, keys, floating))


def key_of(node: Node, keys: Mapping[str, str]) -> str:
    """Return what a node in normal form is, with what its operands are in the place of their names."""
    match node:
        case Name(name):
            return keys[name]
        case Number(value):
            return repr(value)
        case Negate(operand):
            return f"(- {key_of(operand, keys)})"
        case Binary(symbol, left, right):
            return f"({symbol} {key_of(left, keys)} {key_of(right, keys)})"
        case Call(function, arguments):
            return f"({function} {' '.join(key_of(x, keys) for x in arguments)})"
        case _:
            assert_never(node)


def names_in(node: Node) -> list[str]:
    """Return the operands in the order of the text, each as often as it stands there."""
    match node:
        case Name(name):
            return [name]
        case Number():
            return []
        case Negate(operand):
            return names_in(operand)
        case Binary(_, left, right):
            return names_in(left) + names_in(right)
        case Call(_, arguments):
            return [n for x in arguments for n in names_in(x)]
        case _:
            assert_never(node)


def _normal(node: Node, keys: Mapping[str, str], floating: bool) -> Node:
    def inner(x: Node) -> Node:
        return _normal(x, keys, floating)

    match node:
        case Name():
            return node
        case Number(value):
            return _number(value)
        case Negate(operand):
            return _product([Number(-1), inner(operand)], keys)
        case Binary("+", left, right):
            return _sum([inner(left), inner(right)], keys)
        case Binary("-", left, right):
            return _sum([inner(left), _product([Number(-1), inner(right)], keys)], keys)
        case Binary("*", left, right):
            return _product([inner(left), inner(right)], keys)
        case Binary("/", left, right):
            return _quotient(inner(left), inner(right), keys, floating)
        case Binary("**", left, Number(power)):
            return _power(inner(left), power, keys, floating)
        case Binary(symbol, left, right):
            return Binary(symbol, inner(left), inner(right))
        case Call("where", (condition, yes, no)):
            return _chosen(condition, inner(yes), inner(no), keys, floating)
        case Call(function, arguments):
            return _called(function, [inner(x) for x in arguments], keys, floating)
        case _:
            assert_never(node)


def _number(value: float) -> Number:
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _MOST_WHOLE
    return Number(int(value) if whole else value)


def _flat(symbol: str, nodes: Iterable[Node]) -> list[Node]:
    """The terms of a sum or the factors of a product, in normal form."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Binary) and node.symbol == symbol:
            found += _flat(symbol, (node.left, node.right))
        else:
            found.append(node)
    return found


def _split(symbol: str, nodes: Iterable[Node]) -> tuple[list[float], list[Node]]:
    """The numbers, and the others."""
    flat = _flat(symbol, nodes)
    return [x.value for x in flat if isinstance(x, Number)], [x for x in flat if not isinstance(x, Number)]


def _row(symbol: str, nodes: list[Node]) -> Node:
    row = nodes[0]
    for node in nodes[1:]:
        row = Binary(symbol, row, node)
    return row


def _sum(nodes: list[Node], keys: Mapping[str, str]) -> Node:
    numbers, terms = _split("+", nodes)
    # A factor counts last, so that a term and its opposite stand together.
    terms.sort(key=lambda x: (key_of(_row("*", _split("*", [x])[1]), keys), key_of(x, keys)))
    total = _number(sum(numbers))
    if total.value or not terms:
        terms.append(total)
    return _row("+", terms)


def _product(nodes: list[Node], keys: Mapping[str, str]) -> Node:
    numbers, factors = _split("*", nodes)
    for gate in [x for x in factors if isinstance(x, Call) and x.function == "sigmoid"]:
        if gate.arguments[0] in factors:
            factors.remove(gate)
            factors.remove(gate.arguments[0])
            factors.append(Call("silu", gate.arguments))
    factors.sort(key=lambda x: key_of(x, keys))
    by = _number(math.prod(numbers))
    if by.value != 1 or not factors:
        factors.insert(0, by)
    return _row("*", factors)


def _quotient(left: Node, right: Node, keys: Mapping[str, str], floating: bool) -> Node:
    if floating and isinstance(right, Number) and right.value and math.isfinite(1 / right.value):
        return _product([left, Number(1 / right.value)], keys)
    if floating and isinstance(right, Call) and right.function == "sqrt":
        return _product([left, Call("rsqrt", right.arguments)], keys)
    numbers, terms = _split("+", [right])
    if floating and numbers == [1] and len(terms) == 1 and isinstance(terms[0], Call) and terms[0].function == "exp":
        return _product([left, Call("sigmoid", (_product([Number(-1), *terms[0].arguments], keys),))], keys)
    return Binary("/", left, right)


def _power(base: Node, power: float, keys: Mapping[str, str], floating: bool) -> Node:
    if power == 1:
        return base
    if power in (2, 3):
        return _product([base] * int(power), keys)
    if floating and power in (0.5, -0.5):
        return Call("sqrt" if power > 0 else "rsqrt", (base,))
    if floating and power == -1:
        return _quotient(Number(1), base, keys, floating)
    return Binary("**", base, Number(power))


def _chosen(condition: Node, yes: Node, no: Node, keys: Mapping[str, str], floating: bool) -> Node:
    if yes == no:
        return yes
    if not isinstance(condition, Binary):
        return Call("where", (condition, yes, no))
    symbol = condition.symbol
    left, right = (_normal(x, keys, floating) for x in (condition.left, condition.right))
    if symbol in (">", ">="):
        symbol, left, right = symbol.replace(">", "<"), right, left
    if symbol == "!=":
        symbol, yes, no = "==", no, yes
    if symbol == "==" and key_of(left, keys) > key_of(right, keys):
        left, right = right, left
    return Call("where", (Binary(symbol, left, right), yes, no))


def _called(function: str, arguments: list[Node], keys: Mapping[str, str], floating: bool) -> Node:
    if floating and all(isinstance(x, Number) for x in arguments):
        with np.errstate(all="ignore"):
            value = float(evaluate(Call(function, tuple(arguments)), {}, NUMPY, np.dtype(np.float64)))
        if math.isfinite(value):
            return _number(value)
    if function in _COMMUTE:
        arguments = sorted(arguments, key=lambda x: key_of(x, keys))
    if function == "maximum" and Number(0) in arguments:
        return Call("relu", tuple(x for x in arguments if x != Number(0))[:1] or (Number(0),))
    return Call(function, tuple(arguments))


def _said(node: Node) -> Node:
    """A node with a minus where a factor is negative."""
    match node:
        case Name() | Number():
            return node
        case Binary("+", left, right):
            before = _said(left)
            if isinstance(right, Number):
                return Binary("-", before, Number(-right.value)) if right.value < 0 else Binary("+", before, right)
            numbers, factors = _split("*", [right])
            if numbers and numbers[0] < 0:
                opposite = [*([_number(-numbers[0])] if numbers[0] != -1 else []), *factors]
                return Binary("-", before, _said(_row("*", opposite)))
            return Binary("+", before, _said(right))
        case Binary("*", _, _):
            numbers, factors = _split("*", [node])
            if numbers == [-1]:
                return Negate(_said(_row("*", factors)))
            return _row("*", [_number(x) for x in numbers] + [_said(x) for x in factors])
        case Binary("**", left, right):
            return Binary("**", _said(left), right)
        case Binary(symbol, left, right):
            return Binary(symbol, _said(left), _said(right))
        case Call(function, arguments):
            return Call(function, tuple(_said(x) for x in arguments))
        case Negate(operand):
            return Negate(_said(operand))
        case _:
            assert_never(node)
