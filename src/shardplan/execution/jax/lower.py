"""What one device does in an op inside a `shard_map`: a native collective, the op's lowering, or its computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardplan.core.op import Op
from shardplan.core.ops.collective import Collective, moving
from shardplan.core.ops.compute import computing
from shardplan.core.tensor import TensorType
from shardplan.execution.jax.bits import carry_bits, restore_dtype
from shardplan.execution.jax.compute import compute
from shardplan.execution.jax.interpret import interpret
from shardplan.execution.jax.native import native
from shardplan.execution.jax.wire import JaxWire
from shardplan.execution.rounds import permute_rounds


def refusal(op: Op, types: Sequence[TensorType]) -> str | None:
    """Return why JAX cannot run an op on these types, or None."""
    moved = moving(op)
    if moved is None:
        return None if computing(op) else "it has no lowering to JAX"
    for t in (*types, *moved.infer(*types)):
        if t.dtype.startswith("c") and t.layout.reduction in ("max", "min"):
            return f"{t.layout.reduction} is not defined for {t.dtype}; legal is a real dtype"
    return None


def lower(op: Op, arrays: Sequence[Any], types: Sequence[TensorType], wire: JaxWire) -> list[Any]:
    """Return this device's shards of the results of an op, given those of its operands; all types are even."""
    local = computing(op)
    if local is not None:
        return compute(local, arrays, types, wire) if local.alone else interpret(local, arrays, types, wire)
    moved = moving(op)
    assert moved is not None  # checked before anything runs
    xla = native(moved)
    if xla is None:
        return interpret(moved, arrays, types, wire)
    if _group_size(moved, types) == 1:
        return list(arrays)
    found = xla.run(moved, [wire.varying(carry_bits(x) if xla.moves else x) for x in arrays], wire)
    return [restore_dtype(y, x.dtype) for x, y in zip(arrays, found, strict=True)]


def _group_size(op: Collective, types: Sequence[TensorType]) -> int:
    return math.prod(types[0].mesh.span(a).size for a in op.members(types[0]))


def moved_bytes(op: Op, *operands: TensorType) -> dict[int, int]:
    """Return the bytes that each device receives when JAX runs an op on even types, by id.

    It differs from `op.received_bytes` where XLA has no such collective: Reduce and Broadcast are all-reduces, an
    Exchange or a Send is padded permutes; where the last part of a chunked all-reduce overlaps the one before; and away
    from the root, where groups move their bytes as all others do.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import Broadcast
    >>> moved_bytes(Broadcast(("x",)), TensorType("f32", (6,), (None,), Mesh(x=3), root=("x",)))
    {0: 32, 1: 32, 2: 32}
    """
    moved, received, local = moving(op), 0, computing(op)
    if local is not None and not local.alone:
        return permute_rounds(local, operands).padded_received_bytes()
    if moved is not None:
        xla = native(moved)
        if xla is None:
            return permute_rounds(moved, operands).padded_received_bytes()
        received = xla.received(moved, operands, _group_size(moved, operands))
    return {d: received for t in (*operands, *op.infer(*operands)) for d in t.mesh.devices}
