"""The readers of weights, tables and checkpoints for `reader_faults`: what writes seed files, and what reads one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import ROOT
from benchmarks.reader_mutations import (
    Reader,
    header_structure,
    json_structure,
    no_structure,
    toml_structure,
)
from benchmarks.reader_mutations_binary import pickle_structure, zip_structure

import shardplan as sp
from shardplan.interop import safetensors
from shardplan.interop.checkpoint.layouts import is_layouts, layout_weights
from shardplan.interop.checkpoint.manifest import CheckpointManifest
from shardplan.interop.checkpoint.sharing import notes_of
from shardplan.interop.checkpoint.sources import open_checkpoint
from shardplan.movement.weights.form import StoredForm

TABLES = ROOT / "src" / "shardplan" / "movement" / "weights" / "tables"
CONFIG: dict[str, Any] = {
    "kind": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 90, "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
ARRAYS: dict[str, np.ndarray] = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b.weight": np.arange(8, dtype=np.int64),
    "c.bias": np.zeros((0, 3), np.float16),
}
FORMS = (
    "(embed: v | 0: pad)@tensor, e",
    "(q: (g r)@tensor d | k: g@tensor~ d | v_: g@tensor~ d), e",
    "o = e, (g r d)@tensor",
    "(g (q: r d | k: d | v_: d))@tensor, e",
)


def safetensors_files(folder: Path) -> list[Path]:
    """Two files of three tensors, one with metadata."""
    paths = [folder / f"seed{k}.safetensors" for k in range(2)]
    safetensors.write(paths[0], ARRAYS, {"format": "pt"})
    safetensors.write(paths[1], dict(list(ARRAYS.items())[:2]), {})
    return paths


def all_tensors(path: Path) -> None:
    """Read all tensors of a file."""
    with safetensors.open(path) as file:
        for name in file.names:
            file.read(name)


def indexed(folder: Path) -> list[Path]:
    """A checkpoint of two files with an index; the index comes first."""
    where: dict[str, str] = {}
    for k, name in enumerate(ARRAYS):
        file = f"model-{k + 1:05d}-of-00003.safetensors"
        safetensors.write(folder / file, {name: ARRAYS[name]}, {"format": "pt"})
        where[name] = file
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 160}, "weight_map": where}))
    return [index, folder / "model-00001-of-00003.safetensors"]


def distributed(folder: Path, ending: str) -> list[Path]:
    """A folder that torch.distributed.checkpoint itself saved: its `.metadata`, or its files of tensors."""
    import torch

    dcp: Any = import_module("torch.distributed.checkpoint")

    state: dict[str, Any] = {name: torch.from_numpy(array.copy()) for name, array in ARRAYS.items() if array.size}
    dcp.save(state | {"step": 3, "half": torch.ones(3, 5, dtype=torch.bfloat16)}, checkpoint_id=folder, no_dist=True)
    return sorted(path for path in folder.iterdir() if path.name.endswith(ending))


def megatron(folder: Path) -> list[Path]:
    """A folder as Megatron's torch_dist has it: tensors in chunks, an optimizer's state, and what is no tensor."""
    import torch

    dcp: Any = import_module("torch.distributed.checkpoint")

    name = "decoder.layers.0.self_attention.linear_qkv"
    state: dict[str, Any] = {
        f"{name}.weight": torch.arange(24.0).reshape(4, 6),
        f"{name}._extra_state": {"bytes": b"x"},
    }
    state |= {f"optimizer.state.exp_avg.{name}.weight": torch.zeros(4, 6, dtype=torch.float64), "args": {"lr": 0.1}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return sorted(path for path in folder.iterdir() if path.is_file())


def every_tensor(path: Path) -> None:
    """Read all tensors of the checkpoint whose file this is."""
    with open_checkpoint(path.parent) as held:
        for place in held.places:
            for tensor in place.values():
                count = int(np.prod(tensor.shape, dtype=np.int64))
                if count * tensor.dtype.itemsize < 2**20:
                    tensor.read_into(memoryview(bytearray(count * tensor.dtype.itemsize)), 0)


def configs(folder: Path) -> list[Path]:
    """The config of a decoder, plain and within one that also sees."""
    paths = [folder / f"config{k}.json" for k in range(2)]
    paths[0].write_text(json.dumps(CONFIG))
    paths[1].write_text(json.dumps({"model_type": "x", "text_config": CONFIG, "dtype": "bfloat16"}))
    return paths


def tables(folder: Path) -> list[Path]:
    """Three tables and a family, as they ship."""
    names = ("hf-llama.toml", "vllm-llama.toml", "fsdp2-qwen3.toml", "llama.family.toml")
    for name in names:
        text = (TABLES / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace('name = "hf-llama"', 'name = "hf"'), encoding="utf-8")
    return [folder / name for name in names]


def of_table(path: Path) -> object:
    """Read a table; a family through a table beside it."""
    named = path.with_name("hf-llama.toml") if ".family" in path.name else path
    return sp.Weights.load(named, CONFIG).hash


def sides(folder: Path) -> list[Path]:
    """Two sides as text."""
    found = [sp.Weights.load("hf-llama", CONFIG), sp.Weights.load("vllm-llama", CONFIG, tensor=2, devices=(4, 6))]
    paths = [folder / f"side{k}.toml" for k in range(2)]
    for side, path in zip(found, paths, strict=True):
        path.write_text(str(side))
    return paths


def layouts(folder: Path) -> list[Path]:
    """A file of layouts."""
    path = folder / "layouts.toml"
    path.write_text('mesh = { data = 2, tensor = 3 }\n[layouts]\n"*.weight" = "[@data, @tensor]"\n"b*" = "[@tensor]"\n')
    return [path]


def of_layouts(path: Path) -> object:
    """Read a file of layouts for two tensors."""
    return is_layouts(path) and layout_weights(path, {"a.weight": ((4, 6), "f32"), "b.bias": ((7,), "f32")}).hash


def manifests(folder: Path) -> list[Path]:
    """The manifest that `reshard` leaves, and the note of one of its processes."""
    found = CheckpointManifest(folder, "request", "one file", "weights", True, {"x": {"bytes": 3, "sha256": "0"}})
    found.save()
    note = {"request": "r", "number": 1, "count": 2, "verified": False, "files": {"x": {"bytes": 3, "sha256": "0"}}}
    (folder / "shardplan-process-00001.json").write_text(json.dumps(note))
    return sorted(folder.glob("*.json"))


def of_manifest(path: Path) -> object:
    """Read what a run of `reshard` left."""
    found = CheckpointManifest.of(path.parent)
    for note in notes_of(path.parent).values():
        if found is not None:
            found.files |= note.files
    return found is not None and [found.stands(name) for name in found.files]


def forms(folder: Path) -> Sequence[Path]:
    """Forms of stored parameters."""
    paths = [folder / f"form{k}.txt" for k in range(len(FORMS))]
    for path, text in zip(paths, FORMS, strict=True):
        path.write_text(text)
    return paths


def of_form(path: Path) -> object:
    """Read a form, as somebody typed it."""
    return path.is_file() and StoredForm.parse(path.read_bytes().decode(errors="replace"))


def of_side(path: Path) -> object:
    """Read a side as `--from` and `--to` do."""
    from shardplan.cli.weights import read_side

    return read_side("--from", str(path), None, None).hash


WEIGHTS_SEEDED: dict[str, Reader] = {
    "safetensors": Reader(safetensors_files, all_tensors, header_structure, False),
    "safetensors index": Reader(indexed, every_tensor, json_structure),
    "DCP metadata": Reader(partial(distributed, ending=".metadata"), every_tensor, pickle_structure, False),
    "DCP archives": Reader(partial(distributed, ending=".distcp"), every_tensor, zip_structure, False),
    "Megatron folder": Reader(megatron, every_tensor, pickle_structure, False),
    "config.json": Reader(configs, lambda path: sp.Weights.load("hf-llama", path).hash, json_structure),
    "weights TOML": Reader(tables, of_table, toml_structure),
    "weights text": Reader(sides, of_side, toml_structure),
    "weights form text": Reader(forms, of_form, no_structure),
    "weights layouts TOML": Reader(layouts, of_layouts, toml_structure),
    "reshard manifest": Reader(manifests, of_manifest, json_structure),
}
