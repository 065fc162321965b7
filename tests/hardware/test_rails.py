"""Rails: NIC k of every node of a pod on leaf switch k, whose uplinks carry what goes from leaf to leaf."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replay
import shardplan as sp
from hardware.topologies import grouped, outermost, pairs, railed, transfer
from shardplan.core.pattern import Groups
from shardplan.hardware.prices.affine_costs import affine_costs
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric, Flows
from shardplan.movement.reductions.type_graph import digit_lines
from shardplan.plans.pricing import price_program
from shardplan.simulation.closed.collectives import group_members
from shardplan.simulation.switch_tree import Tree

SMALL = railed(nodes=3, gpus=4, uplinks=2)
PLANES = sp.Topology(  # pods whose leaves have planes of a core of their own
    "planes", (replace(SMALL.levels[0], name="hall"), replace(SMALL.levels[0], size=2), *SMALL.levels[1:])
)
ONE_POD = railed(pods=1)


@given(
    st.sampled_from([SMALL, PLANES, replace(SMALL, library="ring"), railed(uplinks=4, degraded=((1, 0.5),))]), st.data()
)
@settings(max_examples=60, deadline=None)
def test_messages_go_over_the_leaves(topology: sp.Topology, data: st.DataObject) -> None:
    members, nbytes = data.draw(grouped(topology))
    sent, fabric = pairs(members, nbytes), Fabric(topology)
    whole = price(Groups("all_to_all", members, nbytes), fabric)
    if topology.library == "ring":  # others reach other shares of levels
        assert whole.transfer == pytest.approx(transfer(topology, sent), rel=1e-9)
    moved = np.zeros(len(topology.levels))
    for a, b, n in sent:
        moved[outermost(topology, a, b)] += n
    assert whole.level_bytes == pytest.approx(moved.tolist(), rel=1e-9)
    flows = Flows(
        np.array([a for a, _, _ in sent], dtype=np.int64),
        np.array([b for _, b, _ in sent], dtype=np.int64),
        np.array([n for _, _, n in sent]),
    )
    apart = max((x.max() for x in fabric.load(flows) if x is not None), default=0.0)
    assert apart == pytest.approx(transfer(topology, sent), rel=1e-9)


@given(st.integers(0, SMALL.size - 1), st.integers(0, SMALL.size - 1))
def test_a_message_of_the_events_takes_the_same_way(a: int, b: int) -> None:
    tree = Tree(SMALL)
    names = [tree.edges[k].name for k in tree.path(a, b)]
    pods = [name for name in names if name.startswith("pod")]
    nic = [device % 4 // 2 for device in (a, b)]
    crosses = a // 12 != b // 12 or (a // 4 != b // 4 and nic[0] != nic[1])
    assert pods == ([f"pod[{a // 12}].{nic[0]} up", f"pod[{b // 12}].{nic[1]} down"] if crosses else [])
    assert len([name for name in names if name.startswith("node")]) == 2 * (a // 4 != b // 4)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_rings_stay_on_their_rails(kind: str) -> None:
    """Of nodes whose members have the same NICs; of others every hop goes from leaf to leaf."""
    plain = Fabric(replace(ONE_POD, levels=(replace(ONE_POD.levels[0], rails=False), *ONE_POD.levels[1:])))
    rails, b = Fabric(ONE_POD), 1e8
    straight = np.arange(32).reshape(4, 8).T
    turned = np.array([[8 * node + (node + k) % 8 for node in range(4)] for k in range(8)])
    volume = {"all_reduce": 1.5, "all_gather": 3.0, "reduce_scatter": 0.75}[kind] * b
    for members, strays in ((straight, 0.0), (turned, 1.0), (straight[:, :1], 0.0), (np.arange(32)[None], 0.0)):
        pattern = Groups(kind, members, np.full(len(members), b))
        on, off = price(pattern, rails, "ring"), price(pattern, plain, "ring")
        assert sum(on.level_bytes) == pytest.approx(sum(off.level_bytes))
        assert on.level_bytes[0] == pytest.approx(strays * 8 * 4 * volume)
        if not strays:
            assert on == off
        else:  # a leaf's uplink carries what each of its four NICs sends, at half of a NIC's rate
            assert on.row is not None
            assert on.transfer - on.own == pytest.approx(4 * volume / (1e9 * on.row.share(True)))


def test_half_of_the_rails() -> None:
    """Two members a node, of which one has its NIC in all nodes: the other's half of what nodes send strays."""
    members = np.array([[0, 2, 8, 12, 16, 20]])  # NICs 0 and 2, 0 and 4, 0 and 4
    found = price(Groups("all_gather", members, np.array([1e6])), Fabric(ONE_POD), "ring")
    assert found.level_bytes[0] == pytest.approx(3 * 5e6 / 2)


def test_a_rotated_node_is_audited() -> None:
    topology, mesh = railed(leaf=sp.Topology.load("dgx-h100").levels[0].bandwidth / 50), sp.Mesh(data=8, tensor=8)
    ids = np.arange(64).reshape(8, 8)
    turned = np.stack([np.roll(row, k) for k, row in enumerate(ids)])
    straight, found = (sp.audit(x.reshape(-1), mesh, topology, {("data",): 1e9}) for x in (ids, turned))
    assert straight.seconds and found.seconds and found.seconds > 3 * straight.seconds
    assert straight.verdict == "canonical" and found.verdict == "interleaved"
    assert found.findings.reason == (
        "groups over `data` have other NICs in other nodes: what they send goes from leaf to leaf of a pod"
    )
    same = np.stack([np.roll(row, 3) for row in ids])  # numbered otherwise, but alike in every node
    assert sp.audit(same.reshape(-1), mesh, topology).verdict == "equivalent"


PROBLEMS = [
    ("f32[4096@(a,b),512]", "f32[4096,512@(a,b)]"),
    ("f32[4096@b,512]", "f32[4096@a,512]"),
    ("f32[4096,512]{+a}", "f32[4096@a,512]"),
    ("f32[4096@(b,a),512]", "f32[4096@(a,b),512]"),
]


@pytest.mark.parametrize("library", ["ring", "nccl"])
@pytest.mark.parametrize(("source", "target"), PROBLEMS)
def test_plans_are_certified(library: str, source: str, target: str) -> None:
    topology = railed(library, nodes=2, gpus=4, uplinks=2)
    for mesh in (sp.Mesh(a=4, b=4), sp.Mesh(a=4, b=4, devices=[i ^ (i // 4 % 4) for i in range(16)])):
        plan = sp.redistribute(source, target, topology, mesh=mesh)
        plan.certificate.check()
        assert plan.seconds >= plan.certificate.lower_bound_seconds
        if library == "ring":
            assert plan.seconds == pytest.approx(replay.replayed(plan.program, topology), rel=1e-9)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_parts_stand_for_all_groups(kind: str) -> None:
    """Planners and the closed form price some of the groups, which lie alike: leaves are shared by all of a pod."""
    for size, stride in itertools.product((2, 4), (1, 4, 8, 16)):
        every = np.arange(64)
        first = every[every // stride % size == 0]
        members = first[:, None] + stride * np.arange(size)
        for library in ("ring", "nccl"):
            topology = railed(library)
            whole = affine_costs(kind, members, Fabric(topology))
            parts = digit_lines(kind, ((size, stride),), (), topology, "auto")
            some = affine_costs(kind, group_members(((size, stride),), topology), Fabric(topology))
            assert np.array(parts) == pytest.approx(np.array(whole))
            assert np.array(some) == pytest.approx(np.array(whole))


def test_reduce_on_rails() -> None:
    topology = railed(nodes=2)
    placement = next(iter(sp.placements(sp.Mesh(data=4, tensor=8), topology)))
    plan = sp.reduce(placement, axes=("data",), nbytes=1e7)
    plan.certificate.check()
    assert plan.seconds == pytest.approx(price_program(plan.program, Fabric(topology, placement.position())).seconds)
