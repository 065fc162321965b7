"""Shapes that vary, on forked ranks: whether results are right, and the bytes that are live; prints JSON.

Arguments are `cpu` or `triton`, and how many shapes.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

if "triton" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from tests.fused.forked import Exchange, forked

from shardplan import fused


def work(rank: int, exchange: Exchange) -> dict[str, Any]:
    """Products of M rows, M growing by 64, and now and then small again."""
    many, rng = int(sys.argv[2]), random.Random(1)
    wide, wrong = 4, 0
    with fused.SymmetricHeap.create(4 << 20, "shm", exchange, "growth") as heap:
        if "triton" in sys.argv:
            from shardplan.fused.triton.serving import TritonKernels

            heap.kernels = TritonKernels(heap)
        fused.bind("growth", heap)
        before, b = heap.used, torch.ones(1, wide)
        step = 64 if many > 100 else 4
        with torch.no_grad():
            for k in range(many):
                m = step * (k + 1 if k % 3 else rng.randint(1, k + 1))
                got = fused.gemm_all_to_all(torch.full((m, 1), float(k % 7)), b, group="growth")
                wrong += not bool((got == k % 7).all())
        most = 4 * wide * heap.ranks * -(-step * many // heap.ranks)
        live = heap.used - before - sum(end - begin for begin, end in heap.holes)
        used = heap.used - before
        x = heap.alloc((512,), "f32", "mine")
        x.local.fill_(3.0)
        heap.release(x)
        again = heap.alloc((256,), "f32", "again")
        zero = not bool(again.local.any())
        return {
            "wrong": wrong,
            "live": live / most,
            "used": used / most,
            "again": again.offset == x.offset,
            "zero": zero,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(forked(2, work, 200)))
