"""Whole models with their collectives fused, beside the same models unfused, on real processes.

`python -m benchmarks.fused_models`: four gloo processes with a thread each run a decode step of a Llama cut by
`tensor`, a training step with a mixture of experts, and a training step of a DLRM whose tables are sharded, each as
`sp.partition` and `sp.fuse` make them. The constants that `sp.fuse` decides by are of a link so slow that all that can
be fused is: what is measured are the kernels, and no decision.

Both variants run in every repetition, in random order, the same on all ranks, which meet before each. A step is the
span from the first step of its programs to the last one, without laying out arrays before and bringing results
together behind; its time is the largest of the ranks'. A ratio is of two times of one repetition; medians are told.
Values are all results, gradients and parameters behind the step, relative to the largest element of each; calls are
those that the operators counted on a rank, and bytes those that were received in a step, over all ranks. A sum in one
shot brings all addends to all ranks, which is more than the collective would.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import arguments, record, table, use_tests, write

import shardplan as sp
from shardplan.execution.record import Record

RANKS, PATIENCE, CLOSE = 4, 60.0, 2e-5
VARIANTS = ("unfused", "fused")
DLRM = {"table_rows": (2000, 1000, 500, 4000, 3000, 200, 800, 1500, 100, 2500), "embedding_dim": 32, "bag": 4,
        "dense_features": 13, "bottom": (128, 32), "top": (128, 1)}  # fmt: skip
LLAMA = {"hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 512, "layers": 4}
MIXTURE = {"hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 256, "layers": 2, "dense_layers": 0,
           "experts": 8, "experts_per_token": 2, "seq": 64}  # fmt: skip
SGD = {"optimizer": "sgd", "dtype": "f32"}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a family, fields and degrees
    "Llama, a decode step": (
        "llama", LLAMA | {"dtype": "f32", "training": False, "seq": 1, "cache": 64, "batch": 4},
        {"tensor": 4, "global_batch": 4, "microbatch": 4},
    ),
    "mixture of experts, a training step": ("moe", MIXTURE | SGD, {"data": 4, "expert": 4, "global_batch": 4}),
    "DLRM, a training step": ("dlrm", DLRM | SGD, {"data": 4, "expert": 4, "microbatch": 256, "global_batch": 1024}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A job, the same fused, and arrays for both."""

    plain: sp.Job
    fused: sp.Job
    rows: tuple[str, ...]  # of the fusion
    given: Mapping[str, np.ndarray]


def pair_of(name: str) -> ModelPair:
    """A model of the table."""
    cases, jobs = use_tests("execution.fused_cases"), use_tests("strategy.jobs")
    family, fields, degrees = MODELS[name]
    strategy = sp.Strategy(**degrees)
    job = sp.partition(sp.Model.load(family, **fields), strategy)
    found = sp.fuse(job, cases.box(strategy.devices), cases.EAGER)
    big = job.model.resize(batch=strategy.sequences) if fields.get("training", True) else job.model
    given = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in jobs.arrays(big, big.program).items()}
    return ModelPair(job, found.program, tuple(f"{row.op}: {row.reason}, {row.choice}" for row in found.rows), given)


class ModelRank:
    """A model on a rank."""

    def __init__(self, name: str) -> None:
        self.pair = pair_of(name)
        self.seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        self.values: dict[str, dict[str, np.ndarray]] = {}
        self.bytes: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def step(self, variant: str) -> None:
        """Run one, and keep what it found."""
        import torch.distributed as dist

        from shardplan.execution.run import run_recorded

        job, before, seen = self.pair.fused if variant == "fused" else self.pair.plain, calls(), Record()
        dist.barrier()
        self.values[variant] = run_recorded(job, self.pair.given, "torch", PATIENCE, seen)
        programs = set(map(id, job.programs.values()))
        spans = [s for p, own in seen.runs if id(p) in programs for s in own.spans]
        self.bytes[variant], self.calls[variant] = sum(s.received for s in spans), calls() - before
        self.seconds[variant].append(max(s.end for s in spans) - min(s.start for s in spans))


def calls() -> int:
    """How often fused operators ran on this rank."""
    from shardplan.execution.torch.fused import group_heaps

    return sum(made.epoch for heap in group_heaps() for made in heap.kept.values() if hasattr(made, "epoch"))


def away(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(got - want).max(initial=0) / max(1e-30, np.abs(want).max(initial=0)))


def child(count: int, names: Sequence[str]) -> None:
    """Be a rank: run the models, and print from rank 0 what all ranks found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name in names:
        one = ModelRank(name)
        for repetition in range(-2, count):
            order = list(VARIANTS)
            random.Random(repetition).shuffle(order)
            for variant in order:
                one.step(variant)
        plain, other = (one.values[v] for v in VARIANTS)
        found[name] = {
            "rows": one.pair.rows,
            "seconds": {v: times[2:] for v, times in one.seconds.items()},
            "bytes": one.bytes,
            "calls": one.calls,
            "difference": max(away(other[k], x) for k, x in plain.items()) if plain.keys() == other.keys() else 1.0,
        }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    dist.destroy_process_group()
    if not rank:
        print(json.dumps(every))


def row(name: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A model: medians, the ratio, calls, bytes, the largest difference."""
    times = {v: [max(t) for t in zip(*(r["seconds"][v] for r in ranks), strict=True)] for v in VARIANTS}
    ratios = sorted(f / u for f, u in zip(times["fused"], times["unfused"], strict=True))
    _, fields, degrees = MODELS[name]
    return {
        "model": name,
        "fields": fields,
        "strategy": degrees,
        "rows": ranks[0]["rows"],
        "seconds": {v: statistics.median(each) for v, each in times.items()},
        "fused / unfused": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "calls": [r["calls"]["fused"] for r in ranks],
        "calls unfused": [r["calls"]["unfused"] for r in ranks],
        "received bytes": {v: sum(r["bytes"][v] for r in ranks) for v in VARIANTS},
        "difference": max(r["difference"] for r in ranks),
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(int(sys.argv[2]), sys.argv[3:])
    parser = arguments("fused_models", "Whole models, fused and not, on real processes.", 20, of="repetitions")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    load, started = os.getloadavg()[0], time.monotonic()
    launch = use_tests("execution.torch_launch")
    ranks = launch.printed(RANKS, Path(__file__), "--child", options.count, *options.models, seconds=600)
    rows = [row(name, [found[name] for found in ranks]) for name in options.models]
    heads = ["model", "unfused, ms", "fused, ms", "fused / unfused", "calls", "bytes", "fused", "difference"]
    lines = [
        [r["model"], *(1e3 * r["seconds"][v] for v in VARIANTS), r["fused / unfused"], max(r["calls"]),
         *(r["received bytes"][v] for v in VARIANTS), r["difference"]]
        for r in rows
    ]  # fmt: skip
    seconds, after = time.monotonic() - started, os.getloadavg()[0]
    print(table(heads, lines, f"{RANKS} ranks, load {load:.1f} before, {after:.1f} after, {seconds:.0f} s"))
    parameters = {"count": options.count, "ranks": RANKS, "load before": load, "load after": after, "seconds": seconds}
    write(options.out, record(parameters, {"rows": rows}))
    if any(r["difference"] > CLOSE or not all(r["calls"]) or any(r["calls unfused"]) for r in rows):
        sys.exit(1)


if __name__ == "__main__":
    if importlib.util.find_spec("benchmarks") is None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
