"""Sizes as arithmetic over a model's config and the degrees: exact, and nothing else is evaluated.

Legal are whole numbers, names, `+ - * / //`, comparisons, `not`, `and`, `or`, `x if c else y`, and the functions
`ceil`, `floor`, `min`, `max`. A name that the config lacks counts as nothing: `head_dim or hidden_size / heads` takes
the first that there is.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from shardplan.errors import LayoutError, ParseError, excerpt

Lookup = Callable[[str], Any]
_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: Fraction,
}
_COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"ceil": math.ceil, "floor": math.floor, "min": min, "max": max}
_LEGAL = "numbers, names, + - * / //, comparisons, not, and, or, x if c else y, ceil, floor, min and max"


def evaluate_arithmetic(text: str, lookup: Lookup) -> Any:
    """Return the value of an expression; `lookup` gives a name's value, None where there is none.

    Raises `ParseError` for what is no arithmetic, and `LayoutError` for a name that is missing where it is needed.

    >>> evaluate_arithmetic("head_dim or hidden / heads", {"hidden": 64, "heads": 4}.get)
    Fraction(16, 1)
    """
    return _value(_parse_arithmetic(text), text, lookup)


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
    found = [
        node.id
        for node in ast.walk(_parse_arithmetic(text))
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS
    ]
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=4096)
def _parse_arithmetic(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ParseError(f"the size {excerpt(text)} is no arithmetic; legal are {_LEGAL}") from None


def _value(node: ast.expr, text: str, lookup: Lookup) -> Any:
    def of(inner: ast.expr) -> Any:
        found = _value(inner, text, lookup)
        if found is None:
            raise LayoutError(f"{ast.unparse(inner)} is not known, which {excerpt(text)} needs; give it in the config")
        return found

    match node:
        case ast.expr(value=bool() | int() as value):
            return value
        case ast.Name(id=name):
            return lookup(name)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _numbers(_BINARY[type(sign)], text, of(left), of(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _numbers(operator.neg, text, of(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, text, lookup)
        case ast.BoolOp(op=sign, values=values):
            found = None
            for inner in values:
                found = _value(inner, text, lookup)
                if bool(found) == isinstance(sign, ast.Or):
                    return found
            return found
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARE:
            return _numbers(_COMPARE[type(sign)], text, of(left), of(right))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, text, lookup) else orelse, text, lookup)
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]) if function in _FUNCTIONS and arguments:
            return _numbers(_FUNCTIONS[function], text, *map(of, arguments))
        case _:
            raise ParseError(f"{ast.unparse(node)} in the size {excerpt(text)} is no arithmetic; legal are {_LEGAL}")


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
