"""The files that a destination has, and what lies in each: parameters one after another, wider dtypes first."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardplan.core.dtypes import itemsize, numpy_dtype
from shardplan.errors import LayoutError, excerpt
from shardplan.interop.checkpoint.boxes import ShardBox, held_boxes
from shardplan.interop.safetensors_header import encode
from shardplan.movement.weights.weights import Weights

FORMS = ("auto", "plain", "devices", "ranks", "parts", "distributed", "megatron")
DISTRIBUTED_FORMS = {"distributed": "", "megatron": "release/"}
"""The forms of torch.distributed.checkpoint, with where its folder is in the destination."""
LARGEST_FILE = 5 * 10**9  # bytes of a file of a plain checkpoint, as transformers cuts
T = TypeVar("T")
_METADATA = {"format": "pt"}  # what transformers asks for


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file under way: its name, its rank, and the (number, name, shape, dtype) of its parameters in order.

    In a folder of torch.distributed.checkpoint each is a box of a whole tensor.
    """

    name: str
    rank: int
    parameters: tuple[tuple[int, str, tuple[int, ...], str], ...]
    boxes: tuple[ShardBox, ...] = ()

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Number, elements and bytes of an element of every parameter."""
        return [(number, math.prod(shape), itemsize(dtype)) for number, _, shape, dtype in self.parameters]

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(n * width for _, n, width in self.sizes)

    def header(self, folder: Path) -> bytes:
        """Return what a safetensors file begins with."""
        arrays = [(n, np.broadcast_to(np.zeros((), numpy_dtype(d)), s)) for _, n, s, d in self.parameters]
        return encode(folder / self.name, arrays, _METADATA)


def form_of(form: str, weights: Weights) -> str:
    """Return the form that `auto` is: plain for one device, a file a device for several; raises `LayoutError`."""
    if form not in FORMS:
        raise LayoutError(f"form = {excerpt(form)}; legal are {', '.join(FORMS)}")
    several = len(weights.devices) > 1
    if form == "auto":
        return "devices" if several else "plain"
    if several and form == "plain":
        raise LayoutError(
            f"form = {form!r} for {len(weights.devices)} devices; legal are devices, ranks, parts and distributed, or "
            "weights of one device, whose tensors are whole"
        )
    return form


def target_files(weights: Weights, form: str, largest: int = LARGEST_FILE) -> list[TargetFile]:
    """Return the files of a destination, in order."""
    every = {r: [(k, *p) for k, p in enumerate(weights.parameters(r))] for r in weights.devices}
    count = len(weights.devices)
    if form in ("devices", "ranks"):
        named = {
            r: f"rank-{k:05d}/model.safetensors" if form == "ranks" else f"model-{k + 1:05d}-of-{count:05d}.safetensors"
            for k, r in enumerate(weights.devices)
        }
        return [TargetFile(named[r], r, _sort_by_alignment(every[r])) for r in weights.devices]
    if form == "parts":
        sized = {r: _groups([(math.prod(p[2]) * itemsize(p[3]), p) for p in every[r]], largest) for r in every}
        return [
            TargetFile(f"model-rank-{k}-part-{n}.safetensors", r, _sort_by_alignment(group))
            for k, r in enumerate(weights.devices)
            for n, group in enumerate(sized[r])
        ]
    if form in DISTRIBUTED_FORMS:
        return _distributed_files(weights, largest, DISTRIBUTED_FORMS[form])
    (rank,) = weights.devices
    groups = _groups([(math.prod(p[2]) * itemsize(p[3]), p) for p in every[rank]], largest)
    if len(groups) == 1:
        peft = weights.table.name.startswith("peft-")  # which opens one file of this name, and no index
        return [
            TargetFile(
                "adapter_model.safetensors" if peft else "model.safetensors", rank, _sort_by_alignment(groups[0])
            )
        ]
    return [
        TargetFile(f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors", rank, _sort_by_alignment(g))
        for k, g in enumerate(groups)
    ]


def _distributed_files(weights: Weights, largest: int, folder: str) -> list[TargetFile]:
    """Return the files of a folder of torch.distributed.checkpoint: some of every device; `folder` goes before."""
    out: list[TargetFile] = []
    for place, boxes in enumerate(held_boxes(weights).values()):
        groups = _groups([(math.prod(b.shape) * itemsize(b.dtype), b) for b in boxes], largest)
        for k, group in enumerate(groups):
            parameters = tuple((b.number, b.name, b.shape, b.dtype) for b in group)
            out.append(TargetFile(f"{folder}__{place}_{k}.distcp", weights.devices[place], parameters, tuple(group)))
    return out


def _groups(sized: list[tuple[int, T]], largest: int) -> list[list[T]]:
    """Cut a list where the next one makes a file too large."""
    groups: list[list[T]] = [[]]
    used = 0
    for size, item in sized:
        if groups[-1] and used + size > largest:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += size
    return [g for g in groups if g]


def _sort_by_alignment(
    parameters: list[tuple[int, str, tuple[int, ...], str]],
) -> tuple[tuple[int, str, tuple[int, ...], str], ...]:
    return tuple(sorted(parameters, key=lambda p: -itemsize(p[3])))  # so that each is aligned


def index_bytes(files: list[TargetFile]) -> bytes:
    """Return the index of a plain checkpoint of several files."""
    names = {name: file.name for file in files for _, name, _, _ in file.parameters}
    data = {"metadata": {"total_size": sum(f.nbytes for f in files)}, "weight_map": dict(sorted(names.items()))}
    return (json.dumps(data, indent=2) + "\n").encode()
