"""From two types on one mesh to a state graph over units, and back.

A unit is a run of prime sub-axes of one axis. Sub-axes that stand together in both types may form one unit; they are
cut further, down to primes, while the graph stays small. Axes of an uneven dim, and partial or root axes, stay as
whole as the types allow: nested ceilings do not refine, and reductions are searched on the given factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh, primes
from shardplan.core.tensor import TensorType
from shardplan.movement.redistribution.space import Space, space

T = TypeVar("T")
Run = tuple[int, ...]  # consecutive atoms of one axis
MOST_UNITS = {0: 8, 1: 6, 2: 6, 3: 5, 4: 5}


@dataclass(frozen=True)
class Problem:
    """A source and a destination on one mesh, over units."""

    source: TensorType
    target: TensorType
    units: tuple[Run, ...]
    rigid: tuple[bool, ...]  # a whole axis: legal on an uneven dim
    fine: bool  # every unit is a prime, or may not be cut: the graph holds every type
    fixed: tuple[Run, ...] = ()  # per dim, leading atoms that both types share and the graph leaves in place

    @cached_property
    def graph(self) -> Space:
        """The state graph."""
        masks = [0, 0]
        for t in (self.source, self.target):
            for k, names in enumerate((t.layout.partial, t.layout.root)):
                atoms = set(t.mesh.expand(names))
                masks[k] |= sum(1 << u for u, run in enumerate(self.units) if set(run) & atoms)
        atoms = self.source.mesh.atoms
        sizes = tuple(math.prod(atoms[a].size for a in run) for run in self.units)
        return space(sizes, self.source.ndim, self.source.mesh.size, *masks)

    @property
    def nbytes(self) -> float:
        """Bytes of the part of the array that a size of 1 in the graph stands for."""
        atoms = self.source.mesh.atoms
        return self.source.nbytes / math.prod(atoms[a].size for run in self.fixed for a in run)

    @property
    def countable(self) -> bool:
        """Whether the graph's rounds are exact: with one prime, every box meets equally many tiles."""
        return len({p for size in self.graph.sizes for p in primes(size)}) <= 1

    def node(self, t: TensorType) -> int:
        """Return the state of a type made of whole units."""
        start = {run[0]: u for u, run in enumerate(self.units)}
        dims: list[tuple[int, ...]] = []
        for atoms in t.atoms:
            dims.append(tuple(start[a] for a in atoms if a in start))
        masks = [
            sum(1 << u for u, run in enumerate(self.units) if run[0] in set(t.mesh.expand(names)))
            for names in (t.layout.partial, t.layout.root)
        ]
        return self.graph.find(tuple(dims), *masks)

    def atoms(self, node: int) -> tuple[Run, ...]:
        """Return the atoms of every dim of a state."""
        graph = self.graph
        fixed = self.fixed or ((),) * self.source.ndim
        return tuple(
            (*first, *(a for u in graph.lists[i] for a in self.units[u]))
            for first, i in zip(fixed, graph.types[node], strict=True)
        )

    def atoms_of(self, mask: int) -> Run:
        """Return the atoms of a set of units, in mesh order."""
        return tuple(sorted(a for u, run in enumerate(self.units) if mask >> u & 1 for a in run))

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

    def legal(self, bound: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which states are types of this shape with local bytes of at most `bound`, and which of them are even.

        Two bool arrays [states].
        """
        graph = self.graph
        rigid = sum(1 << u for u, r in enumerate(self.rigid) if r)
        ok, tiled = np.ones(len(graph.types), dtype=bool), np.ones(len(graph.types), dtype=bool)
        local = np.full(len(graph.types), float(self.source.itemsize))
        for d, n in enumerate(self.source.shape):
            if self.fixed:
                n //= math.prod(self.source.mesh.atoms[a].size for a in self.fixed[d])
            products = graph.list_product
            even = n % products == 0
            whole = (graph.list_mask & ~rigid) == 0
            ids = graph.types[:, d]
            chunk = np.where(even, n // products, 0)
            if not even.all():
                for i in np.flatnonzero(~even & whole):
                    size = n
                    for u in graph.lists[i]:
                        size = -(-size // graph.sizes[u])
                    chunk[i] = size
                ok &= (even | whole)[ids]
                tiled &= even[ids]
            local = local * chunk[ids]
        ok &= local <= bound * (1 + 1e-12)
        return ok, ok & tiled


def problem(source: TensorType, target: TensorType) -> Problem | None:
    """Return the problem over units, or None when the two types interleave more runs than a graph can hold."""
    mesh = source.mesh
    neighbours = [_neighbours(t) for t in (source, target)]
    stiff: set[int] = set()
    for t in (source, target):
        stiff |= set(mesh.expand((*t.layout.partial, *t.layout.root)))
    uneven = {d for t in (source, target) for d, e in enumerate(t.even) if not e}
    whole: set[int] = set()
    for t in (source, target):
        for d in uneven:
            whole |= set(t.atoms[d])
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
    cuttable = [not set(run) & (whole | stiff) for run in natural]
    used = set(mesh.expand((*source.layout.used, *target.layout.used)))
    most = MOST_UNITS.get(source.ndim, 4)
    busy = [r for r in natural if set(r) & used]
    fixed: tuple[Run, ...] = ()
    if len(busy) > most:
        fixed = tuple(common(a, b) if e and f else () for a, b, e, f in _pairs(source, target))
        standing = {a for run in fixed for a in run}
        busy = [r for r in busy if not set(r) & standing]
    if len(busy) > most:
        return None
    idle = sorted((r for r in natural if not set(r) & used), key=lambda r: -_product(mesh, r))
    units = busy + idle[: max(0, most - len(busy))]
    fine = len(units) == len(natural)
    may = dict(zip(natural, cuttable, strict=True))
    while True:
        long = [r for r in units if len(r) > 1 and may.get(r, True)]
        if not long:
            break
        if len(units) >= most:
            fine = False
            break
        widest = max(long, key=lambda r: (_product(mesh, r), -r[0]))
        at = len(widest) // 2
        k = units.index(widest)
        units[k : k + 1] = [widest[:at], widest[at:]]
    units.sort()
    rigid = tuple(any(run == mesh.span(a).atoms for a in mesh.axes) for run in units)
    return Problem(source, target, tuple(units), rigid, fine and not fixed, fixed)


def _pairs(s: TensorType, t: TensorType) -> Iterator[tuple[Run, Run, bool, bool]]:
    return zip(s.atoms, t.atoms, s.even, t.even, strict=True)


def common(a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    """Return the common prefix of two lists."""
    n = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def _product(mesh: Mesh, run: Run) -> int:
    return math.prod(mesh.atoms[a].size for a in run)


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
