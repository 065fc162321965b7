"""Moves between meshes: disjoint, overlapping, or the same devices in another order.

`Send` lets every device of the destination mesh fetch what it lacks. Around it: partial sources reduce first (scattered
where that is possible, so that each addend travels once); the send may carry smaller tiles that the destination mesh
gathers behind it; and where the destination mesh can name the source's boxes, the send moves nothing (it relabels) and
the whole move is planned on one mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Op, ReduceScatter, Send, ToPartial
from shardplan.core.tensor import TensorType, same
from shardplan.errors import LayoutError
from shardplan.movement.redistribution.candidates import Candidate

# Smaller tiles to try on the destination mesh: three free axes on two dims make 18, so most are tried.
# Each is a candidate that is typed and priced.
MOST_TILES = 24
# Free axes that a smaller tile adds: three of four on three dims alone would make 108 tiles.
_MOST_ADDED = 2
# Ways to settle a partial source, scatters before the all-reduce: the tiles are tried for each.
_MOST_SETTLED = 3
Planner = Callable[[TensorType, TensorType], Iterator[Candidate]]


def relabel(s: TensorType, mesh: Mesh) -> TensorType | None:
    """Return the type on `mesh` that has the boxes of `s` on every device (by id), or None if no axes name them.

    An atom of one mesh is one of the other where the devices, in the order of their ids, have equal digits along both.
    """
    if s.mesh.size != mesh.size or set(s.mesh.devices) != set(mesh.devices) or not s.all_even:
        return None
    ours, theirs = np.argsort(s.mesh.ids), np.argsort(mesh.ids)

    def digits(m: Mesh, order: np.ndarray) -> list[bytes]:
        """Of every atom the digits of the devices, in this order; bytes, so that they can be looked up."""
        places = np.arange(m.size)
        return [(places // a.stride % a.size)[order].tobytes() for a in m.atoms]

    table = {d: atom for atom, d in enumerate(digits(mesh, theirs))}
    match = [table.get(d) for d in digits(s.mesh, ours)]
    named = set(s.mesh.expand(s.layout.used))
    if any(match[a] is None for a in named):
        return None

    def names(group: tuple[str, ...]) -> tuple[str, ...]:
        return mesh.fold(tuple(k for a in s.mesh.expand(group) if (k := match[a]) is not None))

    layout = Layout(
        tuple(names(d) for d in s.layout.dims),
        tuple(sorted(names(s.layout.partial))),
        s.layout.reduction,
        tuple(sorted(names(s.layout.root))),
    )
    try:
        return s.with_layout(layout, mesh)
    except LayoutError:
        return None


def _settled(s: TensorType) -> list[tuple[list[Op], TensorType]]:
    """Ways to make `s` neither partial nor rooted: reduce-scatter into any dim that divides, or all-reduce."""
    ops: list[Op] = []
    current = s
    if s.mesh.expand(s.layout.root):  # root axes of size 1 say nothing
        ops.append(Broadcast(s.layout.root))
        current = ops[-1].infer(current)[0]
    if not s.layout.partial:
        return [([], s)] if not ops else [([], s), (ops, current)]
    reduction = s.layout.reduction or "sum"
    q = math.prod(s.mesh.span(a).size for a in s.layout.partial)
    ways: list[tuple[list[Op], TensorType]] = []
    for d in range(s.ndim):
        if s.even[d] and s.local_shape()[d] % q == 0:
            op = ReduceScatter(d, s.layout.partial, reduction)
            ways.append(([*ops, op], op.infer(current)[0]))
    op = AllReduce(s.layout.partial, reduction)
    ways.append(([*ops, op], op.infer(current)[0]))
    return ways[:_MOST_SETTLED]


def _tiles(t: TensorType) -> Iterator[tuple[TensorType, list[Op]]]:
    """Yield types on the mesh of `t` with smaller tiles, and the gather that leads from each to `t`.

    First those with one free axis added, then those with two: the gather undoes little of what the send saved.
    """
    free = [a for a in t.mesh.axes if t.mesh.span(a).size > 1 and a not in t.layout.used]
    free = [a for a in free if not set(t.mesh.expand(t.layout.used)) & set(t.mesh.span(a).atoms)]
    found = 0
    for count in range(1, min(len(free), _MOST_ADDED) + 1):
        for axes in itertools.combinations(free, count):
            for dims in itertools.product(range(t.ndim), repeat=count):
                layout = t.layout
                for d, a in zip(dims, axes, strict=True):
                    grown = tuple((*x, a) if k == d else x for k, x in enumerate(layout.dims))
                    layout = replace(layout, dims=grown)
                try:
                    u = t.with_layout(layout)
                except LayoutError:
                    continue
                if u.all_even and found < MOST_TILES:
                    found += 1
                    order = sorted(range(count), key=lambda k: dims[k])
                    each = tuple(dims[k] for k in order)  # one dim for every axis
                    gather = AllGather(each[0] if len(set(each)) == 1 else each, tuple(axes[k] for k in order))
                    yield u, [gather]


def crossings(s: TensorType, t: TensorType, plan: Planner) -> Iterator[Candidate]:
    """Yield candidates from `s` to `t` on another mesh; `plan` yields candidates on one mesh.

    First what relabels and is planned on one mesh, the destination's, then the source's; then, for every way to settle
    the source, the send of the destination's own tiles, and of smaller ones with a gather behind.
    """
    plain = t.with_layout(replace(t.layout, partial=(), reduction=None, root=()))
    tail: list[Op] = []
    if t.layout.partial:
        tail.append(ToPartial(t.layout.partial, t.layout.reduction or "sum"))
    if t.layout.root:
        tail.append(ToPartial(t.layout.root, "root"))
    moved = relabel(s, t.mesh) if not (s.layout.partial or s.layout.root) else None
    if moved is not None:
        send = Send(moved.layout, t.mesh)
        for candidate in plan(moved, t):
            yield Candidate((send, *candidate.ops))
    back = relabel(plain, s.mesh) if not tail else None
    if back is not None:
        for candidate in plan(s, back):
            yield Candidate((*candidate.ops, Send(plain.layout, t.mesh)))
    for head, ready in _settled(s):
        if same(ready, plain):
            yield Candidate((*head, *tail))
        yield Candidate((*head, Send(plain.layout, t.mesh), *tail))
        for tile, gather in _tiles(plain):
            yield Candidate((*head, Send(tile.layout, t.mesh), *gather, *tail))
