"""Prices of patterns against closed forms."""

import dataclasses
import math

import numpy as np
import pytest

from hardware.topologies import GB, switches
from shardplan.core.mesh import Mesh
from shardplan.core.nested import stacked_type
from shardplan.core.ops import Repeat, matmul
from shardplan.core.pattern import Groups, Local, Messages, Work
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import TopologyError
from shardplan.hardware import (
    Fabric,
    Level,
    Placement,
    Topology,
    linear_cost,
    price,
    seconds,
)
from shardplan.hardware.prices.algorithms import tree
from shardplan.plans.pricing import fabric_of, price_program

KINDS = ["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "all_to_all"]


def groups(kind, members, nbytes=1e9, chunks=1):
    members = np.array(members, dtype=np.int64)
    return Groups(kind, members, np.broadcast_to(np.asarray(nbytes, float), members.shape[:1]).copy(), chunks)


def two_levels(n, g, inner=100 * GB, outer=8 * GB, uplinks=1, lat=(0.0, 0.0)):
    return Topology(
        "two", (Level("node", n, "switch", outer, lat[0], uplinks), Level("gpu", g, "switch", inner, lat[1]))
    )


# ---- closed forms, to 1e-9 ----


@pytest.mark.parametrize(("n", "g"), [(2, 2), (2, 8), (4, 16), (3, 6), (8, 4)])
@pytest.mark.parametrize("rings", [1, 2])
def test_flat_ring_and_hierarchical(n, g, rings):
    # Each node holds g members of each of `rings` groups, side by side, behind one NIC: s = rings groups per NIC.
    topology = two_levels(n, g * rings, inner=1000 * GB)
    fabric = Fabric(topology)
    size, b, b_in, nbytes = n * g, 8 * GB, 1000 * GB, 1e9
    ids = np.arange(topology.size).reshape(n, rings, g)
    flat = ids.transpose(1, 0, 2).reshape(rings, size)
    got = price(groups("all_reduce", flat, nbytes), fabric, "ring")
    assert got.transfer == pytest.approx(rings * 2 * (size - 1) / size * nbytes / b, rel=1e-9)
    assert got.alpha == 0
    inside = ids.transpose(1, 0, 2).reshape(rings * n, g)
    across = ids.transpose(1, 2, 0).reshape(rings * g, n)
    steps = [
        groups("reduce_scatter", inside, nbytes),
        groups("all_reduce", across, nbytes / g),
        groups("all_gather", inside, nbytes / g),
    ]
    total = sum(seconds(step, fabric, "ring") for step in steps)
    expected = 2 * (g - 1) / g * nbytes / b_in + rings * 2 * (n - 1) / n * nbytes / b
    assert total == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("g", [2, 4, 8])
def test_gain_tends_to_two_minus_one_over_g(g):
    n = 2
    fabric = Fabric(two_levels(n, g, inner=1e6 * GB))
    ids = np.arange(n * g).reshape(n, g)
    flat = seconds(groups("all_reduce", ids.reshape(1, -1)), fabric, "ring")
    across = seconds(groups("all_reduce", ids.T, 1e9 / g), fabric, "ring")
    assert flat / across == pytest.approx(2 - 1 / g, rel=1e-9)


def test_nearly_no_gain_against_a_tree():
    n, g = 2, 8
    fabric = Fabric(two_levels(n, g, inner=1e6 * GB))
    ids = np.arange(n * g).reshape(n, g)
    flat = seconds(groups("all_reduce", ids.reshape(1, -1)), fabric, "tree")
    assert flat == pytest.approx(seconds(groups("all_reduce", ids.T, 1e9 / g), fabric, "ring"), rel=1e-9)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_ring_volumes(k):
    fabric = Fabric(switches(k))
    unit = groups("x", [list(range(k))], 1e9)
    share = {
        "all_reduce": 2 * (k - 1) / k,
        "reduce_scatter": (k - 1) / k,
        "all_gather": k - 1,
        "all_to_all": (k - 1) / k,
    }
    for kind, factor in share.items():
        got = price(dataclasses.replace(unit, kind=kind), fabric, "ring")
        assert got.transfer == pytest.approx(factor, rel=1e-9)
        assert got.level_bytes == pytest.approx((k * factor * 1e9,), rel=1e-9)
    for kind in ("reduce", "broadcast"):
        got = price(dataclasses.replace(unit, kind=kind), fabric, "ring")
        assert got.transfer == pytest.approx(1, rel=1e-9)
        assert got.level_bytes == pytest.approx(((k - 1) * 1e9,), rel=1e-9)
        binomial = price(dataclasses.replace(unit, kind=kind), fabric, "tree")
        assert binomial.transfer == pytest.approx(math.ceil(math.log2(k)), rel=1e-9)
        assert binomial.level_bytes == pytest.approx(((k - 1) * 1e9,), rel=1e-9)


@pytest.mark.parametrize(("n", "g"), [(2, 8), (4, 4), (3, 6)])
def test_ring_alpha_is_nccls(n, g):
    # NCCL tuning.cc: (nsteps - nInter) l_intra + nInter l_net, nsteps = 2(K-1), nInter = 2(n-1).
    fabric = Fabric(two_levels(n, g, lat=(9e-6, 2e-6)), launch=3e-6)
    members = [list(range(n * g))]
    steps, inter = 2 * (n * g - 1), 2 * (n - 1)
    expected = 3e-6 + (steps - inter) * 2e-6 + inter * 9e-6
    assert price(groups("all_reduce", members), fabric, "ring").alpha == pytest.approx(expected, rel=1e-9)
    half = 3e-6 + (n * g - n) * 2e-6 + (n - 1) * 9e-6
    for kind in ("all_gather", "reduce_scatter", "broadcast"):
        assert price(groups(kind, members), fabric, "ring").alpha == pytest.approx(half, rel=1e-9)
    assert price(groups("all_gather", members, chunks=4), fabric, "ring").alpha == pytest.approx(4 * half, rel=1e-9)
    # NCCL's tree: 2 ((g - 1) l_intra + log2(n) l_net).
    tree_alpha = 3e-6 + 2 * ((g - 1) * 2e-6 + math.ceil(math.log2(n)) * 9e-6)
    assert price(groups("all_reduce", members), fabric, "tree").alpha == pytest.approx(tree_alpha, rel=1e-9)


@pytest.mark.parametrize("k", [2, 3, 5, 8, 13])
def test_a_binomial_tree_sends_what_is_there_and_reduces_what_has_come(k):
    for kind in ("broadcast", "reduce"):
        rounds = list(tree(kind, np.arange(k)[None, :], np.array([1.0]), Fabric(switches(k))))
        assert len(rounds) == math.ceil(math.log2(k))
        pairs = [list(zip(one.flows.sender.tolist(), one.flows.receiver.tolist(), strict=True)) for one in rounds]
        # A reduction is a broadcast run backwards.
        turned = pairs if kind == "broadcast" else [[(b, a) for a, b in reversed(one)] for one in reversed(pairs)]
        there = {0}
        for one in turned:
            assert {a for a, _ in one} <= there, "a sender has nothing yet"
            assert not {b for _, b in one} & there, "a receiver has it already"
            there |= {b for _, b in one}
        assert there == set(range(k))


def test_the_slowest_group_says_the_latency():
    # Beside a group across nodes, one inside a node: both run in one round of the outer latency.
    fabric = Fabric(two_levels(2, 4, lat=(9e-6, 2e-6)))
    for members in ([[0, 1], [2, 4]], [[0, 4], [2, 3]]):
        assert price(groups("all_gather", members), fabric, "ring").alpha == pytest.approx(9e-6, rel=1e-9)


def test_heads_of_double_trees_lie_on_different_units():
    # Two racks of two nodes, and two groups over all four nodes. In each rack a group's chain edge carries B each way,
    # and its head B each way to the other rack: a node that holds one group's head carries 3 B, one with both 4 B.
    levels = (("rack", 1000 * GB), ("node", GB), ("gpu", 1000 * GB))
    topology = Topology("t", tuple(Level(name, 2, "switch", bandwidth, 0.0) for name, bandwidth in levels))
    members = np.arange(8).reshape(4, 2).T
    assert price(groups("all_reduce", members), Fabric(topology), "tree").transfer == pytest.approx(3, rel=1e-9)
    # Heads go by the order of the devices: listed the other way round, the heavy group does not spare the slow node.
    slow = dataclasses.replace(topology.levels[1], degraded=((0, 0.5),))
    fabric = Fabric(dataclasses.replace(topology, levels=(topology.levels[0], slow, topology.levels[2])))
    heavy = [
        price(groups("all_reduce", m, b), fabric, "tree")
        for m, b in ((members, [1e9, 3e9]), (members[::-1], [3e9, 1e9]))
    ]
    assert heavy[0] == heavy[1]
    assert price(groups("all_reduce", members, [3e9, 1e9]), fabric, "tree") != heavy[0]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 16])
def test_double_tree_is_two_spanning_trees(n):
    (one,) = tree("all_reduce", np.arange(n)[None, :], np.array([2.0]), Fabric(switches(n)))
    edges = list(zip(one.flows.sender.tolist(), one.flows.receiver.tolist(), strict=True))
    up = edges[: len(edges) // 2]
    assert edges[len(edges) // 2 :] == [(b, a) for a, b in up]
    assert (one.flows.nbytes == 1.0).all()
    for half in (up[: n - 1], up[n - 1 :]):
        parent = dict(half)
        assert len(parent) == len(half) == n - 1
        roots = set()
        for device in range(n):
            for _ in range(n):
                device = parent.get(device, device)
            roots.add(device)
        assert len(roots) == 1
    # Nobody is an inner place of both trees, but for one device when n is odd.
    inner = [{b for _, b in half} for half in (up[: n - 1], up[n - 1 :])]
    assert len(inner[0] & inner[1]) <= 1


def test_torus_all_to_all_of_the_fused_specification():
    # spec/fused.md, section 13: torus 8 x 16, m bytes a pair, ties clockwise 288 m/b; switch 127 m/b.
    torus = Topology("t", (Level("node", 128, "torus", GB, 0.0, shape=(8, 16)),))
    members = np.arange(128)[None, :]
    pattern = Groups("all_to_all", members, np.array([128 * GB]))
    assert price(pattern, Fabric(torus)).transfer == pytest.approx(288, rel=1e-9)
    assert price(pattern, Fabric(switches(128))).transfer == pytest.approx(127, rel=1e-9)


def test_torus_all_to_all_summed_per_dim_equals_listed(monkeypatch):
    from shardplan.hardware.prices import link_loads

    for shape, link in (((4, 3), "torus"), ((2, 3, 2), "torus"), ((4, 3), "mesh"), ((12,), "torus")):
        for outer in (1, 2):
            topology = Topology(
                "t",
                (
                    Level("pod", outer, "switch", GB, 0.0),
                    Level("chip", 12, link, GB, 0.0, shape=shape),
                    Level("core", 2, "switch", 100 * GB, 0.0),
                ),
            )
            rng = np.random.default_rng(0)
            members = rng.permutation(topology.size).reshape(2, -1)
            pattern = Groups("all_to_all", members, np.array([GB, 3 * GB]))
            listed = price(pattern, Fabric(topology)).transfer
            with monkeypatch.context() as patch:
                patch.setattr(link_loads, "_LISTED", 0)
                assert price(pattern, Fabric(topology)).transfer == pytest.approx(listed, rel=1e-9)


def test_all_to_all_loads_every_level_on_its_way():
    # Inner ports are the slower ones and carry what leaves the node too: 7/8 of 8 GB at 1 GB/s.
    fabric = Fabric(two_levels(2, 4, inner=GB, outer=100 * GB, lat=(5e-6, 1e-6)), launch=1e-6)
    flat = groups("all_to_all", [list(range(8))], 8e9)
    got = price(flat, fabric)
    assert (got.algorithm, got.transfer) == ("p2p", pytest.approx(7.0))
    assert got.alpha == pytest.approx(1e-6 + 4 * 5e-6 + 3 * 1e-6)
    assert got.level_bytes == pytest.approx((32e9, 24e9))
    inside = groups("all_to_all", np.arange(8).reshape(2, 4), 8e9)
    assert price(inside, fabric).alpha == pytest.approx(1e-6 + 3 * 1e-6)
    # The same traffic as explicit messages costs the same.
    sender, receiver = np.nonzero(~np.eye(8, dtype=bool))
    messages = Messages(sender, receiver, np.full(56, 1e9))
    assert price(messages, fabric).seconds == pytest.approx(got.seconds)


def test_uplinks():
    ids = np.arange(16).reshape(2, 8)
    eight = groups("all_reduce", ids.T, 1e9)
    one = groups("all_reduce", ids.reshape(1, -1), 1e9)
    narrow, wide = Fabric(two_levels(2, 8)), Fabric(two_levels(2, 8, uplinks=8))
    assert seconds(eight, narrow, "ring") == pytest.approx(8 * seconds(eight, wide, "ring"), rel=1e-9)
    assert seconds(one, narrow, "ring") == pytest.approx(seconds(one, wide, "ring"), rel=1e-9)
    # A library's channels use the NICs of all members.
    nccl = Fabric(dataclasses.replace(two_levels(2, 8, inner=1000 * GB, uplinks=8), library="xla"))
    assert price(one, nccl, "ring").transfer == pytest.approx(price(one, narrow, "ring").transfer / 8, rel=1e-9)
    assert price(eight, nccl, "ring").transfer == pytest.approx(price(eight, wide, "ring").transfer, rel=1e-9)
    # Messages use rails: device 0 and device 3 share the only port, or have their own.
    pattern = Messages(np.array([0, 3]), np.array([11, 8]), np.array([1e9, 1e9]))
    assert price(pattern, narrow).transfer == pytest.approx(2 / 8, rel=1e-9)
    assert price(pattern, wide).transfer == pytest.approx(1 / 8, rel=1e-9)
    # A device with two ports uses both.
    ports = Fabric(Topology("p", (Level("gpu", 2, "switch", GB, 0.0, uplinks=2),)))
    assert price(Messages(np.array([0]), np.array([1]), np.array([1e9])), ports).transfer == pytest.approx(0.5)


def test_what_meets_on_its_way_shares_it():
    # Into a port: from nodes 0 and 1 to node 2.
    fabric = Fabric(two_levels(3, 2))
    pattern = Messages(np.array([0, 2]), np.array([4, 5]), np.full(2, 8 * GB))
    assert price(pattern, fabric).transfer == pytest.approx(2, rel=1e-9)
    # On a torus: dim 0 comes first, so what starts at (0, 0) passes (1, 0) on its way to (1, 1).
    torus = Fabric(Topology("t", (Level("chip", 4, "torus", GB, 0.0, shape=(2, 2)),)))
    pattern = Messages(np.array([0, 2]), np.array([3, 3]), np.full(2, GB))
    assert price(pattern, torus).transfer == pytest.approx(2, rel=1e-9)


def test_the_capacity_of_a_unit_is_that_of_all_ways_into_it():
    levels = (Level("node", 2, "switch", GB, 0.0, 2), Level("gpu", 4, "ring", 3 * GB, 0.0))
    fabric = Fabric(Topology("t", levels))
    assert fabric.capacity(0).tolist() == [2 * GB] * 2
    # Two links of the ring, and the two ports of its node.
    assert fabric.capacity(1).tolist() == [2 * 3 * GB + 2 * GB] * 8


def test_every_chunk_pays_its_rounds_again():
    switch = Level("gpu", 4, "switch", GB, 2e-6, reduces=True)
    fabric = Fabric(Topology("t", (switch,)), launch=3e-6)
    # Launch and latencies: three partners of an all-to-all, up and down the switch that reduces, three hops of a ring.
    for kind, algorithm, rounds in (("all_to_all", "auto", 3), ("all_reduce", "network", 2), ("all_gather", "ring", 3)):
        whole, cut = (price(groups(kind, [[0, 1, 2, 3]], chunks=n), fabric, algorithm) for n in (1, 5))
        assert whole.alpha == pytest.approx(3e-6 + rounds * 2e-6, rel=1e-9)
        assert cut.alpha == pytest.approx(5 * whole.alpha, rel=1e-9)
        assert cut.transfer == whole.transfer


def test_degraded_unit_slows_what_passes_it():
    level = Level("node", 4, "switch", GB, 0.0, degraded=((2, 0.25),))
    fabric = Fabric(Topology("d", (level,)))
    assert seconds(groups("all_gather", [[0, 1]], 1e9), fabric) == pytest.approx(1)
    assert seconds(groups("all_gather", [[1, 2]], 1e9), fabric) == pytest.approx(4)
    ring = Fabric(Topology("r", (Level("gpu", 6, "ring", GB, 0.0, degraded=((2, 0.5),)),)))
    for a, b, expected in ((0, 1, 1), (1, 2, 2), (2, 3, 2), (3, 4, 1), (1, 3, 2), (4, 0, 1), (0, 3, 2), (3, 0, 1)):
        pattern = Messages(np.array([a]), np.array([b]), np.array([1e9]))
        assert seconds(pattern, ring) == pytest.approx(expected), (a, b)


def test_in_network_reduction():
    levels = (
        Level("node", 2, "switch", GB, 4e-6, reduces=True),
        Level("gpu", 4, "switch", 10 * GB, 1e-6, reduces=True),
    )
    fabric = Fabric(Topology("n", levels), launch=1e-6)
    flat = groups("all_reduce", [list(range(8))])
    got = price(flat, fabric, "network")
    assert (got.algorithm, got.transfer, got.alpha) == ("network", pytest.approx(1.0), pytest.approx(11e-6))
    assert got.level_bytes == (4e9, 16e9)
    assert price(flat, fabric).algorithm == "network"
    half = Fabric(Topology("n", (dataclasses.replace(levels[0], reduces=False), levels[1])))
    assert price(flat, half, "network").algorithm == "ring"
    assert price(groups("all_reduce", [[0, 1, 2, 3]]), half, "network").algorithm == "network"
    assert price(groups("all_gather", [[0, 1, 2, 3]]), half, "network").algorithm == "ring"


def test_auto_is_the_cheapest_per_size():
    fabric = Fabric(dataclasses.replace(Topology.load("dgx-h100", nodes=3), library="nccl"))
    members = [list(range(24))]
    for nbytes in (1e3, 1e6, 1e9):
        names = fabric.library.algorithms()
        offers = [price(groups("all_reduce", members, nbytes), fabric, name) for name in names]
        best = price(groups("all_reduce", members, nbytes), fabric)
        assert best == min(offers, key=lambda offer: offer.seconds)
    assert "tree" in price(groups("all_reduce", members, 1e3), fabric).algorithm
    assert price(groups("all_gather", members), fabric, "tree").algorithm.startswith("ring")


def test_messages_and_local():
    fabric = Fabric(two_levels(2, 4, lat=(5e-6, 1e-6)), launch=1e-6)
    inner = Messages(np.array([0, 0, 1]), np.array([1, 2, 3]), np.full(3, 1e9))
    got = price(inner, fabric)
    assert got.alpha == pytest.approx(1e-6 + 2 * 1e-6)
    assert got.transfer == pytest.approx(2e9 / (100 * GB))
    assert got.level_bytes == (0.0, 3e9)
    outer = Messages(np.array([0, 1, 2, 0]), np.array([7, 7, 7, 1]), np.full(4, 1e9), chunks=2)
    got = price(outer, fabric)
    assert (got.algorithm, got.alpha) == ("p2p", pytest.approx(2 * (1e-6 + 3 * 5e-6)))
    assert got.transfer == pytest.approx(3 / 8)
    assert got.level_bytes == (3e9, 1e9)
    nothing = Messages(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    assert price(nothing, fabric).seconds == 0
    a100 = Fabric(Topology.load("dgx-a100-40g"))
    assert seconds(Local(1e9), a100) == pytest.approx(2e9 / 1.555e12)
    assert seconds(Local(1e9), fabric) == 0
    assert price(Local(1e9), a100).level_bytes == (0.0, 0.0)


def test_linear_cost():
    fabric = Fabric(two_levels(2, 4, lat=(5e-6, 1e-6)), launch=1e-6)
    members = np.arange(8).reshape(2, 4).T
    for kind in KINDS:
        alpha, beta = linear_cost(kind, members, fabric, 1e6)
        for nbytes in (1.0, 1e6, 1e9):
            assert seconds(groups(kind, members, nbytes), fabric, "ring") == pytest.approx(
                alpha + beta * nbytes, rel=1e-12
            )


def test_nothing_to_do_costs_nothing():
    fabric = Fabric(switches(4, latency=1e-6), launch=1e-6)
    assert seconds(groups("all_reduce", [[0], [1]]), fabric) == 0
    assert seconds(groups("all_reduce", [[0, 1]], 0.0), fabric) == 0
    assert seconds(groups("all_gather", np.zeros((0, 4))), fabric) == 0


def test_a_placement_positions_the_mesh():
    topology = two_levels(2, 4)
    mesh = Mesh(data=2, tensor=4)
    along = groups("all_reduce", np.arange(8).reshape(2, 4))
    good = Placement(mesh, topology, ((2, 1), (1, 4)))
    bad = Placement(mesh, topology, ((1, 2), (2, 2)))
    assert seconds(along, Fabric(topology, good.position())) < seconds(along, Fabric(topology, bad.position()))
    strange = Mesh({"data": 2, "tensor": 4}, devices=range(10, 18))
    moved = Fabric(topology, Placement(strange, topology, good.matrix).position())
    assert seconds(groups("all_reduce", np.arange(10, 18).reshape(2, 4)), moved) == seconds(along, Fabric(topology))
    with pytest.raises(TopologyError) as caught:
        seconds(along, moved)
    assert str(caught.value) == "device 0 has no place in topology 'two': the mesh does not name it"


def test_errors():
    fabric = Fabric(switches(4))
    with pytest.raises(TopologyError) as caught:
        seconds(groups("all_reduce", [[0, 1]]), fabric, "rings")
    assert str(caught.value) == ("algorithm 'rings' is unknown to library ring; legal: auto, ring, tree, network, p2p")
    with pytest.raises(TopologyError) as caught:
        seconds(groups("gather", [[0, 1]]), fabric)
    assert str(caught.value) == (
        "collective 'gather' is unknown; legal: all_reduce, reduce_scatter, all_gather, reduce, broadcast, all_to_all"
    )
    with pytest.raises(TopologyError, match=r"device 9 is not in topology 'test', whose devices are 0 to 3 \(l0=4\)"):
        seconds(groups("all_reduce", [[0, 9]]), fabric)
    with pytest.raises(
        TopologyError, match=r"members of shape \[4\] with nbytes of shape \[4\]: members are \[groups, k\]"
    ):
        seconds(Groups("all_reduce", np.arange(4), np.ones(4)), fabric)
    with pytest.raises(TopologyError, match="device 4 is not in topology"):
        Fabric(switches(4), np.array([0, 4]))


def test_a_kernel_takes_the_longer_of_its_operations_and_its_bytes():
    a100 = Fabric(Topology.load("dgx-a100-40g", nodes=1))
    assert seconds(Work(312e12, "bf16", 1e6), a100) == pytest.approx(1.0)
    assert seconds(Work(312e12, "f16", 1e6), a100) == pytest.approx(1.0)
    assert seconds(Work(1e6, "bf16", 1.555e12), a100) == pytest.approx(1.0)
    assert seconds(Work(1e30, "c128", 1.555e12), a100) == pytest.approx(1.0)  # no flops are stated for it
    assert seconds(Work(1e30, "f32", 1e30), Fabric(Topology("bare", (Level("gpu", 2, "switch", GB, 0.0),)))) == 0
    assert price(Work(1e12, "bf16", 1e9), a100).level_bytes == (0.0, 0.0)


def test_a_matrix_product_costs_what_its_device_makes_of_it():
    mesh = Mesh(x=8)
    a, b = (TensorType("bf16", (8192, 8192), dims, mesh) for dims in (("x",), (None, None)))
    pattern = matmul().pattern(a, b)
    assert pattern.flops == 2 * 1024 * 8192 * 8192
    assert pattern.nbytes == 2 * (2 * 1024 * 8192 + 8192 * 8192)
    program = Program({"a": a, "b": b}, [Step(matmul(), ("a", "b"), ("c",))], ("c",))
    for n in (1, 7):
        where = Topology.load("dgx-a100", nodes=1)
        total = price_program(repeated(program, n), fabric_of(where, program.meshes)).seconds
        assert total == pytest.approx(n * pattern.flops / 312e12)


def repeated(program: Program, n: int) -> Program:
    outputs = ("c",)
    inputs = {name: stacked_type(t, n) for name, t in program.inputs}
    return Program(inputs, [Step(Repeat(n, program, sliced=2), ("a", "b"), outputs)], outputs)
