"""`ways`: some ways through the actions of a schedule, whose lengths its makespan is never below, whatever the times.

They are the critical paths of a few configurations: chunks alike, and one of them slower in turn, with messages that
take some time. Where long lists repeat, paths are looked for in fewer periods, and made as long as the schedule is: a
stretch of a path from a pass to the same pass some periods later is gone through again and again, and what is left over
is gone along the list of that rank. Both are ways through the longer lists, whose passes wait for each other as before.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardplan.simulation.sweep.compiled_schedule import CompiledSchedule
from shardplan.simulation.sweep.periods import PeriodicLists
from shardplan.simulation.sweep.stage_seconds import StageSeconds
from shardplan.strategy.schedules.action_graph import FREE, ActionGraph, code

PROBES, CELLS = 17, 1 << 21  # configurations, and configurations times rows of the graph, at most
PASSES = 1 << 13  # of lists that are not shortened further
SLOWER, MESSAGE = 1.1, 0.05  # of a chunk's F = I = W
LOSSES = (2.0, 4.0)  # of the last chunk's: layers are few, and vocabularies large
BACK = 2.0  # of I, where attention of long sequences is most of it


@lru_cache(maxsize=1024)
def critical_paths(compiled: CompiledSchedule) -> np.ndarray:
    """Return float [ways, codes]: how often each row of the table of times stands on a way.

    >>> from shardplan.simulation.sweep import compile_schedule
    >>> stages = StageSeconds.equal(4, 1.0, 1.0, 1.0, 0.5)
    >>> float((critical_paths(compile_schedule("1f1b", 4, 8)) @ stages.table()).max())
    41.0
    """
    if compiled.repeats is None:
        graph, window, missing = compiled.graph, np.zeros((0, 0), dtype=np.int64), 0
    else:
        least = 4 * compiled.repeats.delay + 2 * compiled.ranks
        times = min(compiled.periods, max(least, PASSES // sum(map(len, compiled.repeats.block))))
        graph, window = compiled.repeats.graph(times)
        missing = compiled.periods - times
    table = _probes(compiled.chunks, graph.rows).table()
    codes, rows = _critical(graph, table)
    found: list[np.ndarray] = []
    for k in range(table.shape[1]):
        way = np.bincount(codes[:, :, k].ravel(), minlength=len(table))
        if missing and compiled.repeats is not None:
            more = _longer(compiled.repeats, window, rows[:, k], codes[:, :, k], missing, len(table))
            if more is None:
                continue
            way = way + more
        way[FREE] = 0
        found.append(way)
    return np.unique(np.array(found, dtype=np.float64).reshape(-1, len(table)), axis=0)


def _probes(chunks: int, rows: int) -> StageSeconds:
    """Chunks alike, then one of them slower: as many as there is room for, evenly; then the last, that has the loss.

    At last the last one is that, where each pass back takes longer than the others.
    """
    count = max(1, min(PROBES, chunks + 1, CELLS // rows))
    times = np.ones((count + len(LOSSES) + 1, chunks))
    slow = np.linspace(0, chunks - 1, count - 1).round().astype(int)
    times[np.arange(1, count), slow] = SLOWER
    times[count:, -1] = [*LOSSES, SLOWER * SLOWER]
    count += len(LOSSES) + 1
    back = times * np.where(np.arange(count) == count - 1, BACK, 1.0)[:, None]
    return StageSeconds(times, back, times, np.full((count, chunks - 1), MESSAGE))


def _critical(graph: ActionGraph, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The critical path of each configuration, from its end: codes [steps, 2, n] of nodes and messages, and rows."""
    each = np.arange(table.shape[1])
    end = np.zeros((graph.rows, len(each)))
    graph.run(table, end)
    at = graph.tails[end[graph.tails].argmax(axis=0)]
    codes: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    while at.any():
        lag = graph.lag[at]
        late = end[graph.second[at], each] + table[lag, each] > end[graph.first[at], each]
        codes.append(np.stack([graph.cost[at], np.where(late, lag, FREE)]))
        rows.append(at)
        at = np.where(late, graph.second[at], graph.first[at])
    return np.array(codes).reshape(-1, 2, len(each)), np.array(rows).reshape(-1, len(each))


def _longer(
    repeats: PeriodicLists, window: np.ndarray, rows: np.ndarray, codes: np.ndarray, missing: int, count: int
) -> np.ndarray | None:
    """What a path gains, codes [count], in lists that are longer by `missing` periods; None where it passes by all.

    `window` [periods, passes] are rows of the graph; a path is given from its end.
    """
    period = np.full(int(max(window.max(), rows.max())) + 1, -1)
    place = period.copy()
    period[window] = np.arange(len(window))[:, None]
    place[window] = np.arange(window.shape[1])
    steps = np.flatnonzero(period[rows] >= 0)
    if not len(steps):
        return None
    seen: dict[int, int] = {}
    gained, left, at = np.zeros(count, dtype=np.int64), missing, int(steps[0])
    for step in steps.tolist():
        other = seen.setdefault(int(place[rows[step]]), step)
        span = int(period[rows[other]] - period[rows[step]])
        if span:  # from the pass at `step` to the same one at `other`, which stands later in time
            gained = np.bincount(codes[other:step].ravel(), minlength=count) * (missing // span)
            left, at = missing % span, other
            break
    lengths = np.array([len(block) for block in repeats.block])
    rank = int(np.searchsorted(np.cumsum(lengths), place[rows[at]], side="right"))
    stages = len(repeats.owners)
    kind, chunk = repeats.block[rank] // stages, repeats.block[rank] % stages % (stages // repeats.copies)
    return gained + left * np.bincount(code(kind, chunk, stages // repeats.copies), minlength=count)
