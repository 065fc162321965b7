"""`reshard`: a checkpoint on disk to another storage, by byte ranges, within a memory limit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.errors import LayoutError, ParseError, ShardplanError, line
from shardplan.hardware.units import format_bytes, limit_of
from shardplan.interop.checkpoint.companion_files import files_beside, write_beside, write_megatron
from shardplan.interop.checkpoint.conversion_sides import (
    AskedConfig,
    fused_alike,
    recorded_weights,
    source_weights,
    target_weights,
)
from shardplan.interop.checkpoint.deltas import DELTA, delta_job
from shardplan.interop.checkpoint.filling import fill_file
from shardplan.interop.checkpoint.folders import METADATA, metadata_bytes
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.jobs import CheckpointJob, Progress, Reshared, ResharedFile, job_of
from shardplan.interop.checkpoint.layouts import layout_weights
from shardplan.interop.checkpoint.manifest import CheckpointManifest, has_unfinished_run, resume_manifest
from shardplan.interop.checkpoint.output import OutputFile
from shardplan.interop.checkpoint.replicas import compare_copies
from shardplan.interop.checkpoint.settings_files import WrittenSettings, written_settings
from shardplan.interop.checkpoint.sharing import ProcessMeeting, ProcessShare, launched_share, note_path, notes_of
from shardplan.interop.checkpoint.sources import INDEX, open_checkpoint
from shardplan.interop.checkpoint.storage_detection import whole_weights
from shardplan.interop.checkpoint.targets import DISTRIBUTED_FORMS, LARGEST_FILE, index_bytes
from shardplan.interop.safetensors import sync_folder
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights
from shardplan.plans.plan_file import write_atomic

TIMEOUT = 300.0  # seconds


@dataclass(frozen=True, slots=True)
class ReshardWork:
    """What a run is given beside its job: what stands beside, how long others may be silent, whom to tell."""

    beside: dict[str, Path]
    config: AskedConfig
    timeout: float
    progress: Progress | None
    replicas: bool
    settings: WrittenSettings


def reshard(
    source: str | Path,
    destination: str | Path,
    layouts: str | Path | None = None,
    memory_limit: float | str = "1 GB",
    source_layouts: str | Path | None = None,
    *,
    from_: Weights | str | None = None,
    to: Weights | str | None = None,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    from_dtype: str | None = None,
    form: str = "auto",
    largest_file: float | str = LARGEST_FILE,
    ignore: Iterable[str] = (),
    drop: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
    changed_since: str | Path | None = None,
    dry_run: bool = False,
    verify: bool = True,
    compare_replicas: bool = True,
    progress: Progress | None = None,
    process: tuple[int, int] | None = None,
    timeout: float = TIMEOUT,
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
        from_: how the source stores the model, as weights or text; the places of its mesh are its files, or folders, in
            order. Without it, where `to` is text, it is found by the tensors' names and shapes.
        to: how the destination is to store it: weights, in the dtype that they say, or text, `"vllm,tp=8"`.
        config: the model's config.json, or its folder; else that beside the source.
        tokenizer: a folder of a tokenizer's files; else those beside the source or the config.
        overrides: fields that win over the config's, which sides that are text read and the destination gets.
        dtype: the dtype of a destination that is text; else every parameter keeps its own.
        from_dtype: that of a source that is text; else that which its files say.
        form: `plain` (files with an index where one gets too large), `devices` (a file a device), `ranks` (a folder a
            rank), `parts` (vLLM's sharded state), `distributed` (a folder of torch.distributed.checkpoint, of any
            number of devices, each of which writes its boxes of the whole tensors), `megatron` (such a folder with
            what Megatron-Core asks for beside it), or `auto`: that of a framework's word, else plain for one device.
        largest_file: bytes of a file where the form is plain or distributed, or text of them.
        ignore: names of tensors of the source that no table has, and that are left out; patterns with `*`, too.
        drop: tensors that the destination need not take, logical or as the source stores them; patterns with `*`, too.
        differ: fields of the configs (`rope_theta`) in which the sides may differ.
        changed_since: a checkpoint that is stored as the destination would be; only tensors that differ from its own
            are written, as a delta, which `apply_delta` applies to it.
        dry_run: say what would be done, and write nothing.
        verify: whether checksums that the source has recorded are verified before it is read.
        compare_replicas: whether copies of one element in the source must be equal; else one of them is taken.
        progress: called with bytes done, bytes to do of this process, and what is being done.
        process: which of how many processes this is: (0, 1) for one that does all; None for what the launcher says
            (torchrun, or mpiexec of MPICH or Open MPI), and alone without one. Each writes its part of the files, by
            bytes, and returns when all is there; they meet in the destination, and nowhere else.
        timeout: seconds that another process may give no sign.

    Raises:
        LayoutError: sides that do not fit, tensors that the destination does not take, or a source that is not what
            `from_` says: every name at once; copies of an element that differ.
        ParseError: a source that is no checkpoint, breaks its format, or does not have its recorded checksum.
        Infeasible: a memory limit that is too small; it names the least.
        BackendError: a disk that gives back other bytes than were written, or another process that failed.
        TimedOut: another process that did not come, or gave no sign.
    """
    started = time.perf_counter()
    place, into = Path(source), Path(destination)
    if place.resolve() == into.resolve():
        raise LayoutError(f"source and destination are both {line(into)}; legal is another folder")
    if place.is_dir() and has_unfinished_run(place):
        raise ParseError(f"the source {line(place)} is of a reshard that has not ended; legal is to end it first")
    if not timeout > 0:
        raise LayoutError(f"timeout = {timeout}; legal are seconds above 0")
    asked = AskedConfig.find(place, config, overrides)
    files = files_beside(place, asked, None if tokenizer is None else Path(tokenizer))
    if isinstance(to, str):
        if source_layouts is None and not isinstance(from_, Weights):
            from_ = source_weights(place, from_, asked, from_dtype, tuple(ignore), True)
        if not isinstance(from_, Weights):
            raise LayoutError(f"to = {to!r} of a source with a file of layouts; legal is from_ with its table")
        to, own_form = target_weights(to, from_, asked, dtype)
        form = own_form if form == "auto" else form
    if isinstance(from_, str):
        from_ = source_weights(place, from_, asked, from_dtype, tuple(ignore))
    source_side, target_side = sides_of(place, (from_, source_layouts), (to, layouts))
    source_side = fused_alike(source_side, target_side)
    limit = limit_of("memory limit", memory_limit)
    assert limit is not None
    share = launched_share(os.environ) if process is None else ProcessShare(*process)
    ignored = tuple(ignore)
    with open_checkpoint(place, len(source_side.devices), ignored) as held:
        own = held.side(source_side)
        held.check(own, ignored)
        limits = limit, limit_of("largest file", largest_file) or LARGEST_FILE
        job = job_of(refit(own, target_side, drop=drop, differ=differ), held, into, form, limits, share)
        if changed_since is not None:
            job, files = delta_job(job, Path(changed_since)), {}
        settings = written_settings(job, ignored)
        owners = zip(job.files, job.owners, strict=True)
        done, count = [], 0
        if dry_run:
            done = [ResharedFile(f.name, f.nbytes, job.needs(f), False, owner, job.parts(f)) for f, owner in owners]
        else:
            recorded = CheckpointManifest.of(place) if verify and place.is_dir() else None
            done, count = _run(job, recorded, ReshardWork(files, asked, timeout, progress, compare_replicas, settings))
    total, seconds = sum(f.nbytes for f in done), time.perf_counter() - started
    return Reshared(
        job.plan,
        job.form,
        tuple(done),
        total,
        job.memory,
        job.least,
        count,
        seconds,
        share.count,
        tuple(files),
        settings.left,
    )


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
            first = whole_weights(held, None if file is None else Path(file))
    if second is None:
        assert wanted is not None
        tensors = {f.entry.name: (_global_shape(first, k), f.dtype) for k, f in enumerate(first.families)}
        second = layout_weights(Path(wanted), tensors)
    return first, second


def _global_shape(weights: Weights, family: int) -> tuple[int, ...]:
    """Return the whole shape of what is stored under one name."""
    found = weights.families[family]
    if len(found.tensors) != 1 or found.names:
        raise LayoutError(
            f"a file of layouts for {weights.table.name or 'a table'}, which joins tensors ({found.entry.name}); legal "
            "is a table at both ends"
        )
    (name,) = found.tensors
    return tuple(weights.tensors[name].sizes)


def _run(job: CheckpointJob, held: CheckpointManifest | None, work: ReshardWork) -> tuple[list[ResharedFile], int]:
    """Write every file of this process that is not finished, and close when all have; returns files and bytes read."""
    manifest = resume_manifest(job.destination, job.request(), job.form, str(job.plan.target))
    together = ProcessMeeting(job.destination, job.share, manifest.request, work.timeout)
    try:
        if held is not None:
            held.verify(job.share, together.beat)
        gather = WindowGather(job.window)
        if work.replicas and not manifest.complete:
            own = job.plan.source.devices[job.share.number :: job.share.count]
            compare_copies(job.plan, job.held, own, gather, together.beat)
        together.note.verified = True
        together.save()
        while not manifest.complete and (late := together.late_processes("verified")):
            together.wait(late)
        written = _write(job, manifest, gather, together, work.progress)
        together.note.complete = True
        together.save()
        _close(job, manifest, together, work)
    except BaseException as error:
        together.fail(error)
        raise
    together.leave()
    owners = zip(job.files, job.owners, strict=True)
    return [ResharedFile(f.name, f.nbytes, job.needs(f), f.name not in written, owner) for f, owner in owners], (
        gather.bytes_read
    )


def _write(
    job: CheckpointJob,
    manifest: CheckpointManifest,
    gather: WindowGather,
    together: ProcessMeeting,
    progress: Progress | None,
) -> set[str]:
    """Write what is not finished of this process's files; returns the names of those, and of all unrecorded others."""
    alone = job.share.count == 1
    if alone:
        manifest.save()
    buffers = [np.empty(job.window, dtype=np.uint8) for _ in range(2)]
    total, done, begun = sum(f.nbytes for f in job.mine), 0, time.perf_counter()
    written, names = 0, {f.name for f in job.files if f.name not in manifest.files}

    def tell(name: str, more: int) -> None:
        nonlocal written
        written += more
        together.beat()
        if progress is not None:
            rate = written / max(time.perf_counter() - begun, 1e-9)
            progress(done + written, total, f"{format_bytes(rate)}/s {name}")

    for file in job.mine:
        path = job.destination / file.name
        if manifest.is_file_finished(file.name, together.beat):
            done += file.nbytes
            together.note.files[file.name] = manifest.files[file.name]
            continue
        names.add(file.name)
        if path.parent != job.destination:
            path.parent.mkdir(exist_ok=True)
            sync_folder(job.destination)
        path.unlink(missing_ok=True)  # what is recorded and wrong: nobody takes it for finished
        with OutputFile(path, buffers, together.beat) as out:
            items = fill_file(job, gather, file, out, lambda more, name=file.name: tell(name, more))
            size, checksum = out.finish()
        manifest.files[file.name] = {"bytes": size, "sha256": checksum, **({"items": items} if items else {})}
        together.note.files[file.name] = manifest.files[file.name]
        manifest.save() if alone else together.save()
    return names


def _close(job: CheckpointJob, manifest: CheckpointManifest, together: ProcessMeeting, work: ReshardWork) -> None:
    """Wait until every process has written its part; the first one then writes what says that all is there."""
    first = job.share.number == 0
    while True:
        late = [] if manifest.complete else together.late_processes("complete")
        for note in notes_of(job.destination).values() if job.share.count > 1 else ():
            manifest.files |= note.files
        missing = [k for k, f in enumerate(job.files) if not manifest.stands(f.name)]
        if not first:
            found = CheckpointManifest.of(job.destination)
            if found is not None and found.complete and all(found.stands(f.name) for f in job.files):
                return
            late = [*late, 0]
        elif not late and not missing:
            return _end(job, manifest, work)
        together.wait(sorted({*late, *(job.owners[k] for k in missing)}))


def _end(job: CheckpointJob, manifest: CheckpointManifest, work: ReshardWork) -> None:
    """Write the config, then the index, then the manifest; take away what only said how far it was."""
    folder = job.destination
    manifest.files = {f.name: manifest.files[f.name] for f in job.files}
    try:
        write_beside(folder, work.beside, work.config, job.plan.target.dtype)
        if job.delta:
            write_atomic(folder / DELTA, job.delta)
        elif job.form == "plain" and len(job.files) > 1:
            write_atomic(folder / INDEX, index_bytes(list(job.files)))
        if job.form in DISTRIBUTED_FORMS:
            tensors = list(dict.fromkeys((b.name, b.whole, b.dtype) for f in job.files for b in f.boxes))
            lies = [tuple(item) for f in job.files for item in manifest.files[f.name]["items"]]
            own = folder / DISTRIBUTED_FORMS[job.form]
            write_atomic(own / METADATA, metadata_bytes(tensors, lies, work.settings.write_objects(own)))
        if job.form == "megatron":
            write_megatron(folder, work.settings.common)
        if not manifest.complete:  # else another process may be at work on a file that was found wrong
            for partial in folder.rglob("*.partial"):
                partial.unlink()
        manifest.complete = True
        manifest.save()
        for number in notes_of(folder):
            note_path(folder, number).unlink(missing_ok=True)
        sync_folder(folder)
    except OSError as error:
        raise ShardplanError(f"cannot write {line(folder)}: {error.strerror or error}") from None
