"""What two sides' configs must agree on beside the shapes: models of one shape that compute something else.

A family declares it (`[agree]`): names of fields, each with where a config says it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from shardplan.errors import LayoutError, excerpt
from shardplan.movement.weights.arithmetic import evaluate_arithmetic, names_in
from shardplan.movement.weights.weights import Weights


def said_of(side: Weights, field: str, text: str) -> Any:
    """Return what a side's config says of a field, None where it does not."""
    try:
        value = evaluate_arithmetic(text, side.sizing.look)
    except LayoutError:
        return None
    whole = value.denominator == 1 if isinstance(value, Fraction) else isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def check_agreement(source: Weights, target: Weights, differ: str | Iterable[str] = ()) -> tuple[str, ...]:
    """Compare both sides' configs on the fields that their families declare; return those that may differ, and do.

    Raises `LayoutError` naming every field that differs, with both values; for a field in `differ` that does not, and
    for one that sets shapes.
    """
    given = (differ,) if isinstance(differ, str) else tuple(differ)
    first, second = dict(source.table.agree), dict(target.table.agree)
    apart: dict[str, tuple[Any, Any]] = {}
    shapes: set[str] = set()
    for field in dict.fromkeys([*first, *second]):
        texts = first.get(field) or second[field], second.get(field) or first[field]
        mine, theirs = (said_of(side, field, t) for side, t in zip((source, target), texts, strict=True))
        silent = (mine is None and field not in first) or (theirs is None and field not in second)
        if mine != theirs and not silent:
            apart[field] = mine, theirs
            used = {n for side in (source, target) for _, text in side.table.atoms for n in names_in(text)}
            shapes |= {field} if used & {n for text in texts for n in names_in(text)} else set()
    for name in given:
        if name not in apart or name in shapes:
            why = "sets shapes" if name in shapes else "is no field in which the configs differ"
            some = ", ".join(f for f in apart if f not in shapes) or "those that set none, where they differ"
            raise LayoutError(f"differ = {excerpt(name)} {why}; legal are {some}")
    wrong = {field: values for field, values in apart.items() if field not in given}
    if wrong:
        every = [f"{f} is {_value(a)} at the source and {_value(b)} at the target" for f, (a, b) in wrong.items()]
        may = [f for f in wrong if f not in shapes]
        more = f", or differ = {', '.join(map(repr, may))} ({' '.join(f'--differ {f}' for f in may)})" if may else ""
        raise LayoutError(
            f"the configs of {_name(source)} and {_name(target)} differ: {'; '.join(every)}; legal is one config{more}"
        )
    return given


def _value(value: Any) -> str:
    return "not said" if value is None else excerpt(value)


def _name(side: Weights) -> str:
    return side.table.name or "a table"
