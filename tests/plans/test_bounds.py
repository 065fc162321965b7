"""Lower bounds in seconds: entry bytes, cuts, and the collectives' bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import GB, any_topology, grouped, switches
from shardplan.core.pattern import Groups, Messages
from shardplan.hardware import Fabric, Level, Topology, price, seconds
from shardplan.plans.bounds import (
    all_gather_bound,
    all_reduce_bound,
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
    from shardplan.plans import bounds

    (src, dst), units = case
    limit, bounds._EXACT = bounds._EXACT, 0
    try:
        coarse = entry_bytes(src, dst, units)
    finally:
        bounds._EXACT = limit
    assert (coarse <= true_entry(src, dst, units)).all()
    assert (coarse >= 0).all()


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
