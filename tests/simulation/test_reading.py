"""A reading beside the job that `partition` makes: kernels, movements by layer, parameters, what is saved."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardplan import Model, Strategy, partition
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.simulation.closed.form import SPREAD
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.reading import read
from shardplan.simulation.closed.work import StepProfile
from shardplan.strategy.partition.job import Job

L = 4
SIZES: dict[str, Any] = {"layers": L, "hidden": 64, "heads": 8, "ffn": 96, "seq": 32, "vocab": 128, "optimizer": "sgd"}
LLAMA: dict[str, Any] = SIZES | {"kv_heads": 4}
MOE: dict[str, Any] = LLAMA | {"experts": 4, "experts_per_token": 2, "dense_layers": 0}
COLLECTIVES = {
    (True, True): "all_reduce",
    (True, False): "reduce_scatter",
    (False, True): "all_gather",
    (False, False): "all_to_all",
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"data": 4}),
    ("llama", {"tensor": 4}),
    ("llama", {"tensor": 4, "sequence_parallel": True}),
    ("llama", {"tensor": 2, "data": 2, "microbatch": 2, "global_batch": 8}),
    ("llama", {"context": 4}),
    ("llama", {"context": 2, "context_kind": "gather"}),
    ("gpt", {"tensor": 2}),
    ("gpt", {"tensor": 2, "sequence_parallel": True, "data": 2}),
    ("moe", {"data": 4, "expert": 4}),
    ("moe", {"data": 4, "expert": 4, "tensor": 2}),
]


def both(family: str, said: dict[str, Any]) -> tuple[Job, StepProfile, LocalSizes]:
    """A job, and the reading of its model with its degrees."""
    fields: dict[str, Any] = {"llama": LLAMA, "gpt": SIZES, "moe": MOE}[family]
    strategy = Strategy(**said)
    model = Model.load(family, **fields, batch=2)
    axes = strategy.axes(model)
    reading = read(model, strategy.layouts(model), list(axes))
    degrees = {axis: np.array([float(n)]) for axis, n in axes.items()}
    sizes = LocalSizes(degrees, np.array([float(strategy.microbatch)]), reading.batch, SPREAD)
    return partition(Model.load(family, **fields), strategy), reading, sizes


def times(reading: StepProfile, run: int) -> int:
    return reading.layers[run] if run >= 0 else 1


@pytest.mark.parametrize(("family", "said"), CASES, ids=str)
def test_operations_are_those_of_the_programs(family: str, said: dict[str, Any]) -> None:
    job, reading, sizes = both(family, said)
    read_ = sum(
        times(reading, k.run) * k.flops * (sizes.volume(k.extents) / np.prod([float(e.size) for e in k.extents])).item()
        for k in reading.kernels
    )
    wrote = sum(
        n * op.flops(*types)
        for (_, kind), p in job.programs.items()
        for n, one, types in program_leaves(p)
        if kind != "OPT" and (op := computing(one))
    )
    assert read_ == pytest.approx(wrote, rel=0.03)


@pytest.mark.parametrize(("family", "said"), CASES, ids=str)
def test_movements_of_a_layer_are_those_of_the_programs(family: str, said: dict[str, Any]) -> None:
    job, reading, _ = both(family, said)
    for phase, kind in enumerate("FB"):
        read_ = Counter(COLLECTIVES[m.summed, m.whole] for m in reading.moves if m.run >= 0 and m.phase == phase)
        wrote = Counter(
            step.op.name
            for m in job.movements[0, kind]
            if m.path
            for step in m.plan.program.steps
            if m.plan.program.step_types(step)[0][0].ndim > 1  # not the gradients of gains and biases
        )
        moved = {k: n for k, n in wrote.items() if k in COLLECTIVES.values()}
        assert dict(read_) == moved, (kind, wrote)
