"""Collectives without tags: one rank that runs another program is named, and no result outlives the next run."""

import pytest

pytest.importorskip("torch")

from execution.unlike_runs import hasty, wrong_sequences  # noqa: E402


def test_one_rank_that_differs_is_named_on_all_by_the_next_run() -> None:
    """Of new and known programs; `benchmarks.unlike_sequences` runs ten thousand."""
    with hasty():
        wrong, _ = wrong_sequences(40, 0)
    assert wrong == []
