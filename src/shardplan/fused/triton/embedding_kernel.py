"""The kernel of `embedding_bag_all_to_all`: bags of rows, summed and stored where the next layer reads them."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.words import PUT, WIDE, enter, place, put, turn


@triton.jit
def bag_rows(tables, number, like, aligned: tl.constexpr):
    """Return a pointer to a table, whose addresses are int64 [tables]."""
    found = tl.load(tables + number).to(tl.pointer_type(like.dtype.element_ty))
    if aligned:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit(do_not_specialize=["rank0", "polls", "state"])
def embedding_kernel(
    table,
    rows,
    begin,
    state,
    rank0,
    polls,
    like,
    tables,
    indices,
    offsets,
    scale,
    dim,
    batch,
    programs: tl.constexpr,
    block_b: tl.constexpr,
    block_d: tl.constexpr,
    weighted: tl.constexpr,
    mean: tl.constexpr,
    aligned: tl.constexpr,
):
    """Compute the tiles of a program: bags of all tables of its rank for some of the batch, table by table.

    `like` [1] has the tables' dtype. A PUT says bags (5, 6) of the batch, the rank's first table (7) and the number of
    its tables (8) among `tables`, the first bag's place in the result (9), the result's column of the first table (10),
    and the result's row length (11), both in numbers. `offsets` are of `batch` bags a table, table after table.
    """
    rank, k, last, epoch = enter(table, begin, state, rank0, programs)
    ok = 1
    while (k < last) & (ok != 0):
        row = rows + k * WIDE
        if tl.load(row) == PUT:
            where = place(table, row, epoch, like, aligned)
            first, end, number = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
            left, length = tl.load(row + 10), tl.load(row + 11)
            if aligned:
                left, length = tl.multiple_of(left, 16), tl.multiple_of(length, 16)
            d = tl.arange(0, block_d)
            for t in range(tl.load(row + 8).to(tl.int32)):
                weights = bag_rows(tables, number + t, like, aligned)
                for b0 in range(first.to(tl.int32), end.to(tl.int32), block_b):
                    bag = b0 + tl.arange(0, block_b)
                    inside = bag < end
                    at = offsets + (number + t) * batch + bag
                    start = tl.load(at, mask=inside, other=0)
                    many = tl.load(at + 1, mask=inside, other=0) - start
                    out = where + (tl.load(row + 9) + bag - first)[:, None] * length + left + t * dim
                    for d0 in range(0, dim, block_d):
                        column = d0 + d
                        total = tl.zeros((block_b, block_d), tl.float32)
                        for j in range(tl.max(many, 0).to(tl.int32)):
                            more = j < many
                            index = tl.load(indices + start + j, mask=more, other=0)
                            mask = more[:, None] & (column[None, :] < dim)
                            x = tl.load(weights + index[:, None] * dim + column[None, :], mask=mask, other=0.0)
                            x = x.to(tl.float32)
                            if weighted:
                                x *= tl.load(scale + start + j, mask=more, other=0.0)[:, None]
                            total += x
                        if mean:
                            total = total / tl.maximum(many, 1).to(tl.float32)[:, None]
                        mask = inside[:, None] & (column[None, :] < dim)
                        put(out + column[None, :], total.to(like.dtype.element_ty), mask)
        else:
            ok = turn(table, row, state, rank, epoch, polls)
        k += 1
