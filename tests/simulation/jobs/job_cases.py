"""Small jobs of many kinds, each made once, and the topologies that they run on."""

from __future__ import annotations

from functools import cache
from typing import Any

import shardplan as sp
from shardplan.hardware.level import DeviceSpec, Level
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition.job import Job

SIZES: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 8, "seq": 32, "vocab": 96}
STRATEGIES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": 2, "global_batch": 12},
    "tensor": {"tensor": 2, "pipeline": 2, "global_batch": 12, "sequence_parallel": True, "recompute": "full"},
    "fsdp": {"data": 4, "fsdp": True, "global_batch": 8},
    "prefetch": {"data": 4, "fsdp": True, "prefetch": True, "global_batch": 8, "recompute": "full"},
    "bucket": {"data": 4, "zero": 2, "bucket": 1e5, "global_batch": 8},
    "interleaved": {"pipeline": 2, "interleave": 2, "schedule": "interleaved", "global_batch": 12},
    "zb-h1": {"pipeline": 2, "schedule": "zb-h1", "global_batch": 10},
    "dualpipe": {"pipeline": 4, "schedule": "dualpipe", "global_batch": 8},
    "gpipe": {"pipeline": 4, "schedule": "gpipe", "global_batch": 30},
    "looped": {"pipeline": 2, "interleave": 2, "schedule": "looped-bfs", "global_batch": 8},
    "offload": {"pipeline": 2, "global_batch": 12, "offload": True, "data": 2},
    "ring": {"context": 2, "context_kind": "ring", "data": 2, "global_batch": 4},
    "clipped": {"pipeline": 2, "data": 2, "zero": 1, "global_batch": 12},
    "uneven": {"tensor": 3, "data": 2, "global_batch": 4},
}
CLUSTER = Topology(
    "2x4",
    (Level("node", 2, "switch", 1e9, 1e-6), Level("gpu", 4, "switch", 1e10, 1e-7)),
    DeviceSpec((("*", 1e12),), memory_bandwidth=1e11, launch=1e-7),
)


@cache
def job(name: str, layers: int = 4) -> Job:
    """Return the job of a strategy."""
    sizes: dict[str, Any] = {**SIZES, "layers": layers}
    model = sp.Model.load("gpt", **sizes, clip=1.0 if name == "clipped" else 0.0)
    return sp.partition(model, sp.Strategy(**STRATEGIES[name]))
