"""What a call of Triton's operators costs the host, launches stubbed: Python's calls, and seconds; prints JSON.

An argument is the number of ranks; another one, `seconds`, has it time calls, too.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from tests.fused.forked import Exchange, forked

from shardplan import fused
from shardplan.fused.calls.agreement import agree_on_call
from shardplan.fused.library import SPECS
from shardplan.fused.operators import gemm as product
from shardplan.fused.triton import blocks, embedding, gemm, gemv
from shardplan.fused.triton.serving import TritonKernels

ROWS, DEPTH, COLUMNS = 8192, 7168, 16


class Nothing:
    """A kernel whose launch does nothing; an interpreter's, by its name."""

    launches = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        Nothing.launches += 1
        return lambda *_, **__: None


class InterpretedNothing(Nothing):
    pass


def stub() -> None:
    for module, name in (
        (gemm, "gemm_kernel"), (gemv, "gemv_kernel"), (embedding, "embedding_kernel"), (blocks, "read_kernel"),
    ):  # fmt: skip
        setattr(module, name, InterpretedNothing())


def counted(run: Callable[[], Any]) -> Counter[str]:
    """Python's calls of a run, by file and name; the exchange of splits is that of `header.py`, which spins."""
    found: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1
        elif event == "c_call" and getattr(argument, "__name__", "") in ("tolist", "item", "synchronize"):
            found[f"waits: {argument.__name__}"] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def work(rank: int, exchange: Exchange) -> dict[str, Any]:
    stub()
    said: dict[str, Any] = {}
    with fused.SymmetricHeap.create(1 << 24, "shm", exchange, "host") as heap:
        heap.kernels = TritonKernels(heap)
        fused.bind("host", heap)
        n = heap.ranks
        a = torch.zeros((ROWS, DEPTH), dtype=torch.bfloat16)
        b = torch.zeros((DEPTH, COLUMNS), dtype=torch.bfloat16)
        torch.manual_seed(0)
        varying = [
            torch.multinomial(torch.ones(n * n), ROWS * n, True).bincount(minlength=n * n).view(n, n) for _ in range(9)
        ]
        tables, ids = [torch.zeros((64, 32)) for _ in range(4)], torch.zeros(4 * 256, dtype=torch.int64)
        offsets, vector = torch.arange(4 * 256 + 1), torch.zeros(DEPTH, dtype=torch.bfloat16)
        scale = [int(x.sum(1).max()) for x in varying]
        largest = torch.zeros((max(scale), DEPTH), dtype=torch.bfloat16)

        def splits(k: int) -> Any:
            c = varying[k % len(varying)]
            send, receive = c[rank].tolist(), c[:, rank].tolist()
            x = largest[: sum(send)]
            return lambda: fused.gemm_all_to_all(x, b, group="host", send_splits=send, recv_splits=receive)

        facts = (ROWS, COLUMNS, 0, None, None, a.dtype, 0, None, True, True)
        spec = next(one for one in SPECS if one.name == product.NAME)
        schema = f"({spec.arguments}, Tensor? anchor=None) -> Tensor"

        def nothing(a: Any, b: Any, *rest: Any, **more: Any) -> torch.Tensor:
            agree_on_call(heap, product.KIND, facts, 20.0, lambda said, varying: None)
            return torch.empty(0)

        torch.library.custom_op("host::nothing", nothing, mutates_args=(), schema=schema)
        given = (a, b, None, "host", "none", 0, None, None, 0, None)
        with torch.no_grad():
            cases: dict[str, Callable[[int], Callable[[], Any]]] = {
                "an empty operator and the exchange": lambda k: lambda: torch.ops.host.nothing(*given),
                "gemm": lambda k: lambda: fused.gemm_all_to_all(a, b, group="host"),
                "gemm, splits of data": splits,
                "gemv": lambda k: lambda: fused.gemv_all_reduce(a[:1024], vector, group="host"),
                "bags": lambda k: lambda: fused.embedding_bag_all_to_all(tables, ids, offsets, group="host"),
            }
            for name, case in cases.items():
                for k in range(3):
                    case(k)()
                run = case(3)
                found = counted(run)
                said[name] = {
                    "calls": sum(v for key, v in found.items() if not key.startswith(("waits", "header.py"))),
                    "waits": [key for key in found if key.startswith("waits")],
                    "most": found.most_common(12),
                }
                if "seconds" in sys.argv:
                    took: list[float] = []
                    for k in range(300):
                        run = case(k)
                        heap.barrier()
                        begun = time.thread_time()
                        run()
                        took.append(time.thread_time() - begun)
                    said[name]["seconds"] = statistics.median(took)
    said["launches"] = Nothing.launches
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(forked(int(sys.argv[1]), work, 100)))
