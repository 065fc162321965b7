"""The pairs that the fused benchmarks run on forked ranks: operands, the whole computation, tiles, and references.

A pair has the same rows for every rank of two; all operands are f32, from a seed that both ranks know, so that each
works out what it must get. `fused_grid` times them on the shared-memory heap and gloo, `fused_emulated` on a link that
is modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from shardplan.fused.deciding.trials import ROWS, BagsTrial, ProductTrial, Shape, VectorTrial, shape_work
from shardplan.fused.kernels.bags import TILE, BagKernel
from shardplan.fused.kernels.vectors import rows_times, thin
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.tiles.shapes import BlockShape, starts, tile_sizes

TRIALS = {"gemm": "product", "embedding": "bags", "gemv": "vector"}
KINDS = tuple(TRIALS)


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
    def shape(self) -> Shape:
        """As trials have it."""
        return TRIALS[self.kind], self.numbers

    @property
    def nbytes(self) -> float:
        """Bytes of the result that a rank computes."""
        return shape_work(self.shape)[2]


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

    def run_unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute all, then send it on the heap; `out` is a tensor of the heap, for results that are not copied."""
        ...

    def run_fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the fused operator."""
        ...


class GemmPair(ProductTrial):
    """Blocks of rows of a product, as experts return them; it runs the same kernels unfused."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        super().__init__(sizes.numbers, rank, ranks)
        m, n, k = sizes.numbers
        given = [torch.from_numpy(x) for x in _normal(sizes, ranks, (m, k), (k, n))]
        self.a, self.b = given[2 * rank], given[2 * rank + 1]
        cuts = starts(tile_sizes(m, ranks))
        self.wanted = torch.cat([given[2 * s][cuts[rank] : cuts[rank + 1]] @ given[2 * s + 1] for s in range(ranks)])

    def rows(self) -> int:
        return len(self.a)

    def tile(self, first: int, last: int, view: torch.Tensor) -> None:
        torch.mm(self.a[first:last], self.b, out=view)

    def ready(self, first: int, last: int, view: torch.Tensor) -> Callable[[], Any]:
        rows = self.a[first:last]
        return lambda: torch.mm(rows, self.b, out=view)

    def tiles(self, cuts: Sequence[tuple[int, int]]) -> None:
        for first, last in cuts:
            self.tile(first, last, self.out[first:last])


class BagsPair(BagsTrial):
    """Bags of a rank's tables for the batch of all ranks; it runs the same kernels unfused."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        tables, batch, bag, dim = sizes.numbers
        rng = np.random.default_rng(hash(sizes.numbers) % (1 << 32))
        self.tables = [torch.from_numpy(rng.normal(size=(ROWS, dim)).astype(np.float32)) for _ in range(tables)]
        self.indices = torch.from_numpy(rng.integers(0, ROWS, tables * batch * bag))
        self.offsets = torch.arange(0, tables * batch * bag + 1, bag)
        self.batch, self.bag = batch, bag
        self.set_call(ranks)
        whole = torch.stack(
            [t[self.indices[k * batch * bag : (k + 1) * batch * bag]].view(batch, bag, dim).sum(1)
             for k, t in enumerate(self.tables)], 1
        )  # fmt: skip
        cuts = starts(tile_sizes(batch, ranks))
        self.wanted = torch.cat([whole[cuts[rank] : cuts[rank + 1]]] * ranks, 1)

    def rows(self) -> int:
        return self.batch

    def library(self) -> torch.Tensor:
        return self.compute()

    def tiles(self, cuts: Sequence[tuple[int, int]]) -> None:
        """Compute parts of the own buffer one after another, without Python between."""
        if not BagKernel.fits(self.call):
            for first, last in cuts:
                self.call.store(first, last, self.out[first:last])
            return
        rows = [(first, last, self.out[first:last].data_ptr(), 0, 0, 0) for first, last in cuts]
        self.kernel_of(self.out).store(np.array(rows, TILE), 0)

    def ready(self, first: int, last: int, view: torch.Tensor) -> Callable[[], Any]:
        if not BagKernel.fits(self.call):
            return lambda: self.call.store(first, last, view)
        kernel, rows = self.kernel_of(view), np.array([(first, last, view.data_ptr(), 0, 0, 0)], TILE)
        return lambda: kernel.store(rows, 0)


class VectorPair(VectorTrial):
    """Rows of a matrix times a vector, whose addends all ranks sum; it runs the same kernels unfused."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        super().__init__(sizes.numbers, rank, ranks)
        m, k = sizes.numbers
        given = [torch.from_numpy(x) for x in _normal(sizes, ranks, (m, k), (k,))]
        self.a, self.x = given[2 * rank], given[2 * rank + 1]
        self.thin = thin(self.x)
        self.wanted = sum((given[2 * s] @ given[2 * s + 1] for s in range(ranks)), torch.zeros(m))

    def rows(self) -> int:
        return len(self.a)

    def library(self) -> torch.Tensor:
        return self.compute()

    def tile(self, first: int, last: int, view: torch.Tensor) -> None:
        rows_times(self.a[first:last], self.thin, view)

    def ready(self, first: int, last: int, view: torch.Tensor) -> Callable[[], Any]:
        return lambda: self.tile(first, last, view)


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
