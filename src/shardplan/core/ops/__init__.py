"""Every operation of the package, in the one table by which program text names them.

- `collective` `Collective`: what the ops that move or reduce share
- `grouped`   `Grouped`: those in groups over axes
- `movement`  those that move tiles inside groups: Slice, AllGather, AllToAll
- `general`   those that move boxes between any two layouts: Permute, Exchange, Send
- `reduction` those that make, reduce or spread partial and root values: ReduceScatter, AllReduce, Reduce, ...
- `compute`   `Compute`: what the ops that compute share
- `products`  products: Einsum
- `narrow`    products of 8 bits: Quantize, ScaledEinsum
- `arithmetic` expressions, sums along dims, new dims: Elementwise, ReduceDims, Expand
- `composed`  `Composed`: an op that says only its decomposition; Backward, its gradient
- `blocks`, `row_tiles`  a function of elements, or of rows, some of them at a time
- `placing`   those that place elements: Reshape, Pad, Crop, Cast
- `indexing`  those on positions: Gather, ScatterAdd, Write, Iota, Constant
- `layers`    those of a transformer, by decomposition: Softmax, LayerNorm, CrossEntropy, ...
- `attention` Attention: causal, in windows, of packed sequences
- `rotary`    Rotary, and how long contexts scale its angles
- `query_tiles`  attention a few rows of queries at a time
- `overlapped` `Overlapped`: an op that computes between its messages
- `ring`      attention whose keys and values go round, and its gradient: RingAttention, RingAttentionBackward
- `ring_rounds`, `zigzag`  the rounds of both, and the order of a sequence in which their tiles are even
- `routing`   TopK, and tokens in slots of experts: Dispatch, Combine, ...; Dropout
- `updates`   updates of parameters: Sgd, AdamW, Adafactor
- `opaque`    what an import keeps without knowing it: Opaque
- `bodies`    those with a program in them: Repeat, Together
- `fused`     a computation and its collective as one: GemmAllToAll, AllGatherGemm, GemmReduceScatter, GemvAllReduce,
                EmbeddingBagAllToAll
- `fused_forms`  what such a kernel has to know of its body

To add an op: one class in a file of this folder, and its name in `OPS`.
"""

from __future__ import annotations

from shardplan.core.op import Op
from shardplan.core.ops.arithmetic import Elementwise, Expand, ReduceDims
from shardplan.core.ops.attention import Attention
from shardplan.core.ops.bodies import Repeat, Together
from shardplan.core.ops.collective import Collective
from shardplan.core.ops.composed import Backward
from shardplan.core.ops.compute import Compute
from shardplan.core.ops.fused import AllGatherGemm, EmbeddingBagAllToAll, GemmAllToAll, GemmReduceScatter, GemvAllReduce
from shardplan.core.ops.general import Exchange, Permute, Send
from shardplan.core.ops.indexing import Constant, Gather, Iota, ScatterAdd, Write
from shardplan.core.ops.layers import (
    ClassSums,
    Concat,
    CrossEntropy,
    EmbeddingBag,
    LayerNorm,
    OneHot,
    RmsNorm,
    Softmax,
    Split,
    TargetCount,
)
from shardplan.core.ops.movement import AllGather, AllToAll, Slice
from shardplan.core.ops.narrow import Quantize, ScaledEinsum
from shardplan.core.ops.opaque import Opaque
from shardplan.core.ops.placing import Cast, Crop, Pad, Pin, Reshape
from shardplan.core.ops.products import Einsum, matmul
from shardplan.core.ops.reduction import AllReduce, Broadcast, Reduce, ReduceScatter, ToPartial
from shardplan.core.ops.ring import RingAttention, RingAttentionBackward
from shardplan.core.ops.rotary import Rotary
from shardplan.core.ops.routing import Combine, Dispatch, Dropout, FromSlots, TopK, ToSlots
from shardplan.core.ops.updates import Adafactor, AdamW, Sgd
from shardplan.core.registry import OPS

OPS.update(
    (op.name, op)
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
        Quantize,
        ScaledEinsum,
        Elementwise,
        ReduceDims,
        Reshape,
        Expand,
        Pad,
        Crop,
        Cast,
        Pin,
        Gather,
        ScatterAdd,
        Write,
        Iota,
        Constant,
        Softmax,
        LayerNorm,
        RmsNorm,
        OneHot,
        CrossEntropy,
        ClassSums,
        TargetCount,
        EmbeddingBag,
        Attention,
        RingAttention,
        RingAttentionBackward,
        Rotary,
        Concat,
        Split,
        TopK,
        ToSlots,
        FromSlots,
        Dispatch,
        Combine,
        Dropout,
        Sgd,
        AdamW,
        Adafactor,
        Backward,
        Opaque,
        Repeat,
        Together,
        GemmAllToAll,
        GemvAllReduce,
        EmbeddingBagAllToAll,
        AllGatherGemm,
        GemmReduceScatter,
    )
)

__all__ = [
    "OPS",
    "Adafactor",
    "AllGatherGemm",
    "AdamW",
    "Attention",
    "ClassSums",
    "Combine",
    "Dispatch",
    "Dropout",
    "FromSlots",
    "TopK",
    "ToSlots",
    "Concat",
    "CrossEntropy",
    "EmbeddingBag",
    "LayerNorm",
    "OneHot",
    "RingAttention",
    "RingAttentionBackward",
    "RmsNorm",
    "Rotary",
    "Sgd",
    "Softmax",
    "Split",
    "TargetCount",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Backward",
    "Broadcast",
    "Cast",
    "Collective",
    "Compute",
    "Constant",
    "Crop",
    "Einsum",
    "Elementwise",
    "Exchange",
    "Expand",
    "Gather",
    "Iota",
    "Op",
    "Opaque",
    "Pad",
    "Pin",
    "Permute",
    "Quantize",
    "Reduce",
    "ReduceDims",
    "ReduceScatter",
    "Reshape",
    "ScatterAdd",
    "EmbeddingBagAllToAll",
    "GemmAllToAll",
    "GemmReduceScatter",
    "GemvAllReduce",
    "Repeat",
    "ScaledEinsum",
    "Send",
    "Slice",
    "ToPartial",
    "Together",
    "Write",
    "matmul",
]
