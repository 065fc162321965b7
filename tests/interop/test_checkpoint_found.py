"""Checkpoints whose table nobody types: found by names and shapes, written in words, opened by their frameworks."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from interop.checkpoint_cases import CONFIG, plain, read, same_tensors, whole
from movement.weights_cases import TABLES, made
from movement.weights_more import lora, lora_torch_dist
from shardplan.cli import run_command
from shardplan.errors import LayoutError, ParseError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import diff, reshard
from shardplan.interop.checkpoint.conversion_sides import AskedConfig, source_weights
from shardplan.interop.checkpoint.manifest import MANIFEST
from shardplan.interop.checkpoint.sources import OpenCheckpoint
from shardplan.interop.checkpoint.storage_detection import find_weights, model_and_switches
from shardplan.movement.weights.weights import Weights

WHOLE = ("hf-", "hf5-", "torchtitan-", "megatron-dist-", "megatron-stacked-", "peft-")
BRIDGE = "megatron-dist-peft-llama"  # whose rows depend on degrees that the folder does not say
MANY = "tokenizer.json", "generation_config.json", "config.json"


def source(folder: Path, **fields: Any) -> Path:
    """A checkpoint of transformers with a tokenizer, of which no field says more than transformers' own do."""
    plain(folder)
    own = {k: v for k, v in CONFIG.items() if k != "kind"}
    (folder / "config.json").write_text(json.dumps(own | {"model_type": "llama"} | fields))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    return folder


def held(weights: Weights) -> OpenCheckpoint:
    """A checkpoint that is stored as weights say, without bytes."""
    places = [
        {n: SimpleNamespace(shape=s, dtype_name=d, dtype=None) for n, s, d in weights.parameters(r)}
        for r in weights.devices
    ]
    return OpenCheckpoint(Path("made"), "made", places, [])  # pyright: ignore


@pytest.mark.parametrize(
    "name", [n for tables in TABLES.values() for n in tables if n.startswith(WHOLE) and n != BRIDGE]
)
def test_every_table_of_whole_tensors_is_found_by_names_and_shapes(name: str) -> None:
    kind = next(k for k, tables in TABLES.items() if name in tables)
    sizes = made(kind, random.Random(1))
    own = Weights.load(name, sizes, dtype="f32")
    found = find_weights(held(own), sizes)
    assert found.parameters(0) == own.parameters(0)
    assert [(p.name, p.form) for p in found.table.parameters] == [(p.name, p.form) for p in own.table.parameters]
    family, switches = model_and_switches(found.table.name)
    assert (family, switches) == model_and_switches(name)


def test_a_size_is_read_off_the_parameters_that_the_model_has() -> None:
    sizes = {k: n for k, n in CONFIG.items() if k not in ("kind", "head_dim")} | {"model_type": "olmo2"}
    own = Weights.load("hf-olmo2", sizes, dtype="f32")  # whose q_norm is as long as all heads, and Qwen 3's as one
    found = find_weights(held(own), sizes)
    assert found.table.name == "hf-olmo2" and found.parameters(0) == own.parameters(0)


def test_a_prefix_that_one_name_does_not_have() -> None:
    sizes = {k: n for k, n in CONFIG.items() if k != "kind"} | {"model_type": "qwen2", "tie_word_embeddings": False}
    named = held(Weights.load("hf-qwen2", sizes, dtype="f32"))
    (place,) = named.places
    seeing = {n.replace("model.", "model.language_model.", 1): x for n, x in place.items()}  # lm_head as it was
    found = find_weights(OpenCheckpoint(Path("made"), "made", [seeing], []), sizes)  # pyright: ignore
    assert {n for n, *_ in found.parameters(0)} == seeing.keys()


@pytest.mark.parametrize("word", ["hf", "vllm,tp=2", "sglang,tp=4", "megatron,tp=2,pp=3", "torchtitan,dp=2", "dcp"])
def test_there_by_a_word_and_back_without_one(word: str, tmp_path: Path) -> None:
    there = reshard(source(tmp_path / "hf"), tmp_path / "there", to=word)
    assert all((tmp_path / "there" / name).is_file() for name in MANY)
    assert set(MANY) <= set(there.beside)
    (tmp_path / "there" / MANIFEST).unlink()  # which would say how it is stored
    reshard(tmp_path / "there", tmp_path / "back", to="hf")
    (again,) = read(tmp_path / "back")
    assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in whole().items()}


@pytest.mark.parametrize("word", ["dcp", "fsdp2,dp=2", "megatron,tp=1"])
def test_torch_opens_what_is_written(word: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    reshard(source(tmp_path / "hf"), tmp_path / "there", to=word)
    folder, want = tmp_path / "there", whole()
    name, lead = "model.norm.weight", ""
    if word.startswith("megatron"):
        folder, name, lead = folder / "release", "decoder.final_layernorm.weight", "decoder."
        assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "release"
        assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
        assert torch.load(folder / "common.pt", weights_only=True)["checkpoint_version"] == 3.0
    reader = dcp.FileSystemReader(folder)
    state = {n: torch.zeros(m.size) for n, m in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert np.array_equal(state[name].numpy(), want["model.norm.weight"])
    for layer in range(3):
        down = state[f"{lead or 'model.'}layers.{layer}.mlp.{'linear_fc2' if lead else 'down_proj'}.weight"]
        assert np.array_equal(down.numpy(), want[f"model.layers.{layer}.mlp.down_proj.weight"])


def test_every_parameter_keeps_its_dtype(tmp_path: Path) -> None:
    folder = source(tmp_path / "hf")
    mixed = {n: a if "norm" in n else a.astype(ml_dtypes.bfloat16) for n, a in whole().items()}
    safetensors.write(folder / "model.safetensors", mixed, {"format": "pt"})
    reshard(folder, tmp_path / "there", to="vllm,tp=2")
    kinds = {n: a.dtype for part in read(tmp_path / "there") for n, a in part.items()}
    assert {n: d == np.float32 for n, d in kinds.items()} == {n: "norm" in n for n in kinds}
    assert json.loads((tmp_path / "there/config.json").read_text())["torch_dtype"] == "bfloat16"
    reshard(tmp_path / "there", tmp_path / "back", to="hf")
    (again,) = read(tmp_path / "back")
    assert {n: (a.dtype, a.tobytes()) for n, a in again.items()} == {
        n: (a.dtype, a.tobytes()) for n, a in mixed.items()
    }
    reshard(folder, tmp_path / "all", to="hf", dtype="f32")
    assert {a.dtype for a in read(tmp_path / "all")[0].values()} == {np.dtype(np.float32)}
    mixed["model.layers.1.input_layernorm.weight"] = mixed["model.layers.1.input_layernorm.weight"].astype(np.float16)
    safetensors.write(folder / "model.safetensors", mixed, {"format": "pt"})
    with pytest.raises(LayoutError, match=r"\{l\}.input_layernorm.weight has several dtypes, .* legal is one for all"):
        reshard(folder, tmp_path / "none", to="vllm,tp=2")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("megatron", "megatron: the tensors are those of hf-llama; legal is to leave it out"),
        ("vllm,tp=4", "vllm: the tensors are those of hf-llama"),
        ("hf,tp=4", "hf with tp=4: the source is of one device; legal is no degree"),
    ],
)
def test_a_word_that_the_tensors_deny_is_refused(word: str, reason: str, tmp_path: Path) -> None:
    folder = source(tmp_path / "hf")
    with pytest.raises(LayoutError, match=f"--from: {reason}"):
        source_weights(folder, word, AskedConfig.find(folder))
    for same in ("hf", "fsdp2", "dcp"):  # of the same names
        assert len(source_weights(folder, same, AskedConfig.find(folder)).devices) == 1


def test_sizes_without_a_config_are_those_of_the_tensors(tmp_path: Path) -> None:
    folder = source(tmp_path / "hf")
    (folder / "config.json").unlink()
    with pytest.raises(LayoutError, match=r"num_attention_heads.*--config FILE or --set KEY=VALUE"):
        reshard(folder, tmp_path / "none", to="megatron")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # which no shape alone says
    there = reshard(folder, tmp_path / "there", to="vllm,tp=2", overrides=heads)
    assert dict(there.plan.source.config)["hidden_size"] == 32 and "config.json" not in there.beside
    reshard(tmp_path / "there", tmp_path / "back", to="hf")
    assert {n: a.tobytes() for n, a in read(tmp_path / "back")[0].items()} == {
        n: a.tobytes() for n, a in whole().items()
    }


def test_a_prefix_of_all_names_is_seen(tmp_path: Path) -> None:
    sizes = {"model_type": "gpt2", "vocab_size": 12, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2}
    bare = Weights.load("hf-gpt2", sizes, dtype="f32").parameters(0)
    rng = np.random.default_rng(3)
    named = {f"transformer.{n}": rng.random(s, np.float32) for n, s, _ in bare}  # as save_pretrained has them
    (tmp_path / "gpt2").mkdir()
    safetensors.write(tmp_path / "gpt2/model.safetensors", named, {"format": "pt"})
    (tmp_path / "gpt2/config.json").write_text(json.dumps(sizes))
    done = reshard(tmp_path / "gpt2", tmp_path / "there", to="hf")
    assert done.plan.source.table.name == "hf-gpt2"
    (again,) = read(tmp_path / "there")
    assert all(np.array_equal(again[n.removeprefix("transformer.")], a) for n, a in named.items())
    assert diff(tmp_path / "gpt2", tmp_path / "there").elements == sum(a.size for a in named.values())


def test_a_checkpoint_that_says_nothing_is_compared_as_its_names_show(tmp_path: Path) -> None:
    folder = source(tmp_path / "hf")
    reshard(folder, tmp_path / "there", to="torchtitan")  # lm_head.weight is called the same
    reshard(folder, tmp_path / "served", to="vllm,tp=2")
    for other in ("there", "served"):
        assert diff(folder, tmp_path / other).equal and diff(tmp_path / other, folder).equal


def test_a_field_is_set_where_the_config_says_it() -> None:
    config = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "a": {"b": {"c": 1}}, "d": {"b": 2}}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        asked = AskedConfig.find(Path(folder), None, {"rope_theta": 5e5, "c": 3, "new": 4})
        want = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "a": {"b": {"c": 3}}, "d": {"b": 2}}
        assert asked.data() == want | {"new": 4} and asked.sizes()["rope_theta"] == 5e5
        with pytest.raises(ParseError, match=r"--set b: the config says it in 2 places; legal are a\.b and d\.b"):
            AskedConfig.find(Path(folder), None, {"b": 1}).data()


def test_the_files_beside_are_the_sources_or_those_that_are_said(tmp_path: Path) -> None:
    folder = source(tmp_path / "hf", architectures=["LlamaForCausalLM"])
    (tmp_path / "words").mkdir()
    (tmp_path / "words/tokenizer.json").write_text("another")
    (tmp_path / "words/config.json").write_text("not read")
    said = {"rope_theta": 5e5, "rope_scaling.rope_type": "yarn"}
    reshard(folder, tmp_path / "there", to="hf", dtype="bf16", tokenizer=tmp_path / "words", overrides=said)
    assert (tmp_path / "there/tokenizer.json").read_text() == "another"
    assert (tmp_path / "there/generation_config.json").read_text() == '{"do_sample": true}'
    found = json.loads((tmp_path / "there/config.json").read_text())
    assert (found["torch_dtype"], found["rope_theta"], found["rope_scaling"]) == (
        "bfloat16",
        5e5,
        {"rope_type": "yarn"},
    )
    assert found["architectures"] == ["LlamaForCausalLM"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ParseError, match=r"--tokenizer .*no tokenizer's files are there"):
        reshard(folder, tmp_path / "none", to="hf", tokenizer=tmp_path / "empty")


def test_a_model_that_no_table_knows(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    named = {"embeddings.word.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "ids": np.arange(4)}
    safetensors.write(folder / "model.safetensors", named, {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "bert"}')
    reshard(folder, tmp_path / "there", to="dcp")
    reshard(tmp_path / "there", tmp_path / "back", to="hf")
    assert all(np.array_equal(a, named[n]) and a.dtype == named[n].dtype for n, a in read(tmp_path / "back")[0].items())
    with pytest.raises(LayoutError, match="no table knows this model, whose tensors are whole; legal are hf and dcp"):
        reshard(folder, tmp_path / "none", to="vllm,tp=2")


def test_megatrons_newest_folder_is_the_one_that_is_read(tmp_path: Path) -> None:
    reshard(source(tmp_path / "hf"), tmp_path / "there", to="megatron,tp=2")
    (tmp_path / "there/release").rename(tmp_path / "there/iter_0000012")
    (tmp_path / "there" / MANIFEST).unlink()
    (tmp_path / "there/latest_checkpointed_iteration.txt").write_text("12\n")
    assert reshard(tmp_path / "there", tmp_path / "back", to="hf").nbytes == sum(a.nbytes for a in whole().values())
    (tmp_path / "there/latest_checkpointed_iteration.txt").write_text("../hf")
    with pytest.raises(ParseError, match=r"iteration\.txt says '\.\./hf'; legal is a number, or release"):
        reshard(tmp_path / "there", tmp_path / "none", to="hf")


def adapter(folder: Path, fused: bool) -> dict[str, np.ndarray]:
    """An adapter of peft on disk, with a config beside its folder; its A are alike as in a fused one, or not."""
    (folder.parent / "config.json").write_text(
        json.dumps({k: v for k, v in CONFIG.items() if k != "kind"} | {"model_type": "llama"})
    )
    named = lora({**CONFIG, "head_dim": 8, "lora_rank": 4, "fused_lora": fused}, np.random.default_rng(0))
    folder.mkdir()
    safetensors.write(folder / "adapter_model.safetensors", named, {"format": "pt"})
    return named


@pytest.mark.parametrize("tensor", [1, 2])
def test_an_adapter_goes_to_megatron_bridge_and_back_to_peft_and_vllm(tmp_path: Path, tensor: int) -> None:
    folder, config = tmp_path / "peft", tmp_path / "config.json"
    named = adapter(folder, False)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    reshard(folder, tmp_path / "bridge", to=f"megatron,tp={tensor}", config=config)
    same_tensors(tmp_path / "bridge", lora_torch_dist({**CONFIG, "head_dim": 8}, named, tensor)[0])
    for word in ("peft", "vllm,tp=1"):
        again = tmp_path / word.partition(",")[0]
        reshard(tmp_path / "bridge", again.with_suffix(".out"), to=word, config=config)
        assert (again.with_suffix(".out") / "adapter_model.safetensors").is_file()
        (found,) = read(again.with_suffix(".out"))
        assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in named.items()}
    assert (tmp_path / "bridge" / "adapter_config.json").is_file()


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_fused_adapter_of_megatron_bridge_is_found_and_has_one_a(tmp_path: Path, tensor: int) -> None:
    """One A for q, k and v, and one for gate and up: peft has it three times, and twice."""
    named, config = adapter(tmp_path / "peft", True), tmp_path / "config.json"
    reshard(tmp_path / "peft", tmp_path / "bridge", to=f"megatron,tp={tensor},fused", config=config)
    same_tensors(tmp_path / "bridge", lora_torch_dist({**CONFIG, "head_dim": 8, "fused_lora": True}, named, tensor)[0])
    (tmp_path / "bridge" / MANIFEST).unlink()  # as if Megatron-Bridge had written it
    reshard(tmp_path / "bridge", tmp_path / "again", to="peft", config=config)
    (found,) = read(tmp_path / "again")
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in named.items()}
    assert diff(tmp_path / "peft", tmp_path / "again").equal


def test_an_adapter_of_several_a_is_refused_as_a_fused_one(tmp_path: Path) -> None:
    adapter(tmp_path / "peft", False)
    with pytest.raises(LayoutError, match=r"copies of qA differ in peft-llama: .*\.k_proj\.lora_A.*\.q_proj\.lora_A"):
        reshard(tmp_path / "peft", tmp_path / "out", to="megatron,fused", config=tmp_path / "config.json")
    assert not list(tmp_path.glob("out/release/*"))


def test_a_fused_adapter_is_written_and_refused_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fused, status in ((True, 0), (False, 2)):
        folder = tmp_path / str(fused)
        folder.mkdir()
        named, config = adapter(folder / "peft", fused), folder / "config.json"
        given = ["convert", folder / "peft", folder / "out", "--to", "megatron,fused", "--config", config]
        assert run_command([str(x) for x in given]) == status
        if fused:
            want = lora_torch_dist({**CONFIG, "head_dim": 8, "fused_lora": True}, named)[0]
            same_tensors(folder / "out", want)
    assert "copies of qA differ in peft-llama" in capsys.readouterr().err
