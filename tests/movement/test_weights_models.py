"""Decoders by their features: names and shapes beside transformers' own, storage beside slow converters.

`transformers_parameters.json` has what `save_pretrained` of transformers 5.24 writes of a tiny model of each kind
(`python -m benchmarks.weights_models --shapes FILE`, which also compares logits). The converters follow vLLM's loaders
(`stacked_params_mapping`: what is joined, and then by the name alone) and Megatron-Bridge's mappings.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from shardplan.errors import LayoutError
from shardplan.movement.weights.frameworks import SideRequest
from shardplan.movement.weights.table import shipped_models
from shardplan.movement.weights.weights import load_weights

Named = dict[str, np.ndarray]
READ = json.loads((Path(__file__).parent / "transformers_parameters.json").read_text())
SIZES: dict[str, Any] = READ["sizes"]
DENSE = [kind for kind in READ["models"] if shipped_models()[kind.replace("_", "-")] == "llama"]
# What Megatron has no place for: norms over a whole projection, a bias of the head.
WITHOUT_PLACE = {"olmo2": "qw", "olmo3": "qw", "phi": "head_b"}
SPELLED = {"c_fc": "up_proj", "c_proj": "down_proj", "fc1": "up_proj", "fc2": "down_proj", "dense": "o_proj"}


def config(kind: str) -> dict[str, Any]:
    return SIZES | READ["own"].get(kind, {}) | {"model_type": kind}


def whole(kind: str) -> Named:
    """A checkpoint of which every element is another number."""
    shapes: dict[str, list[int]] = READ["models"][kind]
    rng, total = np.random.default_rng(5), sum(math.prod(s) for s in shapes.values())
    parts = np.split(rng.permutation(total).astype(np.float32) + 1, np.cumsum([math.prod(s) for s in shapes.values()]))
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}


def part(a: np.ndarray, rank: int, axis: int = 0) -> np.ndarray:
    return np.split(a, 2, axis)[rank]


def padded(a: np.ndarray, unit: int) -> np.ndarray:
    return np.concatenate([a, np.zeros((-len(a) % unit, *a.shape[1:]), a.dtype)])


def separate(kind: str, named: Named) -> Named:
    """A checkpoint with q, k, v, gate and up apart, under Llama's names of projections."""
    out: Named = {}
    d, h, g = SIZES["head_dim"], SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    for name, a in named.items():
        stem, last, tail = (["", "", *name.split(".")])[-3:]
        front = name.removesuffix(f"{last}.{tail}")
        if last == "qkv_proj":
            pieces = np.split(a, [h * d, (h + g) * d])
            out |= {f"{front}{k}_proj.{tail}": x for k, x in zip("qkv", pieces, strict=True)}
        elif last == "gate_up_proj":
            out |= {f"{front}{k}_proj.{tail}": x for k, x in zip(("gate", "up"), np.split(a, 2), strict=True)}
        else:
            out[f"{front}{SPELLED.get(last, last)}.{tail}" if stem in ("self_attn", "mlp") else name] = a
    return out


def back(kind: str, name: str) -> str:
    """A name with the model's own words."""
    own = {v: k for k, v in SPELLED.items() if any(f".{k}." in n for n in READ["models"][kind])}
    front, _, rest = name.rpartition(".")
    stem, _, last = front.rpartition(".")
    return f"{stem}.{own[last]}.{rest}" if last in own else name


def served(kind: str, named: Named, rank: int) -> Named:
    """What one of two ranks of vLLM holds."""
    out: Named = {}
    apart = separate(kind, named)
    for name, a in apart.items():
        front, last, tail = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
        if last in ("q_proj", "gate_proj"):
            joined, parts = ("qkv_proj", "qkv") if last == "q_proj" else ("gate_up_proj", ("gate", "up"))
            pieces = [part(apart[f"{front}.{k}_proj.{tail}"], rank) for k in parts]
            out[f"{front}.{joined}.{tail}"] = np.concatenate(pieces)
        elif last in ("embed_tokens", "lm_head"):
            out[name] = part(padded(a, 64), rank)
        elif last == "up_proj" and f"{front}.gate_proj.{tail}" not in apart:
            out[back(kind, name)] = part(a, rank)
        elif last in ("o_proj", "down_proj"):
            out[back(kind, name)] = part(a, rank, 1) if a.ndim == 2 else a
        elif last not in ("k_proj", "v_proj", "up_proj"):
            out[name] = a
    return out


def trained(kind: str, named: Named, rank: int) -> Named:
    """What one of two ranks of Megatron holds, layers under local numbers of the only chunk."""
    d, g = SIZES["head_dim"], SIZES["num_key_value_heads"]
    a = separate(kind, named)
    out = {"0.embedding.word_embeddings.weight": part(padded(a["model.embed_tokens.weight"], 16), rank)}
    if "lm_head.weight" in a:
        out["0.output_layer.weight"] = part(padded(a["lm_head.weight"], 16), rank)
    gemma = any("feedforward" in n for n in a)
    for name, x in a.items():
        words = name.split(".")
        if len(words) == 3:
            out |= {f"0.decoder.final_layernorm.{words[2]}": x} if "norm" in words[1] else {}
            continue
        if words[1] != "layers":
            continue
        to, what, tail = f"0.decoder.layers.{words[2]}.", ".".join(words[3:-1]), words[-1]
        behind = {"post_self_attn_layernorm": "self_attention.linear_proj", "post_mlp_layernorm": "mlp.linear_fc2",
                  "post_feedforward_layernorm": "mlp.linear_fc2"}  # fmt: skip
        if gemma and kind != "vaultgemma":
            behind["post_attention_layernorm"] = "self_attention.linear_proj"
        if what == "input_layernorm":
            out[f"{to}self_attention.linear_qkv.layer_norm_{tail}"] = x
        elif behind.get(what):
            out[f"{to}{behind[what]}.post_layernorm.{tail}"] = x
        elif what in ("post_attention_layernorm", "pre_feedforward_layernorm"):
            out[f"{to}mlp.linear_fc1.layer_norm_{tail}"] = x
        elif what == "self_attn.q_proj":
            q, k, v = (a[name.replace("q_proj", f"{n}_proj")].reshape(g, -1, d, *x.shape[1:]) for n in "qkv")
            joined = np.concatenate([q, k, v], 1).reshape(-1, *x.shape[1:])
            out[f"{to}self_attention.linear_qkv.{tail}"] = part(joined, rank)
        elif what == "self_attn.o_proj":
            out[f"{to}self_attention.linear_proj.{tail}"] = part(x, rank, 1) if x.ndim == 2 else x
        elif what.split(".")[-1] in ("q_norm", "query_layernorm", "k_norm", "key_layernorm"):
            out[f"{to}self_attention.{what.split('.')[-1][0]}_layernorm.{tail}"] = x
        elif what == "mlp.up_proj":
            gate = a.get(name.replace("up_proj", "gate_proj"))
            halves = [part(y, rank) for y in (gate, x) if y is not None]
            out[f"{to}mlp.linear_fc1.{tail}"] = np.concatenate(halves)
        elif what == "mlp.down_proj":
            out[f"{to}mlp.linear_fc2.{tail}"] = part(x, rank, 1) if x.ndim == 2 else x
    return out


@pytest.mark.parametrize("kind", READ["models"])
def test_names_and_shapes_are_those_of_transformers(kind: str) -> None:
    side = load_weights(SideRequest("hf", {}), config(kind), disk=True)
    found = {name: list(shape) for name, shape, _ in side.parameters(0)}
    want = READ["models"][kind]
    prefix = "transformer." if kind == "gpt2" else ""
    assert {prefix + n: s for n, s in found.items()} == want


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize(("word", "converter"), [("vllm", served), ("megatron", trained)])
def test_storage_is_that_of_a_slow_converter(kind: str, word: str, converter: Any) -> None:
    named = whole(kind)
    degrees = {"tp": 2} | ({"divisible": 8} if word == "megatron" else {})
    source = load_weights(SideRequest("hf", {}), config(kind), dtype="f32", disk=True)
    target = sp.Weights.load(word, config(kind), devices=[1, 2], dtype="f32", **degrees)
    if word == "megatron" and kind in WITHOUT_PLACE:
        with pytest.raises(LayoutError, match=f"does not take: {WITHOUT_PLACE[kind]} "):
            sp.refit(source, target)
        return
    found = sp.refit(source, target).apply({0: named})
    for rank in (0, 1):
        want = converter(kind, named, rank)
        assert found[1 + rank].keys() == want.keys()
        assert all(np.array_equal(found[1 + rank][n], want[n]) for n in want)


def test_a_model_that_a_family_does_not_have() -> None:
    with pytest.raises(LayoutError, match="'vllm-bert' is no file and is not shipped"):
        sp.Weights.load("vllm-bert", config("llama"))
    with pytest.raises(LayoutError, match="model_type = 'qwen22': no table ships for it; did you mean 'qwen2'"):
        sp.Weights.load("vllm", config("llama") | {"model_type": "qwen22"})


def linear_part(kind: str, named: Named, rank: int) -> Named:
    """What one of two ranks of vLLM holds of a layer of linear attention: rows in a run, but for the convolution."""
    own = READ["own"][kind]
    key = own["linear_num_key_heads"] * own["linear_key_head_dim"]
    out: Named = {}
    for name, a in named.items():
        last = name.partition(".linear_attn.")[2]
        if last == "conv1d.weight":  # queries, keys and values, each cut
            out[name] = np.concatenate([part(x, rank) for x in np.split(a, [key, 2 * key])])
        elif last in ("in_proj_qkvz.weight", "in_proj_ba.weight", "A_log", "dt_bias"):
            out[name] = part(a, rank)
        elif last in ("out_proj.weight", "norm.weight"):
            out[name] = part(a, rank, 1) if a.ndim == 2 else a
    return out


def test_linear_attention_is_cut_on_its_heads() -> None:
    named = whole("qwen3_next")
    source = load_weights(SideRequest("hf", {}), config("qwen3_next"), dtype="f32", disk=True)
    target = load_weights(SideRequest("vllm", {"tp": 2}), config("qwen3_next"), [1, 2], "f32", disk=True)
    plan = sp.refit(source, target)
    found = plan.apply({0: named})
    for rank in range(2):
        want = linear_part("qwen3_next", named, rank)
        assert len(want) == 7 * 5  # of six layers the fourth has attention
        assert all(np.array_equal(found[rank + 1][name], a) for name, a in want.items())
        q, heads = (
            named["model.layers.3.self_attn.q_proj.weight"],
            found[rank + 1]["model.layers.3.self_attn.qkv_proj.weight"],
        )
        assert np.array_equal(heads[: len(q) // 2], part(q, rank))  # each query with its gate
    with pytest.raises(LayoutError, match="legal"):  # key heads are whole
        load_weights(SideRequest("vllm", {"tp": 4}), config("qwen3_next"), disk=True)


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_attention_stands_at_the_interval_that_the_config_says(every: int) -> None:
    side = load_weights(SideRequest("hf", {}), config("qwen3_next") | {"full_attention_interval": every}, disk=True)
    full = [n for n in range(6) if f"model.layers.{n}.self_attn.q_proj.weight" in side.names(0)]
    linear = [n for n in range(6) if f"model.layers.{n}.linear_attn.A_log" in side.names(0)]
    assert full == [n for n in range(6) if (n + 1) % every == 0]
    assert sorted(full + linear) == list(range(6))


def test_a_state_space_layer_goes_to_shards_of_rows_and_back() -> None:
    named = whole("mamba2")
    sides = [load_weights(SideRequest(w, d), config("mamba2"), dtype="f32", devices=range(n, n + k), disk=True)
             for w, d, n, k in (("hf", {}, 0, 1), ("fsdp2", {"dp": 3}, 1, 3))]  # fmt: skip
    for side in sides:
        assert side.families
    found = sp.refit(*sides).apply({0: named})
    rows = -(-len(named["backbone.layers.1.mixer.in_proj.weight"]) // 3)
    for rank in range(3):
        want = named["backbone.layers.1.mixer.in_proj.weight"][rank * rows : (rank + 1) * rows]
        assert np.array_equal(found[rank + 1]["backbone.layers.1.mixer.in_proj.weight"], want)
    again = sp.refit(sides[1], sides[0]).apply(found)[0]
    assert all(np.array_equal(again[name], a) for name, a in named.items())
