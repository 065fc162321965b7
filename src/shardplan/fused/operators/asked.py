"""What every fused operator is asked beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardplan.errors import TypingError, shown
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.tiles.shapes import cut


@dataclass(frozen=True, slots=True)
class Asked:
    """The heap of the group, tiles a destination (0: chosen by size), their order, and the seconds of a wait."""

    heap: SymmetricHeap
    tiles: int = 0
    order: str = "remote_first"
    seconds: float = 30.0

    def many(self, rows: int, least: int, most: int = 8) -> int:
        """Return the tiles of a destination of so many rows: as asked, or of `least` rows each, at most `most`."""
        return self.tiles or max(1, min(most, rows // least))


def even(n: int, parts: int) -> list[int]:
    """Return the sizes of parts by the tiling rule.

    >>> even(7, 3), even(1, 3)
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
        raise TypingError(f"{name} {shown(found)}; legal are {legal}")
    return found
