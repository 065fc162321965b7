"""`gemm_all_to_all`: a product whose blocks go to their ranks tile by tile (paper, section 3.3), and its gradient.

`scatter` 0 sends blocks of rows, as experts return tokens: rank d gets, from every rank s, the rows that s has for it.
`scatter` 1 sends blocks of columns, as Ulysses does: rank d gets its columns of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from shardplan.errors import TypingError, optional, shown
from shardplan.fused.calls.agreement import agreed
from shardplan.fused.calls.instance import FusedInstance, PutStep, TileCall, instance
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.kernels.activation import activated, deactivated
from shardplan.fused.operators.asked import Asked, even, splits, starts
from shardplan.fused.operators.moving import moved
from shardplan.fused.operators.out import placed, refuse_out, stored
from shardplan.fused.tiles.events import TileBox
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape

if TYPE_CHECKING:
    import torch

NAME = "gemm_all_to_all"
LEAST = 64  # rows of a tile: below, packing b again for every tile costs more than it hides (measured, one core)


@dataclass(frozen=True, slots=True)
class GemmBlocks:
    """Who sends what: blocks of results forward, of gradients back, and boxes of the own product by destination."""

    forward: BlockShape
    back: BlockShape
    own: tuple[TileBox, ...]
    counts: tuple[tuple[int, ...], ...]
    columns: tuple[int, ...]


Counts = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def blocks(counts: Counts, columns: tuple[int, ...], scatter: int, rank: int) -> GemmBlocks:
    """Return the blocks; `counts[s][d]` are rows of a block (`scatter` 0, else `counts[s][0]`), `columns` the columns.

    >>> blocks(((1, 2), (3, 0)), (4, 4), 0, 1).own
    (((0, 3), (0, 4)), ((3, 3), (0, 4)))
    """
    ranks = range(len(counts))
    if scatter == 0:
        n = columns[0]
        rows = [starts(each) for each in counts]
        forward = BlockShape.rows(counts, n)
        back = tuple(tuple(((rows[s][d], rows[s][d + 1]), (0, n)) for s in ranks) for d in ranks)
        extents = tuple((rows[s][-1], n) for s in ranks)
        return GemmBlocks(forward, BlockShape(extents, back), tuple(back[d][rank] for d in ranks), counts, columns)
    rows_of, cols = starts([each[0] for each in counts]), starts(columns)
    there = tuple(tuple(((rows_of[s], rows_of[s + 1]), (0, columns[d])) for d in ranks) for s in ranks)
    forward = BlockShape(tuple((rows_of[-1], columns[d]) for d in ranks), there)
    back = tuple(tuple(((0, counts[s][0]), (cols[d], cols[d + 1])) for s in ranks) for d in ranks)
    extents = tuple((counts[s][0], cols[-1]) for s in ranks)
    return GemmBlocks(forward, BlockShape(extents, back), tuple(back[d][rank] for d in ranks), counts, columns)


def agree(
    asked: Asked,
    rows: int,
    columns: int,
    scatter: int,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
    dtype: str,
    out: int | None = None,
) -> GemmBlocks:
    """Return who sends what, told by all ranks to all; collective.

    Raises `HeapMismatch` where a rank's `send_splits` and another's `recv_splits` differ.
    """
    heap = asked.heap
    facts = {"N": columns, "scatter": scatter, "tiles": asked.tiles, "order": asked.order, "dtype": dtype, "out": out}
    facts |= {"rows": rows, "sends": send, "receives": receive}
    alike = ("N", "dtype", "scatter", "tiles", "order", "out", *(("sends",) if scatter else ()))
    said = agreed(heap, NAME, facts, alike, asked.seconds)
    if scatter == 0:
        counts = tuple(tuple(each["sends"] or even(each["rows"], heap.ranks)) for each in said)
        cols = (columns,) * heap.ranks
    else:
        counts = tuple((each["rows"],) for each in said)
        cols = tuple(send or even(columns, heap.ranks))
    for d, each in enumerate(said):
        for s, wanted in enumerate(each["receives"] or ()):
            if wanted != (found := counts[s][d if scatter == 0 else 0]):
                raise HeapMismatch(f"{NAME}: rank {d} wants {wanted} rows of rank {s}, which sends {found}")
    return blocks(counts, cols, scatter, heap.rank)


def checked(
    asked: Asked,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scatter: int,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
) -> tuple[list[int] | None, list[int] | None]:
    """Return checked splits; raises `TypingError` where operands do not fit."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        said = " and ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (a, b))
        raise TypingError(f"{NAME}: {said}; legal are [M, K] and [K, N] of one dtype")
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype != a.dtype):
        raise TypingError(f"{NAME}: bias {list(bias.shape)}; legal is [{b.shape[1]}] of the dtype of the operands")
    if scatter not in (0, 1):
        raise TypingError(f"{NAME}: scatter {shown(scatter)}; legal are 0, blocks of rows, and 1, blocks of columns")
    asked.placed(NAME, a, b, *([] if bias is None else [bias]))
    n = asked.heap.ranks
    sent = splits(f"{NAME}: send_splits", send, n, a.shape[0] if scatter == 0 else b.shape[1])
    return sent, splits(f"{NAME}: recv_splits", receive, n, None)


def forward(
    asked: Asked,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    scatter: int = 0,
    send_splits: Sequence[int] | None = None,
    recv_splits: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what all ranks computed for this one: of a [M, K] and b [K, N] the activation of a @ b + bias, in blocks.

    With `scatter` 0 the result is [sum(recv_splits), N], with 1 [rows of all ranks, N of this rank]. Splits are by the
    tiling rule where they are not given. A product is rounded once, at its store. With `out`, in a
    `SymmetricTensor` of the heap, the result is there, uncopied, until the next call that writes it. Collective;
    raises `TypingError` where operands do not fit, `HeapMismatch` where ranks differ, and as `FusedInstance.run`.
    """
    sent, received = checked(asked, a, b, bias, scatter, send_splits, recv_splits)
    activated(a[:0], activation)  # an unknown one is refused before anything is sent
    if asked.kernels is not None:
        refuse_out(NAME, out)
        who, varying = _agreed(asked, a, b, scatter, sent, received), bool(sent or received)
        return asked.kernels.gemm(asked, a, b, bias, activation, scatter, who.counts, who.columns, varying)
    found = _call(asked, a, b, scatter, sent, received, out)
    who = found.blocks
    exact = a.dtype.itemsize >= 4
    mine = who.forward.boxes[asked.heap.rank]
    ahead = [there[0][0] - own[0][0] for there, own in zip(mine, who.own, strict=True)]
    torch = optional("torch", "torch")

    def put(step: PutStep) -> None:
        first, last = (x - ahead[step.to] for x in step.box[0])
        if first == last:
            return
        rows, columns = a[first:last], b if scatter == 0 else b[:, slice(*who.own[step.to][1])]
        if bias is None and activation == "none":
            torch.mm(rows, columns, out=step.view)
            return
        z = rows @ columns if exact else rows.float() @ columns.float()
        if bias is not None:
            z += bias if scatter == 0 else bias[slice(*who.own[step.to][1])]
        step.view.copy_(activated(z, activation))

    return stored(NAME, found.made.run(found.call, put)["result"], out)


@dataclass(frozen=True, slots=True)
class GemmCall:
    """A call that all ranks agreed upon: its instance, its steps and its blocks."""

    made: FusedInstance
    call: TileCall
    blocks: GemmBlocks


def _agreed(
    asked: Asked,
    a: torch.Tensor,
    b: torch.Tensor,
    scatter: int,
    sent: list[int] | None,
    received: list[int] | None,
) -> GemmBlocks:
    """Who sends what, where a heap has its own kernels: remembered as `_call` does."""
    key = (NAME, "blocks", a.shape[0], b.shape[1], scatter, str(a.dtype), asked.tiles, asked.order)
    found: GemmBlocks | None = None if sent or received else asked.heap.kept.get(key)
    if found is None:
        found = agree(asked, a.shape[0], b.shape[1], scatter, sent, received, str(a.dtype))
        if not (sent or received):
            asked.heap.kept[key] = found
    return found


def _call(
    asked: Asked,
    a: torch.Tensor,
    b: torch.Tensor,
    scatter: int,
    sent: list[int] | None,
    received: list[int] | None,
    out: torch.Tensor | None = None,
) -> GemmCall:
    """What is to be done: agreed upon where the shapes are new, and always where splits are given, as data has them."""
    rows, columns, heap = a.shape[0], b.shape[1], asked.heap
    dtype = str(a.dtype)
    into = placed(NAME, heap, out)
    key = (NAME, rows, columns, scatter, dtype, asked.tiles, asked.order, into and into.offset)
    found: GemmCall | None = None if sent or received else heap.kept.get(key)
    if found is None:
        who = agree(asked, rows, columns, scatter, sent, received, dtype, into and into.offset)
        sizes = [box[0][1] - box[0][0] for row in who.forward.boxes for box in row]
        tiles = asked.many(sum(sizes) // len(sizes), LEAST)
        schedule = TileSchedule(order=asked.order, tiles=tiles)  # type: ignore[arg-type]
        made = instance(heap, NAME, schedule, dtype, asked.seconds, into)
        found = GemmCall(
            made, made.call(who.forward, who.forward, {"result": a.dtype}, varying=bool(sent or received)), who
        )
        if not (sent or received):
            heap.kept[key] = found
    found.made.ready()
    found.made.seconds = asked.seconds
    return found


def backward(
    asked: Asked,
    g: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scatter: int,
    send_splits: Sequence[int] | None,
    recv_splits: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of a, b and bias, given that of the result; collective.

    Blocks of g go back; what an activation saw is computed again. Gradients of b and bias are of this rank's rows.
    """
    sent, received = checked(asked, a, b, bias, scatter, send_splits, recv_splits)
    if asked.kernels is not None:
        who = _agreed(asked, a, b, scatter, sent, received)
    else:
        who = _call(asked, a, b, scatter, sent, received).blocks
    mine = [who.forward.boxes[s][asked.heap.rank] for s in range(asked.heap.ranks)]
    varying = bool(sent or received)
    dz = moved(asked, f"{NAME}_backward", who.back, who.back, g.contiguous(), mine, varying)
    if activation != "none":
        z = a.float() @ b.float() if a.dtype.itemsize < 4 else a @ b
        dz = deactivated(dz.to(z.dtype), z if bias is None else z + bias, activation).to(a.dtype)
    return dz @ b.t(), a.t() @ dz, None if bias is None else dz.sum(0)
