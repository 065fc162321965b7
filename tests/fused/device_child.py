"""The operators of PyTorch by Triton's kernels, in the interpreter, on memory of CPUs and on a device's; prints JSON.

The device is a stand-in: memory that processes share, made and opened as a GPU's is, beside the heap's own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from tests.fused.forked import Exchange, forked, refused

from shardplan import fused
from shardplan.fused.heap import devices
from shardplan.fused.heap.segments import ShmSegment
from shardplan.fused.operators import gemv
from shardplan.fused.operators.call_context import CallContext

Operands = tuple[Callable[[str], torch.Tensor], list[torch.Tensor]]


class SharedDevice:
    """What `CudaIpcSegment` is, without a GPU."""

    device = "cpu"
    broken = False

    def export(self, nbytes: int, name: str) -> bytes:
        if SharedDevice.broken:
            raise RuntimeError("no memory there")
        self.made = ShmSegment(nbytes, name)
        return self.made.token.encode()

    def __del__(self) -> None:
        if hasattr(self, "made"):
            self.made.publish()

    def open(self, said: Sequence[bytes], rank: int) -> list[torch.Tensor]:
        parts = [torch.from_numpy(self.made.open(token.decode())) for token in said]
        dist.barrier()
        self.made.publish()
        return parts


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def cases(ranks: int, rank: int, epoch: int) -> dict[str, Operands]:
    """Calls of a group's name, and what they are differentiated by; alike where ranks must be."""
    torch.manual_seed(epoch)
    counts = torch.randint(0, 6, (ranks, ranks)) * (torch.rand(ranks, ranks) < 0.7)
    send, receive = counts[rank].tolist(), counts[:, rank].tolist()
    rows = [5 + 3 * s for s in range(ranks)]
    columns = [4] + [3] * (ranks - 2) + [0]
    b, bias, wide = random(6, 7), random(7), random(6, sum(columns))
    held = [0] + [2] * (ranks - 1) if epoch == 2 else [1] * ranks
    batches = [3] + [2] * (ranks - 1)
    torch.manual_seed(100 * epoch + rank)
    a, left = random(sum(send), 6), random(rows[rank], 6)
    factor, vector, thin = random(9, 2 + rank), random(2 + rank), random(2 + rank, 3)
    tables = [random(5, 4) for _ in range(held[rank])]
    lengths = torch.randint(0, 3, (held[rank] * sum(batches),))
    kind = torch.int32 if epoch == 1 else torch.int64  # which kernels of Triton read as they are
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(kind)
    ids = torch.randint(0, 5, (int(offsets[-1]),), dtype=kind)
    scale = torch.rand(len(ids), requires_grad=True)

    def bags(mode: str) -> Operands:
        given = {"mode": mode, "table_counts": held, "batch_splits": batches}
        weights = scale if mode == "sum" else None
        leaves = [*tables, *([scale] if mode == "sum" else [])]
        return (lambda g: fused.embedding_bag_all_to_all(tables, ids, offsets, weights, group=g, **given)), leaves

    given = {"send_splits": send, "recv_splits": receive}
    there = {"scatter": 1, "send_splits": columns, "recv_splits": rows}
    return {
        "rows": (lambda g: fused.gemm_all_to_all(a, b, bias, group=g, activation="silu", **given), [a, b, bias]),
        "signals": (lambda g: fused.gemm_all_to_all(left[:5], b, group=g, tiles=2), [left, b]),
        "columns": (lambda g: fused.gemm_all_to_all(left, wide, group=g, **there), [left, wide]),
        "one shot": (lambda g: fused.gemv_all_reduce(factor, vector, group=g, algorithm="one_shot"), [factor, vector]),
        "two shots": (lambda g: fused.gemv_all_reduce(factor, thin, group=g, algorithm="two_shot"), [factor, thin]),
        "bags": bags("mean" if epoch == 1 else "sum"),
    }


def values(call: Callable[[str], torch.Tensor], leaves: list[torch.Tensor], group: str) -> list[torch.Tensor]:
    out = call(group)
    seed = torch.arange(out.numel()).reshape(out.shape).sin()
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]


def work(rank: int, exchange: Exchange, ranks: int, path: str, backend: str) -> dict[str, Any]:
    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    said: dict[str, Any] = {"wrong": [], "used": [], "count": 0}
    if backend == "cuda_ipc":
        devices.DEVICES["cuda_ipc"] = devices.CudaIpcSegment
        said["no GPU"] = refused(lambda: fused.bind_group(nbytes=1 << 16, backend=backend))
        devices.DEVICES["cuda_ipc"] = SharedDevice
    group = dist.group.WORLD.group_name
    with fused.SymmetricHeap.create(1 << 22, "shm", exchange, "plain") as plain:
        fused.bind("plain", plain)
        with fused.bind_group(nbytes=1 << 22, backend=backend, kernels="triton") as heap:
            said["parts"] = len(heap.parts)
            for epoch in range(3):
                for name, (call, leaves) in cases(ranks, rank, epoch).items():
                    got, wanted = (values(call, leaves, g) for g in (group, "plain"))
                    good = all(
                        x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, atol=2e-5)
                        for x, y in zip(got, wanted, strict=True)
                    )
                    said["count"] += 1 + len(leaves)
                    if not good or len(got) != len(wanted):
                        said["wrong"].append(f"{name} epoch {epoch}")
                said["used"].append(heap.used)
            said |= failures(heap, group, rank, ranks)
    said["left"] = refused(lambda: fused.gemv_all_reduce(torch.ones(2, 2), torch.ones(2), group=group))
    SharedDevice.broken = rank == 1
    if backend == "cuda_ipc":
        said["broken"] = refused(lambda: fused.bind_group(nbytes=1 << 16, backend=backend))
    dist.destroy_process_group()
    return said


def failures(heap: fused.SymmetricHeap, group: str, rank: int, ranks: int) -> dict[str, str | bool]:
    """What is refused on all ranks, what one rank's mistake tells the others, and a reset."""
    ops, said = torch.ops.shardplan, dict[str, str | bool]()
    a, b, x = torch.ones(2 * ranks, 3), torch.ones(3, 2), torch.ones(3)
    said["out"] = refused(lambda: ops.gemm_all_to_all_out(torch.zeros(2 * ranks, 2), a, b, None, group))
    said["into"] = into(heap, group, rank, ranks)
    with fused.counted(heap):
        said["counted"] = refused(lambda: fused.gemv_all_reduce(a, x, group=group))
    said["flags"] = refused(lambda: heap.flags(2, "mine"))
    said["placed"] = refused(lambda: gemv.forward(CallContext(heap), a.to("meta"), x.to("meta")))
    heap.barrier()
    table, offsets = torch.ones(4, 2), torch.arange(ranks + 1)
    ids = torch.full((ranks,), 4 if rank == 1 else 0)
    heap.seconds = 20.0
    fused.embedding_bag_all_to_all([table], ids, offsets, group=group)
    said["index"] = refused(heap.check)
    dist.barrier()
    said["told"] = not heap.parts or int(heap.parts[rank][0]) == 1  # to kernels that wait
    said["after"] = refused(lambda: fused.gemv_all_reduce(a, x, group=group))
    dist.barrier()
    heap.reset()
    said["cleared"] = not heap.parts or int(heap.parts[rank][0]) == 0  # else waits of the next call end at once
    said["again"] = torch.equal(fused.gemm_all_to_all(a, b, group=group), torch.full((2 * ranks, 2), 3.0))
    return said


def into(heap: fused.SymmetricHeap, group: str, rank: int, ranks: int) -> bool:
    """Whether five results that lie in the heap are right, each until the next call that writes it."""
    ops, good = torch.ops.shardplan, True
    products, bags = heap.alloc((2 * ranks, 2), "f32", "products").local, heap.alloc((3, ranks, 2), "f32", "bags").local
    vector = heap.alloc((5,), "f32", "vector").local
    ids, offsets = torch.arange(3 * ranks) % 4, torch.arange(3 * ranks + 1)
    for epoch in range(5):
        a, table = torch.full((2 * ranks, 3), 1.0 + rank + epoch), torch.full((4, 2), 7.0 * rank + epoch)
        ops.gemm_all_to_all_out(products, a, torch.ones(3, 2), None, group)
        ops.embedding_bag_all_to_all_out(bags, [table], ids, offsets, None, group, "sum", [1] * ranks, [3] * ranks)
        ops.gemv_all_reduce_out(vector, a[:1].expand(5, 3).contiguous(), torch.ones(3), group)
        sums = [3.0 * (1 + r + epoch) for r in range(ranks)]
        good &= bool((products.view(ranks, 4) == torch.tensor(sums)[:, None]).all())
        good &= bool((bags == (7.0 * torch.arange(ranks) + epoch)[None, :, None]).all())
        good &= bool((vector == sum(sums)).all())
    return good


def main() -> None:
    ranks, backend = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        done = forked(ranks, lambda rank, exchange: work(rank, exchange, ranks, f"{folder}/store", backend), 200)
        print(json.dumps(done))


if __name__ == "__main__":
    main()
