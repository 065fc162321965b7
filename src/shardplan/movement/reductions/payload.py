"""The payload of a reduction as a type, and reduction programs as typed ops on it.

A device's payload, padded to a multiple of the K members, is viewed as `[h_0, .., h_(L-1), c]`: one dim a factor, so
that each can be scattered and gathered in any order, and the rest. `f32[2, 8, 100]{+data.node,+data.gpu}` is to become
`f32[2, 8, 100]`. The mesh is `Placement.mesh_split()`: sub-axes are the placement's. Every group reduces a payload of
its own, so the last dim is sharded over the axes that are not reduced: `f32[2, 8, 400@tensor]{+data.node,+data.gpu}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Op, Reduce, ReduceScatter, ToPartial
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.hardware.level_factors import LevelFactor, checked_axes, factors
from shardplan.hardware.placement import Placement
from shardplan.movement.reductions.instructions import Instruction
from shardplan.movement.reductions.type_graph import State, TypeEdge, step_state


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

    def state(self, t: TensorType) -> State | None:
        """Return the letters of a type on this mesh and shape, or None where it is no such type."""
        if t.mesh != self.mesh or t.shape != self.shape or t.dtype != self.dtype:
            return None
        letters = ""
        for d, f in enumerate(self.factors):
            atoms = t.mesh.expand(f.axes)
            if t.atoms[d] == atoms:
                letters += "S"
            elif set(atoms) <= set(t.mesh.expand(t.layout.partial)):
                letters += "P"
            elif set(atoms) <= set(t.mesh.expand(t.layout.root)):
                letters += "R"
            else:
                letters += "U"
        reduction = t.layout.reduction in (None, self.reduction)
        return letters if reduction and self.type(letters).layout == t.layout else None

    def op(self, instruction: Instruction) -> Op:
        """Return the typed op of an instruction."""
        varies = instruction.grouping.varies
        axes = tuple(a for d in varies for a in self.factors[d].axes)
        each = tuple(d for d in varies for _ in self.factors[d].axes)
        dims = each[0] if len(set(each)) == 1 else each
        match instruction.collective:
            case "all_reduce":
                return AllReduce(axes, self.reduction)
            case "reduce_scatter":
                return ReduceScatter(dims, axes, self.reduction)
            case "all_gather":
                return AllGather(dims, axes)
            case "reduce":
                return Reduce(axes, self.reduction)
            case "broadcast":
                return Broadcast(axes)
            case other:
                raise LayoutError(f"{other!r} is no collective of the reduction language")

    def _step_ops(self, before: State, entered: State, instruction: Instruction) -> list[Op]:
        """The op that enters the Master form, if that is needed, and that of the instruction."""
        new = [a for f, x, y in zip(self.factors, before, entered, strict=True) if x != y for a in f.axes]
        return [*([ToPartial(tuple(new), "root")] if new else []), self.op(instruction)]

    def path_ops(self, path: Iterable[TypeEdge]) -> list[Op]:
        """Return the ops along a path of types."""
        return [op for e in path for op in self._step_ops(e.source, e.entered, e.instruction)]

    def instruction_ops(self, program: Sequence[Instruction]) -> list[Op] | None:
        """Return the ops of an instruction list, or None where it does not type: a device would read an old value."""
        state, ops = "P" * len(self.factors), list[Op]()
        for instruction in program:
            step = step_state(state, instruction)
            if step is None:
                return None
            ops += self._step_ops(state, step[0], instruction)
            state = step[1]
        return ops if set(state) <= {"U"} else None


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


def recognise(source: TensorType, target: TensorType, placement: Placement) -> tuple[Payload, State, State] | None:
    """Read two types as a reduction of a payload: its states before and after; None where they are none.

    At least one factor is partial or root in the source, and the shape is `[h_0, .., h_(L-1), c]` of the axes that are
    partial, root, or on the leading dims; the last dim has the same axes on both ends.
    """
    if source.mesh != placement.mesh_split() or not (source.layout.partial or source.layout.root):
        return None
    others = source.layout.dims[-1] if source.ndim else ()
    used = {a.partition(".")[0] for t in (source, target) for a in t.layout.used} - set(others)
    axes = tuple(a for a, n in zip(placement.mesh.axes, placement.mesh.sizes, strict=True) if a in used and n > 1)
    if not axes:
        return None
    for uncollapsed in (False, True):
        found = factors(placement, axes, uncollapsed)
        if source.shape[:-1] != tuple(f.size for f in found):
            continue
        kind = source.layout.reduction or target.layout.reduction or "sum"
        view = Payload(found, source.mesh, source.dtype, source.shape, others, kind)
        before, after = view.state(source), view.state(target)
        if before is not None and after is not None:
            return view, before, after
    return None
