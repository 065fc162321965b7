"""What a settlement pays: the seconds of an op on its worst device, and of laying a value out anew."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op
from shardplan.core.ops import AllGather, AllToAll, Exchange, ReduceScatter, Slice
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.plans.nominal import DEVICE
from shardplan.plans.pricing import fabric_of

Types = tuple[TensorType, ...]


def with_default_device(where: Topology | Placement) -> Topology | Placement:
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
    sets: dict[tuple[TensorType, Types], np.ndarray] = field(
        default_factory=dict[tuple[TensorType, "tuple[TensorType, ...]"], np.ndarray]
    )

    def op(self, op: Op, operands: Types) -> float:
        """Return the seconds of one op."""
        found = self.ops.get((op, operands))
        if found is None:
            found = self.ops[op, operands] = seconds(op.pattern(*operands), self.fabric)
        return found

    def move(self, made: TensorType, wanted: TensorType) -> float:
        """Return the seconds of a movement, infinite where none is legal: nothing becomes partial."""
        found = self.moves.get((made, wanted))
        if found is None:
            found = self.moves[made, wanted] = 0.0 if made == wanted else self._move(made, wanted)
        return found

    def _move(self, made: TensorType, wanted: TensorType) -> float:
        """The seconds of the plain steps, or of those by parts where these take less."""
        return min(self._written(made, wanted, axis) for axis in (None, *common_axes(made, wanted)))

    def _written(self, made: TensorType, wanted: TensorType, axis: str | None) -> float:
        builder = ProgramBuilder.of([made])
        name = moved(builder, "0", wanted) if axis is None else moved_by_parts(builder, "0", wanted, axis)
        if name is None:
            return math.inf
        types = builder.types
        return sum(self.op(step.op, tuple(types[o] for o in step.operands)) for step in builder.steps)

    def all_of(self, made: TensorType, kinds: Types) -> np.ndarray:
        """Return the least seconds to have a value in every set of types, float64 [sets]: a type has a bit.

        Each is moved from the one made or from one before.
        """
        found = self.sets.get((made, kinds))
        if found is None:
            found = self.sets[made, kinds] = self._all_of(made, kinds)
        return found

    def _all_of(self, made: TensorType, kinds: Types) -> np.ndarray:
        move = [[self.move(t, u) for u in kinds] for t in (*kinds, made)]
        out = np.full(1 << len(kinds), math.inf)
        out[0] = 0.0
        for chosen in range(1, len(out)):
            for k in range(len(kinds)):
                if chosen >> k & 1:
                    rest = chosen ^ 1 << k
                    sources = [move[-1][k], *(move[j][k] for j in range(len(kinds)) if rest >> j & 1)]
                    out[chosen] = min(out[chosen], out[rest] + min(sources))
        return out


@lru_cache(maxsize=8)
def prices_on(where: Topology | Placement, meshes: tuple[Mesh, ...]) -> Prices:
    """Return the prices for ids of these meshes, remembered: strategies that differ otherwise ask for the same.

    Raises `TopologyError` for an id that is not there.
    """
    return Prices(fabric_of(with_default_device(where), meshes))


def moved(builder: ProgramBuilder, name: str, wanted: TensorType) -> str | None:
    """Write the plain steps from a value of the builder to one of another type, None where it would have to be partial.

    Sums are scattered where the dims want it, then dims are cut, exchanged and gathered.
    """
    mesh = wanted.mesh
    keeps, made = set(mesh.expand(wanted.layout.partial)), builder.types[name].layout
    if not keeps <= set(mesh.expand(made.partial)) or (keeps and made.reduction != wanted.layout.reduction):
        return None
    for d in range(wanted.ndim):
        t = builder.types[name]
        before, after = t.atoms[d], wanted.atoms[d]
        new = after[len(before) :]
        if new and after[: len(before)] == before and set(new) <= set(mesh.expand(t.layout.partial)) - keeps:
            name = builder(ReduceScatter(d, mesh.fold(new), t.layout.reduction or "sum"), name)
    name = builder.reduce_axes(
        name, mesh.fold(tuple(sorted(set(mesh.expand(builder.types[name].layout.partial)) - keeps)))
    )
    t = builder.types[name]
    changed = [d for d in range(t.ndim) if t.atoms[d] != wanted.atoms[d]]
    lost = {
        d: t.atoms[d][len(wanted.atoms[d]) :] for d in changed if t.atoms[d][: len(wanted.atoms[d])] == wanted.atoms[d]
    }
    new = {d: wanted.atoms[d][len(t.atoms[d]) :] for d in changed if wanted.atoms[d][: len(t.atoms[d])] == t.atoms[d]}
    if len(lost) + len(new) < len(changed):
        return builder(Exchange(Layout(wanted.layout.dims, t.layout.partial, t.layout.reduction)), name)
    for a, run in list(lost.items()):
        b = next((b for b, order in new.items() if set(order) == set(run)), None)
        if b is not None:
            order = new.pop(b)
            del lost[a]
            name = builder(AllToAll(a, b, mesh.fold(run), mesh.fold(order) if order != run else ()), name)
    gathered = {a for run in lost.values() for a in run}
    if gathered & {a for run in new.values() for a in run}:  # an axis that changes its dim with others that do not
        return builder(Exchange(Layout(wanted.layout.dims, t.layout.partial, t.layout.reduction)), name)
    for d, run in new.items():
        name = builder(Slice(d, mesh.fold(run)), name)
    for d, run in lost.items():
        name = builder(AllGather(d, mesh.fold(run)), name)
    return name


def common_axes(made: TensorType, wanted: TensorType) -> tuple[str, ...]:
    """Return the axes over which both types have copies, or the first is a sum and the other has copies of it."""
    if made == wanted or made.layout.root or wanted.layout.root:
        return ()
    cut = {a for t in (made, wanted) for dim in t.layout.dims for a in dim}
    return tuple(a for a in made.mesh.axes if a not in cut.union(wanted.layout.partial))


def moved_by_parts(builder: ProgramBuilder, name: str, wanted: TensorType, axis: str) -> str | None:
    """Write the steps that move a part on each device of one of `common_axes`, and gather these behind.

    Where links of the axis are faster than others, those carry each byte once: so frameworks send tokens to experts,
    each device of a tensor group its part (Megatron-Core's dispatchers). None where no dim divides, or `moved` says so.
    """
    made, size = builder.types[name], wanted.mesh.span(axis).size
    shapes = [t.local_shape(0) for t in (made, wanted)]
    legal = [d for d in range(made.ndim) if all(shape[d] and shape[d] % size == 0 for shape in shapes)]
    if not legal:
        return None
    d = max(legal, key=lambda d: (not made.atoms[d] and not wanted.atoms[d], min(shape[d] for shape in shapes)))
    if axis not in made.layout.partial:
        name = builder(Slice(d, (axis,)), name)
    dims = tuple((*axes, axis) if k == d else axes for k, axes in enumerate(wanted.layout.dims))
    parts = moved(builder, name, wanted.with_layout(replace(wanted.layout, dims=dims)))
    return None if parts is None else moved(builder, parts, wanted)
