"""What two ranks exchange in a refit, cut into messages: both ends cut alike, since they list the same regions.

A pair of ranks has one slot of staging at each end, and its messages follow each other through it. The slots of a rank
take at most the memory limit together; what the limit leaves is shared in proportion to what pairs move. The slots of
the second hop lie where those of the first did, which is over by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.errors import Infeasible
from shardplan.hardware.units import format_bytes
from shardplan.interop.torch.refit.hops import RefitHop
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.regions import RefitRegions, split_block

MOST = 4 * 2**20  # bytes of a slot without a limit: larger ones leave the caches of a core
RESERVED = tuple(2**k for k in range(12, 3, -1))  # bytes that every pair has at least: the largest that fits
ALIGNED = 16  # bytes: no element is wider
SCRATCH = 2**16  # bytes at most in which a constant is added


@dataclass(frozen=True, slots=True, eq=False)
class RefitChunk:
    """One message: rows of regions, the byte of the message at which each starts, and the bytes of all."""

    rows: RefitRegions
    at: np.ndarray
    nbytes: int


def slots(hop: RefitHop) -> dict[tuple[int, int], int]:
    """Return the bytes of the slot of every pair (sender, receiver) of a hop, a multiple of `ALIGNED`.

    Raises `Infeasible` where the plan's memory limit has no room for the least slots.
    """
    source, target, total = (a.tolist() for a in hop.traffic)
    pairs = list(zip(source, target, strict=True))
    limit = hop.plan.memory_limit
    if limit is None:
        return {pair: _align_up(min(size, MOST)) for pair, size in zip(pairs, total, strict=True)}
    beside = scratch_bytes(hop.plan)
    room_for = limit - beside
    held: dict[int, int] = {}
    for reserved in RESERVED:
        least = [_align_up(min(size, reserved)) for size in total]
        held = _by_rank(pairs, least)
        if max(held.values(), default=0) <= room_for:
            more = [max(size - low, 0) for size, low in zip(total, least, strict=True)]
            wanted = _by_rank(pairs, more)
            out: dict[tuple[int, int], int] = {}
            for pair, low, size in zip(pairs, least, more, strict=True):
                room = min((room_for - held[r]) * size // max(wanted[r], 1) for r in pair)
                out[pair] = min(low + room // ALIGNED * ALIGNED, _align_up(MOST), _align_up(low + size))
            return out
    raise Infeasible(
        f"a refit within {format_bytes(limit)} a rank: rank {max(held, key=lambda r: held[r])} needs "
        f"{max(held.values()) + beside} bytes for a message to or from each of its peers; legal is that or more",
        max(held.values()) + beside,
        max(held.values()) + beside,
    )


def scratch_bytes(plan: RefitPlan) -> int:
    """Return the bytes in which constants are added, of any rank: none where no parameter has another one."""
    source, target = plan.source.families, plan.target.families
    if all(source[m.source_family].entry.plus == target[m.target_family].entry.plus for m in plan.moves):
        return 0
    return SCRATCH if plan.memory_limit is None else max(min(SCRATCH, plan.memory_limit // 8) // 8 * 8, 8)


def _by_rank(pairs: list[tuple[int, int]], sizes: list[int]) -> dict[int, int]:
    out: dict[int, int] = {}
    for pair, size in zip(pairs, sizes, strict=True):
        for rank in pair:
            out[rank] = out.get(rank, 0) + size
    return out


def _align_up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def chunks(hop: RefitHop, rows: RefitRegions, slot: int) -> list[RefitChunk]:
    """Return the messages of a pair: its regions in order, none longer than the slot."""
    width = hop.widths
    rows = _split(rows, width, slot)
    if not len(rows):
        return []
    each = width[rows.move]
    align = int(each.max())  # of one width there is no padding
    taken = -(-rows.elements * each // align) * align
    ends = np.cumsum(taken)
    out: list[RefitChunk] = []
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + slot, side="right")), first + 1)
        part = np.arange(first, last)
        at = ends[first:last] - taken[first:last] - before
        out.append(RefitChunk(rows.select_regions(part), at, int(ends[last - 1]) - before))
        first = last
    return out


def _split(rows: RefitRegions, width: np.ndarray, slot: int) -> RefitRegions:
    """Return the regions with those longer than a slot cut along their outer dims."""
    large = rows.elements * width[rows.move] > slot
    if not large.any():
        return rows
    number: list[int] = []
    start: list[tuple[int, ...]] = []
    shape: list[tuple[int, ...]] = []
    for k in range(len(rows)):
        sizes = tuple(rows.sizes[k].tolist())
        for at, part in (
            split_block(sizes, slot // int(width[rows.move[k]])) if large[k] else [((0,) * len(sizes), sizes)]
        ):
            number.append(k)
            start.append(at)
            shape.append(part)
    found, at = rows.select_regions(np.array(number)), np.array(start, dtype=np.int64)
    return RefitRegions(
        found.source,
        found.target,
        found.move,
        found.source_parameter,
        found.target_parameter,
        found.source_offset + (at * found.source_strides).sum(axis=1),
        found.target_offset + (at * found.target_strides).sum(axis=1),
        np.array(shape, dtype=np.int64),
        found.source_strides,
        found.target_strides,
    )
