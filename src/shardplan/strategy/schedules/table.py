"""The generators of schedules by name, and `schedule`, which asks one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from shardplan.core import validation
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.dualpipe import dualpipe, dualpipev
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.simple import (
    combined_rows,
    gpipe,
    interleaved_rows,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from shardplan.strategy.schedules.vshape import v_half, v_min, zb_v

Rows = list[list[Action]]


@dataclass(frozen=True, slots=True)
class Generator:
    """What makes a kind of schedule from (ranks, microbatches, chunks): `rows`, a list of actions a rank.

    `in_flight(ranks, microbatches, chunks, rank)` is the most forwards whose B or W is not done, in stages times
    microbatches: `chunks` of them are one device's share of the layers for one microbatch. `chunks` is how many stages
    a rank has unless it is said; others are legal where `free`. Where it is `blocking`, and a rank has one stage,
    frameworks post the receive for a pass behind the pass before, and wait for it (Megatron-LM's
    `forward_backward_pipelining_without_interleaving`, PyTorch's `ScheduleGPipe` and `Schedule1F1B`).
    """

    rows: Callable[[int, int, int], Rows]
    in_flight: Callable[[int, int, int, int], int]
    chunks: int = 1
    free: bool = False
    copies: int = 1
    blocking: bool = False


def _interleaved_in_flight(p: int, m: int, v: int, r: int, more: int = 0) -> int:
    each = m // max(1, m // p)
    return min((v - 1) * each + 2 * (p - r) - 1 + more, m * v)


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(lambda p, m, v: gpipe(p, m), lambda p, m, v, r: m, blocking=True),
    "1f1b": Generator(lambda p, m, v: one_f_one_b(p, m), lambda p, m, v, r: min(p - r, m), blocking=True),
    "interleaved": Generator(interleaved_rows, _interleaved_in_flight, chunks=2, free=True, blocking=True),
    "combined-1f1b": Generator(
        combined_rows, lambda p, m, v, r: _interleaved_in_flight(p, m, v, r, more=1), chunks=2, free=True, blocking=True
    ),
    "looped-bfs": Generator(looped_bfs, lambda p, m, v, r: m * v, chunks=2, free=True, blocking=True),
    "zb-h1": Generator(lambda p, m, v: zb_h1(p, m), lambda p, m, v, r: min(p, m)),
    "zb-h2": Generator(lambda p, m, v: zb_h2(p, m), lambda p, m, v, r: min(2 * p - 1, m)),
    "zb-v": Generator(lambda p, m, v: zb_v(p, m), lambda p, m, v, r: 2 * min(p, m), chunks=2),
    "v-half": Generator(lambda p, m, v: v_half(p, m), lambda p, m, v, r: 2 * min((p + 2) // 2, m), chunks=2),
    "v-min": Generator(lambda p, m, v: v_min(p, m), lambda p, m, v, r: 2 * min((p + 4) // 3, m), chunks=2),
    "dualpipe": Generator(lambda p, m, v: dualpipe(p, m), lambda p, m, v, r: p + 1, chunks=2, copies=2),
    "dualpipev": Generator(lambda p, m, v: dualpipev(p, m), lambda p, m, v, r: 2 * p + 1, chunks=2),
}


@lru_cache(maxsize=1)
def overlapping_schedules() -> tuple[str, ...]:
    """Return the names of schedules that run a forward and a backward together.

    >>> overlapping_schedules()
    ('combined-1f1b', 'dualpipe', 'dualpipev')
    """
    return tuple(
        name for name, made in GENERATORS.items() if any(a.is_pair for row in made.rows(2, 8, made.chunks) for a in row)
    )


def is_rendezvous(name: str, chunks: int) -> bool:
    """Return whether a message of a schedule, of so many chunks a rank, begins once its receiver waits for it.

    Else it goes as soon as it is made, beside what its receiver does.

    >>> is_rendezvous("1f1b", 1), is_rendezvous("interleaved", 2), is_rendezvous("zb-h1", 1)
    (True, False, False)
    """
    return GENERATORS[name].blocking and chunks == 1


def schedule(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, forward_only: bool = False
) -> Schedule:
    """Return the schedule called `name` of a pipeline of `ranks`, each with `chunks` stages.

    Raises `ScheduleError` for an unknown name or sizes for which that schedule is not defined.

    >>> print(schedule("1f1b", 2, 2))
    schedule 1f1b, 2 microbatches
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1
    """
    made = GENERATORS[validation.choice("schedule", name, GENERATORS, ScheduleError)]
    validation.whole_number(f"schedule {name}: ranks", ranks, 1, kind=ScheduleError)
    validation.whole_number(f"schedule {name}: microbatches", microbatches, 1, kind=ScheduleError)
    v = (
        made.chunks
        if chunks is None
        else validation.whole_number(f"schedule {name}: chunks", chunks, 1, kind=ScheduleError)
    )
    if v != made.chunks and not made.free:
        raise ScheduleError(f"schedule {name} has {made.chunks} chunks a rank, {v} were asked for")
    found = Schedule(tuple(map(tuple, made.rows(ranks, microbatches, v))), microbatches, made.copies, name)
    return found.filter_actions(lambda a: a.kind == "F") if forward_only else found
