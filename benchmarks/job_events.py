"""Op-level events of a step, cold: the program that DistIR unrolls to 643,456 ops, and a model of 1T parameters.

`python -m benchmarks.job_events [--count 5]`: a fresh process for each, so that nothing is remembered; processor time.
The building of the model is not counted; `partition` is, by itself. `simulate` is the makespan and the times of all
actions, planning of messages and pricing included; `memory` the bytes of every rank over the step. Beside it the same
with layers and prices not folded, whose times of all actions are compared. DistIR's own time is quoted:
32 s on a quiet machine (spec, section 10). `links shared` is the first case device by device with contention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.common import ROOT, arguments, record, spread, table, write

DISTIR = {"distir ops": 643456, "distir seconds": 32.0}
CASES: dict[str, dict[str, Any]] = {
    "gpt3-large forward": {
        "model": {"source": "gpt3-large", "training": False},
        "strategy": {"tensor": 2, "pipeline": 8, "microbatch": 1, "global_batch": 64},
        "nodes": 2,
        "target": 0.05,
    },
    "1T, 3,072 GPUs, 512 microbatches": {
        "model": {"source": "gpt", "layers": 128, "hidden": 25600, "heads": 160, "seq": 2048, "vocab": 51200},
        "strategy": {
            "data": 6,
            "tensor": 8,
            "pipeline": 64,
            "microbatch": 1,
            "global_batch": 3072,
            "precision": "bf16",
            "recompute": "full",
        },
        "nodes": 384,
        "target": 1.0,
    },
}
OURS = """
import json, sys, time
import numpy as np
import shardplan as sp
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.jobs.settings import Fold
from shardplan.simulation.jobs.timing import issued_of
said = json.loads(sys.argv[1])
model = sp.Model.load(said["model"].pop("source"), **said["model"])
strategy, where = sp.Strategy(**said["strategy"]), sp.Topology.load("dgx-a100", nodes=said["nodes"])

def timed(run):
    started = time.process_time()
    found = run()
    return found, time.process_time() - started

job, partition = timed(lambda: sp.partition(model, strategy, where))
line, simulate = timed(lambda: simulate_job(job, where))
_, memory = timed(lambda: line.peak_bytes)
_, bubble = timed(lambda: line.bubble_seconds)
maps = line.compiled.maps
ops = sum(issued_of(maps[s, k].nodes) * strategy.stage for run in line.swept.ranks for s, k, _ in run.actions)
out = {"partition": partition, "simulate": simulate, "memory": memory, "bubble": bubble, "ops": ops,
       "seconds": line.seconds, "peak_bytes": line.peak_bytes,
       "sweep ranks": len(line.swept.ranks)}
if said["plain"]:
    plain, out["plain"] = timed(lambda: simulate_job(job, where, fold=Fold(False, False, True)))
    pairs = zip(line.swept.ranks, plain.swept.ranks)
    out["apart"] = max(float(np.abs(a.done - b.done).max()) for a, b in pairs) / plain.seconds
if said["nodes"] == 2 and said["plain"]:
    shared, out["links shared"] = timed(lambda: simulate_job(job, where, contention=True))
    out["slower when shared"] = shared.seconds / line.seconds - 1
print(json.dumps(out))
"""


def one(case: dict[str, Any], plain: bool) -> dict[str, Any]:
    """What a fresh process says of a case."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OURS, json.dumps(case | {"plain": plain})]
    return json.loads(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)


def main() -> None:
    options = arguments("job_events", "Op-level events of jobs, cold.", 5, of="processes a case").parse_args()
    found = {name: [one(case, plain=not k) for k in range(options.count)] for name, case in CASES.items()}
    rows: list[list[Any]] = []
    for name, runs in found.items():
        medians = [spread([run[what] for run in runs])["median"] for what in ("partition", "simulate", "memory")]
        first = runs[0]
        rows.append([name, first["ops"], *medians, CASES[name]["target"], first["plain"], f"{first['apart']:.0e}"])
    heads = ("processor seconds", "ops of devices", "partition", "simulate", "memory", "target", "not folded", "apart")
    print(table(heads, rows, f"{options.count} processes a case; DistIR takes 32 s for the first (quoted)"))
    result = {name: {"case": CASES[name], "samples": runs} for name, runs in found.items()}
    for name, runs in found.items():
        result[name] |= {what: spread([run[what] for run in runs]) for what in ("partition", "simulate", "memory")}
    write(options.out, record({"count": options.count, **DISTIR}, result))


if __name__ == "__main__":
    main()
