"""What a fused operator cuts into tiles: blocks from every rank to every rank, or rows that all ranks sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardplan.fused.tiles.events import TileBox, TileScheduleError


def cut(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range, by the tiling rule: equal, the last ones short or empty.

    >>> list(cut(2, 9, 3)), list(cut(0, 1, 2))
    ([(2, 5), (5, 8), (8, 9)], [(0, 1), (1, 1)])
    """
    size = -(-(stop - start) // parts)
    for k in range(parts):
        yield min(stop, start + k * size), min(stop, start + (k + 1) * size)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Results of `extents` elements at every rank, in which every source has a box: `boxes[source][destination]`.

    A block is cut into tiles along its dim `dim`.
    """

    extents: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[TileBox, ...], ...]
    dim: int = 0

    def __post_init__(self) -> None:
        """Check that sources and destinations are as many as extents."""
        if any(len(row) != len(self.boxes) for row in self.boxes) or len(self.extents) != len(self.boxes):
            raise TileScheduleError(
                f"blocks of {len(self.boxes)} sources for {len(self.extents)} results; legal are as many each"
            )

    @classmethod
    def rows(cls, counts: Sequence[Sequence[int]], *more: int) -> BlockShape:
        """Return the shape of an all-to-all of rows: `counts[source][destination]`, each row `more` elements.

        >>> BlockShape.rows([[1, 2], [3, 0]], 8).boxes[1]
        (((1, 4), (0, 8)), ((2, 2), (0, 8)))
        """
        starts = [list(accumulate(column, initial=0)) for column in zip(*counts, strict=True)]
        rest = tuple((0, m) for m in more)
        boxes = (
            tuple(((starts[d][s], starts[d][s + 1]), *rest) for d in range(len(counts))) for s in range(len(counts))
        )
        return cls(tuple((each[-1], *more) for each in starts), tuple(boxes))

    def tile(self, source: int, to: int, tiles: int) -> list[TileBox]:
        """Return the boxes of a block's tiles in the result."""
        box = self.boxes[source][to]
        return [(*box[: self.dim], part, *box[self.dim + 1 :]) for part in cut(*box[self.dim], tiles)]


@dataclass(frozen=True, slots=True)
class RowShape:
    """`size` rows, of which every rank has addends and wants the sums."""

    size: int

    def lanes(self, ranks: int) -> BlockShape:
        """Return it as blocks: every rank has a lane for every rank's addends."""
        boxes = tuple(tuple(((s, s + 1), (0, self.size)) for _ in range(ranks)) for s in range(ranks))
        return BlockShape(((ranks, self.size),) * ranks, boxes, 1)

    def tiles(self, ranks: int, each: int) -> list[list[tuple[int, int]]]:
        """Return the tiles of every owner, `each` many: tile t belongs to rank t mod ranks.

        >>> RowShape(10).tiles(2, 2)
        [[(0, 3), (6, 9)], [(3, 6), (9, 10)]]
        """
        parts = list(cut(0, self.size, ranks * each))
        return [parts[owner::ranks] for owner in range(ranks)]


TileShape = BlockShape | RowShape
