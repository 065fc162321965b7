"""Windows: the parts of a rank's parameters that are in memory at a time, and what of a region lies in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.movement.weights.regions import RefitRegions

Piece = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]
"""Row of the regions, sizes, source strides, target strides, source offset, target offset; in elements."""


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Elements `lo` to `hi` of a parameter, at byte `at` of a window."""

    parameter: int
    lo: int
    hi: int
    at: int


def windows(sizes: Sequence[tuple[int, int, int]], nbytes: int) -> Iterator[tuple[list[WindowPart], int]]:
    """Yield windows over parameters that lie one after another, and the bytes of each: all full but the last.

    `sizes` are (number, elements, bytes of an element); `nbytes` bounds a window and is a multiple of every width.
    """
    parts: list[WindowPart] = []
    used = 0
    for number, elements, width in sizes:
        lo = 0
        while lo < elements:
            room = (nbytes - used) // width
            if not room:
                yield parts, used
                parts, used = [], 0
                continue
            hi = min(elements, lo + room)
            parts.append(WindowPart(number, lo, hi, used))
            used += (hi - lo) * width
            lo = hi
    if parts:
        yield parts, used


class PiecesOf:
    """The regions of one target rank, found by parameter and place."""

    def __init__(self, regions: RefitRegions) -> None:
        """Sort by parameter."""
        order = np.argsort(regions.target_parameter, kind="stable")
        self.regions = regions.select_regions(order)
        self.first = self.regions.target_offset
        self.reach = self.first + ((self.regions.sizes - 1) * self.regions.target_strides).sum(axis=1)

    def pieces_within(self, part: WindowPart) -> Iterator[Piece]:
        """Yield what of the regions lies in a part of a parameter."""
        number = self.regions.target_parameter
        low = int(np.searchsorted(number, part.parameter))
        high = int(np.searchsorted(number, part.parameter, side="right"))
        met = (self.first[low:high] < part.hi) & (self.reach[low:high] >= part.lo)
        r = self.regions
        for k in (low + np.flatnonzero(met)).tolist():
            s, t = tuple(r.source_strides[k].tolist()), tuple(r.target_strides[k].tolist())
            s_at, t_at = int(r.source_offset[k]), int(r.target_offset[k])
            for at, sizes in clip_block(tuple(r.sizes[k].tolist()), t, t_at, part.lo, part.hi):
                yield (
                    k,
                    sizes,
                    s,
                    t,
                    s_at + sum(i * x for i, x in zip(at, s, strict=True)),
                    t_at + sum(i * x for i, x in zip(at, t, strict=True)),
                )


def clip_block(
    sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, lo: int, hi: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the parts (start, sizes) of a strided block whose elements lie in [lo, hi).

    >>> list(clip_block((3, 4), (10, 1), 0, 2, 22))
    [((1, 0), (1, 4)), ((0, 2), (1, 2)), ((2, 0), (1, 2))]
    """
    reach = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    if offset >= hi or offset + reach < lo:
        return
    if offset >= lo and offset + reach < hi:
        yield (0,) * len(sizes), sizes
        return
    d = max((d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: strides[d])
    step, count = strides[d], sizes[d]
    inner = reach - (count - 1) * step
    first, last = max(-((offset - lo) // step), 0), min((hi - 1 - inner - offset) // step, count - 1)
    if first <= last:
        start = tuple(first if k == d else 0 for k in range(len(sizes)))
        yield start, tuple(last - first + 1 if k == d else n for k, n in enumerate(sizes))
    low, high = max(-((offset + inner - lo) // step), 0), min((hi - 1 - offset) // step, count - 1)
    one = tuple(1 if k == d else n for k, n in enumerate(sizes))
    within = range(first, last + 1) if first <= last else range(low, low)
    for i in (*range(low, within.start), *range(within.stop, high + 1)):
        for at, part in clip_block(one, strides, offset + i * step, lo, hi):
            yield tuple(i if k == d else x for k, x in enumerate(at)), part
