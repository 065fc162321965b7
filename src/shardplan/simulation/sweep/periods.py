"""What of a named schedule repeats: lists of a few microbatches, and the block that each further period adds.

For the schedules of `PERIODS` the list of a rank is A P P ... P T: a period more of microbatches adds one more P, and
leaves A and T as they are but for the numbers of microbatches. That the generators do so for all sizes is a law of the
tests; that the blocks are cut so that they form a recurrence is derived here, from the lists themselves:

- no pass of a period waits for one of a later period, nor one of A for any (the cuts are closed);
- each period does each pass of a stage equally often, so that in a long list what a pass waits for is as many periods
  before it, wherever it stands; at most `delay` periods, of all passes, those of T too.

GPipe and breadth first do all forwards first; they have no such form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.strategy.schedules import GENERATORS
from shardplan.strategy.schedules.action_graph import ActionGraph
from shardplan.strategy.schedules.action_lists import ActionLists, F, W, leaves

_Rows = list[np.ndarray]  # of each rank, kind * stages + stage of its passes


def _round(p: int, m: int) -> int:
    """The microbatches of a round of `interleaved`; 0 where a longer schedule has others."""
    return p if m % p == 0 else 0


# The microbatches of a period, by (ranks, microbatches); 0 where there is none.
PERIODS: dict[str, Callable[[int, int], int]] = {
    "1f1b": lambda p, m: 1,
    "interleaved": _round,
    "combined-1f1b": _round,
    "zb-h1": lambda p, m: 1,
    "zb-h2": lambda p, m: 1,
    "zb-v": lambda p, m: 1,
    "v-half": lambda p, m: 1,
    "v-min": lambda p, m: 1,
    "dualpipe": lambda p, m: 2,
    "dualpipev": lambda p, m: 1,
}


@dataclass(frozen=True, slots=True, eq=False)
class PeriodicLists:
    """The lists A P ... P T of each rank as codes (kind * stages + stage), for `microbatches` with no P at all.

    `period` is how many microbatches a P has, `delay` how many periods back a pass may wait for another.
    """

    before: tuple[np.ndarray, ...]
    block: tuple[np.ndarray, ...]
    behind: tuple[np.ndarray, ...]
    owners: np.ndarray
    copies: int
    microbatches: int
    period: int
    delay: int

    def lists(self, times: int) -> ActionLists:
        """The lists with so many periods; microbatches are numbered by turns at their stage."""
        triples = zip(self.before, self.block, self.behind, strict=True)
        return _turns([np.concatenate([a, np.tile(b, times), t]) for a, b, t in triples], self.owners, self.copies)

    def places(self, times: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the lists with so many periods: which passes are of A or a period, and the passes of each period.

        Bool [passes] and int [times, passes of a period].
        """
        early: list[np.ndarray] = []
        window: list[np.ndarray] = []
        start = 0
        for a, b, t in zip(self.before, self.block, self.behind, strict=True):
            held = len(a) + times * len(b)
            early.append(np.arange(held + len(t)) < held)
            window.append(start + len(a) + np.arange(times * len(b)).reshape(times, -1))
            start += held + len(t)
        return np.concatenate(early), np.concatenate(window, axis=1)

    def graph(self, times: int) -> tuple[ActionGraph, np.ndarray]:
        """The graph of the lists with so many periods, T late, and the rows of each period, int [times, passes]."""
        early, window = self.places(times)
        graph = self.lists(times).graph(late=~early)
        return graph, graph.row[window]


@lru_cache(maxsize=256)
def periodic(name: str, ranks: int, microbatches: int, chunks: int) -> PeriodicLists | None:
    """Return what repeats in a named schedule, with as many microbatches as end in `microbatches` by whole periods.

    None where nothing does, or where the schedule is too short to gain from it.
    """
    made = GENERATORS[name]
    q = PERIODS[name](ranks, microbatches) if name in PERIODS else 0
    if not q:
        return None
    tried = 4 * max(ranks, q)
    while (tried := tried + (microbatches - tried) % q) + 2 * q <= microbatches:
        both = (made.rows(ranks, m, chunks) for m in (tried, tried + q))
        short, longer = (ActionLists.of(map(leaves, rows), [0]) for rows in both)
        stages = int(longer.stage.max()) + 1
        owners = np.zeros(stages, dtype=np.int64)
        owners[longer.stage] = longer.rank
        a, b = _codes(short, stages), _codes(longer, stages)
        cut = _cut(a, b, owners, made.copies)
        if cut is not None:
            found = _template(a, b, cut, owners, made.copies, tried, q)
            if found is not None:
                return found
        tried *= 2
    return None


def _codes(lists: ActionLists, stages: int) -> _Rows:
    return np.split(lists.kind * stages + lists.stage, lists.starts[1:-1])


def _turns(rows: _Rows, owners: np.ndarray, copies: int) -> ActionLists:
    """Lists in which the microbatch of a pass is its turn among the forwards, backwards or W of its stage."""
    codes, stages = np.concatenate(rows), len(owners)
    kind, stage = codes // stages, codes % stages
    group = np.where(kind == F, 0, np.where(kind == W, 1, 2)) * stages + stage
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group, minlength=3 * stages)
    turn = np.empty(len(codes), dtype=np.int64)
    turn[order] = nth_of_each(counts)
    rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return ActionLists(rank, kind, stage, turn, owners, copies, len(rows))


def _cut(short: _Rows, longer: _Rows, owners: np.ndarray, copies: int) -> np.ndarray | None:
    """Where each rank's list can be cut to put a period in, so that no pass before a cut waits for one behind."""
    low, high = np.array([_range(a, b) for a, b in zip(short, longer, strict=True)]).T
    if (low > high).any():
        return None
    lists = _turns(short, owners, copies)
    source, _ = lists.sources()
    takes = np.flatnonzero(source >= 0)
    place = np.arange(len(source)) - lists.starts[lists.rank]
    cut = low
    while True:
        inside = takes[place[takes] < cut[lists.rank[takes]]]
        more = cut.copy()
        np.maximum.at(more, lists.rank[source[inside]], place[source[inside]] + 1)
        if (more == cut).all():
            return cut if (cut <= high).all() else None
        cut = more


def _range(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """The first and the last place of the shorter list at which putting something in gives the longer one."""
    same = np.flatnonzero(a != b[: len(a)])
    back = np.flatnonzero(a[::-1] != b[::-1][: len(a)])
    ahead = int(same[0]) if len(same) else len(a)
    return len(a) - (int(back[0]) if len(back) else len(a)), ahead


def _template(
    short: _Rows, longer: _Rows, cut: np.ndarray, owners: np.ndarray, copies: int, microbatches: int, q: int
) -> PeriodicLists | None:
    """The lists, cut, if what is cut is a recurrence."""
    cuts = cut.tolist()
    blocks = tuple(b[c : c + len(b) - len(a)] for a, b, c in zip(short, longer, cuts, strict=True))
    counts = np.bincount(np.concatenate(blocks), minlength=4 * len(owners)).reshape(4, -1)
    if (counts != counts[:, :1]).any():
        return None
    heads = tuple(a[:c] for a, c in zip(short, cuts, strict=True))
    tails = tuple(a[c:] for a, c in zip(short, cuts, strict=True))
    found = PeriodicLists(heads, blocks, tails, owners, copies, microbatches, q, 0)
    for times in (4, 16, 64):
        delay = _delay(found, times)
        if delay is None:
            return None
        if delay < times:
            return replace(found, delay=delay)
    return None


def _delay(found: PeriodicLists, times: int) -> int | None:
    """How many periods the last period and T go back, of so many; None where a pass waits for a later period."""
    lists = found.lists(times)
    source, _ = lists.sources()
    taken = np.flatnonzero(source >= 0)
    place = np.arange(len(source)) - lists.starts[lists.rank]
    ahead, length = (np.array([len(row) for row in rows])[lists.rank] for rows in (found.before, found.block))
    period = np.minimum((place - ahead) // length, times)
    back = period[taken] - period[source[taken]]
    inside = period[taken] >= 0
    if (back[inside] < 0).any() or (period[source[taken[~inside]]] >= 0).any():
        return None
    return max(1, int(back[period[taken] >= times - 1].max(initial=1)))
