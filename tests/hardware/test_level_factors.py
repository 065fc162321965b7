"""Factors of reductions: the digits of the reduced axes, level by level, and the groups along them."""

import pytest
from hypothesis import given, settings
from tests.hardware.topologies import placed

from shardplan.core.mesh import Mesh
from shardplan.errors import TopologyError
from shardplan.hardware.level_factors import checked_axes, factors
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology


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
