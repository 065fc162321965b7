"""A reduction plan as a function, inside `jit` and outside: gradients of each member in, their sum out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax.sharding import PartitionSpec  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import short_name
from shardplan.core.program import Program
from shardplan.errors import BackendError, LayoutError
from shardplan.execution.jax.executables import jax_mesh, lower_steps
from shardplan.execution.jax.run import check
from shardplan.interop.jax.traced_move import own_mesh
from shardplan.movement.reductions.sizes import members_of, resize_payload, sum_program
from shardplan.plans.plan import Plan

MOST_SUMS = 256  # functions that are remembered


def sum_by(plan: Plan | Program) -> Callable[[Any], Any]:
    """Return a function that sums arrays over their first dim by a reduction plan.

    It takes an array [members, ...], or a pytree of them, cut along its first dim over the axes that the plan reduces
    (as the `out_specs` of a `shard_map` make one of gradients), and returns the sums [...], whole on every device.

    Args:
        plan: Of `sp.reduce`, to target `replicated`, or its program; device ids are those of JAX.

    Raises:
        LayoutError: The program is no sum of one payload to all its members; an array of other members.
        BackendError: An op, or devices, that JAX has not.
    """
    program = sum_program(plan)
    members = members_of(program)

    def total(x: Any) -> Any:
        if x.ndim < 1 or x.shape[0] != members:
            raise LayoutError(
                f"sum_by: an array of shape {x.shape}; legal is one of {members} addends, [{members}, ...]"
            )
        own = own_mesh(x)
        if own.explicit_axes or own.manual_axes:
            raise BackendError(
                f"sum_by: an array over the axes {', '.join(own.axis_names)}, which are Explicit or of an enclosing "
                "shard_map; legal is a mesh of Auto axes, outside of it"
            )
        return _map_sum(program, str(x.dtype), tuple(x.shape[1:]))(x)

    def apply(tree: Any) -> Any:
        return jax.tree.map(total, tree)

    return apply


@lru_cache(maxsize=MOST_SUMS)
def _map_sum(program: Program, dtype: str, shape: tuple[int, ...]) -> Any:
    """The sum of payloads of a shape, mapped over a mesh with an axis a factor."""
    n = math.prod(shape)
    sized = resize_payload(program, short_name(dtype), n)
    check(sized)
    (t,) = sized.input_types
    mesh = jax_mesh(t.mesh)
    names = tuple(mesh.axis_names)
    inner = lower_steps(sized, sized.steps, [sized.inputs[0][0]], sized.outputs, t.mesh, names, False, by_atom=True)
    cut = tuple(names[a] for a in t.mesh.expand(t.layout.partial))

    def body(x: Any) -> Any:
        payload = jnp.pad(x.reshape(-1), (0, math.prod(t.shape) - n)).reshape(t.shape)
        return inner(payload)[0].reshape(-1)[:n].reshape(shape)

    return jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(cut), out_specs=PartitionSpec(), check_vma=False)
