"""Products of 8 bits: jobs beside plain torch with its own casts, what they hold, and what has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import shardplan as sp
from shardplan import Mesh, Model, ShardplanError, Strategy, TensorType, Topology, partition, simulate
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.nested import as_nested
from shardplan.core.ops import Quantize, ReduceDims
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import run_reference
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.searching.certifier import Certifier
from shardplan.strategy.model import assemble_model
from shardplan.strategy.narrowing import narrow_products
from shardplan.strategy.partition.memory import saved_bytes, state_bytes
from strategy import plain_llama, plain_narrow
from strategy.jobs import apart, stepped

BF16 = numpy_dtype("bf16")
BATCH, SEQ, STEPS, RATE = 4, 8, 3, 0.2
SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 12, "vocab": 23}
CASES = [
    Strategy(global_batch=BATCH, microbatch=2),
    Strategy(tensor=2, data=2, global_batch=BATCH),
    Strategy(tensor=2, data=2, zero=3, sequence_parallel=True, global_batch=BATCH),
    Strategy(data=4, fsdp=True, global_batch=BATCH),
    Strategy(data=2, fsdp=True, zero=2, global_batch=BATCH, recompute="full"),
    Strategy(pipeline=2, tensor=2, global_batch=BATCH, recompute="selective_op"),
    Strategy(pipeline=2, schedule="zb-h1", global_batch=BATCH, recompute="full", recompute_layers=1),
    Strategy(context=2, context_kind="ring", data=2, zero=2, global_batch=BATCH),
]


def wide_model() -> Model:
    """The recipe in f64 but for the products, so that nothing else rounds."""
    plain = Model.load("llama", **SIZES, seq=SEQ, dtype="f64", optimizer="sgd", lr=RATE)
    assert plain.forward is not None
    program = narrow_products("llama", plain.forward, plain.parameters)
    dims = {name: plain.dims[name] for name, _ in program.inputs}
    return assemble_model("narrow", program, dims, plain.parameters, {}, plain.fields, {"lr": RATE})


@pytest.mark.parametrize("strategy", CASES, ids=repr)
def test_three_steps_are_those_of_plain_torch(strategy: Strategy) -> None:
    """To 1e-9, however it is sharded: the scale is of all that a microbatch has, on all its devices."""
    model = wide_model()
    rng = np.random.default_rng(3)
    state, w = plain_llama.drawn_weights(model, rng)
    optimizer = torch.optim.SGD(w.values(), RATE)
    job = partition(model, strategy)
    for _ in range(STEPS):
        ids = rng.integers(0, SIZES["vocab"], (BATCH, SEQ + 1)).astype(np.int32)
        given = {"tokens": ids[:, :-1], "targets": ids[:, 1:].copy()}
        optimizer.zero_grad()
        total, rows = 0.0, strategy.data * strategy.microbatch
        for k in range(0, BATCH, rows):
            tokens, targets = (torch.tensor(given[n][k : k + rows], dtype=torch.int64) for n in ("tokens", "targets"))
            part = plain_narrow.loss(w, tokens, targets, SIZES) / (BATCH * SEQ)
            part.backward()
            total += float(part.detach())
        optimizer.step()
        got = stepped(job, {**state, **given})
        assert abs(float(got["loss"]) - total) < 1e-9
        state = {n: got[n] for n in state}
        for n, x in model.unpack(state).items():
            assert apart(x, w[n].detach().numpy()) < 1e-9, n


@pytest.mark.parametrize(
    "said", [{}, {"tensor": 2, "data": 2}, {"data": 4, "zero": 2}, {"data": 2, "fsdp": True}], ids=str
)
def test_steps_in_bf16_are_those_of_plain_torch(said: dict[str, Any]) -> None:
    """Of one layer, whose operands are the same bits: nearer than where products are in bf16, by far."""
    rows, rng = 8, np.random.default_rng(1)
    model = Model.load("mlp", layers=1, hidden=64, optimizer="sgd", lr=RATE)
    made = Strategy(**said, global_batch=rows, microbatch=rows // said.get("data", 1))
    jobs = [partition(model, replace(made, precision=kind)) for kind in ("fp8", "bf16")]
    first = rng.normal(0, 0.5, (1, 64, 64)).astype(BF16)
    held = {"layers.weight": first, **jobs[0].model.state({"layers.weight": first})}
    for _ in range(STEPS):
        data = {name: rng.normal(size=(rows, 64)).astype(BF16) for name in ("inputs", "targets")}
        w, x, y = (torch.tensor(v.astype(np.float32)).bfloat16() for v in (held["layers.weight"][0], *data.values()))
        w.requires_grad_()
        want = (plain_narrow.linear(x, w.T).relu() - y).square().float().sum() / rows
        want.backward()
        assert w.grad is not None
        got, other = (stepped(job, held | data) for job in jobs)
        true = w.grad.float().numpy()
        near, far = (np.linalg.norm(one["gradient.layers.weight"][0] - true) for one in (got, other))
        assert 2 * near < far < 0.1 * np.linalg.norm(true), (near, far)
        assert abs(float(got["loss"]) - float(want.detach())) < 0.01 * float(want.detach())
        held = {name: got[name] for name in held}


def test_it_is_quantized_alike_however_it_is_sharded() -> None:
    """The largest value is that of the whole: with a maximum over devices, each bit is that of one device."""
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(12, 20)) * np.exp(rng.normal(0, 2, (12, 1)))).astype(BF16)
    found: set[bytes] = set()
    for layout in ((), ("x",), (None, "x"), (("x", "y"),), ("y", "x"), (None, ("y", "x"))):
        builder = ProgramBuilder({"x": TensorType("bf16", x.shape, layout, Mesh(x=2, y=2))})
        most = builder.reduce_axes(builder(ReduceDims((0, 1), "absmax"), "x"), ("x", "y"))
        narrow = builder(Quantize("f8e5m2"), "x", most)
        program = Program([("x", builder.types["x"])], builder.steps, (narrow,))
        (shards,) = run_reference(program, [sp.distribute(x, builder.types["x"])])
        found.add(sp.collect(shards, builder.types[narrow]).tobytes())
    assert len(found) == 1


WIDE: dict[str, Any] = {"layers": 3, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "seq": 512, "vocab": 2048}


def test_it_keeps_what_products_read_in_8_bits() -> None:
    """What goes into them, once for all that read it; and nothing of parameters, which are there."""
    model, tokens = Model.load("llama", **WIDE), 512
    jobs = [partition(model, Strategy(precision=kind)) for kind in ("bf16", "fp8")]
    less = saved_bytes(jobs[0], 0) - saved_bytes(jobs[1], 0)
    # Two norms' results; attention's, which its gradient does not read; and what goes back, which it made again.
    assert less == pytest.approx(WIDE["layers"] * tokens * (3 * 1024 + 4096), rel=1e-3)
    assert state_bytes(jobs[0], 0) == state_bytes(jobs[1], 0)


@pytest.mark.parametrize("said", [{"data": 8, "fsdp": True}, {"tensor": 2, "data": 4, "zero": 1}], ids=str)
def test_fidelities_agree(said: dict[str, Any]) -> None:
    """In bytes as in bf16; a kernel for each cast takes up to a fifth more than norms that cast, as is measured."""
    model, box = (
        Model.load("llama", **WIDE | {"hidden": 4096, "heads": 32, "ffn": 16384, "seq": 4096}),
        Topology.load("dgx-h100", nodes=1),
    )
    found = {
        (kind, f): simulate(model, Strategy(**said, precision=kind), box, f)
        for kind in ("bf16", "fp8") for f in ("closed", "events", "ops")
    }  # fmt: skip
    closed, ops = (found["bf16", f].peak_bytes - found["fp8", f].peak_bytes for f in ("closed", "ops"))
    assert closed == pytest.approx(ops, rel=0.02) and ops > 0
    assert found["fp8", "events"].peak_bytes == found["fp8", "closed"].peak_bytes
    assert 1 <= found["fp8", "ops"].seconds / found["fp8", "closed"].seconds < 1.25
    assert all(found["fp8", f].seconds < found["bf16", f].seconds for f in ("closed", "events", "ops"))


def test_what_is_certified_is_the_job_in_8_bits() -> None:
    """Of what has no job the same, which keeps more."""
    model = Model.load("llama", **WIDE)
    certifier = Certifier(model, of_machine(Topology.load("dgx-h100")), 80e9)
    peaks = {
        kind: certifier.peak(Strategy(data=2, fsdp=True, precision=kind)).nbytes for kind in ("bf16", "fp8", "nvfp4")
    }
    assert peaks["nvfp4"] == peaks["fp8"] < peaks["bf16"]
    kept = [saved_bytes(partition(model, Strategy(data=2, fsdp=True, precision=kind)), 0) for kind in ("bf16", "fp8")]
    assert peaks["bf16"] - peaks["fp8"] == pytest.approx(kept[0] - kept[1], rel=0.3)


def test_what_has_no_such_products_is_refused() -> None:
    with pytest.raises(ShardplanError) as caught:
        Model.load("dlrm", table_rows=(30,), embedding_dim=8, dense_features=5, bottom=(8,), top=(1,), precision="fp8")
    assert str(caught.value) == (
        "precision='fp8' of dlrm, in which no layer multiplies with a parameter; legal are models that repeat layers "
        "with such products"
    )
    plain = Model.load("llama", **SIZES, seq=SEQ, dtype="bf16")
    assert plain.forward is not None
    dims = {name: plain.dims[name] for name, _ in plain.forward.inputs}
    own = Model.of(plain.forward, dims, plain.parameters, optimizer="sgd").with_precision("fp8")
    assert own.with_precision("fp8").forward == own.forward and own.resize(batch=2).fields["precision"] == "fp8"
    with pytest.raises(ShardplanError) as caught:
        own.with_precision("bf16")
    assert str(caught.value) == "precision='bf16' of model, a program in 8 bits; legal is one in bf16"


def test_experts_have_scales_of_their_own_and_routers_none() -> None:
    sizes = SIZES | {"experts": 4, "experts_per_token": 2, "layers": 1}
    model = Model.load("moe", **sizes, seq=SEQ, precision="fp8")
    assert model.forward is not None
    (body,) = [op.body for step in model.forward.steps if (op := as_nested(step.op)) is not None]
    made = {o: step for step in body.steps for o in step.results}
    products = [step for step in body.steps if step.op.name == "scaled_einsum"]
    scales = [[body.types[o].shape for o in step.operands[2:]] for step in products]
    assert scales == [[(), ()]] * 4 + [[(4,), (4,)]] * 3
    read = {o for step in products for narrow in step.operands[:2] for o in made[narrow].operands[:1]}
    assert {"q", "o", "expert_gate", "expert_down"} <= read and "router" not in read
