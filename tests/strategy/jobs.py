"""Models of a few layers in f64, strategies by name, and a job's steps beside those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardplan import Job, Model, Strategy, partition
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.execution.job_arrays import check_step_arrays
from shardplan.execution.job_backend import JobBackend
from shardplan.execution.jobs import JobRun

# Key biases have gradients that are zero but for rounding, which adamw makes as large as any: so sgd for gpt.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"layers": 3, "hidden": 12, "heads": 6, "kv_heads": 2, "ffn": 20, "seq": 8, "vocab": 32}),
    "odd": (
        "llama",
        {"layers": 3, "hidden": 10, "heads": 3, "kv_heads": 3, "head_dim": 4, "ffn": 7, "seq": 5, "vocab": 13},
    ),
    "gpt": ("gpt", {"layers": 3, "hidden": 12, "heads": 4, "seq": 6, "vocab": 17, "optimizer": "sgd"}),
    "moe": (
        "moe",
        {
            "layers": 3,
            "hidden": 16,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 10,
            "experts": 4,
            "experts_per_token": 2,
            "seq": 6,
            "vocab": 17,
            "dense_layers": 1,
        },
    ),
    "mlp": ("mlp", {"layers": 4, "hidden": 8, "optimizer": "sgd"}),
    "dlrm": (
        "dlrm",
        {
            "table_rows": (30, 50, 7),
            "embedding_dim": 8,
            "dense_features": 5,
            "bottom": (16, 8),
            "top": (12, 1),
            "bag": 3,
        },
    ),
}


def model(name: str, **fields: Any) -> Model:
    """One of `MODELS`."""
    family, sizes = MODELS[name]
    return Model.load(family, **{"dtype": "f64", **sizes, **fields})


def arrays(found: Model, program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of a step."""
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for name, t in program.inputs:
        if name in found.parameters:
            out[name] = rng.normal(0, 0.3, t.shape)
        elif name in found.replaced:
            out[name] = np.zeros(t.shape, numpy_dtype(t.dtype))
        elif t.dtype.startswith("i"):
            rows = found.fields.get("vocab") or found.fields["table_rows"][int(name.split(".")[1])]
            out[name] = rng.integers(0, rows, t.shape).astype(np.int32)
        else:
            out[name] = rng.normal(size=t.shape)
    return out


def by_name(program: Program, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of a program on one device."""
    found = run_reference(program, [[given[n]] for n, _ in program.inputs])
    return {o: shards[0] for o, shards in zip(program.outputs, found, strict=True)}


def stepped(job: Job, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of a job's step on the reference."""
    return JobRun(job, JobBackend(), check_step_arrays(job, given)).step()


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(got - want).max(initial=0) / max(1e-30, np.abs(want).max(initial=0)))


def wrong(found: Model, strategy: Strategy, steps: int = 3, **more: Any) -> list[str]:
    """What differs by more than 1e-9 in some steps of a job: losses and all that a step replaces."""
    job, big = partition(found, strategy, **more), found.resize(batch=strategy.sequences)
    here = there = arrays(big, big.program)
    out: list[str] = []
    for step in range(steps):
        want, got = by_name(big.program, there), stepped(job, here)
        pairs = {"loss": "loss", **big.replaced}
        out += [f"step {step}: {n} by {e:.1e}" for n, o in pairs.items() if not (e := apart(got[n], want[o])) <= 1e-9]
        here, there = (
            {**here, **{n: got[n] for n in big.replaced}},
            {**there, **{n: want[o] for n, o in big.replaced.items()}},
        )
    return out
