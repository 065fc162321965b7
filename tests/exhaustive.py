"""Exhaustive Dijkstra over typed op instances: what the planner's search is compared with (T8).

Every op on every type is written out, typed by the op's own rule and priced by `op.received_bytes` and `op.rounds`
alone.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from oracle import ROUND_CHARGE, moved
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Slice,
    ToPartial,
)
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.movement.redistribution.cuts import Staging

Marks = tuple[frozenset[str], frozenset[str]]  # axes that may be partial, axes that may be root


def arrangements(names: tuple[str, ...], ndim: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to deal `names`, all of them, to ordered lists of `ndim` dims."""
    for where in itertools.product(range(ndim), repeat=len(names)):
        groups = [[n for n, d in zip(names, where, strict=True) if d == dim] for dim in range(ndim)]
        yield from itertools.product(*(itertools.permutations(g) for g in groups))


def all_types(t: TensorType, marks: Marks) -> list[TensorType]:
    """Every type of the array of `t` over the prime sub-axes of its mesh."""
    names = tuple(a.name for a in t.mesh.atoms)
    reduction = t.layout.reduction or "sum"
    out: list[TensorType] = []
    for choice in itertools.product("dupr", repeat=len(names)):
        dealt = list(zip(names, choice, strict=True))
        if any((c == "p" and n not in marks[0]) or (c == "r" and n not in marks[1]) for n, c in dealt):
            continue
        of = {c: tuple(n for n, x in zip(names, choice, strict=True) if x == c) for c in "dpr"}
        for dims in arrangements(of["d"], t.ndim):
            try:
                kind = reduction if of["p"] else None
                out.append(TensorType(t.dtype, t.shape, Layout(dims, of["p"], kind, of["r"]), t.mesh))
            except ShardplanError:
                continue  # a sub-axis on an uneven dim
    return out


def suffixes(t: TensorType) -> Iterator[dict[int, tuple[str, ...]]]:
    """Every choice of a suffix (maybe none) for every dim, over prime sub-axes; not all empty."""
    lists = [tuple(t.mesh.atoms[a].name for a in run) for run in t.atoms]
    for lengths in itertools.product(*(range(len(x) + 1) for x in lists)):
        if any(lengths):
            yield {d: x[len(x) - n :] for d, (x, n) in enumerate(zip(lists, lengths, strict=True)) if n}


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every non-empty subset."""
    for n in range(1, len(names) + 1):
        yield from itertools.combinations(names, n)


def plain_ops(t: TensorType) -> Iterator[Op]:
    """Slice, AllGather, AllToAll and the ops of partial and root axes on `t`; some may not type."""
    atoms = {a: t.mesh.atoms[a].name for a in range(len(t.mesh.atoms))}
    used = set(t.mesh.expand(t.layout.used_axes))
    free = tuple(n for a, n in atoms.items() if a not in used)
    for a, d in itertools.product(free, range(t.ndim)):
        yield Slice(d, (a,))
    for runs in suffixes(t):
        axes = tuple(a for run in runs.values() for a in run)
        dims = tuple(d for d, run in runs.items() for _ in run)
        yield AllGather(dims[0] if len(runs) == 1 else dims, axes)
        if len(runs) == 1:
            yield ToPartial(axes, t.layout.reduction or "sum")
            for d, order in itertools.product(range(t.ndim), itertools.permutations(axes)):
                if d != dims[0]:
                    yield AllToAll(dims[0], d, axes, order)
    partial, root = (tuple(atoms[a] for a in t.mesh.expand(x)) for x in (t.layout.partial, t.layout.root))
    kind = t.layout.reduction or "sum"
    for axes in subsets(partial):
        yield AllReduce(axes, kind)
        yield Reduce(axes, kind)
        for order in itertools.permutations(axes):
            for dims in itertools.product(range(t.ndim), repeat=len(axes)):
                yield ReduceScatter(dims, order, kind)
    for axes in subsets((*root, *free)):
        if set(axes) & set(root):
            yield Broadcast(axes)
    for axes in subsets(free):
        yield ToPartial(axes, kind)
        yield ToPartial(axes, "root")


def groups(mesh: Mesh) -> list[tuple[str, ...]]:
    """Every set of prime sub-axes that spans at most half of the mesh."""
    names = tuple(a.name for a in mesh.atoms)
    return [g for g in subsets(names) if 2 * math.prod(mesh.span(a).size for a in g) <= mesh.size]


TYPED, PORTABLE, ALL = range(3)  # no Exchange, no cutting Permute; Exchange over at most half of the devices; any


def dijkstra(start: int, goal: int, out: Callable[[int, float], Iterator[tuple[int, float]]]) -> float:
    """The least cost of any path; inf if there is none. `out` says where one leads on from a state, and at what cost.

    Costs never fall on the way.
    """
    best = {start: 0.0}
    queue = [(0.0, start)]
    while queue:
        cost, k = heapq.heappop(queue)
        if k == goal:
            return cost
        if cost > best[k]:
            continue
        for to, total in out(k, cost):
            if total < best.get(to, math.inf) - 1e-12:
                best[to] = total
                heapq.heappush(queue, (total, to))
    return math.inf


class Graph:
    """All types and ops over one array and mesh, priced once; `cheapest` asks within a bound and a set of moves."""

    def __init__(self, t: TensorType, marks: Marks = (frozenset(), frozenset())) -> None:
        self.types = all_types(t, marks)
        self.even = [u for u in self.types if u.all_even]
        self.index = {u: k for k, u in enumerate(self.types)}
        self.groups = groups(t.mesh)
        self.edges: dict[int, set[tuple[int, int, int, int]]] = {}

    def ops(self, t: TensorType) -> Iterator[tuple[int, Op]]:
        """Every op that is tried on `t`, with the least set of moves that has it."""
        for op in plain_ops(t):
            yield TYPED, op
        for u in self.types:
            if u == t:
                continue
            yield TYPED if u.local_bytes() == t.local_bytes() else PORTABLE, Permute(u.layout)
            yield ALL, Exchange(u.layout)
            # In a group some holders are missing, so that the others send more.
            small = (Exchange(u.layout, axes) for axes in self.groups)
            yield from ((PORTABLE, op) for op in small if self._legal(op, t))

    @staticmethod
    def _legal(op: Op, t: TensorType) -> bool:
        try:
            op.infer(t)
        except ShardplanError:
            return False
        return True

    def out(self, k: int) -> set[tuple[int, int, int, int]]:
        """Every (type, bytes, rounds, set of moves) of one op from type `k`."""
        if k not in self.edges:
            found: set[tuple[int, int, int, int]] = set()
            t = self.types[k]
            for moves, op in self.ops(t):
                try:
                    (u,) = op.infer(t)
                except ShardplanError:
                    continue
                to = self.index.get(u)
                if to is not None and to != k:
                    found.add((to, moved(op, t), op.rounds(t), moves))
            self.edges[k] = found
        return self.edges[k]

    def cheapest(self, s: TensorType, t: TensorType, bound: int, moves: int = ALL, even: bool = False) -> float:
        """The cost of the cheapest sequence of ops through types of at most `bound` local bytes; inf if there is none.

        `even` leaves out the types with an uneven dim.
        """

        def out(k: int, cost: float) -> Iterator[tuple[int, float]]:
            for to, nbytes, rounds, least in self.out(k):
                u = self.types[to]
                if least <= moves and u.local_bytes() <= bound and (u.all_even or not even):
                    yield to, cost + nbytes + ROUND_CHARGE * bound * rounds

        return dijkstra(self.index[s], self.index[t], out)


class Cut(NamedTuple):
    """One op from a type to another, with what its staging is by the number of chunks."""

    to: int
    moved: int
    rounds: int
    stage: Staging


class CutGraph:
    """A graph whose ops come in chunks: the least workspace of any path, and the cheapest path under a limit."""

    def __init__(self, graph: Graph) -> None:
        """Stage every op of the graph."""
        self.graph = graph
        self.edges: list[list[Cut]] = []
        for t in graph.types:
            found: list[Cut] = []
            for _, op in graph.ops(t):
                try:
                    (u,) = op.infer(t)
                except ShardplanError:
                    continue
                if u in graph.index and u != t:
                    stage = Staging.of(op, (t,), t.local_bytes() + u.local_bytes())
                    found.append(Cut(graph.index[u], moved(op, t), op.rounds(t), stage))
            self.edges.append(found)

    def least(self, s: TensorType, t: TensorType, bound: int, most: float) -> float:
        """The least that any path needs with at most `most` chunks a step."""

        def out(k: int, cost: float) -> Iterator[tuple[int, float]]:
            for e in self.edges[k]:
                if self.graph.types[e.to].local_bytes() <= bound:
                    yield e.to, max(cost, e.stage.base + e.stage.staged(e.stage.chunks(0, most)))

        return dijkstra(self.graph.index[s], self.graph.index[t], out)

    def cheapest(self, s: TensorType, t: TensorType, bound: int, limit: int, most: float) -> float:
        """The charged bytes of the cheapest path that keeps the limit; a chunk is a round."""

        def out(k: int, cost: float) -> Iterator[tuple[int, float]]:
            for e in self.edges[k]:
                chunks = e.stage.chunks(limit, most)
                fits = e.stage.base + e.stage.staged(chunks) <= limit
                if fits and self.graph.types[e.to].local_bytes() <= bound:
                    yield e.to, cost + e.moved + ROUND_CHARGE * bound * e.rounds * chunks

        return dijkstra(self.graph.index[s], self.graph.index[t], out)
