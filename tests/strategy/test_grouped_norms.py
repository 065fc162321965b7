"""A norm of groups of hidden features, as Mamba 2's gated norm is: groups are the major part of the dim that is cut."""

from __future__ import annotations

import numpy as np
import pytest

from shardplan import Model, Strategy, partition
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Einsum, Elementwise, ReduceDims, Reshape
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.strategy.training import rename_values
from strategy.jobs import by_name, stepped

GROUPS = 4


def gated_norm(*, gain_in_groups: bool) -> Model:
    """Two products, one gates the other; the norm of each group, a gain, and a product back."""
    shapes = {"x": (2, 3, 6), "up": (6, 16), "gate": (6, 16), "gain": (16,), "down": (16, 6)}
    inputs = {name: TensorType("f64", shape, (), Mesh()) for name, shape in shapes.items()}
    d = ProgramBuilder(inputs)
    y = d(Elementwise("a * silu(b)"), *(d(Einsum("bsh,hf->bsf"), "x", name) for name in ("up", "gate")))
    y = d(Reshape(f"b s (g={GROUPS} h) -> b s g h"), y)
    square = d(ReduceDims((3,), "mean", keep=True), d(Elementwise("a * a"), y))
    y = d(Elementwise("a / sqrt(b + 0.001)"), y, square)
    if gain_in_groups:
        y = d(Einsum("bsgh,gh->bsgh"), y, d(Reshape(f"(g={GROUPS} h) -> g h"), "gain"))
    y = d(Reshape("b s g h -> b s (g h)"), y)
    if not gain_in_groups:
        y = d(Elementwise("a * b"), y, "gain")
    out = d(Einsum("bsf,fh->bsh"), y, "down")
    loss = d(ReduceDims((0, 1, 2), "mean"), d(Elementwise("a * a"), out))
    program = rename_values(Program(tuple(inputs.items()), d.steps, (loss,)), {loss: "loss"})
    dims = {"x": ("batch", "sequence", "hidden"), "up": ("hidden", "ffn"), "gate": ("hidden", "ffn"), "gain": ("ffn",),
            "down": ("ffn", "hidden")}  # fmt: skip
    return Model.of(program, dims, ["up", "gate", "gain", "down"], optimizer="sgd", lr=0.5)


@pytest.mark.parametrize("gain_in_groups", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
def test_groups_stay_where_they_are(tensor: int, gain_in_groups: bool) -> None:
    model = gated_norm(gain_in_groups=gain_in_groups)
    job = partition(model, Strategy(tensor=tensor, microbatch=2))
    moved = [step.op.name for found in job.movements.values() for m in found for step in m.plan.program.steps]
    assert moved == ["all_reduce"]  # of what down makes: nothing of the norm moves
    given = {n: np.random.default_rng(k).normal(size=t.shape) for k, (n, t) in enumerate(model.program.inputs)}
    want, got = by_name(model.program, given), stepped(job, given)
    for name, new in {"loss": "loss", **model.replaced}.items():
        np.testing.assert_allclose(got[name], want[new], rtol=1e-12, atol=1e-12)


def test_more_devices_than_groups_gather_the_groups() -> None:
    model = gated_norm(gain_in_groups=False)
    job = partition(model, Strategy(tensor=8, microbatch=2))
    given = {n: np.random.default_rng(k).normal(size=t.shape) for k, (n, t) in enumerate(model.program.inputs)}
    want, got = by_name(model.program, given), stepped(job, given)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-12)
