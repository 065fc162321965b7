"""The move of one array inside `jit`: a `shard_map`, over sub-axes or over the caller's own mesh."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType, same
from shardplan.errors import BackendError
from shardplan.execution.jax.bits import from_bits, to_bits
from shardplan.execution.jax.executables import jax_mesh, lower_steps
from shardplan.execution.jax.run import check
from shardplan.interop.jax.plans import check_ends, ends, plan_of
from shardplan.interop.jax.types import mesh_of, spec_of

MOST_FUNCTIONS = 1024  # mapped programs that are remembered: JAX keeps what it traced for as long as a function lives


def inside(x: Any, sharding: Any, source: Any, memory_limit: int | None) -> Any:
    """Return a traced array under another sharding; `source` is the sharding that it has, None if unknown.

    Raises as `reshard`; `memory_limit` is in bytes.
    """
    import jax  # pyright: ignore[reportMissingImports]

    if source is None:
        raise BackendError(
            f"reshard: inside jit, in auto mode, an array does not carry its sharding (its type is {jax.typeof(x)}); "
            f"pass source=, the NamedSharding that it has"
        )
    check_ends(source, sharding)
    explicit = is_explicit(x)
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
    if not x.size:
        return x if explicit else jax.lax.with_sharding_constraint(x, sharding)
    s, t = ends(x.shape, x.dtype, jax.sharding.NamedSharding(home if explicit else source.mesh, source.spec), sharding)
    if s.mesh != t.mesh:
        raise _unmet("no mesh refines both", source, sharding)
    if not same(s, t):
        x = mapped(plan_of(s, t, memory_limit).program, home if not own.empty else None)(x)
    return x if explicit else jax.lax.with_sharding_constraint(x, sharding)


def is_explicit(x: Any) -> bool:
    """Return whether a tracer's type carries its sharding."""
    import jax  # pyright: ignore[reportMissingImports]

    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and mesh.are_all_axes_explicit


def _unmet(why: str, source: Any, sharding: Any) -> BackendError:
    return BackendError(
        f"reshard: {why}, but the source is on the mesh {mesh_of(source.mesh)} and the destination on "
        f"{mesh_of(sharding.mesh)}; reshard outside jit"
    )


@lru_cache(maxsize=MOST_FUNCTIONS)
def mapped(program: Program, home: Any = None, header: bool = False) -> Any:
    """Return a program of one array as a function: mapped over `home`, the caller's own mesh, or over one of sub-axes.

    With a `header` the devices first make sure that all run it (`execution.jax.header`).

    `check_vma` is on where the result is cut over every axis. It is off where it is replicated over one: that all
    devices along it get equal parts, JAX cannot see of a permute or a gather. An array of a dtype that the program's
    types have no name for is moved as integers of its bits.
    """
    import jax  # pyright: ignore[reportMissingImports]
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
                        by_atom=home is None, header=header)  # fmt: skip

    def body(x: Any) -> Any:
        carried = x.dtype != numpy_dtype(s.dtype)
        y = inner(to_bits(x) if carried else x)[0].reshape(t.local_shape())
        return from_bits(y, x.dtype) if carried else y

    def spec(u: TensorType) -> Any:
        if home is not None:
            return spec_of(u)
        return PartitionSpec(*(tuple(names[a] for a in run) or None for run in u.atoms))  # one axis an atom

    return jax.shard_map(body, mesh=mesh, in_specs=spec(s), out_specs=spec(t), check_vma=checked)
