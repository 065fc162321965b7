"""`CompiledSchedule`: a schedule made ready for sweeps, once for each name, sizes and way of sending messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.core import border
from shardplan.errors import ScheduleError, ShardplanError, excerpt
from shardplan.simulation.sweep.graph import KINDS, ActionGraph
from shardplan.simulation.sweep.message_graph import graph_of_placed
from shardplan.simulation.sweep.pass_lists import I, PassLists, of_actions
from shardplan.simulation.sweep.periods import PeriodicLists, periodic
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.strategy.schedules import GENERATORS, Schedule, check
from shardplan.strategy.schedules import schedule as named
from shardplan.strategy.schedules.run import MODES


@dataclass(frozen=True, slots=True, eq=False)
class CompiledSchedule:
    """What a sweep needs to know of a schedule, whatever the times.

    `forwards` and `backwards` [ranks, chunks] count what each rank does of each chunk in a step; `owners` says the rank
    of each stage, of which `copies` have a chunk. `in_flight` are the most forwards of each rank whose B or W is not
    done, in chunks times microbatches. `split` says whether some backward is halved. `repeats` is what repeats in it,
    if that shortens a sweep.

    >>> compile_schedule("1f1b", 4, 8).in_flight
    (4, 3, 2, 1)
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    owners: tuple[int, ...]
    copies: int
    split: bool
    in_flight: tuple[int, ...]
    forwards: np.ndarray
    backwards: np.ndarray
    repeats: PeriodicLists | None
    interleave: int
    messages: str
    schedule: Schedule | None  # that was given; None of a name

    @property
    def graph(self) -> ActionGraph:
        """The graph of all of its actions; of a name, made when it is first asked for."""
        if self.schedule is not None:
            return _graph_of(self.schedule, self.messages)
        return _graph_of_named(self.name, self.ranks, self.microbatches, self.interleave)

    @property
    def periods(self) -> int:
        """How many periods its lists have; 0 where nothing repeats."""
        return 0 if self.repeats is None else (self.microbatches - self.repeats.microbatches) // self.repeats.period


def compile_schedule(
    schedule: Schedule | str,
    pipeline: int | None = None,
    microbatches: int | None = None,
    interleave: int | None = None,
    messages: str = "blocking",
) -> CompiledSchedule:
    """Return a schedule, or the one called so of `pipeline` ranks with `interleave` chunks each, ready for `sweep`.

    Where a schedule has sends and receives, `messages` says how they are sent, as in `check`, and they hold their
    ranks; without them, a value is on its way for the time of a message and holds nobody. Raises `ScheduleError` for a
    schedule that `check` refuses, an unknown name, and sizes for which that schedule is not defined.

    >>> from shardplan.simulation.sweep import StageSeconds, sweep
    >>> sweep(compile_schedule("1f1b", 4, 8), StageSeconds.equal(4, 1.0, 1.0, 1.0)).makespan
    array([33.])
    """
    border.choice("messages", messages, MODES, ScheduleError)
    if isinstance(schedule, Schedule):
        said = (pipeline, len(schedule.ranks)), (microbatches, schedule.microbatches)
        if any(given is not None and given != own for given, own in said):
            raise ScheduleError(
                f"{schedule.label} has {len(schedule.ranks)} ranks and {schedule.microbatches} microbatches; "
                f"{pipeline} and {microbatches} were asked for"
            )
        return _compiled_schedule(schedule, schedule.name, messages)
    made = GENERATORS[border.choice("schedule", schedule, GENERATORS, ScheduleError)]
    p = border.whole_number(f"schedule {schedule}: pipeline", pipeline, 1, kind=ScheduleError)
    m = border.whole_number(f"schedule {schedule}: microbatches", microbatches, 1, kind=ScheduleError)
    v = made.chunks if interleave is None else border.whole_number("interleave", interleave, 1, kind=ScheduleError)
    if v != made.chunks and not made.free:
        raise ScheduleError(f"schedule {schedule} has {made.chunks} chunks a rank; an interleave of {v} was asked for")
    return _compiled_name(schedule, p, m, v)


def checked(what: str, schedule: CompiledSchedule, stages: object) -> None:
    """Raise `ShardplanError` unless the stages have as many chunks as the schedule."""
    if not isinstance(stages, StageSeconds) or stages.chunks != schedule.chunks:
        has = f"{stages.chunks} chunks" if isinstance(stages, StageSeconds) else excerpt(stages)
        raise ShardplanError(
            f"{what} of {schedule.name or 'a schedule'}: the stages are {has}; legal are StageSeconds of "
            f"{schedule.chunks} chunks on {schedule.ranks} ranks"
        )


@lru_cache(maxsize=1024)
def _compiled_name(name: str, p: int, m: int, v: int) -> CompiledSchedule:
    repeats = periodic(name, p, m, v)
    if repeats is None:
        return _of(_named_lists(name, p, m, v), name, m, v, None, "blocking", None)
    # A period more than none holds the most that any number of them does: each gives back what it takes.
    lists = repeats.lists(1)
    return _of(lists, name, m, v, repeats, "blocking", None)


@lru_cache(maxsize=64)
def _compiled_schedule(schedule: Schedule, name: str, messages: str) -> CompiledSchedule:
    check(schedule, messages=messages if schedule.has_messages else "buffered")
    lists = of_actions(schedule.ranks, schedule.owners, schedule.copies)
    v = schedule.stages // len(schedule.ranks)
    return _of(lists, name, schedule.microbatches, v, None, messages, schedule)


def _of(
    lists: PassLists,
    name: str,
    m: int,
    v: int,
    repeats: PeriodicLists | None,
    messages: str,
    schedule: Schedule | None,
) -> CompiledSchedule:
    forwards, backwards = lists.counts()
    if repeats is not None:
        more = (m - repeats.microbatches) // repeats.period - 1
        one, none = (repeats.lists(times).counts() for times in (1, 0))
        forwards, backwards = (a + more * (a - b) for a, b in zip(one, none, strict=True))
    return CompiledSchedule(
        name,
        lists.ranks,
        lists.chunks,
        m,
        tuple(lists.owners.tolist()),
        lists.copies,
        bool((lists.kind == I).any()),
        lists.in_flight(),
        forwards,
        backwards,
        repeats,
        v,
        messages,
        schedule,
    )


def _named_lists(name: str, p: int, m: int, v: int) -> PassLists:
    found = named(name, p, m, v)
    return of_actions(found.ranks, found.owners, found.copies)


@lru_cache(maxsize=32)
def _graph_of_named(name: str, p: int, m: int, v: int) -> ActionGraph:
    return _with_actions(named(name, p, m, v))


@lru_cache(maxsize=32)
def _graph_of(schedule: Schedule, messages: str) -> ActionGraph:
    return graph_of_placed(schedule, messages) if schedule.has_messages else _with_actions(schedule)


def _with_actions(found: Schedule) -> ActionGraph:
    actions = [
        (rank, leaf)
        for rank, row in enumerate(found.ranks)
        for action in row
        if action is not None
        for leaf in action.leaves
        if leaf.kind in KINDS
    ]
    return of_actions(found.ranks, found.owners, found.copies).graph(actions=actions)
