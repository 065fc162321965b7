"""Launches: the matrix read back, verdicts against plain loops, rings, offending groups, what shares an uplink."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import any_topology, switches
from launches.systems import plain_detour, plain_groups, plain_matrix, plain_renaming, renaming, systems
from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, TopologyError
from shardplan.hardware import Level, Placement, Topology, orders, placements
from shardplan.launches.launch import Launch, ring_of, sharing
from shardplan.launches.verdict import Stray, analyse

RANDOM = st.randoms(use_true_random=False)


@given(systems(), RANDOM)
@settings(max_examples=40)
def test_audit_inverts_every_placement(system, random):
    for placement in placements(*system):
        found = analyse(Launch.of(placement))
        assert (found.verdict, found.matrix, found.strays, found.reason) == ("canonical", placement.matrix, (), "")
        renamed = renaming(placement.topology, random)[placement.device_mesh()]
        again = analyse(Launch(placement.mesh, placement.topology, tuple(renamed.reshape(-1).tolist())))
        same = np.array_equal(renamed, placement.device_mesh())
        assert (again.verdict, again.matrix) == ("canonical" if same else "equivalent", placement.matrix)


@given(any_topology(16), st.data())
@settings(max_examples=30)
def test_every_placement_is_canonical_on_every_link(topology, data):
    factors = [d for d in range(1, topology.size + 1) if topology.size % d == 0]
    a = data.draw(st.sampled_from(factors))
    for placement in placements(Mesh(a=a, b=topology.size // a), topology):
        assert analyse(Launch.of(placement)).verdict == "canonical"


TORUS = Topology.load("tpu-v7", chips=(4, 2, 4))


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        (Topology("r", (Level("chip", 12, "ring", 1e9, 0.0),)), Mesh(a=4, b=3)),
        (TORUS, Mesh(a=16, b=4)),
        (TORUS, Mesh(a=4, b=8, c=2)),
    ],
)
def test_the_order_of_a_placement_is_read_back(topology, mesh):
    """Where ring and torus are shared in another order than the mesh's, and where that order is the mesh's."""
    for plain in placements(mesh, topology):
        for placement in orders(plain):
            found = analyse(Launch.of(placement))
            assert (found.matrix, found.order) == (placement.matrix, placement.order)
            assert found.verdict == ("canonical" if placement == plain else "equivalent")


@given(systems(most=24), st.data())
@settings(max_examples=120)
def test_verdict_equals_plain_loops(system, data):
    """Any order of the devices; of a placement a few exchanged; and right groups in another order along an axis."""
    mesh, topology = system
    kind = data.draw(st.sampled_from(["any", "exchanged", "reordered", "reordered"]))
    if kind == "any":
        ids = list(data.draw(st.permutations(range(topology.size))))
    else:
        array = data.draw(st.sampled_from(list(placements(mesh, topology)))).device_mesh()
        if kind == "reordered":
            axis = data.draw(st.integers(0, len(mesh.axes) - 1))
            array = array.take(data.draw(st.permutations(range(array.shape[axis]))), axis)
        ids = array.reshape(-1).tolist()
        for _ in range(data.draw(st.integers(1, 2)) if kind == "exchanged" else 0):
            a, b = (data.draw(st.integers(0, topology.size - 1)) for _ in range(2))
            ids[a], ids[b] = ids[b], ids[a]
    found = analyse(Launch(mesh, topology, tuple(ids)))
    matrix = plain_matrix(mesh, ids, topology)
    assert found.matrix == matrix
    if matrix is None:
        assert found.verdict == "not a placement" and found.strays and found.reason
        for stray in found.strays:
            groups = plain_groups(mesh, ids, stray.axes)
            devices = {ids[mesh.devices.index(r)] for r in stray.ranks}
            assert devices in [set(g) for g in groups]
            stride = topology.strides[topology.index(stray.level)]
            assert stray.spans == len({d // stride for d in devices}) != stray.expected
    else:
        canonical = Placement(mesh, topology, matrix).device_mesh().reshape(-1).tolist()
        assert (found.verdict == "canonical") == (ids == canonical)
        assert (found.verdict == "interleaved") != plain_renaming(mesh, ids, canonical, topology)
        assert (" pass between " in found.reason) == plain_detour(mesh, ids, topology)
        assert (found.verdict == "interleaved") == bool(found.reason)


@given(systems(most=24), st.data())
@settings(max_examples=40)
def test_rings_and_sharing_equal_plain_loops(system, data):
    mesh, topology = system
    launch = Launch(mesh, topology, tuple(data.draw(st.permutations(range(topology.size)))))
    axes = tuple(data.draw(st.permutations(mesh.axes))[: data.draw(st.integers(1, len(mesh.axes)))])
    groups = plain_groups(mesh, launch.ids, axes)
    assert sorted(map(tuple, groups)) == sorted(map(tuple, launch.groups(axes).tolist()))
    crossings, least, shared = [], [], []
    for stride in topology.strides:
        units = [[d // stride for d in g] for g in groups]
        crossings.append(sum(a != b for u in units for a, b in zip(u, u[1:] + u[:1], strict=True)))
        least.append(sum(len(set(u)) for u in units if len(set(u)) > 1))
        leaving = [u for u in units if len(set(u)) > 1]
        shared.append(max((sum(k in u for u in leaving) for k in range(topology.size // stride)), default=0))
    ring = ring_of(launch, axes)
    assert (ring.crossings, ring.contiguous) == (tuple(crossings), tuple(least))
    assert sharing(launch.groups(axes), topology) == tuple(shared)


def launched(mesh, topology, ids):
    return analyse(Launch(mesh, topology, tuple(ids)))


def test_three_way_tensor_on_eight_device_nodes_is_no_placement():
    found = launched(Mesh(data=8, tensor=3), Topology.load("dgx-a100", nodes=3), range(24))
    assert (found.verdict, found.matrix) == ("not a placement", None)
    assert found.reason == "2 of the 8 groups over `tensor` span 2 nodes where a placement has 1"
    assert found.strays == (
        Stray(("tensor",), "node", (6, 7, 8), 2, 1),
        Stray(("tensor",), "node", (15, 16, 17), 2, 1),
    )
    assert found.spans == (((3, 3), (8, 8)), ((1, 2), (3, 3)))


def test_diagonals_are_no_placement():
    """Each axis alone looks placed; the two together do not."""
    found = launched(Mesh(a=4, b=2), switches(2, 4), [0, 4, 5, 1, 2, 6, 7, 3])
    assert found.verdict == "not a placement"
    assert found.reason == "the group over `a`, `b` spans 2 l0s where a placement has 4"
    assert found.strays[0].axes == ("a", "b") and len(found.strays[0].ranks) == 8


def test_counts_that_are_no_multiple():
    found = launched(Mesh(a=3, b=2), switches(2, 3), [0, 3, 1, 4, 5, 2])
    assert found.verdict == "not a placement"
    assert found.reason == "every group over `a` spans 2 l0s but 3 l1s, which is no multiple"
    assert [s.spans for s in found.strays] == [3, 3]


def test_interleaved():
    mesh, topology = Mesh(data=8), Topology.load("gcp-a100x16").resize(nodes=2, gpus=4)
    found = launched(mesh, topology, [0, 4, 1, 5, 2, 6, 3, 7])
    assert (found.verdict, found.matrix) == ("interleaved", ((2, 4),))
    assert found.reason == "the rings over `data` pass between nodes 8 times, 2 would do"
    assert found.rings[0].crossings == (8, 8) and found.rings[0].contiguous == (2, 8)
    # A ring that begins in the middle of a node closes there: it crosses no more, but a chain does not close.
    found = launched(mesh, topology, [2, 3, 4, 5, 6, 7, 0, 1])
    assert (found.verdict, found.rings[0].detours) == ("interleaved", (0, 0))
    assert found.reason == (
        "the groups are right, but some begin inside a node: their rings cross no more, their chains do"
    )


def test_joint_rings_do_not_change_the_verdict():
    mesh, topology = Mesh(gpu=4, node=2), switches(2, 4)
    found = analyse(Launch(mesh, topology, tuple(np.arange(8).reshape(2, 4).T.reshape(-1).tolist())), [("gpu", "node")])
    assert found.verdict == "canonical"
    assert found.rings[-1].axes == ("gpu", "node") and found.rings[-1].detours == (6, 0)


def test_members_by_rank():
    """torch sorts the ranks of a group: an order that the mesh does not show."""
    mesh = Mesh({"data": 4}, devices=[0, 2, 1, 3])
    launch = Launch(mesh, switches(2, 2), (0, 1, 2, 3))
    assert analyse(launch).verdict == "canonical"
    sorted_ranks = Launch(mesh, switches(2, 2), (0, 1, 2, 3), by_rank=True)
    assert sorted_ranks.groups(("data",)).tolist() == [[0, 2, 1, 3]]
    assert analyse(sorted_ranks).verdict == "interleaved"


def ring_system(link="ring", size=8, shape=()):
    return Topology("grid", (Level("chip", size, link, 1e9, 0.0, 1, shape),))


@pytest.mark.parametrize(
    ("topology", "mesh", "ids", "verdict"),
    [
        (ring_system(), Mesh(a=8), range(8), "canonical"),
        (ring_system(), Mesh(a=8), [3, 4, 5, 6, 7, 0, 1, 2], "equivalent"),
        (ring_system(), Mesh(a=8), range(7, -1, -1), "equivalent"),
        (ring_system(), Mesh(a=8), [0, 2, 1, 3, 4, 5, 6, 7], "interleaved"),
        # From four devices on an order may take the long way: 2 + 1 + 2 + 1 hops instead of 4.
        (ring_system(size=4), Mesh(a=4), [0, 2, 1, 3], "interleaved"),
        # The axes of a level in the other order: each as good as it can be.
        (ring_system(), Mesh(a=4, b=2), [0, 4, 1, 5, 2, 6, 3, 7], "equivalent"),
        (ring_system("torus", 16, (4, 4)), Mesh(a=4, b=4), np.arange(16).reshape(4, 4).T.reshape(-1), "equivalent"),
        (ring_system("torus", 16, (4, 4)), Mesh(a=4, b=4), [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)],
         "interleaved"),
    ],
)  # fmt: skip
def test_order_on_rings_and_toruses(topology, mesh, ids, verdict):
    found = launched(mesh, topology, ids)
    assert found.verdict == verdict
    if verdict == "interleaved":
        assert found.reason.startswith("the rings over `a` take ") and found.reason.endswith(" would do")


def test_errors():
    mesh, topology = Mesh(data=4, tensor=2), switches(2, 4)
    with pytest.raises(TopologyError) as caught:
        Launch(mesh, topology, (0, 1, 2, 3, 4, 5, 6, 6))
    assert str(caught.value) == (
        "device 6 stands at the coordinates (3, 0) and (3, 1) of mesh data=4, tensor=2; each device stands once"
    )
    with pytest.raises(TopologyError, match="device 8 is not in topology 'test', whose devices are 0 to 7"):
        Launch(mesh, topology, tuple(range(1, 9)))
    with pytest.raises(TopologyError, match="7 device ids for mesh data=4, tensor=2; legal is one for each of 8"):
        Launch(mesh, topology, tuple(range(7)))
    with pytest.raises(TopologyError) as caught:
        Launch(mesh, switches(4, 4), tuple(range(8)))
    assert str(caught.value) == (
        "mesh data=4, tensor=2 has 8 devices, topology 'test' has 16 (l0=4 x l1=4); a launch covers its topology: "
        "give the topology the launch's size, as in Topology.load(..., l0s=...)"
    )
    with pytest.raises(LayoutError, match="unknown axis 'pipe'"):
        Launch(mesh, topology, tuple(range(8))).groups(("pipe",))


def test_large_launches_are_quick():
    topology = switches(64, 4, 4, 8)
    mesh = Mesh(data=32, tensor=16, pipeline=16)
    found = analyse(Launch(mesh, topology, tuple(range(8192))))
    assert found.matrix is not None and math.prod(found.matrix[0]) == 32
