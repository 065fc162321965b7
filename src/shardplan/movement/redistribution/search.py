"""Shortest paths over a state graph: exact A* while the budget lasts.

The heuristic is what a device still lacks of its destination box, which every path must deliver; it is admissible and,
because one op's cost is priced on the worst device, consistent in the sense A* needs (a step never pays for more than
it brings). Pure functions on a graph; nothing here knows devices, dtypes or programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
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
# Bytes of a need that break ties, for all bytes of the array: needs are whole bytes.
_TIE = 0.2
# Costs are sums of some ten terms of at most about 1: what differs by less than this is equal.
_ROUNDING = 1e-15
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
            cost = (e.portable if self.portable else e.bytes) * self.byte + e.rounds * self.turn
        else:
            cost = self._timed(e, graph, sources, targets)
        # A local op counts half: of paths that cost the same the one with fewer transfers is taken.
        cost = cost + np.where(e.kind == LOCAL, self.step * 0.5, self.step)
        if self.portable:
            cost = np.where(np.isfinite(e.portable), cost, np.inf)
        if not self.direct:
            cost = np.where((e.kind == MOVE) | (e.kind == RENAME), np.inf, cost)
        return cost

    def _timed(self, e: Edges, graph: Graph, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Seconds of every edge: what a gather costs goes by the bytes held, what messages cost by those received."""
        rates = self.rates
        assert rates is not None
        gone = graph.used[sources] & ~graph.used[targets]
        reduced = graph.partial[sources] & ~graph.partial[targets]
        size = graph.size[sources]
        held = np.where(np.isfinite(size), size, 0.0) * self.byte  # to types that are not priced no op leads
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
        return np.where(np.isfinite(e.bytes), np.where(e.kind == LOCAL, 0.0, cost), np.inf)


@dataclass(frozen=True, slots=True)
class Path:
    """A sequence of types (indices into the space), its cost, and whether nothing cheaper exists in the graph."""

    nodes: tuple[int, ...]
    cost: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Needs:
    """What steps need, in bytes: operand, result, the source where it is kept, and staging as nearly as a graph says.

    `known` holds what was counted exactly, by the two ends of a step.
    """

    types: np.ndarray  # the list of each dim of every type [types, ndim]
    extents: np.ndarray  # the elements of a shard along each dim of every type [types, ndim]
    local: np.ndarray  # the bytes of a shard of every type
    itemsize: int
    kept: int | None  # the type that lives to the end
    arriving: float  # how much of what a step receives is staged, in bytes for a fraction of the array
    known: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def between(self, e: Edges, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return what the steps of edges need, from one type to all or to one of all; inf where there is none.

        Of every peer an element is staged at the least. A gather may arrive in place, and what comes from one peer:
        where no dim changes behind one that is longer than 1. Ties go to what receives less.
        """
        local = self.local
        behind, scattered = np.zeros(np.shape(e.bytes), dtype=bool), np.zeros(np.shape(e.bytes), dtype=bool)
        for d in range(self.types.shape[1]):
            scattered |= behind & (self.types[a, d] != self.types[b, d])
            behind |= np.maximum(self.extents[a, d], self.extents[b, d]) > 1
        whole = ~scattered & (e.kind == GATHER) | (e.rounds <= 1) & (~scattered | (local[a] == local[b]))
        staged = np.where(whole, 0.0, np.maximum(e.bytes * max(self.arriving, _TIE), e.rounds * self.itemsize))
        need = local[a] + local[b] + staged + e.bytes * _TIE
        if self.kept is not None:
            need = need + np.where(a == self.kept, 0.0, local[self.kept])
        for (x, y), exact in self.known.items():
            if a.ndim == 0 and x == a:
                need[y] = exact
            elif b.ndim == 0 and y == b:
                need[x] = exact
        return need

    def along(self, graph: Graph, path: Path) -> list[float]:
        """Return what every step of a path needs."""
        everyone = np.arange(len(graph.types))
        pairs = zip(path.nodes, path.nodes[1:], strict=False)
        return [float(self.between(graph.row(a), np.array(a), everyone)[b]) for a, b in pairs]


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
    within: tuple[Needs, float] | None = None,
    *,
    budget: int,
    below: float = np.inf,
    known: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> Path | None:
    """Return the cheapest path from `s` to `t` through `allowed` types (bool [types]) that costs less than `below`.

    `within` says what steps need, and the most that one may need; `known` what some edges cost, by their ends. After
    `budget` expansions the best path found so far is returned, marked inexact.

    Nearly every type has an edge to `t`, so each expansion completes the paths to its neighbours by those: `last` is
    the type before `t` on the best path so far, and there is a path to return long before the search ends. The frontier
    is the array `reach`, without a heap: one argmin over it costs less than the row of edges that is priced anyway.
    """
    everyone = np.arange(len(graph.types))
    rate = objective.byte if objective.rates is None else objective.byte * _least_rate(objective)
    bound = lacking(graph, t) * rate

    def price(e: Edges, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        cost = objective.price(e, graph, a, b)
        for (x, y), exact in known.items():
            if a.ndim == 0 and x == a:
                cost[y] = exact
            elif b.ndim == 0 and y == b:
                cost[x] = exact
        return cost if within is None else np.where(within[0].between(e, a, b) <= within[1], cost, np.inf)

    column = price(graph.column(t), everyone, np.array(t))
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
        cost = price(graph.row(node), np.array(node), everyone) + reach[node]
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
    return Path(_back(parent, s, last, t), best, bool(exact))


def _back(parent: np.ndarray, s: int, last: int, t: int) -> tuple[int, ...]:
    """The path that ends in `last` and `t`, by the type before each."""
    nodes = [t, last]
    while nodes[-1] != s:
        nodes.append(int(parent[nodes[-1]]))
    return tuple(reversed(nodes))


def _least_rate(objective: Objective) -> float:
    """Seconds that a byte takes at the least, as the heuristic takes it."""
    assert objective.rates is not None
    positive = [rate[rate > 0].min() for _, rate in objective.rates if np.any(rate > 0)]
    return float(min(positive, default=0.0)) * _RATE_SHARE


def narrowest(
    graph: Graph, s: int, t: int, needs: Needs, allowed: np.ndarray, portable: bool, *, budget: int
) -> Path | None:
    """Return the path, of other types, whose largest step needs least; its cost is that need.

    Dijkstra's algorithm with the maximum for the sum. Every path leaves `s` and enters `t`, so the narrowest steps that
    do are a floor; of what is reached within it that comes first which completes the narrowest path. After `budget`
    expansions the narrowest path found so far is returned.
    """
    everyone = np.arange(len(graph.types))

    def need(e: Edges, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        legal = np.isfinite(e.portable if portable else e.bytes) & allowed[a] & allowed[b] & (a != b)
        return np.where(legal, needs.between(e, a, b), np.inf)

    column = need(graph.column(t), everyone, np.array(t))
    floor = max(column.min(), need(graph.row(s), np.array(s), everyone).min())
    reach, closed = np.where(everyone == s, floor, np.inf), np.zeros(len(everyone), dtype=bool)
    parent = np.full(len(everyone), -1, dtype=np.int64)
    best, last, node, expansions = float(column[s]), s, s, 0
    # Needs are whole bytes, what arrives aside.
    while max(floor, reach[node]) <= best - 1 and (expansions < budget or best == np.inf):
        closed[node] = True
        expansions += 1
        out = np.maximum(need(graph.row(node), np.array(node), everyone), reach[node])
        better = (out < reach) & ~closed
        reach[better], parent[better] = out[better], node
        through = np.where(better, np.maximum(out, column), np.inf)
        k = _first(through, column)
        if through[k] < best:
            best, last = float(through[k]), k
        node = _first(np.where(closed, np.inf, reach), column)
        if closed[node]:
            break
    return Path(_back(parent, s, last, t), best, expansions < budget) if np.isfinite(best) else None


def _first(key: np.ndarray, tie: np.ndarray) -> int:
    """Where the key is least, and of these the tie."""
    least = np.flatnonzero(key == key.min())
    return int(least[np.argmin(tie[least])])
