"""What comparing copies costs a conversion on disk: processor time with and without, by the share of copies.

`python -m benchmarks.weights_copies [--count 5] [--layers 2]`: a synthetic Qwen3-MoE checkpoint of random bf16 bits
(0.6 GB with 2 layers), as vLLM stores it at several degrees, a file a device. Each is converted to transformers'
storage `--count` times with the comparison of copies and as often without, in turns, in this process; the processor
time of all threads is taken, and the median of the ratios within turns. On a busy machine these spread by more than the
comparison takes, so that it is also run alone as often: its median over that of the conversion without it. Copies are
the bytes that some device holds before.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.common import Progress, arguments, record, table, write
from benchmarks.weights_disk import config, make

from shardplan.core.dtypes import itemsize
from shardplan.interop.checkpoint import reshard
from shardplan.interop.checkpoint.gather import WindowGather
from shardplan.interop.checkpoint.jobs import LARGEST_WINDOW
from shardplan.interop.checkpoint.replicas import compare_copies
from shardplan.interop.checkpoint.sources import open_checkpoint
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.replicas import WeightReplicas
from shardplan.movement.weights.weights import Weights

CASES: tuple[dict[str, int], ...] = ({"tensor": 4}, {"tensor": 8}, {"tensor": 4, "replica": 2})
LIMIT = 512_000_000
LARGEST = 5_000_000_000


def share(side: Weights) -> float:
    """The bytes of copies over all bytes of a side."""
    moves = WeightReplicas(side).moves
    copies = sum(int(m.elements.sum()) * itemsize(side.families[m.target_family].dtype) for m in moves)
    return copies / sum(side.nbytes(r) for r in side.devices)


def measured(source: Path, place: Path, sides: tuple[Weights, Weights], count: int) -> dict[str, Any]:
    """Seconds of the processor with and without the comparison, and the median ratio less one."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(count + 1):
        for compare in (True, False) if turn % 2 else (False, True):
            begun = process_time()
            reshard(source, place, memory_limit=LIMIT, from_=sides[0], to=sides[1], compare_replicas=compare)
            if turn:  # the first turn warms the cache
                seconds[compare].append(process_time() - begun)
            shutil.rmtree(place)
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {
        "without s": round(statistics.median(seconds[False]), 3),
        "with s": round(statistics.median(seconds[True]), 3),
        "more %": round(100 * (statistics.median(ratios) - 1), 2),
        "least and most %": [round(100 * (f(ratios) - 1), 2) for f in (min, max)],
    } | alone(source, sides, count, statistics.median(seconds[False]))


def alone(source: Path, sides: tuple[Weights, Weights], count: int, whole: float) -> dict[str, Any]:
    """Seconds of the processor of the comparison alone, planning the copies too, and its share of a conversion."""
    seconds: list[float] = []
    with open_checkpoint(source, len(sides[0].devices)) as held:
        for _ in range(count + 1):
            plan = refit(*sides)
            begun = process_time()
            compare_copies(plan, held, plan.source.devices, WindowGather(LARGEST_WINDOW), lambda: None)
            seconds.append(process_time() - begun)
    taken = statistics.median(seconds[1:])
    return {"alone s": round(taken, 4), "alone %": round(100 * taken / whole, 2)}


def main() -> None:
    """Convert, print a line a case, and write the result."""
    options = arguments("weights_copies", "What comparing copies costs.", 5, of="turns a case")
    options.add_argument("--layers", type=int, default=2, help="of the model (default %(default)s)")
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    progress = Progress("cases", len(CASES))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make(place / "transformers", given.layers, LARGEST)
        whole = Weights.load("hf-qwen3-moe", config(given.layers))
        for case in CASES:
            side = Weights.load("vllm-qwen3-moe", config(given.layers), **case)
            reshard(place / "transformers", place / "vllm", from_=whole, to=side, memory_limit=LIMIT)
            total = sum(side.nbytes(r) for r in side.devices)
            row = {"case": " ".join(f"{k}={v}" for k, v in case.items()), "bytes": total}
            row |= {"copies %": round(100 * share(side), 2)}
            rows.append(row | measured(place / "vllm", place / "out", (side, whole), given.count))
            shutil.rmtree(place / "vllm")
            progress.add(1)
    print(table(list(rows[0]), [list(row.values()) for row in rows], "Processor time of a conversion"))
    write(given.out, record({"count": given.count, "layers": given.layers}, {"rows": rows}))


if __name__ == "__main__":
    main()
