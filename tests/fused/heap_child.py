"""Ranks of a symmetric heap, forked; prints what they saw as JSON. See `test_heap.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from tests.fused.forked import Exchange, forked, refused, segments

from shardplan.fused.heap.header import wrap_int32
from shardplan.fused.heap.symmetric import SymmetricHeap

BYTES = 1 << 20


def whole(rank: int, exchange: Exchange) -> Any:
    """Puts into every peer, notes, barriers; nothing has a name any more."""
    with SymmetricHeap.create(BYTES, "shm", exchange, "whole") as heap:
        exchange(b"")
        names = [name for name in segments() if "-whole-" in name]  # another run's heaps may be about
        x, flags = heap.alloc((heap.ranks, 3), "f32", "x"), heap.flags(heap.ranks, "f")
        for epoch in range(1, 4):
            for to in range(heap.ranks):
                x.peer(to)[rank] = torch.tensor([rank, to, epoch], dtype=torch.float32)
                flags[to][rank, 0] = epoch
            for source in range(heap.ranks):
                heap.header.wait(flags[rank][source], epoch, 10.0, str, "test")
            seen = x.local.tolist()
            assert seen == [[source, rank, epoch] for source in range(heap.ranks)], seen
            heap.barrier()
        notes = [heap.gather(f"{rank} {k}".encode()) for k in range(5)]
        assert notes == [[f"{r} {k}".encode() for r in range(heap.ranks)] for k in range(5)]
        assert len(set(heap.table.tolist())) == heap.ranks
        assert x.offset % 256 == 0
        y = heap.alloc((0, 4), "bf16", "y")
        assert y.local.shape == (0, 4)
        wide = heap.alloc((2,), "bf16", "z").peer((rank + 1) % heap.ranks)
        assert wide.dtype == torch.bfloat16
        heap.barrier()
    return names


def wraps(rank: int, exchange: Exchange) -> Any:
    """Barriers over the wrap of a counter."""
    with SymmetricHeap.create(BYTES, "shm", exchange, "wraps") as heap:
        heap.header.count = 2**31 - 2
        for source in range(heap.ranks):
            heap.header.lines[rank][source][0] = wrap_int32(2**31 - 2)
        exchange(b"")
        for _ in range(5):
            heap.barrier(5.0)
        return int(heap.header.lines[rank][0][0])


def differ(rank: int, exchange: Exchange) -> Any:
    with SymmetricHeap.create(BYTES, "shm", exchange, "differ") as heap:
        heap.alloc((4,), "f32", "same")
        return refused(lambda: heap.alloc((4 + (rank == 1),), "f32", "x"))


def other_size(rank: int, exchange: Exchange) -> Any:
    return refused(lambda: SymmetricHeap.create(BYTES + rank, "shm", exchange, "size"))


def full(rank: int, exchange: Exchange) -> Any:
    with SymmetricHeap.create(BYTES, "shm", exchange, "full") as heap:
        return refused(lambda: heap.alloc((BYTES,), "f32", "x"))


def huge(rank: int, exchange: Exchange) -> Any:
    return refused(lambda: SymmetricHeap.create(1 << 46 if rank == 1 else BYTES, "shm", exchange, "huge"))


def late(rank: int, exchange: Exchange) -> Any:
    """The last rank comes to no barrier: one waits for it in vain and has the others fail, too."""
    with SymmetricHeap.create(BYTES, "shm", exchange, "late") as heap:
        if rank == heap.ranks - 1:
            time.sleep(4.0)
            return refused(heap.barrier)
        started = time.monotonic()
        said = refused(lambda: heap.barrier(0.3 if rank == 0 else 20.0))
        return said, time.monotonic() - started < 3.5


def failing(rank: int, exchange: Exchange) -> Any:
    """A rank leaves by an exception."""
    if rank == 0:
        try:
            with SymmetricHeap.create(BYTES, "shm", exchange, "failing"):
                raise ValueError("no luck")
        except ValueError:
            return "left"
    with SymmetricHeap.create(BYTES, "shm", exchange, "failing") as heap:
        started = time.monotonic()
        said = refused(lambda: heap.barrier(20.0))
        return said, time.monotonic() - started < 15.0


def killed(rank: int, exchange: Exchange) -> Any:
    with SymmetricHeap.create(BYTES, "shm", exchange, "killed") as heap:
        heap.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if heap.ranks == 2 else signal.SIGTERM)
        started = time.monotonic()
        said = refused(lambda: heap.barrier(20.0)).replace(str(heap.header.peers[1].pid), "PID")
        return said, time.monotonic() - started < 15.0


def again(rank: int, exchange: Exchange) -> Any:
    """After a failure all reset, and go on."""
    with SymmetricHeap.create(BYTES, "shm", exchange, "again") as heap:
        heap.alloc((4,), "f32", "x").local.fill_(7)
        if rank == 0:
            heap.header.fail("rank 0 gave up")
        first = refused(heap.barrier)
        heap.reset()
        x = heap.alloc((4,), "f32", "y")
        heap.barrier()
        return first, x.local.tolist()


def main() -> None:
    cases = [a.split(":") for a in sys.argv[1:]]
    print(json.dumps([forked(int(ranks), globals()[name]) for name, ranks in cases]))


if __name__ == "__main__":
    main()
