"""Composites that are opened close again, and what is not one stays as it is."""

from __future__ import annotations

import numpy as np
import pytest

from shardplan.core.attention_pattern import AttentionRule
from shardplan.core.composite_patterns import close_composites
from shardplan.core.expression_tree import GELU_EXACT
from shardplan.core.op import Op
from shardplan.core.ops import Attention, Einsum, Elementwise, LayerNorm, ReduceDims, RmsNorm, Softmax
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.tensor import TensorType

X, ROW = (TensorType.parse(t, "x=1") for t in ("f32[2, 3, 8]", "f32[8]"))
Q, K = (TensorType.parse(t, "x=1") for t in ("f32[2, 5, 3, 2, 4]", "f32[2, 5, 3, 4]"))


def written_out(op: Op, *types: TensorType) -> Program:
    compute = computing(op)
    assert compute is not None
    body = compute.decomposition(*types)
    assert body is not None
    return Program({str(k): t for k, t in enumerate(types)}, body.steps, body.results)


def run(program: Program) -> np.ndarray:
    rng = np.random.default_rng(0)
    return run_reference(program, [[rng.normal(size=t.shape).astype("f4")] for t in program.input_types])[0][0]


CASES = [
    (Softmax(2), (X,)),
    (LayerNorm(1e-3), (X, ROW, ROW)),
    (RmsNorm(1e-3), (X, ROW)),
    (Attention(), (Q, K, K)),
    (Attention(causal=False), (Q, K, K)),
    (Attention(scale=0.3), (Q, K, K)),
]


@pytest.mark.parametrize(("op", "types"), CASES, ids=str)
def test_what_is_opened_closes_again(op: Op, types: tuple[TensorType, ...]) -> None:
    flat = written_out(op, *types)
    found = close_composites(flat, AttentionRule())
    assert [str(s.op) for s in found.steps] == [str(op)]
    assert np.allclose(run(found), run(flat), rtol=1e-5, atol=1e-6)


GELU = "0.5 * a * (1 + tanh(0.7978845608028654 * (a + 0.044715 * a ** 3)))"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GELU, "gelu(a)"),
        (GELU.replace("0.044715", "0.05"), None),
        (GELU.replace("0.5 *", "0.6 *"), None),
        ("0.5 * a * (1 + erf(a * 0.7071067811865476))", GELU_EXACT),
        ("a * 0.5 * (erf(a / 1.4142135623730951) + 1)", GELU_EXACT),
        ("0.5 * a * (1 - erf(-a * 0.7071067811865476))", GELU_EXACT),
        ("0.5 * a * (1 - erf(a * 0.7071067811865476))", None),
        ("0.5 * a * (1 + erf(a * 0.7))", None),
        ("a * sigmoid(a)", "silu(a)"),
        ("sigmoid(a) * a", "silu(a)"),
        ("a * sigmoid(2 * a)", None),
    ],
)
def test_formulas_of_elements(text: str, expected: str | None) -> None:
    d = ProgramBuilder({"x": X})
    y = d(Elementwise(text), "x")
    (step,) = close_composites(Program({"x": X}, d.steps, (y,)), AttentionRule()).steps
    assert step.op == Elementwise(expected or text)


def changed(flat: Program, old: str, new: str) -> Program:
    return Program.parse(str(flat).replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("where(a < b, 1, 0)", "where(a <= b, 1, 0)"),  # another mask than the causal one
        ("bgrst,btge->bsgre", "bgrst,bsge->btgre"),  # the values of queries
        ("bgrst,btge->bsgre", "bgrts,btge->bsgre"),  # weights over queries
    ],
)
def test_what_is_not_attention_is_none(old: str, new: str) -> None:
    flat = written_out(Attention(), Q, K, K)
    other = changed(flat, old, new)
    assert str(other) != str(flat)
    found = close_composites(other, AttentionRule())
    assert "attention" not in [s.op.name for s in found.steps]
    assert np.allclose(run(found), run(other), rtol=1e-5, atol=1e-6)


def test_what_is_not_a_norm_is_none() -> None:
    flat = written_out(LayerNorm(), X, ROW, ROW)
    for old, new in (("a * a", "a * a * a"), ("rsqrt(b", "sqrt(b"), ("reduction=mean", "reduction=sum")):
        other = changed(flat, old, new)
        assert [s.op.name for s in close_composites(other, AttentionRule()).steps] == [s.op.name for s in other.steps]


def test_a_difference_from_another_mean_is_no_norm() -> None:
    d = ProgramBuilder({"x": X, "z": X, "g": ROW, "b": ROW})
    c = d(Elementwise("a - b"), "x", d(ReduceDims((2,), "mean", keep=True), "z"))
    square = d(ReduceDims((2,), "mean", keep=True), d(Elementwise("a * a"), c))
    y = d(Elementwise("a * rsqrt(b + 0.1) * c + d"), c, square, "g", "b")
    found = close_composites(Program({"x": X, "z": X, "g": ROW, "b": ROW}, d.steps, (y,)), AttentionRule())
    assert "layer_norm" not in [s.op.name for s in found.steps]


def test_transpositions_are_part_of_the_product_that_reads_them() -> None:
    w = TensorType.parse("f32[8, 5]", "x=1")
    d = ProgramBuilder({"x": X, "w": w})
    y = d(Einsum("abc,bo->cao"), d(Einsum("abc->bca"), "x"), "w")
    flat = Program({"x": X, "w": w}, d.steps, (y,))
    found = close_composites(flat, AttentionRule())
    assert len(found.steps) == 1
    assert np.allclose(run(found), run(flat), rtol=1e-5)
