"""Without a topology seconds are those of the topology `nominal`: one price, by whichever way it is asked for.

The flows are replayed by plain loops in `tests/replay.py`, which lists every message; the price counts them.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings

import replay
import shardplan as sp
import strategies as some
from shardplan.core.messages import messages
from shardplan.core.ops import Exchange
from shardplan.core.ops.collective import result_type
from shardplan.core.pattern import Groups, Messages
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.plans.nominal import nominal_fabric
from shardplan.plans.pricing import price_program, step_prices
from shardplan.simulation.closed.collectives import KINDS, CollectivePrices
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.predict import predict

SUITES = ("even", "uneven", "partial", "rooted")
SEEDS = 500  # drawn programs; each is priced in five ways


def nominal(*meshes: sp.Mesh) -> sp.Topology:
    """As large as the ids are."""
    return sp.Topology.load("nominal", devices=1 + max((d for m in meshes for d in m.devices), default=0))


def agree(plan: sp.Plan) -> None:
    """The certificate, the closed form of a program and the plain loops say what the topology's price is."""
    program = plan.program
    topology = nominal(*(t.mesh for t in (*plan.certificate.sources, *plan.certificate.destinations)))
    wanted = price_program(program, Fabric(topology)).seconds
    assert plan.certificate.where is None and plan.certificate.level_bytes == ()
    assert plan.seconds == pytest.approx(wanted, rel=1e-9, abs=0), str(program)
    assert predict(program).seconds == pytest.approx(predict(program, topology).seconds, rel=1e-9, abs=0)
    assert predict(program).seconds == pytest.approx(wanted, rel=1e-9, abs=0)
    assert replay.replayed(program, topology) == pytest.approx(wanted, rel=1e-9, abs=0), str(program)


@settings(max_examples=200, deadline=None)
@given(some.pairs(SUITES, most=16))
def test_a_redistribution_takes_what_it_takes_on_nominal(pair: tuple[sp.TensorType, sp.TensorType]) -> None:
    agree(sp.redistribute(*pair))


@settings(max_examples=60, deadline=None)
@given(some.cross_pairs())
def test_so_does_one_between_two_meshes(pair: tuple[sp.TensorType, sp.TensorType]) -> None:
    agree(sp.redistribute(*pair))


@settings(max_examples=40, deadline=None)
@given(some.batches())
def test_so_does_a_batch(batch: tuple[list[sp.TensorType], list[sp.TensorType]]) -> None:
    agree(sp.redistribute(*batch))


def test_a_drawn_collective_costs_the_same_by_every_way() -> None:
    """Single steps: hardware's price, that of no topology, events, and messages one by one."""
    seen: dict[str, int] = {}
    for seed in range(SEEDS):
        rng = random.Random(f"nominal {seed}")
        program = some.random_program(rng, 16, together=seed % 2 == 0, repeat=False)
        topology = nominal(*program.meshes)
        step = rng.choice(program.steps) if program.steps else None
        if step is None:
            continue
        one = Program({name: program.types[name] for name in step.operands}, [step], step.results)
        (wanted,) = step_prices(one, Fabric(topology))
        assert price_program(one, nominal_fabric(topology.size)).seconds == pytest.approx(
            wanted.seconds, rel=1e-9, abs=0
        )
        assert predict(one).seconds == pytest.approx(wanted.seconds, rel=1e-9, abs=0), str(one)
        assert sp.simulate(one, topology).seconds == pytest.approx(wanted.seconds, rel=1e-9), str(one)
        assert replay.replayed(one, topology) == pytest.approx(wanted.seconds, rel=1e-9, abs=0), str(one)
        seen[step.op.name] = seen.get(step.op.name, 0) + (wanted.seconds > 0)
    moving = {"all_gather", "all_reduce", "all_to_all", "reduce_scatter", "exchange", "together"}
    assert moving <= {name for name, count in seen.items() if count > 3}, seen


def test_the_closed_form_asks_the_same_of_groups() -> None:
    """Each kind over each degree of 24 devices, near and far."""
    topology = sp.Topology.load("nominal", devices=24)
    prices = CollectivePrices.of(topology, Parameters(network=1.0))
    for (summed, whole), kind in KINDS.items():
        for size, stride in [(n, s) for n in (2, 3, 4, 6, 8, 24) for s in (1, 2, 3, 4) if 24 % (n * s) == 0]:
            ids = np.arange(24).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
            lines = prices.lines(summed, whole, [(np.array([size]), np.array([stride]))])
            for nbytes in (8.0, 4096.0, 1e7):
                held = nbytes / (1 if summed else size)
                wanted = price(Groups(kind, ids, np.full(len(ids), held)), nominal_fabric(24)).seconds
                assert lines.seconds(np.array([nbytes])).item() == pytest.approx(wanted, rel=1e-9), (kind, size, stride)


@pytest.mark.parametrize("axes", [(), ("a",), ("a", "b")])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[48@(a,b), 48@c]", "f32[48@(b,a), 48]"),
        ("f32[48@(a,c), 48@b]", "f32[48@(b,c), 48@a]"),
        ("f32[48@a, 48]", "f32[48@b, 48]"),
        ("f32[48@(b,a), 48]{+c}", "f32[48, 48@(a,b)]{+c}"),
        ("f32[48@a, 48]{root:c}", "f32[48, 48@a]{root:c}"),
        ("f32[48, 48@(a,b,c)]", "f32[48@a, 48]"),
    ],
)
def test_messages_that_are_counted_are_those_that_are_listed(source: str, target: str, axes: tuple[str, ...]) -> None:
    mesh = sp.Mesh({"a": 2, "b": 2, "c": 6}, devices=np.random.default_rng(3).permutation(40)[:24].tolist())
    s, t = (sp.TensorType.parse(x, mesh) for x in (source, target))
    op = Exchange(t.layout, axes)
    try:
        result_type(op, s)
    except sp.ShardplanError:
        return
    for operands in ((s,), (s, s)):
        found = op.pattern(*operands)
        assert isinstance(found, Messages)
        if found.totals is None:  # groups that do not want all that they hold: listed
            assert axes
            return
        sender, receiver, count = messages(s, t, (), axes)
        ids = mesh.ids
        for ends, number, nbytes in (
            (ids[sender], found.totals.sent, found.totals.sent_bytes),
            (ids[receiver], found.totals.received, found.totals.received_bytes),
        ):
            dense = np.zeros((2, 40))
            np.add.at(dense[0], ends, 1)
            np.add.at(dense[1], ends, count * s.itemsize * len(operands))
            said = np.zeros((2, 40))
            said[:, found.totals.devices] = number, nbytes
            np.testing.assert_array_equal(said, dense)
        listed = Messages(found.sender, found.receiver, found.nbytes)
        assert price(found, nominal_fabric(40)) == price(listed, nominal_fabric(40))
        assert price(found, nominal_fabric(40)).load[0].tolist() == pytest.approx(  # pyright: ignore[reportOptionalMemberAccess]
            price(listed, nominal_fabric(40)).load[0].tolist()  # pyright: ignore[reportOptionalMemberAccess]
        )
        steps = [Step(op, tuple(map(str, range(len(operands)))), tuple(f"r{k}" for k in range(len(operands))))]
        program = Program({str(k): s for k in range(len(operands))}, steps, steps[0].results)
        assert predict(program).seconds == pytest.approx(replay.replayed(program, nominal(mesh)), rel=1e-9)


def test_messages_of_many_devices_are_not_listed() -> None:
    """Four million of them: the price of a plan without a topology counts."""
    mesh = sp.Mesh(a=64, b=32, c=32)
    plan = sp.redistribute("f32[4096@(a,b), 4096@c]", "f32[4096@c, 4096@(a,b)]", mesh=mesh)
    (step,) = plan.program.steps
    found = step.op.pattern(*plan.program.step_types(step)[0])
    assert isinstance(found, Messages) and "ends" not in vars(found)
    assert plan.seconds == pytest.approx(64 * 5e-6 + found.totals.sent_bytes.max() / 50e9, rel=1e-9)  # pyright: ignore[reportOptionalMemberAccess]
    assert "ends" not in vars(found)
