"""What a collective over digits of a placement costs, against its price over all groups of all devices."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hardware.topologies import placed, switches

from shardplan.core.mesh import Mesh
from shardplan.core.pattern import Groups
from shardplan.hardware.level_factors import factors, groups_along
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology
from shardplan.movement.reductions.type_graph import COLLECTIVES, digit_lines


@given(placed(), st.sampled_from(COLLECTIVES), st.data())
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
    place = np.zeros_like(ids)
    for d in varies:
        place = place * d.size + ids // d.stride % d.size
    apart = ids - sum(ids // d.stride % d.size * d.stride for d in varies)
    taking = [n for n in ids if all(n // d.stride % d.size == 0 for d in zero)]
    groups = {}
    for n in sorted(taking, key=lambda n: place[n]):
        groups.setdefault(apart[n], []).append(n)
    members = np.array([groups[first] for first in sorted(groups)])
    pairs = [tuple((d.size, d.stride) for d in x) for x in (varies, zero)]
    assert np.array_equal(groups_along(*pairs, placement.topology.size), members)
    whole = price(Groups(kind, members, np.full(len(members), 1e6)), Fabric(placement.topology), algorithm)
    lines = digit_lines(kind, *pairs, placement.topology, algorithm)
    assert min(alpha + beta * 1e6 for alpha, beta in lines) == pytest.approx(whole.seconds, rel=1e-12)


def test_a_degraded_link_is_not_overlooked():
    topology = Topology.load("gcp-v100x8", nodes=4)
    slow = dataclasses.replace(
        topology, levels=(dataclasses.replace(topology.levels[0], degraded=((3, 0.5),)), topology.levels[1])
    )
    for where, ratio in ((topology, 1.0), (slow, 2.0)):
        digits = factors(Placement(Mesh(a=2, b=16), where, ((2, 1), (2, 8))), "a")[0].strides
        rate = digit_lines("all_reduce", digits, (), where, "ring")[0][1]
        assert rate == pytest.approx(ratio * 8 / 8e9)


def test_a_slow_port_of_another_rack_is_not_overlooked():
    """Of two racks of two nodes with two NICs, the last NIC of the last node is slow: nodes 0 and 1 are not all."""
    levels = switches(2, 2, 2, uplinks=2).levels
    for slow, ratio in (((), 1.0), (((3, 1, 0.5),), 2.0)):
        topology = Topology("", (levels[0], dataclasses.replace(levels[1], slow_ports=slow), levels[2]))
        digits = factors(Placement(Mesh(a=2, b=4), topology, ((1, 2, 1), (2, 1, 2))), "a")[0].strides
        assert digit_lines("all_reduce", digits, (), topology, "auto")[0][1] == pytest.approx(ratio / 1e9)
