"""The pairs that the fused benchmarks run on forked ranks: operands, the whole computation, tiles, and references.

A pair has the same rows for every rank of two; all operands are f32, from a seed that both ranks know, so that each
works out what it must get. `fused_grid` times them on the shared-memory heap and gloo, `fused_emulated` on a link that
is modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from shardplan.fused.calls.instance import FusedInstance, PutStep, TileCall, instance
from shardplan.fused.kernels.bags import TILE, BagCall, BagKernel
from shardplan.fused.kernels.vectors import rows_times, thin
from shardplan.fused.operators import embedding, gemm, gemv
from shardplan.fused.operators.call_context import CallContext, starts, tile_sizes
from shardplan.fused.operators.gemv import in_order
from shardplan.fused.operators.out import find_out_tensor, result_or_out
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockCuts, BlockShape, RowShape, TileShape

KINDS = ("gemm", "embedding", "gemv")


@dataclass(frozen=True, slots=True)
class Sizes:
    """A pair's kind and sizes: M, N, K of a product; tables, batch, bag and dim of bags; M, K of a vector's product."""

    kind: str
    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        if self.kind == "embedding":
            return "T{} B{} L{} D{}".format(*self.numbers)
        return "x".join(map(str, self.numbers))

    @property
    def flops(self) -> float:
        """Multiplications and additions of a rank."""
        return 2.0 * math.prod(self.numbers)

    @property
    def read_bytes(self) -> float:
        """Bytes of operands that a rank reads."""
        match self.kind:
            case "gemm":
                m, n, k = self.numbers
                return 4.0 * (m * k + n * k)
            case "embedding":
                return 4.0 * math.prod(self.numbers)
            case _:
                return 4.0 * math.prod(self.numbers)

    @property
    def nbytes(self) -> float:
        """Bytes of the result that a rank computes."""
        match self.kind:
            case "gemm":
                return 4.0 * self.numbers[0] * self.numbers[1]
            case "embedding":
                tables, batch, _, dim = self.numbers
                return 4.0 * tables * batch * dim
            case _:
                return 4.0 * self.numbers[0]


class RankPair(Protocol):
    """A pair on a rank."""

    wanted: torch.Tensor

    def compute(self) -> torch.Tensor:
        """Compute all of it into a buffer of its own."""
        ...

    def rows(self) -> int:
        """Rows of what is computed, dealt out to the ranks in order."""
        ...

    def tile(self, first: int, last: int, view: torch.Tensor) -> None:
        """Compute rows into a view, of the memory of whomever."""
        ...

    def ready(self, first: int, last: int, view: torch.Tensor) -> Callable[[], Any]:
        """The same as a call that has everything at hand, as a compiled schedule has."""
        ...

    def unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute all, then send it on the heap; `out` is a tensor of the heap, for results that are not copied."""
        ...

    def fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the fused operator."""
        ...


class GemmPair:
    """Blocks of rows of a product, as experts return them."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        m, n, k = sizes.numbers
        given = [torch.from_numpy(x) for x in _normal(sizes, ranks, (m, k), (k, n))]
        self.a, self.b = given[2 * rank], given[2 * rank + 1]
        self.out = torch.empty(m, n)
        cuts = starts(tile_sizes(m, ranks))
        self.wanted = torch.cat([given[2 * s][cuts[rank] : cuts[rank + 1]] @ given[2 * s + 1] for s in range(ranks)])
        self.cuts = BlockCuts("rows", (tuple(tile_sizes(m, ranks)),) * ranks, n)

    def rows(self) -> int:
        return len(self.a)

    def compute(self) -> torch.Tensor:
        return torch.mm(self.a, self.b, out=self.out)

    def tile(self, first: int, last: int, view: torch.Tensor) -> None:
        torch.mm(self.a[first:last], self.b, out=view)

    def ready(self, first: int, last: int, view: torch.Tensor) -> Callable[[], Any]:
        rows = self.a[first:last]
        return lambda: torch.mm(rows, self.b, out=view)

    def tiles(self, cuts: Sequence[tuple[int, int]]) -> None:
        for first, last in cuts:
            self.tile(first, last, self.out[first:last])

    def unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        return moved(asked, "bench_gemm", self.cuts, self.compute(), out)

    def fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        return gemm.forward(asked, self.a, self.b, out=out)


class BagsPair:
    """Bags of a rank's tables for the batch of all ranks."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        tables, batch, bag, dim = sizes.numbers
        rng = np.random.default_rng(hash(sizes.numbers) % (1 << 32))
        rows = 20_000
        self.tables = [torch.from_numpy(rng.normal(size=(rows, dim)).astype(np.float32)) for _ in range(tables)]
        self.indices = torch.from_numpy(rng.integers(0, rows, tables * batch * bag))
        self.offsets = torch.arange(0, tables * batch * bag + 1, bag)
        self.batch, self.ranks = batch, ranks
        self.call = BagCall(self.tables, self.indices, self.offsets, None, "sum", batch, "bench")
        self.out = torch.empty(batch, tables, dim)
        whole = torch.stack(
            [t[self.indices[k * batch * bag : (k + 1) * batch * bag]].view(batch, bag, dim).sum(1)
             for k, t in enumerate(self.tables)], 1
        )  # fmt: skip
        cuts = starts(tile_sizes(batch, ranks))
        self.wanted = torch.cat([whole[cuts[rank] : cuts[rank + 1]]] * ranks, 1)
        self.cuts = BlockCuts("beside", (tuple(tile_sizes(batch, ranks)), (tables,) * ranks))
        self.kernels: dict[tuple[int, int], BagKernel] = {}

    def rows(self) -> int:
        return self.batch

    def compute(self) -> torch.Tensor:
        self.tile(0, self.batch, self.out)
        return self.out

    def tiles(self, cuts: Sequence[tuple[int, int]]) -> None:
        """Compute parts of the own buffer one after another, without Python between."""
        if not BagKernel.fits(self.call):
            for first, last in cuts:
                self.call.store(first, last, self.out[first:last])
            return
        rows = [(first, last, self.out[first:last].data_ptr(), 0, 0, 0) for first, last in cuts]
        self._kernel(self.out).store(np.array(rows, TILE), 0)

    def ready(self, first: int, last: int, view: torch.Tensor) -> Callable[[], Any]:
        if not BagKernel.fits(self.call):
            return lambda: self.call.store(first, last, view)
        kernel, rows = self._kernel(view), np.array([(first, last, view.data_ptr(), 0, 0, 0)], TILE)
        return lambda: kernel.store(rows, 0)

    def _kernel(self, view: torch.Tensor) -> BagKernel:
        strides = view.stride(0), view.stride(1)
        if strides not in self.kernels:
            self.kernels[strides] = BagKernel(self.call, *strides)
        return self.kernels[strides]

    def tile(self, first: int, last: int, view: torch.Tensor) -> None:
        if not BagKernel.fits(self.call):
            self.call.store(first, last, view)
            return
        self._kernel(view).store(np.array([(first, last, view.data_ptr(), 0, 0, 0)], TILE), 0)

    def unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        return moved(asked, "bench_bags", self.cuts, self.compute(), out)

    def fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        return embedding.forward(asked, self.tables, self.indices, self.offsets, batch=self.batch, out=out)


class VectorPair:
    """Rows of a matrix times a vector, whose addends all ranks sum."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        m, k = sizes.numbers
        given = [torch.from_numpy(x) for x in _normal(sizes, ranks, (m, k), (k,))]
        self.a, self.x = given[2 * rank], given[2 * rank + 1]
        self.thin = thin(self.x)
        self.out = torch.empty(m, 1)
        self.wanted = sum((given[2 * s] @ given[2 * s + 1] for s in range(ranks)), torch.zeros(m))
        self.shape = RowShape(m).lanes(ranks)

    def rows(self) -> int:
        return len(self.a)

    def compute(self) -> torch.Tensor:
        rows_times(self.a, self.thin, self.out)
        return self.out

    def tile(self, first: int, last: int, view: torch.Tensor) -> None:
        rows_times(self.a[first:last], self.thin, view)

    def ready(self, first: int, last: int, view: torch.Tensor) -> Callable[[], Any]:
        return lambda: self.tile(first, last, view)

    def unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        addends = self.compute()[None]
        made = instance(asked.heap, "bench_vector", TileSchedule(order=asked.order), "", asked.seconds)  # type: ignore[arg-type]
        call = prepared(made, self.out, self.shape, (1,))

        def put(step: PutStep) -> None:
            step.view.copy_(addends)

        return in_order(made.run(call, put)["result"])[:, 0]

    def fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        return gemv.forward(asked, self.a, self.x, variant)


def prepared(made: FusedInstance, x: torch.Tensor, shape: TileShape, more: Sequence[int]) -> TileCall:
    """The call of a shape, kept beside the heap: all ranks ask for the same ones in the same order."""
    key = (made.op, made.out and made.out.offset, tuple(x.shape))
    if key not in made.heap.kept or made.heap.kept[key].grown != made.grown:
        made.heap.kept[key] = made.call(shape, {"result": x.dtype}, more)
    return made.heap.kept[key]


def moved(asked: CallContext, op: str, cuts: BlockCuts, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The blocks of all ranks, put together, into `out` of the heap if there is one."""
    schedule = TileSchedule(order=asked.order)  # type: ignore[arg-type]
    made = instance(asked.heap, op, schedule, "", asked.seconds, find_out_tensor(op, asked.heap, out))
    call, boxes = prepared(made, x, cuts.shape(), tuple(x.shape[2:])), cuts.own_boxes(asked.heap.rank)

    def put(step: PutStep) -> None:
        step.view.copy_(x[tuple(slice(a, b) for a, b in boxes[step.to])])

    return result_or_out(op, made.run(call, put)["result"], out)


def _normal(sizes: Sizes, ranks: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(hash(sizes.numbers) % (1 << 32))
    return [rng.normal(size=shape).astype(np.float32) for _ in range(ranks) for shape in shapes]


def pair_of(sizes: Sizes, rank: int, ranks: int) -> GemmPair | BagsPair | VectorPair:
    """The operands of a rank."""
    made: dict[str, Any] = {"gemm": GemmPair, "embedding": BagsPair, "gemv": VectorPair}
    return made[sizes.kind](sizes, rank, ranks)


def away(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference beside the largest number that was wanted."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def shape_of(pair: RankPair, ranks: int) -> BlockShape:
    """Its blocks, rows only."""
    return BlockShape.rows([tile_sizes(pair.rows(), ranks)] * ranks)


def heap_bytes(sizes: Sequence[Sizes], instances: int) -> int:
    """Enough for so many instances of every pair, each with two slots."""
    return int(sum(s.nbytes * 2 * 1.1 + (1 << 16) for s in sizes) * instances * 2) + (1 << 20)
