"""Cases of the shipped tables: configs and degrees at random, and what frameworks hold under them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import shardplan as sp

from . import weights_frameworks as frameworks
from . import weights_linear as linear
from . import weights_more as more

Config = dict[str, Any]
Maker = Callable[..., dict[int, dict[str, np.ndarray]]]


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


def latent(kind: str, rng: random.Random) -> Config:
    """DeepSeek-V3: sizes that blocks of 4 do not divide where the published ones do not either."""
    return {
        "kind": "deepseek", "fp8": kind == "deepseek-fp8", "weight_block_size": 4, "hidden_size": rng.choice([8, 10]),
        "num_attention_heads": rng.choice([4, 8]), "q_lora_rank": rng.choice([8, 12]), "kv_lora_rank": 8,
        "qk_rope_head_dim": rng.choice([2, 4]), "qk_nope_head_dim": 4, "v_head_dim": 4,
        "n_routed_experts": rng.choice([4, 8]), "moe_intermediate_size": 16, "intermediate_size": 32,
        "n_shared_experts": rng.choice([1, 2]), "first_k_dense_replace": rng.choice([1, 2]), "num_hidden_layers": 4,
        "vocab_size": rng.choice([10, 70]), "tie_word_embeddings": rng.random() < 0.4,
    }  # fmt: skip


def other(kind: str, rng: random.Random) -> Config:
    """GPT-2 and Mamba-2."""
    return {
        "kind": kind, "n_embd": rng.choice([8, 16]), "n_head": rng.choice([2, 4]), "n_layer": rng.choice([4, 5]),
        "n_positions": 6, "vocab_size": rng.choice([10, 70]), "hidden_size": rng.choice([5, 8]),
        "num_hidden_layers": rng.choice([4, 5]), "num_heads": rng.choice([4, 8]), "head_dim": rng.choice([2, 4]),
        "n_groups": rng.choice([2, 4]), "state_size": rng.choice([2, 3]), "conv_kernel": 4,
        "tie_word_embeddings": kind == "gpt2" or rng.random() < 0.4,
    }  # fmt: skip


def made(kind: str, rng: random.Random) -> Config:
    """A config of a kind of model."""
    if kind == "deepseek-mtp":
        return latent(kind, rng) | {"tie_word_embeddings": False, "hidden_size": 8, "num_nextn_predict_layers": 1}
    if kind.startswith("deepseek"):
        return latent(kind, rng)
    if kind == "qwen3-next":
        return linear.next_config(rng)
    if kind in ("gpt2", "mamba2"):
        return other(kind, rng)
    c = config("llama" if kind in ("lora", "llama4") or kind.startswith("gpt-oss") else kind, rng)
    if kind in ("llama4", "gpt-oss", "gpt-oss-mxfp4"):
        c |= {"tie_word_embeddings": False, "num_local_experts": rng.choice([2, 4])}
    if kind == "llama4":  # Scout, Maverick
        c |= {"interleave_moe_layer_step": rng.choice([1, 2]), "intermediate_size_mlp": 2 * c["intermediate_size"]}
    if kind == "gpt-oss-mxfp4":
        c |= {"hidden_size": 64, "intermediate_size": rng.choice([64, 128]), "mxfp4": True}
    return c | {"lora_rank": rng.choice([2, 3, 4]), "fused_lora": rng.random() < 0.5} if kind == "lora" else c


def checkpoint(kind: str, c: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What Hugging Face has on disk."""
    special = {
        "deepseek": more.deepseek, "deepseek-mtp": more.deepseek_mtp, "deepseek-fp8": more.deepseek,
        "llama4": more.llama4, "gpt2": more.gpt2,
        "gpt-oss": more.gpt_oss, "gpt-oss-mxfp4": more.gpt_oss, "mamba2": more.mamba2, "lora": more.lora,
        "qwen3-next": linear.next_checkpoint,
    }  # fmt: skip
    return special.get(kind, frameworks.checkpoint)(c, rng)


def saved(c: Config, rng: random.Random) -> dict[str, Any]:
    return {"tensor": rng.choice([1, 2, 4]), "divisible": rng.choice([1, 8, 128])}


def stages_of(c: Config, rng: random.Random, layers: int) -> dict[str, Any]:
    pipeline, chunks = rng.choice([(1, 1), (2, 1), (2, 2), (1, 2)])
    given: dict[str, Any] = {"pipeline": pipeline, "chunks": chunks, "data": rng.choice([1, 2])}
    if layers % (pipeline * chunks) or rng.random() < 0.3:
        given["stages"] = split(rng, layers, pipeline * chunks)
    return given | {"divisible": rng.choice([1, 8, 128])}


def latent_trainer(c: Config, rng: random.Random) -> dict[str, Any]:
    given = {"tensor": rng.choice([1, 2, 4])} | stages_of(c, rng, c["num_hidden_layers"])
    count = given["data"] * given["tensor"]
    legal = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2) if count % (ep * etp) == 0]
    given["expert"], given["etp"] = rng.choice(legal)
    return given


def latent_server(c: Config, rng: random.Random) -> dict[str, Any]:
    # With block scales no cut may fall inside a block of 4: 4 heads of 4 or 8 rows and 16 columns of experts.
    most = 2 if c["fp8"] else 4
    given: dict[str, Any] = {"tensor": rng.choice([t for t in (1, 2, 4) if t <= most])}
    given |= {"replica": rng.choice([1, 2]), "pipeline": rng.choice([1, 2]), "data": rng.choice([1, 2])}
    if rng.random() < 0.3:
        given["stages"] = split(rng, c["num_hidden_layers"], given["pipeline"])
    return given


def latent_sglang(c: Config, rng: random.Random) -> dict[str, Any]:
    given = {k: v for k, v in latent_server(c, rng).items() if k not in ("stages", "data")}
    return given | {"ep": rng.choice([k for k in (1, 2, 4) if given["tensor"] % k == 0])}


def moe_sglang(c: Config, rng: random.Random) -> dict[str, Any]:
    given = {k: v for k, v in moe_server(c, rng).items() if k not in ("stages", "data")}
    return given | {"ep": rng.choice([k for k in (1, 2, 4) if given["tensor"] % k == 0])}


def served_by_sglang(c: Config, w: dict[str, np.ndarray], ep: int = 1, **given: Any) -> Any:
    dense = frameworks.served(c, w, last=True, **given)
    return more.served_moe(c, w, ep=ep, dense=dense, **given)


def stacked_by_fsdp2(c: Config, w: dict[str, np.ndarray], **given: Any) -> Any:
    dense = frameworks.fsdp2(c, {n: a for n, a in w.items() if ".mlp." not in n}, **given)
    return more.fsdp2_experts(c, w, dense, given["data"], given["tensor"])


def gpt2_server(c: Config, rng: random.Random) -> dict[str, Any]:
    return {"tensor": rng.choice([1, 2]), "replica": rng.choice([1, 2])}


def gpt2_trainer(c: Config, rng: random.Random) -> dict[str, Any]:
    return {"tensor": rng.choice([1, 2])} | stages_of(c, rng, c["n_layer"])


def oss_server(c: Config, rng: random.Random) -> dict[str, Any]:
    return {k: v for k, v in server(c, rng).items() if k == "replica"} | {"tensor": rng.choice([1, 2])}


def mamba_trainer(c: Config, rng: random.Random) -> dict[str, Any]:
    return {"tensor": rng.choice([1, 2])} | stages_of(c, rng, c["num_hidden_layers"])


def llama4_server(c: Config, rng: random.Random) -> dict[str, Any]:
    return server(c, rng)


def adapters(c: Config, rng: random.Random) -> dict[str, Any]:
    return {"data": rng.choice([1, 2, 3]), "replica": rng.choice([1, 2])}


def adapter_folder(c: Config, rng: random.Random) -> dict[str, Any]:
    rows = c["num_key_value_heads"] * c["head_dim"], c["hidden_size"], c["lora_rank"], c["intermediate_size"] // 2
    return {"tensor": rng.choice([t for t in (1, 2, 4) if all(n % t == 0 for n in rows)])}


def adapter_trainer(c: Config, rng: random.Random) -> dict[str, Any]:
    given = adapter_folder(c, rng) | stages_of(c, rng, c["num_hidden_layers"])
    return {k: v for k, v in given.items() if k != "divisible"}


TABLES: dict[str, dict[str, Side]] = {
    "llama": {
        "hf-llama": (frameworks.hugging_face, hf, {}),
        "megatron-llama": (frameworks.megatron, trainer, {}),
        "vllm-llama": (frameworks.served, server, {}),
        "sglang-llama": (frameworks.served, without_stages, {"last": True}),
        "fsdp2-llama": (frameworks.fsdp2, sharded, {}),
        "megatron-dist-llama": (more.torch_dist, saved, {}),
        "megatron-stacked-llama": (more.stacked, saved, {}),
        "torchtitan-llama": (frameworks.fsdp2, sharded, {"meta": "fused"}),
        "torchtitan-llama-split": (frameworks.fsdp2, sharded, {"meta": "split"}),
    },
    "qwen3": {
        "hf-qwen3": (frameworks.hugging_face, hf, {}),
        "megatron-qwen3": (frameworks.megatron, trainer, {}),
        "vllm-qwen3": (frameworks.served, server, {}),
        "fsdp2-qwen3": (frameworks.fsdp2, sharded, {}),
        "sglang-qwen3": (frameworks.served, without_stages, {"last": True}),
        "megatron-dist-qwen3": (more.torch_dist, saved, {}),
        "megatron-stacked-qwen3": (more.stacked, saved, {}),
    },
    "qwen3-moe": {
        "hf-qwen3-moe": (frameworks.hugging_face, hf, {}),
        "hf5-qwen3-moe": (frameworks.hugging_face_5, hf, {}),
        "megatron-qwen3-moe": (frameworks.megatron, moe_trainer, {}),
        "vllm-qwen3-moe": (frameworks.served, moe_server, {}),
        "vllm-qwen3-moe-ep": (frameworks.served, moe_server, {"ep": True}),
        "sglang-qwen3-moe": (served_by_sglang, moe_sglang, {}),
        "fsdp2-qwen3-moe": (stacked_by_fsdp2, sharded, {}),
        "megatron-dist-qwen3-moe": (more.torch_dist, saved, {}),
        "megatron-stacked-qwen3-moe": (more.stacked, saved, {}),
    },
    "mixtral": {
        "hf-mixtral": (frameworks.hugging_face, hf, {}),
        "megatron-mixtral": (frameworks.megatron, moe_trainer, {}),
        "vllm-mixtral": (frameworks.served, moe_server, {}),
        "vllm-mixtral-ep": (frameworks.served, moe_server, {"ep": True}),
        "sglang-mixtral": (served_by_sglang, moe_sglang, {}),
        "hf5-mixtral": (more.hugging_face_5_mixtral, hf, {}),
        "megatron-dist-mixtral": (more.torch_dist, saved, {}),
        "megatron-stacked-mixtral": (more.stacked, saved, {}),
    },
    "deepseek": {
        "hf-deepseek-v3": (frameworks.hugging_face, hf, {}),
        "hf5-deepseek-v3": (more.deepseek_5, hf, {}),
        "megatron-deepseek-v3": (more.deepseek_megatron, latent_trainer, {}),
        "megatron-dist-deepseek-v3": (more.torch_dist, saved, {}),
        "vllm-deepseek-v3": (more.deepseek_served, latent_server, {}),
        "vllm-deepseek-v3-ep": (more.deepseek_served, latent_server, {"on": True}),
        "sglang-deepseek-v3": (more.deepseek_served, latent_sglang, {"sglang": True}),
    },
    "deepseek-fp8": {
        "hf-deepseek-v3-fp8": (frameworks.hugging_face, hf, {}),
        "vllm-deepseek-v3-fp8": (more.deepseek_served, latent_server, {}),
        "vllm-deepseek-v3-fp8-ep": (more.deepseek_served, latent_server, {"on": True}),
    },
    "deepseek-mtp": {
        "hf-deepseek-v3-mtp": (frameworks.hugging_face, hf, {}),
        "megatron-deepseek-v3-mtp": (more.deepseek_mtp_megatron, latent_trainer, {}),
    },
    "llama4": {
        "hf-llama4": (frameworks.hugging_face, hf, {}),
        "vllm-llama4": (more.llama4_served, llama4_server, {}),
    },
    "gpt2": {
        "hf-gpt2": (frameworks.hugging_face, hf, {}),
        "megatron-gpt2": (more.gpt2_megatron, gpt2_trainer, {}),
        "vllm-gpt2": (more.gpt2_served, gpt2_server, {}),
    },
    "gpt-oss": {
        "hf5-gpt-oss": (frameworks.hugging_face, hf, {}),
        "vllm-gpt-oss": (more.gpt_oss_served, oss_server, {}),
    },
    "gpt-oss-mxfp4": {
        "hf-gpt-oss-mxfp4": (frameworks.hugging_face, hf, {}),
        "vllm-gpt-oss-mxfp4": (more.gpt_oss_served, oss_server, {}),
    },
    "qwen3-next": {
        "hf-qwen3-next": (frameworks.hugging_face, hf, {}),
        "vllm-qwen3-next": (linear.next_served, linear.next_degrees, {}),
        "fsdp2-qwen3-next": (linear.next_fsdp2, linear.rows_degrees, {}),
    },
    "mamba2": {
        "hf-mamba2": (frameworks.hugging_face, hf, {}),
        "fsdp2-mamba2": (linear.rows_of, linear.rows_degrees, {}),
        "megatron-mamba2": (more.mamba2_megatron, mamba_trainer, {}),
    },
    "lora": {
        "peft-llama": (frameworks.hugging_face, hf, {}),
        "fsdp2-peft-llama": (more.lora_fsdp2, adapters, {}),
        "megatron-peft-llama": (more.lora_megatron, adapter_trainer, {}),
        "megatron-dist-peft-llama": (more.lora_torch_dist, adapter_folder, {}),
    },
}
PAIRS = [(kind, a, b) for kind, tables in TABLES.items() for a, b in itertools.permutations(tables, 2)]


def side(
    kind: str, name: str, c: Config, whole: dict[str, np.ndarray], rng: random.Random, first: int
) -> tuple[sp.Weights, dict[int, dict[str, np.ndarray]]]:
    """A table at random degrees, and what the framework's code holds under them."""
    make, degrees, more_given = TABLES[kind][name]
    given = degrees(c, rng)
    found = make(c, whole, **given, **more_given)
    weights = sp.Weights.load(name, c, devices=range(first, first + len(found)), dtype="f32", **given)
    return weights, {first + rank: named for rank, named in found.items()}


def differing(kind: str, a: str, b: str, seed: int) -> tuple[int, list[str]]:
    """Move one random case from a table to another: the bytes that were compared, and the names that differ."""
    rng = random.Random(f"{a} {b} {seed}")
    c = made(kind, rng)
    whole = checkpoint(kind, c, np.random.default_rng(seed))
    source, before = side(kind, a, c, whole, rng, 0)
    target, wanted = side(kind, b, c, whole, rng, rng.choice([0, 1000]))
    assert sp.Weights.parse(str(source)) == source
    for rank in target.devices:
        target.check(wanted[rank], rank)
    plan = sp.refit(source, target)
    after = plan.apply(before)
    total, wrong = 0, []
    for rank in target.devices:
        found = plan.regions(rank)
        if min(found.source_strides.min(initial=0), found.target_strides.min(initial=0)) < 0:
            wrong.append(f"{seed}: a region of rank {rank} goes backwards")
    for rank, named in wanted.items():
        for name, array in named.items():
            total += array.nbytes
            if after[rank][name].dtype != array.dtype or after[rank][name].tobytes() != array.tobytes():
                wrong.append(f"{seed}: {rank} {name}")
    return total, wrong
