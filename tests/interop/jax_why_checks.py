"""The checks of `test_why_threads.py` that need eight devices: run as a child process, JSON out.

Each loads the function of a thread, asks why it moves what it moves, and lets JAX compile it as it was asked and with
the annotations that `why` names: what collectives there are is counted in the text of the compiled module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import shardplan as sp
from execution.jax_child import main

KINDS = r"(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("


class Grid:
    """A mesh, and shardings on it."""

    def __init__(self, sizes: tuple[int, ...], axes: tuple[str, ...]) -> None:
        import jax
        from jax.sharding import Mesh

        self.mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), axes)

    def at(self, *spec: Any) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def of(self, t: Any) -> Any:
        """Where an array of a type lies."""
        return self.at(*(dim or None for dim in t.layout.dims))


def counted(f: Callable[..., Any], given: Sequence[Any], wanted: Any, shapes: Sequence[Any]) -> dict[str, Any]:
    """The collectives of a compiled function by kind and type, and its values on a ramp."""
    import jax

    compiled = jax.jit(f, in_shardings=tuple(given), out_shardings=wanted).lower(*shapes).compile()
    arrays = [jax.device_put(np.arange(np.prod(s.shape)).reshape(s.shape).astype(s.dtype) % 7, g)
              for s, g in zip(shapes, given, strict=True)]  # fmt: skip
    text = compiled.as_text() or ""
    made = [np.asarray(x).sum(dtype=np.float64).item() for x in jax.tree.leaves(compiled(*arrays))]
    of = sorted(of for of, _ in re.findall(rf"= (\S+?)\{{\S* {KINDS}", text))  # of one result
    return {"kinds": dict(Counter(re.findall(rf" {KINDS}", text))), "of": of, "sums": made}


def told(found: Any) -> list[dict[str, Any]]:
    return [m.to_dict() for m in found.movements]


def asked(
    f: Callable[..., Any], grid: Grid, given: Sequence[Any], wanted: Any, shapes: Sequence[Any], topology: Any = None
) -> dict[str, Any]:
    """What `why` says, and what JAX compiles as asked and with what `why` names for the first movement."""
    import jax

    jaxpr = jax.make_jaxpr(jax.jit(f, in_shardings=tuple(given), out_shardings=wanted))(*shapes)
    model = sp.load(jaxpr)
    found = sp.why(model, topology)
    out: dict[str, Any] = {"movements": told(found), "before": counted(f, given, wanted, shapes)}
    remedy = found.movements[0].remedy if found.movements else None
    types: Mapping[str, Any] = getattr(remedy, "types", {})
    if types:
        names = [name for name, _ in model.program.inputs]
        changed = [grid.of(types[n]) if n in types else g for n, g in zip(names, given, strict=True)]
        result = grid.of(types["output"]) if "output" in types else wanted
        out["after"] = counted(f, changed, result, shapes)
        out["then"] = told(sp.why(model, topology, annotations=types))
    return out


def full_rematerialization() -> dict[str, Any]:
    """jax 21562 and xla 15207: a sum in one layout, pinned to another that shares axes with it."""
    import jax
    import jax.numpy as jnp

    grid = Grid((4, 2), ("x", "y"))
    one, other = grid.at("y", None, "x"), grid.at(None, ("x", "y"), None)

    def f(a: Any, b: Any, c: Any) -> Any:
        d = jax.lax.with_sharding_constraint(a + b, other)
        return c + d

    return asked(f, grid, (one, one, other), other, [jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)] * 3)


def batched_product() -> dict[str, Any]:
    """pytorch 167106: a product whose batch is cut along two dims, by a matrix that all have."""
    import jax
    import jax.numpy as jnp

    grid = Grid((4, 2), ("cp0", "cp1"))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 8, 3), (3, 1))]
    cut = grid.at("cp0", "cp1", None)
    return asked(jnp.matmul, grid, (cut, grid.at()), cut, shapes)


def batched_product_backward() -> dict[str, Any]:
    """The same with the gradient of what is cut."""
    import jax
    import jax.numpy as jnp

    grid = Grid((4, 2), ("cp0", "cp1"))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 8, 3), (3, 1), (8, 8, 1))]

    def f(v: Any, s: Any, w: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.matmul(x, s) ** 2 * w))(v)

    cut = grid.at("cp0", "cp1", None)
    return asked(f, grid, (cut, grid.at(), cut), cut, shapes)


def norm_gradient() -> dict[str, Any]:
    """autoparallel 462, the first: the gradient of a norm's weight, summed over batch and sequence, dealt out."""
    import jax
    import jax.numpy as jnp

    grid = Grid((4, 2), ("dp", "tp"))
    cut = grid.at("dp", "tp", None)
    shapes = [jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)] * 2
    return asked(lambda g, x: jnp.sum(g * x, (0, 1)), grid, (cut, cut), grid.at(("dp", "tp")), shapes)


def shard_to_shard() -> dict[str, Any]:
    """autoparallel 462, the second: from two dims cut to the same two cut the other way round."""
    import jax
    import jax.numpy as jnp

    grid = Grid((4, 2), ("dp", "tp"))
    shapes = [jax.ShapeDtypeStruct((16, 16), jnp.float32)]
    return asked(lambda x: x * 2, grid, (grid.at("dp", "tp"),), grid.at("tp", "dp"), shapes)


def slow_axis() -> dict[str, Any]:
    """shardy 1449: of two sums the smaller is over the axis that crosses nodes, and is the one to be rid of first."""
    import jax
    import jax.numpy as jnp

    grid = Grid((2, 4), ("dcn", "ici"))
    sizes = ((1024, 512), (512, 256), (1024, 512), (512, 1024))
    shapes = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    given = (grid.at(None, "dcn"), grid.at("dcn"), grid.at(None, "ici"), grid.at("ici"))

    def f(x: Any, w: Any, y: Any, v: Any) -> Any:
        return x @ w, y @ v

    nodes = sp.Topology.load("dgx-a100", nodes=2, gpu=4)
    out = asked(f, grid, given, (grid.at(), grid.at()), shapes, nodes)
    model = sp.load(jax.make_jaxpr(jax.jit(f, in_shardings=given))(*shapes))
    return out | {
        "flat": told(sp.why(model, annotations={"output.0": "f32[1024, 256]", "output.1": "f32[1024, 1024]"}))
    }


if __name__ == "__main__":
    main([full_rematerialization, batched_product, batched_product_backward, norm_gradient, shard_to_shard, slow_axis])
