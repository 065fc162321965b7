"""The state of a live job on disk: a folder of torch.distributed.checkpoint, of whole tensors in the boxes of devices.

Each process writes what its devices hold, an element once; `reshard`, torch's own reader and `job_source` read it under
any layout. The folder stands under its name when all of it is there, and not before.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.box_table import strides
from shardplan.core.dtypes import itemsize, numpy_dtype
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, LayoutError, ShardplanError, excerpt, line
from shardplan.execution.live import Box, Live, Source, StateBox, state_boxes, state_names
from shardplan.interop.checkpoint.distributed import blob
from shardplan.interop.checkpoint.folders import METADATA, metadata_bytes
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.output import OutputFile, sync_folder
from shardplan.interop.checkpoint.sources import OpenCheckpoint
from shardplan.plans.plan_file import write_atomic
from shardplan.strategy.partition.job import Job
from shardplan.strategy.training import MASTER

WINDOW = 8 * 2**20  # bytes that are read at once, where that is cheaper than a run at a time
CHUNK = 32 * 2**20  # bytes of a chunk, each of which torch.save copies


def written_boxes(job: Job) -> dict[int, list[StateBox]]:
    """Return by device the boxes that it writes: of devices that hold one box, who writes least by then."""
    holders: dict[tuple[str, Box], list[StateBox]] = {}
    for each in state_boxes(job):
        if all(a < b for a, b in each.box):
            holders.setdefault((each.name, each.box), []).append(each)
    load: dict[int, int] = {}
    out: dict[int, list[StateBox]] = {}
    for held in holders.values():
        one = min(held, key=lambda x: load.get(x.device, 0))
        load[one.device] = load.get(one.device, 0) + math.prod(b - a for a, b in one.box)
        out.setdefault(one.device, []).append(one)
    return out


def _chunks(each: StateBox, dtype: str) -> list[Box]:
    """A box in runs of rows of at most `CHUNK` bytes."""
    if not each.box:
        return [each.box]
    (low, high), *rest = each.box
    some = max(1, CHUNK // max(1, itemsize(dtype) * math.prod(b - a for a, b in rest)))
    return [((at, min(at + some, high)), *rest) for at in range(low, high, some)]


def write_state(live: Live, folder: str | Path) -> None:
    """Write the state of a live job to a new folder, which all its processes see.

    It is written as `FOLDER.partial`, whose name is the folder's once every process has synced what it wrote: a folder
    that was saved before stays as it is, whatever happens. Each process has 32 MiB and a copy of it in memory beside.

    Raises `LayoutError` where the folder exists, and `ShardplanError` on every process where one cannot write.
    """
    place = Path(folder)
    partial = place.with_name(place.name + ".partial")
    first = live.holds(min(written_boxes(live.job)))

    def begin() -> None:
        if place.exists():
            raise LayoutError(f"save to {line(place)}, which is there; legal is a new folder, so that none is lost")
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def end() -> None:
        if first:
            rows = [tuple(row) for path in sorted(partial.glob("*.json")) for row in json.loads(path.read_bytes())]
            types = live.job.model.program.types
            tensors = [(n, types[n].shape, types[n].dtype) for n in state_names(live.job)]
            write_atomic(partial / METADATA, metadata_bytes(tensors, rows))
            for path in partial.glob("*.json"):
                path.unlink()
            partial.rename(place)
            sync_folder(place.parent)

    for part in (begin, lambda: _write_boxes(live, partial), end):
        problem: BaseException | None = None
        try:
            part()
        except OSError as error:
            problem = ShardplanError(f"cannot write {line(partial)}: {error.strerror or error}")
        except ShardplanError as error:
            problem = error
        told = live.vote(problem is not None)
        if problem is not None:
            raise problem
        if any(told):
            raise BackendError(f"save to {line(place)}: the process of device {told.index(1)} of {len(told)} could not")


def _write_boxes(live: Live, folder: Path) -> None:
    """Write what this process writes: of each of its devices a file, and where in it every chunk lies."""
    types = live.job.model.program.types
    for device, boxes in written_boxes(live.job).items():
        if not live.holds(device):
            continue
        rows: list[list[Any]] = []
        name = f"__{device}_0.distcp"
        with OutputFile(folder / name, [np.empty(0, np.uint8) for _ in range(2)]) as out:
            for each in boxes:
                shard = live.shard(each)
                for chunk in _chunks(each, types[each.name].dtype):
                    turn = out.buffer()  # at most two chunks are under way
                    own = tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(chunk, each.box, strict=True))
                    data = blob(np.ascontiguousarray(shard[own]).reshape([b - a for a, b in chunk]))
                    ends = [a for a, _ in chunk], [b - a for a, b in chunk]
                    rows.append([each.name, *ends, name, out.size, len(data)])
                    out.put(data, turn)
            out.finish()
        write_atomic(folder / f"__{device}.json", json.dumps(rows).encode())


def arrays_source(job: Job, arrays: Mapping[str, Any]) -> Source:
    """Return what gives boxes of global arrays by name; raises `LayoutError` for arrays that are not a job's state."""
    types = job.model.program.types
    found = {name: np.asarray(x) for name, x in arrays.items()}
    _check_names(job, found, {n: (x.shape, x.dtype) for n, x in found.items()}, "the state")

    def box_of(name: str, t: TensorType, box: Box) -> np.ndarray:
        of = _first_of(job, name, found)
        if of is None:
            return np.zeros([b - a for a, b in box], numpy_dtype(types[name].dtype))
        return found[of][tuple(slice(a, b) for a, b in box)].astype(numpy_dtype(t.dtype))

    return box_of


def folder_source(job: Job, held: OpenCheckpoint) -> Source:
    """Return what reads boxes of a checkpoint; raises `LayoutError` for one that is not a job's state."""
    if len(held.places) > 1:
        raise LayoutError(
            f"start from {line(held.path)}, {held.form} of {len(held.places)} devices; legal is a folder that save "
            "wrote, or whole tensors (shardplan reshard makes them: form plain or distributed)"
        )
    found, gather = held.first_tensors, WindowGather(WINDOW)
    _check_names(job, found, {n: (tuple(x.shape), x.dtype) for n, x in found.items()}, line(held.path))

    def box_of(name: str, t: TensorType, box: Box) -> np.ndarray:
        shape, of = tuple(b - a for a, b in box), _first_of(job, name, found)
        into = np.zeros(shape, numpy_dtype(t.dtype))
        if of is not None and into.size:
            at = sum(a * n for (a, _), n in zip(box, strides(t.shape), strict=True))
            gather.fill(into.reshape(-1), found[of], shape, (strides(t.shape), strides(shape)), (at, 0), 0)
        return into

    return box_of


def _first_of(job: Job, name: str, found: Collection[str]) -> str | None:
    """What an input begins as: itself; without it a master as its parameter, and what an optimizer keeps as zeros."""
    plain = name.removesuffix(f".{MASTER}")
    return next((n for n in (name, plain) if n in found), None)


def _check_names(
    job: Job, found: Collection[str], types: Mapping[str, tuple[tuple[int, ...], Any]], where: str
) -> None:
    """Refuse what lacks a parameter, or some of what lives beside parameters but not all, or has another shape."""
    names, model = state_names(job), job.model
    beside = [n for n in names if n not in model.parameters]
    wanted = [n for n in names if n in model.parameters or any(b in found for b in beside)]
    if lacking := [n for n in wanted if n not in found]:
        raise LayoutError(
            f"start from {where}: no {lacking[0]} ({len(lacking)} of {len(wanted)} are missing); legal are all "
            f"parameters, and beside them all or nothing: {excerpt(', '.join(wanted))}"
        )
    strange = sorted(set(found) - set(names))
    if strange and model.fields["training"]:  # a forward pass has no use for what an optimizer keeps
        raise LayoutError(f"start from {where}: {strange[0]} is no state of {model.name}; legal are {', '.join(names)}")
    for name in wanted:
        t, (shape, dtype) = model.program.types[name], types[name]
        if shape != t.shape or dtype != numpy_dtype(t.dtype):
            raise LayoutError(
                f"start from {where}: {name} is of dtype {dtype} and shape {shape}; legal is "
                f"{numpy_dtype(t.dtype)} and {t.shape}"
            )
