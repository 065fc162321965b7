"""Gradients and training of the plain models: central differences, and three steps of torch's own optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
from tests.models import plain_torch  # noqa: E402
from tests.models.plain_parts import Params  # noqa: E402
from tests.models.small import SMALL, batch_of, differ, random, small  # noqa: E402

CLOSE = {"rtol": 0, "atol": 1e-12}


def test_the_perceptrons_gradient_is_distirs() -> None:
    """2 (a - z) / n into the last ReLU, as its LossGrad has it."""
    config = small("mlp-xs")
    params, batch = plain_torch.parameters(config, 13, spread=1.0), batch_of(config, 14)
    value, grads = plain_torch.gradients(params, batch, config)
    kept = [batch["inputs"]]
    for i in range(3):
        kept.append((kept[-1] @ params[f"layers.{i}.weight"]).relu())
    back = 2 * (kept[-1] - batch["targets"]) / 3
    for i in reversed(range(3)):
        back = back * (kept[i + 1] > 0)
        torch.testing.assert_close(grads[f"layers.{i}.weight"], kept[i].T @ back, **CLOSE)
        back = back @ params[f"layers.{i}.weight"].T
    assert float(value) == pytest.approx(float((kept[-1] - batch["targets"]).square().sum() / 3), rel=1e-12)


def by_torch(
    params: Params, batches: list[Params], config: Any, make: Callable[[Any], Any]
) -> tuple[list[float], Params]:
    """The losses and parameters of training by an optimizer of torch's."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = make(list(leaves.values()))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = plain_torch.loss(leaves, batch, config)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, {name: p.detach() for name, p in leaves.items()}


def furthest(a: Params, b: Params) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("name", SMALL)
def test_three_steps_are_those_of_torchs_optimizers(name: str) -> None:
    config = small(name)
    params, batches = plain_torch.parameters(config, 15), [batch_of(config, seed) for seed in (16, 17, 18)]
    adamw = plain_torch.AdamW(rate=0.01, beta1=0.8, beta2=0.95, decay=0.1)
    losses, trained, _ = plain_torch.train(params, batches, config, adamw)

    def torch_adamw(leaves: Any) -> Any:
        return torch.optim.AdamW(leaves, lr=0.01, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)

    expected, found = by_torch(params, batches, config, torch_adamw)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert furthest(trained, found) < 1e-10
    assert furthest(trained, params) > 1e-3
    for wrong in ({"decay": 0.0}, {"beta2": 0.96}, {"eps": 1e-2}):
        assert (
            furthest(plain_torch.train(params, batches, config, dataclasses.replace(adamw, **wrong))[1], found) > 1e-6
        )
    losses, trained, _ = plain_torch.train(params, batches, config, plain_torch.Sgd(rate=0.05))
    expected, found = by_torch(params, batches, config, lambda leaves: torch.optim.SGD(leaves, lr=0.05))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert furthest(trained, found) < 1e-12


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_central_differences(name: str) -> None:
    """Along one random direction over all parameters at once."""
    config = small(name)
    params, batch = plain_torch.parameters(config, 19), batch_of(config, 20)
    _, grads = plain_torch.gradients(params, batch, config)
    direction = {key: random(*p.shape, seed=i) for i, (key, p) in enumerate(params.items()) if key in grads}
    along = sum(float((grads[key] * d).sum()) for key, d in direction.items())
    step = 1e-6

    def moved(by: float) -> float:
        return float(plain_torch.loss(params | {k: params[k] + by * d for k, d in direction.items()}, batch, config))

    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(along, rel=1e-5)
    unreached = set(params) - set(grads)
    assert all(key.endswith("e_score_correction_bias") for key in unreached)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_counts(name: str) -> None:
    """None is read in another's place, or not at all."""
    config = small(name)
    params, batch = plain_torch.parameters(config, 21), batch_of(config, 22, 13)
    # Small corrections: an expert that no token takes has no gradient.
    params = {key: 0.1 * p if key.endswith("e_score_correction_bias") else p for key, p in params.items()}
    value, grads = plain_torch.gradients(params, batch, config)
    assert [key for key, g in grads.items() if not g.any()] == []
    for key in set(params) - set(grads):
        moved = params | {key: params[key] + random(*params[key].shape)}
        assert differ(plain_torch.loss(moved, batch, config), value)
