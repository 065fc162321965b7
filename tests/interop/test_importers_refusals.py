"""What no table knows, has no elements or is changed in place: it runs as the source does, or one line says why.

Each case is the shape of a graph that somebody met: a CNN with batch norm while it trains, Gemma's scale, a buffer of
one number, Phi-3's rotation of a part of the head, of which nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.interop.test_importers_jax_control import same
from tests.interop.test_importers_onnx import helper, proto_of
from tests.interop.test_importers_onnx import run as run_onnx
from tests.interop.test_importers_torch import outputs
from torch import Tensor, nn

from shardplan.errors import ShardplanError, TypingError
from shardplan.interop.importers import load
from shardplan.interop.importers.call import Operation, Unknown, handle_operation
from shardplan.interop.importers.writer import FlatWriter


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Of(nn.Module):
    """A function of a tensor and of a buffer of one number."""

    def __init__(self, function: Callable[..., Any], buffer: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        if buffer is not None:
            self.register_buffer("number", buffer)

    def forward(self, x: Tensor) -> Any:
        held = [*self.buffers()]
        return self.function(x, *held)


def imported(module: nn.Module, x: Tensor) -> None:
    """A module imports, and computes what torch does."""
    found = outputs(load(torch.export.export(module, (x,))), module, {"x": x})
    wanted = module(x)
    for mine, theirs in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert mine.shape == tuple(theirs.shape)
        assert np.abs(mine - theirs.numpy()).max() <= 1e-9 * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("number", [5.65, 0.1, 3], ids=str)
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x * n.to(x.dtype),  # Gemma
        lambda x, n: x + n.clone().expand(3, 8) + n.view(1),
        lambda x, n: torch.where(x > n, n.to(x.dtype), x),
        lambda x, n: x / n.sqrt().unsqueeze(0) + n.reshape(1, 1),
        lambda x, n: x * (n + 1) ** 2 - (n > 2).to(x.dtype),
        lambda x, n: x * n.detach().to(torch.float32),
        lambda x, n: x * torch.full_like(n, 5.65).to(x.dtype),  # as its dtype has rounded it
    ],
)
def test_a_buffer_of_one_number(function: Any, kind: torch.dtype, number: float) -> None:
    imported(Of(function, torch.tensor(number, dtype=kind)), numbers(3, 8))


def test_what_counts_batches_is_a_number() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(TypingError) as error:
        load(torch.export.export(module.train(), (torch.zeros(2, 3, 8, 8),)))
    assert str(error.value).startswith("load: the export changes 1.running_mean in place; legal is a module")


def rotated(x: Tensor, part: float) -> Tensor:
    """The first dims of `[batch sequence head]` turned, of which there may be all."""
    n = int(x.shape[-1] * part)
    turned, rest = x[..., :n], x[..., n:]
    turned = torch.cat((-turned[..., n // 2 :], turned[..., : n // 2]), -1)
    return torch.cat((turned, rest * 1.0), dim=-1)


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_what_is_left_of_a_part_may_be_nothing(part: float) -> None:
    imported(Of(lambda x: rotated(x, part)), numbers(2, 3, 8))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat((x[:, :0], x + 1, x[:, 8:]), -1),
        lambda x: torch.cat((x[:0] * 2, x[3:].sqrt(), x * 2)),
        lambda x: torch.cat([p.exp() for p in x.split([0, 3, 0, 5], -1)], -1),
        lambda x: (x / 0.0).clamp(-1, 1),
        lambda x: torch.minimum(x, torch.tensor(float("inf"), dtype=x.dtype)),
    ],
)
def test_of_nothing_and_by_nothing(function: Any) -> None:
    imported(Of(function), numbers(3, 8))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x[:, :0], r"a value of the shape \[3, 0\] has no elements; legal are dims of 1 and more"),
        (lambda x: x[:, :0].sum(-1) + x[:, 0],
         r"aten.sum.dim_IntList \(a value of the shape \[3, 0\] has no elements; legal are dims of 1 and more\), 1"),
        (lambda x: torch.where(x > 1, float("nan"), x),
         r"aten.where.ScalarSelf \(with nan in f64; legal are real numbers, and infinities in floats\), 1 times"),
        (lambda x: torch.view_as_real(x * 1j),
         r"aten.mul.Tensor \(with 1j in c128; legal are real numbers, and infinities in floats\), 1 times"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_here_is_named(function: Any, text: str) -> None:
    with pytest.raises(TypingError, match=text):
        load(torch.export.export(Of(function), (numbers(3, 8),)))


def changed_first(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    first = y[:, 0]
    y.add_(1)
    return first, y


def changed_part(x: Tensor) -> Tensor:
    y = x * 2
    y.chunk(2, -1)[0].mul_(2)
    return y + 1


def changed_input(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Of(changed_input), r"load: the export changes x in place; legal is a module that changes no"),
        (Of(lambda x, n: x * n.mul_(2), torch.tensor(2.0)), r"load: the export changes number in place"),
    ],
)
def test_what_is_given_and_changed_in_place_is_refused(module: nn.Module, text: str) -> None:
    with pytest.raises(TypingError, match=text):
        load(torch.export.export(module, (numbers(3, 8),)))


@pytest.mark.parametrize("function", [changed_first, changed_part])
def test_what_is_changed_in_place_and_read_elsewhere_is_what_it_is_then(function: Any) -> None:
    imported(Of(function), numbers(3, 8))


class Counts(nn.Module):
    """A buffer that is changed, once it is functional."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.float().sum(0))
        return x * 2


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize(
    ("export", "text"),
    [
        (lambda x: torch.export.export(Counts(), (x,)).run_decompositions(),
         r"load: the export changes seen in place; legal is a module that changes no input, buffer or parameter"),
        (lambda x: torch.export.export(Of(lambda x: (x + 1, 3)), (x,)),
         r"load: result 1 is 3; legal are tensors, and None, which is left out"),
        (lambda x: torch.export.export(Of(lambda x: x[x > 0]), (x,)),
         r"load: aten.index.Tensor has a result of u0 elements along a dim, as its values are \(.*\); legal are sizes"),
        (lambda x: torch.export.export(Of(lambda x: x * x.sum().item()), (x,)),
         r"the export has operations .*:\n  aten.item.default, 1 times"),
    ],
)  # fmt: skip
def test_results_that_are_none_of_ours_are_named(export: Any, text: str, opaque: bool) -> None:
    with pytest.raises(TypingError, match=text):
        load(export(numbers(3, 8)), opaque=opaque)


@pytest.mark.filterwarnings("ignore:.*operations are opaque")
def test_one_result_in_a_list_is_that_result() -> None:
    def function(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), None

    model = load(torch.export.export(Of(function), (numbers(3, 8),)), opaque=True)
    assert [t.shape for t in model.program.output_types] == [(3, 8)]


def test_what_is_changed_in_place_and_read_by_its_new_name_runs() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.clone()
        y.add_(1)
        y.mul_(2)
        return y + 3

    imported(Of(function), numbers(3, 8))


def test_functions_of_jax_of_nothing() -> None:
    x = numbers(4, 8).numpy().astype("f4")
    same(lambda x: jnp.concatenate((x[:, :0], x + 1), -1), x)
    same(lambda x: x + jnp.reshape(jnp.asarray(2.0), (1, 1)), x)
    same(lambda x: jnp.clip(x / 0.0, -1, 1), x)
    with pytest.raises(ShardplanError, match=r"a value of the shape \[4, 0\] has no elements"):
        load(jax.make_jaxpr(lambda x: x[:, :0])(x))
    with pytest.raises(TypingError, match=r"slice \(with strides\), 5 times"):
        load(jax.make_jaxpr(lambda x: jax.lax.associative_scan(jnp.add, x))(x))


def test_graphs_of_onnx_of_nothing() -> None:
    x = numbers(4, 6).numpy().astype("f4")
    ends = {"a": np.asarray([3]), "d": np.asarray([1])}
    none = helper.make_node("Slice", ["x", "a", "a", "d"], ["e"])
    rest = helper.make_node("Concat", ["e", "x"], ["z"], axis=1), helper.make_node("Relu", ["z"], ["y"])
    proto = proto_of([none, *rest], weights=ends)
    assert np.array_equal(run_onnx(load(proto), proto, x=x)[0], np.maximum(x, 0))
    proto = proto_of([helper.make_node("Div", ["x", "n"], ["y"])], weights={"n": np.asarray(0, "f4")})
    with np.errstate(divide="ignore"):
        assert np.array_equal(run_onnx(load(proto), proto, x=x)[0], x / np.float32(0))


def test_arguments_that_a_table_did_not_foresee_are_named() -> None:
    unknown = Unknown("the export")
    call = Operation(FlatWriter({}), "aten.new.default", ("f32",), ((2,),))
    for error in (KeyError("mode"), TypeError("an unexpected keyword"), ZeroDivisionError("by zero"), IndexError(3)):

        def handler(call: Operation, error: Exception = error) -> None:
            raise error

        made = handle_operation(call, {call.name: handler}, unknown, "the model", (), {})
        assert made.shape == (2,)
    text = r"aten.new.default \(with arguments that are not known here: TypeError: an unexpected keyword\), 1 times"
    with pytest.raises(TypingError, match=text):
        unknown.check()
