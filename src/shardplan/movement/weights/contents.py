"""What is held along one dim: contents of receivers, cells of owners, and how they overlap.

A *content* is a set of logical indices that some coordinates of a target hold, alike. A *cell* of a source is a set of
indices that the same coordinates own: the cells of a dim are disjoint, also where a table gives an index to several.
All are intervals, as arrays; the bytes between two devices are the product of their overlaps over the dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.movement.weights.lowering import DimRuns

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)


@dataclass(frozen=True, slots=True, eq=False)
class DimContents:
    """The contents along a dim: `of` is the content of every coordinate (-1: nothing), int64.

    The intervals of content c are rows `ptr[c]` to `ptr[c + 1]` of `start` and `stop`, ascending and apart.
    """

    of: np.ndarray
    ptr: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class DimCells:
    """The cells along a dim: disjoint intervals, ascending, the cell of each, and which coordinates own a cell.

    `owned` has a row (coordinate, cell) for each of both, sorted.
    """

    start: np.ndarray
    stop: np.ndarray
    cell: np.ndarray
    owned: np.ndarray
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class DimOverlap:
    """How contents meet cells: `content`, `cell` and `length`, a row for each pair that meets."""

    content: np.ndarray
    cell: np.ndarray
    length: np.ndarray


def meet(a: np.ndarray, a_stop: np.ndarray, b: np.ndarray, b_stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which intervals of `a` meet which of `b`, as two arrays of numbers; those of `b` ascend and are apart."""
    first = np.searchsorted(b_stop, a, side="right")
    count = np.maximum(np.searchsorted(b, a_stop, side="left") - first, 0)
    count[a_stop <= a] = 0
    ia = np.repeat(np.arange(len(a)), count)
    ib = nth_of_each(count) + np.repeat(first, count)
    return ia, ib


def merge_intervals(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return intervals as the fewest that hold the same indices, ascending."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    if not len(start):
        return start, stop
    reach = np.maximum.accumulate(stop)
    new = np.concatenate([[True], start[1:] > reach[:-1]])
    at = np.flatnonzero(new)
    return start[at], np.maximum.reduceat(stop, at)


def contents_of(runs: DimRuns, legal: np.ndarray) -> DimContents:
    """Return the contents of the coordinates that `legal` (bool) says."""
    of = np.full(runs.coordinates, -1, dtype=np.int64)
    known: dict[tuple[bytes, bytes], int] = {}
    intervals: list[tuple[np.ndarray, np.ndarray]] = []
    for c in np.flatnonzero(legal):
        rows = runs.rows(int(c))
        start, stop = merge_intervals(runs.start[rows], runs.start[rows] + runs.length[rows])
        if not len(start):
            continue
        key = (start.tobytes(), stop.tobytes())
        if key not in known:
            known[key] = len(intervals)
            intervals.append((start, stop))
        of[c] = known[key]
    ptr = np.cumsum([0, *(len(start) for start, _ in intervals)], dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    starts, stops = ([none, *(pair[k] for pair in intervals)] for k in (0, 1))
    return DimContents(of, ptr, np.concatenate(starts), np.concatenate(stops))


def cells_of(runs: DimRuns, legal: np.ndarray) -> DimCells:
    """Return the cells of the coordinates that `legal` (bool) says."""
    owner = np.repeat(np.arange(runs.coordinates), np.diff(runs.ptr))
    chosen = legal[owner]
    owner, start, stop = owner[chosen], runs.start[chosen], (runs.start + runs.length)[chosen]
    cuts = np.unique(np.concatenate([start, stop]))
    first, last = np.searchsorted(cuts, start), np.searchsorted(cuts, stop)
    count = last - first
    piece = nth_of_each(count) + np.repeat(first, count)
    pairs = np.unique(np.stack([piece, np.repeat(owner, count)], axis=1), axis=0)
    # Pieces with the same owners are one cell: owners are compared by two sums of mixed numbers.
    mark = np.zeros((max(len(cuts) - 1, 0), 2), dtype=np.uint64)
    for k in range(2):
        np.add.at(mark[:, k], pairs[:, 0], _hash_values(pairs[:, 1], k))
    kept = np.unique(pairs[:, 0])
    _, first_of, cell = np.unique(mark[kept], axis=0, return_index=True, return_inverse=True)
    cell = cell.reshape(-1)
    rank = np.empty(len(first_of), dtype=np.int64)
    rank[np.argsort(first_of, kind="stable")] = np.arange(len(first_of))
    cell = rank[cell]  # numbered in order of the first index
    number = np.full(max(len(cuts) - 1, 0), -1, dtype=np.int64)
    number[kept] = cell
    owned = np.unique(np.stack([pairs[:, 1], number[pairs[:, 0]]], axis=1), axis=0)
    start, stop = cuts[:-1][kept], cuts[1:][kept]
    if len(kept):
        new = np.concatenate([[True], (cell[1:] != cell[:-1]) | (start[1:] != stop[:-1])])
        at = np.flatnonzero(new)
        stop = np.maximum.reduceat(stop, at)
        start, cell = start[at], cell[at]
    return DimCells(start, stop, cell, owned, len(first_of))


def _hash_values(values: np.ndarray, seed: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = (values.astype(np.uint64) + np.uint64(1 + seed * 7919)) * np.uint64(_MIX[0])
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[1])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[2])
        return x ^ (x >> np.uint64(31))


def overlap_of(contents: DimContents, cells: DimCells) -> DimOverlap:
    """Return how contents meet cells."""
    ia, ib = meet(contents.start, contents.stop, cells.start, cells.stop)
    length = np.minimum(contents.stop[ia], cells.stop[ib]) - np.maximum(contents.start[ia], cells.start[ib])
    content = np.repeat(np.arange(len(contents.ptr) - 1), np.diff(contents.ptr))[ia]
    code, inverse = np.unique(content * max(cells.count, 1) + cells.cell[ib], return_inverse=True)
    total = np.zeros(len(code), dtype=np.int64)
    np.add.at(total, inverse.reshape(-1), length)
    return DimOverlap(code // max(cells.count, 1), code % max(cells.count, 1), total)


def find_uncovered_index(contents: DimContents, cells: DimCells) -> int | None:
    """Return the first index of any content that no cell has, None where each has an owner."""
    start, stop = merge_intervals(cells.start, cells.stop)
    place = np.searchsorted(stop, contents.start, side="right")
    for a, b, k in zip(contents.start.tolist(), contents.stop.tolist(), place.tolist(), strict=True):
        if k >= len(start) or start[k] > a:
            return a
        if stop[k] < b:
            return int(stop[k])
    return None
