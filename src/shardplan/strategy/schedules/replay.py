"""`replay`: when each action of a schedule runs, for given times of the stages, and how long ranks are idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.core import border
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import COMPUTE, OVERLAP, Action
from shardplan.strategy.schedules.run import MODES, Cost, ListRun
from shardplan.strategy.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Times:
    """What F, I and W of a stage take: one number for all stages, or one a stage; B takes I + W."""

    F: float | Sequence[float] = 1
    I: float | Sequence[float] = 1  # noqa: E741
    W: float | Sequence[float] = 1

    def __call__(self, action: Action) -> float:
        """What an action takes; messages and what belongs to state nothing."""
        table = {"F": (self.F,), "B": (self.I, self.W), "I": (self.I,), "W": (self.W,)}
        each = table.get(action.kind, ())
        return sum(time[action.stage] if isinstance(time, Sequence) else time for time in each)


@dataclass(frozen=True, slots=True)
class Replayed:
    """`spans`: for each rank (slot, begin, end) of what it did, in order, without idle slots."""

    schedule: Schedule
    spans: tuple[tuple[tuple[int, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max((row[-1][2] for row in self.spans if row), default=0)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(end - begin for _, begin, end in row) for row in self._compute_spans())

    @property
    def bubble(self) -> float:
        """The most that a rank idles between its first and its last computation: the loss without a barrier."""
        rows = zip(self._compute_spans(), self.busy, strict=True)
        return max((row[-1][2] - row[0][1] - busy for row, busy in rows if row), default=0)

    @property
    def idle(self) -> float:
        """The most that a rank idles from the first begin to the last end of all: the loss with a barrier."""
        return self.makespan - min(self.busy)

    def _compute_spans(self) -> list[list[tuple[int, float, float]]]:
        """The spans of computations. What they do not take is idle time, whatever stands in between."""
        rows: list[list[tuple[int, float, float]]] = []
        for row, spans in zip(self.schedule.ranks, self.spans, strict=True):
            rows.append([s for s in spans if (a := row[s[0]]) is not None and a.kind in (*COMPUTE, OVERLAP)])
        return rows


def replay(
    found: Schedule, cost: Cost, message: float = 0, messages: str = "buffered", together: Cost | None = None
) -> Replayed:
    """Run a schedule in time: each rank its list in order, each action as soon as what it needs is there.

    `cost` gives what an action takes, as `Times` do; `message` what a message takes; `messages` as in `check`. The
    parts of an overlap run in turn, unless `together` gives what they take together. Raises `ScheduleError` where the
    ranks wait for each other in a circle.

    >>> from shardplan.strategy.schedules import schedule
    >>> replay(schedule("1f1b", 4, 8), Times(1, 1, 1)).bubble
    9
    """
    run = ListRun(found, border.choice("messages", messages, MODES, ScheduleError), cost, message, together)
    if any(run.stands(rank) for rank in range(len(run.rows))):
        raise ScheduleError(f"schedule {found.name}".rstrip() + ": the ranks wait for each other; see check")
    return Replayed(found, tuple(map(tuple, run.spans)))
