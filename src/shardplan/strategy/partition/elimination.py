"""The least sum of tables over choices, exactly: one choice after another is eliminated.

A *table* is an array with an axis for each of some choices; the sum of all tables at one option of every choice is to
be least. A choice is eliminated by adding the tables that have it and taking the minimum along its axis, in order of
the table that this makes; so the work grows with the widest such table, not with the number of choices (bucket
elimination, Dechter 1999).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

Choice = TypeVar("Choice", bound=Hashable)
Table = tuple[tuple[Choice, ...], np.ndarray]
MOST = 4_000_000  # entries of a table: above it nothing is eliminated in reasonable memory


class TooWide(Exception):
    """A table would have more than `MOST` entries."""


class Least(NamedTuple):
    """The least sum, an option of every choice that reaches it, and the entries of the widest table that was made."""

    total: float
    options: dict[Hashable, int]
    widest: int


def least(tables: Sequence[Table[Choice]]) -> Least:
    """Return the least sum of `tables` over the options of every choice; no choice alone could have an earlier option.

    Raises `TooWide`.

    >>> least([(("a",), np.array([0, 1.0])), (("a", "b"), np.array([[5.0, 4], [1, 2]]))]).options
    {'a': 1, 'b': 0}
    """
    left: dict[int, Table[Choice]] = dict(enumerate(tables))
    sizes = {c: n for choices, array in tables for c, n in zip(choices, array.shape, strict=True)}
    having: dict[Choice, set[int]] = {c: set() for c in sizes}
    for k, (choices, _) in left.items():
        for c in choices:
            having[c].add(k)
    widest, done = 0, list[tuple[Choice, tuple[Choice, ...], np.ndarray]]()
    scopes = {c: _scope(c, having, left) for c in sizes}
    cost = {c: math.prod(sizes[x] for x in scope) for c, scope in scopes.items()}
    while cost:
        choice = min(cost, key=lambda c: cost[c])
        scope = scopes[choice]
        wide = cost[choice] * sizes[choice]
        widest = max(widest, wide)
        if wide > MOST:
            raise TooWide
        order = (*scope, choice)
        total = np.zeros([sizes[c] for c in order])
        for k in having[choice]:
            choices, array = left.pop(k)
            total = total + _aligned(choices, array, order)
            for c in choices:
                if c != choice:
                    having[c].discard(k)
        done.append((choice, scope, total.argmin(axis=-1)))
        new = len(tables) + len(done)
        left[new] = (scope, total.min(axis=-1))
        del cost[choice], having[choice], scopes[choice]
        for c in scope:
            having[c].add(new)
        for c in scope:
            scopes[c] = _scope(c, having, left)
            cost[c] = math.prod(sizes[x] for x in scopes[c])
    options: dict[Hashable, int] = {}
    for choice, scope, best in reversed(done):
        options[choice] = int(best[tuple(options[c] for c in scope)])
    return Least(float(sum(array for _, array in left.values())), {c: options[c] for c in sizes}, widest)


def _scope(choice: Choice, having: Mapping[Choice, set[int]], left: Mapping[int, Table[Choice]]) -> tuple[Choice, ...]:
    """The choices that share a table with one, in the order in which tables name them."""
    return tuple(dict.fromkeys(c for k in sorted(having[choice]) for c in left[k][0] if c != choice))


def _aligned(choices: tuple[Choice, ...], array: np.ndarray, order: tuple[Choice, ...]) -> np.ndarray:
    """The array of a table with its axes in an order, and axes of length 1 for choices that it does not have."""
    array = array.transpose([choices.index(c) for c in order if c in choices])
    return array.reshape(
        [array.shape[[x for x in order if x in choices].index(c)] if c in choices else 1 for c in order]
    )
