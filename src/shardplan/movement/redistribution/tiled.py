"""The state graph of one array with the costs of its true tiles: what `space` prices of even types, here of all.

On an uneven dim tiles are nested ceilings, some of them empty, so how two lists of runs relate depends on the size of
the dim. Boxes are therefore compared device by device, as `core.messages` does: bytes, peers, the group and whether a
permute exists are those of the ops. Types are numbered as in the `Space`; only those that a path may visit are priced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.movement.redistribution.problem import Problem
from shardplan.movement.redistribution.space import KEPT_ENTRIES, MOVE, RENAME, Edges, Space

# Boxes of a graph, types times devices: some 50 ns each to price a row of edges.
MOST_BOXES = 100_000


class _Meeting(NamedTuple):
    """How the boxes under some lists meet the tiles of others, in one dim; [lists, devices], `moved` [lists]."""

    overlap: np.ndarray  # elements of the new box that the device's own tile has
    met: np.ndarray  # tiles, other than empty ones, that the new box meets
    first: np.ndarray  # the number of the first of them
    moved: np.ndarray  # mask of the runs along which a device meets tiles other than of its own coordinate


class _Dim:
    """One dim of size n, cut by each of some lists of runs."""

    def __init__(self, n: int, lists: Sequence[tuple[int, ...]], sizes: Sequence[int], digits: np.ndarray) -> None:
        self.lists, self.sizes, self.digits = lists, sizes, digits
        self.bounds = [self._bounds(n, runs) for runs in lists]
        self.full = [np.concatenate([[0], np.cumsum(b[:, 1] > b[:, 0])]) for b in self.bounds]
        self.boxes = np.stack([b[self._numbers(runs)] for b, runs in zip(self.bounds, lists, strict=True)])
        self.size = self.boxes[:, :, 1] - self.boxes[:, :, 0]
        self.tiles = np.array([len(b) for b in self.bounds])

    def _bounds(self, n: int, runs: tuple[int, ...]) -> np.ndarray:
        """The start and stop of every tile, in order of their numbers (see `core.messages.tiles`)."""
        low, high = np.array([0]), np.array([n])
        for r in runs:
            chunk = -(-(high - low) // self.sizes[r])
            start = np.minimum(low[:, None] + np.arange(self.sizes[r]) * chunk[:, None], high[:, None])
            stop = np.minimum(start + chunk[:, None], high[:, None])
            low, high = start.reshape(-1), stop.reshape(-1)
        return np.stack([low, high], axis=1)

    def _numbers(self, runs: tuple[int, ...]) -> np.ndarray:
        """The tile of every device."""
        out = np.zeros(self.digits.shape[1], dtype=np.int64)
        for r in runs:
            out = out * self.sizes[r] + self.digits[r]
        return out

    def meeting(self, x: int, y: slice) -> _Meeting:
        """Hold the boxes under lists `y` against the tiles of list `x`."""
        bounds, full, own, new = self.bounds[x], self.full[x], self.boxes[x], self.boxes[y]
        first = np.minimum(np.searchsorted(bounds[:, 1], new[..., 0], side="right"), len(bounds) - 1)
        last = np.maximum(np.searchsorted(bounds[:, 0], new[..., 1], side="left"), first)
        overlap = np.minimum(new[..., 1], own[:, 1]) - np.maximum(new[..., 0], own[:, 0])
        needs, moved, inner = new[..., 1] > new[..., 0], np.zeros(len(new), dtype=np.int64), 1
        for r in reversed(self.lists[x]):
            low, high = first // inner, np.maximum(last - 1, first) // inner
            away = needs & ((low != high) | (low % self.sizes[r] != self.digits[r]))
            moved |= away.any(axis=1).astype(np.int64) << r
            inner *= self.sizes[r]
        return _Meeting(np.maximum(overlap, 0), np.where(needs, full[last] - full[first], 0), first, moved)


class Tiled:
    """A `Space` without partial or root runs, priced for one array of `shape`, over the types `allowed`."""

    def __init__(
        self, graph: Space, shape: Sequence[int], digits: np.ndarray, allowed: np.ndarray, portable: bool
    ) -> None:
        """Cut every dim by every list that an allowed type has there; `digits` are the devices' [runs, devices].

        `portable` leaves out exchanges over more than half of the devices where another op does.
        """
        self.space, self.types, self.lists = graph, graph.types, graph.lists
        self.partial, self.root, self.used = graph.partial, graph.root, graph.used
        self._whole, self._portable = math.prod(shape), portable
        self._here = np.flatnonzero(allowed)
        self._at = np.zeros((len(shape), len(graph.types)), dtype=np.int64)
        self._dims: list[_Dim] = []
        for d, n in enumerate(shape):
            ids, self._at[d, self._here] = np.unique(graph.types[self._here, d], return_inverse=True)
            self._dims.append(_Dim(n, [graph.lists[i] for i in ids], graph.sizes, digits))
        self._elements = np.ones((len(self._here), digits.shape[1]), dtype=np.int64)
        for dim, at in zip(self._dims, self._at, strict=True):
            self._elements *= dim.size[at[self._here]]
        self.size = np.full(len(graph.types), np.inf)
        self.size[self._here] = self._elements.max(axis=1) / self._whole
        self._rows: dict[int, Edges] = {}
        self._columns: dict[int, Edges] = {}

    def row(self, s: int) -> Edges:
        """Return one op from `s` to every type; kept once asked for."""
        if s not in self._rows:
            found = [dim.meeting(int(at[s]), slice(None)) for dim, at in zip(self._dims, self._at, strict=True)]
            return self._kept(self._rows, s, self._edges(np.array(s), self._here, found))
        return self._rows[s]

    def column(self, t: int) -> Edges:
        """Return one op from every type to `t`; kept once asked for."""
        if t not in self._columns:
            found: list[_Meeting] = []
            for dim, at in zip(self._dims, self._at, strict=True):
                y = slice(int(at[t]), int(at[t]) + 1)
                rows = [dim.meeting(x, y) for x in range(len(dim.lists))]
                found.append(_Meeting(*(np.concatenate(part) for part in zip(*rows, strict=True))))
            return self._kept(self._columns, t, self._edges(self._here, np.array(t), found))
        return self._columns[t]

    def _kept(self, edges: dict[int, Edges], end: int, found: Edges) -> Edges:
        if len(edges) * len(self.types) < KEPT_ENTRIES:
            edges[end] = found
        return found

    def _edges(self, sources: np.ndarray, targets: np.ndarray, meetings: Sequence[_Meeting]) -> Edges:
        """Price the ops between types, given how their lists meet in every dim; `Space` says which op it is."""
        named = self.space.edges(sources, targets)
        elements = self._elements[np.searchsorted(self._here, targets)]
        varying = sources if sources.ndim else targets
        kept, met, number = np.ones((3, len(varying), self._elements.shape[1]), dtype=np.int64)
        number *= 0
        moved = np.zeros(len(varying), dtype=np.int64)
        for dim, at, meeting in zip(self._dims, self._at, meetings, strict=True):
            k = at[varying]
            kept *= meeting.overlap[k]
            met *= meeting.met[k]
            number = number * dim.tiles[at[sources]][..., None] + meeting.first[k]
            moved |= meeting.moved[k]
        needs = elements > 0
        lacking = np.where(needs, elements - kept, 0).max(axis=1)
        peers = np.where(needs, met - (kept > 0), 0).max(axis=1)
        # A permute: one tile for every box, and no tile wanted more often than it is held.
        once = np.where(needs, met, 0).max(axis=1) <= 1
        copies = self.space.devices // self.space.parts[sources]
        wanted = np.bincount((np.arange(len(varying))[:, None] * self.space.devices + number)[needs & once[:, None]])
        most = np.zeros(len(varying) * self.space.devices, dtype=np.int64)
        most[: len(wanted)] = wanted
        permutes = once & (most.reshape(len(varying), -1).max(axis=1) <= copies)
        # Of the ops that lead there, which all deliver the same, the one of fewest rounds, then of fewest peers.
        grouped = (named.kind != MOVE) & (named.kind != RENAME)
        small = 2 * self.space.group_size[moved] <= self.space.devices
        kind, rounds = np.where(grouped, named.kind, MOVE), np.where(grouped, named.rounds, peers)
        portable = grouped | small
        for legal, turns, what in ((permutes, lacking > 0, RENAME), (small | (not self._portable), peers, MOVE)):
            better = legal & (turns < rounds + (kind == MOVE))
            rounds, kind = np.where(better, turns, rounds), np.where(better, what, kind)
            portable = np.where(better, (what == RENAME) | small, portable)
        # Holders of one tile in one group share its receivers: the widest groups that are allowed.
        used = self.space.used
        wide = moved | (used[targets] & ~used[sources])
        covers = np.where(2 * self.space.group_size[wide] <= self.space.devices, wide, moved)
        nbytes = lacking / self._whole
        return self._spread(Edges(nbytes, rounds, wide, kind, np.where(portable, nbytes, np.inf), covers))

    def _spread(self, e: Edges) -> Edges:
        """The same over all types of the `Space`: to those that are not priced no op leads."""
        parts = (e.bytes, e.rounds, e.moved, e.kind, e.portable, e.covers)
        full = [np.zeros(len(self.types), dtype=x.dtype) for x in parts]
        full[0][:] = full[4][:] = np.inf
        for out, x in zip(full, parts, strict=True):
            out[self._here] = x
        return Edges(*full)


Graph = Space | Tiled


class Searched(NamedTuple):
    """A graph to search for one problem."""

    graph: Graph
    allowed: np.ndarray  # types that a path may visit
    whole: bool  # all that are legal within the bound are among them, at their true bytes
    countable: bool  # and at their true rounds


@lru_cache(maxsize=8)
def priced(p: Problem, bound: int, portable: bool) -> Searched:
    """Return the graph of a problem with the costs of its types of at most `bound` local bytes."""
    allowed, even, _ = p.legal(bound)
    graph, flat = p.graph, np.array_equal(allowed, even)
    plain = not (graph.partial.any() or graph.root.any())
    if not flat and plain and int(allowed.sum()) * p.source.mesh.size <= MOST_BOXES:
        return Searched(Tiled(graph, p.heads, p.digits, allowed, portable), allowed, True, False)
    ends = p.source.all_even and p.target.all_even
    return Searched(graph, even if ends else allowed, flat, flat and p.countable)
