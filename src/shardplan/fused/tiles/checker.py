"""The proof that a protocol of tiles is right, for any number of epochs: `check`.

1. **Deadlock.** In each mode of running, all threads end however many epochs are asked for. Counters only grow, so a
   greedy run of one epoch decides, and for the others that no wait asks for more in each than its counter gets.
2. **Exactly once.** Puts into every (rank, slot) are those of the table: boxes are disjoint and cover it.
3. **Happens-before.** Every read comes, in every interleaving, after all puts of its epoch that lie in its box.
4. **Write after read.** Every put comes after all reads of what it overwrites: those of the epoch as many earlier as
   the buffer has slots. Earlier ones follow, since the put's thread did the same put in between.
5. **Counters.** None is used that is not allocated, and slices are full when an epoch ends.

3 and 4 are exact for what signals and waits order, and proved by induction over epochs: see `running`. Epochs are all
of the same protocol. Puts and reads that this orders are ordered on a machine by the release of the signals and the
acquire of the waits between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from shardplan.errors import excerpt
from shardplan.fused.tiles.events import (
    TileBox,
    TileBuffer,
    TileProtocol,
    TilePut,
    TileRead,
    TileScheduleError,
    TileSignal,
    box_text,
    overlap,
    volume,
)
from shardplan.fused.tiles.running import FURTHEST, Reach, TileAccess, TileMode, TileRun, TileSync, supply, threads

_SAID = {
    "ranks": "one thread a rank",
    "virtual": "one thread for all ranks",
    "resident": "one thread a program",
}


def check(protocol: TileProtocol, modes: Sequence[TileMode] = ("ranks", "resident")) -> None:
    """Prove a protocol in the modes in which it may run.

    Races are judged in the last of these modes that has most threads, of which the others run a part only. Raises
    `TileScheduleError` with the circle of waits, the two writers, or the put and the read that nothing orders.
    """
    if not modes or set(modes) - set(get_args(TileMode)):
        raise TileScheduleError(
            f"tile modes {excerpt(tuple(modes))}; legal are some of {', '.join(get_args(TileMode))}"
        )
    _counters(protocol)
    _check_coverage(protocol)
    for mode in modes:
        check_deadlock(protocol, mode)
    _check_order(protocol, max(modes, key=("virtual", "ranks", "resident").index))


def _fail(protocol: TileProtocol, text: str) -> TileScheduleError:
    return TileScheduleError(f"tile schedule {protocol.name} on {protocol.ranks} ranks: {text}")


# Counters and places


def _counters(protocol: TileProtocol) -> None:
    for name, buffer in protocol.buffers.items():
        if not 1 <= buffer.slots <= FURTHEST:
            raise _fail(protocol, f"buffer {name} has {buffer.slots} slots; legal are 1 to {FURTHEST}")
    for rank in range(protocol.ranks):
        for event in protocol.of(rank):
            if isinstance(event, TilePut | TileRead):
                _check_box(protocol, rank, event)
                continue
            signals = isinstance(event, TileSignal)
            if signals and not 0 <= event.to < protocol.ranks:
                raise _fail(protocol, f"rank {rank} signals rank {event.to}; legal are 0 to {protocol.ranks - 1}")
            if not 0 <= event.counter < protocol.counters:
                does = (
                    f"signals counter {event.counter} of rank {event.to}"
                    if signals
                    else f"waits for counter {event.counter}"
                )
                raise _fail(protocol, f"rank {rank} {does}, of {protocol.counters} allocated")
            if signals and event.slice >= protocol.slices:
                raise _fail(protocol, f"rank {rank} counts in slice {event.slice}, of {protocol.slices} allocated")
        _slices(protocol, rank)


def _slices(protocol: TileProtocol, rank: int) -> None:
    """Every arrival of a slice means the same signal, and the last one of an epoch is the last one of a signal."""
    arrivals = Counter(event for event in protocol.of(rank) if isinstance(event, TileSignal) and event.slice >= 0)
    means: dict[int, TileSignal] = {}
    for event in arrivals:
        other = means.setdefault(event.slice, event)
        if other != event:
            text = " and ".join(f"counter {e.counter} of rank {e.to} every {e.of}" for e in (other, event))
            raise _fail(protocol, f"slice {event.slice} of rank {rank} signals {text}; legal is one of them")
    for event, count in arrivals.items():
        if event.of < 1 or count % event.of:
            text = f"slice {event.slice} of rank {rank} has {count} arrivals an epoch and signals every {event.of}"
            raise _fail(protocol, f"{text}; legal are multiples")


def _check_box(protocol: TileProtocol, rank: int, event: TilePut | TileRead) -> None:
    """A put or read is of a buffer, and inside it unless it is empty."""
    buffer = protocol.buffers.get(event.buffer)
    to = event.to if isinstance(event, TilePut) else rank
    if buffer is None or not 0 <= to < protocol.ranks:
        raise _fail(protocol, f"rank {rank} uses buffer {event.buffer} of rank {to}, which does not exist")
    extents = buffer.extents[to]
    inside = len(event.box) == len(extents) and (
        not volume(event.box) or all(0 <= a <= b <= n for (a, b), n in zip(event.box, extents, strict=True))
    )
    if not inside:
        size = box_text(tuple((0, n) for n in extents))
        raise _fail(
            protocol, f"rank {rank} uses {box_text(event.box)} of buffer {event.buffer} of rank {to}, which is {size}"
        )
    if isinstance(event, TileRead) and event.slot % buffer.slots and volume(event.box):
        where = f"{box_text(event.box)} of {event.buffer}"
        raise _fail(protocol, f"rank {rank} reads {where} in a slot of another epoch")


# Exactly once


def _check_coverage(protocol: TileProtocol) -> None:
    """The table covers the result without overlap, and puts are its rows."""
    puts: dict[tuple[str, int], list[tuple[TilePut, int]]] = defaultdict(list)
    for rank in range(protocol.ranks):
        for event in protocol.of(rank):
            if isinstance(event, TilePut) and volume(event.box):
                puts[event.buffer, event.to].append((event, rank))
    for name, buffer in protocol.buffers.items():
        for rank in range(protocol.ranks):
            _table_covers(protocol, name, buffer, rank)
            _check_each_tile_written_once(protocol, name, buffer, rank, puts[name, rank])


def _table_covers(protocol: TileProtocol, name: str, buffer: TileBuffer, rank: int) -> None:
    rows = [(box, tile) for box, tile in buffer.table[rank] if volume(box)]
    for (a, s), (b, t) in pairs([box for box, _ in rows], [tile for _, tile in rows]):
        raise _fail(
            protocol, f"tiles {s} and {t} both lie in {name} of rank {rank}, at {box_text(a)} and {box_text(b)}"
        )
    whole = volume(tuple((0, n) for n in buffer.extents[rank]))
    if (found := sum(volume(box) for box, _ in rows)) != whole:
        raise _fail(protocol, f"tiles cover {found} of the {whole} elements of {name} of rank {rank}")


def _check_each_tile_written_once(
    protocol: TileProtocol, name: str, buffer: TileBuffer, rank: int, puts: list[tuple[TilePut, int]]
) -> None:
    wanted = {box: tile for box, tile in buffer.table[rank] if volume(box)}
    written: dict[TileBox, int] = {}
    for put, source in puts:
        where = f"{box_text(put.box)} of {name} of rank {rank}"
        if put.slot % buffer.slots:
            raise _fail(protocol, f"rank {source} puts tile {put.tile} into {where} in a slot of another epoch")
        if put.box in written:
            raise _fail(protocol, f"ranks {written[put.box]} and {source} both write {where}")
        if wanted.get(put.box) != put.tile:
            others = [f"tile {t} lies in {box_text(box)}" for box, t in wanted.items() if overlap(box, put.box)]
            raise _fail(
                protocol, f"rank {source} puts tile {put.tile} into {where}, where {'; '.join(others) or 'none lies'}"
            )
        written[put.box] = source
    for box, tile in wanted.items():
        if box not in written:
            raise _fail(protocol, f"nobody writes tile {tile} to {box_text(box)} of {name} of rank {rank}")


def pairs(boxes: Sequence[TileBox], marks: Sequence[int]) -> Iterator[tuple[tuple[TileBox, int], tuple[TileBox, int]]]:
    """Yield the pairs of boxes that share an element, each with its mark, along a sweep over their first dim."""
    order = sorted(range(len(boxes)), key=lambda k: boxes[k])
    open_: list[int] = []
    for k in order:
        open_ = [j for j in open_ if not boxes[k] or boxes[j][0][1] > boxes[k][0][0]]
        for j in open_:
            if overlap(boxes[j], boxes[k]):
                yield (boxes[j], marks[j]), (boxes[k], marks[k])
        open_.append(k)


# Deadlock


def check_deadlock(protocol: TileProtocol, mode: TileMode) -> None:
    """Raise `TileScheduleError` with the circle of waits where threads do not end some epoch."""
    syncs = threads(protocol, mode).syncs
    run = TileRun(syncs)
    run.go(range(len(syncs)))
    if stuck := run.stuck_threads():
        raise _fail(protocol, f"deadlock with {_SAID[mode]}: {_circle(run, stuck[0])}")
    gets = supply(syncs)
    for wait in (sync for mine in syncs for sync in mine if sync.want is not None):
        if wait.step > gets[wait.counter]:
            raise _fail(protocol, f"deadlock with {_SAID[mode]}: {_describe_starved_wait(wait, gets[wait.counter])}")


def _circle(run: TileRun, start: int) -> str:
    """Follow a stuck thread to one that it waits for, until one comes again or nobody is left to signal."""
    said, seen, thread = list[str](), set[int](), start
    while thread not in seen:
        seen.add(thread)
        wait = run.syncs[thread][run.done[thread]]
        said.append(_waits(run, wait))
        ahead = (t for t in run.stuck_threads() if any(_is_signal(s, wait) for s in run.syncs[t][run.done[t] :]))
        following = next(ahead, None)
        if following is None:
            return ", which is signalled after ".join(said) + ", which nobody signals any more"
        thread = following
    return ", which is signalled after ".join([*said, "the first of these"])


def _describe_starved_wait(wait: TileSync, gets: int) -> str:
    """The first epoch whose wait asks for more than all epochs up to it give."""
    assert wait.want is not None
    rank, counter = wait.counter
    epoch = max(0, (gets - wait.want) // (wait.step - gets) + 1)
    wants = f"(want {wait.want + wait.step * epoch}, of {gets} signals an epoch)"
    return f"rank {rank} program {wait.program} waits in epoch {epoch} for counter {counter} {wants}"


def _is_signal(sync: TileSync, wait: TileSync) -> bool:
    return sync.want is None and sync.counter == wait.counter


def _waits(run: TileRun, wait: TileSync) -> str:
    rank, counter = wait.counter
    of = f"counter {counter}" if counter >= 0 else "the end of its launch"
    seen = f"(want {wait.want}, seen {run.counters[wait.counter]})"
    return f"rank {rank} program {wait.program} waits in epoch 0 for {of} {seen}"


# Races


def _check_order(protocol: TileProtocol, mode: TileMode) -> None:
    """Every read after its puts, every put after the reads of what it overwrites."""
    found = threads(protocol, mode)
    reach = Reach(found.syncs, max((buffer.slots for buffer in protocol.buffers.values()), default=1))
    place = {id(access): k for k, access in enumerate(found.accesses)}

    def before(first: TileAccess, then: TileAccess, later: int) -> bool:
        if first.thread == then.thread:
            return later > 0 or place[id(first)] < place[id(then)]
        answer = reach.happens_before(first, then, later)
        if answer is None:
            put = first if isinstance(first.event, TilePut) else then
            raise _fail(protocol, f"what orders {_put(put)} lies over {FURTHEST} epochs apart; legal are nearer ones")
        return answer

    for puts, reads in _by_memory(found.accesses):
        slots = protocol.buffers[puts[0].event.buffer].slots if puts else 0
        read_by: dict[int, list[TileBox]] = defaultdict(list)
        for put, read in _touching(puts, reads):
            if not before(put, read, 0):
                raise _fail(protocol, _race(put, 0, read))
            if not before(read, put, slots):
                raise _fail(protocol, _race(put, slots, read))
            read_by[id(put)].append(read.event.box)
        for put in puts:
            _read_whole(protocol, put, read_by[id(put)])


def _by_memory(accesses: Iterable[TileAccess]) -> Iterator[tuple[list[TileAccess], list[TileAccess]]]:
    """The puts and the reads of every buffer of every rank that are not empty."""
    found: dict[tuple[str, int], tuple[list[TileAccess], list[TileAccess]]] = defaultdict(lambda: ([], []))
    for access in accesses:
        event = access.event
        if volume(event.box):
            is_read = isinstance(event, TileRead)
            found[event.buffer, access.rank if is_read else event.to][is_read].append(access)
    yield from found.values()


def _touching(puts: list[TileAccess], reads: list[TileAccess]) -> Iterator[tuple[TileAccess, TileAccess]]:
    """The pairs of a put and a read that share an element, along a sweep over the dim that is cut most."""
    dims = range(len(puts[0].event.box) if puts else 0)
    dim = max(dims, key=lambda d: len({put.event.box[d][0] for put in puts}), default=0)
    open_: tuple[list[TileAccess], list[TileAccess]] = [], []
    for access in sorted([*puts, *reads], key=lambda access: access.event.box[dim] if dims else ()):
        box, is_read = access.event.box, isinstance(access.event, TileRead)
        others = open_[not is_read]
        if dims:
            others[:] = [other for other in others if other.event.box[dim][1] > box[dim][0]]
        for other in others:
            if overlap(box, other.event.box):
                yield (other, access) if is_read else (access, other)
        open_[is_read].append(access)


def _read_whole(protocol: TileProtocol, put: TileAccess, boxes: Iterable[TileBox]) -> None:
    """Every put is read in its epoch: one that is not would be ordered with the next by nothing."""
    left = [put.event.box]
    for box in boxes:
        left = [part for each in left for part in subtract_box(each, box)]
    if left:
        raise _fail(protocol, f"nobody reads all of {_put(put)}")


def subtract_box(box: TileBox, hole: TileBox) -> Iterator[TileBox]:
    """Yield boxes that make up a box without another one.

    >>> list(subtract_box(((0, 4), (0, 4)), ((1, 2), (0, 2))))
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (2, 4))]
    """
    if not overlap(box, hole):
        yield box
        return
    rest = list(box)
    for dim, ((start, stop), (a, b)) in enumerate(zip(box, hole, strict=True)):
        for part in ((start, min(stop, a)), (max(start, b), stop)):
            if part[0] < part[1]:
                yield (*rest[:dim], part, *rest[dim + 1 :])
        rest[dim] = (max(start, a), min(stop, b))


def _put(put: TileAccess) -> str:
    event = put.event
    assert isinstance(event, TilePut)
    return f"tile {event.tile} in {box_text(event.box)} of {event.buffer} of rank {event.to}"


def _race(put: TileAccess, epoch: int, read: TileAccess) -> str:
    who = f"rank {put.rank} program {put.program} may put {_put(put)} for epoch {epoch}"
    return f"{who} {'before' if epoch else 'after'} rank {read.rank} program {read.program} reads it in epoch 0"
