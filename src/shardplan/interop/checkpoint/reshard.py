"""`reshard`: a checkpoint on disk to another storage, by byte ranges, within a memory limit."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.dtypes import itemsize, numpy_dtype
from shardplan.errors import Infeasible, LayoutError, ShardplanError, line
from shardplan.hardware.units import format_bytes, limit_of
from shardplan.interop.checkpoint import distributed
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.layouts import layout_weights
from shardplan.interop.checkpoint.manifest import CheckpointManifest, resumed
from shardplan.interop.checkpoint.output import OutputFile, sync_folder
from shardplan.interop.checkpoint.sources import INDEX, METADATA, OpenCheckpoint, open_checkpoint
from shardplan.interop.checkpoint.targets import LARGEST_FILE, TargetFile, form_of, index_bytes, target_files
from shardplan.interop.checkpoint.windows import PiecesOf, windows
from shardplan.movement.weights.refit import RefitPlan, refit
from shardplan.movement.weights.weights import Weights
from shardplan.plans.plan_file import write_atomic

LARGEST_WINDOW, LEAST_WINDOW = 32 * 2**20, 2**16  # bytes
BUFFERS = 3  # two that are filled and written in turn, and one of scratch, which is read into
BESIDE = 12 * 2**20  # bytes of everything that is not a buffer: threads, headers, the second reading
REGION = 600  # bytes of a region and its place in the order
CONFIG = "config.json"
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True, slots=True)
class ResharedFile:
    """A file of a destination: its name, its bytes of tensors, and the logical tensors that it needs."""

    name: str
    nbytes: int
    tensors: tuple[str, ...]
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Reshared:
    """What was done, or with `dry_run` would be: the plan, the form, the files, bytes, memory and seconds."""

    plan: RefitPlan
    form: str
    files: tuple[ResharedFile, ...]
    nbytes: int
    memory_bytes: int
    least_memory_bytes: int
    read_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointJob:
    """What a run needs: both sides, the source's files, the destination's, and how large a window is."""

    plan: RefitPlan
    held: OpenCheckpoint
    destination: Path
    form: str
    files: tuple[TargetFile, ...]
    window: int
    memory: int
    least: int
    kept: dict[int, PiecesOf]  # the regions of the rank that is written, by rank

    def pieces(self, rank: int) -> PiecesOf:
        """Return what a rank receives, worked out once while its files are written."""
        if rank not in self.kept:
            self.kept.clear()
            found = self.plan.regions(rank)
            self.kept[rank] = PiecesOf(found.where(found.target == rank))
        return self.kept[rank]


def reshard(
    source: str | Path,
    destination: str | Path,
    layouts: str | Path | None = None,
    memory_limit: float | str = "1 GB",
    source_layouts: str | Path | None = None,
    *,
    from_: Weights | None = None,
    to: Weights | None = None,
    form: str = "auto",
    largest_file: float | str = LARGEST_FILE,
    ignore: Iterable[str] = (),
    dry_run: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Reshared:
    """Write a checkpoint as another side stores it.

    It is crash-safe (no incomplete file under a final name), resumable (the same call goes on with what a killed one
    left), and checked: recorded checksums of the source are verified, and what is written is read again.

    Args:
        source: a safetensors file, or a folder: files with an index, a file a device, a folder a rank, or what
            torch.distributed.checkpoint wrote.
        destination: a new folder, or one that a killed run of the same request left.
        layouts: a file of layouts of the destination, in place of `to`.
        memory_limit: the bytes that may be in memory beyond the interpreter, or text of them ("512 MB").
        source_layouts: a file of layouts of the source, in place of `from_`. Where neither is given, the source says
            itself how it is stored, if reshard wrote it, and is read as whole tensors otherwise.
        from_: how the source stores the model; the places of its mesh are its files, or folders, in order.
        to: how the destination is to store it, in the dtype that it says.
        form: `plain` (files with an index where one gets too large), `devices` (a file a device), `ranks` (a folder a
            rank), `distributed` (a folder of torch.distributed.checkpoint), or `auto`: plain for one device.
        largest_file: bytes of a file where the form is plain or distributed, or text of them.
        ignore: names of tensors of the source that no table has, and that are left out.
        dry_run: say what would be done, and write nothing.
        verify: whether checksums that the source has recorded are verified before it is read.
        progress: called with bytes done, bytes to do, and what is being done.

    Raises:
        LayoutError: sides that do not fit, or a source that is not what `from_` says: every name at once.
        ParseError: a source that is no checkpoint, breaks its format, or does not have its recorded checksum.
        Infeasible: a memory limit that is too small; it names the least.
        BackendError: a disk that gives back other bytes than were written.
    """
    started = time.perf_counter()
    place, into = Path(source), Path(destination)
    if place.resolve() == into.resolve():
        raise LayoutError(f"source and destination are both {line(into)}; legal is another folder")
    sides = sides_of(place, (from_, source_layouts), (to, layouts))
    limit = limit_of("memory limit", memory_limit)
    assert limit is not None
    with open_checkpoint(place, len(sides[0].devices)) as held:
        held.check(sides[0], tuple(ignore))
        job = _job(refit(*sides), held, into, form, (limit, limit_of("largest file", largest_file) or LARGEST_FILE))
        done: list[ResharedFile] = []
        gather = WindowGather(0)
        if not dry_run:
            recorded = CheckpointManifest.of(place) if place.is_dir() else None
            if verify and recorded is not None:
                recorded.verify()
            gather = WindowGather(job.window)
            done = list(_run(job, gather, progress))
            _close(job, place)
    files = tuple(done) or tuple(ResharedFile(f.name, f.nbytes, _needs(job, f)) for f in job.files)
    total = sum(f.nbytes for f in files)
    seconds = time.perf_counter() - started
    return Reshared(job.plan, job.form, files, total, job.memory, job.least, gather.bytes_read, seconds)


def sides_of(
    place: Path, source: tuple[Weights | None, str | Path | None], target: tuple[Weights | None, str | Path | None]
) -> tuple[Weights, Weights]:
    """Return the weights of both sides, each given as weights or as a file of layouts; see `reshard`."""
    for weights, file in (source, target):
        if weights is not None and file is not None:
            raise LayoutError("a side given as weights and as a file of layouts; legal is one of them")
    if target == (None, None):
        raise LayoutError("reshard without to= and layouts=; legal is one of them")
    first, file = source
    if first is None and file is None:
        first = recorded_weights(place)
    second, wanted = target
    if first is None:
        with open_checkpoint(place) as held:
            if file is not None and len(held.places) > 1:
                raise LayoutError(
                    f"{line(place)} is sharded; legal is a source that reshard wrote, or a plain checkpoint"
                )
            whole = {name: (tuple(t.shape), t.dtype_name) for name, t in held.first.items()}
        first = layout_weights(None if file is None else Path(file), whole)
    if second is None:
        assert wanted is not None
        tensors = {f.entry.name: (_whole(first, k), f.dtype) for k, f in enumerate(first.families)}
        second = layout_weights(Path(wanted), tensors)
    return first, second


def recorded_weights(place: Path) -> Weights | None:
    """Return how a checkpoint says that it is stored, None where reshard did not write it."""
    recorded = CheckpointManifest.of(place) if place.is_dir() else None
    return None if recorded is None else Weights.parse(recorded.weights)


def _whole(weights: Weights, family: int) -> tuple[int, ...]:
    """Return the whole shape of what is stored under one name."""
    found = weights.families[family]
    if len(found.tensors) != 1 or found.names:
        raise LayoutError(
            f"a file of layouts for {weights.table.name or 'a table'}, which joins tensors ({found.entry.name}); legal "
            "is a table at both ends"
        )
    (name,) = found.tensors
    return tuple(weights.tensors[name].sizes)


def _job(plan: RefitPlan, held: OpenCheckpoint, into: Path, form: str, limits: tuple[int, int]) -> CheckpointJob:
    form, limit = form_of(form, plan.target), limits[0]
    files = tuple(target_files(plan.target, form, limits[1]))
    regions = max(len(plan.regions(r)) for r in plan.target.devices)
    names = sum(len(f.parameters) for f in files)
    beside = BESIDE + regions * REGION + names * REGION
    buffers = BUFFERS + (2 if form == "distributed" else 0)  # torch.save has its own copy, and what is written another
    largest = LEAST_WINDOW
    if form == "distributed":
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
    return CheckpointJob(plan, held, into, form, files, window, beside + buffers * window, least, {})


def _request(job: CheckpointJob) -> str:
    """Return the hash of what is asked for: both sides, the form, and the files of the source as they are."""
    files: list[Any] = []
    for path in job.held.files:
        status = path.stat()
        files.append([path.name, status.st_size, status.st_mtime_ns])
    # chunks are as large as windows there
    cut = [f.name for f in job.files], [len(f.parameters) for f in job.files]
    said = [job.plan.hash, job.form, files, cut, job.window if job.form == "distributed" else 0]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _run(job: CheckpointJob, gather: WindowGather, progress: Progress | None) -> Iterator[ResharedFile]:
    """Write every file that is not finished."""
    manifest = resumed(job.destination, _request(job), job.form, str(job.plan.target))
    manifest.save()
    buffers = [np.empty(job.window, dtype=np.uint8) for _ in range(2)]
    total, done, begun = sum(f.nbytes for f in job.files), 0, time.perf_counter()
    written = 0

    def tell(name: str, more: int) -> None:
        nonlocal written
        written += more
        if progress is not None:
            rate = written / max(time.perf_counter() - begun, 1e-9)
            progress(done + written, total, f"{format_bytes(rate)}/s {name}")

    for file in job.files:
        needs = _needs(job, file)
        if manifest.finished(file.name):
            done += file.nbytes
            yield ResharedFile(file.name, file.nbytes, needs, skipped=True)
            continue
        path = job.destination / file.name
        if path.parent != job.destination:
            path.parent.mkdir(exist_ok=True)
            sync_folder(job.destination)
        with OutputFile(path, buffers) as out:
            items = _fill_file(job, gather, file, out, lambda more, name=file.name: tell(name, more))
            size, checksum = out.finish()
        manifest.files[file.name] = {"bytes": size, "sha256": checksum, **({"items": items} if items else {})}
        manifest.save()
        yield ResharedFile(file.name, file.nbytes, needs)


def _fill_file(
    job: CheckpointJob, gather: WindowGather, file: TargetFile, out: OutputFile, tell: Callable[[int], None]
) -> list[list[Any]]:
    """Put every byte of a file; returns where the chunks lie, of a folder of torch.distributed.checkpoint."""
    pieces = job.pieces(file.rank)
    dtypes = {number: (name, shape, numpy_dtype(dtype)) for number, name, shape, dtype in file.parameters}
    if job.form == "distributed":
        return _fill_chunks(job, gather, file, out, tell, pieces)
    out.put(file.header(job.destination))
    for parts, used in windows(file.sizes, job.window):
        buffer = out.buffer()
        for part in parts:
            dtype = dtypes[part.parameter][2]
            fill_part(job.plan, job.held, gather, pieces, part, buffer, dtype)
        out.put(memoryview(buffer[:used]), buffer)  # pyright: ignore
        tell(used)
    return []


def _fill_chunks(
    job: CheckpointJob,
    gather: WindowGather,
    file: TargetFile,
    out: OutputFile,
    tell: Callable[[int], None],
    pieces: PiecesOf,
) -> list[list[Any]]:
    from shardplan.interop.checkpoint.windows import WindowPart

    items: list[list[Any]] = []
    for number, name, shape, dtype in file.parameters:
        row = int(np.prod(shape[1:], dtype=np.int64))
        rows = max(job.window // max(row * itemsize(dtype), 1), 1)
        count = shape[0] if shape else 1
        for first in range(0, max(count, 1), rows):
            some = min(rows, count - first)
            buffer = out.buffer()
            fill_part(
                job.plan, job.held, gather, pieces, WindowPart(number, first * row, (first + some) * row, 0), buffer,
                numpy_dtype(dtype),
            )  # fmt: skip
            held = buffer[: some * row * itemsize(dtype)].view(numpy_dtype(dtype))
            data = distributed.blob(held.reshape((some, *shape[1:]) if shape else ()))
            items.append([name, first, some, file.name, out.size, len(data)])
            out.put(data, buffer)
            tell(held.nbytes)
    return items


def fill_part(
    plan: RefitPlan,
    held: OpenCheckpoint,
    gather: WindowGather,
    pieces: PiecesOf,
    part: Any,
    buffer: np.ndarray,
    dtype: np.dtype[Any],
) -> None:
    """Fill a part of a parameter within a buffer; padding is zero."""
    into = buffer[part.at : part.at + (part.hi - part.lo) * dtype.itemsize].view(dtype)
    mine = list(pieces.within(part))
    if sum(int(np.prod(sizes)) for _, sizes, *_ in mine) < part.hi - part.lo:
        into[...] = 0
    r = pieces.regions
    for k, sizes, s, t, s_at, t_at in mine:
        move = plan.moves[int(r.move[k])]
        source, target = plan.source.families[move.source_family], plan.target.families[move.target_family]
        rank = int(r.source[k])
        name = _name(plan.source, rank, int(r.source_parameter[k]))
        tensor = held.tensor(plan.source.place(rank), name)
        gather.fill(into, tensor, sizes, (s, t), (s_at, t_at - part.lo), source.entry.plus - target.entry.plus)


def _name(weights: Weights, rank: int, number: int) -> str:
    return names_of(weights, rank)[number]


def names_of(weights: Weights, rank: int) -> list[str]:
    """Return the names of a rank, remembered with the weights."""
    kept: dict[int, list[str]] = weights.__dict__.setdefault("_names_by_rank", {})
    if rank not in kept:
        kept[rank] = weights.names(rank)
    return kept[rank]


def _needs(job: CheckpointJob, file: TargetFile) -> tuple[str, ...]:
    """Return the logical tensors that a file needs."""
    numbers = {number for number, _, _, _ in file.parameters}
    found = job.pieces(file.rank).regions
    mine = np.isin(found.target_parameter, list(numbers))
    return tuple(dict.fromkeys(job.plan.moves[m].tensor for m in np.unique(found.move[mine]).tolist()))


def _close(job: CheckpointJob, place: Path) -> None:
    """Write what says that all is there: the config, then the index, then the manifest."""
    folder = job.destination
    manifest = CheckpointManifest.of(folder)
    assert manifest is not None
    try:
        config = (place if place.is_dir() else place.parent) / CONFIG
        if config.is_file() and not (folder / CONFIG).exists():
            write_atomic(folder / CONFIG, config.read_bytes())
        if job.form == "plain" and len(job.files) > 1:
            write_atomic(folder / INDEX, index_bytes(list(job.files)))
        if job.form == "distributed":
            tensors = [(name, shape, dtype) for f in job.files for _, name, shape, dtype in f.parameters]
            lies = [tuple(item) for f in job.files for item in manifest.files[f.name]["items"]]
            write_atomic(folder / METADATA, distributed.metadata_bytes(tensors, lies))
        for partial in folder.rglob("*.partial"):
            partial.unlink()
        manifest.complete = True
        manifest.save()
        sync_folder(folder)
    except OSError as error:
        raise ShardplanError(f"cannot write {line(folder)}: {error.strerror or error}") from None
