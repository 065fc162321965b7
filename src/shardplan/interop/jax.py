"""`reshard`: a JAX array to another sharding, by a plan within a memory limit; a drop-in for `jax.device_put`.

Outside `jit` the source is the array's own sharding, the meshes may differ in shape, order and devices, and the plan
runs on the array's shards as `execution.jax` runs any program. Inside `jit` it becomes one `shard_map`, over a mesh
with one axis per prime sub-axis, whose result is constrained to the caller's sharding. In explicit-sharding mode, and
under a mesh set by `jax.set_mesh`, JAX takes a `shard_map` over that very mesh only; sub-axes are then groups of it.

Plans are portable where a portable one exists: `ragged_all_to_all` does not run on every backend (XLA:CPU has none), so
an exchange over most of the mesh would become a round of permutes for each peer. Where the limit leaves nothing else,
it is taken.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from shardplan.core.program import Program
from shardplan.core.tensor import TensorType, same
from shardplan.errors import BackendError, Infeasible, optional
from shardplan.execution.jax import check, jax_mesh, lower_steps, run_placed
from shardplan.hardware.plan import Plan
from shardplan.interop.jax_types import common_mesh, mesh_of, spec_of, type_of
from shardplan.movement.redistribute import redistribute

__all__ = ["plan_of", "reshard", "spec_of", "type_of"]
MOST_PLANS = 4096
optional("jax", "jax")  # who lacks it is told so here, and not by a traceback later


def reshard(array: Any, sharding: Any, source: Any = None, memory_limit: int | None = None) -> Any:
    """Return the array under another sharding, moved by the cheapest certified plan.

    Args:
        array: A jax array; inside `jit` a tracer. Anything else is given to `jax.device_put`.
        sharding: The `NamedSharding` wanted; inside `jit` on the same devices in the same order, and in explicit mode
            on the array's own mesh.
        source: The sharding that the array has, needed inside `jit` in auto mode, where a tracer carries none.
        memory_limit: Bytes that a device may hold during the move (operand, result, staging), by the certificate.

    Returns:
        The array, with exactly the sharding asked for; `array` itself where it has that sharding. Differentiable: a
        gradient is moved back, by a plan of its own.

    Raises:
        BackendError: No `source` where it is needed; meshes that cannot meet inside `jit`; a sum still to be made.
        LayoutError: A dim that is unconstrained or uneven, a sharding that names no axes.
        Infeasible: A limit that no plan keeps; `least_bytes` says which would do.

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> a = reshard(jax.numpy.arange(4), NamedSharding(mesh, PartitionSpec("x")))
    >>> tuple(a.sharding.spec), reshard(a, a.sharding) is a
    (('x',), True)
    """
    import jax  # pyright: ignore[reportMissingImports]
    from jax.core import Tracer  # pyright: ignore[reportMissingImports]

    if isinstance(array, Tracer):
        return _differentiable(sharding, _source_of(array, source), memory_limit)(array)
    if not isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    return _outside(array, sharding, memory_limit)


@lru_cache(maxsize=MOST_PLANS)
def plan_of(source: TensorType, destination: TensorType, memory_limit: int | None = None) -> Plan:
    """Return the plan that `reshard` runs: a portable one, else any."""
    try:
        return redistribute(source, destination, memory_limit=memory_limit, portable=True)
    except Infeasible:
        return redistribute(source, destination, memory_limit=memory_limit)


@lru_cache(maxsize=1024)
def _differentiable(sharding: Any, source: Any, memory_limit: int | None) -> Any:
    """The move as a function of the array, with its gradient."""
    import jax  # pyright: ignore[reportMissingImports]
    from jax.core import Tracer  # pyright: ignore[reportMissingImports]

    def move(x: Any) -> Any:
        if isinstance(x, Tracer):
            return _inside(x, sharding, source, memory_limit)
        return _outside(x, sharding, memory_limit)  # under grad, outside jit

    def forward(x: Any) -> tuple[Any, Any]:
        return moved(x), jax.tree_util.Partial(_backward(source, sharding, memory_limit))

    moved = jax.custom_vjp(move)
    moved.defvjp(forward, lambda back, gradient: (back(gradient),))
    return moved


@lru_cache(maxsize=1024)
def _backward(before: Any, sharding: Any, memory_limit: int | None) -> Any:
    """The gradient's way back; one object for equal arguments, as JAX compares them."""
    import jax  # pyright: ignore[reportMissingImports]
    from jax.core import Tracer  # pyright: ignore[reportMissingImports]

    def back(gradient: Any) -> Any:
        if gradient.dtype == jax.dtypes.float0:
            return gradient
        if isinstance(gradient, Tracer):
            return _differentiable(before, _source_of(gradient, sharding), memory_limit)(gradient)
        return _outside(gradient, before, memory_limit)

    return back


def _check_ends(source: Any, sharding: Any) -> None:
    kinds = [getattr(x, "memory_kind", None) for x in (source, sharding)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise BackendError(
            f"reshard: from memory {kinds[0]!r} to {kinds[1]!r}; legal is one kind of memory: use jax.device_put"
        )
    for x in (source, sharding):
        unreduced = sorted(getattr(getattr(x, "spec", None), "unreduced", ()))
        if unreduced:
            raise BackendError(f"reshard: {x.spec} is unreduced over {', '.join(unreduced)}; legal is a reduced array")


def _outside(array: Any, sharding: Any, memory_limit: int | None) -> Any:
    import jax  # pyright: ignore[reportMissingImports]

    if array.sharding == sharding:
        return array
    if not array.size:
        return jax.device_put(array, sharding)
    program = _route(array.shape, array.dtype, array.sharding, sharding, memory_limit)
    (t,) = program.input_types
    shards = {s.device.id: s.data for s in array.addressable_shards}
    (found,) = run_placed(program, [[shards[k] for k in t.mesh.devices if k in shards]])
    return jax.make_array_from_single_device_arrays(array.shape, sharding, found)


@lru_cache(maxsize=MOST_PLANS)
def _route(shape: tuple[int, ...], dtype: Any, source: Any, sharding: Any, memory_limit: int | None) -> Program:
    """The program between two shardings: on one mesh, where one refines both."""
    _check_ends(source, sharding)
    program = plan_of(*_ends(type_of(shape, source, dtype), type_of(shape, sharding, dtype)), memory_limit).program
    check(program)
    return program


def _ends(s: TensorType, t: TensorType) -> tuple[TensorType, TensorType]:
    """The two types, on one mesh if there is one that refines theirs."""
    found = common_mesh(s.mesh, t.mesh)
    if found is None:
        return s, t
    mesh, of_s, of_t = found
    return tuple(
        TensorType(x.dtype, x.shape, [tuple(c for a in dim for c in names[a]) for dim in x.layout.dims], mesh)
        for x, names in ((s, of_s), (t, of_t))
    )  # type: ignore[return-value]


# Inside jit.


def _explicit(x: Any) -> bool:
    """Whether a tracer's type carries its sharding."""
    import jax  # pyright: ignore[reportMissingImports]

    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and mesh.are_all_axes_explicit


def _source_of(x: Any, source: Any) -> Any:
    """The sharding of what a tracer stands for: an array that is being differentiated, its type, or what is said."""
    import jax  # pyright: ignore[reportMissingImports]
    from jax.core import Tracer  # pyright: ignore[reportMissingImports]

    held: Any = x
    while isinstance(held, Tracer) and hasattr(held, "primal"):
        held = getattr(held, "primal")  # noqa: B009
    if not isinstance(held, Tracer):
        return held.sharding
    if _explicit(x):
        return jax.typeof(x).sharding
    if source is None:
        raise BackendError(
            f"reshard: inside jit, in auto mode, an array does not carry its sharding (its type is {jax.typeof(x)}); "
            f"pass source=, the NamedSharding that it has"
        )
    return source


def _inside(x: Any, sharding: Any, source: Any, memory_limit: int | None) -> Any:
    import jax  # pyright: ignore[reportMissingImports]

    _check_ends(source, sharding)
    explicit = _explicit(x)
    if explicit and source.spec == sharding.spec and source.mesh.shape_tuple == sharding.mesh.shape_tuple:
        return x
    if not x.size:
        return x if explicit else jax.lax.with_sharding_constraint(x, sharding)
    own = source.mesh if explicit else jax.sharding.get_abstract_mesh()
    if not own.empty:
        for end in (source, sharding):
            if end.mesh.shape_tuple != own.shape_tuple:
                why = "the array's own" if explicit else "the one that is set"
                raise BackendError(
                    f"reshard: {end.spec} is on the mesh {mesh_of(end.mesh)}, but inside jit JAX takes one mesh only, "
                    f"{why}: {mesh_of(own)}; reshard to another mesh outside jit"
                )
    elif [d.id for d in source.mesh.devices.flat] != [d.id for d in sharding.mesh.devices.flat]:
        raise _unmet("a jit has one list of devices", source, sharding)
    home = sharding.mesh  # concrete where the source's is not
    s, t = _ends(type_of(x, jax.sharding.NamedSharding(home if explicit else source.mesh, source.spec)),
                 type_of(x, sharding))  # fmt: skip
    if s.mesh != t.mesh:
        raise _unmet("no mesh refines both", source, sharding)
    program = plan_of(s, t, memory_limit).program
    body, mesh, specs, checked = _mapped(program, home if not own.empty else None)
    if not same(s, t):
        x = jax.shard_map(body, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=checked)(x)
    return x if explicit else jax.lax.with_sharding_constraint(x, sharding)


def _unmet(why: str, source: Any, sharding: Any) -> BackendError:
    return BackendError(
        f"reshard: {why}, but the source is on the mesh {mesh_of(source.mesh)} and the destination on "
        f"{mesh_of(sharding.mesh)}; reshard outside jit"
    )


@lru_cache(maxsize=1024)
def _mapped(program: Program, home: Any) -> tuple[Any, Any, tuple[Any, Any], bool]:
    """What to map over which mesh, with which specs: over `home`, the caller's own mesh, or over one of sub-axes.

    `check_vma` is on where the result is cut over every axis. It is off where it is replicated over one: that all
    devices along it get equal parts, JAX cannot see of a permute or a gather.
    """
    from jax.sharding import PartitionSpec  # pyright: ignore[reportMissingImports]

    check(program, placed=home is None)
    (s,), (t,) = program.input_types, program.output_types
    mesh = home or jax_mesh(s.mesh)
    names = tuple(mesh.axis_names)
    if home is None:
        checked = len({a for run in t.atoms for a in run}) == len(names)
    else:
        checked = {a for dim in t.layout.dims for a in dim} == set(names)
    inner = lower_steps(program, program.steps, [program.inputs[0][0]], program.outputs, s.mesh, names, checked,
                        by_atom=home is None)  # fmt: skip

    def body(x: Any) -> Any:
        return inner(x)[0].reshape(t.local_shape())

    def spec(u: TensorType) -> Any:
        if home is not None:
            return spec_of(u)
        return PartitionSpec(*(tuple(names[a] for a in run) or None for run in u.atoms))

    return body, mesh, (spec(s), spec(t)), checked
