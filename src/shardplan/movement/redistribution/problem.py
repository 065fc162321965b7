"""From two types on one mesh to a state graph over runs, and back.

A run is a sequence of atoms (prime sub-axes) of one axis that the planner does not separate. Atoms that stand together
in both types may form one run; runs are cut further, down to primes, while the graph stays small. Axes of an uneven
dim, and partial or root axes, stay as whole as the types allow: nested ceilings do not refine, and reductions are
searched on the given factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.movement.redistribution.pool import Dims, pool
from shardplan.movement.redistribution.space import Space, space

T = TypeVar("T")
Run = tuple[int, ...]  # consecutive atoms of one axis
# Runs of a graph by the number of dims: it has at most some 12,000 types, and a row of edges takes 2 ms. One run more
# means four to ten times as many types; from 7 on the tables over pairs of lists (13,700 of them) take half a minute.
MOST_RUNS = {0: 8, 1: 6, 2: 6, 3: 5, 4: 5}
_MOST_RUNS_OF_MANY_DIMS = 4
MOST_POOLED = 14  # runs of a pool of types: masks of them have 16 bits
# Local bytes are a product of floats: those that are the bound must not exceed it by a rounding error.
_SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Problem:
    """A source and a destination on one mesh, over runs."""

    source: TensorType
    target: TensorType
    runs: tuple[Run, ...]
    rigid: tuple[bool, ...]  # per run: a whole axis, legal on an uneven dim
    fine: bool  # every run is a prime, or partial or root: the graph holds every type
    fixed: tuple[Run, ...] = ()  # per dim, leading atoms that both types share and the graph leaves in place
    pool: tuple[Dims, ...] = ()  # the types of the graph, where it is not to hold all

    @cached_property
    def graph(self) -> Space:
        """The state graph."""
        masks = [0, 0]
        for t in (self.source, self.target):
            for k, names in enumerate((t.layout.partial, t.layout.root)):
                atoms = set(t.mesh.expand(names))
                masks[k] |= sum(1 << r for r, run in enumerate(self.runs) if set(run) & atoms)
        atoms = self.source.mesh.atoms
        sizes = tuple(math.prod(atoms[a].size for a in run) for run in self.runs)
        if self.pool:
            return Space(sizes, self.source.ndim, self.source.mesh.size, only=self.pool)
        return space(sizes, self.source.ndim, self.source.mesh.size, *masks)

    def pool_around(self, types: Iterable[TensorType]) -> Problem:
        """Return the same problem over the pool around some types of its runs."""
        return replace(self, pool=pool(map(self.lists, types), len(self.runs)))

    @property
    def nbytes(self) -> float:
        """Bytes of the part of the array that a size of 1 in the graph stands for."""
        return self.source.itemsize * math.prod(self.heads)

    @property
    def countable(self) -> bool:
        """Whether the graph's rounds are exact: with one prime, every box meets equally many tiles."""
        return self.graph.alike

    @property
    def heads(self) -> tuple[int, ...]:
        """The shape of that part of the array."""
        atoms = self.source.mesh.atoms
        fixed = self.fixed or ((),) * self.source.ndim
        return tuple(
            n // math.prod(atoms[a].size for a in run) for n, run in zip(self.source.shape, fixed, strict=True)
        )

    @property
    def digits(self) -> np.ndarray:
        """The coordinate of every device along every run, [runs, devices]."""
        places, atoms = np.arange(self.source.mesh.size), self.source.mesh.atoms
        rows = [places // atoms[r[-1]].stride % k for r, k in zip(self.runs, self.graph.sizes, strict=True)]
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(places))

    def lists(self, t: TensorType) -> Dims:
        """Return the runs in every dim of a type made of whole runs."""
        start = {run[0]: r for r, run in enumerate(self.runs)}
        return tuple(tuple(start[a] for a in atoms if a in start) for atoms in t.atoms)

    def node(self, t: TensorType) -> int:
        """Return the state of a type made of whole runs."""
        masks = [
            sum(1 << r for r, run in enumerate(self.runs) if run[0] in set(t.mesh.expand(names)))
            for names in (t.layout.partial, t.layout.root)
        ]
        return self.graph.find(self.lists(t), *masks)

    def atoms(self, node: int) -> tuple[Run, ...]:
        """Return the atoms of every dim of a state."""
        graph = self.graph
        fixed = self.fixed or ((),) * self.source.ndim
        return tuple(
            (*first, *(a for r in graph.lists[i] for a in self.runs[r]))
            for first, i in zip(fixed, graph.types[node], strict=True)
        )

    def atoms_of(self, mask: int) -> Run:
        """Return the atoms of a set of runs, in mesh order."""
        return tuple(sorted(a for r, run in enumerate(self.runs) if mask >> r & 1 for a in run))

    def type(self, node: int) -> TensorType:
        """Return the type of a state."""
        mesh, graph = self.source.mesh, self.graph
        partial, root = int(graph.partial[node]), int(graph.root[node])
        reduction = (self.source.layout.reduction or self.target.layout.reduction) if partial else None
        layout = Layout(
            tuple(mesh.fold(run) for run in self.atoms(node)),
            mesh.fold(self.atoms_of(partial)),
            reduction,
            mesh.fold(self.atoms_of(root)),
        )
        return self.source.with_layout(layout)

    def legal(self, bound: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which states are types of this shape with local bytes of at most `bound`, and which of them are even.

        Two bool arrays [states]; and the elements of a shard along each dim, [states, ndim].
        """
        graph = self.graph
        rigid = sum(1 << r for r, whole in enumerate(self.rigid) if whole)
        ok, tiled = np.ones(len(graph.types), dtype=bool), np.ones(len(graph.types), dtype=bool)
        extents = np.zeros(graph.types.shape)
        for d, n in enumerate(self.heads):
            products = graph.list_product
            even = n % products == 0
            whole = (graph.list_mask & ~rigid) == 0
            ids = graph.types[:, d]
            chunk = np.where(even, n // products, 0)
            if not even.all():  # the tiling rule, list by list: a chunk is a nested ceiling
                for i in np.flatnonzero(~even & whole):
                    size = n
                    for r in graph.lists[i]:
                        size = -(-size // graph.sizes[r])
                    chunk[i] = size
                ok &= (even | whole)[ids]
                tiled &= even[ids]
            extents[:, d] = chunk[ids]
        ok &= extents.prod(axis=1) * self.source.itemsize <= bound * _SLACK
        return ok, ok & tiled, extents


def problem(source: TensorType, target: TensorType, *, cut: bool = True) -> Problem | None:
    """Return the problem over runs, or None where the mesh has too many of them.

    `cut` cuts runs that both types keep together further, as far as a graph can hold.
    """
    mesh, ends = source.mesh, (source, target)
    neighbours = [_neighbours(t) for t in ends]
    stiff = {a for t in ends for a in mesh.expand((*t.layout.partial, *t.layout.root))}
    uneven = {d for t in ends for d, even in enumerate(t.even) if not even}
    whole = {a for t in ends for d in uneven for a in t.atoms[d]}
    # The longest runs that both types keep together, and that an uneven dim does not need as a whole axis.
    natural: list[Run] = []
    for axis in mesh.axes:
        run: list[int] = []
        atoms = mesh.span(axis).atoms
        busy_whole = bool(set(atoms) & whole)
        for a in atoms:
            joined = run and (busy_whole or all(n[run[-1]] == n[a] - 1 or n[run[-1]] == n[a] == -1 for n in neighbours))
            if run and not joined:
                natural.append(tuple(run))
                run = []
            run.append(a)
        if run:
            natural.append(tuple(run))
    used = set(mesh.expand((*source.layout.used_axes, *target.layout.used_axes)))
    most = MOST_RUNS.get(source.ndim, _MOST_RUNS_OF_MANY_DIMS)
    busy = [r for r in natural if set(r) & used]
    fixed: tuple[Run, ...] = ()
    if len(busy) > most:  # what both types have at the head of an even dim may stay where it is
        fixed = tuple(
            common_prefix(source.atoms[d], target.atoms[d]) if d not in uneven else () for d in range(source.ndim)
        )
        standing = {a for run in fixed for a in run}
        busy = [r for r in busy if not set(r) & standing]
    if len(busy) > most:  # all types are too many
        return None if stiff else pool_types(source, target, natural)
    # Unused runs serve a path as room to slice into, the largest best.
    idle = sorted((r for r in natural if not set(r) & used), key=lambda r: (-_product(mesh, r), _stride(mesh, r)))
    runs = busy + idle[: max(0, most - len(busy))]
    fine = len(runs) == len(natural) and not any(len(r) > 1 and set(r) & whole for r in runs)
    while long := [r for r in runs if len(r) > 1 and not set(r) & (whole | stiff)]:
        if not cut or len(runs) >= most:
            fine = False
            break
        widest = max(long, key=lambda r: (_product(mesh, r), -r[0]))
        at = len(widest) // 2
        k = runs.index(widest)
        runs[k : k + 1] = [widest[:at], widest[at:]]
    # One graph serves all orders of the axes and their factors, and a plan does not depend on how a mesh is written.
    where = [{a: (d, k) for d, run in enumerate(t.atoms) for k, a in enumerate(run)} for t in ends]
    nowhere = source.ndim, 0
    runs.sort(key=lambda r: (_product(mesh, r), *(x.get(r[0], nowhere) for x in where), _stride(mesh, r)))
    rigid = tuple(any(run == mesh.span(a).atoms for a in mesh.axes) for run in runs)
    return Problem(source, target, tuple(runs), rigid, fine and not fixed, fixed)


def pool_types(source: TensorType, target: TensorType, natural: Iterable[Run]) -> Problem | None:
    """Return a pool of types over the finest runs that there are, or None where these are too many."""
    mesh, ends = source.mesh, (source, target)
    uneven = {d for t in ends for d, even in enumerate(t.even) if not even}
    whole = {a for t in ends for d in uneven for a in t.atoms[d]}
    primes_fit = len(mesh.atoms) <= MOST_POOLED
    runs = tuple(run for r in natural for run in ([(a,) for a in r] if primes_fit and not set(r) & whole else [r]))
    if len(runs) > MOST_POOLED:
        return None
    rigid = tuple(any(run == mesh.span(a).atoms for a in mesh.axes) for run in runs)
    return Problem(source, target, runs, rigid, False).pool_around(ends)


def common_prefix(a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    """Return the common prefix of two tuples."""
    n = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def _product(mesh: Mesh, run: Run) -> int:
    return math.prod(mesh.atoms[a].size for a in run)


def _stride(mesh: Mesh, run: Run) -> int:
    """How far apart the ids of neighbours along a run are, whichever place its axis has in the mesh."""
    return int(abs(mesh.ids[mesh.atoms[run[-1]].stride] - mesh.ids[0]))


def _neighbours(t: TensorType) -> list[int]:
    """Number the atoms so that two stand side by side in a list exactly when their numbers do; -1 for unused ones."""
    out = [-1] * len(t.mesh.atoms)
    number = 1  # 0 would follow the -1 of an unused atom
    for atoms in t.atoms:
        for a in atoms:
            out[a] = number
            number += 1
        number += 1
    for names in (t.layout.partial, t.layout.root):
        for name in names:
            for a in t.mesh.span(name).atoms:
                out[a] = number
                number += 1
            number += 1
    return out
