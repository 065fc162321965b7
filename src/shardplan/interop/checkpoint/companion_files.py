"""What stands beside the tensors so that a framework opens a folder: config, tokenizer, the framework's own files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardplan.errors import ParseError, line
from shardplan.interop.checkpoint.conversion_sides import CONFIG, AskedConfig
from shardplan.interop.checkpoint.distributed import blob
from shardplan.interop.checkpoint.manifest import MANIFEST
from shardplan.interop.checkpoint.parameter_groups import COMMON
from shardplan.interop.checkpoint.sources import TRACKER
from shardplan.movement.weights.state import STEPS
from shardplan.plans.plan_file import write_atomic

RELEASE = "release"  # the folder of a Megatron checkpoint that no training wrote
_LARGEST = 2**28  # bytes of a tokenizer
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
_OWN = (MANIFEST, TRACKER, "metadata.json", "README.txt")  # of the source's storage
_CONFIGS = (CONFIG, "generation_config.json")
_DTYPES = ("dtype", "torch_dtype")
_LONG = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def files_beside(source: Path, config: AskedConfig, tokenizer: Path | None = None) -> dict[str, Path]:
    """Return the files that a destination needs beside its tensors, by name: who is named first has the last word.

    They are the source's, those beside the config, and of a tokenizer's folder all but the config. Raises `ParseError`
    for a tokenizer's folder that has none.
    """
    out: dict[str, Path] = {}
    folders = [source if source.is_dir() else source.parent]
    if config.path is not None and config.path.parent.resolve() != folders[0].resolve():
        folders.append(config.path.parent)
    for folder in folders:
        out |= _small_files(folder)
    if config.path is not None:
        out[CONFIG] = config.path
    if tokenizer is not None:
        found = {n: p for n, p in _small_files(tokenizer).items() if n not in _CONFIGS} if tokenizer.is_dir() else {}
        if not found:
            raise ParseError(
                f"--tokenizer {line(tokenizer)}: no tokenizer's files are there; legal is a folder of them"
            )
        out |= found
    return dict(sorted(out.items()))


def _small_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that are neither tensors nor an index, and the configs of modules one level below."""
    out: dict[str, Path] = {}
    for path in [*folder.glob("*"), *folder.glob(f"*/{CONFIG}")]:
        inner = path.parent != folder
        if path.suffix not in _SUFFIXES or path.name.startswith(".") or not path.is_file():
            continue
        if (
            path.name.endswith(".index.json")
            or path.name in ("metadata.json", TRACKER)
            or path.stat().st_size > _LARGEST
        ):
            continue
        if not inner or not any(path.parent.glob("*.safetensors")):
            out[str(path.relative_to(folder))] = path
    return out


def config_bytes(config: AskedConfig, dtype: str) -> bytes:
    """Return the text of a config that says the dtype that was written, and the fields that were set.

    It is the source's byte for byte where nothing differs.
    """
    assert config.path is not None
    data, name = config.data(), _LONG.get(dtype)
    data.pop(STEPS, None)
    if name is not None:
        inner = data.get("text_config")
        for part in (data, *([inner] if isinstance(inner, dict) else [])):
            for key in _DTYPES:
                if key in part:
                    part[key] = name
        if not any(key in part for part in (data, inner or {}) for key in _DTYPES):
            data["torch_dtype"] = name  # which every version of transformers reads
    raw = config.path.read_bytes()
    return raw if json.loads(raw) == data else (json.dumps(data, indent=2) + "\n").encode()


def write_beside(folder: Path, files: dict[str, Path], config: AskedConfig, dtype: str) -> None:
    """Write the files beside the tensors, each atomically; one that is there stays."""
    for name, path in files.items():
        to = folder / name
        if to.exists():
            continue
        to.parent.mkdir(exist_ok=True)
        write_atomic(to, config_bytes(config, dtype) if name == CONFIG else path.read_bytes())


def write_megatron(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write what Megatron-Core asks for beside the tensors of a torch_dist folder, and what says where that is.

    As megatron-core 0.16.1 names them, whose loader opens such a folder (`benchmarks/weights_words.py`):
    dist_checkpointing/core.py (metadata.json), strategies/common.py (common.pt); Megatron-LM
    training/checkpointing.py: `release` has no iteration, and a checkpoint_version below 3 is reordered. `settings` are
    what common.pt says beside that, of an optimizer.
    """
    said: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    said |= {"common_backend": "torch", "common_backend_version": 1}
    write_atomic(folder / RELEASE / COMMON, blob({"checkpoint_version": 3.0, "iteration": 0, **settings}))
    write_atomic(folder / RELEASE / "metadata.json", json.dumps(said).encode())
    write_atomic(folder / TRACKER, RELEASE.encode())
