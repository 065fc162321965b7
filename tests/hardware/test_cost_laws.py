"""Laws of the cost model."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import any_topology, grouped, pairs, transfer
from shardplan.core.pattern import Groups, Messages
from shardplan.hardware import (
    Fabric,
    price,
)
from shardplan.hardware.prices.algorithms import ring, tree

KINDS = ["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "all_to_all"]
ALGORITHM_NAMES = ["ring", "tree"]
ALGORITHMS = {"all_reduce": (ring, tree), "reduce": (ring, tree), "broadcast": (ring, tree)}


@st.composite
def cases(draw):
    topology = draw(any_topology())
    members, nbytes = draw(grouped(topology))
    return topology, Groups(draw(st.sampled_from(KINDS)), members, nbytes)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_loads_equal_a_loop_over_messages(case):
    topology, pattern = case
    if pattern.members.shape[1] < 2:
        return
    # A tree's heads are given in the order of the devices, however the groups are listed.
    order = np.argsort(pattern.members.min(axis=1), kind="stable")
    pattern = dataclasses.replace(pattern, members=pattern.members[order], nbytes=pattern.nbytes[order])
    for algorithm in ALGORITHMS.get(pattern.kind, () if pattern.kind == "all_to_all" else (ring,)):
        total = 0.0
        for one in algorithm(pattern.kind, pattern.members, pattern.nbytes, Fabric(topology)):
            flows = one.flows
            total += transfer(topology, zip(flows.sender.tolist(), flows.receiver.tolist(), flows.nbytes, strict=True))
        assert price(pattern, Fabric(topology), algorithm.__name__).transfer == pytest.approx(total, rel=1e-9)


@given(any_topology(), st.data())
@settings(max_examples=100, deadline=None)
def test_messages_equal_a_loop(topology, data):
    ids = st.integers(0, topology.size - 1)
    rows = data.draw(st.lists(st.tuples(ids, ids, st.integers(0, 100)), max_size=12))
    rows = [row for row in rows if row[0] != row[1]]
    sender, receiver, nbytes = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    got = price(Messages(sender, receiver, nbytes.astype(float)), Fabric(topology))
    assert got.transfer == pytest.approx(transfer(topology, rows), rel=1e-9)
    assert sum(got.level_bytes) == pytest.approx(float(nbytes.sum()))


@given(cases(), st.sampled_from(["auto", *ALGORITHM_NAMES]), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_in_which_groups_are_listed_means_nothing(case, name, random):
    topology, pattern = case
    order = list(range(len(pattern.members)))
    random.shuffle(order)
    listed = dataclasses.replace(pattern, members=pattern.members[order], nbytes=pattern.nbytes[order])
    assert price(listed, Fabric(topology), name) == price(pattern, Fabric(topology), name)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_bytes_are_conserved(case):
    topology, pattern = case
    k = pattern.members.shape[1]
    total = {
        "all_reduce": 2 * (k - 1),
        "reduce_scatter": k - 1,
        "all_gather": k * (k - 1),
        "all_to_all": k - 1,
        "reduce": k - 1,
        "broadcast": k - 1,
    }[pattern.kind] * float(pattern.nbytes.sum())
    for name in ALGORITHM_NAMES:
        assert sum(price(pattern, Fabric(topology), name).level_bytes) == pytest.approx(total, rel=1e-9)


@given(cases(), st.sampled_from(ALGORITHM_NAMES), st.floats(1.0, 8.0))
@settings(max_examples=100, deadline=None)
def test_monotone_and_homogeneous(case, name, factor):
    topology, pattern = case
    base = price(pattern, Fabric(topology), name)
    larger = dataclasses.replace(pattern, nbytes=pattern.nbytes * factor)
    assert price(larger, Fabric(topology), name).transfer == pytest.approx(base.transfer * factor, rel=1e-9)
    assert price(larger, Fabric(topology), name).alpha == base.alpha
    one_more = pattern.nbytes.copy()
    one_more[0] += 1000.0
    assert price(dataclasses.replace(pattern, nbytes=one_more), Fabric(topology), name).seconds >= base.seconds - 1e-15
    faster = tuple(dataclasses.replace(level, bandwidth=level.bandwidth * factor) for level in topology.levels)
    quick = price(pattern, Fabric(dataclasses.replace(topology, levels=faster)), name)
    assert quick.transfer == pytest.approx(base.transfer / factor, rel=1e-9)
    for j in range(len(topology.levels)):
        levels = (*topology.levels[:j], faster[j], *topology.levels[j + 1 :])
        assert (
            price(pattern, Fabric(dataclasses.replace(topology, levels=levels)), name).seconds <= base.seconds + 1e-15
        )


@given(cases(), st.sampled_from(["auto", *ALGORITHM_NAMES]), st.data())
@settings(max_examples=100, deadline=None)
def test_renaming_equal_units_changes_nothing(case, name, data):
    topology, pattern = case
    # Children of a switch are equal; around a ring only turns are.
    levels = tuple(dataclasses.replace(level, uplinks=1, degraded=()) for level in topology.levels)
    topology = dataclasses.replace(topology, levels=levels)
    renamed = np.zeros(topology.size, dtype=np.int64)

    def shuffle(level, old, new):
        if level == len(levels):
            renamed[old] = new
            return
        n = levels[level].size
        if levels[level].link in ("switch", "full"):
            order = data.draw(st.permutations(range(n)))
        elif levels[level].link == "ring":
            turn = data.draw(st.integers(0, n - 1))
            order = [(i + turn) % n for i in range(n)]
        else:
            order = range(n)
        for a, b in enumerate(order):
            shuffle(level + 1, old * n + a, new * n + b)

    shuffle(0, 0, 0)
    one, two = price(pattern, Fabric(topology), name), price(pattern, Fabric(topology, renamed), name)
    assert two.alpha == pytest.approx(one.alpha, rel=1e-12)
    if one.algorithm == two.algorithm != "tree":
        assert two.transfer == pytest.approx(one.transfer, rel=1e-9)
        assert two.level_bytes == pytest.approx(one.level_bytes, rel=1e-9)


@given(any_topology(), st.data())
@settings(max_examples=100, deadline=None)
def test_all_to_all_equals_a_loop(topology, data):
    members, nbytes = data.draw(grouped(topology))
    got = price(Groups("all_to_all", members, nbytes), Fabric(topology)).transfer
    assert got == pytest.approx(transfer(topology, pairs(members, nbytes)), rel=1e-9)
