"""`MapGraph`: the graph of a job's schedule whose nodes are `ActionMap`s: what each action's entries are.

Which action waits for which, and so the levels in which they run, is said by the lists of the schedule, as for sweeps
of stages (`sweep.sweeping`), where a node is one sum. Here it is a matrix of (max,+) over entries, each the time of an
earlier action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.prices.fabric import Floats, Ints
from shardplan.simulation.jobs.compiled_job import CompiledJob, Key
from shardplan.simulation.jobs.maps import ActionMap
from shardplan.simulation.jobs.timing import COMPUTE
from shardplan.strategy.schedules.action_lists import ActionLists


@dataclass(frozen=True, slots=True)
class TimeRow:
    """The times of one action as a row: `streams`, begin, end, and start and arrival of each of `sends` messages."""

    streams: int
    sends: int

    @property
    def begin(self) -> int:
        """The column of the begin of its first op."""
        return self.streams

    @property
    def end(self) -> int:
        """The column of the end of its last op."""
        return self.streams + 1

    @property
    def starts(self) -> int:
        """The first column of when messages start."""
        return self.streams + 2

    @property
    def arrivals(self) -> int:
        """The first column of when messages arrive."""
        return self.starts + self.sends

    @property
    def width(self) -> int:
        """How many columns there are."""
        return self.arrivals + self.sends


@dataclass(frozen=True, slots=True, eq=False)
class MapGraph:
    """The actions of all ranks, rank by rank; behind their rows of times, laid end to end, stands that of the begin.

    `levels` are actions none of which waits for another of its level, `starts` [ranks + 1] the first action of a rank.
    An action does what `matrices` [maps, streams + 2 + sends, entries] says at `which` [actions] to the times at
    `entry` [actions, entries]; each message starts no sooner than the one before it on the same connection arrives,
    `line` [actions, sends], and takes `seconds` [actions, sends]. Those that their receivers wait for start once the
    action before has computed, too: `awaited` [actions, messages taken] is what they take, 0 of others.
    """

    row: TimeRow
    levels: tuple[Ints, ...]
    starts: Ints
    matrices: Floats
    which: Ints
    entry: Ints
    line: Ints
    seconds: Floats
    awaited: Floats
    compute: int  # the stream on which a receiver waits

    @staticmethod
    def of(compiled: CompiledJob) -> MapGraph:
        """Number the actions of a job; raises `ScheduleError` where ranks wait for each other in a circle."""
        lists, at = compiled.lists, dict[Key, list[int]]()
        for action, key in enumerate((stage, kind) for own in compiled.rows for stage, kind, _ in own):
            at.setdefault(key, []).append(action)
        count = len(lists.rank)
        row = TimeRow(len(compiled.streams), max((len(compiled.sent[key]) for key in at), default=0))
        taken = max((len(compiled.taken[key]) for key in at), default=0)
        never = count * row.width + row.begin  # the begin of the step has no first op
        entry = np.full((count, row.streams + 1 + taken), never)
        entry[:, : row.streams] = _before_on_rank(lists)[:, None] * row.width + np.arange(row.streams)
        earlier = _before_of_microbatch(lists)
        entry[:, row.streams] = np.where(earlier < 0, never, earlier * row.width + row.end)
        mail, line, seconds = _messages(compiled, at, row, never)
        awaited = np.zeros((count, taken))
        for key, mine in at.items():
            for place, number in enumerate(compiled.taken[key]):
                entry[mine, row.streams + 1 + place] = mail[number, lists.microbatch[mine]]
                if compiled.is_rendezvous:
                    sent = entry[mine, row.streams + 1 + place] != never
                    awaited[mine, place] = sent * compiled.messages[number].seconds
        if compiled.is_rendezvous:  # a receiver takes them in turn
            line[:] = never
        matrices, which = _matrices(compiled, at, (row.starts + row.sends, entry.shape[1]))
        compute = compiled.streams.index(COMPUTE)
        return MapGraph(row, _levels(lists), lists.starts, matrices, which, entry, line, seconds, awaited, compute)

    def run(self) -> Floats:
        """Return the times of all actions and of the begin, seconds [actions + 1, row.width]; minus infinity: never."""
        row = self.row
        times = np.full((len(self.which) + 1, row.width), -np.inf)
        times[-1, : row.streams] = 0.0
        flat = times.reshape(-1)
        for level in self.levels:
            self._receive(flat, level)
            after = (self.matrices[self.which[level]] + flat[self.entry[level]][:, None, :]).max(axis=2)
            start = np.maximum(after[:, row.starts :], flat[self.line[level]])
            times[level] = np.concatenate([after[:, : row.starts], start, start + self.seconds[level]], axis=1)
        return times

    def _receive(self, flat: Floats, level: Ints) -> None:
        """Set when messages start and arrive that actions of a level wait for."""
        awaited = self.awaited[level]
        action, place = np.nonzero(awaited)
        entry = self.entry[level[action]]
        arrival = entry[np.arange(len(action)), self.row.streams + 1 + place]
        start = arrival - self.row.sends
        flat[start] = np.maximum(flat[start], flat[entry[:, self.compute]])
        flat[arrival] = flat[start] + awaited[action, place]


def _levels(lists: ActionLists) -> tuple[Ints, ...]:
    graph = lists.graph()
    order = np.argsort(graph.row)
    return tuple(order[low - 1 : high - 1] for low, high in graph.levels)


def _before_on_rank(lists: ActionLists) -> Ints:
    """The action before each on its rank, int [actions]; of the first the number of actions, the begin of the step."""
    count = len(lists.rank)
    before = np.arange(-1, count - 1)
    first = np.diff(lists.rank, prepend=-1) != 0
    return np.where(first, count, before)


def _before_of_microbatch(lists: ActionLists) -> Ints:
    """The action before each of the same stage and microbatch, int [actions]; -1 without one."""
    order = np.lexsort((np.arange(len(lists.rank)), lists.microbatch, lists.stage))
    stage, microbatch = lists.stage[order], lists.microbatch[order]
    same = (np.diff(stage, prepend=-1) == 0) & (np.diff(microbatch, prepend=-1) == 0)
    found = np.full(len(order), -1)
    found[order[same]] = order[np.flatnonzero(same) - 1]
    return found


def _messages(
    compiled: CompiledJob, at: Mapping[Key, Sequence[int]], row: TimeRow, never: int
) -> tuple[Ints, Ints, Floats]:
    """Where each message arrives, int [messages, microbatches], and of every action `line` and `seconds`."""
    microbatch, count = compiled.lists.microbatch, len(compiled.lists.rank)
    mail = np.full((len(compiled.messages), int(microbatch.max(initial=0)) + 1), never)
    line, seconds = np.full((count, row.sends), never), np.zeros((count, row.sends))
    senders: dict[int, list[tuple[int, int]]] = {}  # by message the actions that send it, and as which of theirs
    for key, mine in at.items():
        for place, number in enumerate(compiled.sent[key]):
            mail[number, microbatch[mine]] = np.array(mine) * row.width + row.arrivals + place
            seconds[mine, place] = compiled.messages[number].seconds
            senders.setdefault(number, []).extend((action, place) for action in mine)
    for found in senders.values():
        actions, places = np.array(sorted(found)).T
        line[actions[1:], places[1:]] = actions[:-1] * row.width + row.arrivals + places[:-1]
    return mail, line, seconds


def _matrices(compiled: CompiledJob, at: Mapping[Key, Sequence[int]], shape: tuple[int, int]) -> tuple[Floats, Ints]:
    """The maps of a job, each once, as matrices of one shape, and which of them every action is."""
    numbers: dict[int, int] = {}
    maps: list[ActionMap] = []

    def number(one: ActionMap) -> int:
        if id(one) not in numbers:
            numbers[id(one)] = len(maps)
            maps.append(one)
        return numbers[id(one)]

    which = np.zeros(len(compiled.lists.rank), dtype=np.int64)
    for key, mine in at.items():
        which[mine] = number(compiled.maps[key])
    for first, ends in zip(compiled.lists.starts.tolist(), compiled.ends_at, strict=False):
        for place, one in ends.items():
            which[first + place] = number(one)
    matrices = np.full((len(maps), *shape), -np.inf)
    for matrix, one in zip(matrices, maps, strict=True):
        rows, columns = one.matrix.shape
        matrix[:rows, :columns] = one.matrix
    return matrices, which
