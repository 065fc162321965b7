"""`grouped_gemm_all_to_all` by Triton: several experts a rank, their rows counted on the device, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardplan.errors import optional
from shardplan.fused.tiles.shapes import BlockCuts
from shardplan.fused.triton.blocks import block_kernel
from shardplan.fused.triton.grouped_kernel import grouped_kernel
from shardplan.fused.triton.memory import TileMemory
from shardplan.fused.triton.move import move
from shardplan.fused.triton.move_kernel import move_kernel
from shardplan.fused.triton.options import KernelOptions
from shardplan.fused.triton.product_tiles import ProductTile

if TYPE_CHECKING:
    import torch

NAME = "grouped_gemm_all_to_all"


def gather_counts(memory: TileMemory, op: str, counts: torch.Tensor, options: KernelOptions) -> torch.Tensor:
    """Return the counts [E, W] of all ranks, int64 [W, E, W]; collective, and the host waits for nothing."""
    cuts = BlockCuts("whole", ((1,) * memory.ranks,), counts.numel())
    found = move(memory, f"{op} counts", cuts, counts.contiguous().view(1, -1), options)
    return found.view(memory.ranks, *counts.shape)


def matrix_of(every: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return how many rows of whom go to whom, as kernels read cuts, each result cut off at its capacity."""
    torch = optional("torch", "torch")
    ends = every.sum(1).cumsum(0).clamp(max=capacity)
    return torch.cat([torch.diff(ends, dim=0, prepend=torch.zeros_like(ends[:1])).reshape(-1), ends.new_zeros(1)])


def grouped_multiply(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    tile: ProductTile,
    options: KernelOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `operators.grouped.grouped_multiply`; collective. Raises as `BlockKernel.run`."""
    made = block_kernel(memory, NAME, options.programs, str(a.dtype), options.seconds)
    every, depth, columns = gather_counts(memory, NAME, counts, options), a.shape[1], b.shape[2]
    call = made.call_on_device(matrix_of(every, capacity), capacity, columns, a.dtype)
    made.record.lengths, made.record.indexed = [capacity, len(a)], "the rows of a result, or of a"
    told, operands = options.product(memory, grouped_kernel, tile, a, b, True)
    constants: dict[str, Any] = told | {
        "experts": b.shape[0],
        "numbers": 1 << (every[:, :, 0].numel() - 1).bit_length(),
    }
    arguments = (*operands, every, len(a), depth, columns, capacity, call.out)
    (out,) = made.run(grouped_kernel, call, *arguments, **constants)
    return out, every[:, :, memory.rank0].clone()


def move_back(
    memory: TileMemory, g: torch.Tensor, counts: torch.Tensor, most: int, options: KernelOptions
) -> torch.Tensor:
    """Return the rows of g that this rank's experts made, by destination and expert, of at most `most`; collective."""
    op, columns = f"{NAME}_backward", g.shape[1]
    made = block_kernel(memory, op, options.programs, str(g.dtype), options.seconds)
    every = gather_counts(memory, op, counts, options)
    sums = matrix_of(every, len(g))[:-1].view(memory.ranks, memory.ranks)
    call = made.call_on_device(matrix_of(sums.t()[:, None], most), most, columns, g.dtype)
    constants = {"block_m": 16, "block_n": 128, "aligned": columns % 16 == 0}
    (out,) = made.run(move_kernel, call, g, columns, **constants, **options.launch(memory, move_kernel))
    return out
