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
KINDS = 9
LOCAL, GATHER, ALL_TO_ALL, MOVE, SCATTER, REDUCE_ALL, RENAME, ROOT, SPREAD = range(KINDS)
# Edges of a graph that stay in memory: some 40 bytes each, so 16 MB. Searches of other placements ask for them again;
# four times as many make nothing faster, and 64 graphs are remembered.
KEPT_ENTRIES = 400_000
# Subtracted before rounding a logarithm up, so that one that is whole but for rounding is not taken a round higher.
_HAIR = 1e-9
# What the code of a pair of lists says, or-ed over dims: the first does not begin the second; the second not the first;
# neither does; a tile of the second reaches beyond one of the first. Above them are three masks of runs.
_NOT_FORTH, _NOT_BACK, _APART, _COARSE, _FLAGS = 1, 2, 4, 8, 4
# What dims do, added up: the first list begins the second; the second the first; neither.
_GROWN, _CUT, _OTHER = 1, 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Edges:
    """One op from a type to many (or from many to one): arrays over the many."""

    bytes: np.ndarray  # received on the worst device, fraction of the array; inf without an op
    paid: (
        np.ndarray
    )  # what is charged: more where a sender has more to do; inf where the op is not portable and must be
    rounds: np.ndarray
    group: (
        np.ndarray
    )  # mask of the runs of the op's groups; of messages those in which all holders of what is wanted send
    kind: np.ndarray  # the kinds above


class _EdgeEnd(NamedTuple):
    """The types at one end of edges: masks of runs, and the size of a shard."""

    partial: np.ndarray
    root: np.ndarray
    used: np.ndarray  # in some dim
    parts: np.ndarray  # into how many tiles the array is cut
    size: np.ndarray  # fraction of the array


class _Relation(NamedTuple):
    """How the tiles of two types stand to each other, in every dim; bool arrays over edges."""

    extends: np.ndarray  # the source's lists begin the target's: each new box lies in the device's own old one
    shrinks: np.ndarray  # the target's begin the source's
    refines: np.ndarray  # each new tile lies in one old tile, of whatever device
    flat: np.ndarray  # the same runs are partial and root


class _Pairs(NamedTuple):
    """How one list stands to every other, as the first or the second of a pair; arrays over lists."""

    code: np.ndarray  # flags, and the masks: runs of the first that do not stay put; with which the second cuts where
    # the first does too; and of these what the first does not have there
    changes: np.ndarray  # how the second differs, 0 where it does not
    larger: np.ndarray  # of the numbers of tiles
    met: np.ndarray  # most tiles of the first that a tile of the second meets
    away: np.ndarray  # the same of tiles that miss one


class Space:
    """All types over `sizes` (runs) with `ndim` dims; runs in the masks `partial` and `root` may also be those.

    Lists of runs and types are numbered. `lists` holds the lists, `list_index` their numbers, `list_mask` and
    `list_product` the set and the product of their runs.
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
        every = (p for n in range(count + 1 if ndim else 1) for p in itertools.permutations(range(count), n))
        self.lists: list[tuple[int, ...]] = list(every if only is None else dict.fromkeys(p for t in only for p in t))
        self.list_index = {p: i for i, p in enumerate(self.lists)}
        self.list_mask = np.array([sum(1 << r for r in p) for p in self.lists])
        self.list_product = np.array([math.prod(sizes[r] for r in p) for p in self.lists])
        self._pairs: dict[tuple[int, bool], _Pairs] = {}
        self._kept: dict[tuple[int, bool, bool], Edges] = {}
        # Of every list the index of every run, and the product of the sizes before it; -1 where it is not there.
        self._at, self._offset = (np.full((len(self.lists), count), -1) for _ in range(2))
        for i, p in enumerate(self.lists):
            for k, r in enumerate(p):
                self._at[i, r], self._offset[i, r] = k, math.prod(sizes[x] for x in p[:k])
        if only is None:
            self._enumerate(count, partial, root)
        else:
            self.types = np.array([[self.list_index[p] for p in t] for t in only]).reshape(-1, ndim)
            self.partial = self.root = np.zeros(len(only), dtype=np.int64)
        self.used = np.bitwise_or.reduce(self.list_mask[self.types], axis=1)
        self.parts = self.list_product[self.types].prod(axis=1)
        self.size = 1.0 / self.parts
        # Whether all sub-axes are of one prime: else what a holder sends may lie above the costs of edges.
        self.alike = len({p for n in sizes for p in primes(n)}) <= 1
        # Of every set of runs the devices of a group over it.
        self.group_size = np.array(
            [math.prod(sizes[r] for r in range(count) if mask >> r & 1) for mask in range(1 << count)]
        )

    def _relation(self, i: int, *, first: bool) -> _Pairs:
        """Return how list `i` stands to all, as the first or as the second of a pair."""
        found = self._pairs.get((i, first))
        if found is not None:
            return found
        own = self._offset[i], self.list_product[i]
        (x, x_size), (y, y_size) = (own, (self._offset, self.list_product))[:: 1 if first else -1]
        begins = self._at == self._at[i]
        # A list begins another when every run of it stands at the same index there.
        forth, back = ((begins | (z < 0)).all(axis=1) for z in (x, y))
        inside = (y >= 0) & (y < np.reshape(x_size, (-1, 1)))
        bits = 1 << np.arange(len(self.sizes))
        code = (~forth) * _NOT_FORTH | (~back) * _NOT_BACK | ~(forth | back) * _APART | (y_size % x_size != 0) * _COARSE
        # A run decides which tiles a box meets where what stands before it makes no multiple of them.
        decides = (y >= 0) & (y % np.reshape(x_size, (-1, 1)) != 0)
        for k, mask in enumerate(((x >= 0) & (x != y), decides, inside & (x != y))):
            code = code | (mask @ bits) << (_FLAGS + k * len(self.sizes))
        # Equal tiles meet by their numbers alone.
        sizes, at = np.unique(self.list_product, return_inverse=True)
        ends = ((int(own[1]), int(n))[:: 1 if first else -1] for n in sizes)
        met = np.array([_meeting(*pair) for pair in ends], dtype=np.float64)[at]
        larger = np.maximum(x_size, y_size).astype(np.float64)
        changes = np.where(forth, np.where(back, 0, _GROWN), np.where(back, _CUT, _OTHER))
        return self._pairs.setdefault((i, first), _Pairs(code, changes, larger, met[:, 0], met[:, 1]))

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
            block = np.array(list(itertools.product(*options)), dtype=np.int64)
            rows.append(block.reshape(math.prod(map(len, options)), self.ndim))  # of no dims, too
            partials.append(masks[self.ndim + 1])
            roots.append(masks[self.ndim + 2])
        self.types = np.asfortranarray(np.concatenate(rows))
        lengths = [len(block) for block in rows]
        self.partial = np.repeat(partials, lengths)
        self.root = np.repeat(roots, lengths)

    def find(self, dims: tuple[tuple[int, ...], ...], partial: int = 0, root: int = 0) -> int:
        """Return the number of a type given its lists of runs."""
        here = (self.partial == partial) & (self.root == root)
        for d, runs in enumerate(dims):
            here &= self.types[:, d] == self.list_index[runs]
        return int(np.flatnonzero(here)[0])

    def edges(self, end: int, others: np.ndarray | None = None, *, out: bool, portable: bool = False) -> Edges:
        """Return the cheapest op from a type to each of some others (None: all), or, without `out`, to it from each.

        `portable` leaves out exchanges over more than half of the devices.
        """
        kept = self._kept.get((end, out, portable))
        if kept is not None and others is None:
            return kept
        if kept is not None:
            return Edges(*(getattr(kept, name)[others] for name in Edges.__slots__))
        found = self._edges(end, slice(None) if others is None else others, out, portable)
        if others is None:
            if len(self._kept) * len(self.types) > KEPT_ENTRIES:
                self._kept.clear()
            self._kept[end, out, portable] = found
        return found

    def _edges(self, end: int, others: np.ndarray | slice, out: bool, portable: bool) -> Edges:
        """Price the ops.

        Any two types with the same partial and root runs have an exchange (MOVE); where the lists allow a collective or
        a local op, that costs no more, so it takes the edge. Later choices overwrite earlier ones.
        """
        lists = self.types[others]
        one, many = (_EdgeEnd(*(x[at] for x in (self.partial, self.root, self.used, self.parts, self.size)))
                     for at in (end, others))  # fmt: skip
        before, after = (one, many) if out else (many, one)
        code, changes = (np.zeros(len(lists), dtype=np.int64) for _ in range(2))
        larger, count, away = np.ones(len(lists)), np.ones(len(lists)), np.zeros(len(lists))
        for d in range(self.ndim):
            ids, i = lists[:, d], int(self.types[end, d])
            pairs = self._relation(i, first=out)
            mine = pairs.code.take(ids)
            code |= mine
            larger *= pairs.larger.take(ids)
            changes += pairs.changes.take(ids)
            if not self.alike:  # the busiest receiver that holds none of its box here, times what other dims add
                met = pairs.met.take(ids)
                away = np.maximum(away * met, np.where(mine & _APART, pairs.away.take(ids), 0.0) * count)
                count *= met
        extends, shrinks, comparable, refines = ((code & f) == 0 for f in (_NOT_FORTH, _NOT_BACK, _APART, _COARSE))
        moved, crowding, turned = (
            code >> (_FLAGS + k * len(self.sizes)) & (1 << len(self.sizes)) - 1 for k in range(3)
        )
        # It hears from one sender for each old tile that it meets, itself among them where it holds one of them.
        rounds = larger / after.parts - comparable if self.alike else np.maximum(count - 1, away)
        # A device receives its new box minus the overlap with the old one, which is the smaller of the two or nothing.
        nbytes = after.size - np.where(comparable, 1.0 / larger, 0.0)
        # Holders of one tile that lie in one group share its receivers, so that none sends more than a device receives.
        # In the smallest groups that cover there is one of them: it sends what the others would.
        new = crowding & ~before.used
        group, paid = moved | new, nbytes
        if portable:
            fits, narrow = (self.group_size[mask] * 2 <= self.devices for mask in (group, moved))
            # Of the tile that is wanted its holder wants its part, but where a run that it cuts by stands elsewhere.
            held = np.where(turned & before.used, 0.0, 1.0 / larger)
            crowded = after.size * self.group_size[new] - held if self.alike else nbytes
            # Where tiles nest, MOVE is a permute.
            paid = np.where(fits | refines, nbytes, np.where(narrow, crowded, np.inf))
            group = np.where(fits, group, moved)
        # Where tiles nest, one message delivers each; or runs leave the end of one dim for the end of another.
        kind = np.where(refines, RENAME, MOVE)
        kind[(changes == _GROWN + _CUT) & (before.used == after.used)] = ALL_TO_ALL
        kind[shrinks] = GATHER
        rounds = np.where(shrinks, doublings(before.parts / after.parts), rounds)
        kind[extends] = LOCAL
        nbytes, rounds = np.where(extends, 0.0, nbytes), np.where(extends, 0.0, rounds)
        paid = np.where((kind == MOVE) | (kind == RENAME), paid, nbytes)
        if not (self.partial.any() or self.root.any()):
            return Edges(nbytes, paid, rounds, group, kind)
        relation = _Relation(extends, shrinks, refines, (before.partial == after.partial) & (before.root == after.root))
        nbytes, paid = (np.where(relation.flat, x, np.inf) for x in (nbytes, paid))
        return self._reductions(Edges(nbytes, paid, rounds, group, kind), relation, before, after)

    def _reductions(self, found: Edges, relation: _Relation, before: _EdgeEnd, after: _EdgeEnd) -> Edges:
        """Return the edges with the ops that change the partial or root runs, of which there are none yet.

        Each such op is legal only where it alone explains the difference between the types, so no two are on one edge.
        Bytes, per shard held before and for groups of q: AllReduce 2 (q - 1) / q, ReduceScatter (q - 1) / q, Reduce and
        Broadcast 1.
        """
        nbytes, paid, rounds, kind, group = found.bytes, found.paid, found.rounds, found.kind, found.group
        equal = relation.extends & relation.shrinks

        def put(here: np.ndarray, cost: np.ndarray | float, turns: np.ndarray | float, what: int) -> None:
            nonlocal nbytes, paid, rounds, kind
            here = here & ~relation.flat
            nbytes, paid = np.where(here, cost, nbytes), np.where(here, cost, paid)
            rounds, kind = np.where(here, turns, rounds), np.where(here, what, kind)

        devices = self.group_size
        # Other runs are partial, of as many devices: a permute of tiles with their addends. Root runs may change too.
        renamed = relation.refines & (devices[before.partial] == devices[after.partial])
        renamed &= (devices[before.root] == devices[after.root]) & (before.partial != after.partial)
        put(renamed, after.size, 1.0, RENAME)
        gone, new = before.partial & ~after.partial, after.partial & ~before.partial
        freed, rooted = before.root & ~after.root, after.root & ~before.root
        q = devices[gone].astype(float)
        reduced, turns = (gone > 0) & (new == 0), doublings(q)
        unrooted = before.root == after.root
        put(reduced & unrooted & equal, 2 * before.size * (1 - 1 / q), turns, REDUCE_ALL)
        scattered = (after.used & ~before.used) == gone
        put(reduced & unrooted & relation.extends & scattered, before.size * (1 - 1 / q), turns, SCATTER)
        put(reduced & equal & (after.root == (before.root | gone)), before.size, turns, ROOT)
        summed = before.partial == after.partial
        turns = doublings(devices[freed].astype(float))
        put(summed & (freed > 0) & (rooted == 0) & equal, before.size, turns, SPREAD)
        # ToPartial: an unused run becomes partial, or one that ends a dim (a single one does so for certain).
        left = before.used & ~after.used
        suffix = relation.shrinks & (left == new) & ((left & (left - 1)) == 0)
        put((gone == 0) & (new > 0) & unrooted & (equal | suffix), 0.0, 0.0, LOCAL)
        put(summed & (freed == 0) & (rooted > 0) & equal, 0.0, 0.0, LOCAL)
        group = np.where((kind == SCATTER) | (kind == REDUCE_ALL), gone, group)
        return Edges(nbytes, paid, rounds, group, kind)


def doublings(q: np.ndarray) -> np.ndarray:
    """Return the rounds of a collective over groups of q that doubles in each what a member holds, or has summed."""
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
