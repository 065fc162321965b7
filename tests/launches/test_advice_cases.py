"""Advice whose answer is worked out by hand: clusters, meshes, traffic, and beside them the arithmetic.

A size without a count is one collective of that size (`parse_traffic`).

On the clusters in round numbers latency is 0 and the library is `ring`: an all-reduce of B bytes over k members puts
2 (k - 1) / k B on every edge of its ring, an all-gather (k - 1) B, an all-to-all B / k on every pair, a permute B.
"""

from dataclasses import dataclass, field
from dataclasses import replace as altered

import pytest

from shardplan.core.mesh import Mesh
from shardplan.hardware import Level, Placement, Topology
from shardplan.launches.audit import audit
from shardplan.launches.launch import Launch
from shardplan.movement.placing.traffic import parse_traffic
from shardplan.report.audit import audit_text

GB = 1e9


def cluster(*levels, library="ring"):
    """Levels as (name, size, ports, bytes a second of a port), outermost first."""
    return Topology("", tuple(Level(n, size, "switch", rate, 0.0, ports) for n, size, ports, rate in levels),
                    library=library)  # fmt: skip


# Two nodes of four GPUs: a node has one NIC of 1 GB/s, a GPU a port of 10 GB/s.
TWO = cluster(("node", 2, 1, GB), ("gpu", 4, 1, 10 * GB))
# The same with a NIC for every GPU.
RAILS = cluster(("node", 2, 4, GB), ("gpu", 4, 1, 10 * GB))
FOUR = cluster(("node", 4, 1, 2 * GB), ("gpu", 2, 1, 10 * GB))
PODS = cluster(("pod", 2, 1, GB), ("node", 2, 1, GB), ("gpu", 2, 1, 10 * GB))
# Pods of more rate and less latency than nodes: 8 GB/s and none, 1 GB/s and 10 us.
ODD = altered(PODS, levels=(
    altered(PODS.levels[0], bandwidth=8 * GB), altered(PODS.levels[1], latency=1e-5), PODS.levels[2]
))  # fmt: skip
# Four pods of four H100 nodes, as many uplinks a pod as its nodes have NICs; the file of `dgx-h100` but for the pods.
H100 = Topology.load("dgx-h100", nodes=16)
FAT = altered(H100, levels=(
    altered(H100.levels[0], name="pod", size=4, uplinks=32), altered(H100.levels[0], size=4), H100.levels[1]
))  # fmt: skip
BLOCK, SPLIT = ((2, 1), (1, 4)), ((1, 2), (2, 2))  # of dp=2, tp=4 on TWO: tp inside a node, and over both


@dataclass(frozen=True)
class Case:
    """A launch, and what is to be said of it."""

    topology: Topology
    mesh: Mesh
    traffic: str
    seconds: float  # that a step waits, as launched
    best: tuple[tuple[int, ...], ...] | None = None  # the matrix advised; None where the launch stays as it is
    best_seconds: float = 0.0
    cause: str = "no matrix is faster for this traffic"
    placed: tuple[tuple[int, ...], ...] | None = None  # where it is launched; row-major where None
    ids: tuple[int, ...] = ()
    inside: dict[str, str] = field(default_factory=dict)


DP2_TP4 = Mesh(dp=2, tp=4)
CASES = {
    # tp inside: 2 * 3/4 GB / 10 GB/s = 0.15 s. dp across: 4 groups of 2, each 1 GB over the NIC: 4 s.
    # dp inside: 1 GB / 10 GB/s = 0.1 s. tp across: 2 groups, each 1.5 GB over the NIC: 3 s.
    "alone, data is better inside than tensor": Case(
        TWO, DP2_TP4, "tp=1GB, dp=2GB", 8.15, SPLIT, 3.2, "`dp` spans 2 nodes: 4 groups share each NIC"),
    # Of 4.15 s 3.1 are left with tensor across: less than what prices that are 20 % off may take from it.
    "a gain of a third leaves tensor inside its node": Case(
        TWO, DP2_TP4, "tp=1GB, dp=1GB", 4.15,
        cause="only a matrix that takes tensor parallelism out of a node is faster, by 1.34 times, where prices that "
        "are 20 % off take 1.5"),
    # Contexts do not bind it.
    "a gain of a third moves other axes": Case(
        TWO, Mesh(dp=2, cp=4), "cp=1GB, dp=1GB", 4.15, SPLIT, 3.1, "`dp` spans 2 nodes: 4 groups share each NIC"),
    # The same, and tensor may not leave its node: there is one such matrix.
    "tensor kept inside a node stays as it is": Case(
        TWO, DP2_TP4, "tp=1GB, dp=1GB", 4.15, inside={"tp": "node"},
        cause="no matrix that keeps `tp` inside a node is faster for this traffic"),
    # Of the 3.1 s as launched to the 4.15 s where tensor is inside: slower, but asked for.
    "tensor that leaves its node is brought back": Case(
        TWO, DP2_TP4, "tp=1GB, dp=1GB", 3.1, BLOCK, 4.15, "`tp` spans 2 nodes, and is to stay inside one", SPLIT,
        inside={"tp": "node"}),
    # The 4 s of the gradients run behind 4 s of backward pass: 0.15 s are left, and 3 s with tensor across.
    "gradients behind the backward pass leave tensor inside": Case(
        TWO, DP2_TP4, "tp=1GB, dp=1GB behind 4 s", 0.15),
    # A tenth of 4 s sticks out: 0.15 + 0.4 s; the other way 3 + 0.01 s.
    "gradients nine tenths of which are hidden": Case(TWO, DP2_TP4, "tp=1GB, dp=1GB behind 90%", 0.55),
    # Tensor across costs 3 s, the gradients' 0.1 s are hidden; with tensor inside their 4 s are too: 0.15 s.
    "hidden gradients do not keep tensor outside": Case(
        TWO, DP2_TP4, "tp=1GB, dp=1GB behind 4 s", 3.0, BLOCK, 0.15, "`tp` spans 2 nodes: 2 groups share each NIC",
        SPLIT),
    # 0.15 + 4 * 0.7355 = 3.092 s against 3 + 0.1 * 0.7355 = 3.0736 s: 0.6 %.
    "a difference of 0.6 % is none": Case(
        TWO, DP2_TP4, "tp=1GB, dp=735.5MB", 3.092, cause="no matrix is faster for this traffic by 1 % or more"),
    # 0.15 + 4 * 0.75 = 3.15 s against 3 + 0.075 s: 2.4 %.
    "a difference of 2.4 % is one": Case(
        TWO, Mesh(dp=2, cp=4), "cp=1GB, dp=750MB", 3.15, SPLIT, 3.075, "`dp` spans 2 nodes: 4 groups share each NIC"),
    # Four groups of dp have a NIC each: 1 GB / 1 GB/s; tp as before. dp inside saves 0.9 s; tp across takes at least
    # 2 groups * 1 GB / 4 NICs = 0.5 s, as a ring over one NIC each 1.5 s.
    "a NIC for every GPU": Case(RAILS, DP2_TP4, "tp=1GB, dp=1GB", 1.15),
    # Ranks in turn on two nodes: all 4 edges out of a node's members cross, 2 * 7/8 GB each: 7 s; one crosses: 1.75 s.
    "ranks in turn on the nodes": Case(
        TWO, Mesh(dp=8), "dp=1GB", 7.0, ((2, 4),), 1.75, "the rings over `dp` pass between nodes 8 times, 2 would do",
        ids=(0, 4, 1, 5, 2, 6, 3, 7)),
    # Shards of 250 MB gathered over 4 nodes: 3 * 250 MB a ring, 2 rings a NIC of 2 GB/s: 0.75 s. Over 2 nodes of 2
    # each: a ring a NIC.
    "shards gathered over four nodes": Case(
        FOUR, Mesh(dp=4, tp=2), "dp=all_gather:250MB", 0.75, ((2, 2), (2, 1)), 0.375,
        "`dp` spans 4 nodes: 2 groups share each NIC"),
    # 2 groups; in each, 2 members of a node send 250 MB to 2 elsewhere: 2 * 1 GB. Inside: 3 * 250 MB / 10 GB/s.
    "experts over two nodes": Case(
        TWO, Mesh(ep=4, dp=2), "ep=all_to_all:1GB", 2.0, ((1, 4), (2, 1)), 0.075,
        "`ep` spans 2 nodes: 2 groups share each NIC"),
    # 4 stages send 100 MB over a NIC: 0.4 s, and dp inside 0.15 s; with dp across 2 * 1.5 GB: 3 s.
    "pipeline stages on nodes": Case(TWO, Mesh(pp=2, dp=4), "pp=permute:100MB, dp=1GB", 0.55),
    # 24 times 2 * 3/4 * 100 MB / 10 GB/s = 0.36 s, and dp 4 * 10 MB; with tensor across 24 * 2 * 150 MB: 7.2 s.
    "many small calls of tensor": Case(TWO, DP2_TP4, "tp=100MB*24, dp=10MB", 0.4),
    # b over pods: 4 groups of 1 GB share an uplink: 4 s; on GPUs 0.1 s. All of a is hidden wherever it lies, and goes
    # to the nodes: over pods it would cost as little, but load what is further out.
    "what is hidden goes where it is local": Case(
        PODS, Mesh(x=2, a=2, b=2), "a=1GB behind 100%, b=1GB", 4.0, ((2, 1, 1), (1, 2, 1), (1, 1, 2)), 0.1,
        "`b` spans 2 pods: 4 groups share each uplink of a pod", ((1, 2, 1), (1, 1, 2), (2, 1, 1))),
    # All of it is hidden wherever it lies: nothing is gained by having it inside.
    "what costs nothing stays": Case(TWO, DP2_TP4, "tp=1GB behind 100%, dp=1MB behind 1 s", 0.0, placed=SPLIT),
    # b over pods: a NIC passes 2 groups of 1 GB: 2 s, an uplink 4 in 0.5 s; a on GPUs 0.1 ms. Best: b on GPUs, 0.1 s;
    # a passes 2 groups of 1 MB over a NIC, 2 ms, whether over pods or over nodes, where two rounds of 10 us are added.
    # They are no difference, and a is more local there.
    "a difference below 1 % goes to what is local": Case(
        ODD, Mesh(x=2, a=2, b=2), "a=1MB, b=1GB", 2.0001, ((2, 1, 1), (1, 2, 1), (1, 1, 2)), 0.10202,
        "`b` spans 2 nodes: 2 groups share each NIC", ((1, 2, 1), (1, 1, 2), (2, 1, 1))),
    # c over pods: 4 groups of 100 MB share an uplink, 0.4 s; b over nodes: 2 groups of 1 GB share a NIC, 2 s.
    # b on GPUs takes 0.1 s, c on nodes 2 * 100 MB, 0.2 s; a has nothing to send over the pods.
    "an axis without traffic takes the outermost level": Case(
        PODS, Mesh(c=2, b=2, a=2), "b=1GB, c=100MB", 2.4, ((1, 2, 1), (1, 1, 2), (2, 1, 1)), 0.3,
        "`b` spans 2 nodes: 2 groups share each NIC"),
}  # fmt: skip


def launched(case):
    if case.ids:
        return Launch(case.mesh, case.topology, case.ids)
    if case.placed:
        return Launch.of(Placement(case.mesh, case.topology, case.placed))
    return Launch(case.mesh, case.topology, tuple(range(case.topology.size)))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_by_hand(case):
    found = audit(launched(case), traffic=parse_traffic(case.traffic), inside=case.inside)
    assert found.seconds == pytest.approx(case.seconds)
    assert found.causes[0] == case.cause
    if case.best is None:
        assert (found.fix, found.best) == (None, found.placement)
        assert "as on the best matrix" in audit_text(found)
        return
    assert found.fix is not None and found.fix.placement.matrix == found.best.matrix == case.best
    assert found.best_seconds == pytest.approx(case.best_seconds)
    after = audit(Launch.of(found.best), traffic=parse_traffic(case.traffic), inside=case.inside)
    assert after.seconds == pytest.approx(case.best_seconds) and after.fix is None


def test_what_is_gained_has_to_be_worth_a_new_launch():
    """0.15 + 4 * 0.7426 = 3.1204 s against 3 + 0.07426 s: 1.5 % are said, and nothing is advised."""
    found = audit(range(8), Mesh(dp=2, cp=4), TWO, "cp=1GB*1, dp=742.6MB*1")
    assert (found.seconds, found.best_seconds) == pytest.approx((3.1204, 3.07426))
    assert (found.best.matrix, found.fix) == (SPLIT, None)
    assert found.cause == "no matrix is faster for this traffic by 2 % or more"
    assert ", 1.02 times the 3.07 s of the best matrix\n" in audit_text(found)


def test_hosts_in_text_order():
    """h0, h1, h10, ..: groups lie unlike a placement's, but pods pass all that NICs bring, and nothing is lost by it.

    dp: a NIC carries 2 * 3/4 * 1.82 GB of one group, 8 groups share 8 NICs: 2.73 GB as in host order. Less of it
    would take tensor over two nodes, for 0.3 %.
    """
    hosts = sorted(range(16), key=lambda k: f"h{k}")
    ids = tuple(8 * host + gpu for host in hosts for gpu in range(8))
    found = audit(ids, "pp=4, dp=4, tp=8", FAT, "tp=64MB*96, dp=1.82GB*1")
    assert found.verdict == "not a placement"
    assert [s.port_bytes[1] for s in found.shares] == pytest.approx([0, 2.73 * GB])
    assert (found.fix, found.slower) == (None, False) and "as on the best matrix\n" in audit_text(found)
    assert found.cause == "no matrix is faster for this traffic by 1 % or more"
    in_order = audit(range(128), "pp=4, dp=4, tp=8", FAT, "tp=64MB*96, dp=1.82GB*1")
    assert found.seconds == pytest.approx(in_order.seconds, rel=0.01)


@pytest.mark.parametrize("traffic", ["tp=64MB*96, dp=2GB", "tp=50MB*3072, dp=11GB", "tp=1GB, dp=1GB"])
def test_two_racks_in_block_order(traffic):
    """dp=18, tp=8: tensor inside a rack; of dp each of 8 groups has one edge out of a rack each way, over 72 NICs.

    Both racks have to pass half of the sums of every group, twice: B a group, so 8 B / 72 a NIC.
    """
    found = audit(range(144), "dp=18, tp=8", Topology.load("gb200-nvl72", nodes=2), parse_traffic(traffic))
    tp, dp = found.shares
    assert (tp.port_bytes[0], dp.port_bytes[0]) == (0, pytest.approx(8 * dp.demand.nbytes / 72))
    assert (found.verdict, found.matrix, found.fix) == ("canonical", ((2, 9), (1, 8)), None)
    assert found.ratio == pytest.approx(1) and found.cause == "no matrix is faster for this traffic"


MEGATRON = [
    # GPT-3 175B: hidden 12288, 2048 tokens, 24 layers a stage, 32 microbatches: 4 * 24 * 32 all-reduces of 50 MB over
    # tensor; gradients 175e9 / 32 * 2 B = 11 GB. A NIC carries 2 * 3/4 of them: 16.5 GB, 0.33 s at 50 GB/s.
    # With tensor over 2 nodes it carries at least 3072 * 2 groups * 50 MB / 8 = 38 GB, and saves less than 16.5.
    ("pp=4, dp=4, tp=8", "tp=50MB*3072, dp=11GB, pp=permute:50MB*64", 16.5 * GB),
    # Llama 13B: hidden 5120, 4096 tokens, 40 layers, 16 microbatches: 2560 of 42 MB; gradients 13e9 / 8 * 2 B = 3.25
    # GB over 16 nodes: 2 * 15/16 of them.
    ("dp=16, tp=8", "tp=42MB*2560, dp=3.25GB", 2 * 15 / 16 * 3.25 * GB),
    # One microbatch of it, most of the gradients behind the backward pass.
    ("dp=16, tp=8", "tp=42MB*160, dp=3.25GB behind 80%", 2 * 15 / 16 * 3.25 * GB),
    # A step of 24 layers, nothing hidden: the least that tensor over two nodes saves is 1 %.
    ("dp=16, tp=8", "tp=64MB*96, dp=2GB", 2 * 15 / 16 * 2 * GB),
]


@pytest.mark.parametrize(("mesh", "traffic", "nic"), MEGATRON)
def test_the_standard_layout_of_megatron(mesh, traffic, nic):
    """Tensor inside the node, pipeline outermost, on 16 nodes of 8 H100: nothing is better by 2 %, and none is said."""
    found = audit(range(128), mesh, H100, parse_traffic(traffic))
    assert found.shares[1].port_bytes[0] == pytest.approx(nic) and found.shares[0].port_bytes[0] == 0
    assert found.ratio <= 1.02 and found.fix is None
    assert found.cause.startswith("no matrix is faster for this traffic")
