"""Threads that signal and wait on counters that only grow, run as far as they get, over any number of epochs.

What a thread may do next, it may do for ever: a wait that is satisfied stays so. So one greedy run reaches the furthest
point that any interleaving reaches, of all threads at once. With one thread held before an event, what still runs is
what may happen before that event, and what does not run always comes after it: `Reach` answers this for every event.

**Induction over epochs.** Every thread repeats its list of signals and waits, and no number of epochs is enough to try:
a ring of s slots goes wrong in epoch s. What holds for one epoch is carried to all:

1. No counter gets less in an epoch than a wait on it asks for more in the next: a wait that asks for more never ends
   once so many epochs are asked for. Slices are full at the end of an epoch.
2. If all threads end one epoch, they end any number of them: when all have ended e epochs, a counter that gets s an
   epoch stands at s e, against which waits ask for no more than they did in the first epoch against 0. So the state
   "all have ended e epochs" is reached for every e, by the greedy run of one epoch, e times.
3. Hold a thread T somewhere in its epoch e. All threads can end epoch e - 1 all the same, by 2, so the furthest point
   lies behind that state, and it is the same seen from there for every e: a wait whose step is s asks for as much above
   s e as in the first epoch above 0. One whose step is less asks for less with every epoch and in the end for nothing,
   so it orders nothing (`standing` leaves it out). Hence epoch 0 stands for all: an event of T in epoch e comes before
   one of another thread in epoch e + d for every e, if it does so for e = 0.

What is left is how far the others run while T is held in epoch 0, and only up to epoch d, which is as many as a buffer
has slots. Nobody needs to be followed for ever: threads that get to a far epoch are either stopped there, and then the
others get at least so far (what they then overtake is a race), or signal without end from then on, and then the others
get at most so far (what still comes after is proved). Where these two differ, the far epoch is taken twice as far; a
thread that ever stops is followed to its end in this way, and for one that does not, the second is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal, NamedTuple

from shardplan.fused.tiles.events import TileProtocol, TilePut, TileRead, TileSignal, TileWait

TileMode = Literal["ranks", "virtual", "resident"]
FURTHEST = 4096  # epochs that a thread is followed ahead of one that is held


class TileAccess(NamedTuple):
    """A put or a read: of which thread, and in its epoch after how many of its signals and waits."""

    event: TilePut | TileRead
    rank: int
    program: int
    thread: int
    after: int


class TileSync(NamedTuple):
    """A signal (`want` is None) or a wait, on a counter; a signal counts in `slice` first, each `of`-th one goes on.

    A wait asks for `want` in the first epoch, and for `step` more in every other one. Counters and slices are
    (rank, number); the ends of launches are counters (rank, -1).
    """

    counter: tuple[int, int]
    want: int | None
    step: int
    slice: tuple[int, int] | None
    of: int
    rank: int
    program: int


TileSyncs = Sequence[Sequence[TileSync]]  # per thread, of one epoch


class TileThreads(NamedTuple):
    """What every thread does in an epoch: its signals and waits, and beside them all accesses to memory."""

    syncs: list[list[TileSync]]
    accesses: list[TileAccess]


def threads(protocol: TileProtocol, mode: TileMode) -> TileThreads:
    """Return the threads of a protocol, for one epoch, which they repeat.

    - `ranks`: one thread a rank, its programs one after another, as the interpreter runs them
    - `virtual`: one thread for all ranks, launch by launch, as the interpreter runs virtual ranks
    - `resident`: one for every program of every rank; a rank's launches follow each other
    """
    syncs: dict[tuple[int, int], list[TileSync]] = defaultdict(list)
    accesses: list[TileAccess] = []
    programs = max(1, protocol.programs)
    places = [(r, p) for r in range(protocol.ranks) for p in range(programs)]
    if mode == "resident":
        name = {place: place for place in places}
    else:
        name = {(r, p): (r if mode == "ranks" else 0, 0) for r, p in places}
    numbers = {thread: k for k, thread in enumerate(dict.fromkeys(name.values()))}
    every = len(protocol.launches) * programs
    for done, launch in enumerate(protocol.launches, 1):
        for rank, p in places:
            mine = syncs[name[rank, p]]
            events = launch[rank][p] if p < len(launch[rank]) else ()
            for event in events:
                if isinstance(event, TilePut | TileRead):
                    accesses.append(TileAccess(event, rank, p, numbers[name[rank, p]], len(mine)))
                else:
                    mine.append(_sync(event, rank, p))
            if mode == "resident":
                mine.append(TileSync((rank, -1), None, 0, None, 1, rank, p))
        if mode == "resident":
            for rank, p in places:
                syncs[rank, p].append(TileSync((rank, -1), done * programs, every, None, 1, rank, p))
    return TileThreads([syncs[thread] for thread in numbers], accesses)


def _sync(event: TileSignal | TileWait, rank: int, program: int) -> TileSync:
    if isinstance(event, TileWait):
        return TileSync((rank, event.counter), event.want, event.step, None, 1, rank, program)
    own = (rank, event.slice) if event.slice >= 0 else None
    return TileSync((event.to, event.counter), None, 0, own, event.of, rank, program)


def supply(syncs: TileSyncs) -> dict[tuple[int, int], int]:
    """Return how many signals every counter gets in an epoch; slices must be full at its end."""
    arrivals: dict[tuple[tuple[int, int], int], int] = defaultdict(int)
    for sync in (sync for mine in syncs for sync in mine if sync.want is None):
        arrivals[sync.counter, sync.of if sync.slice else 1] += 1
    found: dict[tuple[int, int], int] = defaultdict(int)
    for (counter, of), count in arrivals.items():
        found[counter] += count // of
    return found


def standing(syncs: TileSyncs) -> list[list[TileSync]]:
    """Return the same with waits that in the end ask for nothing waiting for nothing."""
    gets = supply(syncs)

    def lasting(sync: TileSync) -> TileSync:
        is_wait = sync.want is not None
        return sync._replace(want=0, step=0) if is_wait and sync.step < gets[sync.counter] else sync

    return [[lasting(sync) for sync in mine] for mine in syncs]


class TileRun:
    """A greedy run of some epochs: `done` are the signals and waits that every thread has behind it.

    With `endless`, who has ended these epochs signals without end.
    """

    def __init__(self, syncs: TileSyncs, epochs: int = 1, endless: bool = False) -> None:
        """Begin before everything."""
        self.syncs, self.endless = syncs, endless
        self.done = [0] * len(syncs)
        self.ends = [len(each) * epochs for each in syncs]
        self.limits = list(self.ends)
        self.counters: dict[tuple[int, int], float] = defaultdict(int)
        self.arrived: dict[tuple[int, int], int] = defaultdict(int)
        self.waiting: dict[tuple[int, int], list[int]] = {}
        self.nearest: dict[tuple[int, int], float] = {}  # the least that anybody waits for

    def go(self, ready: Iterable[int]) -> None:
        """Advance these threads, and whichever they set free, up to their limits."""
        stack, counters, nearest = list(ready), self.counters, self.nearest
        while stack:
            thread = stack.pop()
            mine, limit, k = self.syncs[thread], self.limits[thread], self.done[thread]
            if k == limit:
                continue
            epoch, at = divmod(k, len(mine))
            while k < limit:
                sync = mine[at]
                if sync.want is None:
                    if sync.slice is None or self._signals(sync):
                        counters[sync.counter] += 1
                        if counters[sync.counter] >= nearest.get(sync.counter, inf):
                            stack += self._woken(sync.counter)
                elif counters[sync.counter] < (need := sync.want + sync.step * epoch):
                    self.waiting.setdefault(sync.counter, []).append(thread)
                    nearest[sync.counter] = min(need, nearest.get(sync.counter, inf))
                    break
                k += 1
                at += 1
                if at == len(mine):
                    epoch, at = epoch + 1, 0
            self.done[thread] = k
            if self.endless and k == self.ends[thread]:
                for counter in {sync.counter for sync in mine if sync.want is None}:
                    counters[counter] = inf
                    stack += self._woken(counter)

    def _woken(self, counter: tuple[int, int]) -> list[int]:
        self.nearest.pop(counter, None)
        return self.waiting.pop(counter, [])

    def _signals(self, sync: TileSync) -> bool:
        """Count an arrival in a slice; whether it is its last one."""
        assert sync.slice is not None
        self.arrived[sync.slice] += 1
        return self.arrived[sync.slice] % sync.of == 0

    def stuck_threads(self) -> list[int]:
        """Return the threads that have not ended."""
        return [t for t, end in enumerate(self.ends) if self.done[t] < end]


class Reach:
    """What can happen while a thread is held, in any epoch."""

    def __init__(self, syncs: TileSyncs, ahead: int) -> None:
        """Take threads that end an epoch, and how many epochs after that of the held one will be asked about."""
        self.syncs, self.epochs = standing(syncs), ahead + 1
        self.tables: dict[tuple[int, int, bool], list[tuple[int, ...]]] = {}

    def _table(self, held: int, epochs: int, endless: bool) -> list[tuple[int, ...]]:
        """Per number of signals and waits that the held thread has done in its epoch: those of all threads."""
        if (held, epochs, endless) in self.tables:
            return self.tables[held, epochs, endless]
        run = TileRun(self.syncs, epochs, endless)
        run.limits[held] = 0
        run.go(range(len(self.syncs)))
        table = [tuple(run.done)]
        for k in range(len(self.syncs[held])):
            run.limits[held] = k + 1
            before = run.done[held]
            run.go([held])
            # A wait opens nothing for others, so what they have done is still the same tuple.
            same = self.syncs[held][k].want is not None and run.done[held] == before + 1
            row = table[-1]
            table.append((*row[:held], k + 1, *row[held + 1 :]) if same else tuple(run.done))
        self.tables[held, epochs, endless] = table
        return table

    def happens_before(self, first: TileAccess, then: TileAccess, later: int) -> bool | None:
        """Return whether `first` comes before `then` so many epochs later, in every interleaving and every epoch.

        None where that depends on more than `FURTHEST` epochs ahead.
        """
        if first.thread == then.thread:
            raise ValueError("of one thread the place in its list decides")
        behind = later * len(self.syncs[then.thread]) + then.after
        epochs = self.epochs
        while epochs <= FURTHEST + 1:
            if self._table(first.thread, epochs, True)[first.after][then.thread] < behind:
                return True
            if self._table(first.thread, epochs, False)[first.after][then.thread] >= behind:
                return False
            epochs *= 2
        return None
