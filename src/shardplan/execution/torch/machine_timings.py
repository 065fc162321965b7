"""`time_machine`: the kernels and collectives of `simulation.accuracy.machine_timings`, timed on torchrun's processes.

All ranks time the same at once, as in a step, and the slowest counts. On a GPU the calls are as large as products of a
model are; on cores they are an eighth of that along each dim. What a library does not have is left out, and said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardplan.errors import BackendError, ShardplanError, line
from shardplan.execution.torch.native import NATIVE
from shardplan.simulation.accuracy.machine_timings import COLLECTIVES, CollectiveTiming, KernelTiming, MachineTimings

Timed = KernelTiming | CollectiveTiming
Timer = Callable[[Timed, Callable[[], None]], float]
"""What returns the seconds of a call; the same on every rank."""
LARGE = 8192  # elements along a dim of the largest product of a GPU; the others in parts of it, thin ones too
PARTS = ((1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (1, 2, 2), (2, 1, 2), (2, 2, 1),
         (32, 1, 1), (1, 32, 1), (1, 1, 32), (16, 2, 2), (2, 2, 16))  # fmt: skip
COPIES = (1 << 26, 1 << 28, 1 << 29, 1 << 30)  # bytes
MESSAGES = (1 << 20, 1 << 24, 1 << 28)
ATTENTION = ((2, 16, 2048, 128), (2, 16, 4096, 128))
SMALLER = 8  # times, each dim of a product on cores; bytes 64 and 8 times
CHAIN = 200  # kernels that do nothing, one after another
LEAST, MOST = 3, 30  # runs of each
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@contextmanager
def join_machine() -> Generator[torch.device]:
    """Join the processes of torchrun, over nccl where there are GPUs; yields this process's device.

    Raises `ShardplanError` where there are none to join, `BackendError` for what fails while they are joined.
    """
    if "RANK" not in os.environ:
        raise ShardplanError(
            "measure runs one process a device; legal is torchrun --nproc-per-node N --no-python shardplan measure ..."
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        yield device
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"measure: {line(error)}") from error
    finally:
        dist.destroy_process_group()


def time_machine(device: torch.device, dtype: str, timer: Timer, done: Callable[[int, int], None]) -> MachineTimings:
    """Time all of it on the processes that are joined.

    Args:
        device: This process's.
        dtype: Of products and attention.
        timer: What takes the time: see `wall_timer`.
        done: Called with how much is done, and of how much.
    """
    every = [*kernel_calls(device, DTYPES[dtype])]
    total = len(every) + len(COLLECTIVES) * len(MESSAGES) * (dist.get_world_size() > 1)
    kernels: list[KernelTiming] = []
    for k, (item, make) in enumerate(every):
        kernels.append(item._replace(seconds=timer(item, make())))
        done(k + 1, total)
    collectives: list[CollectiveTiming] = []
    lacking: list[str] = []
    for k, kind in enumerate(COLLECTIVES if dist.get_world_size() > 1 else ()):
        with suppress(_LackingError):
            for item, call in _collective_calls(kind, device):
                collectives.append(item._replace(seconds=timer(item, call)))
        if not any(one.kind == kind for one in collectives):
            lacking.append(kind)
        done(len(every) + (k + 1) * len(MESSAGES), total)
    return MachineTimings(dtype, tuple(kernels), tuple(collectives), tuple(lacking))


def wall_timer(device: torch.device, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """Return a timer that repeats a call, for about so many seconds; the slowest rank's median counts."""

    def timed(item: Timed, call: Callable[[], None]) -> float:
        _once(item, call, device, clock)  # connects, compiles, and touches memory
        first = _slowest(_once(item, call, device, clock), device)
        runs = int(min(MOST, max(LEAST, seconds / max(first, 1e-9))))
        return _slowest(median(_once(item, call, device, clock) for _ in range(runs)), device)

    return timed


def kernel_calls(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[KernelTiming, Callable[[], Any]]]:
    """Yield kernels, and what makes the call of each."""
    small = SMALLER if device.type == "cpu" else 1

    def product(m: int, k: int, n: int) -> Callable[[], None]:
        a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
        out = torch.empty(m, n, dtype=dtype, device=device)
        return lambda: _drop(torch.mm(a, b, out=out))

    def copy(nbytes: int) -> Callable[[], None]:
        a, b = (torch.ones(nbytes // 4, dtype=torch.float32, device=device) for _ in range(2))
        return lambda: _drop(b.copy_(a))

    def attention(batch: int, heads: int, tokens: int, width: int) -> Callable[[], None]:
        q = torch.ones(batch, heads, tokens, width, dtype=dtype, device=device)
        return lambda: _drop(torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))

    def chain(count: int) -> Callable[[], None]:
        x = torch.zeros(1, device=device)

        def call() -> None:
            for _ in range(count):
                x.add_(1.0)

        return call

    for parts in PARTS:
        sizes = tuple(LARGE // small // part for part in parts)
        yield KernelTiming("product", sizes), lambda sizes=sizes: product(*sizes)
    for nbytes in COPIES:
        yield KernelTiming("copy", (nbytes // small,)), lambda n=nbytes // small: copy(n)
    for batch, heads, tokens, width in ATTENTION:
        sizes = batch, heads, tokens // small, width
        yield KernelTiming("attention", sizes), lambda sizes=sizes: attention(*sizes)
    yield KernelTiming("launch", (CHAIN,)), lambda: chain(CHAIN)


class _LackingError(Exception):
    """The library has no such collective."""


def _collective_calls(kind: str, device: torch.device) -> Iterator[tuple[CollectiveTiming, Callable[[], None]]]:
    """Sizes of a collective with a call of each; raises `_LackingError` where the first does not run."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for size in MESSAGES:
        count = max(1, size // (SMALLER**2 if device.type == "cpu" else 1) // 4 // ranks)  # elements of a part
        whole = torch.zeros(count * ranks, device=device)
        part = torch.zeros(count, device=device)
        y, x = {"all_gather": (whole, part), "reduce_scatter": (part, whole)}.get(
            kind, (whole, torch.zeros_like(whole))
        )

        def call(y: torch.Tensor = y, x: torch.Tensor = x) -> None:
            if kind == "message":
                sends = dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, y, (rank - 1) % ranks)
                for work in dist.batch_isend_irecv(list(sends)):
                    work.wait()
            else:
                NATIVE[kind](y, x, dist.ReduceOp.SUM, None).wait()

        if size == MESSAGES[0]:
            try:
                call()
            except RuntimeError as error:
                if "support" in str(error) or "implement" in str(error):
                    raise _LackingError from error
                raise
        yield CollectiveTiming(kind, count * ranks * 4), call


def _once(item: Timed, call: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    if dist.get_world_size() > 1:
        dist.barrier()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    start = clock()
    call()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return clock() - start


def _slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks', so that all go on alike."""
    told = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told[0])


def _drop(value: Any) -> None:
    """Take the result of a call for none."""
