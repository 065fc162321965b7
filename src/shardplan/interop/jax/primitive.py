"""The move as a primitive of JAX: a linear function of the array, so that every transformation of JAX applies to it.

Its tangent is moved as the array is, its gradient is moved back, and under `vmap` the new dim is left whole (cut over
`spmd_axis_name`, where that is given). Outside `jit` a transformed array is moved by the plan that its own sharding
asks for, inside `jit` as `traced_move` does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
from jax._src.core import trace_state_clean  # pyright: ignore[reportMissingImports]
from jax._src.mesh import get_concrete_mesh  # pyright: ignore[reportMissingImports]
from jax.core import Tracer  # pyright: ignore[reportMissingImports]
from jax.extend.core import Primitive  # pyright: ignore[reportMissingImports]
from jax.interpreters import ad, batching, mlir  # pyright: ignore[reportMissingImports]
from jax.sharding import AbstractMesh, NamedSharding  # pyright: ignore[reportMissingImports]

from shardplan.interop.jax.traced_move import check_source, is_fully_explicit, own_mesh, part_of, reshard_traced, unsaid


def bind_reshard(x: Any, sharding: Any, source: Any, memory_limit: int | None) -> Any:
    """Return a tracer's array under another sharding; `source` is needed inside `jit` in auto mode."""
    own = own_mesh(x)
    before: Any = _known_sharding(x)
    if before is None and own.explicit_axes:  # its gradient would have another type
        if source is None:
            raise unsaid(x)
        check_source(x, own, source)
    x, before = _on_mesh(x, source), before or source
    if is_fully_explicit(own) and before.spec == sharding.spec and before.mesh.shape_tuple == sharding.mesh.shape_tuple:
        return x
    return primitive().bind(x, source=before, sharding=sharding, memory_limit=memory_limit)


def _on_mesh(x: Any, sharding: Any) -> Any:
    """Say to `jit` where an array lies, where it is in auto mode: it would see no mesh, and compile for one device."""
    traced = (
        _known_sharding(x) is None if isinstance(x, Tracer) else not trace_state_clean()
    )  # then a constant of what is traced
    mesh = getattr(sharding, "mesh", None)
    if not traced or not own_mesh(x).empty or mesh is None or not mesh.are_all_axes_auto:
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


def _known_sharding(x: Any) -> Any:
    """The sharding of the array behind a tracer, as the traced function sees it; None where there is none (in jit)."""
    if not isinstance(x, Tracer):
        return getattr(x, "sharding", None)
    if hasattr(x, "primal"):
        return _known_sharding(getattr(x, "primal"))  # noqa: B009
    if hasattr(x, "batch_dim"):
        before, at = _known_sharding(getattr(x, "val")), getattr(x, "batch_dim")  # noqa: B009
        return before if before is None or at is None else _drop_dim(before, at)
    own = own_mesh(x)  # that is set, of an argument that no operation has seen
    return jax.NamedSharding(own, jax.typeof(x).sharding.spec) if is_fully_explicit(own) else None


def _on_devices(sharding: Any, x: Any) -> Any:
    """A sharding on devices, also where its mesh names none: of a mesh of that shape, the array's or that is set."""
    if not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    for mesh in (getattr(getattr(x, "sharding", None), "mesh", None), get_concrete_mesh()):
        if mesh is not None and mesh.shape_tuple == sharding.mesh.shape_tuple:
            return NamedSharding(mesh, sharding.spec)
    return sharding


def _drop_dim(sharding: Any, at: int) -> Any:
    """A sharding less the dim `at`."""
    spec = list(getattr(sharding, "spec", ()))
    return sharding.update(spec=type(sharding.spec)(*spec[:at], *spec[at + 1 :])) if spec else sharding


def _with(sharding: Any, at: int, axis: Any) -> Any:
    """A sharding with one dim more, at `at`, cut over `axis`."""
    if not hasattr(sharding, "spec"):
        return sharding
    spec = [*sharding.spec, *[None] * (at - len(sharding.spec))]
    return sharding.update(spec=type(sharding.spec)(*spec[:at], axis, *spec[at:]))


@cache
def primitive() -> Any:
    """Return the primitive, with its rules."""
    p = Primitive("shardplan_reshard")

    @p.def_impl
    def _run(x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        from shardplan.interop.jax.eager_move import reshard_array

        if getattr(sharding, "mesh", None) is not None:  # said by a type, which names no devices
            sharding = _on_devices(sharding, x)
        return reshard_array(x, sharding, memory_limit) if hasattr(x, "sharding") else jax.device_put(x, sharding)

    @p.def_abstract_eval
    def _typed(x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        mesh = x.sharding.mesh
        if mesh.empty:  # outside jit, from an array in auto mode
            mesh = getattr(getattr(sharding, "mesh", None), "abstract_mesh", mesh)
        if not mesh.explicit_axes or not hasattr(sharding, "spec"):
            return x
        return x.update(sharding=x.sharding.update(mesh=mesh, spec=part_of(sharding.spec, mesh.explicit_axes)))

    def back(gradient: Any, x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> list[Any]:
        if source is None:  # under jax.checkpoint, outside jit: nobody knows where the array lay
            return [gradient]
        own = own_mesh(gradient)
        if own.explicit_axes and jax.typeof(gradient).sharding.mesh.empty:  # an argument that no operation has seen
            gradient = jax.sharding.reshard(gradient, part_of(sharding.spec, own.explicit_axes))
        gradient = _on_mesh(gradient, sharding)
        return [p.bind(gradient, source=sharding, sharding=source, memory_limit=memory_limit)]

    def batched(axis: Any, arrays: Any, dims: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        (x,), (at,) = arrays, dims
        if at is not None:
            name = axis.spmd_name or axis.explicit_mesh_axis
            source, sharding = (end and _with(end, at, name) for end in (source, sharding))
        return p.bind(x, source=source, sharding=sharding, memory_limit=memory_limit), at

    def lowered(x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        return reshard_traced(x, sharding, source, memory_limit)

    ad.deflinear2(p, back)
    batching.fancy_primitive_batchers[p] = batched
    mlir.register_lowering(p, mlir.lower_fun(lowered, multiple_results=False))
    return p
