"""What frameworks hold of models with linear attention and state-space layers, by slow converters after their code."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np

from .weights_frameworks import chunked
from .weights_more import numbered, part, vocabulary

Named = dict[str, np.ndarray]
Config = dict[str, Any]


def next_config(rng: random.Random) -> Config:
    g = rng.choice([1, 2, 4])
    return {
        "kind": "qwen3-next", "hidden_size": rng.choice([5, 8]), "num_attention_heads": 4, "num_key_value_heads": g,
        "head_dim": rng.choice([2, 4]), "num_hidden_layers": rng.choice([4, 5, 8]), "vocab_size": rng.choice([10, 70]),
        "moe_intermediate_size": 8, "num_experts": rng.choice([2, 4]), "shared_expert_intermediate_size": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": rng.choice([2, 4]), "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": rng.choice([2, 3]), "linear_value_head_dim": rng.choice([2, 5]),
        "full_attention_interval": rng.choice([2, 3, 4]), "tie_word_embeddings": rng.random() < 0.4,
    }  # fmt: skip


def next_checkpoint(c: Config, rng: np.random.Generator) -> Named:
    """On disk: transformers 5.24, models/qwen3_next/modeling_qwen3_next.py."""
    e, d, f, fs = (
        c[k] for k in ("hidden_size", "head_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
    )
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values, heads = c["linear_num_value_heads"] * c["linear_value_head_dim"], c["linear_num_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], e), "model.norm.weight": (e,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], e)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        shapes |= {p + "input_layernorm.weight": (e,), p + "post_attention_layernorm.weight": (e,)}
        if (n + 1) % c["full_attention_interval"]:
            q = p + "linear_attn."
            shapes |= {q + "in_proj_qkvz.weight": (2 * keys + 2 * values, e), q + "in_proj_ba.weight": (2 * heads, e)}
            shapes |= {q + "conv1d.weight": (2 * keys + values, 1, 4), q + "A_log": (heads,), q + "dt_bias": (heads,)}
            shapes |= {q + "norm.weight": (c["linear_value_head_dim"],), q + "out_proj.weight": (e, values)}
        else:
            q, h, g = p + "self_attn.", c["num_attention_heads"] * d, c["num_key_value_heads"] * d
            shapes |= {q + "q_proj.weight": (2 * h, e), q + "k_proj.weight": (g, e), q + "v_proj.weight": (g, e)}
            shapes |= {q + "o_proj.weight": (e, h), q + "q_norm.weight": (d,), q + "k_norm.weight": (d,)}
        q = p + "mlp."
        shapes |= {q + "gate.weight": (c["num_experts"], e), q + "shared_expert_gate.weight": (1, e)}
        for name, rows in (("shared_expert.", fs), *((f"experts.{x}.", f) for x in range(c["num_experts"]))):
            shapes |= {q + name + "gate_proj.weight": (rows, e), q + name + "up_proj.weight": (rows, e)}
            shapes[q + name + "down_proj.weight"] = (e, rows)
    return numbered(shapes, rng, {})


def next_degrees(c: Config, rng: random.Random) -> dict[str, Any]:
    out: dict[str, Any] = {k: rng.choice([1, 2]) for k in ("tensor", "data", "replica")}
    return out | {"pipeline": rng.choice([k for k in (1, 2) if c["num_hidden_layers"] % k == 0])}


def _gathered(c: Config, w: Named, n: int, joined: Any) -> tuple[np.ndarray, np.ndarray]:
    """Experts of a layer, stacked: gate and up, each as `joined` says, and down."""
    p = f"model.layers.{n}.mlp.experts."
    every = [[w[f"{p}{x}.{k}_proj.weight"] for k in ("gate", "up", "down")] for x in range(c["num_experts"])]
    return np.stack([np.concatenate([joined(a), joined(b)]) for a, b, _ in every]), np.stack([d for *_, d in every])


def next_served(
    c: Config, w: Named, tensor: int = 1, data: int = 1, replica: int = 1, pipeline: int = 1
) -> dict[int, Named]:
    """vLLM: qwen3_next.py, mamba_v2_sharded_weight_loader; QKVParallelLinear, of which a query's gate is a part."""
    out: dict[int, Named] = {}
    places = itertools.product(range(replica), range(data), range(pipeline), range(tensor))
    keys, heads = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["num_key_value_heads"]
    for rank, (_, each, stage, t) in enumerate(places):
        own: Named = {"model.norm.weight": w["model.norm.weight"]}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            own |= {name: vocabulary(w[name], tensor, t)} if name in w else {}
        count = c["num_hidden_layers"] // pipeline
        for n in range(stage * count, (stage + 1) * count):
            p = f"model.layers.{n}."
            layer = {name.removeprefix(p): a for name, a in w.items() if name.startswith(p)}
            for name, a in layer.items():
                last = name.rpartition("self_attn.")[2]
                if name == "linear_attn.conv1d.weight":
                    own[p + name] = np.concatenate([part(x, tensor, t) for x in np.split(a, [keys, 2 * keys])])
                elif name.startswith("linear_attn.") and name.endswith(
                    ("qkvz.weight", "ba.weight", "A_log", "dt_bias")
                ):
                    own[p + name] = part(a, tensor, t)
                elif name.endswith(("out_proj.weight", "o_proj.weight", "shared_expert.down_proj.weight")):
                    own[p + name] = part(a, tensor, t, 1)
                elif last == "q_proj.weight":
                    shared = max(1, tensor // heads)  # ranks that have the same key head
                    mine = [part(layer[f"self_attn.{k}_proj.weight"], min(tensor, heads), t // shared) for k in "kv"]
                    own[p + "self_attn.qkv_proj.weight"] = np.concatenate([part(a, tensor, t), *mine])
                elif name.endswith("shared_expert.gate_proj.weight"):
                    both = [part(layer[f"mlp.shared_expert.{k}_proj.weight"], tensor, t) for k in ("gate", "up")]
                    own[p + "mlp.shared_expert.gate_up_proj.weight"] = np.concatenate(both)
                elif ".experts." not in name and not name.endswith(
                    ("k_proj.weight", "v_proj.weight", "up_proj.weight")
                ):
                    own[p + name] = a
            k, parts = each * tensor + t, data * tensor
            w13, w2 = _gathered(c, w, n, lambda a, k=k, parts=parts: part(a, parts, k))
            own[p + "mlp.experts.routed_experts.w13_weight"] = w13
            own[p + "mlp.experts.routed_experts.w2_weight"] = part(w2, parts, k, 2)
        out[rank] = own
    return out


def next_fsdp2(c: Config, w: Named, data: int = 1, replica: int = 1) -> dict[int, Named]:
    """FSDP2 over transformers 5: experts stacked, dim 0 by torch.chunk."""
    whole = {n: a for n, a in w.items() if ".experts." not in n}
    for n in range(c["num_hidden_layers"]):
        joined, down = _gathered(c, w, n, lambda a: a)
        whole |= {f"model.layers.{n}.mlp.experts.gate_up_proj": joined, f"model.layers.{n}.mlp.experts.down_proj": down}
    return rows_of(c, whole, data, replica)


def rows_of(c: Config, w: Named, data: int = 1, replica: int = 1) -> dict[int, Named]:
    """FSDP2: dim 0 of everything by torch.chunk."""
    return {r: {n: chunked(a, data, r % data) for n, a in w.items()} for r in range(data * replica)}


def rows_degrees(c: Config, rng: random.Random) -> dict[str, Any]:
    return {"data": rng.choice([1, 2, 3]), "replica": rng.choice([1, 2])}
