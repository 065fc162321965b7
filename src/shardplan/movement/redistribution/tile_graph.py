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

from shardplan.core.digits import tile_bounds
from shardplan.movement.redistribution.problem import Problem
from shardplan.movement.redistribution.space import MOVE, RENAME, Edges, Space

# Boxes of a graph, types times devices: some 50 ns each to price a row of edges.
MOST_BOXES = 100_000
_KEPT = 1 << 12  # boxes of a dim, lists times devices, up to which what meets is remembered: as much for every list


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
        self.bounds = [tile_bounds(n, [sizes[r] for r in runs]) for runs in lists]
        self.full = [np.concatenate([[0], np.cumsum(b[:, 1] > b[:, 0])]) for b in self.bounds]
        self.boxes = np.stack([b[self._numbers(runs)] for b, runs in zip(self.bounds, lists, strict=True)])
        self.size = self.boxes[:, :, 1] - self.boxes[:, :, 0]
        self.tiles = np.array([len(b) for b in self.bounds])
        self._meetings: dict[tuple[int, bool], _Meeting] = {}

    def _numbers(self, runs: tuple[int, ...]) -> np.ndarray:
        """The tile of every device."""
        out = np.zeros(self.digits.shape[1], dtype=np.int64)
        for r in runs:
            out = out * self.sizes[r] + self.digits[r]
        return out

    def meetings(self, end: int, out: bool) -> _Meeting:
        """Hold the boxes under all lists against the tiles of one, or without `out` those under one against all."""
        if (end, out) in self._meetings:
            return self._meetings[end, out]
        if out:
            found = self._meeting(end, slice(None))
        else:
            rows = [self._meeting(x, slice(end, end + 1)) for x in range(len(self.lists))]
            found = _Meeting(*(np.concatenate(part) for part in zip(*rows, strict=True)))
        if self.size.size <= _KEPT:
            self._meetings[end, out] = found
        return found

    def _meeting(self, x: int, y: slice) -> _Meeting:
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


class TileGraph:
    """A `Space` without partial or root runs, priced for one array of `shape`, over the types `allowed`."""

    def __init__(self, graph: Space, shape: Sequence[int], digits: np.ndarray, allowed: np.ndarray) -> None:
        """Cut every dim by every list that an allowed type has there; `digits` are the devices' [runs, devices]."""
        self.space, self.types, self.lists = graph, graph.types, graph.lists
        self.partial, self.root, self.used = graph.partial, graph.root, graph.used
        self._whole = math.prod(shape)
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
        self._kept: dict[tuple[int, bool, bool], Edges] = {}

    def edges(self, end: int, others: np.ndarray | None = None, *, out: bool, portable: bool = False) -> Edges:
        """Return the op from a type to each of some others (None: all), or, without `out`, to it from each.

        To types that are not priced no op leads. `portable` leaves out exchanges over more than half of the devices
        where another op does.
        """
        key = end, out, portable
        if key not in self._kept:
            found = self._edges(end, out, portable)
            full = Edges(*(np.zeros(len(self.types), dtype=getattr(found, x).dtype) for x in Edges.__slots__))
            full.bytes[:] = full.paid[:] = np.inf
            for name in Edges.__slots__:
                getattr(full, name)[self._here] = getattr(found, name)
            self._kept[key] = full
        found = self._kept[key]
        return found if others is None else Edges(*(getattr(found, name)[others] for name in Edges.__slots__))

    def _edges(self, end: int, out: bool, portable: bool) -> Edges:
        """Price the ops between a type and all others that are priced; `Space` says which op it is."""
        here, devices = self._here, self.space.devices
        named = self.space.edges(end, here, out=out)
        kept, met, number = np.ones((3, len(here), devices), dtype=np.int64)
        number *= 0
        moved = np.zeros(len(here), dtype=np.int64)
        for dim, at in zip(self._dims, self._at, strict=True):
            one, many = int(at[end]), at[here]
            meeting = dim.meetings(one, out)
            tiles: np.ndarray | int = int(dim.tiles[one]) if out else dim.tiles[many, None]
            kept *= meeting.overlap[many]
            met *= meeting.met[many]
            number = number * tiles + meeting.first[many]
            moved |= meeting.moved[many]
        elements = self._elements if out else self._elements[np.searchsorted(here, end)]
        needs = elements > 0
        lacking = np.where(needs, elements - kept, 0).max(axis=1)
        peers = np.where(needs, met - (kept > 0), 0).max(axis=1)
        # A permute: one tile for every box, and no tile wanted more often than it is held.
        once = np.where(needs, met, 0).max(axis=1) <= 1
        ends = (np.array(end), here) if out else (here, np.array(end))
        copies = devices // self.space.parts[ends[0]]
        wanted = np.bincount((np.arange(len(here))[:, None] * devices + number)[needs & once[:, None]])
        most = np.zeros(len(here) * devices, dtype=np.int64)
        most[: len(wanted)] = wanted
        permutes = once & (most.reshape(len(here), -1).max(axis=1) <= copies)
        # Of the ops that lead there, which all deliver the same, the one of fewest rounds, then of fewest peers.
        grouped = (named.kind != MOVE) & (named.kind != RENAME)
        # Holders of one tile in one group share its receivers: the widest groups that are allowed.
        wide = moved | (self.used[ends[1]] & ~self.used[ends[0]])
        small, fits = (2 * self.space.group_size[mask] <= devices for mask in (moved, wide))
        kind, rounds = np.where(grouped, named.kind, MOVE), np.where(grouped, named.rounds, peers)
        legal = grouped | small | (not portable)
        for possible, turns, what in ((permutes, lacking > 0, RENAME), (small | (not portable), peers, MOVE)):
            better = possible & (turns < rounds + (kind == MOVE))
            rounds, kind = np.where(better, turns, rounds), np.where(better, what, kind)
            legal |= better
        nbytes = lacking / self._whole
        group = np.where(fits, wide, moved) if portable else wide
        return Edges(nbytes, np.where(legal, nbytes, np.inf), rounds, group, kind)


Graph = Space | TileGraph


class Searched(NamedTuple):
    """A graph to search for one problem."""

    graph: Graph
    allowed: np.ndarray  # types that a path may visit
    whole: bool  # all that are legal within the bound are among them, at their true bytes
    countable: bool  # and at their true rounds


@lru_cache(maxsize=8)
def price_graph(p: Problem, bound: int) -> Searched:
    """Return the graph of a problem with the costs of its types of at most `bound` local bytes."""
    allowed, even, _ = p.legal(bound)
    graph, flat = p.graph, np.array_equal(allowed, even)
    plain = not (graph.partial.any() or graph.root.any())
    if not flat and plain and int(allowed.sum()) * p.source.mesh.size <= MOST_BOXES:
        return Searched(TileGraph(graph, p.heads, p.digits, allowed), allowed, True, False)
    ends = p.source.all_even and p.target.all_even
    return Searched(graph, even if ends else allowed, flat, flat and p.countable)
