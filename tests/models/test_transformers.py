"""Configs of transformers' own models, tiny: loaded, packed, and trained three steps beside them, in f64.

Their rotary embeddings, norms and softmax compute in f32 whatever the model is in: here what they call `float32` is
f64, and rotary embeddings get the same formulas in f64, held against transformers' own numbers first. The formulas
stand in `frequencies`, apart from ours.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardplan import Model, Strategy, partition
from strategy.jobs import stepped

transformers: Any = pytest.importorskip("transformers")
torch: Any = pytest.importorskip("torch")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
    "intermediate_size": 40, "max_position_embeddings": 64, "attention_dropout": 0.0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 0.5}  # fmt: skip
LATENT = SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
W, F = "sliding_attention", "full_attention"
WINDOWS = (W, F)
GEMMA = {
    "head_dim": 8,
    "pad_token_id": None,
    "sliding_window": 5,
    "query_pre_attn_scalar": 6,
    "layer_types": [*WINDOWS, *WINDOWS],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama 3.1": ("LlamaConfig", SIZES | {"rope_parameters": LLAMA3}),
    "llama linear": ("LlamaConfig", SIZES | {"rope_parameters": LINEAR}),
    "llama yarn": ("LlamaConfig", SIZES | {"rope_parameters": YARN}),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": None}),
    "mistral window": ("MistralConfig", SIZES | {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen2 windows": ("Qwen2Config", SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma": ("GemmaConfig", SIZES | {"head_dim": 8, "pad_token_id": None}),
    "gemma2": ("Gemma2Config", SIZES | GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 0.5,
                                                "final_logit_softcapping": 0.7}),
    "gemma3": ("Gemma3TextConfig", SIZES | GEMMA | {"num_hidden_layers": 5, "layer_types": [*WINDOWS, *WINDOWS, W]}),
    "phi3": ("Phi3Config", SIZES | {"pad_token_id": None, "sliding_window": 5}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}),
    "gpt2": ("GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 48, "n_positions": 64,
                            "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4, "sliding_window": None}),
    "qwen3 moe": ("Qwen3MoeConfig", SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                             "norm_topk_prob": True, "head_dim": 16}),
    "qwen2 moe": ("Qwen2MoeConfig", SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                             "shared_expert_intermediate_size": 20}),
    "gpt oss": ("GptOssConfig", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                                         "sliding_window": 5, "rope_parameters": YARN | {"truncate": False}}),
    "deepseek yarn": ("DeepseekV3Config", LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
}  # fmt: skip
BATCH, SEQ, STEPS, LR = 4, 12, 3, 0.3


def frequencies(said: dict[str, Any], dim: int) -> tuple[np.ndarray, float]:
    """The turns a position of pairs, f64 [dim / 2], and what vectors are multiplied with."""
    plain = said["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    factor, kind = said.get("factor", 1.0), said.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    most = said["original_max_position_embeddings"]
    if kind == "llama3":
        out = plain.copy()
        for k, turn in enumerate(plain):
            length = 2 * math.pi / turn
            if length > most / said["low_freq_factor"]:
                out[k] = turn / factor
            elif length >= most / said["high_freq_factor"]:
                smooth = (most / length - said["low_freq_factor"]) / (
                    said["high_freq_factor"] - said["low_freq_factor"]
                )
                out[k] = (1 - smooth) * turn / factor + smooth * turn
        return out, 1.0

    def place(turns: float) -> float:
        return dim * math.log(most / (turns * 2 * math.pi)) / (2 * math.log(said["rope_theta"]))

    ends = place(said["beta_fast"]), place(said["beta_slow"])
    ends = ends if said.get("truncate") is False else (math.floor(ends[0]), math.ceil(ends[1]))
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)

    def spread(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1

    size = spread(said["mscale"]) / spread(said["mscale_all_dim"]) if "mscale" in said else spread(1.0)
    return plain / factor * ramp + plain * (1 - ramp), size


class Rotary(torch.nn.Module):
    """Transformers' rotary embedding, in f64, by kind of layer; of one that knows none it is None.

    `half` says that the angle of a pair is there once, as gpt-oss has it.
    """

    def __init__(self, turns: dict[str | None, tuple[np.ndarray, float]], half: bool) -> None:
        super().__init__()
        self.turns, self.half = turns, half

    def forward(self, x: Any, position_ids: Any, layer_type: str | None = None) -> tuple[Any, Any]:
        turns, size = self.turns[layer_type]
        angles = position_ids[..., None].double() * torch.from_numpy(turns)
        both = angles if self.half else torch.cat((angles, angles), -1)
        return both.cos() * size, both.sin() * size


def theirs(name: str) -> Any:
    """Their model in f64, whose rotary embedding is held against the formulas, and replaced by them."""
    kind, fields = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields, attn_implementation="eager", experts_implementation="eager")
    found = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for p in found.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    rotary = getattr(found.model, "rotary_emb", None) if hasattr(found, "model") else None
    if rotary is not None:
        kinds = {W: f"{W}_", F: f"{F}_"} if hasattr(rotary, f"{F}_inv_freq") else {None: ""}
        turns: dict[str | None, tuple[np.ndarray, float]] = {}
        for layers, prefix in kinds.items():
            theirs, said = getattr(rotary, f"{prefix}inv_freq"), config.rope_parameters
            turns[layers] = frequencies(said[layers] if layers else said, 2 * len(theirs))
            np.testing.assert_allclose(theirs.numpy(), turns[layers][0], rtol=1e-5)
            assert getattr(rotary, f"{prefix}attention_scaling") == pytest.approx(turns[layers][1])
        found.model.rotary_emb = Rotary(turns, config.model_type == "gpt_oss")
    if hasattr(found.base_model, "embed_tokens") and hasattr(found.model.embed_tokens, "embed_scale"):
        found.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=torch.float64)
    return found


def files(found: Any, model: Model) -> dict[str, np.ndarray]:
    """Their parameters by the names that a checkpoint has; experts that they keep as one tensor, one by one."""
    out: dict[str, np.ndarray] = {}
    mixtral = found.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, x in {**dict(found.named_parameters()), **dict(found.named_buffers())}.items():
        array = x.detach().numpy()
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        block = name.rpartition(".")[0]
        if found.config.model_type == "gpt_oss":
            out[name] = array
        elif name.endswith("experts.gate_up_proj"):
            for k, both in enumerate(array):
                for part, one in zip((gate, up), np.split(both, 2), strict=True):
                    out[f"{block}.{k}.{part}.weight"] = one
        elif name.endswith("experts.down_proj"):
            out |= {f"{block}.{k}.{down}.weight": one for k, one in enumerate(array)}
        else:
            out[name] = array
    wanted = {file for p in model.parameters.values() for _, file in p.names()}
    assert {*out} >= wanted
    return {n: out[n] for n in wanted}


@pytest.mark.parametrize("name", CASES)
def test_three_steps_of_a_config_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = theirs(name)
    found.config.save_pretrained(tmp_path)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    fields: dict[str, Any] = {"seq": SEQ, "dtype": "f64", "optimizer": "sgd", "lr": LR}
    if hasattr(found.config, "num_experts_per_tok"):
        fields["capacity_factor"] = 0.0
    model = Model.load(str(tmp_path), **fields)
    state = model.pack(files(found, model))
    job = partition(model, Strategy(data=2, tensor=2, global_batch=BATCH))
    rng = np.random.default_rng(1)
    optimizer = torch.optim.SGD(found.parameters(), LR)
    for _ in range(STEPS):
        ids = rng.integers(0, 48, (BATCH, SEQ + 1))
        logits = found(torch.from_numpy(ids[:, :-1])).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        given = {"tokens": ids[:, :-1].astype(np.int32), "targets": ids[:, 1:].astype(np.int32)}
        got = stepped(job, {**state, **given})
        assert float(got["loss"]) == pytest.approx(loss.item(), rel=1e-9)
        state = {n: got.get(n, x) for n, x in state.items()}
    last = model.unpack(state)
    for n, x in files(found, model).items():
        np.testing.assert_allclose(last[n], x, rtol=1e-9, atol=1e-9, err_msg=n)
