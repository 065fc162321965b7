"""A fused op of a program on a rank's shards: operands laid out as the operators take them, and results back.

A product of several batches is a call for each. What a rank receives follows from the tiles that go to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.ops.fused import ADDEND, Fused
from shardplan.core.ops.fused_forms import BagForm, GemmForm, GemvForm
from shardplan.errors import optional
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.operators import embedding, gemm, gemv, tensor_parallel
from shardplan.fused.operators.call_context import CallContext, count_tiles
from shardplan.fused.tiles.schedule import SLOTS
from shardplan.fused.tiles.shapes import RowShape

if TYPE_CHECKING:
    import torch

WORDS = 1 << 17  # bytes for the counters of an operator, and for what is rounded up


@dataclass(frozen=True, slots=True)
class FusedCall:
    """A fused op bound to the shapes of a rank.

    `nbytes` is what it takes of the heap of its group, of `ranks` ranks; `received` what others put there in a run, of
    a reduction that of rank k, by k.
    """

    op: Fused
    ranks: int
    nbytes: int
    received: tuple[int, ...]
    run: Callable[[SymmetricHeap, float, Sequence[torch.Tensor]], torch.Tensor]


def fused_call(op: Fused, ranks: int) -> FusedCall:
    """Return a fused op, on even types, for a group of so many ranks."""
    after = op.move_with_types[2]
    result = after.local_bytes()
    form = op.form
    match form:
        case GemmForm() | BagForm():
            room = op.landing_bytes
            run = _gemm(op, form, ranks) if isinstance(form, GemmForm) else _bags(op, form, ranks)
            return FusedCall(op, ranks, SLOTS * room + WORDS, (room * (ranks - 1) // ranks,) * ranks, run)
        case GemvForm():
            wide = math.prod(after.local_shape(0)) * ADDEND
            need = wide * ranks if op.in_one_shot else wide + ADDEND * ranks + result
            return FusedCall(op, ranks, SLOTS * need + WORDS, _gemv_bytes_received(op, form, ranks), _gemv(op, form))
        case _:
            assert_never(form)


def _sizes(op: Fused) -> dict[str, int]:
    """The sizes of the letters of a product before the move, on one device."""
    form = op.form
    assert isinstance(form, GemmForm | GemvForm)
    names = [t for _, t in op.body.inputs]
    found: dict[str, int] = {}
    for number, side in zip((form.a, form.b), form.sides, strict=True):
        found.update(zip(side, names[number].local_shape(0), strict=True))
    return found


def _matrices(x: torch.Tensor, side: str, *groups: str) -> torch.Tensor:
    """The operand with its dims in groups, each merged to one."""
    order = [side.index(c) for c in "".join(groups)]
    shape = [math.prod(x.shape[side.index(c)] for c in group) for group in groups]
    return x.permute(order).reshape(shape)


def _gemm(
    op: Fused, form: GemmForm, ranks: int
) -> Callable[[SymmetricHeap, float, Sequence[torch.Tensor]], torch.Tensor]:
    sizes = _sizes(op)
    if form.cut:
        sizes[form.cut] //= ranks
    spread = form.result.replace(form.gathered, f"@{form.gathered}") if form.gathered else form.result
    labels = f"{form.batch}{'@' * bool(form.gathered)}{form.rows}{form.columns}"  # @: whose block it is
    shape = [ranks if c == "@" else sizes[c] for c in labels]
    order = [labels.index(c) for c in spread]
    after = op.body.output_types[0].local_shape(0)
    multiply = _product_call(form)

    def run(heap: SymmetricHeap, seconds: float, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        torch = optional("torch", "torch")
        asked = CallContext(heap, op.tiles, seconds=seconds)
        a = _matrices(arrays[form.a], form.sides[0], form.batch, form.rows, form.inner)
        b = _matrices(arrays[form.b], form.sides[1], form.batch, form.inner, form.columns)
        parts = [multiply(asked, x, y) for x, y in zip(a, b, strict=True)]
        whole = parts[0] if len(parts) == 1 else torch.stack(parts)
        return whole.view(shape).permute(order).reshape(after)

    return run


def _product_call(form: GemmForm) -> Callable[[CallContext, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The operator of a product on matrices: what it cuts and gathers says which."""
    if not form.cut:
        return lambda asked, a, b: tensor_parallel.gather_multiply(asked, a, b)[0]
    if not form.gathered:
        return tensor_parallel.multiply_scatter
    return lambda asked, a, b: gemm.forward(asked, a, b, None, form.activation, form.scatter)


def _gemv(op: Fused, form: GemvForm) -> Callable[[SymmetricHeap, float, Sequence[torch.Tensor]], torch.Tensor]:
    sizes = _sizes(op)
    labels = form.rows + form.columns
    shape, order = [sizes[c] for c in labels], [labels.index(c) for c in form.result]
    after = op.move_with_types[2].local_shape(0)
    algorithm = "one_shot" if op.in_one_shot else "two_shot"

    def run(heap: SymmetricHeap, seconds: float, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        asked = CallContext(heap, op.tiles, seconds=seconds)
        a = _matrices(arrays[form.a], form.sides[0], form.rows, form.inner)
        x = _matrices(arrays[form.b], form.sides[1], form.inner, form.columns)
        return gemv.forward(asked, a, x, algorithm).reshape(shape).permute(order).reshape(after)

    return run


def _gemv_bytes_received(op: Fused, form: GemvForm, ranks: int) -> tuple[int, ...]:
    """What each rank receives: all addends of all others, or those of its own tiles, and the others' sums."""
    sizes = _sizes(op)
    rows, columns = (math.prod(sizes[c] for c in letters) for letters in (form.rows, form.columns))
    if op.in_one_shot:
        return ((ranks - 1) * rows * columns * ADDEND,) * ranks
    size = numpy_dtype(op.move_with_types[2].dtype).itemsize
    tiles = RowShape(rows).tiles(ranks, count_tiles(op.tiles, rows // ranks, gemv.LEAST))
    own = [sum(last - first for first, last in each) for each in tiles]
    return tuple(columns * ((ranks - 1) * n * ADDEND + (rows - n) * size) for n in own)


def _bags(
    op: Fused, form: BagForm, ranks: int
) -> Callable[[SymmetricHeap, float, Sequence[torch.Tensor]], torch.Tensor]:
    _, before, after = op.move_with_types
    batch, shape, count = before.local_shape(0)[0], after.local_shape(0), len(form.tables)

    def run(heap: SymmetricHeap, seconds: float, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        torch = optional("torch", "torch")
        own = torch.arange(batch)[:, None]
        tables = [arrays[t] if ids >= 0 else arrays[t].reshape(batch, -1) for t, ids in form.tables]
        bags = [arrays[ids] if ids >= 0 else own for _, ids in form.tables]
        indices = torch.cat([ids.reshape(-1).to(torch.int64) for ids in bags])
        lengths = torch.cat([torch.full((batch,), ids.shape[1]) for ids in bags])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        asked = CallContext(heap, op.tiles, seconds=seconds)
        found = embedding.forward(asked, tables, indices, offsets, None, "sum", batch, [count] * ranks)
        # Of each table the ranks' columns lie side by side.
        return found.view(-1, ranks, count, found.shape[-1]).permute(0, 2, 1, 3).reshape(shape)

    return run
