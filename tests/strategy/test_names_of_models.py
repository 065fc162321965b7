"""Every dim of a model is named by those of its inputs, and a gradient as its parameter."""

import pytest

from shardplan.core.dim_names import dim_names
from shardplan.strategy.model import Model


@pytest.mark.parametrize("preset", ["gpt3-175b", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "mlp-small"])
def test_names_of_a_training_step(preset: str) -> None:
    model = Model.load(preset)
    names = dim_names(model.program, model.dims, model.origins)
    assert {n: names.values[n] for n in model.dims} == {n: tuple((d,) for d in dims) for n, dims in model.dims.items()}
    assert model.gradients and names.wholes == {}
    for parameter, gradient in model.gradients.items():
        assert names.values[gradient] == names.values[parameter]
