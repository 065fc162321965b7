"""Lowers the ops of a program to what one device does inside a `shard_map`.

Packing and chunks: the operands of one collective that have one dtype travel as one buffer, those of another dtype as
another. A chunked collective runs on one box of its operands after the other; `optimization_barrier` makes each part
depend on the result of the part before, so that XLA can neither merge nor overlap them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import numpy as np

from shardplan.core.dtypes import IDEMPOTENT, identity, numpy_dtype, short_name
from shardplan.core.mesh import Mesh
from shardplan.core.messages import permutation
from shardplan.core.op import poison
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Exchange,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Send,
    Slice,
    ToPartial,
)
from shardplan.core.ops.movement import by_dim
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.bits import from_bits, to_bits
from shardplan.execution.jax.compute import compute
from shardplan.execution.jax.general_move import general_move
from shardplan.execution.jax.wire import Atoms, JaxWire
from shardplan.execution.rounds import chunk_boxes, loop_of

Grouped = AllGather | AllToAll | ReduceScatter | AllReduce | Reduce | Broadcast
Collectives = Grouped | Slice | Permute | Exchange | Send | ToPartial
Lowered = Collectives | Compute
_PLAIN = ("bool", "i8", "u8", "i16", "u16")  # narrow, and moved as they are
_WIDE = 4  # bytes of an element from which on XLA:CPU sends floats as they are


def refusal(op: Op, types: Sequence[TensorType]) -> str | None:
    """Return why JAX cannot run an op on these types, or None."""
    if not isinstance(op, Lowered):
        return "it has no lowering to JAX"
    reduction = getattr(op, "reduction", "sum")
    kinds = [t.dtype for t in types if t.dtype.startswith("c") and reduction in ("max", "min")]
    if kinds:
        return f"{reduction} is not defined for {kinds[0]}; legal is a real dtype"
    return None


def lower(op: Lowered, arrays: Sequence[Any], types: Sequence[TensorType], wire: JaxWire) -> list[Any]:
    """Return this device's shards of the results of an op, given those of its operands; all types are even."""
    if isinstance(op, Compute):
        return compute(op, arrays, types, wire)
    if isinstance(op, Slice | AllGather | AllToAll | Permute | Exchange | Send):
        moved = _lower(op, [_narrow(x) for x in arrays], types, wire)
        return [y if y.dtype == x.dtype else from_bits(y, x.dtype) for x, y in zip(arrays, moved, strict=True)]
    return _lower(op, list(arrays), types, wire)


def _lower(op: Collectives, arrays: list[Any], types: Sequence[TensorType], wire: JaxWire) -> list[Any]:
    """As `lower`, of ops that move or reduce, on arrays that may be the bits of their values."""
    mesh, results = wire.mesh, op.infer(*types)
    pairs = list(zip(arrays, types, results, strict=True))
    match op:
        case Slice():
            return [_slice(x, u, op.dim, mesh.expand(op.axes), wire) for x, _, u in pairs]
        case ToPartial():
            return [_to_partial(op, x, t, u, wire) for x, t, u in pairs]
        case Permute():
            return [_permute(op, x, t, u, wire) for x, t, u in pairs]
        case Exchange() | Send():
            return [general_move(x, t, u, op.chunks, wire) for x, t, u in pairs]
        case AllGather() | AllToAll() | ReduceScatter() | AllReduce() | Reduce() | Broadcast():
            atoms = mesh.expand(op.axes)
            if not atoms:
                return arrays
            whole = _tiled(op, [wire.varying(x) for x in arrays], wire)
            found = _packed(op, [wire.varying(x) for x in arrays], types, results, wire) if whole is None else [whole]
            if isinstance(op, Reduce):
                return [_where(wire.index(atoms) == 0, x, poison((), np.dtype(x.dtype))) for x in found]
            return found
        case _:
            assert_never(op)


def _where(condition: Any, x: Any, other: Any) -> Any:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    return jnp.where(condition, x, jnp.asarray(other, dtype=x.dtype))


def _slice(x: Any, u: TensorType, dim: int, atoms: Atoms, wire: JaxWire) -> Any:
    from jax import lax  # pyright: ignore[reportMissingImports]

    size = u.local_shape()[dim]
    return lax.dynamic_slice_in_dim(x, wire.index(atoms) * size, size, dim) if atoms else x


def _to_partial(op: ToPartial, x: Any, t: TensorType, u: TensorType, wire: JaxWire) -> Any:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    dtype, atoms = numpy_dtype(t.dtype), t.mesh.expand(op.axes)
    for d, held in enumerate(t.atoms):
        if set(atoms) & set(held):
            blank = wire.varying(jnp.full(u.local_shape(), identity(op.reduction, dtype), dtype))
            at = wire.index(atoms) * t.local_shape()[d]
            return lax.dynamic_update_slice_in_dim(blank, wire.varying(x), at, d)
    if op.reduction in IDEMPOTENT:
        return x
    other = poison((), dtype) if op.reduction == "root" else identity(op.reduction, dtype)
    return _where(wire.index(atoms) == 0, x, other)


def _permute(op: Permute, x: Any, t: TensorType, u: TensorType, wire: JaxWire) -> Any:
    """Each pair's tile, cut out by its sender; a device that holds its own cuts it out too, and sends it to itself."""
    from jax import lax  # pyright: ignore[reportMissingImports]

    found = permutation(t, u)
    assert found is not None  # typed so
    n = t.mesh.size
    target = np.full(n, -1)
    target[found[0]] = found[1]
    source = np.full(n, -1)
    source[found[1]] = found[0]
    still = (target < 0) & (source < 0)  # these hold their own tile: to itself a device sends like to any other
    target[still] = np.flatnonzero(still)
    if t.local_shape() != u.local_shape():
        start = np.where((target >= 0)[:, None], u.boxes()[target, :, 0] - t.boxes()[:, :, 0], 0)
        inside = np.clip(start, 0, np.subtract(t.local_shape(), u.local_shape()))  # off the root nothing is read
        row = wire.own(inside)
        x = lax.dynamic_slice(x, [row[d] for d in range(t.ndim)], u.local_shape())
    if not len(found[0]):
        return x
    pairs = [(int(s), int(r)) for s, r in enumerate(target) if r >= 0]
    x = wire.varying(x)
    if op.chunks == 1:
        return lax.ppermute(x, wire.axes, pairs)
    boxes = chunk_boxes(u.local_shape(), op.chunks)
    return _in_parts([x], [x.shape], boxes, lambda parts, _: [lax.ppermute(parts[0], wire.axes, pairs)])[0]


def _in_parts(
    arrays: list[Any], shapes: list[tuple[int, ...]], boxes: Sequence[Any], run: Callable[[list[Any], Any], list[Any]]
) -> list[Any]:
    """Run on one box of the arrays after the other, into results of these shapes; see the module."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    outs = [jnp.zeros(shape, x.dtype) for x, shape in zip(arrays, shapes, strict=True)]
    for k, box in enumerate(boxes):
        if k:
            arrays, outs = lax.optimization_barrier((arrays, outs))
        found = run([x[tuple(slice(a, b) for a, b in box)] for x in arrays], box)
        starts = tuple(a for a, _ in box)
        outs = [lax.dynamic_update_slice(o, y, starts) for o, y in zip(outs, found, strict=True)]
    return outs


def _tiled(op: Grouped, arrays: list[Any], wire: JaxWire) -> Any:
    """One unchunked operand along one dim: the tiled form of jax.lax, which leaves the layout of buffers to XLA."""
    from jax import lax  # pyright: ignore[reportMissingImports]

    if len(arrays) > 1 or op.chunks > 1:
        return None
    (x,) = arrays
    mesh, atoms = wire.mesh, wire.mesh.expand(op.axes)
    group = wire.group(atoms)
    match op:
        case AllGather(dim=int(dim)):
            return lax.all_gather(x, axis=dim, tiled=True, **group)
        case AllToAll():
            x = _lead(x, {op.dst_dim: mesh.expand(op.order or op.axes)}, atoms, mesh)
            x = x.reshape(math.prod(x.shape[:1]), *x.shape[1:])
            back = (*range(1, op.dst_dim + 1), 0, *range(op.dst_dim + 1, x.ndim))
            x = x.transpose(back)
            joined = x.reshape(*x.shape[: op.dst_dim], -1, *x.shape[op.dst_dim + 2 :])
            return lax.all_to_all(joined, split_axis=op.dst_dim, concat_axis=op.src_dim, tiled=True, **group)
        case ReduceScatter(dim=int(dim), reduction="sum") if x.dtype != bool:
            return lax.psum_scatter(x, scatter_dimension=dim, tiled=True, **group)
        case _:
            return None


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
    return y.reshape(math.prod(mesh.atoms[a].size for a in order), *(shape[k] for k in rest))


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
        shape += [math.prod(mesh.atoms[a].size for a in atoms), n]
    return y.transpose(turn).reshape(shape)


def _packed(
    op: Grouped, arrays: list[Any], types: Sequence[TensorType], results: Sequence[TensorType], wire: JaxWire
) -> list[Any]:
    """Several operands, several dims, or in chunks: operands cut into boxes of equal number, flat and side by side.

    Each operand is seen as [q, *body] (one tile a member) where the op deals tiles out, and its result as
    [*(tiles, body) per dim] where it brings tiles together; a box is a part of the body.
    """
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    mesh, order = wire.mesh, wire.mesh.expand(op.axes)
    split: dict[int, Atoms] = {}
    join: dict[int, Atoms] = {}
    match op:
        case AllGather():
            join = {d: mesh.expand(names) for d, names in by_dim(op.name, op.dim, op.axes).items()}
        case AllToAll():
            split, join = {op.dst_dim: mesh.expand(op.order or op.axes)}, {op.src_dim: order}
        case ReduceScatter():
            split = {d: mesh.expand(names) for d, names in by_dim(op.name, op.dim, op.axes).items()}
        case _:
            pass
    q = math.prod(mesh.atoms[a].size for a in order)
    if op.chunks > 1 and isinstance(op, AllReduce | Reduce | Broadcast):
        return _looped(op, arrays, order, wire)
    bodies = [
        tuple(n // math.prod(mesh.atoms[a].size for a in split.get(d, ())) for d, n in enumerate(t.local_shape()))
        for t in types
    ]
    boxes = [chunk_boxes(body, op.chunks) for body in bodies]
    outs: list[Any] = [None] * len(arrays)
    for step in range(max(map(len, boxes))):
        if step:
            arrays, outs = lax.optimization_barrier((arrays, outs))
        live = [k for k, mine in enumerate(boxes) if step < len(mine)]
        for dtype in dict.fromkeys(arrays[k].dtype for k in live):
            chosen = [k for k in live if arrays[k].dtype == dtype]
            flat: list[Any] = []
            for k in chosen:
                part = tuple(slice(a, b) for a, b in boxes[k][step])
                seen = _lead(arrays[k], split, order, mesh)[:, *part] if split else arrays[k][part]
                flat.append(seen.reshape(*seen.shape[:1], -1) if split else seen.reshape(-1))
            packed = _core(op, flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1), order, wire)
            start = 0
            for k in chosen:
                box = boxes[k][step]
                shape = tuple(b - a for a, b in box)
                mine = packed[..., start : start + math.prod(shape)]
                start += math.prod(shape)
                piece = _join(mine.reshape(q, *shape), join, order, mesh) if join else mine.reshape(shape)
                at = tuple(x for a, _ in box for x in ((0, a) if join else (a,)))
                if outs[k] is None and len(boxes[k]) > 1:
                    tiles = (math.prod(mesh.atoms[a].size for a in join.get(d, ())) for d in range(len(shape)))
                    body = bodies[k]
                    full = tuple(x for n, m in zip(tiles, body, strict=True) for x in (n, m)) if join else body
                    outs[k] = wire.varying(jnp.zeros(full, dtype))
                outs[k] = piece if len(boxes[k]) == 1 else lax.dynamic_update_slice(outs[k], wire.varying(piece), at)
    return [x.reshape(u.local_shape()) for x, u in zip(outs, results, strict=True)]


def _looped(op: AllReduce | Reduce | Broadcast, arrays: list[Any], order: Atoms, wire: JaxWire) -> list[Any]:
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
            found = wire.varying(_core(op, lax.dynamic_slice_in_dim(whole, start, step), order, wire))
            return lax.dynamic_update_slice_in_dim(out, found, start, 0)

        packed = lax.fori_loop(0, count, part, wire.varying(jnp.zeros(whole.shape, dtype)))
        start = 0
        for k in chosen:
            outs[k] = packed[start : start + arrays[k].size].reshape(arrays[k].shape)
            start += arrays[k].size
    return [outs[k] for k in range(len(arrays))]


def _core(op: Grouped, x: Any, order: Atoms, wire: JaxWire) -> Any:
    """The collective on flat tiles: [n] or [q, n] in, [n] or [q, n] out."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    group = wire.group(order)
    match op:
        case AllGather():
            return lax.all_gather(x, axis=0, tiled=False, **group)
        case AllToAll():
            return lax.all_to_all(x, split_axis=0, concat_axis=0, tiled=True, **group)
        case ReduceScatter():
            if op.reduction == "sum" and x.dtype != bool:
                return lax.psum_scatter(x, scatter_dimension=0, tiled=False, **group)
            return _folded(_dealt(x, group), op.reduction)
        case AllReduce() | Reduce():
            if op.reduction == "sum" and x.dtype != bool:
                return lax.psum(x, **group)
            if op.reduction in ("sum", "max", "min"):
                return (lax.pmin if op.reduction == "min" else lax.pmax)(x, **group)
            q = math.prod(wire.mesh.atoms[a].size for a in order)
            tiles = jnp.pad(x, (0, -x.size % q)).reshape(q, -1)
            mine = _folded(_dealt(tiles, group), op.reduction)
            whole = lax.all_gather(_narrow(mine), axis=0, tiled=True, **group)[: x.size]
            return whole if whole.dtype == x.dtype else from_bits(whole, x.dtype)
        case Broadcast():
            bits = to_bits(x)
            blank = jnp.zeros((), bits.dtype)
            total = lax.psum(wire.varying(jnp.where(wire.index(order) == 0, bits, blank)), **group)
            return from_bits(total, x.dtype)
        case _:
            assert_never(op)


def _dealt(tiles: Any, group: dict[str, Any]) -> Any:
    """The addends of this member's tile, [q, n] of tiles for the members in, [q, n] of one tile out."""
    from jax import lax  # pyright: ignore[reportMissingImports]

    found = lax.all_to_all(_narrow(tiles), split_axis=0, concat_axis=0, tiled=True, **group)
    return found if found.dtype == tiles.dtype else from_bits(found, tiles.dtype)


def _narrow(x: Any) -> Any:
    """What travels of `x`: the bits of a narrow float, which XLA:CPU would send as a wider one."""
    return to_bits(x) if x.dtype.itemsize < _WIDE and short_name(x.dtype) not in _PLAIN else x


def _folded(parts: Any, reduction: str) -> Any:
    """Reduce over the first dim, in the dtype of the parts; a sum of bools is their maximum."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    if reduction == "product":
        return jnp.prod(parts, axis=0).astype(parts.dtype)
    ufuncs = {"min": jnp.minimum, "band": jnp.bitwise_and, "bor": jnp.bitwise_or, "bxor": jnp.bitwise_xor}
    return ufuncs.get(reduction, jnp.maximum).reduce(parts, axis=0)
