"""The checks of `test_jax_random.py`: `reshard` under random stacks of JAX's transformations, on random kinds of
arguments and meshes, beside JAX's own constraint in the same place; JSON out.

Every function here keeps the shape, and begins and ends in one sharding, so that transformations nest in any order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from execution.jax_child import main
from shardplan.errors import ShardplanError

PARTS, CASES = 4, 50  # that many in each, of those that JAX itself runs
DRAWS = 4 * CASES  # of a part, at most: JAX runs five of six
KNOWN = (  # each once went wrong
    {"is": "a gradient whose type no operation has seen", "kind": "EE", "given": "numpy", "stack": ["vjp"]},
    {"is": "a numpy gradient, outside jit", "kind": "AA", "given": "numpy", "outer": "none", "stack": ["vjp"]},
    {"is": "an end that a type alone says", "kind": "EE", "given": "uncommitted", "outer": "none",
     "stack": ["grad", "checkpoint that saves"]},
    {"is": "a gradient where the type denies the source", "kind": "AE", "given": "numpy", "said": True,
     "stack": ["grad", "checkpoint that saves"]},
)  # fmt: skip
SHAPE = (16, 24)
Move = Callable[[Any, Any, Any], Any]  # an array, where to, where from
Function = Callable[[Any], Any]


class Here:
    """Meshes of 4 x 2 devices by the kinds of their axes, and JAX's transformations by name."""

    def __init__(self) -> None:
        import jax

        self.jax, self.array = jax, np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
        kinds = {"A": jax.sharding.AxisType.Auto, "E": jax.sharding.AxisType.Explicit}
        self.meshes = {
            name: jax.make_mesh((4, 2), ("a", "b"), axis_types=tuple(kinds[k] for k in name))
            for name in ("AA", "EE", "EA", "AE")
        }
        lax, stack, keep = jax.lax, jax.numpy.stack, jax.checkpoint_policies.everything_saveable
        two = lambda x, at=0: stack([x, x + 1], axis=at)  # noqa: E731
        self.transforms: dict[str, Callable[[Function], Function]] = {
            "jit": jax.jit,
            "inlined jit": lambda f: jax.jit(f, inline=True),
            "checkpoint": jax.checkpoint,
            "checkpoint that saves": lambda f: jax.checkpoint(f, policy=keep),
            "grad": lambda f: jax.grad(lambda x: (f(x) * self.array).sum()),
            "value and grad": lambda f: lambda x: jax.value_and_grad(lambda z: (f(z) ** 2).sum())(x)[1],
            "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
            "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
            "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
            "vmap": lambda f: lambda x: jax.vmap(f)(two(x)).sum(0),
            "vmap of dim 1": lambda f: lambda x: jax.vmap(f, in_axes=1)(two(x, 1)).sum(0),
            "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
            "scan of rows": lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), 0.0, two(x))[1][1],
            "map": lambda f: lambda x: lax.map(f, two(x))[0],
            "cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda z: f(z) * 2, x),
            "loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, c: f(c), x),
            "while": lambda f: lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
        }

    def end(self, kind: str, *spec: Any) -> Any:
        return self.jax.sharding.NamedSharding(self.meshes[kind], self.jax.sharding.PartitionSpec(*spec))


SPECS = [("a", "b"), ("b", "a"), (("a", "b"),), (("b", "a"),), (None, ("a", "b")), ("a",), (None, "b"), ()]
LOCAL = [("b",), (None, "b"), ()]  # inside a `shard_map` over a
EAGER = {"grad", "value and grad", "jvp", "vjp", "vmap", "vmap of dim 1"}  # outside `jit` these see the array itself
ARGUMENTS = ["numpy", "uncommitted", "committed", "elsewhere", "replicated", "one device", "shape", "placed shape",
             "key", "captured"]  # fmt: skip
PLACED = ["committed", "placed shape", "captured"]  # that lie where `source=` says


def argument(here: Here, kind: str, source: Any, elsewhere: Any) -> Any:
    """An array, or what stands for it."""
    jax = here.jax
    return {
        "numpy": lambda: here.array,
        "uncommitted": lambda: jax.numpy.asarray(here.array),
        "committed": lambda: jax.device_put(here.array, source),
        "captured": lambda: jax.device_put(here.array, source),
        "elsewhere": lambda: jax.device_put(here.array, elsewhere),
        "replicated": lambda: jax.device_put(here.array, source.update(spec=jax.sharding.PartitionSpec())),
        "one device": lambda: jax.device_put(here.array, jax.devices()[3]),
        "shape": lambda: jax.ShapeDtypeStruct(SHAPE, np.float32),
        "placed shape": lambda: jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=source),
        "key": lambda: jax.random.key(5),
    }[kind]()


class Case:
    """One drawn case, which runs with our move or with JAX's."""

    def __init__(self, here: Here, seed: int, **known: Any) -> None:
        rng = random.Random(seed)
        self.here, self.seed = here, seed
        self.kind = rng.choice(["AA", "AA", "AA", "EE", "EE", "EA", "AE"])
        self.manual = rng.random() < 0.15
        mixed = self.kind in ("EA", "AE")
        self.given = rng.choice(PLACED if mixed and rng.random() < 0.8 else ARGUMENTS)
        self.said = rng.random() < {"AA": 0.8, "EE": 0.5}.get(self.kind, 1)
        self.is_set = self.kind != "AA" or rng.random() < 0.3
        specs = LOCAL if self.manual else [s for s in SPECS if (s, self.kind) != ((("b", "a"),), "EA")
                                           and (s, self.kind) != ((("a", "b"),), "AE")
                                           and (s, self.kind) != ((None, ("a", "b")), "AE")]  # fmt: skip
        self.first, *self.others = (here.end(self.kind, *s) for s in rng.choices(specs, k=rng.choice([2, 2, 3])))
        self.last = here.end(self.kind, *rng.choice(specs))
        self.stack = rng.choices(list(here.transforms), k=rng.choice([1, 2, 2, 3]))
        self.bends = rng.random() < 0.5  # else the function is linear
        self.late = rng.random() < 0.5  # whether its first operation is a move
        self.outer = rng.choice(["jit", "jit", "jit", "none", "compiled", "out"])
        if "shape" in self.given:
            self.outer = "compiled"
        elif self.given in ("key", "captured") and self.outer == "none":
            self.outer = "jit"
        vars(self).update(known)

    def __str__(self) -> str:
        ends = " to ".join(str(e.spec) for e in (self.first, *self.others, self.first, self.last))
        flags = [n for n in ("manual", "said", "is_set", "bends", "late") if getattr(self, n)]
        return f"{self.seed}: {self.kind} {flags} {self.given}, {self.outer} of {self.stack}, {ends}"

    @property
    def legal(self) -> str:
        """What may be told in place of a result, if anything: that nobody says the source, or the type another."""
        if self.kind == "AA":
            eager = self.outer == "none" and set(self.stack) <= EAGER and not self.manual
            return "" if self.said or eager else "pass source="
        return "source= says" if self.kind != "EE" and self.given not in PLACED else ""

    def run(self, move: Move) -> Any:
        here, jax = self.here, self.here.jax

        def base(x: Any) -> Any:
            at = self.first
            for end in (*self.others, self.first):
                y = jax.numpy.sin(x) if self.bends else x * 2
                x, at = move(x if self.late else y, end, at if self.said else None), end
                x = x * 2 if self.late else x
            return x

        f: Function = base
        for name in self.stack:
            f = here.transforms[name](f)
        inner = f

        def whole(x: Any) -> Any:
            if self.given == "captured":
                x = held * x
            if self.given == "key":
                x = jax.random.normal(x, SHAPE)
            return move(inner(x), self.last, self.first if self.said else None)

        mesh = here.meshes[self.kind]
        with jax.set_mesh(mesh) if self.is_set else nullcontext():
            given = argument(here, self.given, self.first, self.last)
            if self.given == "captured":
                held, given = given, 2.0
            call: Function = whole
            if self.manual:
                rows = jax.sharding.PartitionSpec("a")
                ends = jax.sharding.PartitionSpec() if self.given in ("key", "captured") else rows
                call = jax.shard_map(whole, mesh=mesh, in_specs=ends, out_specs=rows, axis_names={"a"})
            if self.outer == "none":
                return call(given)
            if self.outer == "out":
                return jax.jit(call, out_shardings=self.last)(given)
            if self.outer == "jit":
                return jax.jit(call)(given)
            value = argument(here, "committed", self.first, None) if self.given == "placed shape" else here.array
            return jax.jit(call).lower(given).compile()(value if "shape" in self.given else given)


def constrain(x: Any, end: Any, source: Any) -> Any:
    """JAX's own move: of types over Explicit axes, and a constraint over Auto ones."""
    import jax

    from shardplan.interop.jax.traced_move import part_of

    mesh = jax.typeof(x).sharding.mesh
    mesh = mesh if not mesh.empty else end.mesh
    if mesh.explicit_axes:
        x = jax.sharding.reshard(x, part_of(end.spec, mesh.explicit_axes))
    if not mesh.auto_axes:
        return x
    if mesh.explicit_axes or mesh.manual_axes:
        end = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), part_of(end.spec, mesh.auto_axes))
    return jax.lax.with_sharding_constraint(x, end)


def outcome(case: Case, move: Move) -> tuple[str, Any]:
    try:
        found = case.run(move)
        return "right", (np.asarray(found), found.sharding)
    except ShardplanError as error:
        return "told", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "raw", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def known(here: Here) -> Any:
    """Those that once went wrong."""
    plain = {"manual": False, "said": False, "is_set": True, "bends": False, "late": False, "outer": "jit"}

    def ends(kind: str) -> dict[str, Any]:
        first, other = here.end(kind, "a", "b"), here.end(kind, "b", "a")
        return {"first": first, "others": [other], "last": first}

    return compared((Case(here, 0, **plain | ends(case["kind"]) | case) for case in KNOWN), len(KNOWN))


def part(k: int) -> Callable[[Here], Any]:
    """Those that are drawn anew, a part of them."""

    def cases(here: Here) -> Any:
        return compared((Case(here, k + PARTS * number) for number in range(DRAWS)), CASES)

    cases.__name__ = f"part_{k}"
    return cases


def compared(drawn: Iterable[Case], enough: int) -> dict[str, Any]:
    """What went wrong, by case; how many agreed; what we refused, and what JAX refuses itself.

    Cases are drawn until JAX's own move has run in `enough` of them.
    """
    from shardplan.interop.jax import reshard

    wrong: dict[str, str] = {}
    seen, told, refused = Counter[str](), Counter[str](), Counter[str]()
    for case in drawn:
        theirs, want = outcome(case, constrain)
        ours, got = outcome(case, reshard)
        seen[f"{theirs} {ours}"] += 1
        if theirs == "raw":
            refused[want[:120]] += 1
        if ours == "told":
            told[got[:150]] += 1
            if theirs == "right" and not (case.legal and case.legal in got):
                wrong[str(case)] = got
        elif ours == "raw":
            if theirs != "raw" or want[:40] != got[:40]:
                wrong[str(case)] = f"{got}, theirs {want if theirs == 'raw' else theirs}"
        elif theirs == "right":
            if not np.allclose(want[0], got[0], rtol=1e-5, atol=1e-5 * np.abs(want[0]).max()):
                wrong[str(case)] = "other values"
            elif not any(got[1].is_equivalent_to(end, len(SHAPE)) for end in (want[1], case.last)):
                wrong[str(case)] = f"at {got[1]}, theirs at {want[1]}"
        if sum(n for words, n in seen.items() if words.startswith("right")) >= enough:
            break
    return {"wrong": wrong, "seen": seen, "told": told, "refused": refused}


if __name__ == "__main__":
    main((known, *map(part, range(PARTS))), lambda: (Here(),))
