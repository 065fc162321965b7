"""`sweep`: the events of a schedule for many configurations at once, and `Swept`, what comes of them.

A period of a schedule that repeats is a linear map over (max, +) of when the passes of the last `delay` periods end.
Where these have all ended later by one constant than `lag` periods before, they will ever again: such a map commutes
with adding a constant. So the sweep stops there and adds the constant for each `lag` periods that are left. Equal means
within `SAME` of the constant: a map over (max, +) never makes two states differ more, so that the times of all periods
that are left are wrong by no more than that part of their sum. Where no constant is found in so many periods, twice as
many are swept, at last all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.core import validation
from shardplan.simulation.sweep.compiled_schedule import CompiledSchedule, checked
from shardplan.simulation.sweep.periods import PeriodicLists
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.strategy.schedules.action_graph import ActionGraph

SAME = 2.0**-42  # of the constant: what rounding leaves after some hundred periods
CELLS = 1 << 18  # of a block of configurations: what a cache holds


@dataclass(frozen=True, slots=True, eq=False)
class Swept:
    """When n configurations are done with a step, and what their ranks do meanwhile; seconds.

    `makespan` [n]; `busy` [n, ranks] is what a rank computes, `span` [n, ranks] from its first begin to its last end.
    What comes once a step, `before` and `after`, is part of all three: a rank begins with the one, if there is any, and
    goes on with the other as soon as its own last pass ends. `in_flight` [ranks] are forwards that wait for their B or
    W, in chunks times microbatches. `skipped` [n] counts the periods that were not swept. `start` and `end` [n, passes]
    of the passes in `compiled.actions`, if they were asked for.
    """

    makespan: np.ndarray
    busy: np.ndarray
    span: np.ndarray
    in_flight: tuple[int, ...]
    skipped: np.ndarray
    compiled: CompiledSchedule
    stages: StageSeconds
    start: np.ndarray | None = None
    end: np.ndarray | None = None

    def __len__(self) -> int:
        """How many configurations there are."""
        return len(self.makespan)

    @property
    def bubble_seconds(self) -> np.ndarray:
        """The largest over ranks of what a rank idles between its first begin and its last end, [n]."""
        return (self.span - self.busy).max(axis=1)

    @property
    def idle_seconds(self) -> np.ndarray:
        """The largest over ranks of what a rank idles until all are done, [n]."""
        return (self.makespan[:, None] - self.busy).max(axis=1)


def sweep(compiled: CompiledSchedule, stages: StageSeconds, extrapolate: bool = True, times: bool = False) -> Swept:
    """Return when n configurations of one schedule are done.

    `stages` has as many chunks as the schedule. Periods that repeat are extrapolated unless `extrapolate` is false, or
    `times` asks for the begin and end of each pass. Raises `ShardplanError` for another number of chunks, and for
    messages of `rendezvous` where a rank has several, or where a schedule places them.

    Source: DESIGN, simulation: stage-level events.

    >>> from shardplan.simulation.sweep import compile_schedule
    >>> swept = sweep(compile_schedule("1f1b", 4, 8), StageSeconds.equal(4, 1.0, 1.0, 1.0))
    >>> swept.bubble_seconds, swept.idle_seconds
    (array([9.]), array([9.]))
    """
    checked("sweep", compiled, stages, together=True)
    shortened = validation.flag("extrapolate", extrapolate) and not validation.flag("times", times)
    n, skipped = len(stages), np.zeros(len(stages), dtype=np.int64)
    first, last = np.empty((2, compiled.ranks, n))
    table = stages.table(together=compiled.together)
    moments: list[np.ndarray] = []
    if shortened and compiled.repeats is not None:
        _shortened(compiled, compiled.repeats, table, first, last, skipped)
    else:
        graph = compiled.graph
        rows = compiled.pass_rows if times else None
        for part in _blocks(n, graph.rows):
            end = _whole(graph, table[:, part], first[:, part], last[:, part])
            if rows is not None:
                begin = graph.begins(table[:, part], end, rows)
                if stages.rendezvous:
                    begin += stages.table(part, arriving=True)[graph.lag[rows]]
                moments.append(np.stack([begin, end[rows]]))
    if stages.rendezvous:
        first[list(compiled.owners[1:])] += stages.send.T
    forward, backward = stages.forward, stages.backward_input + stages.backward_weight
    once = (stages.before + stages.after)[:, None]
    busy = forward @ compiled.forwards.T + backward @ compiled.backwards.T + once
    if compiled.together:
        there, back = compiled.lists.joint_counts()
        busy = busy - stages.hidden_forward @ there.T - stages.hidden_backward @ back.T
    span = last.T + once - np.where(stages.before[:, None] > 0, 0, first.T)
    makespan = last.max(axis=0) + once[:, 0]
    start, end = (None, None)
    if times:
        start, end = np.concatenate(moments, axis=2).transpose(0, 2, 1) + stages.before[:, None]
    return Swept(makespan, busy, span, compiled.in_flight, skipped, compiled, stages, start, end)


def _blocks(n: int, rows: int) -> list[slice]:
    size = max(32, CELLS // rows)
    return [slice(low, low + size) for low in range(0, n, size)] or [slice(0, 0)]


def _whole(graph: ActionGraph, table: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Sweep all of a graph; fill when ranks begin and end [ranks, n], and return when rows end."""
    table = np.ascontiguousarray(table)
    end = np.zeros((graph.rows, table.shape[1]))
    graph.run(table, end)
    first[:] = graph.begins(table, end, graph.heads)
    last[:] = end[graph.tails]
    return end


def _shortened(
    compiled: CompiledSchedule,
    repeats: PeriodicLists,
    table: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    skipped: np.ndarray,
) -> None:
    """Sweep A and some periods, extrapolate to all of them, and sweep T."""
    left, total = np.arange(table.shape[1]), compiled.periods
    times = 4 * repeats.delay + 2 * compiled.ranks
    while len(left):
        if times * 2 > total:
            graph = _unrolled(repeats, total)[0]
            for part in _blocks(len(left), graph.rows):
                at = left[part]
                f, z = np.empty((2, compiled.ranks, len(at)))
                _whole(graph, table[:, at], f, z)
                first[:, at], last[:, at] = f, z
            return
        graph, window = _unrolled(repeats, times)
        again: list[np.ndarray] = []
        for part in _blocks(len(left), graph.rows):
            at = left[part]
            own = np.ascontiguousarray(table[:, at])
            end = np.zeros((graph.rows, len(at)))
            graph.run(own, end, late=False)
            begun = graph.begins(own, end, graph.heads)
            lag, constant = _regime(end, window, repeats.delay, compiled.ranks)
            jumps = np.where(lag > 0, -((times - total) // np.maximum(lag, 1)), 0)
            _moved(end, window, repeats.delay, total - jumps * lag, jumps * constant, lag)
            graph.run(own, end, late=True)
            first[:, at], last[:, at] = begun, end[graph.tails]
            skipped[at] = jumps * lag
            again.append(at[lag == 0])
        left = np.concatenate(again)
        times *= 2


def _regime(end: np.ndarray, window: np.ndarray, delay: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The lag in periods after which all passes of the last `delay` periods end later by a constant, and that; [n].

    0 where there is none. `window` [periods, passes] are rows of `end`.
    """
    times, n = len(window), end.shape[1]
    lag, constant = np.zeros(n, dtype=np.int64), np.zeros(n)
    open_ = np.arange(n)
    for tried in range(1, min(2 * ranks, times - delay - 1) + 1):
        new, old = window[times - delay :].ravel(), window[times - delay - tried : times - tried].ravel()
        step = end[np.ix_(new, open_)]
        step -= end[np.ix_(old, open_)]
        low, high = step.min(axis=0), step.max(axis=0)
        same = high - low <= SAME * high
        lag[open_[same]] = tried
        constant[open_[same]] = (low[same] + high[same]) / 2
        open_ = open_[~same]
        if not len(open_):
            break
    return lag, constant


def _moved(
    end: np.ndarray, window: np.ndarray, delay: int, base: np.ndarray, more: np.ndarray, lag: np.ndarray
) -> None:
    """Put what the periods before `base` [n] ended at, and `more` seconds [n], in the place of the last periods."""
    last = window[len(window) - delay :]
    for b in np.unique(base[lag > 0]).tolist():
        at = np.flatnonzero((base == b) & (lag > 0))
        end[np.ix_(last.ravel(), at)] = end[np.ix_(window[b - delay : b].ravel(), at)] + more[at]


@lru_cache(maxsize=32)
def _unrolled(repeats: PeriodicLists, times: int) -> tuple[ActionGraph, np.ndarray]:
    return repeats.graph(times)
