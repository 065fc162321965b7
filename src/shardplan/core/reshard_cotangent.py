"""The gradient of a move is a move: that of the cotangent to where the operand lay, chosen by the types alone."""

from __future__ import annotations

from shardplan.core.layout import Layout
from shardplan.core.ops.general import Exchange, Send
from shardplan.core.ops.movement import AllGather, AllToAll, Slice
from shardplan.core.ops.reduction import ReduceScatter
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


def reshard_cotangent(builder: ProgramBuilder, name: str, t: TensorType, op: str) -> str:
    """Return a cotangent of what an op made of a value of type `t` as one of that value.

    Over axes that `t` names it is not partial any more: hence of an all-reduce the identity, of an all-gather a slice
    or, of a partial cotangent, a reduce-scatter.
    """
    u = builder.types[name]
    if t.layout.root or u.layout.root or t.layout.boxes or u.layout.boxes or t.layout.reduction not in (None, "sum"):
        raise TypingError(f"{op} of {t} has no gradient; legal are values on all devices, whole, sharded or sums")
    if u.mesh != t.mesh:
        return builder(Send(Layout(t.layout.dims), t.mesh), builder.reduce_axes(name, u.layout.partial))
    partial = set(t.mesh.expand(u.layout.partial))
    for d, (before, after) in enumerate(zip(u.atoms, t.atoms, strict=True)):
        new = after[len(before) :]
        if new and after[: len(before)] == before and set(new) <= partial:
            name = builder(ReduceScatter(d, t.mesh.fold(new)), name)
    name = builder.reduce_axes(name, t.layout.used_axes)
    u = builder.types[name]
    changed = [d for d in range(t.ndim) if u.atoms[d] != t.atoms[d]]
    lost = {d: u.atoms[d][len(t.atoms[d]) :] for d in changed if u.atoms[d][: len(t.atoms[d])] == t.atoms[d]}
    new = {d: t.atoms[d][len(u.atoms[d]) :] for d in changed if t.atoms[d][: len(u.atoms[d])] == u.atoms[d]}
    if len(lost) == len(new) == 1 and len(changed) == 2 and set(*lost.values()) == set(*new.values()):
        ((a, run), (b, order)) = (*lost.items(), *new.items())
        return builder(AllToAll(a, b, t.mesh.fold(run), t.mesh.fold(order) if order != run else ()), name)
    if len(lost) == len(changed) or len(new) == len(changed):
        for d in changed:
            name = builder(AllGather(d, t.mesh.fold(lost[d])) if lost else Slice(d, t.mesh.fold(new[d])), name)
        return name
    return builder(Exchange(Layout(t.layout.dims, u.layout.partial, u.layout.reduction)), name)
