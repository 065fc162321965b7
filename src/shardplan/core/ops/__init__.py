"""Every operation, and the one table by which program text names them.

- `collective` `Collective`: what the ops that move or reduce share
- `movement`  those that move tiles inside groups: Slice, AllGather, AllToAll
- `general`   those that move boxes between any two layouts: Permute, Exchange, Send
- `reduction` those that make, reduce or spread partial and root values: ReduceScatter, AllReduce, Reduce, ...
- `compute`   those that compute: Einsum, Elementwise, ReduceDims

To add an op: one class in a file of this folder, and its name in `OPS`.
"""

from __future__ import annotations

from shardplan.core.op import Op
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.compute import Einsum, Elementwise, ReduceDims, matmul
from shardplan.core.ops.general import Exchange, Permute, Send
from shardplan.core.ops.movement import AllGather, AllToAll, Slice
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
