"""Cheapest paths, where the prices of the graph are estimates: their steps are counted, and the search is repeated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from shardplan.errors import LayoutError, TypingError
from shardplan.movement.redistribution.emit import edge
from shardplan.movement.redistribution.problem import Problem
from shardplan.movement.redistribution.search import Objective, Path, shortest
from shardplan.movement.redistribution.tile_graph import Graph, price_graph

# Edges whose price is counted: mostly the path stays, or the next one is right.
_MOST_COUNTED = 24


def counted_paths(
    p: Problem, bound: int, objective: Objective, budget: int, below: float = math.inf
) -> Iterator[tuple[Path, bool]]:
    """Yield the cheapest path below a cost, then, while new steps of it are counted, the one that is cheapest by these.

    Beside each stands whether its cost is final: with several primes, or uneven dims, a sender may have more to do than
    the graph says. Seconds are not counted.
    """
    graph, allowed, _, _ = price_graph(p, bound)
    known: dict[tuple[int, int], float] = {}
    best: Path | None = None  # of those that were counted
    while len(known) <= _MOST_COUNTED:
        ends = p.node(p.source), p.node(p.target)
        path = shortest(graph, *ends, objective, allowed, budget=budget, below=below, known=known)
        if path is None:
            return
        new = [pair for pair in pairwise(path.nodes) if pair not in known]
        final = objective.rates is not None or (p.countable and graph is p.graph) or not new
        yield path, final
        if final:
            return
        known |= {pair: _edge_cost(p, pair, objective, graph) for pair in new}
        cost = sum(known[pair] for pair in pairwise(path.nodes))
        if cost < (below if best is None else best.cost):
            best = replace(path, cost=cost, exact=False)
    if best is not None:
        yield best, True


def _edge_cost(p: Problem, pair: tuple[int, int], objective: Objective, graph: Graph) -> float:
    """What an edge costs by its ops; inf where they do not type."""
    t, total = p.type(pair[0]), 0.0
    for op in edge(p, *pair, objective.portable, graph):
        try:
            (u,) = op.infer(t)
        except (TypingError, LayoutError):
            return math.inf
        moved = max(int(op.received_bytes(t).max(initial=0)), int(op.sent_bytes(t)[1].max(initial=0)))
        total += moved / p.nbytes * objective.byte + op.rounds(t) * objective.turn
        t = u
    return total + objective.step
