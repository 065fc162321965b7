"""The collectives that XLA has: the one table of them, by op. All else is its lowering, interpreted.

Packing and chunks: the operands of one collective that have one dtype travel as one buffer, those of another dtype as
another. A chunked collective runs on one box of its operands after the other; `optimization_barrier` makes each part
depend on the result of the part before, so that XLA can neither merge nor overlap them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.dtypes import itemsize
from shardplan.core.mesh import Mesh
from shardplan.core.op import poison
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.movement import by_dim
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.bits import carried, from_bits, restored, to_bits
from shardplan.execution.jax.interpret import reducer
from shardplan.execution.jax.wire import Atoms, JaxWire
from shardplan.execution.rounds import chunk_boxes


class Native(NamedTuple):
    """How XLA runs an op in groups of more than one device."""

    run: Callable[[Any, list[Any], JaxWire], list[Any]]  # op and operands to results
    received: Callable[[Any, Sequence[TensorType], int], int]  # bytes on every device, in groups of that size


Core = Callable[[Any], Any]  # a collective on flat tiles: [n] or [q, n] in, [n] or [q, n] out


def _gather(op: AllGather, arrays: list[Any], wire: JaxWire) -> list[Any]:
    from jax import lax  # pyright: ignore[reportMissingImports]

    bits, group = [carried(x) for x in arrays], wire.group(wire.mesh.expand(op.axes))
    if isinstance(op.dim, int) and _plain(op, arrays):
        found = [lax.all_gather(bits[0], axis=op.dim, tiled=True, **group)]
    else:
        join = {d: wire.mesh.expand(names) for d, names in by_dim(op.name, op.dim, op.axes).items()}
        found = _packed(op, bits, {}, join, wire, lambda x: lax.all_gather(x, axis=0, tiled=True, **group))
    return [restored(y, x.dtype) for x, y in zip(arrays, found, strict=True)]


def _all_to_all(op: AllToAll, arrays: list[Any], wire: JaxWire) -> list[Any]:
    from jax import lax  # pyright: ignore[reportMissingImports]

    mesh, order = wire.mesh, wire.mesh.expand(op.axes)
    bits, group = [carried(x) for x in arrays], wire.group(order)
    split = {op.dst_dim: mesh.expand(op.order or op.axes)}
    if _plain(op, arrays):
        x = _lead(bits[0], split, order, mesh)
        back = (*range(1, op.dst_dim + 1), 0, *range(op.dst_dim + 1, x.ndim))
        x = x.transpose(back)
        joined = x.reshape(*x.shape[: op.dst_dim], -1, *x.shape[op.dst_dim + 2 :])
        found = [lax.all_to_all(joined, split_axis=op.dst_dim, concat_axis=op.src_dim, tiled=True, **group)]
    else:
        found = _packed(op, bits, split, {op.src_dim: order}, wire, lambda x: _exchanged(x, group))
    return [restored(y, x.dtype) for x, y in zip(arrays, found, strict=True)]


def _reduce_scatter(op: ReduceScatter, arrays: list[Any], wire: JaxWire) -> list[Any]:
    from jax import lax  # pyright: ignore[reportMissingImports]

    group = wire.group(wire.mesh.expand(op.axes))

    def core(x: Any) -> Any:
        if op.reduction == "sum" and x.dtype != bool:
            return lax.psum_scatter(x, scatter_dimension=0, tiled=True, **group)
        return _reduced(x, op.reduction, group)[None]

    if isinstance(op.dim, int) and _plain(op, arrays) and op.reduction == "sum" and arrays[0].dtype != bool:
        return [lax.psum_scatter(arrays[0], scatter_dimension=op.dim, tiled=True, **group)]
    split = {d: wire.mesh.expand(names) for d, names in by_dim(op.name, op.dim, op.axes).items()}
    return _packed(op, arrays, split, {}, wire, core)


def _all_reduce(op: AllReduce | Reduce, arrays: list[Any], wire: JaxWire) -> list[Any]:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    order = wire.mesh.expand(op.axes)
    q, group = _tiles(order, wire.mesh), wire.group(order)

    def core(x: Any) -> Any:
        if op.reduction == "sum" and x.dtype != bool:
            return lax.psum(x, **group)
        if op.reduction in _ADDED:
            return (lax.pmin if op.reduction == "min" else lax.pmax)(x, **group)
        tiles = jnp.pad(x, (0, -x.size % q)).reshape(q, -1)
        mine = carried(_reduced(tiles, op.reduction, group))
        return restored(lax.all_gather(mine, axis=0, tiled=True, **group)[: x.size], x.dtype)

    return _flat(op, arrays, wire, core)


def _reduce(op: Reduce, arrays: list[Any], wire: JaxWire) -> list[Any]:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    root = wire.index(wire.mesh.expand(op.axes)) == 0
    found = _all_reduce(op, arrays, wire)
    return [jnp.where(root, x, jnp.asarray(poison((), np.dtype(x.dtype)), x.dtype)) for x in found]


def _broadcast(op: Broadcast, arrays: list[Any], wire: JaxWire) -> list[Any]:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    order = wire.mesh.expand(op.axes)

    def core(x: Any) -> Any:
        bits = to_bits(x)
        given = jnp.where(wire.index(order) == 0, bits, jnp.zeros((), bits.dtype))
        return from_bits(lax.psum(wire.varying(given), **wire.group(order)), x.dtype)

    return _flat(op, arrays, wire, core)


def _received_whole(op: AllReduce | Reduce | Broadcast, operands: Sequence[TensorType], q: int) -> int:
    """Of all-reduces, in parts of one size."""
    sizes: dict[str, int] = {}
    for t in operands:
        sizes[t.dtype] = sizes.get(t.dtype, 0) + t.local_bytes()
    total = 0
    for dtype, n in sizes.items():
        count, step = loop_of(n // itemsize(dtype), op.chunks)
        if not isinstance(op, Broadcast) and op.reduction not in _ADDED:  # padded to tiles of one size
            step += -step % q
        total += 2 * count * step * itemsize(dtype) * (q - 1) // q
    return total


_ADDED = ("sum", "max", "min")  # the reductions that XLA's all-reduce has for every dtype
NATIVE: dict[type[Collective], Native] = {
    AllGather: Native(_gather, lambda op, operands, q: sum(t.local_bytes() for t in operands) * (q - 1)),
    AllToAll: Native(_all_to_all, lambda op, operands, q: sum(n - n // q for n in map(_bytes, operands))),
    ReduceScatter: Native(_reduce_scatter, lambda op, operands, q: sum(n - n // q for n in map(_bytes, operands))),
    AllReduce: Native(_all_reduce, _received_whole),
    Reduce: Native(_reduce, _received_whole),
    Broadcast: Native(_broadcast, _received_whole),
}


def loop_of(elements: int, chunks: int) -> tuple[int, int]:
    """Return how many parts, of how many elements each, a chunked all-reduce has; the last may overlap the one before.

    >>> loop_of(10, 4), loop_of(2, 5), loop_of(8, 1)
    ((4, 3), (2, 1), (1, 8))
    """
    step = -(-elements // min(chunks, elements))
    return -(-elements // step), step


def _bytes(t: TensorType) -> int:
    return t.local_bytes()


def _plain(op: AllGather | AllToAll | ReduceScatter, arrays: list[Any]) -> bool:
    """Whether the tiled form of jax.lax will do, which leaves the layout of buffers to XLA."""
    return len(arrays) == 1 and op.chunks == 1


def _tiles(atoms: Atoms, mesh: Mesh) -> int:
    return math.prod(mesh.atoms[a].size for a in atoms)


def _exchanged(tiles: Any, group: dict[str, Any]) -> Any:
    """A tile for every member in, [q, n], one from every member out, [q, n]."""
    from jax import lax  # pyright: ignore[reportMissingImports]

    return lax.all_to_all(tiles, split_axis=0, concat_axis=0, tiled=True, **group)


def _reduced(tiles: Any, reduction: str, group: dict[str, Any]) -> Any:
    """A member's tile of a reduction that XLA has not, in the dtype of the tiles: [q, n] in, [n] out."""
    addends = restored(_exchanged(carried(tiles), group), tiles.dtype)
    return reducer(reduction).reduce(addends, axis=0).astype(tiles.dtype)


def _lead(x: Any, split: dict[int, Atoms], order: Atoms, mesh: Mesh) -> Any:
    """Cut dims into tiles over atoms, and bring those in front as one dim: [q, *rest], the index of q in `order`."""
    shape: list[int] = []
    front: dict[int, int] = {}
    rest: list[int] = []
    for d, n in enumerate(x.shape):
        for a in split.get(d, ()):
            front[a] = len(shape)
            shape.append(mesh.atoms[a].size)
            n //= mesh.atoms[a].size
        rest.append(len(shape))
        shape.append(n)
    y = x.reshape(shape).transpose([front[a] for a in order] + rest)
    return y.reshape(_tiles(order, mesh), *(shape[k] for k in rest))


def _join(x: Any, join: dict[int, Atoms], order: Atoms, mesh: Mesh) -> Any:
    """Undo `_lead` but for the last step: [*(tiles, rest) per dim], the tiles of a dim in the order of its atoms."""
    body = x.shape[1:]
    y = x.reshape(*(mesh.atoms[a].size for a in order), *body)
    dim_of = {a: k for k, a in enumerate(order)}
    turn: list[int] = []
    shape: list[int] = []
    for d, n in enumerate(body):
        atoms = join.get(d, ())
        turn += [*(dim_of[a] for a in atoms), len(order) + d]
        shape += [_tiles(atoms, mesh), n]
    return y.transpose(turn).reshape(shape)


def _packed(
    op: AllGather | AllToAll | ReduceScatter,
    arrays: list[Any],
    split: dict[int, Atoms],
    join: dict[int, Atoms],
    wire: JaxWire,
    core: Core,
) -> list[Any]:
    """Several operands, several dims, or in chunks: operands cut into boxes of equal number, flat and side by side.

    Each operand is seen as [q, *body] (one tile a member) where the op deals tiles out, and its result as
    [*(tiles, body) per dim] where it brings tiles together; a box is a part of the body.
    """
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    mesh, order = wire.mesh, wire.mesh.expand(op.axes)
    dealt, joined = (order if dims else () for dims in (split, join))
    bodies = [tuple(n // _tiles(split.get(d, ()), mesh) for d, n in enumerate(x.shape)) for x in arrays]
    tiles = [[_tiles(join.get(d, ()), mesh) for d in range(len(body))] for body in bodies]
    boxes = [chunk_boxes(body, op.chunks) for body in bodies]
    outs = [
        wire.varying(jnp.zeros([x for pair in zip(many, body, strict=True) for x in pair], x.dtype))
        for x, many, body in zip(arrays, tiles, bodies, strict=True)
    ]
    for step in range(max(map(len, boxes))):
        if step:
            arrays, outs = lax.optimization_barrier((arrays, outs))
        live = [k for k, mine in enumerate(boxes) if step < len(mine)]
        for dtype in dict.fromkeys(arrays[k].dtype for k in live):
            chosen = [k for k in live if arrays[k].dtype == dtype]
            flat: list[Any] = []
            for k in chosen:
                part = tuple(slice(a, b) for a, b in boxes[k][step])
                seen = _lead(arrays[k], split, dealt, mesh)[:, *part]
                flat.append(seen.reshape(seen.shape[0], -1))
            packed = core(flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1))
            start = 0
            for k in chosen:
                shape = tuple(b - a for a, b in boxes[k][step])
                mine = packed[:, start : start + math.prod(shape)]
                start += math.prod(shape)
                piece = _join(mine.reshape(-1, *shape), join, joined, mesh)
                at = tuple(x for a, _ in boxes[k][step] for x in (0, a))
                outs[k] = lax.dynamic_update_slice(outs[k], wire.varying(piece), at)
    return [
        x.reshape([n * m for n, m in zip(many, body, strict=True)])
        for x, many, body in zip(outs, tiles, bodies, strict=True)
    ]


def _flat(op: AllReduce | Reduce | Broadcast, arrays: list[Any], wire: JaxWire, core: Core) -> list[Any]:
    """The operands of one dtype flat, side by side, and in parts of one size; the last part overlaps that before it."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    outs: dict[int, Any] = {}
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        chosen = [k for k, x in enumerate(arrays) if x.dtype == dtype]
        flat = [arrays[k].reshape(-1) for k in chosen]
        whole = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
        count, step = loop_of(whole.size, op.chunks)

        def part(k: Any, out: Any, whole: Any = whole, step: int = step) -> Any:
            start = jnp.minimum(k * step, whole.size - step)
            found = wire.varying(core(lax.dynamic_slice_in_dim(whole, start, step)))
            return lax.dynamic_update_slice_in_dim(out, found, start, 0)

        if op.chunks > 1:
            packed = lax.fori_loop(0, count, part, wire.varying(jnp.zeros(whole.shape, dtype)))
        else:
            packed = core(whole)
        start = 0
        for k in chosen:
            outs[k] = packed[start : start + arrays[k].size].reshape(arrays[k].shape)
            start += arrays[k].size
    return [outs[k] for k in range(len(arrays))]
