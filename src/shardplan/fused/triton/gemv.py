"""`gemv_all_reduce` by Triton: a thin product whose addends all ranks sum, in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import TypingError, excerpt, optional
from shardplan.fused.tiles.events import TilePut, TileRead
from shardplan.fused.tiles.schedule import TileSchedule, TileWaits
from shardplan.fused.tiles.shapes import RowShape, starts
from shardplan.fused.triton.gemv_kernel import gemv_kernel
from shardplan.fused.triton.launches import FusedKernel, KernelCall
from shardplan.fused.triton.memory import TileMemory, cache_on_heap, is_interpreted
from shardplan.fused.triton.options import KernelOptions
from shardplan.fused.triton.rows import Detail

if TYPE_CHECKING:
    import torch

NAME = "gemv_all_reduce"
Operand = tuple[int, int, int]  # of a rank here: first number of a, of x, and the depth


def gemv_all_reduce(
    memory: TileMemory,
    a: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    shots: int = 2,
    block: tuple[int, int] = (16, 256),
    tiles: int = 0,
    options: KernelOptions | None = None,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return for each rank here the sum over ranks of a [M, K_r] times x [K_r, C], C at most 16: [M, C].

    `a` and `x` have one tensor a rank here; depths may differ. In one shot all ranks get all addends, in two an owner
    sums a tile and spreads it, with `tiles` tiles an owner (one a program, if 0). Addends and sums are f32, rounded
    once, and of the same bits on all ranks. `out` [here, M, C], contiguous, is where they come. Collective; raises
    `TypingError` where operands do not fit, and as `FusedKernel.run`.
    """
    made, call, arguments, constants, found = gemv_prepared(memory, a, x, shots, block, tiles, options, out)
    made.run(gemv_kernel, call, *arguments, **constants)
    return list(found.unbind())


def gemv_prepared(
    memory: TileMemory,
    a: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    shots: int,
    block: tuple[int, int],
    tiles: int,
    options: KernelOptions | None,
    out: torch.Tensor | None = None,
) -> Any:
    """Return the instance, the call, the kernel's arguments and constants, and where results come: [here, M, C]."""
    torch = optional("torch", "torch")
    options = options or KernelOptions()
    _check_gemv(memory, a, x, shots)
    height, wide = a[0].shape[0], x[0].shape[1]
    flat = a[0].reshape(-1) if len(a) == 1 else torch.cat([each.reshape(-1) for each in a])
    vectors = torch.cat([each.t().reshape(-1) for each in x])
    depths = [each.shape[1] for each in a]
    operands = list(zip(starts([d * height for d in depths]), starts([d * wide for d in depths]), depths, strict=False))
    # Virtual ranks in the interpreter are one sequence of programs: only a second launch may wait.
    virtual = memory.here > 1 and is_interpreted(gemv_kernel)
    programs = 1 if virtual and shots == 1 else options.programs
    waits: TileWaits = "second_launch" if virtual else "last_program" if shots == 1 else "owner"
    schedule = TileSchedule(tiles=tiles or programs, programs=programs, waits=waits, shots=shots)
    key = (NAME, schedule, a[0].dtype)
    made: FusedKernel = cache_on_heap(memory, key, lambda: FusedKernel(memory, NAME, schedule))
    made.seconds = options.seconds
    shape = RowShape(height)
    key = (tuple(depths), height, wide)

    def fresh() -> KernelCall:
        owned = max(sum(end - start for start, end in own) for own in shape.tiles(memory.ranks, schedule.tiles))
        lanes = memory.ranks * wide * 4
        size = {"result": lanes * height} if shots == 1 else {
            "partial": lanes * owned, "result": height * wide * a[0].dtype.itemsize,
        }  # fmt: skip
        say = one_shot if shots == 1 else two_shot
        detail = say(memory, operands[: memory.here], height, wide, schedule.tiles)
        return made.call(gemv_kernel, shape, size, detail)

    call = made.cached_call(key, fresh)
    parts = torch.empty((memory.here, height, wide), dtype=torch.float32, device=memory.device)
    if out is None:
        out = torch.empty((memory.here, height, wide), dtype=a[0].dtype, device=memory.device)
    constants = {"ranks": memory.ranks, "wide": wide, "block_m": block[0], "block_k": block[1]}
    upcast = is_interpreted(gemv_kernel) and a[0].dtype == torch.bfloat16
    constants |= {"lanes": 1 if wide == 1 else 16, "upcast": upcast}
    constants |= {"aligned": all(d % 16 == 0 for d in depths)} | options.launch(memory, gemv_kernel, waits=True)
    return made, call, (flat, vectors, parts, out, height), constants, out


def one_shot(memory: TileMemory, operands: Sequence[Operand], height: int, wide: int, tiles: int) -> Detail:
    """Return what rows say in one shot: a tile's addends are computed for the first rank, and kept for the others."""
    known: set[tuple[int, int, int]] = set()
    read: dict[int, int] = dict.fromkeys(range(memory.ranks), 0)

    def detail(rank: int, program: int, event: TilePut | TileRead) -> Sequence[int] | None:
        if isinstance(event, TileRead):
            read[rank] += 1
            return (0, height, 0, height * wide, 3) if read[rank] == memory.ranks else None
        (_, (first, end)) = event.box
        key = (rank, program, first)
        again = key in known
        known.add(key)
        place = (rank * height + first) * wide
        return first, end, place, height * wide, int(again), *operands[rank - memory.rank0]

    return detail


def two_shot(memory: TileMemory, operands: Sequence[Operand], height: int, wide: int, tiles: int) -> Detail:
    """Return what rows say in two shots: an owner's lanes lie one after another, each of all its tiles."""
    places: list[dict[int, tuple[int, int]]] = []
    lengths: list[int] = []
    for own in RowShape(height).tiles(memory.ranks, tiles):
        begin = starts([end - first for first, end in own])
        places.append({at: tile for at, tile in zip(begin, own, strict=False) if tile[0] < tile[1]})
        lengths.append(begin[-1])

    def lane(rank: int, box: Sequence[tuple[int, int]], does: int) -> Sequence[int] | None:
        owner, (source, _), (at, end) = rank, *box
        if at == end:
            return None
        return *places[owner][at], (source * lengths[owner] + at) * wide, lengths[owner] * wide, does

    def detail(rank: int, program: int, event: TilePut | TileRead) -> Sequence[int] | None:
        if event.buffer == "partial":
            if isinstance(event, TileRead):
                return lane(rank, event.box, 3)
            found = lane(event.to, event.box, 0)
            return None if found is None else (*found, *operands[rank - memory.rank0])
        ((first, end),) = event.box
        return first, end, first * wide, 0, 4 if isinstance(event, TileRead) else 2

    return detail


def _check_gemv(memory: TileMemory, a: Sequence[torch.Tensor], x: Sequence[torch.Tensor], shots: int) -> None:
    if len(a) != memory.here or len(x) != memory.here or shots not in (1, 2):
        said = f"{len(a)} and {len(x)} operands, {excerpt(shots)} shots"
        raise TypingError(f"{NAME}: {said}; legal are {memory.here} of each, 1 or 2 shots")
    for y, z in zip(a, x, strict=True):
        fits = y.ndim == z.ndim == 2 and y.shape[1] == z.shape[0] and y.shape[0] == a[0].shape[0]
        if not fits or y.dtype != z.dtype or not 1 <= z.shape[1] <= 16 or not y.is_contiguous():
            said = f"{list(y.shape)} and {list(z.shape)}"
            raise TypingError(f"{NAME}: {said}; legal are [M, K] and [K, C] of one dtype, contiguous, C 1 to 16")
