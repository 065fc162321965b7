"""What axes deal out is what programs say when they are counted; and the line that mends the rest mends it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

from shardplan import Job, Model, Strategy, partition
from shardplan.core.mesh import Mesh
from shardplan.core.nested import as_nested
from shardplan.core.ops import Attention, Einsum, Elementwise, ReduceDims, Softmax
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.errors import ReplicationWarning
from shardplan.strategy.partition.partition import make_job
from shardplan.strategy.partition.serve_remedies import serve_remedies
from shardplan.strategy.partition.shares import operation_shares
from shardplan.strategy.training import rename_values
from strategy.jobs import by_name, model, stepped

SIZES: dict[str, Any] = {
    "batch": 2,
    "training": False,
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 24,
    "seq": 8,
    "vocab": 32,
}


def multiplications(program: Program, times: int = 1) -> int:
    """Of products, on the first device, counted from the shapes of its shards; attention has two forward."""
    total = 0
    for step in program.steps:
        nested = as_nested(step.op)
        if nested is not None:
            total += multiplications(nested.body, times * nested.times)
        elif isinstance(step.op, Einsum):
            letters = step.op.spec.split("->")[0].split(",")
            shapes = [program.types[o].local_shape(0) for o in step.operands]
            sizes = {
                c: n for word, shape in zip(letters, shapes, strict=True) for c, n in zip(word, shape, strict=True)
            }
            total += times * math.prod(sizes.values())
        elif isinstance(step.op, Attention):
            q, k = (program.types[o].local_shape(0) for o in step.operands[:2])
            total += times * 2 * math.prod(q) * k[1]
    return total


def forward(job: Job) -> int:
    return multiplications(job.programs[0, "F"])


CASES = (
    Strategy(tensor=2, microbatch=2),
    Strategy(data=2),
    Strategy(context=2, context_kind="gather", microbatch=2),
    Strategy(tensor=4, microbatch=2),
)


@pytest.mark.parametrize("said", CASES, ids=repr)
def test_shares_are_those_of_the_counted_programs(said: Strategy) -> None:
    found = Model.load("llama", **SIZES)
    job = partition(found, said)
    (share,) = job.shares()
    counted = forward(job) / forward(partition(found, Strategy(microbatch=2)))
    assert share.operations == pytest.approx(counted, rel=5e-3)  # which also has the mask that every device makes
    assert list(operation_shares(job.settled)) == [(share.axis, share.size, pytest.approx(share.operations))]
    names = list(job.model.parameters)
    held = sum(job.state[n].local_bytes() for n in names) / sum(job.model.program.types[n].local_bytes() for n in names)
    assert share.held == pytest.approx(held)
    assert share.whole == tuple(sorted((n for n in names if job.state[n].local_bytes() == job.state[n].nbytes),
                                       key=lambda n: -job.model.parameters[n].size))  # fmt: skip


CUT = Strategy(tensor=2, microbatch=2)


def capped(*, optimizer: str | None = "sgd") -> Model:
    """Attention with a soft cap, written out, of heads that are called as nothing in the tables is; and an MLP."""
    dims = {"x": ("batch", "sequence", "hidden"), **dict.fromkeys("qkv", ("hidden", "head_count", "d7")),
            "o": ("head_count", "d7", "hidden"), "up": ("hidden", "ffn"), "down": ("ffn", "hidden")}  # fmt: skip
    sizes = {"batch": 2, "sequence": 6, "hidden": 8, "head_count": 4, "d7": 2, "ffn": 16}
    inputs = {n: TensorType("f64", tuple(sizes[d] for d in names), (), Mesh()) for n, names in dims.items()}
    d = ProgramBuilder(inputs)
    q, k, v = (d(Einsum("bsh,hgd->bsgd"), "x", name) for name in ("q", "k", "v"))
    scores = d(Elementwise("5 * tanh(a / 5)"), d(Einsum("bsgd,btgd->bgst"), q, k))
    mixed = d(Einsum("bgst,btgd->bsgd"), d(Softmax(3), scores), v)
    x = d(Elementwise("a + b"), "x", d(Einsum("bsgd,gdh->bsh"), mixed, "o"))
    out = d(Einsum("bsf,fh->bsh"), d(Elementwise("silu(a)"), d(Einsum("bsh,hf->bsf"), x, "up")), "down")
    loss = d(ReduceDims((0, 1, 2), "mean"), d(Elementwise("a * a"), out))
    program = rename_values(Program(tuple(inputs.items()), d.steps, (loss,)), {loss: "loss"})
    return Model.of(program, dims, [n for n in dims if n != "x"], name="capped", optimizer=optimizer)


def test_devices_that_do_the_same_are_warned_of_with_the_line_that_mends_it() -> None:
    with pytest.warns(ReplicationWarning) as said:
        job = partition(capped(), CUT)
    (share,) = job.shares()
    assert share.replicates and {*share.whole} == {"q", "k", "v", "o"}
    (text,) = (str(w.message) for w in said)
    assert text.startswith(
        f"capped: of 2 devices of the axis tensor the worst does {share.operations:.3f} of the operat"
    )
    assert "it leaves whole: q, k, v, o; 'serve, tensor: [kv_heads, ffn, vocab, head_count]'" in text
    assert "'held, q, k, v, o: head_count@tensor' makes it 0.500" in text


def test_the_line_that_is_said_deals_it_out_and_computes_the_same() -> None:
    found = capped()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicationWarning)
        job = partition(found, CUT)
    tables = """
        serve
          tensor: [kv_heads, ffn, vocab, head_count]
        stored
        held
          q, k, v, o: head_count@tensor
          up, down: ffn@tensor
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        mended = partition(found, CUT, layouts=tables)
    assert [share.operations for share in mended.shares()] == [0.5]
    best = serve_remedies(found, job.layouts, job.settled, "tensor", lambda t: make_job(found, CUT, layouts=t).settled)[
        0
    ]
    assert (best.operations, best.seconds) == (0.5, mended.settled.seconds)
    mesh = job.settled.problem.mesh
    for name, dims in found.dims.items():
        assert best.layouts.held_layout(name, dims, mesh) == mended.layouts.held_layout(name, dims, mesh)
    given = {n: np.random.default_rng(k).normal(size=t.shape) for k, (n, t) in enumerate(found.program.inputs)}
    want, got = by_name(found.program, given), stepped(mended, given)
    for name, new in {"loss": "loss", **found.replaced}.items():
        np.testing.assert_allclose(got[name], want[new], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt", "moe", "mlp"])
def test_models_of_ours_deal_their_products_out(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        job = partition(model(name), Strategy(data=2, tensor=2))
    assert not any(share.replicates for share in job.shares())
