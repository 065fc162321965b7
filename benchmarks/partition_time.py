"""From a model to the programs of a training step on thousands of devices, cold.

`python -m benchmarks.partition_time [--count 5]`: a fresh process for each, so that nothing is remembered; imports and
the building of the model are not counted. Sizes are of the programs of all stages, those that are one counted once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.common import ROOT, arguments, record, spread, table, write

# Seconds asked: of gpt3-175b on 3,072 devices, of Llama 405B on 16,384 and DeepSeek-V3 on 2,048 with a topology.
TARGETS = {"gpt3-175b": 1.0, "llama3-405b on dgx-h100": 1.5, "deepseek-v3 on dgx-h100": 2.0}
CASES: dict[str, dict[str, Any]] = {
    "gpt3-175b": {"data": 32, "tensor": 8, "pipeline": 12, "global_batch": 1536, "zero": 1, "sequence_parallel": True},
    "llama3-405b": {
        "data": 128,
        "tensor": 8,
        "pipeline": 16,
        "global_batch": 2048,
        "zero": 1,
        "sequence_parallel": True,
    },
    "deepseek-v3 on dgx-h100": {
        "data": 64,
        "expert": 64,
        "tensor": 2,
        "pipeline": 16,
        "global_batch": 1024,
        "zero": 1,
        "sequence_parallel": True,
    },
    "llama3-70b": {"data": 64, "context": 4, "global_batch": 256, "fsdp": True, "recompute": "full"},
    "mixtral-8x7b": {"data": 64, "expert": 8, "tensor": 4, "zero": 1, "sequence_parallel": True, "global_batch": 256},
}
CASES["llama3-405b on dgx-h100"] = CASES["llama3-405b"]
OURS = """
import json, sys, time
import shardplan as sp
(name, _, preset), said = sys.argv[1].partition(" on "), json.loads(sys.argv[2])
model = sp.Model.load(name, dtype="bf16")
strategy, partition = sp.Strategy(**said), sp.partition
topology = sp.Topology.load(preset, nodes=strategy.devices // 8) if preset else None
started = time.process_time()
job = partition(model, strategy, topology)
seconds = time.process_time() - started
print(json.dumps({"seconds": seconds, "programs": len(job.programs.shared), "devices": strategy.devices,
                  "steps": sum(len(p.steps) for p in job.programs.shared), "widest": job.settled.widest}))
"""


def one(name: str) -> dict[str, Any]:
    """What a fresh process says of a case; processor time."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OURS, name, json.dumps(CASES[name])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)


def main() -> None:
    options = arguments("partition_time", "Partitioning of large models, cold.", 5, of="processes a case").parse_args()
    found = {name: [one(name) for _ in range(options.count)] for name in CASES}
    rows: list[list[Any]] = []
    for name, runs in found.items():
        seconds = spread([run["seconds"] for run in runs])
        first, asked = runs[0], TARGETS.get(name, "")
        rows.append(
            [name, first["devices"], seconds["median"], seconds["max"], asked, first["programs"], first["steps"]]
        )
    head = ("partition, processor seconds", "devices", "median", "max", "asked", "programs", "steps")
    print(table(head, rows, f"{options.count} processes a case"))
    result = {
        name: {"strategy": CASES[name], "seconds": spread([run["seconds"] for run in runs]), "samples": runs}
        for name, runs in found.items()
    }
    write(options.out, record({"count": options.count, "target seconds": TARGETS}, result))


if __name__ == "__main__":
    main()
