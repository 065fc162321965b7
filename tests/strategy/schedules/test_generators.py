"""The generators: bubbles and in-flight counts, exactly, by replay."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import GENERATORS, Schedule, Times, broken_law, check, in_flight, replay, schedule
from shardplan.strategy.schedules.table import overlapping_schedules

CASES = ((1, 1, 1), (2, 3, 1), (3, 2, 2))
BUBBLES = {
    "gpipe": lambda p, f, i, w: (p - 1) * (f + i + w),
    "1f1b": lambda p, f, i, w: (p - 1) * (f + i + w),
    "interleaved": lambda p, f, i, w: (p - 1) * (f + i + w),  # of chunk times, so without the v below
    "looped-bfs": lambda p, f, i, w: (p - 1) * (f + i + w),
    "zb-h1": lambda p, f, i, w: (p - 1) * (f + i - w),
    "zb-h2": lambda p, f, i, w: max(0, (p - 1) * (f + i - 2 * w)),
}


@pytest.mark.parametrize("name", BUBBLES)
def test_bubbles_are_exact(name: str) -> None:
    chunks = (1, 2, 3) if GENERATORS[name].free else (None,)
    for p, k, v, (f, i, w) in product((1, 2, 3, 4, 6), (2, 3), chunks, CASES):
        replayed = replay(schedule(name, p, k * p, v), Times(f, i, w))
        assert replayed.bubble == BUBBLES[name](p, f, i, w)
        if name != "zb-h2":
            assert replayed.idle == replayed.bubble


def test_combined_1f1b_loses_as_much_as_interleaved() -> None:
    """Where nothing overlaps: what a pair waits for is there when its forward is done, or when the one before it is."""
    for p, k, v, (f, i, w) in product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3), CASES):
        replayed = replay(schedule("combined-1f1b", p, k * p, v), Times(f, i, w))
        assert replayed.makespan == (v * k * p + p - 1) * (f + i + w)


def test_the_two_bubbles_of_zb_h2_differ() -> None:
    for p in (2, 4, 8):
        replayed = replay(schedule("zb-h2", p, 3 * p), Times(1, 1, 1))
        assert (replayed.bubble, replayed.idle) == (0, p - 1)


def test_idle_is_what_the_rank_that_computes_least_loses() -> None:
    for name, (p, k) in product(GENERATORS.keys() - {*overlapping_schedules()}, ((2, 2), (4, 3))):
        found = schedule(name, p, k * p)
        times = Times(*([1 + (s * n) % 4 for s in range(found.stages)] for n in (1, 2, 3)))
        replayed = replay(found, times)
        busy = [sum(times(leaf) for a in row if a for leaf in a.leaves) for row in found.ranks]
        assert len({*busy}) > 1
        assert replayed.idle == max(replayed.makespan - own for own in busy)


def test_zb_v_has_no_bubble_where_all_passes_take_the_same() -> None:
    for p in (2, 4, 6):
        found = schedule("zb-v", p, 3 * p)
        assert replay(found, Times(1, 1, 1)).bubble == 0
        assert replay(found, Times(3, 2, 2)).bubble == 2 * (p - 1)


def test_v_half_and_v_min_are_about_as_published() -> None:
    """Half, and two thirds, of 1F1B's bubble at f = i = w, which is 6 (p - 1) in times of a chunk."""
    for p in range(2, 9):
        half, least = (replay(schedule(name, p, 3 * p), Times(1, 1, 1)).bubble for name in ("v-half", "v-min"))
        assert abs(half - 3 * p) <= 2
        assert 4 * p - 6 <= least <= 4 * p


def test_dualpipe_without_overlap() -> None:
    """With a barrier, in times of a chunk; the published (P/2-1)(F&B + B - 3W), P = 2p stages, is never reached."""
    for p, (f, i, w) in product((2, 4, 8), CASES):
        for name, ranks in (("dualpipev", p), ("dualpipe", 2 * p)):
            replayed = replay(schedule(name, ranks, 6 * ranks), Times(f, i, w))
            least = (p - 1) * (f + i - w)
            assert least <= replayed.idle <= (1.18 * least if (f, i, w) == (2, 3, 1) else least)
            assert replayed.bubble <= replayed.idle < (p - 1) * (f + 2 * i - w)


def test_parts_that_overlap_take_what_is_said() -> None:
    found = Schedule.parse("schedule, 2 microbatches\n0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert replay(found, Times(1, 1, 1)).makespan == 6
    assert replay(found, Times(1, 1, 1), together=lambda a: 2).makespan == 5


@pytest.mark.parametrize("name", GENERATORS)
def test_in_flight_is_as_declared(name: str) -> None:
    made = GENERATORS[name]
    for p, m in product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 8, 16, 24)):
        for v in (1, 2, 3) if made.free else (made.chunks,):
            try:
                found = schedule(name, p, m, v)
            except ScheduleError as error:
                assert "legal" in str(error)
                continue
            declared = [made.in_flight(p, m, v, r) for r in range(p)]
            check(found, declared)
            if m >= 2 * p and name != "v-min":
                assert list(in_flight(found)) == declared
            elif m >= 2 * p:
                assert max(in_flight(found)) == declared[0]


def test_the_share_in_flight() -> None:
    """In one device's share of the layers: p + 1 chunks of P in DualPipe, (p+2)//2 in V-Half, (p+4)//3 in V-Min."""
    assert max(in_flight(schedule("v-half", 8, 24))) == 2 * 5
    assert max(in_flight(schedule("v-min", 8, 24))) == 2 * 4
    assert set(in_flight(schedule("dualpipe", 8, 24))) == {9} == set(in_flight(schedule("dualpipev", 4, 24)))


@pytest.mark.parametrize("name", GENERATORS)
def test_forwards_alone_are_valid(name: str) -> None:
    assert broken_law(schedule(name, 4, 8, forward_only=True)) is None


def test_what_generators_refuse() -> None:
    for name, sizes, said in (
        ("interleaved", (4, 9), "9 microbatches in 2 rounds of 4 ranks are not even; legal are multiples of 2, as 8"),
        ("dualpipe", (3, 12), "3 ranks, 12 microbatches; legal are even numbers of both"),
        ("dualpipev", (4, 7), "7 microbatches; legal are at least twice the 4 ranks"),
        ("zb-v", (4, 8, 3), "schedule zb-v has 2 chunks a rank, 3 were asked for"),
    ):
        with pytest.raises(ScheduleError) as error:
            schedule(name, *sizes)
        assert said in str(error.value)


@given(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=4), st.integers(4, 8))
def test_unequal_stages_take_at_least_what_each_alone_does(times: list[tuple[int, int, int]], m: int) -> None:
    p = len(times)
    whole = [sum(t) for t in times]
    least = max(sum(whole[:j]) + m * whole[j] for j in range(p))
    f, i, w = (list(column) for column in zip(*times, strict=True))
    for name in ("gpipe", "1f1b"):
        assert replay(schedule(name, p, m), Times(f, i, w)).makespan >= least
    last = [max(f), max(i), max(w)]
    f[-1], i[-1], w[-1] = last
    whole[-1] = sum(last)
    least = max(sum(whole[:j]) + m * whole[j] for j in range(p))
    assert replay(schedule("1f1b", p, m), Times(f, i, w)).makespan == least
