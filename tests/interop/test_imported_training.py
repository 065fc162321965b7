"""Imported models train under strategies: losses and gradients are those of torch's autograd, and of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.interop import jax_decoders as plain
from tests.interop.test_importers_jax import GPT, checkpoint, is_shape, weights
from tests.interop.test_importers_torch import exported, gpt, llama, times, tokens
from torch import Tensor, nn
from torch.nn import functional

import shardplan as sp
from strategy.jobs import stepped

NAMES = {"ids": ("batch", "sequence"), "targets": ("batch", "sequence")}
STRATEGY = sp.Strategy(tensor=2, data=2, global_batch=6)  # three microbatches, of the export's batch of four


class Trained(nn.Module):
    """A loss beside logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(ids)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


HELD = {
    "gpt": {"model.blocks.fused.weight": "f64[3, 3, 4@tensor, 3, 12]",
            "model.blocks.up.weight": "f64[3, 48@tensor, 12]", "model.tokens.weight": "f64[17@tensor, 12]"},
    "llama": {"model.blocks.q.weight": "f64[3, 2@tensor, 3, 4, 24]", "model.blocks.k.weight": "f64[3, 2@tensor, 4, 24]",
              "model.blocks.down.weight": "f64[3, 24, 20@tensor]", "model.head.weight": "f64[19@tensor, 24]"},
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_gradients_are_those_of_torch(name: str) -> None:
    module = Trained(gpt(layers=3, heads=4) if name == "gpt" else llama(layers=3))
    model = sp.load(exported(module, *tokens(17, 2, 4, 7)), NAMES, training=True)
    assert times(model.forward or model.program) == [3]
    job = sp.partition(model, STRATEGY)
    assert {n: str(job.state[n]) for n in HELD[name]} == HELD[name]
    ids, targets = tokens(17, 2, 6, 7)
    loss = module(ids, targets)
    loss.backward()
    arrays = {n: p.detach().numpy() for n, p in module.named_parameters()}
    found = stepped(job, model.pack(arrays) | {"ids": ids.numpy(), "targets": targets.numpy()})
    assert abs(found["loss"] - loss.item()) <= 1e-9
    mine = model.unpack({p: found[f"gradient.{p}"] for p in model.parameters})
    for key, p in module.named_parameters():
        assert p.grad is not None
        assert np.abs(mine[key] - p.grad.numpy()).max() <= 1e-9 * max(1.0, p.grad.abs().max().item()), key


def test_another_size_is_what_another_export_gives() -> None:
    module = Trained(llama(layers=2))
    small, large = (sp.load(exported(module, *tokens(17, 2, *size)), NAMES, training=True) for size in ((2, 7), (4, 5)))
    assert str(small.resize(batch=4, seq=5).program) == str(large.program)


def test_a_mean_of_jax_is_one_of_any_batch() -> None:
    def loss(p: Any, ids: Any, targets: Any) -> Any:
        logits = plain.gpt(p, ids, heads=3)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, 17), -1))

    def traced(batch: int) -> sp.Model:
        abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), GPT, is_leaf=is_shape)
        ids = jax.ShapeDtypeStruct((batch, 7), jnp.int32)
        return sp.load(jax.make_jaxpr(loss)(abstract, ids, ids), NAMES, training=True)

    model = traced(4)
    assert str(model.resize(batch=2).program) == str(traced(2).program)
    p, rng = weights(GPT), np.random.default_rng(1)
    ids, targets = (rng.integers(0, 17, (6, 7)).astype("i4") for _ in range(2))
    want, slopes = jax.jit(jax.value_and_grad(loss))(p, ids, targets)
    job = sp.partition(model, STRATEGY)
    found = stepped(job, model.pack(checkpoint(p)) | {"ids": ids, "targets": targets})
    assert abs(found["loss"] - float(want)) <= 1e-5
    mine = model.unpack({n: found[f"gradient.{n}"] for n in model.parameters})
    for key, slope in checkpoint(slopes).items():
        assert np.abs(mine[key] - slope).max() <= 1e-5 * max(1.0, np.abs(slope).max()), key
