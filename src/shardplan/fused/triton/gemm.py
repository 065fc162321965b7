"""`gemm_all_to_all` by Triton: a product whose blocks go to their ranks tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardplan.errors import TypingError, excerpt, optional
from shardplan.fused.operators.asked import splits, starts, tile_sizes
from shardplan.fused.tiles.events import TileBox, TilePut, TileRead
from shardplan.fused.tiles.shapes import BlockShape
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.memory import TileMemory, is_interpreted
from shardplan.fused.triton.options import KernelOptions

if TYPE_CHECKING:
    import torch

NAME = "gemm_all_to_all"
ACTIVATIONS = ("none", "relu", "gelu", "silu")
GROUP = 8  # rows of tiles whose columns come one after another, so that b's tiles stay in the cache
Counts = tuple[tuple[int, ...], ...]
Blocks = list[list[tuple[TileBox, TileBox]]]  # per source and destination: box of the own product, box of the result


@lru_cache(maxsize=256)
def gemm_blocks(counts: Counts, columns: int, scatter: int, parts: tuple[int, ...] | None = None) -> Blocks:
    """Return where blocks come from and go; `counts[s][d]` are rows of a block, of `scatter` 1 `counts[s][0]` a rank's.

    Of `scatter` 1 rank d gets `parts[d]` columns, by the tiling rule if None.

    >>> gemm_blocks(((1, 2), (3, 0)), 4, 0)[0][1]
    (((1, 3), (0, 4)), ((0, 2), (0, 4)))
    """
    ranks = range(len(counts))
    if scatter == 0:
        own, there = [starts(c) for c in counts], [starts([c[d] for c in counts]) for d in ranks]
        whole = (0, columns)
        return [
            [(((own[s][d], own[s][d + 1]), whole), ((there[d][s], there[d][s + 1]), whole)) for d in ranks]
            for s in ranks
        ]
    rows, cols = starts([c[0] for c in counts]), starts(parts or tile_sizes(columns, len(counts)))
    return [
        [
            (((0, counts[s][0]), (cols[d], cols[d + 1])), ((rows[s], rows[s + 1]), (0, cols[d + 1] - cols[d])))
            for d in ranks
        ]
        for s in ranks
    ]


def gemm_all_to_all(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    counts: Sequence[Sequence[int]],
    scatter: int = 0,
    activation: str = "none",
    block: tuple[int, int, int] = (128, 128, 64),
    options: KernelOptions | None = None,
    parts: Sequence[int] | None = None,
    varying: bool = False,
) -> list[torch.Tensor]:
    """Return the results of the ranks here: what all ranks computed for each, copies.

    `a` are the rows [M, K] of all ranks here, one rank's after the other's; `b` [here, K, N], `bias` [here, N]. Of
    `scatter` 0 `counts[s][d]` rows of rank s go to rank d, in order; of 1 `counts[s][0]` are the rows of rank s, and
    columns go by `parts`, or by the tiling rule. `block` is a tile: rows, columns, and the step along K.
    With `varying`, for counts that data decides, the call is not remembered, and only the first of a schedule is
    proved. Collective; raises `TypingError` where operands do not fit, and as `FusedKernel.run`.
    """
    given = (counts, scatter, activation, block, options, parts, varying)
    made, call, arguments = gemm_prepared(memory, a, b, bias, *given)
    made.run(gemm_kernel, call, *arguments[0], **arguments[1])
    return [made.result(call, "result", *each, a.dtype).clone() for each in arguments[2]]


def gemm_prepared(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    counts: Sequence[Sequence[int]],
    scatter: int,
    activation: str,
    block: tuple[int, int, int],
    options: KernelOptions | None,
    parts: Sequence[int] | None = None,
    varying: bool = False,
) -> Any:
    """Return the instance, the call, and the kernel's arguments, constants and results' places: `gemm_all_to_all`."""
    torch = optional("torch", "torch")
    options = options or KernelOptions()
    held = tuple(tuple(int(n) for n in c) for c in counts)
    cut = None if parts is None else tuple(splits(f"{NAME}: parts", parts, memory.ranks, b.shape[-1]) or ())
    blocks = _check_gemm(memory, a, b, held, scatter, activation, cut)
    columns, here = b.shape[2], range(memory.rank0, memory.rank0 + memory.here)
    units = [[_units(own, block) for own, _ in row] for row in blocks]
    tiles = max(1, *(rows * cols for each in units for rows, cols in each))
    if varying:
        tiles = 1 << (tiles - 1).bit_length()  # few schedules, and so few counters, whatever data decide
    schedule = options.schedule(memory, gemm_kernel, tiles=tiles, slice=options.tiles_per_signal(tiles))
    made = options.kernel_instance(memory, NAME, schedule, f"{a.dtype}")
    first = starts([sum(held[r]) if scatter == 0 else held[r][0] for r in here])
    lengths = [max(there[1][1] for _, there in (row[d] for row in blocks)) for d in range(memory.ranks)]
    heights = [max(row[d][1][0][1] for row in blocks) for d in range(memory.ranks)]
    shape = BlockShape.rows([[rows * cols for rows, cols in each] for each in units])

    def detail(rank: int, program: int, event: TilePut | TileRead) -> Sequence[int] | None:
        ((unit, end),) = event.box
        if isinstance(event, TileRead) or unit == end:
            return None
        own, there = blocks[rank][event.to]
        i, j = swizzle_tile(unit - shape.boxes[rank][event.to][0][0], *units[rank][event.to])
        m, n = i * block[0], j * block[1]
        base = first[rank - memory.rank0] + own[0][0]
        rows = base + m, min(base + m + block[0], first[rank - memory.rank0] + own[0][1])
        columns = own[1][0] + n, min(own[1][0] + n + block[1], own[1][1])
        return *rows, *columns, there[0][0] + m, there[1][0] + n, lengths[event.to]

    size = max(h * n for h, n in zip(heights, lengths, strict=True)) * a.dtype.itemsize
    key = (held, scatter, tuple(b.shape), block, cut)
    call = made.cached_call(key, lambda: made.call(gemm_kernel, shape, {"result": size}, detail, varying), varying)
    even16 = all(n % 16 == 0 for n in (*lengths, columns, a.shape[1], *(own[1][0] for row in blocks for own, _ in row)))
    constants = {"block_m": block[0], "block_n": block[1], "block_k": block[2], "biased": bias is not None}
    constants |= {"activation": ACTIVATIONS.index(activation), "aligned": even16}
    constants["upcast"] = is_interpreted(gemm_kernel) and a.dtype == torch.bfloat16
    constants |= options.launch(memory, gemm_kernel)
    some = torch.zeros(1, dtype=a.dtype, device=a.device) if bias is None else bias
    constants["stamped"] = False
    stamps = call.launches[0].begin  # no kernel stores there
    places = [(rank, (heights[rank], lengths[rank])) for rank in here]
    return made, call, ((a, b, some, stamps, a.shape[1], columns), constants, places)


def _check_gemm(
    memory: TileMemory,
    a: torch.Tensor,
    b: torch.Tensor,
    counts: Counts,
    scatter: int,
    activation: str,
    parts: tuple[int, ...] | None,
) -> Blocks:
    here = range(memory.rank0, memory.rank0 + memory.here)
    if len(counts) != memory.ranks or scatter not in (0, 1) or activation not in ACTIVATIONS:
        said = f"counts of {len(counts)} ranks, scatter {excerpt(scatter)}, activation {excerpt(activation)}"
        raise TypingError(f"{NAME}: {said}; legal are {memory.ranks}, 0 or 1, {', '.join(ACTIVATIONS)}")
    rows = sum(sum(counts[r]) if scatter == 0 else counts[r][0] for r in here)
    fits = a.ndim == 2 and b.ndim == 3 and a.shape[0] == rows and b.shape[:2] == (memory.here, a.shape[1])
    if not fits or a.dtype != b.dtype or not (a.is_contiguous() and b.is_contiguous()):
        said = f"{list(a.shape)} and {list(b.shape)} for {rows} rows of {memory.here} ranks"
        raise TypingError(f"{NAME}: {said}; legal are [rows, K] and [ranks, K, N] of one dtype, contiguous")
    if parts is not None and scatter == 0:
        raise TypingError(f"{NAME}: parts {list(parts)} of blocks of rows; legal with scatter 0 are none")
    return gemm_blocks(counts, b.shape[2], scatter, parts)


def _units(box: TileBox, block: tuple[int, int, int]) -> tuple[int, int]:
    """How many tiles a block has, along rows and columns."""
    (m0, m1), (n0, n1) = box
    return -(-(m1 - m0) // block[0]), -(-(n1 - n0) // block[1])


def swizzle_tile(unit: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the row and column of a tile: `GROUP` rows at a time, column after column.

    >>> [swizzle_tile(k, 2, 2) for k in range(4)]
    [(0, 0), (1, 0), (0, 1), (1, 1)]
    """
    group, rest = divmod(unit, GROUP * columns)
    height = min(GROUP, rows - group * GROUP)
    return group * GROUP + rest % height, rest // height
