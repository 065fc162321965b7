"""What frameworks hold, from a checkpoint of Hugging Face, made as their own code makes it: whole tensors.

Nothing of shardplan is imported: these are what the tables and refits are compared with. Each function names the file
and the commit whose order of cutting and joining it follows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray
Named = dict[str, Array]
Config = dict[str, Any]


def head_dim(c: Config) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def checkpoint(c: Config, rng: np.random.Generator) -> Named:
    """A checkpoint on disk: transformers 000c33f (llama, qwen3, mixtral), 00d4b3d (qwen3_moe)."""
    e, d, v = c["hidden_size"], head_dim(c), c["vocab_size"]
    h, g = c["num_attention_heads"], c["num_key_value_heads"]
    kind = c["kind"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, e)
    for k in range(c["num_hidden_layers"]):
        p = f"model.layers.{k}."
        shapes |= {p + "input_layernorm.weight": (e,), p + "post_attention_layernorm.weight": (e,)}
        shapes |= {p + "self_attn.q_proj.weight": (h * d, e), p + "self_attn.k_proj.weight": (g * d, e)}
        shapes |= {p + "self_attn.v_proj.weight": (g * d, e), p + "self_attn.o_proj.weight": (e, h * d)}
        if "qwen3" in kind:
            shapes |= {p + "self_attn.q_norm.weight": (d,), p + "self_attn.k_norm.weight": (d,)}
        if kind in ("llama", "qwen3"):
            f = c["intermediate_size"]
            shapes |= {p + "mlp.gate_proj.weight": (f, e), p + "mlp.up_proj.weight": (f, e)}
            shapes[p + "mlp.down_proj.weight"] = (e, f)
        elif kind == "qwen3-moe":
            f = c["moe_intermediate_size"]
            shapes[p + "mlp.gate.weight"] = (c["num_experts"], e)
            for x in range(c["num_experts"]):
                q = p + f"mlp.experts.{x}."
                shapes |= {q + "gate_proj.weight": (f, e), q + "up_proj.weight": (f, e), q + "down_proj.weight": (e, f)}
        else:
            f = c["intermediate_size"]
            shapes[p + "block_sparse_moe.gate.weight"] = (c["num_local_experts"], e)
            for x in range(c["num_local_experts"]):
                q = p + f"block_sparse_moe.experts.{x}."
                shapes |= {q + "w1.weight": (f, e), q + "w3.weight": (f, e), q + "w2.weight": (e, f)}
    total = sum(math.prod(s) for s in shapes.values())
    every = rng.permutation(total).astype(np.float32) + 1
    out: Named = {}
    at = 0
    for name, shape in shapes.items():
        out[name] = every[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
    return out


def experts(c: Config, w: Named, k: int) -> list[tuple[Array, Array, Array]]:
    """Gate, up and down of every expert of a layer, whatever they are called."""
    if c["kind"] == "mixtral":
        p = f"model.layers.{k}.block_sparse_moe.experts."
        names = ("w1", "w3", "w2")
        count = c["num_local_experts"]
    else:
        p = f"model.layers.{k}.mlp.experts."
        names = ("gate_proj", "up_proj", "down_proj")
        count = c["num_experts"]
    return [
        (w[f"{p}{x}.{names[0]}.weight"], w[f"{p}{x}.{names[1]}.weight"], w[f"{p}{x}.{names[2]}.weight"])
        for x in range(count)
    ]


def router(c: Config, w: Named, k: int) -> Array:
    return w[f"model.layers.{k}.{'block_sparse_moe' if c['kind'] == 'mixtral' else 'mlp'}.gate.weight"]


def hugging_face(c: Config, w: Named, replica: int = 1) -> dict[int, Named]:
    """On disk."""
    return {r: dict(w) for r in range(replica)}


def hugging_face_5(c: Config, w: Named, replica: int = 1) -> dict[int, Named]:
    """In memory: transformers 000c33f, conversion_mapping.py (MergeModulelist of experts, Concatenate)."""
    out = {name: a for name, a in w.items() if ".experts." not in name}
    for k in range(c["num_hidden_layers"]):
        every = experts(c, w, k)
        p = f"model.layers.{k}.mlp.experts."
        gates, ups = np.stack([g for g, _, _ in every]), np.stack([u for _, u, _ in every])
        out[p + "gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        out[p + "down_proj"] = np.stack([d for _, _, d in every])
    return {r: dict(out) for r in range(replica)}


def merge_qkv(c: Config, q: Array, k: Array, v: Array) -> Array:
    """Megatron-Bridge 067f987, param_mapping.py merge_qkv_weights: each group's queries, key and value together."""
    g, d = c["num_key_value_heads"], head_dim(c)
    each = c["num_attention_heads"] // g
    rows: list[Array] = []
    for i in range(g):
        rows.append(q[i * each * d : (i + 1) * each * d])
        rows.append(k[i * d : (i + 1) * d])
        rows.append(v[i * d : (i + 1) * d])
    return np.concatenate(rows)


def pad_rows(a: Array, n: int) -> Array:
    return np.concatenate([a, np.zeros((n - len(a), *a.shape[1:]), a.dtype)])


def megatron(
    c: Config,
    w: Named,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    chunks: int = 1,
    divisible: int = 128,
    stages: list[int] | None = None,
    expert: int = 1,
    etp: int = 1,
) -> dict[int, Named]:
    """Megatron-LM d98e8a6: attention.py, mlp.py, transformer_layer.py (get_transformer_layer_offset), experts.py,
    parallel_state.py:617 (order tp-cp-ep-dp-pp), vocab_utils.py (vocabulary padded to divisible * tensor).
    """  # fmt: skip
    layers = c["num_hidden_layers"]
    counts = stages or [layers // (chunks * pipeline)] * (chunks * pipeline)
    unit = divisible * tensor
    padded = -(-c["vocab_size"] // unit) * unit
    out: dict[int, Named] = {}
    dense = data * tensor
    for rank in range(pipeline * dense):
        stage, rest = divmod(rank, dense)
        t = rest % tensor
        et, ep = rest % etp, rest // etp % expert
        own: Named = {}
        for chunk in range(chunks):
            p = f"{chunk}."
            first = chunk == 0 and stage == 0
            last = chunk == chunks - 1 and stage == pipeline - 1
            if first:
                own[p + "embedding.word_embeddings.weight"] = np.split(
                    pad_rows(w["model.embed_tokens.weight"], padded), tensor
                )[t]
            if last and not (c["tie_word_embeddings"] and pipeline == 1):
                head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
                own[p + "output_layer.weight"] = np.split(pad_rows(head, padded), tensor)[t]
            if last:
                own[p + "decoder.final_layernorm.weight"] = w["model.norm.weight"]
            number = chunk * pipeline + stage
            offset = sum(counts[:number])
            for local in range(counts[number]):
                k = offset + local
                hf, m = f"model.layers.{k}.", f"{p}decoder.layers.{local}."
                q, kk, v = (w[f"{hf}self_attn.{a}_proj.weight"] for a in "qkv")
                own[m + "self_attention.linear_qkv.layer_norm_weight"] = w[hf + "input_layernorm.weight"]
                own[m + "self_attention.linear_qkv.weight"] = np.split(merge_qkv(c, q, kk, v), tensor)[t]
                own[m + "self_attention.linear_proj.weight"] = np.split(
                    w[hf + "self_attn.o_proj.weight"], tensor, axis=1
                )[t]
                if "qwen3" in c["kind"]:
                    own[m + "self_attention.q_layernorm.weight"] = w[hf + "self_attn.q_norm.weight"]
                    own[m + "self_attention.k_layernorm.weight"] = w[hf + "self_attn.k_norm.weight"]
                norm = w[hf + "post_attention_layernorm.weight"]
                if c["kind"] in ("llama", "qwen3"):
                    own[m + "mlp.linear_fc1.layer_norm_weight"] = norm
                    gate, up, down = (w[f"{hf}mlp.{a}_proj.weight"] for a in ("gate", "up", "down"))
                    # Megatron-Bridge GatedMLPMapping: both are cut, then joined
                    own[m + "mlp.linear_fc1.weight"] = np.concatenate(
                        [np.split(gate, tensor)[t], np.split(up, tensor)[t]]
                    )
                    own[m + "mlp.linear_fc2.weight"] = np.split(down, tensor, axis=1)[t]
                    continue
                own[m + "pre_mlp_layernorm.weight"] = norm
                own[m + "mlp.router.weight"] = router(c, w, k)
                every = experts(c, w, k)
                each = len(every) // expert
                for x, (gate, up, down) in enumerate(every[ep * each : (ep + 1) * each]):
                    halves = [np.split(gate, etp)[et], np.split(up, etp)[et]]
                    own[m + f"mlp.experts.linear_fc1.weight{x}"] = np.concatenate(halves)
                    own[m + f"mlp.experts.linear_fc2.weight{x}"] = np.split(down, etp, axis=1)[et]
        out[rank] = own
    return out


def has_head(c: Config, stage: int, pipeline: int) -> bool:
    """SGLang 0.5.23, models/llama.py, qwen3.py, deepseek_v2.py, qwen3_moe.py, mixtral.py: stages with an lm_head."""
    if c["kind"] == "llama":
        return not c["tie_word_embeddings"]
    if c["kind"] in ("qwen3", "deepseek"):
        return stage == pipeline - 1 and not (c["tie_word_embeddings"] and pipeline == 1)
    return True


def served(
    c: Config,
    w: Named,
    tensor: int = 1,
    pipeline: int = 1,
    replica: int = 1,
    data: int = 1,
    stages: list[int] | None = None,
    ep: bool = False,
    last: bool = False,
) -> dict[int, Named]:
    """vLLM 0036d38: linear.py (QKVParallelLinear.weight_loader, MergedColumnParallelLinear), 00db011:
    vocab_parallel_embedding.py, 0014ec6: fused_moe/layer.py; SGLang 0079fcc likewise (`last`: its uneven stages).
    """  # fmt: skip
    layers, d = c["num_hidden_layers"], head_dim(c)
    h, g = c["num_attention_heads"], c["num_key_value_heads"]
    small, more = divmod(layers, pipeline)
    counts = stages or [small + (last and s >= pipeline - more) for s in range(pipeline)]
    padded = -(-c["vocab_size"] // 64) * 64
    out: dict[int, Named] = {}
    for rank in range(replica * data * pipeline * tensor):
        t, stage, dp = rank % tensor, rank // tensor % pipeline, rank // (tensor * pipeline) % data
        own: Named = {}
        rows = padded // tensor

        def vocabulary(a: Array, t: int = t, rows: int = rows) -> Array:
            mine = np.zeros((rows, a.shape[1]), a.dtype)  # padding at the end is zero
            loaded = a[t * rows : min((t + 1) * rows, len(a))]
            mine[: len(loaded)] = loaded
            return mine

        tied = c["tie_word_embeddings"]
        ends = c["kind"] in ("mixtral", "qwen3-moe") and not last  # vLLM 0.33: on every stage
        if ends or stage == 0 or (tied and stage == pipeline - 1 and not last):
            own["model.embed_tokens.weight"] = vocabulary(w["model.embed_tokens.weight"])
        if ends or stage == pipeline - 1:
            own["model.norm.weight"] = w["model.norm.weight"]
        if has_head(c, stage, pipeline) if last else (ends or stage == pipeline - 1) and not tied:
            own["lm_head.weight"] = vocabulary(w["model.embed_tokens.weight" if tied else "lm_head.weight"])
        offset = sum(counts[:stage])
        for k in range(offset, offset + counts[stage]):
            p = f"model.layers.{k}."
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                own[p + name] = w[p + name]
            heads = h // tensor
            if tensor >= g:  # num_kv_head_replicas = tensor / g: neighbours hold the same head
                kv_heads, shard = 1, t // (tensor // g)
            else:
                kv_heads, shard = g // tensor, t
            q = w[p + "self_attn.q_proj.weight"][t * heads * d : (t + 1) * heads * d]
            kk = w[p + "self_attn.k_proj.weight"][shard * kv_heads * d : (shard + 1) * kv_heads * d]
            v = w[p + "self_attn.v_proj.weight"][shard * kv_heads * d : (shard + 1) * kv_heads * d]
            own[p + "self_attn.qkv_proj.weight"] = np.concatenate([q, kk, v])
            own[p + "self_attn.o_proj.weight"] = w[p + "self_attn.o_proj.weight"][
                :, t * heads * d : (t + 1) * heads * d
            ]
            if "qwen3" in c["kind"]:
                for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                    own[p + name] = w[p + name]
            if c["kind"] in ("llama", "qwen3"):
                gate, up, down = (w[f"{p}mlp.{a}_proj.weight"] for a in ("gate", "up", "down"))
                f = len(gate) // tensor
                own[p + "mlp.gate_up_proj.weight"] = np.concatenate(
                    [gate[t * f : (t + 1) * f], up[t * f : (t + 1) * f]]
                )
                own[p + "mlp.down_proj.weight"] = down[:, t * f : (t + 1) * f]
                continue
            m = p + ("block_sparse_moe." if c["kind"] == "mixtral" else "mlp.")
            own[m + "gate.weight"] = router(c, w, k)
            every = experts(c, w, k)
            number, count = dp * tensor + t, data * tensor
            if ep:  # determine_expert_map: the first ranks hold one more
                base, rest = divmod(len(every), count)
                start = number * base + min(number, rest)
                mine = every[start : start + base + (number < rest)]
                f, number = len(every[0][0]), 0
            else:
                mine, f = every, len(every[0][0]) // count
            cut = slice(number * f, (number + 1) * f)
            e = c["hidden_size"]
            w13, w2 = np.zeros((len(mine), 2 * f, e), np.float32), np.zeros((len(mine), e, f), np.float32)
            for x, (gate, up, down) in enumerate(mine):
                w13[x, :f], w13[x, f:], w2[x] = gate[cut], up[cut], down[:, cut]
            m += "experts." if last else "experts.routed_experts."
            own[m + "w13_weight"], own[m + "w2_weight"] = w13, w2
        out[rank] = own
    return out


def chunked(a: Array, n: int, k: int, axis: int = 0) -> Array:
    """torch.chunk's k-th chunk, empty where there are fewer."""
    size = -(-a.shape[axis] // n)
    at: list[Any] = [slice(None)] * a.ndim
    at[axis] = slice(k * size, (k + 1) * size)
    return a[tuple(at)]


def titan(c: Config, w: Named, fused: bool) -> Named:
    """torchtitan 0.3.0: the names and rotary order of models/llama3/state_dict_adapter.py (`_reverse_permute`).

    `fused`: wqkv of models/common/attention.py, FusedQKVLinear._merge_qkv_on_load.
    """
    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "lm_head.weight": "lm_head.weight",
        "model.norm.weight": "norm.weight",
    }
    parts = {
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.qkv_linear.wq", "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.v_proj": "attention.qkv_linear.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    out: Named = {}
    for name, a in w.items():
        if "q_proj" in name or "k_proj" in name:
            d = head_dim(c)
            a = a.reshape(a.shape[0] // d, 2, d // 2, -1).swapaxes(1, 2).reshape(a.shape)
        if name in names:
            out[names[name]] = a
        else:
            _, _, number, rest = name.split(".", 3)
            out[f"layers.{number}.{parts[rest.removesuffix('.weight')]}.weight"] = a
    for name in [n for n in out if fused and "wq.weight" in n]:
        q, k, v = (out.pop(name.replace("wq", part)) for part in ("wq", "wk", "wv"))
        out[name.replace("wq", "wqkv")] = merge_qkv(c, q, k, v)
    return out


def fsdp2(c: Config, w: Named, tensor: int = 1, data: int = 1, replica: int = 1, meta: str = "") -> dict[int, Named]:
    """torch 2.13: tensor parallelism first, then FSDP2 chunks dim 0 of what is local (_fsdp_param.py).

    `meta`: as torchtitan has it, q, k and v "split" or "fused".
    """
    out: dict[int, Named] = {}
    rows = ("o_proj.weight", "down_proj.weight", "attention.wo.weight", "feed_forward.w2.weight")
    held = titan(c, w, meta == "fused") if meta else w
    for rank in range(replica * data * tensor):
        t, n = rank % tensor, rank // tensor % data
        own: Named = {}
        for name, a in held.items():
            local = chunked(a, tensor, t, 1 if name.endswith(rows) else 0) if a.ndim == 2 else a
            own[name] = chunked(local, data, n)
        out[rank] = own
    return out
