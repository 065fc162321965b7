"""Nothing of a source is lost unsaid: tensors that a target does not take, and configs that mean something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardplan as sp
from movement import weights_frameworks as frameworks
from shardplan.errors import LayoutError, ParseError
from shardplan.movement.weights.configs import model_config
from shardplan.movement.weights.drops import left_out
from shardplan.movement.weights.table import WeightTable, shipped_tables
from shardplan.movement.weights.weights import Weights

QWEN: dict[str, Any] = {
    "kind": "qwen3", "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 2, "num_hidden_layers": 2, "vocab_size": 10, "tie_word_embeddings": False, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip


def load(name: str, config: dict[str, Any] | None = None, **given: Any) -> Weights:
    return sp.Weights.load(name, config or QWEN, dtype="f32", **given)


def refused(*sides: Weights, **given: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        sp.refit(*sides, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_that_a_target_does_not_take_are_refused_by_name() -> None:
    sides = load("hf-qwen3"), load("vllm-llama", tensor=2)
    assert refused(*sides) == (
        "hf-qwen3 stores what vllm-llama does not take: qn (model.layers.{l}.self_attn.q_norm.weight), "
        "kn (model.layers.{l}.self_attn.k_norm.weight); legal is a target that takes it, or drop = 'qn', 'kn' "
        "(--drop qn --drop kn)"
    )
    assert "does not take: kn (" in refused(*sides, drop="qn")
    assert refused(*sides, drop=["?n", "q"]) == "drop = 'q' matches nothing that is left out; legal are qn, kn"
    whole = load("hf-qwen3"), load("vllm-qwen3", tensor=2)
    assert sp.refit(*whole).dropped == ()
    assert refused(*whole, drop="qn") == (
        "drop = 'qn' matches nothing that is left out; legal are none, since the target takes all"
    )


def test_what_is_dropped_is_said_and_all_else_arrives() -> None:
    whole = frameworks.checkpoint(QWEN, np.random.default_rng(0))
    source, target = load("hf-qwen3"), load("vllm-llama", tensor=2)
    for drop in ("*_norm.weight", ["qn", "kn"], "?n"):
        plan = sp.refit(source, target, drop=drop)
        assert plan.dropped == ("qn", "kn")
        llama = {n: a for n, a in whole.items() if "q_norm" not in n and "k_norm" not in n}
        want = frameworks.served(QWEN | {"kind": "llama"}, llama, tensor=2)
        for rank, named in plan.apply({0: whole}).items():
            assert all(named[n].tobytes() == a.tobytes() for n, a in want[rank].items())


def test_a_part_of_the_model_leaves_out_no_more_than_it_says() -> None:
    sides = load("hf-qwen3"), load("vllm-llama", tensor=2)
    assert sp.refit(*sides, only=["embed", "v_"]).dropped == ()
    assert "does not take: kn (" in refused(*sides, only="k*")
    assert sp.refit(*sides, only="k*", drop="kn").dropped == ("kn",)


def test_an_expert_and_a_layer_that_no_device_takes_are_named() -> None:
    source = load("hf-qwen3-moe")
    table = WeightTable.read("vllm-qwen3-moe-ep")
    text = str(load("vllm-qwen3-moe-ep", tensor=2))
    assert sp.refit(source, load("vllm-qwen3-moe-ep", tensor=2)).dropped == ()
    assert "x@data*tensor.first" in text
    lacking = sp.Weights.parse(text.replace("x@data*tensor.first", "x@data*tensor.map").replace(
        "degrees = { tensor = 2 }", "degrees = { map = [[0], [1, 3]], tensor = 2 }"))  # fmt: skip
    said = refused(source, lacking)
    assert "gate (model.layers.{l}.mlp.experts.{x}.gate_proj.weight, from element [0, 2, 0, 0] on)" in said
    assert sp.refit(source, lacking, drop=["gate", "up", "down"]).dropped == ("gate", "up", "down")
    stages = sp.Weights.load("vllm-qwen3", QWEN | {"num_hidden_layers": 3}, pipeline=2, stages=[[0], [2]])
    said = refused(load("hf-qwen3", QWEN | {"num_hidden_layers": 3}), stages)
    assert "norm1 (model.layers.{l}.input_layernorm.weight, from element [1, 0] on)" in said
    assert said.endswith("(--drop norm1 --drop norm2 --drop q --drop k)")
    assert table.agree


def test_what_every_framework_recomputes_may_be_there_and_may_be_left_out() -> None:
    whole = frameworks.checkpoint(QWEN, np.random.default_rng(0))
    buffers = {f"model.layers.{k}.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32) for k in range(2)}
    source, target = load("hf-qwen3"), load("vllm-qwen3")
    plan = sp.refit(source, target)
    assert list(plan.apply({0: whole | buffers})[0]) == list(plan.apply({0: whole})[0])
    with pytest.raises(LayoutError, match=r"1 additional \(model.layers.0.self_attn.rotary_emb.freq\)"):
        plan.apply({0: whole | {"model.layers.0.self_attn.rotary_emb.freq": np.ones(1, np.float32)}})
    # a table that stores it itself
    text = str(source).replace("[of.tensors]\n", '[of.tensors]\nfreq = "l, d"\n')
    text = text.replace("[[parameters]]\n", '[[parameters]]\nname = "{l}.rotary_emb.inv_freq"\nis = "freq = d"\n'
                        "[[parameters]]\n", 1)  # fmt: skip
    stores = sp.Weights.parse(text)
    assert "freq" in stores.tensors
    assert sp.refit(stores, target).dropped == ()
    assert "does not take: freq (" in refused(sp.Weights.parse(text.replace("{l}.rotary_emb", "{l}.rotary")), target)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 1},
         "heads is 4 at the source and 8 at the target; kv_heads is 2 at the source and 4 at the target; head_dim is 2 "
         "at the source and 1 at the target; legal is one config"),
        ({"rope_theta": 10000.0}, "rope_theta is 1000000 at the source and 10000 at the target; legal is one config, "
         "or differ = 'rope_theta' (--differ rope_theta)"),
        ({"rope_theta": None}, "rope_theta is 1000000 at the source and not said at the target"),
        ({"rms_norm_eps": 1e-5}, "norm_eps is 1e-06 at the source and 1e-05 at the target"),
        ({"hidden_act": "gelu"}, "activation is 'silu' at the source and 'gelu' at the target"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling is 'default' at the source and 'yarn factor=4"),
    ],
)  # fmt: skip
def test_configs_that_mean_another_model_of_one_shape_are_refused_by_field(config: dict[str, Any], said: str) -> None:
    sides = load("hf-qwen3"), load("vllm-qwen3", QWEN | config)
    text = refused(*sides)
    assert text.startswith(f"the configs of hf-qwen3 and vllm-qwen3 differ: {said}"), text
    fields = [part.split(" is ")[0] for part in text.partition("differ: ")[2].split("; ")[:-1]]
    if "head_dim" in config:
        assert refused(*sides, differ="heads") == (
            "differ = 'heads' sets shapes; legal are those that set none, where they differ"
        )
    else:
        sp.refit(*sides, differ=fields)
        assert "differ = 'layers' is no field in which the configs differ" in refused(
            *sides, differ=[*fields, "layers"]
        )


def test_products_that_agree_are_no_agreement() -> None:
    """8 heads of 2 key-value heads, and 16 of 4: every product is alike but for the heads."""
    base = QWEN | {"hidden_size": 64, "head_dim": None, "num_attention_heads": 8, "num_key_value_heads": 4}
    other = base | {"num_attention_heads": 16, "num_key_value_heads": 8}
    sides = load("hf-llama", base), load("vllm-llama", other)
    assert [s.sizes for s in sides[0].tensors.values()] == [s.sizes for s in sides[1].tensors.values()]
    assert "heads is 8 at the source and 16 at the target" in refused(*sides)


def test_rotary_embeddings_said_in_two_ways_agree() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}
    new = {"rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", "factor": 8, "low_freq_factor": 1}}
    base = {k: v for k, v in QWEN.items() if k != "rope_theta"}
    said = [load("hf-qwen3", base | c) for c in (old, new)]
    assert dict(said[0].config)["rope_scaling"] == "llama3 factor=8 low_freq_factor=1"
    assert sp.refit(said[0], load("vllm-qwen3", base | new)).moves
    assert sp.refit(said[1], load("vllm-qwen3", base | old)).moves
    plain = [{"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e4}},
             {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}]  # fmt: skip
    assert len({str(load("hf-qwen3", base | c)) for c in plain}) == 1
    assert "rope_scaling" not in model_config(base)
    assert model_config(model_config(base | old)) == model_config(base | old)
    layers = {"rope_parameters": {"full": {"rope_theta": 1e6, "rope_type": "default"}, "sliding": {"rope_theta": 1e4}}}
    assert "1000000" in model_config(layers)["rope_scaling"]


def test_every_shipped_table_declares_what_configs_must_agree_on_and_its_text_keeps_it() -> None:
    for name in shipped_tables():
        table = WeightTable.read(name)
        assert {"layers", "heads", "norm_eps", "activation"} <= {field for field, _ in table.agree}, name
    side = load("vllm-qwen3-moe", tensor=2)
    again = sp.Weights.parse(str(side))
    assert again == side and again.table.agree == side.table.agree and again.table.recomputed == side.table.recomputed
    assert {"rope_theta", "hidden_act", "rms_norm_eps", "num_experts_per_tok"} <= {k for k, _ in side.config}
    assert load("hf-qwen3", QWEN | {"rope_theta": 5.0}).hash != load("hf-qwen3").hash
    with pytest.raises(LayoutError, match=r"recomputed = 'x'; legal is a list of names"):
        sp.Weights.parse(str(side).replace("[of]\n", "[of]\nrecomputed = 'x'\n#"))
    with pytest.raises(ParseError, match=r"a size is malformed: .* was never closed\n"):
        sp.Weights.parse(str(side).replace('heads = "num_attention_heads"', 'heads = "num ("'))


def test_a_side_whose_table_declares_nothing_is_compared_where_it_says_something() -> None:
    text = str(load("hf-qwen3"))
    start, stop = text.index("[of.agree]"), text.index("[holes]")
    old = sp.Weights.parse(text[:start] + text[stop:])  # as an earlier version wrote it
    assert sp.refit(old, load("vllm-qwen3", QWEN | {"rope_theta": 5.0})).moves
    other = QWEN | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 1}
    assert "heads is 4 at the source and 8 at" in refused(old, load("vllm-qwen3", other))


def test_left_out_lists_what_each_side_alone_has() -> None:
    a, b = load("hf-qwen3"), load("hf-llama")
    assert [f.tensor for f in left_out(a, b)] == ["qn", "kn"]
    assert left_out(b, a) == ()
    assert [f.tensor for f in left_out(a, b, ["kn"])] == ["kn"]
