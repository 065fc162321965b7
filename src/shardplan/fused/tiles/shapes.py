"""What a fused operator cuts into tiles: blocks from every rank to every rank, or rows that all ranks sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from shardplan.errors import TypingError, excerpt
from shardplan.fused.tiles.events import TileBox, TileScheduleError


def cut(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range, by the tiling rule: equal, the last ones short or empty.

    >>> list(cut(2, 9, 3)), list(cut(0, 1, 2))
    ([(2, 5), (5, 8), (8, 9)], [(0, 1), (1, 1)])
    """
    size = -(-(stop - start) // parts)
    for k in range(parts):
        yield min(stop, start + k * size), min(stop, start + (k + 1) * size)


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
class BlockCuts:
    """How matrices of all ranks are cut into blocks, and put together again: all that a kernel needs to know of places.

    - `rows`: of rank s `counts[s][d]` rows go to rank d, in order; all rows have `columns`
    - `stack`: `counts` are heights and widths; rank s has `heights[s]` rows, of which `widths[d]` columns go to rank d,
      which stacks them
    - `beside`: `heights[d]` rows of every rank go to rank d, which puts the `widths[s]` columns of rank s side by side
    - `whole`: `counts` are heights; all rows of rank s, of `columns`, go to every rank
    """

    form: Literal["rows", "stack", "beside", "whole"]
    counts: tuple[tuple[int, ...], ...]
    columns: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.counts[0])

    def reverse(self) -> BlockCuts:
        """Return the way back, of what was gathered that of addends, which are not added up.

        >>> BlockCuts("rows", ((1, 2), (3, 0)), 4).reverse().counts
        ((1, 3), (2, 0))
        """
        if self.form == "rows":
            return BlockCuts("rows", tuple(zip(*self.counts, strict=True)), self.columns)
        if self.form == "whole":
            return BlockCuts("rows", self.counts * self.ranks, self.columns)
        return BlockCuts("beside" if self.form == "stack" else "stack", self.counts)

    def of_numbers(self, each: int) -> BlockCuts:
        """Return the same where every column is so many numbers."""
        if self.form in ("rows", "whole"):
            return BlockCuts(self.form, self.counts, self.columns * each)
        return BlockCuts(self.form, (self.counts[0], tuple(n * each for n in self.counts[1])))

    def result(self, rank: int) -> tuple[int, int]:
        """Return the rows and columns that a rank gets."""
        if self.form == "rows":
            return sum([row[rank] for row in self.counts]), self.columns
        if self.form == "whole":
            return sum(self.counts[0]), self.columns
        heights, widths = self.counts
        return (sum(heights), widths[rank]) if self.form == "stack" else (heights[rank], sum(widths))

    def count_rows(self, rank: int) -> int:
        """Return the rows that a rank has."""
        if self.form == "rows":
            return sum(self.counts[rank])
        return sum(self.counts[0]) if self.form == "beside" else self.counts[0][rank]

    def mean_rows(self) -> int:
        """Return the rows that a block has in the mean.

        >>> BlockCuts("rows", ((1, 2), (3, 2)), 4).mean_rows(), BlockCuts("stack", ((3, 5), (4, 1))).mean_rows()
        (2, 4)
        """
        every = self.counts if self.form == "rows" else self.counts[:1]
        return sum(map(sum, every)) // (len(every) * self.ranks)

    def largest_block(self) -> tuple[int, int]:
        """Return the most rows, and the most columns, that a block has.

        >>> BlockCuts("rows", ((1, 2), (3, 0)), 4).largest_block(), BlockCuts("stack", ((3, 2), (4, 1))).largest_block()
        ((3, 4), (3, 4))
        """
        if self.form in ("rows", "whole"):
            return max(map(max, self.counts)), self.columns
        return max(self.counts[0]), max(self.counts[1])

    def own_boxes(self, rank: int) -> tuple[TileBox, ...]:
        """Return the box of each destination's block in what a rank has.

        >>> BlockCuts("stack", ((3, 2), (4, 1))).own_boxes(0)
        (((0, 3), (0, 4)), ((0, 3), (4, 5)))
        """
        if self.form == "rows":
            return tuple((part, (0, self.columns)) for part in _parts(self.counts[rank]))
        if self.form == "whole":
            return (((0, self.counts[0][rank]), (0, self.columns)),) * self.ranks
        heights, widths = self.counts
        if self.form == "stack":
            return tuple(((0, heights[rank]), part) for part in _parts(widths))
        return tuple((part, (0, widths[rank])) for part in _parts(heights))

    @lru_cache(maxsize=1024)  # noqa: B019, of values
    def shape(self) -> BlockShape:
        """Return the boxes of all blocks in the results."""
        back = self.reverse()
        there = [back.own_boxes(rank) for rank in range(self.ranks)]
        boxes = tuple(tuple(there[d][s] for d in range(self.ranks)) for s in range(self.ranks))
        return BlockShape(tuple(self.result(rank) for rank in range(self.ranks)), boxes)


def _parts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [*accumulate(sizes)]
    return list(zip([0, *ends], ends, strict=False))


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
