"""What is searched beside the graph of a problem: wider pools, coarser runs, and other orders of the prime factors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardplan.core.op import Op
from shardplan.core.ops import Send
from shardplan.movement.redistribution.counting import counted_paths
from shardplan.movement.redistribution.emit import ops_of_path
from shardplan.movement.redistribution.orders import other_orders
from shardplan.movement.redistribution.problem import MOST_POOLED, Problem, pool_types, problem
from shardplan.movement.redistribution.search import Objective, Path
from shardplan.movement.redistribution.tile_graph import price_graph

# Each search takes few: its first expansion finds every path of two steps.
_EXPANSIONS = 10
_EXPANSIONS_COARSE = 60
_MOST_POOLS = 4


def fallback_candidates(p: Problem, objective: Objective, bound: int, best: Path | None) -> Iterator[tuple[Op, ...]]:
    """Yield op sequences cheaper than the best path of a problem, where one may be, each cheaper than the one before.

    A pool is followed by those around its best paths, and so is a graph of portable paths that lacks types; a search
    that was cut off by one over the longest runs. Portable paths that deliver a byte twice are searched in other orders
    of the factors.
    """
    least = float("inf") if best is None else best.cost
    pools = p if p.pool else _finest(p) if objective.portable else None
    for _ in range(_MOST_POOLS):
        if pools is None or best is None:
            break
        wider = pools.pool_around(p.type(node) for node in best.nodes)
        found = _cheaper(wider, objective, bound, least)
        if found is None:
            break
        p, best, least = wider, found, found.cost
        yield _ops(p, best, bound, objective)
    if best is not None and not best.exact and not p.pool:
        coarse = problem(p.source, p.target, cut=False)
        if coarse is not None and len(coarse.runs) < len(p.runs):
            found = _cheaper(coarse, objective, bound, least, _EXPANSIONS_COARSE)
            if found is not None:
                least = found.cost
                yield _ops(coarse, found, bound, objective)
    if not objective.portable or (best is not None and _at_bound(p, best, bound, objective)):
        return
    for ours, theirs in other_orders(p.source, p.target):
        other = problem(ours, theirs)
        found = None if other is None else _cheaper(other, objective, bound, least)
        if other is not None and found is not None:
            least = found.cost
            ops = _ops(other, found, bound, objective)
            yield (Send(ours.layout, ours.mesh), *ops, Send(p.target.layout, p.target.mesh))


def _finest(p: Problem) -> Problem | None:
    """A pool over prime sub-axes, where the graph holds none of some types that have them."""
    mesh = p.source.mesh
    marked = any((*t.layout.partial, *t.layout.root) for t in (p.source, p.target))
    if p.fine or marked or len(mesh.atoms) > MOST_POOLED:
        return None
    return pool_types(p.source, p.target, [mesh.span(a).atoms for a in mesh.axes])


def _cheaper(p: Problem, objective: Objective, bound: int, least: float, budget: int = _EXPANSIONS) -> Path | None:
    """The cheapest path below `least`, if its cost can be told."""
    found = counted_paths(p, bound, objective, budget, least)
    return next((path for path, final in found if final), None)


def _ops(p: Problem, path: Path, bound: int, objective: Objective) -> tuple[Op, ...]:
    return tuple(ops_of_path(p, path.nodes, objective.portable, price_graph(p, bound).graph))


def _at_bound(p: Problem, path: Path, bound: int, objective: Objective) -> bool:
    """Say whether a path costs no more than the direct exchange of whatever group, none of whose senders is crowded."""
    direct = price_graph(p, bound).graph.edges(path.nodes[0], np.array(path.nodes[-1:]), out=True)
    least = direct.bytes[0] * objective.byte + direct.rounds[0] * objective.turn
    return bool(path.cost - (len(path.nodes) - 1) * objective.step <= least * (1 + 1e-9))
