"""The dialect of sizes: arithmetic over a model's config and the degrees, exact, and nothing else is evaluated.

Legal are whole numbers, names, `+ - * / //`, comparisons, `not`, `and`, `or`, `x if c else y`, and the functions
`ceil`, `floor`, `min`, `max`. A name that the config lacks counts as nothing: `head_dim or hidden_size / heads` takes
the first that there is.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, assert_never

from shardplan.core.dialect import Dialect
from shardplan.core.expression_tree import BINARY, LOOSEST, Binary, Call, Name, Negate, Node, Number, text_of, walk
from shardplan.errors import LayoutError, excerpt

Lookup = Callable[[str], Any]
# As of arrays, but for a quotient, which is exact, and no powers.
_BINARY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    **{symbol: meaning for symbol, meaning in BINARY.items() if symbol != "**"},
    "/": Fraction,
    "//": operator.floordiv,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"ceil": math.ceil, "floor": math.floor, "min": min, "max": max}
SIZES: Final = Dialect(
    subject="a size",
    legal="numbers, names, + - * / //, comparisons, not, and, or, x if c else y, ceil, floor, min and max",
    symbols=frozenset({*_BINARY, "and", "or"}),
    functions={"ceil": 1, "floor": 1, "min": None, "max": None},
    operand=re.compile(r"\w+"),
    operands="names",
    floats=False,
    numbers="a whole number",
    logic=True,
)


def evaluate_arithmetic(text: str, lookup: Lookup) -> Any:
    """Return the value of an expression; `lookup` gives a name's value, None where there is none.

    Raises `ParseError` for what is no arithmetic, and `LayoutError` for a name that is missing where it is needed.

    >>> evaluate_arithmetic("head_dim or hidden / heads", {"hidden": 64, "heads": 4}.get)
    Fraction(16, 1)
    """
    return evaluate_size(parse_size(text), text, lookup)


def evaluate_whole_number(text: str | int, lookup: Lookup, what: str) -> int:
    """Return the value of an expression that must be a whole number of at least 0; raises `LayoutError`.

    >>> evaluate_whole_number("ceil(v / 4) * 4 - v", {"v": 10}.get, "pad")
    2
    """
    value = text if isinstance(text, int) else evaluate_arithmetic(text, lookup)
    if isinstance(value, bool) or not isinstance(value, int | Fraction) or value != int(value) or value < 0:
        said = excerpt(float(value)) if isinstance(value, Fraction) else excerpt(value)
        where = ", ".join(f"{name} = {excerpt(lookup(name))}" for name in names_in(str(text)))
        given = f" where {where}" if where else ""
        raise LayoutError(f"{what} = {text} is {said}{given}; legal is a whole number of at least 0")
    return int(value)


def names_in(text: str) -> tuple[str, ...]:
    """Return the names whose values an expression is made of, each once; raises `ParseError`."""
    return tuple(dict.fromkeys(n.name for n in walk(parse_size(text)) if isinstance(n, Name)))


@lru_cache(maxsize=4096)
def parse_size(text: str) -> Node:
    """Return the tree of an expression; raises `ParseError` pointing at the character."""
    return SIZES.parse(text)


def evaluate_size(node: Node, text: str, lookup: Lookup) -> Any:
    """Return the value of a node of the expression `text`, as `evaluate_arithmetic` does."""

    def of(inner: Node) -> Any:
        found = evaluate_size(inner, text, lookup)
        if found is None:
            shown = text_of(inner, LOOSEST)
            raise LayoutError(f"{shown} is not known, which {excerpt(text)} needs; give it in the config")
        return found

    match node:
        case Number(value):
            return value
        case Name(name):
            return lookup(name)
        case Negate(operand):
            return _numbers(operator.neg, text, of(operand))
        case Binary("and" | "or" as symbol, left, right):
            found = evaluate_size(left, text, lookup)
            return found if bool(found) == (symbol == "or") else evaluate_size(right, text, lookup)
        case Binary(symbol, left, right):
            return _numbers(_BINARY[symbol], text, of(left), of(right))
        case Call("not", (operand,)):
            return not evaluate_size(operand, text, lookup)
        case Call("if", (condition, yes, no)):
            return evaluate_size(yes if evaluate_size(condition, text, lookup) else no, text, lookup)
        case Call(function, arguments):
            return _numbers(_FUNCTIONS[function], text, *map(of, arguments))
        case _:
            assert_never(node)


def _numbers(function: Callable[..., Any], text: str, *values: Any) -> Any:
    """The value of a function of numbers; raises `LayoutError` for what is none, and for a division by zero."""
    try:
        return function(*(v if isinstance(v, int | Fraction) else _exact(v) for v in values))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        said = ", ".join(map(excerpt, values))
        raise LayoutError(
            f"{excerpt(text)} cannot be worked out on {said}; legal are numbers, and no division by 0"
        ) from None


def _exact(value: object) -> Fraction:
    if isinstance(value, float):
        return Fraction(value)
    raise TypeError
