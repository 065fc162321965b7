"""`timeline_of`: one configuration of a sweep as a `Timeline`: what every rank does when, why then, and what it holds.

A device is a rank. Its passes are on the stream `compute`. A message is on `comm` of the rank that sends it, on further
lanes `comm 1`, `comm 2`, ... where several are on their way at once: those of a schedule without sends and receives
hold nobody. (A `Timeline` calls a device busy while any of its streams is, a `Swept` while it computes: of messages
that take time its bubbles are larger.) One of no time has no interval.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core import validation
from shardplan.errors import ShardplanError
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.sweep.compiled_schedule import CompiledSchedule
from shardplan.simulation.sweep.sweeping import Swept
from shardplan.simulation.timeline import Timeline
from shardplan.strategy.schedules.action_graph import FREE, PASSES

COMM = "comm"

# What intervals are called, by the kind of action, and once a step.
NAMES: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
    "P2P": "p2p",
    "before": "before",
    "after": "after",
}


def timeline_of(
    swept: Swept,
    which: int = 0,
    names: Mapping[str, str] | None = None,
    kept_bytes: Sequence[int] | None = None,
    static_bytes: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
) -> Timeline:
    """Return what ranks do in the configuration `which` of a sweep; its makespan is its critical path.

    `names` calls kinds of intervals other than `NAMES` does. With `kept_bytes` [chunks] a rank holds so many from the
    begin of a forward until the B or W of its microbatch ends (forward only, until it ends), and `static_bytes` [ranks]
    all the time (none, if they are not given). `devices` [ranks] are ids, 0, 1, ... by default. Raises `ShardplanError`
    for a configuration that is not there, an unknown kind, or another number of bytes or devices.

    >>> from shardplan.simulation.sweep import StageSeconds, compile_schedule, sweep
    >>> swept = sweep(compile_schedule("1f1b", 4, 8), StageSeconds.equal(4, 1.0, 1.0, 1.0, 0.5))
    >>> line = timeline_of(swept, kept_bytes=[100] * 4)
    >>> line.seconds, line.peak_bytes, {k: float(v) for k, v in line.breakdown.items()}
    (41.0, 400, {'backward': 22.0, 'forward': 11.0, 'p2p': 8.0})
    """
    done = swept.compiled
    what = f"timeline_of {done.name or 'a schedule'}"
    which = validation.whole_number(f"{what}: which", which, 0, len(swept) - 1, ShardplanError)
    words = {
        **NAMES,
        **{validation.choice(f"{what}: names", k, NAMES, ShardplanError): v for k, v in (names or {}).items()},
    }
    ids = _counted(f"{what}: devices", devices, done.ranks, range(done.ranks), "ranks")
    kept = _counted(f"{what}: kept_bytes", kept_bytes, done.chunks, [0] * done.chunks, "chunks")
    static = _counted(f"{what}: static_bytes", static_bytes, done.ranks, [0] * done.ranks, "ranks")
    lines = _Lines(swept, which, words, ids)
    intervals = lines.intervals()
    memory: tuple[MemoryCurve, ...] = ()
    if kept_bytes is not None or static_bytes is not None:
        memory = tuple(lines.memory(rank, kept, static[rank]) for rank in range(done.ranks))
    return Timeline(intervals, memory, title=f"{done.name} schedule".strip())


def intervals_of(swept: Swept, which: int = 0) -> tuple[Interval, ...]:
    """Return the intervals of `timeline_of` alone, of ranks 0, 1, ..., for a timeline that is to have more."""
    return _Lines(swept, which, NAMES, range(swept.compiled.ranks)).intervals()


def _counted(what: str, given: Sequence[int] | None, count: int, default: Sequence[int], of: str) -> list[int]:
    values = [validation.whole_number(what, v, kind=ShardplanError) for v in (default if given is None else given)]
    if len(values) != count:
        raise ShardplanError(f"{what} has {len(values)} numbers; legal is one for each of {count} {of}")
    return values


class _DrawnLine(NamedTuple):
    """An interval of every configuration whose messages take time where those of one do; `begin`, `end` are moments."""

    rank: int
    stream: str
    begin: int
    end: int
    name: str  # empty: what its kind is called
    kind: str
    causes: tuple[int, ...]


class _Lines:
    """One configuration, swept again whole: the times of all nodes of its graph."""

    def __init__(self, swept: Swept, which: int, words: Mapping[str, str], ids: Sequence[int]) -> None:
        one = swept.stages[which : which + 1]
        self.done, self.words, self.ids = swept.compiled, words, ids
        together = swept.compiled.together
        graph, self.table = swept.compiled.graph, one.table(together=together, arriving=True)
        ends = np.zeros((graph.rows, 1))
        graph.run(one.table(together=together), ends)
        self.before, self.after = float(one.before[0]), float(one.after[0])
        self.rendezvous = one.rendezvous
        end = ends[:, 0]
        ready, made = end[graph.first], end[graph.second]
        sent = np.maximum(ready, made) if self.rendezvous else made
        arrived = sent + self.table[graph.lag][:, 0]
        self.start, self.end, self.sent, self.arrived = (
            x + self.before for x in (np.maximum(ready, arrived), end, sent, arrived)
        )

    def intervals(self) -> tuple[Interval, ...]:
        """All intervals, causes first."""
        words, ids = self.words, self.ids
        rows = self.start, self.end, self.sent, self.arrived, self.end + self.after
        moments = np.concatenate([[0.0, self.before], *rows]).tolist()
        moved = (self.table[:, 0] > 0).tobytes()
        drawn = _draw_lines(self.done, moved, self.before > 0, self.after > 0, self.rendezvous)
        return _on_lanes([
            Interval(ids[x.rank], x.stream, moments[x.begin], moments[x.end], x.name or words[x.kind], words[x.kind],
                     causes=x.causes)
            for x in drawn
        ])  # fmt: skip

    def memory(self, rank: int, kept: Sequence[int], static: int) -> MemoryCurve:
        """What a rank holds."""
        held, samples = static, [(0.0, static)]
        alone = not self.done.backwards.any()
        for own, action, row in self.done.actions:
            nbytes = kept[action.stage % self.done.chunks]
            if own != rank or not nbytes:
                continue
            if action.kind == PASSES[0]:
                held += nbytes
                samples.append((float(self.start[row]), held))
            if alone or action.kind in ("B", "W"):
                held -= nbytes
                samples.append((float(self.end[row]), held))
        return MemoryCurve(self.ids[rank], tuple(samples))


@lru_cache(maxsize=16)
def _draw_lines(
    done: CompiledSchedule, moved: bytes, before: bool, after: bool, rendezvous: bool
) -> tuple[_DrawnLine, ...]:
    """The intervals of a schedule, causes first: `moved` says which codes take time, as bools.

    Moments are the begin, when what comes first is done, and by row of the graph when it starts, when it ends, when
    what its second predecessor sends starts and is there, and when what comes last is done behind it.
    """
    lists, graph = done.lists, done.graph
    starts, ends, sent, arrived, last = (2 + k * graph.rows for k in range(5))
    row_of, first, second, cost = (x.tolist() for x in (graph.row, graph.first, graph.second, graph.cost))
    lags = np.frombuffer(moved, dtype=bool)[graph.lag].tolist()
    passes = {row: (rank, action) for rank, action, row in done.actions}
    other = dict(zip(row_of, graph.row[lists.sources()[0]].tolist(), strict=False))  # the end of a message
    causes: list[tuple[int, ...]] = [()] * graph.rows  # of a row: the intervals at whose end it ends
    owner = dict(zip(row_of, lists.rank.tolist(), strict=False))
    sends = set(graph.row[np.flatnonzero(lists.sends)].tolist())
    drawn: dict[int, tuple[int, ...]] = {}  # by send
    found: list[_DrawnLine] = []

    def add(rank: int, stream: str, begin: int, end: int, name: str, kind: str, why: tuple[int, ...]) -> tuple[int]:
        found.append(_DrawnLine(rank, stream, begin, end, name, kind, tuple(sorted(why))))
        return (len(found) - 1,)

    begun = [add(rank, "compute", 0, 1, "", "before", ()) if before else () for rank in range(done.ranks)]
    for row in range(1, graph.rows):
        a, b = first[row], second[row]
        late = causes[b]
        if lags[row]:
            name = f"send({passes[b][1]})" if b in passes else ""
            late = (*late, *(c for c in causes[a] if c not in late)) if rendezvous else late
            late = add(owner[b], COMM, sent + row, arrived + row, name, "P2P", late)
        why = (*causes[a], *(c for c in late if c not in causes[a]))
        if row in passes:
            rank, action = passes[row]
            why = why or begun[rank]
            causes[row] = add(rank, "compute", starts + row, ends + row, str(action), action.kind, why)
        elif cost[row] != FREE:  # either end of a placed message, which is drawn once
            end = row if row in sends else other[row]
            if end not in drawn:
                drawn[end] = add(owner[end], COMM, starts + row, ends + row, "", "P2P", why)
            causes[row] = drawn[end]
        else:
            causes[row] = why
    for rank, row in enumerate(graph.tails.tolist()):
        if row and after:
            add(rank, "compute", ends + row, last + row, "", "after", causes[row])
    return tuple(found)


def _on_lanes(found: list[Interval]) -> tuple[Interval, ...]:
    """The intervals, each message on the first lane of its rank that is free."""
    lanes: dict[int, list[tuple[float, int]]] = {}
    messages = [k for k, interval in enumerate(found) if interval.stream == COMM]
    for k in sorted(messages, key=lambda k: (found[k].start, found[k].end)):
        own = lanes.setdefault(found[k].device, [])
        lane = heapq.heappop(own)[1] if own and own[0][0] <= found[k].start else len(own)
        heapq.heappush(own, (found[k].end, lane))
        if lane:
            found[k] = replace(found[k], stream=f"{COMM} {lane}")
    return tuple(found)
