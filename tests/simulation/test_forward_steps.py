"""Forward steps at the closed form beside the jobs that `partition` makes of them: operations, bytes, messages, caches.

And their prices beside a plain one of every op of the job.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardplan import Model, Strategy, Topology, partition
from shardplan.core.accounting import account
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.simulation.closed.collectives import with_network
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.form import SPREAD, ClosedForm
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.work import StepProfile
from shardplan.simulation.inference.form import whole_sequences
from shardplan.simulation.inference.forward import forward_bytes, forward_times
from shardplan.simulation.inference.requests import forward_model
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.recomputed_layers import model_name

SIZES: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 8, "ffn": 96, "vocab": 128, "seq": 16, "dtype": "bf16"}
MODELS: dict[str, Model] = {
    "llama": Model.load("llama", kv_heads=4, **SIZES),
    "gpt": Model.load("gpt", positions=64, **SIZES),
    "moe": Model.load("moe", kv_heads=4, experts=4, experts_per_token=2, dense_layers=1, **SIZES),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"data": 2, "microbatch": 3}),
    ("llama", {"tensor": 4, "microbatch": 2}),
    ("llama", {"tensor": 8}),  # more than there are heads of keys
    ("llama", {"tensor": 4, "sequence_parallel": True}),
    ("llama", {"tensor": 2, "pipeline": 2, "data": 2}),
    ("llama", {"pipeline": 4, "microbatch": 2}),
    ("llama", {"context": 2, "context_kind": "gather"}),
    ("gpt", {"tensor": 2, "microbatch": 2}),
    ("gpt", {"pipeline": 2, "tensor": 2, "sequence_parallel": True}),
    ("gpt", {"context": 4, "context_kind": "gather"}),
    ("moe", {"data": 2}),
    ("moe", {"data": 4, "expert": 4}),
    ("moe", {"tensor": 4, "expert": 4}),
]
BOX = Topology.load("dgx-a100-80g", nodes=2)
COLLECTIVES = {(True, True): "all_reduce", (True, False): "reduce_scatter", (False, True): "all_gather",
               (False, False): "all_to_all"}  # fmt: skip
PROMPT, CACHE = 16, 24


def both(family: str, said: dict[str, Any], prompt: bool) -> tuple[Job, ClosedForm, Configurations]:
    """The job of one group's step, the closed form of it, and its strategy as that has it."""
    model = forward_model(MODELS[family], PROMPT, PROMPT) if prompt else forward_model(MODELS[family], 1, CACHE)
    strategy = Strategy(**said)
    assert strategy.microbatches == 1
    c = Configurations.of([strategy])
    form = ClosedForm(model, BOX, Parameters(launch=0.0), captured=not prompt)
    return partition(model, strategy), form, c if prompt else whole_sequences(c)


def reading_of(form: ClosedForm, c: Configurations) -> tuple[StepProfile, LocalSizes]:
    ((reading, _, _, cost),) = form.classes(c)
    return reading, LocalSizes(cost.degrees, c.columns["microbatch"].astype(float), reading.batch, SPREAD)


steps = pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "token"])
cases = pytest.mark.parametrize(("family", "said"), CASES, ids=str)


@steps
@cases
def test_operations_and_bytes_are_those_of_the_job(family: str, said: dict[str, Any], prompt: bool) -> None:
    job, form, c = both(family, said, prompt)
    reading, sizes = reading_of(form, c)
    read_, wrote = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for k in reading.kernels:
        n = reading.layers[k.run] if k.run >= 0 else 1
        volume = sizes.volume(k.extents)
        share = volume / np.prod([float(e.size) for e in k.extents])
        # Attention counts its mask, which no head cuts: of it the size of both products.
        read_[k.kind, "flops"] += n * (volume if k.kind == "scores" else k.flops * share).item()
        read_[k.kind, "bytes"] += n * (sum(sizes.bytes(v) for v in k.values) * k.touched).item()
    for p in job.programs.values():
        for n, one, types in program_leaves(p):
            op = computing(one)
            if op is not None and not op.view:
                wrote[op.kernel_class, "flops"] += n * (
                    math.prod((*types[0].local_shape(), types[1].local_shape()[1], types[2].local_shape()[-1]))
                    if op.kernel_class == "scores"
                    else op.flops(*types)
                )
                wrote[op.kernel_class, "bytes"] += n * op.touched_bytes(*types)
    for kind in ("product", "scores"):
        assert read_[kind, "flops"] == pytest.approx(wrote[kind, "flops"], rel=1e-12)
        assert read_[kind, "bytes"] == pytest.approx(wrote[kind, "bytes"], rel=1e-12)
    # Of a cache, or of a table in parts, a reading has the share of its bytes that one device alone touches.
    assert read_["streamed", "bytes"] == pytest.approx(wrote["streamed", "bytes"], rel=0.15)


@steps
@cases
def test_messages_of_layers_are_those_of_the_job(family: str, said: dict[str, Any], prompt: bool) -> None:
    job, form, c = both(family, said, prompt)
    reading, sizes = reading_of(form, c)
    read_ = Counter(
        (COLLECTIVES[m.summed, m.whole], sizes.bytes(m.value).item() / (1 if m.summed else _ranks(m.axes, sizes)))
        for m in reading.moves
        if m.run >= 0
    )
    wrote = Counter(
        (step.op.name, float(m.plan.program.step_types(step)[0][0].local_bytes()))
        for (stage, _), moves in job.movements.items()
        if stage == 0
        for m in moves
        if m.path
        for step in m.plan.program.steps
        if step.op.name in COLLECTIVES.values()
    )
    assert read_ == wrote


def _ranks(axes: tuple[str, ...], sizes: LocalSizes) -> float:
    return np.prod([sizes.degrees[a].item() for a in axes]).item()


@steps
@cases
def test_parameters_and_caches_are_the_jobs(family: str, said: dict[str, Any], prompt: bool) -> None:
    job, form, c = both(family, said, prompt)
    positions = PROMPT if prompt else CACHE
    held = forward_bytes(form, c, positions, int(c.columns["microbatch"][0]))
    for stage in range(job.stages):
        mine = {p.name: job.state[key].local_bytes() for key, p in job.parts.items() if p.stage == stage}
        caches = sum(n for name, n in mine.items() if name.endswith("_cache"))
        # What two stages hold is a copy on the second.
        parameters = sum(n for name, n in mine.items() if model_name(name) in job.model.parameters)
        assert caches > 0 and held.caches[0, stage] == caches
        assert held.parameters[0, stage] == parameters
    twice = forward_bytes(form, c, 2 * positions, 3 * int(c.columns["microbatch"][0]))
    assert np.array_equal(twice.caches, 6 * held.caches) and np.array_equal(twice.parameters, held.parameters)


@pytest.mark.parametrize("said", [{}, {"tensor": 4, "microbatch": 2}, {"tensor": 4, "sequence_parallel": True}],
                         ids=str)  # fmt: skip
def test_what_is_at_work_is_near_what_the_program_makes(said: dict[str, Any]) -> None:
    model = forward_model(Model.load("llama", **{**SIZES, "layers": 2, "hidden": 32}), 1024, 1024)
    strategy = Strategy(**said)
    (program,) = partition(model, strategy).programs.values()
    form, c = ClosedForm(model, BOX, Parameters()), Configurations.of([strategy])
    held = forward_bytes(form, c, 1024, strategy.microbatch)
    want = account(program).workspace_bytes - held.parameters.max() - held.caches.max()
    assert max(held.work.max(), held.behind.max()) == pytest.approx(want, rel=0.25)


PRICES = Parameters(launch=0.0, product=0.7, stream=0.6, attention=0.3, half=50.0)


@pytest.mark.parametrize(
    ("family", "said"),
    [("llama", {}), ("llama", {"tensor": 4, "microbatch": 8}), ("gpt", {"tensor": 8, "microbatch": 2}),
     ("gpt", {"tensor": 16})],
    ids=str,
)  # fmt: skip
def test_a_token_costs_what_the_ops_of_its_job_do(family: str, said: dict[str, Any]) -> None:
    """Every op priced alone, by a roofline and by its own devices' collective: no reading, no factors, no extents."""
    if said.get("tensor") == 16:
        model = Model.load("gpt", positions=64, **{**SIZES, "heads": 16})
    else:
        model = MODELS[family]
    step = forward_model(model, 1, CACHE)
    job = partition(step, Strategy(**said))
    form = ClosedForm(step, BOX, PRICES, captured=True)
    c = Configurations.of([Strategy(**said)])
    device, fabric = BOX.device, Fabric(with_network(BOX, PRICES), launch=0.0)
    seconds = 0.0
    for n, one, types in program_leaves(job.programs[0, "F"]):
        op = computing(one)
        if op is None:
            seconds += n * price(one.pattern(*types), fabric).seconds
        elif not op.view:
            streamed = op.touched_bytes(*types) / (device.memory_bandwidth * PRICES.stream)
            busy = 0.0
            if op.kernel_class == "product":
                left, right = op.spec.partition("->")[0].split(",")  # type: ignore[attr-defined]
                size = dict(zip(left + right, types[0].local_shape() + types[1].local_shape(), strict=True))
                rows, columns, inner = (
                    np.prod([float(size[x]) for x in letters])
                    for letters in ({*left} - {*right}, {*right} - {*left}, {*left} & {*right})
                )
                busy = op.flops(*types) / (device.peak("bf16") * PRICES.product)
                busy *= 1 + PRICES.half * (1 / rows + 1 / columns + 1 / inner)
            if op.kernel_class == "scores":
                busy = op.flops(*types) / (device.peak("bf16") * PRICES.attention * 1.6)
            seconds += n * max(busy, streamed)
    made = forward_times(form, c)
    assert made.stages.sum() + made.behind.sum() == pytest.approx(seconds, rel=0.02)
