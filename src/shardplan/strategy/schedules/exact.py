"""The exact solver: the least makespan of a small shop, as an oracle.

For makespans from a lower bound on, one after the other, the tree of all orders is searched depth first, in time: the
rank that is free first begins a pass that is ready, or waits for the next event. A node is cut where what is left on
some rank cannot end in time, and where the same passes had been begun before at the same time, or sooner. So the first
makespan that is reached is the least: a lower bound is met, or the trees of all smaller ones were exhausted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.core import border
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.listing import listed
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.shop import F, I, Orders, Pass, Shop, W

NODES = 1_000_000  # of the trees: about a minute
_FAR = 1 << 60
_NONE: Pass = (-1, F)
_Path = tuple[int, Pass, "_Path"] | None


@dataclass(frozen=True, slots=True)
class Solved:
    """The best schedule found, its makespan, and a lower bound; they are equal where it is `proved` to be the least."""

    schedule: Schedule
    makespan: int
    least: int
    nodes: int

    @property
    def proved(self) -> bool:
        """Whether no order is shorter."""
        return self.makespan == self.least


@dataclass(frozen=True, slots=True)
class _Node:
    """What was begun of each pass, until when each rank is busy, with what, and since when it waits (-1: not)."""

    begun: tuple[int, ...]
    free: tuple[int, ...]
    doing: tuple[Pass, ...]
    waits: tuple[int, ...]
    path: _Path


def solve(shop: Shop, nodes: int = NODES) -> Solved:
    """Return the schedule of least makespan; times must be whole numbers.

    At most so many `nodes` are visited. Where that does not do, the best schedule known and a lower bound come back.
    """
    for time in (t for times in shop.times for t in times):
        border.whole("solve: a time", time, 1, kind=ScheduleError)
    best = listed(shop)
    makespan = int(max(shop.ends(shop.orders(best))))
    search = _Search(shop, nodes)
    least = search.bound(search.root)
    while least < makespan:
        found = search.within(least)
        if search.left <= 0:
            break
        if found is not None:
            best, makespan = shop.schedule(found, "exact"), least
            break
        least += 1
    return Solved(best, makespan, least, nodes - max(search.left, 0))


class _Search:
    """The trees of a shop, with the number of nodes that are left to be visited."""

    def __init__(self, shop: Shop, nodes: int) -> None:
        self.shop, self.left = shop, nodes
        self.times = [tuple(int(t) for t in times) for times in shop.times]
        self.stages, self.count, self.m = shop.stages, len(shop.owners), shop.microbatches
        self.single = all(len(mine) == 1 for mine in self.stages)
        ranks = len(self.stages)
        self.root = _Node((0,) * 3 * self.count, (0,) * ranks, (_NONE,) * ranks, (-1,) * ranks, None)
        # From the end of the last I, or of the last F, of a stage to the end of all.
        self.behind = [[0, 0] for _ in range(self.count)]
        for s in range(self.count):
            before = self.behind[s - 1][1] + self.times[s - 1][I] if s else 0
            self.behind[s][1] = max(before, self.times[s][W])
        for s in reversed(range(self.count)):
            after = self.behind[s + 1][0] + self.times[s + 1][F] if s + 1 < self.count else 0
            self.behind[s][0] = max(after, self.behind[s][1] + self.times[s][I])

    def within(self, makespan: int) -> Orders | None:
        """Return an order that is done by then, or None where there is none (or no nodes are left)."""
        seen: dict[tuple[object, ...], int] = {}
        stack = [self.root]
        while stack and self.left > 0:
            node = stack.pop()
            self.left -= 1
            if sum(node.begun) == 3 * self.m * self.count:  # its bound holds the ends of all
                return self.orders(node)
            children = [child for child in self.children(node) if self.bound(child) <= makespan]
            for child in reversed(children):
                now = min(child.free)
                waits = tuple(w if w < 0 else w - now for w in child.waits)
                key = (child.begun, tuple(f - now for f in child.free), child.doing, waits)
                if seen.get(key, _FAR) > now:
                    seen[key] = now
                    stack.append(child)
        return None

    def orders(self, node: _Node) -> Orders:
        """Return the order that led to a node."""
        orders: Orders = [[] for _ in self.stages]
        path = node.path
        while path is not None:
            rank, each, path = path
            orders[rank].insert(0, each)
        return orders

    def children(self, node: _Node) -> Iterator[_Node]:
        """Yield what may happen next, the likeliest first."""
        running = [f for f, w in zip(node.free, node.waits, strict=True) if w < 0]
        now = min((f for f in running if f < _FAR), default=_FAR)
        if now == _FAR:
            return
        # Something is done at this time: who has waited since before looks again.
        woken = [0 <= w < now for w in node.waits]
        free = tuple(now if woken[r] else f for r, f in enumerate(node.free))
        waits = tuple(-1 if woken[r] else w for r, w in enumerate(node.waits))
        node = replace(node, free=free, waits=waits)
        rank = next(r for r, f in enumerate(free) if f == now and waits[r] < 0)
        begun, done, mine = node.begun, list(node.begun), self.stages[rank]
        for r, f in enumerate(node.free):
            if node.waits[r] < 0 and now < f < _FAR and node.doing[r][0] >= 0:
                done[3 * node.doing[r][0] + node.doing[r][1]] -= 1
        held = sum(begun[3 * s] - begun[3 * s + W] for s in mine)
        able: list[Pass] = []
        for kind in (I, F, W):
            for s in reversed(mine):
                if begun[3 * s + kind] < self.m and self.ready(done, s, kind):
                    if kind != F or held < self.shop.bounds[rank]:
                        able.append((s, kind))
        for s, kind in able:
            yield self.after(node, rank, now + self.times[s][kind], (s, kind), -1)
        missing = sum(self.m - begun[3 * s + kind] for s in mine for kind in range(3))
        if not missing:
            yield self.after(node, rank, _FAR, _NONE, -1)
        elif not (able and self.idle_is_lost(node, rank, now, able)):
            yield self.after(node, rank, now, _NONE, now)

    def idle_is_lost(self, node: _Node, rank: int, now: int, able: list[Pass]) -> bool:
        """Whether a pass that is ready would end before anything else can happen.

        Nothing waits longer for an I or a W; nor for an F with one stage a rank, where the bound of memory, too, is
        that F k waits for an earlier W.
        """
        soon = min((f for r, f in enumerate(node.free) if r != rank and node.waits[r] < 0 and f > now), default=_FAR)
        shortest = min(min(times) for times in self.times)
        undecided = any(f == now for r, f in enumerate(node.free) if r != rank and node.waits[r] < 0)
        soon = min(soon, now + shortest) if undecided else soon
        useful = (each for each in able if self.single or each[1] != F)
        return any(now + self.times[s][kind] <= soon for s, kind in useful)

    def ready(self, done: list[int], s: int, kind: int) -> bool:
        """Whether the next of a pass has its value."""
        n = done[3 * s + kind]
        if kind == F:
            return s == 0 or done[3 * s - 3] > n
        if kind == I:
            return done[3 * s] > n and (s == self.count - 1 or done[3 * s + 3 + I] > n)
        return done[3 * s + I] > n

    def after(self, node: _Node, rank: int, free: int, doing: Pass, waits: int) -> _Node:
        """The node in which a rank has begun something, or waits."""
        begun, path = node.begun, node.path
        if doing[0] >= 0:
            k = 3 * doing[0] + doing[1]
            begun = (*begun[:k], begun[k] + 1, *begun[k + 1 :])
            path = (rank, doing, path)
        frees, doings, waiting = list(node.free), list(node.doing), list(node.waits)
        frees[rank], doings[rank], waiting[rank] = free, doing, waits
        return _Node(begun, tuple(frees), tuple(doings), tuple(waiting), path)

    def bound(self, node: _Node) -> int:
        """A lower bound of the makespan behind a node.

        On each rank, what is left, from when it can begin, and then what must follow on others.
        """
        f0, i0 = self.earliest(node)
        least = 0
        for rank, mine in enumerate(self.stages):
            clock = node.free[rank]
            if clock == _FAR:
                continue
            starts: list[tuple[int, int, int]] = []  # from when, how long, what follows
            for s in mine:
                f, i, w = (self.m - n for n in node.begun[3 * s : 3 * s + 3])
                times, after_f, after_i = self.times[s], *self.behind[s]
                if f:
                    starts.append((f0[s], f * times[F], after_f))
                if i:
                    starts.append((i0[s], i * times[I], after_i))
                if w:
                    pending = node.begun[3 * s + I] > node.begun[3 * s + W]
                    starts.append((clock if pending else i0[s] + times[I], w * times[W], 0))
            for follows in {tail for _, _, tail in starts}:
                some = sorted(each for each in starts if each[2] >= follows)
                end = clock
                for begin, work, _ in some:
                    end = max(end, begin) + work
                least = max(least, end + follows)
            least = max(least, clock)
        return least

    def earliest(self, node: _Node) -> tuple[list[int], list[int]]:
        """The soonest begin of the next F and of the next I of each stage."""
        begun, owners = node.begun, self.shop.owners
        f0, i0 = [0] * self.count, [0] * self.count
        for s in range(self.count):
            clock = min(node.free[owners[s]], _FAR)
            if s and begun[3 * s - 3] <= begun[3 * s]:
                clock = max(clock, f0[s - 1] + self.times[s - 1][F])
            elif s and node.doing[owners[s - 1]] == (s - 1, F) and begun[3 * s - 3] == begun[3 * s] + 1:
                clock = max(clock, node.free[owners[s - 1]])
            f0[s] = clock
        for s in reversed(range(self.count)):
            clock = node.free[owners[s]]
            if begun[3 * s] <= begun[3 * s + I]:
                clock = max(clock, f0[s] + self.times[s][F])
            if s + 1 < self.count:
                if begun[3 * s + 3 + I] <= begun[3 * s + I]:
                    clock = max(clock, i0[s + 1] + self.times[s + 1][I])
                elif node.doing[owners[s + 1]] == (s + 1, I) and begun[3 * s + 3 + I] == begun[3 * s + I] + 1:
                    clock = max(clock, node.free[owners[s + 1]])
            i0[s] = clock
        for rank, mine in enumerate(self.stages):  # at the bound of memory a forward waits for a W, and so for an I
            if sum(begun[3 * s] - begun[3 * s + W] for s in mine) >= self.shop.bounds[rank]:
                freed = min(
                    (node.free[rank] if begun[3 * s + I] > begun[3 * s + W] else i0[s] + self.times[s][I])
                    + self.times[s][W]
                    for s in mine
                    if begun[3 * s + W] < self.m
                )
                for s in mine:
                    f0[s] = max(f0[s], freed)
        return f0, i0
