"""Right and wrong protocols: small ones of tile schedules, altered in eight ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from shardplan.fused.tiles.events import TileProtocol, TilePut, TileRead, TileSignal, TileWait
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape, RowShape

MODES = ("ranks", "virtual", "resident")
Events = list[list[list[list[Any]]]]  # launch, rank, program


def base(rng: Random) -> TileProtocol:
    """A protocol of two or three ranks, of at most six tiles a rank."""
    ranks = rng.choice((2, 2, 2, 3))
    summed = rng.random() < 0.25
    tiles = 1 if ranks == 3 or summed else rng.choice((1, 2, 2, 3))
    programs = rng.choice((1, 1, 2)) if ranks == 2 and tiles < 3 and not summed else 1
    slots = rng.choice((1, 2, 2))
    order = rng.choice(("remote_first", "natural", "local_first"))
    if summed:
        waits = rng.choice(("last_program", "second_launch", "owner"))
        if ranks == 2 and rng.random() < 0.3:
            programs, tiles = 2, rng.choice((1, 2))
        return TileSchedule(order, tiles, 1, programs, waits, slots, shots=2).protocol(ranks, RowShape(ranks * tiles))
    waits = rng.choice(("last_program", "second_launch", "consumer"))
    schedule = TileSchedule(
        order, tiles, rng.randint(1, tiles), programs, waits, slots, slots == 1 or rng.random() < 0.2
    )
    counts = [[rng.choice((0, tiles, tiles)) for _ in range(ranks)] for _ in range(ranks)]
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


KINDS: dict[str, Callable[[TileProtocol, Random], TileProtocol]] = {
    "wait dropped": wait_dropped,
    "wait lowered": wait_lowered,
    "signal dropped": signal_dropped,
    "put to another slot": put_elsewhere,
    "phases reordered": phases_reordered,
    "read before wait": read_before_wait,
    "slot reused an epoch early": slot_early,
    "flags halved": flags_halved,
}
