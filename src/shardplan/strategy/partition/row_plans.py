"""`RowPlans`: movements planned once for stacks that differ in nothing but how many rows of it a stage has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Slice
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.movement.redistribute import redistribute
from shardplan.plans.certificate import issue
from shardplan.plans.plan import Plan

Stack = tuple[str, tuple[int, ...], Layout, Layout, Mesh]  # dtype, the shape of a row, source, destination, mesh


@dataclass(frozen=True, slots=True)
class RowPlans:
    """Plans movements on some hardware; a stack has one of the numbers of `rows`, along a first dim that is whole.

    Stages whose stacks differ in their rows alone, by a third at most, move them in the same ops: a plan serves other
    rows where its ops type there and leave rows whole. Its certificate is then derived when it is asked for, and is no
    word of the planner: the search was of other sizes.
    """

    where: Topology | Placement | None
    rows: frozenset[int]
    known: dict[Stack, Plan] = field(default_factory=dict[Stack, Plan])

    def __call__(self, made: TensorType | Sequence[TensorType], wanted: TensorType | Sequence[TensorType]) -> Plan:
        """Return the plan of a movement, or of a batch."""
        if not isinstance(made, TensorType) or not isinstance(wanted, TensorType):
            return redistribute(made, wanted, self.where)
        # A mesh as large as its topology is planned on each of its placements, of which a certificate names one.
        fills = isinstance(self.where, Topology) and made.mesh.size == self.where.size
        if not fills and (cut := _cut(made, wanted)) is not None:
            program = Program({"0": made}, [Step(cut, ("0",), ("1",))], ("1",))
            return Plan.from_issuer(program, lambda: issue(program, (made,), (wanted,), self.where, None, exact=True))
        if not self._stacked(made, wanted):
            return redistribute(made, wanted, self.where)
        key = made.dtype, made.shape[1:], made.layout, wanted.layout, made.mesh
        first = self.known.get(key)
        again = None if first is None else _again(first, made, wanted)
        if again is None:
            again = redistribute(made, wanted, self.where)
            self.known.setdefault(key, again)
        return again

    def _stacked(self, made: TensorType, wanted: TensorType) -> bool:
        whole = made.ndim > 1 and not made.atoms[0] and not wanted.atoms[0]
        return whole and made.shape[0] in self.rows and made.mesh == wanted.mesh


def _cut(made: TensorType, wanted: TensorType) -> Slice | None:
    """What leads to a type whose one dim is cut further: every device has its part, and nothing is cheaper."""
    changed = [d for d in range(made.ndim) if made.atoms[d] != wanted.atoms[d]]
    if made.mesh != wanted.mesh or len(changed) != 1 or made.layout.partial or made.layout.root or made.layout.boxes:
        return None
    (d,) = changed
    before, after = made.atoms[d], wanted.atoms[d]
    plain = wanted == made.with_layout(Layout(wanted.layout.dims)) and after[: len(before)] == before
    return Slice(d, made.mesh.fold(after[len(before) :])) if plain else None


def _again(plan: Plan, made: TensorType, wanted: TensorType) -> Plan | None:
    """The ops of a plan on a stack of other rows, None where they do not type, or cut the rows."""
    if plan.program.input_types[0] == made:
        return plan
    few, many = sorted((plan.program.input_types[0].shape[0], made.shape[0]))
    if 3 * many > 4 * few or any(t.atoms[0] for t in plan.program.types.values()):
        return None
    steps = [Step(step.op, step.operands, step.results) for step in plan.program.steps]
    try:
        program = Program({plan.program.inputs[0][0]: made}, steps, plan.program.outputs)
    except ShardplanError:
        return None
    if program.output_types != (wanted,):
        return None
    where = plan.certificate.where
    return Plan.from_issuer(program, lambda: issue(program, (made,), (wanted,), where, None, False))
