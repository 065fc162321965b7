"""Stock models of transformers in tiny configurations of random weights; nothing is downloaded.

Sizes are small, and every flag of an architecture is on: windows are shorter than the sequence, layers are as many as
it takes for each kind of them, experts have groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.errors import optional

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
                         "vocab_size": 67, "max_position_embeddings": 64}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
HEAD = GROUPED | {"head_dim": 8}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
          "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4,
          "first_k_dense_replace": 1, "num_key_value_heads": 4}  # fmt: skip
# Names of model types, whether words are predicted, and the fields of the configuration that are not its default's.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("CausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64}),
    "gpt_neo": ("CausalLM", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 67,
                             "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}),
    "gpt_neox": ("CausalLM", SMALL),
    "gptj": ("CausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64,
                          "rotary_dim": 4}),
    "gpt_bigcode": ("CausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64}),
    "gpt_oss": ("CausalLM", HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "opt": ("CausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40,
                         "vocab_size": 67, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "bloom": ("CausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67}),
    "falcon": ("CausalLM", SMALL),
    "mpt": ("CausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 67, "max_seq_len": 64}),
    "llama": ("CausalLM", GROUPED),
    "mistral": ("CausalLM", GROUPED | {"sliding_window": 4}),
    "mixtral": ("CausalLM", GROUPED | {"num_local_experts": 4}),
    "qwen2": ("CausalLM", GROUPED),
    "qwen2_moe": ("CausalLM", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3": ("CausalLM", HEAD),
    "qwen3_moe": ("CausalLM", HEAD | EXPERTS),
    "gemma": ("CausalLM", HEAD),
    "gemma2": ("CausalLM", HEAD | {"query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gemma3_text": ("CausalLM", HEAD | {"query_pre_attn_scalar": 8, "sliding_window": 4,
                                     "num_hidden_layers": 6}),
    "phi": ("CausalLM", SMALL),
    "phi3": ("CausalLM", GROUPED | {"pad_token_id": 0}),
    "deepseek_v2": ("CausalLM", SMALL | LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("CausalLM", SMALL | LATENT),
    "olmo": ("CausalLM", GROUPED),
    "olmo2": ("CausalLM", GROUPED),
    "stablelm": ("CausalLM", GROUPED),
    "starcoder2": ("CausalLM", GROUPED),
    "cohere": ("CausalLM", GROUPED),
    "granite": ("CausalLM", GROUPED),
    "nemotron": ("CausalLM", HEAD),
    "smollm3": ("CausalLM", GROUPED | {"pad_token_id": 0}),
    "glm4": ("CausalLM", HEAD | {"pad_token_id": 0}),
    "mamba": ("CausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 67, "state_size": 4}),
    "mamba2": ("CausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 67, "state_size": 4,
                            "num_heads": 8, "head_dim": 4, "n_groups": 2, "chunk_size": 4}),
    "bert": ("MaskedLM", SMALL),
    "roberta": ("MaskedLM", SMALL),
    "distilbert": ("MaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "vocab_size": 67}),
    "albert": ("MaskedLM", SMALL | {"embedding_size": 16}),
    "electra": ("MaskedLM", SMALL | {"embedding_size": 16}),
    "deberta-v2": ("MaskedLM", SMALL),
    "modernbert": ("MaskedLM", SMALL | ENDS | {"cls_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 4,
                                             "local_attention": 4}),
    "t5": ("Seq2SeqLM", {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 40, "d_kv": 8, "vocab_size": 67}),
    "bart": ("Seq2SeqLM", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                           "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 67,
                           "max_position_embeddings": 64} | ENDS),
    "persimmon": ("CausalLM", SMALL),
    "seed_oss": ("CausalLM", HEAD),
    "convnext": ("ImageClassification", {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1], "patch_size": 1,
                                         "image_size": 8}),
    "qwen3_next": ("CausalLM", HEAD | EXPERTS | {"shared_expert_intermediate_size": 24, "num_hidden_layers": 4,
                                                 "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                                                 "linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    "xlnet": ("CausalLM", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40, "vocab_size": 67}),
    "vit": ("ImageClassification", SMALL | {"image_size": 8, "patch_size": 4}),
}  # fmt: skip

# Kinds that were chosen after the code was done, for `stock_models`.
MORE = ("persimmon", "seed_oss", "convnext", "qwen3_next", "xlnet")


class Answers(nn.Module):
    """A stock model that gives its logits alone, and keeps nothing."""

    def __init__(self, stock: nn.Module, twice: bool, cached: bool) -> None:
        super().__init__()
        self.stock, self.twice, self.more = stock, twice, {"use_cache": False} if cached else {}

    def forward(self, ids: Tensor) -> Tensor:
        """Of words, or of an image."""
        given = {"decoder_input_ids": ids} if self.twice else {}
        return self.stock(ids, **given, **self.more).logits


def stock(attention: str = "sdpa") -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    """Return the models by name, each made when it is called."""

    def made(kind: str, head: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        shape = (2, 3, 8, 8) if head == "ImageClassification" else (2, 7)
        ids = torch.randn(shape, dtype=torch.float64) if len(shape) > 2 else torch.randint(3, 67, shape)
        return Answers(model_of(kind, attention), head == "Seq2SeqLM", head in ("CausalLM", "Seq2SeqLM")), (ids,)

    return {name: (lambda name=name, head=head: made(name, head)) for name, (head, _) in CONFIGS.items()}


def model_of(kind: str, attention: str | None = None) -> nn.Module:
    """Return a stock model of random weights, under an attention of transformers or its own default."""
    hf: Any = optional("transformers", "torch")
    head, fields = CONFIGS[kind]
    config = hf.AutoConfig.for_model(kind, **fields)
    config._attn_implementation = attention
    config._experts_implementation = "batched_mm"  # the default multiplies no f64
    return getattr(hf, f"AutoModelFor{head}").from_config(config)
