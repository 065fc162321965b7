"""A proved protocol as the words that a kernel reads: `TileRows`, one row an event, int64 [rows, 16].

| field | PUT, READ | SIGNAL | WAIT | END |
|---|---|---|---|---|
| 0 | 0 or 3 | 1 | 2 | 4 |
| 1 | rank of the buffer | rank of the counter | | |
| 2 | the buffer's offset in the heap, slot 0 | the counter's | the counter's | the epoch's |
| 3 | bytes between slots | offset of the own slice | want | |
| 4 | slots - 1 | arrivals of a signal | step | |
| 5 to 9 | the operator's; by default first row, end row, first column, end column, row length | | | |
| 7 | | | number of the wait | |
| 10 to 15 | the operator's | | | |

END lies behind the last row of a program, in the last launch: the program's epoch has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardplan.errors import optional
from shardplan.fused.tiles.events import TileProtocol, TilePut, TileRead, TileScheduleError, TileSignal, TileWait
from shardplan.fused.triton.memory import LINE

if TYPE_CHECKING:
    import torch

WIDE, BOX = 16, 5
Detail = Callable[[int, int, TilePut | TileRead], Sequence[int] | None]


class TileSpot(NamedTuple):
    """Where a buffer lies in every heap: offset of slot 0, bytes between slots."""

    offset: int
    between: int


class TileMissed(NamedTuple):
    """A wait, as an error names it: in epoch e rank `rank` wants `want + step * e` signals of `source`."""

    rank: int
    source: int
    want: int
    step: int
    tiles: int


class TileRows(NamedTuple):
    """A launch: `rows` int64 [n, 16]; program p's are `begin[p]` to `begin[p + 1]` - 1, of the ranks here."""

    rows: torch.Tensor
    begin: torch.Tensor
    programs: int


def compile_launches(
    protocol: TileProtocol,
    ranks: Sequence[int],
    spots: Mapping[str, TileSpot],
    flags: int,
    slices: int,
    epochs: int,
    detail: Detail,
    device: torch.device | str,
) -> tuple[list[TileRows], list[TileMissed]]:
    """Return the launches of some ranks, and what their waits are, by number.

    `flags`, `slices` and `epochs` are where counters, slices and epochs begin in every heap. `detail(rank, program,
    event)` says the fields from 5 on of a PUT or READ, or None where the kernel has nothing to do.
    """
    torch = optional("torch", "torch")
    sources = _sources(protocol)
    missed: list[TileMissed] = []
    launches: list[TileRows] = []
    programs = max(1, protocol.programs)
    for number, launch in enumerate(protocol.launches):
        table: list[list[int]] = []
        begin = [0]
        for rank in ranks:
            for p in range(programs):
                events = launch[rank][p] if p < len(launch[rank]) else ()
                for event in events:
                    match event:
                        case TileSignal(to, counter, part, of):
                            row = [1, to, flags + counter * LINE, slices + part * LINE, of if part >= 0 else 1]
                        case TileWait(counter, want, step):
                            source, tiles = sources.get((rank, counter), (rank, 1))
                            row = [2, rank, flags + counter * LINE, want, step, 0, 0, len(missed)]
                            missed.append(TileMissed(rank, source, want, step, tiles))
                        case _:
                            said = detail(rank, p, event)
                            if said is None:
                                continue
                            row = [*_buffer(protocol, spots, rank, event), *said]
                    table.append(row + [0] * (WIDE - len(row)))
                if number == len(protocol.launches) - 1:
                    table.append([4, rank, epochs + p * 64, *[0] * (WIDE - 3)])
                begin.append(len(table))
        rows = torch.tensor(table or [[0] * WIDE], dtype=torch.int64, device=device)
        launches.append(TileRows(rows, torch.tensor(begin, dtype=torch.int32, device=device), programs))
    return launches, missed


def _buffer(
    protocol: TileProtocol, spots: Mapping[str, TileSpot], rank: int, event: TilePut | TileRead
) -> tuple[int, ...]:
    if event.slot:
        raise TileScheduleError(f"{protocol.name}: a slot of another epoch; legal for kernels is that of the epoch")
    spot, slots = spots[event.buffer], protocol.buffers[event.buffer].slots
    is_put = isinstance(event, TilePut)
    return 0 if is_put else 3, event.to if is_put else rank, spot.offset, spot.between, slots - 1


def _sources(protocol: TileProtocol) -> dict[tuple[int, int], tuple[int, int]]:
    """Who signals the counters of every rank, and for how many tiles at once."""
    return {
        (event.to, event.counter): (source, event.of)
        for source in range(protocol.ranks)
        for event in protocol.of(source)
        if isinstance(event, TileSignal)
    }
