"""Windows and files filled: what every byte of a destination is, from the pieces of the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.dtypes import itemsize, numpy_dtype
from shardplan.interop.checkpoint import distributed
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.jobs import CheckpointJob
from shardplan.interop.checkpoint.output import OutputFile
from shardplan.interop.checkpoint.sources import OpenCheckpoint
from shardplan.interop.checkpoint.targets import DISTRIBUTED_FORMS, TargetFile
from shardplan.interop.checkpoint.windows import PiecesOf, WindowPart, windows
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.weights import names_of


def fill_file(
    job: CheckpointJob, gather: WindowGather, file: TargetFile, out: OutputFile, tell: Callable[[int], None]
) -> list[list[Any]]:
    """Put every byte of a file; returns where the chunks lie, of a folder of torch.distributed.checkpoint."""
    pieces = job.pieces(file.rank)
    dtypes = {number: numpy_dtype(dtype) for number, _, _, dtype in file.parameters}
    if job.form in DISTRIBUTED_FORMS:
        return _fill_chunks(job, gather, file, out, tell, pieces)
    out.put(file.header(job.destination))
    for parts, used in windows(file.sizes, job.window):
        buffer = out.buffer()
        for part in parts:
            fill_part(job.plan, job.held, gather, pieces, part, buffer, dtypes[part.parameter])
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
    items: list[list[Any]] = []
    for box in file.boxes:
        row, width = int(np.prod(box.shape[1:], dtype=np.int64)), itemsize(box.dtype)
        rows = max(job.window // max(row * width, 1), 1)
        count = box.sizes[0] if box.sizes else 1  # what lies beyond the whole tensor is not written
        for first in range(0, count, rows):
            some = min(rows, count - first)
            buffer = out.buffer()
            part = WindowPart(box.number, first * row, (first + some) * row, 0)
            fill_part(job.plan, job.held, gather, pieces, part, buffer, numpy_dtype(box.dtype))
            held = buffer[: some * row * width].view(numpy_dtype(box.dtype))
            offsets, sizes = list(box.offsets), list(box.sizes)
            if box.shape:
                offsets[0], sizes[0] = offsets[0] + first, some
                held = held.reshape((some, *box.shape[1:]))[tuple(slice(n) for n in sizes)]
            data = distributed.blob(np.ascontiguousarray(held).reshape(sizes))
            items.append([box.name, offsets, sizes, Path(file.name).name, out.size, len(data)])
            out.put(data, buffer)
            tell(held.nbytes)
    return items


def fill_part(
    plan: RefitPlan,
    held: OpenCheckpoint,
    gather: WindowGather,
    pieces: PiecesOf,
    part: WindowPart,
    buffer: np.ndarray,
    dtype: np.dtype[Any],
) -> None:
    """Fill a part of a parameter within a buffer; padding is zero."""
    into = buffer[part.at : part.at + (part.hi - part.lo) * dtype.itemsize].view(dtype)
    mine = list(pieces.pieces_within(part))
    if sum(int(np.prod(sizes)) for _, sizes, *_ in mine) < part.hi - part.lo:
        into[...] = 0
    r = pieces.regions
    for k, sizes, s, t, s_at, t_at in mine:
        move = plan.moves[int(r.move[k])]
        source, target = plan.source.families[move.source_family], plan.target.families[move.target_family]
        rank = int(r.source[k])
        name = names_of(plan.source, rank)[int(r.source_parameter[k])]
        tensor = held.tensor(plan.source.place(rank), name)
        gather.fill(into, tensor, sizes, (s, t), (s_at, t_at - part.lo), source.entry.plus - target.entry.plus)
