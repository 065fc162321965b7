"""The checks of `test_jax_modes.py`: `reshard` by kinds of axes and transformations, on eight devices; JSON out.

Every case says `right`, where the values are the array's and the result lies where it was asked to, or one line that
starts with the name of an error of ours; anything else that is raised is `raw`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from execution.jax_child import main
from shardplan.errors import ShardplanError

ARRAY = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)


class Here:
    """Meshes of 4 x 2 devices by the kinds of their axes."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import AxisType, PartitionSpec

        kinds = {"A": AxisType.Auto, "E": AxisType.Explicit}
        self.jax, self.spec = jax, PartitionSpec
        self.meshes = {
            name: jax.make_mesh((4, 2), ("a", "b"), axis_types=tuple(kinds[k] for k in name))
            for name in ("AA", "EE", "EA", "AE")
        }

    def end(self, kind: str, *spec: Any) -> Any:
        return self.jax.sharding.NamedSharding(self.meshes[kind], self.spec(*spec))

    def placed(self, kind: str, *spec: Any) -> Any:
        return self.jax.device_put(ARRAY, self.end(kind, *spec))


def outcome(call: Callable[[], Any], spec: Any) -> str:
    try:
        found = call()
    except ShardplanError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if not np.array_equal(np.asarray(found), ARRAY):
        return "wrong values"
    there = [entry for entry in found.sharding.spec if entry is not None]
    return "right" if there == [entry for entry in spec if entry is not None] else f"at {found.sharding.spec}"


def in_jit(here: Here) -> dict[str, str]:
    """Arrays on meshes of every kind, with `source=` and without, under `jit`, `grad` and `vmap`, a mesh set or not."""
    out: dict[str, str] = {}
    for kind in here.meshes:
        for said in (True, False):
            for setting in (True, False):
                out |= one_kind(here, kind, said, setting)
    return out | others(here)


def one_kind(here: Here, kind: str, said: bool, setting: bool) -> dict[str, str]:
    from contextlib import nullcontext

    from shardplan.interop.jax import reshard

    jax = here.jax
    one, two, rows, columns = (here.end(kind, *s) for s in (("a", "b"), ("b", "a"), ("a",), ("b",)))
    x, many, weights = here.placed(kind, "a", "b"), here.placed(kind, None, "a"), here.placed(kind, "b", "a")
    source, row = (one, rows) if said else (None, None)
    calls = {
        "jit": (lambda: jax.jit(lambda y: reshard(y, two, source))(x), two.spec),
        "vmap": (lambda: jax.jit(jax.vmap(lambda y: reshard(y, columns, row)))(many), here.spec(None, "b")),
    }
    if setting:  # else JAX itself refuses to add up over Explicit axes
        calls["grad"] = (
            lambda: jax.jit(jax.grad(lambda y: (reshard(y, two, source) * weights).sum()))(x),
            one.spec,
        )
    name = f"{kind}{', source' if said else ''}{', set' if setting else ''}"
    with jax.set_mesh(here.meshes[kind]) if setting else nullcontext():
        return {f"{name}: {what}": outcome(*call) for what, call in calls.items()}


def others(here: Here) -> dict[str, str]:
    from shardplan.interop.jax import reshard

    jax = here.jax
    one, two = here.end("AA", "a", "b"), here.end("AA", "b", "a")
    moved = jax.jit(lambda y: reshard(y, two, one))
    shape = jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype)
    auto, mixed = here.placed("AA", "a", "b"), here.placed("EA", "a", "b")
    linear = jax.jit(jax.grad(lambda y: (reshard(y, two, one) * ARRAY).sum()))

    def between(x: Any, source: Any, *end: Any) -> Callable[[], Any]:
        return lambda: jax.jit(lambda y: reshard(y, here.end(*end), source))(x)

    calls = {
        "host array: jit": (lambda: moved(ARRAY), two.spec),
        "a shape: jit": (lambda: moved.lower(shape).compile()(ARRAY), two.spec),
        "linear: grad": (lambda: linear(auto), one.spec),
        "AA to EE: jit": (between(auto, one, "EE", "b", "a"), two.spec),
        "AA to EA: jit": (between(auto, one, "EA", "b", "a"), two.spec),
        "EE to AA: jit": (between(here.placed("EE", "a", "b"), one, "AA", "b", "a"), two.spec),
        "EA to AA: jit": (between(mixed, one, "AA", "b", "a"), two.spec),
        "EA, wrong source: jit": (between(mixed, here.end("EA", "b", "a"), "EA", "b", "a"), two.spec),
        "EA, one dim by both, Auto first: jit": (between(mixed, one, "EA", ("b", "a")), here.spec(("b", "a"))),
        "EA, one dim by both, Explicit first: jit": (between(mixed, one, "EA", ("a", "b")), here.spec(("a", "b"))),
    }
    return {name: outcome(*call) for name, call in calls.items()}


def in_shard_map(here: Here) -> dict[str, str]:
    """Inside a `shard_map` over all axes, and over one of them, within `jit` and without."""
    out: dict[str, str] = {}
    for kind in here.meshes:
        for jitted in (True, False):
            out |= manual(here, kind, jitted)
    return out


def manual(here: Here, kind: str, jitted: bool) -> dict[str, str]:
    from shardplan.interop.jax import reshard

    jax, (both, rows) = here.jax, (here.spec("a", "b"), here.spec("a"))

    def run(axes: set[str], there: Any, source: Any, *end: Any) -> Callable[[], Any]:
        f = jax.shard_map(
            lambda y: reshard(y, here.end(kind, *end), None if source is None else here.end(kind, *source)),
            mesh=here.meshes[kind], in_specs=there, out_specs=there, axis_names=axes,
        )  # fmt: skip
        return lambda: (jax.jit(f) if jitted else f)(here.placed(kind, "a", "b"))

    def loss(x: Any) -> Any:
        f = jax.shard_map(
            lambda y: reshard(y, here.end(kind, "b"), here.end(kind, None, "b")),
            mesh=here.meshes[kind], in_specs=rows, out_specs=rows, axis_names={"a"},
        )  # fmt: skip
        return (f(x) * here.placed(kind, ("a", "b"))).sum()

    def gradient() -> Any:
        with jax.set_mesh(here.meshes[kind]):
            return jax.jit(jax.grad(loss))(here.placed(kind, "a", "b"))

    calls = {
        "over all": (run({"a", "b"}, both, ("a", "b"), "b", "a"), both),
        "over all, no source": (run({"a", "b"}, both, None), both),
        "over a, from columns to rows": (run({"a"}, rows, (None, "b"), "b"), here.spec(("a", "b"))),
        "over a, moved to a": (run({"a"}, rows, (None, "b"), "a"), rows),
        "over a, grad": (gradient, both),
    }
    name = f"{kind}{', jit' if jitted else ''}"
    return {f"{name}: {what}": outcome(*call) for what, call in calls.items()}


if __name__ == "__main__":
    main((in_jit, in_shard_map), lambda: (Here(),))
