"""`reshard`: JAX arrays to other shardings, by plans within a memory limit; a drop-in for `jax.device_put`.

Outside `jit` the source is the array's own sharding, and the meshes may differ in shape, order and devices
(`eager_move`). Inside `jit` a move becomes one `shard_map`, over a mesh with one axis per prime sub-axis, whose result
is constrained to the caller's sharding (`traced_move`). In explicit-sharding mode, and under a mesh set by
`jax.set_mesh`, JAX takes a `shard_map` over that very mesh only; sub-axes are then groups of it.

Plans are portable where a portable one exists: `ragged_all_to_all` does not run on every backend (XLA:CPU has none), so
an exchange over most of the mesh would become a round of permutes for each peer. Where the limit leaves nothing else,
it is taken.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
from jax._src.array import ArrayImpl  # pyright: ignore[reportMissingImports]
from jax.sharding import Sharding  # pyright: ignore[reportMissingImports]

from shardplan.hardware.units import limit_of
from shardplan.interop.jax.eager_move import reshard_array
from shardplan.interop.jax.leaves import leaves_of, move_all


def reshard(
    array: Any,
    sharding: Any,
    source: Any = None,
    memory_limit: int | str | None = None,
    donate: Any = False,
    may_alias: Any = None,
) -> Any:
    """Return arrays under other shardings, moved by the cheapest certified plan.

    Args:
        array: A jax array, inside `jit` a tracer; or a pytree of them. Numbers and numpy arrays are placed from the
            host, which moves nothing between devices: `jax.device_put` does that.
        sharding: As `jax.device_put` takes it: a `Sharding`, a `PartitionSpec` of the mesh that is set, a device, a
            `Format`, None (where it is, or on the default device), or a pytree of them that is a prefix of `array`.
            Inside `jit` a `NamedSharding` on the same devices in the same order, in explicit mode on the array's own
            mesh.
        source: The sharding that the array has, or a prefix, needed inside `jit` in auto mode, where a tracer carries
            none.
        memory_limit: Bytes, or their text, that a device may hold during the move, by the certificate: the arrays,
            which stay unless they are donated, the results and staging, over the whole pytree; inside `jit` of one.
        donate: Whether an array may be given up, or a prefix: its memory is freed as soon as the plan allows.
        may_alias: Whether a result may share memory with its array, or a prefix; None: where nothing is to be moved.

    Returns:
        The arrays, with exactly the shardings asked for; an array itself where it has its sharding. Differentiable in
        forward and reverse mode, and batched by `vmap`: a gradient is moved back, by a plan of its own.

    Raises:
        BackendError: No `source` where it is needed; meshes that cannot meet inside `jit`; a sum still to be made.
        LayoutError: A dim that is unconstrained or uneven, a sharding that names no axes, no prefix of the pytree.
        Infeasible: A limit that no plan keeps; `least_bytes` says which would do.

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> a = reshard(jax.numpy.arange(4), NamedSharding(mesh, PartitionSpec("x")))
    >>> tuple(a.sharding.spec), reshard(a, a.sharding) is a
    (('x',), True)
    """
    limit = limit_of("memory limit", memory_limit)
    if donate is False and may_alias is None and _is_plain_array(type(array)) and _is_sharding(type(sharding)):
        return reshard_array(array, sharding, limit)
    leaves, tree = leaves_of(array, sharding, source, donate, may_alias)
    return jax.tree.unflatten(tree, move_all(leaves, limit))


# Known once a type: an array on devices to a sharding is the usual call, and its cost is compared with device_put's.


@cache
def _is_plain_array(kind: type) -> bool:
    """Whether these are arrays of numbers on devices."""
    return issubclass(kind, ArrayImpl)


@cache
def _is_sharding(kind: type) -> bool:
    return issubclass(kind, Sharding)
