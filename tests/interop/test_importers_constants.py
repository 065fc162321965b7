"""Every number that a pattern knows, from both sides: just inside it is known, just outside it stays what it is.

A row of `ROWS` is a module with one number in it, the number that a pattern stands for, how close to it one must be,
and what the program says where it is known. All modules run in f64, and so do the programs made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.canonical.form import canonical
from tests.interop.test_importers_torch import outputs
from torch import Tensor, nn
from torch.nn import functional

from shardplan.core.expression_tree import CUBIC, GELU_EXACT
from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.ops import Attention, Elementwise, LayerNorm, ReduceDims, RmsNorm
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.interop.importers import load
from shardplan.interop.importers.call import eval_number
from shardplan.strategy import Model

DIGITS = 1e-10  # relative, of a number in f64: ten digits
HEAD = 128
ROOT = math.sqrt(2 / math.pi)


class Of(nn.Module):
    """A function of tensors."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, GAIN = (numbers(2, 3, 8),), (numbers(2, 3, 8), numbers(8, seed=1), numbers(8, seed=2))
QKV = tuple(numbers(2, 2, 3, HEAD, seed=k) for k in range(3))


def imported(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Model:
    """The model of a function, which computes what the function does."""
    module = Of(function)
    model = load(torch.export.export(module, inputs))
    (found,) = outputs(model, module, {f"inputs_{k}": x for k, x in enumerate(inputs)})
    wanted = function(*inputs).numpy()
    assert np.abs(found - wanted).max() <= 1e-9 * np.abs(wanted).max()
    form = canonical(model.program, model.constants)
    values = form.values({f"inputs_{k}": x.numpy() for k, x in enumerate(inputs)} | dict(model.constants))
    ((again,),) = run_reference(form.program, [[values[n]] for n, _ in form.program.inputs])
    assert np.abs(again - wanted).max() <= 1e-9 * np.abs(wanted).max()
    return model


def ops(program: Program) -> Iterator[Op]:
    for step in program.steps:
        inner = as_nested(step.op)
        yield from ops(inner.body) if inner is not None else (step.op,)


# The modules.


def scores(change: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return change(q @ k.transpose(-1, -2)).softmax(-1) @ v


def tanh_gelu(x: Tensor, half: float = 0.5, one: float = 1.0, root: float = ROOT, cubic: float = CUBIC,
              power: float = 3) -> Tensor:  # fmt: skip
    return half * x * (one + torch.tanh(root * (x + cubic * x.pow(power))))


def erf_gelu(x: Tensor, half: float = 0.5, one: float = 1.0, root: float = math.sqrt(0.5)) -> Tensor:
    return half * x * (one + torch.erf(root * x))


def rms(x: Tensor, gain: Tensor, eps: float = 1e-5, by: float = 1 / 8, power: float = 2) -> Tensor:
    return x * torch.rsqrt(x.pow(power).sum(-1, keepdim=True) * by + eps) * gain


def layer(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5, by: float = 1 / 8, mean: float = 1 / 8) -> Tensor:
    x = x - x.sum(-1, keepdim=True) * mean
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) * by + eps) * gain + bias


@dataclass(frozen=True)
class Row:
    """A number in a module: `exact` is what a pattern knows, and `close` how far from it, relatively."""

    name: str
    module: Callable[..., Tensor]  # of the number, then the inputs
    inputs: tuple[Tensor, ...]
    exact: float
    known: Op
    close: float = DIGITS
    says: Callable[[Op], float] | None = None  # the number that the op has where it is not the known one


def attends(op: Op) -> float:
    assert isinstance(op, Attention)
    return op.scale


def gelu(name: str) -> Callable[..., Tensor]:
    return lambda c, x: tanh_gelu(x, **{name: c})


def erf(name: str) -> Callable[..., Tensor]:
    return lambda c, x: erf_gelu(x, **{name: c})


WHOLE = Attention(causal=False)
ROWS = [
    Row("scale of scores", lambda c, *x: scores(lambda s: s * c, *x), QKV, HEAD**-0.5, WHOLE, says=attends),
    Row("divisor of scores", lambda c, *x: scores(lambda s: s / c, *x), QKV, HEAD**0.5, WHOLE, says=attends),
    Row("scale of queries", lambda c, q, k, v: scores(lambda s: s, q * c, k, v), QKV, HEAD**-0.5, WHOLE, says=attends),
    Row("scale of an operator", lambda c, *x: functional.scaled_dot_product_attention(*x, scale=c), QKV, HEAD**-0.5,
        WHOLE, says=attends),
    Row("root in GELU", gelu("root"), X, ROOT, Elementwise("gelu(a)")),
    Row("cubic term of GELU", gelu("cubic"), X, CUBIC, Elementwise("gelu(a)")),
    Row("exponent in GELU", gelu("power"), (numbers(2, 3, 8).abs(),), 3, Elementwise("gelu(a)"), 0),
    Row("half of GELU", gelu("half"), X, 0.5, Elementwise("gelu(a)"), 0),
    Row("one in GELU", gelu("one"), X, 1, Elementwise("gelu(a)"), 0),
    Row("root in the exact GELU", erf("root"), X, math.sqrt(0.5), Elementwise(GELU_EXACT)),
    Row("divisor in the exact GELU", lambda c, x: 0.5 * x * (1 + torch.erf(x / c)), X, math.sqrt(2),
        Elementwise(GELU_EXACT)),
    Row("half of the exact GELU", erf("half"), X, 0.5, Elementwise(GELU_EXACT), 0),
    Row("one in the exact GELU", erf("one"), X, 1, Elementwise(GELU_EXACT), 0),
    Row("count of an RMS norm", lambda c, x, g, _: rms(x, g, by=c), GAIN, 1 / 8, RmsNorm(1e-5)),
    Row("exponent of an RMS norm", lambda c, x, g, _: rms(x.abs(), g, power=c), GAIN, 2, RmsNorm(1e-5), 0),
    Row("count of a layer norm's mean", lambda c, *x: layer(*x, mean=c), GAIN, 1 / 8, LayerNorm(1e-5)),
    Row("count of a layer norm", lambda c, *x: layer(*x, by=c), GAIN, 1 / 8, LayerNorm(1e-5)),
    Row("factor of a mean", lambda c, x: x.sum(1) * c, X, 1 / 3, ReduceDims((1,), "mean")),
    Row("divisor of a mean", lambda c, x: x.sum(1) / c, X, 3, ReduceDims((1,), "mean"), 0),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_a_number_from_both_sides(row: Row) -> None:
    def found(number: float) -> list[Op]:
        return [*ops(imported(lambda *x: row.module(number, *x), row.inputs).program)]

    for inside in (row.exact, *(row.exact * (1 + s * row.close / 2) for s in (-1, 1) if row.close)):
        assert row.known in found(inside), inside
    step = max(3 * row.close, 1e-15)
    for off in (step, 1e-8, 1e-6, 1e-4, 0.06, 0.9):
        for number in (row.exact * (1 + off), row.exact * (1 - off)):
            every = found(number)
            assert row.known not in every, number
            if row.says is not None and number:
                (op,) = (op for op in every if type(op) is type(row.known))
                wanted = number if "divisor" not in row.name else 1 / number
                assert row.says(op) == pytest.approx(wanted, rel=1e-15)


def test_a_gate_from_both_sides() -> None:
    assert Elementwise("silu(a)") in [*ops(imported(lambda x: x * torch.sigmoid(x), X).program)]
    for number in (1 - 1e-15, 1 + 1e-15, 1.702, -1.0, 0.0):
        found = [*ops(imported(lambda x, c=number: x * torch.sigmoid(c * x), X).program)]
        assert Elementwise("silu(a)") not in found, number


@pytest.mark.parametrize("eps", [0.0, 1e-12, 9.9e-7, 1e-6, 1.01e-6, 1e-5, 1e-3, 0.5])
def test_what_a_norm_adds_is_its_own(eps: float) -> None:
    every: list[tuple[Callable[..., Tensor], Op]] = [
        (lambda x, g, _: rms(x, g, eps), RmsNorm(eps)),
        (lambda x, g, _: rms(x, g, eps / 4, 1 / 8) + 0 * g, RmsNorm(eps / 4)),
        (lambda x, g, b: layer(x, g, b, eps), LayerNorm(eps)),
        (lambda x, g, b: functional.layer_norm(x, (8,), g, b, eps), LayerNorm(eps)),
        (lambda x, g, _: functional.rms_norm(x, (8,), g, eps), RmsNorm(eps)),
    ]
    for function, known in every:
        assert known in [*ops(imported(function, GAIN).program)]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_torch_adds_to_a_norm_where_nothing_is_said(kind: torch.dtype) -> None:
    x = numbers(3, 8).to(kind)
    model = load(torch.export.export(Of(lambda x: functional.rms_norm(x, (8,))), (x,)))
    (op,) = (op for op in ops(model.program) if isinstance(op, RmsNorm))
    small = torch.full((1, 8), 2.0**-20, dtype=kind)  # whose square is below what is added, where that is f32's
    wanted = small.double() ** 2 * (1 / functional.rms_norm(small, (8,)).double() ** 2 - 1)
    assert op.eps == pytest.approx(wanted[0, 0].item(), rel=2e-2 if kind.itemsize == 2 else 1e-3)


# Masks.


def triangle(diagonal: int = 0) -> Tensor:
    return torch.ones(3, 3, dtype=torch.bool).tril(diagonal)


def filled(c: float, before: float = 1.0, after: float = 1.0) -> Callable[..., Tensor]:
    return lambda *x: scores(lambda s: (s * before).masked_fill(~triangle(), c) * after, *x)


def chosen(c: float, after: float = 1.0) -> Callable[..., Tensor]:
    return lambda *x: scores(lambda s: torch.where(triangle(), s, c) * after, *x)


def added(c: float, after: float = 1.0, seen: float = 0.0) -> Callable[..., Tensor]:
    def number(x: float) -> Tensor:
        return torch.full((), x, dtype=torch.float64)

    return lambda *x: scores(lambda s: (s + torch.where(triangle(), number(seen), number(c))) * after, *x)


@pytest.mark.parametrize(
    ("function", "causal"),
    [
        (filled(-1e4, 0.1), True),
        (filled(-1e30, 0.1), True),
        (filled(-math.inf, 0.1), True),
        (filled(-9999.9, 0.1), False),
        (filled(-1.0, 0.1), False),
        (filled(1e5, 0.1), False),
        (filled(0.0, 0.1), False),
        (filled(-1e5, after=0.1), True),
        (filled(-1e5, after=0.0999), False),
        (filled(-1e4, after=1e-4), False),
        (filled(-1e5, after=-1.0), False),
        (filled(1e5, after=-1.0), True),
        (chosen(-1e4), True),
        (chosen(-9999.9), False),
        (chosen(-1e5, 0.1), True),
        (chosen(-1e5, 0.0999), False),
        (chosen(-1e5, -1.0), False),
        (chosen(1e5, -1.0), True),
        (added(-1e4), True),
        (added(-9999.9), False),
        (added(-1e5, 0.1), True),
        (added(-1e5, 0.0999), False),
        (added(-1e4, 1e-4), False),
        (added(-1e30, -1.0), False),
        (added(-1e4, seen=1e-9), False),
        (added(-1e4, seen=-1e-300), False),
    ],
)
def test_what_masks_from_both_sides(function: Callable[..., Tensor], causal: bool) -> None:
    every = [op for op in ops(imported(function, QKV).program) if isinstance(op, Attention)]
    assert [op.causal for op in every] == [True] * causal


@pytest.mark.parametrize("diagonal", [-1, 0, 1])
def test_a_triangle_from_both_sides(diagonal: int) -> None:
    def attention(*x: Tensor) -> Tensor:
        return scores(lambda s: s.masked_fill(~triangle(diagonal), -1e30), *x)

    every = [op for op in ops(imported(attention, QKV).program) if isinstance(op, Attention)]
    assert len(every) == (diagonal == 0)


# What has no place in an op, and what a dtype has rounded.


def test_a_scale_of_nothing_is_not_the_default() -> None:
    every = [*ops(imported(lambda *x: scores(lambda s: s * 0.0, *x), QKV).program)]
    assert not any(isinstance(op, Attention) for op in every)
    imported(lambda *x: functional.scaled_dot_product_attention(*x, scale=0.0), QKV)


def test_a_number_that_its_dtype_has_rounded_is_the_rounded_one() -> None:
    root = torch.tensor(math.sqrt(0.5))  # f32, and then widened

    def function(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * torch.full((), root.item() + 1e-9, dtype=torch.float32)))

    assert Elementwise(GELU_EXACT) not in [*ops(imported(function, X).program)]


def test_an_expression_of_numbers_alone_is_a_number() -> None:
    assert eval_number("2 * (3 + 4) / 4") == 3.5
    assert eval_number("exp(0) - 3") == -2
