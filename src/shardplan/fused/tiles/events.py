"""What the programs of a fused kernel do to memory of other ranks, as data: `TileProtocol` and its events.

A rank runs launches one after another. A launch has programs, and a program is a list of events. All of it is said for
one epoch and repeated: in epoch e a put or read of slot offset s touches slot (s + e) mod slots, and a wait asks for
`want + e * step`. Counters lie in the memory of the rank that waits, only grow, and are never reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.errors import ScheduleError

TileBox = tuple[tuple[int, int], ...]  # (start, stop) per dim


class TileScheduleError(ScheduleError):
    """A tile schedule, or a protocol of tiles, deadlocks or gives a wrong result."""


class TilePut(NamedTuple):
    """A tile is stored in a box of a buffer of a rank, `slot` after the slot of the epoch."""

    to: int
    buffer: str
    box: TileBox
    tile: int
    slot: int = 0


class TileSignal(NamedTuple):
    """One is added to a counter of a rank, after all that the program did before (release).

    With a `slice`, one of the rank's own counters, it is counted there first, and only every `of`-th arrival signals.
    """

    to: int
    counter: int
    slice: int = -1
    of: int = 1


class TileWait(NamedTuple):
    """The program goes on once its rank's counter is at least `want + step * epoch` (acquire)."""

    counter: int
    want: int
    step: int


class TileRead(NamedTuple):
    """A box of a buffer of the own rank is read, `slot` after the slot of the epoch."""

    buffer: str
    box: TileBox
    slot: int = 0


TileEvent = TilePut | TileSignal | TileWait | TileRead
TileEvents = tuple[TileEvent, ...]
TileLaunch = tuple[tuple[TileEvents, ...], ...]  # per rank, per program


@dataclass(frozen=True, slots=True)
class TileBuffer:
    """Memory that peers write: per rank its `extents`, and which tile must lie in which box in every epoch."""

    extents: tuple[tuple[int, ...], ...]
    table: tuple[tuple[tuple[TileBox, int], ...], ...]  # per rank, rows (box, tile)
    slots: int = 2


@dataclass(frozen=True, slots=True)
class TileProtocol:
    """Everything that the ranks do in an epoch; `counters` and `slices` are what each rank has allocated."""

    name: str
    ranks: int
    launches: tuple[TileLaunch, ...]
    buffers: Mapping[str, TileBuffer]
    counters: int
    slices: int

    @property
    def programs(self) -> int:
        """The most programs of a launch."""
        return max((len(programs) for launch in self.launches for programs in launch), default=0)

    def of(self, rank: int) -> tuple[TileEvent, ...]:
        """Return the events of a rank in an epoch, its launches and programs one after another."""
        return tuple(event for launch in self.launches for program in launch[rank] for event in program)


def volume(box: TileBox) -> int:
    """Return the number of elements of a box.

    >>> volume(((0, 3), (2, 4))), volume(((1, 1), (0, 4)))
    (6, 0)
    """
    found = 1
    for start, stop in box:
        found *= max(0, stop - start)
    return found


def overlap(a: TileBox, b: TileBox) -> bool:
    """Return whether two boxes share an element."""
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True))


def box_text(box: TileBox) -> str:
    """Return a box as messages print it.

    >>> box_text(((0, 3), (2, 4)))
    '[0:3, 2:4]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
