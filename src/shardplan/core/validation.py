"""What a user's value must be, checked once at the top of what is public, with one line where it is not.

Each function takes `what`, the name of the argument, and the value, and returns it in the one form that is used inside.
A bool is no number, and a text is no list of characters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from shardplan.core.notation import MOST_DIGITS
from shardplan.errors import LayoutError, ShardplanError, excerpt

MOST = 10**MOST_DIGITS - 1  # what text cannot hold, no value may have: it would print and not be read back
MOST_ITEMS = 2**22  # of a list: an endless one is cut off, and no mesh has more devices (`mesh.MOST_DEVICES`)

Kind = type[ShardplanError]


def whole_number(what: str, value: object, least: int = 0, most: int = MOST, kind: Kind = LayoutError) -> int:
    """Return a whole number from `least` to `most`; raises `kind` for any other value.

    A float is none, even where it is whole.

    >>> whole_number("rank", np.int64(3))
    3
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and least <= value <= most:
        return int(value)
    legal = f"of at least {least}" if most == MOST else f"from {least} to {most}"
    raise kind(f"{what} is {excerpt(value)}; legal is a whole number {legal}")


def integer(what: str, value: object, kind: Kind = LayoutError) -> int:
    """Return a whole number of either sign, below 10**18; raises `kind` for any other value."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and -MOST <= value <= MOST:
        return int(value)
    raise kind(f"{what} is {excerpt(value)}; legal is a whole number below 10**18")


def number(what: str, value: object, kind: Kind = LayoutError, least: float = 0.0, most: float = math.inf) -> float:
    """Return a finite number from `least`, or of `most` and less; raises `kind` for any other value."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        try:
            if least <= value <= most and math.isfinite(value):
                return float(value)
        except OverflowError:  # an integer beyond any float
            pass
    legal = f"{least:g} or more" if most == math.inf else f"{most:g} or less"
    raise kind(f"{what} is {excerpt(value)}; legal is a finite number of {legal}")


def flag(what: str, value: object, kind: Kind = LayoutError) -> bool:
    """Return True or False; raises `kind` for any other value."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise kind(f"{what} is {excerpt(value)}; legal is True or False")


def choice(what: str, value: object, legal: Collection[str], kind: Kind = LayoutError) -> str:
    """Return one of some words; raises `kind` for any other value."""
    if isinstance(value, str) and value in legal:
        return value
    raise kind(f"{what} {excerpt(value)} is unknown; legal: {', '.join(legal)}")


def text(what: str, value: object, kind: Kind = LayoutError) -> str:
    """Return a text; raises `kind` for any other value."""
    if isinstance(value, str):
        return value
    raise kind(f"{what} is {excerpt(value)}; legal is a text")


def items(what: str, value: object, of: str, kind: Kind = LayoutError) -> list[Any]:
    """Return the items of a list, a tuple, an array or any other ordered series; `of` says in an error what they are.

    Raises `kind` for a text, for a set or a mapping, which have no such order, and for more than `MOST_ITEMS`.
    """
    if not isinstance(value, (str, bytes, bytearray, Mapping, set, frozenset)) and isinstance(value, Iterable):
        try:
            iterator: Iterator[Any] = iter(value)
        except TypeError:  # an array without dims
            iterator = iter(())
        else:
            found = list(islice(iterator, MOST_ITEMS + 1))
            if len(found) <= MOST_ITEMS:
                return found
            raise kind(f"{what} has more than {MOST_ITEMS} items; legal is a list of {of}, at most so many")
    raise kind(f"{what} is {excerpt(value)}; legal is a list of {of}")


def names(what: str, value: object, kind: Kind = LayoutError) -> tuple[str, ...]:
    """Return names of axes, given as one name or as a list of them; raises `kind` for any other value."""
    if isinstance(value, str):
        return (value,)
    found = items(what, value, "names of axes", kind)
    for name in found:
        if not isinstance(name, str):
            raise kind(f"{what} is {excerpt(value)}; legal is a list of names of axes, and {excerpt(name)} is none")
    return tuple(found)


def table(what: str, value: object, of: str, kind: Kind = LayoutError) -> dict[Any, Any]:
    """Return a mapping as a dict; `of` says in an error what it maps; raises `kind` for any other value."""
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownVariableType]
    raise kind(f"{what} is {excerpt(value)}; legal is a mapping of {of}")
