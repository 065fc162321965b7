"""Functions that every framework has, as expressions of ours, and the handlers that write them.

A handler takes a call, its operands, and what else the call says; a table of a framework has it under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardplan.interop.importers.call import Handler, Operation
from shardplan.interop.importers.views import AtomView

# Those that expressions have by the same name.
FUNCTIONS = ("exp", "log", "sqrt", "rsqrt", "tanh", "erf", "sin", "cos", "abs")
FORMULAS = {
    # These two lose no digits where a is small.
    "expm1": "tanh({a} / 2) * (exp({a}) + 1)",
    "sinh": "tanh({a}) * (exp({a}) + exp(-{a})) / 2",
    "log1p": "log(1 + {a})",
    "exp2": f"exp({{a}} * {math.log(2)!r})",
    "erfc": "1 - erf({a})",
    "sign": "where({a} > 0, 1, where({a} < 0, -1, 0))",
    "tan": "sin({a}) / cos({a})",
    "cosh": "(exp({a}) + exp(-{a})) / 2",
}
SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def expression_handler(text: str) -> Handler:
    """An expression of the operands, whatever else the call says."""
    return lambda c, *values, **_: c.write_elementwise(text, *values)


def logical_handler(text: str) -> Handler:
    """An expression of bools, computed in i32; another dtype is refused."""

    def handler(c: Operation, *values: Any, **_: Any) -> AtomView:
        if c.dtype != "bool":
            raise NotImplementedError(f"of {c.dtype}")
        numbers = [c.w.cast(v, "i32") if isinstance(v, AtomView) else v for v in values]
        return c.w.cast(c.write_elementwise(text, *numbers, dtype="i32"), "bool")

    return handler


def pass_through(c: Operation, x: Any, *_: Any, **__: Any) -> Any:
    """The first operand as it is."""
    return x


def write_power(c: Operation, x: Any, y: Any, **_: Any) -> AtomView:
    """A power; of one that is a value the base is positive."""
    if isinstance(y, AtomView):
        return c.write_elementwise("exp({b} * log({a}))", x, y)
    return c.write_elementwise("{a} * {a}", x) if y == 2 else c.write_elementwise("{a} ** {b}", x, y)


def write_einsum(c: Operation, spec: str, views: Sequence[AtomView]) -> AtomView:
    """An einsum whose letters and result are said."""
    left, arrow, right = spec.replace(" ", "").partition("->")
    if "." in spec or not arrow or len(views) < 2:
        raise NotImplementedError("with an ellipsis, without a result or of one operand")
    return c.w.einsum([list(side) for side in left.split(",")], list(right), *views)
