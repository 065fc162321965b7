"""Targets of -100 count for nothing: loss and gradients are those of torch on the whole, however a step is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardplan as sp
from shardplan.core.ops.layers import IGNORED
from shardplan.core.program import Program
from shardplan.errors import LayoutError

SIZES: dict[str, Any] = {"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 2, "ffn": 8, "seq": 6, "vocab": 11}
BATCH = 5  # sequences of a step


def load(batch: int, **more: Any) -> sp.Model:
    return sp.Model.load("llama", batch=batch, dtype="f64", **{**SIZES, "optimizer": None, **more})


def arrays(ignored: str = "some") -> dict[str, np.ndarray]:
    """Values of every input, of a whole step; with all targets of one sequence ignored, and one of another's."""
    rng = np.random.default_rng(3)
    found: dict[str, np.ndarray] = {}
    for name, t in load(BATCH).program.inputs:
        ids = t.dtype == "i32"
        found[name] = rng.integers(0, 11, t.shape, "i4") if ids else rng.normal(size=t.shape) / 2
    targets = found["targets"]
    if ignored == "some":
        targets[0, 2:] = targets[2] = targets[4, 1] = IGNORED
    elif ignored == "all":
        targets[:] = IGNORED
    return found


def whole(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model on one device."""
    program = load(BATCH).program
    found = sp.run(program, [[given[name]] for name, _ in program.inputs])
    return {name: x for name, (x,) in zip(program.outputs, found, strict=True)}


STRATEGIES = [
    sp.Strategy(global_batch=BATCH),
    sp.Strategy(microbatch=2, global_batch=BATCH),  # the last one is not full
    sp.Strategy(data=2, microbatch=1, global_batch=BATCH),
    sp.Strategy(data=3, microbatch=1, tensor=2, global_batch=BATCH),  # classes are cut, too
    sp.Strategy(tensor=2, context=2, context_kind="gather", microbatch=BATCH, global_batch=BATCH),
    sp.Strategy(context=2, data=2, zero=2, global_batch=BATCH),
    sp.Strategy(pipeline=2, data=2, fsdp=True, global_batch=BATCH),
    sp.Strategy(context=3, context_kind="zigzag", microbatch=BATCH, global_batch=BATCH),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("ignored", ["some", "none"])
def test_loss_and_gradients_are_those_of_the_whole(strategy: sp.Strategy, ignored: str) -> None:
    given = arrays(ignored)
    want = whole(given)
    found = sp.run(sp.partition(load(2), strategy), given)
    assert {*found} == {*want}
    for name, x in found.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("ignored", ["some", "none"])
def test_the_loss_is_torchs(ignored: str) -> None:
    torch = pytest.importorskip("torch")
    given = arrays(ignored)
    program = load(BATCH, training=False).program
    [[logits]] = sp.run(program, [[given[name]] for name, _ in program.inputs])
    pair = torch.tensor(logits.reshape(-1, 11)), torch.tensor(given["targets"].reshape(-1)).long()
    want = torch.nn.functional.cross_entropy(*pair, ignore_index=IGNORED)
    assert whole(given)["loss"] == pytest.approx(want.item(), rel=1e-9)


def test_the_losss_gradient_is_torchs() -> None:
    """That of logits, by way of the embedding's rows, which logits are linear in."""
    torch = pytest.importorskip("torch")
    given = arrays()
    model = sp.Model.load("gpt", layers=1, hidden=4, heads=1, seq=6, vocab=11, batch=BATCH, dtype="f64", tied=False,
                          optimizer=None)  # fmt: skip
    rng = np.random.default_rng(5)
    every = {n: given[n] if n in ("tokens", "targets") else rng.normal(size=t.shape) for n, t in model.program.inputs}
    found = sp.run(sp.partition(model.resize(batch=1), sp.Strategy(data=5)), every)
    forward = sp.Model.load("gpt", layers=1, hidden=4, heads=1, seq=6, vocab=11, batch=BATCH, dtype="f64", tied=False,
                            training=False)  # fmt: skip
    step = next(s for s in forward.program.steps if "logits" in s.results)
    inside = Program(forward.program.inputs, forward.program.steps, step.operands[:1])
    [[x]] = sp.run(inside, [[every[n]] for n, _ in inside.inputs])
    head = torch.tensor(every["head"], requires_grad=True)
    logits = torch.tensor(x).reshape(-1, 4) @ head.T
    torch.nn.functional.cross_entropy(logits, torch.tensor(given["targets"].reshape(-1)).long()).backward()
    np.testing.assert_allclose(found["gradient.head"], head.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_what_routing_adds_hangs_on_no_target() -> None:
    """To the mean over the targets that count it is added as it is, however many these are."""
    added: list[float] = []
    for ignored in (0, 3, BATCH):
        losses: list[float] = []
        for share in (0.0, 0.5):
            model = sp.Model.load("moe", batch=BATCH, dtype="f64", optimizer=None, experts=4, experts_per_token=2,
                                  capacity_factor=0.0, balance_loss=share, **SIZES)  # fmt: skip
            rng = np.random.default_rng(7)
            drawn = {n: rng.integers(0, 11, t.shape, "i4") if t.dtype == "i32" else rng.normal(size=t.shape) / 2
                     for n, t in sorted(model.program.inputs)}  # fmt: skip
            drawn["targets"].ravel()[:ignored] = IGNORED
            found = sp.run(model.program, [[drawn[n]] for n, _ in model.program.inputs])
            losses.append(float(found[model.program.outputs.index("loss")][0]))
        added.append(losses[1] - losses[0])
    assert added[0] > 1e-3 and added == pytest.approx([added[0]] * 3, rel=1e-9)


def test_where_no_target_counts_loss_and_gradients_are_0() -> None:
    given = arrays("all")
    for found in (whole(given), sp.run(sp.partition(load(1), sp.Strategy(data=2, global_batch=BATCH)), given)):
        assert all(not x.any() for x in found.values())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", 11, "input %tokens: the id at [4, 5] is 11; legal are 0 to 10"),
        ("tokens", IGNORED, "input %tokens: the id at [4, 5] is -100; legal are 0 to 10"),
        ("targets", -1, "input %targets: the id at [4, 5] is -1; legal are 0 to 10, and -100 for what does not count"),
    ],
)
def test_a_job_refuses_what_is_no_id(name: str, value: int, message: str) -> None:
    given = arrays()
    given[name][4, 5] = value
    for strategy in (STRATEGIES[2], STRATEGIES[-1]):  # in its own order, and in another
        with pytest.raises(LayoutError) as error:
            sp.run(sp.partition(load(1), strategy), given)
        assert str(error.value) == message
