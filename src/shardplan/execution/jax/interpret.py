"""Any movement op inside a `shard_map`: its lowering as the permutes of `execution.rounds`, on this device's buffers.

What differs from device to device, where a piece begins and who gets one, is read from tables by the device's place.
Buffers hold what travels, the bits of a narrow float; a fold takes the values of both sides, and rounds to the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]

from shardplan.core.dtypes import COMBINE, identity, numpy_dtype
from shardplan.core.lowering import BufferBlock, Kernel
from shardplan.core.op import Op, poison
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.bits import carry_bits, restore_dtype
from shardplan.execution.jax.compute import jax_namespace
from shardplan.execution.jax.wire import JaxWire
from shardplan.execution.rounds import PermuteRound, permute_rounds


def interpret(op: Op, arrays: Sequence[Any], types: Sequence[TensorType], wire: JaxWire) -> list[Any]:
    """Return this device's shards of the results; the wire's places are the rows of `permute_rounds`."""
    plan = permute_rounds(op, tuple(types))
    dtypes = {name: numpy_dtype(short) for name, short in plan.dtypes.items()}
    held = {f"x{k}": wire.varying(carry_bits(x)) for k, x in enumerate(arrays)}
    for name in plan.shapes.keys() - held.keys():
        blank = jnp.full(plan.shapes[name], poison((), dtypes[name]), dtypes[name])
        held[name] = wire.varying(carry_bits(blank))
    for k, batch in enumerate(plan.batches):
        if k:  # one after the other: XLA may neither merge nor overlap them
            held = lax.optimization_barrier(held)
        for one in batch:
            if isinstance(one, Kernel):
                held |= _compute_kernel(held, one, dtypes, wire)
                continue
            dtype = dtypes[one.target]
            if one.source is None:
                piece = carry_bits(jnp.full(one.shape, identity(one.fold or "sum", dtype), dtype))
            else:
                piece = _window(held[one.source], one, wire)
            if one.travels:
                piece = lax.ppermute(piece, wire.axes, one.pairs)
            held[one.target] = _deliver(held[one.target], piece, one, dtype, wire)
    count = sum(name.startswith("y") for name in plan.shapes)
    return [restore_dtype(held[f"y{k}"], dtypes[f"y{k}"]) for k in range(count)]


def _compute_kernel(
    held: Mapping[str, Any], kernel: Kernel, dtypes: Mapping[str, Any], wire: JaxWire
) -> dict[str, Any]:
    """The buffers that a kernel writes; devices on which it is not live compute it too, and keep what they had."""
    xp, row = jax_namespace(), int(np.flatnonzero(kernel.live)[0])  # all types are even: blocks are of one size

    def seen(x: Any, block: BufferBlock) -> Any:
        start = int(block.start[row])
        n = int(block.elements[row])
        if (block.start[kernel.live] == start).all():
            return x[start : start + n]
        return lax.dynamic_slice(x, [wire.own_row(block.start)], [n])

    flat = {
        b.buffer: restore_dtype(held[b.buffer], dtypes[b.buffer]).reshape(-1)
        for b in (*kernel.sources, *kernel.targets)
    }
    arrays = [seen(flat[b.buffer], b).reshape(b.shape[row]) for b in kernel.sources]
    numbers = wire.own_row(kernel.numbers)
    found = kernel.run(xp, arrays, [numbers[k] for k in range(kernel.numbers.shape[1])])
    for block, y in zip(kernel.targets, found, strict=True):
        x = flat[block.buffer]
        y = xp.astype(y, dtypes[block.buffer]).reshape(-1)
        if not kernel.live.all():
            y = jnp.where(wire.own_row(kernel.live) > 0, y, seen(x, block))
        flat[block.buffer] = lax.dynamic_update_slice(x, y, [wire.own_row(block.start)])
    return {b.buffer: wire.varying(carry_bits(flat[b.buffer].reshape(held[b.buffer].shape))) for b in kernel.targets}


def reducer(reduction: str) -> Any:
    """Return the ufunc of jax.numpy that makes one of two addends; that of a sum is the maximum of bools."""
    return getattr(jnp, COMBINE[reduction].__name__)


def _fit_ndim(x: Any, ndim: int) -> Any:
    return x if x.ndim == ndim else x.reshape(-1)


def _window(x: Any, one: PermuteRound, wire: JaxWire) -> Any:
    """The piece that this device sends, at index 0 of a window of the round's shape."""
    x = _fit_ndim(x, len(one.shape))
    if one.shape == x.shape and not one.start.any():
        return x
    row = wire.own_row(one.start)
    if one.is_unpadded:  # a slice, which is cheaper than the gather below
        return lax.dynamic_slice(x, [row[d] for d in range(x.ndim)], one.shape)
    for d, n in enumerate(one.shape):  # the window may reach beyond the shard: what lies there is padding
        x = jnp.take(x, jnp.clip(row[d] + np.arange(n, dtype=np.int32), 0, x.shape[d] - 1), axis=d)
    return x


def _deliver(out: Any, piece: Any, one: PermuteRound, dtype: np.dtype[Any], wire: JaxWire) -> Any:
    """`out` with the piece that this device got, or folded with it, where it got one."""
    shape, out = out.shape, _fit_ndim(out, len(one.into))
    piece = piece.reshape(one.into)
    inside: Any = True
    if len(one.pairs) < len(one.at):
        got = np.zeros(len(one.at), dtype=np.int32)
        got[[r for _, r in one.pairs]] = 1
        inside = wire.own_row(got) > 0
    at = wire.own_row(one.at)
    part = one.is_unpadded and one.into != out.shape
    starts = [at[d] for d in range(out.ndim)]
    old = lax.dynamic_slice(out, starts, one.into) if part else out
    if not one.is_unpadded:
        extent = wire.own_row(one.extent)
        for d, n in enumerate(out.shape):
            here = np.arange(n, dtype=np.int32) - at[d]
            piece = jnp.take(piece, jnp.clip(here, 0, one.into[d] - 1), axis=d)
            mine = (here >= 0) & (here < extent[d])
            inside = inside & mine.reshape(*(n if k == d else 1 for k in range(out.ndim)))
    if one.fold and one.source:
        piece = carry_bits(reducer(one.fold)(restore_dtype(old, dtype), restore_dtype(piece, dtype)))
    new = piece if inside is True else jnp.where(inside, piece, old)
    return (lax.dynamic_update_slice(out, new, starts) if part else new).reshape(shape)
