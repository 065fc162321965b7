"""Collectives without tags: one rank that runs another program is named, and no result outlives the next run."""

import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from execution.unlike_runs import hasty, wrong_sequences
from shardplan.errors import BackendError
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.posts import GREETING, POST, Post, PostedRun, PostOffice


def test_one_rank_that_differs_is_named_on_all_by_the_next_run() -> None:
    """Of new and known programs; `benchmarks.unlike_sequences` runs ten thousand."""
    with hasty():
        wrong, _ = wrong_sequences(8, 0)
    assert wrong == []


def test_after_unlike_programs_nothing_without_tags_starts() -> None:
    watch = object.__new__(TorchWatch)  # of no process group
    watch.ranks, watch.name = (0, 1), "all_gather of a plan"
    watch.state = state = cast(Any, SimpleNamespace(mismatches={}))
    watch.refuse_after_mismatch()
    state.mismatches[0, 1] = "in the run before, rank 1 ran another program"
    with pytest.raises(BackendError, match=r"did not start: in the run before, rank 1 .* legal is a new process group"):
        watch.refuse_after_mismatch()


@pytest.fixture
def offices():
    """Two ranks of one store."""
    store = dist.HashStore()
    made = [PostOffice(store, rank) for rank in (0, 1)]
    yield made
    for office in made:
        office.close()


def test_posts_come_in_pieces_and_in_any_order(offices) -> None:
    low, high = offices
    first, second = (PostedRun(7, number) for number in (1, 2))
    low.send(1, second, Post(20, "program b"), 5.0)
    assert high.take(0, second, 5.0, lambda: False) == Post(20, "program b")
    data = b"".join(POST.pack(*run, n, b"x") for run, n in ((second, 21), (first, 11)))
    for start in range(0, len(data), 30):
        low.called[1].sendall(data[start : start + 30])
        time.sleep(0.02)
        high._read(0, high.heard[0])
    assert [high.take(0, run, 5.0, lambda: False).identity for run in (first, second)] == [11, 21]
    assert high.take(0, first, 5.0, lambda: True) is None
    with pytest.raises(TimeoutError):
        high.take(0, first, 0.05, lambda: False)
    low.close()
    with pytest.raises(ConnectionError, match="it closed its connection"):
        high.take(0, first, 5.0, lambda: False)


def test_a_caller_without_the_secret_is_sent_away(offices) -> None:
    """Its posts are no rank's."""
    low, high = offices
    with socket.create_connection(high.listener.getsockname()[:2], 5.0) as stranger:
        stranger.sendall(GREETING.pack(bytes(16), 0) + POST.pack(7, 1, 11, b"x"))
        with pytest.raises(TimeoutError):
            high.take(0, PostedRun(7, 1), 0.3, lambda: False)
        assert not high.callers
    low.send(1, PostedRun(7, 1), Post(12, ""), 5.0)
    assert high.take(0, PostedRun(7, 1), 5.0, lambda: False) == Post(12, "")
