"""The built models are those of `tests/models`, written in plain torch: losses, parameters, gradients, caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
from tests.models import plain_decoders, plain_others, plain_torch  # noqa: E402
from tests.models.small import DECODERS, SMALL, batch_of, small  # noqa: E402

from shardplan.core.dtypes import numpy_dtype  # noqa: E402
from shardplan.core.reference import run_reference  # noqa: E402
from shardplan.strategy import Model  # noqa: E402

Arrays = dict[str, np.ndarray]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
NO_LIMIT = {"capacity_factor": 0.0}


def load(name: str, **others: Any) -> Model:
    """The small model of a preset's kind, in f64, for a batch of 3."""
    own = SMALL[name] | (NO_LIMIT if "experts" in SMALL[name] else {})
    return Model.load(name, **{"batch": 3, "dtype": "f64", **own, **others})


def arrays(tensors: dict[str, Any]) -> Arrays:
    return {name: x.numpy() for name, x in tensors.items()}


def data(batch: dict[str, Any]) -> Arrays:
    """A batch as inputs: ids of each table apart."""
    found = arrays(batch)
    sparse = found.pop("sparse", None)
    if sparse is not None:
        found |= {f"sparse.{t}": np.ascontiguousarray(sparse[:, t]) for t in range(sparse.shape[1])}
    return found


def run(model: Model, inputs: Arrays) -> Arrays:
    """The outputs by name."""
    given = [[inputs[name].astype(numpy_dtype(t.dtype))] for name, t in model.program.inputs]
    found = run_reference(model.program, given)
    return {name: shards[0] for name, shards in zip(model.program.outputs, found, strict=True)}


def train(model: Model, params: Arrays, batches: list[Any]) -> tuple[list[float], Arrays, Arrays]:
    """Losses, then parameters and state after the last batch."""
    held = model.pack(params) | model.state()
    losses = []
    for batch in batches:
        out = run(model, held | data(batch))
        losses.append(float(out["loss"]))
        held |= {name: out[next_name] for name, next_name in model.replaced.items()}
    return losses, {name: held[name] for name in model.parameters}, held


def assert_close(found: Arrays, expected: Arrays) -> None:
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, err_msg=name, **CLOSE)


@pytest.mark.parametrize("name", SMALL)
def test_three_steps_of_adamw_are_those_of_plain_torch(name: str) -> None:
    config, settings = small(name), {"beta1": 0.8, "beta2": 0.95}
    model = load(name, optimizer="adamw", lr=0.01, decay=0.1, **settings)
    params, batches = plain_torch.parameters(config, 15), [batch_of(config, seed) for seed in (16, 17, 18)]
    rule = plain_torch.AdamW(rate=0.01, decay=0.1, **settings)
    expected, trained, moments = plain_torch.train(params, batches, config, rule)
    losses, found, held = train(model, arrays(params), batches)
    np.testing.assert_allclose(losses, expected, **CLOSE)
    assert_close(model.unpack(found), arrays(trained))
    assert held["step"] == 3
    for part in ("m", "v"):
        kept = {name: held[f"{name}.{part}"] for name, p in model.parameters.items() if p.trained}
        named = {f"{name}.{part}": x for name, x in model.unpack(kept).items()}
        assert_close(named, {name: x for name, x in arrays(moments).items() if name.endswith(f".{part}")})


@pytest.mark.parametrize("name", SMALL)
def test_three_steps_of_sgd_are_those_of_plain_torch(name: str) -> None:
    config = small(name)
    params, batches = plain_torch.parameters(config, 15), [batch_of(config, seed) for seed in (16, 17, 18)]
    expected, trained, _ = plain_torch.train(params, batches, config, plain_torch.Sgd(rate=0.05))
    losses, found, _ = train(model := load(name, optimizer="sgd", lr=0.05), arrays(params), batches)
    np.testing.assert_allclose(losses, expected, **CLOSE)
    assert_close(model.unpack(found), arrays(trained))


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_those_of_plain_torch(name: str) -> None:
    config = small(name)
    params, batch = plain_torch.parameters(config, 3), batch_of(config, 4)
    model = load(name, optimizer=None)
    out = run(model, model.pack(arrays(params)) | data(batch))
    loss, expected = plain_torch.gradients(params, batch, config)
    np.testing.assert_allclose(out["loss"], loss, **CLOSE)
    assert_close(model.unpack({name: out[g] for name, g in model.gradients.items()}), arrays(expected))


@pytest.mark.parametrize("name", [name for name, sizes in DECODERS.items() if "experts" in sizes])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_experts_with_few_slots_drop_what_those_of_plain_torch_drop(name: str, factor: float) -> None:
    config = small(name, capacity_factor=factor)
    params, batch = plain_torch.parameters(config, 5), batch_of(config, 6)
    model = load(name, optimizer=None, capacity_factor=factor)
    out = run(model, model.pack(arrays(params)) | data(batch))
    loss, expected = plain_torch.gradients(params, batch, config)
    np.testing.assert_allclose(out["loss"], loss, **CLOSE)
    assert_close(model.unpack({name: out[g] for name, g in model.gradients.items()}), arrays(expected))
    dropped = plain_decoders.dropped(params, batch["tokens"], config)
    np.testing.assert_array_equal(out["layers.dropped"], dropped)
    assert dropped.any()


@pytest.mark.parametrize("name", DECODERS)
def test_prefill_then_decode_is_the_whole_sequence(name: str) -> None:
    """Six tokens at once, then one by one: the logits of the whole, and a cache longer than the sequence."""
    config = small(name)
    params, tokens = plain_torch.parameters(config, 7), batch_of(config, 8)["tokens"]
    expected = plain_decoders.logits(params, tokens, config).numpy()
    packed, tokens = load(name, training=False).pack(arrays(params)), tokens.numpy().astype(np.int32)
    whole = run(load(name, training=False), packed | {"tokens": tokens})["logits"]
    np.testing.assert_allclose(whole, expected, **CLOSE)
    longest = SMALL[name]["seq"] + (0 if name == "gpt2" else 4)
    prefill = load(name, training=False, cache=longest, seq=6)
    decode = prefill.resize(seq=1)
    held, found, at = packed | prefill.state(), [], 0
    for model in (prefill, *(decode,) * 5):
        n = model.fields["seq"]
        out = run(model, held | {"tokens": tokens[:, at : at + n]})
        held |= {key: out[value] for key, value in model.replaced.items()}
        found.append(out["logits"])
        at += n
    assert held["position"] == 11
    np.testing.assert_allclose(np.concatenate(found, 1), expected, **CLOSE)


@pytest.mark.parametrize(("name", "result"), [("mlp-xs", "outputs"), ("dlrm-kaggle", "logits")])
def test_a_forward_pass_alone_is_that_of_plain_torch(name: str, result: str) -> None:
    config = small(name)
    params, batch = plain_torch.parameters(config, 10), batch_of(config, 11)
    expected = (
        plain_others.perceptron(params, batch["inputs"], config)
        if result == "outputs"
        else plain_others.click_logits(params, batch, config)
    )
    model = load(name, training=False)
    assert model.program.outputs == (result,)
    np.testing.assert_allclose(run(model, model.pack(arrays(params)) | data(batch))[result], expected, **CLOSE)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("dtype", "within"), [("bf16", 0.1), ("f32", 1e-5)])
def test_a_narrow_model_is_near(name: str, dtype: str, within: float) -> None:
    config = small(name)
    params, batch = plain_torch.parameters(config, 12), batch_of(config, 13)
    model = load(name, dtype=dtype, optimizer="adamw", lr=0.01)
    losses, found, _ = train(model, arrays(params), [batch, batch])
    expected, _, _ = plain_torch.train(params, [batch, batch], config, plain_torch.AdamW(rate=0.01))
    np.testing.assert_allclose(losses, expected, rtol=within)
    assert all(x.dtype.name == ("bfloat16" if dtype == "bf16" else "float32") for x in found.values())


@pytest.mark.parametrize("name", SMALL)
def test_a_checkpoint_is_packed_and_unpacked(name: str) -> None:
    model, stored = load(name), arrays(plain_torch.parameters(small(name), 9))
    back = model.unpack(model.pack(stored))
    assert set(back) == set(stored)
    assert all(np.array_equal(back[key], x) for key, x in stored.items())
