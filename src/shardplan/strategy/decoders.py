"""GPT-2 and GPT-3; Llama 3, Qwen3, Mixtral and DeepSeek-V3: decoders, trained or stepping through a cache."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.ops import (
    Combine,
    CrossEntropy,
    Dispatch,
    Expand,
    Gather,
    LayerNorm,
    OneHot,
    ReduceDims,
    Reshape,
    RmsNorm,
    Softmax,
    TopK,
)
from shardplan.core.ops.ring_rounds import MASKED
from shardplan.core.ops.zigzag import Zigzag
from shardplan.errors import ShardplanError
from shardplan.strategy.attention import Given, gpt_attention, grouped_attention, latent_attention
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


# The MLP of a layer: gated, and experts that a router chooses for each token, of which some are shared by all.


MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def gated_mlp(s: Scope, x: str, hidden: int, ffn: int, block: str, opens: str = "") -> str:
    """Llama's: the SiLU of one product times another, and back; names of parameters begin with `opens`."""
    wide = {"hidden": hidden, "ffn": ffn}
    gate, up = (
        s.parameter(f"{opens}{name}", wide, f"{block}.{name}_proj.weight", "ffn hidden") for name in ("gate", "up")
    )
    down = s.parameter(f"{opens}down", {"ffn": ffn, "hidden": hidden}, f"{block}.down_proj.weight", "hidden ffn")
    inside = s.elementwise("silu(a) * b", s.einsum("bsh,hf->bsf", x, gate), s.einsum("bsh,hf->bsf", x, up))
    return s.einsum("bsf,fh->bsh", inside, down)


def routed_mlp(s: Scope, c: DecoderSizes, x: str, layer: str) -> str:
    """The weighted sum of the experts that each token takes, and of those shared; a sequence is a group of slots.

    Choices behind an expert's last slot are dropped; how many in each sequence is the result `dropped`.
    """
    mixtral = c.model_type == "mixtral"
    block = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    router = s.parameter("router", {"hidden": c.hidden, "experts": c.experts}, f"{block}.gate.weight", "experts hidden")
    scores = s.einsum("bsh,hn->bsn", x, router)
    chosen, weights = (_group_limited if c.router == "sigmoid" else _softmax)(s, c, scores, block)
    slots, s.results["dropped"] = s.draft.write_step(Dispatch(c.experts, c.capacity), x, chosen)
    wide = {"experts": c.experts, "hidden": c.hidden, "ffn": c.ffn}
    names = MIXTRAL if mixtral else {name: f"{name}_proj" for name in MIXTRAL}
    one = f"{block}.experts.{{experts}}"
    gate, up = (s.parameter(f"expert_{n}", wide, f"{one}.{names[n]}.weight", "ffn hidden") for n in ("gate", "up"))
    back = {"experts": c.experts, "ffn": c.ffn, "hidden": c.hidden}
    down = s.parameter("expert_down", back, f"{one}.{names['down']}.weight", "hidden ffn")
    inside = s.elementwise(
        "silu(a) * b", s.einsum("bech,ehf->becf", slots, gate), s.einsum("bech,ehf->becf", slots, up)
    )
    y = s(Combine(), s.einsum("becf,efh->bech", inside, down), chosen, weights)
    if c.shared_ffn:
        y = s.elementwise("a + b", y, gated_mlp(s, x, c.hidden, c.shared_ffn, f"{block}.shared_experts", "shared_"))
    return y


def _softmax(s: Scope, c: DecoderSizes, scores: str, block: str) -> tuple[str, str]:
    """The experts of the best scores, and the softmax of these alone (arXiv 2401.04088, 2.1)."""
    best, chosen = s.draft.write_step(TopK(c.experts_per_token), scores)
    return chosen, s(Softmax(2), best)


def _group_limited(s: Scope, c: DecoderSizes, scores: str, block: str) -> tuple[str, str]:
    """DeepSeek-V3's choice (arXiv 2412.19437, 2.1.2): sigmoid affinities, corrected for the choice alone.

    Of groups of experts those are kept whose two best sum to the most. Weights are affinities, made to sum to
    `router_scale`.
    """
    correction = s.parameter(
        "correction", {"experts": c.experts}, f"{block}.gate.e_score_correction_bias", trained=False
    )
    affinity = s.elementwise("sigmoid(a)", scores)
    choice = s.elementwise("a + b", affinity, correction)
    if c.router_groups > 1:
        grouped = s(Reshape(f"b s (g={c.router_groups} n) -> b s g n"), choice)
        best, _ = s.draft.write_step(TopK(min(2, c.experts // c.router_groups)), grouped)
        _, kept = s.draft.write_step(TopK(c.router_groups_kept), s(ReduceDims((3,)), best))
        inside = s(ReduceDims((2,)), s(OneHot(c.router_groups, s.dtype), kept))
        allowed = s.elementwise(f"where(a > 0, b, {MASKED})", s(Expand("b s g -> b s g one=1"), inside), grouped)
        choice = s(Reshape("b s g n -> b s (g n)"), allowed)
    _, chosen = s.draft.write_step(TopK(c.experts_per_token), choice)
    taken = s.einsum("bsn,bskn->bsk", affinity, s(OneHot(c.experts, s.dtype), chosen))
    return chosen, s.elementwise(f"{c.router_scale} * a / b", taken, s(ReduceDims((2,), keep=True), taken))
