"""GPT-2 and GPT-3; Llama 3, Qwen3, Mixtral and DeepSeek-V3: decoders, trained or stepping through a cache."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.ops import CrossEntropy, Gather, LayerNorm, RmsNorm
from shardplan.core.ops.zigzag import Zigzag
from shardplan.errors import ShardplanError
from shardplan.strategy.attention import Given, gpt_attention, grouped_attention, latent_attention
from shardplan.strategy.experts import gated_mlp, routed_mlp
from shardplan.strategy.scope import ONE, Scope
from shardplan.strategy.sizes import DecoderSizes


def decoder(s: Scope, c: DecoderSizes, training: bool) -> None:
    """Write the result `loss`, the mean cross entropy of the targets but -100, or without training `logits`."""
    if training and c.cache:
        raise ShardplanError(f"Model.load: training with cache={c.cache}; legal is a cache with training=False")
    pair = {"batch": c.batch, "sequence": c.seq}
    tokens = s.input("tokens", pair, "i32")
    if training:
        s.input("targets", pair, "i32")
    given: dict[str, str] = {"positions": Zigzag(c.seq, c.zigzag).write_positions(s, ONE)}
    if c.cache:
        given["position"] = s.input("position", {}, "i32")
        given["positions"] = s.elementwise("a + b", given["positions"], given["position"])
        s.replaced["position"] = s.elementwise(f"a + {c.seq}", given["position"])
    embed = "transformer.wte" if c.family == "gpt" else "model.embed_tokens"
    table = s.parameter("embed", {"vocab": c.vocab, "hidden": c.hidden}, f"{embed}.weight")
    x = s(Gather(), table, tokens)
    x = _gpt(s, c, x, given) if c.family == "gpt" else _llama(s, c, x, given)
    head = table if c.tied else s.parameter("head", {"vocab": c.vocab, "hidden": c.hidden}, "lm_head.weight")
    logits = s.einsum("bsh,vh->bsv", x, head)
    if training:
        s.counted_mean(s(CrossEntropy(), logits, "targets"), "targets")
    else:
        s.results["logits"] = logits


def _gpt(s: Scope, c: DecoderSizes, x: str, given: Given) -> str:
    rows = s.parameter("positions", {"position": c.positions, "hidden": c.hidden}, "transformer.wpe.weight")
    x = s.elementwise("a + b", x, s(Gather(), rows, given["positions"]))
    hidden, wide, block = {"hidden": c.hidden}, {"ffn": c.ffn}, "transformer.h.{layer}"

    def norm(s: Scope, name: str, file: str, x: str) -> str:
        gain, bias = (s.parameter(f"{name}{end}", hidden, f"{file}.{kind}")
                      for end, kind in (("", "weight"), ("_bias", "bias")))  # fmt: skip
        return s(LayerNorm(c.norm_eps), x, gain, bias)

    def layer(s: Scope, x: str, given: Mapping[str, str]) -> str:
        mixed = gpt_attention(s, c, given, norm(s, "attention_norm", f"{block}.ln_1", x), f"{block}.attn")
        x = s.elementwise("a + b + c", x, mixed, s.parameter("o_bias", hidden, f"{block}.attn.c_proj.bias"))
        y = norm(s, "mlp_norm", f"{block}.ln_2", x)
        inside = s.einsum("bsh,hf->bsf", y, s.parameter("up", {**hidden, **wide}, f"{block}.mlp.c_fc.weight"))
        inside = s.elementwise("gelu(a + b)", inside, s.parameter("up_bias", wide, f"{block}.mlp.c_fc.bias"))
        down = s.parameter("down", {**wide, **hidden}, f"{block}.mlp.c_proj.weight")
        bias = s.parameter("down_bias", hidden, f"{block}.mlp.c_proj.bias")
        return s.elementwise("a + b + c", x, s.einsum("bsf,fh->bsh", inside, down), bias)

    x = s.layers("layers", range(c.layers), x, layer, given if c.cache else {})
    return norm(s, "norm", "transformer.ln_f", x)


def _llama(s: Scope, c: DecoderSizes, x: str, given: Given) -> str:
    hidden, block = {"hidden": c.hidden}, "model.layers.{layer}"
    attention = latent_attention if c.kv_lora_rank else grouped_attention
    norm = RmsNorm(c.norm_eps)

    def layer(s: Scope, x: str, given: Given, ffn: int) -> str:
        gain = s.parameter("attention_norm", hidden, f"{block}.input_layernorm.weight")
        x = s.elementwise("a + b", x, attention(s, c, given, s(norm, x, gain), f"{block}.self_attn"))
        y = s(norm, x, s.parameter("mlp_norm", hidden, f"{block}.post_attention_layernorm.weight"))
        added = gated_mlp(s, y, c.hidden, ffn, f"{block}.mlp") if ffn else routed_mlp(s, c, y, block)
        return s.elementwise("a + b", x, added)

    if c.dense_layers:
        first = range(c.dense_layers)
        x = s.layers("dense", first, x, lambda s, x, given: layer(s, x, given, c.dense_ffn or c.ffn), given)
    ffn = 0 if c.experts else c.ffn
    x = s.layers("layers", range(c.dense_layers, c.layers), x, lambda s, x, given: layer(s, x, given, ffn), given)
    return s(norm, x, s.parameter("norm", hidden, "model.norm.weight"))
