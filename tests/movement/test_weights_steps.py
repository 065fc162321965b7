"""Dims of logical tensors with a range and a step: which layers there are, their names, and who owns what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardplan as sp
from shardplan.errors import LayoutError
from shardplan.movement.weights.contents import merge_intervals
from shardplan.movement.weights.logical import logical_dims
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights


def side(q: str, name: str = "{l}.q", first: int = 0, stages: int = 1) -> Weights:
    """One tensor of six layers, three elements each."""
    data: dict[str, Any] = {
        "mesh": ["stage"], "degrees": {"stage": stages}, "atoms": {"l": 6, "n": 3, "s": "step or 2"},
        "of": {"tensors": {"q": q}}, "holes": {"l": "l@stage"}, "parameters": [{"name": name, "is": "q = n"}],
    }  # fmt: skip
    return make_weights(WeightTable.of(data, "a table"), {}, {"stage": stages}, range(first, first + stages), "f32")


def test_a_step_is_text_and_read_back() -> None:
    for text in ("l[1::2]", "l[::2]", "l[s - 1:5:s]", "l[3:]", "l"):
        assert str(logical_dims("q", f"{text}, n")[0]) == text
    found = side("l[s - 1::s], n")
    assert found.names(0) == ["1.q", "3.q", "5.q"]
    assert Weights.parse(str(found)) == found
    assert side("l[:5:2], n").names(0) == ["0.q", "2.q", "4.q"]


def test_names_of_a_rank_count_all_layers() -> None:
    found = side("l[1::2], n", "{l.local}.q", stages=2)  # layers 0 to 2, and 3 to 5
    assert [found.names(r) for r in (0, 1)] == [["1.q"], ["0.q", "2.q"]]


def test_every_element_of_a_step_arrives() -> None:
    plan = sp.refit(side("l[1::2], n"), side("l[1::2], n", "{l.local}.q", first=1, stages=2))
    before = {f"{k}.q": np.arange(3, dtype=np.float32) + 10 * k for k in (1, 3, 5)}
    after = plan.apply({0: before})
    assert after[1]["1.q"].tolist() == [10, 11, 12]
    assert [after[2][n].tolist() for n in ("0.q", "2.q")] == [[30, 31, 32], [50, 51, 52]]


def test_a_layer_between_has_no_owner() -> None:
    with pytest.raises(LayoutError, match=r"element \[0, 0\] of q \(l, n\) has no owner in the source"):
        sp.refit(side("l[1::2], n"), side("l, n", first=1))
    with pytest.raises(LayoutError, match=r"does not take: q \({l}.q, from element \[0, 0\] on\); legal is"):
        sp.refit(side("l, n"), side("l[1::2], n", first=1))
    assert sp.refit(side("l, n"), side("l[1::2], n", first=1), drop="q").received_bytes == (0, 36)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("l[::0], n", r"q: l\[::0\] goes on by 0; legal is a step of at least 1"),
        ("l[1:9:2], n", r"q: l\[1:9:2\] is 1 to 9 of 6; legal is a range within 0 to 6"),
        ("l[1:2:3:4], n", r"the dim 'l\[1:2:3:4\]' is none; legal is as"),
    ],
)
def test_a_step_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises((LayoutError, sp.errors.ParseError), match=message):
        side(text)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=6))
def test_joined_intervals_are_the_fewest_with_the_same_indices(pairs: list[tuple[int, int]]) -> None:
    start = np.array([a for a, _ in pairs], dtype=np.int64)
    low, high = merge_intervals(start, start + np.array([n for _, n in pairs], dtype=np.int64))
    held = {i for a, n in pairs for i in range(a, a + n)}
    assert [i for a, b in zip(low, high, strict=True) for i in range(a, b)] == sorted(held)
    assert len(low) == sum(i - 1 not in held for i in held)
