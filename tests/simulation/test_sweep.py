"""Sweeps of many configurations at once, beside schedules run one action after another."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.errors import ScheduleError, ShardplanError
from shardplan.simulation.sweep import StageSeconds, closed_step, compile_schedule, lower_bound, sweep, timeline_of
from shardplan.simulation.sweep.periods import PERIODS, periodic
from shardplan.strategy.schedules import GENERATORS, Schedule, Times, in_flight, place_messages, replay, schedule
from shardplan.strategy.schedules.table import is_rendezvous
from simulation.slow_pipeline import drawn_stages, named, placed_spans, run
from strategy.schedules.drawn import drawn

SEEDS = st.integers(0, 10**6)


def beside(found: Schedule, swept, ran, k: int) -> None:
    """One configuration of a sweep is what the plain run says."""
    assert swept.makespan[k] == pytest.approx(ran.makespan, rel=1e-12)
    for r in range(len(found.ranks)):
        own = ran.of(r)
        busy = sum(ran.end[key] - ran.begin[key] for key in own)
        span = max(ran.end[key] for key in own) - min(ran.begin[key] for key in own) if own else 0
        assert swept.busy[k, r] == pytest.approx(busy, rel=1e-12)
        assert swept.span[k, r] == pytest.approx(span, rel=1e-12)


@given(named(), SEEDS)
@settings(max_examples=150)
def test_named_schedules_are_as_the_plain_run_has_them(sizes: tuple[str, int, int, int], seed: int) -> None:
    name, p, m, v = sizes
    found, ready = schedule(name, p, m, v), compile_schedule(name, p, m, v)
    stages = drawn_stages(seed, 3, ready.chunks)
    swept = sweep(ready, stages, times=True)
    for k in range(3):
        ran = run(found, stages, k)
        beside(found, swept, ran, k)
        for (_, action, _), begin, end in zip(ready.actions, swept.start[k], swept.end[k], strict=True):
            key = action.kind, action.stage, action.microbatch
            assert (begin, end) == pytest.approx((ran.begin[key], ran.end[key]), rel=1e-12)
    assert ready.in_flight == in_flight(found)


BLOCKING = st.sampled_from(["1f1b", "gpipe", "interleaved", "combined-1f1b", "looped-bfs"])


@given(BLOCKING, st.integers(1, 5), st.integers(1, 60), SEEDS, st.sampled_from([0.2, 3.0]))
@settings(max_examples=60)
def test_messages_that_begin_once_their_receivers_wait_are_as_the_plain_run_has_them(
    name: str, p: int, m: int, seed: int, message: float
) -> None:
    m = m - m % p or p  # whole rounds
    assert is_rendezvous(name, 1)
    ready, stages = compile_schedule(name, p, m, 1), replace(drawn_stages(seed, 2, p, message), rendezvous=True)
    swept, short = sweep(ready, stages, times=True), sweep(ready, stages)
    assert (swept.makespan, swept.span) == (pytest.approx(short.makespan), pytest.approx(short.span))
    for k in range(2):
        ran = run(schedule(name, p, m, 1), stages, k)
        beside(schedule(name, p, m, 1), swept, ran, k)
        for (_, action, _), begin, end in zip(ready.actions, swept.start[k], swept.end[k], strict=True):
            key = action.kind, action.stage, action.microbatch
            assert (begin, end) == pytest.approx((ran.begin[key], ran.end[key]), rel=1e-12)
        line = timeline_of(swept, k)
        assert line.seconds == pytest.approx(ran.makespan, rel=1e-12)
        drawn_passes = [x for x in line.intervals if x.stream == "compute"]
        assert sorted(x.start for x in drawn_passes) == pytest.approx(sorted(ran.begin.values()), rel=1e-12)
        sent = [x.seconds for x in line.intervals if x.stream != "compute"]
        assert sum(sent) == pytest.approx(m * float(stages.send[k].sum() + stages.send_back[k].sum()))


def test_a_rank_of_two_chunks_waits_for_no_message() -> None:
    stages = replace(drawn_stages(0, 1, 4), rendezvous=True)
    for ask in (sweep, closed_step, lower_bound):
        with pytest.raises(ShardplanError, match="a rank has several chunks; legal is one chunk a rank"):
            ask(compile_schedule("interleaved", 2, 4, 2), stages)
    placed = place_messages(schedule("1f1b", 4, 4), Times(1, 1, 1), 0.5)
    with pytest.raises(ShardplanError, match="it places its messages; legal is one chunk a rank, without sends"):
        sweep(compile_schedule(placed), stages)
    with pytest.raises(ShardplanError, match="rendezvous"):
        replace(stages, rendezvous="no")


@given(SEEDS)
@settings(max_examples=100)
def test_schedules_of_users_are_as_the_plain_run_has_them(seed: int) -> None:
    found = drawn(Random(seed), messages=False)
    stages = drawn_stages(seed, 2, found.stages)
    swept = sweep(compile_schedule(found), stages)
    for k in range(2):
        beside(found, swept, run(found, stages, k), k)


@pytest.mark.parametrize("messages", ["blocking", "batched", "buffered"])
@given(SEEDS)
@settings(max_examples=60)
def test_placed_messages_hold_their_ranks_as_the_plain_run_has_them(messages: str, seed: int) -> None:
    random = Random(seed)
    found = drawn(random, messages=False)
    s = found.stages
    times = Times(*([random.uniform(0.1, 2) for _ in range(s)] for _ in range(3)))
    message = random.choice([0.0, 0.3, 1.5])
    ready = place_messages(found, times, message)
    wide = [np.array([each]) for each in (times.F, times.I, times.W)]
    stages = StageSeconds(*wide, np.full((1, s - 1), message))
    swept = sweep(compile_schedule(ready, messages=messages), stages, times=True)
    ran = replay(ready, times, message, messages)
    plain = placed_spans(ready, times, message, messages)
    assert len(plain) == sum(map(len, ran.spans))
    for rank, spans in enumerate(ran.spans):
        for slot, begin, end in spans:
            assert (begin, end) == pytest.approx(plain[rank, slot], rel=1e-12)
    assert swept.makespan[0] == pytest.approx(ran.makespan, rel=1e-12)
    assert swept.bubble_seconds[0] == pytest.approx(ran.bubble, rel=1e-9, abs=1e-9)
    assert swept.busy[0] == pytest.approx(ran.busy, rel=1e-12)


def test_a_placed_message_holds_its_ranks_and_another_does_not() -> None:
    bare = schedule("gpipe", 2, 4)
    stages = StageSeconds.equal(2, 1.0, 1.0, 0.0, 1.0)
    free = sweep(compile_schedule(bare), stages).makespan
    held = sweep(compile_schedule(place_messages(bare, Times(1, 1, 0), 1)), stages).makespan
    assert (free.tolist(), held.tolist()) == ([12.0], [18.0])


@given(named(), SEEDS)
@settings(max_examples=50)
def test_less_time_for_messages_never_takes_longer(sizes: tuple[str, int, int, int], seed: int) -> None:
    ready = compile_schedule(*sizes)
    slow = drawn_stages(seed, 4, ready.chunks)
    share = np.random.default_rng(seed).random(slow.send.shape)
    fast = replace(slow, send=slow.send * share, send_back=slow.send_back * share)
    assert (sweep(ready, fast).makespan <= sweep(ready, slow).makespan * (1 + 1e-12)).all()


@given(st.sampled_from(sorted(PERIODS)), st.integers(1, 5), st.integers(1, 3), st.integers(0, 40), SEEDS)
@settings(max_examples=150)
def test_periods_that_are_extrapolated_are_as_those_that_are_swept(
    name: str, p: int, v: int, more: int, seed: int
) -> None:
    made = GENERATORS[name]
    p, v = p + p % 2 if made.copies == 2 else p, v if made.free else made.chunks
    q = max(1, PERIODS[name](p, p))
    m = q * (90 + more)
    ready = compile_schedule(name, p, m, v)
    assert ready.periods > 50
    assert all(
        (own == all_).all() for own, all_ in zip((ready.forwards, ready.backwards), ready.lists.counts(), strict=True)
    )
    stages = drawn_stages(seed, 8, ready.chunks)
    short, whole = sweep(ready, stages), sweep(ready, stages, extrapolate=False)
    assert short.makespan == pytest.approx(whole.makespan, rel=1e-12)
    assert short.span == pytest.approx(whole.span, rel=1e-12)
    assert short.busy == pytest.approx(whole.busy, rel=1e-12)
    assert (short.skipped > 0).any() and not whole.skipped.any()


@given(st.sampled_from(sorted(PERIODS)), st.integers(1, 7), st.integers(1, 4), st.integers(0, 60))
@settings(max_examples=200)
def test_long_lists_are_their_beginning_periods_and_end(name: str, p: int, v: int, more: int) -> None:
    made = GENERATORS[name]
    p, v = p + p % 2 if made.copies == 2 else p, v if made.free else made.chunks
    m = max(1, PERIODS[name](p, p)) * (30 + more)
    found = periodic(name, p, m, v)
    if found is None:
        assert m < 8 * max(p, PERIODS[name](p, m))
        return
    lists = found.lists((m - found.microbatches) // found.period)
    wanted = [(r, a.kind, a.stage) for r, row in enumerate(made.rows(p, m, v)) for cell in row for a in cell.leaves]
    kinds = "FIWB"
    assert [(r, kinds[k], s) for r, k, s in zip(lists.rank, lists.kind, lists.stage, strict=True)] == wanted


def test_what_does_not_repeat_is_swept_whole() -> None:
    assert periodic("gpipe", 2, 100, 1) is periodic("looped-bfs", 2, 100, 2) is None
    assert periodic("interleaved", 4, 101, 2) is None  # its rounds are not of 4


def test_the_two_bubbles_of_the_table_are_exact() -> None:
    """DESIGN, schedules as data; the tests of generators have them for a replay."""
    p, m = 4, 12
    random = np.random.default_rng(0)
    f, i = random.uniform(1, 2, (2, 9))
    w = np.minimum(f, i) * random.uniform(0.1, 0.5, 9)
    for name, v, wanted in (
        ("gpipe", 1, (p - 1) * (f + i + w)),
        ("1f1b", 1, (p - 1) * (f + i + w)),
        ("interleaved", 3, (p - 1) * (f + i + w)),
        ("looped-bfs", 2, (p - 1) * (f + i + w)),
        ("zb-h1", 1, (p - 1) * (f + i - w)),
        ("zb-h2", 1, (p - 1) * (f + i - 2 * w)),
    ):
        swept = sweep(compile_schedule(name, p, m, v), StageSeconds.equal(p * v, f, i, w))
        assert swept.bubble_seconds == pytest.approx(wanted, rel=1e-12), name
        assert (swept.idle_seconds >= swept.bubble_seconds * (1 - 1e-12)).all()
        assert name == "zb-h2" or swept.idle_seconds == pytest.approx(wanted, rel=1e-12)


@given(named(), SEEDS, st.sampled_from([0.0, 0.4, 3.0]))
@settings(max_examples=80)
def test_a_timeline_is_its_sweep(sizes: tuple[str, int, int, int], seed: int, message: float) -> None:
    p = sizes[1]
    ready, found = compile_schedule(*sizes), schedule(*sizes)
    stages = drawn_stages(seed, 2, ready.chunks, message)
    stages = replace(stages, before=np.array([0.0, 0.7]), after=np.array([0.3, 0.0]))
    swept = sweep(ready, stages)
    random = np.random.default_rng(seed)
    kept, static = random.integers(0, 100, ready.chunks), random.integers(0, 100, p)
    for k in range(2):
        line = timeline_of(swept, k, kept_bytes=kept.tolist(), static_bytes=static.tolist())
        path = line.critical_path
        assert line.seconds == pytest.approx(swept.makespan[k], rel=1e-12)
        assert sum(link.seconds for link in path) == pytest.approx(line.seconds, rel=1e-9)
        if not message:
            assert line.bubble_seconds == pytest.approx(swept.bubble_seconds[k], rel=1e-9, abs=1e-9)
            assert line.idle_seconds == pytest.approx(swept.idle_seconds[k], rel=1e-9, abs=1e-9)
        assert [curve.samples[-1][1] for curve in line.memory] == static.tolist()
        assert [max(b for _, b in curve.samples) for curve in line.memory] == [
            static[r] + most_held(found, r, kept) for r in range(p)
        ]


def most_held(found: Schedule, rank: int, kept: np.ndarray) -> int:
    held = most = 0
    for cell in found.ranks[rank]:
        for a in cell.leaves if cell else ():
            nbytes = kept[a.stage % len(kept)]
            held += nbytes if a.kind == "F" else -nbytes if a.kind in "BW" else 0
            most = max(most, held)
    return most


@pytest.mark.parametrize("messages", ["blocking", "batched", "buffered"])
@given(SEEDS)
@settings(max_examples=40)
def test_a_timeline_of_placed_messages_is_its_sweep(messages: str, seed: int) -> None:
    ready = place_messages(drawn(Random(seed), messages=False), Times(1, 1, 1), 0.5)
    stages = drawn_stages(seed, 1, ready.stages)
    swept = sweep(compile_schedule(ready, messages=messages), stages)
    line = timeline_of(swept)
    assert line.seconds == pytest.approx(swept.makespan[0], rel=1e-12)
    assert sum(link.seconds for link in line.critical_path) == pytest.approx(line.seconds, rel=1e-9)


def test_messages_on_their_way_at_once_have_lanes() -> None:
    swept = sweep(compile_schedule("gpipe", 2, 3), StageSeconds.equal(2, 1.0, 1.0, 1.0, 5.0))
    line = timeline_of(swept, names={"P2P": "message", "F": "fwd"}, devices=(4, 7))
    assert {i.stream for i in line.intervals if i.device == 4} == {"compute", "comm", "comm 1", "comm 2"}
    assert line.devices == (4, 7) and {"message", "fwd", "backward"} == {i.kind for i in line.intervals}


def test_what_is_refused() -> None:
    ones = np.ones((2, 3))
    with pytest.raises(
        ShardplanError,
        match=r"send is float64 of the shape \(2, 3\); legal are floats \[n, chunks - 1\], here \(2, 2\)",
    ):
        StageSeconds(ones, ones, ones, ones)
    with pytest.raises(ShardplanError, match=r"backward_weight has -1\.0; legal are finite seconds of at least 0"):
        StageSeconds(ones, ones, -ones, ones[:, :2])
    stages = StageSeconds(ones, ones, ones, ones[:, :2])
    with pytest.raises(
        ShardplanError, match="sweep of 1f1b: the stages are 3 chunks; legal are StageSeconds of 4 chunks on 4 ranks"
    ):
        sweep(compile_schedule("1f1b", 4, 8), stages)
    with pytest.raises(ScheduleError, match="schedule 1f1b has 1 chunks a rank; an interleave of 2 was asked for"):
        compile_schedule("1f1b", 4, 8, 2)
    with pytest.raises(ScheduleError, match="schedule '1b1f' is unknown; legal: gpipe, 1f1b"):
        compile_schedule("1b1f", 4, 8)
    with pytest.raises(
        ScheduleError, match="schedule 1f1b: microbatches is None; legal is a whole number of at least 1"
    ):
        compile_schedule("1f1b", 4)
    with pytest.raises(ScheduleError, match="has 4 ranks and 8 microbatches; 4 and 9 were asked for"):
        compile_schedule(schedule("1f1b", 4, 8), 4, 9)
    with pytest.raises(ScheduleError, match=r"1F0 \(rank 1, slot 1\) stands behind 1B0"):
        compile_schedule(Schedule.parse("schedule, 1 microbatches\n0: 0F0 0B0\n1: 1B0 1F0"))
    with pytest.raises(ShardplanError, match="kept_bytes has 2 numbers; legal is one for each of 3 chunks"):
        timeline_of(sweep(compile_schedule("1f1b", 3, 4), stages), kept_bytes=[1, 2])
    with pytest.raises(ShardplanError, match="which is 2; legal is a whole number from 0 to 1"):
        timeline_of(sweep(compile_schedule("1f1b", 3, 4), stages), 2)


def test_no_configurations_are_none() -> None:
    stages = StageSeconds(*(np.ones((0, 4)) for _ in range(3)), np.ones((0, 3)))
    assert sweep(compile_schedule("1f1b", 4, 8), stages).makespan.shape == (0,)
    assert sweep(compile_schedule("1f1b", 4, 800), stages).bubble_seconds.shape == (0,)
