"""Dropout of builders: plain torch's with the same masks, which hang on a sequence's seed and on no sharding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, layer_norm, softmax

from shardplan import LayoutError, Model, ShardplanError, Strategy, partition
from shardplan.core.ops import Dropout
from shardplan.core.tensor import TensorType
from strategy import plain_llama
from strategy.jobs import stepped

BATCH, SEQ, STEPS, RATE = 4, 10, 3, 0.2
LLAMA: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 12, "vocab": 23}
GPT: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "vocab": 23}
DROPS = {"dropout": 0.3, "embed_dropout": 0.15}
STRATEGIES = {
    "tensor 2 x data 2": Strategy(tensor=2, data=2, global_batch=BATCH, microbatch=2),
    "fsdp 4, recomputed": Strategy(data=4, fsdp=True, recompute="full"),
    "pipeline 2": Strategy(pipeline=2, data=2, global_batch=BATCH),
    "sequence, context": Strategy(
        tensor=2, sequence_parallel=True, context=2, context_kind="gather", global_batch=BATCH
    ),
}


def masks(seed: int, shape: tuple[int, int], rates: list[float]) -> list[np.ndarray]:
    """What elements of a sequence are multiplied with, dropout by dropout, by unsigned numbers of 32 bits."""

    def mixed(x: np.ndarray) -> np.ndarray:  # MurmurHash3's end
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x85EBCA6B)
        x = x ^ (x >> np.uint32(13))
        x = x * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    found, at = [], np.indices(shape).astype(np.uint32)
    for k, rate in enumerate(rates):
        key = (seed + (k + 1) * 0x61C88647) % 2**32
        bits = mixed(np.full(shape, key, np.uint32))
        for d in (0, 1):  # the sequence is dim 1 of a value, a feature dim 2
            bits = mixed(bits ^ mixed(at[d] + np.uint32(d + 1)))
        kept = (bits & np.uint32(2**30 - 1)) >= int(rate * 2**30)
        found.append(kept / (1 - rate))
    return found


def drops(seed: int, layers: int, first: float, rate: float) -> Any:
    """A function that multiplies with one mask after another."""
    rest = iter(masks(seed, (SEQ, LLAMA["hidden"]), [first, *[rate] * (2 * layers)]))
    return lambda x: x * torch.from_numpy(next(rest))


def llama_loss(
    w: dict[str, Tensor], tokens: Tensor, targets: Tensor, seeds: np.ndarray, sizes: dict[str, Any]
) -> Tensor:
    total = torch.zeros(()).double()
    for row, seed in enumerate(seeds.tolist()):
        drop = drops(seed, sizes["layers"], DROPS["embed_dropout"], DROPS["dropout"])
        x = drop(w["model.embed_tokens.weight"][tokens[row]])
        for number in range(sizes["layers"]):
            x = plain_llama.layer(w, number, x, {**sizes, "drop": drop}, [])
        total = total + cross_entropy(plain_llama.logits(w, x, "model.norm.weight", sizes), targets[row])
    return total / len(seeds)


def gpt_loss(w: dict[str, Tensor], tokens: Tensor, targets: Tensor, seeds: np.ndarray, sizes: dict[str, Any]) -> Tensor:
    total, width = torch.zeros(()).double(), sizes["hidden"] // sizes["heads"]

    def norm(name: str, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def product(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    for row, seed in enumerate(seeds.tolist()):
        drop = drops(seed, sizes["layers"], DROPS["embed_dropout"], DROPS["dropout"])
        x = drop(w["transformer.wte.weight"][tokens[row]] + w["transformer.wpe.weight"][:SEQ])
        for block in (f"transformer.h.{k}" for k in range(sizes["layers"])):
            parts = product(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x)).chunk(3, -1)
            q, k, v = (y.unflatten(-1, (-1, width)).transpose(0, 1) for y in parts)
            scores = (q @ k.mT / math.sqrt(width)).masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf)
            x = x + drop(product(f"{block}.attn.c_proj", (softmax(scores, -1) @ v).transpose(0, 1).flatten(1)))
            inside = gelu(product(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x)), approximate="tanh")
            x = x + drop(product(f"{block}.mlp.c_proj", inside))
        total = total + cross_entropy(norm("transformer.ln_f", x) @ w["transformer.wte.weight"].T, targets[row])
    return total / len(seeds)


CASES = [*(("llama", name) for name in STRATEGIES), ("gpt", "tensor 2 x data 2"), ("gpt", "pipeline 2")]


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_three_steps_are_those_of_plain_torch_with_the_same_masks(family: str, strategy: str) -> None:
    sizes, loss = (LLAMA, llama_loss) if family == "llama" else (GPT, gpt_loss)
    model = Model.load(family, **sizes, **DROPS, seq=SEQ, dtype="f64", optimizer="sgd", lr=RATE)
    rng = np.random.default_rng(3)
    state, w = plain_llama.drawn_weights(model, rng)
    optimizer = torch.optim.SGD(w.values(), RATE)
    job = partition(model, STRATEGIES[strategy])
    for _ in range(STEPS):
        ids = rng.integers(0, sizes["vocab"], (BATCH, SEQ + 1)).astype(np.int32)
        seeds = rng.integers(-(2**31), 2**31, BATCH).astype(np.int32)
        given = {"tokens": ids[:, :-1], "targets": ids[:, 1:].copy()}
        tokens, targets = (torch.tensor(x, dtype=torch.int64) for x in given.values())
        want = loss(w, tokens, targets, seeds, sizes)
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        got = stepped(job, {**state, **given, "seeds": seeds})
        assert float(got["loss"]) == pytest.approx(want.item(), rel=1e-9)
        state = {n: got.get(n, x) for n, x in state.items()}
    for n, x in model.unpack(state).items():
        np.testing.assert_allclose(x, w[n].detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=n)


def test_a_loss_hangs_on_the_seeds_and_on_no_sharding() -> None:
    model = Model.load("llama", **LLAMA, **DROPS, seq=SEQ, dtype="f64", optimizer="sgd")
    rng = np.random.default_rng(4)
    state = {n: rng.normal(0, 0.4, model.program.types[n].shape) for n in model.parameters}
    ids = rng.integers(0, LLAMA["vocab"], (BATCH, SEQ + 1)).astype(np.int32)
    given = {**state, "tokens": ids[:, :-1], "targets": ids[:, 1:].copy()}
    found: list[list[float]] = []
    for strategy in (Strategy(global_batch=BATCH), *STRATEGIES.values()):
        job = partition(model, strategy)
        each = (np.arange(BATCH, dtype=np.int32) + first for first in (0, 1))
        found.append([float(stepped(job, {**given, "seeds": seeds})["loss"]) for seeds in each])
    assert abs(found[0][0] - found[0][1]) > 1e-3
    np.testing.assert_allclose(found[1:], [found[0]] * len(STRATEGIES), rtol=1e-9)


def test_masks_of_layers_and_of_seeds_that_lie_close_are_unlike() -> None:
    found = [m for seed in range(3) for m in masks(seed, (64, 64), [0.5] * 4)]
    for k, a in enumerate(found):
        for b in found[:k]:
            assert abs(np.corrcoef((a > 0).ravel(), (b > 0).ravel())[0, 1]) < 0.06


def test_a_key_of_the_first_dims_takes_the_place_of_their_position() -> None:
    t, key = TensorType.parse("f64[2, 3, 5]", "x=2"), TensorType.parse("i32[2]", "x=2")
    x, op = np.ones((2, 3, 5)), Dropout(0.5)
    a, b = (op.reference([[x] * 2, [np.array(k, np.int32)] * 2], [t, key])[0][0] for k in ([7, 8], [8, 7]))
    np.testing.assert_array_equal(a, b[::-1])
    assert not np.array_equal(a[0], a[1])


def test_forward_passes_drop_nothing() -> None:
    plain, dropped = (Model.load("llama", **LLAMA, **more, seq=SEQ, training=False) for more in ({}, DROPS))
    assert plain.program == dropped.program and "seeds" not in dropped.dims


def test_what_no_builder_drops_is_refused() -> None:
    with pytest.raises(ShardplanError, match=r"a llama of dropout=1\.0; legal is a part below 1"):
        Model.load("llama", **LLAMA, seq=SEQ, dropout=1.0)
    model = Model.load("llama", **LLAMA, seq=SEQ + 2, dropout=0.1)
    with pytest.raises((LayoutError, ShardplanError), match="legal is 1 with dropout"):
        partition(model, Strategy(context=2, context_kind="zigzag"))
