"""The second launch of blocks, which waits for them and reads them; and what says that they were read."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.memory_ops import (
    LINE,
    await_count,
    begin_blocks,
    block,
    by_16,
    end_blocks,
    landing,
    signal,
    word,
)
from shardplan.fused.triton.move_kernel import copy_tiles


@triton.jit(do_not_specialize=["rank0", "polls"])
def read_kernel(
    table,
    cuts,
    spot,
    rank0,
    polls,
    out,
    pitch,
    columns,
    programs: tl.constexpr,
    ranks: tl.constexpr,
    span: tl.constexpr,
    form: tl.constexpr,
    copies: tl.constexpr,
    adds: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    aligned: tl.constexpr,
):
    """Wait for the blocks of every rank, and copy a program's share of each to `out`: `pitch` numbers a rank here.

    The second launch of an epoch: it ends the program's epoch. Without `copies` the result stays where it lies.
    With `adds` blocks are rows that are added up in `out`, zeros at first.
    """
    rank, p, epoch = begin_blocks(table, spot, rank0, programs)
    out += (rank - rank0).to(tl.int64) * pitch
    ok = 1
    for step in range(ranks):
        source = (rank + ranks - step) % ranks
        if ok != 0:
            ok = await_count(table, spot, rank, source, epoch + 1, epoch, polls)
        if copies:
            if ok != 0:
                _, high, _, wide, there, over, length = block(cuts, source, rank, columns, form, ranks, span)
                if aligned:
                    over, length = by_16(over), by_16(length)
                at = there * length + over
                came = landing(table, spot, rank, epoch, out, aligned) + at
                if adds:
                    at = at * 0
                copy_tiles(came, length, out + at, length, high, wide, p, programs, block_m, block_n, adds)
    end_blocks(table, spot, rank, p, epoch)


@triton.jit(do_not_specialize=["rank0"])
def ack_kernel(table, spot, rank0, ranks: tl.constexpr):
    """Tell all ranks that the result of the epoch before is of no use any more: they may write it again."""
    rank, _, epoch = begin_blocks(table, spot, rank0, 1)
    if epoch > 0:
        for source in range(ranks):
            signal(word(table, source, tl.load(spot + 3) + (ranks + rank) * LINE))
