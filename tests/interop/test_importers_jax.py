"""Closed jaxprs as models: counts of layers, parameters and flops, numbers, names, constraints, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.interop import jax_decoders as plain
from tests.interop.test_importers_torch import flops, times

import shardplan as sp
from shardplan.core.nested import as_nested
from shardplan.core.reference import run_reference
from shardplan.errors import LayoutError, TypingError
from shardplan.interop.importers import load
from shardplan.strategy import Model

NAMES = {"ids": ("batch", "sequence")}
GPT = plain.gpt_shapes(4, 12, 17, 9)
LLAMA = plain.llama_shapes(4, 24, 6, 2, 20, 19)


def is_shape(x: object) -> bool:
    return isinstance(x, tuple)


def weights(shapes: Any, seed: int = 0) -> Any:
    """Random f32 weights, gains around 1."""
    rng = np.random.default_rng(seed)
    make = lambda s: jnp.asarray(0.2 * rng.normal(size=s).astype("f4") + (len(s) == 1))  # noqa: E731
    return jax.tree.map(make, shapes, is_leaf=is_shape)


def traced(function: Callable[..., Any], shapes: Any, *size: int) -> Any:
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape)
    return jax.make_jaxpr(function)(abstract, jax.ShapeDtypeStruct(size, jnp.int32))


def checkpoint(p: Any) -> dict[str, np.ndarray]:
    """The tensors by the names that the import gives them."""
    leaves = jax.tree_util.tree_flatten_with_path(p)[0]
    return {"p." + ".".join(str(getattr(k, "key", getattr(k, "idx", ""))) for k in path): np.asarray(x)
            for path, x in leaves}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "shapes"), [(partial(plain.gpt, heads=3), GPT), (plain.llama, LLAMA)], ids=["gpt", "llama"]
)
def test_numbers_are_those_of_jax(function: Any, shapes: Any) -> None:
    p, ids = weights(shapes), np.random.default_rng(1).integers(0, 17, (2, 7)).astype("i4")
    model = load(traced(function, shapes, 2, 7), NAMES)
    values = model.pack(checkpoint(p)) | {"ids": ids}
    ((found,),) = run_reference(model.program, [[values[n]] for n, _ in model.program.inputs])
    wanted = np.asarray(function(p, ids))
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert times(model.program) == [4]
    assert model.parameter_count == sum(x.size for x in jax.tree.leaves(p))


@pytest.mark.parametrize("preset", ["gpt2", "llama3-8b"])
def test_a_model_imported_is_the_one_built(preset: str) -> None:
    built = Model.load(preset, training=False, layers=3, seq=256)
    c = built.fields
    if preset == "gpt2":
        jaxpr = traced(partial(plain.gpt, heads=c["heads"]), plain.gpt_shapes(3, c["hidden"], c["vocab"], 256), 1, 256)
    else:
        sizes = (c[n] for n in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))
        jaxpr = traced(plain.llama, plain.llama_shapes(*sizes), 1, 256)
    model = load(jaxpr, NAMES)
    assert times(model.program) == times(built.program) == [3]
    assert model.parameter_count == built.parameter_count
    assert flops(model.program) == pytest.approx(flops(built.program), rel=1e-3)


def test_composites_that_are_written_out_are_found() -> None:
    for function, shapes, norm, act in ((partial(plain.gpt, heads=3), GPT, "layer_norm", "gelu(a)"),
                                        (plain.llama, LLAMA, "rms_norm", "silu(a)")):  # fmt: skip
        text = str(load(traced(function, shapes, 2, 7), NAMES).program)
        assert text.count(f"{norm}(") == 3
        assert text.count("= attention(") == 1
        assert text.count(act) == 1
        assert "reduce_dims" not in text


def test_heads_have_names() -> None:
    model = load(traced(plain.llama, LLAMA, 2, 7), NAMES)
    assert model.dims["p.blocks.k"] == ("layer", "hidden", "kv_heads", "head")
    assert model.dims["p.blocks.up"] == ("layer", "hidden", "ffn")


def pinned_to(axes: tuple[str, ...], *spec: str | None) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape((1,) * len(axes)), axes)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def constrained(to: jax.sharding.NamedSharding, layers: int = 1) -> Model:
    """Layers of one weight each, of which every input is pinned."""

    def function(p: Any, ids: Any) -> Any:
        x = p["table"][ids]
        for w in p["layers"]:
            x = jnp.tanh(jax.lax.with_sharding_constraint(x * 2, to) @ w)
        return x

    shapes = {"table": (8, 4), "layers": [(4, 4)] * layers}
    return load(traced(function, shapes, 2, 5), NAMES)


def test_sharding_constraints_are_kept() -> None:
    model = constrained(pinned_to(("data", "tensor"), "data", None, "tensor"))
    ((value, axes),) = model.constraints.items()
    assert axes == (("data",), (), ("tensor",))
    assert model.program.types[value].shape == (2, 5, 4)


def test_a_job_lies_as_constraints_say() -> None:
    """In the body of a repeat too; without them the tensor axis cuts nothing here but the table."""
    model = constrained(pinned_to(("data", "tensor"), "data", None, "tensor"), layers=3)
    assert times(model.program) == [3] and len(model.constraints) == 1
    job = sp.partition(model, sp.Strategy(data=2, tensor=2))
    bodies = [op.body for s in job.programs[0, "F"].steps if (op := as_nested(s.op))]
    pins = [str(body.types[s.results[0]]) for body in bodies for s in body.steps if s.op.name == "pin"]
    assert pins == ["f32[2@data, 5, 4@tensor]"]
    rng = np.random.default_rng(0)
    given = {n: rng.integers(0, 8, t.shape, "i4") if n == "ids" else rng.normal(size=t.shape).astype("f4")
             for n, t in model.program.inputs}  # fmt: skip
    wanted = run_reference(model.program, [[given[n]] for n, _ in model.program.inputs])[0][0]
    assert np.abs(sp.run(job, given)["output"] - wanted).max() <= 1e-6


def test_a_constraint_that_no_strategy_can_keep_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"the model pins %\S+ to \[@model, _, _\], of the axis 'model'; legal are repl"
    ):
        sp.partition(constrained(pinned_to(("model",), "model", None, None)), sp.Strategy(data=2))
    twice = constrained(pinned_to(("data",), None, "data", None))
    job = sp.partition(twice, sp.Strategy(data=2))  # moved there and back: honoured, whatever serve says
    (pin,) = (s for s in job.programs[0, "F"].steps if s.op.name == "pin")
    assert str(job.programs[0, "F"].types[pin.results[0]]) == "f32[2, 5@data, 4]"


def test_all_that_is_unknown_is_said_at_once() -> None:
    def function(p: Any, ids: Any) -> Any:
        return jnp.cumprod(p["x"], 0), jnp.round(p["x"])

    with pytest.raises(TypingError) as error:
        load(traced(function, {"x": (3, 3)}, 1))
    assert "cumprod, 1 times" in str(error.value)
    assert "round, 1 times" in str(error.value)
    assert "test_importers_jax.py" in str(error.value)


@pytest.mark.parametrize(
    "function", [jnp.expm1, jnp.tan, jnp.sinh, jnp.cosh, jnp.exp2, jnp.sign, lambda x: jnp.log1p(abs(x))]
)
def test_a_function_that_expressions_lack_is_a_formula(function: Callable[..., Any]) -> None:
    """Also of what is near to 0, of which `exp(x) - 1` has no digits."""
    x = np.asarray([-1.5, -1e-3, -2.5e-8, 0.0, 2.5e-8, 1e-3, 0.75, 1.25], "f4")
    model = load(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, jnp.float32)), {"x": ("n",)})
    ((found,),) = run_reference(model.program, [[x] for _ in model.program.inputs])
    whole = function in (jnp.expm1, jnp.tan, jnp.sinh)
    np.testing.assert_allclose(found, np.asarray(function(x)), rtol=2e-6, atol=0 if whole else 1e-7)
