"""Who sends what: every content of every receiver cut among the owners of its cells, so that owners share the work.

Where D receivers want a cell that S owners have, their D copies are laid end to end and cut into S equal shares: with
D a multiple of S each owner serves D/S whole copies; else a copy is cut along one dim. A receiver that is itself an
owner takes its own. What is small is sent whole, by the owners in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.movement.weights.contents import DimCells, DimContents, cells_of, contents_of, overlap_of
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.lowering import DimRuns
from shardplan.movement.weights.relays import relay_within_node
from shardplan.movement.weights.spreading import Shares, spread


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


def copies_of(
    tensor: str,
    sides: tuple[tuple[int, StoredFamily], tuple[int, StoredFamily]],
    contents: tuple[DimContents, ...],
    cells: tuple[DimCells, ...],
    itself: bool,
) -> FamilyMove:
    """Return a move from the first owner of every cell of one family to all who hold it in another, of one side.

    `sides` are (number, family) of the owners and of the holders. `itself` says whether the owner is one of the latter.
    """
    (first_number, first), (second_number, second) = sides
    content, cell, length = _combinations(contents, cells)
    holders, owners = _Groups(*_target_codes(second, tensor, contents)), _Groups(*_source_codes(first, tensor, cells))
    wants = holders.find(_code(content, [len(c.ptr) - 1 for c in contents]))
    by = owners.places[owners.ptr[owners.find(_code(cell, [c.count for c in cells]))]]
    combo, to = holders.rows(wants)
    apart = (to != by[combo]) | itself
    combo, to = combo[apart], to[apart]
    zero, one = np.zeros(len(to), dtype=np.int64), np.ones(len(to), dtype=np.int64)
    columns = _columns_of((combo, to, by[combo], zero, zero, one, one), content, cell, length)
    return FamilyMove(tensor, first_number, second_number, contents, cells, *columns)


def _combinations(
    contents: tuple[DimContents, ...], cells: tuple[DimCells, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every content with every cell that it meets, over all dims together: their numbers, and lengths, [n, dims]."""
    overlaps = [overlap_of(c, s) for c, s in zip(contents, cells, strict=True)]
    grid = np.meshgrid(*(np.arange(len(o.length)) for o in overlaps), indexing="ij")
    chosen = [g.reshape(-1) for g in grid]
    count = math.prod(len(o.length) for o in overlaps)
    content = _columns([o.content[k] for o, k in zip(overlaps, chosen, strict=True)], count)
    cell = _columns([o.cell[k] for o, k in zip(overlaps, chosen, strict=True)], count)
    length = _columns([o.length[k] for o, k in zip(overlaps, chosen, strict=True)], count)
    return content, cell, length


def move_of(
    tensor: str,
    sides: tuple[tuple[int, StoredFamily, np.ndarray], tuple[int, StoredFamily, np.ndarray]],
    contents: tuple[DimContents, ...],
    cells: tuple[DimCells, ...],
    itemsize: int,
    turn: int,
    node: np.ndarray | None = None,
) -> tuple[FamilyMove, FamilyMove]:
    """Return who sends what between two families: (number, family, device ids) of the source and of the target.

    The second has what receivers of one node (`node` [places of the target]) pass on among them, from target to target;
    it is empty where `node` is None.
    """
    (source_number, source, source_ids), (target_number, target, target_ids) = sides
    content, cell, length = _combinations(contents, cells)
    receivers = _Groups(*_target_codes(target, tensor, contents))
    owners = _Groups(*_source_codes(source, tensor, cells))
    wants = receivers.find(_code(content, [len(c.ptr) - 1 for c in contents]))
    has = owners.find(_code(cell, [c.count for c in cells]))
    ids = source_ids, target_ids
    shares = _shares(receivers, owners, wants, has, length, itemsize, turn, ids, node)

    def made(found: Shares, number: int) -> FamilyMove:
        head = tensor, number, target_number, contents, cells
        return FamilyMove(*head, *_columns_of(found, content, cell, length))

    return made(shares[0], source_number), made(shares[1], target_number)


def _columns_of(shares: Shares, content: np.ndarray, cell: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """The columns of a move: places, contents and cells of its shares, parts and elements; empty shares dropped."""
    combo, to, by, cut, first, last, parts = shares
    elements = np.prod(length[combo], axis=1, dtype=np.int64) if length.shape[1] else np.ones(len(combo), np.int64)
    whole = length[combo, cut] if length.shape[1] else np.ones(len(combo), np.int64)
    part = whole * last // parts - whole * first // parts
    elements = elements // np.maximum(whole, 1) * part
    kept = elements > 0
    arrays = (to, by, content[combo], cell[combo], cut, first, last, parts, elements)
    return [a[kept] for a in arrays]


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
        at = nth_of_each(count) + np.repeat(first, count)
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

    def rows(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A row a place of groups, as two arrays: the number in `groups`, and the place."""
        count = self.count(groups)
        which = np.repeat(np.arange(len(groups)), count)
        at = nth_of_each(count) + np.repeat(self.ptr[groups], count)
        return which, self.places[at]


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
        return self.groups.rows(self.groups.find(_code(cell, self.sizes)))


def _shares(
    receivers: _Groups,
    owners: _Groups,
    wants: np.ndarray,
    has: np.ndarray,
    length: np.ndarray,
    itemsize: int,
    turn: int,
    ids: tuple[np.ndarray, np.ndarray],
    node: np.ndarray | None,
) -> tuple[Shares, Shares]:
    """The shares of every combination of content and cell, from owners and between receivers of a node."""
    out: list[Shares] = []
    passed: list[Shares] = []
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
        elif node is not None and dd > 1 and len(combos):
            outside, inside, served = relay_within_node(combos, to, by, node[to], length, size, turn)
            out.append(outside)
            passed.append(inside)
            combos, to, by = combos[~served], to[~served], by[~served]
        out += spread(combos, to, by, length, size, turn)
    return _sort_shares(out), _sort_shares(passed)


def _sort_shares(out: list[Shares]) -> Shares:
    """Shares together, in order of the combinations."""
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
        found += spread(np.array([combo]), to[others][None], by[None], length, size, turn)
    return found
