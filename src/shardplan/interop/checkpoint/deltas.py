"""Deltas: the tensors in which a checkpoint differs from another one, as a folder that a server applies.

`reshard(..., changed_since=BASE)` writes one: only tensors whose SHA-256 differs from that of the base, which is
stored as the destination would be, and `delta.json`, with the hash of every tensor before and after. Two hashes over
all of them are the base and the version of a delta. `apply_delta` makes the version out of the base, after it has read
every byte of both: a folder beside the base, which gets its name once all of it is synced, or tensors in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.errors import BackendError, LayoutError, ParseError, ShardplanError, excerpt, line, optional
from shardplan.interop.checkpoint.filling import fill_part
from shardplan.interop.checkpoint.gather import StoredTensor, WindowGather
from shardplan.interop.checkpoint.jobs import CheckpointJob
from shardplan.interop.checkpoint.manifest import FORMAT, MANIFEST, CheckpointManifest, FormatFields, read_format
from shardplan.interop.checkpoint.output import checksum_of, sync_folder
from shardplan.interop.checkpoint.sources import FileTensor, OpenCheckpoint, open_checkpoint
from shardplan.interop.checkpoint.targets import DISTRIBUTED_FORMS
from shardplan.interop.checkpoint.windows import windows

DELTA = "delta.json"
_PIECE = 2**23  # bytes that are read at once
Hashes = list[dict[str, str]]
"""Of every place the SHA-256 of every tensor, with its dtype and shape before it."""


class _DeltaFields(FormatFields):
    """The file: of every place, by name, the hash in the base, that in the version, and the file where it changed."""

    base: str
    version: str
    places: list[dict[str, tuple[str, str, str | None]]]


@dataclass(frozen=True, slots=True)
class AppliedDelta:
    """What was applied: the version that there is now, tensors that changed, of how many, and their bytes."""

    version: str
    changed: int
    tensors: int
    nbytes: int


def version_of(hashes: Hashes) -> str:
    """Return the hash over those of all tensors of all places."""
    return hashlib.sha256(json.dumps([sorted(place.items()) for place in hashes]).encode()).hexdigest()


def _described(dtype: str, shape: tuple[int, ...], digest: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}] {digest}"


def hash_tensor(tensor: StoredTensor) -> str:
    """Return the dtype, shape and SHA-256 of a tensor that is stored."""
    found = hashlib.sha256()
    for piece in _pieces(tensor):
        found.update(piece)
    return _described(tensor.dtype_name, tuple(tensor.shape), found.hexdigest())


def _pieces(tensor: StoredTensor) -> Iterator[memoryview]:
    """The bytes of a tensor, some at a time; each is gone at the next."""
    width, total = tensor.dtype.itemsize, int(np.prod(tensor.shape, dtype=np.int64))
    some = max(1, _PIECE // width)
    buffer = memoryview(np.empty(min(some, total) * width, dtype=np.uint8))  # pyright: ignore
    for start in range(0, total, some):
        part = buffer[: min(some, total - start) * width]
        tensor.read_into(part, start)
        yield part


def hash_checkpoint(held: OpenCheckpoint) -> Hashes:
    """Return what every tensor of a checkpoint is, by place and name."""
    return [{name: hash_tensor(t) for name, t in place.items()} for place in held.places]


def delta_job(job: CheckpointJob, base: Path) -> CheckpointJob:
    """Return a job that writes only what differs from a base, with the text of its `delta.json`.

    Raises `LayoutError` for a base of other names, shapes or dtypes, and for forms and processes that write no delta.
    """
    if job.form in DISTRIBUTED_FORMS or job.share.count > 1:
        what = f"the form {job.form}" if job.form in DISTRIBUTED_FORMS else f"{job.share.count} processes"
        raise LayoutError(f"changed_since with {what}; legal are one process, and the forms of safetensors")
    target, gather = job.plan.target, WindowGather(job.window)
    with open_checkpoint(base, len(target.devices)) as held:
        held.check(target)
        before = hash_checkpoint(held)
    places: list[dict[str, tuple[str, str, str | None]]] = [{} for _ in before]
    files = list(job.files)
    buffer = np.empty(job.window, dtype=np.uint8)
    for k, file in enumerate(files):
        pieces, place = job.pieces(file.rank), target.place(file.rank)
        kept = list(file.parameters)
        for parameter, sizes in zip(file.parameters, file.sizes, strict=True):
            _, name, shape, dtype = parameter
            found = hashlib.sha256()
            for parts, used in windows([sizes], job.window):
                for part in parts:
                    fill_part(job.plan, job.held, gather, pieces, part, buffer, numpy_dtype(dtype))
                found.update(memoryview(buffer[:used]))  # pyright: ignore
            new, old = _described(dtype, shape, found.hexdigest()), before[place][name]
            places[place][name] = old, new, file.name if new != old else None
            if new == old:
                kept.remove(parameter)
        files[k] = replace(file, parameters=tuple(kept))
    after = [{name: new for name, (_, new, _) in place.items()} for place in places]
    data = {"format": FORMAT, "base": version_of(before), "version": version_of(after), "places": places}
    text = (json.dumps(data, indent=1) + "\n").encode()
    left = [(f, o) for f, o in zip(files, job.owners, strict=True) if f.parameters]
    owners = tuple(o for _, o in left)
    return replace(job, files=tuple(f for f, _ in left), owners=owners, delta=text)


def read_delta(folder: Path) -> _DeltaFields:
    """Return what a delta says, after it has read its files again.

    Raises `ParseError` for a folder that is no delta, one whose writing has not ended, and a file that was altered.
    """
    path = folder / DELTA
    if not path.is_file():
        raise ParseError(f"{line(folder)} holds no {DELTA}; legal is what reshard wrote with changed_since")
    manifest = CheckpointManifest.of(folder)
    if manifest is None or not manifest.complete:
        raise ParseError(f"the delta {line(folder)} is of a reshard that has not ended; legal is to end it first")
    data = read_format(path, _DeltaFields)
    if any(file is not None and file not in manifest.files for p in data.places for *_, file in p.values()):
        raise ParseError(f"{line(path)} names a file that was not written; legal is what reshard wrote")
    before = [{name: old for name, (old, _, _) in place.items()} for place in data.places]
    after = [{name: new for name, (_, new, _) in place.items()} for place in data.places]
    for hashes, said in ((before, data.base), (after, data.version)):
        if version_of(hashes) != said:
            raise ParseError(f"{line(path)}: its hashes are not those of {said[:16]}; legal is what reshard wrote")
    manifest.verify()
    return data


def check_base(data: _DeltaFields, hashes: Hashes, where: str) -> None:
    """Raise `LayoutError` where tensors are not those that a delta was made for: the first that differs is named."""
    for number, (place, own) in enumerate(zip(data.places, hashes, strict=False)):
        for name in dict.fromkeys([*place, *own]):
            old, new = place[name][:2] if name in place else ("none", "none")
            if (found := own.get(name, "none")) != old:
                more = ", and is of the delta's own version" if found == new else ""
                raise LayoutError(
                    f"{where}: {name} of place {number} is {_shorten_digest(found)}, and the delta is for "
                    f"{_shorten_digest(old)}{more}; legal is the base {data.base[:16]}"
                )
    if len(data.places) != len(hashes):
        raise LayoutError(f"{where} has {len(hashes)} places, and the delta {len(data.places)}; legal is its base")


def _shorten_digest(described: str) -> str:
    head, _, digest = described.rpartition(" ")
    return f"{head} {digest[:16]}" if head else digest


def _changed_tensors(data: _DeltaFields, folder: Path) -> Iterator[tuple[int, str, FileTensor]]:
    """Yield place, name and tensor of what changed, one open file at a time."""
    by_file: dict[str, list[tuple[int, str]]] = {}
    for number, place in enumerate(data.places):
        for name, (_, _, file) in place.items():
            if file is not None:
                by_file.setdefault(file, []).append((number, name))
    for file, names in by_file.items():
        with open_checkpoint(folder / file) as held:
            for number, name in names:
                tensor = held.first_tensors.get(name)
                if not isinstance(tensor, FileTensor):
                    raise ParseError(f"{line(folder / file)} lacks {name}; legal is what reshard wrote")
                yield number, name, tensor


def apply_delta(delta: str | Path, base: str | Path, destination: str | Path) -> AppliedDelta:
    """Make the version of a delta out of its base, in a new folder; the base stays as it is.

    The folder is made as `DESTINATION.partial`, with files that did not change linked where the file system links, and
    gets its name when all of it is synced and every changed tensor has been read again. A killed call leaves a partial
    folder, which the next one removes.

    Raises:
        LayoutError: a base that is another, with the first tensor that differs; a destination that is there.
        ParseError: a folder that is no delta, one that has not ended, or a file of it that was altered.
        BackendError: a disk that gives back other bytes than were written.
    """
    folder, old, into = Path(delta), Path(base), Path(destination)
    if into.exists():
        raise LayoutError(f"the destination {line(into)} is there; legal is a new folder")
    data = read_delta(folder)
    partial = into.with_name(into.name + ".partial")
    with open_checkpoint(old, len(data.places)) as held:
        check_base(data, hash_checkpoint(held), str(line(old)))
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            done = _write_version(data, folder, held, partial)
            partial.rename(into)
            sync_folder(into.parent)
        except OSError as error:
            raise ShardplanError(f"cannot write {line(partial)}: {error.strerror or error}") from None
    return done


def _write_version(data: _DeltaFields, folder: Path, held: OpenCheckpoint, partial: Path) -> AppliedDelta:
    """Fill a folder with the version: what did not change is linked, the rest copied, written over and read again."""
    changed: dict[Path, list[tuple[FileTensor, FileTensor]]] = {}
    for number, name, tensor in _changed_tensors(data, folder):
        own = held.tensor(number, name)
        if not isinstance(own, FileTensor) or own.entry.nbytes != tensor.entry.nbytes:
            raise ParseError(f"{line(folder)}: {name} has another size than in the base; legal is what reshard wrote")
        own_path, place = own.file.path, partial / own.file.path.relative_to(held.path)
        if own_path not in changed:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(own_path, place)
            changed[own_path] = []
        changed[own_path].append((tensor, own))
        with place.open("r+b") as file:
            file.seek(own.entry.begin)
            for piece in _pieces(tensor):
                file.write(piece)
    for path in sorted(p for p in held.path.rglob("*") if p.is_file()):
        to = partial / path.relative_to(held.path)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".partial" or path in changed or path.name == MANIFEST:
            continue
        try:
            os.link(path, to)
        except OSError:
            shutil.copyfile(path, to)
            _sync(to)
    for path in changed:
        _sync(partial / path.relative_to(held.path))
    if (manifest := CheckpointManifest.of(held.path)) is not None:
        for path in changed:
            size, digest = checksum_of(partial / path.relative_to(held.path))
            manifest.files[str(path.relative_to(held.path))] = {"bytes": size, "sha256": digest}
        replace(manifest, folder=partial, request=data.version).save()
    with open_checkpoint(partial, len(data.places)) as again:
        for number, place in enumerate(data.places):
            for name, (_, new, file) in place.items():
                if file is not None and hash_tensor(again.tensor(number, name)) != new:
                    raise BackendError(f"{line(partial)}: {name} was written, and another one read again")
    for path in [partial, *(p for p in partial.rglob("*") if p.is_dir())]:
        sync_folder(path)
    tensors = [t for pairs in changed.values() for t, _ in pairs]
    return AppliedDelta(data.version, len(tensors), sum(map(len, data.places)), sum(t.entry.nbytes for t in tensors))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def apply_live_delta(delta: str | Path, tensors: Mapping[str, Any], place: int = 0) -> AppliedDelta:
    """Copy what changed into tensors in memory: those of one place of the base, by name, of torch or of numpy.

    Every tensor is hashed, and every file of the delta read, before the first is written; a failure until then leaves
    the tensors as they were. While they are copied the model must not be used.

    Raises `LayoutError` where they are not the base's, with the first that differs, and `ParseError` as `apply_delta`.
    """
    folder = Path(delta)
    data = read_delta(folder)
    if not 0 <= place < len(data.places):
        raise LayoutError(f"place = {excerpt(place)}; legal are 0 to {len(data.places) - 1}")
    views = {name: _bytes_of(x) for name, x in tensors.items()}
    hashes = {n: _described(d, s, hashlib.sha256(_on_host(x)).hexdigest()) for n, (x, d, s) in views.items()}
    own = _DeltaFields(data.format, data.base, data.version, [data.places[place]])
    check_base(own, [hashes], "the tensors in memory")
    changed = 0
    nbytes = 0
    for number, name, tensor in _changed_tensors(data, folder):
        if number == place:
            at = 0
            for piece in _pieces(tensor):
                _write_bytes(views[name][0][at : at + len(piece)], piece)
                at += len(piece)
            changed, nbytes = changed + 1, nbytes + at
    return AppliedDelta(data.version, changed, len(views), nbytes)


def _bytes_of(tensor: Any) -> tuple[Any, str, tuple[int, ...]]:
    """The bytes of a contiguous tensor, flat and writable, with dtype and shape; raises `LayoutError`."""
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous or not tensor.flags.writeable:
            raise LayoutError("a tensor that is not contiguous, or not writable; legal are contiguous, writable ones")
        return tensor.reshape(-1).view(np.uint8), short_name(str(tensor.dtype)), tensor.shape
    torch = optional("torch", "torch")
    tensors: Any = optional("shardplan.execution.torch.dtypes", "torch")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
        raise LayoutError(f"{excerpt(type(tensor).__name__)}; legal are contiguous tensors of torch or numpy")
    own = tensor.detach()
    return own.view(-1).view(torch.uint8), tensors.short_name_of(own.dtype), tuple(own.shape)


def _on_host(flat: Any) -> memoryview:
    return memoryview(flat if isinstance(flat, np.ndarray) else flat.cpu().numpy())  # pyright: ignore


def _write_bytes(flat: Any, data: memoryview) -> None:
    """Write bytes over those of a tensor, of numpy or of torch."""
    held = np.frombuffer(data, dtype=np.uint8)
    flat[...] = held if isinstance(flat, np.ndarray) else optional("torch", "torch").from_numpy(held.copy())
