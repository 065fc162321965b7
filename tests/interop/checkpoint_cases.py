"""Small checkpoints of a Llama, in a folder as a framework has them, without shardplan's writer."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from movement.weights_frameworks import checkpoint, hugging_face, megatron, served
from shardplan.interop import safetensors
from shardplan.interop.checkpoint.sources import open_checkpoint

CONFIG: dict[str, Any] = {
    "kind": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 90, "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip


def whole(seed: int = 0) -> dict[str, np.ndarray]:
    return checkpoint(CONFIG, np.random.default_rng(seed))


def plain(folder: Path, seed: int = 0, files: int = 1) -> Path:
    """A checkpoint as transformers saves it."""
    folder.mkdir()
    named = whole(seed)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if files == 1:
        safetensors.write(folder / "model.safetensors", named, {"format": "pt"})
        return folder
    where: dict[str, str] = {}
    for k in range(files):
        part = dict(list(named.items())[k::files])
        name = f"model-{k + 1:05d}-of-{files:05d}.safetensors"
        safetensors.write(folder / name, part, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def read(folder: Path) -> list[dict[str, np.ndarray]]:
    """The tensors of every file, in order of the names."""
    out: list[dict[str, np.ndarray]] = []
    for path in sorted(folder.rglob("*.safetensors")):
        with safetensors.open(path) as file:
            out.append({name: file.read(name) for name in file.names})
    return out


def same_tensors(folder: Path, want: dict[str, np.ndarray]) -> None:
    """Assert that a folder of torch.distributed.checkpoint has some tensors and no others, each of the same bytes."""
    with open_checkpoint(folder) as held:
        assert set(held.first_tensors) == set(want)
        for name, array in want.items():
            out = bytearray(array.nbytes)
            held.first_tensors[name].read_into(memoryview(out), 0)
            assert bytes(out) == array.tobytes(), name


__all__ = ["CONFIG", "hugging_face", "megatron", "plain", "read", "same_tensors", "served", "whole"]
