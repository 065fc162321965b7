"""All-gather + GEMM and GEMM + reduce-scatter on forked ranks, beside torch on all ranks' operands; prints JSON.

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

import torch
import torch.distributed as dist
from tests.fused.forked import Exchange, forked, refused

from shardplan import fused
from shardplan.errors import ShardplanError
from shardplan.fused.tiles.shapes import tile_sizes

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float64: 1e-12}


class Layer(torch.nn.Module):
    """Two products of tensor parallelism whose sequence is cut."""

    def forward(self, a: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: str) -> torch.Tensor:
        return fused.gemm_reduce_scatter(fused.all_gather_gemm(a, up, group=group).relu(), down, group=group)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.randn(*shape, dtype=torch.float64) / max(1, shape[-1]) ** 0.5).to(dtype).requires_grad_()


def work(rank: int, exchange: Exchange, ranks: int, path: str) -> dict[str, Any]:
    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    group = dist.group.WORLD.group_name
    kernels = "triton" if "triton" in sys.argv else "cpu"
    wrong: list[str] = []
    count = 0
    with fused.bind_group(nbytes=1 << 22, kernels=kernels) as heap:
        heap.seconds = 30.0
        cases = [(torch.float32, [4] * ranks, None), (torch.bfloat16, [3] * ranks, None)]
        cases += [(torch.float32, [5 * (s % 3) for s in range(ranks)], True)]
        cases += [(torch.float64, [7, *[2] * (ranks - 1)], True)] * (kernels == "cpu")
        for dtype, rows, given in cases:
            for epoch in range(2):
                seed = 1000 * epoch
                a = [random(seed + s, rows[s], 6, dtype=dtype) for s in range(ranks)]
                up = [random(seed + 50 + s, 6, 5 + s, dtype=dtype) for s in range(ranks)]
                wide = [random(seed + 70 + s, sum(rows), 4 + s, dtype=dtype) for s in range(ranks)]
                down = [random(seed + 90 + s, 4 + s, 8, dtype=dtype) for s in range(ranks)]
                gathered = [torch.cat(a) @ b for b in up]
                summed = sum((x.double() @ y.double() for x, y in zip(wide, down, strict=True)), torch.zeros(()))
                splits = rows if given else None
                parts = torch.split(summed, rows if given else tile_sizes(sum(rows), ranks))
                got = [
                    fused.all_gather_gemm(a[rank], up[rank], group=group, splits=splits),
                    fused.gemm_reduce_scatter(wide[rank], down[rank], group=group, splits=splits),
                ]
                wanted = [
                    (gathered[rank], sum(x.double().sin().sum() for x in gathered), (a[rank], up[rank])),
                    (parts[rank], summed.sin().sum(), (wide[rank], down[rank])),
                ]
                for name, mine, (out, loss, leaves) in zip(("gather", "scatter"), got, wanted, strict=True):
                    pairs = [(mine, out)]
                    pairs += zip(
                        torch.autograd.grad(mine.double().sin().sum(), leaves),
                        torch.autograd.grad(loss, leaves, retain_graph=True),
                        strict=True,
                    )
                    for k, (x, y) in enumerate(pairs):
                        count += 1
                        if x.shape != y.shape or not torch.allclose(
                            x.double(), y.double(), atol=CLOSE[dtype], rtol=CLOSE[dtype]
                        ):
                            wrong.append(f"{name} {dtype} {rows} epoch {epoch} {k}")
        said: dict[str, Any] = {"wrong": wrong, "count": count}
        said |= traced(group, rank, ranks) if kernels == "cpu" else {}
        said["refused"] = refused(lambda: fused.all_gather_gemm(a[rank], torch.ones(3, 3), group=group))
        said["uneven"] = refused(lambda: fused.all_gather_gemm(torch.ones(3 + rank, 2), torch.ones(2, 2), group=group))
    dist.destroy_process_group()
    return said


def traced(group: str, rank: int, ranks: int) -> dict[str, Any]:
    """Whether a layer of both compiles and trains equal, and what opcheck says."""
    layer, leaves = (
        Layer(),
        [random(5 + rank + k, *s, dtype=torch.float32) for k, s in enumerate(((4, 6), (6, 5), (5, 6)))],
    )
    found: list[list[torch.Tensor]] = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out = run(*leaves, group)
        found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    same = all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    ops, wide = torch.ops.shardplan, random(9, 4 * ranks, 6, dtype=torch.float32)
    try:
        for op, x in ((ops.all_gather_gemm, leaves[0]), (ops.gemm_reduce_scatter, wide)):
            torch.library.opcheck(
                op, (x, leaves[1], group), test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )
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
