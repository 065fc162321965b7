"""Bytes on slow levels: near holders, parts gathered inside a node, idle peers, and what decides within 10 %."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from tests import oracle
from tests.replay import messages_of
from tests.strategies import rngs

import shardplan as sp
from shardplan.core.accounting import books_of
from shardplan.core.ops import Exchange, Send
from shardplan.movement.batches.idle_peers import relayed_ops
from shardplan.movement.redistribution.choice import FEW_BYTES, Chosen, Contest, chain
from shardplan.movement.redistribution.single_move import rules_of
from shardplan.plans.pricing import NOISE

NODE = 8


def cluster(nodes: int) -> sp.Topology:
    return sp.Topology.load("dgx-h100", nodes=nodes)


def crossing(plan: sp.Plan) -> float:
    """Bytes between nodes, of messages that lowerings put."""
    total = 0.0
    for step in plan.program.steps:
        sent = messages_of(step.op, *plan.program.step_types(step))
        total += sum(n for (a, b), n in sent.items() if a // NODE != b // NODE)
    return total


def test_parts_are_fetched_near_and_gathered_inside() -> None:
    """What a node holds together does not cross: 0.356 ms and 290 MB with a permute that takes its holders in turn."""
    plan = sp.redistribute("f32[82975744@b]", "f32[82975744@a]", cluster(8), mesh="a=8,b=8")
    assert [step.op.name for step in plan.program.steps] == ["exchange", "all_gather"]
    assert plan.certificate.level_bytes[0] == 0 and plan.seconds * 1e3 == pytest.approx(0.2685, abs=1e-4)
    small = sp.redistribute("f32[1024@b]", "f32[1024@a]", cluster(8), mesh="a=8,b=8")
    assert oracle.unsound(small.program, small.program.output_types) is None


def moved(rng: random.Random) -> tuple[sp.TensorType, sp.TensorType]:
    """A tensor of 16 devices on 2 nodes, and the same on some that stayed and a third node's."""
    dp, tp = rng.choice([(2, 8), (4, 4), (1, 16)])
    where = rng.choice(["[{}@tp, 96]", "[{}, 96@tp]", "[{}@dp, 96@tp]", "[{}@(dp,tp), 96]", "[{}@(tp,dp), 96]"])
    count = rng.choice((16, 16, 24, 8))
    ids = sorted(rng.sample(range(16), min(count, rng.randint(8, 16))))
    ids = [*ids, *range(16, 16 + count - len(ids))][:count]
    later = sp.Mesh(dp=count // tp, tp=tp, devices=ids) if count % tp == 0 else sp.Mesh(dp=1, tp=count, devices=ids)
    text = "i32" + where.format(96 * rng.choice((1, 40)))
    return sp.TensorType.parse(text, sp.Mesh(dp=dp, tp=tp)), sp.TensorType.parse(text, later)


@given(rngs())
@settings(max_examples=40)
def test_what_takes_as_long_with_fewer_bytes_between_nodes_is_taken(rng: random.Random) -> None:
    """A send from near holders counts among what was there to choose from; the plan says the least seconds too."""
    s, t = moved(rng)
    plan = sp.redistribute(s, t, cluster(4))
    assert oracle.least_crossing(s, t, NODE) <= crossing(plan) == pytest.approx(plan.certificate.level_bytes[0], abs=1)
    assert plan.least_seconds <= plan.seconds <= plan.least_seconds * (1 + NOISE) * (1 + 1e-9)
    rules = rules_of(s, t, cluster(4), False, False)
    near = chain([Send(t.layout, t.mesh, near=(NODE,))], s)
    direct = Chosen.of(near, books_of(near), False, rules)
    assert plan.least_seconds <= direct.price * (1 + 1e-9)
    if direct.price <= plan.least_seconds * (1 + NOISE):
        assert plan.certificate.level_bytes[0] <= (1 + FEW_BYTES) * direct.crossing[0] * (1 + 1e-9)


def test_a_hot_spare_fetches_its_shard_once() -> None:
    """One of 16 devices is replaced: parts gathered over all pairs save 6 %, for 8 times as many bytes."""
    text, mesh = "bf16[8192, 106496@tp]", sp.Mesh(dp=2, tp=8)
    spare = sp.Mesh(dp=2, tp=8, devices=[*range(15), 16])
    plan = sp.redistribute(sp.TensorType.parse(text, mesh), sp.TensorType.parse(text, spare), cluster(4))
    assert plan.certificate.level_bytes == (8192 * 106496 * 2 / 8, 0.0)
    assert plan.certificate.least_seconds is not None and plan.least_seconds < plan.seconds
    assert f"least      {plan.least_seconds * 1e3:.2f} ms by another program" in str(plan)
    plan.certificate.check()
    for claim in (plan.seconds * 2, plan.certificate.lower_bound_seconds / 2):
        with pytest.raises(sp.CertificateError, match="least_seconds is claimed to be"):
            replace(plan.certificate, least_seconds=claim).check()


def test_within_ten_percent_bytes_decide_then_devices_and_names() -> None:
    rules = rules_of(*(sp.TensorType.parse("f32[8@a]", sp.Mesh(a=4, b=4)),) * 2, cluster(2), False, False)
    assert rules.slow_levels == [0, 1]
    mesh = sp.Mesh(a=2, b=2)
    source, target = (sp.TensorType.parse(x, mesh) for x in ("f32[8@a, 8]", "f32[8, 8@a]"))
    grouped, whole = (chain([Exchange(target.layout, axes)], source) for axes in (("a",), ()))

    def made(program: sp.Program, price: float, slow: float, exact: bool = False) -> Chosen:
        return Chosen(program, books_of(program), exact, price, (slow, 300 - slow))

    def taken(*entered: Chosen) -> Chosen:
        contest = Contest(rules)
        for one in entered:
            contest.add(one)
        assert contest.winner is not None
        return contest.winner

    fast, near, slow = made(whole, 1.0, 100.0), made(whole, 1.09, 90.0), made(whole, 1.11, 0.0)
    assert taken(fast, near, slow) == taken(slow, near, fast) == replace(near, least=1.0)
    inside = made(whole, 1.0, 0.0), replace(made(whole, 1.09, 0.0), crossing=(0.0, 90.0))
    assert taken(*inside) == replace(inside[1], least=1.0)
    few = made(grouped, 1.05, 101.0)
    assert taken(fast, few) == taken(few, fast) == replace(few, least=1.0)
    proved = replace(fast, exact=True)
    assert taken(proved, near, few) is taken(few, proved) is proved


def pipelined(rng: random.Random) -> tuple[sp.TensorType, sp.TensorType]:
    """A tensor on 16 devices, and the same in other parts on 8 to 32, some of them the same, in another order."""
    mesh = sp.Mesh(dp=2, tp=8, devices=rng.sample(range(16), 16) if rng.random() < 0.5 else range(16))
    count = rng.choice((8, 16, 24, 32))
    later = sp.Mesh(fsdp=count, devices=rng.choice((range(32 - count, 32), range(count))))
    text = rng.choice(("i32[{}@tp, 32]", "i32[{}@dp, 32@tp]", "i32[{}@(dp,tp), 32]")).format(rng.choice((2400, 3200)))
    goal = rng.choice(("i32[{}@fsdp, 32]", "i32[{}, 32@fsdp]")).format(text[4:].split("@")[0])
    return sp.TensorType.parse(text, mesh), sp.TensorType.parse(goal, later)


def prompt_cluster() -> sp.Topology:
    """Four nodes whose links answer at once, so that a step more pays for tensors that a test can follow, too."""
    text = re.sub(r'latency = ".*"', 'latency = "1 ns"', str(cluster(4)))
    return sp.Topology.parse(re.sub(r'(library|launch) = ".*"\n', "", text))


@given(rngs())
@settings(max_examples=60)
def test_idle_peers_share_what_leaves_their_node(rng: random.Random) -> None:
    """Every element arrives, as few bytes cross as straight from near holders, and none sends more than before."""
    s, t = pipelined(rng)
    ops = relayed_ops(s, t, rules_of(s, t, prompt_cluster(), False, False).fabric)
    assume(ops)
    program, straight = chain(ops, s), chain([Send(t.layout, t.mesh, near=(NODE,))], s)
    assert oracle.unsound(program, (t,)) is None
    inner, outer = (messages_of(step.op, *program.step_types(step)) for step in program.steps)
    (before,) = (messages_of(step.op, *straight.step_types(step)) for step in straight.steps)
    assert all(a // NODE == b // NODE for a, b in inner)

    def sent(found: dict[tuple[int, int], int]) -> dict[int, int]:
        ids = {a for a, _ in found}
        return {d: sum(n for (a, b), n in found.items() if a == d and b // NODE != a // NODE) for d in ids}

    one, two = sent(before), sent(outer)
    assert sum(two.values()) == sum(one.values())
    for node in {d // NODE for d in two}:
        mine = [n for d, n in two.items() if d // NODE == node]
        peers = sum(d // NODE == node for d in s.mesh.devices)
        cuts = len(before) // len({d // NODE for d in s.mesh.devices}) + peers  # parts are cut between rows
        assert max(mine) <= min(max(one.values()), sum(mine) / peers + cuts * s.shape[1] * s.itemsize)


def test_idle_peers_are_used_where_that_pays() -> None:
    """PP2 x DP2 x TP8 to FSDP32: half of the senders' NICs were idle, at 2.34 times the bound."""
    mesh, later = sp.Mesh(dp=2, tp=8), sp.Mesh(fsdp=32)
    ends = (sp.TensorType.parse(x, m) for x, m in (("bf16[28672@tp,8192]", mesh), ("bf16[28672@fsdp,8192]", later)))
    plan = sp.redistribute(*ends, cluster(4))
    assert [step.op.name for step in plan.program.steps] == ["exchange", "send"]
    assert plan.seconds <= 1.78 * plan.certificate.lower_bound_seconds
    plan.certificate.check()


@pytest.mark.parametrize("megabytes", [2, 4, 8, 16, 32])
def test_what_gathers_is_called_an_all_gather(megabytes):
    """Sequence-parallel gathers in a node: messages are priced lower there, and published all-gathers take less."""
    rows = megabytes * 2**20 // (2 * 8192)
    dgx = sp.Topology.load("dgx-h100", nodes=1)
    plan = sp.redistribute(f"bf16[{rows}@tp, 8192]", f"bf16[{rows}, 8192]", mesh="tp=8", topology=dgx)
    assert [type(step.op).__name__ for step in plan.program.steps] == ["AllGather"]
    assert plan.least_seconds is not None and plan.least_seconds < plan.seconds
    plan.certificate.check()
