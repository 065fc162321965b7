"""SIGKILL at random points of a refit: who is named, when, what is served, and whether the next full refit is right.

`python -m benchmarks.weights_kill [--count 20] [--seed 0]` launches two trainers and two servers of a small Llama
over gloo, which refit without pause through staging of 4 kB, in messages of at most a few hundred bytes. After a
random time one of them, trainers and servers in turn, gets SIGKILL. Every survivor must name it within the timeout of
8 s, have no version, and refuse to serve; nothing that a rank had in shared memory may be left there. Then the rank
is started again, all meet anew in the store, and the next full refit must be the reference's, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from typing import Any

from benchmarks.common import ROOT, arguments, record, spread, table, use_tests, write

CHILD = ROOT / "tests" / "interop" / "refit_child.py"
FAILED = re.compile(r"failed ([0-9.]+) s: (.*)")


def one(victim: int, wait: float) -> dict[str, Any]:
    """Kill one rank after some seconds of refits, and start it again."""
    job = use_tests("execution.torch_launch").Launch(4, CHILD, "killed", json.dumps({"victim": victim}))
    try:
        until = time.monotonic() + 120
        _until(job, "ready", 4, until)
        time.sleep(wait)
        shared = use_tests("execution.shared_memory").shared_files(rank.pid for rank in job.ranks)
        job.ranks[victim].kill()
        _until(job, "failed", 3, until)
        said = [(float(m[1]), m[2]) for m in FAILED.finditer(job.said(".out"))]
        job.again(victim)
        job.wait(120)
        again = (job.output / f"{victim}-again.out").read_text()
        right = job.status == 0 and job.said(".out").count("recovered") == 3 and "recovered" in again
        return {
            "victim": victim,
            "after seconds": wait,
            "named by": sum(f"rank {victim}" in text for _, text in said),
            "slowest seconds": max(seconds for seconds, _ in said),
            "next refit right": right,
            "left in shared memory": sum(os.path.exists(name) for name in shared),
            "said": said[0][1],
        }
    finally:
        job.end()


def _until(job: Any, word: str, count: int, until: float) -> None:
    while job.said(".out").count(word) < count:
        if time.monotonic() > until:
            raise SystemExit(f"not all ranks were {word}:\n{job.said('.err')[-4000:]}")
        time.sleep(0.02)


def main() -> None:
    parser = arguments("weights_kill", __doc__.splitlines()[0] if __doc__ else "", 20, of="kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    for k in range(options.count):
        rows.append(one((0, 2, 1, 3)[k % 4], rng.uniform(0.01, 0.4)))
        print(rows[-1], file=sys.stderr, flush=True)
    wrong = [r for r in rows if r["named by"] != 3 or not r["next refit right"] or r["left in shared memory"]]
    shown = [key for key in rows[0] if key != "said"]
    print(table(shown, [[r[key] for key in shown] for r in rows], "SIGKILL in a refit"))
    print(f"{len(wrong)} wrong")
    seconds = spread([r["slowest seconds"] for r in rows])
    result = {"kills": len(rows), "wrong": len(wrong), "seconds until all knew": seconds, "rows": rows}
    write(options.out, record({"count": options.count, "seed": options.seed, "timeout": 8}, result))


if __name__ == "__main__":
    main()
