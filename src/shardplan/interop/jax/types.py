"""JAX's shardings as types, and back: `type_of`, `spec_of`.

A `PartitionSpec` and a layout say the same in the same order, major axis first. What JAX has and a type has not, a dim
left unconstrained, is refused; what a type has and JAX has not (uneven dims, roots, other reductions than sums) too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

MOST_SHARDINGS, MOST_MESHES = 1024, 256  # read ones that are remembered, as a call of `reshard` reads its own again


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

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
    >>> print(type_of((8, 4), NamedSharding(mesh, PartitionSpec(("data", "model"))), "f32"))
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
    from jax.sharding import AbstractMesh  # pyright: ignore[reportMissingImports]

    ids = None if isinstance(mesh, AbstractMesh) else [d.id for d in mesh.devices.flat]
    return Mesh(dict(mesh.shape_tuple), devices=ids)


def spec_of(t: TensorType) -> Any:
    """Return the `PartitionSpec` of a type's dims; raises `LayoutError` for what JAX has no words for.

    >>> tuple(spec_of(TensorType("f32", (8, 4), (("data", "model"), None), Mesh(data=2, model=2))))
    (('data', 'model'), None)
    """
    from jax.sharding import PartitionSpec  # pyright: ignore[reportMissingImports]

    parts = [a for a in t.layout.used if not t.mesh.span(a).whole]
    if parts or t.layout.root or not t.all_even or t.layout.reduction not in (None, "sum"):
        what = f"the sub-axis {parts[0]!r}" if parts else "an uneven dim" if not t.all_even else t.layout.suffix()
        raise LayoutError(f"{t}: a PartitionSpec cannot say {what}; legal are whole axes of even dims, and {{+axis}}")
    return PartitionSpec(*t.layout.spec, unreduced=frozenset(t.layout.partial))


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
