"""GPT-2 and a Llama through torch.export, a jaxpr and ONNX are one program, with the numbers of their framework."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from tests.canonical.form import Canonical, canonical
from tests.canonical.test_canonical import run, scrambled
from tests.interop import jax_decoders as plain
from tests.interop.test_importers_jax import checkpoint, traced, weights
from tests.interop.test_importers_torch import exported, flops, gpt, llama, times, tokens
from tests.interop.torch_decoders import GptBlock, LlamaBlock, OpenGain
from torch import nn
from torch.nn import functional

from shardplan.core.nested import as_nested
from shardplan.core.ops import Einsum
from shardplan.core.program import Program
from shardplan.interop.importers import load
from shardplan.strategy import Model

onnx: Any = pytest.importorskip("onnx")

NAMES = {"ids": ("batch", "sequence")}
SOURCES = "torch", "jax", "onnx"


class Imported(NamedTuple):
    """A model of a source, its canonical form, its weights by their names, and what its framework computes."""

    model: Model
    form: Canonical
    checkpoint: dict[str, np.ndarray]
    wanted: np.ndarray


def of_torch(module: nn.Module) -> Model:
    return load(exported(module, tokens(17, 2, 7).int()), NAMES)


def of_onnx(module: nn.Module) -> Model:
    file: Any = io.BytesIO()
    torch.onnx.export(module, (tokens(17, 2, 7).int(),), file, dynamo=False, opset_version=17, input_names=["ids"],
                      do_constant_folding=False)  # fmt: skip
    return load(onnx.load_from_string(file.getvalue()), NAMES)


def gpt_of(**fields: Any) -> nn.Module:
    return gpt(**{"layers": 4} | fields).float()


def llama_of(**fields: Any) -> nn.Module:
    return llama(**{"vocab": 17} | fields).float()


@cache
def imported(kind: str, source: str) -> Imported:
    if source == "jax":
        function: Callable[..., Any] = partial(plain.gpt, heads=3) if kind == "gpt" else plain.llama
        shapes = plain.gpt_shapes(4, 12, 17, 7) if kind == "gpt" else plain.llama_shapes(4, 24, 6, 2, 20, 17)
        p = weights(shapes)
        model = load(traced(function, shapes, 2, 7), NAMES)
        held, wanted = checkpoint(p), np.asarray(jax.jit(function)(p, tokens(17, 2, 7).int().numpy()))
    else:
        # ONNX has no op for an RMS norm before opset 23: there it is written out.
        norm = {"norm": OpenGain} if source == "onnx" and kind == "llama" else {}
        module = gpt_of() if kind == "gpt" else llama_of(**norm)
        model = of_torch(module) if source == "torch" else of_onnx(module)
        held = {n: p.detach().numpy() for n, p in module.named_parameters()}
        wanted = module(tokens(17, 2, 7)).detach().numpy()
    return Imported(model, canonical(model.program, model.constants), held, wanted)


def contractions(program: Program) -> Iterator[tuple[int, Any]]:
    for step in program.steps:
        inner = as_nested(step.op)
        if inner is not None:
            yield from ((inner.times * n, said) for n, said in contractions(inner.body))
        elif isinstance(step.op, Einsum):
            yield 1, (step.op.spec, *(program.types[o].shape for o in step.operands))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_three_sources_are_one_program(kind: str) -> None:
    found = [imported(kind, source) for source in SOURCES]
    assert len({str(one.form.program) for one in found}) == 1
    assert {tuple(times(one.model.program)) for one in found} == {(4,)}
    assert len({one.model.parameter_count for one in found}) == 1
    assert len({tuple(contractions(one.form.program)) for one in found}) == 1
    most, least = max(flops(one.model.program) for one in found), min(flops(one.model.program) for one in found)
    assert most - least <= 1e-3 * least
    for one in found[1:]:
        for name, table in found[0].form.constants.items():
            assert np.allclose(one.form.constants[name], table, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_form_has_the_numbers_of_the_framework(kind: str, source: str) -> None:
    one = imported(kind, source)
    values = one.model.pack(one.checkpoint) | {"ids": tokens(17, 2, 7).int().numpy()} | dict(one.model.constants)
    (found,) = run(one.form.program, one.form.values(values))
    assert np.abs(found - one.wanted).max() <= 2e-5 * np.abs(one.wanted).max()


def test_random_names_and_orders_change_nothing() -> None:
    for kind in ("gpt", "llama"):
        one = imported(kind, "torch")
        other, names = scrambled(one.model.program, random.Random(3))
        constants = {names[n]: x for n, x in one.model.constants.items()}
        assert str(canonical(other, constants).program) == str(one.form.program)


class OpenGpt(GptBlock):
    """The same block with all composites written out, and products of rows in one dim."""

    def normed(self, norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * norm.weight + norm.bias

    def product(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(linear.bias, x.reshape(-1, x.shape[-1]), linear.weight.t())
        return rows.view(*x.shape[:-1], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        parts = self.product(self.fused, self.normed(self.first, x)).split(h, dim=2)
        q, k, v = (p.view(b, s, self.heads, h // self.heads).permute(0, 2, 1, 3) for p in parts)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(h // self.heads)
        mask = torch.tril(torch.ones(s, s, dtype=torch.bool)).view(1, 1, s, s)
        scores = torch.where(mask, scores, torch.full([], torch.finfo(x.dtype).min, dtype=x.dtype))
        mixed = torch.matmul(functional.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous().view(b, s, h)
        x = self.product(self.out, mixed) + x
        y = self.product(self.up, self.normed(self.second, x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.product(self.down, y)


def test_a_model_that_is_written_out_is_the_same_program() -> None:
    form = canonical(of_torch(blocks_of(gpt_of(), OpenGpt)).program)
    assert str(form.program) == str(imported("gpt", "torch").form.program)


class LateGpt(GptBlock):
    """The first residual is taken behind the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, first = self.first(x), self.first
        self.first = nn.Identity()  # type: ignore[assignment]
        found = GptBlock.forward(self, y)
        self.first = first
        return found


class SwappedGpt(GptBlock):
    """Queries are the second part of the fused product, and keys the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        k, q, v = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in self.fused(self.first(x)).split(h, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(b, s, h))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class SwappedLlama(LlamaBlock):
    """The gate is not bent, and what it gates is."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        self.gate, self.up = self.up, self.gate
        found = LlamaBlock.forward(self, x, cos, sin)
        self.gate, self.up = self.up, self.gate
        return found


def blocks_of(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    for block in module.blocks:  # type: ignore[union-attr]
        block.__class__ = kind
    return module


def epsilon_of(module: nn.Module, eps: float) -> nn.Module:
    for block in module.blocks:  # type: ignore[union-attr]
        block.second.eps = eps
    return module


def test_another_model_is_another_program() -> None:
    changed = [blocks_of(gpt_of(), LateGpt), blocks_of(gpt_of(), SwappedGpt), epsilon_of(gpt_of(), 1e-6)]
    forms = {str(canonical(of_torch(m).program).program) for m in changed}
    assert len(forms | {str(imported("gpt", "torch").form.program)}) == 4


def test_weights_in_each_others_place_are_another_mapping() -> None:
    model, one = of_torch(blocks_of(llama_of(), SwappedLlama)), imported("llama", "torch")
    form = canonical(model.program, model.constants)
    assert str(form.program) == str(one.form.program)
    turned = {"blocks.gate.weight": "blocks.up.weight", "blocks.up.weight": "blocks.gate.weight"}
    assert {n: t.name for n, t in form.inputs.items()} == {
        n: turned.get(t.name, t.name) for n, t in one.form.inputs.items()
    }
    assert form.inputs != one.form.inputs


@pytest.mark.filterwarnings("ignore")
def test_an_unlike_layer_is_three_runs_from_every_source() -> None:
    module, shapes = gpt_of(layers=7, odd=[3]), plain.gpt_shapes(7, 12, 17, 7)
    shapes["blocks"][3] = shapes["blocks"][3] | {"up": (12, 60), "up_bias": (60,), "down": (60, 12)}
    models = [of_torch(module), of_onnx(module), load(traced(partial(plain.gpt, heads=3), shapes, 2, 7), NAMES)]
    assert [times(m.program) for m in models] == [[3, 1, 3]] * 3
    assert len({str(canonical(m.program, m.constants).program) for m in models}) == 1
