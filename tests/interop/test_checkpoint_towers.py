"""Models that also see: the language model found under its prefix, the tower passed through, whole and unchanged.

`seeing_parameters.json` has what `save_pretrained` of transformers 5.24 writes of a tiny model of each kind
(`python -m benchmarks.weights_models --shapes FILE`, which compares logits, and every parameter, too). What is written
is read here without shardplan: a header of JSON, and bytes.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardplan.errors import LayoutError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import reshard
from shardplan.interop.checkpoint.manifest import MANIFEST

READ: dict[str, Any] = json.loads((Path(__file__).parent / "seeing_parameters.json").read_text())
LANGUAGE = (
    "model.language_model.",
    "language_model.",
    "model.layers.",
    "model.norm.",
    "model.embed_tokens.",
    "lm_head.",
)
Named = dict[str, tuple[str, tuple[int, ...], bytes]]


def source(kind: str, folder: Path, **config: Any) -> Path:
    """A checkpoint of which every element is another number."""
    folder.mkdir()
    named: dict[str, np.ndarray] = {}
    total = 0
    for name, shape in READ[kind]["shapes"].items():
        count = math.prod(shape)
        named[name] = np.arange(total, total + count, dtype=np.float32).reshape(shape)
        total += count
    safetensors.write(folder / "model.safetensors", named, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(READ[kind]["config"] | config))
    return folder


def parts(folder: Path) -> list[Named]:
    """The tensors of every file: dtype, shape and bytes."""
    out: list[Named] = []
    for path in sorted(folder.rglob("*.safetensors")):
        raw = path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        header.pop("__metadata__", None)
        out.append({n: (t["dtype"], tuple(t["shape"]), data[slice(*t["data_offsets"])]) for n, t in header.items()})
    return out


def tower(named: Named) -> Named:
    return {n: t for n, t in named.items() if not n.startswith(LANGUAGE)}


@pytest.mark.parametrize("word", ["vllm,tp=2", "megatron,tp=2,pp=2", "fsdp2,dp=2", "sglang,tp=2", "vllm,pp=2"])
@pytest.mark.parametrize("kind", READ)
def test_there_with_its_tower_and_back(kind: str, word: str, tmp_path: Path) -> None:
    (whole,) = parts(source(kind, tmp_path / "hf"))
    assert len(tower(whole)) > 20
    reshard(tmp_path / "hf", tmp_path / "there", to=word)
    if word.startswith(("vllm", "sglang")):
        held = parts(tmp_path / "there")
        for part in held[: 1 if "pp" in word else 2]:
            assert tower(part) == tower(whole)
        assert "pp" not in word or not tower(held[1])
    if "pp" not in word:  # ranks that tensors' names alone do not say are of the record
        (tmp_path / "there" / MANIFEST).unlink()
    reshard(tmp_path / "there", tmp_path / "back", to="hf")
    assert parts(tmp_path / "back") == [whole]


def test_a_server_has_the_language_model_under_its_own_prefix(tmp_path: Path) -> None:
    (whole,) = parts(source("qwen2_5_vl", tmp_path / "hf"))
    reshard(tmp_path / "hf", tmp_path / "there", to="vllm,tp=2")
    first, second = parts(tmp_path / "there")
    halves = [np.frombuffer(p["language_model.model.layers.1.mlp.down_proj.weight"][2], "<f4") for p in (first, second)]
    own = np.frombuffer(whole["model.layers.1.mlp.down_proj.weight"][2], "<f4").reshape(32, 64)
    assert np.array_equal(np.concatenate([h.reshape(32, 32) for h in halves], 1), own)
    assert "language_model.lm_head.weight" in first and "lm_head.weight" not in first


def test_a_tower_of_two_ranks_that_differ_is_named(tmp_path: Path) -> None:
    reshard(source("gemma3", tmp_path / "hf"), tmp_path / "there", to="vllm,tp=2")
    path = tmp_path / "there/model-rank-1-part-0.safetensors"
    with safetensors.open(path) as file:
        named = {n: file.read(n).copy() for n in file.names}
    named["vision_tower.encoder.layers.1.mlp.fc1.bias"][3] += 1
    safetensors.write(path, named, {"format": "pt"})
    (tmp_path / "there" / MANIFEST).unlink()
    with pytest.raises(LayoutError, match=r"vision_tower.encoder.layers.1.mlp.fc1.bias"):
        reshard(tmp_path / "there", tmp_path / "back", to="hf")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3", "language_model.model.layers.1.extra.weight"),
        ("qwen3_vl", "model.language_model.layers.1.extra.weight"),
        ("qwen2_5_vl", "model.layers.1.extra.weight"),
        ("qwen2_5_vl", "model.extra.weight"),
    ],
)
def test_what_of_a_language_model_no_table_knows_is_no_tower(kind: str, name: str, tmp_path: Path) -> None:
    folder = source(kind, tmp_path / "hf")
    with safetensors.open(folder / "model.safetensors") as file:
        named = {n: file.read(n) for n in file.names}
    safetensors.write(folder / "model.safetensors", named | {name: np.ones(3, np.float32)}, {"format": "pt"})
    with pytest.raises(LayoutError, match="no table knows this model"):
        reshard(folder, tmp_path / "there", to="vllm,tp=2")


def test_tensors_beside_a_model_that_sees_nothing_are_no_tower(tmp_path: Path) -> None:
    folder = source("llava", tmp_path / "hf", vision_config=None)
    with pytest.raises(LayoutError, match="no table knows this model"):
        reshard(folder, tmp_path / "there", to="vllm,tp=2")


def test_a_framework_without_a_tower_names_what_it_leaves_out(tmp_path: Path) -> None:
    folder = source("llava", tmp_path / "hf")
    with pytest.raises(LayoutError, match=r"does not take: .*(vision_tower|multi_modal_projector)"):
        reshard(folder, tmp_path / "there", to="torchtitan,dp=2")
    done = reshard(folder, tmp_path / "there", to="torchtitan,dp=2", drop=("vision_tower.*", "multi_modal_projector.*"))
    assert len(done.plan.dropped) > 10
