"""Reduction programs for JAX: a function for `shard_map`, the mesh it needs, and both as text to paste.

The mesh has one named axis for each factor of more than one device, in the program's order of devices, and collectives
run over tuples of names in the order of the program's members, so `axis_index_groups`, which would need `check_vma`
off, is not used. Gathers say that their result does not vary (`to="invarying"`), so that JAX sees it replicated. Reduce
and broadcast are a psum and a mask, at a psum's cost, and in Master form the devices that take no part sum as well.
"""

from __future__ import annotations

import math
from typing import Any

from shardplan.core.program import Program
from shardplan.errors import BackendError, optional
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.recipe import RecipeStep, heading, recipe, shape_text, turn_text


class JaxReduction:
    """A reduction program for JAX (`recipe` says which); device id k is `jax.devices()[k]`.

    Raises `BackendError` for a program that cannot be exported, and too few devices.

    `reduce_payload` is the body, for a `shard_map` of the caller's over `mesh`: each device's payload, of any shape, to
    the reduced payload, flat. Calling the object does it for one array [devices, n] whose row k is the payload of the
    k-th device of the mesh; the result has a row for each group that was reduced.
    """

    def __init__(self, program: Program) -> None:
        """Make the mesh."""
        optional("jax", "jax")
        import jax  # pyright: ignore[reportMissingImports]
        import numpy as np
        from jax.sharding import Mesh, PartitionSpec  # pyright: ignore[reportMissingImports]

        self.recipe = r = recipe(program)
        devices = jax.devices()
        if max(r.ranks) >= len(devices):
            raise BackendError(
                f"the program runs on device {max(r.ranks)}, but jax.devices() has {len(devices)}; legal are "
                f"device ids 0 to {len(devices) - 1}"
            )
        self.mesh = Mesh(np.asarray([devices[k] for k in r.ranks], dtype=object).reshape(r.sizes), r.names)
        self.mapped = jax.jit(
            jax.shard_map(
                lambda x: self.reduce_payload(x)[None],
                mesh=self.mesh,
                in_specs=PartitionSpec(r.names),
                out_specs=PartitionSpec(r.differs),
            )
        )

    def __call__(self, rows: Any) -> Any:
        """Reduce an array [devices, n]: row k is the payload of the k-th device of the mesh."""
        return self.mapped(rows)

    def reduce_payload(self, payload: Any) -> Any:
        """Return a device's reduced payload, flat; inside a `shard_map` over `mesh`.

        It has as many elements as the payload. Where the program ends in shards, it is the device's, padded; where it
        ends at a root, zeros on other devices.
        """
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

        r = self.recipe
        flat = payload.reshape(-1)
        x = jnp.pad(flat, (0, -flat.size % math.prod(r.chunks))).reshape(*r.chunks, -1)
        for move in r.moves:
            x = _run(move, x)
        return x.reshape(-1)[: flat.size] if r.result == r.chunks else x.reshape(-1)


def _run(move: RecipeStep, x: Any) -> Any:
    """A device's array after a move."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    match move.kind:
        case "reduce_scatter":
            parts = x.reshape(*move.split, -1).transpose(*move.turn, len(move.turn)).reshape(move.size, -1)
            return lax.psum_scatter(parts, move.axes).reshape(*move.result, -1)
        case "all_gather":
            parts = lax.all_gather(x, move.axes, to="invarying")
            parts = parts.reshape(*move.turned, -1).transpose(*move.back, len(move.back))
            return parts.reshape(*move.result, -1)
        case "all_reduce":
            return lax.psum(x, move.axes)
        case "reduce":
            return jnp.where(lax.axis_index(move.axes) == 0, lax.psum(x, move.axes), 0)
        case "broadcast":
            return lax.psum(jnp.where(lax.axis_index(move.axes) == 0, x, 0), move.axes)


def bind(program: Program) -> JaxReduction:
    """Return a reduction program for JAX, on a mesh of its own: see `JaxReduction`."""
    return JaxReduction(program)


def jax_text(program: Program, placement: Placement | None = None) -> str:
    """Return Python source that runs a reduction program with JAX alone; device id k is `jax.devices()[k]`.

    It is a module: `MESH`, `reduce_payload` (the body, for a `shard_map` over it), and `reduce_rows` (the whole).
    `placement` is where the program lies, for a comment. Raises `BackendError` for one that cannot be exported.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllReduce
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (4, 5), (), Mesh(data=4), partial={"data": "sum"})
    >>> text = jax_text(Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",)))
    >>> [line.strip() for line in text.splitlines() if "psum" in line]
    ['x = lax.psum(x, "data")']
    """
    r = recipe(program)
    total = math.prod(r.chunks)
    end = "[: flat.size]" if r.result == r.chunks else ""
    lines = ['"""A reduction with JAX, exported by shardplan. Device k is `jax.devices()[k]`.', ""]
    lines += [*heading(program, placement), ""]
    lines += [
        "`reduce_payload` is the body of a `shard_map` over `MESH`; `reduce_rows` takes an array [devices, n] whose",
        "row k is the payload of the k-th device of the mesh, and returns a row for each group that was reduced.",
        '"""',
        "",
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from jax import lax",
        "from jax.sharding import Mesh, PartitionSpec",
        "",
        f"NAMES = {_names(r.names, True)}",
        f"DEVICES = [jax.devices()[k] for k in {_ids(r.ranks)}]",
        f"MESH = Mesh(np.asarray(DEVICES, dtype=object).reshape({', '.join(map(str, r.sizes))}), NAMES)",
        "",
        "",
        "def reduce_payload(payload: jax.Array) -> jax.Array:",
        "    flat = payload.reshape(-1)",
        f"    x = jnp.pad(flat, (0, -flat.size % {total})).reshape({shape_text(r.chunks)})",
    ]
    for move in r.moves:
        lines.append(f"    # {move.kind} over {', '.join(move.axes)}: {move.note}")
        lines += [f"    {line}" for line in _lines(move)]
    lines += [
        f"    return x.reshape(-1){end}",
        "",
        "",
        "reduce_rows = jax.jit(",
        "    jax.shard_map(",
        "        lambda x: reduce_payload(x)[None],",
        "        mesh=MESH,",
        "        in_specs=PartitionSpec(NAMES),",
        f"        out_specs=PartitionSpec({_names(r.differs, True)}),",
        "    )",
        ")",
    ]
    return "\n".join(lines) + "\n"


def _lines(move: RecipeStep) -> list[str]:
    """Return the statements of a move."""
    names = _names(move.axes)
    first = f"lax.axis_index({names}) == 0"
    end = f"reshape({shape_text(move.result)})"
    match move.kind:
        case "reduce_scatter":
            parts = "x" if move.straight else f"x.reshape({shape_text(move.split)}).transpose({turn_text(move.turn)})"
            return [f"parts = {parts}.reshape({move.size}, -1)", f"x = lax.psum_scatter(parts, {names}).{end}"]
        case "all_gather":
            turned = f".reshape({shape_text(move.turned)}).transpose({turn_text(move.back)})"
            return [
                f'parts = lax.all_gather(x, {names}, to="invarying")',
                f"x = parts{'' if move.straight else turned}.{end}",
            ]
        case "all_reduce":
            return [f"x = lax.psum(x, {names})"]
        case "reduce":
            return [f"x = lax.psum(x, {names})", f"x = jnp.where({first}, x, 0)"]
        case "broadcast":
            return [f"x = jnp.where({first}, x, 0)", f"x = lax.psum(x, {names})"]


def _names(names: tuple[str, ...], always: bool = False) -> str:
    """Return names as Python: one as a string, unless a tuple is wanted."""
    quoted = [f'"{n}"' for n in names]
    if len(quoted) == 1 and not always:
        return quoted[0]
    return f"({', '.join(quoted)}{',' if len(quoted) == 1 else ''})"


def _ids(ranks: tuple[int, ...]) -> str:
    start, count = ranks[0], len(ranks)
    return f"range({start}, {start + count})" if ranks == tuple(range(start, start + count)) else str(list(ranks))
