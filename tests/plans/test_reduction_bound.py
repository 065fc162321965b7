"""Lower bounds of moves that reduce: never above any program, equal to the known bounds, exact on hand-made cases."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.hardware.topologies import any_topology

import shardplan as sp
from shardplan.errors import ShardplanError
from shardplan.hardware.level import Level
from shardplan.hardware.prices.fabric import Fabric
from shardplan.plans.collective_bounds import all_reduce_bound, reduce_scatter_bound
from shardplan.plans.pricing import fabric_of, seconds_bound
from shardplan.plans.reduction_bound import reduction_bound
from shardplan.plans.starts import Bound

STATES = ["dim0", "dim1", "partial", "root", "free"]


def make(mesh, states):
    dims = [tuple(a for a, s in zip(mesh.axes, states, strict=True) if s == f"dim{d}") for d in range(2)]
    partial = {a: "sum" for a, s in zip(mesh.axes, states, strict=True) if s == "partial"}
    root = tuple(a for a, s in zip(mesh.axes, states, strict=True) if s == "root")
    return sp.TensorType("f32", (240, 240), dims, mesh, partial=partial, root=root)


@st.composite
def moves(draw):
    topology = replace(draw(any_topology(most=16)), library=draw(st.sampled_from(["ring", "nccl", "xla"])))
    n = topology.size
    a = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    mesh = sp.Mesh(a=a, b=n // a)
    source = draw(st.tuples(st.sampled_from(STATES), st.sampled_from(STATES)))
    target = draw(st.tuples(st.sampled_from(STATES), st.sampled_from(STATES)))
    assume("partial" in source)
    where = draw(st.sampled_from(list(sp.placements(mesh, topology))))
    return make(mesh, source), make(mesh, target), where


@given(moves())
@settings(max_examples=200, deadline=None)
def test_no_plan_is_below_the_bound(move):
    source, target, where = move
    fabric = fabric_of(where, (source.mesh,))
    try:
        plan = sp.redistribute(source, target, topology=where)
    except ShardplanError:
        assume(False)
        return
    assert reduction_bound(source, target, fabric).seconds <= plan.seconds * (1 + 1e-9)
    assert plan.certificate.lower_bound_seconds <= plan.seconds * (1 + 1e-9)


def test_of_addends_that_stay_addends_no_time_is_claimed() -> None:
    """They may be added up first: then one of two roots receives a sum, and the other makes zeros."""
    source, target = (sp.TensorType.parse(x, sp.Mesh(a=2, b=3)) for x in ("f32[6@b]{+a}", "f32[6]{+a}{root:b}"))
    assert seconds_bound([source], [target], fabric_of(sp.Topology.load("dgx-h100", nodes=1), (source.mesh,))) == Bound(
        0.0, 0.0
    )
    assert sp.redistribute(source, target).certificate.lower_bound_seconds == 0


@given(any_topology(most=24))
@settings(max_examples=60, deadline=None)
def test_plain_collectives_have_the_known_bounds(topology):
    n = topology.size
    assume(n > 1)
    mesh, fabric = sp.Mesh(a=n), Fabric(topology)
    source = sp.TensorType("f32", (n * 5, 3), (), mesh, partial={"a": "sum"})
    members, nbytes = np.arange(n)[None], np.array([n * 60.0])
    first = float(fabric.latencies().min())
    whole = reduction_bound(source, sp.TensorType("f32", (n * 5, 3), (), mesh), fabric)
    assert whole.transfer >= all_reduce_bound(members, nbytes, fabric) * (1 - 1e-12)
    parts = reduction_bound(source, sp.TensorType("f32", (n * 5, 3), ("a",), mesh), fabric)
    assert parts.transfer >= reduce_scatter_bound(members, nbytes, fabric) * (1 - 1e-12)
    if all(level.link == "switch" for level in topology.levels):
        assert whole.transfer == pytest.approx(all_reduce_bound(members, nbytes, fabric))
        assert parts.transfer == pytest.approx(reduce_scatter_bound(members, nbytes, fabric))
    for found in (whole, parts):
        assert found.seconds >= (found.transfer + first) * (1 - 1e-12)


def test_by_hand():
    topology = sp.Topology("t", (Level("node", 2, "switch", 1e9, 0.0), Level("gpu", 4, "switch", 1e10, 0.0)))
    mesh = sp.Mesh(node=2, gpu=4)
    shape = (8, 1000)
    nbytes = 8 * 1000 * 4

    def bound(partial, dims, source_dims=(), root=()):
        source = sp.TensorType("f32", shape, source_dims, mesh, partial=dict.fromkeys(partial, "sum"))
        return reduction_bound(source, sp.TensorType("f32", shape, dims, mesh, root=root), Fabric(topology)).seconds

    # Everything to everyone: the payload enters each node.
    assert bound(("node", "gpu"), ()) == pytest.approx(nbytes / 1e9)
    # Half of it is wanted in each node.
    assert bound(("node", "gpu"), (("node", "gpu"),)) == pytest.approx(nbytes / 2 / 1e9)
    # Sharded over the devices of each node, every node wants all of it.
    assert bound(("node", "gpu"), ("gpu",)) == pytest.approx(nbytes / 1e9)
    # Inside nodes nothing crosses: a device takes in its payload, or, counted, 2 x 3 / 4 of it.
    assert bound(("gpu",), ("node",), ("node",)) == pytest.approx(1.5 * nbytes / 2 / 1e10)
    # By the count alone, where the sums are wanted on a mesh of other names: no bound of an all-reduce is asked.
    source = sp.TensorType("f32", shape, ("node",), mesh, partial={"gpu": "sum"})
    renamed = sp.TensorType("f32", shape, ("n",), sp.Mesh(n=2, g=4))
    assert reduction_bound(source, renamed, Fabric(topology)).seconds == pytest.approx(1.5 * nbytes / 2 / 1e10)
    # Where the other node wants a node's sum, too, half of the array enters each.
    assert bound(("gpu",), (), ("node",)) == pytest.approx(nbytes / 2 / 1e9)
    assert bound(("gpu",), (None, "node"), ("node",)) == pytest.approx(nbytes / 4 / 1e9)
    # The four copies of each node's addends need not all travel.
    assert bound(("node",), ()) == pytest.approx(nbytes / 1e9)
    # With a payload of its own on each device all of them do.
    assert bound(("node",), ("gpu",), ("gpu",)) == pytest.approx(nbytes / 1e9)
    big = sp.TensorType("f32", (8, 4000), (None, "gpu"), mesh, partial={"node": "sum"})
    assert reduction_bound(
        big, big.with_layout(replace(big.layout, partial=(), reduction=None)), Fabric(topology)
    ).seconds == (pytest.approx(4 * nbytes / 1e9))
    # Only the first node wants the sum.
    assert bound(("node", "gpu"), (), root=("node", "gpu")) == pytest.approx(nbytes / 1e9)
    assert bound(("node",), (), ("gpu",), root=()) == pytest.approx(nbytes / 1e9)


def test_nothing_is_claimed_where_nothing_is_reduced():
    mesh = sp.Mesh(a=2, b=2)
    fabric = Fabric(sp.Topology.load("nominal", devices=4))
    kept = sp.TensorType("f32", (4, 4), (), mesh, partial={"a": "sum"})
    moved = sp.TensorType("f32", (4, 4), ("b",), mesh, partial={"a": "sum"})
    assert reduction_bound(kept, moved, fabric).seconds == 0
    other = sp.TensorType("f32", (4, 4), (), sp.Mesh(c=4), partial={"c": "sum"})
    assert reduction_bound(kept, other, fabric).seconds == 0
    # A mesh of the same devices wants what its own would.
    whole, same = (sp.TensorType("f32", (4, 4), (), x) for x in (sp.Mesh(c=4), mesh))
    assert reduction_bound(kept, whole, fabric).seconds == reduction_bound(kept, same, fabric).seconds > 0
    # Where the sum is cut into addends again, all but one of them may be zeros.
    again = sp.TensorType("f32", (4, 4), (), mesh, partial={"b": "sum"})
    assert reduction_bound(kept, again, fabric).seconds == 0


def test_all_targets_of_a_payload():
    topology = sp.Topology("t", (Level("l0", 2, "switch", 1e9, 0.0), Level("l1", 4, "switch", 1e10, 0.0)))
    for placement, target in itertools.product(
        sp.placements(sp.Mesh(a=4, b=2), topology), ("replicated", "sharded", "root")
    ):
        plan = sp.reduce(placement, "a", 2**20, target=target)
        assert 0 < plan.certificate.lower_bound_seconds <= plan.seconds * (1 + 1e-9)
