"""Right and wrong protocols: small ones of tile schedules, altered in ten ways, and ones that chance made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from shardplan.fused.tiles.events import TileBuffer, TileProtocol, TilePut, TileRead, TileSignal, TileWait
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape, RowShape

MODES = ("ranks", "virtual", "resident")
Events = list[list[list[list[Any]]]]  # launch, rank, program


def base(rng: Random) -> TileProtocol:
    """A protocol of two or three ranks, of at most six tiles a rank; often with more slots, or credits of long ago."""
    made = of_schedule(rng)
    if rng.random() < 0.6:
        return made
    slots = rng.randint(1, 4)
    events = lists(made)
    for program, k in places(events, TileWait):
        if program[k].want < program[k].step:
            program[k] = program[k]._replace(want=(1 - rng.randint(1, slots)) * program[k].step)
    buffers = {name: replace(buffer, slots=slots) for name, buffer in made.buffers.items()}
    return replace(sealed(made, events), buffers=buffers)


def of_schedule(rng: Random) -> TileProtocol:
    """The protocol of a tile schedule, in a third of the cases with ranks of other sizes, or with none."""
    ranks = rng.choice((2, 2, 2, 3))
    summed = rng.random() < 0.25
    tiles = 1 if ranks == 3 or summed else rng.choice((1, 2, 2, 3))
    programs = rng.choice((1, 1, 2)) if ranks == 2 and tiles < 3 and not summed else 1
    slots = rng.choice((1, 2, 2))
    order = rng.choice(("remote_first", "natural", (0, 1, 2)[:ranks]))
    if summed:
        waits = rng.choice(("last_program", "second_launch", "owner"))
        if ranks == 2 and rng.random() < 0.3:
            programs, tiles = 2, rng.choice((1, 2))
        return TileSchedule(order, tiles, 1, programs, waits, slots, shots=2).protocol(ranks, RowShape(ranks * tiles))
    waits = rng.choice(("last_program", "second_launch"))
    schedule = TileSchedule(
        order, tiles, rng.randint(1, tiles), programs, waits, slots, slots == 1 or rng.random() < 0.2
    )
    counts = [[rng.choice((0, tiles, tiles)) for _ in range(ranks)] for _ in range(ranks)]
    if rng.random() < 0.34:
        counts = [[rng.randint(0, 3) for _ in range(ranks)] for _ in range(ranks)]
        idle = rng.randrange(ranks)
        which = rng.randrange(3)  # has nothing to send, nothing to receive, or both
        for other in range(ranks):
            counts[idle][other] *= which == 1
            counts[other][idle] *= which == 0
    return schedule.protocol(ranks, BlockShape.rows(counts))


def lists(protocol: TileProtocol) -> Events:
    return [[[list(p) for p in rank] for rank in launch] for launch in protocol.launches]


def sealed(protocol: TileProtocol, events: Events) -> TileProtocol:
    launches = tuple(tuple(tuple(tuple(p) for p in rank) for rank in launch) for launch in events)
    return replace(protocol, launches=launches)


def places(events: Events, *kinds: type) -> list[tuple[list[Any], int]]:
    """Where events of some kinds stand: a program's list, and the index."""
    programs = [p for launch in events for rank in launch for p in rank]
    return [(p, k) for p in programs for k, e in enumerate(p) if isinstance(e, kinds)]


def wait_dropped(protocol: TileProtocol, rng: Random) -> TileProtocol:
    events = lists(protocol)
    program, k = rng.choice(places(events, TileWait))
    del program[k]
    return sealed(protocol, events)


def wait_lowered(protocol: TileProtocol, rng: Random) -> TileProtocol:
    events = lists(protocol)
    program, k = rng.choice(places(events, TileWait))
    wait = program[k]
    program[k] = wait._replace(step=wait.step - 1) if rng.random() < 0.3 else wait._replace(want=wait.want - 1)
    return sealed(protocol, events)


def signal_dropped(protocol: TileProtocol, rng: Random) -> TileProtocol:
    events = lists(protocol)
    program, k = rng.choice(places(events, TileSignal))
    del program[k]
    return sealed(protocol, events)


def put_elsewhere(protocol: TileProtocol, rng: Random) -> TileProtocol:
    """Into the slot of another epoch, to another rank, or into the box of another put of the program."""
    events = lists(protocol)
    program, k = rng.choice(places(events, TilePut))
    put, kind = program[k], rng.randrange(3)
    if kind == 0:
        program[k] = put._replace(slot=put.slot + 1)
    elif kind == 1:
        program[k] = put._replace(to=(put.to + 1) % protocol.ranks)
    else:
        other = rng.choice([e for e in program if isinstance(e, TilePut)])
        program[k] = put._replace(to=other.to, box=other.box, buffer=other.buffer)
    return sealed(protocol, events)


def phases_reordered(protocol: TileProtocol, rng: Random) -> TileProtocol:
    """Two events of a program change places, a suffix of it comes first, or two launches change places."""
    events = lists(protocol)
    kind = rng.randrange(3)
    if kind == 0 and len(events) > 1:
        k = rng.randrange(len(events) - 1)
        events[k], events[k + 1] = events[k + 1], events[k]
    else:
        program = rng.choice([p for launch in events for rank in launch for p in rank if len(p) > 1])
        if kind == 1:
            i, j = rng.sample(range(len(program)), 2)
            program[i], program[j] = program[j], program[i]
        else:
            k = rng.randrange(1, len(program))
            program[:] = program[k:] + program[:k]
    return sealed(protocol, events)


def read_before_wait(protocol: TileProtocol, rng: Random) -> TileProtocol:
    events = lists(protocol)
    program, k = rng.choice(
        [(p, k) for p, k in places(events, TileRead) if any(isinstance(e, TileWait) for e in p[:k])]
    )
    before = rng.choice([j for j in range(k) if isinstance(program[j], TileWait)])
    program.insert(before, program.pop(k))
    return sealed(protocol, events)


def slot_early(protocol: TileProtocol, rng: Random) -> TileProtocol:
    """A buffer has one slot less, or an ack is awaited an epoch late."""
    name = rng.choice(list(protocol.buffers))
    events = lists(protocol)
    buffers = dict(protocol.buffers)
    acks = [(p, k) for p, k in places(events, TileWait) if p[k].want < p[k].step]
    if buffers[name].slots > 1 and (not acks or rng.random() < 0.5):
        buffers[name] = replace(buffers[name], slots=1)
        return replace(protocol, buffers=buffers)
    if acks:
        program, k = rng.choice(acks)
        program[k] = program[k]._replace(want=program[k].want - program[k].step)
        return sealed(protocol, events)
    return protocol


def flags_halved(protocol: TileProtocol, rng: Random) -> TileProtocol:
    """Half as many counters are allocated, or neighbours share one."""
    half = -(-protocol.counters // 2)
    if rng.random() < 0.3:
        return replace(protocol, counters=half)
    events = lists(protocol)
    for program, k in places(events, TileWait, TileSignal):
        program[k] = program[k]._replace(counter=program[k].counter // 2)
    return sealed(replace(protocol, counters=half), events)


def credits_dropped(protocol: TileProtocol, rng: Random) -> TileProtocol:
    """A rank waits for no credit any more, or for those of some epochs earlier."""
    events = lists(protocol)
    acks = [(p, k) for p, k in places(events, TileWait) if p[k].want < p[k].step]
    if not acks:
        return protocol
    back = rng.choice((0, 1, 2, 3))
    for program, k in reversed(acks if rng.random() < 0.5 else [rng.choice(acks)]):
        wait = program[k]
        if back:
            program[k] = wait._replace(want=wait.want - back * wait.step)
        else:
            del program[k]
    return sealed(protocol, events)


def rows_differ(protocol: TileProtocol, rng: Random) -> TileProtocol:
    """A rank has more or fewer rows for another one than that one thinks, or none."""
    events = lists(protocol)
    program, k = rng.choice(places(events, TilePut))
    put, kind = program[k], rng.randrange(3)
    (start, stop), *rest = put.box
    size = protocol.buffers[put.buffer].extents[put.to][0]
    rows = [(start, start), (start, min(stop + 1, size)), (max(0, start - 1), stop)][kind]
    program[k] = put._replace(box=(rows, *rest))
    return sealed(protocol, events)


KINDS: dict[str, Callable[[TileProtocol, Random], TileProtocol]] = {
    "wait dropped": wait_dropped,
    "wait lowered": wait_lowered,
    "signal dropped": signal_dropped,
    "put to another slot": put_elsewhere,
    "phases reordered": phases_reordered,
    "read before wait": read_before_wait,
    "slot reused an epoch early": slot_early,
    "flags halved": flags_halved,
    "credits dropped": credits_dropped,
    "rows differ": rows_differ,
}


def by_chance(rng: Random) -> TileProtocol:
    """Two or three ranks that put, read, signal and wait in any order, on two counters each that all may share.

    Most of these are wrong. Of the right ones many have threads that nothing holds, and counters that several raise.
    """
    ranks, slots, counters = rng.choice((2, 2, 3)), rng.randint(1, 3), 2
    edges = [(s, d) for s in range(ranks) for d in range(ranks) if rng.random() < 0.5]
    sources = [[s for s, to in edges if to == d] for d in range(ranks)]

    def box(source: int, to: int) -> Any:
        k = sources[to].index(source)
        return ((k, k + 1),)

    events: list[list[Any]] = []
    for rank in range(ranks):
        mine: list[Any] = [TilePut(d, "b", box(s, d), s * ranks + d) for s, d in edges if s == rank]
        mine += [TileRead("b", box(s, rank)) for s in sources[rank]]
        mine += [TileSignal(rng.randrange(ranks), rng.randrange(counters)) for _ in range(rng.randint(0, 4))]
        rng.shuffle(mine)
        events.append(mine)
    signals = Counter((e.to, e.counter) for mine in events for e in mine if isinstance(e, TileSignal))
    for rank, mine in enumerate(events):
        for _ in range(rng.randint(0, 3)):
            counter = rng.randrange(counters)
            gets = signals[rank, counter]
            step = gets if rng.random() < 0.8 else rng.randint(0, gets + 1)
            want = rng.randint(1, max(1, gets)) - step * rng.choice((0, 0, 0, 1, 1, 2, 3))
            mine.insert(rng.randint(0, len(mine)), TileWait(counter, want, step))
    cuts = [sorted(rng.choices(range(len(mine) + 1), k=3)) for mine in events]
    if rng.random() < 0.6:  # a launch of a program; else up to two of two
        cuts = [[len(mine)] * 3 for mine in events]
    parts = [
        [mine[a:b] for a, b in zip((0, *c), (*c, len(mine)), strict=True)] for mine, c in zip(events, cuts, strict=True)
    ]
    launches = [[each[:2] for each in parts], [each[2:] for each in parts]]
    table = tuple(tuple((box(s, d), s * ranks + d) for s in sources[d]) for d in range(ranks))
    buffers = {"b": TileBuffer(tuple((len(s),) for s in sources), table, slots)}
    return sealed(TileProtocol("by chance", ranks, (), buffers, counters, 0), launches)
