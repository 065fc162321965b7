"""Gradients clipped by the norm of all of them: as torch's, under every sharding, with one message of one number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardplan import Strategy, partition
from shardplan.strategy.partition.memory import certify, moments
from strategy.jobs import arrays, by_name, model, stepped, wrong
from strategy.memory_oracle import moments_by_dictionaries

STRATEGIES = {
    "tensor 2 x data 2": Strategy(data=2, tensor=2),
    "fsdp": Strategy(data=4, fsdp=True),
    "zero 1, microbatches": Strategy(data=2, tensor=2, zero=1, global_batch=8),
    "grouped heads": Strategy(tensor=6),
    "context, sequence": Strategy(context=2, context_kind="gather", tensor=2, sequence_parallel=True, zero=2),
    "bucket": Strategy(data=2, tensor=2, zero=1, bucket="1 MiB"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_jobs_clip_as_the_model_does(strategy: str, clip: float) -> None:
    assert wrong(model("llama", clip=clip), STRATEGIES[strategy]) == []


def test_experts_clip_too() -> None:
    assert wrong(model("moe", clip=0.01), Strategy(data=2, tensor=2, expert=2)) == []


@pytest.mark.parametrize(("optimizer", "clip"), [("sgd", 0.05), ("adamw", 0.05), ("sgd", 1e3)])
def test_three_steps_are_torchs(optimizer: str, clip: float) -> None:
    """Gradients are those of the model without an optimizer; norm, clipping and update are torch's."""
    settings = {"lr": 0.1} if optimizer == "sgd" else {"lr": 0.1, "eps": 1e-3, "decay": 0.02}
    found = model("llama", optimizer=optimizer, clip=clip, **settings)
    job = partition(found, Strategy(data=2, tensor=2))
    plain = model("llama", optimizer=None, batch=2)
    given = arrays(found.resize(batch=2), found.resize(batch=2).program)
    params = {n: torch.nn.Parameter(torch.from_numpy(given[n].copy())) for n in found.parameters}
    rule: Any = (
        torch.optim.SGD(params.values(), lr=0.1)
        if optimizer == "sgd"
        else torch.optim.AdamW(params.values(), lr=0.1, eps=1e-3, weight_decay=0.02)
    )
    factors: list[float] = []
    for _ in range(3):
        data = {n: given[n] for n in ("tokens", "targets")}
        made = by_name(plain.program, data | {n: p.detach().numpy() for n, p in params.items()})
        for n, p in params.items():
            p.grad = torch.from_numpy(made[plain.gradients[n]].copy())
        factors.append(clip / float(torch.nn.utils.clip_grad_norm_(params.values(), clip)))
        rule.step()
        got = stepped(job, given)
        given = {**given, **{n: got[n] for n in found.replaced}}
        for n, p in params.items():
            np.testing.assert_allclose(got[n], p.detach().numpy(), rtol=1e-9, atol=1e-12)
    assert max(factors) < 1 if clip < 1 else min(factors) > 1  # each of them clips, or none


def test_the_norm_is_one_message_of_one_number() -> None:
    strategy = Strategy(data=2, tensor=2, zero=1)
    plain, clipped = (partition(model("llama", clip=clip), strategy) for clip in (0.0, 1.0))
    before, after = ([s.op.name for s in job.programs[0, "OPT"].steps] for job in (plain, clipped))
    assert after.count("all_reduce") == before.count("all_reduce") + 1
    moves = clipped.movements[0, "OPT"]
    (norm,) = [m for m in moves if m.by == "the norm of all gradients"]
    assert [t.shape for t in norm.plan.program.input_types] == [()]


STAGES = {
    "two": Strategy(pipeline=2, data=2, tensor=2),
    "interleaved": Strategy(pipeline=2, data=2, schedule="interleaved", interleave=2, global_batch=8),
    "zero 1": Strategy(pipeline=3, data=2, zero=1, global_batch=8),
    "fsdp": Strategy(pipeline=2, data=2, fsdp=True, global_batch=8),
    "two chains": Strategy(pipeline=2, schedule="dualpipe", global_batch=8),
    "halves": Strategy(pipeline=2, schedule="zb-h1", tensor=2, global_batch=4),
}


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_a_norm_is_one_over_stages(strategy: str, clip: float) -> None:
    assert wrong(model("llama", clip=clip, layers=4), STAGES[strategy]) == []


def test_tied_weights_are_in_the_norm_once() -> None:
    """Their gradient is the sum of those on two stages."""
    assert wrong(model("llama", clip=0.01, tied=True), Strategy(pipeline=2, data=2)) == []


@pytest.mark.parametrize("strategy", STAGES)
def test_stages_send_their_squares_and_get_a_factor(strategy: str) -> None:
    job = partition(model("llama", clip=1.0, layers=4), STAGES[strategy])
    stages = [s for s, kind in job.programs if kind == "NORM"]
    sent = [(t.kind, t.source[0], t.target[0], t.types[0].shape) for t in job.transfers if t.kind in ("norm", "clip")]
    assert sent == [x for s in stages for x in (("norm", s, 0, ()), ("clip", 0, s, ()))]
    assert [s for s, kind in job.programs if kind == "CLIP"] == [0]
    for s in stages:  # what NORM reduces OPT does not again
        whole = [s_.op.name for s_ in job.programs[s, "OPT"].steps]
        assert not {"all_reduce", "reduce_scatter"} & {*whole}


@pytest.mark.parametrize("strategy", STAGES)
def test_bytes_of_updates_are_those_of_plain_dictionaries(strategy: str) -> None:
    job = partition(model("llama", clip=1.0, layers=4), STAGES[strategy])
    certify(job).check()
    for rank in range(job.strategy.pipeline):
        assert [tuple(m) for m in moments(job, rank)] == list(moments_by_dictionaries(job, rank))
