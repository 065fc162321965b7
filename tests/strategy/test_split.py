"""A backward program in two: I and W are B, to the last bit, and no operation is done twice."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardplan import Job, Strategy, partition
from shardplan.core.accounting import account
from shardplan.core.nested import stacked_type
from shardplan.core.ops import Elementwise, Repeat
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import program_leaves
from shardplan.strategy.partition.memory import moments, state_bytes
from shardplan.strategy.partition.programs import SAVED
from shardplan.strategy.partition.split import split
from strategy.jobs import arrays, by_name, model, stepped

JOBS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"pipeline": 2, "global_batch": 3}),
    (
        "llama",
        {
            "pipeline": 2,
            "tensor": 2,
            "data": 2,
            "sequence_parallel": True,
            "zero": 3,
            "global_batch": 4,
            "prefetch": False,
        },
    ),
    ("gpt", {"pipeline": 2, "recompute": "full", "global_batch": 2}),
    ("moe", {"pipeline": 2, "data": 2, "expert": 2, "zero": 2, "global_batch": 4}),
    ("mlp", {"global_batch": 2}),
    ("dlrm", {"data": 2, "global_batch": 4}),
]


def jobs(name: str, said: dict[str, Any]) -> tuple[Job, Job]:
    """A job whose B are whole, and one whose are split."""
    return partition(model(name), Strategy(**said)), partition(model(name), Strategy(**said, schedule="zb-h1"))


def counted(program: Program) -> Counter[str]:
    """How often each op runs that computes or moves."""
    found: Counter[str] = Counter()
    for times, op, types in program_leaves(program):
        found[op.name] += times * (bool(types) and not op.view)
    return found


def flops(program: Program) -> float:
    return sum(times * op.flops(*types) for times, one, types in program_leaves(program) if (op := computing(one)))


@pytest.mark.parametrize(("name", "said"), JOBS, ids=str)
def test_i_and_w_are_b(name: str, said: dict[str, Any]) -> None:
    """Every result and what each op does; only what is laid out by rows is done again."""
    whole, halves = jobs(name, said)
    big = model(name).resize(batch=whole.strategy.sequences)
    given = arrays(big, big.program)
    want, got = stepped(whole, given), stepped(halves, given)
    assert want.keys() == got.keys()
    assert all(np.array_equal(array, got[value]) for value, array in want.items())
    for stage in range(whole.stages):
        b, i, w = whole.programs[stage, "B"], halves.programs[stage, "I"], halves.programs[stage, "W"]
        assert (stage, "B") not in halves.programs
        assert counted(i) + counted(w) == counted(b)
        assert flops(i) + flops(w) == flops(b)
        sent = {o for o in b.outputs if o.startswith("sent.")}
        assert sent <= set(i.outputs)
        assert {*b.outputs} == {o for o in (*i.outputs, *w.outputs) if not o.startswith("kept.")}
        again = split(b, sent)
        assert (again.first, again.rest) == (i, w)


def test_i_is_the_way_of_the_cotangent_on_every_stage() -> None:
    """Also on the first, which sends nothing: one product a layer in each half."""
    job = jobs("mlp", {"global_batch": 4, "pipeline": 4})[1]
    for stage in range(4):
        i, w = job.programs[stage, "I"], job.programs[stage, "W"]
        assert counted(i)["einsum"] == counted(w)["einsum"] == 1
        assert counted(i)["repeat"] == 0  # leaves are inside
        assert [o for o in w.outputs if not o.startswith("next.gradient.")] == []


def test_a_sum_that_is_carried_is_w_s() -> None:
    """A loop that carries a cotangent and a sum of what it reads: I carries the first, W the second over its rows."""
    x = TensorType.parse("f64[3]", "d=1")
    steps = [
        Step(Elementwise("a * b"), ("c", "w"), ("down",)),
        Step(Elementwise("a * b"), ("c", "x"), ("part",)),
        Step(Elementwise("a + b"), ("sum", "part"), ("more",)),
    ]
    body = Program({"c": x, "sum": x, "w": x, "x": x}, steps, ("down", "more"))
    loop = Repeat(4, body, carried=2, sliced=1, reverse=True)
    types = {"c0": x, "s0": x, "w0": x, "xs": stacked_type(x, 4)}
    whole = Program(types, [Step(loop, (*types,), ("c4", "s4"))], ("s4",))
    halves = split(whole, ())
    assert [
        step.op.carried_count for step in halves.first.steps + halves.rest.steps if isinstance(step.op, Repeat)
    ] == [1, 1]
    assert [halves.first.outputs, halves.rest.outputs] == [("kept.c4.c",), ("s4",)]
    rng = np.random.default_rng(0)
    given = {name: rng.normal(size=t.shape) for name, t in types.items()}
    want = by_name(whole, given)["s4"]
    kept = by_name(halves.first, {n: given[n] for n, _ in halves.first.inputs})
    got = by_name(halves.rest, {n: (given | kept)[n] for n, _ in halves.rest.inputs})["s4"]
    assert np.array_equal(got, want)


def test_i_frees_what_w_does_not_read() -> None:
    """A layer saves its input and what is before its relu; I makes of the second the cotangent that W reads."""
    rows, hidden, layers = 3, 8, 2
    strategy = Strategy(pipeline=2, microbatch=rows, global_batch=4 * rows, schedule="zb-h1")
    job = partition(model("mlp"), strategy)
    one = layers * rows * hidden * 8
    state = state_bytes(job, 0)
    after = {m.action: m.after - state for m in moments(job, 0)}
    assert [str(a) for a in job.schedule.ranks[0]][:5] == ["0F0", "0F1", "0I0", "0W0", "0F2"]
    assert (after["0F0"], after["0F1"]) == (2 * one, 4 * one)
    assert after["0I0"] == 2 * one + 2 * one  # the input of each layer, and the cotangent
    assert after["0W0"] == 2 * one
    first, rest = (dict(job.programs[0, kind].inputs) for kind in "IW")
    aside = sum(t.local_bytes() for name, t in rest.items() if name.startswith(SAVED) and name not in first)
    assert aside == one, "the input of each layer, which I does not read"
    weights = sum(t.local_bytes() for name, t in first.items() if job.key(0, name) in job.state)
    during = next(m.during for m in moments(job, 0) if m.action == "0I0")
    # Weights stay, and so does what I reads until it ends: as if it gave them back.
    p = job.programs[0, "I"]
    whole = Program(p.inputs, p.steps, [*p.outputs, *(n for n in first if n not in (*p.outputs, *job.batch))])
    assert during == state - weights + 2 * one + aside + account(whole).workspace_bytes
    said = [str(a) for a in job.schedule.ranks[1]]
    late = {m.action: m.after for m in moments(job, 1)}
    assert said[:5] == ["1F0", "1I0", "1F1", "1I1", "1W0"]
    saved = late["1F0"] - state_bytes(job, 1)
    assert late["1I0"] - state_bytes(job, 1) == 2 * one < saved  # the output, which the loss read, is gone
    assert all(m.during >= m.after - saved for m in moments(job, 1))
    assert [m.after for m in moments(job, 1)][-1] == state_bytes(job, 1)
