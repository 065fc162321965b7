"""A Hugging Face config as what builders take: its family, its fields, and what of it no builder computes, by name.

Of a config every key is read, is known to say nothing of a training step, has the value that the builders compute, or
stands in `left_out`: nothing is silent. A type of model that no builder writes is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardplan.core import validation
from shardplan.core.ops.rotary import RotaryScaling
from shardplan.errors import ParseError, ShardplanError, excerpt, line, near_text
from shardplan.movement.weights.configs import PLAIN, model_config
from shardplan.strategy.sizes import period_of

USUAL_SEQ = 4096  # tokens of a sequence, where a config allows as many: it says how long one may be, not how long it is
# By `model_type` the family that writes it, what of it no config says, and what the builder lacks.
GEMMA: Mapping[str, Any] = {"unit_norms": True}
TYPES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "gpt2": ("gpt", {}, ""),
    "llama": ("llama", {}, ""),
    "mistral": ("llama", {}, ""),
    "qwen2": ("llama", {"qkv_bias": True}, ""),
    "qwen3": ("llama", {"qk_norm": True, "model_type": "qwen3"}, ""),
    "gemma": ("llama", GEMMA, ""),
    "gemma2": ("llama", {**GEMMA, "post_norms": True}, ""),
    "gemma3_text": ("llama", {**GEMMA, "post_norms": True, "qk_norm": True}, ""),
    "phi3": ("llama", {"model_type": "phi3"}, ""),
    "mixtral": ("moe", {"router": "softmax", "model_type": "mixtral"}, ""),
    "qwen2_moe": ("moe", {"router": "softmax", "shared_gate": True}, ""),
    "qwen3_moe": ("moe", {"router": "softmax", "qk_norm": True}, ""),
    "deepseek_v3": ("moe", {"router": "sigmoid"}, ""),
    "gpt_oss": ("moe", {"router": "softmax", "sinks": True, "model_type": "gpt_oss"}, ""),
}
# What a config of such a type that does not say it means.
OF_GEMMA: Mapping[str, Any] = {"tied": True, "head_dim": 256}
UNSAID: Mapping[str, Mapping[str, Any]] = {
    "gemma": OF_GEMMA, "gemma2": OF_GEMMA, "gemma3_text": OF_GEMMA, "qwen2_moe": {"qkv_bias": True},
}  # fmt: skip
# By type the letters of layers that have a window, where `layer_types` does not say them; by default all.
WINDOWS: Mapping[str, str] = {"gemma2": "wf", "gpt_oss": "wf", "gemma3_text": "wwwwwf"}
KINDS = {"sliding_attention": "w", "full_attention": "f"}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
# By field of the builders the keys of configs that say it, the first that is there.
KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "tied": ("tie_word_embeddings",),
    "rope_theta": ("rope_theta",),
    "positions": ("n_positions",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "dense_layers": ("first_k_dense_replace",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "rotary_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
    "router_groups": ("n_group",),
    "router_groups_kept": ("topk_group",),
    "router_scale": ("routed_scaling_factor",),
    "attention_cap": ("attn_logit_softcapping",),
    "logit_cap": ("final_logit_softcapping",),
}
# What is none where a config says 0: by field its key, and the types that do as it says.
BESIDE = {
    "dropout": ("resid_pdrop", ("gpt2", "phi3")),
    "embed_dropout": ("embd_pdrop", ("gpt2",)),
    "mtp_layers": ("num_nextn_predict_layers", ("deepseek_v3",)),
}
OF_EXPERTS = (*(key for name in ("experts", "experts_per_token", "dense_layers") for key in KEYS[name]),
              "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts")  # fmt: skip
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_GROUPS = ("n_group", "topk_group", "routed_scaling_factor", "topk_method", "scoring_func")
# By key the values of it that are what the builders compute.
COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "swiglu_limit": (7,),
    "swiglu_alpha": (1.702,),
    "use_bidirectional_attention": (False,),
    "norm_topk_prob": (True,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "add_cross_attention": (False,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1,),
    "num_nextn_predict_layers": (0,),
    "mlp_only_layers": ([],),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "scale_attn_by_inverse_layer_idx"), (False,)),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"), (0,)),
}
# Keys that say nothing of what a step computes: ids of tokens, how weights are stored and begun, what serves.
ELSEWHERE = frozenset((
    "_name_or_path", "architectures", "attn_implementation", "auto_map", "aux_loss_alpha", "bos_token_id", "dtype",
    "eos_token_id", "ep_size", "experts_per_token", "initial_context_length", "initializer_range",
    "max_position_embeddings", "max_window_layers", "model_type", "n_ctx", "n_positions", "name_or_path",
    "original_max_position_embeddings",
    "output_router_logits", "pad_token_id", "pretraining_tp", "quantization_config", "reorder_and_upcast_attn",
    "rope_parameters", "rope_theta", "router_aux_loss_coef", "router_jitter_noise", "scale_attn_weights", "seq_aux",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "unk_token_id", "use_cache", "use_sliding_window",
))  # fmt: skip


class ReadConfig(NamedTuple):
    """A config: what it is called, its family, fields of `Model.load`; by key what no builder computes, as text."""

    title: str
    family: str
    fields: Mapping[str, Any]
    left_out: Mapping[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is left out, a line each."""
        return tuple(f"left out: {text}" for text in self.left_out.values())


def read_config(config: Mapping[str, Any], what: str = "config.json") -> ReadConfig:
    """Return the model of a config that `movement.weights.configs.model_config` read.

    Raises `ShardplanError` for a type that no builder writes, and where a size is missing or is none.

    >>> tiny = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
    ...         "vocab_size": 32, "intermediate_size": 16, "max_position_embeddings": 64, "rope_theta": 1e6}
    >>> found = read_config(tiny | {"logit_cap": 30.0})
    >>> found.family, found.fields["seq"], found.notes
    ('llama', 64, ('left out: logit_cap=30.0',))
    """
    kind = str(config.get("model_type"))
    if kind not in TYPES:
        raise ShardplanError(
            f"{what}: model_type={excerpt(kind)}{near_text(kind, TYPES)}; legal are {', '.join(TYPES)}"
        )
    family, beside, lacking = TYPES[kind]
    legal = {name: keys for name, keys in KEYS.items() if _concerns(family, kind, keys)}
    read = {name: next((k for k in keys if config.get(k) is not None), "") for name, keys in legal.items()}
    for name in ("layers", "hidden", "heads", "vocab", *(("experts", "experts_per_token") if family == "moe" else ())):
        if not read[name]:
            raise ShardplanError(f"{what} lacks {' or '.join(KEYS[name])}; legal is a config with the sizes of {kind}")
    fields: dict[str, Any] = dict(UNSAID.get(kind, {}))
    fields |= {name: config[key] for name, key in read.items() if key} | dict(beside)
    most = config.get("max_position_embeddings") or config.get("n_positions") or USUAL_SEQ
    fields["seq"] = min(
        validation.whole_number(f"{what}: max_position_embeddings", most, 1, kind=ShardplanError), USUAL_SEQ
    )
    taken = {*read.values()}
    if family == "moe":
        taken |= {"shared_expert_intermediate_size", "n_shared_experts", "intermediate_size"}
        fields |= _shared_widths(config, fields, what)
    if "kv_lora_rank" in fields:
        taken |= {"qk_nope_head_dim", "head_dim", "qk_head_dim"}
        fields["head_dim"] = sum(_size(config, key, what) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
        fields["kv_heads"] = fields["heads"]
    if family != "gpt" and (scaling := _scaling(config, most)) is not None:
        taken.add("rope_scaling")
        fields |= {"rope_scaling": scaling} if scaling else {}
    if family != "gpt":
        for more, keys in (
            _biases(config, fields),
            _router(config, kind),
            _activation(config, kind),
            _gemma(config, kind, what),
            _windows(config, kind, fields["layers"], what),
            _rotary_bases(config, most),
        ):
            fields |= more
            taken |= keys
        if not fields.get("window"):
            fields.pop("window_theta", None)  # of no layer
    more = {name: key for name, (key, kinds) in BESIDE.items() if kind in kinds and config.get(key)}
    fields |= {name: config[key] for name, key in more.items()}
    taken |= {*more.values()}
    left_out = {kind: lacking} if lacking else {}
    left_out |= {key: f"{key}={said}" for key, said in _otherwise(config, taken)}
    return ReadConfig(f"{kind} of {what}", family, fields, left_out)


def is_config(name: str) -> bool:
    """Say whether a name of a model is the path of a config, or of the folder that has it."""
    return "/" in name or name.endswith(".json") or Path(name).is_dir()


def load_config(path: str, ignore: Iterable[str] = ()) -> ReadConfig:
    """Read the config at a path, of which everything counts but the keys that are to be ignored.

    Raises `ShardplanError` naming the keys that no builder computes, and a key to ignore that is none of them.
    """
    found, spared = read_config(model_config(path), line(path)), validation.names("Model.load: ignore", tuple(ignore))
    for key in spared:
        if key not in found.left_out:
            legal = ", ".join(found.left_out) or "none, as all of it counts"
            raise ShardplanError(f"Model.load: ignore={excerpt(key)} of {line(path)}; legal are {legal}")
    if left := [text for key, text in found.left_out.items() if key not in spared]:
        keys = [key for key in found.left_out if key not in spared]
        raise ShardplanError(
            f"Model.load: {found.title}: no builder computes {', '.join(left)}; legal is a config without, or "
            f"ignore={keys}"
        )
    return found


def _scaling(config: Mapping[str, Any], most: int) -> str | None:
    """How positions are scaled, as the builders read it; None where they do not."""
    text = str(config.get("rope_scaling") or PLAIN)
    text = {PLAIN: ""}.get(text, text)
    key = "original_max_position_embeddings"
    if text.startswith("yarn") and f" {key}=" not in text:
        text += f" {key}={config.get('initial_context_length') or most}"
    try:
        RotaryScaling.parse(text)
    except ParseError:
        return None
    return text


Read = tuple[dict[str, Any], set[str]]  # fields, and the keys that say them


def _biases(config: Mapping[str, Any], fields: Mapping[str, Any]) -> Read:
    """Biases of attention: of a latent none are built."""
    if "kv_lora_rank" in fields:
        return {}, set()
    if config.get("attention_bias") is True:
        return {"qkv_bias": True, "o_bias": True}, {"attention_bias"}
    said = config.get("qkv_bias")
    return ({"qkv_bias": said}, {"qkv_bias"}) if isinstance(said, bool) else ({}, set())


def _router(config: Mapping[str, Any], kind: str) -> Read:
    """Whether the weights of the experts of a token are made to sum to 1."""
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return {}, set()
    return {"router_norm": config.get("norm_topk_prob") is True}, {"norm_topk_prob"}


def _activation(config: Mapping[str, Any], kind: str) -> Read:
    """What an MLP makes of its gate."""
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    said = config.get(key, "gelu_pytorch_tanh" if kind.startswith("gemma") else "silu")
    found = ACTIVATIONS.get(said) if isinstance(said, str) else None
    if kind == "gpt_oss" and found == "silu":
        found = "clamped"
    return ({"activation": found}, {"hidden_act", "hidden_activation"}) if found else ({}, set())


def _gemma(config: Mapping[str, Any], kind: str, what: str) -> Read:
    """Gemma's embeddings are scaled, and its scores by a number of their own."""
    if not kind.startswith("gemma"):
        return {}, set()
    key, hidden = "query_pre_attn_scalar", _size(config, "hidden_size", what)
    said = validation.number(f"{what}: {key}", config.get(key) or 0, ShardplanError)
    return {"embed_scale": hidden**0.5} | ({"score_scale": said**-0.5} if said else {}), {key}


def _windows(config: Mapping[str, Any], kind: str, layers: int, what: str) -> Read:
    """The window of attention, and which layers have it."""
    keys = {"sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"}
    window, said = config.get("sliding_window"), config.get("layer_types")
    none = not window or config.get("use_sliding_window") is False
    listed = isinstance(said, list) and not {*map(str, said)} - {*KINDS}
    layers = validation.whole_number(f"{what}: the number of layers", layers, 1, validation.MOST_ITEMS, ShardplanError)
    if said is not None and (not listed or len(said) < layers or (none and "sliding_attention" in said)):
        return {}, set()
    if none:
        return {}, {"sliding_window"}
    if said is not None:
        letters = "".join(KINDS[one] for one in said[:layers])
    elif "use_sliding_window" in config:  # Qwen's: of the layers from one on
        full = config.get("max_window_layers") or 0
        full = min(validation.whole_number(f"{what}: max_window_layers", full, kind=ShardplanError), layers)
        letters = "f" * full + "w" * (layers - full)
    else:
        key = next((k for k in ("sliding_window_pattern", "_sliding_window_pattern") if config.get(k)), "")
        pattern = min(_size(config, key, what), layers + 1) if key else 0
        letters = f"{'w' * (pattern - 1)}f" if pattern else WINDOWS.get(kind, "w")
    if "w" not in letters:
        return {}, keys
    return {"window": window, "windows": letters[: period_of(letters)]}, keys


def _rotary_bases(config: Mapping[str, Any], most: int) -> Read:
    """Gemma 3's: of layers with a window another base, which nothing scales."""
    said, keys = config.get("rope_parameters"), {"rope_local_base_freq", "rope_scaling"}
    if isinstance(said, Mapping) and {*said} == {*KINDS}:
        local, full = (model_config({"rope_parameters": said[kind]}) for kind in KINDS)
        scaling = _scaling(full, most)
        if local["rope_scaling"] != PLAIN or scaling is None:
            return {}, set()
        more = {"rope_scaling": scaling} if scaling else {}
        return {"rope_theta": full["rope_theta"], "window_theta": local["rope_theta"], **more}, keys
    local = config.get("rope_local_base_freq")
    return ({"window_theta": local}, {"rope_local_base_freq"}) if local else ({}, set())


def _concerns(family: str, kind: str, keys: tuple[str, ...]) -> bool:
    """Whether a model of this type has what these keys say."""
    if family != "moe" and {*keys} & {*OF_EXPERTS} and "intermediate_size" not in keys:
        return False
    if kind != "deepseek_v3" and {*keys} & {*OF_LATENTS, *OF_GROUPS}:
        return False
    return "n_positions" not in keys if family != "gpt" else not {*keys} & {"rope_theta", "head_dim"}


def _shared_widths(config: Mapping[str, Any], fields: Mapping[str, Any], what: str) -> dict[str, int]:
    """The widths of what every token takes, and of the layers without experts."""
    found: dict[str, int] = {}
    if fields.get("dense_layers"):
        found["dense_ffn"] = _size(config, "intermediate_size", what)
    if config.get("n_shared_experts"):
        found["shared_ffn"] = _size(config, "n_shared_experts", what) * _size(config, "moe_intermediate_size", what)
    elif config.get("shared_expert_intermediate_size"):
        found["shared_ffn"] = _size(config, "shared_expert_intermediate_size", what)
    return found


def _size(config: Mapping[str, Any], key: str, what: str) -> int:
    return validation.whole_number(f"{what}: {key}", config.get(key), 1, kind=ShardplanError)


def _otherwise(config: Mapping[str, Any], taken: set[str]) -> list[tuple[str, str]]:
    """What a config says that no builder does: keys and values."""
    found: list[tuple[str, str]] = []
    said = config.get("rope_parameters")
    part = said.get("partial_rotary_factor", 1) if isinstance(said, Mapping) else 1
    if part != 1 and "partial_rotary_factor" not in config:
        found.append(("partial_rotary_factor", str(part)))
    for key, value in sorted(config.items()):
        kinds = key == "layer_types" and isinstance(value, list) and {*map(str, value)} == {"full_attention"}
        plain = key in taken or key in ELSEWHERE or value in COMPUTED.get(key, ()) or value is None
        if not (plain or kinds or (isinstance(value, Mapping) and key == "text_config")):
            found.append((key, line(_brief(value))))
    return found


def _brief(value: Any) -> str:
    """A value in a few words: of a list what it has."""
    return f"[{', '.join(sorted({*map(str, value)}))}]" if isinstance(value, list) else str(value)
