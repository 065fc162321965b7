"""`Timeline`: what every device does when, and the bytes it holds meanwhile; predicted or measured, same type.

Time runs from 0, the start of the run, in seconds. Invariants, checked on construction:

- an interval ends no earlier than it starts; those of one (device, stream) do not overlap;
- a cause of an interval stands before it in the tuple, and ends no later than the interval starts;
- predicted: an interval starts at 0 or when the last of its causes ends, so that the critical path has no gaps;
- a memory curve is a step function: a sample holds until the next one.

Times are compared with a tolerance (`interval.TOLERANCE`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardplan.errors import ShardplanError
from shardplan.hardware.units import format_seconds
from shardplan.notebook import notebook_html
from shardplan.simulation.interval import TOLERANCE, Interval, MemoryCurve, seconds_by_kind
from shardplan.simulation.trace import read_traces, save_traces

SOURCES = ("predicted", "measured")


class TimelineError(ShardplanError):
    """A timeline breaks an invariant."""


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """Intervals per device and stream, with the memory curve.

    Raises `TimelineError` where an invariant of the module does not hold.

    Source: arXiv 2111.05426, simulator.

    >>> gather = Interval(0, "comm", 0.0, 2e-6, "all_gather(%0)", "all_gather", step=0)
    >>> cut = Interval(0, "compute", 2e-6, 3e-6, "slice(%1)", "slice", step=1, causes=(0,))
    >>> Timeline((gather, cut)).critical_path == (gather, cut)
    True
    """

    intervals: tuple[Interval, ...]  # in any order in which causes come before what they cause
    memory: tuple[MemoryCurve, ...] = ()  # at most one curve a device; () where memory is not known
    source: str = "predicted"  # or `measured`
    title: str = ""  # for people: where it comes from
    seconds: float = field(init=False, compare=False)  # the makespan: the end of the last interval

    _repr_html_ = notebook_html

    def __post_init__(self) -> None:
        """Check the invariants."""
        if self.source not in SOURCES:
            raise TimelineError(f"a timeline of source {self.source!r}; legal are {', '.join(SOURCES)}")
        object.__setattr__(self, "intervals", tuple(self.intervals))
        object.__setattr__(self, "memory", tuple(self.memory))
        object.__setattr__(self, "seconds", _checked(self.intervals, self.source == "predicted"))
        _check_memory(self.memory)

    @property
    def devices(self) -> tuple[int, ...]:
        """The device ids that have an interval or a memory curve, ascending."""
        return tuple(sorted({i.device for i in self.intervals} | {c.device for c in self.memory}))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any device holds at any time; 0 where memory is not known."""
        return max((nbytes for curve in self.memory for _, nbytes in curve.samples), default=0)

    @property
    def critical_path(self) -> tuple[Interval, ...]:
        """A contiguous chain of intervals from 0 to the makespan: what to shorten to shorten the run.

        From the interval that ends last it goes back over the cause that ended last. A measured timeline without
        causes is taken as steps with a barrier between them: one link a step, its last finisher, in the order in which
        the steps finish (an interval without a step is one of its own). Where a measured link does not start when the
        one before it ends, its start is moved there: a link then says what its step added to the run, waiting included.
        """
        if self.source == "measured" and not any(i.causes for i in self.intervals):
            links = _last_finishers(self.intervals)
        else:
            links = _causes_of_the_end(self.intervals)
        return _contiguous(links)

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds per kind of interval on the critical path, largest first; they sum to the makespan.

        The same for predicted and measured, so that the two can be compared kind by kind. Work that is hidden behind
        other work is on no critical path and does not count; waiting in a measured run counts for what was waited for.
        """
        return seconds_by_kind(self.critical_path)

    @property
    def bubble_seconds(self) -> float:
        """The largest over devices: from the device's first start to its last end, minus the time it is busy.

        A device is busy while any of its streams is.
        """
        return max((o.last - o.first - o.busy for o in _occupied(self.intervals).values()), default=0.0)

    @property
    def idle_seconds(self) -> float:
        """The largest over devices: the makespan minus the time the device is busy."""
        busy = {device: o.busy for device, o in _occupied(self.intervals).items()}
        return max((self.seconds - busy.get(device, 0.0) for device in self.devices), default=0.0)

    def save(self, path: str | Path) -> None:
        """Write a trace file, atomically; Perfetto and Chrome open it, and `load_timelines` reads it."""
        save_traces(path, [self])

    def __repr__(self) -> str:
        """Say what it is, not all that is in it."""
        about = f" {self.title!r}" if self.title else ""
        return (
            f"<Timeline {self.source}{about}: {len(self.intervals)} intervals on {len(self.devices)} devices, "
            f"{format_seconds(self.seconds)}>"
        )


def load_timelines(path: str | Path) -> tuple[Timeline, ...]:
    """Return the timelines of a trace file, in the order in which they were written; times exact to a nanosecond.

    Raises `ParseError`, naming the file and what is wrong, where it cannot be read or is no trace of timelines.

    >>> import tempfile
    >>> line = Timeline((Interval(0, "comm", 0.0, 2e-6, "all_gather(%0)", "all_gather"),), source="measured")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     line.save(f"{folder}/trace.json")
    ...     load_timelines(f"{folder}/trace.json") == (line,)
    True
    """
    return read_traces(path, Timeline)


def _last_finishers(intervals: tuple[Interval, ...]) -> list[Interval]:
    """The interval of each step that ends last, of equals the first; one without a step is a step of its own."""
    last: dict[tuple[bool, int], Interval] = {}
    for number, interval in enumerate(intervals):
        key = (True, number) if interval.step is None else (False, interval.step)
        if key not in last or interval.end > last[key].end:
            last[key] = interval
    return sorted(last.values(), key=lambda i: i.end)


def _causes_of_the_end(intervals: tuple[Interval, ...]) -> list[Interval]:
    if not intervals:
        return []
    links = [max(intervals, key=lambda i: i.end)]
    while links[-1].causes and links[-1].start > 0:
        links.append(max((intervals[c] for c in links[-1].causes), key=lambda i: i.end))
    return links[::-1]


def _contiguous(links: list[Interval]) -> tuple[Interval, ...]:
    """The links, each starting where the one before it ends."""
    ends = [0.0, *(i.end for i in links)]
    return tuple(i if i.start == at else replace(i, start=min(at, i.end)) for at, i in zip(ends, links, strict=False))


def _column(intervals: tuple[Interval, ...], name: str) -> np.ndarray:
    return np.fromiter((getattr(i, name) for i in intervals), np.float64, len(intervals))


class _Occupied(NamedTuple):
    """When a device starts and ends, and how long any of its streams is busy; seconds."""

    first: float
    last: float
    busy: float


def _occupied(intervals: tuple[Interval, ...]) -> dict[int, _Occupied]:
    """By device what its intervals occupy."""
    start, end = _column(intervals, "start"), _column(intervals, "end")
    device = np.fromiter((i.device for i in intervals), np.int64, len(intervals))
    order = np.lexsort((start, device))
    start, end, device = start[order], end[order], device[order]
    edges = [*np.flatnonzero(np.diff(device, prepend=device[:1] - 1)).tolist(), len(device)]
    found: dict[int, _Occupied] = {}
    for low, high in pairwise(edges):
        # By start: what an interval adds is what of it lies beyond the latest end so far.
        reached = np.maximum.accumulate(end[low:high])
        fresh = reached.copy()
        fresh[0] -= start[low]
        fresh[1:] -= np.maximum(start[low + 1 : high], reached[:-1])
        found[int(device[low])] = _Occupied(float(start[low]), float(reached[-1]), float(fresh.sum()))
    return found


def _checked(intervals: tuple[Interval, ...], predicted: bool) -> float:
    """Raise `TimelineError` unless the intervals satisfy the invariants of the module; return the makespan."""
    start, end = _column(intervals, "start"), _column(intervals, "end")
    for k in _first(~((start >= 0) & (end >= start) & np.isfinite(end))):
        raise TimelineError(
            f"{_named(intervals, k)} starts at {_at(start[k])} and ends at {_at(end[k])}; "
            "an interval starts at 0 or later and ends no earlier than it starts"
        )
    makespan = float(end.max(initial=0.0))
    slack = TOLERANCE * makespan
    codes: dict[tuple[int, str], int] = {}
    row = np.array([codes.setdefault((i.device, i.stream), len(codes)) for i in intervals], dtype=np.int64)
    # By their middles: of two that touch up to a rounding error, the one without duration may start later.
    order = np.lexsort((start + end, row))
    one, next_one = order[:-1], order[1:]
    for k in _first((row[one] == row[next_one]) & (start[next_one] < end[one] - slack)):
        a, b = int(one[k]), int(next_one[k])
        raise TimelineError(
            f"{_named(intervals, a)} ends at {_at(end[a])}, after {_named(intervals, b)} starts at {_at(start[b])}; "
            f"the intervals of one stream of a device ({intervals[a].stream}) do not overlap"
        )
    _check_causes(intervals, start, end, slack, predicted)
    return makespan


def _check_causes(
    intervals: tuple[Interval, ...], start: np.ndarray, end: np.ndarray, slack: float, predicted: bool
) -> None:
    owner = np.repeat(np.arange(len(intervals)), np.array([len(i.causes) for i in intervals], dtype=np.int64))
    cause = np.fromiter(chain.from_iterable(i.causes for i in intervals), np.int64, len(owner))
    for k in _first((cause < 0) | (cause >= owner)):
        a = int(owner[k])
        legal = f"causes are intervals before it, 0 to {a - 1}" if a else "the first interval has no causes"
        raise TimelineError(f"{_named(intervals, a)} has the cause {cause[k]}; {legal}")
    for k in _first(end[cause] > start[owner] + slack):
        a, c = int(owner[k]), int(cause[k])
        raise TimelineError(
            f"{_named(intervals, a)} starts at {_at(start[a])}, before its cause {_named(intervals, c)} "
            f"ends at {_at(end[c])}"
        )
    if predicted:
        ready = np.zeros(len(intervals))
        np.maximum.at(ready, owner, end[cause])
        for k in _first(start > ready + slack):
            why = f"the last of its causes ends at {_at(ready[k])}" if intervals[k].causes else "it has no cause"
            raise TimelineError(
                f"{_named(intervals, k)} starts at {_at(start[k])}, but {why}; "
                "a predicted interval starts at 0 or when a cause ends"
            )


def _check_memory(memory: tuple[MemoryCurve, ...]) -> None:
    seen: set[int] = set()
    for curve in memory:
        what = f"the memory curve of device {curve.device}"
        if curve.device in seen:
            raise TimelineError(f"{what} is given twice; a device has one")
        seen.add(curve.device)
        if not curve.samples:
            raise TimelineError(f"{what} has no samples; leave it out")
        before = 0.0
        for at, nbytes in curve.samples:
            if not (math.isfinite(at) and at >= before):
                raise TimelineError(f"{what} has a sample at {_at(at)} after {_at(before)}; times ascend from 0")
            if nbytes < 0:
                raise TimelineError(f"{what} has {nbytes} bytes at {_at(at)}; bytes are 0 or more")
            before = at


def _first(wrong: np.ndarray) -> list[int]:
    """The first index at which it is true, if there is one."""
    return np.flatnonzero(wrong)[:1].tolist()


def _named(intervals: tuple[Interval, ...], k: int) -> str:
    return f"interval {k} ({intervals[k].name} on device {intervals[k].device})"


def _at(seconds: float) -> str:
    return f"{seconds:.12g} s"
