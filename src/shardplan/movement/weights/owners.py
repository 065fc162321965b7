"""Who sends what: every content of every receiver cut among the owners of its cells, so that owners share the work.

Where D receivers want a cell that S owners have, their D copies are laid end to end and cut into S equal shares: with
D a multiple of S each owner serves D/S whole copies; else a copy is cut along one dim. A receiver that is itself an
owner takes its own. What is small is sent whole, by the owners in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardplan.movement.weights.contents import DimCells, DimContents, cells_of, contents_of, overlap_of
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.lowered import DimRuns

SMALL = 1 << 16  # bytes of a share: a message of 64 kB takes about as long as its latency (nominal: 5 us at 50 GB/s)
_FINE = 8  # a dim is cut into n shares that differ by one index; from 8 n indices on that is little


@dataclass(frozen=True, slots=True, eq=False)
class FamilyMove:
    """All that goes from one stored parameter of the source to one of the target, of one logical tensor.

    Per share, int64: `target` and `source` places, `content` and `cell` per dim [shares, dims], and the part: from
    `first` to `last` of `parts` equal parts along dim `cut`. `elements` counts them.
    """

    tensor: str
    source_family: int
    target_family: int
    contents: tuple[DimContents, ...]
    cells: tuple[DimCells, ...]
    target: np.ndarray
    source: np.ndarray
    content: np.ndarray
    cell: np.ndarray
    cut: np.ndarray
    first: np.ndarray
    last: np.ndarray
    parts: np.ndarray
    elements: np.ndarray


def legal_coordinates(family: StoredFamily, runs: DimRuns) -> np.ndarray:
    """Return which coordinates along a dim a family has devices at, as its `on` says: bool."""
    legal = np.ones(runs.coordinates, dtype=bool)
    stride = 1
    for axis in reversed(runs.axes):
        size = family.axes[axis]
        if axis in family.on:
            legal &= np.arange(runs.coordinates) // stride % size == family.on[axis]
        stride *= size
    return legal


def family_contents(family: StoredFamily, tensor: str) -> tuple[DimContents, ...]:
    """Return the contents of every dim of a tensor in a stored parameter."""
    return tuple(contents_of(runs, legal_coordinates(family, runs)) for runs in family.tensors[tensor])


def family_cells(family: StoredFamily, tensor: str) -> tuple[DimCells, ...]:
    """Return the cells of every dim of a tensor in a stored parameter."""
    return tuple(cells_of(runs, legal_coordinates(family, runs)) for runs in family.tensors[tensor])


def move_of(
    tensor: str,
    sides: tuple[tuple[int, StoredFamily, np.ndarray], tuple[int, StoredFamily, np.ndarray]],
    contents: tuple[DimContents, ...],
    cells: tuple[DimCells, ...],
    itemsize: int,
    turn: int,
) -> FamilyMove:
    """Return who sends what between two families: (number, family, device ids) of the source and of the target."""
    (source_number, source, source_ids), (target_number, target, target_ids) = sides
    overlaps = [overlap_of(c, s) for c, s in zip(contents, cells, strict=True)]
    grid = np.meshgrid(*(np.arange(len(o.length)) for o in overlaps), indexing="ij")
    chosen = [g.reshape(-1) for g in grid]
    count = math.prod(len(o.length) for o in overlaps)
    content = _columns([o.content[k] for o, k in zip(overlaps, chosen, strict=True)], count)
    cell = _columns([o.cell[k] for o, k in zip(overlaps, chosen, strict=True)], count)
    length = _columns([o.length[k] for o, k in zip(overlaps, chosen, strict=True)], count)
    receivers = _Groups(*_target_codes(target, tensor, contents))
    owners = _Groups(*_source_codes(source, tensor, cells))
    wants = receivers.find(_code(content, [len(c.ptr) - 1 for c in contents]))
    has = owners.find(_code(cell, [c.count for c in cells]))
    shares = _shares(receivers, owners, wants, has, length, itemsize, turn, (source_ids, target_ids))
    combo, to, by, cut, first, last, parts = shares
    elements = np.prod(length[combo], axis=1, dtype=np.int64) if length.shape[1] else np.ones(len(combo), np.int64)
    whole = length[combo, cut] if length.shape[1] else np.ones(len(combo), np.int64)
    part = whole * last // parts - whole * first // parts
    elements = elements // np.maximum(whole, 1) * part
    kept = elements > 0
    arrays = (to, by, content[combo], cell[combo], cut, first, last, parts, elements)
    return FamilyMove(tensor, source_number, target_number, contents, cells, *(a[kept] for a in arrays))


def _columns(arrays: list[np.ndarray], count: int) -> np.ndarray:
    return np.stack(arrays, axis=1) if arrays else np.zeros((count, 0), dtype=np.int64)


def _code(columns: np.ndarray, sizes: list[int]) -> np.ndarray:
    code = np.zeros(len(columns), dtype=np.int64)
    for k, size in enumerate(sizes):
        code = code * max(size, 1) + columns[:, k]
    return code


def _target_codes(
    family: StoredFamily, tensor: str, contents: tuple[DimContents, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The places that hold something, and the code of what each holds."""
    kept = family.present
    code = np.zeros(len(kept), dtype=np.int64)
    for runs, dim in zip(family.tensors[tensor], contents, strict=True):
        own = dim.of[family.coordinate(runs.axes)]
        kept = kept & (own >= 0)
        code = code * max(len(dim.ptr) - 1, 1) + np.maximum(own, 0)
    return np.flatnonzero(kept), code[kept]


def _source_codes(family: StoredFamily, tensor: str, cells: tuple[DimCells, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The places that own cells, one row for each cell of theirs, and its code."""
    places = np.flatnonzero(family.present)
    code = np.zeros(len(places), dtype=np.int64)
    for runs, dim in zip(family.tensors[tensor], cells, strict=True):
        own = family.coordinate(runs.axes)[places]
        first = np.searchsorted(dim.owned[:, 0], own, side="left")
        count = np.searchsorted(dim.owned[:, 0], own, side="right") - first
        at = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        places, code = np.repeat(places, count), np.repeat(code, count)
        code = code * max(dim.count, 1) + dim.owned[at, 1]
    return places, code


class _Groups:
    """Places by code: those of group g are `places[ptr[g]:ptr[g + 1]]`, ascending."""

    def __init__(self, places: np.ndarray, code: np.ndarray) -> None:
        order = np.lexsort((places, code))
        self.places = places[order]
        self.codes, first = np.unique(code[order], return_index=True)
        self.ptr = np.append(first, len(order)).astype(np.int64)

    def find(self, codes: np.ndarray) -> np.ndarray:
        """The group of each code, all of which there are."""
        return np.searchsorted(self.codes, codes)

    def count(self, groups: np.ndarray) -> np.ndarray:
        return self.ptr[groups + 1] - self.ptr[groups]

    def members(self, groups: np.ndarray, count: int) -> np.ndarray:
        """The places of groups that have `count` each: [groups, count]."""
        return self.places[self.ptr[groups][:, None] + np.arange(count)]


class OwnerGroups:
    """Who owns each cell of a tensor in a stored parameter, over all its dims together."""

    def __init__(self, groups: _Groups, sizes: list[int]) -> None:
        """Take the groups of places, and the number of cells of every dim."""
        self.groups, self.sizes = groups, sizes

    @staticmethod
    def of(family: StoredFamily, tensor: str, cells: tuple[DimCells, ...]) -> OwnerGroups:
        """Return the owners of a tensor's cells."""
        return OwnerGroups(_Groups(*_source_codes(family, tensor, cells)), [c.count for c in cells])

    def places_of(self, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows (number of the cell in `cell` [n, dims], place), as two arrays."""
        found = self.groups.find(_code(cell, self.sizes))
        count = self.groups.count(found)
        which = np.repeat(np.arange(len(cell)), count)
        at = (
            np.arange(len(which))
            - np.repeat(np.cumsum(count) - count, count)
            + np.repeat(self.groups.ptr[found], count)
        )
        return which, self.groups.places[at]


Shares = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _shares(
    receivers: _Groups,
    owners: _Groups,
    wants: np.ndarray,
    has: np.ndarray,
    length: np.ndarray,
    itemsize: int,
    turn: int,
    ids: tuple[np.ndarray, np.ndarray],
) -> Shares:
    """The shares of every combination of content and cell: combination, receiver, owner, cut, first, last, parts."""
    out: list[Shares] = []
    together = len(np.intersect1d(ids[0], ids[1])) > 0
    d, s = receivers.count(wants), owners.count(has)
    size = np.prod(length, axis=1, dtype=np.int64) * itemsize if length.shape[1] else np.full(len(d), itemsize)
    for dd, ss in np.unique(np.stack([d, s], axis=1), axis=0).tolist():
        combos = np.flatnonzero((d == dd) & (s == ss))
        to, by = receivers.members(wants[combos], dd), owners.members(has[combos], ss)
        if together:
            own = ids[1][to][:, :, None] == ids[0][by][:, None, :]
            mine = own.any(axis=(1, 2))
            for k in np.flatnonzero(mine):
                out += _with_own(combos[k], to[k], by[k], own[k], length, size, turn)
            combos, to, by = combos[~mine], to[~mine], by[~mine]
        out += _spread(combos, to, by, length, size, turn)
    if not out:
        return tuple(np.zeros(0, dtype=np.int64) for _ in range(7))  # pyright: ignore[reportReturnType]
    combo, *rest = (np.concatenate(column) for column in zip(*out, strict=True))
    order = np.argsort(combo, kind="stable")
    return tuple(a[order] for a in (combo, *rest))  # pyright: ignore[reportReturnType]


def _with_own(
    combo: np.int64, to: np.ndarray, by: np.ndarray, own: np.ndarray, length: np.ndarray, size: np.ndarray, turn: int
) -> list[Shares]:
    """The shares of one combination of which some receivers are owners: these take their own."""
    at, mine = np.nonzero(own)
    at, where = np.unique(at, return_index=True)
    mine = mine[where]
    zero, one = np.zeros(len(at), dtype=np.int64), np.ones(len(at), dtype=np.int64)
    found: list[Shares] = [(np.full(len(at), combo), to[at], by[mine], zero, zero, one, one)]
    others = np.setdiff1d(np.arange(len(to)), at)
    if len(others):
        found += _spread(np.array([combo]), to[others][None], by[None], length, size, turn)
    return found


def _spread(
    combos: np.ndarray, to: np.ndarray, by: np.ndarray, length: np.ndarray, size: np.ndarray, turn: int
) -> list[Shares]:
    """The shares of combinations of D receivers [combos, D] and S owners [combos, S] each."""
    if not len(combos):
        return []
    d, s = to.shape[1], by.shape[1]
    parts = s // math.gcd(d, s)
    small = size[combos] < parts * SMALL
    if not length.shape[1] or parts == 1:
        small = np.ones(len(combos), dtype=bool)
    found: list[Shares] = []
    for some, pieces in ((small, 1), (~small, parts)):
        if not some.any():
            continue
        j, owner, first, last = _template(d, s, pieces)
        n, k = int(some.sum()), len(j)
        cut = np.repeat(_cut_dim(length[combos[some]], pieces), k)
        # In turn, so that the one index that some shares have more does not meet the same owner every time.
        shift = (combos[some] + turn) % s if d % s else np.zeros(n, dtype=np.int64)
        chosen = (owner[None] + shift[:, None]) % s
        sender = np.take_along_axis(by[some], chosen, axis=1).reshape(-1)
        sizes = np.tile(first, n), np.tile(last, n), np.full(n * k, pieces, dtype=np.int64)
        found.append((np.repeat(combos[some], k), to[some][:, j].reshape(-1), sender, cut, *sizes))
    return found


def _template(d: int, s: int, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of d receivers and s owners, each copy in `parts`: receiver, owner, first part and last of every share."""
    if parts == 1:
        j = np.arange(d, dtype=np.int64)
        owner = j * s // d if d >= s else j
        return j, owner, np.zeros_like(j), np.ones_like(j)
    rows: list[tuple[int, int, int, int]] = []
    each = d * parts // s
    for j in range(d):
        at = j * parts
        while at < (j + 1) * parts:
            end = min((at // each + 1) * each, (j + 1) * parts)
            rows.append((j, at // each, at - j * parts, end - j * parts))
            at = end
    columns = np.array(rows, dtype=np.int64).T
    return columns[0], columns[1], columns[2], columns[3]


def _cut_dim(length: np.ndarray, parts: int) -> np.ndarray:
    """The dim along which every combination is cut: the first that is cut evenly enough, else the longest."""
    if not length.shape[1]:
        return np.zeros(len(length), dtype=np.int64)
    fine = (length % parts == 0) | (length >= _FINE * parts)
    return np.where(fine.any(axis=1), np.argmax(fine, axis=1), np.argmax(length, axis=1))
