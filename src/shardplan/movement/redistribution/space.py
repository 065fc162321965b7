"""The state graph of redistribution: every even type over a few *runs*, and the cost of one op between any two.

A run is a sequence of atoms (prime sub-axes) that the planner never separates. Types are ordered lists of runs per dim,
plus a set of partial and a set of root runs; sizes are fractions of the global array, so one graph serves every shape
and is built once per (run sizes, ndim, partial, root). All costs are exact for even types:

- two boxes overlap on every device exactly when, per dim, one list is a prefix of the other (then the overlap is the
  smaller box); otherwise some device holds nothing of its new box. Hence worst-device bytes of a move need no devices.
- a run stays put when it stands in the same dim behind the same product of sizes; a group over all other source runs
  is the smallest that covers every destination box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.mesh import primes

# The op of an edge: Slice or ToPartial; AllGather; AllToAll; Exchange; ReduceScatter; AllReduce; Permute; Reduce;
# Broadcast.
LOCAL, GATHER, ALL_TO_ALL, MOVE, SCATTER, REDUCE_ALL, RENAME, ROOT, SPREAD = range(9)
# Edges of a graph that stay in memory, for each direction: 26 bytes each, so 40 MB. With none kept, a search under the
# many bounds of a memory limit would compute the same rows again for each of them.
KEPT_ENTRIES = 1_500_000
# Subtracted before rounding a logarithm up, so that one that is whole but for rounding is not taken a round higher.
_HAIR = 1e-9


@dataclass(frozen=True, slots=True)
class Edges:
    """One op from a type to many (or from many to one): arrays over the many."""

    bytes: np.ndarray  # the larger of sent and received on the worst device, fraction of the array; inf without an op
    rounds: np.ndarray
    moved: np.ndarray  # mask of the runs of a group in which all holders of what is wanted send
    kind: np.ndarray  # the kinds above
    portable: np.ndarray  # bytes without an exchange over more than half of the devices; inf where there is none
    covers: np.ndarray  # mask of the runs of the smallest group that holds what is wanted, which such an exchange takes


class _EdgeEnd(NamedTuple):
    """The types at one end of edges: masks of runs, and the size of a shard."""

    partial: np.ndarray
    root: np.ndarray
    used: np.ndarray  # in some dim
    size: np.ndarray  # fraction of the array


class _Relation(NamedTuple):
    """How the tiles of two types stand to each other, in every dim; bool arrays over edges."""

    extends: np.ndarray  # the source's lists begin the target's: each new box lies in the device's own old one
    shrinks: np.ndarray  # the target's begin the source's
    refines: np.ndarray  # each new tile lies in one old tile, of whatever device
    flat: np.ndarray  # the same runs are partial and root


class Space:
    """All types over `sizes` (runs) with `ndim` dims; runs in the masks `partial` and `root` may also be those.

    Lists of runs and types are numbered. `lists` holds the lists, `list_index` their numbers, `list_mask` and
    `list_product` the set and the product of their runs. Per pair of lists: `prefix` (the first begins the second),
    `moved` (mask of runs of the first that do not stay put), `crowding` (mask of runs with which the second cuts where
    the first does too), `turned` (of these what the first does not have there), `met` (most tiles of the first that a
    tile of the second meets), `met_away` (the same of tiles that miss one), `refines` (each tile of the second lies in
    one of the first).
    Per type: `types` (the list of each dim, [types, ndim]), the masks `partial`, `root` and `used`, `parts` (into how
    many tiles the array is cut) and `size` (its inverse: a shard as a fraction of the array).
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        ndim: int,
        devices: int,
        partial: int = 0,
        root: int = 0,
        only: Sequence[tuple[tuple[int, ...], ...]] | None = None,
    ) -> None:
        """Enumerate lists and types, or take the types `only`, none of them partial or rooted."""
        self.sizes, self.ndim, self.devices = sizes, ndim, devices
        count = len(sizes)
        every = (p for n in range(count + 1) for p in itertools.permutations(range(count), n))
        self.lists: list[tuple[int, ...]] = list(every if only is None else dict.fromkeys(p for t in only for p in t))
        self.list_index = {p: i for i, p in enumerate(self.lists)}
        self.list_mask = np.array([sum(1 << r for r in p) for p in self.lists])
        self.list_product = np.array([math.prod(sizes[r] for r in p) for p in self.lists])
        self._rows: dict[int, Edges] = {}
        self._columns: dict[int, Edges] = {}
        self._relate(count)
        if only is None:
            self._enumerate(count, partial, root)
        else:
            self.types = np.array([[self.list_index[p] for p in t] for t in only], dtype=np.int32).reshape(-1, ndim)
            self.partial = self.root = np.zeros(len(only), dtype=np.int64)
        self._count()
        # Whether all sub-axes are of one prime: else what a holder sends may lie above the costs of edges.
        self.alike = len({p for n in sizes for p in primes(n)}) <= 1
        # Of every set of runs the devices of a group over it.
        self.group_size = np.array(
            [math.prod(sizes[r] for r in range(count) if mask >> r & 1) for mask in range(1 << count)]
        )

    def _relate(self, count: int) -> None:
        """Fill the tables over pairs of lists: few lists make many types, so edges only look up."""
        n = len(self.lists)
        at = np.full((n, count), -1, dtype=np.int16)
        offset = np.full((n, count), -1, dtype=np.int64)
        for i, p in enumerate(self.lists):
            product = 1
            for k, r in enumerate(p):
                at[i, r], offset[i, r] = k, product
                product *= self.sizes[r]
        prefix = np.ones((n, n), dtype=bool)
        moved = np.zeros((n, n), dtype=np.int16)
        for r in range(count):
            here = at[:, r] >= 0
            # A list begins another when every run of it stands at the same index there.
            prefix &= ~here[:, None] | (at[:, None, r] == at[None, :, r])
            moved |= ((here[:, None] & (offset[:, None, r] != offset[None, :, r])).astype(np.int16)) << r
        self.prefix, self.moved = prefix, moved
        inside = (offset >= 0) & (offset < self.list_product[:, None, None])  # [first, second, runs]
        bits = 1 << np.arange(count)
        self.crowding = (inside * bits).sum(axis=2, dtype=np.int16)
        self.turned = ((inside & (offset[:, None] != offset)) * bits).sum(axis=2, dtype=np.int16)
        # Equal tiles meet by their numbers alone: a table over the few products, spread over the lists.
        products = np.unique(self.list_product)
        index = np.searchsorted(products, self.list_product)
        met = np.array([[_meeting(int(a), int(b)) for b in products] for a in products], dtype=np.int32)
        self.met = met[:, :, 0][index[:, None], index[None, :]]
        self.met_away = met[:, :, 1][index[:, None], index[None, :]]
        self.refines = (products[None, :] % products[:, None] == 0)[index[:, None], index[None, :]]

    def _enumerate(self, count: int, partial: int, root: int) -> None:
        """Fill the tables over types: each run goes into a dim or none, or is partial or root; each dim orders its own.

        Types with the same choices stand side by side, as one block of the product of the dims' orders.
        """
        by_mask: dict[int, list[int]] = {}
        for i, m in enumerate(self.list_mask):
            by_mask.setdefault(int(m), []).append(i)
        rows: list[np.ndarray] = []
        partials: list[int] = []
        roots: list[int] = []
        for choice in itertools.product(*(_choices(self.ndim, partial >> r & 1, root >> r & 1) for r in range(count))):
            masks = [0] * (self.ndim + 3)  # dims, unused, partial, root
            for r, c in enumerate(choice):
                masks[c] |= 1 << r
            options = [by_mask[masks[d]] for d in range(self.ndim)]
            block = np.array(list(itertools.product(*options)), dtype=np.int32)
            rows.append(block.reshape(math.prod(map(len, options)), self.ndim))  # of no dims, too
            partials.append(masks[self.ndim + 1])
            roots.append(masks[self.ndim + 2])
        self.types = np.concatenate(rows)
        lengths = [len(block) for block in rows]
        self.partial = np.repeat(partials, lengths)
        self.root = np.repeat(roots, lengths)

    def _count(self) -> None:
        """Fill the tables that follow from the types."""
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
        """Return the number of a type given its lists of runs."""
        return self.index[(*(self.list_index[d] for d in dims), partial, root)]

    def edges(self, sources: np.ndarray, targets: np.ndarray) -> Edges:
        """Return the cheapest op from each source to each target; the two arrays of type numbers broadcast.

        Any two types with the same partial and root runs have an exchange (MOVE); where the lists allow a collective or
        a local op, that costs no more, so it takes the edge. Later choices overwrite earlier ones.
        """
        a, b = self.types[sources], self.types[targets]
        shape = np.broadcast_shapes(sources.shape, targets.shape)
        extends, shrinks, comparable, refines = (np.ones(shape, dtype=bool) for _ in range(4))
        larger, count, away = np.ones(shape), np.ones(shape), np.zeros(shape)
        moved, crowding, turned, grown, cut = (np.zeros(shape, dtype=np.int64) for _ in range(5))
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
            crowding |= self.crowding[x, y]
            turned |= self.turned[x, y]
            grown |= np.where(forth & ~back, 1 << d, 0)
            cut |= np.where(back & ~forth, 1 << d, 0)
            changed += ~(forth & back)
        before, after = self._ends(sources), self._ends(targets)
        relation = _Relation(extends, shrinks, refines, (before.partial == after.partial) & (before.root == after.root))
        # A device receives its new box minus the overlap with the old one, which is the smaller of the two or nothing.
        nbytes = after.size - np.where(comparable, 1.0 / larger, 0.0)
        # Holders of one tile that lie in one group share its receivers, so that none sends more than a device receives.
        # In the smallest groups that cover there is one of them: it sends what the others would.
        new = crowding & ~before.used
        fits, narrow = (self.group_size[group] * 2 <= self.devices for group in (moved | new, moved))
        # Of the tile that is wanted its holder wants its part, but where a run that it cuts by stands elsewhere.
        kept = np.where(turned & before.used, 0.0, 1.0 / larger)
        crowded = after.size * self.group_size[new] - kept if self.alike else nbytes
        # Where tiles nest, MOVE is a permute.
        portable = np.where(fits | refines, nbytes, np.where(narrow, crowded, np.inf))
        # It hears from one sender for each old tile that it meets, itself among them where it holds one of them.
        rounds = np.maximum(count - 1, away)
        kind = np.where(refines, RENAME, MOVE).astype(np.int8)  # where tiles nest, one message delivers each
        # Runs leave the end of one dim for the end of another, and none comes or goes.
        swap = (changed == 2) & (grown > 0) & (cut > 0) & (before.used == after.used)
        kind = np.where(swap, ALL_TO_ALL, kind)
        rounds = np.where(shrinks, _doublings(self.parts[sources] / self.parts[targets]), rounds)
        kind = np.where(shrinks, GATHER, kind)
        nbytes, rounds = np.where(extends, 0.0, nbytes), np.where(extends, 0.0, rounds)
        kind = np.where(extends, LOCAL, kind)
        portable = np.where((kind == MOVE) | (kind == RENAME), portable, nbytes)
        nbytes, portable = (np.where(relation.flat, x, np.inf) for x in (nbytes, portable))
        found = Edges(nbytes, rounds, moved | new, kind, portable, np.where(fits, moved | new, moved))
        if self.partial.any() or self.root.any():
            return self._reductions(found, relation, before, after)
        return found

    def _ends(self, types: np.ndarray) -> _EdgeEnd:
        return _EdgeEnd(self.partial[types], self.root[types], self.used[types], self.size[types])

    def _reductions(self, found: Edges, relation: _Relation, before: _EdgeEnd, after: _EdgeEnd) -> Edges:
        """Return the edges with the ops that change the partial or root runs, of which there are none yet.

        Each such op is legal only where it alone explains the difference between the types, so no two are on one edge.
        Bytes, per shard held before and for groups of q: AllReduce 2 (q - 1) / q, ReduceScatter (q - 1) / q, Reduce and
        Broadcast 1.
        """
        nbytes, rounds, kind, portable = found.bytes, found.rounds, found.kind, found.portable
        equal = relation.extends & relation.shrinks

        def put(here: np.ndarray, cost: np.ndarray | float, turns: np.ndarray | float, what: int) -> None:
            nonlocal nbytes, rounds, kind, portable
            here = here & ~relation.flat
            nbytes, portable = np.where(here, cost, nbytes), np.where(here, cost, portable)
            rounds, kind = np.where(here, turns, rounds), np.where(here, what, kind)

        devices = self.group_size
        # Other runs are partial, of as many devices: a permute of tiles with their addends. Root runs may change too.
        renamed = relation.refines & (devices[before.partial] == devices[after.partial])
        renamed &= (devices[before.root] == devices[after.root]) & (before.partial != after.partial)
        put(renamed, after.size, 1.0, RENAME)
        gone, new = before.partial & ~after.partial, after.partial & ~before.partial
        freed, rooted = before.root & ~after.root, after.root & ~before.root
        q = devices[gone].astype(float)
        reduced, turns = (gone > 0) & (new == 0), _doublings(q)
        unrooted = before.root == after.root
        put(reduced & unrooted & equal, 2 * before.size * (1 - 1 / q), turns, REDUCE_ALL)
        scattered = (after.used & ~before.used) == gone
        put(reduced & unrooted & relation.extends & scattered, before.size * (1 - 1 / q), turns, SCATTER)
        put(reduced & equal & (after.root == (before.root | gone)), before.size, turns, ROOT)
        summed = before.partial == after.partial
        turns = _doublings(devices[freed].astype(float))
        put(summed & (freed > 0) & (rooted == 0) & equal, before.size, turns, SPREAD)
        # ToPartial: an unused run becomes partial, or one that ends a dim (a single one does so for certain).
        left = before.used & ~after.used
        suffix = relation.shrinks & (left == new) & ((left & (left - 1)) == 0)
        put((gone == 0) & (new > 0) & unrooted & (equal | suffix), 0.0, 0.0, LOCAL)
        put(summed & (freed == 0) & (rooted > 0) & equal, 0.0, 0.0, LOCAL)
        return Edges(nbytes, rounds, found.moved, kind, portable, found.covers)

    def row(self, s: int) -> Edges:
        """Return one op from `s` to every type; kept once asked for."""
        found = self._rows.get(s)
        if found is None:
            found = self.edges(np.array(s), np.arange(len(self.types)))
            if len(self._rows) * len(self.types) < KEPT_ENTRIES:
                self._rows[s] = found
        return found

    def column(self, t: int) -> Edges:
        """Return one op from every type to `t`; kept once asked for."""
        found = self._columns.get(t)
        if found is None:
            found = self.edges(np.arange(len(self.types)), np.array(t))
            if len(self._columns) * len(self.types) < KEPT_ENTRIES:
                self._columns[t] = found
        return found


def _doublings(q: np.ndarray) -> np.ndarray:
    """Rounds of a collective over groups of q that doubles in every round what a member holds, or has summed."""
    return np.ceil(np.log2(np.maximum(q, 1.0)) - _HAIR)


def _choices(ndim: int, partial: int, root: int) -> tuple[int, ...]:
    """Where a run may be: a dim, `ndim` for unused, and the next two for partial and root where it may be those."""
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
