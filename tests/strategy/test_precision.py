"""Recipes of precision: what is held, counted exactly; and steps beside the same in plain numpy, rounded as it goes."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardplan import LayoutError, Model, ShardplanError, Strategy, Topology, partition, simulate
from shardplan.core.dtypes import numpy_dtype
from shardplan.strategy.partition.memory import moments, saved_bytes, state_bytes
from shardplan.strategy.strategy_text import parse_strategy, strategy_text
from strategy.jobs import apart, by_name, stepped

STEP, COUNT = 4, 4  # bytes of the number of the step, and of how many targets count
BF16 = numpy_dtype("bf16")
SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 32, "seq": 8, "vocab": 32}


@pytest.mark.parametrize(
    ("said", "a_parameter"),
    [  # bytes of the parameter, of its gradient, and of the copy in f32 with two moments: spec 5.5
        ({"precision": "bf16"}, 2 + 4 + 12),
        ({"precision": "fp16"}, 2 + 2 + 12),
        ({"precision": "bf16", "gradient_dtype": "bf16"}, 2 + 2 + 12),
        ({"precision": "fp16", "gradient_dtype": "float32"}, 2 + 4 + 12),
        ({"precision": "fp32"}, 4 + 4 + 8),
        ({"precision": "bf16", "data": 4, "zero": 1}, 2 + 4 + 12 / 4),
        ({"precision": "bf16", "data": 4, "zero": 2}, 2 + 4 / 4 + 12 / 4),
        ({"precision": "bf16", "data": 2, "context": 2, "fsdp": True}, 18 / 4),
        ({"precision": "fp16", "data": 4, "zero": 3}, 16 / 4),
    ],
    ids=str,
)
def test_bytes_a_parameter(said: dict[str, Any], a_parameter: float) -> None:
    model = Model.load("llama", **SIZES)
    job = partition(model, Strategy(**said))
    assert state_bytes(job, 0) == a_parameter * model.parameter_count + STEP + COUNT


def test_what_takes_the_place_of_state_is_not_held_twice() -> None:
    """Gradients of one microbatch, and parameters: the most is held before the backward pass, with what was saved."""
    job = partition(Model.load("llama", **SIZES), Strategy(precision="bf16"))
    most = max(m.during for m in moments(job, 0))
    held = state_bytes(job, 0) + saved_bytes(job, 0)
    assert held <= most < 1.1 * held


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).astype(np.float32)


def by_hand(w: np.ndarray, x: np.ndarray, y: np.ndarray, rows: int) -> tuple[float, np.ndarray]:
    """The loss of a perceptron, and gradients added up in f32 over so many rows at a time; all else in bf16."""
    loss, total = 0.0, np.zeros(w.shape, np.float32)
    for k in range(0, len(x), rows):
        made = [rounded(x[k : k + rows])]
        for each in w:
            made.append(rounded(np.maximum(rounded(made[-1] @ each), 0)))
        miss = made[-1] - rounded(y[k : k + rows])
        loss += float((miss**2).sum()) / len(x)
        back = rounded(2 * miss / len(x))
        for n in reversed(range(len(w))):
            back = rounded(back * (made[n + 1] > 0))
            total[n] += rounded(made[n].T @ back)
            back = rounded(back @ w[n].T)
    return loss, total


@pytest.mark.parametrize("said", [{}, {"data": 2, "zero": 2}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_steps_are_those_of_plain_numpy(said: dict[str, Any]) -> None:
    """The copies move by less than a parameter can, and the parameters are what they round to."""
    rng, lr, batch = np.random.default_rng(1), 2e-3, 8
    strategy = Strategy(**said, precision="bf16", global_batch=batch)
    job = partition(Model.load("mlp", layers=3, hidden=8, optimizer="sgd", lr=lr), strategy)
    first = rng.normal(0, 0.5, (3, 8, 8)).astype(BF16)
    held = {"layers.weight": first, **job.model.state({"layers.weight": first})}
    master = first.astype(np.float32)
    for _ in range(3):
        data = {name: rng.normal(size=(batch, 8)).astype(BF16) for name in ("inputs", "targets")}
        now = held["layers.weight"].astype(np.float32)
        x, y = (data[name].astype(np.float32) for name in ("inputs", "targets"))
        loss, total = by_hand(now, x, y, strategy.data)
        master = master - lr * total
        got = stepped(job, held | data)
        assert got["gradient.layers.weight"].dtype == got["layers.weight.master"].dtype == np.float32
        assert abs(float(got["loss"]) - loss) < 0.02 * loss
        assert apart(got["gradient.layers.weight"], total) < 0.02
        assert apart(got["layers.weight.master"] - first, master - first) < 0.02
        assert np.array_equal(got["layers.weight"], got["layers.weight.master"].astype(BF16))
        held = {name: got[name] for name in held}
    still = held["layers.weight"] == first
    assert 0.1 < still.mean() < 1
    assert (held["layers.weight.master"] != first.astype(np.float32))[still].mean() > 0.5


def test_sums_in_f32_keep_what_sums_in_bf16_lose() -> None:
    """Of 64 microbatches that are alike, each adds as much as the first."""
    rng, found = np.random.default_rng(2), dict[str, float]()
    w, x, y = (rng.normal(0, 0.5, shape).astype(BF16) for shape in ((1, 8, 8), (1, 8), (1, 8)))
    for dtype in ("f32", "bf16"):
        strategy = Strategy(precision="bf16", gradient_dtype=dtype, global_batch=64)
        job = partition(Model.load("mlp", layers=1, hidden=8, optimizer="sgd"), strategy)
        data = {"inputs": np.repeat(x, 64, 0), "targets": np.repeat(y, 64, 0)}
        got = stepped(job, {"layers.weight": w, **job.model.state({"layers.weight": w}), **data})
        one = by_hand(*(v.astype(np.float32) for v in (w, x, y)), rows=1)[1]
        found[dtype] = apart(got["gradient.layers.weight"].astype(np.float32), one)
    assert found["f32"] < 0.01 < found["bf16"]


@pytest.mark.parametrize(("said", "dtype"), [({}, "f32"), ({"reduce_dtype": "bf16"}, "bf16"),
                                             ({"gradient_dtype": "bf16"}, "bf16")], ids=str)  # fmt: skip
@pytest.mark.parametrize("dealt", [{"fsdp": True}, {"zero": 1}], ids=str)
def test_gradients_are_summed_over_devices_in_the_dtype_that_is_said(
    said: dict[str, Any], dtype: str, dealt: dict[str, Any]
) -> None:
    """By default that in which they are accumulated; what is summed in bf16 loses what f32 keeps."""
    job = partition(Model.load("mlp", layers=2, hidden=8), Strategy(data=4, precision="bf16", **dealt, **said))
    programs = [one.plan.program for found in job.movements.values() for one in found]
    summed = [t for program in programs for t in program.input_types if t.layout.partial and t.shape]
    assert summed and {t.dtype for t in summed} == {dtype}
    assert {t.dtype for name, t in job.state.items() if name.startswith("gradient.")} == {
        said.get("gradient_dtype", "f32")
    }


def test_the_job_is_its_model_on_one_device() -> None:
    """Every loaded model has the recipe; of a program of one's own it is that of its dtype."""
    model = Model.load("llama", **SIZES, optimizer="adamw")
    job = partition(model, Strategy(tensor=2, data=2, zero=1, precision="bf16"))
    assert job.model.fields["precision"] == "bf16" and job.model.program.types["layers.q"].dtype == "bf16"
    mine = partition(Model.load("llama", **SIZES, precision="bf16"), Strategy(tensor=2, data=2, zero=1))
    assert mine.programs[0, "F"] == job.programs[0, "F"]
    rng = np.random.default_rng(3)
    given = {name: rng.normal(0, 0.3, p.shape).astype(BF16) for name, p in model.parameters.items()}
    given |= job.model.state(given)
    given |= {name: rng.integers(0, 32, (2, 8)).astype(np.int32) for name in ("tokens", "targets")}
    want, got = by_name(job.model.program, given), stepped(job, given)
    assert apart(got["loss"], want["loss"]) < 0.01
    for name in model.parameters:
        assert apart(got[f"{name}.m"], want[f"next.{name}.m"]) < 0.05, name


def test_what_no_recipe_covers_is_refused() -> None:
    plain = Model.load("mlp", layers=2, hidden=8, optimizer="sgd", batch=2)
    assert plain.forward is not None
    dims = {name: plain.dims[name] for name, _ in plain.forward.inputs}
    own = Model.of(plain.forward, dims, plain.parameters, optimizer="sgd")
    with pytest.raises(ShardplanError) as caught:
        partition(own, Strategy(data=2, precision="bf16"))
    assert str(caught.value) == "precision='bf16' of model, a program in f32; legal is one in bf16"
    assert partition(own, Strategy(data=2, precision="fp32")).model.parameters == own.parameters
    with pytest.raises(LayoutError, match="precision 'int8' is unknown; legal: fp32, bf16, fp16, fp8, nvfp4"):
        Strategy(precision="int8")
    with pytest.raises(LayoutError, match="gradient_dtype 'i32' is unknown; legal: f16, bf16"):
        Strategy(gradient_dtype="i32")
    with pytest.raises(ShardplanError, match=r"no parameter layers.weight, of which layers.weight.master is a copy"):
        plain.with_precision("bf16").state()


def test_what_is_predicted_alone_is_no_job() -> None:
    """At the fidelities that need no job it is predicted."""
    model = Model.load("llama", **SIZES, precision="bf16")
    strategy, machine = Strategy(tensor=2, data=4, precision="nvfp4"), Topology.load("dgx-b200", nodes=1)
    for fidelity in ("closed", "events"):
        assert simulate(model, strategy, machine, fidelity).seconds > 0
    for made in (lambda: partition(model, strategy), lambda: simulate(model, strategy, machine, "ops")):
        with pytest.raises(LayoutError) as caught:
            made()
        assert str(caught.value) == (
            "strategy: precision=nvfp4 is predicted, and no program has its narrow products; legal for a job are fp32, "
            "bf16, fp16, fp8"
        )


@pytest.mark.parametrize("said", [{"attention": "cudnn"}, {"tensor_overlap": True}, {"offload_layers": 1}], ids=str)
def test_what_is_said_of_software_changes_no_program(said: dict[str, Any]) -> None:
    model, strategy = Model.load("llama", **SIZES), Strategy(tensor=2, **said)
    assert partition(model, Strategy(tensor=2)).programs == partition(model, strategy).programs
    assert strategy != Strategy(tensor=2) and strategy.software != Strategy(tensor=2).software
    (name, value), *_ = said.items()
    more = replace(strategy, tensor=4)
    assert getattr(strategy, name) == getattr(more, name) == getattr(more.software, name) == value
    assert eval(repr(strategy)) == parse_strategy(strategy_text(strategy)) == strategy
    assert copy.deepcopy(strategy) == pickle.loads(pickle.dumps(strategy)) == strategy
    assert hash(replace(strategy, **{name: getattr(Strategy(), name)})) == hash(Strategy(tensor=2))


def test_classes_of_attention() -> None:
    with pytest.raises(LayoutError, match=r"attention 'flash9' is unknown; legal: unfused, .*, flash3, cudnn"):
        Strategy(attention="flash9")
