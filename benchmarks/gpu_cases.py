"""The cases of `benchmarks.gpu`: each a function from `dry` to what it found; shapes are tiny where it is dry."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from benchmarks.fused_text import Variant, findings
from benchmarks.gpu_kernels import time_kernels
from benchmarks.gpu_timing import time_embedding, time_gemm, time_gemv
from benchmarks.gpu_torch import abort, compute_ops, graph_capture, programs_on_nccl, stream_order

from shardplan import fused
from shardplan.errors import ShardplanError
from shardplan.fused.triton import (
    KernelOptions,
    ProductTile,
    TileMemory,
    embedding_bag_all_to_all,
    gemm_all_to_all,
    gemv_all_reduce,
)
from shardplan.fused.triton.compile_ahead import source_hash
from shardplan.fused.triton.embedding_kernel import embedding_kernel
from shardplan.fused.triton.gemm import gemm_prepared
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.gemv_kernel import gemv_kernel

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EPOCHS = 3


def device(dry: bool) -> str:
    return "cpu" if dry else "cuda"


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error over the largest number."""
    if not wanted.numel():
        return 0.0
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1.0))


def _worlds(dry: bool) -> list[tuple[int, torch.dtype]]:
    if dry:
        return [(2, torch.float32)]
    return [(w, t) for w in (2, 4, 8) for t in (torch.float32, torch.bfloat16, torch.float16)]


def _row(ranks: int, dtype: torch.dtype, errors: list[float]) -> dict[str, Any]:
    good = bool(errors) and max(errors) <= CLOSE[dtype]
    return {"ranks": ranks, "dtype": str(dtype).removeprefix("torch."), "error": max(errors), "good": good}


def _gemm_operands(
    rng: np.random.Generator, counts: np.ndarray, dtype: torch.dtype, depth: int, n: int, where: str
) -> Any:
    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype).to(where)

    ranks = len(counts)
    return [draw(int(m), depth) for m in counts.sum(1)], draw(ranks, depth, n), draw(ranks, n)


def correct_gemm(dry: bool) -> dict[str, Any]:
    """Virtual ranks, uneven and empty splits, with bias and an activation; aligned and unaligned columns."""
    rows = []
    tile, high, depth = (ProductTile((16, 16, 16)), 12, 20) if dry else (ProductTile((128, 128, 64)), 300, 200)
    for ranks, dtype in _worlds(dry):
        memory = TileMemory.virtual(ranks, 1 << (21 if dry else 26), device(dry))
        errors: list[float] = []
        for columns in (16,) if dry else (256, 200, 133):
            rng = np.random.default_rng(ranks)
            counts = rng.integers(0, high, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.8)
            for _ in range(EPOCHS):
                a, b, bias = _gemm_operands(rng, counts, dtype, depth, columns, device(dry))
                z = [torch.relu(x.float() @ y.float() + c.float()) for x, y, c in zip(a, b, bias, strict=True)]
                parts = [torch.split(x, counts[s].tolist()) for s, x in enumerate(z)]
                got = gemm_all_to_all(memory, torch.cat(a), b, bias, counts.tolist(), 0, "relu", tile, KernelOptions())
                errors += [_error(x, torch.cat([p[d] for p in parts])) for d, x in enumerate(got)]
        rows.append(_row(ranks, dtype, errors))
    return {"rows": rows, "source": source_hash(gemm_kernel)}


def correct_gemv(dry: bool) -> dict[str, Any]:
    """Virtual ranks, one shot and two, depths that differ, one column and three; the same bits on all."""
    rows = []
    height, block = (9, (16, 16)) if dry else (1000, (16, 256))
    for ranks, dtype in _worlds(dry):
        memory = TileMemory.virtual(ranks, 1 << 24, device(dry))
        rng, errors, same = np.random.default_rng(ranks), list[float](), True
        depths = [(7 * s) % 20 * (1 if dry else 50) for s in range(ranks)]
        for shots, wide in ((1, 1), (2, 1), (2, 3)):
            for _ in range(EPOCHS):
                a = [torch.from_numpy(rng.normal(size=(height, d))).to(dtype).to(device(dry)) for d in depths]
                x = [torch.from_numpy(rng.normal(size=(d, wide))).to(dtype).to(device(dry)) for d in depths]
                wanted = torch.stack([y.float() @ z.float() for y, z in zip(a, x, strict=True)]).sum(0)
                got = gemv_all_reduce(memory, a, x, shots, block, 0, KernelOptions())
                errors += [_error(g, wanted) for g in got]
                same &= all(torch.equal(g, got[0]) for g in got)
        row = _row(ranks, dtype, errors)
        rows.append(row | {"same bits": same, "good": row["good"] and same})
    return {"rows": rows, "source": source_hash(gemv_kernel)}


def correct_embedding(dry: bool) -> dict[str, Any]:
    """Virtual ranks, some without tables, empty bags, uneven parts of the batch, weights and means."""
    rows = []
    where = device(dry)
    for ranks, dtype in _worlds(dry):
        memory = TileMemory.virtual(ranks, 1 << 25, where)
        rng, errors = np.random.default_rng(ranks), list[float]()
        held, batches = rng.integers(0, 3, ranks).tolist(), rng.integers(0, 5 if dry else 200, ranks).tolist()
        held[0], batch = 2, sum(batches)
        for dim, mode in ((16, "sum"),) if dry else ((128, "sum"), (92, "mean"), (5, "sum")):
            for _ in range(EPOCHS):
                tables = [torch.from_numpy(rng.normal(size=(50, dim))).to(dtype).to(where) for _ in range(sum(held))]
                lengths = rng.integers(0, 4, len(tables) * batch)
                ids = torch.from_numpy(rng.integers(0, 50, lengths.sum())).to(where)
                offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(where)
                weights = torch.rand(len(ids), device=where) if mode == "sum" else None
                parts = []
                for t, table in enumerate(tables):
                    at = offsets[t * batch : (t + 1) * batch + 1]
                    cut = slice(int(at[0]), int(at[-1]))
                    scale = None if weights is None else weights[cut]
                    bag = torch.nn.functional.embedding_bag
                    parts.append(bag(ids[cut], table.float(), at[:-1] - at[0], mode=mode, per_sample_weights=scale))
                wanted = torch.split(torch.stack(parts, 1), batches)
                got = embedding_bag_all_to_all(memory, tables, ids, offsets, weights, held, batches, dim, mode)
                errors += [_error(x, y) for x, y in zip(got, wanted, strict=True)]
        rows.append(_row(ranks, dtype, errors))
    return {"rows": rows, "source": source_hash(embedding_kernel)}


# Two processes on one GPU


def _by_torch(rank: int, ranks: int, group: str, where: str) -> list[float]:
    """Errors of PyTorch's operators and of their gradients, beside torch on all ranks' operands here."""
    rng = np.random.default_rng(1)

    def made(*shape: int) -> list[torch.Tensor]:
        numbers = [rng.normal(size=shape) / shape[-1] ** 0.5 for _ in range(ranks)]
        return [torch.tensor(x, dtype=torch.float32, device=where, requires_grad=True) for x in numbers]

    a, b, factor, vector, table = made(4 * ranks, 16), made(16, 32), made(48, 24), made(24), made(9, 16)
    ids = torch.from_numpy(rng.integers(0, 9, 6 * ranks)).to(where)
    offsets = torch.arange(0, 6 * ranks + 1, 3, device=where)
    rows = [torch.cat([(x @ y).relu().split(4)[r] for x, y in zip(a, b, strict=True)]) for r in range(ranks)]
    bag = [torch.nn.functional.embedding_bag(ids, t, offsets[:-1], mode="sum").split(2) for t in table]
    wanted = [
        (rows[rank], torch.stack(rows).sin().sum(), (a[rank], b[rank])),
        (sum(x @ y for x, y in zip(factor, vector, strict=True)), None, (factor[rank], vector[rank])),
        (torch.stack([t[rank] for t in bag], 1), sum(x.sin().sum() for t in bag for x in t), (table[rank],)),
    ]
    got = [
        fused.gemm_all_to_all(a[rank], b[rank], group=group, activation="relu"),
        fused.gemv_all_reduce(factor[rank], vector[rank], group=group),
        fused.embedding_bag_all_to_all([table[rank]], ids, offsets, group=group),
    ]
    errors: list[float] = []
    for mine, (out, loss, leaves) in zip(got, wanted, strict=True):
        assert isinstance(out, torch.Tensor)
        errors.append(_error(mine.detach(), out.detach()))
        found = torch.autograd.grad(mine.sin().sum(), leaves)
        whole = torch.autograd.grad(out.sin().sum() if loss is None else loss, leaves, retain_graph=True)
        errors += [_error(x, y) for x, y in zip(found, whole, strict=True)]
    return errors


def _rank(rank: int, ranks: int, kind: str, dry: bool, port: int, queue: Any) -> None:
    """A process: three epochs of a product, PyTorch's operators, then a product that rank 1 calls alone."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        heap = fused.bind_group(nbytes=1 << 22, backend=kind, kernels="triton")
        memory = TileMemory.of(heap)
        where, tile = device(dry), ProductTile((16, 16, 16) if dry else (64, 64, 32), described=True)
        high = 8 if dry else 200
        counts = np.array([[high, high - 3], [0, high]])
        rng, errors = np.random.default_rng(0), list[float]()
        options = KernelOptions(programs=2, seconds=60.0)
        for _ in range(EPOCHS):
            a, b, _ = _gemm_operands(rng, counts, torch.float32, 32, 16, where)
            z = [x @ y for x, y in zip(a, b, strict=True)]
            (got,) = gemm_all_to_all(
                memory, a[rank], b[rank : rank + 1], None, counts.tolist(), 0, "none", tile, options
            )
            parts = [torch.split(x, counts[s].tolist())[rank] for s, x in enumerate(z)]
            errors.append(_error(got, torch.cat(parts)))
            dist.barrier()
        errors += _by_torch(rank, ranks, dist.group.WORLD.group_name, where)
        said, started = "no error", time.monotonic()
        if rank == 1:
            try:
                late = replace(options, seconds=1.0)
                gemm_all_to_all(memory, a[1], b[1:2], None, counts.tolist(), 0, "none", tile, late)
                heap.check()
            except ShardplanError as error:
                said = f"{type(error).__name__}: {error}"
        queue.put((rank, errors, said, time.monotonic() - started))
        dist.barrier()
    except Exception as error:
        queue.put((rank, [], f"{type(error).__name__}: {error}", 0.0))
    finally:
        dist.destroy_process_group()


def two_processes(kind: str, dry: bool) -> dict[str, Any]:
    """Correctness and the timeout between two processes; multi-process times on one GPU mean nothing, so none."""
    import socket

    from torch import multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, 2, kind, dry, port, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in ranks:
            rank, *said = queue.get(timeout=100)
            found[rank] = said
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
    errors = [e for said in found.values() for e in said[0]]
    checked = EPOCHS + 3 + 2 + 2 + 1  # products; results of operators, and their gradients
    timed_out = found[1][1].startswith("FusedTimeout: gemm_all_to_all: rank 1 waited")
    good = len(errors) == 2 * checked and max(errors) < CLOSE[torch.float32] and timed_out
    return {"kind": kind, "errors": errors, "said": [found[r][1] for r in (0, 1)], "seconds": found[1][2], "good": good}


def assembly(dry: bool) -> dict[str, Any]:
    """What `fused_text` asserts of kernels compiled ahead of time, of what a real launch ran."""
    memory = TileMemory.virtual(2, 1 << 22, device(dry))
    dtype = torch.float32 if dry else torch.bfloat16
    side, tile = (16, ProductTile((16, 16, 16))) if dry else (256, ProductTile((128, 256, 64), described=True))
    a, b = (torch.ones(s, dtype=dtype, device=device(dry)) for s in ((4 * side, side), (2, side, side)))
    counts = [[side, side]] * 2
    made, call, (arguments, constants, _) = gemm_prepared(memory, a, b, None, counts, 0, "none", tile, None)
    launched = made.launch(gemm_kernel, call, *arguments, **constants)
    made.finish()
    if dry:
        return {"good": True, "why": "the interpreter compiles nothing"}
    each = zip(("gemm", "read"), launched, (Variant(tile), Variant()), strict=True)
    said = {name: findings(name, made.asm, variant) for name, made, variant in each}
    return {"findings": said, "good": all(good for each in said.values() for good in each.values())}


CASES: dict[str, Any] = {
    "kernels by shape": time_kernels,
    "compute ops": compute_ops,
    "programs on nccl": programs_on_nccl,
    "stream order on nccl": stream_order,
    "graph capture on nccl": graph_capture,
    "abort on nccl": abort,
    "correct gemm": correct_gemm,
    "correct gemv": correct_gemv,
    "correct embedding": correct_embedding,
    "two processes, cuda_ipc": lambda dry: two_processes("shm" if dry else "cuda_ipc", dry),
    "two processes, torch_symm": lambda dry: two_processes("shm" if dry else "torch_symm", dry),
    "assembly": assembly,
    "times of gemm": time_gemm,
    "times of embedding": time_embedding,
    "times of gemv": time_gemv,
}
