"""The price of a program is the time of its flows, replayed by plain loops: one mesh and two, `together`, `repeat`."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import replay
import strategies as some
from benchmarks import claimed_seconds, suites
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Send
from shardplan.core.ops.grouped import Grouped
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import step_patterns
from shardplan.hardware import Fabric, Level, Topology
from shardplan.hardware.level import DeviceSpec
from shardplan.plans.pricing import price_program, step_prices, step_windows

DEVICE = DeviceSpec(flops=(("*", 1e12),), memory_bandwidth=1e11, launch=3e-6)
SWITCH = Level("gpu", 4, "switch", 1e11, 1e-6)


def cluster(library: str, *levels: Level) -> Topology:
    return Topology("replayed", levels, DEVICE, library)


NODES = Level("node", 4, "switch", 2e10, 5e-6, 2, degraded=((1, 0.5),))
TOPOLOGIES = {
    "ring-switch": cluster("ring", Level("device", 16, "switch", 5e10, 5e-6, degraded=((3, 0.5),))),
    "ring-nodes": cluster("ring", NODES, SWITCH),
    "ring-ring": cluster("ring", Level("chip", 16, "ring", 5e10, 1e-6)),
    "ring-torus": cluster("ring", Level("chip", 16, "torus", 5e10, 1e-6, shape=(4, 4), efficiency=0.9)),
    "ring-mesh": cluster("ring", Level("chip", 16, "mesh", 5e10, 1e-6, shape=(2, 8))),
    "ring-full": cluster("ring", Level("node", 4, "switch", 2e10, 5e-6), Level("gpu", 4, "full", 5e10, 1e-6)),
    "ring-deep": cluster("ring", Level("rack", 2, "full", 1e10, 9e-6), Level("node", 2, "ring", 2e10, 5e-6, 3), SWITCH),
    "ring-pods": cluster(
        "ring",
        Level("pod", 2, "switch", 1e10, 9e-6, 2, rails=True, degraded=((1, 0.5),)),
        Level("node", 2, "switch", 2e10, 5e-6, 2),
        SWITCH,
    ),
    "nccl-nodes": cluster("nccl", NODES, SWITCH),
    "nccl-nvls": cluster("nccl", replace(NODES, size=2), replace(SWITCH, size=8, reduces=True)),
    "nccl-rails": cluster("nccl", Level("node", 2, "switch", 5e10, 9e-6, 8), Level("gpu", 8, "switch", 4e11, 1e-6)),
}


MIXES = {"plain": (False, False), "together": (True, False), "repeat": (False, True), "both": (True, True)}


@pytest.mark.parametrize("mixed", MIXES)
@pytest.mark.parametrize("where", TOPOLOGIES)
def test_the_price_is_the_time_of_the_flows(where: str, mixed: str, programs: int = 5) -> None:
    """40 x 5 programs; `python -m tests.plans.test_replay` replays 40 x 30."""
    topology = TOPOLOGIES[where]
    for seed in range(programs):
        rng = random.Random(f"{where} {mixed} {seed}")
        program = some.random_program(rng, 16, *MIXES[mixed])
        place = np.array(rng.sample(range(16), 16))
        seconds = price_program(program, Fabric(topology, place)).seconds
        assert seconds == pytest.approx(replay.replayed(program, topology, place), rel=1e-9), program


@pytest.mark.parametrize("where", ["ring-nodes", "ring-torus", "nccl-nodes", "nccl-rails"])
def test_a_step_by_an_algorithm_takes_its_rounds(where: str) -> None:
    """Whatever the library has: what runs is that algorithm, so its messages are priced."""
    topology, seen = TOPOLOGIES[where], Counter[str]()
    for seed in range(60):
        rng = random.Random(seed)
        place = np.array(rng.sample(range(16), 16))
        for step, operands in steps_of(some.random_program(rng, 16, together=False, repeat=False)):
            if isinstance(step.op, Grouped) and operands[0].mesh.size > 1:
                # Slots are no messages: `test_composed` compares them.
                op = replace(step.op, algorithm=rng.choice([x for x in step.op.algorithms if x != "padded"]))
                names = tuple(map(str, range(len(operands))))
                results = tuple(f"r{name}" for name in names)
                program = Program(dict(zip(names, operands, strict=True)), [Step(op, names, results)], results)
                found = price_program(program, Fabric(topology, place)).seconds
                assert found == pytest.approx(replay.replayed(program, topology, place), rel=1e-9), program
                seen[op.algorithm] += found > 0
    assert seen.keys() == {"direct", "ring", "doubling", "chain", "tree"}, seen


def steps_of(program: Program) -> list[tuple[Step, tuple[TensorType, ...]]]:
    return [(step, program.step_types(step)[0]) for step in program.steps]


def test_claimed_seconds_are_those_of_the_flows() -> None:
    """40 plans; `python -m benchmarks.claimed_seconds` replays 1,000."""
    found = claimed_seconds.claims(seed=1, count=40)
    assert found["exceptions"] == [] and found["equal"] == found["count"] >= 38


@pytest.mark.parametrize("how", claimed_seconds.WRITTEN)
def test_the_same_boxes_cost_the_same_however_the_mesh_is_written(how: str) -> None:
    rng, seen = random.Random(how), 0
    for seed, (suite, where) in enumerate(itertools.product(("U", "M"), (None, *TOPOLOGIES.values()))):
        for s, t, _ in suites.problems(suite, seed, 12, most_devices=12):
            assert isinstance(s, TensorType) and isinstance(t, TensorType)
            same = 0 if s.mesh == t.mesh else 1
            state = rng.random()
            u, v = (claimed_seconds.rewritten(how, random.Random(state + k * same), x) for k, x in enumerate((s, t)))
            if u is None or v is None or (u, v) == (s, t) or max(*s.mesh.devices, *t.mesh.devices) > 15:
                continue
            for near in ((), (4,), (2, 8)):
                one, other = (claimed_seconds.direct_seconds(*pair, where, near) for pair in ((s, t), (u, v)))
                assert one is other is None or one == pytest.approx(other, rel=1e-12), (s, t, u, v)
                seen += one is not None
    assert seen >= 30


def test_the_programs_replayed_overlap() -> None:
    fabric, faster, ops = Fabric(TOPOLOGIES["ring-nodes"]), 0, set[str]()
    for seed, mix in itertools.product(range(25), MIXES.values()):
        program = some.random_program(random.Random(seed), 16, *mix)
        ops |= {step.op.name for step in program.steps}
        faster += price_program(program, fabric).seconds < (1 - 1e-9) * sum(
            p.seconds for p in step_prices(program, fabric)
        )
    assert faster >= 10 and ops >= {"together", "repeat", "send", "exchange", "all_gather", "all_reduce", "elementwise"}


def test_a_step_waits_for_what_it_reads() -> None:
    """Devices 0 and 3 have nothing to do with the first move, which changes the value that the second one reads."""
    types = [TensorType("f32", (8,), ("x",), Mesh({"x": 2}, devices=ids)) for ids in ((0, 1), (0, 2), (3, 2))]
    steps = [Step(Send(t.layout, t.mesh), (str(k),), (str(k + 1),)) for k, t in enumerate(types[1:])]
    program = Program({"0": types[0]}, steps, ("2",))
    assert [pattern.devices.tolist() for pattern in step_patterns(program)] == [[1, 2], [0, 3]]
    fabric = Fabric(TOPOLOGIES["ring-switch"])
    first, second = step_prices(program, fabric)
    assert price_program(program, fabric).seconds == first.seconds + second.seconds
    assert [window.start for window in step_windows(program, fabric)[1]] == [0.0, first.seconds]


if __name__ == "__main__":
    for name, mix in itertools.product(TOPOLOGIES, MIXES):
        test_the_price_is_the_time_of_the_flows(name, mix, 30)
    print(f"{len(TOPOLOGIES) * len(MIXES) * 30} programs take the seconds of their flows")
