"""What our strategies move in a training step; `strategy_gspmd` and `strategy_dtensor` stand beside.

The models are a small Llama and a mixture of experts. Counted are all programs of a job with one microbatch: forward,
backward, and the optimizer, which is SGD and so moves nothing but what is left of the gradients' reductions. Bytes
are those that the worst device receives, op by op, each as often as its loop runs; seconds are the price of every op
by itself, nothing overlapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan import Job, Layouts, Model, Strategy, partition
from shardplan.core.op import Op
from shardplan.core.reference import run_reference
from shardplan.core.tensor import TensorType
from shardplan.core.walk import program_leaves
from shardplan.hardware.prices.cost import seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.plans.pricing import fabric_of

LAYERS = (2, 4)
SIZES: dict[str, Any] = {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 128, "seq": 32, "vocab": 256, "batch": 8}
RATE = 0.1
TOPOLOGY = Topology.load("dgx-h100", nodes=1)
DEVICES = 8
SHORT = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
         "all_to_all": "all-to-all"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moved:
    """What a step moves: bytes of the worst device, seconds, how many of each collective."""

    received: int
    seconds: float
    counts: dict[str, int]


def load(layers: int, **more: Any) -> Model:
    """The model of some layers."""
    family = more.get("family", "llama")
    sizes = {name: n for name, n in (SIZES | more).items() if name != "family"}
    return Model.load(family, layers=layers, **sizes, optimizer="sgd", lr=RATE)


def filled(model: Model, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters and a batch."""
    rng = np.random.default_rng(seed)
    types = model.program.types
    out = {n: rng.normal(0, 0.1, p.shape).astype("f4") for n, p in model.parameters.items()}
    return out | {n: rng.integers(0, SIZES["vocab"], types[n].shape).astype("i4") for n in ("tokens", "targets")}


def stepped(model: Model, given: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the parameters after a step, by the reference on one device."""
    found = run_reference(model.program, [[given[name]] for name, _ in model.program.inputs])
    out = {name: shards[0] for name, shards in zip(model.program.outputs, found, strict=True)}
    return float(out["loss"]), {name: out[new] for name, new in model.replaced.items()}


def far(loss: float, after: dict[str, np.ndarray], want: tuple[float, dict[str, np.ndarray]]) -> float:
    """The largest difference of the loss and of the changes of parameters, each over the largest number there."""
    out = [abs(loss - want[0]) / abs(want[0])]
    return max(out + [float(np.abs(after[n] - w).max() / np.abs(w).max()) for n, w in want[1].items()])


def job_of(layers: int, strategy: dict[str, Any], layouts: Layouts | None = None, **more: Any) -> Job:
    """The job of a strategy, which takes the whole batch at once."""
    found = Strategy(**strategy, microbatch=SIZES["batch"] // strategy.get("data", 1))
    assert found.microbatches == 1
    return partition(load(layers, **more), found, TOPOLOGY, layouts=layouts)


def moved(job: Job) -> Moved:
    """What a job moves."""
    return total(leaf for p in job.programs.values() for leaf in program_leaves(p))


def total(ops: Iterable[tuple[int, Op, Sequence[TensorType]]]) -> Moved:
    """Add up ops: how often, the op, its operands."""
    received, spent, counts = 0, 0.0, Counter[str]()
    for times, op, types in ops:
        if got := int(op.received_bytes(*types).max(initial=0)):
            received += times * got
            spent += times * seconds(op.pattern(*types), fabric(types[0]))
            counts[SHORT.get(op.name, op.name)] += times
    return Moved(received, spent, dict(sorted(counts.items())))


def fabric(t: TensorType) -> Fabric:
    """Where everything is priced."""
    return fabric_of(TOPOLOGY, [t.mesh])


def per_layer(less: Moved, more: Moved) -> Moved:
    """What one layer adds."""
    n = LAYERS[1] - LAYERS[0]
    names = sorted(less.counts.keys() | more.counts.keys())
    counts = {k: d for k in names if (d := (more.counts.get(k, 0) - less.counts.get(k, 0)) / n)}
    return Moved((more.received - less.received) // n, (more.seconds - less.seconds) / n, counts)  # type: ignore[arg-type]


def told(counts: dict[str, float]) -> str:
    """Counts in a few letters: AR 4, AG 2."""
    return " ".join(f"{''.join(w[0].upper() for w in name.split('-'))}{n:g}" for name, n in counts.items()) or "-"
