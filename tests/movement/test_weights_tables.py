"""The shipped tables against what frameworks' own code makes: every ordered pair, random shapes, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from movement import weights_frameworks as frameworks
from shardplan.movement.weights.table import shipped

Config = dict[str, Any]
Maker = Callable[..., dict[int, dict[str, np.ndarray]]]
SEEDS = 3


def power(rng: random.Random, most: int) -> int:
    return rng.choice([k for k in (1, 2, 4, 8) if k <= most])


def split(rng: random.Random, n: int, parts: int) -> list[int]:
    """Counts of at least one that add up to n, or an uneven stage more."""
    ends = sorted(rng.sample(range(1, n), parts - 1)) if parts <= n else []
    return [b - a for a, b in itertools.pairwise([0, *ends, n])]


def config(kind: str, rng: random.Random) -> Config:
    g = rng.choice([1, 2, 4])
    r = rng.choice([1, 2, 4]) if g == 4 else rng.choice([4, 8])
    d = rng.choice([2, 4, 6])
    return {
        "kind": kind, "hidden_size": rng.choice([5, 8, 12]), "num_attention_heads": g * r, "num_key_value_heads": g,
        "head_dim": d, "num_hidden_layers": rng.choice([4, 5, 7]), "vocab_size": rng.choice([10, 64, 70, 130]),
        "intermediate_size": rng.choice([8, 16, 24]), "moe_intermediate_size": rng.choice([8, 16]),
        "num_experts": rng.choice([4, 8, 12]), "num_local_experts": rng.choice([4, 8]),
        "tie_word_embeddings": rng.random() < 0.4,
    }  # fmt: skip


def hf(c: Config, rng: random.Random) -> dict[str, Any]:
    return {"replica": rng.choice([1, 2])}


def trainer(c: Config, rng: random.Random) -> dict[str, Any]:
    rows = c["num_key_value_heads"] * (c["num_attention_heads"] // c["num_key_value_heads"] + 2) * c["head_dim"]
    t = rng.choice([t for t in (1, 2, 4, 8) if rows % t == 0 and c["intermediate_size"] % t == 0 and
                    (c["num_attention_heads"] * c["head_dim"]) % t == 0])  # fmt: skip
    pipeline, chunks = rng.choice([(1, 1), (2, 1), (2, 2), (4, 1), (1, 2)])
    given: dict[str, Any] = {"tensor": t, "pipeline": pipeline, "chunks": chunks, "data": rng.choice([1, 2])}
    given["divisible"] = rng.choice([1, 8, 128])
    if c["num_hidden_layers"] % (pipeline * chunks) or rng.random() < 0.3:
        given["stages"] = split(rng, c["num_hidden_layers"], pipeline * chunks)
    return given


def moe_trainer(c: Config, rng: random.Random) -> dict[str, Any]:
    given = trainer(c, rng)
    count = given["data"] * given["tensor"]
    f = c["moe_intermediate_size"] if c["kind"] == "qwen3-moe" else c["intermediate_size"]
    legal = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2) if count % (ep * etp) == 0 and f % etp == 0]
    given["expert"], given["etp"] = rng.choice(legal)
    return given


def server(c: Config, rng: random.Random) -> dict[str, Any]:
    g, h = c["num_key_value_heads"], c["num_attention_heads"]
    legal = [t for t in (1, 2, 4, 8) if h % t == 0 and (t % g == 0 or g % t == 0) and c["intermediate_size"] % t == 0]
    given: dict[str, Any] = {"tensor": rng.choice(legal), "replica": rng.choice([1, 2]), "pipeline": rng.choice([1, 2])}
    if c["num_hidden_layers"] % given["pipeline"] or rng.random() < 0.3:
        given["stages"] = split(rng, c["num_hidden_layers"], given["pipeline"])
    return given


def moe_server(c: Config, rng: random.Random) -> dict[str, Any]:
    given = server(c, rng)
    f = c["moe_intermediate_size"] if c["kind"] == "qwen3-moe" else c["intermediate_size"]
    given["data"] = rng.choice([k for k in (1, 2) if f % (k * given["tensor"]) == 0] or [1])
    while f % (given["data"] * given["tensor"]):
        given["tensor"] //= 2
    return given


def without_stages(c: Config, rng: random.Random) -> dict[str, Any]:
    return {k: v for k, v in server(c, rng).items() if k != "stages"}


def sharded(c: Config, rng: random.Random) -> dict[str, Any]:
    g, h = c["num_key_value_heads"], c["num_attention_heads"]
    legal = [t for t in (1, 2, 4) if h % t == 0 and g % t == 0 and c["intermediate_size"] % t == 0]
    return {"tensor": rng.choice(legal), "data": rng.choice([1, 2, 3, 5]), "replica": rng.choice([1, 2])}


Side = tuple[Maker, Callable[[Config, random.Random], dict[str, Any]], dict[str, Any]]
TABLES: dict[str, dict[str, Side]] = {
    "llama": {
        "hf-llama": (frameworks.hugging_face, hf, {}),
        "megatron-llama": (frameworks.megatron, trainer, {}),
        "vllm-llama": (frameworks.served, server, {}),
        "sglang-llama": (frameworks.served, without_stages, {"last": True}),
        "fsdp2-llama": (frameworks.fsdp2, sharded, {}),
        "torchtitan-llama": (frameworks.fsdp2, sharded, {"meta": True}),
    },
    "qwen3": {
        "hf-qwen3": (frameworks.hugging_face, hf, {}),
        "megatron-qwen3": (frameworks.megatron, trainer, {}),
        "vllm-qwen3": (frameworks.served, server, {}),
        "fsdp2-qwen3": (frameworks.fsdp2, sharded, {}),
    },
    "qwen3-moe": {
        "hf-qwen3-moe": (frameworks.hugging_face, hf, {}),
        "hf5-qwen3-moe": (frameworks.hugging_face_5, hf, {}),
        "megatron-qwen3-moe": (frameworks.megatron, moe_trainer, {}),
        "vllm-qwen3-moe": (frameworks.served, moe_server, {}),
        "vllm-qwen3-moe-ep": (frameworks.served, moe_server, {"ep": True}),
    },
    "mixtral": {
        "hf-mixtral": (frameworks.hugging_face, hf, {}),
        "megatron-mixtral": (frameworks.megatron, moe_trainer, {}),
        "vllm-mixtral": (frameworks.served, moe_server, {}),
        "vllm-mixtral-ep": (frameworks.served, moe_server, {"ep": True}),
    },
}
PAIRS = [(kind, a, b) for kind, tables in TABLES.items() for a, b in itertools.permutations(tables, 2)]


def test_every_shipped_table_is_tested() -> None:
    assert sorted(name for tables in TABLES.values() for name in tables) == list(shipped())


def side(
    kind: str, name: str, c: Config, whole: dict[str, np.ndarray], rng: random.Random, first: int
) -> tuple[sp.Weights, dict[int, dict[str, np.ndarray]]]:
    """A table at random degrees, and what the framework's code holds under them."""
    make, degrees, more = TABLES[kind][name]
    given = degrees(c, rng)
    found = make(c, whole, **given, **more)
    weights = sp.Weights.load(name, c, devices=range(first, first + len(found)), dtype="f32", **given)
    return weights, {first + rank: named for rank, named in found.items()}


@pytest.mark.parametrize(("kind", "a", "b"), PAIRS)
def test_every_pair_moves_bit_for_bit(kind: str, a: str, b: str) -> None:
    for seed in range(SEEDS):
        rng = random.Random(f"{a} {b} {seed}")
        c = config(kind, rng)
        whole = frameworks.checkpoint(c, np.random.default_rng(seed))
        source, before = side(kind, a, c, whole, rng, 0)
        target, wanted = side(kind, b, c, whole, rng, rng.choice([0, 1000]))
        assert sp.Weights.parse(str(source)) == source
        for rank in target.devices:
            target.check(wanted[rank], rank)
        after = sp.refit(source, target).apply(before)
        for rank, named in wanted.items():
            for name, array in named.items():
                np.testing.assert_array_equal(after[rank][name], array, err_msg=f"{seed} {rank} {name}")
