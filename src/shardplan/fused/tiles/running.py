"""Threads that signal and wait on counters that only grow, run as far as they get.

What a thread may do next, it may do for ever: a wait that is satisfied stays so. So one greedy run reaches the furthest
point that any interleaving reaches, of all threads at once. With one thread held before an event, what still runs is
what may happen before that event, and what does not run always comes after it: `Reach` answers this for every event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from shardplan.fused.tiles.events import TileProtocol, TilePut, TileRead, TileSignal, TileWait

TileMode = Literal["ranks", "virtual", "resident"]
EPOCHS = 3


class TileAccess(NamedTuple):
    """A put or a read: in which epoch, of which thread, after how many of its signals and waits."""

    event: TilePut | TileRead
    rank: int
    program: int
    epoch: int
    thread: int
    after: int


class TileSync(NamedTuple):
    """A signal (`want` is None) or a wait, on a counter; a signal counts in `slice` first, each `of`-th one goes on.

    Counters and slices are (rank, number); the ends of launches are counters (rank, -1).
    """

    counter: tuple[int, int]
    want: int | None
    slice: tuple[int, int] | None
    of: int
    rank: int
    program: int
    epoch: int


class TileThreads(NamedTuple):
    """What every thread does: its signals and waits, and beside them all accesses to memory."""

    syncs: list[list[TileSync]]
    accesses: list[TileAccess]


def threads(protocol: TileProtocol, mode: TileMode, epochs: int = EPOCHS) -> TileThreads:
    """Return the threads of a protocol over some epochs.

    - `ranks`: one thread a rank, its programs one after another, as the interpreter runs them
    - `virtual`: one thread for all ranks, launch by launch, as the interpreter runs virtual ranks
    - `resident`: one for every program of every rank; a rank's launches follow each other
    """
    syncs: dict[tuple[int, int], list[TileSync]] = defaultdict(list)
    accesses: list[TileAccess] = []
    places = [(r, p) for r in range(protocol.ranks) for p in range(max(1, protocol.programs))]
    if mode == "resident":
        name = {place: place for place in places}
    else:
        name = {(r, p): (r if mode == "ranks" else 0, 0) for r, p in places}
    numbers = {thread: k for k, thread in enumerate(dict.fromkeys(name.values()))}
    done = 0
    for epoch in range(epochs):
        for launch in protocol.launches:
            done += 1
            for rank, p in places:
                mine = syncs[name[rank, p]]
                events = launch[rank][p] if p < len(launch[rank]) else ()
                for event in events:
                    if isinstance(event, TilePut | TileRead):
                        thread = numbers[name[rank, p]]
                        accesses.append(TileAccess(event, rank, p, epoch, thread, len(mine)))
                    else:
                        mine.append(_sync(event, rank, p, epoch))
                if mode == "resident":
                    mine.append(TileSync((rank, -1), None, None, 1, rank, p, epoch))
            if mode == "resident":
                for rank, p in places:
                    want = done * max(1, protocol.programs)
                    syncs[name[rank, p]].append(TileSync((rank, -1), want, None, 1, rank, p, epoch))
    return TileThreads([syncs[thread] for thread in numbers], accesses)


def _sync(event: TileSignal | TileWait, rank: int, program: int, epoch: int) -> TileSync:
    if isinstance(event, TileWait):
        want = event.want + event.step * epoch
        return TileSync((rank, event.counter), want, None, 1, rank, program, epoch)
    own = (rank, event.slice) if event.slice >= 0 else None
    return TileSync((event.to, event.counter), None, own, event.of, rank, program, epoch)


class TileRun:
    """A greedy run: `done` are the signals and waits that every thread has behind it."""

    def __init__(self, syncs: Sequence[Sequence[TileSync]]) -> None:
        """Begin before everything."""
        self.syncs = syncs
        self.done = [0] * len(syncs)
        self.limits = [len(each) for each in syncs]
        self.counters: dict[tuple[int, int], int] = defaultdict(int)
        self.arrived: dict[tuple[int, int], int] = defaultdict(int)
        self.waiting: dict[tuple[int, int], set[int]] = defaultdict(set)

    def go(self, ready: Iterator[int] | Sequence[int]) -> None:
        """Advance these threads, and whichever they set free, up to their limits."""
        stack = list(ready)
        while stack:
            thread = stack.pop()
            mine, limit, k = self.syncs[thread], self.limits[thread], self.done[thread]
            while k < limit:
                sync = mine[k]
                if sync.want is None:
                    if self._signals(sync):
                        self.counters[sync.counter] += 1
                        stack += self.waiting.pop(sync.counter, ())
                elif self.counters[sync.counter] < sync.want:
                    self.waiting[sync.counter].add(thread)
                    break
                k += 1
            self.done[thread] = k

    def _signals(self, sync: TileSync) -> bool:
        """Count an arrival; whether it is the last of its slice."""
        if sync.slice is None:
            return True
        self.arrived[sync.slice] += 1
        return self.arrived[sync.slice] % sync.of == 0

    def stuck(self) -> list[int]:
        """Return the threads that have not ended."""
        return [t for t, each in enumerate(self.syncs) if self.done[t] < len(each)]


class Reach:
    """What can happen while a thread is held."""

    def __init__(self, syncs: Sequence[Sequence[TileSync]]) -> None:
        """Take threads that do not deadlock."""
        self.syncs = syncs
        self.tables: dict[int, list[tuple[int, ...]]] = {}

    def _table(self, held: int) -> list[tuple[int, ...]]:
        """Per number of signals and waits that the held thread has done: those of all threads, at most."""
        run = TileRun(self.syncs)
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
        return table

    def before(self, first: TileAccess, then: TileAccess) -> bool:
        """Return whether `first` comes before `then` in every interleaving."""
        if first.thread == then.thread:
            raise ValueError("of one thread the place in its list decides")
        if first.thread not in self.tables:
            self.tables[first.thread] = self._table(first.thread)
        return self.tables[first.thread][first.after][then.thread] < then.after
