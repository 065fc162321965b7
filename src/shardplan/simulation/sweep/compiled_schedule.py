"""`CompiledSchedule`: a schedule made ready for sweeps, once for each name, sizes and way of sending messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardplan.core import validation
from shardplan.errors import ScheduleError, ShardplanError, excerpt
from shardplan.simulation.sweep.periods import PeriodicLists, periodic
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.strategy.schedules import GENERATORS, Action, Schedule, check
from shardplan.strategy.schedules import schedule as named
from shardplan.strategy.schedules.action_graph import ActionGraph
from shardplan.strategy.schedules.action_lists import MODES, ActionLists, I


@dataclass(frozen=True, slots=True, eq=False)
class CompiledSchedule:
    """What a sweep needs to know of a schedule, whatever the times.

    `forwards` and `backwards` [ranks, chunks] count what each rank does of each chunk in a step; `owners` says the rank
    of each stage, of which `copies` have a chunk. `in_flight` are the most forwards of each rank whose B or W is not
    done, in chunks times microbatches. `split` says whether some backward is halved. `repeats` is what repeats in it,
    if that shortens a sweep. `together` says whether what overlaps has times of its own.

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
    together: bool = False

    @property
    def lists(self) -> ActionLists:
        """The lists of all of its actions; of a name, made when they are first asked for."""
        return _lists_and_graph(self.schedule or self._sizes, self.messages, self.together)[0]

    @property
    def graph(self) -> ActionGraph:
        """Their graph, as `lists`."""
        return _lists_and_graph(self.schedule or self._sizes, self.messages, self.together)[1]

    @property
    def pass_rows(self) -> np.ndarray:
        """The rows of computations in the graph, by rank and in order."""
        return self.graph.row[np.flatnonzero(self.lists.computes)]

    @property
    def actions(self) -> list[tuple[int, Action, int]]:
        """Rank, action and row of the same."""
        lists, at = self.lists, np.flatnonzero(self.lists.computes)
        ranks, rows = lists.rank[at].tolist(), self.pass_rows.tolist()
        return list(zip(ranks, map(lists.action, at.tolist()), rows, strict=True))

    @property
    def _sizes(self) -> tuple[str, int, int, int]:
        return self.name, self.ranks, self.microbatches, self.interleave

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
    together: bool = False,
) -> CompiledSchedule:
    """Return a schedule, or the one called so of `pipeline` ranks with `interleave` chunks each, ready for `sweep`.

    Where a schedule has sends and receives, `messages` says how they are sent, as in `check`, and they hold their
    ranks; without them, a value is on its way for the time of a message and holds nobody, but for `StageSeconds` with
    `rendezvous`. With `together` a forward and a backward that a schedule runs together take less, as `StageSeconds`
    says; nothing is extrapolated then.

    Raises `ScheduleError` for a schedule that `check` refuses, an unknown name, and sizes for which that schedule is
    not defined.

    >>> from shardplan.simulation.sweep import StageSeconds, sweep
    >>> sweep(compile_schedule("1f1b", 4, 8), StageSeconds.equal(4, 1.0, 1.0, 1.0)).makespan
    array([33.])
    """
    validation.choice("messages", messages, MODES, ScheduleError)
    if isinstance(schedule, Schedule):
        said = (pipeline, len(schedule.ranks)), (microbatches, schedule.microbatches)
        if any(given is not None and given != own for given, own in said):
            raise ScheduleError(
                f"{schedule.label} has {len(schedule.ranks)} ranks and {schedule.microbatches} microbatches; "
                f"{pipeline} and {microbatches} were asked for"
            )
        found = _compiled_schedule(schedule, schedule.name, messages)
        return replace(found, together=True) if together else found
    made = GENERATORS[validation.choice("schedule", schedule, GENERATORS, ScheduleError)]
    p = validation.whole_number(f"schedule {schedule}: pipeline", pipeline, 1, kind=ScheduleError)
    m = validation.whole_number(f"schedule {schedule}: microbatches", microbatches, 1, kind=ScheduleError)
    v = made.chunks if interleave is None else validation.whole_number("interleave", interleave, 1, kind=ScheduleError)
    if v != made.chunks and not made.free:
        raise ScheduleError(f"schedule {schedule} has {made.chunks} chunks a rank; an interleave of {v} was asked for")
    found = _compiled_name(schedule, p, m, v)
    return replace(found, repeats=None, together=True) if together else found


def checked(what: str, schedule: CompiledSchedule, stages: object, together: bool = False) -> None:
    """Raise `ShardplanError` unless the stages have as many chunks as the schedule.

    And where passes run together, unless it is for who knows what these take (`together`); and where messages are of
    `rendezvous` but some go from a rank to itself, or are placed.
    """
    if schedule.together and not together:
        raise ShardplanError(
            f"{what} of {schedule.name or 'a schedule'}: forwards and backwards run together, in times that only "
            "`sweep` takes; legal is the schedule compiled without `together`"
        )
    if not isinstance(stages, StageSeconds) or stages.chunks != schedule.chunks:
        has = f"{stages.chunks} chunks" if isinstance(stages, StageSeconds) else excerpt(stages)
        raise ShardplanError(
            f"{what} of {schedule.name or 'a schedule'}: the stages are {has}; legal are StageSeconds of "
            f"{schedule.chunks} chunks on {schedule.ranks} ranks"
        )
    placed = schedule.schedule is not None and schedule.schedule.has_messages
    if stages.rendezvous and (placed or len({*schedule.owners}) < len(schedule.owners)):
        has = "it places its messages" if placed else "a rank has several chunks"
        raise ShardplanError(
            f"{what} of {schedule.name or 'a schedule'}: messages of rendezvous, and {has}; legal is one chunk a rank, "
            "without sends and receives"
        )


@lru_cache(maxsize=1024)
def _compiled_name(name: str, p: int, m: int, v: int) -> CompiledSchedule:
    repeats = periodic(name, p, m, v)
    if repeats is None:
        return _of(ActionLists.of_schedule(named(name, p, m, v)), name, m, v, None, "blocking", None)
    # A period more than none holds the most that any number of them does: each gives back what it takes.
    lists = repeats.lists(1)
    return _of(lists, name, m, v, repeats, "blocking", None)


@lru_cache(maxsize=64)
def _compiled_schedule(schedule: Schedule, name: str, messages: str) -> CompiledSchedule:
    check(schedule, messages=messages if schedule.has_messages else "buffered")
    lists = ActionLists.of_schedule(schedule)
    v = schedule.stages // len(schedule.ranks)
    return _of(lists, name, schedule.microbatches, v, None, messages, schedule)


def _of(
    lists: ActionLists,
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


@lru_cache(maxsize=32)
def _lists_and_graph(
    said: Schedule | tuple[str, int, int, int], messages: str, together: bool
) -> tuple[ActionLists, ActionGraph]:
    lists = ActionLists.of_schedule(said if isinstance(said, Schedule) else named(*said), together)
    return lists, lists.graph(messages)
