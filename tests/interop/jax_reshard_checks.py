"""The checks of `test_jax_reshard.py` that need eight devices: run as a child process, JSON out."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.peers.hlo import largest_bytes, received_bytes

from benchmarks import suites
from execution.jax_child import main, told
from shardplan.core.tensor import TensorType
from shardplan.interop.hlo import parse_hlo

ARRAY = np.arange(48 * 24, dtype=np.float32).reshape(48, 24)
WEIGHT = np.arange(48 * 24, dtype=np.float32).reshape(24, 48).T % 11
SAMPLE = 10


class Here:
    """The meshes and shardings that the checks share; made in the child, where there are eight devices."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import AxisType, Mesh

        grid = np.array(jax.devices())
        self.mesh = Mesh(grid.reshape(2, 4), ("x", "y"))
        self.explicit = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))
        self.others = {
            "other axes": (Mesh(grid.reshape(4, 2), ("p", "q")), (("q", "p"), None)),
            "other order": (Mesh(grid[::-1].reshape(8), ("z",)), ("z",)),
            "fewer": (Mesh(grid[[6, 2, 5]], ("w",)), (None, "w")),
            "no common refinement": (Mesh(grid[:6].reshape(2, 3), ("u", "v")), ("v", "u")),
            "six": (Mesh(grid[:6].reshape(3, 2), ("s", "t")), ("t", "s")),
        }

    def sharding(self, *spec: Any, mesh: Any = None) -> Any:
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(mesh or self.mesh, PartitionSpec(*spec))

    def put(self, sharding: Any, array: np.ndarray = ARRAY) -> Any:
        import jax

        return jax.device_put(array, sharding)


def differs(got: Any, sharding: Any, array: np.ndarray = ARRAY, exact: bool = True) -> str | None:
    """How an array differs from the one expected, shard by shard; jit itself drops or adds a spec's last Nones."""
    if not (got.sharding == sharding if exact else got.sharding.is_equivalent_to(sharding, array.ndim)):
        return f"the sharding {got.sharding}, not {sharding}"
    for index, shard in ((s.index, np.asarray(s.data)) for s in got.addressable_shards):
        if shard.dtype != array.dtype or not np.array_equal(shard, array[index]):
            return f"other values at {index}"
    return None


def outside(here: Here) -> Any:
    """From a few shardings to all, and from all to one: on one mesh and others, and of one device."""
    import jax

    from shardplan.interop.jax import reshard

    ends = {
        "x,y": here.sharding("x", "y"),
        "y,x": here.sharding("y", "x"),
        "xy": here.sharding(("x", "y")),
        "yx": here.sharding(None, ("y", "x")),
        "none": here.sharding(),
        "one": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
        "explicit": here.sharding("y", None, mesh=here.explicit),
    } | {name: here.sharding(*spec, mesh=mesh) for name, (mesh, spec) in here.others.items()}
    wrong: dict[str, str] = {}
    for a, source in ends.items():
        array = here.put(source)
        for b, target in ends.items():
            if a not in ("x,y", "none", "six") and b != "y,x":
                continue
            try:
                found = differs(reshard(array, target), target)
            except Exception:
                found = traceback.format_exc()[-800:]
            if found:
                wrong[f"{a} to {b}"] = found
    return wrong


def dtypes(here: Here) -> Any:
    import jax

    from shardplan.interop.jax import reshard

    wrong: dict[str, str] = {}
    target = here.sharding("y", "x")
    with jax.enable_x64(True):
        arrays = {d: here.put(here.sharding("x", "y"), ARRAY.astype(d)) for d in ("i8", "f8", "i8", "c16", "?", "u2")}
    for d, array in arrays.items():
        found = differs(reshard(array, target), target, ARRAY.astype(d))
        if found:
            wrong[d] = found
    for shape in ((), (0, 8), (8, 0)):
        got = reshard(here.put(here.sharding(), np.zeros(shape, np.float32)), here.sharding(*("x",)[: len(shape)]))
        if got.shape != shape:
            wrong[str(shape)] = str(got.shape)
    return wrong


def identity(here: Here) -> Any:
    """The array itself, where its sharding is asked for; an equivalent sharding is another object over equal shards."""
    import jax

    from shardplan.interop.jax import reshard

    array = here.put(here.sharding("x", "y"))
    long, short = here.sharding("x", None), here.sharding("x")
    moved = reshard(here.put(long), short)
    inside = jax.make_jaxpr(lambda z: reshard(z, here.sharding("x", "y"), source=here.sharding("x", "y")))(array)
    return [
        reshard(array, here.sharding("x", "y")) is array,
        moved.sharding == short,
        "shard_map" not in str(inside),
    ]


def inside(here: Here) -> Any:
    """Under jit, in auto mode, with and without a mesh set; in explicit mode, with and without."""
    import jax

    from shardplan.interop.jax import reshard

    wrong: dict[str, str] = {}
    auto = [here.sharding("x", "y"), here.sharding("y", "x"), here.sharding(("y", "x")), here.sharding()]
    auto += [here.sharding(None, ("x", "y")), here.sharding(("q", "p"), mesh=here.others["other axes"][0])]
    explicit = [here.sharding(*s.spec, mesh=here.explicit) for s in auto[:-1]]

    def note(name: str, call: Callable[[], Any], target: Any) -> None:
        try:
            found = differs(call(), target, ARRAY + 1, exact=False)
        except Exception:
            found = traceback.format_exc()[-800:]
        if found:
            wrong[name] = found

    for source in auto[:4]:
        for target in auto:
            array = here.put(source)
            f = jax.jit(lambda z, t=target, s=source: reshard(z + 1, t, source=s))
            note(f"auto {source.spec} {target.spec}", lambda: f(array), target)  # noqa: B023
    with jax.set_mesh(here.mesh):
        for target in auto[1:5]:
            array = here.put(auto[0])
            f = jax.jit(lambda z, t=target: reshard(z + 1, t, source=auto[0]))
            note(f"auto, set {target.spec}", lambda: f(array), target)  # noqa: B023
    for source in explicit[:3]:
        for target in explicit:
            array = here.put(source)
            f = jax.jit(lambda z, t=target: reshard(z + 1, t))
            note(f"explicit {source.spec} {target.spec}", lambda: f(array), target)  # noqa: B023
    with jax.set_mesh(here.explicit):
        array = here.put(explicit[0])
        f = jax.jit(lambda z: reshard(z + 1, explicit[2]))
        note("explicit, set", lambda: f(array), explicit[2])
        note("explicit, set, outside", lambda: reshard(array, explicit[2]) + 1, explicit[2])
    shape = jax.eval_shape(lambda z: reshard(z, explicit[1]), here.put(explicit[0]))
    if str(shape.sharding.spec) != str(explicit[1].spec):
        wrong["explicit type"] = str(shape)
    held = here.put(auto[0])
    captured = jax.jit(lambda z: reshard(held, auto[1]) + z)(1.0)  # an array, not a tracer, inside jit
    if not np.array_equal(np.asarray(captured), ARRAY + 1):
        wrong["captured"] = "other values"
    return wrong


def gradients(here: Here) -> Any:
    """The gradient of a weighted sum is the weight, sharded as the source; through two moves and vjp too."""
    import jax

    from shardplan.interop.jax import reshard

    wrong: dict[str, str] = {}
    source, middle, target = here.sharding("x", "y"), here.sharding(None, ("y", "x")), here.sharding("y", "x")

    def note(name: str, call: Callable[[], Any], sharding: Any, want: np.ndarray) -> None:
        try:
            found = differs(call(), sharding, want, exact=False)
        except Exception:
            found = traceback.format_exc()[-800:]
        if found:
            wrong[name] = found

    array = here.put(source)
    weight = WEIGHT

    def loss(z: Any, given: Any = None) -> Any:
        return (reshard(reshard(z, middle, source=given), target, source=given and middle) * weight).sum()

    note("outside", lambda: jax.grad(loss)(array), source, weight)
    inner = jax.jit(jax.grad(lambda z: loss(z, source)), out_shardings=source)
    note("inside", lambda: inner(array), source, weight)
    square = jax.jit(jax.grad(lambda z: (reshard(z, target, source=source) ** 2).sum()))
    note("inside, square", lambda: square(array), source, 2 * ARRAY)
    twice = jax.grad(lambda z: (jax.grad(lambda a: (reshard(a, target) ** 3).sum())(z) * weight).sum())
    note("twice", lambda: twice(array), source, 6 * ARRAY * weight)
    one, two = (here.sharding(*s, mesh=here.explicit) for s in (("x", "y"), (("y", "x"),)))
    held = here.put(one)
    note("explicit", lambda: jax.jit(jax.grad(lambda z: (reshard(z, two) ** 2).sum()))(held), one, 2 * ARRAY)
    with jax.set_mesh(here.explicit):  # JAX's own sum asks for it
        note("explicit, outside", lambda: jax.grad(lambda z: (reshard(z, two) ** 2).sum())(held), one, 2 * ARRAY)
    away, spec = here.others["fewer"]
    far = here.sharding(*spec, mesh=away)
    note("other mesh", lambda: jax.grad(lambda z: (reshard(z, far) ** 2).sum())(array), source, 2 * ARRAY)
    _, back = jax.vjp(lambda z: reshard(z, target), array)
    note("vjp", lambda: back(here.put(here.sharding(), weight))[0], source, weight)
    return wrong


def errors(here: Here) -> Any:
    import jax
    from jax.sharding import PartitionSpec

    from shardplan.interop.jax import reshard, type_of

    array = here.put(here.sharding("x", "y"))
    held = here.put(here.sharding("x", "y", mesh=here.explicit))
    target = here.sharding("y", "x")
    order = here.sharding("z", mesh=here.others["other order"][0])
    axes = here.sharding("q", "p", mesh=here.others["other axes"][0])
    (first, spec), (second, other) = here.others["no common refinement"], here.others["six"]
    six = here.sharding(*spec, mesh=first)
    waiting = here.sharding(None, None, mesh=here.explicit).update(spec=PartitionSpec(unreduced={"x"}))
    return {
        "no source": told(lambda: jax.jit(lambda z: reshard(z, target))(array)),
        "order": told(lambda: jax.jit(lambda z: reshard(z, order, source=target))(array)),
        "refinement": told(
            lambda: jax.jit(lambda z: reshard(z, here.sharding(*other, mesh=second), source=six))(here.put(six))
        ),
        "explicit mesh": told(lambda: jax.jit(lambda z: reshard(z, axes))(held)),
        "unconstrained": told(lambda: reshard(array, here.sharding(PartitionSpec.UNCONSTRAINED))),
        "uneven": told(lambda: reshard(here.put(here.sharding(), np.zeros((7, 2), np.float32)), target)),
        "limit": told(lambda: reshard(array, here.sharding(), memory_limit=1000)),
        "unreduced": told(lambda: reshard(held, waiting)),
        "no dtype": told(lambda: type_of((4, 4), target)),
    }


def types(here: Here) -> Any:
    """Types of shardings, and back."""
    import jax
    from jax.sharding import PartitionSpec

    from shardplan.interop.jax import spec_of, type_of

    array = here.put(here.sharding("x", "y"))
    rows = [
        type_of(array, array.sharding),
        type_of(array, here.sharding(("y", "x"))),
        type_of((8, 8), here.sharding("z", mesh=here.others["other order"][0]), "bf16"),
        type_of(array, jax.sharding.SingleDeviceSharding(jax.devices()[3])),
        type_of(array, here.sharding("y").update(mesh=here.mesh.abstract_mesh)),
        type_of(array, here.sharding(mesh=here.explicit).update(spec=PartitionSpec("y", unreduced={"x"}))),
    ]
    back = [str(spec_of(t)) for t in rows if t.mesh.size > 1]
    return {"types": [f"{t} on {t.mesh}" for t in rows], "specs": back}


def shardings(here: Here) -> Any:
    """Plans between `NamedSharding`s, beside those between the types that `type_of` says."""
    import shardplan as sp
    from shardplan.core.shardings import types_between

    ends = [here.sharding(*spec) for spec in (("x", "y"), ("y", "x"), (("x", "y"),), (None, ("y", "x")), ())]
    ends += [here.sharding(*spec, mesh=here.others[name][0]) for name, spec in (("other axes", ("q", "p")),
                                                                                ("fewer", (None, "w")))]  # fmt: skip
    wrong, checked = list[str](), 0
    for a in ends:
        for b in ends:
            shape = (48, 24)
            found, want = sp.redistribute(a, b, shape=shape, dtype="f32"), types_between(shape, "f32", a, b)
            if found != sp.redistribute(*want):
                wrong.append(f"{a} to {b}")
            checked += 1
    return {"wrong": wrong, "checked": checked}


def beside(here: Here) -> Any:
    """What XLA sends beside ours: the lines, and the bytes beside those that another reader finds."""
    import jax

    from shardplan.hardware.units import format_bytes
    from shardplan.interop.jax import compare_with_xla

    start, wrong = here.sharding("x", "y"), list[str]()
    for spec in (("y", "x"), (), ("x",), (("y", "x"),), (None, ("x", "y"))):
        end = here.sharding(*spec)
        shape = jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype, sharding=start)
        text = jax.jit(lambda x: x, out_shardings=end).lower(shape).compile().as_text()
        theirs = sum(sum(received_bytes(c, 8)) for c in parse_hlo(text, 8))
        line = compare_with_xla(start, end, ARRAY.shape, "f32")
        if f", {format_bytes(theirs)} by XLA (" not in line:
            wrong.append(f"{line}, not {theirs}")
    order = here.sharding("z", mesh=here.others["other order"][0])
    lines = {
        "gather": compare_with_xla(start, here.sharding(), ARRAY.shape, "f32"),
        "swap": compare_with_xla(start, here.sharding("y", "x"), ARRAY.shape, np.float32, "1 MB"),
        "order": told(lambda: compare_with_xla(start, order, ARRAY.shape, "f32")),
    }
    return {"lines": lines, "wrong": wrong}


def compiled(here: Here) -> Any:
    """Problems compiled inside jit: the program's collectives and bytes, none over the bound, and right."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from shardplan.execution.jax.lower import moved_bytes
    from shardplan.interop.jax import plan_of, reshard

    wrong: list[str] = []
    checked = 0
    rng = random.Random(5)
    for suite in ("s8", "U"):
        for s, t, _ in suites.problems(suite, 9, SAMPLE, most_devices=8):
            assert isinstance(s, TensorType) and isinstance(t, TensorType)
            devices = np.array(jax.devices()[: s.mesh.size]).reshape(s.mesh.sizes)
            mesh = Mesh(devices, s.mesh.axes)
            before, after = (NamedSharding(mesh, PartitionSpec(*x.layout.spec)) for x in (s, t))
            array = np.asarray([rng.randrange(1000) for _ in range(int(np.prod(s.shape)))], np.float32).reshape(s.shape)
            f = jax.jit(lambda z, a=after, b=before: reshard(z, a, source=b), in_shardings=before)
            executable = f.lower(jax.ShapeDtypeStruct(s.shape, np.float32)).compile()
            text = executable.as_text()
            got = np.zeros(s.mesh.size, dtype=np.int64)
            for c in parse_hlo(text, s.mesh.size):
                got += received_bytes(c, s.mesh.size)
            plan = plan_of(s, t)
            says = np.zeros(s.mesh.size, dtype=np.int64)
            for step in plan.program.steps:
                found = moved_bytes(step.op, *plan.program.step_types(step)[0])
                says += [found[d] for d in s.mesh.devices]
            name = f"{suite}: {s} -> {t} on {s.mesh}"
            if not np.array_equal(got, says):
                wrong.append(f"{name}: {got} bytes received, not {says}")
            limit = max(plan.certificate.bound_bytes, 4 * s.mesh.size * max(1, s.ndim))
            if largest_bytes(text) > limit:
                wrong.append(f"{name}: an array of {largest_bytes(text)} bytes, over {limit}")
            found = differs(f(jax.device_put(array, before)), after, array, exact=False)
            if found:
                wrong.append(f"{name}: {found}")
            checked += 1
    return {"wrong": wrong[:5], "checked": checked}


CHECKS: tuple[Callable[[Here], Any], ...] = (
    outside, dtypes, identity, inside, gradients, errors, types, shardings, beside, compiled,
)  # fmt: skip


def make() -> tuple[Here]:
    from shardplan.interop.jax import eager_move as moves_outside

    moves_outside.LEAVES_TO_HOST = False  # what is checked are plans
    return (Here(),)


if __name__ == "__main__":
    main(CHECKS, make)
