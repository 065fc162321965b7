"""Calls that ranks know alone but not together, gradients that one rank needs, threads; prints what came as JSON.

Arguments are names of functions below, each with a number of ranks, and `triton` or `net` for other kernels or heaps.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

if "triton" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from tests.fused.forked import Exchange, forked, refused

from shardplan import fused
from shardplan.fused.calls import agreement
from shardplan.fused.heap.header import DIGEST
from shardplan.fused.library import torch as registered

GROUP = "calls"


@contextmanager
def heap_of(rank: int, exchange: Exchange) -> Iterator[fused.SymmetricHeap]:
    backend = f"net:127.0.0.1@{rank}" if "net" in sys.argv else "shm"
    with fused.SymmetricHeap.create(1 << 20, backend, exchange, "calls") as heap:
        if "triton" in sys.argv:
            from shardplan.fused.triton.serving import TritonKernels

            heap.kernels = TritonKernels(heap)
        heap.seconds = 15.0
        fused.bind(GROUP, heap)
        yield heap
        fused.unbind(GROUP)


def rows(m: int) -> list[Any]:
    """The rows that came, and whether they are right: all ones, of depth 2."""
    found = fused.gemm_all_to_all(torch.ones(m, 2), torch.ones(2, 3), group=GROUP)
    return [list(found.shape), bool((found == 2).all())]


def sums(m: int) -> Any:
    return fused.gemv_all_reduce(torch.ones(m, 2), torch.ones(2), group=GROUP).tolist()


def apart(rank: int, exchange: Exchange) -> Any:
    """Shapes that all have met, then each its own; then one that is known on one rank and new on the other."""
    with heap_of(rank, exchange):
        found = [rows(m) for m in (8, 16, (8, 16)[rank % 2], (8, 10)[rank % 2], (8, 16)[rank % 2])]
        vectors = [refused(lambda m=m: sums(m)) for m in (8, 16, (8, 16)[rank % 2], 8, (9, 8)[rank % 2])]
        return found, vectors, sums(2)


def some_splits(rank: int, exchange: Exchange) -> Any:
    """Splits on one rank only, again and again."""
    with heap_of(rank, exchange) as heap:
        splits = [[1, 3], None][rank]
        a, b = torch.ones(4, 2), torch.ones(2, 3)
        return [
            list(fused.gemm_all_to_all(a * k, b, group=GROUP, send_splits=splits).shape) for k in range(3)
        ], heap.header.calls


def tables(rank: int, exchange: Exchange) -> Any:
    """Rank 1 has no tables: dims that change, and a training step of each; gradients of rank 0's table."""
    with heap_of(rank, exchange):
        found: list[Any] = []
        for dim in (2, 5, 2, 3):
            given = {"table_counts": [1, 0], "batch_splits": [2, 2]}
            if rank == 0:
                table = torch.ones(3, dim, requires_grad=True)
                y = fused.embedding_bag_all_to_all(
                    [table], torch.tensor([0, 1, 1, 2]), torch.arange(5), group=GROUP, **given
                )
            else:
                table = torch.zeros(0)
                nothing = torch.zeros(0, dtype=torch.int64)
                y = fused.embedding_bag_all_to_all([], nothing, torch.zeros(1, dtype=torch.int64), group=GROUP, **given)
            (y * (rank + 1)).sum().backward()
            found.append([list(y.shape), None if rank else table.grad[:, 0].tolist()])
        with torch.no_grad():
            free = rows(4), fused.gemm_all_to_all(torch.ones(4, 2), torch.ones(2, 3), group=GROUP).requires_grad
        return found, free


def needs(rank: int, exchange: Exchange) -> Any:
    """Only rank 0 needs a gradient: by the functions all take part, by the bare operators all are refused."""
    with heap_of(rank, exchange):
        a, b = torch.ones(4, 2, requires_grad=rank == 0), torch.ones(2, 3)
        y = fused.gemm_all_to_all(a, b, group=GROUP)
        (y * (rank + 1)).sum().backward()
        ops = registered.ops.shardplan
        bare = refused(lambda: ops.gemm_all_to_all(a, b, None, GROUP))
        alike = ops.gemm_all_to_all(a.detach(), b, None, GROUP).requires_grad
        return y.requires_grad, None if rank else a.grad.tolist(), bare, alike


def differing(rank: int, exchange: Exchange) -> Any:
    """What differs is said of all ranks, and the next call is well."""
    with heap_of(rank, exchange):
        wide = torch.ones(2, 3 + (rank == 2))
        n = 2 + (rank % 2)
        tables_ = [torch.ones(2, 2 + rank % 2)]
        bags = (torch.zeros(4, dtype=torch.int64), torch.arange(5))
        return [
            refused(lambda: fused.gemm_all_to_all(torch.ones(4, 2), wide, group=GROUP)),
            refused(lambda: fused.gemm_all_to_all(torch.ones(n, 2), torch.ones(2, 8), group=GROUP, scatter=1)),
            refused(lambda: fused.embedding_bag_all_to_all(tables_, *bags, group=GROUP)),
            refused(lambda: (sums if rank == 1 else rows)(4)),
            rows(4)[1],
        ]


def in_thread(call: Callable[[], Any], name: str) -> Any:
    found: list[Any] = []
    one = threading.Thread(target=lambda: found.append(refused(call)), name=name)
    one.start()
    one.join()
    return found[0]


def threads(rank: int, exchange: Exchange) -> Any:
    """Another thread is refused, until the heap's has ended or it resets the heap."""
    with heap_of(rank, exchange) as heap:
        rows(4)
        other = in_thread(lambda: rows(4), "second")
        after = rows(4)[1]
        reset = in_thread(lambda: (heap.reset(), rows(4)), "second")
        ended = rows(4)[1]  # the second has ended
        return [other, after, reset, ended]


def few(rank: int, exchange: Exchange) -> Any:
    """More shapes than are remembered, each rank its own."""
    agreement.MOST = 2
    with heap_of(rank, exchange) as heap:
        found = [rows(1 + (k * (rank + 1)) % 3)[1] for k in range(12)]
        return found, len(heap.kept[agreement.KNOWN])


def wraps(rank: int, exchange: Exchange) -> Any:
    """Calls over the wrap of their stamps."""
    with heap_of(rank, exchange) as heap:
        header = heap.header
        exchange(b"")
        header.calls = (1 << 16) - 3
        for line in header.said:
            line[1], line[0] = ((1 << 16) - 3) << DIGEST, ((1 << 16) - 4) << DIGEST
        exchange(b"")
        return [rows(4)[1] for _ in range(8)], header.calls - (1 << 16)


def words(rank: int, exchange: Exchange) -> Any:
    """Words that differ in low bits only, in high bits only, and come again."""
    with heap_of(rank, exchange) as heap:
        said = [1, 2, 1, 1 << 40, 1, 3, 3, 3]
        return [heap.header.exchange(each + rank, (), 15.0, "words") for each in said]


def absent(rank: int, exchange: Exchange) -> Any:
    """Rank 1 makes one call less."""
    with heap_of(rank, exchange) as heap:
        rows(4)
        heap.seconds = 0.5
        said = refused(lambda: rows(4)) if rank == 0 else ""
        exchange(b"")
        return said


def main() -> None:
    cases = [a.split(":") for a in sys.argv[1:] if ":" in a]
    with fused.SymmetricHeap.create(1 << 16, "virtual", lambda mine: [mine], "first") as heap:
        fused.bind(GROUP, heap)  # what a first call imports is there before ranks are forked
        rows(1)
    print(json.dumps([forked(int(ranks), globals()[name], 100) for name, ranks in cases]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
