"""The leaves of what `reshard` is given, each with its end, and who moves it: a plan, a tracer's rule, the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
from jax._src.array import ArrayImpl  # pyright: ignore[reportMissingImports]
from jax.core import Tracer  # pyright: ignore[reportMissingImports]
from jax.experimental.layout import Format  # pyright: ignore[reportMissingImports]
from jax.sharding import NamedSharding, PartitionSpec, Sharding  # pyright: ignore[reportMissingImports]

from shardplan.core.shardings import type_of
from shardplan.errors import BackendError, Infeasible, LayoutError
from shardplan.execution.jax.bits import carrier
from shardplan.hardware.units import limit_of
from shardplan.interop.jax.eager_move import JaxMove, move_together, reshard_array
from shardplan.interop.jax.primitive import bind_reshard


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the pytree, and what is asked of it."""

    x: Any
    sharding: Any  # where it goes; None: where it is, or on the default device
    source: Any  # the sharding that it has, where it is said
    donate: bool
    may_alias: bool | None
    form: Any = None  # a `Format`, where a layout of memory is said

    @property
    def is_traced(self) -> bool:
        """Whether it stands for an array in a function that JAX transforms or compiles."""
        return isinstance(self.x, Tracer)

    @property
    def is_placed(self) -> bool:
        """Whether it is an array on devices."""
        return isinstance(self.x, jax.Array) and not self.is_traced

    @property
    def key(self) -> bool:
        """Whether it is an array of random keys, whose elements are arrays of integers."""
        dtype = getattr(self.x, "dtype", None)
        return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)

    @property
    def stays(self) -> bool:
        """Whether the array is already what is asked for."""
        return self.is_placed and (self.sharding is None or (self.x.sharding == self.sharding and self.x.committed))


def leaves_of(x: Any, sharding: Any, source: Any, donate: Any, may_alias: Any) -> tuple[list[Leaf], Any]:
    """Return the leaves of a pytree, with what is asked of each, and the tree to put them back into."""
    found, tree = jax.tree.flatten(x)
    asked = {"sharding": sharding, "source": source, "donate": donate, "may_alias": may_alias}
    each = [_broadcast_prefix(name, prefix, x) for name, prefix in asked.items()]
    return [_leaf(*row) for row in zip(found, *each, strict=True)], tree


def _broadcast_prefix(name: str, prefix: Any, tree: Any) -> list[Any]:
    """What a prefix of a pytree says of every leaf."""
    out: list[Any] = []
    try:
        jax.tree.map(
            lambda said, part: out.extend([said] * len(jax.tree.leaves(part))),
            prefix,
            tree,
            is_leaf=lambda p: p is None,
        )
    except ValueError as error:
        raise LayoutError(
            f"reshard: {name} is no prefix of the arrays' pytree: {jax.tree.structure(prefix)} of "
            f"{jax.tree.structure(tree)}; legal is one value, or a pytree that ends where the other goes on"
        ) from error
    return out


def _leaf(x: Any, given: Any, source: Any, donate: bool, may_alias: bool | None) -> Leaf:
    if donate and may_alias:
        raise LayoutError("reshard: donate=True and may_alias=True; legal is one of them")
    form = given if isinstance(given, Format) else None
    end = given if form is None else form.sharding
    return Leaf(x, end_of(end, x), end_of(source, x), donate, may_alias, form)


def end_of(given: Any, x: Any) -> Any:
    """Return the sharding that is meant: by a spec, one of the mesh that is set; by a device, its own; None stays."""
    if given is None or isinstance(given, Sharding):
        return given
    if isinstance(given, jax.Device):
        return jax.sharding.SingleDeviceSharding(given)
    if isinstance(given, PartitionSpec):
        from jax._src.mesh import get_concrete_mesh  # pyright: ignore[reportMissingImports]

        mesh: Any = get_concrete_mesh()  # as device_put; jax.sharding.get_mesh() is refused while a function is traced
        if mesh.empty:
            raise BackendError(
                f"reshard: {given} names axes of no mesh; legal is a NamedSharding, or a PartitionSpec under "
                f"jax.set_mesh(mesh)"
            )
        return NamedSharding(mesh, given)
    raise LayoutError(
        f"reshard: {given!r} ({type(given).__name__}) is no place for an array; legal are a Sharding, a "
        f"PartitionSpec, a device, a Format, None, or a pytree of them"
    )


def move_all(leaves: Sequence[Leaf], memory_limit: int | None) -> list[Any]:
    """Return what the leaves become; an array that is named twice for one end is moved once."""
    first: dict[Any, int] = {}
    same = [first.setdefault(_identity(leaf, k), k) for k, leaf in enumerate(leaves)]
    chosen = {k: leaves[k] for k in first.values()}
    found = _reshard_each(chosen) if memory_limit is None else _reshard_within_limit(chosen, memory_limit)
    return [_finish_leaf(leaves[k], found[k]) for k in same]


def _identity(leaf: Leaf, number: int) -> Any:
    if not leaf.is_placed:
        return number
    return id(leaf.x), leaf.sharding, leaf.form, leaf.donate, leaf.may_alias


def _reshard_each(leaves: dict[int, Leaf]) -> dict[int, Any]:
    """Each by itself."""
    return {k: _reshard_leaf(leaf, None) for k, leaf in leaves.items()}


def _reshard_leaf(leaf: Leaf, memory_limit: int | None) -> Any:
    if leaf.is_traced:
        if leaf.donate:
            raise BackendError("reshard: donate=True of an array that is traced; legal is donate_argnums of jax.jit")
        if leaf.sharding is None:
            return leaf.x
        return _rewrap_keys(leaf, bind_reshard(_raw(leaf), leaf.sharding, leaf.source, memory_limit))
    if leaf.stays:
        return leaf.x
    if leaf.is_placed:
        return _rewrap_keys(leaf, reshard_array(_raw(leaf), leaf.sharding, memory_limit, leaf.donate))
    return jax.device_put(leaf.x, leaf.sharding, donate=leaf.donate, may_alias=leaf.may_alias)


def _reshard_within_limit(leaves: dict[int, Leaf], memory_limit: int) -> dict[int, Any]:
    """All under one limit: what is placed from the host comes last, and is room that the moves do not have."""
    traced = [leaf for leaf in leaves.values() if leaf.is_traced]
    if traced and len(leaves) > 1:
        raise BackendError(
            f"reshard: memory_limit={memory_limit} over {len(leaves)} arrays of which {len(traced)} are traced; legal "
            f"is one array, or a call outside jit"
        )
    laid = [leaf.form for leaf in leaves.values() if leaf.form is not None and leaf.form.layout is not None]
    if laid:
        raise BackendError(
            f"reshard: memory_limit={memory_limit} with the layout {laid[0].layout}, whose change no plan counts; "
            f"legal is its sharding here, and jax.device_put to the layout then"
        )
    if traced:
        return {k: _reshard_leaf(leaf, memory_limit) for k, leaf in leaves.items()}
    placed = {k: leaf for k, leaf in leaves.items() if leaf.is_placed and leaf.x.size}
    host = {k: leaf for k, leaf in leaves.items() if k not in placed}  # nothing moves, also of an empty array
    room = memory_limit - sum(map(_host_bytes, host.values()))
    if room < (1 if placed else 0):
        raise Infeasible(
            f"reshard within {memory_limit} bytes a device: the arrays placed from the host take {memory_limit - room}",
            memory_limit - room,
        )
    if len(placed) == 1:
        found = {k: _reshard_leaf(leaf, room) for k, leaf in placed.items()}
    else:
        moves = [JaxMove(_raw(leaf), leaf.sharding or leaf.x.sharding, leaf.donate) for leaf in placed.values()]
        found = dict(zip(placed, move_together(moves, room) if moves else [], strict=True))
        found = {k: leaf.x if leaf.stays else _rewrap_keys(leaf, found[k]) for k, leaf in placed.items()}
    return found | {k: _reshard_leaf(leaf, None) for k, leaf in host.items()}


def _host_bytes(leaf: Leaf) -> int:
    """The bytes that each device gets of what is placed from the host."""
    t = jax.typeof(leaf.x)
    if leaf.sharding is None or not t.size:
        return t.size * t.dtype.itemsize
    return type_of(t.shape, leaf.sharding, carrier(t.dtype)).local_bytes()


def _raw(leaf: Leaf) -> Any:
    """The array of numbers: of random keys, their data, with one dim more."""
    return jax.random.key_data(leaf.x) if leaf.key else leaf.x


def _rewrap_keys(leaf: Leaf, found: Any) -> Any:
    """The array of keys whose data were moved; of another array what was moved."""
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf.x)) if leaf.key else found


def _finish_leaf(leaf: Leaf, found: Any) -> Any:
    """The result in the layout asked for, and a copy where it may not share memory."""
    if leaf.form is not None and leaf.form.layout is not None:
        return jax.device_put(found, leaf.form)
    if leaf.may_alias is False and leaf.is_placed and _pointers(leaf.x) & _pointers(found):
        return jax.device_put(found, found.sharding, may_alias=False)
    return found


def _pointers(x: Any) -> set[int]:
    """Where the shards of an array lie in memory."""
    return set() if x.is_deleted() else {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


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
