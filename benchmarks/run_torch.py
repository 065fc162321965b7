"""Random programs and random DTensor pairs on real processes over gloo, against the numpy reference and DTensor.

`python -m benchmarks.run_torch [--count 2000] [--pairs 1000] [--seed 0]` launches 2, 4, 6 and 8 processes in turn. Each
runs `count` programs of `tests/conformance.py` (every op alone and in chains, plans of the planner, batches, moves
between meshes, computations) and compares every shard with the reference bit for bit and the bytes received in every
step with what the op says; the live storages of a further `count` / 10 programs are compared with the certificate's
workspace. Then the pairs, a quarter on each number of processes, go through `shardplan.interop.torch.redistribute` and
through `DTensor.redistribute` and are compared bit for bit.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.common import ROOT, arguments, record, table, write
from benchmarks.processes import launch

WORLDS = (2, 4, 6, 8)
CHILDREN = ROOT / "tests" / "execution"


def main() -> None:
    parser = arguments("run_torch", "Programs and DTensor pairs on gloo against the reference.", 2000, of="programs")
    parser.add_argument("--pairs", type=int, default=1000, help="pairs over all launches (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for world in WORLDS:
        programs, seconds = launch(CHILDREN / "torch_child.py", world, options.seed, options.count)
        memory, _ = launch(CHILDREN / "torch_memory_child.py", world, options.seed + 1, options.count // 10)
        pairs, _ = launch(
            ROOT / "tests" / "interop" / "dtensor_child.py", world, options.seed, options.pairs // len(WORLDS)
        )
        rows.append(
            {
                "processes": world,
                "programs": programs["cases"],
                "programs wrong": len(programs["wrong"]),
                "over the workspace": memory["count"],
                "pairs": pairs["pairs"],
                "pairs wrong": pairs["wrong"],
                "kinds of pairs": pairs["kinds"],
                "seconds": round(seconds),
                "first wrong": [*programs["wrong"], *memory["wrong"], *pairs["first"]][:5],
            }
        )
        print(f"{world} processes: {rows[-1]}", file=sys.stderr, flush=True)
    shown = ("processes", "programs", "programs wrong", "over the workspace", "pairs", "pairs wrong")
    print(table(shown, [[row[k] for k in shown] for row in rows], "gloo against the reference and DTensor"))
    parameters = {"count": options.count, "pairs": options.pairs, "seed": options.seed, "backend": "gloo"}
    write(options.out, record(parameters, {"launches": rows}))


if __name__ == "__main__":
    main()
