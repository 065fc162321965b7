"""`gemm_all_to_all` by Triton: a product whose blocks go to their ranks tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import TypingError, excerpt
from shardplan.fused.heap.symmetric import SymmetricTensor
from shardplan.fused.kernels.activation import ACTIVATIONS
from shardplan.fused.tiles.shapes import BlockCuts, splits, tile_sizes
from shardplan.fused.triton.blocks import block_kernel
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.memory import TileMemory
from shardplan.fused.triton.options import KernelOptions
from shardplan.fused.triton.product_tiles import MIDDLE, ProductTile

if TYPE_CHECKING:
    import torch

NAME = "gemm_all_to_all"


def gemm_all_to_all(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    cuts: BlockCuts | Sequence[Sequence[int]],
    scatter: int = 0,
    activation: str = "none",
    tile: ProductTile = MIDDLE,
    options: KernelOptions | None = None,
    parts: Sequence[int] | None = None,
    varying: bool = False,
    out: SymmetricTensor | None = None,
) -> list[torch.Tensor]:
    """Return the results of the ranks here: what all ranks computed for each.

    `a` are the rows [M, K] of all ranks here, one rank's after the other's; `b` [here, K, N], `bias` [here, N]. Of
    `scatter` 0 counts `cuts[s][d]` rows of rank s go to rank d, in order; of 1 `cuts[s][0]` are the rows of rank s, and
    columns go by `parts`, or by the tiling rule. `tile` is a `ProductTile`.
    With `varying`, for counts that data decides, they are not remembered. With `out` the result is there until the next
    call that writes it. Collective; raises `TypingError` where operands do not fit; a wait that ends before its signal
    is a `FusedTimeout` of the next call, or of `SymmetricHeap.check`.
    """
    given = (cuts, scatter, activation, tile, options, parts, varying, out)
    made, call, (arguments, constants, _) = gemm_prepared(memory, a, b, bias, *given)
    return made.run(gemm_kernel, call, *arguments, **constants)


def gemm_prepared(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    cuts: BlockCuts | Sequence[Sequence[int]],
    scatter: int,
    activation: str,
    tile: ProductTile,
    options: KernelOptions | None,
    parts: Sequence[int] | None = None,
    varying: bool = False,
    out: SymmetricTensor | None = None,
) -> Any:
    """Return the instance, the call, and the kernel's arguments, constants and results' shapes: `gemm_all_to_all`."""
    options = options or KernelOptions()
    if not isinstance(cuts, BlockCuts):
        cuts = _cuts_of(memory, b, cuts, scatter, parts)
    _check_gemm(memory, a, b, cuts, activation)
    columns, depth = b.shape[2], a.shape[1]
    made = block_kernel(memory, NAME, options.programs, str(a.dtype), options.seconds, out)
    call = made.call(cuts, a.dtype, varying)
    told, operands = options.product(memory, gemm_kernel, tile, a, b, call.aligned)
    constants = told | {"biased": bias is not None, "activation": ACTIVATIONS.index(activation), "stamped": 0}
    arguments = (
        *operands,
        a if bias is None else bias,
        call.cuts,
        depth,
        columns,
        call.out,
    )  # nothing is stored in cuts
    here = range(memory.rank0, memory.rank0 + memory.here)
    return made, call, (arguments, constants, [(rank, cuts.result(rank)) for rank in here])


def _cuts_of(
    memory: TileMemory, b: torch.Tensor, counts: Sequence[Sequence[int]], scatter: int, parts: Sequence[int] | None
) -> BlockCuts:
    if len(counts) != memory.ranks or scatter not in (0, 1):
        said = f"counts of {len(counts)} ranks, scatter {excerpt(scatter)}"
        raise TypingError(f"{NAME}: {said}; legal are {memory.ranks}, 0 or 1")
    if scatter == 0:
        if parts is not None:
            raise TypingError(f"{NAME}: parts {list(parts)} of blocks of rows; legal with scatter 0 are none")
        return BlockCuts("rows", tuple(tuple(int(n) for n in c) for c in counts), b.shape[2])
    widths = splits(f"{NAME}: parts", parts, memory.ranks, b.shape[2]) or tile_sizes(b.shape[2], memory.ranks)
    return BlockCuts("stack", (tuple(int(c[0]) for c in counts), tuple(widths)))


def _check_gemm(memory: TileMemory, a: torch.Tensor, b: torch.Tensor, cuts: BlockCuts, activation: str) -> None:
    rows = sum([cuts.count_rows(rank) for rank in range(memory.rank0, memory.rank0 + memory.here)])
    fits = a.ndim == 2 and b.ndim == 3 and a.shape[0] == rows and b.shape[:2] == (memory.here, a.shape[1])
    if not fits or a.dtype != b.dtype or not (a.is_contiguous() and b.is_contiguous()):
        said = f"{list(a.shape)} and {list(b.shape)} for {rows} rows of {memory.here} ranks"
        raise TypingError(f"{NAME}: {said}; legal are [rows, K] and [ranks, K, N] of one dtype, contiguous")
    if activation not in ACTIVATIONS:
        raise TypingError(f"{NAME}: activation {excerpt(activation)}; legal are {', '.join(ACTIVATIONS)}")
