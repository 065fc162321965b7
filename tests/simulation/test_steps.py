"""A model's step at three fidelities: where they agree, and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest

import shardplan as sp
from shardplan import Model, ShardplanError, Strategy, Topology
from shardplan.hardware.level import KernelShares
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.steps import derate, simulate_step

MODEL = Model.load("gpt", layers=8, hidden=256, heads=4, seq=128, positions=128, vocab=512, precision="bf16")
BOX = Topology.load("dgx-a100-80g", nodes=1)


@pytest.mark.parametrize(
    "said",
    [
        {"data": 8},
        {"data": 2, "tensor": 4, "sequence_parallel": True},
        {"pipeline": 4, "data": 2, "global_batch": 32},
        {"pipeline": 2, "tensor": 4, "global_batch": 16, "schedule": "interleaved", "interleave": 2},
        {"pipeline": 4, "tensor": 2, "global_batch": 16, "schedule": "zb-h1"},
        {"pipeline": 4, "tensor": 2, "global_batch": 16, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_the_closed_form_is_near_the_events(said: dict[str, Any]) -> None:
    """Equal but for the embedding and the head, and for messages: a few percent."""
    one = Strategy(**said)
    closed, events = (simulate_step(MODEL, one, BOX, f) for f in ("closed", "events"))
    assert closed.seconds == pytest.approx(events.seconds, rel=0.06)
    assert closed.peak_bytes == events.peak_bytes
    assert sum(i.end - i.start for i in closed.critical_path) == pytest.approx(closed.seconds)
    assert sum(i.end - i.start for i in events.critical_path) == pytest.approx(events.seconds)


def test_without_a_pipeline_they_are_one() -> None:
    for many in (1, 5):
        one = Strategy(data=4, tensor=2, global_batch=4 * many)
        closed, events = (simulate_step(MODEL, one, BOX, f) for f in ("closed", "events"))
        assert closed.seconds == pytest.approx(events.seconds, rel=1e-12)


def test_ops_are_no_other_size() -> None:
    """The same flops and bytes on what the machine delivers, without the shapes of products: of one order."""
    one = Strategy(data=2, tensor=4)
    model = Model.load("gpt", layers=4, hidden=2048, heads=16, seq=1024, vocab=8192, precision="bf16")
    p = Parameters(launch=1e-9, half=1.0)
    ops = sp.simulate(model, one, BOX, "ops", p).seconds
    assert ops == pytest.approx(sp.simulate(model, one, BOX, "closed", p).seconds, rel=0.5)


def test_a_machine_delivers_parts() -> None:
    p = Parameters(product=0.5, stream=0.25, network=0.5, attention=0.2, half=32, launch=3e-6)
    half = derate(BOX, p)
    assert replace(half.device, kernels=KernelShares(), issue=None) == BOX.device
    assert half.device.issue_seconds == 3e-6
    assert half.device.kernels == KernelShares(product=0.5, attention=0.2 * 1.6, stream=0.25, half=32)
    assert Topology.parse(str(half)) == half
    assert half.levels[0].delivered_rate == BOX.levels[0].delivered_rate / 2 and half.levels[1] == BOX.levels[1]


def test_a_host_issues_in_its_own_time_and_collectives_start_in_the_devices() -> None:
    """A host that takes a millisecond for each kernel is what a step waits for; no collective takes longer by it."""
    job = sp.partition(MODEL, Strategy(tensor=4, data=2), BOX)
    slow, fast = (simulate_job(job, derate(BOX, Parameters(launch=x))) for x in (1e-3, 1e-9))
    spans = [[p.op for p in line.opened.ops(0, 0)] for line in (slow, fast)]
    assert slow.seconds > 1e-3 * sum(op.issued for op in spans[0]) > fast.seconds
    costs = [[op.cost.seconds for op in ops if op.cost.kind == "all_reduce"] for ops in spans]
    assert costs[0] == costs[1] and min(costs[0]) > BOX.device.launch > 0


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ((MODEL, Strategy(data=4), BOX), "a strategy of 4 devices on a topology of 8; legal is one of 4"),
        ((MODEL, BOX), "legal are a Strategy and a topology"),
        ((MODEL.program, Strategy()), "legal is a Model with it"),
        ((MODEL.program, BOX, BOX), "topology, fidelity, params and requests are of a model"),
        ((MODEL, Strategy(data=8), BOX, "guess"), "legal: closed, events, ops"),
        ((MODEL, Strategy(pipeline=2, data=4, cuts=(3,), global_batch=8), BOX), "legal is None"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(what: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ShardplanError, match=text.replace("(", r"\(")):
        sp.simulate(*what)


def test_what_is_remembered_of_a_model_is_not_its_machine() -> None:
    one = Strategy(data=4, tensor=2, global_batch=32)
    boxes = [Topology.load(name, nodes=1) for name in ("dgx-a100-80g", "dgx-h100")]
    for box in (*boxes, boxes[0]):
        fresh = ClosedForm(MODEL, box, of_machine(box))(Configurations.of([one]))
        assert simulate_step(MODEL, one, box, "closed").seconds == pytest.approx(float(fresh.seconds[0]))
