"""The kernel of an all-to-all of blocks: what is there already is put where it goes."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.memory_ops import arrive, begin_blocks, block, by_16, landing, put, serve


@triton.jit
def copy_tiles(
    source,
    length,
    target,
    there,
    high,
    wide,
    p,
    programs: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    adds: tl.constexpr,
):
    """Copy the program's tiles of a box between matrices whose rows are so long, or add them there."""
    across = tl.cdiv(wide, block_n)
    unit = p.to(tl.int64)
    while unit < tl.cdiv(high, block_m) * across:
        i = ((unit // across) * block_m + tl.arange(0, block_m))[:, None]
        j = ((unit % across) * block_n + tl.arange(0, block_n))[None, :]
        inside = (i < high) & (j < wide)
        x = tl.load(source + i * length + j, mask=inside)
        if adds:
            x += tl.load(target + i * there + j, mask=inside)
        put(target + i * there + j, x, inside)
        unit += programs


@triton.jit(do_not_specialize=["rank0", "polls"])
def move_kernel(
    table,
    cuts,
    spot,
    rank0,
    polls,
    g,
    columns,
    programs: tl.constexpr,
    ranks: tl.constexpr,
    span: tl.constexpr,
    form: tl.constexpr,
    sends: tl.constexpr,
    acked: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    aligned: tl.constexpr,
):
    """Copy the blocks of g [rows, columns] to where their ranks read them."""
    rank, p, epoch = begin_blocks(table, spot, rank0, programs)
    for step in range(ranks):
        to = serve(rank, step, ranks)
        m0, high, n0, wide, there, over, length = block(cuts, rank, to, columns, form, ranks, span)
        if aligned:  # said here: what a function is told of its arguments is lost
            n0, wide = by_16(n0), by_16(wide)
            over, length = by_16(over), by_16(length)
        where = landing(table, spot, to, epoch, g, aligned) + there * length + over
        copy_tiles(g + m0 * columns + n0, columns, where, length, high, wide, p, programs, block_m, block_n, False)
        arrive(table, spot, rank, to, epoch, programs)
