"""The generators of schedules by name, and `schedule`, which asks one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardplan.core import border
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.simple import gpipe, one_f_one_b

Rows = list[list[Action]]


@dataclass(frozen=True, slots=True)
class Generator:
    """What makes a kind of schedule from (ranks, microbatches, chunks): `rows`, a list of actions a rank.

    `chunks`: how many stages a rank has unless it is said; any other is legal where `free`.
    """

    rows: Callable[[int, int, int], Rows]
    chunks: int = 1
    free: bool = False
    copies: int = 1


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(lambda p, m, v: gpipe(p, m)),
    "1f1b": Generator(lambda p, m, v: one_f_one_b(p, m)),
}


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
    made = GENERATORS[border.choice("schedule", name, GENERATORS, ScheduleError)]
    border.whole(f"schedule {name}: ranks", ranks, 1, kind=ScheduleError)
    border.whole(f"schedule {name}: microbatches", microbatches, 1, kind=ScheduleError)
    v = made.chunks if chunks is None else border.whole(f"schedule {name}: chunks", chunks, 1, kind=ScheduleError)
    if v != made.chunks and not made.free:
        raise ScheduleError(f"schedule {name} has {made.chunks} chunks a rank, {v} were asked for")
    found = Schedule(tuple(map(tuple, made.rows(ranks, microbatches, v))), microbatches, made.copies, name)
    return found.only(lambda a: a.kind == "F") if forward_only else found
