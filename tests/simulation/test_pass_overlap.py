"""What a pass takes beside what moves: the formula against both streams, op by op."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.simulation.closed.pass_overlap import (
    CHANNELS,
    PassOrder,
    PassWork,
    beside_moves,
    pass_seconds,
    settled_seconds,
)  # fmt: skip

SECONDS = st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0])
COUNTS = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 1), st.integers(0, 1))
ROW = st.tuples(SECONDS, SECONDS, SECONDS, SECONDS)


def followed(counts: Sequence[int], rows: Sequence[Sequence[float]], lag: float, backward: bool) -> tuple[float, float]:
    """Run a pass layer by layer: every gather, kernel and reduction in the order in which it is issued."""
    parts = [2, 0, 1, 3]
    done, free = 0.0, lag
    for part in reversed(parts) if backward else parts:
        kernels, gathered, reduced = (row[part] for row in rows)
        there = [0.0] * (counts[part] + 1)
        for layer in range(counts[part] + 1):
            if layer < counts[part]:  # a layer's parameters before the gradients of the layer before it
                free = there[layer] = free + gathered
            if layer > 0:
                done = (max(done, there[layer - 1]) if gathered else done) + kernels
                free = max(free, done) + reduced if reduced else free
    return done, free - done


@given(COUNTS, ROW, ROW, ROW, st.sampled_from([-4.0, 0.0, 2.5]), st.booleans())
def test_a_pass_takes_what_its_streams_take(
    counts: Sequence[int], kernels: Sequence[float], gathered: Sequence[float], reduced: Sequence[float], lag: float,
    backward: bool,
) -> None:  # fmt: skip
    work = PassWork(*(np.array(row)[:, None] for row in (kernels, gathered, reduced)))
    found = pass_seconds(np.array(counts, dtype=float)[:, None, None], work, np.full((1, 1), lag), backward=backward)
    wanted = followed(counts, (kernels, gathered, reduced), lag, backward)
    assert [float(x[0, 0]) for x in found] == pytest.approx(wanted)


@given(COUNTS, ROW, ROW, ROW, st.integers(2, 6))
def test_microbatches_take_what_passes_take_one_after_another(
    counts: Sequence[int], kernels: Sequence[float], gathered: Sequence[float], reduced: Sequence[float], several: int
) -> None:
    """Parameters gathered forward, gradients reduced backward: every pass followed, and the moves behind the last."""
    nothing = [0.0] * 4
    made = [
        [np.array(row)[:, None] for row in rows]
        for rows in ((kernels, gathered, nothing), (kernels, nothing, reduced), (nothing, nothing, nothing))
    ]
    order = PassOrder(*(np.array([x]) for x in (False, False, True)))
    table = np.array(counts, dtype=float)[:, None, None]
    *passes, left = settled_seconds(table, *(PassWork(*rows) for rows in made), order)
    seconds = sum(float(x[0, 0]) for x in passes) * several + float(left[0])
    at, lag = 0.0, 0.0
    for _ in range(several):
        for rows, backward in (((kernels, gathered, nothing), False), ((kernels, nothing, reduced), True)):
            done, lag = followed(counts, rows, lag, backward)
            at += done
    assert at + max(0.0, lag) == pytest.approx(seconds)


@given(st.sampled_from([0.5, 1.0, 3.0]), SECONDS, SECONDS, st.sampled_from([0.0, 0.4, 1.0]), st.integers(48, 160))
def test_kernels_beside_a_collective_lose_the_processors_that_it_keeps(
    kernels: float, gathered: float, reduced: float, part: float, processors: int
) -> None:
    """Followed instant by instant: while anything moves, the part that fills the device runs on what is left of it."""
    column = [np.array([[x]]) for x in (kernels, gathered, reduced)]
    found = beside_moves(PassWork(*column), np.array([[part * kernels]]), processors)
    at, done, instant = 0.0, 0.0, 1e-4
    while done < kernels - 1e-9:
        done += instant * (1 - part * CHANNELS / processors * (at < gathered + reduced - instant / 2))
        at += instant
    assert float(found.kernels[0, 0]) == pytest.approx(at, abs=3 * instant)
    assert [float(x[0, 0]) for x in found[1:3]] == [gathered, reduced]


def test_nothing_is_lost_where_processors_are_not_known() -> None:
    row = np.array([[2.0]])
    assert beside_moves(PassWork(row, row, row), row, 0).kernels.tolist() == [[2.0]]


@pytest.mark.parametrize("processors", [1, 8, CHANNELS, 2 * CHANNELS])
def test_collectives_leave_half_of_few_processors(processors: int) -> None:
    row = np.array([[2.0]])
    assert beside_moves(PassWork(row, row, row), row, processors).kernels.tolist() == [[4.0]]
