"""Timelines as tables: expected texts next to their inputs."""

from dataclasses import replace

import pytest

from shardplan.report.timeline import comparison_text, timeline_text
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.timeline import Timeline, TimelineError

US = 1e-6
GATHER = "all_gather(%0; dim=0, axes=(x))"
PREDICTED = Timeline(
    (
        Interval(0, "comm", 0.0, 10 * US, GATHER, "all_gather", 0, 3000),
        Interval(1, "comm", 0.0, 10 * US, GATHER, "all_gather", 0, 4000),
        Interval(0, "compute", 10 * US, 10 * US, "slice(%1; dim=1, axes=(y))", "slice", 1, 0, (0,)),
        Interval(1, "comm", 10 * US, 15 * US, "permute(%2)", "permute", 2, 100, (1,)),
    ),
    (MemoryCurve(0, ((0.0, 12_000),)),),
    title="closed form, dgx-a100",
)
MEASURED = Timeline(
    (
        Interval(0, "comm", 1 * US, 12 * US, GATHER, "all_gather", 0, 3000),
        Interval(1, "comm", 0.0, 13 * US, GATHER, "all_gather", 0, 4000),
        Interval(2, "comm", 0.0, 16 * US, GATHER, "all_gather", 0, 0),
        Interval(1, "comm", 14 * US, 17 * US, "permute(%2)", "permute", 2, 60),
        Interval(1, "comm", 17 * US, 20 * US, "permute(%2)", "permute", 2, 40),
        Interval(1, "copy", 0.0, 2 * US, "warm up", "host"),
    ),
    source="measured",
)


def test_a_predicted_timeline() -> None:
    assert (
        timeline_text(PREDICTED)
        == """\
predicted: closed form, dgx-a100
step  op                               devices    min  median    max  received
   0  all_gather(%0; dim=0, axes=(x))        2  10 us   10 us  10 us      4 kB
   1  slice(%1; dim=1, axes=(y))             1    0 s     0 s    0 s       0 B
   2  permute(%2)                            1   5 us    5 us   5 us     100 B
makespan       15 us
critical path  all_gather 66.7 %, permute 33.3 %
idle           5 us, bubbles 0 s, each at its worst device
memory         12 kB at the worst device"""
    )


def test_a_measured_timeline() -> None:
    """Intervals of one step on one device are added; those without a step come last, by kind."""
    assert (
        timeline_text(MEASURED)
        == """\
measured
step  op                               devices    min  median    max  received
   0  all_gather(%0; dim=0, axes=(x))        3  11 us   13 us  16 us      4 kB
   2  permute(%2)                            1   6 us    6 us   6 us     100 B
   -  host                                   1   2 us    2 us   2 us       0 B
makespan       20 us
critical path  all_gather 70 %, permute 20 %, host 10 %
idle           9 us, bubbles 1 us, each at its worst device"""
    )


def test_side_by_side() -> None:
    assert (
        comparison_text(PREDICTED, MEASURED)
        == """\
step  op                               predicted  measured min  median    max  ratio
   0  all_gather(%0; dim=0, axes=(x))      10 us         11 us   13 us  16 us   1.30
   1  slice(%1; dim=1, axes=(y))             0 s             -       -      -      -
   2  permute(%2)                           5 us          6 us    6 us   6 us   1.20
   -  host                                     -          2 us    2 us   2 us      -
      makespan                             15 us                 20 us          1.33"""
    )


@pytest.mark.parametrize(("times", "shown"), [(99, "99.00"), (101, "-"), (1 / 99, "0.01"), (1 / 101, "-")])
def test_no_ratio_to_other_links(times: float, shown: str) -> None:
    """Where a run takes more than a hundred times its prediction, or a hundredth, it is one for other links."""
    one, other = (Timeline((Interval(0, "comm", 0.0, s, "permute(%0)", "permute", 0),)) for s in (1e-3, 1e-3 * times))
    lines = comparison_text(one, other).splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == [shown, shown]
    note = "these are not the links that are predicted for: without --topology they are measured first"
    assert lines[3:] == ([note] if shown == "-" else [])


def test_a_timeline_equals_itself() -> None:
    for line in comparison_text(PREDICTED, PREDICTED).splitlines()[1:]:
        assert line.split()[-1] in ("1.00", "-")


def test_nothing_and_long_names() -> None:
    assert timeline_text(Timeline(())).splitlines()[2:] == [
        "makespan       0 s",
        "critical path  nothing takes time",
        "idle           0 s, bubbles 0 s, each at its worst device",
    ]
    long = Timeline((Interval(0, "comm", 0.0, 1.0, "x" * 61, "op", 0), Interval(0, "comm", 1.0, 1.0, "y" * 60, "op", 1,
                                                                                causes=(0,))))  # fmt: skip
    assert [line.split()[1] for line in timeline_text(long).splitlines()[2:4]] == ["x" * 57 + "...", "y" * 60]


def test_timelines_of_two_programs() -> None:
    other = replace(MEASURED, intervals=(replace(MEASURED.intervals[0], name="permute(%0)", kind="permute"),))
    with pytest.raises(TimelineError) as error:
        comparison_text(PREDICTED, other)
    assert str(error.value) == (
        "step 0 is all_gather(%0; dim=0, axes=(x)) in the predicted timeline and permute(%0) in the measured one; "
        "compare timelines of one program"
    )
