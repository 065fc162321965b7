"""The state graph of redistribution: every even type over a few *units*, and the cost of one op between any two.

A unit is a run of prime sub-axes that the planner never separates. Types are ordered lists of units per dim, plus a
set of partial and a set of root units; sizes are fractions of the global array, so one graph serves every shape and is
built once per (unit sizes, ndim, partial, root). All costs are exact for even types:

- two boxes overlap on every device exactly when, per dim, one list is a prefix of the other (then the overlap is the
  smaller box); otherwise some device holds nothing of its new box. Hence worst-device bytes of a move need no devices.
- a unit stays put when it stands in the same dim behind the same product of sizes; a group over all other source units
  is the smallest that covers every destination box.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LOCAL, GATHER, ALL_TO_ALL, MOVE, SCATTER, REDUCE_ALL, RENAME, ROOT, SPREAD = range(9)
KEPT_ENTRIES = 1_500_000  # edges of a graph that stay in memory, for each direction


@dataclass(frozen=True, slots=True)
class Edges:
    """One op from a type to many (or from many to one): arrays over the many."""

    bytes: np.ndarray  # worst-device received, fraction of the array; inf where there is no op
    rounds: np.ndarray
    moved: np.ndarray  # mask of the units of the smallest covering group
    kind: np.ndarray  # the kinds above
    portable: np.ndarray  # no exchange over more than half of the devices


class Space:
    """All types over `sizes` (units) with `ndim` dims; units in the masks `partial` and `root` may also be those."""

    def __init__(self, sizes: tuple[int, ...], ndim: int, devices: int, partial: int = 0, root: int = 0) -> None:
        """Enumerate lists and types."""
        self.sizes, self.ndim, self.devices = sizes, ndim, devices
        k = len(sizes)
        self.lists: list[tuple[int, ...]] = [p for n in range(k + 1) for p in itertools.permutations(range(k), n)]
        self.list_index = {p: i for i, p in enumerate(self.lists)}
        self.list_mask = np.array([sum(1 << u for u in p) for p in self.lists])
        self.list_product = np.array([math.prod(sizes[u] for u in p) for p in self.lists])
        self._rows: dict[int, Edges] = {}
        self._columns: dict[int, Edges] = {}
        self._relate(k)
        self._enumerate(k, partial, root)
        self.group_size = np.array([math.prod(sizes[u] for u in range(k) if m >> u & 1) for m in range(1 << k)])

    def _relate(self, k: int) -> None:
        """Prefix and moved-unit tables over pairs of lists."""
        count = len(self.lists)
        position = np.full((count, k), -1, dtype=np.int16)
        offset = np.full((count, k), -1, dtype=np.int64)
        for i, p in enumerate(self.lists):
            product = 1
            for at, u in enumerate(p):
                position[i, u], offset[i, u] = at, product
                product *= self.sizes[u]
        prefix = np.ones((count, count), dtype=bool)
        moved = np.zeros((count, count), dtype=np.int16)
        for u in range(k):
            here = position[:, u] >= 0
            prefix &= ~here[:, None] | (position[:, None, u] == position[None, :, u])
            moved |= ((here[:, None] & (offset[:, None, u] != offset[None, :, u])).astype(np.int16)) << u
        self.prefix, self.moved = prefix, moved
        products = np.unique(self.list_product)
        index = np.searchsorted(products, self.list_product)
        met = np.array([[_meeting(int(a), int(b)) for b in products] for a in products], dtype=np.int32)
        self.met = met[:, :, 0][index[:, None], index[None, :]]
        self.met_away = met[:, :, 1][index[:, None], index[None, :]]
        self.refines = (products[None, :] % products[:, None] == 0)[index[:, None], index[None, :]]

    def _enumerate(self, k: int, partial: int, root: int) -> None:
        """Type table: list ids per dim, partial and root masks."""
        by_mask: dict[int, list[int]] = {}
        for i, m in enumerate(self.list_mask):
            by_mask.setdefault(int(m), []).append(i)
        rows: list[np.ndarray] = []
        extras: list[tuple[int, int, int]] = []
        for choice in itertools.product(*(_choices(self.ndim, partial >> u & 1, root >> u & 1) for u in range(k))):
            masks = [0] * (self.ndim + 3)  # dims, unused, partial, root
            for u, c in enumerate(choice):
                masks[c] |= 1 << u
            options = [by_mask[masks[d]] for d in range(self.ndim)]
            block = np.array(list(itertools.product(*options)), dtype=np.int32)
            block = block.reshape(math.prod(map(len, options)), self.ndim)
            rows.append(block)
            extras.append((len(block), masks[self.ndim + 1], masks[self.ndim + 2]))
        self.types = np.concatenate(rows)
        lengths = [n for n, _, _ in extras]
        self.partial = np.repeat([p for _, p, _ in extras], lengths)
        self.root = np.repeat([r for _, _, r in extras], lengths)
        self.used = np.zeros(len(self.types), dtype=np.int64)
        self.parts = np.ones(len(self.types), dtype=np.int64)
        for d in range(self.ndim):
            self.used |= self.list_mask[self.types[:, d]]
            self.parts *= self.list_product[self.types[:, d]]
        self.size = 1.0 / self.parts
        self.index = {
            (*(int(x) for x in row), int(p), int(r)): i
            for i, (row, p, r) in enumerate(zip(self.types, self.partial, self.root, strict=True))
        }

    def find(self, dims: tuple[tuple[int, ...], ...], partial: int = 0, root: int = 0) -> int:
        """Return the index of a type given its unit lists."""
        return self.index[(*(self.list_index[d] for d in dims), partial, root)]

    def edges(self, sources: np.ndarray, targets: np.ndarray) -> Edges:
        """Return the cheapest op from each source to each target; the two index arrays broadcast."""
        a, b = self.types[sources], self.types[targets]
        shape = np.broadcast_shapes(sources.shape, targets.shape)
        extends, shrinks, comparable, refines = (np.ones(shape, dtype=bool) for _ in range(4))
        larger, count, away = np.ones(shape), np.ones(shape), np.zeros(shape)
        moved, grown, cut = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        changed = np.zeros(shape, dtype=np.int8)
        for d in range(self.ndim):
            x, y = a[..., d], b[..., d]
            forth, back = self.prefix[x, y], self.prefix[y, x]
            extends &= forth
            shrinks &= back
            comparable &= forth | back
            refines &= self.refines[x, y]
            larger *= np.maximum(self.list_product[x], self.list_product[y])
            # the busiest receiver that holds none of its box here, times what the other dims add
            apart = np.where(forth | back, 0, self.met_away[x, y])
            away = np.maximum(away * self.met[x, y], apart * count)
            count *= self.met[x, y]
            moved |= self.moved[x, y]
            grown |= np.where(forth & ~back, 1 << d, 0)
            cut |= np.where(back & ~forth, 1 << d, 0)
            changed += ~(forth & back)
        size_a, size_b = self.size[sources], self.size[targets]
        pa, pb, ra, rb = self.partial[sources], self.partial[targets], self.root[sources], self.root[targets]
        ua, ub = self.used[sources], self.used[targets]
        flat = (pa == pb) & (ra == rb)
        nbytes = size_b - np.where(comparable, 1.0 / larger, 0.0)
        rounds = np.maximum(count - 1, away)
        kind = np.full(shape, MOVE, dtype=np.int8)
        portable = (self.group_size[moved] * 2 <= self.devices) | refines
        swap = (changed == 2) & (grown > 0) & (cut > 0) & (ua == ub)
        kind = np.where(swap, ALL_TO_ALL, kind)
        portable = portable | swap
        logs = np.ceil(np.log2(np.maximum(self.parts[sources] / self.parts[targets], 1.0)) - 1e-9)
        rounds = np.where(shrinks, logs, rounds)
        kind = np.where(shrinks, GATHER, kind)
        portable = portable | shrinks
        nbytes, rounds = np.where(extends, 0.0, nbytes), np.where(extends, 0.0, rounds)
        kind = np.where(extends, LOCAL, kind)
        portable = portable | extends
        nbytes = np.where(flat, nbytes, np.inf)
        if self.partial.any() or self.root.any():
            nbytes, rounds, kind, portable = self._reductions(
                (nbytes, rounds, kind, portable),
                (extends, shrinks, refines, flat),
                (pa, pb, ra, rb, ua, ub),
                size_a,
                size_b,
            )
        return Edges(nbytes, rounds, moved, kind, portable)

    def _reductions(
        self,
        found: tuple[np.ndarray, ...],
        relation: tuple[np.ndarray, ...],
        masks: tuple[np.ndarray, ...],
        size_a: np.ndarray,
        size_b: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """Add the ops that change the partial or root part."""
        nbytes, rounds, kind, portable = found
        extends, shrinks, refines, flat = relation
        pa, pb, ra, rb, ua, ub = masks
        equal = extends & shrinks

        def put(where: np.ndarray, cost: np.ndarray | float, turns: np.ndarray | float, what: int) -> None:
            nonlocal nbytes, rounds, kind, portable
            where = where & (~flat)
            nbytes, rounds = np.where(where, cost, nbytes), np.where(where, turns, rounds)
            kind, portable = np.where(where, what, kind), portable | where

        # renaming partial or root units: a permute of tiles with their addends
        counts = self.group_size
        renamed = refines & (counts[pa] == counts[pb]) & ((counts[ra] == counts[rb]) | (ra == rb)) & (pa != pb)
        put(renamed, size_b, 1.0, RENAME)
        gone, new = pa & ~pb, pb & ~pa
        q = counts[gone].astype(float)
        turns = np.ceil(np.log2(q) - 1e-9)
        fewer = (gone > 0) & (new == 0) & (ra == rb)
        put(fewer & equal, 2 * size_a * (1 - 1 / q), turns, REDUCE_ALL)
        put(fewer & extends & ((ub & ~ua) == gone), size_a * (1 - 1 / q), turns, SCATTER)
        put((gone > 0) & (new == 0) & equal & (rb == (ra | gone)) & ((ra & gone) == 0), size_a, turns, ROOT)
        freed, rooted = ra & ~rb, rb & ~ra
        q = counts[freed].astype(float)
        put((pa == pb) & (freed > 0) & (rooted == 0) & equal, size_a, np.ceil(np.log2(q) - 1e-9), SPREAD)
        local = (gone == 0) & (new > 0) & (ra == rb)
        suffix = shrinks & ((ua & ~ub) == new) & (self._changed(ua, ub) == 1)
        put(local & (equal | suffix), 0.0, 0.0, LOCAL)
        put((pa == pb) & (freed == 0) & (rooted > 0) & equal, 0.0, 0.0, LOCAL)
        return nbytes, rounds, kind, portable

    @staticmethod
    def _changed(ua: np.ndarray, ub: np.ndarray) -> np.ndarray:
        """1 where a single unit left the dims (a suffix of one dim for certain)."""
        left = ua & ~ub
        return np.where((left > 0) & ((left & (left - 1)) == 0), 1, 0)

    def row(self, s: int) -> Edges:
        """One op from `s` to every type; kept once asked for."""
        found = self._rows.get(s)
        if found is None:
            found = self.edges(np.array(s), np.arange(len(self.types)))
            if len(self._rows) * len(self.types) < KEPT_ENTRIES:
                self._rows[s] = found
        return found

    def column(self, t: int) -> Edges:
        """One op from every type to `t`; kept once asked for."""
        found = self._columns.get(t)
        if found is None:
            found = self.edges(np.arange(len(self.types)), np.array(t))
            if len(self._columns) * len(self.types) < KEPT_ENTRIES:
                self._columns[t] = found
        return found


def _choices(ndim: int, partial: int, root: int) -> tuple[int, ...]:
    return (*range(ndim + 1), *((ndim + 1,) if partial else ()), *((ndim + 2,) if root else ()))


def _meeting(a: int, b: int) -> tuple[int, int]:
    """Return how many of `a` equal tiles one of `b` equal tiles meets at most, and when it misses one of them."""
    if a % b == 0:
        return a // b, a // b
    if b % a == 0:
        return 1, 1
    spans = [(y * a // b, -(-(y + 1) * a // b)) for y in range(b)]
    return max(stop - start for start, stop in spans), max(
        (stop - start for start, stop in spans if stop - start < a), default=0
    )


@lru_cache(maxsize=64)
def space(sizes: tuple[int, ...], ndim: int, devices: int, partial: int = 0, root: int = 0) -> Space:
    """Return the state graph, built once per process."""
    return Space(sizes, ndim, devices, partial, root)
