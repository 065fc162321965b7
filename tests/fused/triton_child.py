"""Triton's operators in the interpreter: on forked ranks, and on virtual ranks of one process; prints findings as JSON.

Arguments are names of functions below, each with a number of ranks: `values:3`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from benchmarks.fused_text import altered
from tests.fused.forked import Exchange, forked, refused
from tests.fused.operator_child import away

from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.tiles.shapes import starts, tile_sizes
from shardplan.fused.triton import (
    FusedKernel,
    KernelOptions,
    ProductTile,
    TileMemory,
    embedding_bag_all_to_all,
    gemm_all_to_all,
    gemv_all_reduce,
    peer,
    put,
    signal,
    wait,
)
from shardplan.fused.triton.compile_ahead import source_hash
from shardplan.fused.triton.gemm import gemm_prepared
from shardplan.fused.triton.gemm_kernel import gemm_kernel

EPOCHS = 3
TILE = ProductTile((16, 16, 32), described=True)
ACTS: Any = {"none": lambda z: z, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
             "relu": torch.relu}  # fmt: skip


class Found:
    """What differed from numpy's reference, and the largest error of f32."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.count = 0
        self.error = 0.0

    def __call__(self, what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        self.count += 1
        if said := away(got, wanted, got.dtype):
            self.wrong.append(f"{what}: {said}")
        elif got.numel() and got.dtype == torch.float32:
            self.error = max(self.error, float((got - wanted).abs().max()))

    def said(self) -> dict[str, Any]:
        return {"count": self.count, "wrong": self.wrong[:9], "error": self.error}


def gemms(memory: TileMemory, found: Found) -> None:
    """Even, uneven and empty splits, both scatters, activations, slices, dtypes."""
    n, here = memory.ranks, range(memory.rank0, memory.rank0 + memory.here)
    cases = [
        (0, "none", torch.float32, KernelOptions(programs=2 if n < 8 else 1)),
        (0, "gelu", torch.bfloat16, KernelOptions(programs=3 if n < 8 else 2)),
        (1, "silu", torch.float32, KernelOptions(programs=1)),
    ]
    for k, (scatter, activation, dtype, options) in enumerate(cases):
        rng = np.random.default_rng(k)
        counts = rng.integers(1, 24 if n < 8 else 16, (n, n)) * (rng.random((n, n)) < min(0.7, 6 / n / n))
        if k == 0 and n < 4:
            counts = np.full((n, n), 16)
        depth, columns = (33, 2 * n + 1 if n < 8 else 9) if k else (32, 16)
        if scatter:
            counts[:, 0] = rng.integers(0, 12, n)
        rows = counts.sum(1) if scatter == 0 else counts[:, 0]
        for epoch in range(EPOCHS if n < 8 or k == 1 else 1):
            a = [torch.from_numpy(rng.normal(size=(int(m), depth))).to(dtype) for m in rows]
            b = [torch.from_numpy(rng.normal(size=(depth, columns))).to(dtype) for _ in range(n)]
            bias = [torch.from_numpy(rng.normal(size=columns)).to(dtype) for _ in range(n)]
            if scatter:
                b, bias = [b[0]] * n, [bias[0]] * n
            z = [ACTS[activation](x.float() @ y.float() + c.float()) for x, y, c in zip(a, b, bias, strict=True)]
            cut = [counts[s].tolist() if scatter == 0 else tile_sizes(columns, n) for s in range(n)]
            parts = [torch.split(x, w, dim=scatter) for x, w in zip(z, cut, strict=True)]
            mine = (torch.cat([a[r] for r in here]), *(torch.stack([x[r] for r in here]) for x in (b, bias)))
            got = gemm_all_to_all(
                memory, *mine, counts.tolist(), scatter, activation, TILE, replace(options, seconds=20)
            )
            for r, each in zip(here, got, strict=True):
                wanted = torch.cat([parts[s][r] for s in range(n)])
                found(f"gemm {k} scatter {scatter} {dtype} epoch {epoch} rank {r}", each, wanted)


def gemvs(memory: TileMemory, found: Found) -> list[str]:
    """One shot and two; depths that differ, one of them 0; several columns. Returns the results' bits."""
    n, here = memory.ranks, range(memory.rank0, memory.rank0 + memory.here)
    bits: list[str] = []
    for k, (shots, wide, dtype) in enumerate([(1, 1, torch.float32), (2, 1, torch.float32), (2, 2, torch.bfloat16)]):
        rng = np.random.default_rng(10 + k)
        depths = [(7 * s + 16 * (k == 0)) % 20 for s in range(n)]
        for epoch in range(EPOCHS):
            a = [torch.from_numpy(rng.normal(size=(9, d))).to(dtype) for d in depths]
            x = [torch.from_numpy(rng.normal(size=(d, wide))).to(dtype) for d in depths]
            wanted = sum((y.float() @ z.float() for y, z in zip(a, x, strict=True)), torch.zeros(9, wide))
            options = KernelOptions(programs=2 if n < 4 else 1, seconds=20)
            got = gemv_all_reduce(memory, [a[r] for r in here], [x[r] for r in here], shots, (16, 16), 0, options)
            for r, each in zip(here, got, strict=True):
                found(f"gemv {k} epoch {epoch} rank {r}", each, wanted)
            same = {each.view(torch.uint8).numpy().tobytes().hex() for each in got}
            bits.append(same.pop() if len(same) == 1 else "other bits on other ranks")
    return bits


def bags(memory: TileMemory, found: Found) -> None:
    """Ranks without tables, empty bags, uneven and empty parts of the batch, weights, means."""
    n, here = memory.ranks, range(memory.rank0, memory.rank0 + memory.here)
    for k, (mode, weighted, dtype) in enumerate([("sum", True, torch.float32), ("mean", False, torch.bfloat16)]):
        rng = np.random.default_rng(20 + k)
        held, batches = rng.integers(0, 3, n) * (rng.random(n) < 4 / n), rng.integers(0, 6, n)
        held, batches = held.tolist(), batches.tolist()
        held[0], batches[-1] = max(1, held[0]), max(1, batches[-1])
        dim, batch, first = (20, 16)[k], sum(batches), starts(held)
        for epoch in range(EPOCHS):
            tables = [
                torch.from_numpy(rng.normal(size=(int(rng.integers(1, 9)), dim))).to(dtype) for _ in range(sum(held))
            ]
            lengths = rng.integers(0, 4, (len(tables), batch))
            ids = [torch.from_numpy(rng.integers(0, len(t), lengths[j].sum())) for j, t in enumerate(tables)]
            scale = [torch.from_numpy(rng.normal(size=len(i))).float() if weighted else None for i in ids]
            at = [torch.from_numpy(np.concatenate([[0], np.cumsum(each)])) for each in lengths]
            each_bag = [
                torch.nn.functional.embedding_bag(i, t.float(), o[:-1], mode=mode, per_sample_weights=w)
                for i, t, o, w in zip(ids, tables, at, scale, strict=True)
            ]
            whole = torch.stack(each_bag, 1)
            own = range(first[memory.rank0], first[memory.rank0 + memory.here])
            none = torch.zeros(0, dtype=torch.int64)
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[own.start : own.stop].ravel())]))
            weights = (
                torch.cat([torch.zeros(0), *(w for j in own if (w := scale[j]) is not None)]) if weighted else None
            )
            got = embedding_bag_all_to_all(
                memory, [tables[j] for j in own], torch.cat([none, *(ids[j] for j in own)]), offsets, weights, held,
                batches, dim, mode, options=KernelOptions(programs=2 if n < 8 else 1, seconds=20), dtype=dtype,
            )  # fmt: skip
            parts = torch.split(whole, batches)
            for r, each in zip(here, got, strict=True):
                found(f"bags {mode} {dtype} epoch {epoch} rank {r}", each, parts[r])


def values(rank: int, exchange: Exchange) -> Any:
    found = Found()
    with SymmetricHeap.create(1 << 21, "shm", exchange, "triton") as heap:
        memory = TileMemory.of(heap)
        gemms(memory, found)
        bits = gemvs(memory, found)
        bags(memory, found)
        same = len(set(heap.gather("".join(bits).encode()[:4000]))) == 1
    return {**found.said(), "same": same, "source": source_hash(gemm_kernel)}


def virtual(ranks: int) -> Any:
    found, memory = Found(), TileMemory.virtual(ranks, 1 << 21)
    gemms(memory, found)
    bits = gemvs(memory, found)
    bags(memory, found)
    return {**found.said(), "same": "other bits on other ranks" not in bits}


def silent(rank: int, exchange: Exchange) -> Any:
    """In the third epoch rank 0 leaves out its last signal to rank 1: of a sum, and, by no call at all, of blocks.

    What each rank hears of that call, of the next one, and of a heap that was reset.
    """
    return [_silent(rank, exchange, op) for op in ("gemv", "gemm")]


def _silent(rank: int, exchange: Exchange, op: str) -> Any:
    with SymmetricHeap.create(1 << 20, "shm", exchange, f"triton silent {op}") as heap:
        memory = TileMemory.of(heap)
        n, options = heap.ranks, KernelOptions(programs=1, seconds=1.0)
        a, b, counts = torch.ones(16 * n, 8), torch.ones(1, 8, 8), [[16] * n] * n

        def call() -> torch.Tensor:
            if op == "gemm":
                return gemm_all_to_all(memory, a, b, None, counts, tile=ProductTile((8, 16, 16)), options=options)[0]
            return gemv_all_reduce(memory, [a], [b[0, :, :1]], 1, (16, 16), 0, options)[0]

        for _ in range(2):
            call()
        heap.check()
        heap.barrier()
        if rank == 0 and op == "gemv":
            _leave_out_a_signal(next(v for v in heap.kept.values() if isinstance(v, FusedKernel)))
        if rank or op == "gemv":
            call()
        if rank != 1:
            exchange(b"")
        said = [refused(heap.check)]
        if rank == 1:
            exchange(b"")
        said.append(refused(call))
        heap.reset()
        right = bool((call() == (8.0 if op == "gemm" else 8.0 * n)).all())
        heap.check()
        return said, right


def _leave_out_a_signal(made: FusedKernel) -> None:
    """The last signal to rank 1."""
    (known,) = made.calls.values()
    rows, begin = known.launches[0].rows, known.launches[0].begin
    at = [k for k, row in enumerate(rows.tolist()) if row[0] == 1 and row[1] == 1]
    known.launches[0] = known.launches[0]._replace(
        rows=torch.cat([rows[: at[-1]], rows[at[-1] + 1 :]]), begin=begin - (begin > at[-1]).int()
    )


ALTERED = {
    "right": ("memory_ops", "", ""),
    "wait": ("read_kernel", "source, epoch + 1, epoch, polls", "source, epoch - 1000, epoch, polls"),
    "mask": ("gemm_kernel", "inside_k = k < depth", "inside_k = k < depth - 1"),
    "slot": ("memory_ops", "epoch & tl.load(spot + 2)", "1 - epoch & tl.load(spot + 2)"),
}


def wrong(rank: int, exchange: Exchange) -> Any:
    """Whether a product by an altered kernel is wrong (by another one: right); without a wait rank 1 begins late."""
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as made:
        sys.path.insert(0, made)
        for name, (module, old, new) in ALTERED.items():
            find = altered(module, old, new, Path(made))
            with SymmetricHeap.create(1 << 18, "shm", exchange, name) as heap:
                memory = TileMemory.of(heap)
                a, b, counts = torch.ones(8 * 2, 9), torch.ones(1, 9, 8), [[8, 8]] * 2
                options = KernelOptions(programs=1, seconds=10.0)
                given = gemm_prepared(memory, a, b, None, counts, 0, "none", ProductTile((16, 16, 16)), options)
                instance, call, (arguments, constants, _) = given
                instance.reader = find("read") if name != "slot" else instance.reader
                if name == "wait" and rank == 1:
                    exchange(b"")
                (got,) = instance.run(find("gemm"), call, *arguments, **constants)
                close = got.shape == (16, 8) and bool(torch.allclose(got, torch.full((16, 8), 9.0)))
                if name == "wait" and rank == 0:  # which has not waited
                    exchange(b"")
                found[name] = close == (name == "right")
                heap.barrier()
    return found


def again(rank: int, exchange: Exchange) -> list[bool]:
    """Whether launches of a call are right when they are done again, in turn with another call's."""
    with SymmetricHeap.create(1 << 18, "shm", exchange, "again") as heap:
        memory, n = TileMemory.of(heap), heap.ranks
        options = KernelOptions(programs=2, seconds=20)
        a, more = torch.ones(4 * n, 8), torch.ones(6 * n, 8)
        b = torch.ones(1, 8, 8)
        made = [gemm_prepared(memory, x, b, None, [[len(x) // n] * n] * n, 0, "none", TILE, options) for x in (a, more)]
        right: list[bool] = []
        for epoch in range(3):
            for x, (instance, call, (arguments, constants, _)) in zip((a, more), made, strict=True):
                x.fill_(1.0 + rank + epoch)
                heap.barrier()
                instance.launch(gemm_kernel, call, *arguments, **constants)
                wanted = torch.arange(1.0, n + 1).repeat_interleave(len(x) // n) + epoch
                right.append(bool((instance.result(call, rank) == 8 * wanted[:, None]).all()))
        heap.check()
        return right


@triton.jit
def counting(table, many, ranks: tl.constexpr):
    for _ in range(many):
        for r in range(ranks):
            signal(peer(table, r, 4096, table, False).to(tl.pointer_type(tl.int32)))


@triton.jit
def passing(table, rank, ranks: tl.constexpr):
    """Put own words to the next rank, signal, and pass on what has come."""
    to = (rank + 1) % ranks
    k = tl.arange(0, 16)
    put(peer(table, to, 8192, table, True) + k, k.to(tl.int64) + rank, k < 16)
    flag = tl.load(table + to) + 12288
    signal(flag.to(tl.pointer_type(tl.int32)))
    own = tl.load(table + rank) + 12288
    seen = wait(
        own.to(tl.pointer_type(tl.int32)), tl.full((), 1, tl.int64), 20000, (own + 64).to(tl.pointer_type(tl.int32))
    )
    mine = peer(table, rank, 8192, table, True) + k
    put(mine + 16, tl.load(mine) + seen, k < 16)


def words(rank: int, exchange: Exchange) -> Any:
    """A user's own kernels: contended adds, and a put that is read after a wait."""
    with SymmetricHeap.create(1 << 16, "shm", exchange, "triton words") as heap:
        place = heap.alloc((8192,), "i64", "words")
        base = torch.from_numpy(heap.table + place.offset)
        heap.barrier()
        counting[(1,)](base, 100, ranks=heap.ranks)
        passing[(1,)](base, rank, ranks=heap.ranks)
        heap.barrier()
        own = place.local
        return int(own.view(torch.int32)[1024]), own[1024 + 16 : 1024 + 32].tolist()


def main() -> None:
    found = []
    for name, ranks in (a.split(":") for a in sys.argv[1:]):
        found.append(virtual(int(ranks)) if name == "virtual" else forked(int(ranks), globals()[name], 100))
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
