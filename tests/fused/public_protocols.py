"""Protocols of public fused kernels, as tile schedules: facts of what they put, signal, wait for and read; no code.

What a rank loads from another's memory, or polls there, is rendered as a copy at every reader: a store that all see is
a put to each. A kernel's end and what follows on its stream is a launch of its own. Flags that are set to zero between
calls are rendered as counters that only grow, which is milder: a reset that comes after the next call's first signal
loses it, and no rendering has that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardplan.fused.tiles.events import (
    TileBox,
    TileBuffer,
    TileEvent,
    TileLaunch,
    TileProtocol,
    TilePut,
    TileRead,
    TileSignal,
    TileWait,
)

ROCM = "https://github.com/ROCm/rocm-libraries/pull/10925 and /11413"
FBGEMM = "https://github.com/pytorch/FBGEMM, nvshmem_put_tbe.cu"
IRIS = "https://github.com/ROCm/iris/issues/"
TOKENSPEED = "https://github.com/lightseekorg/tokenspeed/pull/"


class PublicProtocol(NamedTuple):
    """A rendering: what it renders, where that is published, and what the checker must say (nothing: it is right)."""

    says: str
    address: str
    protocol: TileProtocol
    wrong: str = ""


Programs = list[list[TileEvent]]


def launch(ranks: int, programs: Callable[[int], Programs]) -> TileLaunch:
    return tuple(tuple(tuple(program) for program in programs(rank)) for rank in range(ranks))


def meeting(ranks: int, first: int) -> TileLaunch:
    """All ranks meet: each tells all, and waits for all, on counters from `first` on."""
    return launch(
        ranks,
        lambda rank: [
            [*(TileSignal(to, first + rank) for to in range(ranks)), *(TileWait(first + s, 1, 1) for s in range(ranks))]
        ],
    )


def lanes(ranks: int, size: int) -> Callable[[int, int, int], TileBox]:
    """Part `k` of `of` of a source's row in a buffer of a row for every source."""
    return lambda source, k, of: ((source, source + 1), (k * size // of, (k + 1) * size // of))


def buffer(ranks: int, size: int, parts: int, slots: int) -> TileBuffer:
    """A row for every source; tile (source, destination, part) has the number of its place in this order."""
    box = lanes(ranks, size)
    table = tuple(
        tuple((box(s, k, parts), (s * ranks + d) * parts + k) for s in range(ranks) for k in range(parts))
        for d in range(ranks)
    )
    return TileBuffer(((ranks, size),) * ranks, table, slots)


# GEMM + all-to-all of hipBLASLt: workgroups of a band count, the last one has the band copied and then the flag of its
# source raised, on one queue; the last workgroup of the grid waits for all flags, and the kernel ends.


def rocm(ranks: int, bands: int, groups: int, drain: bool, meets: bool) -> TileProtocol:
    parts = bands * groups
    box = lanes(ranks, parts)

    def kernel(rank: int) -> Programs:
        workgroups: Programs = []
        for to in range(ranks):
            for band in range(bands):
                for g in range(groups):
                    k = band * groups + g
                    put = TilePut(to, "recv", box(rank, k, parts), (rank * ranks + to) * parts + k)
                    workgroups.append([put, TileSignal(to, rank, to * bands + band, groups), TileSignal(rank, ranks)])
        every = len(workgroups)
        last: list[TileEvent] = [TileWait(ranks, every, every)]
        last += [TileWait(s, bands, bands) for s in range(ranks)] if drain else []
        return [*workgroups, last]

    read = launch(ranks, lambda rank: [[TileRead("recv", ((0, ranks), (0, parts)))]])
    launches = [launch(ranks, kernel), read, *([meeting(ranks, ranks + 1)] if meets else [])]
    name = f"hipBLASLt FusedGemmA2A drain={int(drain)}"
    buffers = {"recv": buffer(ranks, parts, parts, 1)}
    return TileProtocol(name, ranks, tuple(launches), buffers, 2 * ranks + 1, ranks * bands)


# Embedding put of FBGEMM: every warp puts its bag into the owner's output, without waiting; the kernel ends; a barrier
# of all ranks on the stream completes the puts; the output is read.


def fbgemm(ranks: int, warps: int, barrier: bool, slots: int = 1, second: bool = False) -> TileProtocol:
    box = lanes(ranks, warps)

    def kernel(rank: int) -> Programs:
        return [
            [TilePut(to, "output", box(rank, k, warps), (rank * ranks + to) * warps + k) for to in range(ranks)]
            for k in range(warps)
        ]

    read = launch(ranks, lambda rank: [[TileRead("output", ((0, ranks), (0, warps)))]])
    first = [meeting(ranks, 0)] if barrier else []
    launches = [launch(ranks, kernel), *first, read, *([meeting(ranks, ranks)] if second else [])]
    buffers = {"output": buffer(ranks, warps, warps, slots)}
    return TileProtocol("FBGEMM nvshmem_put_tbe", ranks, tuple(launches), buffers, 2 * ranks, 0)


# GEMM + all-reduce in one shot of iris: a workgroup stores its tile for all to load, raises the tile's lock, waits for
# the lock of every rank and sums. Before every call the ranks meet (the preamble, which clears the locks).


def iris(ranks: int, tiles: int, locks: int, reach: str) -> TileProtocol:
    """`reach` is how far a raised lock is seen: the scope of the atomic. There are locks for `locks` tiles."""
    box = lanes(ranks, tiles)

    def kernel(rank: int) -> Programs:
        return [
            [
                *(TilePut(to, "aux", box(rank, t, tiles), (rank * ranks + to) * tiles + t) for to in range(ranks)),
                *(TileSignal(to, ranks + t) for to in (range(ranks) if reach == "sys" else [rank])),
                TileWait(ranks + t, ranks, ranks),
                *(TileRead("aux", box(s, t, tiles)) for s in range(ranks)),
            ]
            for t in range(tiles)
        ]

    launches = (meeting(ranks, 0), launch(ranks, kernel))
    return TileProtocol("iris matmul_all_reduce", ranks, launches, {"aux": buffer(ranks, tiles, tiles, 1)},
                        ranks + locks, 0)  # fmt: skip


# All-reduce in one shot of tokenspeed on iris: a rank stages its input for all, says that it is ready, waits until all
# are, and sums. `done` is the first mend that was proposed, `slots=2` the one that was merged.


def staged(ranks: int, slots: int, done: bool = False) -> TileProtocol:
    box = lanes(ranks, 1)

    def kernel(rank: int) -> Programs:
        events: list[TileEvent] = [TileWait(ranks + s, 0, 1) for s in range(ranks)] if done else []
        events += [TilePut(to, "staging", box(rank, 0, 1), rank * ranks + to) for to in range(ranks)]
        events += [TileSignal(to, rank) for to in range(ranks)]
        events += [TileWait(s, 1, 1) for s in range(ranks)]
        events.append(TileRead("staging", ((0, ranks), (0, 1))))
        return [[*events, *(TileSignal(to, ranks + rank) for to in range(ranks) if done)]]

    buffers = {"staging": buffer(ranks, 1, 1, slots)}
    return TileProtocol("tokenspeed one-shot all-reduce", ranks, (launch(ranks, kernel),), buffers, 2 * ranks, 0)


def public(ranks: int) -> list[PublicProtocol]:
    """All renderings on so many ranks, at least two."""
    return [
        PublicProtocol(
            "GEMM + all-to-all, every device synchronised before the next launch, as the test client does",
            ROCM, rocm(ranks, 2, 2, drain=True, meets=True),
        ),
        PublicProtocol(
            "the same, each rank's stream synchronised alone: received data may be overwritten by the next launch",
            ROCM, rocm(ranks, 2, 2, drain=True, meets=False),
            r"for epoch 1 before rank \d program 0 reads it in epoch 0$",
        ),
        PublicProtocol(
            "the same, the kernel's wait left out (FusedDrain=0, which the interface does not offer)",
            ROCM, rocm(ranks, 2, 2, drain=False, meets=True),
            r"for epoch 0 after rank \d program 0 reads it in epoch 0$",
        ),
        PublicProtocol(
            "embedding put, its loop: kernel, barrier, and the output read before the next kernel puts",
            FBGEMM, fbgemm(ranks, 2, barrier=True),
            r"for epoch 1 before rank \d program 0 reads it in epoch 0$",
        ),
        PublicProtocol(
            "the same without the barrier (put_type 3)", FBGEMM, fbgemm(ranks, 2, barrier=False),
            r"for epoch 0 after rank \d program 0 reads it in epoch 0$",
        ),
        PublicProtocol("the same with a second barrier after the read", FBGEMM,
                       fbgemm(ranks, 2, barrier=True, second=True)),
        PublicProtocol("the same with two outputs in turn", FBGEMM, fbgemm(ranks, 2, barrier=True, slots=2)),
        PublicProtocol(
            "locks raised at the scope of one GPU, before the fix", IRIS + "462", iris(ranks, 2, 2, "gpu"),
            r"deadlock .* waits in epoch 0 for counter \d+ \(want \d, seen 1\)",
        ),
        PublicProtocol("locks raised at the scope of the system, after it", IRIS + "462", iris(ranks, 2, 2, "sys")),
        PublicProtocol(
            "locks allocated for larger blocks than those of the call, before the fix", IRIS + "463",
            iris(ranks, 4, 2, "sys"), r"signals counter \d+ of rank 0, of \d+ allocated$",
        ),
        PublicProtocol("locks for the smallest blocks, after it", IRIS + "463", iris(ranks, 4, 4, "sys")),
        PublicProtocol(
            "one staging slot, written before peers are waited for, before the fix", TOKENSPEED + "1356",
            staged(ranks, 1), r"for epoch 1 before rank \d program 0 reads it in epoch 0$",
        ),
        PublicProtocol("two staging slots in turn, after it", TOKENSPEED + "1356", staged(ranks, 2)),
        PublicProtocol("one slot and a flag that peers have read it", TOKENSPEED + "1017", staged(ranks, 1, done=True)),
    ]  # fmt: skip
