"""A model of one's own: names that shardplan has never heard, and an op whose class stands here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from shardplan import Layouts, Mesh, Model, Program, Strategy, TensorType, partition
from shardplan.core.factor_rule import FactorRule
from shardplan.core.layout import Layout
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.ops import Einsum, Elementwise, ReduceDims, Repeat
from shardplan.core.ops.compute import At, RuleTypedOp, Size
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.rule_text import rule_of
from shardplan.errors import LayoutError
from strategy.jobs import apart, arrays, by_name, stepped, wrong

TABLES = """
serve
  data: people > free
  tensor: [wishes]
stored
  asked, wanted: people@data
  rounds.*.m, rounds.*.v: free@data
  gradient.*: {+data}
held
  rounds.into, rounds.out, rounds.shift: wishes@tensor
"""


@dataclass(frozen=True, slots=True)
class Bent(RuleTypedOp):
    """x + bend * x^3 + shift, of x `[p w]` and a shift `[w]`."""

    name: ClassVar[str] = "bent"
    bend: float

    def rule(self, *operands: TensorType) -> FactorRule:
        """All dims pass."""
        return rule_of(self.name, "[p w] [w] -> [p w]", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """It is not linear."""
        return False

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Element by element."""
        x, shift = arrays
        return (x + self.bend * x * x * x + shift,)

    def flops(self, *operands: TensorType) -> float:
        """Five an element."""
        return 5.0 * float(np.prod(operands[0].local_shape(0)))

    def gradient(
        self, builder: ProgramBuilder, operands: Sequence[str], results: Sequence[str], cotangents: Sequence[str]
    ) -> Sequence[str | None]:
        """(1 + 3 bend x^2) dy, and the sum of dy over p."""
        x, dy = operands[0], cotangents[0]
        dx = builder(Elementwise(f"(1 + {3 * self.bend} * a * a) * b"), x, dy)
        return [dx, builder(ReduceDims((0,)), dy)]


def own() -> Model:
    """Three rounds of x + bent(x into) out, and a squared error."""
    one, people, taste, wishes = Mesh(), 6, 5, 8
    typed = lambda *shape: TensorType("f64", shape, (), one)  # noqa: E731
    body = ProgramBuilder(
        {"x": typed(people, taste), "in": typed(taste, wishes), "by": typed(wishes), "out": typed(wishes, taste)}
    )
    bent = body(Bent(0.1), body(Einsum("pt,tw->pw"), "x", "in"), "by")
    y = body(Elementwise("a + b"), "x", body(Einsum("pw,wt->pt"), bent, "out"))
    layer = Program([(n, body.types[n]) for n in ("x", "in", "by", "out")], body.steps, (y,))
    stacks = {
        "rounds.into": typed(3, taste, wishes),
        "rounds.shift": typed(3, wishes),
        "rounds.out": typed(3, wishes, taste),
    }
    builder = ProgramBuilder({"asked": typed(people, taste), "wanted": typed(people, taste), **stacks})
    inputs = [(n, t) for n, t in builder.types.items()]
    x = builder(Repeat(3, layer, 1, 3), "asked", *stacks)
    miss = builder(Elementwise("(a - b) ** 2"), x, "wanted")
    (loss,) = builder.write_step(ReduceDims((0, 1), "mean"), miss)
    steps = [s if s.results != (loss,) else type(s)(s.op, s.operands, ("loss",)) for s in builder.steps]
    dims = {
        "asked": ("people", "taste"), "wanted": ("people", "taste"), "rounds.into": ("layer", "taste", "wishes"),
        "rounds.shift": ("layer", "wishes"), "rounds.out": ("layer", "wishes", "taste"),
    }  # fmt: skip
    return Model.of(Program(inputs, steps, ("loss",)), dims, stacks, name="wishes", optimizer="adamw")


def test_it_trains_under_tensor_2_and_data_3() -> None:
    found, strategy = own(), Strategy(data=3, tensor=2, microbatch=2)
    job = partition(found, strategy, layouts=TABLES)
    assert str(job.state["rounds.into"]) == "f64[3, 5, 8@tensor]"
    assert str(job.programs[0, "F"].types["asked"]) == "f64[6@data, 5]"
    here = there = arrays(found, found.program)
    for _ in range(3):
        want, got = by_name(found.program, there), stepped(job, here)
        assert apart(got["loss"], want["loss"]) < 1e-9
        assert all(apart(got[n], want[o]) < 1e-9 for n, o in found.replaced.items())
        here, there = (
            {**here, **{n: got[n] for n in found.replaced}},
            {**there, **{n: want[o] for n, o in found.replaced.items()}},
        )
    moved = [s.op.name for m in job.movements[0, "F"] if m.path for s in m.plan.program.steps]
    assert moved == ["all_reduce"]  # of the product that leaves the wishes


def with_names(found: Model, names: dict[str, str]) -> Model:
    """The same model with other names of parameters, and its people a batch."""
    plain = found.forward or found.program
    steps = [replace(step, operands=tuple(names.get(o, o) for o in step.operands)) for step in plain.steps]
    program = Program([(names.get(n, n), t) for n, t in plain.inputs], steps, plain.outputs)
    dims = {names.get(n, n): tuple("batch" if d == "people" else d for d in found.dims[n]) for n, _ in plain.inputs}
    return Model.of(program, dims, [names.get(n, n) for n in found.parameters], name="renamed", optimizer="adamw")


@pytest.mark.parametrize("strategy", [Strategy(data=3, microbatch=2, zero=1), Strategy(pipeline=3)])
def test_a_parameter_may_be_called_like_a_copy_or_what_is_left_behind(strategy: Strategy) -> None:
    names = {"rounds.into": "rounds.copy.into", "rounds.shift": "rounds.left_behind", "rounds.out": "rounds.copy1"}
    assert wrong(with_names(own(), names), strategy) == []


@pytest.mark.parametrize("name", ["rounds..copy1", "rounds..behind"])
def test_a_name_with_a_mark_of_stages_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=rf"a value called '{name}'; legal are names without \.\.copy and \.\.behind"):
        partition(with_names(own(), {"rounds.into": name}), Strategy(data=3, microbatch=2))


def test_another_name_of_a_dim_changes_nothing_but_the_name() -> None:
    found = own()
    other = TABLES.replace("wishes", "w").replace("people", "p")
    renamed = Model.of(
        found.forward or found.program,
        {
            n: tuple({"wishes": "w", "people": "p"}.get(d, d) for d in found.dims[n])
            for n in ("asked", "wanted", *found.parameters)
        },
        found.parameters,
        name="other",
        optimizer="adamw",
    )
    strategy = Strategy(data=3, tensor=2, microbatch=2)
    one, two = partition(found, strategy, layouts=TABLES), partition(renamed, strategy, layouts=Layouts.parse(other))
    assert [str(p) for p in one.programs.shared] == [str(p) for p in two.programs.shared]
    assert Layout((("data",), ())) == one.programs[0, "F"].types["asked"].layout
