"""What frameworks hold of further models, made as their own code makes it; as `weights_frameworks`, which see.

DeepSeek-V3, Llama 4, GPT-2, GPT-OSS, Mamba-2, LoRA adapters, and Megatron's torch_dist folders.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from ml_dtypes import float8_e4m3fn

from .weights_frameworks import chunked, experts, has_head, hugging_face, merge_qkv, pad_rows, router

Array = np.ndarray
Named = dict[str, Array]
Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def numbered(shapes: Shapes, rng: np.random.Generator, dtypes: dict[str, Any]) -> Named:
    """Tensors of distinct whole numbers, or of random bytes where a name ends as `dtypes` says."""
    total = sum(math.prod(s) for s in shapes.values())
    every = rng.permutation(total).astype(np.float32) + 1
    out: Named = {}
    at = 0
    for name, shape in shapes.items():
        kind = next((d for end, d in dtypes.items() if name.endswith(end)), np.float32)
        if kind is np.float32:
            out[name] = every[at : at + math.prod(shape)].reshape(shape)
        else:
            out[name] = rng.integers(0, 120, shape, dtype=np.uint8).view(kind)
        at += math.prod(shape)
    return out


def part(a: Array, n: int, k: int, axis: int = 0) -> Array:
    """The k-th of n equal parts."""
    return np.split(a, n, axis=axis)[k]


def vocabulary(a: Array, tensor: int, t: int, unit: int = 64) -> Array:
    """vLLM 00db011, vocab_parallel_embedding.py: padded to a multiple, then cut; padding is zero."""
    return part(pad_rows(a, -(-len(a) // unit) * unit), tensor, t)


# DeepSeek-V3


def deepseek(c: Config, rng: np.random.Generator) -> Named:
    """On disk: deepseek-ai/DeepSeek-V3 9b4e978, README_WEIGHTS.md: with `fp8` a scale for each block."""
    e, h, a, k = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    rope, nope, vd = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], e), "model.norm.weight": (e,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], e)
    quantised: list[str] = []
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        shapes |= {p + "input_layernorm.weight": (e,), p + "post_attention_layernorm.weight": (e,)}
        s = p + "self_attn."
        shapes |= {s + "q_a_layernorm.weight": (a,), s + "kv_a_layernorm.weight": (k,)}
        linear: Shapes = {
            s + "q_a_proj": (a, e), s + "q_b_proj": (h * (nope + rope), a), s + "kv_a_proj_with_mqa": (k + rope, e),
            s + "kv_b_proj": (h * (nope + vd), k), s + "o_proj": (e, h * vd),
        }  # fmt: skip
        mlps = {p + "mlp.": c["intermediate_size"]}
        if n >= c["first_k_dense_replace"]:
            shapes |= {p + "mlp.gate.weight": (c["n_routed_experts"], e)}
            shapes[p + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
            mlps = {p + f"mlp.experts.{x}.": c["moe_intermediate_size"] for x in range(c["n_routed_experts"])}
            mlps[p + "mlp.shared_experts."] = c["moe_intermediate_size"] * c["n_shared_experts"]
        for q, f in mlps.items():
            linear |= {q + "gate_proj": (f, e), q + "up_proj": (f, e), q + "down_proj": (e, f)}
        for name, shape in linear.items():
            shapes[name + ".weight"] = shape
            quantised.append(name + ".weight")
            if c.get("fp8"):
                b = c["weight_block_size"]
                shapes[name + ".weight_scale_inv"] = (-(-shape[0] // b), -(-shape[1] // b))
    return numbered(shapes, rng, dict.fromkeys(quantised, float8_e4m3fn) if c.get("fp8") else {})


def deepseek_5(c: Config, w: Named, replica: int = 1) -> dict[int, Named]:
    """In memory: transformers 000c33f, conversion_mapping.py."""
    out = {name: a for name, a in w.items() if ".mlp.experts." not in name}
    for n in range(c["first_k_dense_replace"], c["num_hidden_layers"]):
        p = f"model.layers.{n}.mlp.experts."
        every = [[w[f"{p}{x}.{m}_proj.weight"] for m in ("gate", "up", "down")] for x in range(c["n_routed_experts"])]
        out[p + "gate_up_proj"] = np.stack([np.concatenate([g, u]) for g, u, _ in every])
        out[p + "down_proj"] = np.stack([d for _, _, d in every])
    return {r: dict(out) for r in range(replica)}


def deepseek_megatron(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, data: int = 1, chunks: int = 1, divisible: int = 128,
    stages: list[int] | None = None, expert: int = 1, etp: int = 1,
) -> dict[int, Named]:  # fmt: skip
    """Megatron-LM d98e8a6, multi_latent_attention.py (down projections duplicated), shared_experts.py, experts.py;
    Megatron-Bridge 067f987, models/deepseek/common.py.
    """  # fmt: skip
    layers, dense = c["num_hidden_layers"], data * tensor
    counts = stages or [layers // (chunks * pipeline)] * (chunks * pipeline)
    out: dict[int, Named] = {}
    for rank in range(pipeline * dense):
        stage, rest = divmod(rank, dense)
        t, et, ep = rest % tensor, rest % etp, rest // etp % expert
        own: Named = {}
        for chunk in range(chunks):
            number = chunk * pipeline + stage
            last = number == chunks * pipeline - 1
            own |= _megatron_ends(c, w, f"{chunk}.", number == 0, last, tensor, t, divisible, pipeline)
            for local in range(counts[number]):
                n = sum(counts[:number]) + local
                p, m = f"model.layers.{n}.", f"{chunk}.decoder.layers.{local}."
                own[m + "input_layernorm.weight"] = w[p + "input_layernorm.weight"]
                s, q = m + "self_attention.", p + "self_attn."
                own[s + "linear_q_down_proj.weight"] = w[q + "q_a_proj.weight"]
                own[s + "linear_q_up_proj.layer_norm_weight"] = w[q + "q_a_layernorm.weight"]
                own[s + "linear_q_up_proj.weight"] = part(w[q + "q_b_proj.weight"], tensor, t)
                own[s + "linear_kv_down_proj.weight"] = w[q + "kv_a_proj_with_mqa.weight"]
                own[s + "linear_kv_up_proj.layer_norm_weight"] = w[q + "kv_a_layernorm.weight"]
                own[s + "linear_kv_up_proj.weight"] = part(w[q + "kv_b_proj.weight"], tensor, t)
                own[s + "linear_proj.weight"] = part(w[q + "o_proj.weight"], tensor, t, 1)
                norm = w[p + "post_attention_layernorm.weight"]
                if n < c["first_k_dense_replace"]:
                    own[m + "mlp.linear_fc1.layer_norm_weight"] = norm
                    own |= _gated(w, p + "mlp.", m + "mlp.linear_fc{}.weight", tensor, t)
                    continue
                own[m + "pre_mlp_layernorm.weight"] = norm
                own[m + "mlp.router.weight"] = w[p + "mlp.gate.weight"]
                own[m + "mlp.router.expert_bias"] = w[p + "mlp.gate.e_score_correction_bias"]
                own |= _gated(w, p + "mlp.shared_experts.", m + "mlp.shared_experts.linear_fc{}.weight", tensor, t)
                each = c["n_routed_experts"] // expert
                for x in range(each):
                    name = m + "mlp.experts.linear_fc{}.weight" + str(x)
                    own |= _gated(w, p + f"mlp.experts.{ep * each + x}.", name, etp, et)
        out[rank] = own
    return out


def deepseek_mtp(c: Config, rng: np.random.Generator) -> Named:
    """On disk: deepseek-ai/DeepSeek-V3 0b39205, README_WEIGHTS.md: one more layer under the next number, with experts;
    embed_tokens and shared_head.head share parameters with the model; enorm, hnorm and eh_proj beside the layer.
    """  # fmt: skip
    n, e = c["num_hidden_layers"], c["hidden_size"]
    out = deepseek(c | {"num_hidden_layers": n + 1}, rng)
    p = f"model.layers.{n}."
    most = sum(a.size for a in out.values())
    for name, shape in (("enorm", (e,)), ("hnorm", (e,)), ("eh_proj", (e, 2 * e)), ("shared_head.norm", (e,))):
        size = math.prod(shape)
        out[f"{p}{name}.weight"] = (np.arange(size, dtype=np.float32) + most + 1).reshape(shape)
        most += size
    out[p + "embed_tokens.weight"] = out["model.embed_tokens.weight"]
    out[p + "shared_head.head.weight"] = out["lm_head.weight"]
    return out


def deepseek_mtp_megatron(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, data: int = 1, chunks: int = 1, divisible: int = 128,
    expert: int = 1, etp: int = 1, **more: Any,
) -> dict[int, Named]:  # fmt: skip
    """Megatron-LM 00611e6, multi_token_prediction.py (mtp_on_this_rank: the last stage; eh_proj column parallel) and
    gpt_model.py (`pre_process or mtp_process` has an embedding); Megatron-Bridge 067f987, models/deepseek/common.py.
    """  # fmt: skip
    out = deepseek_megatron(c, w, tensor, pipeline, data, chunks, divisible, expert=expert, etp=etp, **more)
    p = f"model.layers.{c['num_hidden_layers']}."
    for rank, own in out.items():
        stage, rest = divmod(rank, data * tensor)
        if stage < pipeline - 1:
            continue
        t, et, ep = rest % tensor, rest % etp, rest // etp % expert
        m = f"{chunks - 1}.mtp.layers.0."
        embed = w[p + "embed_tokens.weight"]
        rows = -(-len(embed) // (divisible * tensor)) * divisible * tensor
        own[f"{chunks - 1}.embedding.word_embeddings.weight"] = part(pad_rows(embed, rows), tensor, t)
        for mine, theirs in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            own[f"{m}{mine}.weight"] = w[f"{p}{theirs}.weight"]
        own[m + "eh_proj.weight"] = part(w[p + "eh_proj.weight"], tensor, t)
        m += "mtp_model_layer."
        s, q = m + "self_attention.", p + "self_attn."
        whole = {
            m + "input_layernorm.weight": p + "input_layernorm.weight",
            m + "pre_mlp_layernorm.weight": p + "post_attention_layernorm.weight",
            s + "linear_q_down_proj.weight": q + "q_a_proj.weight",
            s + "linear_q_up_proj.layer_norm_weight": q + "q_a_layernorm.weight",
            s + "linear_kv_down_proj.weight": q + "kv_a_proj_with_mqa.weight",
            s + "linear_kv_up_proj.layer_norm_weight": q + "kv_a_layernorm.weight",
            m + "mlp.router.weight": p + "mlp.gate.weight",
            m + "mlp.router.expert_bias": p + "mlp.gate.e_score_correction_bias",
        }
        own |= {name: w[other] for name, other in whole.items()}
        own[s + "linear_q_up_proj.weight"] = part(w[q + "q_b_proj.weight"], tensor, t)
        own[s + "linear_kv_up_proj.weight"] = part(w[q + "kv_b_proj.weight"], tensor, t)
        own[s + "linear_proj.weight"] = part(w[q + "o_proj.weight"], tensor, t, 1)
        own |= _gated(w, p + "mlp.shared_experts.", m + "mlp.shared_experts.linear_fc{}.weight", tensor, t)
        each = c["n_routed_experts"] // expert
        for x in range(each):
            name = m + "mlp.experts.linear_fc{}.weight" + str(x)
            own |= _gated(w, p + f"mlp.experts.{ep * each + x}.", name, etp, et)
    return out


def _gated(w: Named, p: str, name: str, n: int, k: int) -> Named:
    """Megatron-Bridge GatedMLPMapping: gate and up are cut, then joined; down is cut on its second dim."""
    gate, up, down = (w[f"{p}{m}_proj.weight"] for m in ("gate", "up", "down"))
    return {name.format(1): np.concatenate([part(gate, n, k), part(up, n, k)]), name.format(2): part(down, n, k, 1)}


def _megatron_ends(
    c: Config, w: Named, p: str, first: bool, last: bool, tensor: int, t: int, divisible: int, pipeline: int
) -> Named:
    embed = w.get("model.embed_tokens.weight", w.get("backbone.embeddings.weight"))
    assert embed is not None
    rows = -(-len(embed) // (divisible * tensor)) * divisible * tensor
    own: Named = {}
    if first:
        own[p + "embedding.word_embeddings.weight"] = part(pad_rows(embed, rows), tensor, t)
    if last:
        tied = c["tie_word_embeddings"]
        if not (tied and pipeline == 1):
            own[p + "output_layer.weight"] = part(pad_rows(embed if tied else w["lm_head.weight"], rows), tensor, t)
        if "model.norm.weight" in w:
            own[p + "decoder.final_layernorm.weight"] = w["model.norm.weight"]
        else:
            own[p + "decoder.final_norm.weight"] = w["backbone.norm_f.weight"]
    return own


def deepseek_served(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, replica: int = 1, data: int = 1,
    stages: list[int] | None = None, on: bool = False, sglang: bool = False, ep: int = 1,
) -> dict[int, Named]:  # fmt: skip
    """vLLM models/deepseek_v2.py, 0036d38 linear.py (MergedReplicatedLinear; with block scales each shard's rows by
    block), 0014ec6 fused_moe/layer.py; SGLang 0079fcc likewise: its experts over ep x tensor / ep.
    """  # fmt: skip
    small, more = divmod(c["num_hidden_layers"], pipeline)
    counts = stages or [small + (sglang and s >= pipeline - more) for s in range(pipeline)]
    out: dict[int, Named] = {}
    tied = c["tie_word_embeddings"]
    ends = [".weight", ".weight_scale_inv"] if c.get("fp8") else [".weight"]
    for rank in range(replica * data * pipeline * tensor):
        t, stage, dp = rank % tensor, rank // tensor % pipeline, rank // (tensor * pipeline) % data
        own: Named = {}
        if stage == 0 or (tied and stage == pipeline - 1 and not sglang):
            own["model.embed_tokens.weight"] = vocabulary(w["model.embed_tokens.weight"], tensor, t)
        if stage == pipeline - 1:
            own["model.norm.weight"] = w["model.norm.weight"]
        if has_head(c, stage, pipeline) if sglang else stage == pipeline - 1 and not tied:
            head = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
            own["lm_head.weight"] = vocabulary(head, tensor, t)
        for n in range(sum(counts[:stage]), sum(counts[: stage + 1])):
            p = f"model.layers.{n}."
            s = p + "self_attn."
            for name in (p + "input_layernorm.weight", p + "post_attention_layernorm.weight"):
                own[name] = w[name]
            for name in (s + "q_a_layernorm.weight", s + "kv_a_layernorm.weight"):
                own[name] = w[name]
            moe = n >= c["first_k_dense_replace"]
            for end in ends:
                fused = "fused_qkv_a_proj_with_mqa" if sglang else "fused_qkv_a_proj"
                own[s + fused + end] = np.concatenate([w[s + "q_a_proj" + end], w[s + "kv_a_proj_with_mqa" + end]])
                own[s + "q_b_proj" + end] = part(w[s + "q_b_proj" + end], tensor, t)
                own[s + "kv_b_proj" + end] = part(w[s + "kv_b_proj" + end], tensor, t)
                own[s + "o_proj" + end] = part(w[s + "o_proj" + end], tensor, t, 1)
                m = p + ("mlp.shared_experts." if moe else "mlp.")
                gate, up, down = (w[f"{m}{k}_proj{end}"] for k in ("gate", "up", "down"))
                whole = moe and on and data > 1 and tensor > 1  # vLLM 0.33: use_sequence_parallel_moe
                cut = (1, 0) if whole else (tensor, t)
                own[m + "gate_up_proj" + end] = np.concatenate([part(gate, *cut), part(up, *cut)])
                own[m + "down_proj" + end] = part(down, *cut, 1)
                if moe:
                    tail = end.removeprefix(".")
                    own |= _fused_experts(c, w, p + "mlp.experts.", end, tail, (dp, data, t, tensor), on, sglang, ep)
            if moe:
                own[p + "mlp.gate.weight"] = w[p + "mlp.gate.weight"]
                name = p + "mlp.gate.e_score_correction_bias"
                own[name] = w[name]
        out[rank] = own
    return out


def _fused_experts(
    c: Config, w: Named, p: str, end: str, tail: str, where: tuple[int, int, int, int], on: bool, sglang: bool, ep: int
) -> Named:
    dp, data, t, tensor = where
    count = c["n_routed_experts"]
    number, ranks = dp * tensor + t, data * tensor
    mine, parts, k = range(count), ranks, number
    if on:
        base, rest = divmod(count, ranks)
        start = number * base + min(number, rest)
        mine, parts, k = range(start, start + base + (number < rest)), 1, 0
    if sglang:
        moe = tensor // ep
        mine, parts, k = range(t // moe * (count // ep), (t // moe + 1) * (count // ep)), moe, t % moe
    sample = w[f"{p}0.gate_proj{end}"]
    f, e = sample.shape[0] // parts, sample.shape[1]
    w13 = np.zeros((len(mine), 2 * f, e), sample.dtype)
    rows = w[f"{p}0.down_proj{end}"].shape[0]
    w2 = np.zeros((len(mine), rows, f), sample.dtype)
    for i, x in enumerate(mine):
        gate, up, down = (w[f"{p}{x}.{m}_proj{end}"] for m in ("gate", "up", "down"))
        w13[i, :f], w13[i, f:], w2[i] = part(gate, parts, k), part(up, parts, k), part(down, parts, k, 1)
    p += "" if sglang else "routed_experts."
    return {f"{p}w13_{tail}": w13, f"{p}w2_{tail}": w2}


# torch_dist folders


def torch_dist(c: Config, w: Named, replica: int = 1, tensor: int = 1, divisible: int = 128) -> dict[int, Named]:
    """Megatron-LM d98e8a6: mlp.py apply_swiglu_sharded_factory (gate and up whole), global layer numbers, experts
    with a leading dim; vocab_utils.py.
    """  # fmt: skip
    rows = -(-c["vocab_size"] // (divisible * tensor)) * divisible * tensor
    own: Named = {"embedding.word_embeddings.weight": pad_rows(w["model.embed_tokens.weight"], rows)}
    if not c["tie_word_embeddings"]:
        own["output_layer.weight"] = pad_rows(w["lm_head.weight"], rows)
    own["decoder.final_layernorm.weight"] = w["model.norm.weight"]
    latent = c["kind"] == "deepseek"
    for n in range(c["num_hidden_layers"]):
        p, m = f"model.layers.{n}.", f"decoder.layers.{n}."
        a, s = p + "self_attn.", m + "self_attention."
        if latent:
            own[m + "input_layernorm.weight"] = w[p + "input_layernorm.weight"]
            for theirs, ours in (
                ("linear_q_down_proj.weight", "q_a_proj"), ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm"),
                ("linear_q_up_proj.weight", "q_b_proj"), ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa"),
                ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm"), ("linear_kv_up_proj.weight", "kv_b_proj"),
                ("linear_proj.weight", "o_proj"),
            ):  # fmt: skip
                own[s + theirs] = w[f"{a}{ours}.weight"]
        else:
            own[s + "linear_qkv.layer_norm_weight"] = w[p + "input_layernorm.weight"]
            own[s + "linear_qkv.weight"] = merge_qkv(c, *(w[f"{a}{x}_proj.weight"] for x in "qkv"))
            own[s + "linear_proj.weight"] = w[a + "o_proj.weight"]
        if "qwen3" in c["kind"]:
            own[s + "q_layernorm.weight"] = w[a + "q_norm.weight"]
            own[s + "k_layernorm.weight"] = w[a + "k_norm.weight"]
        norm = w[p + "post_attention_layernorm.weight"]
        if c["kind"] in ("llama", "qwen3") or (latent and n < c["first_k_dense_replace"]):
            own[m + "mlp.linear_fc1.layer_norm_weight"] = norm
            own |= _gated(w, p + "mlp.", m + "mlp.linear_fc{}.weight", 1, 0)
            continue
        own[m + "pre_mlp_layernorm.weight"] = norm
        if latent:
            own[m + "mlp.router.weight"] = w[p + "mlp.gate.weight"]
            own[m + "mlp.router.expert_bias"] = w[p + "mlp.gate.e_score_correction_bias"]
            own |= _gated(w, p + "mlp.shared_experts.", m + "mlp.shared_experts.linear_fc{}.weight", 1, 0)
            q = p + "mlp.experts."
            every = [
                [w[f"{q}{x}.{k}_proj.weight"] for k in ("gate", "up", "down")] for x in range(c["n_routed_experts"])
            ]
        else:
            own[m + "mlp.router.weight"] = router(c, w, n)
            every = [list(three) for three in experts(c, w, n)]
        own[m + "mlp.experts.experts.linear_fc1.weight"] = np.stack([np.concatenate([g, u]) for g, u, _ in every])
        own[m + "mlp.experts.experts.linear_fc2.weight"] = np.stack([d for _, _, d in every])
    return {r: dict(own) for r in range(replica)}


def served_moe(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, replica: int = 1, ep: int = 1, dense: Any = None
) -> dict[int, Named]:
    """SGLang 0079fcc: what `dense` makes of everything else, and experts over ep x tensor / ep."""
    out: dict[int, Named] = dense
    layers = c["num_hidden_layers"]
    small, more = divmod(layers, pipeline)
    counts = [small + (s >= pipeline - more) for s in range(pipeline)]
    block = "block_sparse_moe" if c["kind"] == "mixtral" else "mlp"
    for rank, own in out.items():
        t, stage = rank % tensor, rank // tensor % pipeline
        for n in range(sum(counts[:stage]), sum(counts[: stage + 1])):
            every = experts(c, w, n)
            moe, each = tensor // ep, len(every) // ep
            mine = every[t // moe * each : (t // moe + 1) * each]
            k = t % moe
            halves = [np.concatenate([part(g, moe, k), part(u, moe, k)]) for g, u, _ in mine]
            p = f"model.layers.{n}.{block}.experts."
            own[p + "w13_weight"], own[p + "w2_weight"] = (
                np.stack(halves),
                np.stack([part(d, moe, k, 1) for *_, d in mine]),
            )
    return out


# Llama 4


def llama4(c: Config, rng: np.random.Generator) -> Named:
    """On disk: transformers 000c33f, models/llama4/modeling_llama4.py (Llama4TextExperts)."""
    e, d, v = c["hidden_size"], c["head_dim"], c["vocab_size"]
    h, g, x = c["num_attention_heads"], c["num_key_value_heads"], c["num_local_experts"]
    o = "language_model."
    shapes: Shapes = {o + "model.embed_tokens.weight": (v, e), o + "model.norm.weight": (e,)}
    if not c["tie_word_embeddings"]:
        shapes[o + "lm_head.weight"] = (v, e)
    for n in range(c["num_hidden_layers"]):
        p = f"{o}model.layers.{n}."
        q, s = p + "feed_forward.", p + "self_attn."
        shapes |= {p + "input_layernorm.weight": (e,), p + "post_attention_layernorm.weight": (e,)}
        shapes |= {s + "q_proj.weight": (h * d, e), s + "k_proj.weight": (g * d, e), s + "v_proj.weight": (g * d, e)}
        shapes[s + "o_proj.weight"] = (e, h * d)
        if (n + 1) % c["interleave_moe_layer_step"]:  # Llama4TextDecoderLayer: is not one of config.moe_layers
            f = c["intermediate_size_mlp"]
        else:
            f = c["intermediate_size"]
            shapes |= {q + "router.weight": (x, e)}
            shapes |= {q + "experts.gate_up_proj": (x, e, 2 * f), q + "experts.down_proj": (x, f, e)}
            q += "shared_expert."
        shapes |= {q + "gate_proj.weight": (f, e), q + "up_proj.weight": (f, e), q + "down_proj.weight": (e, f)}
    return numbered(shapes, rng, {})


def llama4_served(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, replica: int = 1, stages: list[int] | None = None
) -> dict[int, Named]:
    """vLLM 0036d38: models/llama4.py (permute_qk_weight_for_rotary; fused experts are transposed and chunked); 0121c95:
    Llama4DecoderLayer, a LlamaMLP where there are no experts.
    """  # fmt: skip
    d, g, h = c["head_dim"], c["num_key_value_heads"], c["num_attention_heads"]
    counts = stages or [c["num_hidden_layers"] // pipeline] * pipeline
    o = "language_model."

    def permute(a: Array, heads: int) -> Array:
        return a.reshape(heads, d // 2, 2, a.shape[1]).swapaxes(1, 2).reshape(a.shape)

    out: dict[int, Named] = {}
    for rank in range(replica * pipeline * tensor):
        t, stage = rank % tensor, rank // tensor % pipeline
        own: Named = {}
        if stage == 0:
            own[o + "model.embed_tokens.weight"] = vocabulary(w[o + "model.embed_tokens.weight"], tensor, t)
        if stage == pipeline - 1:
            own[o + "model.norm.weight"] = w[o + "model.norm.weight"]
            own[o + "lm_head.weight"] = vocabulary(w[o + "lm_head.weight"], tensor, t)
        for n in range(sum(counts[:stage]), sum(counts[: stage + 1])):
            p = f"{o}model.layers.{n}."
            s, q = p + "self_attn.", p + "feed_forward."
            for name in (p + "input_layernorm.weight", p + "post_attention_layernorm.weight"):
                own[name] = w[name]
            groups = max(g // tensor, 1)
            shard = t * g // tensor
            kv = slice(shard * d, (shard + groups) * d)
            three = [
                part(permute(w[s + "q_proj.weight"], h), tensor, t),
                permute(w[s + "k_proj.weight"], g)[kv],
                w[s + "v_proj.weight"][kv],
            ]
            own[s + "qkv_proj.weight"] = np.concatenate(three)
            own[s + "o_proj.weight"] = part(w[s + "o_proj.weight"], tensor, t, 1)
            if (n + 1) % c["interleave_moe_layer_step"] == 0:
                own[q + "router.weight"] = w[q + "router.weight"]
                gate, up = np.split(w[q + "experts.gate_up_proj"].swapaxes(1, 2), 2, axis=1)
                both = [part(gate, tensor, t, 1), part(up, tensor, t, 1)]
                r = q + "experts.routed_experts."
                own[r + "w13_weight"] = np.concatenate(both, axis=1)
                own[r + "w2_weight"] = part(w[q + "experts.down_proj"].swapaxes(1, 2), tensor, t, 2)
                q += "shared_expert."
            gate, up, down = (w[f"{q}{m}_proj.weight"] for m in ("gate", "up", "down"))
            own[q + "gate_up_proj.weight"] = np.concatenate([part(gate, tensor, t), part(up, tensor, t)])
            own[q + "down_proj.weight"] = part(down, tensor, t, 1)
        out[rank] = own
    return out


# GPT-2


def gpt2(c: Config, rng: np.random.Generator) -> Named:
    """On disk: transformers 000c33f, models/gpt2/modeling_gpt2.py: Conv1D has [in, out]."""
    e, f = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"]
    shapes: Shapes = {"wte.weight": (c["vocab_size"], e), "wpe.weight": (c["n_positions"], e)}
    shapes |= {"ln_f.weight": (e,), "ln_f.bias": (e,)}
    for n in range(c["n_layer"]):
        p = f"h.{n}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {p + norm + ".weight": (e,), p + norm + ".bias": (e,)}
        for name, a, b in (("attn.c_attn", e, 3 * e), ("attn.c_proj", e, e), ("mlp.c_fc", e, f), ("mlp.c_proj", f, e)):
            shapes |= {f"{p}{name}.weight": (a, b), f"{p}{name}.bias": (b,)}
    return numbered(shapes, rng, {})


def gpt2_served(c: Config, w: Named, tensor: int = 1, replica: int = 1) -> dict[int, Named]:
    """vLLM 0176894: models/gpt2.py (Conv1D transposed), QKVParallelLinear cuts q, k and v each."""
    out: dict[int, Named] = {}
    for rank in range(replica * tensor):
        t = rank % tensor
        own: Named = {}
        for name, a in w.items():
            if name == "wte.weight":
                a = vocabulary(a, tensor, t)
            elif "c_attn" in name:
                three = np.split(a.T, 3)
                a = np.concatenate([part(x, tensor, t) for x in three])
            elif "c_fc" in name:
                a = part(a.T, tensor, t)
            elif "c_proj.weight" in name:
                a = part(a.T, tensor, t, 1)
            own["transformer." + name] = a
        out[rank] = own
    return out


def gpt2_megatron(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, data: int = 1, chunks: int = 1, divisible: int = 128,
    stages: list[int] | None = None,
) -> dict[int, Named]:  # fmt: skip
    """Megatron-LM d98e8a6: attention.py (each head's q, k and v together), mlp.py, gpt_model.py."""
    h, layers = c["n_head"], c["n_layer"]
    counts = stages or [layers // (chunks * pipeline)] * (chunks * pipeline)
    rows = -(-c["vocab_size"] // (divisible * tensor)) * divisible * tensor

    def merged(a: Array) -> Array:
        heads = [np.split(x, h) for x in np.split(a, 3)]
        return np.concatenate([x[i] for i in range(h) for x in heads])

    out: dict[int, Named] = {}
    for rank in range(pipeline * data * tensor):
        t, stage = rank % tensor, rank // (data * tensor)
        own: Named = {}
        for chunk in range(chunks):
            number = chunk * pipeline + stage
            embed = part(pad_rows(w["wte.weight"], rows), tensor, t)
            if number == 0:
                own[f"{chunk}.embedding.word_embeddings.weight"] = embed
                own[f"{chunk}.embedding.position_embeddings.weight"] = w["wpe.weight"]
            if number == chunks * pipeline - 1:
                if pipeline > 1:
                    own[f"{chunk}.output_layer.weight"] = embed
                for end in ("weight", "bias"):
                    own[f"{chunk}.decoder.final_layernorm.{end}"] = w["ln_f." + end]
            for local in range(counts[number]):
                p, m = f"h.{sum(counts[:number]) + local}.", f"{chunk}.decoder.layers.{local}."
                for end in ("weight", "bias"):
                    own[f"{m}self_attention.linear_qkv.layer_norm_{end}"] = w[f"{p}ln_1.{end}"]
                    own[f"{m}mlp.linear_fc1.layer_norm_{end}"] = w[f"{p}ln_2.{end}"]
                    own[f"{m}self_attention.linear_qkv.{end}"] = part(merged(w[f"{p}attn.c_attn.{end}"].T), tensor, t)
                    own[f"{m}mlp.linear_fc1.{end}"] = part(w[f"{p}mlp.c_fc.{end}"].T, tensor, t)
                own[m + "self_attention.linear_proj.weight"] = part(w[p + "attn.c_proj.weight"].T, tensor, t, 1)
                own[m + "self_attention.linear_proj.bias"] = w[p + "attn.c_proj.bias"]
                own[m + "mlp.linear_fc2.weight"] = part(w[p + "mlp.c_proj.weight"].T, tensor, t, 1)
                own[m + "mlp.linear_fc2.bias"] = w[p + "mlp.c_proj.bias"]
        out[rank] = own
    return out


# GPT-OSS


def gpt_oss(c: Config, rng: np.random.Generator) -> Named:
    """transformers 000c33f, models/gpt_oss: in bf16 as in memory, else (`mxfp4`) as published."""
    e, d, f, v = c["hidden_size"], c["head_dim"], c["intermediate_size"], c["vocab_size"]
    h, g, x = c["num_attention_heads"], c["num_key_value_heads"], c["num_local_experts"]
    shapes: Shapes = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,), "lm_head.weight": (v, e)}
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        s, m = p + "self_attn.", p + "mlp."
        shapes |= {p + "input_layernorm.weight": (e,), p + "post_attention_layernorm.weight": (e,), s + "sinks": (h,)}
        for name, a, b in (("q", h * d, e), ("k", g * d, e), ("v", g * d, e), ("o", e, h * d)):
            shapes |= {f"{s}{name}_proj.weight": (a, b), f"{s}{name}_proj.bias": (a,)}
        shapes |= {m + "router.weight": (x, e), m + "router.bias": (x,)}
        q = m + "experts."
        shapes |= {q + "gate_up_proj_bias": (x, 2 * f), q + "down_proj_bias": (x, e)}
        if c.get("mxfp4"):
            shapes |= {
                q + "gate_up_proj_blocks": (x, 2 * f, e // 32, 16),
                q + "gate_up_proj_scales": (x, 2 * f, e // 32),
            }
            shapes |= {q + "down_proj_blocks": (x, e, f // 32, 16), q + "down_proj_scales": (x, e, f // 32)}
        else:
            shapes |= {q + "gate_up_proj": (x, e, 2 * f), q + "down_proj": (x, f, e)}
    return numbered(shapes, rng, {"_blocks": np.uint8, "_scales": np.uint8})


def gpt_oss_served(c: Config, w: Named, tensor: int = 1, replica: int = 1) -> dict[int, Named]:
    """vLLM 0025d69: models/gpt_oss.py load_weights; the bias of w2 on the first rank only."""
    d, g, x = c["head_dim"], c["num_key_value_heads"], c["num_local_experts"]
    out: dict[int, Named] = {}
    for rank in range(replica * tensor):
        t = rank % tensor
        own: Named = {"model.norm.weight": w["model.norm.weight"]}
        own["model.embedding.weight"] = vocabulary(w["model.embed_tokens.weight"], tensor, t)
        own["lm_head.weight"] = vocabulary(w["lm_head.weight"], tensor, t)
        for n in range(c["num_hidden_layers"]):
            p = f"model.layers.{n}."
            s, m = p + "self_attn.", p + "mlp."
            own[p + "input_layernorm.weight"] = w[p + "input_layernorm.weight"]
            own[p + "post_attention_layernorm.weight"] = w[p + "post_attention_layernorm.weight"]
            own[p + "attn.sinks"] = part(w[s + "sinks"], tensor, t)
            groups, shard = max(g // tensor, 1), t * g // tensor
            for end in ("weight", "bias"):
                kv = slice(shard * d, (shard + groups) * d)
                q, k, v = (w[f"{s}{a}_proj.{end}"] for a in "qkv")
                own[f"{p}attn.qkv_proj.{end}"] = np.concatenate([part(q, tensor, t), k[kv], v[kv]])
                own[f"{m}router.{end}"] = w[f"{m}router.{end}"]
            own[p + "attn.o_proj.weight"] = part(w[s + "o_proj.weight"], tensor, t, 1)
            own[p + "attn.o_proj.bias"] = w[s + "o_proj.bias"]
            q, r = m + "experts.", m + "experts.routed_experts."
            own[r + "w13_bias"] = part(w[q + "gate_up_proj_bias"], tensor, t, 1)
            bias = w[q + "down_proj_bias"]
            own[r + "w2_bias"] = bias if t == 0 else np.zeros_like(bias)
            if c.get("mxfp4"):
                flat = w[q + "gate_up_proj_blocks"]
                own[r + "w13_weight"] = part(flat.reshape(x, flat.shape[1], -1), tensor, t, 1)
                own[r + "w13_weight_scale"] = part(w[q + "gate_up_proj_scales"], tensor, t, 1)
                flat = w[q + "down_proj_blocks"]
                own[r + "w2_weight"] = part(flat.reshape(x, flat.shape[1], -1), tensor, t, 2)
                own[r + "w2_weight_scale"] = part(w[q + "down_proj_scales"], tensor, t, 2)
            else:
                own[r + "w13_weight"] = part(w[q + "gate_up_proj"], tensor, t, 2).swapaxes(1, 2)
                own[r + "w2_weight"] = part(w[q + "down_proj"].swapaxes(1, 2), tensor, t, 2)
        out[rank] = own
    return out


# Mamba-2


def mamba2(c: Config, rng: np.random.Generator) -> Named:
    """On disk: transformers 000c33f, models/mamba2/modeling_mamba2.py."""
    e, m, inner = c["hidden_size"], c["num_heads"], c["num_heads"] * c["head_dim"]
    states = c["n_groups"] * c["state_size"]
    shapes: Shapes = {"backbone.embeddings.weight": (c["vocab_size"], e), "backbone.norm_f.weight": (e,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], e)
    for n in range(c["num_hidden_layers"]):
        p = f"backbone.layers.{n}."
        q = p + "mixer."
        shapes |= {p + "norm.weight": (e,), q + "in_proj.weight": (2 * inner + 2 * states + m, e)}
        shapes |= {
            q + "conv1d.weight": (inner + 2 * states, 1, c["conv_kernel"]),
            q + "conv1d.bias": (inner + 2 * states,),
        }
        shapes |= {q + "A_log": (m,), q + "D": (m,), q + "dt_bias": (m,), q + "norm.weight": (inner,)}
        shapes[q + "out_proj.weight"] = (e, inner)
    return numbered(shapes, rng, {})


def mamba2_megatron(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, data: int = 1, chunks: int = 1, divisible: int = 128,
    stages: list[int] | None = None,
) -> dict[int, Named]:  # fmt: skip
    """Megatron-LM d98e8a6, ssm/mamba_mixer.py:296; Megatron-Bridge 067f987, MambaInProjMapping, MambaConv1dMapping."""
    m, inner, states = c["num_heads"], c["num_heads"] * c["head_dim"], c["n_groups"] * c["state_size"]
    counts = stages or [c["num_hidden_layers"] // (chunks * pipeline)] * (chunks * pipeline)

    def pieces(a: Array, sizes: list[int], t: int) -> Array:
        found = np.split(a, np.cumsum(sizes)[:-1])
        return np.concatenate([part(x, tensor, t) for x in found])

    out: dict[int, Named] = {}
    for rank in range(pipeline * data * tensor):
        t, stage = rank % tensor, rank // (data * tensor)
        own: Named = {}
        for chunk in range(chunks):
            number = chunk * pipeline + stage
            last = number == chunks * pipeline - 1
            own |= _megatron_ends(c, w, f"{chunk}.", number == 0, last, tensor, t, divisible, pipeline)
            for local in range(counts[number]):
                p, q = f"backbone.layers.{sum(counts[:number]) + local}.", f"{chunk}.decoder.layers.{local}."
                own[q + "mixer.in_proj.layer_norm_weight"] = w[p + "norm.weight"]
                p, q = p + "mixer.", q + "mixer."
                own[q + "in_proj.weight"] = pieces(w[p + "in_proj.weight"], [inner, inner, states, states, m], t)
                for end in ("weight", "bias"):
                    own[q + "conv1d." + end] = pieces(w[p + "conv1d." + end], [inner, states, states], t)
                for name in ("A_log", "D", "dt_bias", "norm.weight"):
                    own[q + name] = part(w[p + name], tensor, t)
                own[q + "out_proj.weight"] = part(w[p + "out_proj.weight"], tensor, t, 1)
        out[rank] = own
    return out


# LoRA


def lora(c: Config, rng: np.random.Generator) -> Named:
    """adapter_model.safetensors of peft: A is [rank, in], B is [out, rank]."""
    e, d, f, z = c["hidden_size"], c["head_dim"], c["intermediate_size"], c["lora_rank"]
    q, k = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes: Shapes = {}
    linear = {"self_attn.q": (q, e), "self_attn.k": (k, e), "self_attn.v": (k, e), "self_attn.o": (e, q)}
    linear |= {"mlp.gate": (f, e), "mlp.up": (f, e), "mlp.down": (e, f)}
    for n in range(c["num_hidden_layers"]):
        for name, (a, b) in linear.items():
            p = f"base_model.model.model.layers.{n}.{name}_proj."
            shapes |= {p + "lora_A.weight": (z, b), p + "lora_B.weight": (a, z)}
    out = numbered(shapes, rng, {})
    if c.get("fused_lora"):  # one A for q, k and v, and one for gate and up
        for name in [n for n in out if "lora_A" in n]:
            out[name] = out[re.sub(r"\.[kv]_proj", ".q_proj", name.replace("up_proj", "gate_proj"))]
    return out


def lora_fsdp2(c: Config, w: Named, data: int = 1, replica: int = 1) -> dict[int, Named]:
    """torch 2.13, _fsdp_param.py: dim 0 by torch.chunk; peft's live names have the adapter's name in them."""
    return {
        rank: {n.replace(".weight", ".default.weight"): chunked(a, data, rank % data) for n, a in w.items()}
        for rank in range(replica * data)
    }


_BRIDGE = {
    "self_attn.q": "self_attention.linear_qkv.adapter.adapter_q", "self_attn.o": "self_attention.linear_proj.adapter",
    "self_attn.k": "self_attention.linear_qkv.adapter.adapter_k", "mlp.down": "mlp.linear_fc2.adapter",
    "self_attn.v": "self_attention.linear_qkv.adapter.adapter_v", "mlp.up": "mlp.linear_fc1.adapter.adapter_up",
    "mlp.gate": "mlp.linear_fc1.adapter.adapter_gate",
}  # fmt: skip


def lora_megatron(
    c: Config, w: Named, tensor: int = 1, pipeline: int = 1, data: int = 1, chunks: int = 1,
    stages: list[int] | None = None,
) -> dict[int, Named]:  # fmt: skip
    """Megatron-Bridge 0.3.1, peft/utils.py ParallelLinearAdapter: linear_in is row parallel behind a row parallel base
    and else column parallel, linear_out is column parallel.
    """  # fmt: skip
    counts = stages or [c["num_hidden_layers"] // (chunks * pipeline)] * (chunks * pipeline)
    out: dict[int, Named] = {}
    for rank in range(pipeline * data * tensor):
        stage, t = rank // (data * tensor), rank % tensor
        own: Named = {}
        for chunk in range(chunks):
            number = chunk * pipeline + stage
            for local in range(counts[number]):
                hf = f"base_model.model.model.layers.{sum(counts[:number]) + local}."
                if c.get("fused_lora"):
                    own |= _fused_adapters(c, w, hf, f"{chunk}.decoder.layers.{local}.", tensor, t)
                for name, to in _BRIDGE.items():
                    if c.get("fused_lora") and name not in ("self_attn.o", "mlp.down"):
                        continue
                    p = f"{chunk}.decoder.layers.{local}.{to}."
                    a, b = (w[f"{hf}{name}_proj.lora_{x}.weight"] for x in "AB")
                    own[p + "linear_in.weight"] = part(a, tensor, t, int(name in ("self_attn.o", "mlp.down")))
                    own[p + "linear_out.weight"] = part(b, tensor, t)
        out[rank] = own
    return out


def _fused_adapters(c: Config, w: Named, hf: str, to: str, tensor: int, t: int) -> Named:
    """Megatron-Bridge 0.3.1, peft/lora.py: behind a fused product one A, and B of its rows in its own order."""
    q, k, v, gate, up = (
        w[f"{hf}{n}_proj.lora_B.weight"] for n in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    )
    qkv, fc1 = f"{to}self_attention.linear_qkv.adapter.", f"{to}mlp.linear_fc1.adapter."
    return {
        qkv + "linear_in.weight": part(w[f"{hf}self_attn.q_proj.lora_A.weight"], tensor, t),
        qkv + "linear_out.weight": part(merge_qkv(c, q, k, v), tensor, t),
        fc1 + "linear_in.weight": part(w[f"{hf}mlp.gate_proj.lora_A.weight"], tensor, t),
        fc1 + "linear_out.weight": np.concatenate([part(gate, tensor, t), part(up, tensor, t)]),
    }


def lora_torch_dist(c: Config, w: Named, tensor: int = 1) -> dict[int, Named]:
    """The same saved: apply_swiglu_sharded_factory halves each rank's rows under linear_fc1, whatever they are."""
    every = lora_megatron(c, w, tensor)
    out: Named = {}
    for name in every[0]:
        parts = [every[t][name] for t in range(tensor)]
        if "linear_fc1" in name and "linear_out" in name:
            parts = [np.split(x, 2)[h] for h in range(2) for x in parts]
        down = name.endswith(("linear_proj.adapter.linear_in.weight", "linear_fc2.adapter.linear_in.weight"))
        out[name.removeprefix("0.")] = np.concatenate(parts, axis=int(down))
    return {0: out}


def fsdp2_experts(c: Config, w: Named, dense: dict[int, Named], data: int = 1, tensor: int = 1) -> dict[int, Named]:
    """FSDP2 over transformers 5: stacked experts are chunked on their first dim, whole over tensor."""
    for rank, own in dense.items():
        k = rank // tensor % data
        for n in range(c["num_hidden_layers"]):
            every = experts(c, w, n)
            p = f"model.layers.{n}.mlp."
            joined = np.stack([np.concatenate([g, u]) for g, u, _ in every])
            own[p + "experts.gate_up_proj"] = chunked(joined, data, k)
            own[p + "experts.down_proj"] = chunked(np.stack([d for *_, d in every]), data, k)
            own[p + "gate.weight"] = chunked(router(c, w, n), data, k)
    return dense


def hugging_face_5_mixtral(c: Config, w: Named, replica: int = 1) -> dict[int, Named]:
    """In memory: transformers 000c33f, conversion_mapping.py: block_sparse_moe becomes mlp."""
    own = {n: a for n, a in w.items() if ".block_sparse_moe." not in n}
    for n in range(c["num_hidden_layers"]):
        every = experts(c, w, n)
        p = f"model.layers.{n}.mlp."
        own[p + "gate.weight"] = router(c, w, n)
        own[p + "experts.gate_up_proj"] = np.stack([np.concatenate([g, u]) for g, u, _ in every])
        own[p + "experts.down_proj"] = np.stack([d for *_, d in every])
    return hugging_face(c, own, replica)


def stacked(c: Config, w: Named, **given: int) -> dict[int, Named]:
    """megatron-core 0.16.1: transformer_block.py sharded_state_dict without non_homogeneous_layers: layers are one."""
    out: dict[int, Named] = {}
    for rank, own in torch_dist(c, w, **given).items():
        out[rank] = {n: a for n, a in own.items() if ".layers." not in n}
        for name in [n for n in own if ".layers.0." in n]:
            every = [own[name.replace(".layers.0.", f".layers.{n}.")] for n in range(c["num_hidden_layers"])]
            out[rank][name.replace(".layers.0.", ".layers.")] = np.stack(every)
    return out
