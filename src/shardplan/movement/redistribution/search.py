"""Shortest paths over a state graph: exact A* while the budget lasts.

The heuristic is what a device still lacks of its destination box, which every path must deliver; it is admissible and,
because one op's cost is priced on the worst device, consistent in the sense A* needs (a step never pays for more than
it brings). Pure functions on a graph; nothing here knows devices, dtypes or programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardplan.movement.redistribution.space import (
    ALL_TO_ALL,
    GATHER,
    KINDS,
    LOCAL,
    MOVE,
    REDUCE_ALL,
    RENAME,
    ROOT,
    SCATTER,
    SPREAD,
    Edges,
    doublings,
)
from shardplan.movement.redistribution.tile_graph import Graph

# Ties go to fewer steps: far below what a round costs (0.002), far above the rounding of a sum. In units of the bound.
STEP = 1e-7
# Bytes of a need that break ties, for all bytes of the array: needs are whole bytes.
_TIE = 0.2
# Costs are sums of some ten terms of at most about 1: what differs by less than this is equal.
_ROUNDING = 1e-15


class Rates(NamedTuple):
    """Of kinds of collectives seconds, and seconds per byte received, by the mask of the runs of groups [2, masks]."""

    gather: np.ndarray
    scatter: np.ndarray
    reduce_all: np.ndarray
    messages: np.ndarray


@dataclass(frozen=True)
class Objective:
    """What a step costs: `byte` per fraction of the array, `turn` per round, or, where given, by rates."""

    byte: float
    turn: float
    step: float  # of every step, so that of equal paths the shortest is found
    portable: bool = False
    direct: bool = True  # whether moves priced as messages (Exchange, Permute) are edges at all
    rates: Rates | None = None  # `byte` is then the bytes of the array

    def price(self, e: Edges) -> np.ndarray:
        """Return the cost of every edge; inf where it is not allowed."""
        if self.rates is None:
            cost = e.paid * self.byte + e.rounds * self.turn
        else:
            key = e.kind * self.tables.shape[2] + e.group
            fixed, rate = self.tables.reshape(2, -1).take(key, axis=1)
            cost = fixed + rate * (e.paid * self.byte)
        # A local op counts half: of paths that cost the same the one with fewer transfers is taken.
        cost = cost + np.where(e.kind == LOCAL, self.step * 0.5, self.step)
        return cost if self.direct else np.where((e.kind == MOVE) | (e.kind == RENAME), np.inf, cost)

    def floor(self, e: Edges, graph: Graph, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return what paths between the ends of edges cost at the least.

        What is lacking must come, and in rounds enough to hear of all tiles that it lies in: in one round a device
        learns what one other knows. Where the root parts differ, or addends are left, a device may make its box of what
        it holds, so nothing is claimed; but a partial source gives no element its value: then the whole box is lacking.
        """
        claimed = (graph.root[sources] == graph.root[targets]) & (graph.partial[targets] == 0)
        same = claimed & (graph.partial[sources] == 0) & np.isfinite(e.bytes)
        lacking = np.where(same, e.bytes, np.where(claimed & ~same, graph.size[targets], 0.0))
        rounds = np.where(e.kind == GATHER, e.rounds, doublings(e.rounds + 1))
        some = lacking > 0
        steps = (some + 1) * (0.5 * self.step) + some * self.step_floor
        return lacking * self.least_byte + np.where(same, rounds, some) * self.turn + steps

    @cached_property
    def least_byte(self) -> float:
        """What all bytes of the array cost at the least."""
        if self.rates is None:
            return self.byte
        positive = [rate[rate > 0].min() for _, rate in self.rates if np.any(rate > 0)]
        return self.byte * float(min(positive, default=0.0))

    @cached_property
    def step_floor(self) -> float:
        """Seconds of any step at the least."""
        return 0.0 if self.rates is None else float(min(table[0, 1:].min(initial=np.inf) for table in self.rates))

    @cached_property
    def tables(self) -> np.ndarray:
        """By kind of edge and mask of runs: seconds, and seconds per byte [2, kinds, masks].

        A reduction to a root and its broadcast have no rate of their own: bytes at the dearest rate of messages. What
        is local receives nothing, or, where there is no op, endlessly much.
        """
        rates = self.rates
        assert rates is not None
        found = np.zeros((2, KINDS, rates.gather.shape[1]))
        found[1] = 1.0
        for kind, table in ((GATHER, rates.gather), (SCATTER, rates.scatter), (REDUCE_ALL, rates.reduce_all)):
            found[:, kind] = table
        for kind in (ALL_TO_ALL, MOVE, RENAME):
            found[:, kind] = rates.messages
        for kind in (ROOT, SPREAD):
            found[:, kind] = [[rates.messages[0, 1:].min(initial=0.0)], [rates.messages[1].max()]]
        return found


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
    rows: dict[tuple[int, bool], np.ndarray] = field(default_factory=dict[tuple[int, bool], np.ndarray])  # of all types

    def edge_needs(self, e: Edges, a: np.ndarray, b: np.ndarray) -> np.ndarray:
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
        return need

    def path_needs(self, graph: Graph, path: Path) -> list[float]:
        """Return what every step of a path needs."""
        pairs = [(a, np.array([b])) for a, b in pairwise(path.nodes)]
        return [float(self.edge_needs(graph.edges(a, b, out=True), np.array(a), b)[0]) for a, b in pairs]


def insert_known(
    found: np.ndarray, known: Mapping[tuple[int, int], float], end: int, others: np.ndarray, out: bool
) -> np.ndarray:
    """Put what is known exactly of some pairs of types in its place among what was found of one and others."""
    for pair, exact in known.items():
        if pair[0 if out else 1] == end:
            found[others == pair[1 if out else 0]] = exact
    return found


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
    the type before `t` on the best path so far, and there is a path to return long before the search ends. It goes on
    among the types through which a cheaper path may lead, by what is lacking of them at `s` and behind them at `t`. The
    frontier is an array, without a heap: one argmin costs less than the row of edges that is priced anyway.
    """
    if not np.isfinite(graph.size[[s, t]]).all():  # a type that is no legal one is not priced
        return None
    here = np.arange(len(graph.types))

    def priced(end: int, out: bool) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
        """The costs from or to a type, and what gives the least cost of any path."""
        e = graph.edges(end, here if len(here) < len(graph.types) else None, out=out, portable=objective.portable)
        ends = (np.array(end), here) if out else (here, np.array(end))
        cost = insert_known(objective.price(e), known, end, here, out)
        if within is not None:
            cost = np.where(within[0].edge_needs(e, *ends) <= within[1], cost, np.inf)
        return cost, lambda: objective.floor(e, graph, *ends)

    column, behind = priced(t, out=False)
    cost, before = priced(s, out=True)
    best, last = (float(column[s]), s) if column[s] < below - _ROUNDING else (below, -1)
    through = np.where(allowed, cost + column, np.inf)
    k = int(np.argmin(through))
    if through[k] < best - _ROUNDING:
        best, last = float(through[k]), k
    bound = behind()
    keep = allowed & (before() + bound < best - _ROUNDING)
    keep[[s, t]] = False
    if 2 * keep.sum() < len(here):  # rows of all types are kept for other searches
        here, column, bound, cost, keep = (x[keep] for x in (here, column, bound, cost, keep))
    reach = np.where(keep & (cost + bound < best), cost, np.inf)
    parent, closed = np.full(len(here), s), ~keep
    way = dict[int, int]()  # to each type of a path the one before
    expansions = 1
    while True:
        score = np.where(closed, np.inf, reach + bound)
        at = int(np.argmin(score)) if len(here) else -1
        exact = at < 0 or score[at] >= best - _ROUNDING
        if exact or expansions >= budget:
            break
        expansions += 1
        closed[at] = True
        way[int(here[at])] = int(parent[at])
        cost = priced(int(here[at]), out=True)[0] + reach[at]
        better = (cost < reach) & ~closed & (cost + bound < best)
        reach[better], parent[better] = cost[better], here[at]
        through = np.where(better, cost + column, np.inf)
        k = int(np.argmin(through))
        if through[k] < best - _ROUNDING:
            best, last = float(through[k]), int(here[k])
            way[last] = int(parent[k])
    if last == -1:
        return None
    nodes = [t, last]
    while nodes[-1] != s:
        nodes.append(way.get(nodes[-1], s))
    return Path(tuple(reversed(nodes)), best, bool(exact))


def narrowest(
    graph: Graph, s: int, t: int, needs: Needs, allowed: np.ndarray, portable: bool, *, budget: int
) -> Path | None:
    """Return the path, of other types, whose largest step needs least; its cost is that need.

    Dijkstra's algorithm with the maximum for the sum. Every path leaves `s` and enters `t`, so the narrowest steps that
    do are a floor; of what is reached within it that comes first which completes the narrowest path. After `budget`
    expansions the narrowest path found so far is returned.
    """
    everyone = np.arange(len(graph.types))

    def need(end: int, out: bool) -> np.ndarray:
        if (end, out) not in needs.rows:
            e, a, b = graph.edges(end, out=out, portable=portable), *(np.array(end), everyone)[:: 1 if out else -1]
            legal = np.isfinite(e.paid) & allowed[a] & allowed[b] & (a != b)
            needs.rows[end, out] = np.where(legal, needs.edge_needs(e, a, b), np.inf)
        return insert_known(needs.rows[end, out].copy(), needs.known, end, everyone, out)

    column, first = need(t, out=False), need(s, out=True)
    floor = max(column.min(), first.min())
    reach, closed = np.where(everyone == s, floor, np.inf), np.zeros(len(everyone), dtype=bool)
    parent = np.full(len(everyone), -1, dtype=np.int64)
    best, last, node, expansions = float(column[s]), s, s, 0
    # Needs are whole bytes, what arrives aside.
    while max(floor, reach[node]) <= best - 1 and (expansions < budget or best == np.inf):
        closed[node] = True
        expansions += 1
        out = np.maximum(first if node == s else need(node, out=True), reach[node])
        better = (out < reach) & ~closed
        reach[better], parent[better] = out[better], node
        through = np.where(better, np.maximum(out, column), np.inf)
        k = _first_least(through, column)
        if through[k] < best:
            best, last = float(through[k]), k
        node = _first_least(np.where(closed, np.inf, reach), column)
        if closed[node]:
            break
    nodes = [t, last]
    while nodes[-1] != s:
        nodes.append(int(parent[nodes[-1]]))
    return Path(tuple(reversed(nodes)), best, expansions < budget) if np.isfinite(best) else None


def _first_least(key: np.ndarray, tie: np.ndarray) -> int:
    """Where the key is least, and of these the tie."""
    least = np.flatnonzero(key == key.min())
    return int(least[np.argmin(tie[least])])
