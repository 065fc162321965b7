"""The move of one array inside `jit`: a `shard_map`, over sub-axes or over the caller's own mesh."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
from jax.sharding import PartitionSpec  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.core.shardings import mesh_of, type_of
from shardplan.core.tensor import TensorType, same
from shardplan.errors import BackendError
from shardplan.execution.jax.bits import carrier, from_bits, to_bits
from shardplan.execution.jax.executables import jax_mesh, lower_steps
from shardplan.execution.jax.run import check
from shardplan.interop.jax.plans import check_ends, ends, plan_of
from shardplan.interop.jax.types import spec_of

MOST_FUNCTIONS = 1024  # mapped programs that are remembered: JAX keeps what it traced for as long as a function lives


def reshard_traced(x: Any, sharding: Any, source: Any, memory_limit: int | None) -> Any:
    """Return a traced array under another sharding; `source` is the sharding that it has, None if unknown.

    Raises as `reshard`; `memory_limit` is in bytes.
    """
    own = own_mesh(x)
    _check_manual(own, source, sharding)
    if source is None:
        raise unsaid(x)
    check_ends(source, sharding)
    if own.empty:
        return _on_sub_axes(x, source, sharding, memory_limit)
    for end in (source, sharding):
        if end.mesh.shape_tuple != own.shape_tuple:
            why = "the array's own" if is_fully_explicit(own) else "the one that is set"
            raise BackendError(
                f"reshard: {end.spec} is on the mesh {mesh_of(end.mesh)}, but inside jit JAX takes one mesh only, "
                f"{why}: {mesh_of(own)}; reshard to another mesh outside jit"
            )
    check_source(x, own, source)
    for dim in sharding.spec:
        first = next((a for a in dim if a in own.auto_axes), None) if isinstance(dim, tuple) else None
        if first is not None and any(a in own.explicit_axes for a in dim[dim.index(first) :]):
            raise BackendError(
                f"reshard: {sharding.spec} cuts a dim over {dim}, the Auto axis {first} before an Explicit one, for "
                f"which JAX has no type inside jit; legal are Explicit axes first, or reshard outside jit"
            )
    if x.size:
        x = _over_own_axes(x, own, source, sharding, memory_limit)
    if not own.auto_axes:
        return x
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(own, part_of(sharding.spec, own.auto_axes)))


def check_source(x: Any, own: Any, source: Any) -> None:
    """Raise `BackendError` where `source` says otherwise than an array's type over the Explicit axes of its mesh."""
    said, known = part_of(source.spec, own.explicit_axes), part_of(jax.typeof(x).sharding.spec, own.explicit_axes)
    if said != known:
        raise BackendError(
            f"reshard: source= says {source.spec}, but the array's type is {jax.typeof(x)}; legal is {known} over the "
            f"Explicit axes {', '.join(own.explicit_axes)}"
        )


def unsaid(x: Any) -> BackendError:
    """Return the error for an array whose sharding nobody says."""
    own = own_mesh(x)
    where = f"over the Auto axes {', '.join(own.auto_axes)}" if own.explicit_axes else "in auto mode"
    return BackendError(
        f"reshard: inside jit, {where}, an array does not carry its sharding (its type is {jax.typeof(x)}); "
        f"pass source=, the NamedSharding that it has"
    )


def own_mesh(x: Any) -> Any:
    """Return the mesh on which a tracer's type is, or else that which is set: abstract, empty where there is none.

    It says of every axis whether it is Explicit, Auto, or Manual, which an enclosing `shard_map` makes of its own.
    """
    mesh = jax.typeof(x).sharding.mesh
    return mesh if mesh.explicit_axes or mesh.manual_axes else jax.sharding.get_abstract_mesh()


def is_fully_explicit(mesh: Any) -> bool:
    """Return whether types on a mesh carry whole shardings."""
    return bool(mesh.explicit_axes) and not mesh.auto_axes


def part_of(spec: Any, axes: Collection[str]) -> Any:
    """Return what a `PartitionSpec` says over some axes; dims at its end over which it says nothing are left out.

    >>> from jax.sharding import PartitionSpec
    >>> tuple(part_of(PartitionSpec(("a", "b"), "b", None, "a"), ("b",)))
    ('b', 'b')
    """
    dims = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    found = [tuple(a for a in dim if a in axes) for dim in dims]
    while found and not found[-1]:
        found.pop()
    return PartitionSpec(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in found))


def _check_manual(own: Any, source: Any, sharding: Any) -> None:
    """Raise `BackendError` for a move over axes that an enclosing `shard_map` has made its own."""
    manual = own.manual_axes
    asked = [end.spec for end in (source, sharding) if getattr(end, "spec", None) is not None]
    if not manual or (len(manual) < len(own.axis_names) and not any(part_of(spec, manual) for spec in asked)):
        return
    rest = [a for a in own.axis_names if a not in manual]
    legal = f"shardings over {', '.join(rest)}" if rest else "collectives of jax.lax"
    raise BackendError(
        f"reshard: {' to '.join(map(str, asked))} inside a shard_map over {', '.join(manual)}, along which every "
        f"device has an array of its own; legal are {legal} there, or reshard outside of it"
    )


def _on_sub_axes(x: Any, source: Any, sharding: Any, memory_limit: int | None) -> Any:
    """Move an array of which JAX knows no mesh: over a mesh of sub-axes, with a constraint at the end."""
    if [d.id for d in source.mesh.devices.flat] != [d.id for d in sharding.mesh.devices.flat]:
        raise _unmet("a jit has one list of devices", source, sharding)
    if not sharding.mesh.are_all_axes_auto:
        raise BackendError(
            f"reshard: {sharding.spec} is on a mesh with the Explicit axes {', '.join(sharding.mesh.explicit_axes)}, "
            f"but inside jit an array in auto mode ({jax.typeof(x)}) stays so; legal is a mesh of Auto axes here, or "
            f"reshard outside jit"
        )
    if x.size:
        s, t = ends(x.shape, x.dtype, source, sharding)
        if s.mesh != t.mesh:
            raise _unmet("no mesh refines both", source, sharding)
        if not same(s, t):
            x = map_program(plan_of(s, t, memory_limit).program)(x)
    return jax.lax.with_sharding_constraint(x, sharding)


def _over_own_axes(x: Any, own: Any, source: Any, sharding: Any, memory_limit: int | None) -> Any:
    """Move an array over the axes of its own mesh, those of an enclosing `shard_map` aside."""
    home = sharding.mesh  # concrete where the source's is not
    if own.manual_axes:
        home = jax.sharding.AbstractMesh(
            *zip(*((n, a) for a, n in own.shape_tuple if a not in own.manual_axes), strict=True)
        )
    s, t = (type_of(x.shape, jax.NamedSharding(home, end.spec), carrier(x.dtype)) for end in (source, sharding))
    return x if same(s, t) else map_program(plan_of(s, t, memory_limit).program, own)(x)


def _unmet(why: str, source: Any, sharding: Any) -> BackendError:
    return BackendError(
        f"reshard: {why}, but the source is on the mesh {mesh_of(source.mesh)} and the destination on "
        f"{mesh_of(sharding.mesh)}; reshard outside jit"
    )


@lru_cache(maxsize=MOST_FUNCTIONS)
def map_program(program: Program, home: Any = None, header: bool = False) -> Any:
    """Return a program of one array as a function: mapped over `home`, the caller's own mesh, or over one of sub-axes.

    With a `header` the devices first make sure that all run it (`execution.jax.header`).

    `check_vma` is on where the result is cut over every axis. It is off where it is replicated over one: that all
    devices along it get equal parts, JAX cannot see of a permute or a gather. An array of a dtype that the program's
    types have no name for is moved as integers of its bits.
    """
    check(program, placed=home is None)
    (s,), (t,) = program.input_types, program.output_types
    mesh = home or jax_mesh(s.mesh)
    names = tuple(mesh.axis_names) if home is None else tuple(s.mesh.axes)  # not those of an enclosing `shard_map`
    if home is None:
        checked = len({a for run in t.atoms for a in run}) == len(names)
    else:
        checked = {a for dim in t.layout.dims for a in dim} == set(names)
    inner = lower_steps(program, program.steps, [program.inputs[0][0]], program.outputs, s.mesh, names, checked,
                        by_atom=home is None, header=header)  # fmt: skip

    def body(x: Any) -> Any:
        carried = x.dtype != numpy_dtype(s.dtype)
        y = inner(to_bits(x) if carried else x)[0].reshape(t.local_shape())
        return from_bits(y, x.dtype) if carried else y

    def spec(u: TensorType) -> Any:
        if home is not None:
            return spec_of(u)
        return PartitionSpec(*(tuple(names[a] for a in run) or None for run in u.atoms))  # one axis an atom

    return jax.shard_map(body, mesh=mesh, in_specs=spec(s), out_specs=spec(t), axis_names=set(names), check_vma=checked)
