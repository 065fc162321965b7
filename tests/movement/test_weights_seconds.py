"""Seconds of a refit beside their bound, who sends how much, and receivers that are fed once a node."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from movement import weights_frameworks as frameworks
from movement.weights_cases import TABLES, checkpoint, made, side
from shardplan.errors import LayoutError

CONFIG: dict[str, Any] = {
    "kind": "qwen3-moe", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 4, "vocab_size": 128, "moe_intermediate_size": 32, "intermediate_size": 64, "num_experts": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
# Large enough that latencies do not count, and that small tensors do not.
LARGE = CONFIG | {"hidden_size": 4096, "moe_intermediate_size": 1536, "vocab_size": 16384, "head_dim": 128}


def sides(config: dict[str, Any]) -> tuple[sp.Weights, sp.Weights]:
    a = sp.Weights.load("megatron-qwen3-moe", config, tensor=2, pipeline=2, data=2, expert=4, divisible=1)
    return a, sp.Weights.load("vllm-qwen3-moe", config, tensor=2, replica=4, devices=range(8, 16))


@pytest.mark.parametrize("preset", ["dgx-h100", "dgx-a100", "dgx-b200"])
def test_seconds_are_near_the_bound_and_senders_share(preset: str) -> None:
    topology = sp.Topology.load(preset, nodes=2)
    a, b = sides(LARGE)
    direct, best = sp.refit(a, b, topology), sp.refit(a, b, topology, relay=None)
    assert direct.bound_seconds == pytest.approx(best.bound_seconds)
    assert best.bound_seconds <= best.seconds * (1 + 1e-9)
    assert best.seconds <= 1.05 * best.bound_seconds
    assert direct.seconds > 3 * best.seconds  # four replicas on one node
    sent = [n for n in best.sent_bytes if n]
    assert max(sent) <= 1.1 * sum(sent) / len(sent)


def test_the_bound_is_that_of_a_case_by_hand() -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": False}  # fmt: skip
    a = sp.Weights.load("hf-llama", config)
    plan = sp.refit(a, sp.Weights.load("hf-llama", config, replica=2, devices=[1, 2]))
    # One owner sends both copies here, one after another; at the least it sends one, and each receiver takes one.
    assert plan.bound_seconds == pytest.approx(a.nbytes(0) / 50e9 + 5e-6)
    assert plan.seconds == pytest.approx(2 * a.nbytes(0) / 50e9 + 2 * 5e-6)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of any size are divided, as those of large tensors are."""
    for module in ("relays", "spreading"):
        monkeypatch.setattr(f"shardplan.movement.weights.{module}.SMALL", 0)


@pytest.mark.usefixtures("divided")
def test_what_is_passed_on_is_bit_for_bit_right() -> None:
    topology = sp.Topology.load("dgx-h100", nodes=2)
    whole = frameworks.checkpoint(CONFIG, np.random.default_rng(0))
    a, b = sides(CONFIG)
    before = frameworks.megatron(CONFIG, whole, tensor=2, pipeline=2, data=2, expert=4, divisible=1)
    wanted = frameworks.served(CONFIG, whole, tensor=2, replica=4)
    plan = sp.refit(a, b, topology, relay=True)
    assert plan.relays
    assert plan.hash != sp.refit(a, b, topology).hash
    after = plan.apply(before)
    for rank, named in wanted.items():
        for name, array in named.items():
            np.testing.assert_array_equal(after[8 + rank][name], array.astype(after[8][name].dtype), err_msg=name)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("kind", ["llama", "deepseek", "gpt-oss"])
def test_random_refits_that_pass_on_are_right(kind: str) -> None:
    names = list(TABLES[kind])
    topology = sp.Topology.load("dgx-h100", nodes=12).resize(gpus=4)
    for seed in range(3):
        rng = random.Random(f"{kind} {seed}")
        c = made(kind, rng)
        whole = checkpoint(kind, c, np.random.default_rng(seed))
        source, before = side(kind, rng.choice(names), c, whole, rng, 0)
        target, wanted = side(kind, rng.choice(names), c, whole, rng, len(source.devices))
        if len(source.devices) + len(target.devices) > topology.size:
            continue
        after = sp.refit(source, target, topology, relay=True).apply(before)
        for rank, named in wanted.items():
            for name, array in named.items():
                assert after[rank][name].tobytes() == array.tobytes(), (seed, rank, name)


def test_relays_without_a_topology_are_refused() -> None:
    a, b = sides(CONFIG)
    with pytest.raises(LayoutError, match="relay=True needs a topology, which says what a node is"):
        sp.refit(a, b, relay=True)
    assert sp.refit(a, b, relay=None).relays == ()
    with pytest.raises(LayoutError, match="rank 0 is not on the target"):
        sp.refit(a, b).passed_on(0)
