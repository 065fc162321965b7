"""What a call of the drop-in costs beside `DTensor.redistribute`, on two gloo processes: cached calls, and first ones.

`python -m benchmarks.dtensor_calls [--count 21] [--shapes 12]` moves 8 x 8 tensors, `messages` as gloo is used, and
`native` by gloo's own collectives (`SHARDPLAN_NATIVE=gloo`). Ours and DTensor's take turns of 100 cached calls. A first
call is one of a shape that no move has had, where both plan; the very first of a process also imports and connects, and
is left out. Of both the seconds that pass, and those of the processor, over all threads of rank 0: the latter say what
a call costs on a machine that is not idle, too.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import ROOT, arguments, geomean, record, table, write
from benchmarks.processes import be_rank, launch

ENGINES = {"messages": "", "native": "gloo"}  # `SHARDPLAN_NATIVE`
CALLS = 100  # in a turn
WARM = 30  # calls before the first turn
MEASURES = ("seconds", "processor")


def used(call: Callable[[], Any]) -> tuple[float, float]:
    """The seconds that pass during a call, and those of the processor."""
    began, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - busy


def child(turns: int, shapes: int) -> dict[str, Any]:
    """All moves, on one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from shardplan.interop.torch import redistribute

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def moves(size: int) -> dict[str, dict[str, Callable[[], Any]]]:
        full = torch.arange(float(size * size)).reshape(size, size)
        cut, whole = distribute_tensor(full, mesh, [Shard(0)]), distribute_tensor(full, mesh, [Replicate()])
        addends = DTensor.from_local(full, mesh, [Partial()], run_check=False)
        return {
            name: {
                "ours": lambda x=x, t=target: redistribute(x, t),
                "dtensor": lambda x=x, t=target: x.redistribute(mesh, t),
            }
            for name, x, target in (
                ("S(0) to R", cut, [Replicate()]),
                ("S(0) to S(1)", cut, [Shard(1)]),
                ("R to S(0)", whole, [Shard(0)]),
                ("P to R", addends, [Replicate()]),
                ("P to S(0)", addends, [Shard(0)]),
            )
        }

    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {f"{who}{when}": [] for who in ("ours", "dtensor") for when in ("", ", first")} for name in moves(8)
    }
    for k in range(shapes + 1):
        for name, calls in moves(8 + 2 * k).items():
            for who, call in calls.items():
                dist.barrier()
                took = used(call)
                if k:
                    found[name][f"{who}, first"].append(took)
    for name, calls in moves(8).items():
        for call in calls.values():
            for _ in range(WARM):
                call()
        for _ in range(turns):
            for who, call in calls.items():
                dist.barrier()
                took = used(lambda call=call: [call() for _ in range(CALLS)])
                found[name][who].append((took[0] / CALLS, took[1] / CALLS))
    rows = [
        {"move": name} | {who: dict(zip(MEASURES, map(statistics.median, zip(*times, strict=True)), strict=True))
                          for who, times in both.items()}
        for name, both in found.items()
    ]  # fmt: skip
    return {"rows": rows}


def main() -> None:
    parser = arguments("dtensor_calls", "A call of the drop-in beside DTensor's.", 21, of="turns of 100 calls")
    parser.add_argument("--shapes", type=int, default=12, help="first calls of each move (default %(default)s)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for engine, native in ENGINES.items():
        os.environ["SHARDPLAN_NATIVE"] = native
        found, _ = launch(ROOT / "benchmarks" / "dtensor_calls.py", 2, options.count, options.shapes)
        for row in found["rows"]:
            over = {
                f"{when or 'cached'}, {what}": row[f"ours{when and ', first'}"][what]
                / row[f"dtensor{when and ', first'}"][what]
                for when in ("", "first")
                for what in MEASURES
            }
            rows.append({"engine": engine} | row | {"over DTensor": over})
    heads = list(rows[0]["over DTensor"])
    shown = [[f"{r['engine']}, {r['move']}", *r["over DTensor"].values()] for r in rows]
    print(table(("ours / DTensor", *heads), shown, "8 x 8 on two processes"))
    summary = {
        engine: {head: geomean(r["over DTensor"][head] for r in rows if r["engine"] == engine) for head in heads}
        for engine in ENGINES
    }
    result = {"over DTensor, geomean": summary, "rows": rows}
    write(options.out, record({"count": options.count, "shapes": options.shapes}, result))


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.path[:0] = [str(ROOT), str(ROOT / "src")]
        be_rank(lambda: child(*map(int, sys.argv[1:])))
    else:
        main()
