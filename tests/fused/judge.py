"""Whether a protocol of tiles is right, by trying every interleaving; written apart from the checker.

A state is the place of every thread, what every element of memory holds, and the counters. From a state every thread
that can do its next event does it. A protocol is wrong where a thread reads an element that does not hold the tile of
its epoch, where an element is written twice in an epoch, where a counter that is not allocated is used, or where nobody
can go on before the end.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from shardplan.fused.tiles.events import TileProtocol, TilePut, TileRead, TileSignal, TileWait

EPOCHS = 3


class TooManyStates(Exception):
    """More states than were asked for."""


def elements(box: Any) -> list[tuple[int, ...]]:
    return list(product(*(range(a, b) for a, b in box)))


def segments(protocol: TileProtocol, mode: str) -> list[list[tuple[int, list[Any]]]]:
    """Per thread, per launch that it takes part in: which rank's launch, and its events with rank and epoch."""
    count = max(len(rank) for launch in protocol.launches for rank in launch)
    threads: dict[Any, list[tuple[int, list[Any]]]] = {}
    for epoch in range(EPOCHS):
        for launch in protocol.launches:
            for rank in range(protocol.ranks):
                for p in range(count):
                    key = {"ranks": rank, "virtual": 0, "resident": (rank, p)}[mode]
                    events = launch[rank][p] if p < len(launch[rank]) else ()
                    threads.setdefault(key, []).append((rank, [(e, rank, epoch) for e in events]))
    return list(threads.values())


def wrong(protocol: TileProtocol, mode: str, most: int = 200_000) -> str:
    """What is wrong in some interleaving of a mode, or nothing; `TooManyStates` where there are more than `most`."""
    threads = segments(protocol, mode)
    # Memory: one number an element. What it must hold for a reader is the tile of the table, in the reader's epoch.
    cells: dict[Any, int] = {}
    must: dict[Any, int] = {}
    for name, buffer in protocol.buffers.items():
        for rank in range(protocol.ranks):
            for box, tile in buffer.table[rank]:
                for at in elements(box):
                    must[name, rank, at] = tile
            for slot in range(buffer.slots):
                for at in elements(tuple((0, n) for n in buffer.extents[rank])):
                    cells[name, rank, slot, at] = len(cells)
    # Every event as a function of the state's parts, looked up once.
    steps: list[list[Any]] = []
    starts: list[list[int]] = []  # where each launch begins
    for thread in threads:
        flat: list[Any] = []
        begin: list[int] = []
        for _, events in thread:
            begin.append(len(flat))
            for event, rank, epoch in events:
                if isinstance(event, TilePut | TileRead):
                    to = event.to if isinstance(event, TilePut) else rank
                    slot = (event.slot + epoch) % protocol.buffers[event.buffer].slots
                    where = [cells.get((event.buffer, to, slot, at)) for at in elements(event.box)]
                    if None in where:
                        return "outside"
                    if isinstance(event, TilePut):
                        flat.append(("put", where, (epoch, event.tile)))
                    else:
                        flat.append(
                            ("read", where, [(epoch, must[event.buffer, to, at]) for at in elements(event.box)])
                        )
                elif isinstance(event, TileWait):
                    if event.counter >= protocol.counters:
                        return "counter"
                    flat.append(("wait", rank * protocol.counters + event.counter, event.want + event.step * epoch))
                else:
                    assert isinstance(event, TileSignal)
                    if event.counter >= protocol.counters:
                        return "counter"
                    own = (
                        -1
                        if event.slice < 0
                        else protocol.ranks * protocol.counters + rank * protocol.slices + event.slice
                    )
                    flat.append(("signal", event.to * protocol.counters + event.counter, own, event.of))
        begin.append(len(flat))
        steps.append(flat)
        starts.append(begin)
    mates = [[u for u, other in enumerate(threads) if other[0][0] == t[0][0]] for t in threads]
    launch_of = [
        [max(k for k in range(len(begin) - 1) if begin[k] <= i) for i in range(len(flat))]
        for flat, begin in zip(steps, starts, strict=True)
    ]
    first = ((0,) * len(threads), (None,) * len(cells), (0,) * (protocol.ranks * (protocol.counters + protocol.slices)))
    seen, stack = {first[:2]}, [first]
    while stack:
        places, memory, counts = stack.pop()
        moved = ended = 0
        for t, i in enumerate(places):
            flat = steps[t]
            if i == len(flat):
                ended += 1
                continue
            if mode == "resident":  # the launch before has ended, of all programs of the rank
                k = launch_of[t][i]
                if any(places[u] < starts[u][k] for u in mates[t]):
                    continue
            event = flat[i]
            later, counted = memory, counts
            if event[0] == "wait":
                if counts[event[1]] < event[2]:
                    continue
            elif event[0] == "signal":
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
            else:
                for cell, value in zip(event[1], event[2], strict=True):
                    if memory[cell] != value:
                        return "read"
            moved += 1
            state = (*places[:t], i + 1, *places[t + 1 :]), later
            if state not in seen:
                seen.add(state)
                if len(seen) > most:
                    raise TooManyStates
                stack.append((*state, counted))
        if not moved and ended < len(threads):
            return "deadlock"
    return ""
