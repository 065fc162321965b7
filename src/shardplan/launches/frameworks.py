"""Launches of torch and JAX: a `DeviceMesh` or a `jax.sharding.Mesh`, read as where its mesh lies on a topology.

Neither framework is imported here: what is read are the attributes of the object that the caller has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, TopologyError
from shardplan.hardware.topology import Topology
from shardplan.launches.hostfile import Hosts, launch_of
from shardplan.launches.launch import Launch


def from_torch(mesh: Any, topology: Topology, hosts: Hosts | None = None, sort_ranks: bool = True) -> Launch:
    """Return the launch of a torch `DeviceMesh`.

    Args:
        mesh: Anything with `.mesh`, the tensor of ranks, and `.mesh_dim_names`; dims without names are d0, d1, ....
        topology: As many devices as the mesh has ranks.
        hosts: Which host every rank runs on, from `parse_hostfile` or `parse_rankfile`; host by host by default.
        sort_ranks: Whether its groups list their members by rank, as torch's `new_group` does unless told otherwise.

    Raises:
        LayoutError: The object is no such mesh, or a dim's name is no identifier.
        TopologyError: Mesh, hosts and topology do not suit each other.

    Source: pytorch#176126 and #193224 for the order of ranks in a group.
    """
    tensor: Any = getattr(mesh, "mesh", None)
    if tensor is None or not hasattr(tensor, "tolist"):
        raise LayoutError(f"{type(mesh).__name__} has no tensor of ranks .mesh; legal is a torch DeviceMesh")
    ranks = np.asarray(tensor.tolist(), dtype=np.int64)
    names = tuple(getattr(mesh, "mesh_dim_names", None) or (f"d{k}" for k in range(ranks.ndim)))
    ours = Mesh(dict(zip(names, ranks.shape, strict=True)), devices=ranks.reshape(-1).tolist())
    return launch_of(ours, topology, hosts, by_rank=sort_ranks)


def from_jax(mesh: Any, topology: Topology, devices: Sequence[Any] | None = None) -> Launch:
    """Return the launch of a JAX `Mesh`; the device ids of its mesh number `devices`.

    Devices lie on the topology slice by slice, process by process, and there in the order of the list.

    Args:
        mesh: Anything with `.devices`, an array of devices, and `.axis_names`.
        topology: As many devices as the mesh.
        devices: All devices as `jax.devices()` lists them; those of the mesh by ascending id by default.

    Raises:
        LayoutError: The object is no such mesh, or names a device that is not in `devices`.
        TopologyError: Its devices are not the topology's in number.

    Source: jax `mesh_utils.create_hybrid_device_mesh`, which orders granules by slice or process.
    """
    array: Any = getattr(mesh, "devices", None)
    names: Any = getattr(mesh, "axis_names", None)
    if not isinstance(array, np.ndarray) or names is None:
        raise LayoutError(f"{type(mesh).__name__} has no array .devices and .axis_names; legal is a jax.sharding.Mesh")
    flat: list[Any] = list(array.reshape(-1))
    listed: list[Any] = sorted(flat, key=lambda d: d.id) if devices is None else list(devices)
    number = {d.id: k for k, d in enumerate(listed)}
    strange = next((d for d in flat if d.id not in number), None)
    if strange is not None:
        raise LayoutError(f"device {strange} of the mesh is not among the {len(listed)} devices given")
    ours = Mesh(dict(zip(names, array.shape, strict=True)), devices=[number[d.id] for d in flat])
    if len(listed) != topology.size:
        raise TopologyError(
            f"{len(listed)} JAX devices, topology {topology.name!r} has {topology.size} ({topology.describe()}); "
            "legal are equal counts"
        )
    order = sorted(range(len(listed)), key=lambda k: (*_granule(listed[k]), k))
    ids = {k: i for i, k in enumerate(order)}
    return Launch(ours, topology, tuple(ids[k] for k in ours.devices))


def _granule(device: Any) -> tuple[int, int]:
    """The slice and the process of a device; 0 where its platform has none."""
    found = (getattr(device, "slice_index", 0), getattr(device, "process_index", 0))
    return (int(found[0] or 0), int(found[1] or 0))
