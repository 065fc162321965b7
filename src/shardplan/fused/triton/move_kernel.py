"""The kernel of an all-to-all of boxes: rows and columns of a matrix, copied to where a peer reads them."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.words import PUT, WIDE, enter, place, put, turn


@triton.jit(do_not_specialize=["rank0", "polls", "state"])
def move_kernel(
    table,
    rows,
    begin,
    state,
    rank0,
    polls,
    g,
    length,
    programs: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    aligned: tl.constexpr,
):
    """Copy boxes of g [rows, length].

    A PUT says rows (5, 6), columns (7, 8) and row length (9) of the result, and where in g the box begins: row (10)
    and column (11).
    """
    rank, k, last, epoch = enter(table, begin, state, rank0, programs)
    ok = 1
    while (k < last) & (ok != 0):
        row = rows + k * WIDE
        if tl.load(row) == PUT:
            m0, m1, n0, n1 = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
            there, left = tl.load(row + 9), tl.load(row + 11)
            if aligned:  # said here: what a function is told of its arguments is lost
                n0, n1 = tl.multiple_of(n0, 16), tl.multiple_of(n1, 16)
                there, left = tl.multiple_of(there, 16), tl.multiple_of(left, 16)
            source = g + tl.load(row + 10) * length + left
            where = place(table, row, epoch, g, aligned) + m0 * there + n0
            for i0 in range(0, (m1 - m0).to(tl.int32), block_m):
                i = (i0 + tl.arange(0, block_m))[:, None].to(tl.int64)
                for j0 in range(0, (n1 - n0).to(tl.int32), block_n):
                    j = (j0 + tl.arange(0, block_n))[None, :]
                    inside = (i < m1 - m0) & (j < n1 - n0)
                    put(where + i * there + j, tl.load(source + i * length + j, mask=inside), inside)
        else:
            ok = turn(table, row, state, rank, epoch, polls)
        k += 1
