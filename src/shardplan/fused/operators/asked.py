"""What every fused operator is asked beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from shardplan.errors import TypingError, excerpt
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.kernels.bags import BagCall
from shardplan.fused.tiles.events import TileBox
from shardplan.fused.tiles.shapes import BlockShape, cut

if TYPE_CHECKING:
    import torch


class LocalKernels(Protocol):
    """The operators on local tensors by kernels that a heap has instead of those of CPUs; operands are checked."""

    def gemm(
        self,
        asked: Asked,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        scatter: int,
        counts: Sequence[Sequence[int]],
        columns: Sequence[int],
        varying: bool,
    ) -> torch.Tensor:
        """Return the result of `operators.gemm.forward`; `counts` and `columns` as in `operators.gemm.blocks`."""
        ...

    def gemv(self, asked: Asked, a: torch.Tensor, x: torch.Tensor, shots: int) -> torch.Tensor:
        """Return the sum over ranks of a [M, K_r] times x [K_r, C]: [M, C]."""
        ...

    def bags(
        self,
        asked: Asked,
        call: BagCall,
        held: Sequence[int],
        batches: Sequence[int],
        dim: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the bags of all tables for this rank's batch: rank s holds `held[s]` tables, d has `batches[d]` bags.

        Raises `TypingError` where an index is no row of its table.
        """
        ...

    def move(
        self, asked: Asked, op: str, shape: BlockShape, g: torch.Tensor, boxes: Sequence[TileBox], varying: bool
    ) -> torch.Tensor:
        """Return the blocks of all ranks, put together; `boxes[d]` of g goes to rank d."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """The heap of the group, tiles a destination (0: chosen by size), their order, and the seconds of a wait.

    Ranks must say the same of `backward`, whether autograd would call it here. With `tile_sizes` ranks have as many
    rows.
    """

    heap: SymmetricHeap
    tiles: int = 0
    order: str = "remote_first"
    seconds: float = 30.0
    backward: bool = True
    even: bool = False

    @property
    def kernels(self) -> LocalKernels | None:
        """What runs the operators where those of CPUs do not."""
        return self.heap.kernels

    def tile_count(self, rows: int, least: int, most: int = 8) -> int:
        """Return the tiles of a destination of so many rows: as asked, or of `least` rows each, at most `most`."""
        return self.tiles or max(1, min(most, rows // least))

    def check_devices(self, name: str, *operands: torch.Tensor | None) -> None:
        """Raise `TypingError` where an operand is on another kind of device than the heap."""
        for each in operands:
            if each is not None and each.device.type != self.heap.device:
                raise TypingError(f"{name}: an operand on {each.device}; legal is {self.heap.device}, as the heap's")


def tile_sizes(n: int, parts: int) -> list[int]:
    """Return the sizes of parts by the tiling rule.

    >>> tile_sizes(7, 3), tile_sizes(1, 3)
    ([3, 3, 1], [1, 0, 0])
    """
    return [stop - start for start, stop in cut(0, n, parts)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Return where parts begin, and the end of the last one.

    >>> starts([2, 0, 3])
    [0, 2, 2, 5]
    """
    return list(accumulate(sizes, initial=0))


def splits(name: str, sizes: Sequence[int] | None, parts: int, whole: int | None) -> list[int] | None:
    """Return checked splits, None where none are given; `whole` is their sum where it is known.

    Raises `TypingError`.
    """
    if sizes is None:
        return None
    found = [int(n) for n in sizes]
    if len(found) != parts or min(found, default=0) < 0 or (whole is not None and sum(found) != whole):
        legal = f"{parts} integers from 0" + ("" if whole is None else f" that sum to {whole}")
        raise TypingError(f"{name} {excerpt(found)}; legal are {legal}")
    return found
