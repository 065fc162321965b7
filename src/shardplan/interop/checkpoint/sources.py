"""What a checkpoint holds, by place and name: safetensors in its forms, and folders of torch.distributed.checkpoint.

A plain checkpoint (one file, or files with an index) is that of one device. A sharded one has a file a device,
`model-00003-of-00006.safetensors`, a folder a rank, `rank-00002/`, or vLLM's files, `model-rank-2-part-0.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from shardplan.core.decoding import decode_json, read_bytes
from shardplan.errors import LayoutError, ParseError, excerpt, line
from shardplan.interop.checkpoint.boxes import whole_of
from shardplan.interop.checkpoint.folders import METADATA
from shardplan.interop.checkpoint.gather import StoredTensor
from shardplan.interop.checkpoint.optimizer_names import SHARED_STEPS
from shardplan.interop.safetensors import Checkpoint, TensorEntry
from shardplan.interop.safetensors_header import NUMPY
from shardplan.movement.weights.binding import check_named
from shardplan.movement.weights.state import STEPS
from shardplan.movement.weights.weights import Weights

INDEX = "model.safetensors.index.json"
DISTRIBUTED = "torch.distributed.checkpoint"
TRACKER = "latest_checkpointed_iteration.txt"  # which folder of a Megatron checkpoint is the newest
_LONGEST_NAME = 255  # bytes
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors\Z")
_VLLM = re.compile(r"model-rank-(\d+)-part-(\d+)\.safetensors\Z")
_FOLDER = re.compile(r"(?:.*[^0-9])?(\d+)\Z")


class _Index(msgspec.Struct):
    """The index of a checkpoint: the file of every tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a safetensors file."""

    file: Checkpoint
    name: str
    entry: TensorEntry

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return NUMPY[self.entry.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.entry.shape

    @property
    def dtype_name(self) -> str:
        """The short name of its dtype."""
        return self.entry.dtype

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill bytes from the element `start` on; raises `ParseError` where the file got shorter."""
        self.file.pread(target, self.entry.begin + start * self.dtype.itemsize, f"tensor {self.name!r}")


@dataclass(frozen=True, slots=True)
class ConstantTensor:
    """A tensor of one number, which no file has: a count of steps that was said."""

    shape: tuple[int, ...]
    value: float
    dtype: np.dtype[Any] = np.dtype(np.float32)  # noqa: RUF009
    dtype_name: str = "f32"

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill bytes with it."""
        np.frombuffer(target, np.float32)[:] = self.value


class OpenCheckpoint:
    """A checkpoint with its headers read: tensors by place in mesh order, and by name."""

    def __init__(
        self, path: Path, form: str, places: Sequence[Mapping[str, StoredTensor]], files: Sequence[Path]
    ) -> None:
        """Take what was found; see `open_checkpoint`."""
        self.path, self.form, self.places, self.files = path, form, tuple(places), tuple(files)
        self.opened: list[Checkpoint] = []

    @property
    def first_tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the first place."""
        return next(iter(self.places))

    def tensor(self, place: int, name: str) -> StoredTensor:
        """Return a tensor of a place."""
        return self.places[place][name]

    def side(self, weights: Weights) -> Weights:
        """Return how this stores what a side does: a folder of torch.distributed.checkpoint has whole tensors.

        A count of steps that the side's config says is there from now on.
        """
        if (steps := dict(weights.config).get(STEPS)) and len(self.places) == 1:
            whole = whole_of(weights).parameters(whole_of(weights).devices[0])
            added = {n: ConstantTensor(s, float(steps)) for n, s, _ in whole if n.startswith(SHARED_STEPS)}
            self.places = ({**added, **self.first_tensors},)
        return whole_of(weights) if self.form == DISTRIBUTED else weights

    def check_names(self, weights: Weights, ignored: Sequence[str] = ()) -> None:
        """Raise `LayoutError` where tensors are missing, additional or misshapen, by what weights say.

        A name that matches a pattern in `ignored`, or that the family says is recomputed, may be there without being
        asked for.
        """
        if len(self.places) != len(weights.devices):
            raise LayoutError(
                f"{line(self.path)} is of {len(self.places)} devices ({self.form}), and "
                f"{weights.table.name or 'the table'} of {len(weights.devices)}; legal is as many"
            )
        for rank in weights.devices:
            where = f"{line(self.path)}, rank {rank} of {weights.table.name or 'the table'}"
            held = self.places[weights.place(rank)]
            check_named(weights.parameters(rank), held, where, (*ignored, *weights.table.recomputed))

    def check(self, weights: Weights, ignored: Sequence[str] = ()) -> None:
        """Raise `LayoutError` as `check_names`, and where a tensor is of another dtype than weights say."""
        self.check_names(weights, ignored)
        for rank in weights.devices:
            held = self.places[weights.place(rank)]
            for name, _, dtype in weights.parameters(rank):
                if held[name].dtype_name != dtype:
                    raise LayoutError(
                        f"{line(self.path)}: {name} is {held[name].dtype_name}, and the weights say {dtype}; legal is "
                        f"--from-dtype {held[name].dtype_name} (from_ with that dtype), or none, for what the files say"
                    )

    def close(self) -> None:
        """Close all files."""
        for file in self.opened:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of some patterns."""
    return name in patterns or any(fnmatchcase(name, p) for p in patterns)


def open_checkpoint(path: str | Path, devices: int = 1, ignored: Sequence[str] = ()) -> OpenCheckpoint:
    """Open a checkpoint of so many devices, and read all its headers.

    Of a folder of torch.distributed.checkpoint, what matches a pattern in `ignored` is not looked at.

    Raises:
        ParseError: there is none, or a file breaks its format; a tensor that is in two files of one device.
    """
    path = newest_folder(Path(path))
    if path.is_file():
        return _open_files(path, "one file", [[path]])
    if not path.is_dir():
        raise ParseError(f"{line(path)}: there is no such file or folder; legal is a checkpoint")
    if (path / METADATA).is_file():
        from shardplan.interop.checkpoint.distributed import opened_distributed

        tensors, files = opened_distributed(path, ignored)
        return OpenCheckpoint(path, DISTRIBUTED, [tensors], files)
    files = sorted(path.glob("*.safetensors"))
    if files:
        return _of_files(path, files, devices)
    folders = sorted(
        ((int(m.group(1)), p) for p in path.iterdir() if p.is_dir() and (m := _FOLDER.match(p.name))),
        key=lambda x: x[0],
    )
    if not folders:
        raise ParseError(
            f"{line(path)} holds no checkpoint; legal are safetensors files, a folder a rank, or a folder of "
            "torch.distributed.checkpoint"
        )
    every = [sorted(p.glob("*.safetensors")) for _, p in folders]
    if empty := [p for (_, p), found in zip(folders, every, strict=True) if not found]:
        raise ParseError(f"{line(empty[0])} holds no safetensors file; legal is one in each")
    return _open_files(path, "a folder a rank", every)


def newest_folder(path: Path) -> Path:
    """The folder that Megatron's file of the newest iteration names, else the path itself; raises `ParseError`."""
    if not (path / TRACKER).is_file():
        return path
    said = read_bytes(path / TRACKER)[:64].decode("ascii", "replace").strip()
    if said != "release" and not said.isdigit():
        raise ParseError(f"{line(path / TRACKER)} says {excerpt(said)}; legal is a number, or release")
    found = path / (said if said == "release" else f"iter_{int(said):07d}")
    if not found.is_dir():
        raise ParseError(f"{line(path / TRACKER)} says {said}, and {line(found)} is not there; legal is its folder")
    return found


def _of_files(path: Path, files: list[Path], devices: int) -> OpenCheckpoint:
    if (path / INDEX).is_file():
        return _open_files(path, "files with an index", [_indexed_files(path)])
    ranks = [(int(m.group(1)), f) for f in files if (m := _VLLM.match(f.name))]
    if len(ranks) == len(files):
        by_rank = [[f for r, f in ranks if r == rank] for rank in sorted({r for r, _ in ranks})]
        return _open_files(path, "files a rank", by_rank)
    shards = [m for f in files if (m := _SHARD.match(f.name))]
    counts = {int(m.group(3)) for m in shards}
    if devices > 1 and len(shards) == len(files) and counts == {len(files)}:
        return _open_files(path, "a file a device", [[f] for f in files])
    if len(shards) == len(files) and counts != {len(files)}:
        raise ParseError(f"{line(path)} has {len(files)} files of {max(counts)}; legal are all of them")
    return _open_files(path, "files without an index" if len(files) > 1 else "one file", [files])


def _indexed_files(path: Path) -> list[Path]:
    try:
        where = decode_json(read_bytes(path / INDEX), _Index).weight_map
    except ParseError as error:
        raise ParseError(f"{line(path / INDEX)}: {line(error)}; legal is an index with a weight_map") from None
    names = dict.fromkeys(where.values())
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name or len(name.encode()) > _LONGEST_NAME:
            raise ParseError(f"{line(path / INDEX)} names {excerpt(name)}; legal are files within its folder")
    files = [path / name for name in names]
    if absent := [f for f in files if not f.is_file()]:
        raise ParseError(f"{line(path / INDEX)} names {absent[0].name}, which is not there; legal are all files of it")
    return sorted(files)


def _open_files(path: Path, form: str, places: list[list[Path]]) -> OpenCheckpoint:
    out = OpenCheckpoint(path, form, [], [f for files in places for f in files])
    found: list[dict[str, FileTensor]] = []
    try:
        for files in places:
            held: dict[str, FileTensor] = {}
            for file in files:
                opened = Checkpoint(file)
                out.opened.append(opened)
                for name, entry in opened.header.tensors.items():
                    if name in held:
                        raise ParseError(
                            f"{line(path)}: tensor {name!r} is in {held[name].file.path.name} and in {file.name}; "
                            "legal is one of them"
                        )
                    held[name] = FileTensor(opened, name, entry)
            found.append(held)
    except BaseException:
        out.close()
        raise
    out.places = tuple(found)
    return out
