"""The import of shardplan beyond numpy, and what it must not load.

`python -m benchmarks.import_time [--count 15]`: alternating processes import numpy, and numpy and then shardplan; the
second import is timed inside the process, whole processes as a check from outside.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import ROOT, arguments, record, spread, table, write

TARGET = 0.150
FORBIDDEN = ("torch", "jax", "jaxlib")
NUMPY = "import numpy"
# Public names are imported on first use: what a first call needs is timed beside the bare import.
OURS = """
import json, sys, time
import numpy
started = time.perf_counter()
import shardplan
bare = time.perf_counter() - started
shardplan.redistribute, shardplan.TensorType, shardplan.Mesh, shardplan.run, shardplan.Topology, shardplan.placements
print(json.dumps({"bare": bare, "with its names": time.perf_counter() - started, "modules": sorted(sys.modules)}))
"""


def process(program: str) -> tuple[float, str]:
    """The seconds of a whole process, and what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    return time.perf_counter() - started, done.stdout


def main() -> None:
    parser = arguments("import_time", "The import of shardplan beyond numpy.", 15, of="pairs of processes")
    options = parser.parse_args()
    process(NUMPY)
    process(OURS)  # files into the cache, bytecode written
    seconds: dict[str, list[float]] = {"bare": [], "with its names": [], "process, beyond numpy's": []}
    modules: set[str] = set()
    for _ in range(options.count):
        alone, _ = process(NUMPY)
        both, printed = process(OURS)
        told: dict[str, Any] = json.loads(printed)
        modules |= set(told["modules"])
        for name in ("bare", "with its names"):
            seconds[name].append(told[name])
        seconds["process, beyond numpy's"].append(both - alone)
    loaded = [name for name in FORBIDDEN if name in modules]
    rows = [[name, *(1e3 * spread(values)[k] for k in ("median", "p90", "max"))] for name, values in seconds.items()]
    print(table(("import of shardplan, ms", "median", "p90", "max"), rows, f"{options.count} processes, target 150 ms"))
    print(f"loaded of {', '.join(FORBIDDEN)}: {', '.join(loaded) or 'none'}")
    result = {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "target seconds": TARGET,
        "within target": statistics.median(seconds["with its names"]) < TARGET,
        "loaded that must not be": loaded,
        "samples": seconds,
    }
    write(options.out, record({"count": options.count}, result))


if __name__ == "__main__":
    main()
