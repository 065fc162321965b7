"""What a settlement pays: the seconds of an op on its worst device, and of laying a value out anew."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from shardplan.core.draft import Draft
from shardplan.core.layout import Layout
from shardplan.core.op import Op
from shardplan.core.ops import AllGather, AllToAll, Exchange, ReduceScatter, Slice
from shardplan.core.tensor import TensorType
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.plans.nominal import DEVICE

Types = tuple[TensorType, ...]


def working(where: Topology | Placement) -> Topology | Placement:
    """Return hardware on which work takes time: what its device does not state is the nominal one's.

    Where work were free, every device would do all of it rather than move a byte.
    """
    topology = where.topology if isinstance(where, Placement) else where
    flops, bandwidth = topology.device.flops, topology.device.memory_bandwidth
    rates = bandwidth if math.isfinite(bandwidth) else DEVICE.memory_bandwidth
    topology = replace(topology, device=replace(topology.device, flops=flops or DEVICE.flops, memory_bandwidth=rates))
    return replace(where, topology=topology) if isinstance(where, Placement) else topology


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds on a fabric, remembered."""

    fabric: Fabric
    ops: dict[tuple[Op, Types], float] = field(default_factory=dict[tuple[Op, Types], float])
    moves: dict[tuple[TensorType, TensorType], float] = field(
        default_factory=dict[tuple[TensorType, TensorType], float]
    )

    def op(self, op: Op, operands: Types) -> float:
        """Return the seconds of one op."""
        key = op, operands
        if key not in self.ops:
            self.ops[key] = seconds(op.pattern(*operands), self.fabric)
        return self.ops[key]

    def move(self, made: TensorType, wanted: TensorType) -> float:
        """Return the seconds of a movement, infinite where none is legal: nothing becomes partial."""
        if made == wanted:
            return 0.0
        key = made, wanted
        if key not in self.moves:
            draft = Draft.of([made])
            legal = moved(draft, "0", wanted) is not None
            types = draft.types
            self.moves[key] = (
                sum(self.op(step.op, tuple(types[o] for o in step.operands)) for step in draft.steps)
                if legal
                else math.inf
            )
        return self.moves[key]


def moved(draft: Draft, name: str, wanted: TensorType) -> str | None:
    """Write the plain steps from a value of the draft to one of another type, None where it would have to be partial.

    Sums are scattered where the dims want it, then dims are cut, exchanged and gathered.
    """
    mesh = wanted.mesh
    keeps, made = set(mesh.expand(wanted.layout.partial)), draft.types[name].layout
    if not keeps <= set(mesh.expand(made.partial)) or (keeps and made.reduction != wanted.layout.reduction):
        return None
    for d in range(wanted.ndim):
        t = draft.types[name]
        before, after = t.atoms[d], wanted.atoms[d]
        new = after[len(before) :]
        if new and after[: len(before)] == before and set(new) <= set(mesh.expand(t.layout.partial)) - keeps:
            name = draft(ReduceScatter(d, mesh.fold(new), t.layout.reduction or "sum"), name)
    name = draft.reduced(name, mesh.fold(tuple(sorted(set(mesh.expand(draft.types[name].layout.partial)) - keeps))))
    t = draft.types[name]
    changed = [d for d in range(t.ndim) if t.atoms[d] != wanted.atoms[d]]
    lost = {
        d: t.atoms[d][len(wanted.atoms[d]) :] for d in changed if t.atoms[d][: len(wanted.atoms[d])] == wanted.atoms[d]
    }
    new = {d: wanted.atoms[d][len(t.atoms[d]) :] for d in changed if wanted.atoms[d][: len(t.atoms[d])] == t.atoms[d]}
    if len(lost) + len(new) < len(changed):
        return draft(Exchange(Layout(wanted.layout.dims, t.layout.partial, t.layout.reduction)), name)
    for a, run in list(lost.items()):
        b = next((b for b, order in new.items() if set(order) == set(run)), None)
        if b is not None:
            order = new.pop(b)
            del lost[a]
            name = draft(AllToAll(a, b, mesh.fold(run), mesh.fold(order) if order != run else ()), name)
    gathered = {a for run in lost.values() for a in run}
    if gathered & {a for run in new.values() for a in run}:  # an axis that changes its dim with others that do not
        return draft(Exchange(Layout(wanted.layout.dims, t.layout.partial, t.layout.reduction)), name)
    for d, run in new.items():
        name = draft(Slice(d, mesh.fold(run)), name)
    for d, run in lost.items():
        name = draft(AllGather(d, mesh.fold(run)), name)
    return name
