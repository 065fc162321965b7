"""The event simulation of programs: the price where nothing overlaps, between its bounds, and as a plain one has it."""

from collections.abc import Iterator

import numpy as np
import pytest

import shardplan as sp
from conformance import cases
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Einsum,
    Op,
    Reduce,
    ReduceScatter,
    Slice,
    ToPartial,
)
from shardplan.core.ops.bodies import Repeat, Together
from shardplan.core.pattern import Groups, Messages
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.walk import walk
from shardplan.errors import ShardplanError, TopologyError
from shardplan.hardware.level import DeviceSpec, Level
from shardplan.hardware.prices.cost import price, row_shares
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.group_loads import group_loads, resource_starts, routes
from shardplan.hardware.topology import Topology
from shardplan.hardware.topology_file import presets
from shardplan.plans.pricing import fabric_of, step_prices
from shardplan.simulation.events import simulate
from shardplan.simulation.predict import predict
from shardplan.simulation.timeline import TimelineError
from simulation.fluid import Task, steps_seconds

CLUSTER = Topology("2x4", (Level("node", 2, "switch", 1e6, 1e-5), Level("gpu", 4, "switch", 1e7, 1e-6)))
MIXED = Topology(
    "mixed",
    (Level("node", 2, "switch", 1e6, 1e-5, uplinks=2), Level("gpu", 4, "torus", 1e6, 1e-6, shape=(2, 2))),
    DeviceSpec((("*", 1e9),), memory_bandwidth=1e8, launch=1e-6),
)
COLLECTIVES = {
    "all_reduce": ("f32[4096]{+x}", AllReduce(("x",))),
    "reduce_scatter": ("f32[4096]{+x}", ReduceScatter(0, ("x",))),
    "all_gather": ("f32[4096@x]", AllGather(0, ("x",))),
    "all_to_all": ("f32[4096@x, 4096]", AllToAll(0, 1, ("x",))),
    "reduce": ("f32[4096]{+x}", Reduce(("x",))),
    "broadcast": ("f32[4096]{root:x}", Broadcast(("x",))),
}


def preset(name: str) -> Topology:
    topology = Topology.load(name)
    if "node" in topology.describe():
        return topology.resize(node=2)
    return topology if topology.size <= 64 else Topology.load(name, devices=16) if name == "nominal" else topology


def one(text: str, *ops: Op, mesh: sp.Mesh) -> Program:
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]
    return Program({"0": sp.TensorType.parse(text, mesh)}, steps, (str(len(ops)),))


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_alone_takes_its_price(name: str, kind: str) -> None:
    """On every preset, under every algorithm: one group over all devices, and all groups of an axis, near and far."""
    topology = preset(name)
    n = topology.size
    text, op = COLLECTIVES[kind]
    inner = topology.level_sizes[-1] if 1 < topology.level_sizes[-1] < n else n // 2
    for mesh in (sp.Mesh(x=n), sp.Mesh(y=n // inner, x=inner), sp.Mesh(x=n // inner, y=inner)):
        program = one(text, op, mesh=mesh)
        for algorithm in ("auto", *Fabric(topology).library.algorithms()):
            found = simulate(program, topology, algorithm)
            (wanted,) = step_prices(program, fabric_of(topology, (mesh,)), algorithm)
            assert found.seconds == pytest.approx(wanted.seconds, rel=1e-9), (mesh, algorithm, wanted.algorithm)
            alike = kind not in ("reduce", "broadcast") and all(t.all_even for t in program.types.values())
            assert {i.end for i in found.intervals} == {found.seconds} or not alike


@pytest.mark.parametrize("name", presets())
def test_messages_alone_take_their_price(name: str) -> None:
    """A shift by one and by half of the devices, which is a permute."""
    topology = preset(name)
    mesh = sp.Mesh(x=topology.size // 2, y=2)
    for source, destination in (("f32[4096@(x,y)]", "f32[4096@(y,x)]"), ("f32[4096@x]{root:y}", "f32[4096@x]")):
        program = sp.redistribute(source, destination, mesh=mesh).program
        wanted = [p.seconds for p in step_prices(program, fabric_of(topology, (mesh,)))]
        assert simulate(program, topology).seconds == pytest.approx(sum(wanted), rel=1e-9), str(program)


def single_steps(seed: int, count: int, devices: int) -> Iterator[tuple[str, Program]]:
    for case in cases(seed, count, devices):
        program = case.program
        for step in program.steps:
            inputs = {name: program.types[name] for name in step.operands}
            yield case.name, Program(inputs, [step], step.results)


@pytest.mark.parametrize("topology", [CLUSTER, MIXED], ids=["tree", "mixed"])
def test_any_step_alone_takes_its_price(topology: Topology) -> None:
    """Also with uneven pieces, and messages over different levels: the busiest resource is always busy."""
    for name, program in single_steps(7, 60, 8):
        (wanted,) = step_prices(program, fabric_of(topology, program.meshes))
        assert simulate(program, topology).seconds == pytest.approx(wanted.seconds, rel=1e-9), (name, str(program))


def tasks_of(program: Program, topology: Topology) -> tuple[list[list[Task]], list[float], int]:
    """By step the tasks of a program without bodies, and the work of each; how many resources there are."""
    fabric = fabric_of(topology, program.meshes)
    starts, steps, amounts = resource_starts(fabric), list[list[Task]](), list[float]()
    for step in program.steps:
        operands, results = program.step_types(step)
        pattern = step.op.pattern(*operands)
        cost = price(pattern, fabric)
        tasks: list[Task] = []
        busy = cost.transfer - cost.own
        if cost.row is not None and isinstance(pattern, Groups):
            tasks = [Task(ids, cost.alpha + cost.own, []) for ids in pattern.members.tolist()]
            for loads in group_loads(pattern, cost.row, fabric):
                for task in tasks:
                    task.rounds.append({})
                for row, resource, seconds in zip(loads.row, loads.resource, loads.seconds, strict=True):
                    tasks[row].rounds[-1][int(resource)] = float(seconds) / busy
        elif cost.row is not None and isinstance(pattern, Messages):
            share = row_shares(cost.row, fabric)
            for s, r, n in zip(
                pattern.sender.tolist(), pattern.receiver.tolist(), pattern.nbytes.tolist(), strict=True
            ):
                loads = routes(fabric, *fabric.topology_ids(np.array([[s], [r]])))
                levels = np.searchsorted(starts, loads.resource, side="right") - 1
                uses = [float(x) * n * share[j] / busy for x, j in zip(loads.seconds, levels, strict=True)]
                tasks.append(Task([s, r], cost.alpha, [dict(zip(loads.resource.tolist(), uses, strict=True))]))
        elif cost.seconds:
            tasks = [Task([d], cost.seconds, []) for d in step.op.devices(*results).tolist()]
        steps.append(tasks)
        amounts.append(busy)
    return steps, amounts, int(starts[-1])


def plain_cases(seed: int, count: int) -> Iterator[tuple[str, Program]]:
    """Programs without bodies."""
    for case in cases(seed, count, 8):
        if all(visit.nested_op is None for visit in walk(case.program)):
            yield f"{case.name}: {case.program}", case.program


@pytest.mark.parametrize("topology", [CLUSTER, MIXED], ids=["tree", "mixed"])
def test_programs_are_as_the_plain_simulation_has_them(topology: Topology) -> None:
    """Groups of one step that reach the next at different times, messages, kernels: on meshes in any order."""
    for name, program in plain_cases(3, 60):
        found, wanted = simulate(program, topology).seconds, steps_seconds(*tasks_of(program, topology))
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-15), name


@pytest.mark.parametrize("topology", [CLUSTER, MIXED], ids=["tree", "mixed"])
def test_between_the_busiest_resource_and_one_after_another(topology: Topology) -> None:
    """No resource gives more than it has, and something always goes on as fast as it would alone."""
    for name, program in plain_cases(11, 80):
        steps, amounts, count = tasks_of(program, topology)
        load, alone = np.zeros(count), 0.0
        for tasks, amount in zip(steps, amounts, strict=True):
            for task in tasks:
                alone += task.delay + sum(amount * max(uses.values(), default=0.0) for uses in task.rounds)
                for resource, use in (item for uses in task.rounds for item in uses.items()):
                    load[resource] += amount * use
        assert load.max() * (1 - 1e-9) <= simulate(program, topology).seconds <= alone * (1 + 1e-9), name


def test_devices_go_on_at_their_own_pace() -> None:
    """The group inside a node is in its second step while the other, over both, is still in its first."""
    mixed = sp.Mesh({"g": 2, "x": 2}, devices=(0, 1, 2, 4))
    found = simulate(one("f32[1000]{+x}", ReduceScatter(0, ("x",)), AllGather(0, ("x",)), mesh=mixed), CLUSTER)
    ends = {(i.device, i.step): i.end for i in found.intervals}
    assert ends[0, 1] < ends[2, 0]
    # Every task of a step has the step's delay: the latency of its slowest group.
    assert ends[0, 1] == pytest.approx(2 * (1e-5 + 2000 / 1e7))
    assert ends[2, 1] == pytest.approx(2 * (1e-5 + 2000 / 1e6))


def test_groups_share_what_they_meet_on() -> None:
    """Two groups over one node's port are half as fast each; where one ends, the other is as fast as alone."""
    whole, half = (sp.TensorType.parse(f"f32[{n}@x]", sp.Mesh({"x": 2}, devices=ids))
                   for n, ids in ((2000, (0, 4)), (1000, (1, 5))))  # fmt: skip
    steps = [Step(AllGather(0, ("x",)), (k,), (k + "0",)) for k in "ab"]
    found = simulate(Program({"a": whole, "b": half}, steps, ("a0", "b0")), CLUSTER)
    assert {i.device: i.end for i in found.intervals} == pytest.approx(
        {0: 1e-5 + 6e-3, 4: 1e-5 + 6e-3, 1: 1e-5 + 4e-3, 5: 1e-5 + 4e-3}
    )


def test_moves_posted_together_take_the_price_of_them_together() -> None:
    """On one mesh and on two; one after another the same moves take longer."""
    near, far = sp.Mesh({"x": 4}, devices=range(4)), sp.Mesh({"x": 2}, devices=(0, 4))
    inputs = {"a": sp.TensorType.parse("f32[4000@x]", near), "b": sp.TensorType.parse("f32[4000@x]", far)}
    steps = [Step(AllGather(0, ("x",)), (k,), (k + "0",)) for k in "ab"]
    apart = Program(inputs, steps, ("a0", "b0"))
    at_once = Program(inputs, [Step(Together(apart), ("a", "b"), ("c", "d"))], ("c", "d"))
    (wanted,) = step_prices(at_once, fabric_of(CLUSTER, at_once.meshes))
    assert simulate(at_once, CLUSTER).seconds == pytest.approx(wanted.seconds, rel=1e-9)
    assert simulate(apart, CLUSTER).seconds > wanted.seconds


def test_a_body_runs_as_often_as_it_says_and_kernels_take_their_time() -> None:
    mesh = sp.Mesh(x=8)
    x, w = sp.TensorType.parse("f32[16, 8@x]", mesh), sp.TensorType.parse("f32[8@x, 8]", mesh)
    steps = [Step(Einsum("bi,io->bo"), ("x", "w"), ("y",)), Step(ReduceScatter(1, ("x",)), ("y",), ("z",))]
    body = Program({"x": x, "w": w}, steps, ("z",))
    twice = Repeat(
        2, Program({"x": x, "w": w}, [Step(Repeat(5, body, carried=1), ("x", "w"), ("z",))], ("z",)), carried=1
    )
    program = Program({"x": x, "w": w}, [Step(twice, ("x", "w"), ("z",))], ("z",))
    kernel, move = step_prices(body, fabric_of(MIXED, (mesh,)))
    assert kernel.seconds > 0
    found = simulate(program, MIXED)
    assert found.seconds == pytest.approx(10 * (kernel.seconds + move.seconds), rel=1e-9)
    assert [(i.step, i.start, i.kind) for i in found.intervals] == 8 * [(0, 0.0, "repeat")]


@pytest.mark.parametrize("runs", [3, 9, 1000])
def test_a_body_that_settles_is_followed_for_some_runs(runs: int) -> None:
    """Two groups of unlike speed that meet once a run: all runs, one by one, take as long."""
    mesh = sp.Mesh({"g": 2, "x": 2}, devices=(0, 1, 2, 4))
    ops = [ReduceScatter(0, ("x",)), AllGather(0, ("x",)), AllGather(1, ("g",)), Slice(1, ("g",)), ToPartial(("x",))]
    start = "f32[600, 40@g]{+x}"
    step = Step(Repeat(runs, one(start, *ops, mesh=mesh), carried=1), ("0",), ("1",))
    told = Program({"0": sp.TensorType.parse(start, mesh)}, [step], ("1",))
    one_by_one = [simulate(one(start, *ops * n, mesh=mesh), CLUSTER).seconds for n in (8, 9)]
    if runs < 8:
        one_by_one = [simulate(one(start, *ops * n, mesh=mesh), CLUSTER).seconds for n in (runs - 1, runs)]
    left = max(0, runs - 9)
    wanted = one_by_one[1] + left * (one_by_one[1] - one_by_one[0])
    assert simulate(told, CLUSTER).seconds == pytest.approx(wanted, rel=1e-9)


def test_the_timeline_says_what_the_closed_form_says_of_bytes() -> None:
    """Each device receives what its op says, and holds as much at most; times are its own."""
    for case in cases(5, 60, 8):
        found, closed = simulate(case.program, CLUSTER), predict(case.program, CLUSTER)
        assert [(i.device, i.step, i.received_bytes, i.stream, i.name) for i in found.intervals] == [
            (i.device, i.step, i.received_bytes, i.stream, i.name) for i in closed.intervals
        ]
        assert [[n for _, n in c.samples] for c in found.memory] == [[n for _, n in c.samples] for c in closed.memory]
        assert sum(i.seconds for i in found.critical_path) == pytest.approx(found.seconds)


def test_what_cannot_be_simulated_is_an_error() -> None:
    program = one("f32[8@x]", AllGather(0, ("x",)), mesh=sp.Mesh(x=8))
    with pytest.raises(
        ShardplanError, match=r"^the program is 3; legal is a Program, such as plan\.program, or a Job$"
    ):
        simulate(3, CLUSTER)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardplanError, match=r"^the placement is None; legal are a placement, a topology, and a"):
        simulate(program, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TopologyError, match=r"^device 7 is not on the topology"):
        simulate(program, CLUSTER.resize(gpu=2))
    with pytest.raises(TopologyError, match=r"^algorithm 'stars' is unknown to library ring; legal: auto, ring"):
        simulate(program, CLUSTER, "stars")
    body = one("f32[8]{+x}", AllReduce(("x",)), mesh=sp.Mesh(x=8))
    long = Program(
        {"0": body.input_types[0], "a": sp.TensorType.parse("f32[8@y]", sp.Mesh({"y": 2}, devices=(8, 9)))},
        [Step(Repeat(10**7, body), ("0",), ("1",)), Step(AllGather(0, ("y",)), ("a",), ("b",))],
        ("1", "b"),
    )
    with pytest.raises(TimelineError, match=r"^the program runs 10000001 steps, and its repeats do not settle; legal"):
        simulate(long, CLUSTER.resize(node=3))
