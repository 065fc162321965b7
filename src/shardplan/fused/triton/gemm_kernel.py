"""The kernel of `gemm_all_to_all`: a tile of a product, bias and activation, stored where its destination reads it."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.words import PUT, WIDE, enter, place, put, turn

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


@triton.jit(do_not_specialize=["rank0", "polls", "state"])
def gemm_kernel(
    table,
    rows,
    begin,
    state,
    rank0,
    polls,
    a,
    b,
    bias,
    depth,
    columns,
    programs: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    biased: tl.constexpr,
    activation: tl.constexpr,
    aligned: tl.constexpr,
    upcast: tl.constexpr,
):
    """Compute the tiles of a program: a [rows, depth] times b [depth, columns] of its rank, plus bias [columns].

    Of ranks in one launch, b and bias lie one after another. A PUT says rows (5, 6) and columns (7, 8) of the own
    product, row (9) and column (10) of the result, and the result's row length (11). With `upcast` products are of f32:
    the interpreter of 3.9 takes the bits of bf16 for integers.
    """
    rank, k, last, epoch = enter(table, begin, state, rank0, programs)
    b += (rank - rank0).to(tl.int64) * depth * columns
    bias += (rank - rank0) * columns
    ok = 1
    while (k < last) & (ok != 0):
        row = rows + k * WIDE
        if tl.load(row) == PUT:
            m0, n0 = tl.load(row + 5), tl.load(row + 7)
            n1, left, length = tl.load(row + 8), tl.load(row + 10), tl.load(row + 11)
            if aligned:  # said here: what a function is told of its arguments is lost
                n0, n1 = tl.multiple_of(n0, 16), tl.multiple_of(n1, 16)
                left, length = tl.multiple_of(left, 16), tl.multiple_of(length, 16)
            m = m0 + tl.arange(0, block_m)
            n = n0 + tl.arange(0, block_n)
            z = tl.zeros((block_m, block_n), tl.float32)
            inside_m, inside_n = m < tl.load(row + 6), n < n1
            a_at = a + m[:, None] * depth
            b_at = b + n[None, :]
            for k0 in range(0, depth, block_k):
                inner = k0 + tl.arange(0, block_k)
                x = tl.load(a_at + inner[None, :], mask=inside_m[:, None] & (inner[None, :] < depth), other=0.0)
                y = tl.load(
                    b_at + inner[:, None].to(tl.int64) * columns,
                    mask=inside_n[None, :] & (inner[:, None] < depth),
                    other=0.0,
                )
                if upcast:
                    x, y = x.to(tl.float32), y.to(tl.float32)
                z = tl.dot(x, y, z, input_precision="ieee")
            if biased:
                z += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
            z = activate(z, activation)
            where = place(table, row, epoch, a, aligned)
            where += (tl.load(row + 9) + tl.arange(0, block_m))[:, None] * length
            where += (left + tl.arange(0, block_n))[None, :]
            put(where, z.to(a.dtype.element_ty), inside_m[:, None] & inside_n[None, :])
        else:
            ok = turn(table, row, state, rank, epoch, polls)
        k += 1
