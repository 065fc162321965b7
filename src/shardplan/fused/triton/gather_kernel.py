"""The second launch of `all_gather_gemm`: rows of every rank, multiplied once they have come."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.gemm_kernel import product
from shardplan.fused.triton.memory_ops import await_count, begin_blocks, block, end_blocks, landing, put
from shardplan.fused.triton.move_kernel import copy_tiles


@triton.jit(do_not_specialize=["rank0", "polls"])
def gather_kernel(
    table,
    cuts,
    spot,
    rank0,
    polls,
    out,
    rows,
    height,
    b,
    depth,
    columns,
    programs: tl.constexpr,
    ranks: tl.constexpr,
    span: tl.constexpr,
    form: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    aligned: tl.constexpr,
    upcast: tl.constexpr,
):
    """Compute `out` [height, columns], the rows of all ranks times b [depth, columns], and keep `rows` [height, depth].

    Of ranks in one launch all three lie one after another. The own rows come first, which need no link.
    """
    rank, p, epoch = begin_blocks(table, spot, rank0, programs)
    here = (rank - rank0).to(tl.int64)
    b_row = here * depth
    out += here * height * columns
    rows += here * height * depth
    done = here * 0
    ok = 1
    for step in range(ranks):
        source = (rank + ranks - step) % ranks
        if ok != 0:
            ok = await_count(table, spot, rank, source, epoch + 1, epoch, polls)
        _, high, _, _, there, _, _ = block(cuts, source, rank, depth, form, ranks, span)
        came = landing(table, spot, rank, epoch, out, aligned) + there * depth
        across = tl.cdiv(columns, block_n).to(tl.int64)
        unit = (p + programs - done % programs) % programs
        units = tl.cdiv(high, block_m) * across
        done += units
        while (unit < units) & (ok != 0):
            i0, j0 = (unit // across) * block_m, (unit % across) * block_n
            i, j = i0 + tl.arange(0, block_m), j0 + tl.arange(0, block_n)
            inside_i, inside_j = i < high, j < columns
            z = product(
                came, b, done * 0, b_row, 0, i0, j0, high, columns, depth, columns, block_m, block_n, block_k, upcast,
                False,
            )  # fmt: skip
            where = out + (there + i)[:, None] * columns + j[None, :]
            put(where, z.to(out.dtype.element_ty), inside_i[:, None] & inside_j[None, :])
            unit += programs
        if ok != 0:
            copy_tiles(came, depth, rows + there * depth, depth, high, depth, p, programs, 16, 64, False)
    end_blocks(table, spot, rank, p, epoch)
