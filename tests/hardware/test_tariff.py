"""Factors of reductions, and prices over digits against prices over all groups of all devices."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hardware.topologies import any_topology, switches, under_library

from shardplan.core.mesh import Mesh
from shardplan.core.pattern import Groups
from shardplan.errors import TopologyError
from shardplan.hardware.level_factors import checked_axes, factors
from shardplan.hardware.placement import Placement, orders, placements
from shardplan.hardware.prices.alpha_beta import AlphaBeta, offsets
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology

KINDS = ["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "all_to_all"]


@st.composite
def placed(draw):
    topology = draw(under_library(draw(any_topology()), slow=True))
    n = topology.size
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    a = draw(st.sampled_from(divisors))
    found = draw(st.sampled_from(list(placements(Mesh(a=a, b=n // a), topology))))
    return draw(st.sampled_from(list(orders(found))))


@given(placed(), st.sampled_from(KINDS), st.data())
@settings(max_examples=300, deadline=None)
def test_prices_over_digits_equal_prices_over_devices(placement, kind, data):
    algorithm = data.draw(st.sampled_from(["auto", *library(placement.topology.library).algorithms()]))
    digits = [d for f in factors(placement, ("a", "b"), uncollapsed=True) for d in f.digits]
    if not digits:
        return
    varies = data.draw(
        st.lists(st.sampled_from(digits), min_size=1, unique=True).map(lambda x: sorted(x, key=digits.index))
    )
    last = digits.index(varies[-1])
    zero = digits[last + 1 :] if data.draw(st.booleans()) else []
    ids = np.arange(placement.topology.size)
    for d in (*varies, *zero):
        ids = ids[ids // d.stride % d.size == 0]
    members = ids[:, None] + offsets([(d.size, d.stride) for d in varies])
    whole = price(Groups(kind, members, np.full(len(members), 1e6)), Fabric(placement.topology), algorithm)
    tariff = AlphaBeta(placement.topology, algorithm)
    assert tariff.seconds(kind, varies, zero, 1e6) == pytest.approx(whole.seconds, rel=1e-12)
    uneven = np.arange(len(members)) * 1e4
    direct = price(Groups(kind, members, uneven), Fabric(placement.topology), algorithm)
    assert tariff.uneven_seconds(kind, varies, ids, uneven) == direct.seconds


@given(placed())
@settings(max_examples=60, deadline=None)
def test_digits_number_the_devices(placement):
    mesh = placement.mesh_split()
    position = placement.device_mesh().reshape(-1)
    for axes in (("a",), ("b",), ("a", "b")):
        for factor in factors(placement, axes):
            assert factor.size > 1
            for d in factor.digits:
                assert (position // d.stride % d.size).tolist() == mesh.coordinate(d.name).tolist()
        flat = factors(placement, axes, uncollapsed=True)
        assert [d for f in factors(placement, axes) for d in f.digits] == [d for f in flat for d in f.digits]


def test_digits_stand_side_by_side_inside_a_level():
    placement = Placement(Mesh(data=8, tensor=2), Topology.load("dgx-a100", nodes=2), ((2, 4), (1, 2)))
    digits = [d for f in factors(placement, "data") for d in f.digits]
    # Of a node's eight devices two neighbours differ in tensor.
    assert [(d.name, d.size, d.stride) for d in digits] == [("data.node", 2, 8), ("data.gpu", 4, 2)]


def test_axes_are_checked():
    placement = Placement(Mesh(data=8, tensor=2), Topology.load("dgx-a100", nodes=2), ((2, 4), (1, 2)))
    assert checked_axes(placement, ("tensor", "data")) == ("data", "tensor")
    assert [f.axes for f in factors(placement, ("tensor", "data"))] == [("data.node",), ("data.gpu", "tensor")]
    with pytest.raises(TopologyError, match=r"cannot reduce over 'pipe': the mesh has data=8, tensor=2"):
        factors(placement, "pipe")
    with pytest.raises(TopologyError, match=r"'data' is named twice"):
        factors(placement, ("data", "data"))
    with pytest.raises(TopologyError, match="needs at least one axis"):
        factors(placement, ())


def test_a_degraded_link_is_not_overlooked():
    topology = Topology.load("gcp-v100x8", nodes=4)
    slow = dataclasses.replace(
        topology, levels=(dataclasses.replace(topology.levels[0], degraded=((3, 0.5),)), topology.levels[1])
    )
    for where, ratio in ((topology, 1.0), (slow, 2.0)):
        digits = factors(Placement(Mesh(a=2, b=16), where, ((2, 1), (2, 8))), "a")[0].digits
        rate = AlphaBeta(where, "ring").offers("all_reduce", digits)[0][1]
        assert rate == pytest.approx(ratio * 8 / 8e9)


def test_a_slow_port_of_another_rack_is_not_overlooked():
    """Of two racks of two nodes with two NICs, the last NIC of the last node is slow: nodes 0 and 1 are not all."""
    levels = switches(2, 2, 2, uplinks=2).levels
    for slow, ratio in (((), 1.0), (((3, 1, 0.5),), 2.0)):
        topology = Topology("", (levels[0], dataclasses.replace(levels[1], slow_ports=slow), levels[2]))
        digits = factors(Placement(Mesh(a=2, b=4), topology, ((1, 2, 1), (2, 1, 2))), "a")[0].digits
        assert AlphaBeta(topology).offers("all_reduce", digits)[0][1] == pytest.approx(ratio / 1e9)
