"""What was published of the preset models: parameters, exact where they are, and the flops of a training step.

`closed_form` counts from a preset's table alone, by sums that no builder shares.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).parents[2] / "src" / "shardplan" / "strategy" / "presets"


def presets() -> dict[str, dict[str, Any]]:
    """Every preset's table by its name."""
    return {
        name: fields
        for path in sorted(PRESETS.glob("*.toml"))
        for name, fields in tomllib.loads(path.read_text()).items()
    }


@dataclass(frozen=True, slots=True)
class Published:
    """Parameters as printed: `count` is exact if `within` is 0, else a number printed in a few digits.

    `within` is the largest relative difference from it that what was printed allows.
    """

    count: int
    source: str
    within: float = 0.0


SAFETENSORS = "Hugging Face, safetensors metadata of {}"
KERAS = "keras-team/keras-hub, keras_hub/src/models/{}_presets.py, params"
# Printed in two to four digits; 350M, 13.0B and 175.0B are further from their own shapes than a digit.
GPT3 = "arXiv 2005.14165 table 2.1, n_params"
MEGATRON = "arXiv 2104.04473 table 1"
DISTIR = "counted from the shapes in microsoft/dist-ir 7cfa1b0, examples/{}.py; not printed there"
DLRM = "counted from the shapes that facebookresearch/dlrm 090956e makes of {}; not printed there"

PUBLISHED = {
    "mlp-xs": Published(2_097_152, DISTIR.format("mlp")),
    "mlp-small": Published(1_073_741_824, DISTIR.format("mlp")),
    "mlp-medium": Published(17_179_869_184, DISTIR.format("mlp")),
    "mlp-large": Published(103_079_215_104, DISTIR.format("mlp")),
    "gpt2-xs": Published(67_736_832, DISTIR.format("gpt2")),
    "gpt2": Published(124_439_808, KERAS.format("gpt2/gpt2")),
    "gpt2-medium": Published(354_823_168, KERAS.format("gpt2/gpt2")),
    "gpt2-large": Published(774_030_080, KERAS.format("gpt2/gpt2")),
    "gpt2-xl": Published(1_557_611_200, KERAS.format("gpt2/gpt2")),
    "gpt3": Published(125_000_000, GPT3, 0.02),
    "gpt3-medium": Published(350_000_000, GPT3, 0.02),
    "gpt3-large": Published(760_000_000, GPT3, 0.02),
    "gpt3-xl": Published(1_300_000_000, GPT3, 0.02),
    "gpt3-2.7b": Published(2_700_000_000, GPT3, 0.02),
    "gpt3-6.7b": Published(6_700_000_000, GPT3, 0.02),
    "gpt3-13b": Published(13_000_000_000, GPT3, 0.02),
    "gpt3-175b": Published(175_000_000_000, GPT3, 0.02),
    # One decimal of a billion: half a unit of it, relative.
    "megatron-1.7b": Published(1_700_000_000, MEGATRON, 0.05 / 1.7),
    "megatron-3.6b": Published(3_600_000_000, MEGATRON, 0.05 / 3.6),
    "megatron-7.5b": Published(7_500_000_000, MEGATRON, 0.05 / 7.5),
    "megatron-18.4b": Published(18_400_000_000, MEGATRON, 0.05 / 18.4),
    "megatron-39.1b": Published(39_100_000_000, MEGATRON, 0.05 / 39.1),
    "megatron-76.1b": Published(76_100_000_000, MEGATRON, 0.05 / 76.1),
    "megatron-145.6b": Published(145_600_000_000, MEGATRON, 0.05 / 145.6),
    "megatron-310.1b": Published(310_100_000_000, MEGATRON, 0.05 / 310.1),
    "megatron-529.6b": Published(529_600_000_000, MEGATRON, 0.05 / 529.6),
    "megatron-1008b": Published(1_008_000_000_000, MEGATRON, 0.05 / 1008.0),
    "llama3-8b": Published(8_030_261_248, KERAS.format("llama3/llama3")),
    "llama3-70b": Published(70_553_706_496, SAFETENSORS.format("meta-llama/Llama-3.1-70B")),
    "llama3-405b": Published(405_853_388_800, SAFETENSORS.format("meta-llama/Llama-3.1-405B")),
    "qwen3-0.6b": Published(596_049_920, KERAS.format("qwen3/qwen3")),
    "qwen3-1.7b": Published(1_720_574_976, KERAS.format("qwen3/qwen3")),
    "qwen3-4b": Published(4_022_468_096, KERAS.format("qwen3/qwen3")),
    "qwen3-8b": Published(8_190_735_360, KERAS.format("qwen3/qwen3")),
    "qwen3-14b": Published(14_768_307_200, KERAS.format("qwen3/qwen3")),
    "qwen3-32b": Published(32_762_123_264, KERAS.format("qwen3/qwen3")),
    "qwen3-30b-a3b": Published(30_532_122_624, KERAS.format("qwen3_moe/qwen3_moe")),
    "qwen3-235b-a22b": Published(235_093_634_560, KERAS.format("qwen3_moe/qwen3_moe")),
    "mixtral-8x7b": Published(46_702_792_704, KERAS.format("mixtral/mixtral")),
    "mixtral-8x22b": Published(140_620_634_112, SAFETENSORS.format("mistral-community/Mixtral-8x22B-v0.1")),
    # README_WEIGHTS.md prints 671B; these are the checkpoint's headers, without scales, with 14,848 corrections.
    "deepseek-v3": Published(671_026_419_200, SAFETENSORS.format("deepseek-ai/DeepSeek-V3, layers 0 to 60")),
    "dlrm-kaggle": Published(540_677_217, DLRM.format("bench/dlrm_s_criteo_kaggle.sh")),
    "dlrm-terabyte": Published(24_036_595_969, DLRM.format("bench/run_and_time.sh")),
}


def closed_form(fields: Mapping[str, Any]) -> int:
    """The parameters of a preset's model, from the fields of its table."""
    return {"gpt": _gpt, "llama": _llama, "moe": _llama, "mlp": _mlp, "dlrm": _dlrm}[fields["family"]](fields)


def _gpt(f: Mapping[str, Any]) -> int:
    h, ffn = f["hidden"], f["ffn"]
    layer = 4 * h * (h + 1) + 2 * h * ffn + ffn + h + 4 * h
    return f["layers"] * layer + (f["vocab"] + f["seq"]) * h + 2 * h


def _llama(f: Mapping[str, Any]) -> int:
    h, layers, dense = f["hidden"], f["layers"], f.get("dense_layers", 0)
    ends = (1 if f["tied"] else 2) * f["vocab"] * h + h
    attention = _latent(f) if "kv_lora_rank" in f else _grouped(f)
    if "experts" not in f:
        return ends + layers * (attention + 2 * h + 3 * h * f["ffn"])
    correction = f["experts"] if f["router"] == "sigmoid" else 0
    routed = f["experts"] * (3 * h * f["ffn"] + h) + correction + 3 * h * f.get("shared_ffn", 0)
    return ends + layers * (attention + 2 * h) + dense * 3 * h * f.get("dense_ffn", 0) + (layers - dense) * routed


def _grouped(f: Mapping[str, Any]) -> int:
    width = f.get("head_dim", f["hidden"] // f["heads"])
    return 2 * f["hidden"] * width * (f["heads"] + f["kv_heads"]) + (2 * width if f.get("qk_norm") else 0)


def _latent(f: Mapping[str, Any]) -> int:
    h, heads, q, kv, turned, value = (
        f[name] for name in ("hidden", "heads", "q_lora_rank", "kv_lora_rank", "rotary_dim", "value_dim")
    )
    queries = q * (h + 1 + heads * f["head_dim"])
    keys = h * (kv + turned) + kv * (1 + heads * (f["head_dim"] - turned + value))
    return queries + keys + heads * value * h


def _mlp(f: Mapping[str, Any]) -> int:
    return f["layers"] * f["hidden"] ** 2


def _dlrm(f: Mapping[str, Any]) -> int:
    vectors = len(f["table_rows"]) + 1
    bottom = [f["dense_features"], *f["bottom"]]
    top = [f["embedding_dim"] + vectors * (vectors - 1) // 2, *f["top"]]
    dense = sum((a + 1) * b for widths in (bottom, top) for a, b in zip(widths, widths[1:], strict=False))
    return sum(f["table_rows"]) * f["embedding_dim"] + dense


def hardware_flops(batch: int, seq: int, layers: int, hidden: int, vocab: int) -> float:
    """Of a GPT's step that computes every layer's forward pass twice (arXiv 2104.04473 section 5.1)."""
    products = 96 * batch * seq * layers * hidden**2
    return products * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))


def model_flops(batch: int, seq: int, layers: int, hidden: int, vocab: int) -> float:
    """Of a GPT's step, forward and backward once, no score left out (arXiv 2205.05198 appendix A)."""
    products = 72 * batch * seq * layers * hidden**2
    return products * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))


def general_flops(fields: Mapping[str, Any], batch: int, causal_half: bool, router: bool = False) -> float:
    """Of a decoder's step, forward and backward once, with half of the scores or all (arXiv 2204.02311 appendix B).

    6 flops a token and parameter of a product, 6 a score and dim of a head's key and of its value. Publications leave
    the router out (`router`): 0.4 % of a step of qwen3-30b-a3b. For a GPT with `ffn = 4 hidden` this is `model_flops`.
    """
    f, h, heads = fields, fields["hidden"], fields["heads"]
    seen = f["seq"] / 2 if causal_half else f["seq"]
    width = f.get("head_dim", h // heads)
    value = f.get("value_dim", width)
    dense = f.get("dense_layers", 0)
    if "kv_lora_rank" in f:
        # A vector of a norm for each rank is no product.
        attention = _latent(f) - f["q_lora_rank"] - f["kv_lora_rank"]
    else:
        attention = h * width * (2 * heads + 2 * f["kv_heads"])
    products = 3 if f["gated_mlp"] else 2
    active = f.get("experts_per_token", 1) * f["ffn"] + f.get("shared_ffn", 0)
    mlps = products * h * ((f["layers"] - dense) * active + dense * f.get("dense_ffn", 0))
    mlps += (f["layers"] - dense) * h * f.get("experts", 0) if router else 0
    scores = f["layers"] * heads * (width + value) * seen
    return 6 * batch * f["seq"] * (f["layers"] * attention + scores + mlps + h * f["vocab"])
