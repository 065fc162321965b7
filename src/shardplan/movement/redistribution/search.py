"""Shortest paths over a state graph: exact A* while the budget lasts.

The heuristic is what a device still lacks of its destination box, which every path must deliver; it is admissible and,
because one op's cost is priced on the worst device, consistent in the sense A* needs (a step never pays for more than
it brings). Pure functions on a graph; nothing here knows devices, dtypes or programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.movement.redistribution.space import (
    ALL_TO_ALL,
    GATHER,
    LOCAL,
    MOVE,
    REDUCE_ALL,
    RENAME,
    SCATTER,
    Edges,
)
from shardplan.movement.redistribution.tiled import Graph

# Ties go to fewer steps: far below what a round costs (0.002), far above the rounding of a sum. In units of the bound.
STEP = 1e-7
# The same for a path whose largest sum of two shards is asked for, a fraction of the array.
_TIGHTEST_STEP = 1e-9
# Costs are sums of some ten terms of at most about 1: what differs by less than this is equal.
_ROUNDING = 1e-15
# A sum of two fractions may exceed a limit that it meets exactly by a rounding error.
_SLACK = 1 + 1e-12
# The least rate is no lower bound on what a missing byte costs: a rate may be per byte held before, of which a gather
# delivers several. A share of it is nearer to one, without proof: of 150 random problems on two clusters one search
# ended dearer than without any heuristic, with the whole rate too. No path under rates is claimed to be exact.
_RATE_SHARE = 0.25


class Rates(NamedTuple):
    """Of kinds of collectives seconds, and seconds per byte, by the mask of the runs that groups vary over [2, masks].

    Bytes are those held before the op; of messages those received.
    """

    gather: np.ndarray
    scatter: np.ndarray
    reduce_all: np.ndarray
    messages: np.ndarray


@dataclass(frozen=True, slots=True)
class Objective:
    """What a step costs: `byte` per fraction of the array, `turn` per round, or, where given, by rates."""

    byte: float
    turn: float
    step: float  # of every step, so that of equal paths the shortest is found
    portable: bool = False
    direct: bool = True  # whether moves priced as messages (Exchange, Permute) are edges at all
    rates: Rates | None = None  # `byte` is then the bytes of the array

    def price(self, e: Edges, graph: Graph, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the cost of every edge; inf where it is not allowed."""
        if self.rates is None:
            cost = e.bytes * self.byte + e.rounds * self.turn
        else:
            cost = self._timed(e, graph, sources, targets)
        # A local op counts half: of paths that cost the same the one with fewer transfers is taken.
        cost = cost + np.where(e.kind == LOCAL, self.step * 0.5, self.step)
        if self.portable:
            cost = np.where(e.portable, cost, np.inf)
        if not self.direct:
            cost = np.where((e.kind == MOVE) | (e.kind == RENAME), np.inf, cost)
        return cost

    def _timed(self, e: Edges, graph: Graph, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Seconds of every edge: what a gather costs goes by the bytes held, what messages cost by those received."""
        rates = self.rates
        assert rates is not None
        gone = graph.used[sources] & ~graph.used[targets]
        reduced = graph.partial[sources] & ~graph.partial[targets]
        held = graph.size[sources] * self.byte
        moved = np.where(np.isfinite(e.bytes), e.bytes, 0.0) * self.byte
        cost = np.full(np.shape(e.bytes), np.inf)
        for kind, (fixed, rate), mask, amount in (
            (GATHER, rates.gather, gone, held),
            (SCATTER, rates.scatter, reduced, held),
            (REDUCE_ALL, rates.reduce_all, reduced, held),
            (ALL_TO_ALL, rates.messages, e.moved, moved),
            (MOVE, rates.messages, e.moved, moved),
            (RENAME, rates.messages, e.moved, moved),
        ):
            cost = np.where(e.kind == kind, fixed[mask] + rate[mask] * amount, cost)
        # A reduction to a root and its broadcast have no rate of their own: bytes at the dearest rate of messages.
        known = np.isin(e.kind, (GATHER, SCATTER, REDUCE_ALL, ALL_TO_ALL, MOVE, RENAME))
        cost = np.where(known, cost, moved * rates.messages[1].max())
        return np.where(e.kind == LOCAL, 0.0, np.where(np.isfinite(e.bytes), cost, np.inf))


@dataclass(frozen=True, slots=True)
class Path:
    """A sequence of types (indices into the space), its cost, and whether nothing cheaper exists in the graph."""

    nodes: tuple[int, ...]
    cost: float
    exact: bool


def lacking(graph: Graph, t: int) -> np.ndarray:
    """Return, for every type, the fraction of the array that the worst device still lacks of `t`: a lower bound.

    Where the partial or root parts differ a device may make its box of what it holds, so nothing is claimed; but a
    partial source gives no element its value, so of it the whole box is lacking.
    """
    e = graph.column(t)
    same = (graph.partial == graph.partial[t]) & (graph.root == graph.root[t])
    left = np.where(same & np.isfinite(e.bytes), e.bytes, 0.0)
    to_reduce = (graph.partial & ~graph.partial[t]) > 0
    no_partial = graph.partial[t] == 0
    return np.where(to_reduce & no_partial & (graph.root == graph.root[t]), graph.size[t], left)


def shortest(
    graph: Graph,
    s: int,
    t: int,
    objective: Objective,
    allowed: np.ndarray,
    limit: float | None = None,
    *,
    budget: int,
    below: float = np.inf,
) -> Path | None:
    """Return the cheapest path from `s` to `t` through `allowed` types (bool [types]) that costs less than `below`.

    `limit` bounds the sum of a step's operand and result (fraction of the array). After `budget` expansions the best
    path found so far is returned, marked inexact.

    Nearly every type has an edge to `t`, so each expansion completes the paths to its neighbours by those: `last` is
    the type before `t` on the best path so far, and there is a path to return long before the search ends. The frontier
    is the array `reach`, without a heap: one argmin over it costs less than the row of edges that is priced anyway.
    """
    everyone = np.arange(len(graph.types))
    rate = objective.byte if objective.rates is None else objective.byte * _least_rate(objective)
    bound = lacking(graph, t) * rate
    column = objective.price(graph.column(t), graph, everyone, np.array(t))
    if limit is not None:
        column = np.where(graph.size + graph.size[t] <= limit * _SLACK, column, np.inf)
    reach = np.full(len(graph.types), np.inf)
    parent = np.full(len(graph.types), -1, dtype=np.int64)
    closed = ~allowed
    reach[s] = 0.0
    best, last = below, -1
    node, expansions = s, 0
    while True:
        if reach[node] + column[node] < best - _ROUNDING:
            best, last = float(reach[node] + column[node]), node
        closed[node] = True
        e = graph.row(node)
        cost = objective.price(e, graph, np.array(node), everyone) + reach[node]
        if limit is not None:
            cost = np.where(graph.size[node] + graph.size <= limit * _SLACK, cost, np.inf)
        better = (cost < reach) & ~closed & (cost + bound < best)
        reach[better] = cost[better]
        parent[better] = node
        through = np.where(better, cost + column, np.inf)
        k = int(np.argmin(through))
        if through[k] < best - _ROUNDING:
            best, last = float(through[k]), k
        expansions += 1
        score = np.where(closed, np.inf, reach + bound)
        node = int(np.argmin(score))
        exact = score[node] >= best - _ROUNDING
        if exact or expansions >= budget:
            break
    if last == -1:
        return None
    nodes = [t]
    while last != -1:  # back to `s`, whose parent is none
        nodes.append(last)
        last = int(parent[last]) if last != s else -1
    nodes.reverse()
    return Path(tuple(nodes), best, bool(exact))


def _least_rate(objective: Objective) -> float:
    """Seconds that a byte takes at the least, as the heuristic takes it."""
    assert objective.rates is not None
    positive = [rate[rate > 0].min() for _, rate in objective.rates if np.any(rate > 0)]
    return float(min(positive, default=0.0)) * _RATE_SHARE


def tightest(graph: Graph, s: int, t: int, allowed: np.ndarray, portable: bool) -> Path | None:
    """Return the path whose largest (operand + result) is least: what a memory limit asks for at the very least.

    Dijkstra's algorithm with the maximum for the sum.
    """
    reach = np.full(len(graph.types), np.inf)
    parent = np.full(len(graph.types), -1, dtype=np.int64)
    closed = ~allowed
    closed[t] = False
    reach[s] = 0.0
    for _ in range(len(graph.types)):
        score = np.where(closed, np.inf, reach)
        node = int(np.argmin(score))
        if not np.isfinite(score[node]) or node == t:
            break
        closed[node] = True
        e = graph.row(node)
        legal = np.isfinite(e.bytes) & (e.portable if portable else True)
        cost = np.where(legal, np.maximum(reach[node], graph.size[node] + graph.size), np.inf) + _TIGHTEST_STEP
        better = (cost < reach) & ~closed
        reach[better], parent[better] = cost[better], node
    if not np.isfinite(reach[t]):
        return None
    nodes = [t]
    while nodes[-1] != s:
        nodes.append(int(parent[nodes[-1]]))
    return Path(tuple(reversed(nodes)), float(reach[t]), True)
