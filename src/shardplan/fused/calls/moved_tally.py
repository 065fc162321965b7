"""`counted`: what puts really moved, counted where they arrive; a put that does nothing is fast, and looks good."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardplan.errors import BackendError
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.tiles.events import TileBox, TileProtocol, TilePut, box_text, volume

if TYPE_CHECKING:
    import torch

POISON = 0xFF  # every byte: a NaN that no computation makes, or -1


class MovedTile(NamedTuple):
    """A put that came here: `nbytes` are the schedule's, `changed` those of elements that were written."""

    op: str
    source: int
    tile: int
    buffer: str
    box: TileBox
    nbytes: int
    changed: int


@dataclass(slots=True)
class MovedTally:
    """The puts into this rank's memory, counted after every epoch; see `counted`."""

    tiles: list[MovedTile] = field(default_factory=list["MovedTile"])

    @property
    def nbytes(self) -> int:
        """The bytes that came."""
        return sum(tile.changed for tile in self.tiles)

    def check(self) -> None:
        """Raise `BackendError` naming the first put that moved less than its schedule says."""
        for op, source, tile, buffer, box, nbytes, changed in self.tiles:
            if changed != nbytes:
                where = f"tile {tile} of rank {source}, {buffer}{box_text(box)}"
                raise BackendError(f"{op}: {where}: {changed} of {nbytes} bytes moved; legal are all")

    def poison(self, heap: SymmetricHeap, views: Mapping[str, torch.Tensor]) -> None:
        """Fill what peers are about to write; collective."""
        for view in views.values():
            _bytes(view).fill_(POISON)
        heap.barrier(heap.seconds)

    def count(self, op: str, rank: int, protocol: TileProtocol, views: Mapping[str, torch.Tensor]) -> None:
        """Count what an epoch wrote, put by put."""
        for source in range(protocol.ranks):
            for put in protocol.of(source):
                if isinstance(put, TilePut) and put.to == rank and volume(put.box):
                    tile = views[put.buffer][tuple(slice(*side) for side in put.box)].contiguous()
                    rows = _bytes(tile).view(-1, tile.dtype.itemsize)
                    changed = int((rows != POISON).any(1).sum()) * tile.dtype.itemsize
                    self.tiles.append(MovedTile(op, source, put.tile, put.buffer, put.box, tile.nbytes, changed))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.view(-1).view(torch.uint8)


@contextmanager
def counted(heap: SymmetricHeap) -> Generator[MovedTally]:
    """Count at the receiver what the puts of fused operators on a heap move, while the block lasts; on all ranks.

    Before an epoch the memory that peers will write is filled with a NaN that nothing computes, all ranks meet, and
    after it every put's elements that changed are counted beside what the schedule says. It costs a barrier and two
    passes over the memory an epoch: for tests and before measuring, not while.

    >>> with SymmetricHeap.create(1 << 16, "virtual", lambda mine: [mine], "doc") as heap, counted(heap) as tally:
    ...     tally.check()
    """
    heap.tally = tally = MovedTally()
    try:
        yield tally
    finally:
        heap.tally = None
