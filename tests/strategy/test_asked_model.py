"""Models as people name them: presets with changes, and configs of Hugging Face, of which nothing is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardplan import Model, ShardplanError
from shardplan.movement.weights.configs import model_config
from shardplan.strategy.asked_model import parse_model
from shardplan.strategy.model_config import COMPUTED, ELSEWHERE, KEYS, TYPES, read_config

COMMON = {"architectures": ["X"], "bos_token_id": 1, "initializer_range": 0.02, "torch_dtype": "bfloat16",
          "transformers_version": "4.51.0", "use_cache": True, "vocab_size": 151936}  # fmt: skip
ROTARY = COMMON | {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
                   "rope_scaling": None, "tie_word_embeddings": False}  # fmt: skip
# As published beside the weights; what a config says beyond sizes is kept, so that it is read as it is found.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": ROTARY | {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "vocab_size": 128256, "pretraining_tp": 1},
    "qwen3-8b": ROTARY | {
        "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False},
    "qwen3-30b-a3b": ROTARY | {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
    "mixtral-8x7b": ROTARY | {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "vocab_size": 32000},
    "deepseek-v3": ROTARY | {
        "model_type": "deepseek_v3", "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {"fmt": "e4m3"},
        "rope_scaling": {"factor": 40, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 129280},
    "gpt2-xl": COMMON | {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_type": "cls_index", "summary_use_proj": True, "task_specific_params": {},
        "vocab_size": 50257},
}  # fmt: skip
# Parameters as published, for models that are no preset.
OTHERS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "Mistral-7B-v0.1": (ROTARY | {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 10000.0,
        "sliding_window": 4096, "vocab_size": 32000}, 7_241_732_096, ()),
    "Qwen2.5-7B": (ROTARY | {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
        "vocab_size": 152064}, 7_615_616_512, ()),
    "gpt-oss-20b": (ROTARY | {
        "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_size": 2880,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rope_theta": 150000,
        "rope_scaling": {"factor": 32.0, "rope_type": "yarn"}, "sliding_window": 128, "swiglu_limit": 7.0,
        "vocab_size": 201088}, 20_914_757_184, ()),
    "gemma-2b": (COMMON | {
        "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "hidden_size": 2048,
        "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 18,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 256000},
        2_506_172_416, ()),
    "gemma-2-9b": (COMMON | {
        "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "vocab_size": 256000}, 9_241_705_984, ()),
    "Phi-3-mini-4k": (ROTARY | {
        "model_type": "phi3", "embd_pdrop": 0.0, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0,
        "rope_theta": 10000.0, "sliding_window": 2047, "vocab_size": 32064}, 3_821_079_552, ()),
    "Qwen1.5-MoE-A2.7B": (ROTARY | {
        "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768, "use_sliding_window": False}, 14_315_784_192, ()),
}  # fmt: skip
GEMMA = CONFIGS["llama3-8b"] | {"model_type": "gemma3_text", "sliding_window": 9}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_the_preset_that_was_made_of_it(name: str, tmp_path: Path) -> None:
    """Every field is that of the preset but the sequence, which no config says."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    more = {"gpt2-xl": {"positions": 1024}, "deepseek-v3": {"mtp_layers": 1}}.get(name, {})
    asked, preset = parse_model(f"{tmp_path},seq=512"), Model.load(name, seq=512, **more)
    found = asked.load()
    assert found.parameter_count == preset.parameter_count
    scaled = {"deepseek-v3": {"rope_scaling": "yarn factor=40 original_max_position_embeddings=163840"}}.get(name, {})
    scaled |= {"dropout": 0.1, "embed_dropout": 0.1} if name == "gpt2-xl" else {}
    assert dict(found.fields) == {**preset.fields, **scaled}
    said = {"gpt2-xl": ["attn_pdrop=0.1"]}
    assert asked.notes == tuple(f"left out: {text}" for text in said.get(name, []))


def test_modules_that_predict_further_are_read_and_train(tmp_path: Path) -> None:
    """A forward pass has no use for them: no parameter, and no tensor of theirs."""
    path = tmp_path / "config.json"
    small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "n_routed_experts": 8,
             "first_k_dense_replace": 1, "intermediate_size": 12, "moe_intermediate_size": 8, "q_lora_rank": 8,
             "kv_lora_rank": 8, "vocab_size": 32, "num_nextn_predict_layers": 2, "n_group": 1,
             "topk_group": 1}  # fmt: skip
    path.write_text(json.dumps(CONFIGS["deepseek-v3"] | small))
    trained, forward = (Model.load(str(path), seq=4, training=training) for training in (True, False))
    files = {file for p in trained.parameters.values() for _, file in p.names()}
    assert (
        trained.fields["mtp_layers"] == 2 and {"model.layers.2.eh_proj.weight", "model.layers.3.hnorm.weight"} <= files
    )
    assert not [n for n in forward.parameters if n.startswith("mtp")]


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_have_the_parameters_that_were_published(name: str) -> None:
    config, count, notes = OTHERS[name]
    asked = read_config(model_config(config))
    assert sorted(asked.notes) == sorted(notes)
    assert Model.load(asked.family, **{**asked.fields, "seq": 64}).parameter_count == count
    assert asked.fields["seq"] == 4096


@pytest.mark.parametrize(
    ("said", "window", "windows"),
    [
        ({"sliding_window": 4095}, 4095, "w"),
        ({"sliding_window": None}, None, None),
        ({"sliding_window": 9, "use_sliding_window": False}, None, None),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 30}, 9, "f" * 30 + "ww"),
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 16}, 9, "wf"),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 32}, None, None),
        ({"sliding_window": 9, "sliding_window_pattern": 3}, 9, "wwf"),
        ({"sliding_window": 9, "sliding_window_pattern": 10**12}, 9, "w" * 32 + "f"),
        ({"sliding_window": None, "rope_local_base_freq": 1e4}, None, None),
    ],
)
def test_layers_have_the_windows_that_a_config_says(said: dict[str, Any], window: int | None, windows: str) -> None:
    found = read_config(model_config(OTHERS["Mistral-7B-v0.1"][0] | said))
    assert (found.fields.get("window"), found.fields.get("windows")) == (window, windows)
    assert "window_theta" not in found.fields
    assert not found.notes


@pytest.mark.parametrize(
    ("said", "note"),
    [
        ({"layer_types": ["chunked_attention"] * 32}, "layer_types=[chunked_attention]"),
        ({"layer_types": ["sliding_attention"] * 32, "sliding_window": None}, "layer_types=[sliding_attention]"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
         "partial_rotary_factor=0.75"),
        ({"layer_types": 3}, "layer_types=3"),
        ({"layer_types": [["full_attention"]] * 32}, "layer_types=[['full_attention']]"),
        ({"rope_parameters": [1]}, "rope_scaling=[1]"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"mlp_bias": True}, "mlp_bias=True"),
    ],
)  # fmt: skip
def test_what_no_builder_computes_is_named(said: dict[str, Any], note: str) -> None:
    assert f"left out: {note}" in read_config(model_config(OTHERS["Mistral-7B-v0.1"][0] | said)).notes


@pytest.mark.parametrize(
    "key", ["partial_rotary_factor", "logit_softcap", "attention_bias", "num_nextn_predict_layers"]
)
@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_no_key_is_passed_over(name: str, key: str) -> None:
    assert read_config(model_config(CONFIGS[name] | {key: 0.5})).notes == (f"left out: {key}=0.5",)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_size_of_a_config_counts(name: str) -> None:
    """A key that a builder reads changes what it reads: none is taken and not used."""
    config = CONFIGS[name]
    plain = read_config(model_config(config))
    read = {k for keys in KEYS.values() for k in keys} | {"n_shared_experts", "qk_nope_head_dim"}
    for key, value in config.items():
        if key in read and isinstance(value, int) and not isinstance(value, bool):
            assert (
                read_config(model_config(config | {key: value * 2})).fields != plain.fields
                or (
                    key in ("num_key_value_heads",) and name == "deepseek-v3"  # a latent has keys for every head
                )
                or (key == "intermediate_size" and name == "qwen3-30b-a3b")
            )  # of layers without experts: there are none
    assert not read & ELSEWHERE - {"n_positions", "experts_per_token", "rope_theta"} and not read & COMPUTED.keys()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen4"}, "config.json: model_type='qwen4'; did you mean 'qwen"),
        ({}, "config.json: model_type='None'; legal are gpt2, llama"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "config.json lacks hidden_size or n_embd; legal is"),
        ({**CONFIGS["mixtral-8x7b"], "num_local_experts": None}, "config.json lacks num_local_experts or num_experts"),
        ({**GEMMA, "query_pre_attn_scalar": "x"}, "query_pre_attn_scalar is 'x'; legal is a finite number"),
        ({**GEMMA, "hidden_size": "x"}, "hidden_size is 'x'; legal is a whole number"),
        ({**GEMMA, "num_hidden_layers": 10**10}, "the number of layers is 10000000000; legal is a whole number from 1"),
        ({**GEMMA, "sliding_window_pattern": "x"}, "sliding_window_pattern is 'x'; legal is a whole number"),
        ({**GEMMA, "use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers is 'x'; legal is a whole"),
    ],
)
def test_what_no_builder_writes_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ShardplanError, match=reason):
        read_config(config)


def test_a_model_is_loaded_from_a_config_of_which_everything_counts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["llama3-8b"]))
    for name in (str(path), str(tmp_path)):
        found = Model.load(name, seq=512, precision="bf16", optimizer="sgd")
        assert found.program == Model.load("llama3-8b", seq=512, precision="bf16", optimizer="sgd").program
    path.write_text(json.dumps(CONFIGS["gpt2-xl"] | {"embd_pdrop": 0.0}))
    left = "no builder computes attn_pdrop=0.1; legal is a config without, or ignore="
    with pytest.raises(ShardplanError, match=left):
        Model.load(str(path))
    with pytest.raises(ShardplanError, match=r"ignore='embd_pdrop' of .*; legal are attn_pdrop"):
        Model.load(str(path), ignore=["embd_pdrop"])
    found = Model.load(str(path), ignore=["attn_pdrop"])
    assert (found.fields["dropout"], found.fields["embed_dropout"], found.dims["seeds"]) == (0.1, 0.0, ("batch",))
    phi = read_config(model_config(OTHERS["Phi-3-mini-4k"][0] | {"resid_pdrop": 0.2, "embd_pdrop": 0.3}))
    assert phi.fields["dropout"] == 0.2 and [*phi.left_out] == ["embd_pdrop"]
    with pytest.raises(ShardplanError, match=r"ignore=.* of gpt2, which is no config"):
        Model.load("gpt2", ignore=["attn_pdrop"])


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"type": "dynamic", "factor": 2.0}, "rope_scaling=dynamic factor=2"),
        ({"type": "linear", "factor": 2.0, "curve": 1}, "rope_scaling=linear curve=1 factor=2"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling=llama3 factor=8"),
    ],
)
def test_a_scaling_of_positions_that_is_not_computed_is_named(said: dict[str, Any], text: str) -> None:
    assert read_config(model_config(CONFIGS["llama3-8b"] | {"rope_scaling": said})).notes == (f"left out: {text}",)


def test_a_preset_takes_changes() -> None:
    asked = parse_model("llama3-70b, seq=4096,layers=40,tied=true,rope_theta=1e4")
    assert asked.load(precision="bf16").fields.items() >= {
        "seq": 4096, "layers": 40, "tied": True, "rope_theta": 1e4, "precision": "bf16"}.items()  # fmt: skip
    assert parse_model("gpt2", seq=77).load().fields["seq"] == 77 and {*TYPES} >= {"llama", "gpt_oss"}
    for text in ("llama3-8b,seq", "llama3-8b,seq=4,seq=5"):
        with pytest.raises(ShardplanError, match="legal is a preset, then field=value, each once"):
            parse_model(text)
    with pytest.raises(ShardplanError, match="has no field 'sequence'"):
        parse_model("llama3-8b,sequence=4").load()
