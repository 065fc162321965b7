"""Exchange and Send inside a `shard_map`: the permutes of `rounds`, with the offsets of every device from tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardplan.core.tensor import TensorType
from shardplan.execution.jax.wire import JaxWire
from shardplan.execution.rounds import PermuteRound, rounds_of


def general_move(x: Any, t: TensorType, u: TensorType, chunks: int, wire: JaxWire) -> Any:
    """An Exchange or Send as padded permutes; the wire's mesh has the devices of `rounds_of(t, u)`, in their order."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    plan = rounds_of(t, u, chunks)
    out = wire.varying(jnp.zeros(u.local_shape(), x.dtype))
    x = wire.varying(x)
    if plan.kept is not None:
        out = _deliver(out, _window(x, plan.kept, wire), plan.kept, wire)
    for k, one in enumerate(plan.rounds):
        if k and chunks > 1:  # one round after the other: XLA may neither merge nor overlap them
            x, out = lax.optimization_barrier((x, out))
        out = _deliver(out, lax.ppermute(_window(x, one, wire), wire.axes, one.pairs), one, wire)
    return out


def _window(x: Any, one: PermuteRound, wire: JaxWire) -> Any:
    """The piece that this device sends, at index 0 of a window of the round's shape."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    if one.shape == x.shape and not one.start.any():
        return x
    if one.whole:  # a slice, which is cheaper than the gather below
        row = wire.own(one.start)
        return lax.dynamic_slice(x, [row[d] for d in range(x.ndim)], one.shape)
    row = wire.own(one.start)
    for d, n in enumerate(one.shape):  # the window may reach beyond the shard: what lies there is padding
        x = jnp.take(x, jnp.clip(row[d] + np.arange(n, dtype=np.int32), 0, x.shape[d] - 1), axis=d)
    return x


def _deliver(out: Any, piece: Any, one: PermuteRound, wire: JaxWire) -> Any:
    """`out` with the piece that this device got, where it got one."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    got = np.zeros(len(one.at), dtype=np.int32)
    got[[r for _, r in one.pairs]] = 1
    active = wire.own(got) > 0
    at = wire.own(one.at)
    if one.whole:
        starts = [at[d] for d in range(out.ndim)]
        now = lax.dynamic_slice(out, starts, one.shape)  # what a device that gets nothing writes back
        return lax.dynamic_update_slice(out, jnp.where(active, piece, now), starts)
    extent = wire.own(one.extent)
    inside = active
    for d, n in enumerate(out.shape):
        here = np.arange(n, dtype=np.int32) - at[d]
        piece = jnp.take(piece, jnp.clip(here, 0, one.shape[d] - 1), axis=d)
        mine = (here >= 0) & (here < extent[d])
        inside = inside & mine.reshape(*(n if k == d else 1 for k in range(out.ndim)))
    return jnp.where(inside, piece, out)
