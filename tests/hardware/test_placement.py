"""Placements: margins, counts, numbering, inversion."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import factorisations, switches
from launches.systems import renaming
from shardplan.core.mesh import Mesh
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware import Fabric, Placement, Topology, count, matrix_of, placements


def mesh_of(*sizes):
    return Mesh({f"a{i}": n for i, n in enumerate(sizes)})


@pytest.mark.parametrize(
    ("levels", "axes", "number"),
    [
        ((4, 16), (16, 2, 2), 4),
        ((8, 4, 8), (16, 16), 10),
        ((16, 32, 8), (8, 8, 64), 79),
        ((64, 4, 4, 8), (32, 16, 16), 297),
    ],
)
def test_pinned_counts(levels, axes, number):
    matrices = [p.matrix for p in placements(mesh_of(*axes), switches(*levels))]
    assert len(matrices) == count(mesh_of(*axes), switches(*levels)) == number
    assert matrices == sorted(set(matrices))


def test_pinned_matrices():
    found = [[list(row) for row in p.matrix] for p in placements(mesh_of(4, 4), switches(1, 2, 2, 4))]
    assert found == [
        [[1, 1, 1, 4], [1, 2, 2, 1]],
        [[1, 1, 2, 2], [1, 2, 1, 2]],
        [[1, 2, 1, 2], [1, 1, 2, 2]],
        [[1, 2, 2, 1], [1, 1, 1, 4]],
    ]


def brute(axes, levels):
    rows = [list(factorisations(a, len(levels))) for a in axes]
    return [m for m in itertools.product(*rows) if [math.prod(c) for c in zip(*m, strict=True)] == list(levels)]


@pytest.mark.parametrize("n", [1, 2, 6, 8, 12, 15, 16, 24, 30, 36, 45, 48, 60, 64])
def test_enumeration_equals_brute_force(n):
    for levels in {*factorisations(n, 1), *factorisations(n, 2), *(f for f in factorisations(n, 3) if 1 not in f)}:
        for axes in {*factorisations(n, 2), *(f for f in factorisations(n, 3) if 1 not in f)}:
            matrices = [p.matrix for p in placements(mesh_of(*axes), switches(*levels))]
            assert matrices == sorted(brute(axes, levels))
            assert len(matrices) == count(mesh_of(*axes), switches(*levels))


@st.composite
def placed(draw):
    topology = switches(*draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    axes = draw(st.sampled_from([f for parts in (1, 2, 3) for f in factorisations(topology.size, parts)]))
    found = list(placements(mesh_of(*axes), topology))
    return draw(st.sampled_from(found))


@given(placed())
@settings(max_examples=60)
def test_device_mesh_is_a_permutation_that_the_audit_inverts(placement):
    ids = placement.device_mesh()
    assert ids.shape == placement.mesh.sizes
    assert sorted(ids.reshape(-1).tolist()) == list(range(placement.topology.size))
    assert matrix_of(ids, placement.topology) == placement.matrix
    assert Placement.parse(str(placement)) == placement
    split = placement.mesh_split()
    assert split.devices == placement.mesh.devices
    assert split.sizes == placement.mesh.sizes


@given(placed(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_matrix_of_does_not_see_renamed_units(placement, random):
    topology = placement.topology
    renamed = renaming(topology, random)
    assert matrix_of(renamed[placement.device_mesh()], topology) == placement.matrix


def test_matrix_of_refuses_what_is_no_placement():
    topology = switches(2, 4)
    # Three devices of a row in one node, one in the other.
    assert matrix_of(np.array([[0, 1, 2, 4], [3, 5, 6, 7]]), topology) is None
    # Each axis alone looks placed, but the two together do not.
    diagonal = np.array([[0, 4], [5, 1], [2, 6], [7, 3]])
    assert matrix_of(diagonal, switches(2, 4)) is None
    # Megatron's tp=3 on nodes of 8 devices.
    assert matrix_of(np.arange(24).reshape(8, 3), switches(3, 8)) is None
    with pytest.raises(TopologyError, match="names 7 distinct devices in 8 places"):
        matrix_of(np.array([0, 1, 2, 3, 4, 5, 6, 6]), topology)
    with pytest.raises(TopologyError, match="device 8 is not in topology"):
        matrix_of(np.arange(1, 9), topology)


def test_hybrid_device_mesh():
    # jax's create_hybrid_device_mesh(mesh_shape=column 1, dcn_mesh_shape=column 0): granules tiled block-wise.
    for p in placements(mesh_of(4, 2, 2), switches(4, 4)):
        outer, inner = ([row[j] for row in p.matrix] for j in range(2))
        blocks = [np.arange(4).reshape(inner) + 4 * node for node in range(4)]
        grid = np.empty(outer, dtype=object)
        for i, block in enumerate(blocks):
            grid[np.unravel_index(i, outer)] = block
        assert np.array_equal(np.block(grid.tolist()), p.device_mesh())


def test_sub_axes():
    topology = Topology.load("dgx-a100", nodes=4)
    p = Placement(Mesh(data=8, tensor=4), topology, ((4, 2), (1, 4)))
    mesh = p.mesh_split()
    assert (mesh.span("data.node").size, mesh.span("data.gpu").size) == (4, 2)
    assert mesh.devices[:8] == tuple(range(8))
    assert p.describe() == "data=[4, 2], tensor=[1, 4]"


def test_position():
    mesh = Mesh({"a": 2, "b": 2}, devices=[7, 5, 3, 2])
    p = Placement(mesh, switches(2, 2), ((1, 2), (2, 1)))
    assert p.device_mesh().tolist() == [[0, 2], [1, 3]]
    assert p.position().tolist() == [-1, -1, 3, 1, -1, 2, -1, 0]
    assert Placement.parse(str(p)) == p


def test_options():
    mesh, topology = mesh_of(4, 4), switches(1, 2, 2, 4)
    inside = [p.matrix for p in placements(mesh, topology, inside={"a0": "l2"})]
    assert inside == [((1, 1, 1, 4), (1, 2, 2, 1)), ((1, 1, 2, 2), (1, 2, 1, 2))]
    bounded = [p.matrix for p in placements(mesh, topology, bounds={("a0", "l3"): (4, 4)})]
    assert bounded == [((1, 1, 1, 4), (1, 2, 2, 1))]
    with pytest.raises(TopologyError, match="unknown axis 'x': the mesh has"):
        list(placements(mesh, topology, bounds={("x", "l3"): (1, 1)}))
    with pytest.raises(TopologyError, match="has no level 'y'"):
        list(placements(mesh, topology, inside={"a0": "y"}))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (((2, 2),), "matrix [[2, 2]] has the wrong shape: mesh a0=4, a1=2 on l0=2 x l1=4 needs 2 rows of 2"),
        (((0, 2), (1, 2)), "matrix [[0, 2], [1, 2]] has an entry below 1; an axis is split over 1 or more units"),
        (((1, 2), (2, 2)), "matrix [[1, 2], [2, 2]]: row [1, 2] of axis 'a0' has product 2, the axis has size 4"),
        (((1, 4), (1, 2)), "matrix [[1, 4], [1, 2]]: column [1, 1] of level 'l0' has product 1, the level has size 2"),
    ],
)
def test_errors(matrix, message):
    with pytest.raises(TopologyError) as caught:
        Placement(mesh_of(4, 2), switches(2, 4), matrix)
    assert str(caught.value) == message


def test_sizes_must_agree():
    for call in (lambda m, t: Placement(m, t, ()), count, lambda m, t: list(placements(m, t))):
        with pytest.raises(TopologyError) as caught:
            call(mesh_of(4, 2), switches(4, 4))
        assert str(caught.value) == (
            "mesh a0=4, a1=2 has 8 devices, topology 'test' has 16 (l0=4 x l1=4); a placement needs equal counts"
        )


def test_parse_errors():
    text = str(Placement(mesh_of(4, 2), switches(2, 4), ((2, 2), (1, 2))))
    with pytest.raises(ParseError, match=r"expected a1=\[...\], the row of axis 'a1'\n  placement a0=\[2, 2\], b"):
        Placement.parse(text.replace(" a1=[", " b=["))
    with pytest.raises(ParseError, match="expected 'mesh '"):
        Placement.parse("nothing")
    with pytest.raises(ParseError, match="expected 'placement '"):
        Placement.parse("mesh a=2\nplaced\n\n")
    with pytest.raises(ParseError, match="expected the end of the matrix"):
        Placement.parse(text.replace("[1, 2]", "[1, 2] and"))


def test_blocks_of_ids_that_are_units():
    """A placement may lay an axis so that no run of ids is a node."""
    topology, mesh = Topology.load("dgx-a100", nodes=2), Mesh(a=2, b=8)
    found = {}
    for p in placements(mesh, topology):
        found[p.matrix] = Fabric(topology, p.position()).blocks(np.arange(16))
    assert found == {((2, 1), (1, 8)): (8,), ((1, 2), (2, 4)): ()}
    assert Fabric(topology).blocks(np.arange(16)) == (8,)
    assert Fabric(topology).blocks(np.arange(8)) == ()
    assert Fabric(topology).blocks(np.arange(4, 12)) == (8,)
