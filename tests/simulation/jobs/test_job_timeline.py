"""What a job's timeline says: memory, the critical path, exposed communication, what-if, and its trace file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from shardplan.errors import ShardplanError
from shardplan.simulation.jobs.job_timeline import JobTimeline, simulate_job
from shardplan.simulation.jobs.spans import joined
from shardplan.simulation.timeline import load_timelines
from shardplan.strategy.partition.memory import certify, moments
from simulation.jobs.job_cases import CLUSTER, SIZES, STRATEGIES, job
from strategy.memory_oracle import moments_by_dictionaries

WAYS: list[dict[str, Any]] = [{}, {"launch": 0.0}, {"overlap": False, "launch": 0.0}, {"launch": 1e-5}]


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_those_of_plain_dictionaries(name: str) -> None:
    line, proved = simulate_job(job(name), CLUSTER), certify(job(name))
    for rank in range(len(job(name).schedule.ranks)):
        want = list(moments_by_dictionaries(job(name), rank))
        assert [tuple(m) for m in moments(job(name), rank)] == want
        assert proved.peak_bytes[rank] == max(during for _, during, _ in want)
    assert line.held.peak_bytes == proved.peak_bytes
    assert line.held.state == proved.state_bytes
    assert line.peak_bytes == max(proved.peak_bytes)


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_returns_to_what_lives_between_steps(name: str) -> None:
    line = simulate_job(job(name), CLUSTER)
    for rank, state in enumerate(line.held.state):
        assert line.held.after[rank][-1] == state
    for curve, state in zip(line.memory, line.held.state, strict=True):
        assert curve.samples[0] == (0.0, state)
        assert curve.samples[-1][1] == state
        assert max(n for _, n in curve.samples) == max(state, *(n for _, n in curve.samples))


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_peak_is_attributed(name: str) -> None:
    """Its parts sum to it, and the action it names is one of the schedule's."""
    line = simulate_job(job(name), CLUSTER)
    peak = line.peak
    assert peak.nbytes == line.peak_bytes == sum(peak.parts.values())
    kinds = {(s, kind, k) for row in line.compiled.rows for s, kind, k in row}
    assert (peak.stage, peak.kind, peak.microbatch) in kinds or peak.kind in job(name).updates
    assert peak.tensors and peak.op


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_critical_path_is_contiguous_and_the_makespan(name: str, way: int) -> None:
    """Its links are what `Timeline` checks: each starts when its cause ends."""
    line = simulate_job(job(name), CLUSTER, **WAYS[way])
    path = line.critical_path
    assert path[0].start == 0.0 and path[-1].end == line.seconds
    assert all(a.end == b.start for a, b in zip(path, path[1:], strict=False))
    assert np.isclose(sum(line.breakdown.values()), line.seconds, rtol=1e-12)
    # The chain was followed cause by cause: no link is longer than its op but for rounding.
    for place, link in zip(line.places, path, strict=True):
        start, end = line.opened.times(place)
        assert abs((end - start) - link.seconds) <= 1e-9 * line.seconds
    whole = line.timeline
    assert np.isclose(whole.seconds, line.seconds, rtol=1e-12)
    assert np.isclose(sum(i.seconds for i in whole.critical_path), whole.seconds, rtol=1e-12)
    assert whole.seconds >= sum(i.seconds for i in path) * (1 - 1e-12)


def test_contention_has_a_timeline_too() -> None:
    line = simulate_job(job("tensor"), CLUSTER, contention=True)
    assert np.isclose(line.critical_path[-1].end, line.seconds)
    assert line.intervals and line.bubble_seconds >= 0.0


def test_a_bound_of_work_is_below_the_makespan() -> None:
    """No device is done before the ops of its own streams."""
    for name in ("1f1b", "tensor", "fsdp"):
        line = simulate_job(job(name), CLUSTER)
        busy = max(own for _, _, own in line._busy)  # pyright: ignore[reportPrivateUsage]
        assert busy <= line.seconds
        assert np.isclose(line.idle_seconds, line.seconds - min(own for _, _, own in line._busy))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe", "offload", "fsdp"])
def test_bubbles_are_what_lies_between_the_ops_that_are_drawn(name: str) -> None:
    """From a device's first op to its last one; neither a host that issues nor a message on its way makes it busy."""
    line = simulate_job(job(name), CLUSTER)
    bubbles: list[float] = []
    for device in line.devices:
        own = [i for i in line.intervals if i.device == device and i.kind not in ("launch", "message")]
        spans = joined((i.start, i.end) for i in own)
        bubbles.append(spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans))
    assert np.isclose(line.bubble_seconds, max(bubbles), rtol=1e-9, atol=1e-9 * line.seconds)


def test_small_layers_are_bounded_by_the_larger_of_two_sums() -> None:
    """A host that issues slowly: the step is its issues and the last op; one that is fast does not show."""
    found = job("fsdp")
    slow, none = simulate_job(found, CLUSTER, launch=1e-3), simulate_job(found, CLUSTER, launch=0.0)
    ops = sum(1 for i in range(len(slow.swept.ranks[0].actions)) for _ in slow.opened.ops(0, i))
    assert ops * 1e-3 <= slow.seconds <= ops * 1e-3 + none.seconds
    shortest = none.seconds / ops / 1e4
    assert simulate_job(found, CLUSTER, launch=shortest).seconds <= none.seconds * 1.01
    assert next(iter(slow.breakdown)) == "launch"


def test_hidden_communication_is_not_exposed() -> None:
    """With streams of their own gathers run beside compute; in one stream all of them show."""
    apart, one = (simulate_job(job("prefetch"), CLUSTER, overlap=o, launch=0.0) for o in (True, False))
    name = next(k for k in one.exposed if k.startswith("data"))
    bare, whole = (sum(n for k, n in x.exposed.items() if k.startswith("data")) for x in (apart, one))
    assert 0.0 < bare < 0.95 * whole  # on several streams, where they have their own
    spans = [op.end - op.start for i in range(len(one.swept.ranks[0].actions)) for op in one.opened.ops(0, i)
             if op.op.cost.stream == name]  # fmt: skip
    assert np.isclose(one.exposed[name], sum(spans), rtol=1e-9)


def test_what_if_something_cost_nothing() -> None:
    line = simulate_job(job("tensor"), CLUSTER, launch=0.0)
    for name in line.names:
        assert line.without(name).seconds <= line.seconds * (1 + 1e-12)
    free = line.without("tensor")
    assert free.seconds < line.seconds
    assert "tensor, gpu" not in free.exposed or free.exposed["tensor, gpu"] == 0.0
    with pytest.raises(
        ShardplanError, match=r"^without 'nvlink': nothing of the step is called so; legal: .*all_gather"
    ):
        line.without("nvlink")


def test_the_step_is_told_in_words() -> None:
    line = simulate_job(job("tensor"), CLUSTER, launch=0.0)
    said = line.explained(3)
    (kind, stream, stage), seconds = next(iter(line.causes.items()))
    assert f"{100 * seconds / line.seconds:.0f} % " in said and kind in said and said.count(";") == 2
    assert f"stage {stage}" in said and stream
    assert np.isclose(sum(line.causes.values()), line.seconds, rtol=1e-12)


def test_one_device_stands_for_others() -> None:
    line = simulate_job(job("tensor"), CLUSTER)
    assert dict(line.stands_for) == {0: (0, 1), 2: (2, 3)}
    assert line.devices == (0, 2) and line.even
    assert not simulate_job(job("uneven"), CLUSTER).even


def test_bytes_leave_and_return_on_the_copy_stream() -> None:
    line = simulate_job(job("offload"), CLUSTER, launch=0.0)
    kinds = {i.kind for i in line.intervals if i.stream == "copy"}
    assert kinds == {"offload", "reload"}
    assert line.without("offload", "reload").seconds <= line.seconds


def test_the_trace_is_what_the_format_requires(tmp_path: Path) -> None:
    """A process a device, a thread a stream, an arrow for each message and around collectives, counters of memory."""
    line = simulate_job(job("tensor"), CLUSTER)
    path = tmp_path / "trace.json"
    line.save(path)
    [back] = load_timelines(path)
    assert len(back.intervals) == len(line.intervals) and back.devices == line.devices
    raw = json.loads(path.read_text())
    events = raw["traceEvents"]
    assert {e["pid"] for e in events} == set(line.devices)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"host", "compute", "tensor, gpu", "send F 0-1"} <= set(names.values())
    for e in events:
        assert e["ph"] in "MXCsf" and isinstance(e["name"], str)
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0 and (e["pid"], e["tid"]) in names
        if e["ph"] == "C":
            assert e["args"]["bytes"] > 0
    assert any(e["ph"] == "C" for e in events)
    ends: dict[int, list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] in "sf":
            ends.setdefault(e["id"], []).append(e)
    assert all(sorted(str(e["ph"]) for e in two) == ["f", "s"] for two in ends.values())
    across = [two for two in ends.values() if two[0]["pid"] != two[1]["pid"]]
    received = [i for i in line.intervals if i.stream.startswith("receive") and i.seconds > 0]
    assert len(across) >= len(received) > 0
    there, here = ({i.device for i in line.intervals if i.stream == f"{end} F 0-1"} for end in ("send", "receive"))
    assert there and here and there.isdisjoint(here)
    gathers = [two for two in ends.values() if {names[e["pid"], e["tid"]] for e in two} == {"compute", "tensor, gpu"}]
    assert gathers


def test_simulate_takes_a_job() -> None:
    found = sp.simulate(job("1f1b"), CLUSTER)
    assert isinstance(found, JobTimeline)
    assert found.seconds == simulate_job(job("1f1b"), CLUSTER).seconds
    with pytest.raises(ShardplanError, match=r"^simulate: the job is 3; legal is a Job"):
        simulate_job(3, CLUSTER)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardplanError, match=r"^the placement is None"):
        simulate_job(job("1f1b"), None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("data", "level"), [(2, "gpu"), (4, "gpu"), (8, "node")])
def test_a_collective_is_of_the_outermost_level_that_it_crosses(data: int, level: str) -> None:
    model = sp.Model.load("gpt", **SIZES)
    line = simulate_job(sp.partition(model, sp.Strategy(data=data, global_batch=8)), CLUSTER, launch=0.0)
    streams = {s for s in line.compiled.streams if s.startswith("data, ")}
    assert streams == {f"data, {level}"}
