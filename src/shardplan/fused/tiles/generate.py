"""The protocols of tile schedules: blocks from every rank to every rank, and sums in two shots."""

from __future__ import annotations

from typing import NamedTuple

from shardplan.fused.tiles.events import (
    TileBox,
    TileBuffer,
    TileEvent,
    TileLaunch,
    TileProtocol,
    TilePut,
    TileRead,
    TileScheduleError,
    TileSignal,
    TileWait,
)
from shardplan.fused.tiles.shapes import BlockShape, RowShape

RESULT, PARTIAL = "result", "partial"


class ScheduleSpec(NamedTuple):
    """A schedule with its order worked out: whom each rank serves, in order."""

    name: str
    orders: list[list[int]]
    tiles: int
    slice: int
    programs: int
    waits: str
    slots: int
    acks: bool


Programs = list[list[list[TileEvent]]]  # per rank, per program


def _empty(ranks: int, programs: int) -> Programs:
    return [[[] for _ in range(programs)] for _ in range(ranks)]


def _launch(lists: Programs) -> TileLaunch:
    return tuple(tuple(tuple(program) for program in rank) for rank in lists)


class _Blocks:
    """What is known of a protocol of blocks: where tiles lie, and which counters there are.

    At a rank stand a counter for every source, then with acks one for every destination.
    """

    def __init__(self, plan: ScheduleSpec, shape: BlockShape) -> None:
        self.plan, self.shape, self.ranks = plan, shape, len(shape.boxes)
        self.slices = -(-plan.tiles // plan.slice)  # of a destination
        self.boxes = [[shape.tile(s, d, plan.tiles) for d in range(self.ranks)] for s in range(self.ranks)]

    def number(self, source: int, to: int, k: int) -> int:
        return (source * self.ranks + to) * self.plan.tiles + k

    def puts(self) -> Programs:
        """Every tile, and where its slice is full the signal."""
        plan = self.plan
        lists = _empty(self.ranks, plan.programs)
        for rank in range(self.ranks):
            freed = set[tuple[int, int]]()
            for step, to in enumerate(plan.orders[rank]):
                for k in range(plan.tiles):
                    p = (step * plan.tiles + k) % plan.programs
                    if plan.acks and (p, to) not in freed:
                        freed.add((p, to))
                        lists[rank][p].append(self.ack(to))
                    part = k // plan.slice
                    full = min(plan.slice, plan.tiles - part * plan.slice)
                    arrivals = (to * self.slices + part, full) if full > 1 else (-1, 1)
                    lists[rank][p] += [
                        TilePut(to, RESULT, self.boxes[rank][to][k], self.number(rank, to, k)),
                        TileSignal(to, rank, *arrivals),
                    ]
        return lists

    def ack(self, to: int) -> TileWait:
        """A destination has read what lay in the slot before."""
        return TileWait(self.ranks + to, 1 - self.plan.slots, 1)

    def receive_block(self, rank: int, source: int) -> list[TileEvent]:
        """A source's block has come, is read, and is acknowledged."""
        want = self.slices
        events: list[TileEvent] = [TileWait(source, want, want), TileRead(RESULT, self.shape.boxes[source][rank])]
        return [*events, TileSignal(source, self.ranks + rank)] if self.plan.acks else events

    def share(self, rank: int, source: int, program: int) -> list[TileEvent]:
        """A source's block has come, and a program reads every so many of its tiles."""
        tiles = self.boxes[source][rank][program :: self.plan.programs]
        return [TileWait(source, self.slices, self.slices), *(TileRead(RESULT, box) for box in tiles)]

    def launches(self) -> list[Programs]:
        """The puts, and who waits."""
        plan, lists = self.plan, self.puts()
        if plan.waits == "last_program":
            for rank, programs in enumerate(lists):
                parts = [self.receive_block(rank, source) for source in plan.orders[rank]]
                programs[-1] += [e for part in parts for e in part]
            return [lists]
        second = _empty(self.ranks, plan.programs)
        for rank, source in ((r, s) for r in range(self.ranks) for s in plan.orders[r]):
            for p in range(plan.programs):
                second[rank][p] += self.share(rank, source, p)
        if not plan.acks:
            return [lists, second]
        third = _empty(self.ranks, plan.programs)  # all programs of a source's destination have read it
        for rank in range(self.ranks):
            third[rank][0] += [TileSignal(source, self.ranks + rank) for source in plan.orders[rank]]
        return [lists, second, third]


def block_protocol(plan: ScheduleSpec, shape: BlockShape) -> TileProtocol:
    """Return the protocol of blocks: every rank puts its tiles, signals slices, waits and reads its result.

    Raises `TileScheduleError` where waits are by owner, which only sums in two shots have.
    """
    if plan.waits == "owner":
        raise TileScheduleError(f"tile schedule {plan.name}: waits=owner of blocks; legal are sums in two shots")
    made = _Blocks(plan, shape)
    launches = made.launches()
    table = tuple(
        tuple((box, made.number(s, d, k)) for s in range(made.ranks) for k, box in enumerate(made.boxes[s][d]))
        for d in range(made.ranks)
    )
    counters = made.ranks * (1 + plan.acks)
    buffers = {RESULT: TileBuffer(shape.extents, table, plan.slots)}
    return TileProtocol(
        plan.name, made.ranks, tuple(map(_launch, launches)), buffers, counters, made.ranks * made.slices
    )


def two_shot_protocol(plan: ScheduleSpec, ranks: int, shape: RowShape) -> TileProtocol:
    """Return the protocol of a sum in two shots: addends go to a tile's owner, which sums them and puts the sums.

    Program p of every rank takes tiles p, p + programs, ... of every owner, so that an owner's program waits only for
    programs of the same number. Counters of a rank: one for every own tile and source, then one for every owner.
    Slices are single tiles, and sums need no acks: who has all sums of an epoch knows that all addends were read.
    """
    if plan.acks:
        raise TileScheduleError(f"tile schedule {plan.name}: acks=1 of a sum in two shots; legal are the others")
    n = plan.tiles
    tiles = shape.tiles(ranks, n)
    starts = [[sum(b - a for a, b in own[:k]) for k in range(n + 1)] for own in tiles]

    def lane(owner: int, k: int, first: int, last: int) -> TileBox:
        return (first, last), (starts[owner][k], starts[owner][k + 1])

    def program(k: int) -> int:
        return k % plan.programs

    first, second, third = (_empty(ranks, plan.programs) for _ in range(3))
    for rank in range(ranks):
        for owner in plan.orders[rank]:
            for k in range(n):
                number = (rank * ranks + owner) * n + k
                first[rank][program(k)] += [
                    TilePut(owner, PARTIAL, lane(owner, k, rank, rank + 1), number),
                    TileSignal(owner, k * ranks + rank),
                ]
        for k in range(n):
            p = plan.programs - 1 if plan.waits == "last_program" else program(k)
            second[rank][p] += [TileWait(k * ranks + source, 1, 1) for source in range(ranks)]
            second[rank][p].append(TileRead(PARTIAL, lane(rank, k, 0, ranks)))
            for to in plan.orders[rank]:
                number = ranks * ranks * n + rank * n + k
                second[rank][p] += [TilePut(to, RESULT, (tiles[rank][k],), number), TileSignal(to, n * ranks + rank)]
        last = third[rank][-1]
        last += [TileWait(n * ranks + owner, n, n) for owner in plan.orders[rank]]
        last.append(TileRead(RESULT, ((0, shape.size),)))
    lists = [first, second, third]
    if plan.waits != "second_launch":
        lists = [
            [[[*a, *b, *c] for a, b, c in zip(*each, strict=True)] for each in zip(first, second, third, strict=True)]
        ]
    partial = tuple(
        tuple((lane(o, k, s, s + 1), (s * ranks + o) * n + k) for s in range(ranks) for k in range(n))
        for o in range(ranks)
    )
    result = tuple(((tiles[o][k],), ranks * ranks * n + o * n + k) for o in range(ranks) for k in range(n))
    buffers = {
        PARTIAL: TileBuffer(tuple((ranks, starts[o][n]) for o in range(ranks)), partial, plan.slots),
        RESULT: TileBuffer(((shape.size,),) * ranks, (result,) * ranks, plan.slots),
    }
    return TileProtocol(plan.name, ranks, tuple(map(_launch, lists)), buffers, n * ranks + ranks, 0)
