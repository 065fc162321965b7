"""Random sequences of calls of the fused operators on one to four ranks, beside torch's own ops; what agreeing costs.

A sequence is eight calls of the three operators: shapes that all ranks know, that each knows alone, new, uneven and
empty ones, splits on all ranks or some, operands that need gradients on some ranks only, backward at once or later, and
calls that all must refuse (`tests/fused/sequences.py`). What is `wrong` is a value, a gradient, a refusal or its
absence; `late` are waits that reached their bound of 30 s.

`added` are microseconds that the word before every call adds on processes that share memory: blocks of 20 calls, with
the exchange and without it in turn, where without it a rank goes on with what it has just agreed upon, each rank on a
core of its own. `p10` compares the fast tenth of blocks, in which nobody else wanted these, `median` all. `exchange` is
one alone. All of it takes about ten minutes on two cores that are free.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from typing import Any

import torch
from benchmarks.common import arguments, record, table, write
from tests.fused.forked import Exchange, forked, run
from tests.fused.sequences import tried

from shardplan.fused.calls.agreement import KNOWN
from shardplan.fused.heap.header import HeapHeader
from shardplan.fused.heap.symmetric import SymmetricHeap
from shardplan.fused.operators import embedding, gemm, gemv
from shardplan.fused.operators.call_context import CallContext

SHARES = {1: 0.05, 2: 0.45, 3: 0.25, 4: 0.25}  # of the sequences, by ranks
MORE = {"net": {2: 0.02, 3: 0.01}, "triton": {2: 0.006, 3: 0.003}}  # beside them
CHUNK = 500
BLOCKS, TIMES = 400, 20


def summed(founds: list[list[Any]]) -> dict[str, Any]:
    """What the ranks of some jobs found, together; of a job that ended otherwise, the texts are wrong."""
    total: Counter[str] = Counter()
    wrong: list[Any] = []
    late = 0
    for found in founds:
        wrong += [each for each in found if not isinstance(each, dict)]
        good = [each for each in found if isinstance(each, dict)]
        wrong += [text for each in good for text in each["wrong"]]
        late += sum(each["late"] for each in good)
        if good:  # all ranks draw the same
            total.update({key: max(each["count"].get(key, 0) for each in good) for key in good[0]["count"]})
    for text in wrong[:5]:
        print(text)
    return {**total, "wrong": len(wrong), "late": late}


def sequences(count: int, seed: int) -> list[dict[str, Any]]:
    """All of them on shared memory, by ranks; and some between nodes, and by Triton's kernels in the interpreter."""
    rows: list[dict[str, Any]] = []
    for ranks, share in SHARES.items():
        started, many = time.monotonic(), round(count * share)
        parts = [range(begin, min(many, begin + CHUNK)) for begin in range(0, many, CHUNK)]
        found = summed([tried(ranks, each, seed, within=3600.0) for each in parts])
        rows.append({"way": "shm", "ranks": ranks, **found, "seconds": time.monotonic() - started})
        print(rows[-1], flush=True)
    for way, shares in MORE.items():
        for ranks, share in shares.items():
            started = time.monotonic()
            found = summed([run("sequences", ranks, round(count * share), seed, way, seconds=3600.0)])
            rows.append({"way": way, "ranks": ranks, **found, "seconds": time.monotonic() - started})
            print(rows[-1], flush=True)
    return rows


def on_rank(rank: int, exchange: Exchange) -> dict[str, list[float]]:
    """Seconds a call of each operator with the exchange and without it, and of the exchange alone."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    plain = HeapHeader.exchange
    with SymmetricHeap.create(1 << 22, "shm", exchange, "added") as heap:
        asked, n = CallContext(heap), heap.ranks
        a, b = torch.ones(8 * n, 16), torch.ones(16, 8)
        matrix, vector = torch.ones(64, 64), torch.ones(64)
        tables, ids, offsets = [torch.ones(5, 8)], torch.zeros(8 * n, dtype=torch.int64), torch.arange(8 * n + 1)
        calls = {
            "gemm": lambda: gemm.forward(asked, a, b),
            "gemv": lambda: gemv.forward(asked, matrix, vector),
            "bags": lambda: embedding.forward(asked, tables, ids, offsets, None, "sum", 8 * n),
        }
        found: dict[str, list[float]] = {}

        def block(call: Any) -> float:
            heap.barrier()
            started = time.perf_counter()
            for _ in range(TIMES):
                call()
            return (time.perf_counter() - started) / TIMES

        for name, call in calls.items():
            call()
            (*_, words) = heap.kept[KNOWN]  # those of the newest agreement
            ways: dict[str, Any] = {"with": plain, "without": lambda *_, known=words: known}
            for way in ways:
                found[f"{name} {way}"] = []
            for k in range(BLOCKS):
                for way in ("with", "without") if k % 2 else ("without", "with"):
                    HeapHeader.exchange = ways[way]  # type: ignore[method-assign]
                    found[f"{name} {way}"].append(block(call))
            HeapHeader.exchange = plain  # type: ignore[method-assign]
        found["alone"] = [block(lambda: heap.header.exchange(1, {(1,) * n}, 30.0, "added")) for _ in range(BLOCKS)]
        return found


def added(ranks: int) -> dict[str, Any]:
    """What the exchange adds to a call, the slower rank's block each time."""
    said = forked(ranks, on_rank, 600.0)
    worst = {key: [max(each[key][k] for each in said) * 1e6 for k in range(BLOCKS)] for key in said[0]}
    row: dict[str, Any] = {"ranks": ranks}
    for name in ("gemm", "gemv", "bags"):
        there, gone = worst[f"{name} with"], worst[f"{name} without"]
        row[name] = {
            "call_p10": tenth(gone),
            "added_p10": tenth(there) - tenth(gone),
            "call_median": statistics.median(gone),
            "added_median": statistics.median(there) - statistics.median(gone),
        }
    return row | {"exchange_p10": tenth(worst["alone"]), "exchange_median": statistics.median(worst["alone"])}


def tenth(values: list[float]) -> float:
    """The value below which a tenth lies."""
    return statistics.quantiles(values, n=10)[0]


def main() -> None:
    parser = arguments("fused_sequences", __doc__ or "", 10_000, of="sequences")
    parser.add_argument("--seed", type=int, default=37)
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = [added(ranks) for ranks in (1, 2)]
    for row in costs:
        print(row, flush=True)
    rows = sequences(options.count, options.seed)
    keys = (
        "way",
        "ranks",
        "sequences",
        "calls",
        "known apart",
        "uneven",
        "empty",
        "refused",
        "backward",
        "wrong",
        "late",
    )
    print(table(keys, [[row.get(key, 0) for key in keys] for row in rows]))
    write(
        options.out,
        record({"count": options.count, "seed": options.seed}, {"load": os.getloadavg(), "added": costs, "rows": rows}),
    )


if __name__ == "__main__":
    main()
