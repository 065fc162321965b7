"""Reduction programs for JAX: a function for `shard_map`, the mesh it needs, and both as text to paste.

The mesh has one named axis for each factor of more than one device, in the program's order of devices, and collectives
run over tuples of names in the order of the program's members, so `axis_index_groups`, which would need `check_vma`
off, is not used. Gathers say that their result does not vary (`to="invarying"`), so that JAX sees it replicated. Reduce
and broadcast are a psum and a mask, at a psum's cost, and in Master form the devices that take no part sum as well.
"""

from __future__ import annotations

from typing import Any

from shardplan.core.program import Program
from shardplan.errors import BackendError, optional
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.recipe import Recipe, recipe
from shardplan.interop.exports.template import Template, ids_text

MODULE = '''"""A reduction with JAX, exported by shardplan. Device k is `jax.devices()[k]`.

$heading

`reduce_payload` is the body of a `shard_map` over `MESH`; `reduce_rows` takes an array [devices, n] whose
row k is the payload of the k-th device of the mesh, and returns a row for each group that was reduced.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

NAMES = $names
DEVICES = [jax.devices()[k] for k in $ids]
MESH = Mesh(np.asarray(DEVICES, dtype=object).reshape($sizes), NAMES)


def reduce_payload(payload: jax.Array) -> jax.Array:
    flat = payload.reshape(-1)
    x = jnp.pad(flat, (0, -flat.size % $cells)).reshape($chunks)
$moves    return x.reshape(-1)$cut


reduce_rows = jax.jit(
    jax.shard_map(
        lambda x: reduce_payload(x)[None],
        mesh=MESH,
        in_specs=PartitionSpec(NAMES),
        out_specs=PartitionSpec($differs),
    )
)
'''


def _tuple(names: tuple[str, ...]) -> str:
    """Return names as Python."""
    return str(names).replace("'", '"')


def _template_fields(r: Recipe) -> dict[str, str]:
    sizes = ", ".join(map(str, r.sizes))
    return {"names": _tuple(r.names), "ids": ids_text(r.ranks), "sizes": sizes, "differs": _tuple(r.differs)}


TEMPLATE = Template(
    MODULE,
    _template_fields,
    size="flat.size",
    turn="transpose",
    group=lambda move: _tuple(move.axes) if len(move.axes) > 1 else f'"{"".join(move.axes)}"',
    reduce_scatter="lax.psum_scatter(parts, {group})",
    all_gather='lax.all_gather(x, {group}, to="invarying")',
    all_reduce="x = lax.psum(x, {group})",
    reduce="x = lax.psum(x, {group})\nx = jnp.where(lax.axis_index({group}) == 0, x, 0)",
    broadcast="x = jnp.where(lax.axis_index({group}) == 0, x, 0)\nx = lax.psum(x, {group})",
)


class JaxReduction:
    """A reduction program for JAX (`recipe` says which); device id k is `jax.devices()[k]`.

    Raises `BackendError` for a program that cannot be exported, and too few devices.

    `reduce_payload` is the body, for a `shard_map` of the caller's over `mesh`: each device's payload, of any shape, to
    the reduced payload, flat: the device's, padded, where the program ends in shards, and zeros beside a root. Calling
    the object does it for one array [devices, n] whose row k is the payload of the k-th device of the mesh; the result
    has a row for each group that was reduced.
    """

    def __init__(self, program: Program) -> None:
        """Make the mesh."""
        optional("jax", "jax")
        import jax  # pyright: ignore[reportMissingImports]

        self.recipe = r = recipe(program)
        devices = jax.devices()
        if max(r.ranks) >= len(devices):
            raise BackendError(
                f"the program runs on device {max(r.ranks)}, but jax.devices() has {len(devices)}; legal are "
                f"device ids 0 to {len(devices) - 1}"
            )
        module = TEMPLATE.load(program)
        self.mesh, self.mapped, self.reduce_payload = (module[x] for x in ("MESH", "reduce_rows", "reduce_payload"))

    def __call__(self, rows: Any) -> Any:
        """Reduce an array [devices, n]: row k is the payload of the k-th device of the mesh."""
        return self.mapped(rows)


def bind_reduction(program: Program) -> JaxReduction:
    """Return a reduction program for JAX, on a mesh of its own: see `JaxReduction`."""
    return JaxReduction(program)


def jax_text(program: Program, placement: Placement | None = None) -> str:
    """Return Python source that runs a reduction program with JAX alone; device id k is `jax.devices()[k]`.

    It is a module: `MESH`, `reduce_payload` (the body, for a `shard_map` over it), and `reduce_rows` (the whole).
    `placement`, where the program lies, says the order of `MESH`. Raises `BackendError` where that cannot be.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllReduce
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (4, 5), (), Mesh(data=4), partial={"data": "sum"})
    >>> text = jax_text(Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",)))
    >>> [line.strip() for line in text.splitlines() if "psum" in line]
    ['x = lax.psum(x, "data")']
    """
    return TEMPLATE.text(program, placement)
