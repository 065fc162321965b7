"""Grouped GEMM + all-to-all on forked ranks, beside plain numpy on all ranks' operands; prints JSON.

Arguments are ranks, and `triton` for its kernels in the interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import timedelta
from typing import Any

if "triton" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from tests.fused.forked import Exchange, forked, refused

from shardplan import fused
from shardplan.errors import ShardplanError

DEPTH, COLUMNS = 5, 7
Arrays = list[np.ndarray]


def reference(a: Arrays, b: Arrays, counts: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    """Results of all ranks, and the gradients of a and b where the loss is the sum of all results' sines."""
    ranks, experts = len(a), len(b[0])
    parts: list[Arrays] = [[] for _ in range(ranks)]
    places: list[list[tuple[int, int, slice]]] = [[] for _ in range(ranks)]
    for s in range(ranks):
        ends = np.cumsum(counts[s].reshape(-1)).reshape(counts[s].shape)
        for d in range(ranks):
            for e in range(experts):
                rows = slice(int(ends[e, d] - counts[s][e, d]), int(ends[e, d]))
                parts[d].append(a[s][rows] @ b[s][e])
                places[d].append((s, e, rows))
    da, db = [np.zeros_like(x) for x in a], [np.zeros_like(x) for x in b]
    for d in range(ranks):
        for part, (s, e, rows) in zip(parts[d], places[d], strict=True):
            da[s][rows] = np.cos(part) @ b[s][e].T
            db[s][e] += a[s][rows].T @ np.cos(part)
    return [np.concatenate(each) for each in parts], da, db


def work(rank: int, exchange: Exchange, ranks: int, path: str) -> dict[str, Any]:
    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    group = dist.group.WORLD.group_name
    kernels = "triton" if "triton" in sys.argv else "cpu"
    wrong: list[str] = []
    count = 0
    with fused.bind_group(nbytes=1 << 22, kernels=kernels) as heap:
        heap.seconds = 30.0
        for dtype, close, experts in ((torch.float32, 2e-5, 3), (torch.float32, 2e-5, 1), (torch.bfloat16, 6e-2, 2)):
            for epoch in range(3):
                dice = np.random.default_rng(10 * epoch + experts)
                counts = [dice.integers(0, 4, (experts, ranks)) for _ in range(ranks)]
                if epoch == 1:
                    counts[0][:] = 0  # a rank that has nothing
                    counts[-1][:, 0] = 0
                spare = [int(dice.integers(0, 3)) for _ in range(ranks)]  # rows behind those that counts name
                sizes = [int(n.sum()) + more for n, more in zip(counts, spare, strict=True)]

                def made(*shape: int, dice: np.random.Generator = dice, dtype: torch.dtype = dtype) -> torch.Tensor:
                    return torch.from_numpy(dice.normal(size=shape) / 2).to(dtype)

                a = [made(n, DEPTH) for n in sizes]
                b = [made(experts, DEPTH, COLUMNS) for _ in range(ranks)]
                wanted, da, db = reference([x.double().numpy() for x in a], [x.double().numpy() for x in b], counts)
                capacity = 2 + max(map(len, wanted))
                mine, weights = a[rank].requires_grad_(), b[rank].requires_grad_()
                given = torch.from_numpy(counts[rank])
                out, came = fused.grouped_gemm_all_to_all(mine, weights, given, group=group, capacity=capacity)
                rows = len(wanted[rank])
                if not np.array_equal(came.numpy(), np.stack([n[:, rank] for n in counts])):
                    wrong.append(f"counts of epoch {epoch}: {came.tolist()}")
                if out.shape != (capacity, COLUMNS) or out[rows:].abs().sum() != 0:
                    wrong.append(f"{out.shape} of epoch {epoch}, or rows behind the {rows} that come")
                found = [out[:rows], *torch.autograd.grad(out.double().sin().sum(), (mine, weights))]
                for k, (x, y) in enumerate(zip(found, (wanted[rank], da[rank], db[rank]), strict=True)):
                    count += 1
                    if not np.allclose(x.detach().double().numpy(), y, atol=close, rtol=close):
                        off = float(np.abs(x.detach().double().numpy() - y).max())
                        wrong.append(f"{dtype}, {experts} experts, epoch {epoch}, {['out', 'da', 'db'][k]}: {off}")
        said: dict[str, Any] = {"wrong": wrong, "count": count, "compiled": True, "opcheck": "right"}
        if kernels == "cpu":
            said |= traced(group, ranks)
        ones = torch.ones(1, ranks, dtype=torch.int64)
        x, w = torch.ones(ranks, 2), torch.ones(1, 2, 4)
        few = lambda: fused.grouped_gemm_all_to_all(x, w, ones, group=group, capacity=ranks - 1)  # noqa: E731
        said["kind"] = refused(lambda: fused.grouped_gemm_all_to_all(x, w, ones.int(), group=group, capacity=9))
        said["few"] = refused(lambda: (few(), heap.check()))
    dist.destroy_process_group()
    return said


def traced(group: str, ranks: int) -> dict[str, Any]:
    """Whether it compiles and trains equal, and what opcheck says."""
    counts = torch.full((2, ranks), 2)
    torch.manual_seed(0)
    leaves = [torch.randn(4 * ranks, 3, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)]

    def layer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fused.grouped_gemm_all_to_all(a, b, counts, group=group, capacity=4 * ranks)[0].relu()

    found: list[list[torch.Tensor]] = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out = run(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    same = all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    op = torch.ops.shardplan.grouped_gemm_all_to_all
    try:
        torch.library.opcheck(op, (*leaves, counts, group, 4 * ranks), test_utils=utils)
        checked = "right"
    except (ShardplanError, torch.testing._internal.optests.generate_tests.OpCheckError) as error:
        checked = str(error)
    return {"compiled": same, "opcheck": checked}


def main() -> None:
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(forked(ranks, lambda rank, exchange: work(rank, exchange, ranks, f"{folder}/store"), 200)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
