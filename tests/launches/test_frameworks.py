"""Launches of torch and JAX, and the equality with JAX's hybrid meshes."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.topologies import switches
from launches.systems import factorisations
from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, TopologyError
from shardplan.hardware import placements
from shardplan.launches.frameworks import from_jax, from_torch
from shardplan.launches.hostfile import parse_hostfile
from shardplan.launches.verdict import analyse


def fake_devices(slices, each, attribute="slice_index"):
    """Devices as `mesh_utils` looks at them."""
    return [
        SimpleNamespace(id=k, platform="cpu", device_kind="cpu", process_index=0, **({attribute: k // each}))
        if attribute != "process_index"
        else SimpleNamespace(id=k, platform="cpu", device_kind="cpu", process_index=k // each)
        for k in range(slices * each)
    ]


@st.composite
def two_levels(draw):
    slices, each = draw(st.sampled_from([(1, 8), (2, 4), (4, 4), (2, 6), (3, 4), (4, 8), (8, 8), (6, 6)]))
    axes = draw(st.sampled_from(sorted(factorisations(slices * each, draw(st.integers(1, 3))))))
    mesh = Mesh({f"a{k}": n for k, n in enumerate(axes)})
    return slices, each, draw(st.sampled_from(list(placements(mesh, switches(slices, each)))))


@given(two_levels())
@settings(max_examples=60)
def test_two_levels_equal_jaxs_hybrid_mesh(case):
    mesh_utils = pytest.importorskip("jax.experimental.mesh_utils")
    slices, each, placement = case
    devices = fake_devices(slices, each)
    theirs = mesh_utils.create_hybrid_device_mesh(
        [row[1] for row in placement.matrix], [row[0] for row in placement.matrix], devices
    )
    ids = np.vectorize(lambda d: d.id)(theirs)
    assert np.array_equal(ids, placement.device_mesh())
    launch = from_jax(SimpleNamespace(devices=theirs, axis_names=placement.mesh.axes), placement.topology)
    found = analyse(launch)
    assert (found.verdict, found.matrix) == ("canonical", placement.matrix)


def test_jax_devices_lie_slice_by_slice_and_process_by_process():
    devices = fake_devices(2, 2, "process_index")
    # The list alternates between processes; the topology does not.
    listed = [devices[k] for k in (0, 2, 1, 3)]
    mesh = SimpleNamespace(
        devices=np.array([[devices[0], devices[1]], [devices[2], devices[3]]]), axis_names=("a", "b")
    )
    launch = from_jax(mesh, switches(2, 2), devices=listed)
    assert launch.ids == (0, 1, 2, 3)
    assert launch.mesh == Mesh({"a": 2, "b": 2}, devices=[0, 2, 1, 3])
    for process, device in enumerate(reversed(devices)):
        device.process_index = process // 2
    assert from_jax(mesh, switches(2, 2)).ids == (2, 3, 0, 1)


def test_real_jax_mesh():
    jax = pytest.importorskip("jax")
    mesh = jax.make_mesh((1, 1), ("data", "tensor"))
    launch = from_jax(mesh, switches(1, 1), jax.devices()[:1])
    assert (launch.mesh, launch.ids) == (Mesh(data=1, tensor=1), (0,))


def fake_mesh(ranks, names=("data", "tensor")):
    torch = pytest.importorskip("torch")
    return SimpleNamespace(mesh=torch.tensor(ranks), mesh_dim_names=names)


def test_torch_mesh():
    launch = from_torch(fake_mesh([[0, 2], [1, 3]]), switches(2, 2))
    assert launch.mesh == Mesh({"data": 2, "tensor": 2}, devices=[0, 2, 1, 3])
    assert (launch.ids, launch.by_rank, launch.hosts) == ((0, 2, 1, 3), True, ())
    hosts = parse_hostfile("x:1\ny:1\nx:1\ny:1")
    launch = from_torch(fake_mesh([[0, 2], [1, 3]]), switches(2, 2), hosts)
    assert (launch.ids, launch.hosts) == ((0, 1, 2, 3), ("x", "y"))
    assert from_torch(fake_mesh([0, 1], None), switches(2)).mesh.axes == ("d0",)


def test_torch_sorts_the_members_of_its_groups():
    """The ring that torch builds is not the one that the mesh shows."""
    hosts = parse_hostfile("x:1\ny:1\nx:1\ny:1")
    mesh = fake_mesh([0, 2, 1, 3], ("data",))
    assert analyse(from_torch(mesh, switches(2, 2), hosts)).verdict == "interleaved"
    assert analyse(from_torch(mesh, switches(2, 2), hosts, sort_ranks=False)).verdict == "canonical"


def test_real_torch_mesh(tmp_path):
    pytest.importorskip("torch")
    code = """
import sys, torch.distributed as dist
from shardplan import Mesh, Topology
from shardplan.launches.frameworks import from_torch
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
assert from_torch(mesh, Topology.load("nominal", devices=1)).mesh == Mesh(data=1, tensor=1)
dist.destroy_process_group()
"""
    # In a process of its own: a test beside it may have a process group.
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True, timeout=120)


def test_errors():
    with pytest.raises(LayoutError) as caught:
        from_torch(object(), switches(2, 2))
    assert str(caught.value) == "object has no tensor of ranks .mesh; legal is a torch DeviceMesh"
    with pytest.raises(LayoutError) as caught:
        from_jax(object(), switches(2, 2))
    assert str(caught.value) == "object has no array .devices and .axis_names; legal is a jax.sharding.Mesh"
    with pytest.raises(
        TopologyError, match=r"rank 4 of mesh .* runs nowhere: topology 'test' has 4 devices; legal are"
    ):
        from_torch(fake_mesh([[1, 2], [3, 4]]), switches(2, 2))
    with pytest.raises(TopologyError, match="has 4 devices, topology 'test' has 8"):
        from_torch(fake_mesh([[0, 1], [2, 3]]), switches(2, 4))
    devices = fake_devices(2, 2)
    mesh = SimpleNamespace(devices=np.array(devices), axis_names=("a",))
    with pytest.raises(TopologyError, match="4 JAX devices, topology 'test' has 8"):
        from_jax(mesh, switches(2, 4))
    with pytest.raises(LayoutError, match="of the mesh is not among the 3 devices given"):
        from_jax(mesh, switches(2, 2), devices[:3])
