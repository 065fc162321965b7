"""Numbers that rules of formulas know, from both sides, in each dtype; modules in f64: `test_importers_constants`.

In f32 and narrower floats a number may have been rounded to f32 on its way, in f64 it has ten digits; what others know
(0, 1, a half, an exponent, a number of rows) they know exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tests.canonical.form import canonical
from tests.canonical.normal_expression import normal

from shardplan.core.attention_pattern import AttentionRule
from shardplan.core.composite_patterns import close_composites
from shardplan.core.dim_names import dim_names
from shardplan.core.expression import Expression
from shardplan.core.expression_tree import CUBIC, GELU_EXACT
from shardplan.core.layout import Layout
from shardplan.core.namespace import NUMPY
from shardplan.core.op import Op
from shardplan.core.ops import Attention, Cast, Constant, Einsum, Elementwise, Gather, ReduceDims, RmsNorm, Softmax
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.core.resizing import Sizes, counted_means, resize_dims
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

ROUNDED = 2.0**-22  # four roundings to f32
CLOSE = {"f64": 1e-10, "f32": ROUNDED, "f16": ROUNDED, "bf16": ROUNDED}


def program(dtype: str, write: Callable[[ProgramBuilder], str], **shapes: tuple[int, ...]) -> Program:
    d = ProgramBuilder({n: TensorType.parse(f"{dtype}{[*s]}", "x=1") for n, s in shapes.items()})
    y = write(d)
    return Program({n: d.types[n] for n in shapes}, d.steps, (y,))


def gelu(dtype: str, number: float, text: str) -> Program:
    return program(dtype, lambda d: d(Elementwise(text.format(number)), "x"), x=(2, 3))


def rms(dtype: str, number: float) -> Program:
    def write(d: ProgramBuilder) -> str:
        total = d(ReduceDims((1,), keep=True), d(Elementwise("a * a"), "x"))
        return d(Elementwise(f"a * rsqrt(b * {number!r} + 0.1) * c"), "x", total, "g")

    return program(dtype, write, x=(2, 3), g=(3,))


def mean(dtype: str, number: float) -> Program:
    def write(d: ProgramBuilder) -> str:
        return d(Elementwise(f"a * {number!r}"), d(ReduceDims((1,)), "x"))

    return program(dtype, write, x=(2, 3))


def attention(dtype: str, number: float) -> Program:
    def write(d: ProgramBuilder) -> str:
        scores = d(Elementwise(f"a * {number!r}"), d(Einsum("bgsd,bgtd->bgst"), "q", "k"))
        return d(Einsum("bgst,bgtd->bgsd"), d(Softmax(3), scores), "v")

    return program(dtype, write, q=(2, 2, 3, 5), k=(2, 2, 4, 5), v=(2, 2, 4, 5))


TANH = "0.5 * a * (1 + tanh(0.7978845608028654 * (a + 0.044715 * a ** 3)))"
KNOWN: list[tuple[str, Callable[[str, float], Program], float, Op]] = [
    ("cubic", lambda t, c: gelu(t, c, TANH.replace("0.044715", "{!r}")), CUBIC, Elementwise("gelu(a)")),
    ("root", lambda t, c: gelu(t, c, TANH.replace("0.7978845608028654", "{!r}")), math.sqrt(2 / math.pi),
     Elementwise("gelu(a)")),
    ("half root", lambda t, c: gelu(t, c, "0.5 * a * (1 + erf({!r} * a))"), math.sqrt(0.5), Elementwise(GELU_EXACT)),
    ("inverse count", rms, 1 / 3, RmsNorm(0.1)),
    ("mean", mean, 1 / 3, ReduceDims((1,), "mean")),
    ("scale", attention, 5**-0.5, Attention(causal=False)),
]  # fmt: skip


def simplified(flat: Program) -> Program:
    return counted_means(close_composites(flat, AttentionRule()))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("name", "write", "exact", "known"), KNOWN, ids=[row[0] for row in KNOWN])
def test_a_rounded_number_from_both_sides(
    name: str, write: Callable[[str, float], Program], exact: float, known: Op, dtype: str
) -> None:
    close = CLOSE[dtype]
    for off in (0.0, 0.7 * close, -0.7 * close):
        assert known in [s.op for s in simplified(write(dtype, exact * (1 + off))).steps], off
    for off in (1.5 * close, -1.5 * close, 1e-5, 1e-3, -0.06, 0.5):
        assert known not in [s.op for s in simplified(write(dtype, exact * (1 + off))).steps], off


def test_a_number_of_f32_is_known_in_f32_alone() -> None:
    for _, write, exact, known in KNOWN:
        number = float(str(np.float32(exact)))
        assert known in [s.op for s in simplified(write("f32", number)).steps]
        if number != exact:
            assert (known in [s.op for s in simplified(write("f64", number)).steps]) == (
                abs(number / exact - 1) < 1e-10
            )


def test_a_constant_that_is_widened_is_what_its_dtype_made_of_it() -> None:
    for value, known in ((0.5, True), (0.1, False), (math.sqrt(0.5), False)):

        def write(d: ProgramBuilder, value: float = value) -> str:
            root = d(Cast("f64"), d(Constant(value, "f32", (), Layout(()), d.types["x"].mesh)))
            return d(Elementwise("a * rsqrt(b + c) * d"), "x", d(ReduceDims((1,), "mean", keep=True),
                     d(Elementwise("a * a"), "x")), root, "g")  # fmt: skip

        flat = program("f64", write, x=(2, 3), g=(3,))
        found = close_composites(flat, AttentionRule())
        assert (RmsNorm(value) in [s.op for s in found.steps]) == known
        given = [[np.random.default_rng(k).normal(size=t.shape)] for k, t in enumerate(flat.input_types)]
        assert np.abs(run_reference(found, given)[0][0] - run_reference(flat, given)[0][0]).max() <= 1e-12


@pytest.mark.parametrize(
    ("text", "exact", "form"),
    [
        ("a ** {}", 1, "a"),
        ("a ** {}", 2, "a * a"),
        ("a ** {}", 3, "a * a * a"),
        ("a ** {}", 0.5, "sqrt(a)"),
        ("a ** {}", -0.5, "rsqrt(a)"),
        ("a ** {}", -1, "1 / a"),
        ("a / ({} + exp(-b))", 1, "sigmoid(b) * a"),
        ("a * sigmoid({} * a)", 1, "silu(a)"),
        ("maximum(a, {})", 0, "relu(a)"),
        ("{} * a", 1, "a"),
        ("a + {}", 0, "a"),
    ],
)
def test_a_number_of_a_normal_form_is_exact(text: str, exact: float, form: str) -> None:
    def of(number: float) -> tuple[str, np.ndarray, np.ndarray]:
        root = Expression.parse(text.format(number)).root
        found = normal(root, {"a": "one", "b": "two"}, True)
        values = [np.asarray([0.3, 1.2]), np.asarray([0.7, -0.1])]
        both = [Expression(x).evaluate(NUMPY, values[: Expression(x).arity], np.dtype("f8")) for x in (root, found)]
        return str(Expression(found)), np.asarray(both[0]), np.asarray(both[1])

    assert of(exact)[0] == form
    for off in (1e-15, -1e-15, 1e-9, 1e-6, 0.06, -0.5):
        said, wanted, found = of(exact + off * (abs(exact) or 1))
        assert said != form, off
        assert np.abs(found - wanted).max() <= 1e-12


@pytest.mark.parametrize(("more", "bare"), [(6, True), (5, False), (7, False), (-6, False)])
def test_a_wrap_of_ids_is_by_the_number_of_rows(more: int, bare: bool) -> None:
    def write(d: ProgramBuilder) -> str:
        return d(Gather(), "t", d(Elementwise(f"where(a < 0, a + {more}, a)"), "i"))

    t, i = TensorType.parse("f32[6, 3]", "x=1"), TensorType.parse("i32[4]", "x=1")
    d = ProgramBuilder({"t": t, "i": i})
    y = write(d)
    found = canonical(Program({"t": t, "i": i}, d.steps, (y,))).program
    assert ([s.op.name for s in found.steps] == ["gather"]) == bare


@pytest.mark.parametrize(("off", "hides"), [(0.0, True), (0.7 * ROUNDED, True), (1.5 * ROUNDED, False), (1e-3, False)])
def test_a_number_hides_a_size_from_both_sides(off: float, hides: bool) -> None:
    flat = mean("f32", (1 + off) / 3)
    named = dim_names(flat, {"x": ("rows", "columns")})
    sizes = Sizes({"columns": 3}, {"columns": 5})
    if hides:
        with pytest.raises(TypingError, match="hides a size that changes, columns=3"):
            resize_dims(flat, named, sizes)
    else:
        assert resize_dims(flat, named, sizes).inputs[0][1].shape == (2, 5)
