"""Messages placed in time: valid, without the bubble of torch's lowering, and never slower than its own cure."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import (
    GENERATORS,
    Action,
    Schedule,
    Times,
    broken_law,
    check,
    in_flight,
    place_messages,
    replay,
    schedule,
)
from strategy.schedules.drawn import drawn
from strategy.schedules.judge import Run
from strategy.schedules.torch_tables import written


def makespan(found: Schedule, cost: Times, message: float, messages: str = "buffered") -> float:
    return replay(found, cost, message, messages, together=lambda a: sum(map(cost, a.leaves))).makespan


@pytest.mark.parametrize("name", GENERATORS)
def test_placed_messages_cost_no_more_than_their_time(name: str) -> None:
    for p, m in ((2, 4), (4, 8)):
        made = schedule(name, p, m)
        for cost, message in ((Times(1, 1, 1), 0), (Times(2, 3, 1), 0.25), (Times(3, 2, 2), 1)):
            found = place_messages(made, cost, message)
            assert found.compute_only() == made.compute_only()
            assert [broken_law(found, in_flight(made), mode) for mode in ("blocking", "batched", "buffered")] == [
                None
            ] * 3
            ideal = makespan(made, cost, message)
            # Receives ahead of their time, where ranks would wait in a circle otherwise; two copies cross each other.
            most = 1.1 if message and made.copies > 1 else 1.05 if message == 1 else 1
            assert makespan(found, cost, message) <= most * ideal
            if message == 0:
                assert makespan(found, cost, 0, "blocking") <= 1.2 * makespan(made, cost, 0)


@pytest.mark.parametrize("messages", ["blocking", "buffered"])
def test_a_rank_does_something_from_its_first_message_on(messages: str) -> None:
    """A message is under way from when its own end is posted: a span begins where the one before it ended."""
    for name in ("1f1b", "zb-h1", "interleaved"):
        cost = Times(2, 3, 1)
        for spans in replay(place_messages(schedule(name, 4, 8), cost, 0.25, messages), cost, 0.25, messages).spans:
            for (_, _, before), (_, begin, end) in pairwise(spans):
                assert before == begin <= end


def test_messages_are_placed_in_any_schedule() -> None:
    random = Random(4)
    for n in range(60):
        made = drawn(random, messages=n % 2 == 0)
        cost = Times(*([random.randint(1, 4) for _ in range(made.stages)] for _ in range(3)))
        message = random.choice((0, 0.5, 3))
        for mode in ("buffered", "blocking"):
            found = place_messages(made, cost, message, mode)
            assert check(found) is found and Run(found, "blocking").fine
            assert found.compute_only() == made.compute_only()


@pytest.mark.parametrize(
    ("name", "chunks", "ranks", "microbatches"),
    [
        ("Interleaved1F1B", 2, 2, 4),  # PyTorch issue 172668
        ("Interleaved1F1B", 2, 8, 8),  # PyTorch issue 188833
        ("LoopedBFS", 2, 4, 8),
        ("ZBVZeroBubble", 2, 4, 8),
        ("DualPipeV", 2, 2, 6),
    ],
)
def test_the_bubble_of_torchs_lowering_is_gone(
    name: str, chunks: int, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    default, deferred = (
        Schedule.from_csv(written(name, ranks, microbatches, chunks, tmp_path, defer=cure)[1]) for cure in (False, True)
    )
    for cost, message in ((Times(1, 1, 1), 0), (Times(1, 1, 1), 0.1), (Times(2, 3, 1), 0.5)):
        ours = makespan(place_messages(default, cost, message), cost, message)
        ideal = makespan(default.compute_only(), cost, message)
        theirs = makespan(default, cost, message)
        assert theirs > ideal
        assert ours - ideal <= 0.1 * (theirs - ideal)
        assert ours <= makespan(deferred, cost, message)


def test_torchs_cure_may_wait_in_a_circle(tmp_path: Path) -> None:
    """With `defer_pp_recv` sends that wait for their receives, as those of NCCL in one stream do, deadlock."""
    pytest.importorskip("torch")
    refusal = broken_law(Schedule.from_csv(written("Interleaved1F1B", 2, 4, 2, tmp_path, defer=True)[1]))
    assert refusal is not None and refusal.rule == "wait"


def test_parameters_are_unsharded_and_gradients_reduced_as_torch_does(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name, chunks in (("Interleaved1F1B", 2), ("LoopedBFS", 5), ("ZBVZeroBubble", 2), ("DualPipeV", 2)):
        theirs = Schedule.from_csv(written(name, 2, 4, chunks, tmp_path)[1])
        ours = place_messages(theirs, Times())
        for mine, row in zip(ours.ranks, theirs.ranks, strict=True):
            kept = [[a for a in r if a is not None and a.kind[:4] not in ("SEND", "RECV")] for r in (mine, row)]
            assert sorted(map(str, kept[0])) == sorted(map(str, kept[1]))
            assert [a for a in kept[0] if a.kind != "RESHARD"] == [a for a in kept[1] if a.kind != "RESHARD"]


def test_what_cannot_be_placed() -> None:
    with pytest.raises(ScheduleError, match="a computation takes no time; legal are times above 0"):
        place_messages(schedule("1f1b", 2, 2), Times(0, 1, 1))
    with pytest.raises(ScheduleError, match="0F0 is missing"):
        place_messages(Schedule(((Action(0, "F", 1), Action(0, "F", 2)),), 3), Times())
