"""Timelines as a trace file that Perfetto and chrome://tracing open, and back.

The file is JSON in the Trace Event Format: a process is a device, a thread one of its streams. An interval is a
complete event ("X"), the memory curve a counter ("C"), a cause on another device or stream a flow arrow ("s" in the
cause, "f" in what it let start); metadata events ("M") name and order the rows. So messages have arrows from device to
device, and a collective has one from what let it start, and one to what it let go on; what a host issues has none.
Several timelines in one file share the origin of time, and the rows of a device are neighbours: timeline k of n has the
process ids `device * n + k`.

Times are microseconds, rounded to whole nanoseconds, which is what Perfetto keeps: as both ends of an interval are
rounded, and not its duration, intervals that touch still touch. All else is read back exactly, from "args" and
"otherData".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from shardplan.core.decoding import decode_json, read_bytes
from shardplan.errors import ParseError, ShardplanError, excerpt, line
from shardplan.plans.plan_file import write_atomic
from shardplan.simulation.interval import TOLERANCE, Interval, MemoryCurve

FORMAT = "shardplan timelines 1"
HOST = "host"  # the stream of what a host issues
NANOSECONDS = 1e9  # in a second
TICKS = 1000  # nanoseconds in a microsecond, the unit of the file
Event = dict[str, Any]
T = TypeVar("T")


class Traced(Protocol):
    """What a trace says of a timeline."""

    @property
    def intervals(self) -> tuple[Interval, ...]: ...  # noqa: D102
    @property
    def memory(self) -> tuple[MemoryCurve, ...]: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def devices(self) -> tuple[int, ...]: ...  # noqa: D102


def save_traces(path: str | Path, timelines: Iterable[Traced]) -> None:
    """Write timelines into one trace file (JSON), atomically, so that they lie over each other when it is opened.

    Source: Trace Event Format (Google), read by Perfetto's JSON importer.
    """
    given = tuple(timelines)
    about = {"format": FORMAT, "timelines": [{"source": t.source, "title": t.title} for t in given]}
    lines = b",\n".join(msgspec.json.encode(event) for event in events(given))
    head = b'{"displayTimeUnit":"ns","otherData":' + msgspec.json.encode(about)
    write_atomic(Path(path), head + b',"traceEvents":[\n' + lines + b"\n]}\n")


def read_traces(path: str | Path, make: Callable[..., T]) -> tuple[T, ...]:
    """Return what `make` makes of each timeline of a trace file, in the order in which they were written.

    It is called with the intervals, the memory curves, the source and the title of one. Raises `ParseError`, naming the
    file and what is wrong, where it cannot be read or is no trace of timelines.
    """
    data = read_bytes(path, f"the trace file {line(path)}")
    try:
        raw: Any = decode_json(data)
        found = raw.get("otherData", {}).get("format") if isinstance(raw, dict) else None
        if found != FORMAT:
            raise ParseError(f"its format is {found!r}, and this version reads {FORMAT!r}")
        return _made(raw["otherData"]["timelines"], raw["traceEvents"], make)
    except (ShardplanError, LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else error
        raise ParseError(f"{line(path)} is not a trace file of timelines: {line(reason)}") from None


def events(timelines: Sequence[Traced]) -> Iterator[Event]:
    """Yield the trace events of timelines: the names of all rows, then each timeline's intervals and memory.

    An interval is followed by the arrows that leave it and those that arrive at it; the two ends of an arrow share a
    number, counted over all timelines.
    """
    streams = {name: k for k, name in enumerate(sorted({i.stream for t in timelines for i in t.intervals}), start=1)}
    yield from _rows(timelines, streams)
    arrow = 0
    for k, timeline in enumerate(timelines):
        leaving: dict[int, list[int]] = {}
        arriving: dict[int, list[int]] = {}
        for number, interval in enumerate(timeline.intervals):
            for cause in interval.causes:
                if _drawn(timeline.intervals[cause], interval):
                    arrow += 1
                    leaving.setdefault(cause, []).append(arrow)
                    arriving.setdefault(number, []).append(arrow)
        ticks = _ticks(timeline)
        for number, interval in enumerate(timeline.intervals):
            row = {"pid": interval.device * len(timelines) + k, "tid": streams[interval.stream]}
            start, end = ticks[number]
            yield {
                "ph": "X",
                **row,
                "ts": start / TICKS,
                "dur": (end - start) / TICKS,
                "name": interval.name,
                "cat": interval.kind,
                "args": {
                    "step": interval.step,
                    "received_bytes": interval.received_bytes,
                    "causes": interval.causes,
                },
            }
            # An arrow belongs to the interval that is open at its time, and at its end an interval is closed.
            arrowed = {"name": "cause", "cat": "cause", **row}
            for tail in leaving.get(number, ()):
                yield {"ph": "s", "id": tail, "ts": max(start, end - 1) / TICKS, **arrowed}
            for head in arriving.get(number, ()):
                yield {"ph": "f", "bp": "e", "id": head, "ts": start / TICKS, **arrowed}
        for curve in timeline.memory:
            row = {"pid": curve.device * len(timelines) + k, "tid": 0, "name": "memory"}
            for at, nbytes in curve.samples:
                yield {"ph": "C", **row, "ts": round(at * NANOSECONDS) / TICKS, "args": {"bytes": nbytes}}


def _drawn(cause: Interval, interval: Interval) -> bool:
    """Say whether what let an interval start is somewhere else."""
    if cause.device != interval.device:
        return True
    return cause.stream != interval.stream and HOST not in (cause.stream, interval.stream)


def _rows(timelines: Sequence[Traced], streams: dict[str, int]) -> Iterator[Event]:
    """Yield the events that name and order processes and threads, timeline by timeline, device by device."""
    sources = [t.source for t in timelines]
    for k, timeline in enumerate(timelines):
        used = {(i.device, i.stream) for i in timeline.intervals}
        which = timeline.source if sources.count(timeline.source) == 1 else f"{timeline.source}, {timeline.title or k}"
        for device in timeline.devices:
            row = {"ph": "M", "pid": device * len(timelines) + k}
            yield {**row, "tid": 0, "name": "process_name", "args": {"name": f"device {device} ({which})"}}
            yield {**row, "tid": 0, "name": "process_sort_index", "args": {"sort_index": row["pid"]}}
            for stream, tid in streams.items():
                if (device, stream) in used:
                    yield {**row, "tid": tid, "name": "thread_name", "args": {"name": stream}}
                    yield {**row, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _ticks(timeline: Traced) -> list[tuple[int, int]]:
    """Start and end of every interval in whole nanoseconds; times that a timeline takes for equal stay equal."""
    times = np.array([(i.start, i.end) for i in timeline.intervals], dtype=np.float64).reshape(-1, 2)
    distinct = np.unique(times)
    fresh = np.diff(distinct, prepend=-np.inf) > TOLERANCE * timeline.seconds
    first = distinct[fresh][np.cumsum(fresh) - 1]
    ticks = np.rint(first * NANOSECONDS).astype(np.int64)[np.searchsorted(distinct, times)]
    return [(start, end) for start, end in ticks.tolist()]


def _seconds(microseconds: float) -> float:
    return round(microseconds * TICKS) / NANOSECONDS


def _causes(found: list[int]) -> tuple[int, ...]:
    for cause in found:
        if type(cause) is not int:
            raise ParseError(f"the cause {excerpt(cause)} of an interval; legal is the number of another")
    return tuple(found)


def _made(about: list[dict[str, str]], found: list[Event], make: Callable[..., T]) -> tuple[T, ...]:
    """The timelines of a file, in order: which one an event is of stands in its process id."""
    count = len(about)
    if found and not count:
        raise ParseError(f"it has {len(found)} events and no timelines; legal is one at least")
    streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name" and e["ph"] == "M"}
    intervals: list[list[Interval]] = [[] for _ in about]
    samples: list[dict[int, list[tuple[float, int]]]] = [{} for _ in about]
    for event in found:
        device, k = divmod(event["pid"], count)
        if event["ph"] == "X":
            intervals[k].append(
                Interval(
                    device=device,
                    stream=streams[event["pid"], event["tid"]],
                    start=_seconds(event["ts"]),
                    end=round(event["ts"] * TICKS + event["dur"] * TICKS) / NANOSECONDS,
                    name=event["name"],
                    kind=event["cat"],
                    step=event["args"]["step"],
                    received_bytes=event["args"]["received_bytes"],
                    causes=_causes(event["args"]["causes"]),
                )
            )
        elif event["ph"] == "C":
            samples[k].setdefault(device, []).append((_seconds(event["ts"]), event["args"]["bytes"]))
    return tuple(
        make(
            tuple(intervals[k]),
            tuple(MemoryCurve(device, tuple(curve)) for device, curve in samples[k].items()),
            about[k]["source"],
            about[k]["title"],
        )
        for k in range(count)
    )
