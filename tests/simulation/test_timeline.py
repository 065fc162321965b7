"""`Timeline`: its invariants and their messages, and its properties against counts tick by tick."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.timeline import Timeline, TimelineError

US = 1e-6


def I(device: int, start: float, end: float, causes: tuple[int, ...] = (), **more: object) -> Interval:  # noqa: E743
    """An interval in microseconds."""
    fields: dict[str, object] = {"stream": "comm", "name": "op(%0)", "kind": "op", "causes": causes, **more}
    return Interval(device=device, start=start * US, end=end * US, **fields)  # type: ignore[arg-type]


def grid(interval: Interval) -> tuple[int, int]:
    return round(interval.start), round(interval.end)


@st.composite
def simulated(draw: st.DrawFn) -> Timeline:
    """Predicted timelines: every interval follows the last on its stream, and others at random, without delay."""
    made: list[Interval] = []
    for _ in range(draw(st.integers(0, 14))):
        device, stream = draw(st.integers(0, 2)), draw(st.sampled_from(("comm", "compute")))
        own = [k for k, i in enumerate(made) if (i.device, i.stream) == (device, stream)]
        others = draw(st.sets(st.integers(0, len(made) - 1), max_size=2)) if made else set()
        causes = tuple(sorted({*own[-1:], *others}))
        start = max((made[c].end for c in causes), default=0.0)
        seconds = draw(st.integers(0, 5))
        kind = draw(st.sampled_from(("all_gather", "permute", "einsum")))
        step = draw(st.none() | st.integers(0, 3))
        made.append(Interval(device, stream, start, start + seconds, f"{kind}(%0)", kind, step, seconds, causes))
    return Timeline(tuple(made), title="drawn")


@st.composite
def stepped(draw: st.DrawFn) -> Timeline:
    """Measured timelines without causes: devices run the same steps in order, with gaps, each at its own pace."""
    steps = draw(st.integers(0, 5))
    made: list[Interval] = []
    for device in range(draw(st.integers(1, 4))):
        at = 0
        for step in range(steps):
            start = at + draw(st.integers(0, 4))
            at = start + draw(st.integers(0, 6))
            made.append(Interval(device, "comm", float(start), float(at), f"op{step}()", f"op{step % 2}", step))
    return Timeline(tuple(made), source="measured")


@given(simulated())
def test_a_simulated_makespan_is_its_critical_path(line: Timeline) -> None:
    chain = line.critical_path
    assert line.seconds == max((i.end for i in line.intervals), default=0.0) == sum(i.seconds for i in chain)
    assert all(i in line.intervals for i in chain)
    assert [i.start for i in chain] == [0.0, *(i.end for i in chain)][: len(chain)]
    for before, after in pairwise(chain):
        assert before in [line.intervals[c] for c in after.causes]
    assert not chain or chain[-1].end == line.seconds


@given(stepped())
def test_a_measured_critical_path_is_the_last_finisher_of_each_step(line: Timeline) -> None:
    chain = line.critical_path
    steps = sorted({i.step for i in line.intervals if i.step is not None})
    assert [i.step for i in chain] == steps
    assert [i.start for i in chain] == [0.0, *(i.end for i in chain)][: len(chain)]
    for link in chain:
        assert link.end == max(i.end for i in line.intervals if i.step == link.step)
        assert any(replace(i, start=link.start) == link for i in line.intervals)
    assert math.isclose(sum(i.seconds for i in chain), line.seconds)


@given(st.one_of(simulated(), stepped()))
def test_the_breakdown_sums_to_the_makespan(line: Timeline) -> None:
    found = line.breakdown
    assert math.isclose(sum(found.values()), line.seconds, abs_tol=1e-12)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for kind, seconds in found.items():
        assert math.isclose(seconds, sum(i.seconds for i in line.critical_path if i.kind == kind))


@given(st.one_of(simulated(), stepped()))
def test_bubble_and_idle_seconds_are_counted_tick_by_tick(line: Timeline) -> None:
    bubbles, idles = [0], [0]
    for device in line.devices:
        spans = [grid(i) for i in line.intervals if i.device == device]
        busy = {tick for start, end in spans for tick in range(start, end)}
        bubbles.append(max(e for _, e in spans) - min(s for s, _ in spans) - len(busy))
        idles.append(round(line.seconds) - len(busy))
    assert line.bubble_seconds == max(bubbles)
    assert line.idle_seconds == max(idles)


def test_a_device_that_never_runs_is_idle_and_has_no_bubble() -> None:
    line = Timeline((I(0, 0, 4),), (MemoryCurve(7, ((0.0, 10),)),))
    assert line.devices == (0, 7)
    assert (line.idle_seconds, line.bubble_seconds) == (4 * US, 0.0)


def test_work_on_two_streams_counts_once() -> None:
    line = Timeline((I(0, 0, 4), I(0, 0, 3, stream="compute"), I(0, 6, 7)), source="measured")
    assert math.isclose(line.idle_seconds, 2 * US) and math.isclose(line.bubble_seconds, 2 * US)


def test_waiting_counts_for_what_was_waited_for() -> None:
    slow = I(0, 1, 5, step=0, kind="gather")
    fast, late = I(1, 0, 2, step=0, kind="gather"), I(1, 2, 9, step=1, kind="cut")
    line = Timeline((slow, fast, late), source="measured")
    assert line.critical_path == (replace(slow, start=0.0), replace(late, start=5 * US))
    assert line.breakdown == pytest.approx({"gather": 5 * US, "cut": 4 * US})
    caused = replace(late, causes=(1,))
    assert Timeline((slow, fast, caused), source="measured").critical_path == (fast, caused)


def test_the_last_to_finish_a_step_need_not_be_the_last_to_start() -> None:
    long, late = I(0, 0, 9, step=0), I(1, 1, 4, step=0)
    assert Timeline((long, late), source="measured").critical_path == (long,)


def test_steps_that_finish_out_of_order_are_on_the_path_as_they_finish() -> None:
    long, short = I(0, 0, 9, step=0), I(1, 0, 4, step=1)
    line = Timeline((long, short), source="measured")
    assert line.critical_path == (short, replace(long, start=4 * US))


def test_a_cause_that_ended_last_is_on_the_critical_path() -> None:
    short, long = I(0, 0, 1), I(1, 0, 3)
    after = I(0, 3, 4, (0, 1))
    assert Timeline((short, long, after)).critical_path == (long, after)


def test_memory_and_peak() -> None:
    curves = (MemoryCurve(0, ((0.0, 5), (1.0, 9), (1.0, 3))), MemoryCurve(1, ((0.0, 7),)))
    assert Timeline((), curves).peak_bytes == 9
    assert Timeline(()).peak_bytes == 0


def test_nothing_at_all() -> None:
    line = Timeline(())
    assert (line.seconds, line.critical_path, line.breakdown, line.devices) == (0.0, (), {}, ())
    assert (line.idle_seconds, line.bubble_seconds) == (0.0, 0.0)


def test_a_rounding_error_is_no_overlap() -> None:
    Timeline((I(0, 0, 3), I(0, 3 * (1 - 1e-15), 4, (0,))))
    with pytest.raises(TimelineError):
        Timeline((I(0, 0, 3), I(0, 3 * (1 - 1e-9), 4)), source="measured")


def test_an_instant_may_touch_what_starts_a_rounding_error_before_it() -> None:
    instant, later = I(0, 3, 3), I(0, 3 * (1 - 1e-15), 4)
    assert later.start < instant.start
    Timeline((instant, later), source="measured")


def test_other_streams_and_devices_may_overlap() -> None:
    Timeline((I(0, 0, 3), I(0, 0, 3, stream="compute"), I(1, 0, 3)))


def test_timelines_are_values() -> None:
    line = Timeline([I(0, 0, 3)])  # type: ignore[arg-type]
    assert line == Timeline((I(0, 0, 3),)) and hash(line) == hash(Timeline((I(0, 0, 3),)))
    assert line.seconds == 3 * US
    with pytest.raises(AttributeError):
        line.title = "other"  # type: ignore[misc]
    assert repr(replace(line, title="x")) == "<Timeline predicted 'x': 1 intervals on 1 devices, 3 us>"


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        ([I(0, 2, 1)],
         "interval 0 (op(%0) on device 0) starts at 2e-06 s and ends at 1e-06 s; "
         "an interval starts at 0 or later and ends no earlier than it starts"),
        ([I(0, -1, 1)],
         "interval 0 (op(%0) on device 0) starts at -1e-06 s and ends at 1e-06 s; "
         "an interval starts at 0 or later and ends no earlier than it starts"),
        ([I(3, 0, math.nan)],
         "interval 0 (op(%0) on device 3) starts at 0 s and ends at nan s; "
         "an interval starts at 0 or later and ends no earlier than it starts"),
        ([I(1, 0, math.inf)],
         "interval 0 (op(%0) on device 1) starts at 0 s and ends at inf s; "
         "an interval starts at 0 or later and ends no earlier than it starts"),
        ([I(0, 0, 1), I(4, 0, 2), I(4, 1, 3, (0,))],
         "interval 1 (op(%0) on device 4) ends at 2e-06 s, after interval 2 (op(%0) on device 4) starts at 1e-06 s; "
         "the intervals of one stream of a device (comm) do not overlap"),
        ([I(0, 0, 1, (0,))],
         "interval 0 (op(%0) on device 0) has the cause 0; the first interval has no causes"),
        ([I(0, 0, 1), I(1, 1, 2, (2,)), I(2, 0, 1)],
         "interval 1 (op(%0) on device 1) has the cause 2; causes are intervals before it, 0 to 0"),
        ([I(0, 0, 1), I(1, 1, 2, (-1,))],
         "interval 1 (op(%0) on device 1) has the cause -1; causes are intervals before it, 0 to 0"),
        ([I(0, 0, 2), I(1, 1, 2, (0,))],
         "interval 1 (op(%0) on device 1) starts at 1e-06 s, before its cause interval 0 (op(%0) on device 0) "
         "ends at 2e-06 s"),
        ([I(0, 0, 2), I(1, 3, 4, (0,))],
         "interval 1 (op(%0) on device 1) starts at 3e-06 s, but the last of its causes ends at 2e-06 s; "
         "a predicted interval starts at 0 or when a cause ends"),
        ([I(0, 0, 2), I(1, 2, 4)],
         "interval 1 (op(%0) on device 1) starts at 2e-06 s, but it has no cause; "
         "a predicted interval starts at 0 or when a cause ends"),
    ],
)  # fmt: skip
def test_what_a_wrong_interval_says(intervals: list[Interval], message: str) -> None:
    with pytest.raises(TimelineError) as error:
        Timeline(tuple(intervals))
    assert str(error.value) == message
    assert isinstance(error.value, sp.ShardplanError)


def test_a_measured_interval_may_wait() -> None:
    Timeline((I(0, 1, 2), I(1, 3, 4, (0,))), source="measured")


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ([MemoryCurve(0, ())], "the memory curve of device 0 has no samples; leave it out"),
        ([MemoryCurve(2, ((0.0, 1),))] * 2, "the memory curve of device 2 is given twice; a device has one"),
        ([MemoryCurve(0, ((1.0, 1), (0.5, 2)))],
         "the memory curve of device 0 has a sample at 0.5 s after 1 s; times ascend from 0"),
        ([MemoryCurve(0, ((-1.0, 1),))],
         "the memory curve of device 0 has a sample at -1 s after 0 s; times ascend from 0"),
        ([MemoryCurve(0, ((0.0, -4),))], "the memory curve of device 0 has -4 bytes at 0 s; bytes are 0 or more"),
    ],
)  # fmt: skip
def test_what_a_wrong_memory_curve_says(curves: list[MemoryCurve], message: str) -> None:
    with pytest.raises(TimelineError) as error:
        Timeline((), tuple(curves))
    assert str(error.value) == message


def test_what_a_wrong_source_says() -> None:
    with pytest.raises(TimelineError) as error:
        Timeline((), source="guessed")
    assert str(error.value) == "a timeline of source 'guessed'; legal are predicted, measured"


@settings(max_examples=60)
@given(simulated(), st.data())
def test_shifting_an_interval_of_a_simulation_is_noticed(line: Timeline, data: st.DataObject) -> None:
    """The check of contiguity can fail: no interval may start later than its causes end."""
    if not line.intervals:
        return
    k = data.draw(st.integers(0, len(line.intervals) - 1))
    moved = replace(line.intervals[k], start=line.intervals[k].start + 1, end=line.intervals[k].end + 1)
    with pytest.raises(TimelineError):
        Timeline((*line.intervals[:k], moved, *line.intervals[k + 1 :]))
