"""Dtypes, autocast and forward mode, on one rank and on two; prints what came as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
from tests.fused.forked import Exchange, forked, refused

from shardplan import fused

FUNCTIONS: dict[str, Any] = {
    "gemm_all_to_all": fused.gemm_all_to_all,
    "gemv_all_reduce": fused.gemv_all_reduce,
    "all_gather_gemm": fused.all_gather_gemm,
    "gemm_reduce_scatter": fused.gemm_reduce_scatter,
}


def work(rank: int, exchange: Exchange) -> dict[str, Any]:
    said: dict[str, Any] = {"f64": {}, "refused": {}, "tangent": {}, "autocast": {}}
    with fused.SymmetricHeap.create(1 << 20, "shm", exchange, "types") as heap:
        fused.bind("types", heap)
        torch.manual_seed(0)
        a, b = torch.randn(2 * heap.ranks, 64, dtype=torch.float64) * 1e6, torch.randn(64, 3, dtype=torch.float64)
        for algorithm in ("one_shot", "two_shot"):
            got = fused.gemv_all_reduce(a, b, group="types", algorithm=algorithm)
            said["f64"][algorithm] = float((got - heap.ranks * (a @ b)).abs().max() / got.abs().max())
        table, ids, offsets = torch.ones(4, 2), torch.arange(heap.ranks), torch.arange(heap.ranks + 1)
        bags = fused.embedding_bag_all_to_all
        for name, run in FUNCTIONS.items():
            x, y = torch.ones(2 * heap.ranks, 4), torch.ones(4, 3)
            said["refused"][name] = refused(lambda: run(x.long(), y.long(), group="types"))  # noqa: B023
            said["tangent"][name] = refused(lambda: torch.func.jvp(lambda z: run(z, y, group="types"), (x,), (x,)))  # noqa: B023
            with torch.autocast("cpu", torch.bfloat16):
                said["autocast"][name] = str(run(x, y, group="types").dtype)
        said["refused"]["bags"] = refused(lambda: bags([table.long()], ids, offsets, group="types"))
        dual = torch.autograd.forward_ad
        with dual.dual_level():
            said["tangent"]["bags"] = refused(lambda: bags([dual.make_dual(table, table)], ids, offsets, group="types"))
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([forked(n, work, 60) for n in (1, 2)]))
