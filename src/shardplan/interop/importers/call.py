"""`Operation`: one operation of a source while it is written: what is known of its results; and the loop over them.

A table of a framework maps names of its operations to functions of a call and its arguments, which are views, numbers
and what else the source has. What no table has is collected, and refused in one error that lists all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.expression import Expression
from shardplan.core.namespace import NUMPY
from shardplan.core.ops import Opaque
from shardplan.errors import ShardplanError, TypingError, line
from shardplan.interop.importers.views import AtomView, ComplexPair
from shardplan.interop.importers.writer import FlatWriter, finite


class Operation(NamedTuple):
    """An operation's name, and the dtypes and shapes of its results."""

    w: FlatWriter
    name: str
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    about: tuple[int, ...] = ()  # what else a source says: of ONNX the opset, and how many results are asked for

    @property
    def dtype(self) -> str:
        """Of the first result."""
        return self.kinds[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first result."""
        return self.shapes[0]

    def write_elementwise(self, expression: str, *values: Any, dtype: str = "") -> AtomView:
        """An expression of a, b, c, ... in which numbers take the place of their letters."""
        kind = dtype or self.dtype
        views, text = list[AtomView](), expression
        given = [self.inline_constant(v, kind) for v in values]
        chosen = expression.startswith("where({a},")
        if chosen and isinstance(given[0], AtomView) and not any(isinstance(v, AtomView) for v in given[1:]):
            given[1] = self.w.constant(given[1], kind)  # a condition alone is of no dtype
        for k, value in reversed(list(enumerate(given))):
            old = f"{{{chr(ord('a') + k)}}}"
            if isinstance(value, AtomView):
                text = text.replace(old, f"<{k}>")
            else:
                text = text.replace(old, number(value, kind))
        for k, value in enumerate(given):
            if isinstance(value, AtomView):
                text = text.replace(f"<{k}>", chr(ord("a") + len(views)))
                same = self.w.dtype(value) in (kind, "bool" if "where" in expression and k == 0 else kind)
                views.append(value if same else self.w.cast(value, kind))
        if not views:
            value = eval_number(text)
            return self.w.constant(int(value) if numpy_dtype(kind).kind in "iu" else value, kind)
        return self.w.write_elementwise(text, *views)

    def inline_constant(self, value: Any, kind: str) -> Any:
        """A value, or what a constant without dims is as a number."""
        found = self.w.scalar(value, kind) if isinstance(value, AtomView) else None
        return value if found is None else found

    def compare(self, sign: str, x: Any, y: Any) -> AtomView:
        """A comparison, as bool."""
        kinds = [self.w.dtype(v) for v in (x, y) if isinstance(v, AtomView)]
        kind = max(kinds, key=lambda k: (numpy_dtype(k).kind in "fV", numpy_dtype(k).itemsize))
        whole = any(isinstance(v, float) and not v.is_integer() for v in (x, y))
        kind = "i32" if kind == "bool" else "f32" if whole and numpy_dtype(kind).kind in "iu" else kind
        return self.w.cast(
            self.write_elementwise(f"where({{a}} {sign} {{b}}, 1, 0)", *_numeric(self.w, kind, x, y), dtype=kind),
            "bool",
        )


def _numeric(w: FlatWriter, kind: str, *values: Any) -> list[Any]:
    return [w.cast(v, kind) if isinstance(v, AtomView) else v for v in values]


def number(value: Any, dtype: str) -> str:
    """A number as an expression has it; an infinity is a large number."""
    value = value.item() if hasattr(value, "item") else value
    value = finite(value, dtype)
    if isinstance(value, complex) or not math.isfinite(value):
        raise NotImplementedError(f"with {value} in {dtype}; legal are real numbers, and infinities in floats")
    if numpy_dtype(dtype).kind in "iu":
        value = int(value)
    text = repr(value if not isinstance(value, bool) else int(value))
    return f"({text})" if text.startswith("-") else text


def eval_number(text: str) -> float:
    """The value of an expression without operands."""
    found = Expression.parse(f"a * 0 + ({text})")
    with np.errstate(all="ignore"):
        return float(found.evaluate(NUMPY, [np.asarray(0.0)], np.dtype(np.float64)))


Handler = Callable[..., Any]
_UNFORESEEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of a handler on other arguments


class Unknown:
    """Operations that no table has, with where they come from."""

    def __init__(self, source: str, opaque: bool = False) -> None:
        self.source, self.opaque = source, opaque
        self.places: dict[str, list[str]] = {}
        self.names: set[str] = set()

    def add(self, name: str, place: str, why: str = "") -> None:
        """Note one, and why what is known of it does not do."""
        self.names.add(name)
        self.places.setdefault(f"{name} ({why})" if why else name, []).append(place)

    def check(self) -> None:
        """Raise `TypingError` where there are any."""
        if self.places:
            lines = [f"  {line(n)}, {len(at)} times, first at {line(at[0])}" for n, at in self.places.items()]
            said = "that nothing here stands for" if self.opaque else "that are not known here; opaque=True keeps them"
            raise TypingError(f"{self.source} has operations {said}:\n" + "\n".join(lines))


def handle_operation(
    call: Operation,
    table: Mapping[str, Handler],
    unknown: Unknown,
    place: str,
    args: Any,
    kwargs: Any,
    refused: str = "",
) -> Any:
    """What a call makes, by the table; an op that is not known, or `refused`, is `opaque`, or noted."""
    steps = len(call.w.builder.steps)
    made = _made_operation(call, table, unknown, place, args, kwargs, refused)
    call.w.places |= dict.fromkeys((r for step in call.w.builder.steps[steps:] for r in step.results), place)
    return made


def _made_operation(
    call: Operation, table: Mapping[str, Handler], unknown: Unknown, place: str, args: Any, kwargs: Any, refused: str
) -> Any:
    handler, why = None if refused else table.get(call.name), refused
    if call.shapes and all(0 in shape for shape in call.shapes):
        made = [call.w.empty(kind, shape) for kind, shape in zip(call.kinds, call.shapes, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)
    if handler is not None:
        try:
            return handler(call, *args, **kwargs)
        except (NotImplementedError, ShardplanError) as error:
            why = line(error)
        except _UNFORESEEN as error:
            why = f"with arguments that are not known here: {type(error).__name__}: {line(error)}"
    views = [v for v in flat(args) if isinstance(v, AtomView)]
    whole = bool(views and call.shapes) and all(0 not in shape for shape in (*call.shapes, *(v.shape for v in views)))
    if not call.w.opaque or not whole:
        unknown.add(call.name, place, why)
        made = [call.w.constant(0, kind, shape) for kind, shape in zip(call.kinds, call.shapes, strict=True)]
    else:
        call.w.opaques += 1
        names = [call.w.materialize_view(v).name for v in views]
        rest = "".join(f" {x}" for x in flat([args, list(kwargs.values())]) if isinstance(x, bool | int | float | str))
        op = Opaque(call.name + rest, call.kinds, call.shapes)
        made = [call.w.view_value(n) for n in call.w.builder.write_step(op, *names)]
    return made[0] if len(made) == 1 else tuple(made)


def flat(values: Any) -> list[Any]:
    """All values in nested lists."""
    if isinstance(values, (list, tuple)) and not isinstance(values, AtomView | ComplexPair):
        items: list[Any] = list(values)
        return [x for v in items for x in flat(v)]
    return [values]
