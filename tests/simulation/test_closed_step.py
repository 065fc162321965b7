"""The closed form of a step and its bound, beside events."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.errors import ShardplanError
from shardplan.simulation.sweep import StageSeconds, closed_step, compile_schedule, lower_bound, sweep
from shardplan.simulation.sweep.critical_paths import critical_paths
from shardplan.simulation.sweep.equal_lines import FORMULAS, equal_lines, found_lines
from shardplan.simulation.sweep.periods import PERIODS
from shardplan.strategy.schedules import Schedule, Shop, Times, list_schedule, place_messages, schedule
from simulation.slow_pipeline import drawn_stages, named
from strategy.schedules.drawn import drawn

SEEDS = st.integers(0, 10**6)


def equal_stages(seed: int, n: int, chunks: int) -> StageSeconds:
    """Equal chunks of any times, some of them 0, and no time for messages."""
    random = np.random.default_rng(seed)
    times = random.exponential(1, (3, n)) * (random.random((3, n)) > 0.15)
    return StageSeconds.equal(chunks, *times)


@given(named(7, 30), SEEDS)
@settings(max_examples=150)
def test_closed_is_events_for_equal_stages_and_free_messages(sizes: tuple[str, int, int, int], seed: int) -> None:
    ready = compile_schedule(*sizes)
    stages = equal_stages(seed, 12, ready.chunks)
    assert closed_step(ready, stages) == pytest.approx(sweep(ready, stages).makespan, rel=1e-12)


@given(st.sampled_from(sorted(FORMULAS)), st.integers(2, 6), st.integers(1, 3), st.integers(1, 30), SEEDS)
@settings(max_examples=100)
def test_formulas_are_what_sweeps_find(name: str, p: int, v: int, m: int, seed: int) -> None:
    if name in ("dualpipe", "dualpipev"):
        p, m = p + p % 2, 2 * p + 2 + 2 * m
    m = m - m % p or p if name in ("interleaved", "combined-1f1b") else m
    ready = compile_schedule(name, p, m, v if name in ("interleaved", "looped-bfs", "combined-1f1b") else None)
    times = np.random.default_rng(seed).dirichlet(np.full(3, 0.5), 50).T
    formula, found = equal_lines(ready) @ times, found_lines(ready) @ times
    assert formula.max(axis=0) == pytest.approx(found.max(axis=0), rel=1e-12)


@given(SEEDS)
@settings(max_examples=60)
def test_the_closed_form_of_a_users_schedule_is_exact_for_equal_stages(seed: int) -> None:
    found = drawn(Random(seed), messages=False)
    ready, stages = compile_schedule(found), equal_stages(seed, 12, found.stages)
    assert closed_step(ready, stages) == pytest.approx(sweep(ready, stages).makespan, rel=1e-12)


@given(named(), SEEDS)
@settings(max_examples=150)
def test_bounds_are_never_above_events(sizes: tuple[str, int, int, int], seed: int) -> None:
    ready = compile_schedule(*sizes)
    stages = drawn_stages(seed, 12, ready.chunks)
    events = sweep(ready, stages).makespan * (1 + 1e-12)
    assert (lower_bound(ready, stages) <= closed_step(ready, stages) * (1 + 1e-12)).all()
    assert (closed_step(ready, stages) <= events).all()


@given(st.sampled_from(sorted(PERIODS)), st.integers(2, 6), st.integers(0, 60), SEEDS)
@settings(max_examples=30)
def test_bounds_of_long_schedules_are_never_above_events(name: str, p: int, more: int, seed: int) -> None:
    """Long enough that ways through fewer periods are made longer."""
    p += p % 2 * (name == "dualpipe")
    m = (700 + more) * (p if name in ("interleaved", "combined-1f1b") else 2)
    ready = compile_schedule(name, p, m)
    assert len(critical_paths(ready))
    stages = drawn_stages(seed, 12, ready.chunks)
    assert (closed_step(ready, stages) <= sweep(ready, stages).makespan * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", sorted(PERIODS))
def test_ways_are_near_where_chunks_differ_and_messages_take_time(name: str) -> None:
    random = np.random.default_rng(0)
    for m in (24, 2400):
        ready = compile_schedule(name, 4, m)
        n, c = 40, ready.chunks
        wide = (random.uniform(0.9, 1.1, (n, c)) for _ in range(3))
        stages = StageSeconds(*wide, *(random.uniform(0, 0.1, (n, c - 1)) for _ in range(2)))
        share = closed_step(ready, stages) / sweep(ready, stages).makespan
        far = closed_step(ready, stages, near=False) / sweep(ready, stages).makespan
        assert share.mean() > 0.99 and (share >= far * (1 - 1e-12)).all()


@pytest.mark.parametrize("m", [24, 2400])
def test_1f1b_waits_for_its_messages_with_each_microbatch_and_so_do_its_ways(m: int) -> None:
    ready = compile_schedule("1f1b", 4, m)
    stages = StageSeconds.equal(4, 1.0, 1.0, 1.0, [0.02, 0.05, 0.2])
    events = sweep(ready, stages).makespan
    assert closed_step(ready, stages) == pytest.approx(events, rel=1e-12)
    assert (closed_step(ready, stages, near=False) < 0.995 * events).all()


@given(SEEDS)
@settings(max_examples=150)
def test_bounds_of_users_schedules_are_never_above_events(seed: int) -> None:
    found = drawn(Random(seed), messages=False)
    stages = drawn_stages(seed, 12, found.stages)
    for ready in (compile_schedule(found), compile_schedule(place_messages(found, Times(1, 1, 1), 0.5))):
        assert (closed_step(ready, stages) <= sweep(ready, stages).makespan * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_no_order_is_below_the_bound(name: str) -> None:
    """Orders that are sought for the very times."""
    made = schedule(name, 3, 4)
    for seed in range(5):
        stages = drawn_stages(seed, 1, 3, messages=0)
        times = [
            tuple(max(float(x[0, s]), 1e-3) for x in (stages.forward, stages.backward_input, stages.backward_weight))
            for s in range(3)
        ]
        stages = StageSeconds(*(np.array([column]) for column in zip(*times, strict=True)), np.zeros((1, 2)))
        best = list_schedule(Shop(made.owners, 4, tuple(times), (4, 4, 4)), 200)
        ready = compile_schedule(best)
        assert lower_bound(ready, stages) <= sweep(ready, stages).makespan * (1 + 1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_the_bound_is_met_where_it_is_said_to_be(name: str) -> None:
    ready = compile_schedule(name, 4, 12)
    stages = equal_stages(0, 20, ready.chunks)
    assert lower_bound(ready, stages) == pytest.approx(sweep(ready, stages).makespan, rel=1e-12)


def test_the_bound_is_met_by_1f1b_whose_last_stage_is_the_slowest() -> None:
    """DESIGN, schedules as data: max over stages of the way there and back and all its work; messages count, too."""
    random = np.random.default_rng(0)
    for p, m in ((2, 3), (3, 7), (5, 9)):
        times = random.uniform(0.5, 1, (3, 20, p))
        times[:, :, -1] = 1.0 + random.random((3, 20))
        stages = StageSeconds(*times, np.zeros((20, p - 1)))
        ready = compile_schedule("1f1b", p, m)
        whole = times.sum(axis=0)
        formula = (np.cumsum(whole, axis=1) - whole + m * whole).max(axis=1)
        assert lower_bound(ready, stages) == pytest.approx(formula, rel=1e-12)
        assert lower_bound(ready, stages) == pytest.approx(sweep(ready, stages).makespan, rel=1e-12)


def test_the_bound_of_one_microbatch_is_its_way() -> None:
    for name in ("1f1b", "zb-h1", "interleaved", "zb-v", "v-half"):
        ready = compile_schedule(name, 4, 1)
        stages = drawn_stages(7, 10, ready.chunks)
        events = sweep(ready, stages).makespan
        least = 1 if name in ("1f1b", "interleaved") else 0.6  # behind the last I some other W may be left
        assert (lower_bound(ready, stages) >= least * events * (1 - 1e-12)).all(), name


def test_forward_only_is_bounded_by_the_way_and_the_work() -> None:
    found = schedule("gpipe", 3, 5, forward_only=True)
    ready = compile_schedule(found)
    stages = equal_stages(3, 10, 3)
    events = sweep(ready, stages).makespan
    assert events == pytest.approx(7 * stages.forward[:, 0], rel=1e-12)
    assert lower_bound(ready, stages) == pytest.approx(events, rel=1e-12)
    assert closed_step(ready, stages) == pytest.approx(events, rel=1e-12)


def test_what_comes_once_is_added() -> None:
    ready = compile_schedule("zb-h1", 4, 8)
    bare = equal_stages(1, 5, 4)
    more = StageSeconds(
        bare.forward, bare.backward_input, bare.backward_weight, bare.send, before=np.full(5, 2.0), after=np.ones(5)
    )
    for of in (closed_step, lower_bound, lambda c, s: sweep(c, s).makespan):
        assert of(ready, more) == pytest.approx(of(ready, bare) + 3, rel=1e-12)


def test_lines_that_are_read_off() -> None:
    assert equal_lines(compile_schedule("1f1b", 4, 8)).tolist() == [[11, 11, 11]]
    assert sorted(found_lines(compile_schedule("zb-h2", 4, 8)).tolist()) == [[5, 11, 8], [11, 8, 8], [11, 11, 2]]
    assert found_lines(compile_schedule(Schedule.parse("schedule, 2 microbatches\n0: 0F0 0F1"))).tolist() == [[2, 0, 0]]


def test_other_chunks_are_refused() -> None:
    ready, stages = compile_schedule("1f1b", 4, 8), StageSeconds.equal(3, 1.0, 1.0, 1.0)
    for of in (closed_step, lower_bound):
        with pytest.raises(ShardplanError, match=f"{of.__name__} of 1f1b: the stages are 3 chunks; legal"):
            of(ready, stages)
