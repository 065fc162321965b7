"""`embedding_bag_all_to_all`: bags of the tables of a rank, for the whole batch, to the ranks of the batch.

The paper's operator (section 3.2) for recommendation models: tables are sharded, the batch behind them is, too. Results
lie as the next layer reads them: [bags of this rank, tables of all ranks, D].
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardplan.errors import TypingError, optional
from shardplan.fused.calls.agreement import ALL_BACK, CallKind, Facts, agree_on_call, check_alike
from shardplan.fused.calls.instance import PutStep, SignalStep, TileStep, WaitStep
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.kernels.bags import TILE, BagCall, BagKernel
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.operators.moving import BlockMove
from shardplan.fused.operators.out import find_out_tensor, result_or_out
from shardplan.fused.tiles.shapes import BlockCuts, splits, starts, tile_sizes

if TYPE_CHECKING:
    import torch

NAME = "embedding_bag_all_to_all"
LEAST = 1024  # bags of a tile: smaller ones cost 1.2 to 1.3 times (measured, one core)


def _check_tables(asked: CallContext, tables: Sequence[torch.Tensor], dim: int, dtype: torch.dtype, batch: int) -> None:
    if any(t.ndim != 2 or t.shape[1] != dim or t.dtype != dtype for t in tables):
        raise TypingError(f"{NAME}: tables {[list(t.shape) for t in tables]}; legal are [R, {dim}] of one dtype")
    if batch < 0:
        raise TypingError(f"{NAME}: a batch of {batch}; legal are integers from 0")


_FACTS = ("tables", "batch", "dim", "dtype", "splits", "counts", "tiles", "out", "backward")
_ALIKE = ("batch", "splits", "counts", "tiles", "out")
KIND = CallKind(NAME, _FACTS, _ALIKE)
BACK = CallKind(f"{NAME}_backward", (*_FACTS, "gradient"), (*_ALIKE, "gradient"))


@dataclass(frozen=True, slots=True)
class BagBlocks:
    """What all ranks said of tables and bags: how many each has, dim and dtype, and who sends what."""

    held: list[int]
    batches: list[int]
    dim: int
    dtype: torch.dtype
    cuts: BlockCuts

    @classmethod
    def of(cls, said: Sequence[Facts]) -> BagBlocks:
        """Return it; raises `HeapMismatch` where tables are of several dims or dtypes, or not as many as was said."""
        torch = optional("torch", "torch")
        check_alike(NAME, said, "backward", ALL_BACK)
        held = [each["tables"] for each in said]
        some = [each for each in said if each["tables"]]  # a rank without tables hears dim and dtype from the others
        types = {(each["dim"], each["dtype"]) for each in some}
        if len(types) != 1:
            there = "; ".join(f"rank {r}: {e['dim']}, {e['dtype']}" for r, e in enumerate(said) if e["tables"])
            legal = "one dim and dtype on all ranks that have some"
            raise HeapMismatch(f"{NAME}: tables of {there or 'no rank'}; legal are {legal}")
        first = said[0]
        if first["counts"] is not None and first["counts"] != held:
            raise HeapMismatch(f"{NAME}: table_counts {first['counts']}, but ranks hold {held}")
        batches = first["splits"] or tile_sizes(first["batch"], len(said))
        dtype = getattr(torch, some[0]["dtype"].removeprefix("torch."))
        return cls(held, batches, some[0]["dim"], dtype, BlockCuts("beside", (tuple(batches), tuple(held))))


class BagOperands:
    """A call's operands, checked, and what this rank says of them: `facts`, values of `_FACTS`."""

    def __init__(
        self,
        asked: CallContext,
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
        """Raises `TypingError` where operands do not fit; where an index is no row, after telling all ranks."""
        heap = asked.heap
        dim, dtype = (tables[0].shape[1], tables[0].dtype) if tables else (None, None)
        if dim is not None and dtype is not None:
            _check_tables(asked, tables, dim, dtype, batch)
        given = splits(f"{NAME}: batch_splits", batch_splits, heap.ranks, batch)
        counts = splits(f"{NAME}: table_counts", table_counts, heap.ranks, None)
        asked.check_operands(NAME, *tables, numbers=(indices, offsets, weights))
        self.call = BagCall(tables, indices, offsets, weights, mode, batch, NAME, asked.kernels is not None)
        if asked.kernels is None:
            try:
                self.call.check(NAME)
            except TypingError as error:  # of the data, so the other ranks do not see it: told to them
                heap.header.fail(str(error))
                raise
        self.out = find_out_tensor(NAME, heap, out)
        said = (None if given is None else tuple(given), None if counts is None else tuple(counts))
        asks = (asked.tiles, None if self.out is None else self.out.offset, asked.backward)
        self.facts: tuple[Hashable, ...] = (len(tables), batch, dim, dtype, *said, *asks)


def forward(
    asked: CallContext,
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

    def make(said: Sequence[Facts], varying: bool) -> BlockMove:
        who = BagBlocks.of(said)
        return BlockMove.of(asked, NAME, who.cuts, who.dtype, (who.dim,), least=LEAST, out=got.out, said=who)

    known = agree_on_call(asked.heap, KIND, got.facts, asked.seconds, make)
    who: BagBlocks = known.said
    if asked.kernels is not None:
        return asked.kernels.bags(asked.seconds, got.call, who.held, who.batches, who.dim, who.dtype, got.out, out)
    made = known.made
    assert made is not None
    bag, wide = starts(who.batches), sum(who.held) * who.dim
    fits = BagKernel.fits(got.call)

    def put(step: PutStep) -> None:
        first, last = step.box[0]
        if last > first and tables and fits:
            _all_at_once(got.call, [step], bag, (wide, who.dim), made.epoch)
        elif last > first and tables:
            got.call.store(bag[step.to] + first, bag[step.to] + last, step.view)

    def ahead(steps: Sequence[TileStep]) -> int:
        begun = next((k for k, step in enumerate(steps) if isinstance(step, WaitStep)), len(steps))
        _all_at_once(got.call, steps[:begun], bag, (wide, who.dim), made.epoch)
        return begun

    found = known.run_tiles(asked, put, ahead=ahead if fits and asked.heap.net is None else None)
    return result_or_out(NAME, found, out)


def _all_at_once(bags: BagCall, steps: Sequence[Any], bag: Sequence[int], strides: tuple[int, int], epoch: int) -> None:
    """All puts and their signals in one call of the C++ kernel; `strides` are those of a bag and of a table."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    for step in steps:
        if isinstance(step, PutStep):
            first, last = (bag[step.to] + x for x in step.box[0])
            rows.append((first, last, step.view.data_ptr(), 0, 0, 0))
        elif isinstance(step, SignalStep):
            rows[-1] = (*rows[-1][:3], step.address, step.first, step.step)
    BagKernel(bags, *strides).store(np.array(rows, TILE), epoch)


def backward(
    asked: CallContext,
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

    def make(said: Sequence[Facts], varying: bool) -> BlockMove:
        who = BagBlocks.of(said)
        return BlockMove.of(asked, BACK.op, who.cuts.reverse(), g.dtype, (who.dim,))

    came = agree_on_call(asked.heap, BACK, (*got.facts, g.dtype), asked.seconds, make).run(asked, g)
    return got.call.gradients(came, weights is not None)
