"""The tree of a shop's orders: which pass a rank does next, and what is the least that may come of it.

Only active orders are in it, those in which no pass could be sooner without another's being later: of all ready passes
one would end first; its rank begins that one, or another that can begin before that end (Giffler and Thompson, 1960).
The one exception is memory: a forward that would end first may have to leave its room to another stage's, which is not
ready yet; then it is barred until its rank has begun something else. Nodes in which the same passes were begun are
compared: what is not later on any rank, and has no value later that another rank waits for, is as good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardplan.strategy.schedules.action_lists import F, I, W
from shardplan.strategy.schedules.shop import Orders, Pass, Shop

_Path = tuple[int, Pass, "_Path"] | None
Key = tuple[tuple[int, ...], frozenset[int]]


class ShopNode(NamedTuple):
    """When the passes of each stage and kind (at `3 * stage + kind`) that were begun are done, and each rank is free.

    `held` are forwards of a rank that wait for their W; `barred` stages whose F is.
    """

    done: tuple[tuple[float, ...], ...]
    free: tuple[float, ...]
    held: tuple[int, ...]
    barred: frozenset[int] = frozenset()
    path: _Path = None

    @property
    def key(self) -> Key:
        """What nodes that can be compared are alike in."""
        return tuple(map(len, self.done)), self.barred


class ShopTree:
    """The nodes of a shop."""

    def __init__(self, shop: Shop) -> None:
        self.shop, self.times, self.stages = shop, shop.times, shop.stages
        self.count, self.m = len(shop.owners), shop.microbatches
        ranks = len(self.stages)
        self.root = ShopNode(((),) * 3 * self.count, (0,) * ranks, (0,) * ranks)
        self.passes = 3 * self.count * self.m
        waits, owner = shop.waits, [shop.owners[k // 3] for k in range(3 * self.count)]
        # Values that go from rank to rank: the pass that makes one, that which takes it, and the rank of that.
        taken = ((source, k, owner[k]) for k, source in enumerate(waits) if source >= 0)
        self.between = [each for each in taken if owner[each[0]] != each[2]]
        # Each F and then each I: its rank, what it waits for, how long that takes, and of an I what its F takes.
        way = [*range(F, len(waits), 3), *range(I, len(waits), 3)[::-1]]
        flat = [t for times in shop.times for t in times]
        self.way = [(k, owner[k], waits[k], flat[waits[k]], flat[k - I] if k % 3 == I else None) for k in way]
        # From the end of the last I, or of the last F, of a stage to the end of all.
        self.behind = [[0.0, 0.0] for _ in range(self.count)]
        for s in range(self.count):
            before = self.behind[s - 1][1] + self.times[s - 1][I] if s else 0
            self.behind[s][1] = max(before, self.times[s][W])
        for s in reversed(range(self.count)):
            after = self.behind[s + 1][0] + self.times[s + 1][F] if s + 1 < self.count else 0
            self.behind[s][0] = max(after, self.behind[s][1] + self.times[s][I])

    def orders(self, node: ShopNode) -> Orders:
        """Return the order that led to a node."""
        orders: Orders = [[] for _ in self.stages]
        path = node.path
        while path is not None:
            rank, each, path = path
            orders[rank].append(each)
        return [order[::-1] for order in orders]

    def children(self, node: ShopNode) -> Iterator[ShopNode]:
        """Yield what may happen next: one pass more, or a forward that is barred."""
        able = [
            (begin + self.times[s][kind], begin, kind, s, rank)
            for rank, mine in enumerate(self.stages)
            for s in mine
            for kind in (F, I, W)
            if (begin := self._begin(node, rank, s, kind)) is not None
        ]
        if not able:
            return
        first = min(able)
        end, _, kind, stage, rank = first
        for each in sorted(able):
            if each is first or (each[4] == rank and each[1] < end):
                yield self._append_pass(node, rank, (each[3], each[2]), each[0])
        left = sum(self.m - len(node.done[3 * s]) for s in self.stages[rank])
        if kind == F and len(self.stages[rank]) > 1 and node.held[rank] + left > self.shop.bounds[rank]:
            yield node._replace(barred=node.barred | {stage})

    def _begin(self, node: ShopNode, rank: int, s: int, kind: int) -> float | None:
        """When the next of a pass can begin; None without one, or where it may not, or what it needs was not begun."""
        done = node.done
        n = len(done[3 * s + kind])
        if n == self.m:
            return None
        if kind == F:
            if node.held[rank] >= self.shop.bounds[rank] or s in node.barred:
                return None
        source = self.shop.waits[3 * s + kind]
        if source < 0:
            return node.free[rank]
        return max(node.free[rank], done[source][n]) if n < len(done[source]) else None

    def _append_pass(self, node: ShopNode, rank: int, each: Pass, end: float) -> ShopNode:
        s, kind = each
        k, done, free, held = 3 * s + kind, node.done, node.free, node.held
        return ShopNode(
            (*done[:k], (*done[k], end), *done[k + 1 :]),
            (*free[:rank], end, *free[rank + 1 :]),
            (*held[:rank], held[rank] + (kind == F) - (kind == W), *held[rank + 1 :]),
            node.barred.difference(self.stages[rank]) if node.barred else node.barred,
            (rank, each, node.path),
        )

    def times_of(self, node: ShopNode) -> tuple[float, ...]:
        """Return what nodes of one key are compared by: each no later is as good.

        Besides the ranks, values that another rank has not taken yet; none sooner than that rank is free.
        """
        done, free = node.done, node.free
        found = list(free)
        for made, taken, to in self.between:
            found += [max(t, free[to]) for t in done[made][len(done[taken]) :]]
        return tuple(found)

    def lower_bound(self, node: ShopNode) -> float:
        """Return a lower bound of the makespan behind a node."""
        return max(least for least, _ in self.ends(node))

    def ends(self, node: ShopNode) -> list[tuple[float, float]]:
        """Return of each rank a lower bound of the makespan, and of its own end.

        What is left on it, from when it can begin, and then what must follow on others.
        """
        f0, i0 = self._earliest(node)
        return [self._ends(node, rank, f0, i0) for rank in range(len(self.stages))]

    def _ends(self, node: ShopNode, rank: int, f0: Sequence[float], i0: Sequence[float]) -> tuple[float, float]:
        clock = own = node.free[rank]
        starts: list[tuple[float, float, float]] = []  # from when, how long, what follows
        for s in self.stages[rank]:
            begun, times = [len(node.done[3 * s + kind]) for kind in (F, I, W)], self.times[s]
            f, i, w = (self.m - n for n in begun)
            if f:
                starts.append((f0[s], f * times[F], self.behind[s][0]))
            if i:
                starts.append((i0[s], i * times[I], self.behind[s][1]))
            if w:
                starts.append((clock if begun[I] > begun[W] else i0[s] + times[I], w * times[W], 0))
        least = clock
        starts.sort()
        for follows in {tail for _, _, tail in starts}:
            end = clock
            for begin, work, tail in starts:
                if tail >= follows:
                    end = (begin if begin > end else end) + work
            least = max(least, end + follows)
            own = max(own, end)
        return least, own

    def _earliest(self, node: ShopNode) -> tuple[list[float], list[float]]:
        """The soonest begin of the next F and of the next I of each stage."""
        done, free = node.done, node.free
        early = [0.0] * 3 * self.count
        for k, rank, source, seconds, forward in self.way:
            clock, n = free[rank], len(done[k])
            if forward is not None and len(done[k - I]) <= n:
                clock = max(clock, early[k - I] + forward)
            if source >= 0:
                before = done[source]
                clock = max(clock, before[n] if n < len(before) else early[source] + seconds)
            early[k] = clock
        f0, i0 = early[F::3], early[I::3]
        for rank, mine in enumerate(self.stages):  # at the bound of memory a forward waits for a W, and so for an I
            if node.held[rank] >= self.shop.bounds[rank]:
                freed = min(
                    (free[rank] if len(done[3 * s + I]) > len(done[3 * s + W]) else i0[s] + self.times[s][I])
                    + self.times[s][W]
                    for s in mine
                    if len(done[3 * s + W]) < self.m
                )
                for s in mine:
                    f0[s] = max(f0[s], freed)
        return f0, i0
