"""Files of weights, tables and configs that say nothing: each is refused in one line that says what is legal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardplan as sp
from shardplan.cli.weights import read_side
from shardplan.errors import ShardplanError
from shardplan.interop.checkpoint.layouts import is_layouts
from shardplan.interop.checkpoint.manifest import MANIFEST, CheckpointManifest
from shardplan.interop.checkpoint.sharing import note_path, notes_of
from shardplan.interop.checkpoint.sources import INDEX, open_checkpoint

CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 90, "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
DEEP = "[" * 100_000
DEEP_OBJECTS = '{"x": ' * 100_000


def said(read: Any, *arguments: Any) -> str:
    """The one line that a reader says."""
    with pytest.raises(ShardplanError) as error:
        read(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (f"mesh = {DEEP}".encode(), "its values are nested too deep; legal is a TOML file"),
        (b"mesh = " + b"9" * 5000, "a number has more than 4300 digits; legal is a TOML file"),
        (b"mesh = '\xff'", "is no UTF-8 text at its byte 8; legal is UTF-8 text; legal is a TOML file"),
        (b"parameters = 3", "parameters = 3; legal are [[parameters]]"),
        (b"base = 'hf-llama'\nwithout = [[]]", "without = [[]]; legal is a list of names"),
        (b"base = ''", "a base '' is no path; shipped are "),
        (
            b"base = 'hf-llama'\nwithout = ['lm.head']",
            "without has 'lm.head'; legal are parameters of the base: model.embed_tokens.weight, ",
        ),
        (
            b"mesh = ['x']\nfamily = 'llama.family.toml'\n[degrees]\nx = 1048577",
            "the degree x is 1048577; legal is 1 to",
        ),
        (
            b"mesh = ['x', 'y']\nfamily = 'llama.family.toml'\n[degrees]\nx = 2048\ny = 1024",
            "the mesh has 2097152 devices; legal are 1048576 at most",
        ),
        (
            b"base = 'megatron-llama'\n[atoms]\npad = 1180591620717411303424\n",
            "elements on a device; legal are 4611686018427387904 at most",
        ),
        (
            b"base = 'hf-llama'\n[[parameters]]\nname = 'model.layers.{l}.self_attn.q_proj.weight'\nis = 'q = g r d e'",
            "e is no digit of g r d of q, which stands there; legal are d, r, g",
        ),
    ],
)
def test_tables(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_bytes(data)
    assert reason in said(sp.Weights.load, path, CONFIG)


@pytest.mark.parametrize("more", ["", '[[parameters]]\nname = "model.norm.weight"\nis = "norm = e"\n'])
def test_what_a_table_is_without_is_not_there(more: str, tmp_path: Path) -> None:
    """Beside parameters of its own, and where the file has none."""
    path = tmp_path / "table.toml"
    path.write_text(f'base = "hf-llama"\nwithout = ["lm_head.weight", "model.embed_tokens.weight"]\n{more}')
    whole, less = sp.Weights.load("hf-llama", CONFIG), sp.Weights.load(path, CONFIG)
    assert {*whole.names(0)} - {*less.names(0)} == {"lm_head.weight", "model.embed_tokens.weight"}
    assert {*less.names(0)} < {*whole.names(0)}


def test_sizes_beyond_any_memory() -> None:
    wide = CONFIG | {"vocab_size": 2**70}
    assert said(sp.Weights.load, "hf-llama", wide) == (
        f"embed has the sizes ({2**70}, 32); legal are {2**62} elements at most"
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("devices = ", "devises = ", "side.devices is None; legal is what str(weights) writes"),
        ("devices = [[0, 2]]", "devices = [[0, 1048577]]", "side.devices is [[0, 1048577]]; legal is what"),
        ("devices = [[0, 2]]", "devices = [[0, 'x']]", "side.devices is [[0, 'x']]; legal is what str(weights) writes"),
        ("version = 1\ndtype", f"version = {'9' * 5000}\ndtype", "a number has more than 4300 digits; legal is what"),
        ("l@pipeline.stages", "l@piline.stages", "the axis piline is not one of the mesh; legal are "),
    ],
)
def test_texts_of_sides(old: str, new: str, reason: str, tmp_path: Path) -> None:
    text = str(sp.Weights.load("vllm-llama", CONFIG, tensor=2))
    assert old in text
    path = tmp_path / "side.toml"
    path.write_text(text.replace(old, new))
    assert said(read_side, "--from", str(path), None, None).startswith("--from: ")
    assert reason in said(read_side, "--from", str(path), None, None)
    path.write_bytes(b"\xff")
    assert said(read_side, "--from", str(path), None, None).endswith(
        "is no UTF-8 text at its byte 0; legal is UTF-8 text"
    )


def test_layouts(tmp_path: Path) -> None:
    path = tmp_path / "layouts.toml"
    path.write_text(f"layouts = {DEEP}")
    assert said(is_layouts, path).startswith(f"{path}: its values are nested too deep; legal is a file of layouts")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (DEEP_OBJECTS, "its values are nested too deep; legal is an index with a weight_map"),
        ("{}", "Object missing required field `weight_map`; legal is an index with a weight_map"),
        ('{"weight_map": {"a": 3}}', "Expected `str`, got `int` - at `$.weight_map[...]`; legal is an index"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "names '../b.safetensors'; legal are files within its folder"),
        ('{"weight_map": {"a": "/b.safetensors"}}', "names '/b.safetensors'; legal are files within its folder"),
        (json.dumps({"weight_map": {"a": "x" * 300}}), "; legal are files within its folder"),
    ],
)
def test_indices(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert said(open_checkpoint, tmp_path).startswith(str(tmp_path / INDEX))
    assert reason in said(open_checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("files", "x", "Expected `object`, got `str` - at `$.files`; legal is what reshard wrote"),
        ("files", {"a": {"bytes": "3", "sha256": ""}}, "the file 'a' is {'bytes': '3', 'sha256': ''}; legal is what"),
        ("files", {"a": {"bytes": -1, "sha256": ""}}, "the file 'a' is {'bytes': -1, 'sha256': ''}; legal is what"),
        ("weights", None, "Expected `str`, got `null` - at `$.weights`; legal is what reshard wrote"),
        ("format", 7, "format 7; this version reads format 1"),
    ],
)
def test_manifests(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    CheckpointManifest(tmp_path, "request", "form", "weights", True, {"x": {"bytes": 3, "sha256": "0"}}).save()
    found = CheckpointManifest.of(tmp_path)
    assert found is not None and found.complete and found.files["x"]["bytes"] == 3
    path = tmp_path / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert reason in said(CheckpointManifest.of, tmp_path)


def test_notes(tmp_path: Path) -> None:
    note_path(tmp_path, 1).write_text(DEEP_OBJECTS)
    assert "its values are nested too deep; legal is what reshard wrote" in said(notes_of, tmp_path)
    note_path(tmp_path, 1).write_text('{"request": "r", "number": 1, "count": 2, "files": 3}')
    assert "Expected `object`, got `int` - at `$.files`; legal is what reshard wrote" in said(notes_of, tmp_path)
