"""`ActionGraph`: the actions of a schedule as levels of independent ones, for (max,+) sweeps over many configurations.

A node begins when its two predecessors have ended, the second of them and the way of its message, and ends when it has
taken its own time. What waits for more than two is a chain of nodes that take none. Rows are numbered in the order in
which a sweep fills them, level by level; row 0 is the begin of the run, the predecessor of what has none. Times are no
part of it: a node has codes, which point into the table of times of `StageSeconds`.

Where some nodes are `late`, all others have lower rows: a sweep can stop between them (`split` levels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import Action

KINDS = ("F", "I", "W", "B")  # in the order of the table of times
FREE = 0  # the code of what takes no time
_Index = TypeVar("_Index", int, np.ndarray)


def code(kind: _Index, chunk: _Index, chunks: int) -> _Index:
    """The row of the table of times of a computation, by its place in `KINDS`."""
    return 1 + kind * chunks + chunk


def message_code(back: int, low: _Index, chunks: int) -> _Index:
    """The row of the table of times of a message between the chunks `low` and `low + 1`, `back` or (0) forward."""
    return 1 + len(KINDS) * chunks + back * (chunks - 1) + low


@dataclass(frozen=True, slots=True, eq=False)
class ActionGraph:
    """Nodes in rows from 1 on: `first` and `second` predecessors, `lag` and `cost` codes; all int [1 + nodes].

    `levels` are ranges of rows, of which `split` are not late. `row` maps the nodes as they were given to rows;
    `heads` and `tails` [ranks] are the rows of the first and last node of each rank. `actions` are (rank, action, row)
    of computations, by rank and in order, where they are known.
    """

    first: np.ndarray
    second: np.ndarray
    lag: np.ndarray
    cost: np.ndarray
    levels: tuple[tuple[int, int], ...]
    split: int
    row: np.ndarray
    heads: np.ndarray
    tails: np.ndarray
    actions: tuple[tuple[int, Action, int], ...] = ()

    @property
    def rows(self) -> int:
        """How many rows a sweep fills, with that of the begin."""
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


def levelled(
    first: np.ndarray,
    second: np.ndarray,
    lag: np.ndarray,
    cost: np.ndarray,
    heads: np.ndarray,
    tails: np.ndarray,
    late: np.ndarray | None = None,
    actions: tuple[tuple[int, Action, int], ...] = (),
) -> ActionGraph:
    """Order nodes by levels; predecessors are indices of nodes, -1 for none, and actions say nodes.

    Raises `ScheduleError` where nodes wait for each other in a circle.
    """
    count = len(first)
    depth = np.full(count, -1)
    for k, level in enumerate(_levels(first, second)):
        depth[level] = k
    if (depth < 0).any():
        raise ScheduleError("the ranks of a schedule wait for each other in a circle; see check")
    behind = np.zeros(count, dtype=bool) if late is None else late
    order = np.lexsort((depth, behind))
    edges = np.flatnonzero(np.diff(depth[order]) | np.diff(behind[order])) + 1
    bounds = [1, *(edges + 1).tolist(), count + 1]
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
        tuple((rank, action, int(row[node])) for rank, action, node in actions),
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
        offsets = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        reached = after[np.repeat(start[level], many) + offsets]
        np.subtract.at(left, reached, 1)
        level = np.unique(reached[left[reached] == 0])
