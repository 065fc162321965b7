"""Boxes that every rank has for every rank, by Triton: the all-to-all of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardplan.errors import TypingError
from shardplan.fused.tiles.events import TileBox, TilePut, TileRead
from shardplan.fused.tiles.shapes import BlockShape
from shardplan.fused.triton.memory import TileMemory
from shardplan.fused.triton.move_kernel import move_kernel
from shardplan.fused.triton.options import KernelOptions

if TYPE_CHECKING:
    import torch


def move(
    memory: TileMemory,
    op: str,
    shape: BlockShape,
    g: torch.Tensor,
    boxes: Sequence[TileBox],
    options: KernelOptions | None = None,
    block: tuple[int, int] = (16, 128),
    varying: bool = False,
) -> torch.Tensor:
    """Return the blocks of all ranks, put together as `shape` says: `boxes[d]` of g [rows, columns, ...] go to rank d.

    Dims of g beyond two are whole; a process has one rank. `op` names the instance, and errors. With `varying` the
    call is not remembered, and only the first is proved. Collective; raises `TypingError` for g of one dim or virtual
    ranks, and as `FusedKernel.run`.
    """
    if memory.here != 1 or g.ndim < 2 or not g.is_contiguous():
        said = f"{list(g.shape)} of {memory.here} ranks"
        raise TypingError(f"{op}: {said}; legal is a contiguous [rows, columns, ...] of one rank a process")
    options = options or KernelOptions()
    more = tuple(g.shape[2:])
    wide = math.prod(more)
    flat = BlockShape(
        tuple((rows, columns * wide) for rows, columns in shape.extents),
        tuple(tuple((rows, (a * wide, b * wide)) for rows, (a, b) in row) for row in shape.boxes),
    )
    tiles = options.programs  # of a destination: one a program
    schedule = options.schedule(memory, move_kernel, tiles=tiles, slice=options.tiles_per_signal(tiles))
    made = options.kernel_instance(memory, op, schedule, f"{g.dtype}")
    key = (shape, tuple(boxes), tuple(g.shape))

    def detail(rank: int, program: int, event: TilePut | TileRead) -> Sequence[int] | None:
        (first, end), (left, right) = event.box
        if isinstance(event, TileRead) or first == end or left == right:
            return None
        (row, _), (column, _) = boxes[event.to]
        ahead = first - flat.boxes[rank][event.to][0][0]
        return first, end, left, right, flat.extents[event.to][1], row + ahead, column * wide

    size = max(rows * columns for rows, columns in flat.extents) * g.dtype.itemsize
    call = made.cached_call(key, lambda: made.call(move_kernel, flat, {"result": size}, detail, varying), varying)
    length = g.shape[1] * wide
    edges = [length, *(columns for _, columns in flat.extents), *(a * wide for _, (a, _) in boxes)]
    edges += [n for _, columns in flat.boxes[memory.rank0] for n in columns]
    constants = {"block_m": block[0], "block_n": block[1], "aligned": all(n % 16 == 0 for n in edges)}
    constants |= options.launch(memory, move_kernel)
    made.run(move_kernel, call, g, length, **constants)
    rows, columns = shape.extents[memory.rank0]
    return made.result(call, "result", memory.rank0, (rows, columns, *more), g.dtype).clone()
