"""`embedding_bag_all_to_all` by Triton: bags of each rank's tables, to the ranks of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import TypingError, excerpt, optional
from shardplan.fused.heap.symmetric import SymmetricTensor
from shardplan.fused.tiles.shapes import BlockCuts
from shardplan.fused.triton.blocks import BlockKernel, block_kernel
from shardplan.fused.triton.embedding_kernel import embedding_kernel
from shardplan.fused.triton.memory import TileMemory
from shardplan.fused.triton.options import KernelOptions

if TYPE_CHECKING:
    import torch

NAME = "embedding_bag_all_to_all"
NUMBERS = 2048  # of a tile of bags: more of f32 take all registers


def embedding_bag_all_to_all(
    memory: TileMemory,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    held: Sequence[int],
    batches: Sequence[int],
    dim: int,
    mode: str = "sum",
    tiles: int = 2,
    rows: int = 16,
    options: KernelOptions | None = None,
    dtype: torch.dtype | None = None,
    out: SymmetricTensor | None = None,
) -> list[torch.Tensor]:
    """Return the results of the ranks here: bags of all tables for each rank's part of the batch, [B_r, T, dim].

    `tables` [R, dim] are those of all ranks here, `held[s]` of rank s; `batches[d]` bags are for rank d. Bag k of table
    t is `indices[offsets[t * B + k] : offsets[t * B + k + 1]]`, both int32 or int64; `weights` f32 [n]. At most `rows`
    bags at once; `tiles` is left to the kernel. `dtype` is that of all tables, needed where no rank here has any. With
    `out` the result is there until the next call that writes it. Collective; raises `TypingError` where operands do not
    fit. An index that is no row of its table is one of the next call or of `SymmetricHeap.check`, as is `FusedTimeout`.
    """
    made, call, arguments, constants, _ = embedding_prepared(
        memory, tables, indices, offsets, weights, held, batches, dim, mode, tiles, rows, options, dtype, out
    )
    found = made.run(embedding_kernel, call, *arguments, **constants)
    return [each.view(each.shape[0], sum(held), dim) for each in found]


def embedding_prepared(
    memory: TileMemory,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    held: Sequence[int],
    batches: Sequence[int],
    dim: int,
    mode: str,
    tiles: int,
    rows: int,
    options: KernelOptions | None,
    dtype: torch.dtype | None,
    out: SymmetricTensor | None = None,
) -> Any:
    """Return the instance, the call, the kernel's arguments and constants, and the results' places."""
    torch = optional("torch", "torch")
    options = options or KernelOptions()
    here = range(memory.rank0, memory.rank0 + memory.here)
    batch = sum(batches)
    _check_bags(memory, tables, indices, offsets, held, batch, dim, mode, here)
    dtype = tables[0].dtype if tables else dtype or torch.float32
    assert dtype is not None
    made = block_kernel(memory, NAME, options.programs, str(dtype), options.seconds, out)
    cuts = BlockCuts("beside", (tuple(batches), tuple(n * dim for n in held)))
    call = made.call(cuts, dtype, ahead=max(1, dim))
    made.record.lengths = [t.shape[0] for t in tables]
    scale = call.cuts if weights is None else weights
    wide = 1 << max(4, (min(dim, 512) - 1).bit_length())  # ids are read once for so many columns
    rows = min(rows, max(4, NUMBERS // wide))
    aligned = dim % 16 == 0 and not any(t.data_ptr() % 16 for t in tables)
    constants = {"block_b": rows, "block_d": wide, "weighted": weights is not None, "mean": mode == "mean"}
    constants |= {"aligned": aligned} | options.launch(memory, embedding_kernel)
    arguments = (call.out, *_tables_tensor(made, tables), indices, offsets, scale, dim, batch, indices.numel())
    places = [(rank, (batches[rank], sum(held), dim)) for rank in here]
    return made, call, arguments, constants, places


def _tables_tensor(made: BlockKernel, tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses and rows of tables, which seldom change."""
    torch = optional("torch", "torch")
    said = tuple((t.data_ptr(), t.shape[0]) for t in tables) or ((0, 0),)
    if said not in made.tables:
        pinned = torch.tensor(said, dtype=torch.int64, pin_memory=made.memory.on_gpu).t().contiguous()
        made.tables[said] = pinned.to(made.memory.device, non_blocking=True)
    return made.tables[said][0], made.tables[said][1]


def _check_bags(
    memory: TileMemory,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    held: Sequence[int],
    batch: int,
    dim: int,
    mode: str,
    here: range,
) -> None:
    torch = optional("torch", "torch")
    mine = sum(held[r] for r in here)
    if len(held) != memory.ranks or len(tables) != mine or mode not in ("sum", "mean"):
        said = f"{len(tables)} tables, held {excerpt(list(held))}, mode {excerpt(mode)}"
        raise TypingError(f"{NAME}: {said}; legal are {mine} tables, {memory.ranks} counts, sum or mean")
    if any(t.ndim != 2 or t.shape[1] != dim or t.dtype != tables[0].dtype or not t.is_contiguous() for t in tables):
        raise TypingError(f"{NAME}: tables {[list(t.shape) for t in tables]}; legal are [R, {dim}] of one dtype")
    whole = (torch.int32, torch.int64)
    if offsets.shape != (mine * batch + 1,) or offsets.dtype not in whole or indices.dtype not in whole:
        said = f"offsets {offsets.dtype}{list(offsets.shape)}, indices {indices.dtype}"
        raise TypingError(f"{NAME}: {said}; legal are [{mine * batch + 1}] of int32 or int64")
