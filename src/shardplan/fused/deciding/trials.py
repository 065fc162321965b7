"""Trials of fused pairs between two processes: what a calibration, and a benchmark of the decision, measure.

A pair is run unfused, by the library and copies through the heap, and in every fused way that a decision may choose;
its computation is run alone. Each run begins at a barrier, in an order that is random and the same on all ranks. A rank
is timed by the wall and by the processor time of its thread, which neighbours on its core do not stretch.

`python -m shardplan.fused.deciding.trials RANK STORE`, with the trials as JSON on its input, is one of the processes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from shardplan.errors import BackendError, optional
from shardplan.fused.calls.instance import FusedInstance, PutStep, TileCall, instance
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.kernels.bags import TILE, BagCall, BagKernel
from shardplan.fused.kernels.native import native
from shardplan.fused.kernels.vectors import rows_times, thin
from shardplan.fused.operators import embedding, gemm, gemv
from shardplan.fused.operators.call_context import CallContext
from shardplan.fused.operators.gemv import in_order
from shardplan.fused.operators.out import find_out_tensor, result_or_out
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockCuts, RowShape, TileShape, tile_sizes
from shardplan.hardware.prices.fused import variants

if TYPE_CHECKING:
    import torch

RANKS = 2
ROWS = 20_000  # of a table, beyond the caches
PING_BYTES = (64, 1 << 18, 1 << 20, 1 << 22)
PING_TRIPS = 30
SPIN = 1_000_000_000  # nanoseconds
WAIT = timedelta(seconds=60)  # for the other process
ALONE = ("kernel", "library")  # the computation by the fused kernels, and by the library where that is another one
Shape = tuple[str, tuple[int, ...]]  # a kind of `KernelConstants`, and M, N, K; T, B, L, D; or M, K
Times = dict[str, list[tuple[float, float]]]  # by variant: of every repetition seconds of the wall, and of the thread


def shape_work(shape: Shape) -> tuple[float, float, float]:
    """Return the operations of a rank, the bytes that it reads, and those of the result that it computes, in f32.

    >>> shape_work(("vector", (1024, 512)))
    (1048576.0, 2099200.0, 4096.0)
    """
    match shape:
        case ("product", (m, n, k)):
            return 2.0 * m * n * k, 4.0 * (m + n) * k, 4.0 * m * n
        case ("bags", (tables, batch, length, dim)):
            rows = float(tables * batch * length)
            return rows * dim, rows * (4 * dim + 8), 4.0 * tables * batch * dim
        case (_, (m, k)):
            return 2.0 * m * k, 4.0 * (m + 1) * k, 4.0 * m
        case _:
            raise ValueError(shape)


class ProductTrial:
    """Blocks of rows of a product, as experts return them."""

    name = "trial_product"

    def __init__(self, numbers: tuple[int, ...], rank: int, ranks: int) -> None:
        """Make operands of M, N, K."""
        torch = optional("torch", "torch")
        m, n, k = numbers
        self.a, self.b, self.out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        self.cuts = BlockCuts("rows", (tuple(tile_sizes(m, ranks)),) * ranks, n)

    def compute(self) -> torch.Tensor:
        """Compute all by the fused kernels."""
        return optional("torch", "torch").mm(self.a, self.b, out=self.out)

    def library(self) -> torch.Tensor:
        """Compute all by the library."""
        return self.compute()

    def run_unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute all by the library, then send it."""
        return move_blocks(asked, self.name, self.cuts, self.library(), out)

    def run_fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the operator."""
        return gemm.forward(asked, self.a, self.b, out=out)


class BagsTrial:
    """Bags of a rank's tables for the batch of all ranks."""

    name = "trial_bags"

    def __init__(self, numbers: tuple[int, ...], rank: int, ranks: int) -> None:
        """Make tables and ids of T, B, L, D."""
        torch = optional("torch", "torch")
        tables, batch, length, dim = numbers
        self.batch, self.bag = batch, length
        self.tables = [torch.randn(ROWS, dim) for _ in range(tables)]
        self.indices = torch.randint(0, ROWS, (tables * batch * length,))
        self.offsets = torch.arange(0, tables * batch * length + 1, length)
        self.set_call(ranks)

    def set_call(self, ranks: int) -> None:
        """Make ready what the operands give."""
        torch = optional("torch", "torch")
        count, dim = len(self.tables), self.tables[0].shape[1]
        self.call = BagCall(self.tables, self.indices, self.offsets, None, "sum", self.batch, "trial")
        self.out = torch.empty(self.batch, count, dim)
        self.cuts = BlockCuts("beside", (tuple(tile_sizes(self.batch, ranks)), (count,) * ranks))
        self.kernels: dict[tuple[int, int], BagKernel] = {}

    def compute(self) -> torch.Tensor:
        """Compute all by the fused kernels."""
        self.tile(0, self.batch, self.out)
        return self.out

    def tile(self, first: int, last: int, view: torch.Tensor) -> None:
        """Compute some bags into a view."""
        if not BagKernel.fits(self.call):
            self.call.store(first, last, view)
            return
        self.kernel_of(view).store(np.array([(first, last, view.data_ptr(), 0, 0, 0)], TILE), 0)

    def kernel_of(self, view: torch.Tensor) -> BagKernel:
        """Return the kernel that stores into views of these strides."""
        strides = view.stride(0), view.stride(1)
        if strides not in self.kernels:
            self.kernels[strides] = BagKernel(self.call, *strides)
        return self.kernels[strides]

    def library(self) -> torch.Tensor:
        """Compute all by the library."""
        torch = optional("torch", "torch")
        step = self.batch * self.bag
        bags = torch.nn.functional.embedding_bag
        each = [
            bags(self.indices[k * step : (k + 1) * step], table, self.offsets[: self.batch], mode="sum")
            for k, table in enumerate(self.tables)
        ]
        return torch.stack(each, 1)

    def run_unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute all by the library, then send it."""
        return move_blocks(asked, self.name, self.cuts, self.library(), out)

    def run_fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the operator."""
        return embedding.forward(asked, self.tables, self.indices, self.offsets, batch=self.batch, out=out)


class VectorTrial:
    """Rows of a matrix times a vector, whose addends all ranks sum."""

    name = "trial_vector"

    def __init__(self, numbers: tuple[int, ...], rank: int, ranks: int) -> None:
        """Make operands of M, K."""
        torch = optional("torch", "torch")
        m, k = numbers
        self.a, self.x, self.out = torch.randn(m, k), torch.randn(k), torch.empty(m, 1)
        self.thin, self.shape = thin(self.x), RowShape(m).lanes(ranks)

    def compute(self) -> torch.Tensor:
        """Compute all by the fused kernels."""
        rows_times(self.a, self.thin, self.out)
        return self.out

    def library(self) -> torch.Tensor:
        """Compute all by the library."""
        return optional("torch", "torch").mv(self.a, self.x, out=self.out[:, 0])[:, None]

    def run_unfused(self, asked: CallContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute all by the library, then send all addends to all, and sum them."""
        addends = self.library()[None]
        made = instance(asked.heap, self.name, TileSchedule(), "", asked.seconds)
        call = kept_call(made, self.out, self.shape, (1,))

        def put(step: PutStep) -> None:
            step.view.copy_(addends)

        return in_order(made.run(call, put)["result"])[:, 0]

    def run_fused(self, asked: CallContext, variant: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the operator."""
        return gemv.forward(asked, self.a, self.x, variant)


TRIALS: Mapping[str, type[ProductTrial] | type[BagsTrial] | type[VectorTrial]] = {
    "product": ProductTrial,
    "bags": BagsTrial,
    "vector": VectorTrial,
}


def kept_call(made: FusedInstance, x: torch.Tensor, shape: TileShape, more: Sequence[int]) -> TileCall:
    """Return the call of a shape, kept beside the heap: all ranks ask for the same ones in the same order."""
    key = (made.op, made.out and made.out.offset, tuple(x.shape))
    if key not in made.heap.kept or made.heap.kept[key].grown != made.grown:
        made.heap.kept[key] = made.call(shape, {"result": x.dtype}, more)
    return made.heap.kept[key]


def move_blocks(
    asked: CallContext, op: str, cuts: BlockCuts, x: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Return the blocks of all ranks, put together, in `out` of the heap if there is one."""
    made = instance(asked.heap, op, TileSchedule(), "", asked.seconds, find_out_tensor(op, asked.heap, out))
    call, boxes = kept_call(made, x, cuts.shape(), tuple(x.shape[2:])), cuts.own_boxes(asked.heap.rank)

    def put(step: PutStep) -> None:
        step.view.copy_(x[tuple(slice(a, b) for a, b in boxes[step.to])])

    return result_or_out(op, made.run(call, put)["result"], out)


def trial_runs(shape: Shape, heap: SymmetricHeap) -> dict[str, Callable[[], Any]]:
    """Return what is run of a shape, by the name of its variant."""
    kind, numbers = shape
    trial = TRIALS[kind](numbers, heap.rank, heap.ranks)
    found: dict[str, Callable[[], Any]] = {"kernel": trial.compute}
    if kind != "product":
        found["library"] = trial.library
    for way in variants(kind == "vector"):
        if not way.tiles:
            found[str(way)] = lambda: trial.run_unfused(CallContext(heap))
        else:
            asked = CallContext(heap, way.tiles)
            found[str(way)] = lambda asked=asked, kind=way.kind: trial.run_fused(asked, kind)
    return found


def time_runs(heap: SymmetricHeap, runs: Mapping[str, Callable[[], Any]], count: int, seed: object) -> Times:
    """Return the times of so many repetitions, after two that do not count."""
    found: Times = {name: [] for name in runs}
    order, dice = list(runs), random.Random(str(seed))
    for number in range(-2, count):
        dice.shuffle(order)
        for name in order:
            heap.barrier()
            wall, own = time.perf_counter_ns(), time.thread_time_ns()
            runs[name]()
            own, wall = time.thread_time_ns() - own, time.perf_counter_ns() - wall
            if number >= 0:
                found[name].append((wall * 1e-9, own * 1e-9))
    return found


def ping_seconds(heap: SymmetricHeap) -> list[tuple[int, float]]:
    """Return, by bytes, the seconds from where one rank begins to store them in the other's memory until they are read.

    Of trips there and back half; the 20th percentile, which load leaves alone.
    """
    torch, kernels = optional("torch", "torch"), native()
    words = heap.alloc((16,), "i32", "ping words")
    numbers = PING_BYTES[-1] // 4
    room, source, sink = heap.alloc((numbers,), "f32", "ping"), torch.ones(numbers), torch.empty(numbers)
    mine, there = words.local.numpy(), words.peer(1 - heap.rank).numpy()
    found: list[tuple[int, float]] = []
    count = 0

    def send(n: int) -> None:
        room.peer(1 - heap.rank)[:n].copy_(source[:n])
        if kernels is None:
            there[0] = count
        else:
            kernels.signal(there.ctypes.data, count)

    def receive(n: int) -> None:
        if kernels is not None:
            kernels.wait(mine.ctypes.data, count, SPIN)
        while mine[0] < count:
            time.sleep(0)
        sink[:n].copy_(room.local[:n])

    for nbytes in PING_BYTES:
        took: list[float] = []
        for _ in range(PING_TRIPS):
            count += 1
            heap.barrier()
            start = time.perf_counter()
            for each in (send, receive) if heap.rank == 0 else (receive, send):
                each(nbytes // 4)
            took.append((time.perf_counter() - start) / 2)
        found.append((nbytes, float(np.percentile(took, 20))))
    return found


def measure_trials(shapes: Sequence[Shape], count: int, seed: int = 0) -> tuple[list[Times], list[tuple[int, float]]]:
    """Return the times of shapes, of each repetition the slower rank's, and those of pings, by two new processes.

    Raises `BackendError` where a process fails.
    """
    torch = optional("torch", "torch")
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // RANKS))
    asked = json.dumps({"shapes": shapes, "count": count, "seed": seed, "threads": threads})
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": str(threads),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardplan.fused.deciding.trials"]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], env=environment, **pipes)
            for rank in range(RANKS)
        ]
        try:
            for each in ranks:
                assert each.stdin is not None
                each.stdin.write(asked)
                each.stdin.close()
                each.stdin = None
            said = [each.communicate(timeout=600) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    for each, (_, error) in zip(ranks, said, strict=True):
        if each.returncode:
            raise BackendError(f"calibrate: a process ended: {(error.strip() or 'without a word').splitlines()[-1]}")
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    times = [slower_rank(both) for both in zip(*(each["times"] for each in found), strict=True)]
    return times, [(nbytes, seconds) for nbytes, seconds in found[0]["pings"]]


def slower_rank(times: Sequence[Times]) -> Times:
    """Return of every repetition the larger of the ranks' seconds, of each clock."""
    found: Times = {}
    for name in times[0]:
        each = np.max([one[name] for one in times], axis=0)  # [repetitions, clocks]
        found[name] = [(float(wall), float(own)) for wall, own in each]
    return found


def _main(rank: int, store: str) -> None:
    torch = optional("torch", "torch")
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(rank)
    meeting = optional("torch.distributed", "torch").FileStore(store, RANKS)
    meeting.set_timeout(WAIT)
    turn = 0

    def exchange(mine: bytes) -> list[bytes]:
        nonlocal turn
        turn += 1
        meeting.set(f"{turn} {rank}", mine)
        return [meeting.get(f"{turn} {r}") for r in range(RANKS)]

    times: list[Times] = []
    pings: list[tuple[int, float]] = []
    with SymmetricHeap.create(PING_BYTES[-1] + (1 << 20), "shm", exchange, "pings") as heap:
        pings = ping_seconds(heap)
    for number, (kind, numbers) in enumerate(asked["shapes"]):
        shape = kind, tuple(numbers)
        # Each variant is an instance with two slots.
        room = int(shape_work(shape)[2] * 2 * (RANKS + 1) * 1.3 + (1 << 18)) * 8
        with SymmetricHeap.create(room, "shm", exchange, f"trial {number}") as heap:
            times.append(time_runs(heap, trial_runs(shape, heap), asked["count"], f"{asked['seed']} {number}"))
            heap.barrier()
    print(json.dumps({"times": times, "pings": pings}))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
