"""What the exports of a reduction program share: the program as moves of arrays over named factors of the mesh.

A reduction program is a chain of reduce-scatters, all-reduces, all-gathers, reduces and broadcasts on one value, from a
sum that is still to be made. The dims before the last are the chunks; the last is cut at most by axes that are not
reduced over, the same in every type, so that a device sees a whole one. Its size is left open: what is exported takes a
payload of any size, and pads it to a multiple of the chunks.

A *factor* is a part of a mesh axis of more than one device (`data.node`), the finest that the program names. Members of
a group are ordered by the op's axes, major to minor. Only devices at coordinate 0 of a move's `masters` take part: what
arXiv 2110.10548 calls Master is here read off the root axes of a type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter, ToPartial
from shardplan.core.ops.movement import by_dim
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.text import op_text
from shardplan.errors import BackendError
from shardplan.hardware.placement import Placement

Shape = tuple[int, ...]
SHOWN = 64  # ranks that a comment lists: a dozen lines at most


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """One collective: on which groups, and how a device's array is cut or joined.

    Of a reduce-scatter `split` is the operand's shape with the members' dims apart, and `turn` the permutation that
    brings these in front, in member order; of an all-gather they are those of the result. Shapes leave out the last
    dim, whose size is open, and which `turn` leaves where it is.
    """

    step: int  # its number in the program
    kind: str  # reduce_scatter, all_reduce, all_gather, reduce or broadcast
    axes: tuple[str, ...]  # factors, major to minor: the order of the members
    size: int  # members of a group
    masters: tuple[str, ...]  # factors at whose coordinate 0 a device must be to take part
    result: Shape  # of a device's array after it
    note: str  # the type after the move
    reduces: bool  # members' arrays are summed
    spreads: bool  # every member has what all have
    split: Shape = ()
    turn: Shape = ()

    @property
    def straight(self) -> bool:
        """Whether the members' parts lie one after the other as they are."""
        return self.turn == tuple(range(len(self.turn)))

    @property
    def members_first_shape(self) -> Shape:
        """The shape with the members' dims in front."""
        return tuple(self.split[k] for k in self.turn)

    @property
    def inverse_turn(self) -> Shape:
        """The permutation that undoes `turn`."""
        return tuple(self.turn.index(k) for k in range(len(self.turn)))

    @property
    def label(self) -> str:
        """The groups in words: `data.node at data.gpu=0`; moves over the same groups have the same."""
        at = f" at {', '.join(f'{name}=0' for name in self.masters)}" if self.masters else ""
        return ", ".join(self.axes) + at


@dataclass(frozen=True, slots=True)
class Recipe:
    """A reduction program, as one device sees it, as moves."""

    program: Program
    factors: tuple[tuple[str, int], ...]  # name and size, in mesh order
    ranks: tuple[int, ...]  # device ids in mesh order, row-major over the factors
    chunks: Shape  # the payload's shape but for its last dim
    reduced: tuple[str, ...]  # factors over which the operand is partial
    differs: tuple[str, ...]  # factors along which the results of two devices may differ
    moves: tuple[RecipeStep, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the factors, in mesh order."""
        return tuple(name for name, _ in self.factors)

    @property
    def sizes(self) -> Shape:
        """The sizes of the factors, in mesh order."""
        return tuple(size for _, size in self.factors)

    @property
    def result(self) -> Shape:
        """The shape of a device's result, but for its last dim."""
        return self.moves[-1].result if self.moves else self.chunks

    def groups(self, move: RecipeStep) -> list[tuple[int, ...]]:
        """Return the groups that take part in a move: ranks in member order."""
        at = [self.names.index(name) for name in move.axes]
        array = np.asarray(self.ranks).reshape(self.sizes)
        array = array[tuple(slice(1) if name in move.masters else slice(None) for name in self.names)]
        rest = [k for k in range(array.ndim) if k not in at]
        return [tuple(row) for row in array.transpose([*rest, *at]).reshape(-1, move.size).tolist()]


def recipe(program: Program, placement: Placement | None = None) -> Recipe:
    """Return the moves of a reduction program; steps that move nothing have none.

    The program goes from one type, partial with a sum and otherwise whole, to one type; its last dim stays whole. The
    ranks are those of the placement, where one is given: see `ranks_of`.

    Raises:
        BackendError: Another op or another reduction than a sum, a step that is no next link of the chain, a payload
            whose chunks are uneven, or whose last dim is cut by what is reduced over.

    Source: arXiv 2110.10548, section 4; a form is read off the types.

    >>> from shardplan.core.step import Step
    >>> mesh = Mesh(data=4).split("data", node=2, gpu=2)
    >>> t = TensorType("f32", (2, 2, 5), (), mesh, partial={"data": "sum"})
    >>> p = Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",))
    >>> recipe(p).moves[0].axes, recipe(p).groups(recipe(p).moves[0])
    (('data.node', 'data.gpu'), [(0, 1, 2, 3)])
    """
    if len(program.inputs) != 1 or len(program.outputs) != 1:
        raise BackendError(
            f"export: the program has {len(program.inputs)} inputs and {len(program.outputs)} outputs; legal is one of "
            f"each"
        )
    program = _own_payloads(program)
    (value, t) = program.inputs[0]
    if any(t.layout.dims) or t.layout.root or t.layout.reduction != "sum":
        raise BackendError(f"export: the program starts from {t}; legal is a whole payload that is partial with a sum")
    for u in program.types.values():
        if not u.all_even or not u.ndim or u.atoms[-1]:
            raise BackendError(
                f"export: {u} on the mesh {u.mesh}: legal is a payload [chunks, ..., c] whose chunks are cut evenly, "
                f"and whose last dim is never cut"
            )
    factors = _factors(program)
    moves: list[RecipeStep] = []
    for number, step in enumerate(program.steps):
        where = f"export: step {number} ({op_text(step.op, step.operands)})"
        if step.operands != (value,):
            raise BackendError(f"{where} does not read %{value}, the value before it; legal is a chain of one value")
        (value,) = step.results
        (t,), (u,) = program.step_types(step)
        moves += _moves(number, step.op, t, u, factors, where)
    if program.outputs != (value,):
        raise BackendError(f"export: the output is %{program.outputs[0]}; legal is the last value, %{value}")
    mesh = program.input_types[0].mesh
    reduced = _factor_names(factors, mesh.expand(program.input_types[0].layout.partial))
    used = _factor_names(factors, mesh.expand(program.output_types[0].layout.used_axes))
    return Recipe(
        program,
        tuple((name, math.prod(mesh.atoms[a].size for a in atoms)) for name, atoms in factors.items()),
        ranks_of(mesh, placement),
        program.input_types[0].shape[:-1],
        reduced,
        tuple(name for name in factors if name not in reduced or name in used),
        tuple(moves),
    )


def ranks_of(mesh: Mesh, placement: Placement | None) -> tuple[int, ...]:
    """Return the rank of every place of a mesh.

    Device ids are ranks. Those of a mesh without an order of its own only number its places: with a placement its
    ranks are the devices of the topology on which these lie, counted level by level, as launchers count.
    """
    if placement is None or not mesh.devices == placement.mesh.devices == tuple(range(mesh.size)):
        return mesh.devices
    return tuple(placement.position()[: mesh.size].tolist())


def _own_payloads(program: Program) -> Program:
    """Return the program as one device sees it: the last dim without the axes that cut it from beginning to end."""
    (name, t) = program.inputs[0]
    others = t.layout.dims[-1] if t.ndim else ()
    cut = t.mesh.expand(others)
    if not cut or any(u.mesh != t.mesh or not u.ndim or u.atoms[-1] != cut for u in program.types.values()):
        return program
    groups = math.prod(t.mesh.span(a).size for a in others)
    layout = replace(t.layout, dims=(*t.layout.dims[:-1], ()))
    if t.shape[-1] % groups:
        return program
    whole = TensorType(t.dtype, (*t.shape[:-1], t.shape[-1] // groups), layout, t.mesh)
    return Program({name: whole}, program.steps, program.outputs)


Factors = dict[str, tuple[int, ...]]  # by name, the atoms of the mesh, in mesh order


def _factors(program: Program) -> Factors:
    """Name the factors: the parts of the mesh's axes, or, where the program cuts one of them, all prime sub-axes."""
    mesh = program.input_types[0].mesh
    parts = {
        name: mesh.span(name).atoms
        for axis, split in zip(mesh.axes, mesh.parts, strict=True)
        for name in ([part for part, _ in split] or [axis])
    }
    parts = {name: atoms for name, atoms in parts.items() if atoms}
    names = {n for t in program.types.values() for n in t.layout.used_axes}
    names |= {n for step in program.steps for n in step.op.members(program.types[step.operands[0]])}
    whole = set(parts.values())
    for name in names:
        atoms = set(mesh.span(name).atoms)
        if any(atoms & set(p) and not atoms >= set(p) for p in whole):
            return {atom.name: (k,) for k, atom in enumerate(mesh.atoms)}
    return parts


def _factor_names(factors: Factors, atoms: tuple[int, ...]) -> tuple[str, ...]:
    """Return the factors that make up a run of atoms, in order."""
    names: list[str] = []
    while atoms:
        name, own = next((n, own) for n, own in factors.items() if atoms[: len(own)] == own)
        names.append(name)
        atoms = atoms[len(own) :]
    return tuple(names)


def _moves(number: int, op: object, t: TensorType, u: TensorType, factors: Factors, where: str) -> list[RecipeStep]:
    """The move of a step from `t` to `u`, none where it moves nothing; `where` is how an error calls the step."""
    mesh = t.mesh
    if isinstance(op, ToPartial) and op.reduction == "root":
        return []
    if not isinstance(op, ReduceScatter | AllReduce | AllGather | Reduce | Broadcast):
        raise BackendError(
            f"{where}: legal are reduce_scatter, all_reduce, all_gather, reduce, broadcast, and to_partial with root"
        )
    if not isinstance(op, AllGather | Broadcast) and op.reduction != "sum":
        raise BackendError(f"{where}: the reduction is {op.reduction}; legal is sum")
    axes = _factor_names(factors, mesh.expand(op.axes))
    if not axes:
        return []
    size = math.prod(mesh.span(a).size for a in axes)
    masters = _factor_names(factors, mesh.expand((u if isinstance(op, Broadcast) else t).layout.root))
    reduces, spreads = not isinstance(op, AllGather | Broadcast), isinstance(op, AllReduce | AllGather | Broadcast)
    move = RecipeStep(number, op.kind, axes, size, masters, u.local_shape()[:-1], str(u), reduces, spreads)
    if not isinstance(op, ReduceScatter | AllGather):
        return [move]
    split, turn = _cut(op, (t if reduces else u).local_shape()[:-1], axes, factors, mesh)
    return [replace(move, split=split, turn=turn)]


def _cut(
    op: ReduceScatter | AllGather, shape: Shape, axes: tuple[str, ...], factors: Factors, mesh: Mesh
) -> tuple[Shape, Shape]:
    """Split `shape` into members' dims and what is left of each, and say how to bring the members' in front."""
    found = by_dim(op.name, op.dim, op.axes)
    split: list[int] = []
    at: dict[str, int] = {}
    rest: list[int] = []
    for d, n in enumerate(shape):
        for name in _factor_names(factors, mesh.expand(found.get(d, ()))):
            at[name] = len(split)
            split.append(mesh.span(name).size)
            n //= mesh.span(name).size
        if n > 1:
            rest.append(len(split))
            split.append(n)
    return tuple(split), (*(at[name] for name in axes), *rest)


def heading(program: Program, placement: Placement | None) -> list[str]:
    """Return the lines that say what an exported text does: the program, and where its ranks are expected to run."""
    lines = str(program).splitlines()
    if placement is None:
        return lines
    lines += ["", f"Placed as {placement.describe()} on {placement.topology.describe()}."]
    mesh = program.input_types[0].mesh
    where, ranks = placement.position(), ranks_of(mesh, placement)
    held = [(r, int(where[d])) for r, d in zip(ranks, mesh.devices, strict=True) if d < len(where) and where[d] >= 0]
    if all(r == d for r, d in held):
        lines.append("Rank r runs on device r of the topology, counted level by level.")
        if ranks != mesh.devices and len(ranks) <= SHOWN:
            lines.append("Ranks of the mesh, row-major: " + ", ".join(map(str, ranks)))
    elif len(held) <= SHOWN:
        lines.append("Rank: device of the topology, counted level by level: " + ", ".join(f"{r}: {d}" for r, d in held))
    else:
        lines.append("Which device of the topology a rank runs on is `placement.position()`.")
    return lines
