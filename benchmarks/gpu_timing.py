"""Times of the fused kernels on virtual ranks of one GPU, beside the same work unfused on the same processors.

Unfused is the same kernel in one launch of as many programs, storing into its own memory without a signal, then one
copy or sum by torch. Variants take turns in random order; medians. Dry runs have tiny shapes and mean nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from shardplan.fused.triton import KernelOptions, ProductTile, TileMemory
from shardplan.fused.triton.embedding import embedding_prepared
from shardplan.fused.triton.embedding_kernel import embedding_kernel
from shardplan.fused.triton.gemm import gemm_prepared
from shardplan.fused.triton.gemm_kernel import gemm_kernel
from shardplan.fused.triton.gemv import gemv_prepared
from shardplan.fused.triton.gemv_kernel import gemv_kernel

RATIOS = (0.25, 0.5, 1.0, 2.0)  # seconds on the wire over seconds of computing, of the emulated link


class OwnMemory:
    """Staging of every rank, one after another, behind `head` bytes of epochs, which stay 0: nobody is told."""

    def __init__(self, memory: TileMemory, head: int, nbytes: int) -> None:
        self.head, self.bytes = head, nbytes
        pitch = -(-(head + nbytes) // 256) * 256
        self.all = torch.zeros((memory.here, pitch), dtype=torch.uint8, device=memory.device)
        self.table = torch.tensor([part.data_ptr() for part in self.all], dtype=torch.int64, device=memory.device)

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        return self.all[:, self.head : self.head + self.bytes].view(dtype)


class OwnAddends(OwnMemory):
    """The same of `gemv_all_reduce`: of the rows of a launch those that compute addends, which stay."""

    def __init__(self, memory: TileMemory, call: Any, nbytes: int) -> None:
        rows, begin, self.programs = call.launches[0]
        super().__init__(memory, -(-(64 + 64 * self.programs) // 256) * 256, nbytes)
        begins, kept, given = [0], list[list[int]](), rows.tolist()
        limits = begin.tolist()
        for program, (first, end) in enumerate(zip(limits, limits[1:], strict=False)):
            for row in given[first:end]:
                if row[0] == row[9] == 0:
                    kept.append([0, program // self.programs, self.head, 0, 0, *row[5:7], row[5], *row[8:]])
            begins.append(len(kept))
        self.rows = torch.tensor(kept, dtype=torch.int64, device=memory.device)
        self.begin = torch.tensor(begins, dtype=torch.int32, device=memory.device)

    def launch(self, *arguments: Any, **constants: Any) -> None:
        grid = (self.programs * len(self.all),)
        gemv_kernel[grid](self.table, self.rows, self.begin, 0, 0, 1, *arguments, programs=self.programs, **constants)


def _programs(dry: bool, ranks: int) -> int:
    return 2 if dry else torch.cuda.get_device_properties(0).multi_processor_count // ranks


def _once(run: Callable[[], Any], dry: bool) -> float:
    if dry:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _graph(run: Callable[[], Any]) -> Callable[[], Any] | str:
    """A captured launch, or why there is none."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def measured(variants: dict[str, Callable[[], Any]], dry: bool) -> dict[str, Any]:
    """Median seconds of variants that take turns, and ratios to the unfused one; as graphs, too, where they capture."""
    for run in variants.values():
        run()
    graphs: dict[str, str] = {}
    if not dry:
        torch.cuda.synchronize()
        for name in ("fused", "unfused"):
            made = _graph(variants[name])
            graphs[name] = made if isinstance(made, str) else "captured"
            if not isinstance(made, str):
                variants[f"{name}, graph"] = made
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 if dry else 60):
        for name in random.sample(list(variants), len(variants)):
            times[name].append(_once(variants[name], dry))
    medians = {name: statistics.median(t) for name, t in times.items()}
    found: dict[str, Any] = {"seconds": medians, "graphs": graphs}
    found["fused / unfused"] = medians["fused"] / medians["unfused"]
    found["fused / compute only"] = medians["fused"] / medians["compute only"]
    return found


def emulated(stamps: list[tuple[int, float, int]], copy: float, compute: float, ratio: float) -> tuple[float, float]:
    """Return the seconds of fused and unfused with a link: tiles leave a rank's one port in order, as they are put.

    `stamps` are (rank, second, bytes) of the tiles for other ranks; the wire takes `ratio` times the computing.

    >>> emulated([(0, 1.0, 1), (0, 2.0, 1)], 0.0, 2.0, 1.0)
    (3.0, 4.0)
    """
    by_rank: dict[int, list[tuple[float, int]]] = {}
    for rank, at, size in stamps:
        by_rank.setdefault(rank, []).append((at, size))
    most = max((sum(size for _, size in each) for each in by_rank.values()), default=1)
    bandwidth = most / (ratio * compute)
    end = compute
    for each in by_rank.values():
        free = 0.0
        for at, size in sorted(each):
            free = max(free, at) + size / bandwidth
        end = max(end, free)
    return end, compute + copy + ratio * compute


def time_gemm(dry: bool) -> dict[str, Any]:
    rows = [_gemm(dry, ranks) for ranks in ((2,) if dry else (4, 8))]
    return {"rows": rows, "good": all(row["error"] < 2e-2 for row in rows)}


def _gemm(dry: bool, ranks: int) -> dict[str, Any]:
    where, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    m, n, k = (32, 16, 16) if dry else (16384 // ranks, 4096, 2048)
    tile = ProductTile((16, 16, 16) if dry else (128, 256, 64), 8, 3 if dry else 4, described=True)
    nbytes = m * n * dtype.itemsize
    memory = TileMemory.virtual(ranks, 2 * nbytes + (1 << 22), where)
    a, b = (torch.randn(s, device=where).to(dtype) for s in ((ranks * m, k), (ranks, k, n)))
    options = KernelOptions(programs=_programs(dry, ranks))
    counts = [[m // ranks] * ranks] * ranks
    made, call, (arguments, constants, _) = gemm_prepared(memory, a, b, None, counts, 0, "none", tile, options)

    own = OwnMemory(memory, made.local_start, nbytes)
    out = torch.empty((ranks, ranks, m // ranks, n), dtype=dtype, device=where)

    def local() -> None:
        made.launch_local(gemm_kernel, call, own.table, *arguments, **constants)

    def copy() -> None:
        out.copy_(own.view(dtype).unflatten(1, (ranks, m // ranks, n)).transpose(0, 1))

    def unfused() -> None:
        local()
        copy()

    got = torch.stack(made.run(gemm_kernel, call, *arguments, **constants)).view(out.shape)
    unfused()
    error = float((got.float() - out.float()).abs().max() / out.float().abs().max())
    variants: dict[str, Callable[[], Any]] = {
        "fused": lambda: made.launch(gemm_kernel, call, *arguments, **constants),
        "unfused": unfused,
        "compute only": local,
        "copy only": copy,
        "torch.bmm, whole chip": lambda: torch.bmm(a.view(ranks, m, k), b),
    }
    found = {"ranks": ranks, "shape": [m, n, k], "error": error} | measured(variants, dry)
    made.finish()
    if not dry:
        found["emulated link"] = _stamped(memory, made, call, arguments, constants, found["seconds"])
    return found


def _stamped(
    memory: TileMemory, made: Any, call: Any, arguments: Any, constants: Any, seconds: dict[str, float]
) -> dict[str, Any]:
    """Overlap with an emulated link, of tiles' own stamps."""
    out, columns = call.out, arguments[5]
    down, across = (
        n // each for n, each in ((call.given.counts[0][0], constants["block_m"]), (columns, constants["block_n"]))
    )
    stamps = torch.zeros((memory.here, memory.ranks, down * across), dtype=torch.int64, device=out.device)
    given = (*arguments[:3], stamps, *arguments[4:])
    for _ in range(3):
        made.launch(gemm_kernel, call, *given, **(constants | {"stamped": down * across}))
        made.finish()
    at = stamps.view(-1).tolist()
    first, last = min(at), (max(at) - min(at)) / 1e9
    size = constants["block_m"] * constants["block_n"] * out.dtype.itemsize
    tiles = [
        (rank, (t - first) / 1e9, size)
        for rank, rows in enumerate(stamps.tolist()) for to, row in enumerate(rows) if to != rank for t in row
    ]  # fmt: skip
    steps = sorted({b - a for a, b in zip(sorted(at), sorted(at)[1:], strict=False) if b > a})
    ratios = {str(r): emulated(tiles, seconds["copy only"], last, r) for r in RATIOS}
    said = {r: {"fused": f, "unfused": u, "fused / unfused": f / u} for r, (f, u) in ratios.items()}
    return {"clock's smallest step, ns": steps[0] if steps else None, "by wire over compute": said}


def time_embedding(dry: bool) -> dict[str, Any]:
    rows = [_embedding(dry, ranks) for ranks in ((2,) if dry else (4, 8))]
    return {"rows": rows, "good": all(row["error"] < 2e-2 for row in rows)}


def _embedding(dry: bool, ranks: int) -> dict[str, Any]:
    where, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    tables, each, bags, dim, height = (1, 2, 4, 16, 9) if dry else (8, 16, 16384 // ranks, 128, 100_000)
    batch = bags * ranks
    nbytes = batch * tables * dim * dtype.itemsize
    memory = TileMemory.virtual(ranks, 2 * nbytes + (1 << 22), where)
    weights = [torch.randn((height, dim), device=where).to(dtype) for _ in range(tables * ranks)]
    many = tables * ranks * batch
    ids = torch.randint(0, height, (many * each,), device=where)
    offsets = torch.arange(many + 1, device=where) * each
    programs = _programs(dry, ranks)
    options = KernelOptions(programs=programs)
    made, call, arguments, constants, _ = embedding_prepared(
        memory, weights, ids, offsets, None, [tables] * ranks, [bags] * ranks, dim, "sum", programs, 16, options, None
    )

    own = OwnMemory(memory, made.local_start, nbytes)
    out = torch.empty((ranks, bags, ranks, tables * dim), dtype=dtype, device=where)

    def local() -> None:
        made.launch_local(embedding_kernel, call, own.table, *arguments, **constants)

    def unfused() -> None:
        local()
        out.copy_(own.view(dtype).unflatten(1, (ranks, bags, tables * dim)).permute(1, 2, 0, 3))

    got = torch.stack(made.run(embedding_kernel, call, *arguments, **constants)).view(out.shape)
    unfused()
    error = float((got.float() - out.float()).abs().max() / out.float().abs().max())
    variants: dict[str, Callable[[], Any]] = {
        "fused": lambda: made.launch(embedding_kernel, call, *arguments, **constants),
        "unfused": unfused,
        "compute only": local,
    }
    found = {"ranks": ranks, "shape": [tables, batch, each, dim], "error": error} | measured(variants, dry)
    made.finish()
    return found


def time_gemv(dry: bool) -> dict[str, Any]:
    rows = [_gemv(dry, ranks, shots) for ranks in ((2,) if dry else (4, 8)) for shots in (1, 2)]
    return {"rows": rows, "good": all(row["error"] < 2e-2 for row in rows)}


def _gemv(dry: bool, ranks: int, shots: int) -> dict[str, Any]:
    where, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    m, k = (8, 16) if dry else (8192, 32768 // ranks)
    memory = TileMemory.virtual(ranks, 1 << 24, where)
    a = [torch.randn((m, k), device=where).to(dtype) for _ in range(ranks)]
    x = [torch.randn((k, 1), device=where).to(dtype) for _ in range(ranks)]
    options = KernelOptions(programs=_programs(dry, ranks))
    made, call, arguments, constants, got = gemv_prepared(
        memory, a, x, shots, (16, 16) if dry else (16, 512), 0, options
    )

    own = OwnAddends(memory, call, 4 * m)
    out = torch.empty((ranks, m), dtype=dtype, device=where)

    def local() -> None:
        own.launch(*arguments, **constants)

    def unfused() -> None:
        local()
        out.copy_(own.view(torch.float32).sum(0).expand(ranks, m))

    made.run(gemv_kernel, call, *arguments, **constants)
    unfused()
    error = float((got[:, :, 0].float() - out.float()).abs().max() / out.float().abs().max())
    variants: dict[str, Callable[[], Any]] = {
        "fused": lambda: made.launch(gemv_kernel, call, *arguments, **constants),
        "unfused": unfused,
        "compute only": local,
    }
    found = {"ranks": ranks, "shots": shots, "shape": [m, k], "error": error} | measured(variants, dry)
    made.finish()
    return found
