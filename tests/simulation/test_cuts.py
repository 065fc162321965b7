"""Which dims an axis cuts: the reading of the closed form beside the types of the job that `partition` makes.

Two answers of one question, found apart: by rules without a price, and by a settlement with one. Compared are the local
shapes of every product and of attention, and the movements of values between them by kind, axes and bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from shardplan import Model, Strategy, partition
from shardplan.core.op import results_of
from shardplan.core.ops.compute import computing
from shardplan.core.walk import program_leaves
from shardplan.simulation.closed.form import SPREAD
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.reading import read
from shardplan.simulation.closed.work import StepProfile
from shardplan.strategy.partition.job import Job

SIZES: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "seq": 64, "vocab": 256}
EXPERTS: dict[str, Any] = SIZES | {"experts": 8}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt3-175b": SIZES | {"kv_heads": 8},
    "llama3-8b": SIZES,
    "qwen3-4b": SIZES | {"head_dim": 16},
    "mixtral-8x7b": EXPERTS,
    "qwen3-30b-a3b": EXPERTS | {"head_dim": 16, "experts_per_token": 4},
    "deepseek-v3": EXPERTS
    | {"kv_heads": 8, "head_dim": 24, "rotary_dim": 8, "value_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 16}
    | {"ffn": 32, "dense_layers": 1, "dense_ffn": 96, "shared_ffn": 32, "experts_per_token": 2}
    | {"router_groups": 4, "router_groups_kept": 2},
}
DENSE, MIXED = tuple(PRESETS)[:3], tuple(PRESETS)[3:]
ALL: list[dict[str, Any]] = [{}, {"data": 4}, {"tensor": 4}, {"data": 2, "tensor": 4}]
SEQUENCES: list[dict[str, Any]] = [
    {"tensor": 4, "sequence_parallel": True},
    {"context": 4},
    {"context": 2, "context_kind": "gather"},
    {"data": 4, "context": 2},
]
DEALT: list[dict[str, Any]] = [{"data": 4, "expert": 4}, {"data": 4, "expert": 2, "tensor": 2}]
SHAPES = [
    *((name, said) for name in DENSE for said in ALL + SEQUENCES),
    *((name, said) for name in MIXED for said in ALL + SEQUENCES + DEALT),
]
# Where tokens of experts are cut, `partition` opens their dispatch and its gradient and moves inside them, which the
# reading does not; and it splits an all-to-all over experts in three where tensor has a sum.
MOVES = [
    *((name, said) for name in DENSE for said in ALL + SEQUENCES),
    *((name, said) for name in MIXED for said in ALL),
    *((name, DEALT[0]) for name in MIXED[:2]),
]
COLLECTIVES = {
    (True, True): "all_reduce",
    (True, False): "reduce_scatter",
    (False, True): "all_gather",
    (False, False): "all_to_all",
}
SMALL = 4 * SIZES["seq"] * 4  # bytes of what has some numbers a token

Kernel = tuple[str, str, tuple[tuple[int, ...], ...]]
Move = tuple[str, bool, str, tuple[str, ...], int]


class Both(NamedTuple):
    """A job, and the reading of its model with its degrees."""

    job: Job
    reading: StepProfile
    sizes: LocalSizes
    degrees: dict[str, int]

    def times(self, run: int) -> int:
        return self.reading.layers[run] if run >= 0 else 1


@cache
def both(name: str, text: str) -> Both:
    strategy = Strategy(**eval(text))
    fields: dict[str, Any] = PRESETS[name] | {"optimizer": "sgd"}
    model = Model.load(name, **fields, batch=2)
    axes = strategy.axes(model)
    reading = read(model, strategy.layouts(model), list(axes))
    degrees = {axis: np.array([float(n)]) for axis, n in axes.items()}
    sizes = LocalSizes(degrees, np.array([float(strategy.microbatch)]), reading.batch, SPREAD)
    return Both(partition(Model.load(name, **fields), strategy), reading, sizes, dict(axes))


def longer(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without dims of 1, of which ops that are alike have more or fewer."""
    return tuple(n for n in shape if n > 1)


def kernels_read(b: Both) -> Counter[Kernel]:
    found: Counter[Kernel] = Counter()
    for k in b.reading.kernels:
        shapes = tuple(longer(int(b.sizes.extent(e).item()) for e in value.extents) for value in k.values)
        found["FB"[k.phase], k.kind, shapes] += b.times(k.run)
    return Counter({k: n for k, n in found.items() if k[1] in ("product", "scores")})


def kernels_written(b: Both) -> Counter[Kernel]:
    found: Counter[Kernel] = Counter()
    for (_, kind), program in b.job.programs.items():
        for n, one, types in program_leaves(program) if kind != "OPT" else ():
            op = computing(one)
            if op is not None and op.kernel_class in ("product", "scores"):
                found[
                    kind, op.kernel_class, tuple(longer(t.local_shape(0)) for t in (*types, *results_of(one, types)))
                ] += n
    return found


@pytest.mark.parametrize(("name", "said"), SHAPES, ids=str)
def test_products_and_attention_have_the_shapes_of_the_jobs(name: str, said: dict[str, Any]) -> None:
    b = both(name, repr(said))
    read_, wrote = kernels_read(b), kernels_written(b)
    assert read_ - wrote == {}
    opened = wrote - read_  # where the sequence is cut, of experts: choices weighed one by one, and back
    assert not opened or (name in MIXED and said in SEQUENCES)
    cut = prod(n for axis, n in said.items() if axis in ("tensor", "context"))
    assert {shapes[0][0] for _, _, shapes in opened} <= {SIZES["seq"] // cut}
    assert len(opened) in (0, 3)


def moves_read(b: Both) -> Counter[Move]:
    found: Counter[Move] = Counter()
    for m in b.reading.moves:
        axes = tuple(sorted(a for a in m.axes if b.degrees[a] > 1))
        nbytes = round(b.sizes.bytes(m.value).item())
        if axes and nbytes > SMALL:
            found["FB"[m.phase], m.run >= 0, COLLECTIVES[m.summed, m.whole], axes, nbytes] += b.times(m.run)
    return found


def moves_written(b: Both) -> Counter[Move]:
    """Those of values: a parameter's, and its gradient's, follow from how it is stored."""
    found: Counter[Move] = Counter()
    for kind in "FB":
        for m in b.job.movements[0, kind]:
            program = m.plan.program
            ours = m.value not in b.job.model.parameters and (m.path, m.value) not in b.job.settled.wanted
            for step in program.steps if ours else ():
                before, after = (types[0] for types in program.step_types(step))
                if step.op.name not in COLLECTIVES.values():
                    continue
                axes: tuple[str, ...] = cast("Any", step.op).axes
                nbytes = max(before.local_bytes(), after.local_bytes())
                if step.op.name == "all_to_all":
                    nbytes *= prod(b.degrees[a] for a in axes)
                if nbytes > SMALL:
                    found[kind, bool(m.path), step.op.name, tuple(sorted(axes)), nbytes] += m.times
    return found


@pytest.mark.parametrize(("name", "said"), MOVES, ids=str)
def test_values_move_as_in_the_job(name: str, said: dict[str, Any]) -> None:
    b = both(name, repr(said))
    assert moves_read(b) == moves_written(b)


@pytest.mark.parametrize(("name", "said"), [(name, said) for name in MIXED for said in SEQUENCES], ids=str)
def test_forward_passes_sum_what_the_job_sums(name: str, said: dict[str, Any]) -> None:
    """Where tokens of experts are cut, too: they are gathered before they are dealt out to slots, of which more are."""
    b = both(name, repr(said))

    def sums(moves: Counter[Move]) -> Counter[Move]:
        return Counter({m: n for m, n in moves.items() if m[0] == "F" and m[2] in ("all_reduce", "reduce_scatter")})

    assert sums(moves_read(b)) == sums(moves_written(b))


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_the_comparison_can_fail(name: str) -> None:
    """The same model under tensor and under context: neither shapes nor movements are those of the other."""
    one, other = both(name, repr({"tensor": 4})), both(name, repr({"context": 4}))
    assert kernels_read(one) - kernels_written(other) and moves_read(one) != moves_written(other)
