"""`embedding_bag_all_to_all`: bags of the tables of a rank, for the whole batch, to the ranks of the batch.

The paper's operator (section 3.2) for recommendation models: tables are sharded, the batch behind them is, too. Results
lie as the next layer reads them: [bags of this rank, tables of all ranks, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardplan.errors import TypingError, optional
from shardplan.fused.calls.agreement import agreed
from shardplan.fused.calls.instance import FusedInstance, PutStep, SignalStep, TileCall, TileStep, WaitStep, instance
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.kernels.bags import TILE, BagCall, BagKernel
from shardplan.fused.operators.asked import Asked, even, splits, starts
from shardplan.fused.operators.moving import moved
from shardplan.fused.operators.out import placed, refuse_out, stored
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape

if TYPE_CHECKING:
    import torch

NAME = "embedding_bag_all_to_all"
LEAST = 1024  # bags of a tile: smaller ones cost 1.2 to 1.3 times (measured, one core)


def _checked(asked: Asked, tables: Sequence[torch.Tensor], dim: int, dtype: torch.dtype, batch: int) -> None:
    if any(t.ndim != 2 or t.shape[1] != dim or t.dtype != dtype for t in tables):
        raise TypingError(f"{NAME}: tables {[list(t.shape) for t in tables]}; legal are [R, {dim}] of one dtype")
    if batch < 0:
        raise TypingError(f"{NAME}: a batch of {batch}; legal are integers from 0")


def blocks(tables: Sequence[int], batches: Sequence[int]) -> tuple[BlockShape, BlockShape]:
    """Return who sends what, forward and back, of so many tables and bags a rank.

    >>> blocks([1, 2], [4, 3])[0].boxes[1]
    (((0, 4), (1, 3)), ((0, 3), (1, 3)))
    """
    at, bag = starts(tables), starts(batches)
    ranks = range(len(tables))
    there = tuple(tuple(((0, batches[d]), (at[s], at[s + 1])) for d in ranks) for s in ranks)
    back = tuple(tuple(((bag[d], bag[d + 1]), (0, tables[s])) for s in ranks) for d in ranks)
    return (
        BlockShape(tuple((n, at[-1]) for n in batches), there),
        BlockShape(tuple((bag[-1], n) for n in tables), back),
    )


BagKey = tuple[int, int, int, str, tuple[int, ...], tuple[int, ...]]


class BagOperands:
    """A call's operands, and what all ranks said of theirs."""

    def __init__(
        self,
        asked: Asked,
        tables: Sequence[torch.Tensor],
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        mode: str,
        batch: int,
        table_counts: Sequence[int] | None,
        batch_splits: Sequence[int] | None,
        out: torch.Tensor | None = None,
    ) -> None:
        """Check and agree; collective where the shapes are new."""
        heap = asked.heap
        first = tables[0] if tables else None
        self.dim = 0 if first is None else first.shape[1]
        self.dtype = None if first is None else first.dtype
        if first is not None:
            _checked(asked, tables, self.dim, first.dtype, batch)
        given = splits(f"{NAME}: batch_splits", batch_splits, heap.ranks, batch)
        counts = splits(f"{NAME}: table_counts", table_counts, heap.ranks, None)
        asked.placed(NAME, *tables, indices, offsets, *([] if weights is None else [weights]))
        self.call = BagCall(tables, indices, offsets, weights, mode, batch, NAME)
        if asked.kernels is None:
            try:
                self.call.check(NAME)
            except TypingError as error:  # of the data, so the other ranks do not see it: told to them
                heap.header.fail(str(error))
                raise
        tiles = asked.many(max(1, batch // heap.ranks), LEAST)
        into = placed(NAME, heap, out) if asked.kernels is None else refuse_out(NAME, out)
        key = (len(tables), batch, self.dim, str(self.dtype), tuple(given or ()), tuple(counts or ()))
        said = heap.kept.get((NAME, key, tiles, asked.order, into and into.offset))
        if said is None:
            said = self._agreed(asked, key, given, counts, tiles, into and into.offset)
            said = (*said, *blocks(*said[:2]))
            heap.kept[NAME, key, tiles, asked.order, into and into.offset] = said
        self.key = key
        self.held, self.batches, self.dim, self.dtype, self.forward, self.back = said
        if asked.kernels is None:
            schedule = TileSchedule(order=asked.order, tiles=tiles)  # type: ignore[arg-type]
            self.made: FusedInstance = instance(heap, NAME, schedule, "", asked.seconds, into)
            self.tiled: TileCall = self.made.call(key, self.forward, {"result": self.dtype}, (self.dim,))

    def _agreed(
        self,
        asked: Asked,
        key: BagKey,
        given: list[int] | None,
        counts: list[int] | None,
        tiles: int,
        out: int | None,
    ) -> tuple[list[int], list[int], int, torch.dtype]:
        """Tables and bags of every rank, dim and dtype; collective."""
        tables, batch = key[:2]
        facts: dict[str, Any] = {"tables": tables, "batch": batch, "splits": given, "counts": counts}
        facts |= {"dim": self.dim, "dtype": str(self.dtype), "tiles": tiles, "order": asked.order, "out": out}
        alike = ("batch", "splits", "counts", "tiles", "order", "out")
        said = agreed(asked.heap, NAME, facts, alike, asked.seconds)
        dim, dtype = self._types(said)
        held = [each["tables"] for each in said]
        if counts is not None and counts != held:
            raise HeapMismatch(f"{NAME}: table_counts {counts}, but ranks hold {held}")
        return held, given or even(batch, asked.heap.ranks), dim, dtype

    def _types(self, said: list[dict[str, Any]]) -> tuple[int, torch.dtype]:
        """Dim and dtype of the tables, which a rank without tables hears from the others."""
        torch = optional("torch", "torch")
        types = {(each["dim"], each["dtype"]) for each in said if each["dtype"] != "None"}
        if len(types) != 1:
            raise HeapMismatch(
                f"{NAME}: tables of {sorted(types) or 'no rank'}; legal are one dim and dtype on all ranks"
            )
        dim, name = types.pop()
        return dim, getattr(torch, name.removeprefix("torch."))


def forward(
    asked: Asked,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
    mode: str = "sum",
    batch: int = 0,
    table_counts: Sequence[int] | None = None,
    batch_splits: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the bags of all tables for the batch of this rank: [B_r, tables of all ranks, D].

    `offsets` [T_r * B + 1] are table-major: bag k of table t is `indices[offsets[t * B + k] : offsets[t * B + k + 1]]`,
    of the `batch` B of all ranks. `mode` is `sum` or `mean`, by the bag's length; an empty bag is 0. A rank may have no
    tables. With `out`, in a `SymmetricTensor` of the heap, the result is there, uncopied, until the next call that
    writes it. Collective; raises `TypingError` where operands do not fit or an index is no row, `HeapMismatch` where
    ranks differ, and as `FusedInstance.run`.
    """
    got = BagOperands(asked, tables, indices, offsets, weights, mode, batch, table_counts, batch_splits, out)
    if asked.kernels is not None:
        assert got.dtype is not None
        c, given = got.call, (mode, got.held, got.batches, got.dim, got.dtype)
        return asked.kernels.bags(asked, c.tables, c.indices, c.offsets, c.weights, *given)
    rank, bag = asked.heap.rank, starts([extents[0] for extents in got.forward.extents])

    fits = BagKernel.fits(got.call)

    def put(step: PutStep) -> None:
        first, last = step.box[0]
        if last > first and tables and fits:
            _all_at_once(got, [step], bag, rank)
        elif last > first and tables:
            got.call.store(bag[step.to] + first, bag[step.to] + last, step.view)

    def ahead(steps: Sequence[TileStep]) -> int:
        begun = next((k for k, step in enumerate(steps) if isinstance(step, WaitStep)), len(steps))
        _all_at_once(got, steps[:begun], bag, rank)
        return begun

    found = got.made.run(got.tiled, put, ahead=ahead if fits and asked.heap.net is None else None)["result"]
    return stored(NAME, found, out)


def _all_at_once(got: BagOperands, steps: Sequence[Any], bag: Sequence[int], rank: int) -> None:
    """All puts and their signals in one call of the C++ kernel."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    for step in steps:
        if isinstance(step, PutStep):
            first, last = (bag[step.to] + x for x in step.box[0])
            rows.append((first, last, step.view.data_ptr(), 0, 0, 0))
        elif isinstance(step, SignalStep):
            rows[-1] = (*rows[-1][:3], step.address, step.first, step.step)
    wide = got.forward.extents[rank][1] * got.dim
    BagKernel(got.call, wide, got.dim).store(np.array(rows, TILE), got.made.epoch)


def backward(
    asked: Asked,
    g: torch.Tensor,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: str,
    batch: int,
    table_counts: Sequence[int] | None,
    batch_splits: Sequence[int] | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return the gradients of the tables, dense, and of the weights, given that of the result; collective."""
    got = BagOperands(asked, tables, indices, offsets, weights, mode, batch, table_counts, batch_splits)
    mine = [got.forward.boxes[s][asked.heap.rank] for s in range(asked.heap.ranks)]
    came = moved(asked, f"{NAME}_backward", got.key, got.back, g.contiguous(), mine)
    return got.call.gradients(came, weights is not None)
