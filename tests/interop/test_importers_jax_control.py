"""Control flow of JAX: scans as `repeat`, calls in their place, what no gradient goes through, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.canonical.form import canonical
from tests.interop import jax_decoders as plain
from tests.interop.test_importers_jax import NAMES, checkpoint, is_shape, traced, weights
from tests.interop.test_importers_torch import times

import shardplan as sp
from shardplan.core.nested import as_nested
from shardplan.core.reference import run_reference
from shardplan.errors import TypingError
from shardplan.interop.importers import load
from shardplan.strategy import Model

UNROLLED = plain.gpt_shapes(4, 12, 17, 9)
STACKED = UNROLLED | {"blocks": jax.tree.map(lambda s: (4, *s), UNROLLED["blocks"][0], is_leaf=is_shape)}
IDS = np.random.default_rng(1).integers(0, 17, (2, 7)).astype("i4")


def gpt(p: Any, ids: Any) -> Any:
    x = p["tokens"][ids] + p["places"][jnp.arange(ids.shape[1])]
    x, _ = jax.lax.scan(lambda x, b: (plain.gpt_block(b, x, 3), None), x, p["blocks"])
    return plain.layer_norm(p["norm"], x) @ p["tokens"].T


def run(model: Model, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    held = values | dict(model.constants)
    return [x[0] for x in run_reference(model.program, [[held[n]] for n, _ in model.program.inputs])]


def same(function: Callable[..., Any], *arrays: Any, rtol: float = 1e-5) -> Model:
    """Import a function, and hold its results against those of JAX."""
    given = [jnp.asarray(x) for x in arrays]
    jaxpr = jax.make_jaxpr(function)(*given)
    model = load(jaxpr)
    said = [*map(str, jaxpr.jaxpr.debug_info.arg_names)]
    values = {n: np.asarray(given[said.index(n)]) for n, _ in model.program.inputs}
    wanted = jax.tree.leaves(function(*given))
    for x, y in zip(run(model, values), wanted, strict=True):
        assert x.shape == y.shape
        assert np.abs(x - np.asarray(y)).max(initial=0) <= rtol * max(1.0, float(np.abs(y).max(initial=0)))
    return model


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def test_layers_in_a_scan_are_a_repeat_with_heads() -> None:
    p, model = weights(STACKED), load(traced(gpt, STACKED, 2, 7), NAMES)
    assert times(model.program) == [4]
    assert model.dims["p.blocks.out"] == ("layer", "kv_heads", "head", "hidden")
    assert model.dims["p.blocks.up"] == ("layer", "hidden", "ffn")
    values = model.pack(checkpoint(p)) | {"ids": IDS}
    wanted = np.asarray(gpt(p, IDS))
    assert np.abs(run(model, values)[0] - wanted).max() <= 1e-5 * np.abs(wanted).max()
    flat = load(traced(partial(plain.gpt, heads=3), UNROLLED, 2, 7), NAMES)
    assert str(canonical(model.program).program) == str(canonical(flat.program).program)


def test_a_scan_is_partitioned() -> None:
    p, model = weights(STACKED), load(traced(gpt, STACKED, 2, 7), NAMES)
    job = sp.partition(model, sp.Strategy(data=2, tensor=3))
    values = model.pack(checkpoint(p)) | {"ids": IDS}
    found = sp.run(job, values)
    wanted = np.asarray(gpt(p, IDS))
    assert np.abs(found["output"] - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("reverse", [False, True])
def test_what_a_scan_carries_reads_and_stacks(reverse: bool) -> None:
    def function(x: Any, w: Any, b: Any, fixed: Any) -> Any:
        def body(state: Any, one: Any) -> Any:
            x, count, before = state
            v, c = one
            return (jnp.tanh(x @ v + c) + fixed * before, count + 1, x), (x.sum(-1), c * 2.0)

        return jax.lax.scan(body, (x, jnp.int32(0), 2 * x), (w, b), reverse=reverse)

    model = same(function, numbers(2, 3), numbers(5, 3, 3), numbers(5, 3), numbers(3))
    (op,) = (op for s in model.program.steps if (op := as_nested(s.op)))
    assert (op.times, op.carried_count, op.cut, op.backwards) == (5, 3, 2, reverse)


def test_scans_inside_scans() -> None:
    def function(x: Any, w: Any) -> Any:
        def outer(x: Any, v: Any) -> Any:
            x, sums = jax.lax.scan(lambda y, u: (jnp.sin(y @ u), y.sum()), x, v)
            return x, sums

        return jax.lax.scan(outer, x, w)

    model = same(function, numbers(2, 3), numbers(4, 2, 3, 3))
    (op,) = (op for s in model.program.steps if (op := as_nested(s.op)))
    assert (op.times, times(op.body)) == (4, [2])


@pytest.mark.parametrize("stop", [False, True])
def test_no_gradient_goes_where_it_is_stopped(stop: bool) -> None:
    held = jax.lax.stop_gradient if stop else lambda x: x

    def loss(p: Any, ids: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return x + jax.nn.softmax(x @ w) * held(x @ w), None

        x, _ = jax.lax.scan(body, p["table"][ids], p["w"])
        return (x * held(jnp.cos(x))).mean()

    shapes = {"table": (5, 4), "w": (3, 4, 4)}
    p, ids = weights(shapes), np.asarray([[0, 2, 4]], dtype="i4")
    model = load(traced(loss, shapes, 1, 3), NAMES, training=True)
    values = model.pack(checkpoint(p)) | {"ids": ids}
    found = dict(zip(model.program.outputs, run(model, values), strict=True))
    wanted = checkpoint(jax.grad(loss)(p, ids))
    assert abs(found["loss"] - float(loss(p, ids))) <= 1e-6
    mine = model.unpack({n: found[g] for n, g in model.gradients.items()})
    for name, x in wanted.items():
        assert np.abs(mine[name] - x).max() <= 1e-6, name


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(jax.nn, name) for name in ("gelu", "relu", "silu", "softmax", "log_softmax", "leaky_relu", "elu",
                                                "softplus", "sigmoid", "relu6", "logsumexp")},
    "clip": lambda x: jnp.clip(x, -0.5, 0.25),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * jax.lax.stop_gradient(x)),
    "jit": jax.jit(lambda x: jnp.where(x > 0, x, 2 * x)),
    "sign": jnp.sign,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_call_others(name: str) -> None:
    same(FUNCTIONS[name], 3 * numbers(4, 6))


def test_a_gradient_of_its_own_is_written_as_what_it_computes() -> None:
    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))
    same(lambda x: twice(x) + 1, numbers(3, 2))


def branched(p: Any, ids: Any) -> Any:
    x = jax.lax.cond(p["x"].sum() > 0, lambda y: y, lambda y: -y, p["x"])
    x = jax.lax.while_loop(lambda y: y.sum() < 3, lambda y: y + 1, x)
    return jax.lax.fori_loop(0, 3, lambda k, y: jnp.tanh(y @ jax.lax.dynamic_slice(p["w"], (k, 0), (3, 3))), x)


def test_branches_and_open_loops_are_refused_together() -> None:
    with pytest.raises(TypingError) as error:
        load(traced(branched, {"x": (3, 3), "w": (5, 3)}, 1))
    text = str(error.value)
    for name in ("cond", "while", "dynamic_slice"):
        assert f"  {name}, 1 times, first at " in text
    assert text.count("test_importers_jax_control.py") == 3
    with pytest.warns(UserWarning, match="operations are opaque"):
        model = load(traced(branched, {"x": (3, 3), "w": (5, 3)}, 1), opaque=True)
    assert [s.op.name for s in model.program.steps].count("opaque") == 2
