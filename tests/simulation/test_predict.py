"""The closed form of programs: its seconds are those of the cost model, its memory that of the types."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
import strategies as some
from oracle import held_bytes
from shardplan.core.accounting import account
from shardplan.core.ops import AllGather, Send
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.hardware.level import Level
from shardplan.hardware.topology import Topology
from shardplan.plans.pricing import Where, fabric_of, price_program, step_prices
from shardplan.simulation.predict import predict, step_names
from shardplan.simulation.timeline import Timeline, TimelineError

KINDS = ("even", "uneven", "partial", "rooted")
LEVELS = (Level("node", 8, "switch", 25e9, 5e-6), Level("gpu", 8, "ring", 300e9, 2e-6))
TOPOLOGY = Topology("two levels", LEVELS)  # 64 devices: every id that the generators draw


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, Where | None]:
    """Plans on one mesh, across meshes and of batches, with where they run."""
    kind = draw(st.sampled_from(("pair", "pair", "cross", "batch")))
    if kind == "batch":
        ends = draw(some.batches(8, 3))
    else:
        ends = draw(some.pairs(KINDS, most=12) if kind == "pair" else some.cross_pairs(8))
    try:
        program = sp.redistribute(*ends, portable=kind == "pair" and draw(st.booleans())).program
    except sp.Infeasible:
        program = Program({}, [], [])
    where = draw(st.sampled_from((None, TOPOLOGY)))
    meshes = program.meshes
    if where is not None and len(meshes) == 1 and draw(st.booleans()):
        levels = (Level("flat", meshes[0].size, "switch", 10e9, 1e-6),)
        where = next(iter(sp.placements(meshes[0], Topology("flat", levels))))
    return program, where


def held(line: Timeline, device: int, at: float) -> int:
    """The bytes of a device at a time, from its curve."""
    curve = next(c for c in line.memory if c.device == device)
    return [n for t, n in curve.samples if t <= at][-1]


@settings(max_examples=150)
@given(programs())
def test_the_makespan_is_the_price(drawn: tuple[Program, Where | None]) -> None:
    program, where = drawn
    line, fabric = predict(program, where), fabric_of(where, program.meshes)
    costs = [p.seconds for p in step_prices(program, fabric)]
    assert line.seconds == price_program(program, fabric).seconds
    for k, seconds in enumerate(costs):
        assert all(math.isclose(i.seconds, seconds, abs_tol=1e-15) for i in line.intervals if i.step == k)
    if len(program.inputs) == 1:
        assert math.isclose(line.seconds, sum(costs), rel_tol=1e-12)


@settings(max_examples=150)
@given(programs())
def test_a_step_starts_when_the_last_that_it_waits_for_ends(drawn: tuple[Program, Where | None]) -> None:
    program, where = drawn
    line = predict(program, where)
    assert line.source == "predicted"
    assert math.isclose(sum(i.seconds for i in line.critical_path), line.seconds, rel_tol=1e-12)
    names = step_names(program)
    assert {i.step for i in line.intervals} == set(range(len(program.steps)))
    using: list[set[object]] = [{i.device for i in line.intervals if i.step == k} for k in range(len(program.steps))]
    if where is not None:
        for used, price in zip(using, step_prices(program, fabric_of(where, program.meshes)), strict=True):
            used |= {(j, r) for j, busy in enumerate(price.load) if busy is not None for r in np.flatnonzero(busy)}
    ends: list[float] = []
    for k, (step, used) in enumerate(zip(program.steps, using, strict=True)):
        mine = [i for i in line.intervals if i.step == k]
        waits = [n for n in range(k) if used & using[n] or set(program.steps[n].results) & set(step.operands)]
        start = max((ends[n] for n in waits), default=0.0)
        for interval in mine:
            assert interval.start == start and interval.end == mine[0].end
            assert interval.kind == step.op.name and interval.name == names[k]
            causes = [line.intervals[c] for c in interval.causes]
            assert [c.end for c in causes] == ([start] if waits else []) and {c.step for c in causes} <= set(waits)
        ends.append(mine[0].end)
    assert line.seconds == max(ends, default=0.0)


@settings(max_examples=150)
@given(programs())
def test_what_a_device_receives_is_booked_on_it(drawn: tuple[Program, Where | None]) -> None:
    program, where = drawn
    books, line = account(program), predict(program, where)
    got = dict.fromkeys(program.devices, 0)
    for interval in line.intervals:
        got[interval.device] += interval.received_bytes
    assert list(got.values()) == books.received.tolist()


@settings(max_examples=150)
@given(programs())
def test_memory_is_what_is_live(drawn: tuple[Program, Where | None]) -> None:
    """Device by device and step by step, against boxes counted out; at the end the outputs are left."""
    program, where = drawn
    books, line = account(program), predict(program, where)
    assert line.peak_bytes <= books.workspace_bytes
    parts = [{i.device for i in line.intervals if i.step == k} for k in range(len(program.steps))]
    if all(part == set(program.devices) for part in parts):
        assert line.peak_bytes == books.workspace_bytes
    for device in program.devices:
        walked = [sum(held_bytes(t, device) for t in program.input_types)]
        for k, step in enumerate(program.steps):
            operands, results = program.step_types(step)
            later = {o for s in program.steps[k + 1 :] for o in s.operands} | set(program.outputs)
            defined = {n for n, _ in program.inputs} | {r for s in program.steps[:k] for r in s.results}
            live = {*step.operands, *step.results} | (later & defined)
            renamed = isinstance(step.op, Send) and not set(step.operands) & later and set(step.results) <= later
            if renamed and all(sp.same(t, u) for t, u in zip(operands, results, strict=True)):
                live -= set(step.results)
            staging = step.op.staging(*operands) if device in parts[k] else 0
            walked.append(sum(held_bytes(program.types[v], device) for v in live) + staging)
            at = next(i for i in line.intervals if i.step == k)
            if at.seconds and device in parts[k]:
                assert held(line, device, (at.start + at.end) / 2) == walked[-1]
            walked.append(sum(held_bytes(program.types[v], device) for v in later & {*defined, *step.results}))
        # Whatever overlaps elsewhere, a device goes through the plain walk, one step after another.
        curve = next(c for c in line.memory if c.device == device)
        assert [n for _, n in curve.samples] == [n for n, _ in itertools.groupby(walked)]


@settings(max_examples=80)
@given(programs(), st.integers(1, 3))
def test_drawing_fewer_devices_changes_nothing_else(drawn: tuple[Program, Where | None], most: int) -> None:
    program, where = drawn
    every, few = predict(program, where), predict(program, where, most_devices=most)
    assert (few.seconds, few.peak_bytes) == (every.seconds, every.peak_bytes)
    assert few.breakdown == every.breakdown
    smallest = program.devices[:most]
    without = [(i.device, i.step, i.start, i.end, i.received_bytes) for i in every.intervals if i.device in smallest]
    assert [(i.device, i.step, i.start, i.end, i.received_bytes) for i in few.intervals if i.device in smallest] == (
        without
    )
    assert len(few.devices) <= most + len(program.steps) + 1


def test_a_device_that_takes_no_part_has_no_interval() -> None:
    two, four = sp.Mesh(x=2), sp.Mesh({"x": 2}, devices=(2, 3))
    t = sp.TensorType("f32", (8,), ("x",), two)
    u = sp.TensorType("f32", (8,), ("x",), four)
    steps = [Step(AllGather(0, ("x",)), ("0",), ("1",)), Step(Send(u.layout, four), ("1",), ("2",))]
    program = Program({"0": t}, steps, ("2",))
    line = predict(program, TOPOLOGY)
    assert [(i.device, i.step, i.received_bytes, i.causes) for i in line.intervals] == [
        (0, 0, 16, ()),
        (1, 0, 16, ()),
        (0, 1, 0, (0,)),
        (1, 1, 0, (1,)),
        (2, 1, 16, (0,)),
        (3, 1, 16, (0,)),
    ]
    first = [i.device for i in predict(program, TOPOLOGY, most_devices=1).intervals]
    assert first == [0, 0]


def test_a_step_of_devices_that_are_not_drawn_is_drawn_on_its_first() -> None:
    """Devices 2 and 3 gather among themselves; only device 0, which does nothing, is asked for."""
    mesh, other = sp.Mesh(x=2), sp.Mesh({"x": 2}, devices=(2, 3))
    t, u = sp.TensorType("f32", (8,), ("x",), mesh), sp.TensorType("f32", (8,), ("x",), other)
    program = Program({"a": t, "b": u}, [Step(AllGather(0, ("x",)), ("b",), ("c",))], ("a", "c"))
    line = predict(program, TOPOLOGY, most_devices=1)
    assert [(i.device, i.step) for i in line.intervals] == [(2, 0)]
    assert line.seconds == price_program(program, fabric_of(TOPOLOGY, program.meshes)).seconds > 0
    assert line.devices == (0, 2)


def test_staging_is_held_by_those_that_take_part() -> None:
    mesh, other = sp.Mesh(x=2), sp.Mesh({"x": 2}, devices=(2, 3))
    t, u = sp.TensorType("f32", (8,), ("x",), mesh), sp.TensorType("f32", (4, 8), (None, "x"), other)
    gather = AllGather(1, ("x",))
    assert gather.staging(u) > 0
    program = Program({"a": t, "b": u}, [Step(gather, ("b",), ("c",))], ("a", "c"))
    peaks = {c.device: max(n for _, n in c.samples) for c in predict(program).memory}
    assert peaks == {0: 16, 1: 16, 2: 64 + 128 + gather.staging(u), 3: 64 + 128 + gather.staging(u)}


def test_a_send_that_moves_nothing_holds_one_copy() -> None:
    flat, grid = sp.Mesh(x=4), sp.Mesh(a=2, b=2)
    t, u = sp.TensorType("f32", (8,), ("x",), flat), sp.TensorType("f32", (8,), (("a", "b"),), grid)
    program = Program({"0": t}, [Step(Send(u.layout, grid), ("0",), ("1",))], ("1",))
    assert predict(program).peak_bytes == account(program).workspace_bytes == 8


def test_an_input_that_nobody_reads_is_freed_at_once() -> None:
    mesh = sp.Mesh(x=2)
    t, big = sp.TensorType("f32", (8,), ("x",), mesh), sp.TensorType("f32", (1000,), ("x",), mesh)
    program = Program({"a": t, "b": big}, [Step(AllGather(0, ("x",)), ("a",), ("c",))], ("c",))
    line = predict(program)
    assert [n for _, n in line.memory[0].samples] == [2016, account(program).step_workspaces[0], 32]


def test_a_local_step_is_compute_on_all_of_its_mesh() -> None:
    mesh = sp.Mesh(x=2, y=2)
    program = sp.redistribute(sp.TensorType.parse("f32[8]", mesh), sp.TensorType.parse("f32[8@(x,y)]", mesh)).program
    line = predict(program)
    assert [(i.device, i.stream, i.seconds) for i in line.intervals] == [(d, "compute", 0.0) for d in range(4)]


def test_where_it_runs_is_in_the_title() -> None:
    program = Program({}, [], [])
    assert predict(program).title == "closed form, nominal switch, 50 GB/s, 5 us"
    assert predict(program, TOPOLOGY).title == "closed form, two levels"


def test_what_is_said_of_wrong_requests() -> None:
    mesh = sp.Mesh({"x": 2}, devices=(0, 99))
    t = sp.TensorType("f32", (8,), ("x",), mesh)
    with pytest.raises(TimelineError) as error:
        predict(Program({"0": t}, [], ("0",)), most_devices=0)
    assert str(error.value) == "a timeline of at most 0 devices; draw at least 1"
    with pytest.raises(sp.TopologyError) as other:
        predict(Program({"0": t}, [], ("0",)), TOPOLOGY)
    assert str(other.value) == "device 99 is not on the topology two levels of 64 devices; legal ids are 0 to 63"
