"""`least` against the sum of all tables at every option of every choice."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.strategy.partition import elimination
from shardplan.strategy.partition.elimination import Least, Table, TooWide, least
from strategies import rngs

CHOICES = "abcdefg"


def random_tables(rng: random.Random, values: tuple[float, ...]) -> list[Table[str]]:
    """Tables of up to seven choices of up to four options, in scopes of any order."""
    names = rng.sample(CHOICES, rng.randint(1, len(CHOICES)))
    sizes = {name: rng.randint(1, 4) for name in names}
    tables: list[Table[str]] = []
    for _ in range(rng.randint(1, 9)):
        scope = tuple(rng.sample(names, min(len(names), rng.randint(0, 3))))
        shape = [sizes[name] for name in scope]
        tables.append((scope, np.array([rng.choice(values) for _ in range(math.prod(shape))]).reshape(shape)))
    return tables


def everywhere(tables: list[Table[str]]) -> tuple[tuple[str, ...], np.ndarray]:
    """The choices, and the sum of all tables at all their options."""
    sizes = {c: n for scope, array in tables for c, n in zip(scope, array.shape, strict=True)}
    order = tuple(sizes)
    total = np.zeros(tuple(sizes.values()))
    for at in np.ndindex(total.shape):
        option = dict(zip(order, at, strict=True))
        total[at] = sum(array[tuple(option[c] for c in scope)] for scope, array in tables)
    return order, total


def assert_least(tables: list[Table[str]]) -> Least:
    found, (order, total) = least(tables), everywhere(tables)
    at = tuple(found.options[c] for c in order)
    assert list(found.options) == list(order)
    assert found.total == total.min() == total[at]
    if not math.isinf(found.total):
        for k in range(len(order)):  # no choice alone could take an earlier option
            assert (total[(*at[:k], slice(at[k]), *at[k + 1 :])] > found.total).all(), order[k]
    return found


@given(rngs())
@settings(max_examples=150)
def test_the_least_of_all_options_is_found(rng: random.Random) -> None:
    assert_least(random_tables(rng, tuple(float(n) for n in range(50))))


@given(rngs())
@settings(max_examples=150)
def test_ties_and_what_cannot_be_leave_it_exact(rng: random.Random) -> None:
    assert_least(random_tables(rng, rng.choice(((0.0, 1.0), (0.0, 1.0, math.inf), (0.0, math.inf, math.inf)))))


def test_choices_that_share_no_table_are_chosen_apart() -> None:
    found = assert_least(
        [(("a", "b"), np.array([[3.0, 1.0], [2.0, 5.0]])), (("c",), np.array([4.0, 0.0, 0.0])), ((), np.array(7.0))]
    )
    assert found == Least(8.0, {"a": 0, "b": 1, "c": 1}, 4)


def test_nothing_to_choose_is_nothing() -> None:
    assert least([]) == Least(0.0, {}, 0)


def test_the_widest_table_does_not_grow_with_a_chain() -> None:
    """A chain of choices is eliminated from its ends, whatever the order in which it is told."""
    rng = np.random.default_rng(0)
    widest = set[int]()
    for length in (5, 50):
        links: list[Table[int]] = [((k, k + 1), rng.random((3, 3))) for k in rng.permutation(length)]
        widest.add(least(links).widest)
    assert widest == {9}


def test_what_is_too_wide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four choices that all share tables with each other make one of 2^4 entries."""
    pairs: list[Table[str]] = [((a, b), np.zeros((2, 2))) for a in "abcd" for b in "abcd" if a < b]
    assert least(pairs).widest == 16
    monkeypatch.setattr(elimination, "MOST", 15)
    with pytest.raises(TooWide):
        least(pairs)


@given(st.permutations(range(3)))
def test_axes_of_a_table_are_its_choices_in_any_order(order: list[int]) -> None:
    array = np.arange(24.0)[::-1].reshape(2, 3, 4)
    names = tuple("abc"[k] for k in order)
    assert least([(names, array.transpose(order))]).options == {"a": 1, "b": 2, "c": 3}
