"""Trace files: what the Trace Event Format requires, what Perfetto draws, and reading back."""

import json
import math
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.timeline import Timeline, load_timelines
from shardplan.simulation.trace import events, save_traces

REQUIRED = {
    "M": {"ph", "pid", "name", "args"},
    "X": {"ph", "pid", "tid", "ts", "dur", "name"},
    "C": {"ph", "pid", "ts", "name", "args"},
    "s": {"ph", "pid", "tid", "ts", "name", "cat", "id"},
    "f": {"ph", "pid", "tid", "ts", "name", "cat", "id", "bp"},
}
NAMES = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


@st.composite
def timelines(draw: st.DrawFn, source: str | None = None) -> Timeline:
    """Timelines of odd floats, with intervals that touch up to a rounding error, causes and memory."""
    source = source or draw(st.sampled_from(("predicted", "measured")))
    seconds = st.one_of(st.just(0.0), st.floats(1e-12, 1e-3), st.sampled_from((0.5e-9, 1.5e-9, 0.1, 1 / 3)))
    made: list[Interval] = []
    for number in range(draw(st.integers(0, 10))):
        device, stream = draw(st.sampled_from((0, 1, 5))), draw(st.sampled_from(("comm", "compute")))
        own = [k for k, i in enumerate(made) if (i.device, i.stream) == (device, stream)]
        others = draw(st.sets(st.integers(0, len(made) - 1), max_size=2)) if made else set()
        causes = tuple(sorted({*own[-1:], *others}))
        start = max((made[c].end for c in causes), default=0.0)
        if start and draw(st.booleans()):
            start = math.nextafter(start, draw(st.sampled_from((0.0, 1.0))))
        if source == "measured":
            start += draw(seconds)
        name = draw(st.sampled_from(("all_gather(%0; dim=0, axes=(x))", 'odd "name" \\ µ', "")))
        step = draw(st.none() | st.just(number))
        made.append(Interval(device, stream, start, start + draw(seconds), name, "kind", step, number, causes))
    memory: list[MemoryCurve] = []
    for device in draw(st.sets(st.sampled_from((0, 2, 5)))):
        times = sorted(draw(st.lists(seconds, min_size=1, max_size=4)))
        memory.append(MemoryCurve(device, tuple((t, draw(st.integers(0, 2**50))) for t in times)))
    return Timeline(tuple(made), tuple(memory), source, draw(st.sampled_from(("", "a title"))))


def near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.5e-9 + 1e-12 * max(1.0, abs(b))


def assert_same(found: Timeline, asked: Timeline) -> None:
    """Equal, times to a nanosecond."""
    assert (found.source, found.title, len(found.intervals)) == (asked.source, asked.title, len(asked.intervals))
    for a, b in zip(found.intervals, asked.intervals, strict=True):
        assert near(a.start, b.start) and near(a.end, b.end)
        assert replace(a, start=0.0, end=0.0) == replace(b, start=0.0, end=0.0)
    for c, d in zip(found.memory, asked.memory, strict=True):
        assert c.device == d.device and [n for _, n in c.samples] == [n for _, n in d.samples]
        assert all(near(s, t) for (s, _), (t, _) in zip(c.samples, d.samples, strict=True))


@settings(max_examples=150)
@given(lines=st.lists(timelines(), max_size=3))
def test_what_is_saved_is_loaded(lines: list[Timeline], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    save_traces(path, lines)
    found = load_timelines(path)
    assert len(found) == len(lines)
    for a, b in zip(found, lines, strict=True):
        assert_same(a, b)
    save_traces(path, found)
    assert load_timelines(path) == found  # whole nanoseconds come back as they are


@settings(max_examples=150)
@given(st.lists(timelines(), max_size=3))
def test_events_are_what_the_format_requires(lines: list[Timeline]) -> None:
    """Keys and types of every phase; slices of a row do not overlap; an arrow has two ends, each on a slice."""
    made = json.loads(json.dumps(list(events(lines))))
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in made:
        assert REQUIRED[event["ph"]] <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert list(event["args"]) == [NAMES[event["name"]]]
            continue
        assert event["ts"] >= 0
        tick = round(event["ts"] * 1000)
        assert math.isclose(event["ts"], tick / 1000)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["tid"] > 0
            slices.setdefault((event["pid"], event["tid"]), []).append((tick, tick + round(event["dur"] * 1000)))
        elif event["ph"] == "C":
            assert all(isinstance(v, int) for v in event["args"].values())
        else:
            arrows.setdefault(event["id"], []).append(event)
    for row in slices.values():
        row.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(row))
    for ends in arrows.values():
        tail, head = sorted(ends, key=lambda e: e["ph"] == "f")
        assert [tail["ph"], head["ph"]] == ["s", "f"] and head["bp"] == "e"
        assert (tail["name"], tail["cat"]) == (head["name"], head["cat"])  # what viewers match ends by, with the id
        assert tail["ts"] <= head["ts"]
        for end in ends:
            at, row = round(end["ts"] * 1000), slices[end["pid"], end["tid"]]
            assert any(a <= at < b or a == at == b for a, b in row)
    named = {(e["pid"], e["tid"]) for e in made if e["name"] == "thread_name"}
    assert named == set(slices)
    wanted = {d * len(lines) + k for k, t in enumerate(lines) for d in t.devices}
    assert {e["pid"] for e in made if e["name"] == "process_name"} == wanted


@given(timelines())
def test_arrows_are_drawn_for_causes_on_other_devices_and_streams(line: Timeline) -> None:
    drawn = Counter(e["ph"] for e in events([line]))
    pairs = [(line.intervals[c], i) for i in line.intervals for c in i.causes]
    across = sum((a.device, a.stream) != (b.device, b.stream) for a, b in pairs)
    assert drawn["s"] == drawn["f"] == across


def test_two_timelines_lie_over_each_other(tmp_path: Path) -> None:
    """One origin of time, and the two rows of a device next to each other, the same order everywhere."""
    predicted = Timeline(tuple(Interval(d, "comm", 0.0, 2e-6, "permute(%0)", "permute", 0) for d in (0, 3)))
    measured = Timeline(
        tuple(Interval(d, "comm", 1e-6, 4e-6, "permute(%0)", "permute", 0) for d in (0, 3)),
        (MemoryCurve(3, ((0.0, 8),)),),
        "measured",
    )
    save_traces(tmp_path / "both.json", [predicted, measured])
    raw = json.loads((tmp_path / "both.json").read_text())
    assert raw["displayTimeUnit"] == "ns"
    names = {e["pid"]: e["args"]["name"] for e in raw["traceEvents"] if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in raw["traceEvents"] if e["name"] == "process_sort_index"}
    assert [names[p] for p in sorted(names, key=lambda p: order[p])] == [
        "device 0 (predicted)",
        "device 0 (measured)",
        "device 3 (predicted)",
        "device 3 (measured)",
    ]
    assert [(names[e["pid"]], e["ts"], e["dur"]) for e in raw["traceEvents"] if e["ph"] == "X"] == [
        ("device 0 (predicted)", 0.0, 2.0),
        ("device 3 (predicted)", 0.0, 2.0),
        ("device 0 (measured)", 1.0, 3.0),
        ("device 3 (measured)", 1.0, 3.0),
    ]
    assert load_timelines(tmp_path / "both.json") == (predicted, measured)


def test_one_timeline_has_its_device_ids_as_process_ids(tmp_path: Path) -> None:
    line = Timeline((Interval(7, "comm", 0.0, 1e-6, "op()", "op"), Interval(7, "copy", 0.0, 1e-6, "op()", "op")))
    line.save(tmp_path / "trace.json")
    made = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in made} == {7}
    assert [(e["tid"], e["args"]["name"]) for e in made if e["name"] == "thread_name"] == [(1, "comm"), (2, "copy")]


def test_timelines_of_one_source_are_told_apart_by_title() -> None:
    line = Timeline((Interval(0, "comm", 0.0, 1e-6, "op()", "op"),))
    made = list(events([replace(line, title="closed form"), line]))
    names = [e["args"]["name"] for e in made if e["name"] == "process_name"]
    assert names == ["device 0 (predicted, closed form)", "device 0 (predicted, 1)"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    Timeline((), title="old").save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Timeline((), title="new").save(path)
    assert [t.title for t in load_timelines(path)] == ["old"] and list(tmp_path.iterdir()) == [path]


HEAD = '{"otherData":{"format":"shardplan timelines 1","timelines":'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Input data was truncated"),
        ("[]", "its format is None, and this version reads 'shardplan timelines 1'"),
        ('{"traceEvents":[]}', "its format is None, and this version reads 'shardplan timelines 1'"),
        ('{"otherData":{"format":"shardplan timelines 9"}}',
         "its format is 'shardplan timelines 9', and this version reads 'shardplan timelines 1'"),
        (HEAD + '[]}}', "missing 'traceEvents'"),
        (HEAD + '[{"source":"guess","title":""}]},"traceEvents":[]}',
         "a timeline of source 'guess'; legal are predicted, measured"),
        (HEAD + '[{"source":"measured","title":""}]},"traceEvents":[{"ph":"X","pid":0,"name":"a","tid":1}]}',
         "missing (0, 1)"),
    ],
)  # fmt: skip
def test_what_a_wrong_file_says(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(sp.ParseError) as error:
        load_timelines(path)
    assert str(error.value) == f"{path} is not a trace file of timelines: {reason}"


def test_what_a_missing_file_says(tmp_path: Path) -> None:
    with pytest.raises(sp.ParseError) as error:
        load_timelines(tmp_path / "none.json")
    assert str(error.value) == f"cannot read the trace file {tmp_path / 'none.json'}: No such file or directory"


def test_a_cause_that_is_no_place_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    one, two = (Interval(0, "comm", start, start + 1.0, "x", "x") for start in (0.0, 1.0))
    save_traces(path, [Timeline((one, replace(two, causes=(0,))))])
    text = path.read_text()
    for cause in ("1e300", "0.5", "true"):
        path.write_text(text.replace('"causes":[0]', f'"causes":[{cause}]'))
        with pytest.raises(
            sp.ParseError, match=r"trace\.json is not a trace file of timelines: the cause \S+ of an interv"
        ):
            load_timelines(path)
    path.write_text(text.replace('"timelines":[{', '"timelines":[],"x":[{'))
    with pytest.raises(sp.ParseError, match=r"it has 6 events and no timelines; legal is one at least$"):
        load_timelines(path)
    path.write_text('{"x":' * 100_000)
    with pytest.raises(sp.ParseError, match=r"is not a trace file of timelines: its values are nested too deep$"):
        load_timelines(path)
