"""DistIR's nine mistakes, each kept in the parity mode, and each shown not to be made by the normal one."""

import dataclasses
import math

import pytest

import shardplan as sp
from shardplan.core.ops import AllGather, AllReduce, Einsum, Elementwise, Op, Reduce
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.hardware.level import DeviceSpec, Level
from shardplan.hardware.topology import Topology
from shardplan.simulation.parity import DistirMachine, DistirModel, DistirPoint, distir, distir_listing
from shardplan.simulation.parity.program import alternating
from shardplan.strategy.schedules import in_flight, schedule

HERE = DistirMachine()
SPEC = DeviceSpec((("*", 1.4e13),), memory_bandwidth=9e11, launch=0.0)
ONE = sp.Mesh(x=1)


def cluster(devices: int, spec: DeviceSpec = SPEC, latency: float = 0.0) -> Topology:
    return Topology("cluster", (Level("gpu", devices, "switch", 25 * 1.25e8, latency),), spec)


def kernel(op: Op, *texts: str, spec: DeviceSpec = SPEC) -> float:
    """Seconds of one op on one device, in the normal mode."""
    types = {f"{n}": sp.TensorType.parse(text, ONE) for n, text in enumerate(texts)}
    return sp.simulate(Program(types, [Step(op, tuple(types), ("out",))], ("out",)), cluster(1, spec)).seconds


def moved(op: Op, text: str, devices: int, latency: float = 0.0, spec: DeviceSpec = SPEC) -> float:
    """Seconds of one collective, in the normal mode."""
    start = sp.TensorType.parse(text, sp.Mesh(x=devices))
    return sp.simulate(
        Program({"0": start}, [Step(op, ("0",), ("1",))], ("1",)), cluster(devices, spec, latency)
    ).seconds


def test_1_the_launch_of_a_device_is_not_used() -> None:
    point = DistirPoint("mlp-xs", global_batch=4)
    assert distir(point, DistirMachine(launch=0.0)) == distir(point, DistirMachine(launch=1.0))
    assert HERE.elementwise((1,), 4, 1) == pytest.approx(10e-6, rel=1e-6)
    slow = dataclasses.replace(SPEC, launch=1e-3)
    quick = moved(AllReduce(("x",)), "f32[8]{+x}", 2)
    assert moved(AllReduce(("x",)), "f32[8]{+x}", 2, spec=slow) == pytest.approx(quick + 1e-3)


def test_2_products_are_priced_by_two_dims() -> None:
    few, many = ((2, 3, s, 64) for s in (8, 1024))
    assert HERE.product(few, (2, 3, 64, 8), 4) == HERE.product(many, (2, 3, 64, 1024), 4)
    scores = Einsum("bhsd,bhdt->bhst")
    fast = dataclasses.replace(SPEC, memory_bandwidth=math.inf)
    short, long = (kernel(scores, f"f32[2,3,{s},64]", f"f32[2,3,64,{s}]", spec=fast) for s in (8, 1024))
    assert long == pytest.approx(short * 128**2)
    assert short == pytest.approx(2 * 2 * 3 * 8 * 8 * 64 / 1.4e13)


def test_3_minimum_gather_reduce_and_loss() -> None:
    assert HERE.minimum(4096) == 4096.0
    assert HERE.collected(4096, 4) == 4 * HERE.message(4096)
    least = kernel(Elementwise("minimum(a,b)"), "f32[1024]", "f32[1024]")
    assert least == pytest.approx(3 * 4096 / 9e11)
    wide, narrow = moved(Reduce(("x",)), "f32[1024]{+x}", 2), moved(Reduce(("x",)), "f16[2048]{+x}", 2)
    assert wide == pytest.approx(narrow) == pytest.approx(HERE.message(4096))
    loss = next(a for a in distir_listing(DistirPoint("mlp-xs", global_batch=4)) if a.kind == "Loss")
    assert loss.seconds == HERE.elementwise((4, 512), 4, 1)
    one = kernel(Elementwise("a*a"), "f32[4,512]")
    assert kernel(Elementwise("(a-b)*(a-b)"), "f32[4,512]", "f32[4,512]") == pytest.approx(1.5 * one)


def updated(weights: int, width: int) -> float:
    """Seconds of SGD on so many square weights on one device, in the normal mode."""
    names = [str(n) for n in range(2 * weights)]
    types = dict.fromkeys(names, sp.TensorType.parse(f"f32[{width},{width}]", ONE))
    steps = [Step(Elementwise("a-0.1*b"), (str(2 * n), str(2 * n + 1)), (f"new{n}",)) for n in range(weights)]
    return sp.simulate(Program(types, steps, tuple(f"new{n}" for n in range(weights))), cluster(1)).seconds


def test_4_sgd_costs_its_last_weight() -> None:
    assert HERE.updated([10**9, 5], 4) == HERE.updated([5], 4)
    actions = list(distir_listing(DistirPoint("mlp-xs", global_batch=4)))
    assert actions[-1].kind == "SGDOptimizer"
    assert actions[-1].seconds == HERE.elementwise((512, 512), 4, 2)
    assert updated(8, 512) == pytest.approx(8 * updated(1, 512))


def test_5_all_gather_counts_its_shard_as_an_all_reduce_would() -> None:
    devices, shard = 4, 4096
    assert HERE.gathered([shard] * devices) == pytest.approx(2 * 3 / 4 * HERE.message(shard))
    fit = DistirMachine(allreduce={devices: (1.0, 2.0, 3.0)})
    assert fit.gathered([shard] * devices) == fit.reduced(shard, devices)
    ours = moved(AllGather(0, ("x",)), f"f32[{devices * shard // 4}@x]", devices)
    assert ours == pytest.approx(3 * HERE.message(shard))


def test_6_an_op_that_no_table_has_fails() -> None:
    ten = DistirPoint(DistirModel(10, 64), global_batch=4)
    found = distir(ten)
    assert (found.seconds, found.peak_bytes) == (-1.0, -1)
    assert found.failure is not None and found.failure.startswith("SGD of 20 operands: the tables have [2, 4, 8, 12,")
    assert updated(10, 64) == pytest.approx(10 * updated(1, 64))


def test_7_groups_are_powers_of_two_and_an_mlp_has_three_layers() -> None:
    assert "3 devices" in str(distir(DistirPoint("mlp-xs", data=3, global_batch=66)).failure)
    assert "16384 devices" in str(distir(DistirPoint("mlp-xs", data=16384, global_batch=16384)).failure)
    assert "powers of two" in str(distir(DistirPoint("gpt3", data=3, global_batch=66)).failure)
    assert "2 layers: the MLP has at least 3" in str(distir(DistirPoint(DistirModel(2, 64))).failure)
    assert moved(AllReduce(("x",)), "f32[3072]{+x}", 3) == pytest.approx(2 * 2 / 3 * HERE.message(4 * 3072))
    model = sp.Model.load("mlp", layers=2, hidden=8)
    job = sp.partition(model.resize(batch=6), sp.Strategy(data=3, microbatch=2, global_batch=6))
    assert dict(job.programs[0, "B"].meshes[0].shape)["data"] == 3


def held(steps: tuple[tuple[tuple[int, int, int], ...], ...], places: int) -> int:
    """The most microbatches of which the first place has run forward and not yet backward."""
    live = most = 0
    for step in steps:
        for place, block, _ in step:
            if place == 0:
                live += 1 if block < places else -1
        most = max(most, live)
    return most


@pytest.mark.parametrize(("places", "count"), [(2, 8), (4, 8), (4, 32)])
def test_8_more_is_in_flight_than_1f1b_has(places: int, count: int) -> None:
    where = [*range(places), *reversed(range(places))]
    waits = [[b - 1] if b else [] for b in range(2 * places)]
    steps = alternating(where, [b >= places for b in range(2 * places)], waits, count)
    ours = schedule("1f1b", places, count)
    assert held(steps, places) > max(in_flight(ours)) == places


def test_9_no_latency_no_workspace() -> None:
    assert HERE.message(0) == HERE.reduced(0, 4) == 0.0
    assert moved(AllReduce(("x",)), "f32[4]{+x}", 2, latency=1e-3) > 1e-3
    # Before anything runs a device holds its weights and its inputs, nothing else.
    point = DistirPoint(DistirModel(4, 64), global_batch=2)
    weights, rows = 4 * 64 * 64, 2 * 64
    assert distir(point).peak_bytes < 4 * (3 * weights + 20 * rows)
    plan = sp.redistribute("f32[64@x]", "f32[64]", mesh=sp.Mesh(x=2))
    assert plan.certificate.workspace_bytes > plan.certificate.peak_bytes
