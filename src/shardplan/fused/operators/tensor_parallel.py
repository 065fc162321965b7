"""All-gather + GEMM and GEMM + reduce-scatter: what tensor parallelism does whose sequence is cut, and their gradients.

`gather_multiply` has the rows of all ranks times the own columns of b: rows go to all ranks, and are multiplied as they
come. `multiply_scatter` has the sum of all ranks' products, of which every rank gets its rows: blocks of addends, f32,
go to their rank, which adds them up as they come, in a fixed order. Each is the gradient of the other one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from shardplan.errors import optional
from shardplan.fused.calls.agreement import ALL_BACK, CallKind, Facts, agree_on_call, check_alike
from shardplan.fused.calls.instance import PutStep, ReadStep
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.kernels.vectors import sum_dtype
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.operators.moving import BlockMove
from shardplan.fused.tiles.shapes import BlockCuts, splits, tile_sizes

if TYPE_CHECKING:
    import torch

GATHER, SCATTER = "all_gather_gemm", "gemm_reduce_scatter"
LEAST = 64  # rows of a tile, as those of `gemm`
_FACTS = ("rows", "width", "splits", "dtype", "backward", "even")
_KINDS = {
    GATHER: CallKind(GATHER, _FACTS, ("width", "splits", "dtype", "backward", "even")),
    SCATTER: CallKind(SCATTER, _FACTS, ("rows", "width", "splits", "dtype", "backward")),
}


def _cuts_of(op: str, said: Sequence[Facts]) -> BlockCuts:
    """Who sends what, given what all ranks said; raises `HeapMismatch` where they differ."""
    check_alike(op, said, "backward", ALL_BACK)
    first, rows = said[0], [each["rows"] for each in said]
    if op == SCATTER:
        heights = tuple(first["splits"] or tile_sizes(rows[0], len(said)))
        return BlockCuts("rows", (heights,) * len(said), first["width"])
    if first["even"] and first["splits"] is None:
        check_alike(op, said, "rows", "as many on every rank, or splits on all")
    if first["splits"] not in (None, rows):
        raise HeapMismatch(f"{op}: splits {first['splits']}, but ranks have {rows} rows")
    return BlockCuts("whole", (tuple(rows),), first["width"])


def _agree(
    asked: CallContext, op: str, a: torch.Tensor, b: torch.Tensor, parts: Sequence[int] | None, back: bool
) -> BlockMove:
    asked.check_product(op, a, b)
    whole = a.shape[0] if op == SCATTER else None
    given = splits(f"{op}: splits", parts, asked.heap.ranks, whole)
    width = a.shape[1] if op == GATHER else b.shape[1]
    facts: tuple[Hashable, ...] = (
        a.shape[0], width, None if given is None else tuple(given), a.dtype, asked.backward, asked.even and not back,
    )  # fmt: skip
    dtype = a.dtype if op == GATHER else sum_dtype(a)

    def make(said: Sequence[Facts], varying: bool) -> BlockMove:
        return BlockMove.of(asked, op, _cuts_of(op, said), dtype, least=LEAST)

    return agree_on_call(asked.heap, _KINDS[op], facts, asked.seconds, make)


def gather_multiply(
    asked: CallContext, a: torch.Tensor, b: torch.Tensor, parts: Sequence[int] | None = None, back: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all ranks, of which this one has a [M_r, K], times b [K, N], and these rows: [M, N], [M, K].

    `parts`, the rows of all ranks, say where they differ. b may have other columns on every rank. Collective; raises
    `TypingError` where operands do not fit, `HeapMismatch` where ranks differ, and as `FusedInstance.run`.
    """
    found, rank = _agree(asked, GATHER, a, b, parts, back), asked.heap.rank
    if asked.kernels is not None:
        return asked.kernels.gather_multiply(asked.seconds, a, b, found.cuts)
    torch = optional("torch", "torch")
    out = torch.empty(found.cuts.result(rank)[0], b.shape[1], dtype=a.dtype)
    begin = found.cuts.shape().boxes[rank][rank][0][0]

    def put(step: PutStep) -> None:
        rows = found.own_rows(step, rank)
        step.view.copy_(a[rows])
        if step.to == rank:  # the last one of all: others are on their way
            torch.mm(a[rows], b, out=out[slice(*step.box[0])])

    def read(step: ReadStep) -> None:
        if step.box[0][0] != begin or not len(a):
            torch.mm(step.view, b, out=out[slice(*step.box[0])])

    return out, found.run_tiles(asked, put, read=read).clone()


def multiply_scatter(
    asked: CallContext, a: torch.Tensor, b: torch.Tensor, parts: Sequence[int] | None = None, back: bool = False
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of a [M, K_r] times b [K_r, N]: [M_r, N].

    Rows are cut by `parts`, the same on all ranks, or by the tiling rule. Addends are f32 (of f64 f64), rounded once.
    Collective; raises as `gather_multiply`.
    """
    found, rank = _agree(asked, SCATTER, a, b, parts, back), asked.heap.rank
    if asked.kernels is not None:
        return asked.kernels.multiply_scatter(asked.seconds, a, b, found.cuts)
    torch, wide = optional("torch", "torch"), sum_dtype(a)
    total = torch.zeros(found.cuts.counts[0][rank], b.shape[1], dtype=wide)

    def put(step: PutStep) -> None:
        torch.mm(a[found.own_rows(step, rank)].to(wide), b.to(wide), out=step.view)

    def read(step: ReadStep) -> None:
        total.add_(step.view)

    found.run_tiles(asked, put, read=read)
    return total.to(a.dtype)


def gather_multiply_backward(
    asked: CallContext, g: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, parts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a and b of `gather_multiply`, given that of its result and the rows of all ranks."""
    return multiply_scatter(asked, g.contiguous(), b.t().contiguous(), parts, True), rows.t() @ g


def multiply_scatter_backward(
    asked: CallContext, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor, parts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a and b of `multiply_scatter`, given that of its result."""
    da, whole = gather_multiply(asked, g.contiguous(), b.t().contiguous(), parts, True)
    return da, a.t() @ whole
