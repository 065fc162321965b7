"""What training needs, as fields of builders: three steps of jobs equal plain torch, written apart, in f64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import shardplan as sp
from shardplan import BackendError, LayoutError, Model, ShardplanError, Strategy, partition
from strategy import plain_llama
from strategy.jobs import stepped

BATCH, SEQ, STEPS, RATE = 4, 12, 3, 0.2
SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 12, "vocab": 23}
MOE = SIZES | {"layers": 2, "experts": 4, "experts_per_token": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "window": SIZES | {"window": 5},
    "windows by turns": SIZES | {"window": 3, "windows": "wf", "layers": 5},
    "soft caps": SIZES | {"attention_cap": 0.4, "logit_cap": 0.6},
    "sinks": SIZES | {"sinks": True},
    "packed sequences": SIZES | {"segments": True},
    "all of them": SIZES | {"window": 4, "windows": "wf", "attention_cap": 0.4, "logit_cap": 0.6, "sinks": True,
                            "segments": True},
    "balance and z loss": MOE | {"balance_loss": 0.3, "router_z_loss": 0.1},
    "multi-token prediction": SIZES | {"mtp_layers": 2, "mtp_weight": 0.7, "layers": 2},
    "of a mixture, packed": MOE | {"mtp_layers": 1, "mtp_weight": 0.7, "balance_loss": 0.3, "segments": True},
}  # fmt: skip
BOUNDED = MOE | {"experts": 8, "capacity_factor": 3.6, "dropless": True}
TWO = Strategy(tensor=2, data=2, global_batch=BATCH, microbatch=2)
OTHERS = {
    "balance and z loss": Strategy(pipeline=2, data=2, expert=2, global_batch=BATCH, microbatch=2),
    "windows by turns": Strategy(pipeline=2, tensor=2, global_batch=BATCH, recompute="full"),
    "multi-token prediction": Strategy(pipeline=2, data=2, fsdp=True, global_batch=BATCH),
    "packed sequences": Strategy(context=2, context_kind="gather", tensor=2, global_batch=BATCH),
    "sinks": Strategy(context=2, data=2, zero=2, global_batch=BATCH),
    "soft caps": Strategy(context=2, context_kind="zigzag", data=2, global_batch=BATCH),
    "window": Strategy(context=2, context_kind="ring", data=2, global_batch=BATCH),
}
AGAIN = [  # of every stage some layers are computed again, and others are not
    ("window", replace(TWO, recompute="full", recompute_layers=3)),
    ("window", Strategy(pipeline=2, data=2, zero=2, global_batch=BATCH, recompute="full", recompute_layers=1)),
    ("soft caps", Strategy(pipeline=2, cuts=(3,), schedule="zb-h1", global_batch=BATCH, recompute="full",
                           recompute_layers=1)),
    ("balance and z loss", Strategy(data=2, expert=2, global_batch=BATCH, microbatch=2, recompute="selective",
                                    recompute_layers=1)),
    ("packed sequences", Strategy(pipeline=2, tensor=2, cuts=(3,), global_batch=BATCH, recompute="full",
                                  recompute_layers=2)),
]  # fmt: skip
CASES = [*((name, TWO) for name in (*FEATURES, "a bound")), *OTHERS.items(), *AGAIN]


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=lambda x: x if isinstance(x, str) else repr(x))
def test_three_steps_are_those_of_plain_torch(name: str, strategy: Strategy) -> None:
    sizes = BOUNDED if name == "a bound" else FEATURES[name]
    family, more = ("moe", {"capacity_factor": 0.0}) if "experts" in sizes else ("llama", {})
    model = Model.load(family, **more | sizes, seq=SEQ, dtype="f64", optimizer="sgd", lr=RATE)
    rng = np.random.default_rng(3)
    state, w = plain_llama.drawn_weights(model, rng)
    optimizer = torch.optim.SGD(w.values(), RATE)
    job = partition(model, strategy)
    for _ in range(STEPS):
        ids = rng.integers(0, SIZES["vocab"], (BATCH, SEQ + 1)).astype(np.int32)
        given = {"tokens": ids[:, :-1], "targets": ids[:, 1:].copy()}
        segments = np.zeros((BATCH, SEQ), np.int32)
        if sizes.get("segments"):
            segments = np.sort(rng.integers(0, 3, (BATCH, SEQ)).astype(np.int32), 1)
            given["targets"][:, :-1][segments[:, 1:] != segments[:, :-1]] = -100
            given["targets"][:, -1] = -100
        given |= {"segments": segments} if sizes.get("segments") else {}
        tensors = [torch.tensor(x, dtype=torch.int64) for x in (given["tokens"], given["targets"], segments)]
        want = plain_llama.loss(w, *tensors, sizes)
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        got = stepped(job, {**state, **given})
        assert float(got["loss"]) == pytest.approx(want.item(), rel=1e-9)
        state = {n: got.get(n, x) for n, x in state.items()}
    for n, x in model.unpack(state).items():
        np.testing.assert_allclose(x, w[n].detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=n)


SCALED = {
    "tensor 2 x data 2": TWO,
    "stages": Strategy(pipeline=2, data=2, zero=1, global_batch=BATCH),
    "fsdp": Strategy(data=4, fsdp=True, global_batch=BATCH),
}


@pytest.mark.parametrize("strategy", SCALED)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_scaled_steps_are_those_of_plain_torch(strategy: str, clip: float) -> None:
    """With a step between them whose gradients overflow: torch's scaler skips it, and so do all ranks."""
    settings: dict[str, Any] = {"lr": 0.05, "eps": 1e-3, "decay": 0.02, "clip": clip, "loss_scale": "input"}
    model = Model.load("llama", **SIZES, seq=SEQ, dtype="f64", optimizer="adamw", **settings)
    rng = np.random.default_rng(4)
    drawn, w = plain_llama.drawn_weights(model, rng)
    state = {**drawn, **model.state(drawn)}
    optimizer = torch.optim.AdamW(w.values(), 0.05, eps=1e-3, weight_decay=0.02)
    job, skipped = partition(model, SCALED[strategy]), 0
    for scale in (2.0**10, np.inf, 2.0**16, 1.0):
        ids = rng.integers(0, SIZES["vocab"], (BATCH, SEQ + 1)).astype(np.int32)
        given = {"tokens": ids[:, :-1], "targets": ids[:, 1:].copy(), "loss_scale": np.array(scale)}
        tensors = [torch.tensor(given[n], dtype=torch.int64) for n in ("tokens", "targets")]
        want = plain_llama.loss(w, *tensors, torch.zeros_like(tensors[0]), SIZES)
        optimizer.zero_grad()
        (want * scale).backward()
        for x in w.values():
            x.grad = None if x.grad is None else x.grad / scale
        if np.isfinite(scale):
            if clip:
                torch.nn.utils.clip_grad_norm_(w.values(), clip)
            optimizer.step()
        skipped += not np.isfinite(scale)
        got = stepped(job, {**state, **given})
        assert float(got["loss"]) == pytest.approx(want.item(), rel=1e-9)
        assert int(got["skipped"]) == skipped
        if not np.isfinite(scale):
            assert all(np.array_equal(got[n], state[n]) for n in model.replaced if n != "skipped")
        state = {n: got[n] for n in state}
    for n, x in model.unpack({n: state[n] for n in drawn}).items():
        np.testing.assert_allclose(x, w[n].detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=n)


def test_a_scale_keeps_gradients_that_f16_has_not() -> None:
    """Unscaled they are zero; with a scale that is too large the step is skipped; one in between trains."""
    rng, found = np.random.default_rng(2), dict[float, tuple[bool, int]]()
    first = rng.normal(0, 0.3, (2, 8, 8)).astype(np.float16)
    data = {n: rng.normal(0, 2e-5, (8, 8)).astype(np.float16) for n in ("inputs", "targets")}
    for scale in (0.0, 1.0, 2.0**14, 2.0**60):
        model = Model.load("mlp", layers=2, hidden=8, optimizer="sgd", precision="fp16", loss_scale=scale, lr=1e3)
        job = partition(model, Strategy(data=2, pipeline=2, global_batch=8))
        held = {"layers.weight": first, **job.model.state({"layers.weight": first})}
        got = stepped(job, held | data)
        moved = not np.array_equal(got["layers.weight.master"], held["layers.weight.master"])
        found[scale] = moved, int(got.get("skipped", 0))
    assert found == {0.0: (False, 0), 1.0: (False, 0), 2.0**14: (True, 0), 2.0**60: (False, 1)}


@pytest.mark.parametrize("strategy", [TWO, Strategy(expert=2, data=2, global_batch=BATCH)], ids=repr)
def test_what_is_above_a_bound_is_an_error(strategy: Strategy) -> None:
    """Every process has all results, and raises; without `dropless` choices are dropped and counted."""
    rng, got = np.random.default_rng(3), dict[bool, np.ndarray]()
    ids = rng.integers(0, SIZES["vocab"], (BATCH, SEQ + 1)).astype(np.int32)
    for dropless in (False, True):
        sizes = BOUNDED | {"capacity_factor": 0.9, "dropless": dropless}
        model = Model.load("moe", **sizes, seq=SEQ, dtype="f64", optimizer="sgd")
        rng = np.random.default_rng(7)
        state = {n: rng.normal(0, 0.4, model.program.types[n].shape) for n in model.parameters}
        job, given = partition(model, strategy), {**state, "tokens": ids[:, :-1], "targets": ids[:, 1:].copy()}
        if not dropless:
            got[dropless] = stepped(job, given)["layers.dropped"]
            continue
        with pytest.raises(BackendError, match=f"{got[False].sum()} choices of experts are above the bound"):
            stepped(job, given)
        with sp.start(job, state, backend="reference") as live:
            with pytest.raises(BackendError, match="above the bound"):
                live.step({n: given[n] for n in ("tokens", "targets")})
            with pytest.raises(BackendError, match="start again from what was saved"):
                live.step({n: given[n] for n in ("tokens", "targets")})


def test_every_feature_counts() -> None:
    """Without it the loss is another: the oracle would see it."""
    rng = np.random.default_rng(5)
    ids = torch.tensor(rng.integers(0, SIZES["vocab"], (2, SEQ + 1)))
    packed = torch.tensor(np.arange(SEQ) // 5)[None].expand(2, -1)
    for name, sizes in FEATURES.items():
        family, more = ("moe", {"capacity_factor": 0.0}) if "experts" in sizes else ("llama", {})
        model = Model.load(family, **sizes, **more, seq=SEQ, dtype="f64")
        drawn = {n: rng.normal(0, 0.4, model.program.types[n].shape) for n in model.parameters}
        w = {n: torch.tensor(x) for n, x in model.unpack(drawn).items()}
        plain = {n: x for n, x in sizes.items() if n in {**SIZES, **MOE}}
        apart = (packed if sizes.get("segments") else 0 * packed, 0 * packed)
        a, b = (plain_llama.loss(w, ids[:, :-1], ids[:, 1:], s, c) for s, c in zip(apart, (sizes, plain), strict=True))
        assert abs(float(a - b)) > 1e-3, name


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"windows": "wf"}, "windows=wf; legal are letters w"),
        ("llama", {"window": 2, "windows": "wx"}, "windows=wx; legal are letters w"),
        ("llama", {"segments": True, "cache": 16, "training": False}, "segments=True; legal is False with a cache"),
        ("llama", {"balance_loss": 0.1}, "a llama of balance_loss=0.1; legal is 0.0"),
        ("llama", {"activation": "relu"}, "activation"),
        ("llama", {"logit_cap": -1.0}, "logit_cap is -1.0; legal is a finite number of 0"),
        ("gpt", {"sinks": True}, "a gpt of sinks=True; legal is False"),
        (
            "moe",
            {"experts": 4, "experts_per_token": 2, "dropless": True, "capacity_factor": 0.0},
            "dropless=True; legal",
        ),
        ("llama", {"mtp_layers": 1, "zigzag": 2}, "zigzag=2; legal is 1 with mtp_layers"),
    ],
)
def test_what_no_builder_writes_is_refused(family: str, fields: dict[str, Any], message: str) -> None:
    sizes = {n: x for n, x in SIZES.items() if family != "gpt" or n not in ("kv_heads",)}
    with pytest.raises(ShardplanError, match=message):
        Model.load(family, **{**sizes, "seq": SEQ, **fields})


@pytest.mark.parametrize("name", ["sinks", "packed sequences"])
def test_what_does_not_go_round_is_refused(name: str) -> None:
    model = Model.load("llama", **FEATURES[name], seq=SEQ)
    with pytest.raises(LayoutError, match="does not go round; legal are ulysses and gather"):
        partition(model, Strategy(context=2, context_kind="ring"))
