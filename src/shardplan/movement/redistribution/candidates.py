"""Candidate op sequences for one tensor on one mesh; each is costed by one function and the cheapest kept.

Families: the exact shortest path over the state graph (typed ops, group exchanges, cutting permutes and the direct
exchange are all its edges), variants of it under other objectives where the objective cannot be priced exactly on the
graph (uneven dims, topologies), the direct exchange itself, and reduce-then-exchange as what always exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from shardplan.core.ops import AllGather, AllReduce, Broadcast, Exchange, Op, Permute, ReduceScatter, Slice, ToPartial
from shardplan.core.tensor import TensorType, live_reduction, same
from shardplan.movement.redistribution.closed_form import closed_form
from shardplan.movement.redistribution.counting import counted_paths
from shardplan.movement.redistribution.emit import direct, ops_of_path
from shardplan.movement.redistribution.fallback_candidates import fallback_candidates
from shardplan.movement.redistribution.limits import Narrowing
from shardplan.movement.redistribution.problem import Problem, common_prefix, problem
from shardplan.movement.redistribution.search import STEP, Objective, Path, Rates, shortest
from shardplan.movement.redistribution.tile_graph import Graph, price_graph

ROUND_CHARGE = 0.002  # of bound_bytes, per round; scale-free, so that tiny arrays are not gathered to save rounds
# What variants charge for a round where the price is not exact on the graph: 25 times as much, for fewer, larger steps.
_DEAR_ROUND = 0.05
# Seconds of a step under rates, to break ties: far below any latency.
_STEP_SECONDS = 1e-9
# States that a search expands. To expand one prices its edges to all others: 0.4 ms on 1,500 states, 2 ms on 12,000, so
# that each search takes at most some 0.15 s. Most end long before with a proof; what is cut off is not claimed exact.
_LARGE = 1500  # states of a graph on which expansions are counted more closely
_EXPANSIONS, _EXPANSIONS_LARGE = 400, 40
# For the variants, several of which run for each pair, and which prove nothing.
_EXPANSIONS_VARIANT = 60


@dataclass(frozen=True, slots=True)
class Request:
    """What the candidates must respect."""

    bound: int  # bytes of the largest shard allowed between steps
    portable: bool = False
    rates: Rates | None = None
    narrow: bool = False  # also what keeps memory limits
    keep: bool = False  # the source then lives to the end


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence of ops; `exact` when nothing cheaper exists in a graph that holds every type."""

    ops: tuple[Op, ...]
    exact: bool = False


def is_portable(op: Op, t: TensorType) -> bool:
    """Say whether an op on `t` is no exchange over more than half of the devices, as arXiv 2112.01075 has it."""
    return op.peers < 2 or 2 * math.prod(t.mesh.span(a).size for a in op.members(t)) <= t.mesh.size


def candidates(s: TensorType, t: TensorType, request: Request, p: Problem | None) -> Iterator[Candidate]:
    """Yield candidates from `s` to `t`: first the paths of the graph, then what needs no search.

    The first is the best of the graph, and the only one where that is exact and no limit is to be kept.
    """
    if p is not None:
        graph, _, whole, countable = price_graph(p, request.bound)
        a, b = p.node(s), p.node(t)
        base = _base(p, request.bound, request.portable)
        budget = _budget(graph)
        timed = request.rates is not None
        first = replace(base, byte=p.nbytes, turn=0.0, step=_STEP_SECONDS, rates=request.rates) if timed else base
        path, settled = None, False
        for path, _ in counted_paths(p, request.bound, first, budget):
            settled = path.exact and countable and whole and not timed
            yield Candidate(tuple(ops_of_path(p, path.nodes, request.portable, graph)), settled and p.fine)
        if settled and not (request.narrow or request.portable or p.pool):
            return
        # What is legal at estimated prices, where those of the graph are; for the variants, and for limits.
        legal, _, extents = p.legal(request.bound)
        cheapest = [] if path is None or graph is not p.graph else [(first, path)]
        if not settled:
            variants = _variants(p, request.bound, request.portable, request.narrow)
            for objective, found in variants[1:] if whole and not timed else variants:
                yield Candidate(tuple(ops_of_path(p, found.nodes, request.portable, graph)))
                cheapest += [(objective, found)] if objective == base and graph is p.graph else []
        if not timed:
            yield from map(Candidate, fallback_candidates(p, first, request.bound, path))
        if request.narrow and a != b:
            if graph is not p.graph:
                found = shortest(p.graph, a, b, base, legal, budget=min(budget, _EXPANSIONS_VARIANT))
                cheapest = [] if found is None else [(base, found)]
            ways = Narrowing(p, request.portable, legal, extents, request.keep, budget)
            yield from (Candidate(ops) for ops in ways.paths(cheapest))
    yield from direct_candidates(s, t, request.portable)


def _base(p: Problem, bound: int, portable: bool) -> Objective:
    """The price without a topology, in units of the bound."""
    return Objective(byte=p.nbytes / bound, turn=ROUND_CHARGE, step=STEP, portable=portable)


def _budget(graph: Graph) -> int:
    return _EXPANSIONS if len(graph.types) <= _LARGE else _EXPANSIONS_LARGE


@lru_cache(maxsize=8)  # asked for again on every placement
def _variants(p: Problem, bound: int, portable: bool, narrow: bool) -> list[tuple[Objective, Path]]:
    """The paths that are best by bytes and rounds, by bytes alone, and in few rounds.

    For limits also that without messages, of which groups stage less.
    """
    graph, allowed, _, _ = price_graph(p, bound)
    base = _base(p, bound, portable)
    found, budget = list[tuple[Objective, Path]](), min(_budget(graph), _EXPANSIONS_VARIANT)
    grouped = [replace(base, direct=False)] if narrow else []
    for objective in (base, replace(base, turn=0.0), replace(base, turn=_DEAR_ROUND), *grouped):
        states = p.legal(bound)[0] if graph is p.graph else allowed
        path = shortest(graph, p.node(p.source), p.node(p.target), objective, states, budget=budget)
        found += [] if path is None else [(objective, path)]
    return found


def direct_candidates(s: TensorType, t: TensorType, portable: bool = False) -> Iterator[Candidate]:
    """Yield the sequences that need no search.

    Between equal partial and root parts: the direct exchange, the closed form, an exchange after a permute, and gather
    then slice. Always: one permute, which types only where tiles nest, and reduce then exchange.
    """
    source, target = (set(x.mesh.expand(x.layout.partial)) for x in (s, t))
    roots = [set(x.mesh.expand(x.layout.root)) for x in (s, t)]
    if source == target and roots[0] == roots[1] and live_reduction(s) == live_reduction(t):
        yield Candidate(tuple(direct(s, t, portable)))
        if s.all_even and t.all_even:
            yield Candidate(tuple(closed_form(s, t)))
            yield from _swap_then_exchange(s, t, portable)
        yield from map(Candidate, _gather_then_slice(s, t))
    yield Candidate((Permute(t.layout),))
    yield Candidate(tuple(_settle_partial(s, t)))
    if not (s.all_even and t.all_even):
        yield from map(Candidate, _scatter_then_gather(s, t))


def _swap_then_exchange(s: TensorType, t: TensorType, portable: bool) -> Iterator[Candidate]:
    """Yield, for each dim in turn, a permute that puts the target's first axis in its final place, and the exchange.

    The exchange then needs a smaller group.
    """
    for ours, theirs in zip(s.atoms, t.atoms, strict=True):
        # Only atoms of one size change places: the tiles then stay as they are, and a permute moves whole ones.
        if not ours or not theirs or s.mesh.atoms[ours[0]].size != s.mesh.atoms[theirs[0]].size:
            continue
        swap = {ours[0]: theirs[0], theirs[0]: ours[0]}
        dims = tuple(s.mesh.fold(tuple(swap.get(a, a) for a in run)) for run in s.atoms)
        if set(s.mesh.expand((*s.layout.partial, *s.layout.root))) & set(swap):
            continue
        middle = s.with_layout(replace(s.layout, dims=dims))
        if middle != s:
            yield Candidate((Permute(middle.layout), *direct(middle, t, portable)))


def _gather_then_slice(s: TensorType, t: TensorType) -> Iterator[tuple[Op, ...]]:
    """Gather what the target does not name, then slice what it names more: types by names, so of uneven dims too.

    In one gather, in one for each dim, and in one for each axis: what is large is then sent to few, who pass it on.
    """
    gone: list[tuple[int, tuple[str, ...]]] = []
    grown: list[Op] = []
    for d, (a, b) in enumerate(zip(s.layout.dims, t.layout.dims, strict=True)):
        stay = len(common_prefix(a, b))
        left, new = (tuple(x for x in names[stay:] if s.mesh.span(x).size > 1) for names in (a, b))
        gone += [(d, left)] if left else []
        grown += [Slice(d, new)] if new else []
    dims, axes = [d for d, names in gone for _ in names], tuple(a for _, names in gone for a in names)
    yield (*([AllGather(dims[0] if len(gone) == 1 else tuple(dims), axes)] if axes else []), *grown)
    yield (*(AllGather(d, names) for d, names in gone), *grown)
    yield (*(AllGather(d, (a,)) for d, names in gone for a in reversed(names)), *grown)


def _scatter_then_gather(s: TensorType, t: TensorType) -> Iterator[tuple[Op, ...]]:
    """Reduce into what the target adds to each dim, and, over the other axes, into any dim, along which they gather."""
    done = [a for a in s.layout.partial if a not in t.layout.partial]
    kept = [(d, a) for d, names in enumerate(t.layout.dims) for a in names[len(s.layout.dims[d]) :] if a in done]
    rest = tuple(a for a in done if a not in {name for _, name in kept})
    for d in range(s.ndim) if rest else ():
        into = [*kept, *((d, a) for a in rest)]
        scatter = ReduceScatter(tuple(d for d, _ in into), tuple(a for _, a in into), s.layout.reduction or "sum")
        yield scatter, AllGather(d, rest)


def _settle_partial(s: TensorType, t: TensorType) -> list[Op]:
    """Reduce what the target does not leave partial, exchange, then make partial what the source did not have."""
    mesh = s.mesh
    source, target = (mesh.expand(x.layout.partial) for x in (s, t))
    keep = set(source) & set(target) if s.layout.reduction == t.layout.reduction else set[int]()
    ops: list[Op] = []
    if done := tuple(a for a in source if a not in keep):
        ops.append(AllReduce(mesh.fold(done), s.layout.reduction or "sum"))
    root_s, root_t = (mesh.expand(x.layout.root) for x in (s, t))
    if spread := tuple(a for a in root_s if a not in root_t):
        ops.append(Broadcast(mesh.fold(spread)))
    current = s
    for op in ops:
        current = op.infer(current)[0]
    layout = replace(current.layout, dims=tuple(mesh.fold(run) for run in t.atoms))  # without axes of size 1
    if not same(current, middle := s.with_layout(layout)):
        ops.append(Exchange(middle.layout))
    if new := tuple(a for a in target if a not in keep):
        ops.append(ToPartial(mesh.fold(new), t.layout.reduction or "sum"))
    if rooted := tuple(a for a in root_t if a not in root_s):
        ops.append(ToPartial(mesh.fold(rooted), "root"))
    return ops


@lru_cache(maxsize=8)
def make_problem(s: TensorType, t: TensorType) -> Problem | None:
    """Return the problem over units for two types on one mesh that carry at most one reduction."""
    kinds = {x.layout.reduction for x in (s, t) if x.layout.partial}
    return problem(s, t) if len(kinds) <= 1 else None
