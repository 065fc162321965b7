"""The operator of docs/fuse.md on forked ranks, in the interpreter; prints findings as JSON.

Arguments are the file with the page's code, and numbers of ranks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from tests.fused.forked import Exchange, forked

from shardplan.fused import SymmetricHeap, bind


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def work(rank: int, exchange: Exchange) -> list[float]:
    """The largest errors of three epochs: results, gradients of a, of b."""
    errors: list[float] = []
    with SymmetricHeap.create(1 << 20, "shm", exchange, "page") as heap:
        bind("page", heap)
        n, columns, height = heap.ranks, 18, 5
        for epoch in range(3):
            torch.manual_seed(epoch)
            a = [torch.randn(n * height, 7 + 4 * r, requires_grad=True) for r in range(n)]
            b = [torch.randn(7 + 4 * r, columns, requires_grad=True) for r in range(n)]
            whole = sum((x @ y for x, y in zip(a, b, strict=True)), torch.zeros(()))
            g = torch.randn(n * height, columns)
            wanted = torch.autograd.grad(whole, [a[rank], b[rank]], g)
            mine = slice(rank * height, (rank + 1) * height)
            la, lb = (x.detach().clone().requires_grad_() for x in (a[rank], b[rank]))
            got = torch.ops.mine.gemm_reduce_scatter(la, lb, "page")
            found = torch.autograd.grad(got, [la, lb], g[mine])
            errors.append(float((got - whole[mine]).detach().abs().max()))
            errors += [float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True)]
        torch.library.opcheck(
            torch.ops.mine.gemm_reduce_scatter, (la, lb, "page"), test_utils=("test_schema", "test_faketensor")
        )
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    load(sys.argv[1])
    print(json.dumps([forked(int(n), work, 100) for n in sys.argv[2:]]))
