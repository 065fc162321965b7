"""Adafactor: factored means of squares, whose dims are not the parameter's, beside torch's and under every sharding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shardplan as sp
from shardplan import Model, ShardplanError, Strategy, partition
from shardplan.strategy.partition.memory import certify, moments
from strategy import plain_llama
from strategy.jobs import model, stepped, wrong
from strategy.memory_oracle import moments_by_dictionaries

BATCH, SEQ = 4, 12
SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 12, "vocab": 23}
STRATEGIES = {
    "tensor 2 x data 2": Strategy(tensor=2, data=2, global_batch=BATCH, microbatch=2),
    "fsdp 4": Strategy(data=4, fsdp=True),
    "zero 1": Strategy(tensor=2, data=2, zero=1, global_batch=BATCH),
    "pipeline 2": Strategy(pipeline=2, data=2, global_batch=BATCH),
}
RATES, DECAYS = (0.3, 0.02, 2.0), (0.0, 0.5, 0.01)  # the last is above 1 / sqrt(3), which takes its place


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("threshold", [1.0, 1.4])
def test_three_steps_are_torchs(strategy: str, threshold: float) -> None:
    settings: dict[str, Any] = {"lr": "input", "decay": "input", "clip_threshold": threshold, "eps2": 0.3}
    found = Model.load("llama", **SIZES, seq=SEQ, dtype="f64", optimizer="adafactor", **settings)
    rng, types = np.random.default_rng(3), found.program.types
    drawn = {n: rng.normal(0, 0.4, types[n].shape) + ("norm" in n) for n in found.parameters}
    state = {**drawn, **found.state(drawn)}
    w = {n: torch.tensor(x, requires_grad=True) for n, x in found.unpack(drawn).items()}
    optimizer = torch.optim.Adafactor(w.values(), eps=(None, 0.3), d=threshold)
    job = partition(found, STRATEGIES[strategy])
    for lr, decay in zip(RATES, DECAYS, strict=True):
        ids = rng.integers(0, SIZES["vocab"], (BATCH, SEQ + 1)).astype(np.int32)
        given = {"tokens": ids[:, :-1], "targets": ids[:, 1:].copy()}
        tensors = [torch.tensor(x, dtype=torch.int64) for x in given.values()]
        want = plain_llama.loss(w, *tensors, torch.zeros_like(tensors[0]), SIZES)
        optimizer.zero_grad()
        want.backward()
        optimizer.param_groups[0] |= {"lr": lr, "weight_decay": decay}
        optimizer.step()
        got = stepped(job, {**state, **given, "lr": np.array(lr), "decay": np.array(decay)})
        assert float(got["loss"]) == pytest.approx(want.item(), rel=1e-9)
        state = {n: got[n] for n in state}
    for n, x in found.unpack({n: state[n] for n in drawn}).items():
        np.testing.assert_allclose(x, w[n].detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=n)
    row = optimizer.state[w["model.layers.2.mlp.up_proj.weight"]]["row_var"].numpy()
    np.testing.assert_allclose(state["layers.up.row"][2, 0], row[:, 0], rtol=1e-9)


OTHERS = {
    "clipped over stages": ({"clip": 0.01}, Strategy(pipeline=2, data=2, tensor=2, zero=1, global_batch=8)),
    "scaled": ({"loss_scale": 128.0}, Strategy(data=2, fsdp=True)),
    "bucket": ({}, Strategy(data=2, tensor=2, zero=1, bucket="1 MiB")),
    "grouped heads": ({}, Strategy(tensor=6)),
    "some layers again": ({}, Strategy(pipeline=2, data=2, recompute="full", recompute_layers=1, global_batch=8)),
    "tied, stages": ({"tied": True}, Strategy(pipeline=3, schedule="zb-h1", global_batch=4)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_jobs_do_as_the_model_does(case: str) -> None:
    fields, strategy = OTHERS[case]
    assert wrong(model("llama", optimizer="adafactor", lr=0.1, decay=0.02, **fields), strategy) == []


def test_experts_are_tensors_of_their_own() -> None:
    found = model("moe", optimizer="adafactor", lr=0.1)
    up = next(n for n in found.parameters if n.endswith("expert_up"))
    sizes = dict(found.parameters[up].dims)
    layers, experts, hidden, ffn = (sizes[d] for d in ("layer", "experts", "hidden", "ffn"))
    assert found.program.types[f"{up}.row"].shape == (layers, experts, 1, ffn)
    assert found.program.types[f"{up}.column"].shape == (layers, experts, hidden, 1)
    assert wrong(found, Strategy(data=2, tensor=2, expert=2)) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_lies_as_the_update_does(strategy: str) -> None:
    """A mean along dims that axes cut is whole over these; bytes held are those of plain dictionaries."""
    job = partition(model("llama", optimizer="adafactor", layers=4), STRATEGIES[strategy])
    certify(job).check()
    for name, t in job.state.items():
        assert all(n > 1 or not axes for n, axes in zip(t.shape, t.layout.dims, strict=True)), (name, t)
    for rank in range(job.strategy.pipeline):
        assert [tuple(m) for m in moments(job, rank)] == list(moments_by_dictionaries(job, rank))


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [("beta2_decay", 0.1, "0 or less"), ("clip_threshold", 0.5, "1 or more"), ("eps1", -1, "0 or more")],
)
def test_settings_are_those_that_torch_takes(name: str, value: float, legal: str) -> None:
    assert model("llama", optimizer="adafactor", beta2_decay=-0.7).fields["beta2_decay"] == -0.7
    with pytest.raises(ShardplanError, match=f"{name} is {value}; legal is a finite number of {legal}"):
        model("llama", optimizer="adafactor", **{name: value})


def test_norms_of_what_is_cut_are_reduced_in_the_account() -> None:
    """Of one tensor cut over an axis: one number for the parameter and for its update, and means of its squares."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "dtype": "f32"}
    jobs = [
        partition(Model.load("mlp", **sizes, optimizer=o), Strategy(data=2, zero=1)) for o in ("adamw", "adafactor")
    ]
    adamw, factored = ([s.op.name for s in job.programs[0, "OPT"].steps] for job in jobs)
    assert "all_reduce" not in adamw and factored.count("all_reduce") == 4
    before, after = (sum(certify(job).axis_bytes.values()) for job in jobs)
    numbers = 2 * (64 + 1 + 1 + 1)  # a layer: the means that lose the dim that is cut, theirs over all, two norms
    assert after - before == 4 * numbers
    held = [max(certify(job).state_bytes) for job in jobs]
    kept = 4 * 2 * (64 + 32)
    assert held[0] - held[1] == 2 * 4 * 2 * 64 * 32 - kept


def test_a_live_job_saves_and_takes_up_what_is_kept(tmp_path: Any) -> None:
    found = model("llama", optimizer="adafactor", lr=0.1)
    rng, types = np.random.default_rng(1), found.program.types
    drawn = {n: rng.normal(0, 0.3, types[n].shape) for n in found.parameters}
    ids = rng.integers(0, 32, (4, 9)).astype(np.int32)
    batch, losses = {"tokens": ids[:, :-1], "targets": ids[:, 1:].copy()}, list[float]()
    with sp.start(partition(found, Strategy(data=4, fsdp=True)), drawn, backend="reference") as live:
        losses += [float(live.step(batch)) for _ in range(2)]
        live.save(tmp_path / "saved")
        losses.append(float(live.step(batch)))
    with sp.start(partition(found, STRATEGIES["pipeline 2"]), tmp_path / "saved", backend="reference") as live:
        assert float(live.step(batch)) == pytest.approx(losses[-1], rel=1e-9)
    assert losses[2] != losses[1] != losses[0]


def test_a_copy_in_f32_is_updated() -> None:
    found = Model.load("mlp", layers=2, hidden=8, optimizer="adafactor", precision="bf16", lr=0.3)
    job = partition(found, Strategy(data=2, fsdp=True, global_batch=8))
    rng = np.random.default_rng(2)
    first = rng.normal(0, 0.3, (2, 8, 8)).astype(np.float32)
    drawn = {"layers.weight": first.astype("bfloat16")}
    data = {n: rng.normal(0, 1, (8, 8)).astype("bfloat16") for n in ("inputs", "targets")}
    got = stepped(job, {**drawn, **job.model.state(drawn), **data})
    assert got["layers.weight.row"].dtype == np.float32 and got["layers.weight.row"].all()
    moved = got["layers.weight.master"] - drawn["layers.weight"].astype(np.float32)
    size = np.sqrt((drawn["layers.weight"].astype(np.float32) ** 2).mean((1, 2)))
    np.testing.assert_allclose(np.sqrt((moved**2).mean((1, 2))), 0.3 * size, rtol=1e-2)  # the first update is clipped
    np.testing.assert_array_equal(got["layers.weight"], got["layers.weight.master"].astype("bfloat16"))


def test_what_it_does_not_take_is_refused() -> None:
    with pytest.raises(ShardplanError, match="no field 'beta1'"):
        Model.load("mlp", layers=1, hidden=4, optimizer="adafactor", beta1=0.9)
    with pytest.raises(ShardplanError, match="adafactor"):
        Model.load("mlp", layers=1, hidden=4, optimizer="adafacto")
