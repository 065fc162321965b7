"""A job: both sides, the files that are read and written, how large a window is, and the hash of what is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.dtypes import itemsize
from shardplan.errors import Infeasible
from shardplan.hardware.units import format_bytes
from shardplan.interop.checkpoint.sharing import ProcessShare, assign_by_size
from shardplan.interop.checkpoint.sources import OpenCheckpoint
from shardplan.interop.checkpoint.targets import DISTRIBUTED_FORMS, TargetFile, form_of, target_files
from shardplan.interop.checkpoint.windows import PiecesOf
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.lowering import DimRuns
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.weights import Weights

LARGEST_WINDOW, LEAST_WINDOW = 32 * 2**20, 2**16  # bytes
BUFFERS = 3  # two that are filled and written in turn, and one of scratch, which is read into
BESIDE = 12 * 2**20  # bytes of everything that is not a buffer: threads, headers, the second reading
REGION = 600  # bytes of a region and its place in the order
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True, slots=True)
class ResharedFile:
    """A file of a destination: name, bytes of tensors, the logical tensors that it needs, and the process it is of.

    `parts` says what of every tensor it needs, as `q[l=0:2, g r d=0:64]`, where that was asked for.
    """

    name: str
    nbytes: int
    tensors: tuple[str, ...]
    skipped: bool = False
    process: int = 0
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshared:
    """What was done, or with `dry_run` would be: the plan, the form, the files, bytes, memory and seconds.

    The files are those of all processes, `beside` names what stands beside them, `left` what of an optimizer's settings
    the destination does not keep; memory, bytes read and seconds
    are of this one.
    """

    plan: RefitPlan
    form: str
    files: tuple[ResharedFile, ...]
    nbytes: int
    memory_bytes: int
    least_memory_bytes: int
    read_bytes: int
    seconds: float
    processes: int = 1
    beside: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointJob:
    """What a run needs: both sides, the source's files, the destination's, whose they are, how large a window is."""

    plan: RefitPlan
    held: OpenCheckpoint
    destination: Path
    form: str
    files: tuple[TargetFile, ...]
    window: int
    memory: int
    least: int
    share: ProcessShare
    owners: tuple[int, ...]  # the process that writes each file
    kept: dict[int, PiecesOf]  # the regions of the rank that is written, by rank
    delta: bytes = b""  # what says from which base, where only what differs from one is written

    @property
    def mine(self) -> tuple[TargetFile, ...]:
        """The files that this process writes."""
        return tuple(f for f, owner in zip(self.files, self.owners, strict=True) if owner == self.share.number)

    def pieces(self, rank: int) -> PiecesOf:
        """Return what a rank receives, worked out once while its files are written."""
        if rank not in self.kept:
            self.kept.clear()
            found = self.plan.regions(rank)
            self.kept[rank] = PiecesOf(found.select_regions(found.target == rank))
        return self.kept[rank]

    def needs(self, file: TargetFile) -> tuple[str, ...]:
        """Return the logical tensors that a file needs."""
        numbers = {number for number, _, _, _ in file.parameters}
        found = self.pieces(file.rank).regions
        mine = np.isin(found.target_parameter, list(numbers))
        return tuple(dict.fromkeys(self.plan.moves[m].tensor for m in np.unique(found.move[mine]).tolist()))

    def parts(self, file: TargetFile) -> tuple[str, ...]:
        """Return what of the logical tensors a file needs, as text."""
        found = needed_parts(self.plan.target, file.rank, {number for number, _, _, _ in file.parameters})
        return tuple(found[name] for name in self.needs(file))

    def request(self) -> str:
        """Return the hash of what is asked for: both sides, the form, and the files of the source as they are.

        How many processes do it is no part of it.
        """
        files: list[Any] = []
        for path in self.held.files:
            status = path.stat()
            files.append([path.name, status.st_size, status.st_mtime_ns])
        # chunks are as large as windows there
        cut = [f.name for f in self.files], [len(f.parameters) for f in self.files]
        said = [self.plan.hash, self.form, files, cut, self.window if self.form in DISTRIBUTED_FORMS else 0]
        return hashlib.sha256(json.dumps(said).encode() + self.delta).hexdigest()


def job_of(
    plan: RefitPlan, held: OpenCheckpoint, into: Path, form: str, limits: tuple[int, int], share: ProcessShare
) -> CheckpointJob:
    """Return a job; `limits` are the bytes in memory and those of a file. Raises `LayoutError` and `Infeasible`."""
    form, limit = form_of(form, plan.target), limits[0]
    files = tuple(target_files(plan.target, form, limits[1]))
    regions = max(len(plan.regions(r)) for r in plan.target.devices)
    names = sum(len(f.parameters) for f in files)
    beside = BESIDE + regions * REGION + names * REGION
    buffers = BUFFERS + (2 if form in DISTRIBUTED_FORMS else 0)  # torch.save has a copy, and what is written too
    largest = LEAST_WINDOW
    if form in DISTRIBUTED_FORMS:
        rows = [np.prod(s[1:], dtype=np.int64) * itemsize(d) for f in files for _, _, s, d in f.parameters if s]
        largest = max([LEAST_WINDOW, *(-(-int(r) // 8) * 8 for r in rows)])
    least = beside + buffers * largest
    if limit < least:
        raise Infeasible(
            f"reshard within {format_bytes(limit)}: no way; the least that works is {least} bytes", least, least
        )
    needed = -(-max(f.nbytes for f in files) // 8) * 8
    window = min((limit - beside) // buffers, LARGEST_WINDOW, needed) // 8 * 8
    window = max(window, largest)
    owners = tuple(assign_by_size([f.nbytes for f in files], share.count))
    return CheckpointJob(plan, held, into, form, files, window, beside + buffers * window, least, share, owners, {})


# Which logical tensors a file needs, and what of them: intervals of every dim that it does not need whole.


_SHOWN = 3  # intervals of a dim


def needed_parts(weights: Weights, rank: int, numbers: Collection[int]) -> dict[str, str]:
    """Return what some parameters of a rank, by their numbers in `names(rank)`, need: per tensor, as text.

    >>> config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "num_hidden_layers": 3, "vocab_size": 10}
    >>> w = Weights.load("vllm-llama", config, tensor=2)
    >>> [n for n in w.names(1)[9:11]], needed_parts(w, 1, [9, 10])["k"]
    (['model.layers.0.self_attn.qkv_proj.weight', 'model.layers.1.self_attn.qkv_proj.weight'], 'k[l=0:2, g d=2:4]')
    """
    place = weights.place(rank)
    starts = np.array(weights.starts[place])
    chosen = np.array(sorted(numbers), dtype=np.int64)
    owners = np.searchsorted(starts, chosen, side="right") - 1
    spans: dict[str, list[list[tuple[int, int]]]] = {}
    for number in np.unique(owners).tolist():
        family = weights.families[number]
        digits = _digits(family, place, chosen[owners == number] - starts[number])
        for name, dims in family.tensors.items():
            held = spans.setdefault(name, [[] for _ in dims])
            for kept, runs in zip(held, dims, strict=True):
                kept += _spans(family, runs, place, digits)
    return {name: _text(weights, name, held) for name, held in spans.items()}


def _digits(family: StoredFamily, place: int, numbers: np.ndarray) -> list[set[int]]:
    """Return which values of every dim of the name some names of a family have."""
    counts = [len(dim.values[int(family.coordinate(dim.axes)[place])]) for dim in family.names]
    return [set(d.tolist()) for d in np.unravel_index(numbers, counts)] if counts else []


def _spans(family: StoredFamily, runs: DimRuns, place: int, digits: list[set[int]]) -> list[tuple[int, int]]:
    """Return the logical intervals of a dim that are at a place, under the names of these digits."""
    rows = runs.rows(int(family.coordinate(runs.axes)[place]))
    out: list[tuple[int, int]] = []
    columns = (runs.start[rows], runs.length[rows], runs.name[rows], runs.name_step[rows])
    for start, length, name, step in zip(*(c.tolist() for c in columns), strict=True):
        if runs.hole < 0 or not step:
            if runs.hole < 0 or name in digits[runs.hole]:
                out.append((start, start + length))
            continue
        out += [(start + k, start + k + 1) for k in range(length) if name + k * step in digits[runs.hole]]
    return out


def _text(weights: Weights, name: str, spans: list[list[tuple[int, int]]]) -> str:
    tensor = weights.tensors[name]
    said: list[str] = []
    for dim, legal, found in zip(tensor.dims, tensor.ranges, spans, strict=True):
        joined: list[tuple[int, int]] = []
        for low, high in sorted(set(found)):
            if joined and low <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
            else:
                joined.append((low, high))
        if sum(high - low for low, high in joined) < len(legal):
            texts = [f"{low}:{high}" if high > low + 1 else str(low) for low, high in joined]
            more = [] if len(texts) <= _SHOWN else ["..."]
            said.append(f"{' '.join(dim.atoms)}={'+'.join(texts[:_SHOWN] + more)}")
    return f"{name}[{', '.join(said)}]" if said else name
