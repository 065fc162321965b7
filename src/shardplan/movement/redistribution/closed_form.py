"""The plan that always exists between even types, without a search.

Per prime p let e_i, f_i be its multiplicity in dim i of source and destination, E and F the sums. The plan has
max(0, F - E) slices, max(0, E - F) gathers and (sum |e_i - f_i| - |F - E|) / 2 moves of one axis between dims, which
turn the source's tile grid into the destination's (or a refinement of it); permutes put axes that must leave behind
those that stay, and the right tiles on the right devices. Local size falls, stays, rises: every intermediate is within
max(source, destination). It is the seed, and the answer where two types interleave more runs than a graph can hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from shardplan.core.ops import AllGather, AllToAll, Op, Permute, Slice
from shardplan.core.tensor import TensorType


class _Leaving(NamedTuple):
    """An axis that moves from one dim to another."""

    atom: int
    source: int
    target: int


def multiplicities(t: TensorType) -> list[Counter[int]]:
    """Return the multiplicity of every prime in every dim."""
    return [Counter(t.mesh.atoms[a].size for a in run) for run in t.atoms]


def closed_form(s: TensorType, t: TensorType) -> list[Op]:
    """Return the ops from `s` to `t`, even types on one mesh with equal partial and root parts."""
    mesh = s.mesh
    size = [a.size for a in mesh.atoms]
    dims = [list(run) for run in s.atoms]
    layout = s.layout
    ops: list[Op] = []
    used = set(mesh.expand((*s.layout.used_axes,)))
    free = [a for a in range(len(size)) if a not in used]
    e, f = multiplicities(s), multiplicities(t)

    def set_dims(runs: list[list[int]]) -> None:
        nonlocal layout
        layout = replace(layout, dims=tuple(mesh.fold(tuple(r)) for r in runs))

    # slices: unused axes of a prime that the destination uses more often
    for p, n in sorted((sum(f, Counter[int]()) - sum(e, Counter[int]())).items()):
        for _ in range(n):
            d = next(i for i in range(s.ndim) if f[i][p] > e[i][p])
            atom = next(a for a in free if size[a] == p)
            free.remove(atom)
            ops.append(Slice(d, mesh.fold((atom,))))
            dims[d].append(atom)
            e[d][p] += 1
    # which axes leave each dim, and where to: the last of a prime first, which need no permute to come to the end
    leaving: list[_Leaving] = []
    for p in sorted({p for c in (*e, *f) for p in c}):
        for d in range(s.ndim):
            need = f[d][p] - e[d][p]
            for _ in range(max(0, need)):
                source = next(i for i in range(s.ndim) if e[i][p] > f[i][p])
                gone = {x.atom for x in leaving}
                atom = next(a for a in reversed(dims[source]) if size[a] == p and a not in gone)
                leaving.append(_Leaving(atom, source, d))
                e[source][p] -= 1
                e[d][p] += 1
    gone = {x.atom for x in leaving}
    ready = [
        [a for a in run if a not in gone] + [x.atom for x in leaving if x.source == d] for d, run in enumerate(dims)
    ]
    if ready != dims:
        set_dims(ready)
        ops.append(Permute(layout))
        dims = ready
    for atom, source, target in reversed(leaving):
        if dims[source][-1] != atom:  # an axis of another prime has arrived behind it
            dims[source].remove(atom)
            dims[source].append(atom)
            set_dims(dims)
            ops.append(Permute(layout))
        ops.append(AllToAll(source, target, mesh.fold((atom,))))
        dims[source].remove(atom)
        dims[target].append(atom)
    # the destination's tiles, each refined by axes that it does not use and that will be gathered
    spare = [a for a in range(len(size)) if a not in set(mesh.expand(t.layout.used_axes))]
    tail: list[list[int]] = []
    for d in range(s.ndim):
        extra: list[int] = []
        for p, n in sorted((Counter(size[a] for a in dims[d]) - f[d]).items()):
            for _ in range(n):
                atom = next((a for a in dims[d] if a in spare and size[a] == p), None)
                atom = next(a for a in spare if size[a] == p) if atom is None else atom
                spare.remove(atom)
                extra.append(atom)
        tail.append(extra)
    final = [list(run) + extra for run, extra in zip(t.atoms, tail, strict=True)]
    if final != dims:
        set_dims(final)
        ops.append(Permute(layout))
    named = {d: mesh.fold(tuple(extra)) for d, extra in enumerate(tail) if extra}
    if named:
        each = tuple(d for d, names in named.items() for _ in names)  # one dim for every axis
        ops.append(AllGather(each[0] if len(named) == 1 else each, tuple(a for names in named.values() for a in names)))
    return ops
