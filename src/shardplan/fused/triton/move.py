"""Blocks that every rank has for every rank, by Triton: the all-to-all of gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardplan.errors import TypingError
from shardplan.fused.tiles.shapes import BlockCuts
from shardplan.fused.triton.blocks import block_kernel
from shardplan.fused.triton.memory import TileMemory
from shardplan.fused.triton.move_kernel import move_kernel
from shardplan.fused.triton.options import KernelOptions

if TYPE_CHECKING:
    import torch


def move(
    memory: TileMemory,
    op: str,
    cuts: BlockCuts,
    g: torch.Tensor,
    options: KernelOptions | None = None,
    block: tuple[int, int] = (16, 128),
    varying: bool = False,
) -> torch.Tensor:
    """Return the blocks of all ranks of g [rows, columns, ...], put together as `cuts` say.

    Dims of g beyond two are whole; a process has one rank. `op` names the instance, and errors. With `varying` the
    cuts are not remembered. Collective; raises `TypingError` for g of one dim or virtual ranks, and as `BlockKernel`.
    """
    if memory.here != 1 or g.ndim < 2 or not g.is_contiguous():
        said = f"{list(g.shape)} of {memory.here} ranks"
        raise TypingError(f"{op}: {said}; legal is a contiguous [rows, columns, ...] of one rank a process")
    options = options or KernelOptions()
    more = tuple(g.shape[2:])
    wide = math.prod(more)
    made = block_kernel(memory, op, options.programs, str(g.dtype), options.seconds)
    call = made.call(cuts.of_numbers(wide), g.dtype, varying)
    columns = g.shape[1] * wide
    constants = {"block_m": block[0], "block_n": block[1], "aligned": call.aligned and columns % 16 == 0}
    found = made.run(move_kernel, call, g, columns, **constants, **options.launch(memory, move_kernel))
    return found[0].view(cuts.result(memory.rank0) + more)
