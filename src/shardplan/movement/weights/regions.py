"""Regions: what one rank sends and receives, as strided blocks of at most four dims between two named parameters.

Only here names, offsets and strides are made, for one rank. A region's order is a function of the two ranks alone, so
both ends list what goes between them in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.movement.weights.contents import meet
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.lowering import DimRuns
from shardplan.movement.weights.owners import FamilyMove

NDIM = 4
Level = tuple[int, int, int]  # count, and the elements from one to the next in the target and in the source


@dataclass(frozen=True, slots=True)
class RefitRegion:
    """One region: what its row of `RefitRegions` says, as ints."""

    source: int
    target: int
    move: int
    source_parameter: int
    target_parameter: int
    source_offset: int
    target_offset: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RefitRegions:
    """What a rank sends and receives: one row a region, int64; ranks are device ids. As an iterable, `RefitRegion`s.

    `source` and `target` are the two ranks (equal: a copy in place). `source_parameter` and `target_parameter` are
    numbers in `names(rank)` of either side; `source_offset` and `target_offset` are in elements of the parameter, and
    `sizes`, `source_strides` and `target_strides` [regions, 4], outermost first, likewise. `move` is the number of the
    pair of families in the plan, in which both dtypes stand.
    """

    source: np.ndarray
    target: np.ndarray
    move: np.ndarray
    source_parameter: np.ndarray
    target_parameter: np.ndarray
    source_offset: np.ndarray
    target_offset: np.ndarray
    sizes: np.ndarray
    source_strides: np.ndarray
    target_strides: np.ndarray

    def __len__(self) -> int:
        """Return the number of regions."""
        return len(self.source)

    def __iter__(self) -> Iterator[RefitRegion]:
        """Yield the regions one by one."""
        columns: list[list[Any]] = [getattr(self, f.name).tolist() for f in fields(self)]
        for row in zip(*columns, strict=True):
            yield RefitRegion(*row[:-3], *map(tuple, row[-3:]))

    @property
    def elements(self) -> np.ndarray:
        """The elements of every region, int64."""
        return np.prod(self.sizes, axis=1, dtype=np.int64)

    def select_regions(self, chosen: np.ndarray) -> RefitRegions:
        """Return some of the regions: those that a mask or an array of numbers says, in order."""
        return RefitRegions(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def peer(self, rank: int) -> np.ndarray:
        """Return the other rank of every region, int64."""
        return np.where(self.source == rank, self.target, self.source)


@dataclass(frozen=True, slots=True, eq=False)
class DimBlocks:
    """Blocks along one dim that are alike but for where they are: names and offsets on both ends."""

    levels: tuple[Level, ...]
    at: np.ndarray  # [blocks, 4]: target name, source name, target offset, source offset


@dataclass(frozen=True, slots=True)
class MoveEnd:
    """One end of a move at one device: family, place, strides, and the steps from name to name of every name dim."""

    family: StoredFamily
    place: int
    strides: tuple[int, ...]
    name_strides: tuple[int, ...]

    @staticmethod
    def of(family: StoredFamily, place: int) -> MoveEnd:
        """Return the end of a family at a place in mesh order."""
        strides: list[int] = []
        step = 1
        for size in reversed(family.local_shape(place)):
            strides.insert(0, step)
            step *= size
        names: list[int] = []
        step = 1
        for dim in reversed(family.names):
            names.insert(0, step)
            step *= len(dim.values[int(family.coordinate(dim.axes)[place])])
        return MoveEnd(family, place, tuple(strides), tuple(names))

    def rows(self, runs: DimRuns) -> tuple[np.ndarray, ...]:
        """Return the runs of a dim here: start, length, name, name step, offset, step; int64."""
        rows = runs.rows(int(self.family.coordinate(runs.axes)[self.place]))
        strides = np.array(self.strides, dtype=np.int64)
        each = self.name_strides[runs.hole] if runs.hole >= 0 else 0
        named = (runs.name[rows] * each, runs.name_step[rows] * each)
        return (runs.start[rows], runs.length[rows], *named, runs.at[rows] @ strides, runs.step[rows] @ strides)


class RegionWriter:
    """Regions of the moves between two sides, with what several shares have in common worked out once."""

    def __init__(self, source: tuple[StoredFamily, ...], target: tuple[StoredFamily, ...]) -> None:
        """Take the families of both sides."""
        self.families = (source, target)
        self.ends: dict[tuple[int, int, int], MoveEnd] = {}
        self.blocks: dict[tuple[object, ...], list[DimBlocks]] = {}

    def end(self, side: int, family: int, place: int) -> MoveEnd:
        """Return an end, remembered."""
        key = (side, family, place)
        if key not in self.ends:
            self.ends[key] = MoveEnd.of(self.families[side][family], place)
        return self.ends[key]

    def share(self, number: int, move: FamilyMove, row: int) -> Iterator[tuple[tuple[Level, ...], np.ndarray]]:
        """Yield levels, outermost first, and blocks [blocks, 4] of one share of a move."""
        target = self.end(1, move.target_family, int(move.target[row]))
        source = self.end(0, move.source_family, int(move.source[row]))
        groups: list[tuple[tuple[Level, ...], np.ndarray]] = [((), np.zeros((1, 4), dtype=np.int64))]
        for d in range(move.content.shape[1]):
            more = self.dim(number, move, row, d, target, source)
            groups = [
                (levels + b.levels, (at[:, None] + b.at[None]).reshape(-1, 4)) for levels, at in groups for b in more
            ]
        for levels, at in groups:
            yield _fewest(levels, at)

    def dim(self, number: int, move: FamilyMove, row: int, d: int, target: MoveEnd, source: MoveEnd) -> list[DimBlocks]:
        """Return the blocks of one dim of a share, remembered."""
        t_runs, s_runs = target.family.tensors[move.tensor][d], source.family.tensors[move.tensor][d]
        part = (int(move.first[row]), int(move.last[row]), int(move.parts[row])) if move.cut[row] == d else (0, 1, 1)
        t_at = int(target.family.coordinate(t_runs.axes)[target.place])
        s_at = int(source.family.coordinate(s_runs.axes)[source.place])
        key = (number, d, t_at, s_at, int(move.content[row, d]), int(move.cell[row, d]), part)
        key += (target.strides, target.name_strides, source.strides, source.name_strides)
        if key not in self.blocks:
            legal = _window(move, row, d, part)
            self.blocks[key] = _blocks(target.rows(t_runs), source.rows(s_runs), legal)
        return self.blocks[key]


def _window(move: FamilyMove, row: int, d: int, part: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The logical intervals of a share along a dim: the content within the cell, from part to part."""
    contents, cells = move.contents[d], move.cells[d]
    c, cell = int(move.content[row, d]), int(move.cell[row, d])
    rows = slice(int(contents.ptr[c]), int(contents.ptr[c + 1]))
    mine = cells.cell == cell
    a, a_stop, b, b_stop = contents.start[rows], contents.stop[rows], cells.start[mine], cells.stop[mine]
    ia, ib = meet(a, a_stop, b, b_stop)
    start, stop = np.maximum(a[ia], b[ib]), np.minimum(a_stop[ia], b_stop[ib])
    first, last, parts = part
    if parts == 1:
        return start, stop
    before = np.cumsum(stop - start) - (stop - start)
    total = int((stop - start).sum())
    low, high = total * first // parts, total * last // parts
    clipped = np.maximum(start, start + low - before), np.minimum(stop, start + high - before)
    kept = clipped[1] > clipped[0]
    return clipped[0][kept], clipped[1][kept]


def _drop_overlaps(rows: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The runs of an owner ascending, each index once: the first of those that hold it."""
    order = np.argsort(rows[0], kind="stable")
    rows = tuple(r[order] for r in rows)
    stop = rows[0] + rows[1]
    if (rows[0][1:] >= stop[:-1]).all():
        return rows
    start, length, name, name_step, offset, step = (r.copy() for r in rows)
    reach = np.maximum.accumulate(np.concatenate([start[:1], stop[:-1]]))
    skip = np.clip(reach - start, 0, length)
    kept = length > skip
    moved = (start + skip, length - skip, name + skip * name_step, name_step, offset + skip * step, step)
    return tuple(r[kept] for r in moved)


def _blocks(
    target: tuple[np.ndarray, ...], source: tuple[np.ndarray, ...], legal: tuple[np.ndarray, np.ndarray]
) -> list[DimBlocks]:
    source = _drop_overlaps(source)
    ia, ib = meet(*legal, source[0], source[0] + source[1])
    start = np.maximum(legal[0][ia], source[0][ib])
    stop = np.minimum(legal[1][ia], (source[0] + source[1])[ib])
    t_stop = target[0] + target[1]
    it, ix = meet(target[0], t_stop, start, stop)
    first = np.maximum(target[0][it], start[ix])
    length = np.minimum(t_stop[it], stop[ix]) - first
    ends: list[np.ndarray] = []
    for rows, at in ((target, it), (source, ib[ix])):
        shift = first - rows[0][at]
        ends += [rows[2][at] + shift * rows[3][at], rows[3][at], rows[4][at] + shift * rows[5][at], rows[5][at]]
    t_name, t_each, t_at, t_step, s_name, s_each, s_at, s_step = ends
    along = ((t_each != 0) | (s_each != 0)) & (length > 1)
    if along.any():  # a name an index: each is a block of its own
        count = np.where(along, length, 1)
        at = np.repeat(np.arange(len(count)), count)
        k = nth_of_each(count)
        t_name, s_name = t_name[at] + k * t_each[at], s_name[at] + k * s_each[at]
        t_at, s_at = t_at[at] + k * t_step[at], s_at[at] + k * s_step[at]
        length, t_step, s_step = np.where(along[at], 1, length[at]), t_step[at], s_step[at]
    t_step, s_step = np.where(length > 1, t_step, 0), np.where(length > 1, s_step, 0)
    table = np.stack([length, t_step, s_step, t_name, s_name, t_at, s_at], axis=1)
    return _group_blocks(_progressions(table))


def _progressions(table: np.ndarray) -> list[tuple[tuple[Level, ...], tuple[int, ...]]]:
    """Rows (length, steps, names, offsets) with neighbours that repeat at equal distances joined to one block.

    Distances go forward on both ends: a transport need not have negative strides, and torch's views have none.
    """
    out: list[tuple[tuple[Level, ...], tuple[int, ...]]] = []
    rows = table.tolist()
    k = 0
    while k < len(rows):
        length, t_step, s_step, t_name, s_name, t_at, s_at = rows[k]
        end = k + 1
        if end < len(rows) and rows[end][:5] == rows[k][:5]:
            t_far, s_far = rows[end][5] - t_at, rows[end][6] - s_at
            while min(t_far, s_far) > 0 and end < len(rows) and rows[end][:5] == rows[k][:5]:
                if rows[end][5] - rows[end - 1][5] != t_far or rows[end][6] - rows[end - 1][6] != s_far:
                    break
                end += 1
            levels: tuple[Level, ...] = ((end - k, t_far, s_far), (length, t_step, s_step))
        else:
            levels = ((length, t_step, s_step),)
        out.append((tuple(x for x in levels if x[0] > 1), (t_name, s_name, t_at, s_at)))
        k = end
    return out


def _group_blocks(found: list[tuple[tuple[Level, ...], tuple[int, ...]]]) -> list[DimBlocks]:
    by_levels: dict[tuple[Level, ...], list[tuple[int, ...]]] = {}
    for levels, at in found:
        by_levels.setdefault(levels, []).append(at)
    return [DimBlocks(levels, np.array(at, dtype=np.int64)) for levels, at in by_levels.items()]


def merge_levels(levels: Iterable[Level]) -> list[Level]:
    """Join levels where one goes on where the next ends, at both ends; the outermost is first."""
    out: list[Level] = []
    for count, one, other in levels:
        if out and out[-1][1:] == (one * count, other * count):
            out[-1] = (out[-1][0] * count, one, other)
        else:
            out.append((count, one, other))
    return out


def split_block(sizes: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the parts (start, sizes) of a block that have at most so many elements, in order.

    >>> list(split_block((3, 4), 8)), len(list(split_block((3, 4), 3)))
    ([((0, 0), (2, 4)), ((2, 0), (1, 4))], 6)
    """
    if math.prod(sizes) <= most or not sizes:
        yield (0,) * len(sizes), sizes
        return
    inner = math.prod(sizes[1:])
    each = max(most // inner, 1)
    for first in range(0, sizes[0], each):
        count = min(each, sizes[0] - first)
        if inner <= most:
            yield (first, *(0 for _ in sizes[1:])), (count, *sizes[1:])
        else:
            for start, part in split_block(sizes[1:], most):
                yield (first, *start), (1, *part)


def _fewest(levels: tuple[Level, ...], at: np.ndarray) -> tuple[tuple[Level, ...], np.ndarray]:
    """Levels joined where one goes on where the next ends, and at most `NDIM`: more become blocks."""
    ordered = sorted((x for x in levels if x[0] > 1), key=lambda x: (-abs(x[1]), -abs(x[2])))
    merged = merge_levels(ordered)
    while len(merged) > NDIM:
        fewest = min(range(len(merged)), key=lambda k: merged[k][0])
        count, t, s = merged.pop(fewest)
        step = np.arange(count)[:, None] * np.array([[0, 0, t, s]])
        at = (at[:, None] + step[None]).reshape(-1, 4)
    return tuple(merged), at


def write_regions(
    writer: RegionWriter,
    moves: tuple[FamilyMove, ...],
    ids: tuple[np.ndarray, np.ndarray],
    starts: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]],
    rank: int,
) -> RefitRegions:
    """Return the regions of a rank: of every move, and of every share of it that begins or ends there."""
    parts: list[tuple[tuple[int, ...], tuple[Level, ...], np.ndarray]] = []
    for number, move in enumerate(moves):
        mine = np.flatnonzero((ids[0][move.source] == rank) | (ids[1][move.target] == rank))
        for row in mine.tolist():
            s_place, t_place = int(move.source[row]), int(move.target[row])
            head = (int(ids[0][s_place]), int(ids[1][t_place]), number)
            names = starts[1][t_place][move.target_family], starts[0][s_place][move.source_family]
            for levels, at in writer.share(number, move, row):
                parts.append(((*head, *names), levels, at))
    count = [len(at) for _, _, at in parts]
    heads = np.repeat(np.array([h for h, _, _ in parts], dtype=np.int64).reshape(-1, 5), count, axis=0)
    none = np.zeros((0, 4), dtype=np.int64)
    at = np.concatenate([none, *(a for _, _, a in parts)])
    padded = np.array([((1, 0, 0),) * (NDIM - len(x)) + x for _, x, _ in parts], dtype=np.int64).reshape(-1, NDIM, 3)
    shape = np.repeat(padded, count, axis=0)
    return RefitRegions(
        heads[:, 0],
        heads[:, 1],
        heads[:, 2],
        heads[:, 4] + at[:, 1],
        heads[:, 3] + at[:, 0],
        at[:, 3],
        at[:, 2],
        shape[:, :, 0],
        shape[:, :, 2],
        shape[:, :, 1],
    )
