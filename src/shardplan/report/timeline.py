"""Timelines as tables for the terminal: one timeline step by step, and a predicted beside a measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes, format_rate, format_seconds
from shardplan.launches.launch import plural
from shardplan.report.text import clip_text, table
from shardplan.simulation.interval import Interval
from shardplan.simulation.timeline import Timeline, TimelineError

WIDEST = 60  # characters of an op's text
MOST_RATIO = 100  # a prediction further off than that is for other links, and no ratio is printed


@dataclass(frozen=True, slots=True)
class _StepRow:
    """One step: its seconds on every device that took part (all its intervals there), and the most bytes received."""

    step: int | None
    name: str
    kind: str
    seconds: tuple[float, ...]
    received: int

    @property
    def middle(self) -> float:
        return median(self.seconds)


def timeline_object(timeline: Timeline) -> dict[str, Any]:
    """Return what a timeline comes to as an object for JSON, and its critical path."""
    names = ("seconds", "peak_bytes", "breakdown", "bubble_seconds", "idle_seconds")
    path = [{"device": i.device, "step": i.step, "name": i.name, "seconds": i.seconds} for i in timeline.critical_path]
    return {name: getattr(timeline, name) for name in names} | {"critical_path": path}


def timeline_text(timeline: Timeline) -> str:
    """Return a timeline as a table: per step its seconds over the devices, and the bytes at the worst device.

    Below stand the makespan, what the critical path consists of, idle time and memory. Intervals without a step are
    gathered by kind.

    >>> from shardplan.simulation.interval import Interval
    >>> print(timeline_text(Timeline((Interval(0, "comm", 0.0, 2e-6, "all_gather(%0)", "all_gather", 0, 4096),))))
    predicted
    step  op              devices   min  median   max  received
       0  all_gather(%0)        1  2 us    2 us  2 us    4.1 kB
    makespan       2 us
    critical path  all_gather 100 %
    idle           0 s, bubbles 0 s, each at its worst device
    """
    rows = [["step", "op", "devices", "min", "median", "max", "received"]]
    for row in _rows(timeline):
        times = (min(row.seconds), row.middle, max(row.seconds))
        rows.append(
            [
                _number(row),
                clip_text(row.name, WIDEST),
                str(len(row.seconds)),
                *map(format_seconds, times),
                format_bytes(row.received),
            ]
        )
    total = timeline.seconds
    shares = [f"{kind} {100 * s / total:.3g} %" for kind, s in timeline.breakdown.items() if total]
    lines = [
        f"{timeline.source}{': ' if timeline.title else ''}{timeline.title}",
        *table(rows, left=(1,)),
        f"makespan       {format_seconds(total)}",
        f"critical path  {', '.join(shares) or 'nothing takes time'}",
        f"idle           {format_seconds(timeline.idle_seconds)}, bubbles {format_seconds(timeline.bubble_seconds)}, "
        "each at its worst device",
    ]
    if timeline.memory:
        lines.append(f"memory         {format_bytes(timeline.peak_bytes)} at the worst device")
    return "\n".join(lines)


def comparison_text(predicted: Timeline, measured: Timeline) -> str:
    """Return two timelines of one program as a table: per step the seconds of both, and their ratio.

    Predicted seconds are medians over devices; measured ones smallest, median and largest, with the waiting for peers
    inside an op. The ratio is measured over predicted, of medians and, on the last line, of makespans. A step that only
    one side has, and a ratio to a prediction of 0, is a dash; so is one beyond `MOST_RATIO`, and where the makespans'
    is, a last line says how to predict for the links that there are. Raises `TimelineError` where a step is another op
    in one than in the other.

    >>> from shardplan.simulation.interval import Interval
    >>> both = [Timeline((Interval(0, "comm", 0.0, s, "permute(%0)", "permute", 0),)) for s in (2e-6, 3e-6)]
    >>> print(comparison_text(*both))
    step  op           predicted  measured min  median   max  ratio
       0  permute(%0)       2 us          3 us    3 us  3 us   1.50
          makespan          2 us                  3 us         1.50
    """
    sides = [{row.step if row.step is not None else row.kind: row for row in _rows(t)} for t in (predicted, measured)]
    order = {row: None for side in sides for row in side}
    numbered = sorted(k for k in order if isinstance(k, int))
    rows = [["step", "op", "predicted", "measured min", "median", "max", "ratio"]]
    for key in [*numbered, *(k for k in order if isinstance(k, str))]:
        p, m = (side.get(key) for side in sides)
        if p and m and p.kind != m.kind:
            raise TimelineError(
                f"step {key} is {p.name} in the predicted timeline and {m.name} in the measured one; "
                "compare timelines of one program"
            )
        known = p or sides[1][key]
        times = (min(m.seconds), m.middle, max(m.seconds)) if m else ()
        rows.append(
            [
                _number(known),
                clip_text(known.name, WIDEST),
                format_seconds(p.middle) if p else "-",
                *(map(format_seconds, times) if times else ("-", "-", "-")),
                _ratio(p.middle, m.middle) if p and m else "-",
            ]
        )
    ends = (predicted.seconds, measured.seconds)
    rows.append(["", "makespan", format_seconds(ends[0]), "", format_seconds(ends[1]), "", _ratio(*ends)])
    lines = table(rows, left=(1,))
    if ends[0] > 0 and not _is_near(*ends):
        lines.append("these are not the links that are predicted for: without --topology they are measured first")
    return "\n".join(lines)


def links_text(topology: Topology) -> str:
    """Return in a line what a prediction was made for."""
    outer = topology.levels[0]
    rates = f"{format_rate(outer.bandwidth)}, {format_seconds(outer.latency)}"
    return f"{topology.name or 'a topology'}: {topology.describe()}, {rates} between {plural(outer.name)}"


def _is_near(predicted: float, measured: float) -> bool:
    return predicted <= measured * MOST_RATIO and measured <= predicted * MOST_RATIO


def _rows(timeline: Timeline) -> list[_StepRow]:
    """The steps in order, then what has no step, by kind."""
    found: dict[int | str, list[Interval]] = {}
    for interval in timeline.intervals:
        found.setdefault(interval.kind if interval.step is None else interval.step, []).append(interval)
    numbered = sorted(k for k in found if isinstance(k, int))
    return [_row(found[k]) for k in [*numbered, *(k for k in found if isinstance(k, str))]]


def _row(intervals: Sequence[Interval]) -> _StepRow:
    seconds: dict[int, float] = {}
    received: dict[int, int] = {}
    for interval in intervals:
        seconds[interval.device] = seconds.get(interval.device, 0.0) + interval.seconds
        received[interval.device] = received.get(interval.device, 0) + interval.received_bytes
    first = intervals[0]
    name = first.kind if first.step is None else first.name
    return _StepRow(first.step, name, first.kind, tuple(seconds.values()), max(received.values()))


def _number(row: _StepRow) -> str:
    return "-" if row.step is None else str(row.step)


def _ratio(predicted: float, measured: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 and _is_near(predicted, measured) else "-"
