"""Memory that two processes on one GPU share, for `benchmarks.gpu`; `shm` is the same on CPUs."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
import torch.distributed as dist

from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.triton.memory import TileMemory, counted


def _exchange(mine: bytes) -> list[bytes]:
    said: list[Any] = [b""] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def shared(kind: str, rank: int, ranks: int, nbytes: int) -> TileMemory:
    """Return the memory of this process's rank: of `shm`, CUDA's handles between processes, or torch's own heap."""
    if kind == "shm":
        return TileMemory.of(SymmetricHeap.create(nbytes, "shm", _exchange, "gpu"))
    if kind == "cuda_ipc":
        from torch.multiprocessing.reductions import reduce_tensor

        mine = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        rebuilds = [pickle.loads(raw) for raw in _exchange(pickle.dumps(reduce_tensor(mine)))]
        # A handle does not open in the process that made it.
        parts = [mine if r == rank else make(*given) for r, (make, given) in enumerate(rebuilds)]
        return TileMemory(parts, rank, 1, counted(nbytes))
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    import torch.distributed._symmetric_memory as symmetric

    mine = symmetric.empty(nbytes, dtype=torch.uint8, device="cuda")
    mine.zero_()
    torch.cuda.synchronize()
    handle = symmetric.rendezvous(mine, dist.group.WORLD)
    parts = [handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(ranks)]
    return TileMemory(parts, rank, 1, counted(nbytes))
