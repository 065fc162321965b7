"""The kernel of `gemv_all_reduce`, in one shot and in two: addends of a thin product, sums in the order of ranks."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

from shardplan.fused.triton.memory_ops import PUT, READ, WIDE, enter, place, put, turn


@triton.jit
def addends(
    a, x, m, inside, depth, lanes: tl.constexpr, wide: tl.constexpr, block_k: tl.constexpr, upcast: tl.constexpr
):
    """Return rows m of a [M, depth] times the columns of x [wide, depth]: f32 [len(m), lanes]; a is read once."""
    c = tl.arange(0, lanes)
    total = tl.zeros((m.shape[0], block_k if wide == 1 else lanes), tl.float32)
    for k0 in range(0, depth.to(tl.int32), block_k):
        k = k0 + tl.arange(0, block_k)
        block = tl.load(a + m[:, None] * depth + k[None, :], mask=inside[:, None] & (k[None, :] < depth), other=0.0)
        if wide == 1:
            vector = tl.load(x + k, mask=k < depth, other=0.0)
            total += block.to(tl.float32) * vector.to(tl.float32)[None, :]
        else:
            mask = (k[:, None] < depth) & (c[None, :] < wide)
            vectors = tl.load(x + c[None, :] * depth + k[:, None], mask=mask, other=0.0)
            if upcast:
                block, vectors = block.to(tl.float32), vectors.to(tl.float32)
            total = tl.dot(block, vectors, total, input_precision="ieee")
    if wide == 1:
        total = tl.sum(total, 1)[:, None]
    return total


@triton.jit(do_not_specialize=["rank0", "polls", "state"])
def gemv_kernel(
    table,
    rows,
    begin,
    state,
    rank0,
    polls,
    a,
    x,
    parts,
    out,
    height,
    programs: tl.constexpr,
    ranks: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    aligned: tl.constexpr,
    upcast: tl.constexpr,
):
    """Compute the tiles of a program: addends a [height, depth] times x [wide, depth], and sums of all ranks' addends.

    `lanes` are 1, or the 16 columns of a product in hardware, from `wide` on, which reads a's rows once for all; with
    `upcast`, which the interpreter of 3.9 wants of bf16, it is of f32. `parts` f32 and `out`, both [height, wide], are
    the rank's own, those of ranks in one launch one after another.
    Fields: rows (5, 6) of the whole; where they lie in the buffer, in numbers (7), and the length of a lane there (8);
    what to do (9): 0 compute addends and put them, 1 put addends from `parts`, 2 put sums that are in `out`; of a
    READ 3, sum lanes into `out`, and 4, copy sums there; a's and x's first number (10, 11), and the depth (12).
    """
    rank, k, last, epoch = enter(table, begin, state, rank0, programs)
    parts += (rank - rank0).to(tl.int64) * height * wide
    out += (rank - rank0).to(tl.int64) * height * wide
    c = tl.arange(0, lanes)
    ok = 1
    while (k < last) & (ok != 0):
        row = rows + k * WIDE
        kind = tl.load(row)
        if (kind == PUT) | (kind == READ):
            first, end, does = tl.load(row + 5).to(tl.int32), tl.load(row + 6), tl.load(row + 9)
            for m0 in range(first, end.to(tl.int32), block_m):
                m = m0 + tl.arange(0, block_m)
                inside = m < end
                mask = inside[:, None] & (c[None, :] < wide)
                own = m.to(tl.int64)[:, None] * wide + c[None, :]
                there = tl.load(row + 7) + (m - first).to(tl.int64)[:, None] * wide + c[None, :]
                if does == 0:
                    start, begins, depth = tl.load(row + 10), tl.load(row + 11), tl.load(row + 12)
                    if aligned:
                        start, begins = tl.multiple_of(start, 16), tl.multiple_of(begins, 16)
                        depth = tl.multiple_of(depth, 16)
                    z = addends(a + start, x + begins, m, inside, depth, lanes, wide, block_k, upcast)
                    put(parts + own, z, mask)
                    put(place(table, row, epoch, parts, False) + there, z, mask)
                elif does == 1:
                    z = tl.load(parts + own, mask=mask, other=0.0)
                    put(place(table, row, epoch, parts, False) + there, z, mask)
                elif does == 2:
                    y = tl.load(out + own, mask=mask, other=0.0)
                    put(place(table, row, epoch, out, False) + there, y, mask)
                elif does == 3:
                    came = place(table, row, epoch, parts, False) + there
                    z = tl.load(came, mask=mask, other=0.0)
                    for s in range(1, ranks):
                        z += tl.load(came + s * tl.load(row + 8), mask=mask, other=0.0)
                    put(out + own, z.to(out.dtype.element_ty), mask)
                else:
                    y = tl.load(place(table, row, epoch, out, False) + there, mask=mask, other=0.0)
                    put(out + own, y, mask)
            tl.debug_barrier()  # what one thread stored in `parts` and `out` another one loads for the next row
        else:
            ok = turn(table, row, state, rank, epoch, polls)
        k += 1
