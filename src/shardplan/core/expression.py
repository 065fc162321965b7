"""`Expression`: the elementwise dialect, of fused ops, and what typing asks of it.

Operands are named `a`, `b`, `c`, ... in operand order. Legal are numbers, `+ - * / **` (constant exponent), unary `-`,
the functions of `FUNCTIONS`, and comparisons as the condition of `where`. Everything a partial operand needs to know is
derived from the tree: the degree in a set of operands (sums), and the direction in them (max and min).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, assert_never

import numpy as np

from shardplan.core.dialect import Dialect
from shardplan.core.expression_tree import (
    BINARY,
    COMPARISONS,
    FUNCTIONS,
    LOOSEST,
    ORDERED,
    ZERO,
    Binary,
    Call,
    Name,
    Negate,
    Node,
    Number,
    evaluate,
    text_of,
    walk,
)
from shardplan.core.namespace import Dtype, Namespace, Tensor
from shardplan.errors import ParseError, TypingError

ELEMENTWISE = Dialect(
    subject="an expression",
    legal="operands, numbers, + - * / **, functions",
    symbols=frozenset(BINARY),
    functions={name: f.arity for name, f in FUNCTIONS.items()},
    operand=re.compile("[a-z]"),
    operands="a, b, c, ... in order",
    floats=True,
    numbers="a finite number",
    logic=False,
)
MOST_EXPONENT = 127  # of an integer: numpy takes an exponent in the dtype of its base, and i8 ends there


@dataclass(frozen=True)  # no slots: what is asked of every step's expression is worked out once
class Expression:
    """A parsed expression.

    >>> e = Expression.parse("relu(a)*b+-1")
    >>> print(e, e.arity, e.flops(), e.degree("b"), Expression.parse("relu(a) * b").degree("b"))
    relu(a) * b + -1 2 3 None 1
    """

    root: Node

    @staticmethod
    def parse(text: str) -> Expression:
        """Read an expression; raises `ParseError` pointing at the character."""
        return _parse(text)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """What computes; see `walk`."""
        return tuple(walk(self.root))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The operands, in order."""
        return tuple(sorted({n.name for n in self.nodes if isinstance(n, Name)}))

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len(self.names)

    @cached_property
    def conditions(self) -> frozenset[str]:
        """The operands that stand alone as the condition of a `where`: these are of dtype bool."""
        return frozenset(
            n.arguments[0].name
            for n in self.nodes
            if isinstance(n, Call) and n.function == "where" and isinstance(n.arguments[0], Name)
        )

    def __str__(self) -> str:
        """Return the canonical text, which `parse` reads back to an equal expression."""
        return text_of(self.root, LOOSEST)

    def evaluate(self, xp: Namespace, arrays: Sequence[Tensor], dtype: Dtype) -> Tensor:
        """Return the value on arrays of `dtype` (conditions: bool), one per operand, broadcast as numpy does."""
        return evaluate(self.root, dict(zip(self.names, arrays, strict=True)), xp, dtype)

    def degree(self, names: Iterable[str]) -> int | None:
        """Return the degree in the operands `names` jointly: 0 if independent of them, 1 if linear and homogeneous.

        None if it is neither: a partial sum may not pass then. The constant 0 is homogeneous of every degree.
        """
        chosen = frozenset(names)
        found = _degree(self.root, chosen)
        return (1 if chosen & set(self.names) else 0) if found == ZERO else found

    def commutes(self, names: Iterable[str], reduction: str, *, finite: bool = False) -> bool:
        """Say whether reducing (`max`, `min`) the operands `names` together and evaluating may change places.

        The value then increases (weakly) with them, the others fixed and finite; also on the infinities, which fill a
        partial value: hence `log` and `sqrt` do not count. With `finite` the fill is the least or largest number of the
        dtype instead, which arithmetic could take out of range: only selections (maximum, minimum, relu, where) count.
        """
        return _direction(self.root, frozenset(names), reduction, finite) == 1

    def flops(self) -> int:
        """Return the operations an element."""
        return sum(
            FUNCTIONS[n.function].flops if isinstance(n, Call) else int(isinstance(n, Binary | Negate))
            for n in self.nodes
        )

    def check(self, dtype: np.dtype[Any], shown: str) -> None:
        """Raise `TypingError` unless every operation is closed in `dtype`, whose short name is `shown`."""
        for n in self.nodes:
            bad = _unfit(n, dtype)
            if bad:
                raise TypingError(f'"{self}": {bad[0]} is not defined for {shown}; legal is {bad[1]}')


def _unfit(node: Node, dtype: np.dtype[Any]) -> tuple[str, str] | None:
    """What of a node does not fit a dtype, and what would."""
    kind = dtype.kind
    match node:
        case Number(value):
            if kind == "b":
                return f"the constant {value}", "a numeric dtype"
            if kind in "iu":
                if isinstance(value, float):
                    return f"the constant {value}", "a floating dtype"
                if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                    return f"the constant {value}", f"{np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
        case Negate():
            if kind in "bu":
                return "unary -", "a signed dtype"
        case Binary(symbol, _, right):
            if kind == "b" and symbol not in COMPARISONS:
                return symbol, "a numeric dtype"
            if kind in "iu" and symbol == "/":
                return "/", "a floating dtype"
            if (
                kind in "iu"
                and symbol == "**"
                and isinstance(right, Number)
                and (isinstance(right.value, float) or not 0 <= right.value <= MOST_EXPONENT)
            ):
                return f"** {right.value}", f"a floating dtype, or an exponent from 0 to {MOST_EXPONENT}"
            if kind == "c" and symbol in ORDERED:
                return symbol, "a real dtype"
        case Call(function, _):
            entry = FUNCTIONS[function]
            if kind == "b" and function not in ("maximum", "minimum", "where"):
                return function, "a numeric dtype"
            if kind in "iu" and not entry.integers:
                return function, "a floating dtype"
            if kind == "c" and not entry.complex:
                return function, "a real dtype"
        case Name():
            pass
        case _:
            assert_never(node)
    return None


def _degree(node: Node, names: frozenset[str]) -> int | None:
    """The degree in `names`, 0 or 1; `ZERO` of the constant 0; None of what is not homogeneous in them."""
    match node:
        case Name(name):
            return int(name in names)
        case Number(value):
            return ZERO if value == 0 else 0
        case Negate(operand):
            return _degree(operand, names)
        case Binary("**", left, Number(exponent)):
            base = _degree(left, names)
            if base == 1 and exponent == 1:
                return 1
            return 0 if base in (0, ZERO) else None
        case Binary(symbol, left, right):
            x, y = _degree(left, names), _degree(right, names)
            if x is None or y is None:
                return None
            if symbol in "+-":
                return _common_degree(x, y)
            if symbol == "*":
                if x == y == ZERO:
                    return ZERO
                both = max(x, 0) + max(y, 0)  # 0 * a is as linear as 2 * a
                return both if both <= 1 else None
            if symbol == "/":
                return x if y in (0, ZERO) else None
            return 0 if x != 1 and y != 1 else None
        case Call("where", (condition, yes, no)):
            x, y = _degree(yes, names), _degree(no, names)
            if _degree(condition, names) not in (0, ZERO) or x is None or y is None:
                return None
            return _common_degree(x, y)
        case Call(_, arguments):
            return 0 if all(_degree(x, names) in (0, ZERO) for x in arguments) else None
        case _:
            assert_never(node)


def _common_degree(x: int, y: int) -> int | None:
    """The degree of a sum, None where its terms differ; a term 0 is of any degree."""
    if ZERO in (x, y):
        return max(x, y)
    return x if x == y else None


def _depends(node: Node, names: frozenset[str]) -> frozenset[str]:
    return frozenset(n.name for n in walk(node) if isinstance(n, Name)) & names


def _direction(node: Node, names: frozenset[str], reduction: str, finite: bool) -> int | None:
    """0 constant in `names`, 1 or -1 if the node maps the reduction over them to itself or to its opposite, or None."""
    if not _depends(node, names):
        return 0
    match node:
        case Name():
            return 1
        case Number():
            return 0
        case Negate(operand):
            found = _direction(operand, names, reduction, finite)
            return None if found is None or finite else -found
        case Binary("+" | "-" as symbol, left, right):
            x, y = _direction(left, names, reduction, finite), _direction(right, names, reduction, finite)
            if finite or x is None or y is None or len(_depends(node, names)) > 1 < abs(x) + abs(y):
                return None
            return _agree(x, y if symbol == "+" else -y)
        case Binary("*" | "/" as symbol, left, right):
            if symbol == "*" and isinstance(left, Number):
                left, right = right, left
            x = _direction(left, names, reduction, finite)
            if finite or x is None or not isinstance(right, Number) or right.value == 0:
                return None
            return x if right.value > 0 else -x
        case Binary():
            return None
        case Call("maximum" | "minimum" as function, (left, right)):
            x, y = _direction(left, names, reduction, finite), _direction(right, names, reduction, finite)
            found = None if x is None or y is None else _agree(x, y)
            if found is not None and x and y and len(_depends(node, names)) > 1:
                opposite = {"max": "minimum", "min": "maximum"}[reduction]
                return found if (function == opposite) == (found == -1) else None
            return found
        case Call("where", (condition, yes, no)):
            x, y = _direction(yes, names, reduction, finite), _direction(no, names, reduction, finite)
            return None if _depends(condition, names) or x is None or y is None else _agree(x, y)
        case Call(function, arguments):
            if not FUNCTIONS[function].increasing or (finite and function != "relu"):
                return None
            return _direction(arguments[0], names, reduction, finite)
        case _:
            assert_never(node)


def _agree(x: int, y: int) -> int | None:
    """The direction of what depends on two values, None where one rises and the other falls."""
    return None if x * y < 0 else x or y


# An op keeps its expression as text, and every facet of the op asks for the tree.
@lru_cache(maxsize=4096)
def _parse(text: str) -> Expression:
    expression = Expression(ELEMENTWISE.parse(text))
    names = expression.names
    if names != tuple(chr(ord("a") + k) for k in range(len(names))) or not names:
        shown = ", ".join(names) if names else "none"
        message = f"an expression uses its operands a, b, c, ... without a gap; this one uses {shown}"
        raise ParseError(message, text, len(text) - len(text.lstrip()))
    return expression
