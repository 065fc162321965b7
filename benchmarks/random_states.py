"""Random state dicts through `redistribute_state`, against the full tensors, under a limit, with every storage traced.

`python -m benchmarks.random_states [--count 1000] [--seed 0]` launches 4 and 8 gloo processes, half of the states each,
in chunks of `--chunk`. The states mix meshes, submeshes and pipeline stages, dtypes, ties, nesting, uneven dims, orders
of sharding, parameters and plain tensors, donated or not, and every limit is the least that works, 1.2 or 2 times that.
A chunk that is done is kept in the result file: a run that was broken off goes on where it stopped.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, arguments, record, table, write
from benchmarks.processes import launch

WORLDS = (4, 8)
CHILD = ROOT / "tests" / "interop" / "random_states_child.py"


def finished(path: Path, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of an earlier run with the same parameters."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found["chunks"] if found["parameters"] == parameters and not found["complete"] else []


def main() -> None:
    """Run what is missing, and tell."""
    parser = arguments("random_states", "Random state dicts against the full tensors.", 1000, of="states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=50, help="states a launch (default %(default)s)")
    options = parser.parse_args()
    parameters = {"count": options.count, "seed": options.seed, "chunk": options.chunk, "backend": "gloo"}
    chunks = finished(options.out, parameters)
    each = options.count // len(WORLDS)
    plan = [(w, k, min(options.chunk, each - k)) for k in range(0, each, options.chunk) for w in WORLDS]
    done = {(c["processes"], c["first state"]) for c in chunks}
    for world, start, count in plan:
        if (world, start) in done:
            continue
        told, seconds = launch(CHILD, world, options.seed, start, count)
        chunks.append({"processes": world, "first state": start, **told, "seconds": round(seconds)})
        print(chunks[-1], file=sys.stderr, flush=True)
        write(options.out, record(parameters, _summary(chunks, len(chunks) == len(plan))), quiet=True)
    summary = _summary(chunks, True)
    shown = ("processes", "states", "wrong", "over the limit")
    print(table(shown, [[row[k] for k in shown] for row in summary["launches"]], "Random states"))
    write(options.out, record(parameters, summary))


def _summary(chunks: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
    """Sums over the chunks, by number of processes."""
    rows: list[dict[str, Any]] = []
    for world in WORLDS:
        here = [c for c in chunks if c["processes"] == world]
        kinds: Counter[str] = Counter()
        for c in here:
            kinds.update(c["kinds"])
        sums = {key: sum(c[key] for c in here) for key in ("states", "wrong", "over the limit", "seconds")}
        share = max((c["largest share of the limit"] for c in here), default=0.0)
        rows.append({"processes": world, **sums, "largest share of the limit": share, "kinds": dict(kinds)})
    return {"complete": complete, "launches": rows, "chunks": chunks}


if __name__ == "__main__":
    main()
