"""An example of every compute op, and every assignment of a mesh's axes to its operands: what the laws run over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.expression_tree import FUNCTIONS
from shardplan.core.factor_rule import FactorRule
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.namespace import Namespace
from shardplan.core.ops import (
    Cast,
    Concat,
    Constant,
    Crop,
    Einsum,
    Elementwise,
    Expand,
    Gather,
    Iota,
    OneHot,
    Pad,
    Pin,
    Quantize,
    ReduceDims,
    Reshape,
    ScaledEinsum,
    ScatterAdd,
    TargetCount,
    Write,
)
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.compute import At, Compute, RuleTypedOp, Size
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError

MESH = Mesh(x=2, y=3)
UNEQUAL = {"i": 7, "j": 4, "k": 5, "a": 4, "b": 6, "m": 24, "o": 1, "p": 4}
EVEN = {"i": 12, "j": 6, "k": 18, "a": 6, "b": 6, "m": 36, "o": 1, "p": 8}
Sizes = dict[str, int]


@dataclass(frozen=True)
class Example:
    """An op on operands (dtype and letters of the dims), what numpy makes of the whole, and how much is legal.

    `legal` counts the assignments that type, on the sizes of `UNEQUAL`. The op is made of the sizes; where it has no
    operands, also of a layout of the result, whose dims are `letters`.
    """

    make: Callable[[Sizes, Layout], Compute]
    operands: tuple[str, ...]
    whole: Callable[..., np.ndarray]  # of the sizes and the operands
    legal: int
    letters: str = ""

    def arrays(self, sizes: Sizes, rng: np.random.Generator) -> list[np.ndarray]:
        """Small integers, in any dtype; some ids are out of range."""
        out: list[np.ndarray] = []
        for dtype, letters in ((text + " ").split(" ")[:2] for text in self.operands):
            shape = [sizes[c] for c in letters]
            values = rng.integers(-3, 14, shape) if dtype != "bool" else rng.integers(0, 2, shape)
            out.append(values.astype(numpy_dtype(dtype)))
        return out

    def assigned(self, sizes: Sizes) -> Iterator[tuple[Compute, tuple[TensorType, ...]]]:
        """Every op and operand types, legal or not, but those of which an operand alone is no type."""
        whole = Layout(())
        if not self.operands:
            for layout in layouts(len(self.letters)):
                yield self.make(sizes, layout), ()
            return
        each: list[list[TensorType]] = []
        for dtype, letters in map(str.split, self.operands):
            each.append([])
            for layout in layouts(len(letters)):
                with suppress(LayoutError):
                    each[-1].append(TensorType(dtype, [sizes[c] for c in letters], layout, MESH))
        op = self.make(sizes, whole)
        yield from ((op, types) for types in itertools.product(*each))

    def legal_ones(self, sizes: Sizes) -> Iterator[tuple[Compute, tuple[TensorType, ...]]]:
        """Those that type; what does not is refused by an error of ours, and by no other."""
        yield from _legal_ones(self, tuple(sizes.items()))


@cache
def _legal_ones(
    example: Example, sizes: tuple[tuple[str, int], ...]
) -> tuple[tuple[Compute, tuple[TensorType, ...]], ...]:
    """Found once for all laws that ask: they are few among those that are tried."""
    found: list[tuple[Compute, tuple[TensorType, ...]]] = []
    for op, types in example.assigned(dict(sizes)):
        with suppress(LayoutError, TypingError):
            op.infer(*types)
            found.append((op, types))
    return tuple(found)


class DistinctIds(Example):
    """The last operand are ids, each once."""

    def arrays(self, sizes: Sizes, rng: np.random.Generator) -> list[np.ndarray]:
        """Some of them below 0, or with no place."""
        *others, ids = super().arrays(sizes, rng)
        return [*others, (rng.permutation(ids.size + 9)[: ids.size] - 4).astype(ids.dtype)]


class SomeIgnored(Example):
    """Of its targets some are -100, and some -99."""

    def arrays(self, sizes: Sizes, rng: np.random.Generator) -> list[np.ndarray]:
        """Those that would be below 2, and 5."""
        return [np.where(x < 2, -100, np.where(x < 5, -99, x)).astype(x.dtype) for x in super().arrays(sizes, rng)]


class Negated(Example):
    """Most of its numbers are below 0."""

    def arrays(self, sizes: Sizes, rng: np.random.Generator) -> list[np.ndarray]:
        """Those of others, less than nothing."""
        return [-x for x in super().arrays(sizes, rng)]


class Lettered(Example):
    """An op whose operands have many dims: axes are assigned to letters, which carry them in every operand."""

    def assigned(self, sizes: Sizes) -> Iterator[tuple[Compute, tuple[TensorType, ...]]]:
        """Every letter, no letter, or partial in one or all of the floats, for x and for y."""
        given = [(*text.split(), "")[:2] for text in self.operands]
        floats = [k for k, (dtype, _) in enumerate(given) if dtype[0] == "f"]
        letters = dict.fromkeys(c for _, names in given for c in names)
        partial: list[Any] = [{k} for k in floats] + ([set(floats)] if len(floats) > 1 else [])
        for x, y in itertools.product([*letters, "", *partial], repeat=2):
            for order in ("xy", "yx") if x == y and isinstance(x, str) and x else ("xy",):
                at = {"x": x, "y": y}
                yield (
                    self.make(sizes, Layout(())),
                    tuple(
                        TensorType(
                            dtype,
                            [sizes[c] for c in names],
                            [tuple(a for a in order if at[a] == c) for c in names],
                            MESH,
                            {a: "sum" for a in order if isinstance(at[a], set) and k in at[a]},
                        )
                        for k, (dtype, names) in enumerate(given)
                    ),
                )


class Scaled(Lettered):
    """The last half are largest values: those whose scales are powers of two in e4m3, and 0 and -1, which are none."""

    def arrays(self, sizes: Sizes, rng: np.random.Generator) -> list[np.ndarray]:
        """7 over 448 is 2 ** -6."""
        found = super().arrays(sizes, rng)
        places = [k for k in range(len(found)) if k >= len(found) // 2]
        for k in places:
            found[k] = np.where(found[k] < 0, found[k] // 3, 7 * 2.0 ** (found[k] % 4)).astype(found[k].dtype)
        return found


def _scale(most: np.ndarray, largest: float = 448.0) -> np.ndarray:
    return np.where(most > 0, most.astype(np.float32), np.float32(largest)) / np.float32(largest)


def _quantized(x: np.ndarray, most: np.ndarray) -> np.ndarray:
    return np.clip(x.astype(np.float32) * (1 / _scale(most))[:, None], -448, 448).astype(numpy_dtype("f8e4m3"))


def layouts(ndim: int) -> list[Layout]:
    """Every layout of x and y: each unused, on a dim (both in either order), partial, or root."""
    out: list[Layout] = []
    for x, y in itertools.product((*range(ndim), "none", "sum", "max", "root"), repeat=2):
        if {x, y} == {"sum", "max"}:
            continue
        at = {"x": x, "y": y}
        partial, root = (tuple(a for a in at if at[a] in kinds) for kinds in (("sum", "max"), ("root",)))
        reduction = next((str(at[a]) for a in partial), None)
        for order in (("x", "y"), ("y", "x")) if x == y and isinstance(x, int) else (("x", "y"),):
            dims = tuple(tuple(a for a in order if at[a] == d) for d in range(ndim))
            out.append(Layout(dims, partial, reduction, root))
    return out


def _rows(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    mine = (ids >= 0) & (ids < len(table))
    return np.where(mine.reshape(*ids.shape, *(1,) * (table.ndim - 1)), table[np.where(mine, ids, 0)], 0)


def _sums(rows: int, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    hot = ids.reshape(-1)[:, None] == np.arange(rows)
    return np.einsum("nv,n...->v...", hot.astype(values.dtype), values.reshape(ids.size, *values.shape[ids.ndim :]))


def _written(target: np.ndarray, values: np.ndarray, ids: np.ndarray, dim: int) -> np.ndarray:
    """Place by place; some ids have none."""
    found = target.copy().swapaxes(0, dim)
    for value, place in zip(values.swapaxes(0, dim), ids, strict=True):
        if 0 <= place < len(found):
            found[place] = value
    return found.swapaxes(0, dim)


def plain(op: Compute, operands: tuple[str, ...], whole: Callable[..., Any], legal: int) -> Example:
    """An example of an op that no size changes."""
    return Example(lambda s, layout: op, operands, lambda s, *x: np.asarray(whole(*x)), legal)


EXAMPLES = (
    plain(Einsum("ik,kj->ij"), ("f64 ik", "f64 kj"), lambda a, b: a @ b, 52),
    plain(Einsum("ij,ij->"), ("i64 ij", "i64 ij"), lambda a, b: (a * b).sum(), 38),
    plain(Einsum("ij->ji"), ("bf16 ij",), lambda a: a.T, 36),
    plain(Elementwise("a - 2 * b"), ("f64 ij", "f64 j"), lambda a, b: a - 2 * b, 36),
    plain(Elementwise("maximum(a, b)"), ("i32 ij", "i32 ij"), np.maximum, 51),
    plain(
        Elementwise("where(b, relu(a) + -2, 0 * a)"),
        ("f32 i", "bool i"),
        lambda a, b: np.where(b, np.maximum(a, 0) - 2, 0 * a),
        10,
    ),
    SomeIgnored(
        lambda s, layout: TargetCount("f32"), ("i32 ij",), lambda s, x: np.asarray((x != -100).sum(), "f4"), 18
    ),
    plain(ReduceDims((0,)), ("i16 ij",), lambda a: a.sum(axis=0, dtype=a.dtype), 27),
    plain(ReduceDims((1,), "mean", keep=True), ("f64 ip",), lambda a: a.sum(axis=1, keepdims=True) / a.shape[1], 27),
    plain(ReduceDims((0, 1), "max"), ("f32 ij",), lambda a: a.max(), 27),
    Negated(lambda s, layout: ReduceDims((0,), "absmax"), ("bf16 ij",), lambda s, a: np.abs(a).max(0), 18),
    Scaled(lambda s, layout: Quantize("f8e4m3", (0,)), ("bf16 ij", "bf16 i"), lambda s, *x: _quantized(*x), 11),
    Scaled(
        lambda s, layout: ScaledEinsum("jik,jka,j,j->jai", "f64"),
        ("f8e4m3 jik", "f8e4m3 jka", "f32 j", "f32 j"),
        lambda s, a, b, m, n: np.einsum("jik,jka,j,j->jai", *(x.astype("f8") for x in (a, b, _scale(m), _scale(n)))),
        29,
    ),
    Example(
        lambda s, layout: Reshape(f"(a={s['a']} b) j -> a b j"),
        ("f64 mj",),
        lambda s, a: a.reshape(s["a"], s["b"], s["j"]),
        29,
    ),
    plain(Reshape("a b j -> (a b) j"), ("i64 abj",), lambda a: a.reshape(-1, a.shape[2]), 29),
    plain(Reshape("one=1 i -> i other=1"), ("f32 oi",), lambda a: a.reshape(-1, 1), 24),
    Example(
        lambda s, layout: Expand(f"o=1 j -> k={s['k']} j i={s['i']}", Layout((("x",),))),
        ("f64 oj",),
        lambda s, a: np.broadcast_to(a.reshape(1, s["j"], 1), (s["k"], s["j"], s["i"])),
        5,
    ),
    Example(
        lambda s, layout: Expand(f"j -> i={s['i']} j", Layout((("y", "x"),))),
        ("i32 j",),
        lambda s, a: np.broadcast_to(a, (s["i"], s["j"])),
        1,
    ),
    Example(
        lambda s, layout: OneHot(s["k"], "f32", Layout((("x",),))),
        ("i32 ij",),
        lambda s, a: (a[..., None] == np.arange(s["k"])).astype(np.float32),
        3,
    ),
    plain(Concat(0), ("i32 ij", "i32 kj"), lambda a, b: np.concatenate([a, b]), 17),
    plain(Pad((1, 0), (2, 0)), ("f64 ij",), lambda a: np.pad(a, ((1, 2), (0, 0))), 24),
    plain(Pad((0, 0), (0, 1), 3), ("i32 ij",), lambda a: np.pad(a, ((0, 0), (0, 1)), constant_values=3), 17),
    Example(lambda s, layout: Crop((1, 0), (s["i"] - 2, s["j"])), ("i8 ij",), lambda s, a: a[1:-2], 24),
    plain(Cast("bf16"), ("f32 ij",), lambda a: a.astype(numpy_dtype("bf16")), 36),
    plain(Cast("i64"), ("f32 ij",), lambda a: a.astype(np.int64), 18),
    plain(Pin(Layout((("x",), ()))), ("f64 ij",), lambda a: a, 18),
    plain(Gather(), ("f64 ij", "i32 k"), _rows, 48),
    plain(Gather(), ("bf16 i", "i64 jk"), _rows, 48),
    Example(lambda s, layout: ScatterAdd(s["i"]), ("f64 kj", "i32 k"), lambda s, *x: _sums(s["i"], *x), 27),
    Example(
        lambda s, layout: ScatterAdd(s["i"], Layout((("x",),))),
        ("f32 jk", "i64 jk"),
        lambda s, *x: _sums(s["i"], *x),
        5,
    ),
    DistinctIds(lambda s, layout: Write(1), ("f64 ji", "f64 jk", "i32 k"), lambda s, *x: _written(*x, dim=1), 36),
    DistinctIds(lambda s, layout: Write(), ("bf16 i", "bf16 k", "i64 k"), lambda s, *x: _written(*x, dim=0), 24),
    Example(
        lambda s, layout: Iota("i32", (s["i"], s["j"]), 0, layout, MESH),
        (),
        lambda s: np.broadcast_to(np.arange(s["i"], dtype=np.int32)[:, None], (s["i"], s["j"])),
        18,
        "ij",
    ),
    Example(
        lambda s, layout: Constant(-2, "bf16", (s["i"],), layout, MESH),
        (),
        lambda s: np.full(s["i"], -2).astype(numpy_dtype("bf16")),
        10,
        "i",
    ),
)


def of_dtype(dtype: str) -> Iterator[tuple[Compute, tuple[TensorType, ...]]]:
    """Ops on a dtype that are defined for it, on even types but for the last."""
    t, u = TensorType(dtype, (12, 6), ("x",), MESH), TensorType(dtype, (12, 6), (None, "y"), MESH)
    ids = TensorType("i32", (12,), ("x",), MESH)
    layout = Layout((("x",), ("y",)))
    for op, types in (
        (Einsum("ij,kj->ik"), (u, u)),
        (Einsum("ij->ji"), (t,)),
        (Elementwise("a + b * 2"), (t, t)),
        (Elementwise("maximum(a, b)"), (t, t)),
        (ReduceDims((0,)), (t,)),
        (ReduceDims((1, 0), "max"), (t,)),
        (ReduceDims((), "min"), (t,)),
        (ReduceDims((1,), "mean"), (u,)),
        (Reshape("(i=4 j) k -> i j k"), (t,)),
        (Expand("i j -> i k=6 j", Layout((("y",),))), (t,)),
        (Pad((0, 1), (0, 0), 1), (t,)),
        (Crop((0, 1), (12, 3)), (t,)),
        (Cast("f32"), (t,)),
        (Cast("u16"), (t,)),
        (Cast(dtype), (TensorType("f32", (12, 6), ("x",), MESH),)),
        (Gather(), (u, ids)),
        (Gather(), (t, TensorType("u8", (), (), MESH))),
        (ScatterAdd(5), (t, ids)),
        (Iota(dtype, (12, 6), 1, layout, MESH), ()),
        (Constant(1, dtype, (12, 6), layout, MESH), ()),
        (ReduceDims((0,), "max"), (TensorType(dtype, (1, 6), ("y",), MESH),)),
    ):
        try:
            op.infer(*types)
        except TypingError:
            continue
        yield op, types


def numbers(t: TensorType, rng: np.random.Generator) -> np.ndarray:
    """0 to 2, which every dtype has, and sums of them exactly in f32."""
    return rng.integers(0, 3, t.shape).astype(numpy_dtype(t.dtype))


def of_functions() -> Iterator[tuple[str, np.ndarray]]:
    """Every function of expressions on one or more operands, and numbers for which it is defined."""
    x = np.linspace(0.1, 4, 24, dtype=np.float32)
    for name, function in FUNCTIONS.items():
        arguments = ("a < b", "a", "b") if name == "where" else ("a", "b")[: function.arity]
        yield f"{name}({', '.join(arguments)})", x if name in ("log", "sqrt", "rsqrt") else x - 2


@dataclass(frozen=True, slots=True)
class Moments(RuleTypedOp):
    """An op from outside with two results of two dtypes: sums along dim 0, and where the largest values stand."""

    name: ClassVar[str] = "moments"

    def rule(self, *operands: TensorType) -> FactorRule:
        return rule_of(self.name, "[n i] -> [i] [i] | fixed: n", operands)

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        return operands[0].dtype, "i32"

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        return False

    def local(self, xp: Namespace, arrays: Sequence[Any], at: At, size: Size) -> tuple[Any, ...]:
        (x,) = arrays
        n, i = size.operands[0]
        most = xp.reduce("max", x, (0,), True, 0)
        row = xp.where(x == most, xp.arange(n).reshape((n, 1)), xp.full((), n, np.dtype(np.int32)))
        first = xp.reduce("min", row, (0,), False, n)
        return xp.reduce("sum", x, (0,), False, 0), first * size.whole[0][1] + at.results[1][0] + xp.arange(i)

    def flops(self, *operands: TensorType) -> float:
        return 2.0 * math.prod(operands[0].local_shape(0))


@dataclass(frozen=True, slots=True)
class MeanSquare(Composed):
    """An op from outside that says its decomposition alone."""

    name: ClassVar[str] = "mean_square"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        return [d(ReduceDims((1,), "mean"), d(Elementwise("a * a"), "0"))]
