"""Every dim of a model is named by those of its inputs, and a gradient as its parameter."""

from typing import Any

import pytest

from shardplan.core.dim_names import dim_names
from shardplan.strategy.model import Model


@pytest.mark.parametrize("preset", ["gpt3-175b", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "mlp-small"])
def test_names_of_a_training_step(preset: str) -> None:
    model = Model.load(preset)
    names = dim_names(model.program, model.dims, model.origins)
    assert {n: names.values[n] for n in model.dims} == {n: tuple((d,) for d in dims) for n, dims in model.dims.items()}
    assert model.gradients
    for parameter, gradient in model.gradients.items():
        assert names.values[gradient] == names.values[parameter]


def test_layers_of_a_period_have_the_names_of_all_layers() -> None:
    """Of windows that alternate each layer of a body has every second number, from its own on."""

    def names(**more: Any) -> set[str]:
        model = Model.load("llama", layers=4, hidden=8, heads=4, kv_heads=2, ffn=8, seq=6, vocab=11, **more)
        found = [file for p in model.parameters.values() for _, file in p.names()]
        assert len(found) == len(set(found))
        return set(found)

    assert names(window=3, windows="wf") == names()
