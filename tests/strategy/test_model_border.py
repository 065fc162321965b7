"""What `Model` refuses, each in one line that says what is legal; resizing; names of a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardplan.errors import LayoutError, ShardplanError
from shardplan.strategy import Model

GPT = {"layers": 2, "hidden": 12, "heads": 3, "seq": 5, "vocab": 17}
LLAMA = {**GPT, "ffn": 7}
MOE = {**LLAMA, "experts": 6, "experts_per_token": 2}
LATENT = {**MOE, "head_dim": 6, "q_lora_rank": 5, "kv_lora_rank": 4, "rotary_dim": 2}
DLRM = {"dense_features": 5, "embedding_dim": 3, "table_rows": [7, 2], "bottom": [3], "top": [1]}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt", {**GPT, "heds": 2}, "gpt has no field 'heds'; did you mean 'heads'; legal are layers, hidden, heads"),
        ("gpt2", {"name": "x"}, "gpt2 has no field 'name'"),
        ("gpt2", {"family": "llama"}, "gpt2 has no field 'family'"),
        ("gpt2", {"training": False, "lr": 1.0}, "gpt2 has no field 'lr'"),
        ("gpt2", {"optimizer": "sgd", "beta1": 0.5}, "gpt2 has no field 'beta1'"),
        ("gpt", {"layers": 2}, "gpt lacks hidden, heads, seq, vocab, which have no default"),
        ("gpt2", {"layers": 0}, "layers is 0; legal is a whole number of at least 1"),
        ("gpt2", {"layers": "3"}, "layers is '3'; legal is a whole number of at least 1"),
        ("gpt2", {"experts": None}, "experts is None; legal is a whole number of at least 0"),
        ("gpt2", {"norm_eps": "a"}, "norm_eps is 'a'; legal is a finite number of 0 or more"),
        ("gpt2", {"hidden": 10}, "heads=12 does not divide hidden=10; legal is one that does"),
        ("gpt2", {"optimizer": "lion"}, "optimizer 'lion' is unknown; legal: sgd, adamw"),
        ("gpt2", {"training": False, "optimizer": "sgd"}, "optimizer='sgd' without training; legal is None"),
        ("gpt2", {"training": "yes"}, "training is 'yes'; legal is True or False"),
        ("gpt2", {"lr": "x"}, "lr is 'x'; legal is a finite number of 0 or more"),
        ("gpt2", {"dtype": "i32"}, "dtype 'i32' is unknown; legal: f16, bf16, f32, f64"),
        ("gpt2", {"cache": 1024}, "training with cache=1024; legal is a cache with training=False"),
        ("gpt2", {"cache": 7}, "a gpt of cache=7; legal is 0, or seq=1024 or more"),
        ("gpt2", {"positions": 7}, "a gpt of seq=1024; legal are up to positions=7"),
        ("gpt", {**GPT, "kv_heads": 1}, "a gpt of kv_heads=1; legal is 3"),
        ("gpt", {**GPT, "qk_norm": True}, "a gpt of qk_norm=True; legal is False"),
        ("gpt", {**GPT, "gated_mlp": True}, "a gpt of gated_mlp=True; legal is False"),
        ("llama", GPT, "ffn is 0; legal is a whole number of at least 1"),
        ("llama", {**LLAMA, "kv_heads": 2}, "kv_heads=2 does not divide heads=3; legal is one that does"),
        ("llama", {**LLAMA, "experts": 2}, "a llama of experts=2; legal is 0"),
        ("llama", {**LLAMA, "qk_norm": "no"}, "qk_norm is 'no'; legal is True or False"),
        ("llama", {**LLAMA, "head_dim": 5}, "a llama of head_dim=5; legal is an even one"),
        ("llama", {**LLAMA, "rope_theta": 0}, "a llama of rope_theta=0; legal is above 0"),
        ("llama", {**LLAMA, "value_dim": 5}, "a llama of value_dim=5; legal is 4"),
        ("moe", {**MOE, "experts": 0}, "experts is 0; legal is a whole number of at least 1"),
        ("moe", {**MOE, "experts_per_token": 7}, "a moe of experts_per_token=7; legal are up to 6"),
        ("moe", {**MOE, "router": "hash"}, "router 'hash' is unknown; legal: softmax, sigmoid"),
        ("moe", {**MOE, "router_groups": 2}, "a moe of router_groups=2; legal is 1"),
        ("moe", {**MOE, "dense_layers": 2}, "a moe of dense_layers=2; legal are fewer than layers=2"),
        ("moe", {**MOE, "capacity_factor": -1}, "capacity_factor is -1; legal is a finite number of 0 or more"),
        ("moe", {**LATENT, "router_groups": 4}, "router_groups=4 does not divide experts=6"),
        ("moe", {**LATENT, "router_groups": 3, "router_groups_kept": 4}, "router_groups_kept=4; legal are up to"),
        ("moe", {**LATENT, "router_groups": 6}, "a moe of experts_per_token=2; legal are up to 1"),
        ("moe", {**LATENT, "rotary_dim": 6}, "a moe of rotary_dim=6; legal is an even one, below head_dim"),
        ("moe", {**LATENT, "q_lora_rank": 0}, "a moe of q_lora_rank=0; legal is 0 only where kv_lora_rank=4 is"),
        ("mlp", {"layers": 2, "hidden": 3, "seq": 4}, "mlp has no field 'seq'; legal are layers, hidden, batch, lr"),
        ("dlrm", {**DLRM, "bottom": [4]}, "bottom=(4,) and top=(1,); legal end in embedding_dim=3 and in 1"),
        ("dlrm", {**DLRM, "table_rows": 3}, "table_rows is 3; legal is a list of whole numbers"),
        ("dlrm", {**DLRM, "table_rows": [0]}, "table_rows is 0; legal is a whole number of at least 1"),
    ],
)  # fmt: skip
def test_a_model_that_is_none_is_refused(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardplanError) as caught:
        Model.load(family, **fields)
    assert str(caught.value).startswith("Model.load: ")
    assert message in str(caught.value)


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(ShardplanError) as caught:
        Model.load("gpt3-175")
    said = (
        "'gpt3-175' is no preset and no family; did you mean 'gpt3-175b' or 'gpt3-13b' or 'gpt3-6.7b'; legal is one of "
    )
    assert said in str(caught.value) and len(str(caught.value)) < 240


@pytest.mark.parametrize("family", ["gpt", "llama", "moe", "mlp", "dlrm"])
def test_a_model_is_resized(family: str) -> None:
    sizes = {"gpt": GPT, "llama": LLAMA, "moe": LATENT, "mlp": {"layers": 2, "hidden": 3}, "dlrm": DLRM}[family]
    for others in ({"optimizer": "sgd", "lr": 0.3}, {"training": False}):
        model = Model.load(family, **sizes, **others)
        assert model.resize(batch=4) == Model.load(family, **sizes, **others, batch=4)
        assert model.resize(batch=4).resize(batch=1) == model
        assert model.resize(batch=4).parameters == model.parameters
    if "seq" in sizes:
        short = model.resize(seq=3, batch=2)
        assert short.program.types["tokens"].shape == (2, 3)
        assert short.parameter_count == model.parameter_count


def test_what_is_no_resize_is_refused() -> None:
    model = Model.load("gpt", **GPT)
    for sizes, message in (
        ({"batch": 0}, "resize of gpt: batch is 0; legal is a whole number of at least 1"),
        ({"training": False}, "resize of gpt: training is False; legal is a whole number"),
        ({"hidden": 24}, "resize of gpt: hidden=24 changes the parameter embed; load it with that"),
        ({"layers": 3}, "resize of gpt: layers=3 changes the parameter layers.attention_norm"),
        ({"seq": 6}, "a gpt of seq=6; legal are up to positions=5"),
        ({"sek": 6}, "gpt has no field 'sek'; did you mean 'seq'"),
    ):
        with pytest.raises(ShardplanError) as caught:
            model.resize(**sizes)  # type: ignore[arg-type]
        assert message in str(caught.value)


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    model = Model.load("gpt", **GPT)
    stored = {name: np.zeros(p.stored_shape) for p in model.parameters.values() for _, name in p.names()}
    fused = "transformer.h.1.attn.c_attn.weight"
    assert stored[fused].shape == (12, 36)
    for arrays, message in (
        ({}, "a checkpoint of gpt without transformer.wte.weight, which is in the parameter embed"),
        (stored | {"transformer.wte.weigt": 0}, "of no parameter; did you mean 'transformer.wte.weight'"),
        (stored | {fused: np.zeros((36, 12))}, f"{fused} of the checkpoint has the shape (36, 12); legal is (12, 36)"),
    ):
        with pytest.raises(LayoutError) as caught:
            model.pack(arrays)
        assert message in str(caught.value)
    packed = model.pack(stored)
    for values, message in (
        ({"layers.k": packed["layers.k"]}, "c_attn.weight of the checkpoint is in several parameters; legal are all"),
        ({"layers.p": 0}, "gpt has no parameter 'layers.p'; did you mean 'layers.up'"),
        ({"norm": np.zeros(3)}, "the parameter norm has the shape (3,); legal is (12,)"),
    ):
        with pytest.raises(LayoutError) as caught:
            model.unpack(values)
        assert message in str(caught.value)


def test_a_model_says_what_it_is() -> None:
    lines = str(Model.load("gpt", **GPT)).splitlines()
    assert lines[0] == "gpt: 4,056 parameters in f32, training with adamw"
    assert lines[1] == "  inputs: tokens[batch=1 sequence=5], targets[batch=1 sequence=5], step[]"
    assert lines[2].split() == ["embed", "[vocab=17", "hidden=12]", "transformer.wte.weight"]
    assert lines[-1] == "  outputs: loss"
    assert str(Model.load("moe", **MOE, training=False)).endswith("outputs: logits, layers.dropped")
