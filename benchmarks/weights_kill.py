"""SIGKILL at random points of a refit: who is named, when, what is served, and whether the next full refit is right.

`python -m benchmarks.weights_kill [--count 20] [--seed 0]` tries each of four things so many times. It launches two
trainers and two servers of a small Llama over gloo, which refit without pause through staging of 4 kB, in messages of
at most a few hundred bytes. After a random time one of them, trainers and servers in turn, gets SIGKILL. Every survivor
must name it within the timeout of 8 s, have no version, and refuse to serve; nothing that a rank had in shared memory
may be left there. Then the rank is started again, all meet anew in the store, and the next full refit must be the
reference's, bit for bit. A restart of the server kills both of its ranks at once, and starts both again. A rank that
comes late, by up to 3 s of a timeout of 8 s, must change nothing; one that comes after a timeout of 2 s must be named
by all that waited.
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


def killed(victims: list[int], wait: float) -> dict[str, Any]:
    """Kill some ranks after some seconds of refits, and start them again."""
    job = use_tests("execution.torch_launch").Launch(4, CHILD, "killed", json.dumps({"victims": victims}))
    others = 4 - len(victims)
    try:
        until = time.monotonic() + 120
        _until(job, "ready", 4, until)
        time.sleep(wait)
        shared = use_tests("execution.shared_memory").shared_files(rank.pid for rank in job.ranks)
        for victim in victims:
            job.ranks[victim].kill()
        _until(job, "failed", others, until)
        said = [(float(m[1]), m[2]) for m in FAILED.finditer(job.said(".out"))]
        for victim in victims:
            job.again(victim)
        job.wait(120)
        again = [(job.output / f"{victim}-again.out").read_text() for victim in victims]
        right = job.status == 0 and job.said(".out").count("recovered") == others
        return {
            "kind": "kill" if len(victims) == 1 else "restart of the server",
            "ranks": victims,
            "after seconds": wait,
            "named by": sum(any(f"rank {v}" in text for v in victims) for _, text in said),
            "of": others,
            "slowest seconds": max(seconds for seconds, _ in said),
            "next refit right": right and all("recovered" in text for text in again),
            "left in shared memory": sum(os.path.exists(name) for name in shared),
            "said": said[0][1],
        }
    finally:
        job.end()


def came_late(victim: int, late: float, timeout: float) -> dict[str, Any]:
    """Let one rank come late: within the timeout all refits are right, beyond it the others name it."""
    given = json.dumps({"victim": victim, "late": late, "timeout": timeout})
    job = use_tests("execution.torch_launch").Launch(4, CHILD, "late", given)
    try:
        job.wait(120, together=False)
        said = [(float(m[1]), m[2]) for m in FAILED.finditer(job.said(".out"))]
        inside = late < timeout
        named = sum(re.search(rf"\b{victim}\b", text) is not None for _, text in said)
        return {
            "kind": "late" if inside else "too late",
            "ranks": [victim],
            "after seconds": late,
            "named by": named,
            "of": 0 if inside else 3,
            "slowest seconds": max((seconds for seconds, _ in said), default=0.0),
            "next refit right": job.status == 0 and job.said(".out").count("recovered") == (4 if inside else 0),
            "left in shared memory": 0,
            "said": next((text for _, text in said if re.search(rf"\b{victim}\b", text)), ""),
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
        victim = (0, 2, 1, 3)[k % 4]
        rows.append(killed([victim], rng.uniform(0.01, 0.4)))
        rows.append(killed([2, 3], rng.uniform(0.01, 0.4)))
        rows.append(came_late(victim, rng.uniform(0.1, 3.0), 8.0))
        rows.append(came_late(victim, 6.0, 2.0))
        print(*rows[-4:], sep="\n", file=sys.stderr, flush=True)

    def is_wrong(row: dict[str, Any]) -> bool:
        few = row["named by"] < row["of"] if row["kind"] == "too late" else row["named by"] != row["of"]
        return few or not row["next refit right"] or bool(row["left in shared memory"])

    kinds = [
        {
            "kind": kind,
            "tries": len(mine),
            "wrong": sum(map(is_wrong, mine)),
            "seconds until all knew": spread([r["slowest seconds"] for r in mine]),
        }
        for kind in dict.fromkeys(r["kind"] for r in rows)
        for mine in [[r for r in rows if r["kind"] == kind]]
    ]
    shown = [key for key in rows[0] if key != "said"]
    print(table(shown, [[str(r[key]) for key in shown] for r in rows], "ranks that are lost or late"))
    wrong = sum(map(is_wrong, rows))
    print(f"{wrong} wrong")
    kills = [r for r in rows if r["kind"] == "kill"]
    result = {
        "kills": len(kills),
        "wrong": wrong,
        "seconds until all knew": spread([r["slowest seconds"] for r in kills]),
        "kinds": kinds,
        "rows": rows,
    }
    write(options.out, record({"count": options.count, "seed": options.seed, "timeout": 8}, result))


if __name__ == "__main__":
    main()
