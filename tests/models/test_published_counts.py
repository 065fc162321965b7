"""Presets have the parameters that were published, and flops by formula are the published ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")

from tests.models import published_counts as published
from tests.models.plain_torch import config_of, count, gradients, parameters
from tests.models.small import DECODERS, SMALL, batch_of
from torch.utils.flop_counter import FlopCounterMode

PRESETS = published.presets()


def test_every_preset_has_a_published_count_and_a_source() -> None:
    assert set(PRESETS) == set(published.PUBLISHED)
    assert [name for name, fields in PRESETS.items() if not fields["source"]] == []
    assert [name for name, entry in published.PUBLISHED.items() if not entry.source] == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    entry, found = published.PUBLISHED[name], published.closed_form(PRESETS[name])
    assert abs(found - entry.count) <= entry.within * entry.count


@pytest.mark.parametrize("name", PRESETS)
def test_the_plain_model_has_as_many(name: str) -> None:
    assert count(config_of(PRESETS[name])) == published.closed_form(PRESETS[name])


@pytest.mark.parametrize("name", [name for name, fields in PRESETS.items() if fields["family"] == "gpt"])
def test_a_dense_gpt_has_the_parameters_of_the_papers(name: str) -> None:
    """L (12 h^2 + 13 h) + (V + s) h (arXiv 2104.04473 section 5.1), and a final norm, not in it."""
    h, layers, vocab, seq = (PRESETS[name][field] for field in ("hidden", "layers", "vocab", "seq"))
    assert published.closed_form(PRESETS[name]) == layers * (12 * h**2 + 13 * h) + (vocab + seq) * h + 2 * h


# Fields that make no parameter: heads where a head is `hidden / heads` wide and keys have as many, and mere numbers.
ROUTER = ("router_groups", "router_groups_kept", "router_scale")
SILENT = {
    "gpt": {"heads", "kv_heads", "norm_eps"},
    "llama": {"seq", "norm_eps", "rope_theta"},
    "moe": {"seq", "norm_eps", "rope_theta", "experts_per_token", *ROUTER},
    "mlp": set[str](),
    "dlrm": {"bag"},
}


EACH = ["gpt3-175b", "qwen3-4b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "mlp-xs", "dlrm-kaggle"]


@pytest.mark.parametrize("name", EACH)
def test_a_wrong_size_is_seen(name: str) -> None:
    """Each field in turn, made larger: the count differs, unless the field makes no parameter."""
    fields = PRESETS[name]
    unseen = set()
    for field, value in fields.items():
        if isinstance(value, bool | str):
            continue
        wrong = [value[0] + 1, *value[1:]] if isinstance(value, list) else value * 2
        if published.closed_form(fields | {field: wrong}) == published.closed_form(fields):
            unseen.add(field)
    latent = {"kv_heads"} if "kv_lora_rank" in fields else set()
    assert unseen == (SILENT[fields["family"]] | latent) & set(fields)


def test_a_false_preset_differs_from_the_plain_model() -> None:
    config = config_of(PRESETS["deepseek-v3"])
    for field in ("ffn", "dense_layers", "shared_ffn", "q_lora_rank", "rotary_dim", "value_dim"):
        wrong = dataclasses.replace(config, **{field: getattr(config, field) + 1})
        assert count(wrong) != published.closed_form(PRESETS["deepseek-v3"])


# batch, layers, hidden, devices, seconds, TFLOP/s a device: README of NVIDIA/Megatron-LM of 2020-09 (arXiv 1909.08053),
# sequence 1,024, vocabulary 51,200.
SHOEYBI = [
    (8, 24, 1920, 1, 1.121, 71.9),
    (8, 36, 3072, 4, 1.238, 58.5),
    (16, 24, 1920, 1, 1.076, 149.8),
    (16, 36, 3072, 4, 1.162, 124.7),
    (2048, 24, 1920, 128, 1.153, 139.8),
    (2048, 36, 3072, 512, 1.242, 116.7),
]


@pytest.mark.parametrize("row", SHOEYBI)
def test_hardware_flops_are_those_of_megatron(row: tuple[int, int, int, int, float, float]) -> None:
    batch, layers, hidden, devices, seconds, teraflops = row
    rate = published.hardware_flops(batch, 1024, layers, hidden, 51200) / (devices * seconds) / 1e12
    assert rate == pytest.approx(teraflops, rel=1e-3)


# batch, layers, hidden, devices, seconds, MFU percent: arXiv 2205.05198 table 5, present work; sequence 2,048,
# vocabulary 51,200, A100 of 312 TFLOP/s.
KORTHIKANTI = [(4, 48, 6144, 8, 1.10, 41.5), (280, 105, 20480, 280, 37.83, 56.0)]


@pytest.mark.parametrize("row", KORTHIKANTI)
def test_model_flops_are_those_of_the_utilisation(row: tuple[int, int, int, int, float, float]) -> None:
    batch, layers, hidden, devices, seconds, percent = row
    used = published.model_flops(batch, 2048, layers, hidden, 51200) / (devices * seconds * 312e12)
    # Seconds have two decimals, percents one.
    assert 100 * used == pytest.approx(percent, abs=0.05 + percent * 0.005 / seconds)


# preset, tokens a second and TFLOP/s a device: NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11.
BRIDGE = [
    ("llama3-8b", 37556, 1933),
    ("llama3-8b", 14451, 744),
    ("llama3-405b", 999, 2522),
    ("llama3-405b", 813, 2053),
]


@pytest.mark.parametrize("row", BRIDGE)
def test_general_flops_are_those_of_megatron_bridge(row: tuple[str, int, int]) -> None:
    name, tokens, teraflops = row
    fields = PRESETS[name]
    rate = published.general_flops(fields, 1, causal_half=True) / fields["seq"] * tokens / 1e12
    assert rate == pytest.approx(teraflops, rel=1e-3)
    assert published.general_flops(fields, 1, causal_half=False) / fields["seq"] * tokens / 1e12 > 1.01 * teraflops


@pytest.mark.parametrize("name", [name for name, fields in PRESETS.items() if fields["family"] == "gpt"])
def test_general_flops_of_a_gpt_are_its_model_flops(name: str) -> None:
    fields = PRESETS[name]
    sizes: dict[str, Any] = {key: fields[key] for key in ("seq", "layers", "hidden", "vocab")}
    assert published.general_flops(fields, 3, causal_half=False) == pytest.approx(published.model_flops(3, **sizes))
    # A forward pass is a third of forward and backward; its products are recomputed, the head's are not.
    head = 2 * 3 * fields["seq"] * fields["hidden"] * fields["vocab"]
    again = published.model_flops(3, **sizes) / 3 - head
    assert published.hardware_flops(3, **sizes) == pytest.approx(published.model_flops(3, **sizes) + again)


def test_a_token_of_deepseek_v3_costs_what_was_published() -> None:
    """36.7B of 671B parameters work on a token, 0.9B of them embedding and 0.9B head (README_WEIGHTS.md)."""
    fields = PRESETS["deepseek-v3"]
    products = published.general_flops(fields | {"seq": 1}, 1, causal_half=False) / 6
    scores = fields["layers"] * fields["heads"] * (fields["head_dim"] + fields["value_dim"])
    # The embedding is looked up, not multiplied: what is printed counts embedding or head once.
    assert products - scores == pytest.approx(36.7e9, rel=5e-3)
    assert math.isclose(fields["vocab"] * fields["hidden"], 0.9e9, rel_tol=0.05)


@pytest.mark.parametrize("name", DECODERS)
def test_general_flops_are_those_that_torch_counts(name: str) -> None:
    """In the products of the plain models, forward and backward, where every token takes every expert."""
    fields = PRESETS[name] | SMALL[name]
    if "experts" in fields:
        fields |= {"experts_per_token": fields["experts"]}
    if "router_groups" in fields:
        fields |= {"router_groups_kept": fields["router_groups"]}
    config = config_of(fields)
    params, batch = parameters(config, 27), batch_of(config, 28, 3)
    with FlopCounterMode(display=False) as counter:
        gradients(params, batch, config)
    assert counter.get_total_flops() == published.general_flops(fields, 3, causal_half=False, router=True)
