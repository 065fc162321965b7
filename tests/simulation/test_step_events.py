"""Many steps by events: each as it is alone, above its floors, and forward passes as a plain recurrence has them."""

import dataclasses

import numpy as np
import pytest

from shardplan import Model, Strategy, Topology
from shardplan.simulation.closed.configurations import ORDERS, Configurations
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.closed.scheduled_steps import StageTimes
from shardplan.simulation.searching.space import INSIDE, StrategySpace
from shardplan.simulation.step_events import StepEvents
from shardplan.simulation.steps import simulate_step
from shardplan.simulation.sweep import compile_schedule, sweep
from simulation.small_box import BOX, SIZES

DEEP = SIZES | {"layers": 8}
GPT = Model.load("gpt", positions=64, **DEEP)
MOE = Model.load("moe", kv_heads=2, ffn=128, experts=4, experts_per_token=2, dense_layers=0, **DEEP)


def form(model: Model) -> ClosedForm:
    return ClosedForm(model, BOX, of_machine(BOX))


@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe"])
def test_many_at_once_are_each_alone(model: Model) -> None:
    space = StrategySpace.of(model, 8, 16, precision="bf16")
    live = np.flatnonzero(space.live(np.arange(len(space.frames))))
    drawn = np.random.default_rng(3).choice(live, 40, replace=False)
    some = [space.one(int(k)).strategy(0) for k in drawn]
    some += [Strategy(pipeline=4, data=2, global_batch=16, schedule="zb-h1", precision="bf16")]
    out = StepEvents(form(model))(Configurations.of(some))
    for k, one in enumerate(some):
        alone = simulate_step(model, one, BOX, "events")
        assert out.seconds[k] == pytest.approx(alone.seconds, rel=1e-12)
        assert out.peak_bytes[k] == alone.peak_bytes or abs(out.peak_bytes[k] - alone.peak_bytes) < 1


@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe"])
def test_no_order_of_passes_is_below_its_floor(model: Model) -> None:
    space = StrategySpace.of(model, 8, 16, precision="bf16")
    frames = np.arange(len(space.frames))
    every = space.columns(np.repeat(frames, len(INSIDE)), 0, np.tile(np.arange(len(INSIDE)), len(frames)))
    events = StepEvents(form(model))
    out = events(every)
    assert (out.floor_seconds <= out.seconds * (1 + 1e-12)).all()
    alone = every.columns["pipeline"] == 1
    once = out.parts["once"]
    assert np.allclose((out.floor_seconds + once)[alone], out.seconds[alone], rtol=1e-12)  # nothing else is in it
    seconds, nbytes = events.floors(space.columns(frames, 0, 0))
    assert (seconds[:, None] <= out.seconds.reshape(len(frames), -1) * (1 + 1e-12)).all()
    assert (nbytes[:, None] <= out.peak_bytes.reshape(len(frames), -1) * (1 + 1e-12)).all()


@pytest.mark.parametrize(("pipeline", "many"), [(1, 3), (2, 4), (4, 4), (8, 2)])
def test_forward_passes_go_as_soon_as_they_can(pipeline: int, many: int) -> None:
    one = Strategy(pipeline=pipeline, data=8 // pipeline, global_batch=8 // pipeline * many, precision="bf16")
    events = StepEvents(form(GPT), forward=True)
    c = Configurations.of([one])
    made = dataclasses.asdict(events.stages(c))
    assert not made["backward_input"].any() and not made["backward_weight"].any()
    ends = [0.0] * pipeline
    for _ in range(many):
        there = 0.0
        for k in range(pipeline):
            ends[k] = max(ends[k], there) + made["forward"][0, k]
            there = ends[k] + (made["send"][0, k] if k + 1 < pipeline else 0)
    assert float(events(c).seconds[0]) == pytest.approx(ends[-1], rel=1e-12)


def test_times_of_chunks_are_those_that_sweeps_take() -> None:
    """One microbatch there and back over two ranks, added up by hand."""
    forward, backward, nothing = (np.array([pair]) for pair in ((1.0, 2.0), (5.0, 7.0), (0.0, 0.0)))
    send, after = np.array([0.5]), np.array([3.0])
    made = StageTimes(
        forward, backward, backward / 4, nothing, nothing, nothing, nothing, send, after, send, np.ones(len(send))
    )
    order = compile_schedule("1f1b", 2, 1)
    assert sweep(order, made.of_chunks()).makespan.tolist() == [1 + 0.5 + 2 + 7 + 0.5 + 5 + 3]
    late = made._replace(ahead=np.array([[9.0, 0.25]]), ahead_back=np.array([[0.125, 9.0]]))  # of who waits alone
    assert sweep(order, late.of_chunks()).makespan.tolist() == [19 - 0.25 - 0.125]


CLUSTER = Topology.load("dgx-h100", nodes=6)


@pytest.mark.parametrize(
    ("pipeline", "tensor", "data"), [(2, 2, 12), (3, 2, 8), (6, 2, 4), (8, 2, 3), (4, 4, 3), (12, 1, 4)]
)
def test_a_message_within_a_node_leaves_none_in_any_pipeline(pipeline: int, tensor: int, data: int) -> None:
    """Under every order of axes, by the nodes of all senders and receivers; and none where no order is said."""
    one = Strategy(pipeline=pipeline, tensor=tensor, data=data, global_batch=4 * data, precision="bf16")
    columns = Configurations.of([one]).columns
    closed = ClosedForm(GPT, CLUSTER, of_machine(CLUSTER))
    seconds: list[float] = []
    for order in range(len(ORDERS)):
        c = Configurations({**columns, "order": np.array([order])})
        step, ids = int(c.strides()["pipeline"][0]), np.arange(one.devices)
        made = closed.stages(c).messages
        between = made.between(pipeline)[0]
        for k in range(pipeline - 1):
            senders = ids[ids // step % pipeline == k]
            leaves = (senders // 8 != (senders + step) // 8).any()
            assert between[k] == (made.far if leaves else made.near)[0] or made.far == made.near
        seconds.append(float(closed.seconds(c)[0]))
    unordered = Configurations({**columns, "order": np.array([len(ORDERS)])})
    assert 0 < closed.seconds(unordered)[0] <= min(seconds) * (1 + 1e-12)
