"""Moves between meshes: disjoint, overlapping, or the same devices in another order.

`Send` lets every device of the destination mesh fetch what it lacks. Around it: partial sources reduce first (scattered
where that is possible, so that each addend travels once); the send may carry smaller tiles that the destination mesh
gathers behind it; and where the destination mesh can name the source's boxes, the send moves nothing (it relabels) and
the whole move is planned on one mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.messages import message_count
from shardplan.core.ops import AllReduce, Broadcast, Exchange, Op, ReduceScatter, Send, ToPartial
from shardplan.core.tensor import TensorType, same
from shardplan.errors import LayoutError, TypingError
from shardplan.hardware.prices.cost import Fabric
from shardplan.movement.batches.idle_peers import relayed_ops
from shardplan.movement.batches.tiles import digits_by_id, tiles, with_split_axes
from shardplan.movement.redistribution.candidates import Candidate

# Messages of a move on one mesh for which tiles and relays are sought.
MOST_NEAR = 1 << 14
# Dims into which a partial source is scattered, beside the all-reduce: the tiles are tried for each.
_MOST_SCATTERED = 2
Planner = Callable[[TensorType, TensorType], Iterator[Candidate]]


def relabel(s: TensorType, mesh: Mesh) -> TensorType | None:
    """Return the type on `mesh` that has the boxes of `s` on every device (by id), or None if no axes name them.

    `s` is neither partial nor at a root. An atom of one mesh is one of the other where the devices, in the order of
    their ids, have equal digits along both.
    """
    if s.mesh.size != mesh.size or set(s.mesh.devices) != set(mesh.devices) or not s.all_even:
        return None
    ours, theirs = digits_by_id(s.mesh), {d: atom for atom, d in enumerate(digits_by_id(mesh))}
    if any(ours[a] not in theirs for run in s.atoms for a in run):
        return None
    return s.with_layout(Layout(tuple(mesh.fold(tuple(theirs[ours[a]] for a in run)) for run in s.atoms)), mesh)


def reduce_fully(s: TensorType) -> list[tuple[list[Op], TensorType]]:
    """Ways to make `s` neither partial nor rooted: reduce-scatter, best into a dim that divides, or all-reduce."""
    ops: list[Op] = []
    current = s
    if s.mesh.expand(s.layout.root):  # root axes of size 1 say nothing
        ops.append(Broadcast(s.layout.root))
        current = ops[-1].infer(current)[0]
    if not s.layout.partial:
        return [([], s)] if not ops else [([], s), (ops, current)]
    reduction = s.layout.reduction or "sum"
    q = math.prod(s.mesh.span(a).size for a in s.layout.partial)
    long = [d for d in range(s.ndim) if s.local_shape()[d] >= q]
    dims = sorted(long, key=lambda d: not (s.even[d] and s.local_shape()[d] % q == 0))[:_MOST_SCATTERED]
    found: list[tuple[list[Op], TensorType]] = []
    for op in (*(ReduceScatter(d, s.layout.partial, reduction) for d in dims), AllReduce(s.layout.partial, reduction)):
        try:
            found.append(([*ops, op], op.infer(current)[0]))
        except (LayoutError, TypingError):  # an uneven dim takes whole axes only
            continue
    return found


def crossings(
    s: TensorType, t: TensorType, first: Planner, later: Planner, fabric: Fabric | None
) -> Iterator[Candidate]:
    """Yield candidates from `s` to `t` on another mesh; `first` yields those on one mesh from `s`, `later` others.

    First what relabels and is planned on one mesh, the destination's, then the source's; then, for every way to settle
    the source, the send of the destination's own tiles, and of smaller ones with gathers behind.
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
        for candidate in later(moved, t):
            yield Candidate((send, *candidate.ops))
    back = relabel(plain, s.mesh) if not tail else None
    if back is not None:
        for candidate in first(s, back):
            yield Candidate((*candidate.ops, Send(plain.layout, t.mesh)))
    for head, ready in reduce_fully(s):
        if same(ready, plain):
            yield Candidate((*head, *tail))
        for tile in tiles(ready, plain, fabric):
            for ops in ((Send(tile.type.layout, t.mesh),), relayed_ops(ready, tile.type, fabric)):
                if ops:
                    yield Candidate((*head, *ops, *tile.gathers, *tail))
        for ops in _split_moves(ready, plain, fabric):
            yield Candidate((*head, *ops, *([Send(plain.layout, plain.mesh), *tail] if tail else ())))


def _split_moves(s: TensorType, t: TensorType, fabric: Fabric | None) -> Iterator[tuple[Op, ...]]:
    """Yield sends to uneven smaller tiles over factors of the axes that are free, and the gathers behind."""
    free = math.prod(a.size for k, a in enumerate(t.mesh.atoms) if k not in set(t.mesh.expand(t.layout.used_axes)))
    if all(n % free == 0 for n in t.local_shape()) or (split := with_split_axes(t)) is None:
        return
    for tile in tiles(s, split, fabric):
        if tile.gathers and not tile.type.all_even:
            yield (Send(tile.type.layout, tile.type.mesh), *tile.gathers)


def near_moves(s: TensorType, t: TensorType, fabric: Fabric) -> Iterator[Candidate]:
    """Yield exchanges on one mesh from near holders, to smaller tiles with gathers behind, and over idle peers."""
    if any(x.layout.partial or x.layout.root for x in (s, t)) or message_count(s, t) > MOST_NEAR:
        return
    for tile in tiles(s, t, fabric):
        for ops in ((Exchange(tile.type.layout),), relayed_ops(s, tile.type, fabric)):
            if ops:
                yield Candidate((*ops, *tile.gathers))
    yield from map(Candidate, _split_moves(s, t, fabric))
