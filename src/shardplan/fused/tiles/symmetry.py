"""The proof of a schedule for every shape at once, on one program and one tile of each kind: `prove`.

What a schedule makes for a shape differs from what it makes for another one in boxes alone, never in signals and waits.
So one protocol stands for all of them, in which every tile is one element: a shape in which some are empty asks less.

**Races.** Order within a program, and ranks beside the two of a put and its read, only add to what comes before what.
So it is enough to look at as many programs as put every tile in one of its own, with the waits in another, and at
three ranks, of which two need not be the same. There tiles of a slice are alike, and slices of as many tiles are: their
programs signal the same and wait for the same, get as far together, and a wait asks for all of them. One and another
of each kind stay.

**Deadlock.** Ranks and their order count, tiles of a kind as above: programs that have several tiles, one, or none.

Both stand on `checker.check`, which tries what stays exhaustively; its time does not grow with tiles and programs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shardplan.fused.tiles.checker import check, check_deadlock
from shardplan.fused.tiles.running import TileMode
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape, RowShape, TileShape


def prove(schedule: TileSchedule, ranks: int, modes: tuple[TileMode, ...]) -> None:
    """Prove a schedule for every shape on so many ranks, in the modes in which it may run.

    A shape's tiles must lie apart and fill the result, as those of `BlockShape.rows` and of operators do. Raises
    `TileScheduleError`, as `checker.check`, with the smallest schedule of the kind.

    >>> prove(TileSchedule(tiles=512, slice=64, programs=132), 8, ("ranks", "resident"))
    >>> prove(TileSchedule(slots=1), 8, ("ranks",))
    Traceback (most recent call last):
    shardplan.fused.tiles.events.TileScheduleError: ...
    """
    small = _with_few_tiles(schedule)
    programs = (1,) if schedule.programs == 1 else (1, 2, 3, small.tiles + 1)
    _prove_races(_with_most_programs(small), min(ranks, 3), modes)
    for each in sorted({min(n, schedule.programs) for n in programs}):
        _prove_ends(replace(small, programs=each), ranks, modes)


@lru_cache(maxsize=1024)
def _prove_races(schedule: TileSchedule, ranks: int, modes: tuple[TileMode, ...]) -> None:
    mode = "virtual" if modes == ("virtual",) else "resident"
    check(schedule.protocol(ranks, element_shape(schedule, ranks)), (mode,))


@lru_cache(maxsize=1024)
def _prove_ends(schedule: TileSchedule, ranks: int, modes: tuple[TileMode, ...]) -> None:
    protocol = schedule.protocol(ranks, element_shape(schedule, ranks))
    for mode in modes:
        check_deadlock(protocol, mode)


def element_shape(schedule: TileSchedule, ranks: int) -> TileShape:
    """Return the shape of which every tile is one element.

    >>> element_shape(TileSchedule(tiles=2, shots=2), 3)
    RowShape(size=6)
    """
    n = schedule.tiles
    return RowShape(ranks * n) if schedule.shots == 2 else BlockShape.rows([[n] * ranks] * ranks)


def _with_few_tiles(schedule: TileSchedule) -> TileSchedule:
    """The same with two slices of two tiles, and a last one of fewer, where there are such.

    >>> str(_with_few_tiles(TileSchedule(tiles=512, slice=100)))[:33]
    'order=remote_first tiles=5 slice='
    """
    n, k = schedule.tiles, min(schedule.slice, schedule.tiles)
    if schedule.shots == 2 or k == 1:
        return replace(schedule, tiles=min(n, 3), slice=1)
    return replace(schedule, tiles=2 * min(n // k, 2) + bool(n % k), slice=2)


def _with_most_programs(schedule: TileSchedule) -> TileSchedule:
    """The same with a program for every tile (of two shots: for those of as many owners), and one that only waits."""
    return replace(schedule, order="natural", programs=schedule.tiles * (1 if schedule.shots == 2 else 3) + 1)
