"""The kernel of `embedding_bag_all_to_all`: bags of rows, summed and stored where the next layer reads them."""

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
    note,
    put,
    rows_ahead,
    serve,
)

INDEX = tl.constexpr(1 << 20)  # numbers of what is noted: from here on those of tables, below those of waits


@triton.jit
def bag_rows(tables, number, like, aligned: tl.constexpr):
    """Return a pointer to a table, whose addresses are int64 [tables]."""
    found = tl.load(tables + number).to(tl.pointer_type(like.dtype.element_ty))
    if aligned:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit(do_not_specialize=["rank0", "polls"])
def embedding_kernel(
    table,
    cuts,
    spot,
    rank0,
    polls,
    like,
    tables,
    lengths,
    indices,
    offsets,
    scale,
    dim,
    batch,
    ids,
    programs: tl.constexpr,
    ranks: tl.constexpr,
    span: tl.constexpr,
    form: tl.constexpr,
    sends: tl.constexpr,
    acked: tl.constexpr,
    block_b: tl.constexpr,
    block_d: tl.constexpr,
    weighted: tl.constexpr,
    mean: tl.constexpr,
    aligned: tl.constexpr,
):
    """Compute the tiles of a program: `block_b` bags of a table of its rank, table by table.

    `like` [1] has the tables' dtype; addresses `tables` and rows `lengths` are of all ranks here, one rank's after the
    other's. `offsets` are of `batch` bags a table, of `ids` indices in all. Columns of `cuts` are numbers: tables times
    `dim`. An index that is no row is left out, and noted. Where nothing is sent, bags lie in the own buffer.
    """
    rank, p, epoch = begin_blocks(table, spot, rank0, programs)
    first = rows_ahead(cuts, rank, rank0, form, ranks)
    done = first * 0
    ok = 1
    for step in range(ranks):
        to = serve(rank, step, ranks)
        m0, high, n0, wide, there, over, length = block(cuts, rank, to, 0, form, ranks, span)
        if not sends:
            there, over, length = m0, n0, wide
        if aligned:  # said here: what a function is told of its arguments is lost
            over, length = by_16(over), by_16(length)
        where = landing(table, spot, to if sends else rank, epoch, like, aligned) + there * length + over
        down, held = tl.cdiv(high, block_b), wide // dim
        if acked:
            ok = await_count(table, spot, rank, ranks + to, epoch, epoch, polls)
        unit = (p + programs - done % programs) % programs
        done += down * held
        while (unit < down * held) & (ok != 0):
            t = unit // down
            number = first + t
            limit = tl.load(lengths + number)
            weights = bag_rows(tables, number, like, aligned)
            b = (unit % down) * block_b + tl.arange(0, block_b)
            inside = b < high
            at = offsets + number * batch + m0 + b
            start = tl.maximum(tl.load(at, mask=inside, other=0).to(tl.int64), 0)
            many = tl.minimum(tl.load(at + 1, mask=inside, other=0).to(tl.int64), ids) - start
            bad, wrong = tl.zeros((block_b,), tl.int32), tl.zeros((block_b,), tl.int64)
            begin = where + t * dim
            if aligned:
                begin = tl.multiple_of(begin, 16)
            out = begin + b[:, None] * length
            for d0 in range(0, dim, block_d):
                column = d0 + tl.arange(0, block_d)
                total = tl.zeros((block_b, block_d), tl.float32)
                for k in range(tl.max(many, 0).to(tl.int32)):
                    more = k < many
                    index = tl.load(indices + start + k, mask=more, other=0).to(tl.int64)
                    out_of = more & ((index < 0) | (index >= limit))
                    bad, wrong = bad | out_of.to(tl.int32), tl.where(out_of, index, wrong)
                    more = more & (index >= 0) & (index < limit)
                    mask = more[:, None] & (column[None, :] < dim)
                    x = tl.load(weights + index[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)
                    if weighted:
                        x *= tl.load(scale + start + k, mask=more, other=0.0)[:, None]
                    total += x
                if mean:
                    total = total / tl.maximum(many, 1).to(tl.float32)[:, None]
                mask = inside[:, None] & (column[None, :] < dim)
                put(out + column[None, :], total.to(like.dtype.element_ty), mask)
            if tl.max(bad, 0) != 0:
                note(
                    table,
                    rank,
                    tl.load(spot + 5),
                    number + INDEX,
                    tl.sum(tl.where(tl.arange(0, block_b) == tl.argmax(bad, 0), wrong, 0), 0),
                    epoch,
                )
            unit += programs
        if sends:
            arrive(table, spot, rank, to, epoch, programs)
