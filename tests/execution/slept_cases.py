"""Steps on two ranks whose compute is slept, and the device that is slept for."""

from typing import Any

import shardplan as sp
from shardplan.hardware.level import DeviceSpec, Level

# A step of them takes some tenths of a second of computing.
DEVICE = DeviceSpec(flops=(("*", 2e6),), memory_bandwidth=2e6)
TOPOLOGY = sp.Topology("slow device", (Level("rank", 2, "switch", 1e9, 1e-4),), DEVICE)
MODEL: dict[str, Any] = {"layers": 2, "hidden": 8, "heads": 2, "seq": 8, "vocab": 16}
CASES: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "tensor": {"tensor": 2, "sequence_parallel": True},
    "pipeline": {"pipeline": 2},
    "ring attention": {"context": 2, "context_kind": "ring"},
}


def job_of(name: str) -> sp.Job:
    """The job of a case."""
    return sp.partition(sp.Model.load("gpt", **MODEL), sp.Strategy(global_batch=4, **CASES[name]))
