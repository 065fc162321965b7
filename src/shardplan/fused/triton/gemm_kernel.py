"""The kernel of `gemm_all_to_all`: a tile of a product, bias and activation, stored where its destination reads it."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.memory_ops import (
    arrive,
    await_count,
    begin_blocks,
    block,
    by_16,
    landing,
    put,
    rows_ahead,
    serve,
    stamp,
)

GROUP = tl.constexpr(8)  # rows of tiles whose columns follow each other: b's tiles stay in the cache
NONE, RELU, GELU, SILU = (tl.constexpr(k) for k in range(4))


@triton.jit
def activate(z, activation: tl.constexpr):
    """Return an activation of f32: 0 none, 1 relu, 2 gelu by erf, 3 silu."""
    if activation == RELU:
        z = tl.maximum(z, 0.0)
    elif activation == GELU:
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif activation == SILU:
        z = z / (1.0 + tl.exp(-z))
    return z


@triton.jit
def product(
    a,
    b,
    a_row,
    b_row,
    b_column,
    i0,
    j0,
    high,
    wide,
    depth,
    columns,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    upcast: tl.constexpr,
    described: tl.constexpr,
):
    """Return a tile of a product, f32 [block_m, block_n], from its row i0 and column j0 on, of `high` times `wide`.

    a [.., depth] has its first row at `a_row`; b [.., columns] at `b_row` and `b_column`. `described` ones are
    descriptors of tiles that the hardware fetches: of rows and columns beyond the product's it has what lies there,
    which nobody stores, and 0 beyond a's depth, so that b's depth must be a multiple of `block_k` or its end.
    """
    z = tl.zeros((block_m, block_n), tl.float32)
    if described:
        i, j, k = (a_row + i0).to(tl.int32), (b_column + j0).to(tl.int32), b_row.to(tl.int32)
        for k0 in range(0, depth, block_k):
            x, y = a.load([i, k0]), b.load([k + k0, j])
            if upcast:
                x, y = x.to(tl.float32), y.to(tl.float32)
            z = tl.dot(x, y, z, input_precision="ieee")
    else:
        i, j = i0 + tl.arange(0, block_m), j0 + tl.arange(0, block_n)
        inside_i, inside_j = i < high, j < wide
        a_at = a + a_row * depth + i[:, None] * depth
        b_at = b + b_row * columns + b_column + j[None, :]
        for k0 in range(0, depth, block_k):
            k = k0 + tl.arange(0, block_k)
            inside_k = k < depth
            x = tl.load(a_at + k[None, :], mask=inside_i[:, None] & inside_k[None, :], other=0.0)
            rows = k[:, None].to(tl.int64) * columns
            y = tl.load(b_at + rows, mask=inside_j[None, :] & inside_k[:, None], other=0.0)
            if upcast:
                x, y = x.to(tl.float32), y.to(tl.float32)
            z = tl.dot(x, y, z, input_precision="ieee")
    return z


@triton.jit(do_not_specialize=["rank0", "polls"])
def gemm_kernel(
    table,
    cuts,
    spot,
    rank0,
    polls,
    a,
    b,
    bias,
    stamps,
    depth,
    columns,
    like,
    programs: tl.constexpr,
    ranks: tl.constexpr,
    span: tl.constexpr,
    form: tl.constexpr,
    sends: tl.constexpr,
    acked: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    biased: tl.constexpr,
    activation: tl.constexpr,
    aligned: tl.constexpr,
    upcast: tl.constexpr,
    stamped: tl.constexpr,
    described: tl.constexpr,
):
    """Compute the tiles of a program: a [rows, depth] times b [depth, columns] of its rank, plus bias [columns].

    Results are of the dtype of `like`. Of ranks in one launch, a's rows, b and bias lie one after another; a and b are
    memory, or `described` as for `product`. Tiles of a block are taken `GROUP` rows at a time, column after column.
    With `upcast` products are of f32: the interpreter of 3.9 takes bf16's bits for integers. Where nothing is sent, the
    product lies in the own buffer as it is. With `stamped`, a block's most tiles, the time of a tile's stores is kept
    in `stamps` [ranks here, ranks, stamped].
    """
    rank, p, epoch = begin_blocks(table, spot, rank0, programs)
    first = rows_ahead(cuts, rank, rank0, form, ranks)
    b_row = (rank - rank0).to(tl.int64) * depth
    bias += (rank - rank0) * columns
    done = first * 0
    ok = 1
    for step in range(ranks):
        to = serve(rank, step, ranks)
        m0, high, n0, wide, there, over, length = block(cuts, rank, to, columns, form, ranks, span)
        if not sends:
            there, over, length = m0, n0, m0 * 0 + columns
        if aligned:  # said here: what a function is told of its arguments is lost
            n0, wide = by_16(n0), by_16(wide)
            over, length = by_16(over), by_16(length)
        down, across = tl.cdiv(high, block_m), tl.cdiv(wide, block_n)
        where = landing(table, spot, to if sends else rank, epoch, like, aligned) + there * length + over
        if acked:
            ok = await_count(table, spot, rank, ranks + to, epoch, epoch, polls)
        unit = (p + programs - done % programs) % programs
        done += down * across
        while (unit < down * across) & (ok != 0):
            group, rest = unit // (GROUP * across), unit % (GROUP * across)
            height = tl.minimum(GROUP, down - group * GROUP)
            i0 = (group * GROUP + rest % height) * block_m
            j0 = (rest // height) * block_n
            i, j = i0 + tl.arange(0, block_m), j0 + tl.arange(0, block_n)
            inside_m, inside_n = i < high, j < wide
            z = product(
                a, b, first + m0, b_row, n0, i0, j0, high, wide, depth, columns, block_m, block_n, block_k, upcast,
                described,
            )  # fmt: skip
            if biased:
                z += tl.load(bias + n0 + j, mask=inside_n, other=0.0).to(tl.float32)[None, :]
            z = activate(z, activation)
            put(
                where + i[:, None] * length + j[None, :],
                z.to(like.dtype.element_ty),
                inside_m[:, None] & inside_n[None, :],
            )
            if stamped:
                stamp(stamps + ((rank - rank0) * ranks + to) * stamped + unit, True)
            unit += programs
        if sends:
            arrive(table, spot, rank, to, epoch, programs)
