"""The checks of `test_jax_dropin.py` that need eight devices: run as a child process, JSON out. None is a pass."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from execution.jax_child import main
from interop.jax_reshard_checks import Here, differs, told

X = np.arange(64, dtype=np.float32).reshape(8, 8)
V = X.T % 5 + 1
HUNT = 30


class Ends(Here):
    """Shardings of a few words."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.sharding("x", "y"), self.sharding("y", "x")
        self.far = self.sharding(None, "w", mesh=self.pair())

    def pair(self) -> Any:
        import jax
        from jax.sharding import Mesh

        return Mesh(np.array(jax.devices())[[6, 2]], ("w",))


def each(rows: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What went wrong: a text, False, or an exception."""
    wrong: dict[str, str] = {}
    for name, call in rows.items():
        try:
            found = call()
        except Exception:
            found = traceback.format_exc()[-900:]
        if found is not None and found is not True:
            wrong[name] = str(found)
    return wrong


def close(got: Any, want: Any) -> str | None:
    """How leaves differ from numpy arrays."""
    import jax

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return next((f"{np.asarray(g)} is not {w}" for g, w in pairs if not np.allclose(np.asarray(g), w)), None)


def like_device_put(here: Ends) -> Any:
    """Pytrees, prefixes and every kind of end: shardings, values, weak types, commitment as device_put gives them."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Format, Layout
    from jax.sharding import PartitionSpec

    from shardplan.interop.jax import reshard

    a = here.put(here.a, X)
    tree = {"a": a, "b": [a, X, 3.0, jnp.ones(4)], "n": None}
    weak = jax.device_put(jnp.full((8,), 2.0), here.sharding("x"))

    def facts(t: Any) -> Any:
        return jax.tree.map(lambda x: (x.sharding, x.committed, x.weak_type, str(x.dtype), np.asarray(x).tolist()), t)

    def same(x: Any, end: Any) -> str | None:
        got, want = facts(reshard(x, end)), facts(jax.device_put(x, end))
        return None if got == want else f"{got}, not {want}"

    device = jax.devices()[3]
    rows: dict[str, Callable[[], Any]] = {
        "one end": lambda: same(tree, here.sharding()),
        "each": lambda: same(tree, {"a": here.b, "b": [here.far, here.b, None, here.sharding("x")], "n": None}),
        "prefix": lambda: same(tree, {"a": here.b, "b": here.sharding(), "n": None}),
        "list": lambda: same([a, a], [here.b, device]),
        "device": lambda: same(a, device),
        "devices": lambda: same([a, X], [device, jax.devices()[2]]),
        "none": lambda: reshard(a, None) is a,
        "numpy": lambda: same(X, here.b),
        "scalar": lambda: same(2, here.sharding()),
        "uncommitted": lambda: same(jnp.ones(8), here.sharding("x")),
        "committed": lambda: same(jnp.ones(8), jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        "weak": lambda: same(weak, here.sharding("y")),
        "weak, far": lambda: same(weak, here.sharding("w", mesh=here.pair())),
        "empty": lambda: same([], here.b) or same({"z": np.zeros((0, 8), np.float32)}, here.sharding()),
        "tied": lambda: len({id(x) for x in reshard([a, a], here.b)}) == 1,
        "format": lambda: (
            reshard(a, f := Format(Layout(major_to_minor=(1, 0)), here.b)).format == jax.device_put(a, f).format
        ),
    }
    wrong = each(rows)
    with jax.set_mesh(here.mesh):
        spec = PartitionSpec("y", "x")
        traced = jax.jit(lambda z: reshard(z, spec, source=PartitionSpec("x", "y")))
        wrong |= each(
            {
                "spec": lambda: same(a, spec),
                "specs": lambda: same([a, X], [spec, PartitionSpec()]),
                "spec, jit": lambda: close(traced(a), X),
                "spec, grad": lambda: close(jax.grad(lambda z: (reshard(z, spec) ** 2).sum())(a), 2 * X),
            }
        )
    return wrong


def limits(here: Ends) -> Any:
    """One limit on the sum: live bytes of a run, step by step, and the least that is said is the least that works."""
    from shardplan.errors import Infeasible
    from shardplan.interop.jax import reshard

    def least(ends: Any, arrays: Callable[[], Any], **more: Any) -> Any:
        """What is said to be the least, if it works."""
        try:
            reshard(arrays(), ends, memory_limit=40, **more)
        except Infeasible as error:
            said = error.least_bytes or 0
            reshard(arrays(), ends, memory_limit=said, **more)
            return said
        return "no error"

    two = lambda: [here.put(here.a, X), here.put(here.a, X)]  # noqa: E731
    ends = [here.b, here.sharding()]
    return {
        "kept": least(ends, two),
        "donated": least(ends, two, donate=True),
        "one": least(here.sharding(), lambda: here.put(here.a, X)),
        "host": told(lambda: reshard([X, 1.0], here.sharding(), memory_limit=200)),
        "host, cut": told(lambda: reshard([X], [here.b], memory_limit=31)),
        "host, moved": told(lambda: reshard([X, here.put(here.a, X)], [here.sharding(), here.b], memory_limit=300)),
        "after a larger one": told(
            lambda: [reshard(here.put(here.a, X), here.sharding(), memory_limit=n) for n in (10**6, 300)]
        ),
        "unmoved counts": least([here.a, here.sharding()], two),
        "too little": told(lambda: reshard(two(), ends, memory_limit=300)),
        "values": close(reshard([here.put(here.a, X), X, here.put(here.far, V)], [here.b, here.far, here.a],
                                memory_limit=4000), [X, X, V]),
    }  # fmt: skip


def held_bytes(program: Any) -> int:
    """The workspace of a program, bytes on the worst device, where its inputs outlive it."""
    from shardplan.core.accounting import account
    from shardplan.core.program import Program

    outputs = tuple(dict.fromkeys((*program.outputs, *(name for name, _ in program.inputs))))
    return account(Program(program.inputs, program.steps, outputs)).workspace_bytes


def chained(here: Ends) -> Any:
    """A plan of several steps whose source is kept: its bytes count to the end, unless it is donated."""
    from shardplan.core.accounting import account
    from shardplan.core.mesh import Mesh
    from shardplan.core.tensor import TensorType
    from shardplan.interop.jax.plans import program_within

    mesh = Mesh(a=2, b=2, c=2)
    wrong: list[str] = []
    rng = random.Random(3)
    layouts = [("a", "b", "c"), ("c", "a", "b"), (("a", "b"), "c", None), (None, ("c", "a"), None), (None, None, "b")]
    for _ in range(40):
        s, t = (TensorType("f32", (8, 8, 8), rng.choice(layouts), mesh) for _ in range(2))
        free = program_within((s,), (t,), 10**6, (False,))
        most = max(held_bytes(free), account(free).workspace_bytes)
        kept = program_within((s,), (t,), most, (True,))
        if held_bytes(kept) > most or held_bytes(kept) < s.local_bytes() + t.local_bytes() * (s != t):
            wrong.append(f"{s} -> {t}: {held_bytes(kept)} of {most}")
    return wrong


def donation(here: Ends) -> Any:
    """A donated array is deleted, the result is right; one that stays, or whose storage is the result's, lives on."""
    import jax
    from jax.sharding import Mesh

    from shardplan.interop.jax import reshard

    renamed = here.sharding("u", "v", mesh=Mesh(here.mesh.devices, ("u", "v")))

    def given(end: Any, deleted: bool, **more: Any) -> Any:
        x = here.put(here.a, X)
        return differs(reshard(x, end, donate=True, **more), end, X) or (x.is_deleted() == deleted)

    def keys() -> bool:
        k = jax.device_put(jax.random.split(jax.random.key(0), 8), here.sharding("x"))
        reshard(k, here.sharding("y"), donate=True)
        return bool(k.is_deleted())

    def beside() -> Any:
        """Moved under one limit with an array whose storage is its result's, under other names of the axes."""
        x, y = here.put(here.a, X), here.put(here.a, V)
        got = reshard([x, y], [here.b, renamed], donate=True, memory_limit=5000)
        return close(got, [X, V]) or x.is_deleted()

    def some() -> bool:
        x, y = here.put(here.a, X), here.put(here.a, V)
        got = reshard([x, y], here.b, donate=[True, False], memory_limit=5000)
        return x.is_deleted() and not y.is_deleted() and close(got, [X, V]) is None

    a = here.put(here.a, X)

    def apart(end: Any) -> bool:
        got = reshard(a, end, may_alias=False)
        mine = {s.data.unsafe_buffer_pointer() for s in a.addressable_shards}
        return not mine & {s.data.unsafe_buffer_pointer() for s in got.addressable_shards}

    return each(
        {
            "moved": lambda: given(here.b, True),
            "far": lambda: given(here.far, True),
            "limit": lambda: given(here.far, True, memory_limit=10_000),
            "direct, limit": lambda: given(here.b, True, memory_limit=10_000),
            "stays": lambda: given(here.a, False),
            "renamed": lambda: given(renamed, False),
            "keys": keys,
            "some": some,
            "beside": beside,
            "kept": lambda: reshard(a, here.b) is not None and not a.is_deleted(),
            "no alias": lambda: apart(here.a) and apart(renamed) and apart(here.b),
        }
    )


def transforms(here: Ends) -> Any:
    """Forward and reverse mode, twice, in both orders, batched and recomputed; outside jit, inside, across jit, far."""
    near, far = here.sharding("y"), here.sharding("w", mesh=here.pair())
    found = {"near": _transforms(here, here.b, near), "far": _transforms(here, here.far, far)}
    return {f"{name}, {k}": text for name, wrong in found.items() for k, text in wrong.items()}


def _transforms(here: Ends, end: Any, short: Any) -> dict[str, str]:
    """Of moves of a matrix to one sharding and of its rows to another."""
    import jax

    from shardplan.interop.jax import reshard

    a, v = here.put(here.a, X), here.put(here.a, V)
    move = lambda z: reshard(z, end)  # noqa: E731
    cube = lambda z: (reshard(z, end) ** 3).sum()  # noqa: E731
    row = lambda z: reshard(z, short)  # noqa: E731
    line = jax.device_put(X[0], here.sharding("x"))
    return each(
        {
            "jvp": lambda: close(jax.jvp(move, (a,), (v,)), (X, V)),
            "linearize": lambda: close(jax.linearize(move, a)[1](v), V),
            "forward over reverse": lambda: close(jax.jvp(jax.grad(cube), (a,), (v,))[1], 6 * X * V),
            "reverse over reverse": lambda: close(
                jax.grad(lambda z: (jax.grad(cube)(z) * v).sum())(a), 6 * X * V
            ),
            "reverse over forward": lambda: close(
                jax.grad(lambda z: jax.jvp(cube, (z,), (v,))[1])(a), 6 * X * V
            ),
            "linearize grad": lambda: close(jax.linearize(jax.grad(cube), a)[1](v), 6 * X * V),
            "checkpoint": lambda: close(jax.grad(jax.checkpoint(cube))(a), 3 * X**2),
            "gradient lies": lambda: differs(jax.grad(cube)(a), here.a, 3 * X**2, exact=False),
            "vmap": lambda: close(jax.vmap(row)(a), X),
            "vmap 1": lambda: close(jax.vmap(row, in_axes=1, out_axes=1)(a), X),
            "vmap grad": lambda: close(jax.vmap(jax.grad(lambda z: (row(z) ** 3).sum()))(a), 3 * X**2),
            "jacfwd": lambda: close(jax.jacfwd(row)(line), np.eye(8)),
            "jacrev": lambda: close(jax.jacrev(row)(line), np.eye(8)),
            "hessian": lambda: close(jax.hessian(lambda z: (row(z) ** 3).sum())(line), np.diag(6 * X[0])),
        }
    )  # fmt: skip


def transforms_inside(here: Ends) -> Any:
    import jax

    from shardplan.interop.jax import reshard

    a, v = here.put(here.a, X), here.put(here.a, V)
    move = lambda z: reshard(z, here.b, source=here.a)  # noqa: E731
    cube = lambda z: (move(z) ** 3).sum()  # noqa: E731
    row = lambda z: reshard(z, here.sharding("y"), source=here.sharding("x"))  # noqa: E731
    over = lambda z: reshard(z, here.sharding("y"), source=here.sharding())  # noqa: E731
    there = lambda c: (reshard(move(c), here.a, source=here.b), None)  # noqa: E731
    looped = lambda p: (jax.lax.scan(lambda c, _: there(c), p, None, length=3)[0] ** 2).sum()  # noqa: E731
    jit = jax.jit
    wrong = each(
        {
            "jvp": lambda: close(jit(lambda p, q: jax.jvp(move, (p,), (q,)))(a, v), (X, V)),
            "linearize": lambda: close(jit(lambda p, q: jax.linearize(move, p)[1](q))(a, v), V),
            "hvp": lambda: close(jit(lambda p, q: jax.jvp(jax.grad(cube), (p,), (q,))[1])(a, v), 6 * X * V),
            "twice": lambda: close(
                jit(lambda p, q: jax.grad(lambda z: (jax.grad(cube)(z) * q).sum())(p))(a, v), 6 * X * V
            ),
            "grad of jit": lambda: close(jax.grad(jit(cube))(a), 3 * X**2),
            "jvp of jit": lambda: close(jax.jvp(jit(move), (a,), (v,)), (X, V)),
            "linearize jit": lambda: close(jax.linearize(jit(move), a)[1](v), V),
            "vmap of jit": lambda: close(jax.vmap(jit(row))(a), X),
            "jit of vmap": lambda: close(jit(jax.vmap(row))(a), X),
            "vmap over an axis": lambda: close(jit(jax.vmap(over, spmd_axis_name="x"))(a), X),
            "checkpoint": lambda: close(jit(jax.grad(jax.checkpoint(cube)))(a), 3 * X**2),
            "scan": lambda: close(jit(jax.grad(looped))(a), 2 * X),
            "cond": lambda: close(jit(lambda p: jax.lax.cond(p[0, 0] < 1, move, lambda c: c, p))(a), X),
            "no source": lambda: "pass source=" in told(lambda: jit(lambda z: reshard(z, here.b))(a)),
        }
    )  # fmt: skip
    one, two = (here.sharding(*s, mesh=here.explicit) for s in (("x", "y"), ("y", "x")))
    held, tangent = here.put(one, X), here.put(one, V)
    cube_of = lambda z: (reshard(z, two) ** 3).sum()  # noqa: E731
    whole = lambda z: reshard(z, here.sharding(None, mesh=here.explicit))  # noqa: E731
    with jax.set_mesh(here.explicit):
        found = each(
            {
                "hvp": lambda: close(
                    jit(lambda p, q: jax.jvp(jax.grad(cube_of), (p,), (q,))[1])(held, tangent), 6 * X * V
                ),
                "hvp, outside": lambda: close(jax.jvp(jax.grad(cube_of), (held,), (tangent,))[1], 6 * X * V),
                "vmap": lambda: close(jit(jax.vmap(whole))(held), X),
                "vmap, outside": lambda: close(jax.vmap(whole)(held), X),
            }
        )  # fmt: skip
    return wrong | {f"explicit, {k}": text for k, text in found.items()}


def kinds(here: Ends) -> Any:
    """Dtypes that a plan has no name for, bit for bit: on one mesh, to another, inside jit, donated and limited."""
    import jax
    import jax.numpy as jnp

    from shardplan.interop.jax import reshard

    wrong: dict[str, str] = {}
    rng = np.random.default_rng(1)

    def note(name: str, x: Any, read: Callable[[Any], np.ndarray]) -> None:
        want = read(x)
        found = each(
            {
                "near": lambda: np.array_equal(read(reshard(x, here.b)), want),
                "far": lambda: np.array_equal(read(reshard(x, here.far)), want),
                "inside": lambda: np.array_equal(
                    read(jax.jit(lambda z: reshard(z, here.b, source=here.a))(x)), want
                ),
                "tree": lambda: np.array_equal(read(reshard([x, x], [here.b, here.far], memory_limit=9999)[1]), want),
                "dtype": lambda: reshard(x, here.b).dtype == x.dtype,
            }
        )  # fmt: skip
        wrong.update({f"{name}, {k}": text for k, text in found.items()})

    names = ("int4", "uint4", "int2", "float4_e2m1fn", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e4m3fn",
             "float8_e3m4", "bool", "complex64")  # fmt: skip
    for name in names:
        dtype = jnp.dtype(name)
        raw = np.arange(64).reshape(8, 8) % 2 if name == "bool" else rng.integers(-8, 8, (8, 8))
        x = jax.device_put(jnp.asarray(raw).astype(dtype), here.a)
        note(name, x, lambda y: np.asarray(y).view(np.uint8))
    keys = jax.device_put(jax.random.split(jax.random.key(0), (8, 8)), here.a)
    note("keys", keys, lambda y: np.asarray(jax.random.key_data(y)))
    if reshard(keys, here.b).sharding != here.b:
        wrong["the sharding of keys"] = str(reshard(keys, here.b).sharding)
    return wrong


def small(here: Ends) -> Any:
    """As shipped, a small array goes by device_put where no limit is said; ends are checked as for any other."""
    from shardplan.interop.jax import eager_move, reshard

    def elsewhere() -> bool:
        """No small array goes by device_put where the devices of an end are another process's."""
        source, known = here.sharding("x"), eager_move._is_local_cpu
        planned: list[bool] = []
        for away in ((), (source,), (here.b,)):
            eager_move._is_local_cpu = lambda end, away=away: end not in away
            planned.append(eager_move._planned_way((8, 8), np.dtype("f4"), source, here.b, None, False) is not None)
        eager_move._is_local_cpu = known
        return planned == [False, True, True]

    def large() -> bool:
        """Which moves of a larger array have a plan: in which a device copies once what it gets."""
        whole, rows, columns = here.sharding(), here.sharding("x"), here.sharding(None, "x")
        explicit = here.sharding(mesh=here.explicit)
        moves = ((rows, here.a), (rows, whole), (rows, columns), (here.a, here.far), (explicit, rows))
        ways = [eager_move._planned_way((256, 256), np.dtype("f4"), *ends, None, False) for ends in moves]
        return [way is not None for way in ways] == [True, False, False, False, False]

    before = len(eager_move.EXECUTABLES.keys())
    eager_move.LEAVES_TO_HOST = True
    eager_move._choose_way.cache_clear()
    try:
        return each(
            {
                "moved": lambda: differs(reshard(here.put(here.sharding("x")), here.b), here.b),
                "far": lambda: differs(reshard(here.put(here.sharding("x")), here.far), here.far),
                "elsewhere": elsewhere,
                "large": large,
                "nothing compiled": lambda: len(eager_move.EXECUTABLES.keys()) == before,
                "limit": lambda: (
                    differs(reshard(here.put(here.sharding("x")), here.b, memory_limit=10**6), here.b)
                    or len(eager_move.EXECUTABLES.keys()) == before + 1
                ),
            }
        )
    finally:
        eager_move.LEAVES_TO_HOST = False
        eager_move._choose_way.cache_clear()


def executables(here: Ends) -> Any:
    """Over 132 shapes twice: the second pass compiles nothing; with room for three, the oldest go."""
    import jax

    from shardplan.interop.jax import eager_move, reshard

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    end = here.sharding("x")

    def cycle(widths: range) -> int:
        before = len(compiled)
        for n in widths:
            reshard(jax.make_array_from_callback((8, n + 1), here.sharding(), lambda i, n=n: np.zeros((8, n + 1))[i]),
                    end)  # fmt: skip
        return len(compiled) - before

    first, second = cycle(range(132)), cycle(range(132))
    store = eager_move.EXECUTABLES
    bytes_of_all = store.bytes
    cycle(range(132, 138))
    store.most_bytes = 7 * (store.bytes - bytes_of_all) // 12  # three and a half of these
    third = cycle(range(140, 146))
    left = len(store.keys()), store.bytes <= store.most_bytes
    third += cycle(range(140, 146))
    return {"first": first, "second": second, "third": third, "left": left, "bytes": bytes_of_all}


BITS = {  # of an element: its bytes, and how many bits of each are random
    "float32": (4, 8), "int32": (4, 8), "uint8": (1, 8), "bool": (1, 1), "complex64": (8, 8), "float16": (2, 8),
    "bfloat16": (2, 8), "int16": (2, 8), "uint4": (1, 4), "int4": (1, 4), "float4_e2m1fn": (1, 4),
    "float8_e4m3fn": (1, 8), "float8_e5m2": (1, 8), "float8_e8m0fnu": (1, 8),
}  # fmt: skip


def apart(got: Any, put: Any, x: Any) -> str | None:
    """How a moved array differs: from device_put's in sharding, dtype and shape, from what `x` held in its bits.

    device_put is no oracle of bits: between lists of devices it may make a signalling NaN of bfloat16 a quiet one.
    """
    import jax

    if (got.sharding, got.dtype, got.shape) != (put.sharding, put.dtype, put.shape):
        return f"{got.dtype}{got.shape} on {got.sharding}, not {put.dtype}{put.shape} on {put.sharding}"
    if jax.numpy.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, x = jax.random.key_data(got), jax.random.key_data(x)
    held = np.asarray(x)
    shards = got.addressable_shards
    return next((f"other bits at {s.index}" for s in shards if np.asarray(s.data).tobytes() != held[s.index].tobytes()),
                None)  # fmt: skip


def hunt(here: Ends) -> Any:
    """Random arrays, dtypes, meshes and specs against device_put: what was held, on the same devices."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    from shardplan.interop.jax import reshard

    rng = random.Random(int(os.environ.get("HUNT_SEED", "7")))
    devices = np.array(jax.devices())

    def mesh() -> Any:
        sizes = rng.choice(
            [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (3, 2), (4,), (2, 2), (1, 4), (6,), (1,), (2, 1, 4)]
        )
        chosen = list(devices) if rng.random() < 0.5 else rng.sample(list(devices), len(devices))
        kind = rng.choice([AxisType.Auto, AxisType.Auto, AxisType.Explicit])
        grid = np.array(chosen[: int(np.prod(sizes))]).reshape(sizes)
        names = rng.sample(["p", "q", "r", "s"], len(sizes))
        return Mesh(grid, names, axis_types=(kind,) * len(sizes))

    def end(shape: tuple[int, ...], m: Any) -> Any:
        if rng.random() < 0.05:
            return SingleDeviceSharding(rng.choice(list(devices)))
        spec: list[list[str]] = [[] for _ in shape]
        for axis in rng.sample(list(m.axis_names), len(m.axis_names)):
            k = rng.randrange(-1, len(shape)) if shape else -1
            if k >= 0 and shape[k] % int(np.prod([m.shape[a] for a in [*spec[k], axis]])) == 0:
                spec[k].append(axis)
        parts = [None if not s else s[0] if len(s) == 1 and rng.random() < 0.5 else tuple(s) for s in spec]
        while parts and parts[-1] is None and rng.random() < 0.5:
            parts.pop()
        return NamedSharding(m, PartitionSpec(*parts))

    def put(trial: int, source: Callable[[tuple[int, ...]], Any]) -> tuple[str, Any]:
        """An array of random bits on its devices, with its dtype in words."""
        shape = tuple(rng.choice([1, 2, 4, 6, 8, 12, 24]) for _ in range(rng.randrange(4)))
        name = rng.choice([*BITS, "key"])
        if name == "key":
            return f"{name}{shape}", jax.device_put(jax.random.split(jax.random.key(trial), shape), source(shape))
        width, bits = BITS[name]
        raw = np.random.default_rng(trial).integers(0, 2**bits, (*shape, width), dtype=np.uint8)
        array = raw.view(jax.numpy.dtype(name)).reshape(shape)
        return f"{name}{shape}", jax.device_put(array, source(shape))

    wrong: list[str] = []
    for trial in range(int(os.environ.get("HUNT", HUNT))):
        m = mesh()
        text, x = put(trial, lambda shape, m=m: end(shape, m))
        target = end(x.shape, m if rng.random() < 0.6 else mesh())
        limit = rng.choice([None, None, 10**6])
        told_ = f"{trial}: {text} {x.sharding} -> {target} limit {limit}"
        try:
            found = apart(reshard(x, target, memory_limit=limit), jax.device_put(x, target), x)
        except Exception:
            found = traceback.format_exc()[-700:]
        if found:
            wrong.append(f"{told_}: {found}")
    return wrong


def sums_by_a_plan(here: Ends) -> Any:
    """Gradients of each member summed by the steps of a reduction plan, and by nothing else; losses as with a mean."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, PartitionSpec

    import shardplan as sp
    from shardplan.interop.jax import sum_by

    nodes = sp.Topology.load("gcp-v100x8", nodes=2).resize(gpu=4)
    plan = sp.reduce(sp.Placement(sp.Mesh(data=8), nodes, ((2, 4),)), "data", 2**26, algorithm="ring")
    total = sum_by(plan)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 6, 5), (8, 6, 3)))
    first = {"w": jnp.ones((5, 3)), "b": jnp.zeros(3)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ p["w"] + p["b"] - y) ** 2)

    def trained(sums: Callable[[Any], Any]) -> Any:
        p, losses = first, []
        step = jax.jit(lambda p: sums(jax.vmap(jax.grad(loss), (None, 0, 0))(p, x, y)))
        for _ in range(3):
            p = jax.tree.map(lambda a, g: a - 0.1 * g / 8, p, step(p))
            losses.append(loss(p, x[0], y[0]))
        return losses

    def calls() -> str | None:
        mesh = Mesh(np.array(jax.devices()), ("d",), axis_types=(AxisType.Auto,))
        addends = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("d")))
        text = jax.jit(total).lower(addends).compile().as_text()
        kinds = [k for k in ("reduce-scatter", "all-reduce", "all-gather", "collective-permute") if f" {k}(" in text]
        said = [s.op.name.replace("_", "-") for s in plan.program.steps]
        return None if kinds == said == ["reduce-scatter", "all-reduce", "all-gather"] else f"{kinds} {said}"

    def refused(call: Callable[[], Any], text: str) -> str | None:
        try:
            call()
        except sp.ShardplanError as error:
            return None if text in str(error) else str(error)
        return "nothing was raised"

    explicit = jax.device_put(x, jax.NamedSharding(jax.make_mesh((8,), ("d",)), PartitionSpec("d")))
    return each({
        "losses": lambda: close(trained(total), trained(lambda g: jax.tree.map(lambda a: a.sum(0), g))),
        "calls": calls,
        "members": lambda: refused(lambda: total(x[:4]), "legal is one of 8 addends, [8, ...]"),
        "explicit": lambda: refused(lambda: jax.jit(total)(explicit), "legal is a mesh of Auto axes"),
    })  # fmt: skip


CHECKS: tuple[Callable[[Ends], Any], ...] = (
    like_device_put, limits, chained, donation, transforms, transforms_inside, kinds, small, hunt, executables,
    sums_by_a_plan,
)  # fmt: skip


def make() -> tuple[Ends]:
    from shardplan.interop.jax import eager_move

    eager_move.LEAVES_TO_HOST = False  # what is checked are plans
    return (Ends(),)


if __name__ == "__main__":
    main(CHECKS, make)
