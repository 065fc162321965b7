"""Whether a protocol of tiles is right, by trying every interleaving; written apart from the checker.

A state is the place of every thread, what every element of memory holds, and the counters. From a state every thread
that can do its next event does it. A protocol is wrong where a thread reads an element that does not hold the tile of
its epoch, where an element is written twice in an epoch, where a counter that is not allocated is used, or where nobody
can go on before the end.

It tries `horizon` epochs: what an element held that lasts for `slots` epochs is overwritten in the next, a writer is
held back at latest when the epochs are over that its waits look back, and a wait that falls behind by one an epoch has
then fallen behind by all that its counter gets while the slots last; one that asks for more than there is has then
asked for all. One epoch alone is tried, too, which may be one too few. The checker has no horizon.

Signals, waits that are satisfied, and accesses to what nobody else ever touches hinder nobody: where a thread can do
one, every end that is reached by doing others first is reached by doing it now. With `eager` only that is tried.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

from shardplan.fused.tiles.events import TileProtocol, TilePut, TileRead, TileSignal, TileWait


class TooManyStates(Exception):
    """More states than were asked for."""


def elements(box: Any) -> list[tuple[int, ...]]:
    return list(product(*(range(a, b) for a, b in box)))


def horizon(protocol: TileProtocol) -> int:
    """How many epochs are tried."""
    slots = max((buffer.slots for buffer in protocol.buffers.values()), default=1)
    events = [event for rank in range(protocol.ranks) for event in protocol.of(rank)]
    gets: dict[Any, int] = defaultdict(int)
    for event in events:
        if isinstance(event, TileSignal):
            gets[event.to, event.counter] += 1
    back, slow, dear = 0, 0, 0
    for rank in range(protocol.ranks):
        for event in protocol.of(rank):
            if isinstance(event, TileWait):
                found = gets[rank, event.counter]
                back = max(back, -(event.want // max(1, event.step)))
                slow = max(slow, found if 0 < event.step < found else 0)
                dear = max(dear, found - event.want + 2 if event.step > found else 0)
    return max(slots + back + 3 + (slots + 1) * slow, dear)


def segments(protocol: TileProtocol, mode: str, epochs: int) -> list[list[tuple[int, list[Any]]]]:
    """Per thread, per launch that it takes part in: which rank's launch, and its events with rank and epoch."""
    count = max(len(rank) for launch in protocol.launches for rank in launch)
    threads: dict[Any, list[tuple[int, list[Any]]]] = {}
    for epoch in range(epochs):
        for launch in protocol.launches:
            for rank in range(protocol.ranks):
                for p in range(count):
                    key = {"ranks": rank, "virtual": 0, "resident": (rank, p)}[mode]
                    events = launch[rank][p] if p < len(launch[rank]) else ()
                    threads.setdefault(key, []).append((rank, [(e, rank, epoch) for e in events]))
    return list(threads.values())


class Steps:
    """Every event of every thread as what it does to the state's parts, looked up once; `fault` where it cannot be."""

    def __init__(self, protocol: TileProtocol, mode: str, epochs: int) -> None:
        self.protocol, self.fault = protocol, ""
        threads = segments(protocol, mode, epochs)
        # Memory: one number an element. What it must hold for a reader is the tile of the table, in the reader's epoch.
        self.cells: dict[Any, int] = {}
        self.must: dict[Any, int] = {}
        for name, buffer in protocol.buffers.items():
            for rank in range(protocol.ranks):
                for box, tile in buffer.table[rank]:
                    self.must.update({(name, rank, at): tile for at in elements(box)})
                for slot in range(buffer.slots):
                    for at in elements(tuple((0, n) for n in buffer.extents[rank])):
                        self.cells[name, rank, slot, at] = len(self.cells)
        self.threads: list[list[Any]] = []
        self.starts: list[list[int]] = []  # where each launch begins
        for thread in threads:
            flat: list[Any] = []
            begin: list[int] = []
            for _, events in thread:
                begin.append(len(flat))
                flat += [self.step(*each) for each in events]
            self.threads.append(flat)
            self.starts.append([*begin, len(flat)])
        self.mates = [[u for u, other in enumerate(threads) if other[0][0] == t[0][0]] for t in threads]
        self.launch = [
            [k for k, (a, b) in enumerate(zip(begin, begin[1:], strict=False)) for _ in range(a, b)]
            for begin in self.starts
        ]
        users: dict[int, set[int]] = defaultdict(set)
        for t, flat in enumerate(self.threads):
            for step in flat:
                for cell in step[1] if step[0] in ("put", "read") else ():
                    users[cell].add(t)
        self.free = [
            [step[0] in ("signal", "wait") or all(len(users[c]) == 1 for c in step[1]) for step in flat]
            for flat in self.threads
        ]

    def step(self, event: Any, rank: int, epoch: int) -> tuple[Any, ...]:
        protocol = self.protocol
        if isinstance(event, TilePut | TileRead):
            to = event.to if isinstance(event, TilePut) else rank
            slot = (event.slot + epoch) % protocol.buffers[event.buffer].slots
            where = [self.cells.get((event.buffer, to, slot, at), -1) for at in elements(event.box)]
            if -1 in where:
                self.fault = "outside"
            if isinstance(event, TilePut):
                return "put", where, (epoch, event.tile)
            return "read", where, [(epoch, self.must.get((event.buffer, to, at))) for at in elements(event.box)]
        if event.counter >= protocol.counters:
            self.fault = "counter"
        if isinstance(event, TileWait):
            return "wait", rank * protocol.counters + event.counter, event.want + event.step * epoch
        assert isinstance(event, TileSignal)
        own = protocol.ranks * protocol.counters + rank * protocol.slices + event.slice if event.slice >= 0 else -1
        return "signal", event.to * protocol.counters + event.counter, own, event.of


def wrong(protocol: TileProtocol, mode: str, most: int = 200_000, epochs: int = 0, eager: bool = True) -> str:
    """What is wrong in some interleaving of a mode, or nothing; `TooManyStates` where there are more than `most`."""
    found = wrong_within(protocol, mode, most, 1, eager) if epochs != 1 else ""
    return found or wrong_within(protocol, mode, most, epochs or horizon(protocol), eager)


def wrong_within(protocol: TileProtocol, mode: str, most: int, epochs: int, eager: bool) -> str:
    """The same of so many epochs."""
    steps = Steps(protocol, mode, epochs)
    if steps.fault:
        return steps.fault
    threads, starts = steps.threads, steps.starts
    counters = protocol.ranks * (protocol.counters + protocol.slices)
    first = ((0,) * len(threads), (None,) * len(steps.cells), (0,) * counters)
    seen, stack = {first[:2]}, [first]
    while stack:
        places, memory, counts = stack.pop()
        able = []
        for t, i in enumerate(places):
            flat = threads[t]
            if i == len(flat) or (flat[i][0] == "wait" and counts[flat[i][1]] < flat[i][2]):
                continue
            # Co-resident, the launch before has ended, of all programs of the rank.
            if mode == "resident" and any(places[u] < starts[u][steps.launch[t][i]] for u in steps.mates[t]):
                continue
            able.append(t)
            if eager and steps.free[t][i]:
                able = [t]
                break
        if not able and any(i < len(flat) for i, flat in zip(places, threads, strict=True)):
            return "deadlock"
        for t in able:
            i = places[t]
            event = threads[t][i]
            later, counted = memory, counts
            if event[0] == "signal":
                _, counter, own, of = event
                new = list(counts)
                if own >= 0:
                    new[own] += 1
                if own < 0 or new[own] % of == 0:
                    new[counter] += 1
                counted = tuple(new)
            elif event[0] == "put":
                values = list(memory)
                for cell in event[1]:
                    if values[cell] is not None and values[cell][0] == event[2][0]:
                        return "twice"
                    values[cell] = event[2]
                later = tuple(values)
            elif event[0] == "read":
                for cell, value in zip(event[1], event[2], strict=True):
                    if memory[cell] != value:
                        return "read"
            state = (*places[:t], i + 1, *places[t + 1 :]), later
            if state not in seen:
                seen.add(state)
                if len(seen) > most:
                    raise TooManyStates
                stack.append((*state, counted))
    return ""
