"""The move as a primitive of JAX: a linear function of the array, so that every transformation of JAX applies to it.

Its tangent is moved as the array is, its gradient is moved back, and under `vmap` the new dim is left whole (cut over
`spmd_axis_name`, where that is given). Outside `jit` a transformed array is moved by the plan that its own sharding
asks for, inside `jit` as `inside` does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from shardplan.interop.jax.inside import inside, is_explicit


def moved(x: Any, sharding: Any, source: Any, memory_limit: int | None) -> Any:
    """Return a tracer's array under another sharding; `source` is needed inside `jit` in auto mode."""
    before = _held(x) or source
    if is_explicit(x) and before.spec == sharding.spec and before.mesh.shape_tuple == sharding.mesh.shape_tuple:
        return x
    return primitive().bind(x, source=before, sharding=sharding, memory_limit=memory_limit)


def _held(x: Any) -> Any:
    """The sharding of the array behind a tracer, as the traced function sees it; None where there is none (in jit)."""
    import jax  # pyright: ignore[reportMissingImports]
    from jax.core import Tracer  # pyright: ignore[reportMissingImports]

    if not isinstance(x, Tracer):
        return x.sharding
    if hasattr(x, "primal"):
        return _held(getattr(x, "primal"))  # noqa: B009
    if hasattr(x, "batch_dim"):
        before, at = _held(getattr(x, "val")), getattr(x, "batch_dim")  # noqa: B009
        return before if before is None or at is None else _without(before, at)
    return jax.typeof(x).sharding if is_explicit(x) else None


def _without(sharding: Any, at: int) -> Any:
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
    from jax.extend.core import Primitive  # pyright: ignore[reportMissingImports]
    from jax.interpreters import ad, batching, mlir  # pyright: ignore[reportMissingImports]

    p = Primitive("shardplan_reshard")

    @p.def_impl
    def _run(x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        from shardplan.interop.jax.outside import outside

        return outside(x, sharding, memory_limit)

    @p.def_abstract_eval
    def _typed(x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        mesh = getattr(getattr(sharding, "mesh", None), "abstract_mesh", None)
        if mesh is None or not (mesh.are_all_axes_explicit or x.sharding.mesh.are_all_axes_explicit):
            return x
        return x.update(sharding=x.sharding.update(mesh=mesh, spec=sharding.spec))

    def back(gradient: Any, x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> list[Any]:
        if source is None:  # under jax.checkpoint, outside jit: nobody knows where the array lay
            return [gradient]
        return [p.bind(gradient, source=sharding, sharding=source, memory_limit=memory_limit)]

    def batched(axis: Any, arrays: Any, dims: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        (x,), (at,) = arrays, dims
        if at is not None:
            name = axis.spmd_name or axis.explicit_mesh_axis
            source, sharding = (end and _with(end, at, name) for end in (source, sharding))
        return p.bind(x, source=source, sharding=sharding, memory_limit=memory_limit), at

    def lowered(x: Any, *, source: Any, sharding: Any, memory_limit: int | None) -> Any:
        return inside(x, sharding, source, memory_limit)

    ad.deflinear2(p, back)
    batching.fancy_primitive_batchers[p] = batched
    mlir.register_lowering(p, mlir.lower_fun(lowered, multiple_results=False))
    return p
