"""The kernel of `grouped_gemm_all_to_all`: tiles of several experts' products, stored where their destination reads."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.embedding_kernel import INDEX
from shardplan.fused.triton.gemm_kernel import product
from shardplan.fused.triton.memory_ops import _sum_first, arrive, begin_blocks, block, landing, note, put, serve


@triton.jit(do_not_specialize=["rank0", "polls", "height", "capacity"])
def grouped_kernel(
    table,
    cuts,
    spot,
    rank0,
    polls,
    a,
    b,
    counts,
    height,
    depth,
    columns,
    capacity,
    like,
    programs: tl.constexpr,
    ranks: tl.constexpr,
    span: tl.constexpr,
    form: tl.constexpr,
    sends: tl.constexpr,
    acked: tl.constexpr,
    experts: tl.constexpr,
    numbers: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    aligned: tl.constexpr,
    upcast: tl.constexpr,
    described: tl.constexpr,
):
    """Compute the tiles of a program: rows of a [height, depth] by expert and destination, times b of their expert.

    `counts` int64 [ranks, experts, ranks] are those of all ranks, `cuts` their sums over experts, cut off at `capacity`
    rows of a result. More rows than that, or than a has, are noted and left out. `numbers` is a power of two from
    ranks * experts.
    """
    rank, p, epoch = begin_blocks(table, spot, rank0, programs)
    own = counts + rank * experts * ranks
    each = tl.arange(0, numbers)
    inside = each < ranks * experts
    if p == 0:
        comes = tl.sum(tl.load(counts + each.to(tl.int64) * ranks + rank, mask=inside, other=0), 0)
        has = tl.sum(tl.load(own + each, mask=inside, other=0), 0)
        if comes > capacity:
            note(table, rank, tl.load(spot + 5), rank * 0 + INDEX, comes - 1, epoch)
        elif has > height:
            note(table, rank, tl.load(spot + 5), rank * 0 + INDEX + 1, has - 1, epoch)
    done = rank * 0
    for step in range(ranks):
        to = serve(rank, step, ranks)
        _, high, _, wide, there, _, _ = block(cuts, rank, to, columns, form, ranks, span)
        where = landing(table, spot, to, epoch, like, aligned) + there * columns
        ahead, first = there * 0, there * 0  # rows of the block before an expert's, and of a
        for e in range(experts):
            row = own + e * ranks
            begin = first + _sum_first(row, to, 1, ranks, span)
            first += _sum_first(row, ranks, 1, ranks, span)
            n = tl.load(row + to)
            rows = tl.maximum(tl.minimum(tl.minimum(n, high - ahead), height - begin), 0)
            down, across = tl.cdiv(rows, block_m).to(tl.int32), tl.cdiv(columns, block_n)
            unit = (p + programs - done % programs) % programs
            done += down * across
            while unit < down * across:
                i0, j0 = (unit % down) * block_m, (unit // down) * block_n
                i, j = i0 + tl.arange(0, block_m), j0 + tl.arange(0, block_n)
                inside_i, inside_j = i < rows, j < wide
                z = product(
                    a, b, begin, e * depth.to(tl.int64), 0, i0, j0, rows, wide, depth, columns, block_m, block_n,
                    block_k, upcast, described,
                )  # fmt: skip
                target = where + (ahead + i)[:, None] * columns + j[None, :]
                put(target, z.to(like.dtype.element_ty), inside_i[:, None] & inside_j[None, :])
                unit += programs
            ahead += n
        arrive(table, spot, rank, to, epoch, programs)
