"""Every operation, and the one table by which program text names them.

- `base`      `Op` and `Collective`: what every operation must say of itself, and what collectives share
- `movement`  those that move data and add nothing: Slice, AllGather, AllToAll, Permute, Exchange, Send
- `reduction` those that make, reduce or spread partial and root values: ReduceScatter, AllReduce, Reduce, ...
- `compute`   those that compute: Einsum, Elementwise, ReduceDims

To add an op: one class in a file of this folder, and its name in `OPS`.
"""

from __future__ import annotations

from shardplan.core.ops.base import Collective, Op
from shardplan.core.ops.compute import Einsum, Elementwise, ReduceDims, matmul
from shardplan.core.ops.movement import AllGather, AllToAll, Exchange, Permute, Send, Slice
from shardplan.core.ops.reduction import AllReduce, Broadcast, Reduce, ReduceScatter, ToPartial

OPS: dict[str, type[Op]] = {
    op.name: op
    for op in (
        Slice,
        AllGather,
        AllToAll,
        Permute,
        Exchange,
        Send,
        ReduceScatter,
        AllReduce,
        Reduce,
        Broadcast,
        ToPartial,
        Einsum,
        Elementwise,
        ReduceDims,
    )
}

__all__ = [
    "OPS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "Einsum",
    "Elementwise",
    "Exchange",
    "Op",
    "Permute",
    "Reduce",
    "ReduceDims",
    "ReduceScatter",
    "Send",
    "Slice",
    "ToPartial",
    "matmul",
]
