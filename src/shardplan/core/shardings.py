"""Shardings of JAX, and whatever says the same by the same attributes, as types; no framework is imported.

A `NamedSharding` has a `mesh` (`shape_tuple`, and `devices` with ids in mesh order) and a `spec`: of each dim None, an
axis, or a tuple of axes, major first, as a layout has them. What it may say and a type may not, a dim that is left
unconstrained, is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeGuard

from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

MOST_SHARDINGS, MOST_MESHES = 1024, 256  # read ones that are remembered, as a call of `reshard` reads its own again


class Sharding(Protocol):
    """Where an array lies, as JAX says it."""

    @property
    def device_set(self) -> Any:
        """The devices, in no order."""


def type_of(array: Any, sharding: Any, dtype: object = None) -> TensorType:
    """Return the type of an array under a JAX sharding.

    Args:
        array: Anything with a shape and a dtype (an array, a `ShapeDtypeStruct`), or a shape; then `dtype` is needed.
        sharding: A `NamedSharding`, a `SingleDeviceSharding`, or any sharding that is fully replicated.
        dtype: Of the elements, where `array` is a shape.

    Returns:
        The type; the ids of its mesh are those of the devices (of an abstract mesh: 0, 1, ... in mesh order). Axes in
        `unreduced` are partial with a sum.

    Raises:
        LayoutError: A dim that is unconstrained or that its axes do not divide, a sharding of another kind.

    >>> class AbstractMesh:  # as JAX's
    ...     shape_tuple = (("data", 2), ("model", 2))
    >>> class NamedSharding:
    ...     mesh, spec = AbstractMesh(), (("data", "model"), None)
    >>> print(type_of((8, 4), NamedSharding(), "f32"))
    f32[8@(data,model), 4]
    """
    shape: Sequence[int] = getattr(array, "shape", array)
    kind = getattr(array, "dtype", dtype)
    if kind is None:
        raise LayoutError(f"type_of: the shape {tuple(shape)} has no dtype; pass dtype=")
    mesh, spec, unreduced = _read(sharding, len(shape))
    t = TensorType(kind, shape, spec, mesh, partial=dict.fromkeys(unreduced, "sum"))
    if not t.all_even:
        d = t.even.index(False)
        product = math.prod(mesh.span(a).size for a in t.layout.dims[d])
        raise LayoutError(
            f"{t} on the mesh {mesh}: dim {d} of size {shape[d]} is uneven over {product} devices; JAX shards evenly: "
            f"legal are sizes that {product} divides"
        )
    return t


@lru_cache(maxsize=MOST_SHARDINGS)
def _read(sharding: Any, ndim: int) -> tuple[Mesh, tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The mesh, the axes of every dim, the unreduced axes."""
    spec = getattr(sharding, "spec", None)
    mesh = getattr(sharding, "mesh", None)
    if spec is None or mesh is None:
        if not getattr(sharding, "is_fully_replicated", False):
            raise LayoutError(
                f"{type(sharding).__name__} names no axes; legal are a NamedSharding, and one that is fully replicated"
            )
        ids = sorted(d.id for d in sharding.device_set)
        return Mesh(device=len(ids), devices=ids), ((),) * ndim, ()
    dims: list[tuple[str, ...]] = []
    for d, entry in enumerate(getattr(spec, "partitions", spec)):
        if entry is not None and not isinstance(entry, str | tuple):
            raise LayoutError(
                f"dim {d} of {spec} is unconstrained; legal are None, an axis, and a tuple of axes, "
                f"since a plan needs to know both ends"
            )
        dims.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    return mesh_of(mesh), tuple(dims), tuple(sorted(getattr(spec, "unreduced", ())))


@lru_cache(maxsize=MOST_MESHES)
def mesh_of(mesh: Any) -> Mesh:
    """Return the mesh of a JAX mesh: ids of its devices, or, of an abstract one, 0, 1, ... in mesh order."""
    abstract = any(kind.__name__ == "AbstractMesh" for kind in type(mesh).__mro__)  # its `devices` raises
    ids = None if abstract else [d.id for d in mesh.devices.flat]
    return Mesh(dict(mesh.shape_tuple), devices=ids)


def is_sharding(value: object) -> TypeGuard[Sharding]:
    """Return whether a value says where an array lies, as JAX's shardings do."""
    return hasattr(type(value), "device_set")  # of one on an abstract mesh it raises


def types_between(shape: Sequence[int], dtype: object, source: Any, sharding: Any) -> tuple[TensorType, TensorType]:
    """Return the types of an array under two shardings, on one mesh if there is one that refines theirs.

    Raises as `type_of`.
    """
    s, t = type_of(shape, source, dtype), type_of(shape, sharding, dtype)
    found = common_mesh(s.mesh, t.mesh)
    if found is None:
        return s, t
    mesh, of_s, of_t = found
    return tuple(
        TensorType(x.dtype, x.shape, [tuple(c for a in dim for c in names[a]) for dim in x.layout.dims], mesh,
                   partial={c: "sum" for a in x.layout.partial for c in names[a]})
        for x, names in ((s, of_s), (t, of_t))
    )  # type: ignore[return-value]  # fmt: skip


def common_mesh(a: Mesh, b: Mesh) -> tuple[Mesh, dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] | None:
    """Return a mesh that refines two meshes of the same devices in the same order, and their axes in its axes.

    None where there is none: 2 x 3 and 3 x 2 devices have no common refinement.

    >>> common_mesh(Mesh(x=2, y=4), Mesh(z=4, w=2))[0]
    Mesh(c0=2, c1=2, c2=2)
    """
    if a.devices != b.devices:
        return None
    if a == b:
        same = {n: (n,) for n in a.axes}
        return a, same, same
    strides = sorted({1, a.size} | {m.span(n).stride for m in (a, b) for n in m.axes}, reverse=True)
    steps = list(itertools.pairwise(strides))
    if any(x % y for x, y in steps):
        return None
    sizes = {f"c{k}": x // y for k, (x, y) in enumerate(steps)} or {"c0": 1}
    mesh = Mesh(sizes, devices=a.devices)

    def runs(m: Mesh) -> dict[str, tuple[str, ...]]:
        out: dict[str, tuple[str, ...]] = {}
        for n in m.axes:
            low, high = m.span(n).stride, m.span(n).stride * m.span(n).size
            out[n] = tuple(c for c in mesh.axes if low <= mesh.span(c).stride < high and mesh.span(c).size > 1)
        return out

    return mesh, runs(a), runs(b)
