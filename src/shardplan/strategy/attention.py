"""The attention of a layer: with grouped heads (arXiv 2305.13245), or of keys and values made from a latent.

Queries are `[batch sequence kv_heads ratio head]`, keys and values `[batch sequence kv_heads head]`: weights have the
dims of heads, so that nothing is reshaped. With a cache, keys and values are written at their positions, and all that
it holds is attended to.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from shardplan.core.ops import Attention, Concat, Expand, RmsNorm, Rotary, Write
from shardplan.core.ops.rotary import RotaryScaling
from shardplan.strategy.parameter import FactorPart
from shardplan.strategy.scope import Scope
from shardplan.strategy.sizes import DecoderSizes

Given = Mapping[str, str]  # the invariants of layers: `positions` of the tokens; with a cache `position`, the first's


def write_cache(s: Scope, c: DecoderSizes, given: Given, name: str, dims: Mapping[str, int], new: str) -> str:
    """Return what is attended to: what the tokens add, or with a cache all that is in it then."""
    if not c.cache:
        return new
    cache = s.input(name, {"batch": c.batch, "cache": c.cache, **dims})
    s.replaced[cache] = s(Write(1), cache, new, given["positions"])
    return s.replaced[cache]


def attend(
    s: Scope, c: DecoderSizes, given: Given, queries: str, keys: str, values: str, *, window: bool, file: str = ""
) -> str:
    """Write causal attention; tokens before those of a cache's step are its `position` in number.

    A checkpoint has the sinks, where there are some, in `file`.
    """
    more = RotaryScaling.parse(c.rope_scaling).score_scale if c.kv_lora_rank else 1.0
    scale = c.score_scale or (0.0 if more == 1 else more * c.head_dim**-0.5)
    seen = c.window if window else 0
    op = Attention(True, scale, c.zigzag, seen, c.attention_cap, segments=c.segments, sinks=c.sinks)
    beside = ["segments"] * 2 if c.segments else []
    if c.sinks:
        heads = {"kv_heads": c.kv_heads, "ratio": c.ratio}
        beside.append(s.parameter("sinks", heads, file, f"({' '.join(heads)})"))
    beside += [given["position"]] if "position" in given else []
    return s(op, queries, keys, values, *(given.get(name, name) for name in beside))


def gpt_attention(s: Scope, c: DecoderSizes, given: Given, x: str, block: str, *, window: bool) -> str:
    """GPT-2's: queries, keys and values stored as one product, with biases; the result is without its bias."""
    one, many = ({"kv_heads": c.kv_heads, **ratio, "head": c.head_dim} for ratio in ({}, {"ratio": 1}))
    made: list[str] = []
    products = (("q", many, "hgrd->bsgrd"), ("k", one, "hgd->bsgd"), ("v", one, "hgd->bsgd"))
    for k, (name, dims, spec) in enumerate(products):
        part, dim = FactorPart("part", 3, k), f"(part {' '.join(dims)})"
        weight = s.parameter(name, {"hidden": c.hidden, **dims}, f"{block}.c_attn.weight", f"hidden {dim}", part)
        bias = s.parameter(f"{name}_bias", dims, f"{block}.c_attn.bias", dim, part)
        made.append(s.elementwise("a + b", s.einsum(f"bsh,{spec}", x, weight), bias))
    queries, keys, values = made
    keys = write_cache(s, c, given, "key_cache", one, keys)
    values = write_cache(s, c, given, "value_cache", one, values)
    file = f"{block}.c_proj.weight"
    mixed = attend(s, c, given, queries, keys, values, window=window)
    return _project_heads(s, c, mixed, file, "(kv_heads ratio head) hidden")


def grouped_attention(s: Scope, c: DecoderSizes, given: Given, x: str, block: str, *, window: bool) -> str:
    """Llama's: rotary positions; with `qkv_bias` Qwen2's biases, with `qk_norm` a norm of each head's query and key.

    Phi 3 stores queries, keys and values as rows of one product.
    """
    head, hidden = {"head": c.head_dim}, {"hidden": c.hidden}
    one, many = {"kv_heads": c.kv_heads, **head}, {"kv_heads": c.kv_heads, "ratio": c.ratio, **head}
    made: list[str] = []
    starts = [0, *itertools.accumulate((c.heads, c.kv_heads, c.kv_heads))]
    for k, (name, dims, spec) in enumerate(
        (("q", many, "hgrd->bsgrd"), ("k", one, "hgd->bsgd"), ("v", one, "hgd->bsgd"))
    ):
        fused = c.model_type == "phi3"
        file = f"{block}.{'qkv' if fused else name}_proj"
        part = FactorPart("", starts[-1] * c.head_dim, starts[k] * c.head_dim) if fused else None
        weight = s.parameter(name, {**hidden, **dims}, f"{file}.weight", f"({' '.join(dims)}) hidden", part)
        y = s.einsum(f"bsh,{spec}", x, weight)
        if c.qkv_bias:
            y = s.elementwise("a + b", y, s.parameter(f"{name}_bias", dims, f"{file}.bias", f"({' '.join(dims)})"))
        made.append(y)
    queries, keys, values = made
    if c.qk_norm:
        queries = norm(s, c, "q_norm", head, f"{block}.q_norm.weight", queries)
        keys = norm(s, c, "k_norm", head, f"{block}.k_norm.weight", keys)
    local = window and c.window_theta
    turn = Rotary(c.window_theta) if local else Rotary(c.rope_theta, scaling=c.rope_scaling)
    queries, keys = s(turn, queries, given["positions"]), s(turn, keys, given["positions"])
    keys = write_cache(s, c, given, "key_cache", one, keys)
    values = write_cache(s, c, given, "value_cache", one, values)
    mixed = attend(s, c, given, queries, keys, values, window=window, file=f"{block}.sinks")
    out = _project_heads(s, c, mixed, f"{block}.o_proj.weight")
    return s.elementwise("a + b", out, s.parameter("o_bias", hidden, f"{block}.o_proj.bias")) if c.o_bias else out


def norm(s: Scope, c: DecoderSizes, name: str, dims: Mapping[str, int], file: str, x: str) -> str:
    """The root mean square's norm; gains of `unit_norms` are stored less 1."""
    gain = s.parameter(name, dims, file)
    return s(RmsNorm(c.norm_eps), x, s.elementwise("a + 1", gain) if c.unit_norms else gain)


def latent_attention(s: Scope, c: DecoderSizes, given: Given, x: str, block: str, *, window: bool) -> str:
    """DeepSeek's (arXiv 2405.04434, 2.1): keys and values of all heads are made of one latent a token, which is kept.

    A query and a key are a plain part, then one turned by the position, of which a key has one for all heads.
    """
    hidden, ranks = {"hidden": c.hidden}, ({"q_rank": c.q_lora_rank}, {"kv_rank": c.kv_lora_rank})
    plain, heads = c.head_dim - c.rotary_dim, {"kv_heads": c.kv_heads}
    turn = Rotary(c.rope_theta, interleaved=True, scaling=c.rope_scaling)
    weight = s.parameter("q_a", {**hidden, **ranks[0]}, f"{block}.q_a_proj.weight", "q_rank hidden")
    squeezed = norm(s, c, "q_a_norm", ranks[0], f"{block}.q_a_layernorm.weight", s.einsum("bsh,hq->bsq", x, weight))
    q, q_turned = _parameters_side_by_side(s, {"q": plain, "q_turned": c.rotary_dim}, {**ranks[0], **heads, "ratio": 1},
                         f"{block}.q_b_proj.weight", "(kv_heads ratio head) q_rank")  # fmt: skip
    turned = s(turn, s.einsum("bsq,qgrd->bsgrd", squeezed, q_turned), given["positions"])
    queries = s(Concat(4), s.einsum("bsq,qgrd->bsgrd", squeezed, q), turned)

    file, width = f"{block}.kv_a_proj_with_mqa.weight", c.kv_lora_rank + c.rotary_dim
    weight = s.parameter("kv_a", {**hidden, **ranks[1]}, file, "kv_rank hidden", FactorPart("kv_rank", width, 0))
    latent = norm(s, c, "kv_a_norm", ranks[1], f"{block}.kv_a_layernorm.weight", s.einsum("bsh,hk->bsk", x, weight))
    one = {"head": c.rotary_dim}
    weight = s.parameter("k_turned", {**hidden, **one}, file, "head hidden", FactorPart("head", width, c.kv_lora_rank))
    key = s(turn, s.einsum("bsh,hd->bsd", x, weight), given["positions"])
    latent = write_cache(s, c, given, "latent_cache", ranks[1], latent)
    key = write_cache(s, c, given, "key_cache", one, key)
    k, v = _parameters_side_by_side(s, {"k": plain, "v": c.value_dim}, {**ranks[1], **heads},
                  f"{block}.kv_b_proj.weight", "(kv_heads head) kv_rank")  # fmt: skip
    shared = s(Expand(f"b s d -> b s g={c.kv_heads} d"), key)
    keys = s(Concat(3), s.einsum("bsk,kgd->bsgd", latent, k), shared)
    values = s.einsum("bsk,kgd->bsgd", latent, v)
    mixed = attend(s, c, given, queries, keys, values, window=window, file=f"{block}.sinks")
    return _project_heads(s, c, mixed, f"{block}.o_proj.weight")


def _parameters_side_by_side(
    s: Scope, widths: Mapping[str, int], dims: Mapping[str, int], file: str, stored: str
) -> list[str]:
    """Parameters that a checkpoint has side by side in each head."""
    starts = [0, *itertools.accumulate(widths.values())]
    return [
        s.parameter(name, {**dims, "head": n}, file, stored, FactorPart("head", starts[-1], at))
        for (name, n), at in zip(widths.items(), starts, strict=False)
    ]


def _project_heads(
    s: Scope, c: DecoderSizes, mixed: str, file: str, stored: str = "hidden (kv_heads ratio head)"
) -> str:
    """The product of all heads' values that makes the result."""
    dims = {"kv_heads": c.kv_heads, "ratio": c.ratio, "head": c.value_dim, "hidden": c.hidden}
    return s.einsum("bsgrd,grdh->bsh", mixed, s.parameter("o", dims, file, stored))
