"""Parts of a partition by hand: ops in other forms, what moves ahead of a layer, where an axis is, what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.nested import as_nested
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.layers import Softmax
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.strategy.partition.alternatives import _place
from shardplan.strategy.partition.decomposition import decompose_refused
from shardplan.strategy.partition.prefetch import prefetched
from shardplan.strategy.partition.problem import ValueSource
from shardplan.strategy.partition.settle import _kept


@dataclass(frozen=True)
class Sharpened(Composed):
    """A softmax of a softmax: an op that is composed of composed ones."""

    name: ClassVar[str] = "sharpened"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Both over dim 1."""
        return (d(Softmax(1), d(Softmax(1), "0")),)


def test_what_is_refused_is_opened_however_deep_it_lies() -> None:
    t = TensorType("f32", (3, 5), ((), ()), Mesh(device=1))
    program = Program([("x", t)], [Step(Sharpened(), ("x",), ("y",))], ["y"])
    once, parts = decompose_refused(program, {}, lambda step, *_: isinstance(step.op, Sharpened))
    assert [type(step.op) for step in once.steps] == [Softmax, Softmax] and parts == set(once.steps)
    whole, parts = decompose_refused(program, {}, lambda *_: True)
    assert not any(isinstance(step.op, Composed) for step in whole.steps) and parts == set(whole.steps)
    x = np.random.default_rng(0).normal(size=t.shape).astype(np.float32)
    wanted = np.exp(np.exp(x) / np.exp(x).sum(1, keepdims=True))
    wanted /= wanted.sum(1, keepdims=True)
    for each in (program, once, whole):
        np.testing.assert_allclose(run_reference(each, [[x]])[0][0], wanted, rtol=1e-5)


BODY = """program
  mesh t=2
  input %x: f32[4@t, 8]
  input %w: f32[3, 8@t, 8]
  %y = repeat(%x, %w; n=3, carried=1, sliced=1) {
    input %a: f32[4@t, 8]
    input %b: f32[8@t, 8]
    %0, %1 = all_gather(%a, %b; dim=0, axes=(t)): f32[4, 8]; f32[8, 8]
    %2 = einsum(%0, %1; spec="bi,io->bo"): f32[4, 8]
    %3 = slice(%2; dim=0, axes=(t)): f32[4@t, 8]
    output %3
  }: f32[4@t, 8]
  output %y"""


def test_what_a_layer_moves_with_what_is_carried_stays_there() -> None:
    """A gather of a row of weights alone runs ahead; one that takes along what the layer before made cannot."""
    apart = BODY.replace(
        "%0, %1 = all_gather(%a, %b; dim=0, axes=(t)): f32[4, 8]; f32[8, 8]",
        "%0 = all_gather(%a; dim=0, axes=(t)): f32[4, 8]\n    %1 = all_gather(%b; dim=0, axes=(t)): f32[8, 8]",
    )
    rng = np.random.default_rng(0)
    for text, ahead in ((BODY, 0), (apart, 1)):
        program = Program.parse(text)
        found = prefetched(program, ("w",))
        op = as_nested(found.steps[0].op)
        assert op is not None and op.ahead == ahead
        given = [[rng.normal(size=t.local_shape(k)).astype(np.float32) for k in range(2)] for t in program.input_types]
        for x, y in zip(run_reference(found, given)[0], run_reference(program, given)[0], strict=True):
            np.testing.assert_array_equal(x, y)


def test_an_axis_moves_where_it_changes_its_place_in_a_dim() -> None:
    mesh = Mesh(a=2, b=2, c=2)
    places = {
        text: [_place(TensorType.parse(text, mesh), axis) for axis in "abc"]
        for text in ("f32[8@(a,b), 8]", "f32[8@(b,a), 8]", "f32[8@a, 8@b]", "f32[8@a, 8]{+b}")
    }
    first, turned, apart, partial = places.values()
    assert [x == y for x, y in zip(first, turned, strict=True)] == [False, False, True]
    assert [x == y for x, y in zip(first, apart, strict=True)] == [False, False, True]
    assert [x == y for x, y in zip(apart, partial, strict=True)] == [True, False, True]


def test_what_is_made_as_a_sum_is_kept_as_what_it_becomes() -> None:
    """For the backward pass, which wants it whole: the forward pass has it in halves; what is no sum is as made."""
    mesh = Mesh(t=2)
    halves, whole, addends = (TensorType.parse(text, mesh) for text in ("f32[8@t]", "f32[8]", "f32[8]{+t}"))
    for made, wanted, kept in (
        (addends, whole, whole),
        (addends, halves, halves),  # which the forward pass has
        (halves, halves, halves),
        (halves, whole, halves),
    ):
        maker, early, late = (cast(Any, object()) for _ in range(3))
        source = ValueSource(maker, 0)
        uses: Any = [SimpleNamespace(maker=user, source=source, operand=0) for user in (early, late)]
        now: Any = {
            maker: SimpleNamespace(made=(made,)),
            early: SimpleNamespace(wanted=(halves,)),
            late: SimpleNamespace(wanted=(wanted,)),
        }
        problem: Any = SimpleNamespace(uses=uses, late=uses[1:])
        assert _kept(problem, now) == {source: (kept,)}
