"""Every preset, as it is built: parameters, flops, text, names of dims; nothing of a model's size is allocated."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from tests.models.published_counts import closed_form, general_flops

from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.ops import Einsum
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.core.walk import program_leaves
from shardplan.strategy import Model, presets

DECODERS = [name for name, fields in presets().items() if fields["family"] in ("gpt", "llama", "moe")]
SCREEN = 60


def einsums(op: Op, types: tuple[TensorType, ...]) -> Iterator[float]:
    """The operations of the products that an op comes down to; of what its kernel skips none."""
    kernel = computing(op)
    assert kernel is not None
    body = kernel.decomposition(*types)
    if body is None:
        yield kernel.flops(*types) if isinstance(op, Einsum) else 0.0
        return
    builder = ProgramBuilder.of(types)
    builder.copy(body.steps, lambda name: name)
    total = sum(computing(s.op).flops(*(builder.types[o] for o in s.operands)) for s in builder.steps)  # type: ignore[union-attr]
    skipped = kernel.flops(*types) / total if total else 1.0
    for step in builder.steps:
        yield from (skipped * n for n in einsums(step.op, tuple(builder.types[o] for o in step.operands)))


def products(program: Program) -> float:
    return sum(leaf.times * n for leaf in program_leaves(program) for n in einsums(leaf.op, leaf.operands))


@pytest.mark.parametrize("name", presets())
def test_a_preset_has_the_parameters_of_the_closed_form(name: str) -> None:
    for others in ({"optimizer": "sgd"}, {"training": False}):
        assert Model.load(name, **others).parameter_count == closed_form(presets()[name])


@pytest.mark.parametrize("name", DECODERS)
def test_a_step_has_the_flops_of_the_formula(name: str) -> None:
    """Of its products, a kernel of attention's backward pass computes the scores once more, which no formula counts."""
    fields = presets()[name]
    width = fields.get("head_dim", fields["hidden"] // fields["heads"])
    for batch in (1, 3):
        again = batch * fields["seq"] ** 2 * fields["layers"] * fields["heads"] * width
        expected = general_flops(fields, batch, causal_half=True, router=True)
        found = products(Model.load(name, optimizer="adamw", batch=batch).program) - again
        assert found == pytest.approx(expected, rel=1e-3)
        if fields["family"] == "gpt":
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in presets() if name not in DECODERS])
def test_a_step_of_the_others_has_its_products(name: str) -> None:
    """Three for each of the forward pass, but that inputs of a DLRM have no gradient."""
    fields, batch = presets()[name], 5
    if fields["family"] == "mlp":
        expected = 6 * batch * fields["layers"] * fields["hidden"] ** 2
    else:
        vectors, width = len(fields["table_rows"]) + 1, fields["embedding_dim"]
        chains = ([fields["dense_features"], *fields["bottom"]],
                  [width + vectors * (vectors - 1) // 2, *fields["top"]])  # fmt: skip
        dense = sum(a * b for chain in chains for a, b in zip(chain, chain[1:], strict=False))
        first = fields["dense_features"] * fields["bottom"][0]
        expected = batch * (6 * dense + 6 * vectors**2 * width - 2 * first)
    assert products(Model.load(name, optimizer="sgd", batch=batch).program) == expected


@pytest.mark.parametrize("name", presets())
def test_a_model_prints_on_one_screen(name: str) -> None:
    """Its parameters, with names; layers are written once."""
    text = str(Model.load(name))
    assert len(text.splitlines()) <= SCREEN
    assert f"{closed_form(presets()[name]):,} parameters" in text


def test_a_program_is_as_long_for_any_number_of_layers() -> None:
    for name, lines in {"llama3-405b": SCREEN, "gpt3-175b": SCREEN + 10}.items():
        sizes: list[Any] = [{}, {"layers": 2}, {"layers": 1000}]
        forward, step = ([str(Model.load(name, training=t, **s).program) for s in sizes] for t in (False, True))
        assert {len(text.splitlines()) for text in forward} == {len(forward[0].splitlines())}
        assert len({len(text.splitlines()) for text in step}) == 1
        assert len(forward[0].splitlines()) <= lines


@pytest.mark.parametrize("name", ["gpt3-175b", "qwen3-4b", "deepseek-v3", "mlp-xs", "dlrm-kaggle"])
def test_a_program_is_read_back(name: str) -> None:
    program = Model.load(name).program
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("training", [True, False])
def test_every_dim_of_an_input_has_a_name_of_its_own(name: str, training: bool) -> None:
    cache = {"cache": 4096, "seq": 7} if not training and name in DECODERS else {}
    model = Model.load(name, training=training, **cache)
    assert list(model.dims) == [name for name, _ in model.program.inputs]
    for key, t in model.program.inputs:
        assert len(set(model.dims[key])) == len(model.dims[key]) == t.ndim
        if key in model.parameters:
            assert model.parameters[key].dims == tuple(zip(model.dims[key], t.shape, strict=True))


def test_a_training_step_of_175b_needs_no_memory_to_build() -> None:
    tracemalloc.start()
    try:
        model = Model.load("gpt3-175b")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6
    assert sum(math.prod(t.shape) for t in model.program.input_types) > 3 * 174e9


def test_each_gradient_step_knows_the_forward_step_that_it_is_of() -> None:
    model = Model.load("llama3-8b")
    forward = sum(origin is None for origin in model.origins)
    assert 0 < forward < len(model.origins) < len(model.program.steps)
    assert {origin is None for origin in model.origins[:forward]} == {True}
    makers = {r: origin for step, origin in zip(model.program.steps, model.origins, strict=False) for r in step.results}
    head, layers = makers[model.gradients["head"]], makers[model.gradients["layers.q"]]
    assert head is not None and layers is not None
    assert head.forward is not None and layers.forward is not None
    assert "head" in model.program.steps[head.forward].operands
    loop = model.program.steps[layers.forward]
    assert "layers.q" in loop.operands
    body = as_nested(loop.op)
    assert body is not None
    products = [body.body.steps[inner.forward] for inner in layers.inner if inner.forward is not None]
    assert {"q", "down"} <= {operand for step in products for operand in step.operands}


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_moments_and_loss_of_a_narrow_model_are_wide(precision: str) -> None:
    types = Model.load("llama3-8b", dtype=precision).program.types
    assert {types[n].dtype for n in ("layers.q", "gradient.layers.q", "next.layers.q")} == {precision}
    assert {types[n].dtype for n in ("layers.q.m", "next.layers.q.v", "loss")} == {"f32"}
