"""Lower bounds in seconds: entry bytes, cuts, and the collectives' bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from hardware.topologies import GB, any_topology, grouped, switches
from shardplan.core.pattern import Groups, Messages
from shardplan.hardware import Fabric, Level, Topology, price, seconds
from shardplan.plans import bounds
from shardplan.plans.bounds import (
    all_gather_bound,
    all_reduce_bound,
    batch_lower_bound_seconds,
    entry_bytes,
    lower_bound_seconds,
    reduce_scatter_bound,
)

BOUNDS = {
    "all_reduce": all_reduce_bound,
    "reduce_scatter": reduce_scatter_bound,
    "all_gather": all_gather_bound,
}


def cells(box):
    return {tuple(c) for c in np.argwhere(np.ones([max(b - a, 0) for a, b in box])) + np.array([a for a, _ in box])}


@st.composite
def boxes(draw):
    n, ndim = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    edge = st.integers(0, 4)
    shape = (2, n, ndim)
    raw = np.array([[[sorted((draw(edge), draw(edge))) for _ in range(ndim)] for _ in range(n)] for _ in range(2)])
    units = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    return raw.reshape(*shape, 2), units


def true_entry(src, dst, units):
    entry = np.zeros(int(units.max()) + 1)
    for unit in range(len(entry)):
        mine = np.flatnonzero(units == unit)
        has = set().union(*(cells(src[d]) for d in mine))
        needs = set().union(*(cells(dst[d]) for d in mine))
        entry[unit] = len(needs - has)
    return entry


@given(boxes())
@settings(max_examples=80, deadline=None)
def test_entry_bytes_equal_sets_of_cells(case):
    (src, dst), units = case
    assert entry_bytes(src, dst, units, 4).tolist() == (4 * true_entry(src, dst, units)).tolist()


@given(boxes())
@settings(max_examples=80, deadline=None)
def test_the_coarse_bound_is_a_bound(case):
    (src, dst), units = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_EXACT", 0)
        coarse = entry_bytes(src, dst, units)
    assert (coarse <= true_entry(src, dst, units)).all()
    assert (coarse >= 0).all()


def test_what_enters_is_what_the_unit_lacks(monkeypatch):
    # Of a row in quarters unit 0 holds the first half and unit 1 the second: of the whole row each lacks the other's.
    units = np.array([0, 0, 1, 1])
    quarters = np.array([[[0, 10]], [[10, 20]], [[20, 30]], [[30, 40]]])
    row, swapped = np.broadcast_to(np.array([[0, 40]]), (4, 1, 2)), quarters[[2, 3, 0, 1]]
    assert entry_bytes(quarters, row, units).tolist() == [20, 20]
    # With the halves swapped all that they hold is of no use.
    assert entry_bytes(quarters, swapped, units).tolist() == [20, 20]
    # The coarse bound attains the first; of the second it counts the largest box of a device, which is a quarter.
    monkeypatch.setattr(bounds, "_EXACT", 0)
    assert entry_bytes(quarters, row, units).tolist() == [20, 20]
    assert entry_bytes(quarters, swapped, units).tolist() == [10, 10]


def test_entry_bytes_of_no_devices():
    assert entry_bytes(np.zeros((0, 1, 2), int), np.zeros((0, 1, 2), int), np.zeros(0, int)).tolist() == []


def test_gathering_a_row():
    topology = Topology("t", (Level("node", 2, "switch", GB, 5e-6, 2), Level("gpu", 2, "switch", 10 * GB, 1e-6)))
    src = np.array([[[0, 1000]], [[1000, 2000]], [[2000, 3000]], [[3000, 4000]]])
    dst = np.broadcast_to(np.array([[0, 4000]]), (4, 1, 2))
    fabric = Fabric(topology, launch=1e-6)
    # Each node lacks 2000 elements of 4 bytes and has two ports of 1 GB/s.
    assert lower_bound_seconds(src, dst, 4, np.arange(4), fabric) == pytest.approx(1e-6 + 5e-6 + 8000 / 2e9)
    assert lower_bound_seconds(src, src, 4, np.arange(4), fabric) == 0
    swapped = src[[1, 0, 3, 2]]
    assert lower_bound_seconds(src, swapped, 4, np.arange(4), fabric) == pytest.approx(2e-6 + 4000 / 10e9)


def test_tensors_of_a_batch_share_the_wires():
    src = np.array([[[0, 1000]], [[1000, 2000]]])
    dst = np.broadcast_to(np.array([[0, 2000]]), (2, 1, 2))
    # Each device lacks 1000 elements of 4 bytes and 1000 of 2.
    bound = batch_lower_bound_seconds([(src, dst, 4), (src, dst, 2)], np.arange(2), Fabric(switches(2)))
    assert bound == pytest.approx((4000 + 2000) / GB)


def test_a_batch_that_reduces_attains_its_bound_in_seconds():
    mesh, n = sp.Mesh(a=2), 250_000
    source = sp.TensorType("f32", (n,), (None,), mesh, partial={"a": "sum"})
    target = sp.TensorType("f32", (n,), (None,), mesh, root=("a",))
    plan = sp.redistribute([source, source], [target, target], topology=switches(2, latency=5e-6))
    # One message with the addends of both tensors.
    assert plan.seconds == pytest.approx(5e-6 + 2 * 4 * n / GB, rel=1e-9)
    assert plan.certificate.lower_bound_seconds == pytest.approx(plan.seconds, rel=1e-9)


@given(any_topology(), st.data())
@settings(max_examples=100, deadline=None)
def test_no_exchange_beats_the_bound(topology, data):
    n = topology.size
    cut = st.integers(0, 12)
    src = np.array([[sorted((data.draw(cut), data.draw(cut)))] for _ in range(n)])
    holders = {c: [d for d in range(n) if src[d, 0, 0] <= c < src[d, 0, 1]] for c in range(12)}
    dst = np.array([[sorted((data.draw(cut), data.draw(cut)))] for _ in range(n)])
    sender, receiver = [], []
    for d in range(n):
        for c in range(*dst[d, 0]):
            if not holders[c]:
                return
            if d not in holders[c]:
                sender.append(data.draw(st.sampled_from(holders[c])))
                receiver.append(d)
    fabric = Fabric(topology)
    pattern = Messages(np.array(sender, np.int64), np.array(receiver, np.int64), np.full(len(sender), 1000.0))
    bound = lower_bound_seconds(src, dst, 1000, np.arange(n), fabric)
    assert bound <= seconds(pattern, fabric) * (1 + 1e-9)
    assert (bound > 0) == bool(sender)


@given(any_topology(), st.data(), st.sampled_from(sorted(BOUNDS)))
@settings(max_examples=150, deadline=None)
def test_no_collective_beats_its_bound(topology, data, kind):
    members, nbytes = data.draw(grouped(topology))
    fabric = Fabric(topology, channels=data.draw(st.booleans()))
    bound = BOUNDS[kind](members, nbytes, fabric)
    for name in ("ring", "tree", "halving-doubling"):
        assert bound <= price(Groups(kind, members, nbytes), fabric, name).transfer * (1 + 1e-9)
    assert (bound > 0) == (members.shape[1] > 1)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_the_ring_is_optimal_on_a_switch(k):
    fabric = Fabric(switches(k))
    members, nbytes = np.arange(k)[None, :], np.array([1e9])
    for kind, bound in BOUNDS.items():
        assert bound(members, nbytes, fabric) == pytest.approx(
            price(Groups(kind, members, nbytes), fabric, "ring").transfer
        )


def test_count_bound_gives_what_a_cut_misses():
    topology = Topology("t", (Level("node", 4, "switch", GB, 0.0), Level("gpu", 2, "switch", 100 * GB, 0.0)))
    assert all_reduce_bound(np.arange(8)[None, :], np.array([1e9]), Fabric(topology)) == pytest.approx(2 * 3 / 4)


def test_gather_bound_takes_complements():
    # ForestColl: M/N max |S| / capacity out of S; the complement of a degraded unit is the bottleneck.
    level = Level("node", 4, "switch", GB, 0.0, degraded=((3, 0.25),))
    members, nbytes = np.arange(4)[None, :], np.array([1e9])
    assert all_gather_bound(members, nbytes, Fabric(Topology("t", (level,)))) == pytest.approx(3 / 0.25)


@pytest.mark.parametrize(("kind", "slow", "share"), [("all_gather", 0, 3), ("reduce_scatter", 1, 3 / 4)])
def test_what_a_unit_gives_out_bounds_it_too(kind, slow, share):
    # Three members in one node and one in the other: to gather, 3 B leave the first and B enters it; to scatter sums,
    # three of four parts of B leave the second and one enters it. The ring moves no more, and each way out is slow.
    outer = Level("node", 2, "switch", GB, 0.0, degraded=((slow, 0.25),))
    fabric = Fabric(Topology("t", (outer, Level("gpu", 3, "switch", 1000 * GB, 0.0))))
    members, nbytes = np.arange(4)[None, :], np.array([1e9])
    assert BOUNDS[kind](members, nbytes, fabric) == pytest.approx(share / 0.25)
    assert price(Groups(kind, members, nbytes), fabric, "ring").transfer == pytest.approx(share / 0.25)


def test_ring_arcs():
    # Half a ring of 8 must receive half of all data over two links.
    ring = Fabric(Topology("r", (Level("gpu", 8, "ring", GB, 0.0),)))
    members, nbytes = np.arange(8)[None, :], np.array([1e9])
    assert all_gather_bound(members, nbytes, ring) == pytest.approx(7 / 2)
    ends = np.array([[0, 4], [1, 5], [2, 6], [3, 7]])
    assert all_reduce_bound(ends, np.full(4, 1e9), ring) == pytest.approx(4 / 2)


def test_in_network_reduction_keeps_only_cuts():
    level = Level("node", 4, "switch", GB, 0.0, reduces=True)
    fabric = Fabric(Topology("n", (level,)))
    members, nbytes = np.arange(4)[None, :], np.array([1e9])
    assert all_reduce_bound(members, nbytes, fabric) == pytest.approx(1.0)
    assert seconds(Groups("all_reduce", members, nbytes), fabric) == pytest.approx(1.0)
