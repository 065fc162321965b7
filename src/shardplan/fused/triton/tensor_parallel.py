"""`all_gather_gemm` and `gemm_reduce_scatter` by Triton: rows that are multiplied, addends that are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardplan.errors import optional
from shardplan.fused.tiles.shapes import BlockCuts
from shardplan.fused.triton.blocks import BoundKernel, block_kernel
from shardplan.fused.triton.gather_kernel import gather_kernel
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.memory import TileMemory
from shardplan.fused.triton.move_kernel import move_kernel
from shardplan.fused.triton.options import KernelOptions
from shardplan.fused.triton.product_tiles import ProductTile

if TYPE_CHECKING:
    import torch

GATHER, SCATTER = "all_gather_gemm", "gemm_reduce_scatter"


def gather_multiply(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    cuts: BlockCuts,
    tile: ProductTile,
    options: KernelOptions | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each rank here the rows of all ranks times b [here, K, N], and these rows: [here, M, N], [here, M, K].

    `a` [rows, K] are those of all ranks here, one rank's after the other's; cuts are of the `whole`. Collective; raises
    as `BlockKernel.run`.
    """
    torch = optional("torch", "torch")
    options = options or KernelOptions()
    made = block_kernel(memory, GATHER, options.programs, str(a.dtype), options.seconds)
    call = made.call(cuts, a.dtype)
    depth, columns, height = a.shape[1], b.shape[2], sum(cuts.counts[0])
    out = torch.empty((memory.here, height, columns), dtype=a.dtype, device=memory.device)
    rows = call.out.view(memory.here, height, depth)
    told, (_, b) = options.product(memory, gather_kernel, tile._replace(described=False), a, b, call.aligned)
    del told["described"]  # rows lie in slots of the heap
    reading = BoundKernel(gather_kernel, (out, rows, height, b, depth, columns), told)
    even = {"block_m": 16, "block_n": 128, "aligned": told["aligned"]}
    own = options.launch(memory, move_kernel)
    made.run(move_kernel, call, a, depth, reader=reading, **even, **own)
    return out, rows


def multiply_scatter(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    cuts: BlockCuts,
    tile: ProductTile,
    options: KernelOptions | None = None,
) -> list[torch.Tensor]:
    """Return for each rank here its rows of the sum over ranks of a [M, K] times b [here, K, N], in a's dtype.

    `a` [here * M, K]; cuts are `rows`, the same of every rank. Addends are f32, added up in a fixed order. Collective;
    raises as `BlockKernel.run`.
    """
    torch = optional("torch", "torch")
    options = options or KernelOptions()
    made = block_kernel(memory, SCATTER, options.programs, str(a.dtype), options.seconds)
    call = made.call(cuts, torch.float32, adds=True)
    depth, columns = a.shape[1], b.shape[2]
    told, operands = options.product(memory, gemm_kernel, tile, a, b, call.aligned)
    constants: dict[str, Any] = told | {"biased": False, "activation": 0, "stamped": 0}
    arguments = (*operands, a, call.cuts, depth, columns, call.out)
    found = made.run(gemm_kernel, call, *arguments, **constants)
    return [each.to(a.dtype) for each in found]
