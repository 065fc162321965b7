"""`redistribute_state` without a limit: what it stages, and its time beside the plan with all the room there is.

`python -m benchmarks.state_staging [--count 7]` launches 4 processes over gloo. States: many equal weights, one large
one, a mixture of 59 shapes; cut to cut otherwise, and to whole. Ways: `usual` (as a user calls it) and `packed` (one
transfer for all, which was the way where no limit was said), interleaved. Reported: the most live storage of any
rank beyond the sources, over the results, and beyond both; the seconds of the first call, planning included, and the
median of later ones, that of the slowest rank.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, record, table, use_tests, write
from benchmarks.processes import be_rank, launch, of_all_ranks

WORLD, MIB = 4, 2**20
MIXED = [(2048, 4096)] * 3 + [(1024, 512 + 256 * k) for k in range(16)] + [(1024, 16)] * 40
STATES = {
    "24 of 8 MiB, rows to columns": ([(1024, 2048)] * 24, 0, 1),
    "24 of 4 MiB, rows to whole": ([(1024, 1024)] * 24, 0, None),
    "24 of 4 MiB, columns to whole": ([(1024, 1024)] * 24, 1, None),
    "one of 256 MiB, rows to columns": ([(4096, 16384)], 0, 1),
    "one of 128 MiB, rows to whole": ([(4096, 8192)], 0, None),
    "59 of 64 KiB to 32 MiB, rows to columns": (MIXED, 0, 1),
}


def child(count: int) -> dict[str, Any]:
    """Move every state both ways on this rank."""
    every = of_all_ranks({name: moved(*state, count) for name, state in STATES.items()})
    return {"rows": [row(name, [each[name] for each in every]) for name in STATES]}


def moved(shapes: list[tuple[int, int]], source: int, target: int | None, count: int) -> dict[str, Any]:
    """Bytes and seconds of one state on this rank, by way."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from shardplan.interop.torch import redistribute_state
    from shardplan.interop.torch.state import plan

    made_of = use_tests("execution.storages").Made
    mesh = init_device_mesh("cpu", (WORLD,))
    state = {
        f"w{k}": DTensor.from_local(
            torch.ones([n // WORLD if d == source else n for d, n in enumerate(shape)]), mesh, [Shard(source)],
            run_check=False,
        )
        for k, shape in enumerate(shapes)
    }  # fmt: skip
    layouts = {"*": [Replicate() if target is None else Shard(target)]}
    shipped = plan.STAGED_BYTES
    out: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {"packed": [], "usual": []}
    for k in range(-1, count):
        for way in sorted(seconds, reverse=bool(k % 2)):
            plan.STAGED_BYTES = shipped if way == "usual" else 2**50
            dist.barrier()
            started = time.perf_counter()
            if k < 0:
                with made_of(*(x.to_local() for x in state.values())) as book:
                    result = redistribute_state(state, layouts)
                given, made = (sum(x.to_local().nbytes for x in end.values()) for end in (state, result))
                out[way] = {"source": given, "result": made, "peak": book.peak, "first": time.perf_counter() - started}
            else:
                result = redistribute_state(state, layouts)
                seconds[way].append(time.perf_counter() - started)
            del result
    for way, found in seconds.items():
        out[way]["seconds"] = found
    plan.STAGED_BYTES = shipped
    return out


def row(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What one state took, of all ranks' reports."""
    ways: dict[str, Any] = {}
    for way in ("usual", "packed"):
        each = [r[way] for r in ranks]
        beyond = max(r["peak"] - r["source"] for r in each)
        result = max(r["result"] for r in each)
        ways[way] = {
            "peak over result": beyond / result,
            "staged MiB": (beyond - result) / MIB,
            "allowed MiB": result / 10 / MIB + 64,
            "first": max(r["first"] for r in each),
            "seconds": statistics.median(map(max, zip(*(r["seconds"] for r in each), strict=True))),
        }
    ratio = {what: ways["usual"][what] / ways["packed"][what] for what in ("first", "seconds")}
    return {"state": name, **ways, "ratio": ratio}


def main() -> None:
    parser = arguments("state_staging", "What a state's move stages without a limit.", 7, of="later calls of each")
    options = parser.parse_args()
    rows = launch(Path(__file__), WORLD, options.count)[0]["rows"]
    shown = [
        [r["state"], *(r[way][what] for way in ("packed", "usual") for what in ("peak over result", "staged MiB")),
         r["usual"]["allowed MiB"], r["packed"]["seconds"], r["ratio"]["seconds"], r["ratio"]["first"]]
        for r in rows
    ]  # fmt: skip
    heads = ("state", "packed: peak / result", "staged MiB", "usual: peak / result", "staged MiB", "allowed", "seconds",
             "ratio", "of first calls")  # fmt: skip
    print(table(heads, shown, f"{WORLD} ranks of gloo"))
    worst = max(r["ratio"]["seconds"] for r in rows)
    mean = math.exp(statistics.fmean(math.log(r["ratio"]["seconds"]) for r in rows))
    write(options.out, record({"count": options.count}, {"rows": rows, "seconds, worst": worst, "seconds, mean": mean}))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        be_rank(lambda: child(int(sys.argv[1])))
    else:
        main()
