"""`replay`: when each action of a schedule runs, for given times of the stages, and how long ranks are idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from shardplan.core import validation
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import COMPUTE, MESSAGES, OVERLAP, Action
from shardplan.strategy.schedules.action_graph import FREE
from shardplan.strategy.schedules.action_lists import MODES, ActionLists
from shardplan.strategy.schedules.schedule import Schedule

Cost = Callable[[Action], float]


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
    mode = validation.choice("messages", messages, MODES, ScheduleError)
    slots = [(rank, k, a) for rank, row in enumerate(found.ranks) for k, a in enumerate(row) if a is not None]
    sizes = [len(action.leaves) for _, _, action in slots]
    last = [n - 1 for n in accumulate(sizes)]  # of the actions in a slot
    edges = ActionLists.of_schedule(found).edges(mode, None if together is None else np.repeat(last, sizes))
    lag, taken = ([0 if each == FREE else message for each in codes.tolist()] for codes in (edges.lag, edges.cost))
    for (_, _, action), end, size in zip(slots, last, sizes, strict=True):
        if together is not None and action.parts:
            own = [*[0] * (size - 1), together(action)]
        else:
            own = [taken[end] if leaf.kind in MESSAGES else cost(leaf) for leaf in action.leaves]
        taken[end + 1 - size : end + 1] = own
    try:
        begins, ends = edges.run_once(lag, taken, message * 0)
    except ScheduleError:
        raise ScheduleError(f"schedule {found.name}".rstrip() + ": the ranks wait for each other; see check") from None
    spans: list[list[tuple[int, float, float]]] = [[] for _ in found.ranks]
    for (rank, slot, action), end, size in zip(slots, last, sizes, strict=True):
        first = end if together is not None and action.parts else end + 1 - size
        # A message is posted, and begins, when its own rank comes to it.
        begin = ends[edges.first[first]] if action.kind in MESSAGES else begins[first]
        spans[rank].append((slot, begin, ends[end]))
    return Replayed(found, tuple(map(tuple, spans)))
