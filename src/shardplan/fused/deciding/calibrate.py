"""`calibrate`: the constants of this machine's CPUs and of shared memory, measured in a few seconds in one process.

Ranks are threads here: a counter that one of them stores and another one waits for is the same word of memory, whoever
has mapped it. A store into a peer's memory is the store of a result, so that nothing travels on a wire of its own.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardplan.errors import optional
from shardplan.fused.kernels.bags import TILE, BagCall, BagKernel
from shardplan.fused.kernels.native import native
from shardplan.fused.kernels.vectors import rows_times
from shardplan.hardware.prices.fused import FusedConstants

TILES = (1, 2, 4, 8, 16, 32, 64)
ROWS, INNER, COLUMNS = 1024, 256, 512  # of the product that is cut into tiles
BYTES = 8 << 20  # of a copy
TRIPS = 200  # of a signal there and back
SPIN = 1_000_000_000  # nanoseconds
LEAST = 5  # repetitions


def calibrate(seconds: float = 10.0) -> FusedConstants:
    """Return the constants of fused operators on shared memory, with what this machine computes.

    Args:
        seconds: About how long it may take; half of it suffices on a quiet machine.

    Tiles are interleaved, so that other load meets all of them; medians are taken. Threads are those that torch has.
    """
    torch = optional("torch", "torch")
    share = seconds / 5
    source, target = torch.ones(BYTES // 4), torch.empty(BYTES // 4)
    (copied,) = _medians([lambda: target.copy_(source)], share / 2)
    taxes, product = _products(torch, share * 2)
    vector = _vector(torch, share / 2)
    bags = _bags(torch, share / 2)
    signal, latency = _signals(share)
    about = f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    return FusedConstants(
        "shm",
        latency=latency,
        bandwidth=float("inf"),
        copy_bandwidth=BYTES / copied,
        signal=signal,
        tile_tax=taxes,
        rates=(("product", product), ("vector", vector), ("bags", bags)),
        source=f"measured here ({about})",
    )


def _medians(runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """The median seconds of each, in turns, after one that does not count."""
    for run in runs:
        run()
    took: list[list[float]] = []
    until = time.perf_counter() + seconds
    while len(took) < LEAST or time.perf_counter() < until:
        row: list[float] = []
        for run in runs:
            start = time.perf_counter()
            run()
            row.append(time.perf_counter() - start)
        took.append(row)
    return np.median(np.array(took), axis=0).tolist()


def _products(torch: Any, seconds: float) -> tuple[tuple[tuple[int, float], ...], float]:
    """The tax of tiles, which never falls with their number, and the rate of a product in operations per second."""
    a, b, out = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS), torch.empty(ROWS, COLUMNS)

    def cut(tiles: int) -> Callable[[], None]:
        parts = list(zip(a.chunk(tiles), out.chunk(tiles), strict=True))

        def run() -> None:
            for x, y in parts:
                torch.mm(x, b, out=y)

        return run

    took = _medians([cut(n) for n in TILES], seconds)
    taxes = np.maximum.accumulate(np.array(took) / took[0])
    return tuple(zip(TILES, taxes.tolist(), strict=True)), 2.0 * ROWS * INNER * COLUMNS / took[0]


def _vector(torch: Any, seconds: float) -> float:
    """The bytes of a matrix per second that a thin product reads."""
    a, x, out = torch.randn(4096, 1024), torch.randn(1, 1024), torch.empty(4096, 1)
    (took,) = _medians([lambda: rows_times(a, x, out)], seconds)
    return a.nbytes / took


def _bags(torch: Any, seconds: float) -> float:
    """The bytes of rows per second that bags read, from a table beyond the caches."""
    batch, length, dim = 512, 32, 64
    table = torch.randn(200_000, dim)
    ids = torch.randint(0, len(table), (batch * length,))
    call = BagCall([table], ids, torch.arange(batch + 1) * length, None, "sum", batch, "calibrate")
    out = torch.empty(batch, 1, dim)
    if BagKernel.fits(call):
        kernel, tiles = BagKernel(call, dim, dim), np.array([(0, batch, out.data_ptr(), 0, 0, 0)], TILE)
        run: Callable[[], Any] = lambda: kernel.store(tiles, 0)  # noqa: E731
    else:
        run = lambda: call.store(0, batch, out)  # noqa: E731
    (took,) = _medians([run], seconds)
    return batch * length * dim * 4 / took


def _signals(seconds: float) -> tuple[float, float]:
    """The seconds that a signal takes its sender, and those from a signal to the end of the wait for it."""
    words = np.zeros((2, 16), np.int32)
    kernels = native()
    addresses = [row.ctypes.data for row in words]

    def signal(k: int, count: int) -> None:
        if kernels is None:
            words[k, 0] = count
        else:
            kernels.signal(addresses[k], count)

    def wait(k: int, count: int) -> None:
        if kernels is not None:
            kernels.wait(addresses[k], count, SPIN)
            return
        while words[k, 0] < count:
            time.sleep(0)

    def there() -> None:
        for k in range(1, TRIPS + 1):
            wait(0, k)
            signal(1, k)

    took: list[float] = []
    until = time.perf_counter() + seconds / 2
    while len(took) < LEAST or time.perf_counter() < until:
        words[:] = 0
        other = threading.Thread(target=there)
        other.start()
        start = time.perf_counter()
        for k in range(1, TRIPS + 1):
            signal(0, k)
            wait(1, k)
        took.append((time.perf_counter() - start) / TRIPS / 2)
        other.join()

    def many() -> None:
        for k in range(TRIPS):
            signal(0, k)

    (sent,) = _medians([many], seconds / 4)
    return sent / TRIPS, float(np.median(took))
