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

import numpy as np

from shardplan.core import border
from shardplan.errors import ShardplanError
from shardplan.simulation.interval import Interval, MemoryCurve
from shardplan.simulation.sweep.sweeping import Swept
from shardplan.simulation.timeline import Timeline
from shardplan.strategy.schedules import Action
from shardplan.strategy.schedules.action_graph import FREE, PASSES, ActionGraph

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
    which = border.whole_number(f"{what}: which", which, 0, len(swept) - 1, ShardplanError)
    words = {
        **NAMES,
        **{border.choice(f"{what}: names", k, NAMES, ShardplanError): v for k, v in (names or {}).items()},
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


def _counted(what: str, given: Sequence[int] | None, count: int, default: Sequence[int], of: str) -> list[int]:
    values = [border.whole_number(what, v, kind=ShardplanError) for v in (default if given is None else given)]
    if len(values) != count:
        raise ShardplanError(f"{what} has {len(values)} numbers; legal is one for each of {count} {of}")
    return values


class _Lines:
    """One configuration, swept again whole: the times of all nodes of its graph."""

    def __init__(self, swept: Swept, which: int, words: Mapping[str, str], ids: Sequence[int]) -> None:
        one = swept.stages[which : which + 1]
        self.done, self.words, self.ids = swept.compiled, words, ids
        self.graph: ActionGraph = swept.compiled.graph
        table = one.table()
        ends = np.zeros((self.graph.rows, 1))
        self.graph.run(table, ends)
        rows = np.arange(self.graph.rows)
        self.before, self.after = float(one.before[0]), float(one.after[0])
        self.end = (ends[:, 0] + self.before).tolist()
        self.start = (self.graph.begins(table, ends, rows)[:, 0] + self.before).tolist()
        self.lag = table[self.graph.lag][:, 0].tolist()
        self.found: list[Interval] = []

    def intervals(self) -> tuple[Interval, ...]:
        """All intervals, causes first."""
        lists, row_of = self.done.lists, self.graph.row
        passes = {row: (rank, action) for rank, action, row in self.done.actions}
        other = dict(zip(row_of.tolist(), row_of[lists.sources()[0]].tolist(), strict=False))  # the end of a message
        causes: list[tuple[int, ...]] = [()] * self.graph.rows  # of a row: the intervals at whose end it ends
        owner = dict(zip(row_of.tolist(), lists.rank.tolist(), strict=False))
        sends = set(row_of[np.flatnonzero(lists.sends)].tolist())
        first, second, cost = (x.tolist() for x in (self.graph.first, self.graph.second, self.graph.cost))
        drawn: dict[int, tuple[int, ...]] = {}  # by send
        begun = [self._once(rank, "before", 0.0, self.before, ()) for rank in range(self.done.ranks)]
        for row in range(1, self.graph.rows):
            a, b = first[row], second[row]
            late = causes[b]
            if self.lag[row] > 0:
                late = (self._message(owner[b], self.end[b], self.end[b] + self.lag[row], late, passes.get(b)),)
            why = (*causes[a], *(c for c in late if c not in causes[a]))
            if row in passes:
                rank, action = passes[row]
                why = why or begun[rank]
                causes[row] = (
                    self._add(rank, "compute", self.start[row], self.end[row], str(action), action.kind, why),
                )
            elif cost[row] != FREE:  # either end of a placed message, which is drawn once
                end = row if row in sends else other[row]
                if end not in drawn:
                    drawn[end] = (self._message(owner[end], self.start[row], self.end[row], why, None),)
                causes[row] = drawn[end]
            else:
                causes[row] = why
        for rank, row in enumerate(self.graph.tails.tolist()):
            if row:
                self._once(rank, "after", self.end[row], self.end[row] + self.after, causes[row])
        return _on_lanes(self.found)

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
                samples.append((self.start[row], held))
            if alone or action.kind in ("B", "W"):
                held -= nbytes
                samples.append((self.end[row], held))
        return MemoryCurve(self.ids[rank], tuple(samples))

    def _add(self, rank: int, stream: str, start: float, end: float, name: str, kind: str, why: tuple[int, ...]) -> int:
        self.found.append(
            Interval(self.ids[rank], stream, start, end, name, self.words[kind], causes=tuple(sorted(why)))
        )
        return len(self.found) - 1

    def _once(self, rank: int, kind: str, start: float, end: float, why: tuple[int, ...]) -> tuple[int, ...]:
        """What comes once a step, if it takes any time."""
        return (self._add(rank, "compute", start, end, self.words[kind], kind, why),) if end > start else ()

    def _message(
        self, rank: int, start: float, end: float, why: tuple[int, ...], sent: tuple[int, Action] | None
    ) -> int:
        """A message; its lane is found when all are known."""
        name = self.words["P2P"] if sent is None else f"send({sent[1]})"
        return self._add(rank, COMM, start, end, name, "P2P", why)


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
