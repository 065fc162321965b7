"""The payload of a reduction as a type, and reduction programs as typed ops on it.

A device's payload, padded to a multiple of the K members, is viewed as `[h_0, .., h_(L-1), c]`: one dim a factor, so
that each can be scattered and gathered in any order, and the rest. `f32[2, 8, 100]{+data.node,+data.gpu}` is to become
`f32[2, 8, 100]`. The mesh is `Placement.mesh_split()`: sub-axes are the placement's. Every group reduces a payload of
its own, so the last dim is sharded over the axes that are not reduced: `f32[2, 8, 400@tensor]{+data.node,+data.gpu}`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Op, Reduce, ReduceScatter, ToPartial
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.hardware.level_factors import LevelFactor, checked_axes, factors
from shardplan.hardware.placement import Placement
from shardplan.movement.reductions.instructions import Instruction
from shardplan.movement.reductions.type_graph import State, TypeEdge, step_state

Atoms = tuple[int, ...]  # of a mesh


@dataclass(frozen=True, slots=True)
class Payload:
    """What is reduced: the factors of the reduced axes, outermost first, and what makes a type of them."""

    factors: tuple[LevelFactor, ...]
    mesh: Mesh
    dtype: str
    shape: tuple[int, ...]  # the sizes of the factors, and the rest
    others: tuple[str, ...] = ()  # axes that are not reduced, on the last dim
    reduction: str = "sum"

    @property
    def nbytes(self) -> int:
        """Bytes of a device's payload, with its padding."""
        return self.type("U" * len(self.factors)).local_bytes()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the factors."""
        return tuple(f.size for f in self.factors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the factors."""
        return tuple(f.name for f in self.factors)

    def type(self, state: State) -> TensorType:
        """Return the type in which each factor is as its letter says."""
        held = {letter: [f for f, x in zip(self.factors, state, strict=True) if x == letter] for letter in "PR"}
        dims = tuple(f.axes if x == "S" else () for f, x in zip(self.factors, state, strict=True))
        partial = {a: self.reduction for f in held["P"] for a in f.axes}
        root = tuple(a for f in held["R"] for a in f.axes)
        return TensorType(self.dtype, self.shape, (*dims, self.others), self.mesh, partial=partial, root=root)

    def op(self, instruction: Instruction) -> Op:
        """Return the typed op of an instruction."""
        return typed_op(instruction, self.mesh, self._atoms, self._homes, self.reduction)

    @property
    def _atoms(self) -> tuple[Atoms, ...]:
        return tuple(self.mesh.expand(f.axes) for f in self.factors)

    @property
    def _homes(self) -> dict[int, int]:
        return {a: d for d, atoms in enumerate(self._atoms) for a in atoms}

    def path_ops(self, path: Iterable[TypeEdge]) -> list[Op]:
        """Return the ops along a path of types."""
        return [op for edge in path for op in edge_ops(edge, self.mesh, self._atoms, self._homes, self.reduction)]

    def instruction_ops(self, program: Sequence[Instruction]) -> list[Op] | None:
        """Return the ops of an instruction list, or None where it does not type: a device would read an old value."""
        path: list[TypeEdge] = []
        state = "P" * len(self.factors)
        for instruction in program:
            step = step_state(state, instruction)
            if step is None:
                return None
            path.append(TypeEdge(state, *step, instruction))
            state = step[1]
        return self.path_ops(path) if set(state) <= {"U"} else None


def edge_ops(
    edge: TypeEdge,
    mesh: Mesh,
    atoms: Sequence[Atoms],
    homes: Mapping[int, int],
    reduction: str,
    order: Sequence[int] = (),
) -> list[Op]:
    """Return the op of an edge, behind the one that enters the Master form where that is needed; see `typed_op`."""
    new = [a for run, x, y in zip(atoms, edge.source, edge.entered, strict=True) if x != y for a in run]
    root = [ToPartial(mesh.fold(tuple(new)), "root")] if new else []
    return [*root, typed_op(edge.instruction, mesh, atoms, homes, reduction, order)]


def typed_op(
    instruction: Instruction,
    mesh: Mesh,
    atoms: Sequence[Atoms],
    homes: Mapping[int, int],
    reduction: str,
    order: Sequence[int] = (),
) -> Op:
    """Return the typed op of an instruction.

    `atoms` are those of each factor, `homes` says on which dim an atom is scattered. Members are ordered as the factors
    are; atoms in `order` come in that order.
    """
    varied = [a for d in instruction.grouping.varies for a in atoms[d]]
    if set(varied) <= set(order):
        varied.sort(key=order.index)
    runs = [(d, tuple(run)) for d, run in itertools.groupby(varied, key=lambda a: homes.get(a, 0))]
    each = [(d, name) for d, run in runs for name in mesh.fold(run)]
    dims = each[0][0] if len(runs) == 1 else tuple(d for d, _ in each)
    axes, names = mesh.fold(tuple(varied)), tuple(name for _, name in each)
    match instruction.collective:
        case "all_reduce":
            return AllReduce(axes, reduction)
        case "reduce_scatter":
            return ReduceScatter(dims, names, reduction)
        case "all_gather":
            return AllGather(dims, names)
        case "reduce":
            return Reduce(axes, reduction)
        case "broadcast":
            return Broadcast(axes)
        case other:
            raise LayoutError(f"{other!r} is no collective of the reduction language")


def payload(
    placement: Placement, axes: str | Sequence[str], nbytes: float, dtype: str = "f32", uncollapsed: bool = False
) -> Payload:
    """Return the payload of a reduction over some axes of a placement, as a type.

    `nbytes` is what a device holds, padded to a whole number of elements for each of the K parts; `uncollapsed` has one
    factor for each sub-axis, instead of one for each level.

    Raises:
        TopologyError: An axis is unknown or named twice.
        LayoutError: `nbytes` is not above 0.
    """
    if not (nbytes > 0 and math.isfinite(nbytes)):
        raise LayoutError(f"a reduction of {nbytes:g} bytes: the payload of a device is above 0 bytes")
    found = factors(placement, axes, uncollapsed)
    sizes = tuple(f.size for f in found)
    mesh = placement.mesh_split()
    rest = max(1, math.ceil(nbytes / (TensorType(dtype, (), (), mesh).itemsize * math.prod(sizes))))
    asked = checked_axes(placement, axes)
    others = tuple(a for a, n in zip(mesh.axes, mesh.sizes, strict=True) if a not in asked and n > 1)
    groups = math.prod(mesh.span(a).size for a in others)
    return Payload(found, mesh, dtype, (*sizes, rest * groups), others)
