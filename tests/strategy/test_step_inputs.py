"""Learning rates and decays that are inputs of a step: a schedule of the caller's, beside torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardplan import Model, ShardplanError, Strategy, partition, start
from strategy.jobs import arrays, by_name, model, stepped

RATES, DECAYS = (0.1, 0.02, 0.3), (0.0, 0.5, 0.01)
STRATEGIES = (
    Strategy(data=2, tensor=2),
    Strategy(data=2, fsdp=True),
    Strategy(pipeline=2, global_batch=2, schedule="gpipe"),
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_three_steps_of_a_schedule_are_torchs(optimizer: str, strategy: Strategy) -> None:
    moments = optimizer == "adamw"
    settings: dict[str, Any] = {"lr": "input"} | ({"decay": "input", "eps": 1e-3} if moments else {})
    found = model("llama", optimizer=optimizer, **settings)
    job = partition(found, strategy)
    plain, big = model("llama", optimizer=None, batch=2), found.resize(batch=2)
    given = arrays(big, big.program)
    assert found.program.types["lr"].shape == () and ("decay" in given) == moments and "lr" not in found.replaced
    params = {n: torch.nn.Parameter(torch.from_numpy(given[n].copy())) for n in found.parameters}
    values = list(params.values())
    rule: Any = torch.optim.AdamW(values, eps=1e-3) if moments else torch.optim.SGD(values)
    for lr, decay in zip(RATES, DECAYS, strict=True):
        data = {n: given[n] for n in ("tokens", "targets")}
        made = by_name(plain.program, data | {n: p.detach().numpy() for n, p in params.items()})
        for n, p in params.items():
            p.grad = torch.from_numpy(made[plain.gradients[n]].copy())
        rule.param_groups[0] |= {"lr": lr, "weight_decay": decay if moments else 0.0}
        rule.step()
        said = {"lr": np.array(lr)} | ({"decay": np.array(decay)} if moments else {})
        got = stepped(job, {**given, **said})
        given = {**given, **{n: got[n] for n in found.replaced}}
        for n, p in params.items():
            np.testing.assert_allclose(got[n], p.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_a_live_job_takes_another_rate_each_step() -> None:
    found = model("llama", optimizer="sgd", lr="input")
    job = partition(found, Strategy(data=2, tensor=2))
    big = found.resize(batch=2)
    given = here = arrays(big, big.program)
    with start(job, {n: given[n] for n in found.parameters}, backend="reference") as live:
        for lr in RATES:
            here = {**here, "lr": np.array(lr)}
            live.step({n: here[n] for n in ("tokens", "targets", "lr")})
            made = by_name(big.program, here)
            here |= {n: made[o] for n, o in found.replaced.items()}
        for n, x in live.collect(list(found.parameters)).items():
            np.testing.assert_allclose(x, here[n], rtol=1e-9, atol=1e-12)


def test_what_may_be_no_input_is_refused() -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 2, "seq": 4, "vocab": 8, "ffn": 8}
    for said in ({"eps": "input"}, {"lr": "inputs"}, {"clip": "input"}):
        with pytest.raises(ShardplanError, match=f"Model.load: {next(iter(said))}"):
            Model.load("llama", **sizes, **said)
