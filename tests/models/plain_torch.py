"""The models in plain torch, each a pure function on a flat dict of parameters, and their training by hand.

`MODELS` has them by family: how to read a preset, the parameters' shapes, and the loss. None imports the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.models import plain_decoders, plain_others
from tests.models.plain_parts import Params
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Family:
    """One family: its sizes, the shapes of its parameters by name, and the loss of a batch."""

    sizes: Callable[..., Any]
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    loss: Callable[[Params, Params, Any], Tensor]


DECODER = Family(plain_decoders.Decoder, plain_decoders.shapes, plain_decoders.loss)
MODELS = {
    "gpt": DECODER,
    "llama": DECODER,
    "moe": DECODER,
    "dlrm": Family(plain_others.Recommender, plain_others.recommender_shapes, plain_others.recommender_loss),
    "mlp": Family(plain_others.Perceptron, plain_others.perceptron_shapes, plain_others.perceptron_loss),
}


def config_of(fields: Mapping[str, Any], **others: Any) -> Any:
    """The sizes that a preset's table gives, some of them replaced."""
    fixed = {
        name: tuple(value) if isinstance(value, list) else value for name, value in (dict(fields) | others).items()
    }
    return MODELS[fields["family"]].sizes(**fixed)


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    return MODELS[config.family].shapes(config)


def count(config: Any) -> int:
    """The number of parameters; a tied head is none."""
    return sum(math.prod(shape) for shape in shapes(config).values())


def parameters(config: Any, seed: int, dtype: torch.dtype = torch.float64, spread: float = 0.2) -> Params:
    """Normal random parameters, gains around 1."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: spread * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes(config).items()
    }
    # A gain is the one vector that is called weight.
    return {name: 1 + p if p.ndim == 1 and name.endswith("weight") else p for name, p in found.items()}


def loss(params: Params, batch: Params, config: Any) -> Tensor:
    return MODELS[config.family].loss(params, batch, config)


def gradients(params: Params, batch: Params, config: Any) -> tuple[Tensor, Params]:
    """The loss, and its gradient in every parameter that it depends on.

    DeepSeek-V3's `e_score_correction_bias` only chooses: it has none, and no optimizer touches it.
    """
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    value = loss(leaves, batch, config)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return value.detach(), {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """w - rate g."""

    rate: float = 1e-2

    def update(self, params: Params, grads: Params, state: Params, step: int) -> tuple[Params, Params]:
        return params | {name: params[name] - self.rate * g for name, g in grads.items()}, state


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with bias correction and decoupled weight decay (arXiv 1711.05101, algorithm 2); every parameter decays."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 1e-2

    def update(self, params: Params, grads: Params, state: Params, step: int) -> tuple[Params, Params]:
        """The parameters and moments after step `step`, which counts from 1."""
        new, moments = dict(params), dict(state)
        for name, g in grads.items():
            first = self.beta1 * state.get(f"{name}.m", torch.zeros_like(g)) + (1 - self.beta1) * g
            second = self.beta2 * state.get(f"{name}.v", torch.zeros_like(g)) + (1 - self.beta2) * g.square()
            moments |= {f"{name}.m": first, f"{name}.v": second}
            towards = (first / (1 - self.beta1**step)) / ((second / (1 - self.beta2**step)).sqrt() + self.eps)
            new[name] = params[name] - self.rate * self.decay * params[name] - self.rate * towards
        return new, moments


def train(
    params: Params, batches: Sequence[Params], config: Any, optimizer: Sgd | AdamW
) -> tuple[list[float], Params, Params]:
    """One step a batch: the losses, the parameters and the optimizer's state after the last."""
    losses: list[float] = []
    state: Params = {}
    for step, batch in enumerate(batches, 1):
        value, grads = gradients(params, batch, config)
        losses.append(float(value))
        params, state = optimizer.update(params, grads, state, step)
    return losses, params, state
