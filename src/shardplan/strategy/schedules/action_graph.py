"""`ActionGraph`: what waits for what in a schedule, as levels of independent nodes with (max,+) entries.

A node begins when its two predecessors have ended, the second of them and the way of its message, and ends when it has
taken its own time. What waits for more than two is a chain of nodes that take none. Rows are numbered in the order in
which a run fills them, level by level; row 0 is the begin of the run, the predecessor of what has none. Times are no
part of it: a node has codes, which point into a table of times, one column for each configuration.

Where some nodes are `late`, all others have lower rows: a sweep can stop between them (`split` levels).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.errors import ScheduleError

PASSES = ("F", "I", "W", "B")  # the kinds of computations, in the order of a table of times
FREE = 0  # the code of what takes no time
Ints = np.ndarray
_Index = TypeVar("_Index", int, np.ndarray)


def code(kind: _Index, chunk: _Index, chunks: int) -> _Index:
    """The row of the table of times of a computation, by its place in `PASSES`."""
    return 1 + kind * chunks + chunk


def message_code(back: _Index, low: _Index, chunks: int) -> _Index:
    """The row of the table of times of a message between the chunks `low` and `low + 1`, `back` or (0) forward."""
    return 1 + len(PASSES) * chunks + back * (chunks - 1) + low


def joint_code(back: _Index, chunk: _Index, chunks: int) -> _Index:
    """The row of the table of times of a forward, or of a B (`back`), beside which the other one runs."""
    return 1 + len(PASSES) * chunks + 2 * (chunks - 1) + back * chunks + chunk


class ActionEdges(NamedTuple):
    """Nodes as they were given: predecessors, -1 for none, and codes of the second's way and of their own time."""

    first: Ints
    second: Ints
    lag: Ints
    cost: Ints

    def sequence(self) -> list[int]:
        """Return nodes in an order in which each can be done, without those that wait in a circle, or for one."""
        after: list[list[int]] = [[] for _ in self.first]
        left = ((self.first >= 0).astype(int) + (self.second >= 0)).tolist()
        for ends in (self.first.tolist(), self.second.tolist()):
            for node, end in enumerate(ends):
                if end >= 0:
                    after[end].append(node)
        found = [node for node, many in enumerate(left) if not many]
        for node in found:
            for each in after[node]:
                left[each] -= 1
                if not left[each]:
                    found.append(each)
        return found

    def run_once(self, lag: Sequence[Any], cost: Sequence[Any], start: Any) -> tuple[list[Any], list[Any]]:
        """Return when each node begins and ends, once: in numbers of any kind, `lag` and `cost` by node.

        What is exact, as whole numbers are, stays so; last is the start. Raises `ScheduleError` for a circle.
        """
        begin, end = ([start] * (len(self.first) + 1) for _ in range(2))  # -1 is the last: the start
        first, second, sequence = self.first.tolist(), self.second.tolist(), self.sequence()
        if len(sequence) < len(first):
            raise ScheduleError("the ranks of a schedule wait for each other in a circle; see check")
        for node in sequence:
            begin[node] = max(end[first[node]], end[second[node]] + lag[node])
            end[node] = begin[node] + cost[node]
        return begin, end


@dataclass(frozen=True, slots=True, eq=False)
class ActionGraph:
    """Nodes in rows from 1 on: `first` and `second` predecessors, `lag` and `cost` codes; all int [1 + nodes].

    `levels` are ranges of rows, of which `split` are not late. `row` maps the nodes as they were given to rows;
    `heads` and `tails` [ranks] are the rows of the first and last computation of each rank, 0 without one.
    """

    first: Ints
    second: Ints
    lag: Ints
    cost: Ints
    levels: tuple[tuple[int, int], ...]
    split: int
    row: Ints
    heads: Ints
    tails: Ints

    @property
    def rows(self) -> int:
        """How many rows a run fills, with that of the begin."""
        return len(self.first)

    def run(self, table: np.ndarray, end: np.ndarray, late: bool | None = None) -> None:
        """Fill `end` [rows, n], seconds: of all nodes, or of those that are `late`, or not.

        `table` is that of `StageSeconds` [codes, n]. Row 0 of `end` must be 0.
        """
        chosen = self.levels if late is None else self.levels[self.split :] if late else self.levels[: self.split]
        for low, high in chosen:
            # Indices are known to be in range: `clip` saves the copy that a check would need.
            ready = end.take(self.first[low:high], axis=0, mode="clip")
            other = end.take(self.second[low:high], axis=0, mode="clip")
            other += table.take(self.lag[low:high], axis=0, mode="clip")
            np.maximum(ready, other, out=ready)
            np.add(ready, table.take(self.cost[low:high], axis=0, mode="clip"), out=end[low:high])

    def begins(self, table: np.ndarray, end: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """When the nodes of some rows begin, seconds [rows, n]."""
        return np.maximum(end[self.first[rows]], end[self.second[rows]] + table[self.lag[rows]])


def levelled(edges: ActionEdges, heads: Ints, tails: Ints, late: Ints | None = None) -> ActionGraph:
    """Order nodes by levels; heads and tails are indices of nodes, -1 for none.

    Raises `ScheduleError` where nodes wait for each other in a circle.
    """
    first, second, lag, cost = edges
    count = len(first)
    depth = np.full(count, -1)
    for k, nodes in enumerate(_levels(first, second)):
        depth[nodes] = k
    if (depth < 0).any():
        raise ScheduleError("the ranks of a schedule wait for each other in a circle; see check")
    behind = np.zeros(count, dtype=bool) if late is None else late
    order = np.lexsort((depth, behind))
    cuts = np.flatnonzero(np.diff(depth[order]) | np.diff(behind[order])) + 1
    bounds = [1, *(cuts + 1).tolist(), count + 1]
    levels = tuple(zip(bounds[:-1], bounds[1:], strict=True))
    row = np.empty(count, dtype=np.int64)
    row[order] = np.arange(1, count + 1)
    rows = np.concatenate([row, [0]])  # of -1: the begin
    early = 1 + int(np.count_nonzero(~behind))
    begin = np.zeros(1, dtype=np.int64)
    return ActionGraph(
        np.concatenate([begin, rows[first[order]]]),
        np.concatenate([begin, rows[second[order]]]),
        np.concatenate([begin, lag[order]]),
        np.concatenate([begin, cost[order]]),
        levels,
        sum(high <= early for _, high in levels),
        row,
        rows[heads],
        rows[tails],
    )


def _levels(first: np.ndarray, second: np.ndarray) -> Iterator[np.ndarray]:
    """Nodes all of whose predecessors are in levels before."""
    count = len(first)
    ends = np.concatenate([first, second])
    nodes = np.tile(np.arange(count), 2)[ends >= 0]
    ends = ends[ends >= 0]
    after = nodes[np.argsort(ends, kind="stable")]
    degree = np.bincount(ends, minlength=count)
    start = np.cumsum(degree) - degree
    left = np.bincount(nodes, minlength=count)
    level = np.flatnonzero(left == 0)
    while len(level):
        yield level
        many = degree[level]
        reached = after[np.repeat(start[level], many) + nth_of_each(many)]
        np.subtract.at(left, reached, 1)
        level = np.unique(reached[left[reached] == 0])
