"""`embedding_bag_all_to_all` by Triton: bags of each rank's tables, to the ranks of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import TypingError, excerpt, optional
from shardplan.fused.operators.asked import starts
from shardplan.fused.operators.embedding import blocks
from shardplan.fused.tiles.events import TilePut, TileRead
from shardplan.fused.triton.embedding_kernel import embedding_kernel
from shardplan.fused.triton.memory import TileMemory
from shardplan.fused.triton.options import KernelOptions

if TYPE_CHECKING:
    import torch

NAME = "embedding_bag_all_to_all"


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
) -> list[torch.Tensor]:
    """Return the results of the ranks here: bags of all tables for each rank's part of the batch, [B_r, T, dim].

    `tables` [R, dim] are those of all ranks here, `held[s]` of rank s; `batches[d]` bags are for rank d. Bag k of table
    t is `indices[offsets[t * B + k] : offsets[t * B + k + 1]]`, int64; `weights` f32 [n]. `tiles` a destination, `rows`
    bags at once. `dtype` is that of all tables, needed where no rank here has any. Collective; raises `TypingError`
    where operands do not fit or an index is no row of its table, and as `FusedKernel.run`.
    """
    made, call, arguments, constants, places = embedding_prepared(
        memory, tables, indices, offsets, weights, held, batches, dim, mode, tiles, rows, options, dtype
    )
    made.run(embedding_kernel, call, *arguments, **constants)
    return [made.result(call, "result", *each, arguments[0].dtype).clone() for each in places]


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
) -> Any:
    """Return the instance, the call, the kernel's arguments and constants, and the results' places."""
    torch = optional("torch", "torch")
    options = options or KernelOptions()
    here = range(memory.rank0, memory.rank0 + memory.here)
    batch = sum(batches)
    _check_bags(memory, tables, indices, offsets, held, batch, dim, mode, here)
    dtype = tables[0].dtype if tables else dtype or torch.float32
    assert dtype is not None
    shape, _ = blocks(held, batches)
    table, bag, many = starts([held[r] for r in here]), starts(batches), sum(held)
    schedule = options.schedule(memory, embedding_kernel, tiles=tiles, slice=options.tiles_per_signal(tiles))
    made = options.kernel_instance(memory, NAME, schedule, f"{dtype}")

    def detail(rank: int, program: int, event: TilePut | TileRead) -> Sequence[int] | None:
        (first, end), (left, right) = event.box
        if isinstance(event, TileRead) or first == end or left == right:
            return None
        at = bag[event.to]
        return at + first, at + end, table[rank - memory.rank0], right - left, first, left * dim, many * dim

    key = (tuple(held), tuple(batches), dim)
    size = max(1, *batches) * many * dim * dtype.itemsize
    call = made.cached_call(key, lambda: made.call(embedding_kernel, shape, {"result": size}, detail))
    where = torch.tensor([t.data_ptr() for t in tables] or [0], dtype=torch.int64, device=memory.device)
    like = torch.zeros(1, dtype=dtype, device=memory.device)
    scale = torch.zeros(1, device=memory.device) if weights is None else weights
    wide = 1 << max(4, (min(dim, 256) - 1).bit_length())
    constants = {"block_b": rows, "block_d": wide, "weighted": weights is not None, "mean": mode == "mean"}
    constants |= {"aligned": dim % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tables)}
    constants |= options.launch(memory, embedding_kernel)
    places = [(rank, (batches[rank], many, dim)) for rank in here]
    return made, call, (like, where, indices, offsets, scale, dim, batch), constants, places


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
    if offsets.shape != (mine * batch + 1,) or offsets.dtype != torch.int64 or indices.dtype != torch.int64:
        raise TypingError(f"{NAME}: offsets {list(offsets.shape)}; legal are [{mine * batch + 1}] of int64")
    if not indices.numel():
        return
    lengths = torch.tensor([t.shape[0] for t in tables], device=indices.device)
    bags = torch.repeat_interleave(offsets.diff())
    limit = lengths[bags // max(1, batch)]
    used = indices[offsets[0] : offsets[-1]]
    if bool(((used < 0) | (used >= limit)).any()):
        k = int(((used < 0) | (used >= limit)).nonzero()[0])
        raise TypingError(f"{NAME}: index {int(used[k])} of a table; legal are 0 to {int(limit[k]) - 1}")
