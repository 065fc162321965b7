"""The collectives that XLA has: the one table of them, by op. All else is its lowering, interpreted.

Packing and chunks: the operands of one collective that have one dtype travel as one buffer, those of another dtype as
another. A chunked collective runs on one box of its operands after the other; `optimization_barrier` makes each part
depend on the result of the part before, so that XLA can neither merge nor overlap them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import itemsize
from shardplan.core.mesh import Mesh
from shardplan.core.op import poison
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.movement import by_dim
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.bits import carry_bits, from_bits, restore_dtype, to_bits
from shardplan.execution.jax.interpret import reducer
from shardplan.execution.jax.wire import Atoms, JaxWire
from shardplan.execution.rounds import chunk_boxes


class Native(NamedTuple):
    """How XLA runs an op in groups of more than one device."""

    run: Callable[[Any, list[Any], JaxWire], list[Any]]  # op and operands to results
    received: Callable[[Any, Sequence[TensorType], int], int]  # bytes on every device, in groups of that size
    moves: bool = False  # it does not reduce: operands and results are what travels of them


Core = Callable[[Any], Any]  # a collective on flat tiles: [n] or [q, n] in, [n] or [q, n] out
_ADDED = ("sum", "max", "min")  # the reductions that XLA's all-reduce has


def _gather(op: AllGather, arrays: list[Any], wire: JaxWire) -> list[Any]:
    group = wire.group(wire.mesh.expand(op.axes))
    if isinstance(op.dim, int) and _can_use_tiled(op, arrays):
        return [lax.all_gather(arrays[0], axis=op.dim, tiled=True, **group)]
    join = {d: wire.mesh.expand(names) for d, names in by_dim(op.name, op.dim, op.axes).items()}
    return _move_packed_boxes(op, arrays, {}, join, wire, lambda x: lax.all_gather(x, axis=0, tiled=True, **group))


def _all_to_all(op: AllToAll, arrays: list[Any], wire: JaxWire) -> list[Any]:
    order, into = wire.mesh.expand(op.axes), op.dst_dim
    split = {into: wire.mesh.expand(op.order or op.axes)}
    if not _can_use_tiled(op, arrays):
        return _move_packed_boxes(
            op, arrays, split, {op.src_dim: order}, wire, lambda x: _deal_tiles(x, wire.group(order))
        )
    x = _lead(arrays[0], split, order, wire.mesh)
    x = x.transpose((*range(1, into + 1), 0, *range(into + 1, x.ndim)))
    x = x.reshape(*x.shape[:into], -1, *x.shape[into + 2 :])
    return [lax.all_to_all(x, split_axis=into, concat_axis=op.src_dim, tiled=True, **wire.group(order))]


def _reduce_scatter(op: ReduceScatter, arrays: list[Any], wire: JaxWire) -> list[Any]:
    group = wire.group(wire.mesh.expand(op.axes))

    def core(x: Any, dim: int = 0) -> Any:
        if _is_native_sum(op, x):
            return lax.psum_scatter(x, scatter_dimension=dim, tiled=True, **group)
        return _reduce_tiles(x, op.reduction, group)[None]

    if isinstance(op.dim, int) and _can_use_tiled(op, arrays) and _is_native_sum(op, arrays[0]):
        return [core(arrays[0], op.dim)]
    split = {d: wire.mesh.expand(names) for d, names in by_dim(op.name, op.dim, op.axes).items()}
    return _move_packed_boxes(op, arrays, split, {}, wire, core)


def _all_reduce(op: AllReduce | Reduce, arrays: list[Any], wire: JaxWire) -> list[Any]:
    order = wire.mesh.expand(op.axes)
    q, group = _count(order, wire.mesh), wire.group(order)

    def core(x: Any) -> Any:
        if _is_native_sum(op, x):
            return lax.psum(x, **group)
        if op.reduction in _ADDED:
            return (lax.pmin if op.reduction == "min" else lax.pmax)(x, **group)
        mine = _reduce_tiles(jnp.pad(x, (0, -x.size % q)).reshape(q, -1), op.reduction, group)
        return restore_dtype(lax.all_gather(carry_bits(mine), axis=0, tiled=True, **group)[: x.size], x.dtype)

    return _flat(op, arrays, wire, core)


def _reduce(op: Reduce, arrays: list[Any], wire: JaxWire) -> list[Any]:
    root = wire.index(wire.mesh.expand(op.axes)) == 0
    found = _all_reduce(op, arrays, wire)
    return [jnp.where(root, x, jnp.asarray(poison((), np.dtype(x.dtype)), x.dtype)) for x in found]


def _broadcast(op: Broadcast, arrays: list[Any], wire: JaxWire) -> list[Any]:
    order = wire.mesh.expand(op.axes)

    def core(x: Any) -> Any:
        bits = to_bits(x)
        given = jnp.where(wire.index(order) == 0, bits, jnp.zeros((), bits.dtype))
        return from_bits(lax.psum(wire.varying(given), **wire.group(order)), x.dtype)

    return _flat(op, arrays, wire, core)


def _received_tiles(op: AllToAll | ReduceScatter, operands: Sequence[TensorType], q: int) -> int:
    return sum(t.local_bytes() // q for t in operands) * (q - 1)


def _received_whole(op: AllReduce | Reduce | Broadcast, operands: Sequence[TensorType], q: int) -> int:
    """Of all-reduces, in parts of one size; the tiles of a reduction that XLA has not are padded to one, too."""
    sizes: Counter[str] = Counter()
    for t in operands:
        sizes[t.dtype] += math.prod(t.local_shape())
    total = 0
    for dtype, n in sizes.items():
        count, step = loop_of(n, op.chunks)
        if not isinstance(op, Broadcast) and op.reduction not in _ADDED:
            step += -step % q
        total += 2 * count * step * itemsize(dtype) * (q - 1) // q
    return total


NATIVE: dict[type[Collective], Native] = {
    AllGather: Native(_gather, lambda op, operands, q: sum(t.local_bytes() for t in operands) * (q - 1), moves=True),
    AllToAll: Native(_all_to_all, _received_tiles, moves=True),
    ReduceScatter: Native(_reduce_scatter, _received_tiles),
    AllReduce: Native(_all_reduce, _received_whole),
    Reduce: Native(_reduce, _received_whole),
    Broadcast: Native(_broadcast, _received_whole),
}


def native(op: Collective) -> Native | None:
    """Return how XLA runs an op; None where it has no such collective, and where the op says another algorithm."""
    return None if op.algorithm else NATIVE.get(type(op))


def loop_of(elements: int, chunks: int) -> tuple[int, int]:
    """Return how many parts, of how many elements each, a chunked all-reduce has; the last may overlap the one before.

    >>> loop_of(10, 4), loop_of(2, 5), loop_of(8, 1)
    ((4, 3), (2, 1), (1, 8))
    """
    step = -(-elements // min(chunks, elements))
    return -(-elements // step), step


def _can_use_tiled(op: AllGather | AllToAll | ReduceScatter, arrays: list[Any]) -> bool:
    """Whether the tiled form of jax.lax will do, which leaves the layout of buffers to XLA."""
    return len(arrays) == 1 and op.chunks == 1


def _is_native_sum(op: ReduceScatter | AllReduce | Reduce, x: Any) -> bool:
    return op.reduction == "sum" and x.dtype != bool


def _count(atoms: Atoms, mesh: Mesh) -> int:
    return math.prod(mesh.atoms[a].size for a in atoms)


def _deal_tiles(tiles: Any, group: dict[str, Any]) -> Any:
    """A tile for every member in, one from every member out: [q, n]."""
    return lax.all_to_all(tiles, split_axis=0, concat_axis=0, tiled=True, **group)


def _reduce_tiles(tiles: Any, reduction: str, group: dict[str, Any]) -> Any:
    """This member's tile of a reduction that XLA has not, in the dtype of the tiles: [q, n] in, [n] out."""
    addends = restore_dtype(_deal_tiles(carry_bits(tiles), group), tiles.dtype)
    return reducer(reduction).reduce(addends, axis=0).astype(tiles.dtype)


def _lead(x: Any, split: dict[int, Atoms], order: Atoms, mesh: Mesh) -> Any:
    """Cut dims into tiles over atoms, and bring those in front as one dim: [q, *rest], the index of q in `order`."""
    shape: list[int] = []
    front: dict[int, int] = {}
    rest: list[int] = []
    for d, n in enumerate(x.shape):
        atoms = split.get(d, ())
        front |= {a: len(shape) + k for k, a in enumerate(atoms)}
        rest.append(len(shape) + len(atoms))
        shape += [*(mesh.atoms[a].size for a in atoms), n // _count(atoms, mesh)]
    y = x.reshape(shape).transpose([front[a] for a in order] + rest)
    return y.reshape(_count(order, mesh), *y.shape[len(order) :])


def _join(x: Any, join: dict[int, Atoms], order: Atoms, mesh: Mesh) -> Any:
    """Undo `_lead` but for the last step: [*(tiles, rest) per dim], the tiles of a dim in the order of its atoms."""
    y = x.reshape(*(mesh.atoms[a].size for a in order), *x.shape[1:])
    turn: list[int] = []
    shape: list[int] = []
    for d, n in enumerate(x.shape[1:]):
        atoms = join.get(d, ())
        turn += [*(order.index(a) for a in atoms), len(order) + d]
        shape += [_count(atoms, mesh), n]
    return y.transpose(turn).reshape(shape)


def _side_by_side(tiles: list[Any], core: Core) -> list[Any]:
    """Run a collective once for every dtype, on all that has it; elements lie along the last dim."""
    found: dict[int, Any] = {}
    for dtype in dict.fromkeys(x.dtype for x in tiles):
        chosen = [k for k, x in enumerate(tiles) if x.dtype == dtype]
        packed = core(jnp.concatenate([tiles[k] for k in chosen], axis=-1) if len(chosen) > 1 else tiles[chosen[0]])
        ends = np.cumsum([tiles[k].shape[-1] for k in chosen])
        found |= zip(chosen, jnp.split(packed, ends[:-1], axis=-1), strict=True)
    return [found[k] for k in range(len(tiles))]


def _move_packed_boxes(
    op: AllGather | AllToAll | ReduceScatter,
    arrays: list[Any],
    split: dict[int, Atoms],
    join: dict[int, Atoms],
    wire: JaxWire,
    core: Core,
) -> list[Any]:
    """Several operands, several dims, or in chunks: operands cut into boxes of equal number, flat and side by side.

    Each operand is seen as [q, *body], one tile a member where the op deals tiles out and q is 1 where not; its result
    as [*(tiles, body) per dim]. A box is a part of the body.
    """
    mesh, order = wire.mesh, wire.mesh.expand(op.axes)
    dealt, joined = (order if dims else () for dims in (split, join))
    bodies = [tuple(n // _count(split.get(d, ()), mesh) for d, n in enumerate(x.shape)) for x in arrays]
    boxes = [chunk_boxes(body, op.chunks) for body in bodies]
    shapes = [[m for d, n in enumerate(body) for m in (_count(join.get(d, ()), mesh), n)] for body in bodies]
    outs = [wire.varying(jnp.zeros(shape, x.dtype)) for x, shape in zip(arrays, shapes, strict=True)]
    for step in range(max(map(len, boxes))):
        if step:
            arrays, outs = lax.optimization_barrier((arrays, outs))
        live = {k: mine[step] for k, mine in enumerate(boxes) if step < len(mine)}
        tiles: list[Any] = []
        for k, box in live.items():
            seen = _lead(arrays[k], split, dealt, mesh)[:, *(slice(a, b) for a, b in box)]
            tiles.append(seen.reshape(seen.shape[0], -1))
        for (k, box), found in zip(live.items(), _side_by_side(tiles, core), strict=True):
            piece = _join(found.reshape(-1, *(b - a for a, b in box)), join, joined, mesh)
            at = [x for a, _ in box for x in (0, a)]
            outs[k] = lax.dynamic_update_slice(outs[k], wire.varying(piece), at)
    return [
        x.reshape([n * m for n, m in zip(shape[::2], shape[1::2], strict=True)])
        for x, shape in zip(outs, shapes, strict=True)
    ]


def _flat(op: AllReduce | Reduce | Broadcast, arrays: list[Any], wire: JaxWire, core: Core) -> list[Any]:
    """Operands flat, side by side, and in parts of one size; the last part overlaps that before it."""

    def in_parts(whole: Any) -> Any:
        count, step = loop_of(whole.size, op.chunks)

        def part(k: Any, out: Any) -> Any:
            start = jnp.minimum(k * step, whole.size - step)
            found = wire.varying(core(lax.dynamic_slice_in_dim(whole, start, step)))
            return lax.dynamic_update_slice_in_dim(out, found, start, 0)

        return lax.fori_loop(0, count, part, wire.varying(jnp.zeros_like(whole)))

    found = _side_by_side([x.reshape(-1) for x in arrays], in_parts if op.chunks > 1 else core)
    return [y.reshape(x.shape) for x, y in zip(arrays, found, strict=True)]
