"""The checker, held against an executor written apart."""

from random import Random

import pytest

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import Schedule, broken_law, check, in_flight, schedule
from strategy.schedules.drawn import FAULTS, drawn, planted
from strategy.schedules.judge import Run

MODES = ("blocking", "batched", "buffered")


def of(*rows: str, m: int = 1) -> Schedule:
    return Schedule.parse("\n".join([f"schedule, {m} microbatches", *(f"{i}: {row}" for i, row in enumerate(rows))]))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (of("0F0"), None),
        (of("0F0 0B0", "2F0 2B0"), "stage 1 of 3 has no action"),
        (of("0F0 0B0", "1F0 1I0"), "1W0 is missing (stage 1 is on rank 1)"),
        (of("0F0 0B0 0B0"), "0B0 (rank 0, slot 2) stands also in slot 1"),
        (of("0F0 0B0 0W0"), "0W0 (rank 0, slot 2) is part of 0B0 (rank 0, slot 1)"),
        (of("0F0 0B0", "1B0 1F0"), "1F0 (rank 1, slot 1) stands behind 1B0 (rank 1, slot 0)"),
        (of("0F0 0W0 0I0"), "0I0 (rank 0, slot 2) stands behind 0W0 (rank 0, slot 1)"),
        (of("0F0 0B0 0F1 0B1"), "0F1 (rank 0, slot 2) is of none of 1 microbatches"),
        (of("0F0 0B0 1W0", "1F0 1I0"), "1W0 (rank 0, slot 2), but stage 1 is on rank 1, from slot 0 on"),
        (of("1F0 0F0 1B0 0B0"), "a circle: 1F0 (rank 0, slot 0) waits for 0F0 (rank 0, slot 1)"),
        (of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", m=2),
         "a circle: 0B0 (rank 0, slot 1) waits for 1B0 (rank 1, slot 3); "
         "1F1 (rank 1, slot 0) waits for 0F1 (rank 0, slot 2)"),
        (of("0F0 0SEND_F0", "1F0"), "1RECV_F0 is missing: 0F0 (rank 0, slot 0) feeds 1F0 (rank 1, slot 0)"),
        (of("0F0 0SEND_F0", "1F0 1RECV_F0"), "1RECV_F0 (rank 1, slot 1) stands behind 1F0 (rank 1, slot 0)"),
        (of("0SEND_F0 0F0", "1RECV_F0 1F0"), "0SEND_F0 (rank 0, slot 0) stands before 0F0 (rank 0, slot 1)"),
        (of("0F0 0SEND_F0 1F0"), "0SEND_F0 (rank 0, slot 1) carries nothing between ranks"),
        (of("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1F1 1RECV_F0 1F0", m=2), "message 0 from rank 0 to rank 1: "
         "0SEND_F0 (rank 0, slot 1) meets 1RECV_F1 (rank 1, slot 0)"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(found: Schedule, said: str | None) -> None:
    if said is None:
        assert check(found) is found
        return
    with pytest.raises(ScheduleError) as error:
        check(found)
    assert str(error.value) == f"schedule: {said}"


def test_messages_may_wait_in_a_circle_that_batching_and_buffers_break() -> None:
    crossed = of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        m=2,
    )
    refusal = broken_law(crossed)
    assert refusal is not None and refusal.places == ((0, 3), (1, 3))
    assert refusal.says == (
        "a circle: 0SEND_F1 (rank 0, slot 3) waits for 1RECV_F1 (rank 1, slot 4); "
        "1SEND_B0 (rank 1, slot 3) waits for 0RECV_B0 (rank 0, slot 4)"
    )
    assert [broken_law(crossed, messages=mode) for mode in MODES[1:]] == [None, None]
    rows = [" ".join(map(str, row)) for row in crossed.ranks]
    apart = of(rows[0].replace(" 0RECV", " 0OPT 0RECV"), rows[1].replace(" 1RECV", " 1OPT 1RECV"), m=2)
    assert [broken_law(apart, messages=mode) is None for mode in MODES] == [False, False, True]
    assert broken_law(crossed.compute_only()) is None


def test_the_bound_in_flight() -> None:
    found = schedule("1f1b", 3, 4)
    assert in_flight(found) == (3, 2, 1)
    assert check(found, in_flight=(3, 2, 1)) is found
    assert in_flight(of("0F0 0B0", "")) == (1, 0)  # a rank that does nothing holds nothing
    with pytest.raises(ScheduleError, match=r"1F1 \(rank 1, slot 1\) makes 2 in flight; the bound of rank 1 is 1"):
        check(found, in_flight=(3, 1, 1))
    with pytest.raises(ScheduleError, match="in_flight has 1 bounds; legal is one for each of 3 ranks"):
        check(found, in_flight=(3,))
    with pytest.raises(ScheduleError, match="messages 'eager' is unknown; legal: blocking, batched, buffered"):
        check(found, messages="eager")


def test_overlapped_parts_run_in_order() -> None:
    assert broken_law(of("(0F0;0B0)OVERLAP_F_B")) is None
    assert broken_law(of("(0B0;0F0)OVERLAP_F_B")) is not None
    assert broken_law(of("(0F0;1F0)OVERLAP_F_B 1B0 0B0")) is None
    assert broken_law(of("(1F0;0F0)OVERLAP_F_B 1B0 0B0")) is not None


def test_copies_share_the_microbatches() -> None:
    text = "schedule, 2 microbatches, 2 copies\n0: 0F0 3F1 0B0 3B1\n1: 2F1 1F0 1B0 2B1"
    assert broken_law(Schedule.parse(text)) is None
    refusal = broken_law(Schedule.parse(text.replace("0F0 3F1", "3F1 0F0").replace("2F1 1F0", "1F0 2F1")))
    assert refusal is not None and refusal.rule == "wait"
    both = broken_law(Schedule.parse("schedule, 1 microbatches, 2 copies\n0: 0F0 0B0\n1: 1F0 1B0"))
    assert both is not None and both.says == "1F0 (rank 1, slot 0), but microbatch 0 goes through another copy"


def test_a_thousand_valid_schedules_are_accepted() -> None:
    random = Random(1)
    for n in range(1000):
        found = drawn(random, messages=n % 2 == 0)
        for mode in MODES:
            assert Run(found, mode).fine, found
            assert broken_law(found, in_flight(found), mode) is None, found


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_where_they_stop_a_run(fault: str) -> None:
    """125 faults of each of eight kinds, 1,000 in all; whether it is one, the executor says."""
    random = Random(fault)
    caught = 0
    while caught < 125:
        found = drawn(random, messages=fault.startswith("swapped") or random.random() < 0.7)
        bounds = in_flight(found)
        if fault == "memory":
            rank = random.randrange(len(bounds))
            bounds = tuple(n - (r == rank) for r, n in enumerate(bounds))
            wrong = None if found.forward_only else found
        else:
            wrong = planted(random, fault, found)
        if wrong is None:
            continue
        limits = bounds if fault == "memory" else None
        mode = random.choice(MODES)
        run, refusal = Run(wrong, mode, limits), broken_law(wrong, limits, mode)
        assert run.fine == (refusal is None), (wrong, mode, refusal)
        if refusal is None:
            continue
        caught += 1
        if refusal.rule == "wait":
            assert all(run.stands(rank, slot) for rank, slot in refusal.places), (wrong, mode, refusal)
        elif refusal.places:
            rank, slot = refusal.places[0]
            assert run.at[rank] <= slot, (wrong, mode, refusal)
        else:
            assert refusal.says.split()[1:3] == ["is", "missing"] or "has no action" in refusal.says
