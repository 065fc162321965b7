"""The plain decoders: GPT-2 and GPT-3, Llama 3, Qwen3, Mixtral and DeepSeek-V3, with or without a key-value cache.

A model is a `Decoder`, whose fields are those of the preset tables, and a flat dict of parameters by the names and in
the layouts of the public checkpoints (Hugging Face): a product is `x @ W.T`, in GPT-2 `x @ W`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from tests.models import plain_parts as parts
from tests.models.plain_parts import Params
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a decoder; 0 where a model does not have the thing, or where a width is `hidden / heads`."""

    family: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated_mlp: bool
    seq: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float = 0.0
    head_dim: int = 0
    value_dim: int = 0
    rotary_dim: int = 0
    qk_norm: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    experts: int = 0
    experts_per_token: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0
    router: str = "softmax"
    router_groups: int = 1
    router_groups_kept: int = 1
    router_scale: float = 1.0
    capacity_factor: float = 0.0
    source: str = ""

    @property
    def key_width(self) -> int:
        """The width of a head's query and key."""
        return self.head_dim or self.hidden // self.heads

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.value_dim or self.key_width

    def routed(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return bool(self.experts) and layer >= self.dense_layers

    def capacity(self, tokens: int) -> int:
        """Slots of an expert for a sequence of `tokens`; 0 where the number of its tokens has no limit."""
        if not self.capacity_factor:
            return 0
        return parts.capacity_of(tokens, self.experts_per_token, self.experts, self.capacity_factor)


def expert_names(config: Decoder, layer: int, expert: int) -> tuple[str, str, str]:
    """The names of an expert's gate, up and down products."""
    if config.model_type == "mixtral":
        block = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        return f"{block}.w1.weight", f"{block}.w3.weight", f"{block}.w2.weight"
    return gated_names(f"model.layers.{layer}.mlp.experts.{expert}")


def gated_names(block: str) -> tuple[str, str, str]:
    return f"{block}.gate_proj.weight", f"{block}.up_proj.weight", f"{block}.down_proj.weight"


def router_name(config: Decoder, layer: int) -> str:
    block = "block_sparse_moe" if config.model_type == "mixtral" else "mlp"
    return f"model.layers.{layer}.{block}.gate"


def shapes(config: Decoder) -> Shapes:
    """Every parameter's name and shape, in the order in which a forward pass meets them."""
    return gpt_shapes(config) if config.family == "gpt" else llama_shapes(config)


def gpt_shapes(config: Decoder) -> Shapes:
    h, f = config.hidden, config.ffn
    found: Shapes = {"transformer.wte.weight": (config.vocab, h), "transformer.wpe.weight": (config.seq, h)}
    for i in range(config.layers):
        block = {
            "ln_1.weight": (h,),
            "ln_1.bias": (h,),
            "attn.c_attn.weight": (h, 3 * h),
            "attn.c_attn.bias": (3 * h,),
            "attn.c_proj.weight": (h, h),
            "attn.c_proj.bias": (h,),
            "ln_2.weight": (h,),
            "ln_2.bias": (h,),
            "mlp.c_fc.weight": (h, f),
            "mlp.c_fc.bias": (f,),
            "mlp.c_proj.weight": (f, h),
            "mlp.c_proj.bias": (h,),
        }
        found |= {f"transformer.h.{i}.{name}": shape for name, shape in block.items()}
    return found | {"transformer.ln_f.weight": (h,), "transformer.ln_f.bias": (h,)}


def llama_shapes(config: Decoder) -> Shapes:
    h = config.hidden
    found: Shapes = {"model.embed_tokens.weight": (config.vocab, h)}
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        found[f"{layer}.input_layernorm.weight"] = (h,)
        attention = latent_shapes(config) if config.kv_lora_rank else attention_shapes(config)
        found |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        found[f"{layer}.post_attention_layernorm.weight"] = (h,)
        found |= (
            expert_shapes(config, i)
            if config.routed(i)
            else gated_shapes(f"{layer}.mlp", h, config.dense_ffn or config.ffn)
        )
    found["model.norm.weight"] = (h,)
    return found if config.tied else found | {"lm_head.weight": (config.vocab, h)}


def attention_shapes(config: Decoder) -> Shapes:
    h, q = config.hidden, config.heads * config.key_width
    k, v = config.kv_heads * config.key_width, config.kv_heads * config.value_width
    norms = {"q_norm": (config.key_width,), "k_norm": (config.key_width,)} if config.qk_norm else {}
    return {
        "q_proj": (q, h),
        "k_proj": (k, h),
        "v_proj": (v, h),
        "o_proj": (h, config.heads * config.value_width),
    } | norms


def latent_shapes(config: Decoder) -> Shapes:
    h, a, q, kv = config.hidden, config.heads, config.q_lora_rank, config.kv_lora_rank
    plain = config.key_width - config.rotary_dim
    return {
        "q_a_proj": (q, h),
        "q_a_layernorm": (q,),
        "q_b_proj": (a * config.key_width, q),
        "kv_a_proj_with_mqa": (kv + config.rotary_dim, h),
        "kv_a_layernorm": (kv,),
        "kv_b_proj": (a * (plain + config.value_width), kv),
        "o_proj": (h, a * config.value_width),
    }


def gated_shapes(block: str, hidden: int, ffn: int) -> Shapes:
    gate, up, down = gated_names(block)
    return {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}


def expert_shapes(config: Decoder, layer: int) -> Shapes:
    h, f, router = config.hidden, config.ffn, router_name(config, layer)
    found: Shapes = {f"{router}.weight": (config.experts, h)}
    if config.router == "sigmoid":
        found[f"{router}.e_score_correction_bias"] = (config.experts,)
    for e in range(config.experts):
        gate, up, down = expert_names(config, layer, e)
        found |= {gate: (f, h), up: (f, h), down: (h, f)}
    return found | (
        gated_shapes(f"model.layers.{layer}.mlp.shared_experts", h, config.shared_ffn) if config.shared_ffn else {}
    )


def new_cache(config: Decoder, batch: int, dtype: torch.dtype) -> Params:
    """An empty cache of `config.seq` positions: keys and values by layer, or the latent and the turned key instead."""
    widths = {
        "key": (config.kv_heads, config.seq, config.key_width),
        "value": (config.kv_heads, config.seq, config.value_width),
    }
    if config.kv_lora_rank:
        widths = {"latent": (1, config.seq, config.kv_lora_rank), "turned": (1, config.seq, config.rotary_dim)}
    return {
        f"{i}.{name}": torch.zeros(batch, *width, dtype=dtype)
        for i in range(config.layers)
        for name, width in widths.items()
    }


# What attention does with what a token adds, by name: keep it, and return all there is to attend to.
Remember = Callable[[str, Tensor], Tensor]


def logits(params: Params, tokens: Tensor, config: Decoder) -> Tensor:
    """The scores `[b, s, vocab]` of what follows each of `tokens [b, s]`."""
    return decode(params, tokens, config, torch.arange(tokens.shape[1]), lambda _, new: new)[0]


def step(params: Params, tokens: Tensor, config: Decoder, cache: Params, first: int) -> tuple[Tensor, Params]:
    """Prefill and decode: as `logits`, of tokens from position `first` on after those in `cache`; and the cache."""
    positions = first + torch.arange(tokens.shape[1])
    written = dict(cache)

    def remember(name: str, new: Tensor) -> Tensor:
        written[name] = written[name].index_copy(2, positions, new)
        return written[name]

    return decode(params, tokens, config, positions, remember)[0], written


def loss(params: Params, batch: Params, config: Decoder) -> Tensor:
    """The mean cross entropy of `batch["targets"]` after `batch["tokens"]`, each `[b, s]`."""
    return parts.cross_entropy(logits(params, batch["tokens"], config), batch["targets"])


def dropped(params: Params, tokens: Tensor, config: Decoder) -> Tensor:
    """The choices dropped for lack of slots, by layer with experts and sequence: `[layers, b]`."""
    return torch.stack(decode(params, tokens, config, torch.arange(tokens.shape[1]), lambda _, new: new)[1])


def decode(
    params: Params, tokens: Tensor, config: Decoder, positions: Tensor, remember: Remember
) -> tuple[Tensor, list[Tensor]]:
    if config.family == "gpt":
        return gpt(params, tokens, config, positions, remember), []
    return llama(params, tokens, config, positions, remember)


def gpt(params: Params, tokens: Tensor, config: Decoder, positions: Tensor, remember: Remember) -> Tensor:
    def affine(name: str, x: Tensor) -> Tensor:
        return x @ params[f"transformer.{name}.weight"] + params[f"transformer.{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return parts.layer_norm(
            x, params[f"transformer.{name}.weight"], params[f"transformer.{name}.bias"], config.norm_eps
        )

    x = params["transformer.wte.weight"][tokens] + params["transformer.wpe.weight"][positions]
    for i in range(config.layers):
        fused = affine(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x))
        queries, keys, values = (parts.split_heads(part, config.heads) for part in fused.chunk(3, -1))
        keys, values = remember(f"{i}.key", keys), remember(f"{i}.value", values)
        x = x + affine(f"h.{i}.attn.c_proj", parts.join_heads(parts.attend(queries, keys, values, positions[0])))
        x = x + affine(f"h.{i}.mlp.c_proj", parts.gelu_tanh(affine(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))))
    return norm("ln_f", x) @ params["transformer.wte.weight"].T


def llama(
    params: Params, tokens: Tensor, config: Decoder, positions: Tensor, remember: Remember
) -> tuple[Tensor, list[Tensor]]:
    def norm(name: str, x: Tensor) -> Tensor:
        return parts.rms_norm(x, params[f"{name}.weight"], config.norm_eps)

    drops: list[Tensor] = []
    attention = latent_attention if config.kv_lora_rank else grouped_attention
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        x = x + attention(params, norm(f"{layer}.input_layernorm", x), config, i, positions, remember)
        y = norm(f"{layer}.post_attention_layernorm", x)
        if config.routed(i):
            added, lost = routed_mlp(params, y, config, i)
            drops.append(lost)
        else:
            added = parts.gated_mlp(y, *(params[name] for name in gated_names(f"{layer}.mlp")))
        x = x + added
    head = params["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    return norm("model.norm", x) @ head.T, drops


def grouped_attention(
    params: Params, x: Tensor, config: Decoder, layer: int, positions: Tensor, remember: Remember
) -> Tensor:
    block = f"model.layers.{layer}.self_attn"

    def heads(name: str, count: int) -> Tensor:
        return parts.split_heads(x @ params[f"{block}.{name}_proj.weight"].T, count)

    queries, keys, values = heads("q", config.heads), heads("k", config.kv_heads), heads("v", config.kv_heads)
    if config.qk_norm:
        queries = parts.rms_norm(queries, params[f"{block}.q_norm.weight"], config.norm_eps)
        keys = parts.rms_norm(keys, params[f"{block}.k_norm.weight"], config.norm_eps)
    turn = partial(parts.rotary, positions=positions, theta=config.rope_theta)
    keys, values = remember(f"{layer}.key", turn(keys)), remember(f"{layer}.value", values)
    mixed = parts.attend(turn(queries), keys, values, positions[0])
    return parts.join_heads(mixed) @ params[f"{block}.o_proj.weight"].T


def latent_attention(
    params: Params, x: Tensor, config: Decoder, layer: int, positions: Tensor, remember: Remember
) -> Tensor:
    """Multi-head latent attention (arXiv 2405.04434, 2.1): keys and values of all heads are made of one latent a token.

    A key's turned part is one for all heads; a head's query and key are the plain part, then the turned one.
    """
    block = f"model.layers.{layer}.self_attn"

    def weigh(name: str, y: Tensor) -> Tensor:
        return y @ params[f"{block}.{name}.weight"].T

    def norm(name: str, y: Tensor) -> Tensor:
        return parts.rms_norm(y, params[f"{block}.{name}.weight"], config.norm_eps)

    plain = config.key_width - config.rotary_dim
    turn = partial(parts.rotary_pairs, positions=positions, theta=config.rope_theta)
    queries = parts.split_heads(weigh("q_b_proj", norm("q_a_layernorm", weigh("q_a_proj", x))), config.heads)
    queries = torch.cat([queries[..., :plain], turn(queries[..., plain:])], -1)
    squeezed = weigh("kv_a_proj_with_mqa", x)[:, None]
    latent = remember(f"{layer}.latent", norm("kv_a_layernorm", squeezed[..., : config.kv_lora_rank]))
    turned = remember(f"{layer}.turned", turn(squeezed[..., config.kv_lora_rank :]))
    wide = parts.split_heads(weigh("kv_b_proj", latent[:, 0]), config.heads)
    keys = torch.cat([wide[..., :plain], turned.expand(-1, config.heads, -1, -1)], -1)
    mixed = parts.attend(queries, keys, wide[..., plain:], positions[0])
    return weigh("o_proj", parts.join_heads(mixed))


def routed_mlp(params: Params, x: Tensor, config: Decoder, layer: int) -> tuple[Tensor, Tensor]:
    """The experts' part of a layer for `x [b, s, h]`, a sequence a group, and the choices dropped in each."""
    router = router_name(config, layer)
    scores = x @ params[f"{router}.weight"].T
    if config.router == "sigmoid":
        correction = params[f"{router}.e_score_correction_bias"]
        limits = (config.router_groups, config.router_groups_kept, config.router_scale)
        experts, weights = parts.group_limited(scores, correction, config.experts_per_token, *limits)
    else:
        experts, weights = parts.top_weights(scores, config.experts_per_token)
    bank = [
        (params[gate], params[up], params[down])
        for gate, up, down in (expert_names(config, layer, e) for e in range(config.experts))
    ]
    capacity = config.capacity(x.shape[1])
    if capacity:
        y, drops = parts.capacity_mixture(x, experts, weights, bank, capacity)
    else:
        y, drops = parts.mixture(x, experts, weights, bank), torch.zeros(x.shape[0], dtype=torch.int64)
    if config.shared_ffn:
        y = y + parts.gated_mlp(x, *(params[name] for name in gated_names(f"model.layers.{layer}.mlp.shared_experts")))
    return y, drops
