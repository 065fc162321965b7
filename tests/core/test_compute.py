"""The compute ops against numpy on the whole array: legal assignments agree with it, illegal ones are refused."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.expression import Expression
from shardplan.core.factor_rule import Factor, FactorRule, infer
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.namespace import NUMPY
from shardplan.core.ops import AllReduce, Einsum, Elementwise, ReduceDims, Slice, matmul
from shardplan.core.ops.compute import Compute
from shardplan.core.program import Program
from shardplan.core.reference import collect, distribute, run_reference
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError, ShardplanError, TypingError

# What the expressions mean, written once more without the package.
MEANING = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "where": np.where,
}


def whole(op: Compute, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The op on whole arrays, by numpy alone."""
    match op:
        case Einsum(spec):
            return np.asarray(np.einsum(spec, *arrays))
        case Elementwise(expr):
            return np.asarray(eval(expr, {}, MEANING | dict(zip("abcdef", arrays, strict=False))))
        case ReduceDims(dims, reduction, keep):
            return np.asarray(getattr(np, reduction)(arrays[0], axis=dims, keepdims=keep))
        case _:
            raise AssertionError(op)


def spread(array: np.ndarray, t: TensorType, rng: np.random.Generator) -> list[np.ndarray]:
    """Shards of `array`; partial ones are *random* addends (`distribute` gives identities, which hide errors)."""
    layout = t.layout
    if not layout.partial:
        return distribute(array, t)
    dtype = numpy_dtype(t.dtype)
    count = math.prod(t.mesh.span(a).size for a in layout.partial)
    if layout.reduction == "sum":
        parts = rng.integers(-4, 5, (count, *t.shape)).astype(dtype)
        parts[-1] = (array - parts[:-1].sum(axis=0)).astype(dtype)
    else:
        less = rng.integers(0, 4, (count, *t.shape))
        owner = rng.integers(0, count, t.shape)
        np.put_along_axis(less, owner[None], 0, axis=0)
        parts = (array - less if layout.reduction == "max" else array + less).astype(dtype)
        if dtype.kind == "f":
            parts[less == 3] = -np.inf if layout.reduction == "max" else np.inf
    index = np.zeros(t.mesh.size, dtype=np.int64)
    for a in layout.partial:
        index = index * t.mesh.span(a).size + t.mesh.coordinate(a)
    bare = TensorType(t.dtype, t.shape, Layout(layout.dims, root=layout.root), t.mesh)
    by_part = [distribute(p, bare) for p in parts]
    return [by_part[index[k]][k] for k in range(t.mesh.size)]


@dataclass(frozen=True)
class Case:
    """An op, the factors of its operands' dims and of its result's, and who may be partial together."""

    op: Compute
    operands: tuple[str, ...]  # letters; a digit is a dim of size 1 that broadcasts
    result: str  # letters; a digit is a new dim of size 1
    reduction: str = "sum"  # of the factors that are not in the result
    sums: tuple[tuple[int, ...], ...] = ()
    maxima: tuple[tuple[int, ...], ...] = ()
    minima: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ("f64", "i64", "f32")
    flags: tuple[int, ...] = ()  # operands of dtype bool
    positive: bool = False


def elementwise(expr: str, operands: tuple[str, ...] = ("ij", "ij"), **rest: object) -> Case:
    return Case(Elementwise(expr), operands, "ij", **rest)  # type: ignore[arg-type]


FLOATS = ("f64",)
CASES = [
    Case(Einsum("ik,kj->ij"), ("ik", "kj"), "ij", sums=((0,), (1,))),
    Case(matmul(3), ("bmk", "bkn"), "bmn", sums=((0,), (1,))),
    Case(Einsum("ik,kj,jl->il"), ("ik", "kj", "jl"), "il", sums=((0,), (1,), (2,))),
    Case(Einsum("i,j->ji"), ("i", "j"), "ji", sums=((0,), (1,))),
    Case(Einsum("ij->ji"), ("ij",), "ji", sums=((0,),), maxima=((0,),), minima=((0,),)),
    Case(Einsum("ij->i"), ("ij",), "i", sums=((0,),)),
    Case(Einsum("ij,ij->"), ("ij", "ij"), "", sums=((0,), (1,))),
    Case(ReduceDims((0,)), ("ij",), "j", sums=((0,),)),
    Case(ReduceDims((1, 0)), ("ijk",), "k", sums=((0,),)),
    Case(ReduceDims((1,), keep=True), ("ijk",), "i0k", sums=((0,),)),
    Case(ReduceDims((1,), "mean"), ("ij",), "i", sums=((0,),), dtypes=FLOATS),
    Case(ReduceDims((0, 1), "mean", keep=True), ("ij",), "01", sums=((0,),), dtypes=FLOATS),
    Case(ReduceDims((0,), "max"), ("ij",), "j", "max", maxima=((0,),)),
    Case(ReduceDims((1,), "min", keep=True), ("ij",), "i0", "min", minima=((0,),)),
    elementwise("a + b", sums=((0, 1),), maxima=((0,), (1,)), minima=((0,), (1,)), dtypes=FLOATS),
    elementwise("a + b", ("ij", "j"), sums=((0, 1),)),
    elementwise("a - 2 * b", ("ij", "0j"), sums=((0, 1),)),
    elementwise("a * b", ("i0", "j"), sums=((0,), (1,))),
    elementwise("relu(a) * b", sums=((1,),)),
    elementwise("a / (1 + b * b)", sums=((0,),), dtypes=FLOATS),
    elementwise("where(b > 0, a, 0)", sums=((0,),), maxima=((0,),), minima=((0,),)),
    elementwise("maximum(a, b)", maxima=((0,), (1,), (0, 1)), minima=((0,), (1,))),
    elementwise("minimum(a, relu(b))", minima=((0,), (1,), (0, 1)), maxima=((0,), (1,))),
    elementwise("-minimum(-a, -b)", maxima=((0,), (1,), (0, 1)), minima=((0,), (1,)), dtypes=FLOATS),
    elementwise("exp(a) * 0.5 + tanh(b)", maxima=((0,), (1,)), minima=((0,), (1,)), dtypes=FLOATS),
    elementwise("a * b + c", ("ij", "ij", "ij"), sums=((0, 2), (1, 2))),
    elementwise(
        "where(a, b, c)", ("ij", "ij", "j"), sums=((1, 2),), maxima=((1,), (2,), (1, 2)), minima=((1, 2),), flags=(0,)
    ),
    elementwise("gelu(a) - silu(b) + sigmoid(a)", dtypes=FLOATS),
    elementwise("sqrt(a) * log(b) + rsqrt(a) ** 2", positive=True, dtypes=FLOATS),
    elementwise("abs(a) + sin(b) * cos(a)", dtypes=FLOATS),
]


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Case, tuple[TensorType, ...], TensorType, int]:
    """A case, a legal assignment of a mesh's axes to its factors, partial and root axes, and the type it must have."""
    case = draw(st.sampled_from(CASES))
    mesh = Mesh(
        dict(zip("xyz", draw(st.lists(st.sampled_from((2, 3, 2, 1, 4)), min_size=1, max_size=3)), strict=False))
    )
    dtype = draw(st.sampled_from(case.dtypes))
    letters = sorted({c for o in case.operands for c in o if c.isalpha()})
    sizes = {c: draw(st.integers(1 if isinstance(case.op, Einsum | ReduceDims) else 2, 7)) for c in letters}
    sets = {"sum": case.sums, "max": case.maxima, "min": case.minima}
    kind = draw(st.sampled_from(["sum", "max", "min"]))
    dims: dict[str, list[str]] = {c: [] for c in letters}
    partial: list[list[str]] = [[] for _ in case.operands]
    root: list[str] = []
    reduced: list[str] = []
    for axis in draw(st.permutations(mesh.axes)):
        role = draw(st.sampled_from(["dim", "dim", "dim", "partial", "root", "none"]))
        if role == "dim" and letters:
            letter = draw(st.sampled_from(letters))
            if letter in case.result or case.reduction == kind:
                dims[letter].append(axis)
                if letter not in case.result:
                    reduced.append(axis)
        elif role == "partial" and sets[kind]:
            for k in draw(st.sampled_from(sets[kind])):
                partial[k].append(axis)
            reduced.append(axis)
        elif role == "root":
            root.append(axis)

    def layout(side: str, over: list[str]) -> dict[str, object]:
        return {
            "shape": tuple(sizes.get(c, 1) for c in side),
            "spec": tuple(tuple(dims.get(c, ())) for c in side),
            "partial": dict.fromkeys(over, kind),
            "root": tuple(root),
        }

    types = tuple(
        TensorType("bool" if k in case.flags else dtype, mesh=mesh, **layout(o, partial[k]))  # type: ignore[arg-type]
        for k, o in enumerate(case.operands)
    )
    live = [a for a in reduced if mesh.span(a).size > 1]
    root = [a for a in root if mesh.span(a).size > 1]
    expected = TensorType(dtype, mesh=mesh, **layout(case.result, live))  # type: ignore[arg-type]
    return case, types, expected, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=600, deadline=None)
@given(assignments())
def test_shards_give_what_numpy_gives_on_the_whole(made: tuple[Case, tuple[TensorType, ...], TensorType, int]) -> None:
    case, types, expected, seed = made
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(1 if case.positive else -4, 5, t.shape).astype(numpy_dtype(t.dtype)) for t in types]
    (found,) = case.op.infer(*types)
    assert found == expected
    program = Program([(str(k), t) for k, t in enumerate(types)], [_step(case.op, len(types))], ["r"])
    assert Program.parse(str(program)) == program
    (shards,) = run_reference(program, [spread(x, t, rng) for x, t in zip(arrays, types, strict=True)])
    for k, shard in enumerate(shards):
        assert shard.shape == found.local_shape(k)
        assert shard.dtype == numpy_dtype(found.dtype)
    reference = whole(case.op, arrays)
    rtol = 1e-6 if found.dtype == "f32" else 1e-12
    np.testing.assert_allclose(collect(shards, found).astype(reference.dtype), reference, rtol=rtol, atol=rtol)


def _step(op: Compute, count: int) -> Step:
    return Step(op, tuple(str(k) for k in range(count)), ("r",))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exactly_the_declared_operands_may_be_partial(case: Case) -> None:
    mesh = Mesh(x=2)
    sizes = dict(zip("ijklmnb", (3, 4, 5, 6, 7, 8, 9), strict=True))
    for kind, legal in (("sum", case.sums), ("max", case.maxima), ("min", case.minima)):
        for size in range(1, len(case.operands) + 1):
            for chosen in itertools.combinations(range(len(case.operands)), size):
                types = [
                    TensorType(
                        "bool" if k in case.flags else case.dtypes[0],
                        [sizes.get(c, 1) for c in o],
                        (),
                        mesh,
                        partial={"x": kind} if k in chosen else None,
                    )
                    for k, o in enumerate(case.operands)
                ]
                if chosen in legal or (case.flags and kind == "min" and chosen in ((1,), (2,))):
                    assert case.op.infer(*types)[0].layout.partial == ("x",)
                elif case.dtypes == FLOATS or kind == "sum" or isinstance(case.op, Einsum | ReduceDims):
                    with pytest.raises(LayoutError, match="does not pass that on"):
                        case.op.infer(*types)


M = Mesh(x=2, y=4)


def typed(*texts: str, mesh: Mesh = M) -> list[TensorType]:
    return [TensorType.parse(t, mesh) for t in texts]


@pytest.mark.parametrize(
    ("op", "types", "error", "text"),
    [
        (
            Einsum("ik,kj->ij"),
            ("f32[8, 8@x]", "f32[8@y, 16]"),
            LayoutError,
            "einsum: the factor k=8 does not meet: dim 1 of operand 0, f32[8, 8@x], is over x, but dim 0 of operand 1, "
            "f32[8@y, 16], is over y; legal on both: x or y or no axes",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8, 8@(x,y)]", "f32[8@(y,x), 16]"),
            LayoutError,
            "einsum: the factor k=8 does not meet: dim 1 of operand 0, f32[8, 8@(x,y)], is over (x,y), but dim 0 of "
            "operand 1, f32[8@(y,x), 16], is over (y,x); legal on both: (x,y) or (y,x) or no axes",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8, 8@x]", "f32[8, 16@x]"),
            LayoutError,
            "einsum: the factor k=8 does not meet: dim 1 of operand 0, f32[8, 8@x], is over x, but dim 0 of operand 1, "
            "f32[8, 16@x], is over no axes; legal on both: no axes",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8@x, 8]", "f32[8, 16@x]"),
            LayoutError,
            "einsum: the axis x serves the factors i (operand 0, dim 0) and j (operand 1, dim 1); an axis serves at "
            "most one factor",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8@y.0, 8]", "f32[8, 16@y]"),
            LayoutError,
            "einsum: the axis y.0 serves the factors i (operand 0, dim 0) and j (operand 1, dim 1); an axis serves at "
            "most one factor",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8@x, 8]", "f32[8, 16]{+x}"),
            LayoutError,
            "einsum: the axis x serves the factor i (operand 0, dim 0) and is partial in operand 1, f32[8, 16]{+x}; "
            "legal is one of the two",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8, 8]{+x}", "f32[8, 16]{+x}"),
            LayoutError,
            "einsum: exactly operand 0, f32[8, 8]{+x}, and operand 1, f32[8, 16]{+x}, are partial (sum) over x, and "
            "the op does not pass that on; legal as partial there: no operand or operand 0 or operand 1",
        ),
        (
            Elementwise("a + b"),
            ("f32[8]{+x}", "f32[8]"),
            LayoutError,
            "elementwise: exactly operand 0, f32[8]{+x}, is partial (sum) over x, and the op does not pass that on; "
            "legal as partial there: no operand or operand 0 and operand 1",
        ),
        (
            Elementwise("a + b + c + d + e + f + g + h + i"),
            ("f32[8]{+x}", *["f32[8]"] * 8),
            LayoutError,
            "elementwise: exactly operand 0, f32[8]{+x}, is partial (sum) over x, and the op does not pass that on; "
            "legal as partial there: no operand or all operands",
        ),
        (
            Elementwise("relu(a)"),
            ("f32[8]{+x,+y}",),
            LayoutError,
            "elementwise: exactly operand 0, f32[8]{+x,+y}, is partial (sum) over (x,y), and the op does not pass that "
            "on; legal as partial there: no operand",
        ),
        (
            Elementwise("a + 1"),
            ("i32[8]{max:x}",),
            LayoutError,
            "elementwise: exactly operand 0, i32[8]{max:x}, is partial (max) over x, and the op does not pass that on; "
            "legal as partial there: no operand",
        ),
        (
            Elementwise("a * b"),
            ("f32[8, 4@x]", "f32[8, 1@x]"),
            LayoutError,
            "elementwise: dim 1 of operand 1, f32[8, 1@x], is over x, but its factor k=1 may not be sharded; legal is "
            "no axes",
        ),
        (
            ReduceDims((1,), "max"),
            ("f32[8, 4@x]{+y}",),
            LayoutError,
            "reduce_dims: the result would be partial with sum (operand 0, f32[8, 4@x]{+y}) and max (the sharded "
            "factor j); legal is one reduction",
        ),
        (
            Elementwise("a + b"),
            ("f32[8]{root:x}", "f32[8]"),
            LayoutError,
            "elementwise: operand 0, f32[8]{root:x}, has {root:x}, operand 1, f32[8], no root axes; legal are equal "
            "root axes",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8, 8]", "f32[4, 16]"),
            TypingError,
            "einsum ik,kj->ij: operand 1, f32[4, 16], has k=4; legal is 8",
        ),
        (
            Einsum("ik,kj->ij"),
            ("f32[8, 8]", "f64[8, 16]"),
            TypingError,
            "einsum: operands of the dtypes f32, f64; legal is one dtype",
        ),
        (Einsum("ik,kj->ij"), ("f32[8, 8]",), TypingError, "einsum ik,kj->ij takes 2 operands, not 1"),
        (
            Elementwise("a + b"),
            ("f32[8, 4]", "f32[8]"),
            TypingError,
            "elementwise: operand 1, f32[8], does not broadcast: its dim 0 has size 8; legal are 1 and 4",
        ),
        (
            Elementwise("a / 2"),
            ("i32[8]",),
            TypingError,
            '"a / 2": / is not defined for i32; legal is a floating dtype',
        ),
        (
            Elementwise("maximum(a, -1)"),
            ("u8[8]",),
            TypingError,
            '"maximum(a, -1)": the constant -1 is not defined for u8; legal is 0 to 255',
        ),
        (
            Elementwise("where(a, b, 0)"),
            ("f32[8]", "f32[8]"),
            TypingError,
            'elementwise: "where(a, b, 0)": the condition a is a f32[8]; legal is bool',
        ),
        (
            ReduceDims((0,), "mean"),
            ("i32[8]",),
            TypingError,
            "reduce_dims(mean) is not defined for i32; legal is a floating dtype",
        ),
        (
            Elementwise("a ** 0.5"),
            ("i8[8]",),
            TypingError,
            '"a ** 0.5": ** 0.5 is not defined for i8; legal is a floating dtype, or an exponent from 0 to 127',
        ),
        (ReduceDims((2,)), ("f32[8]",), TypingError, "reduce_dims: f32[8] has no dim 2; legal are 0 to 0"),
    ],
)
def test_refusals_say_what_is_wrong(
    op: Compute, types: tuple[str, ...], error: type[ShardplanError], text: str
) -> None:
    with pytest.raises(error) as caught:
        op.infer(*typed(*types))
    assert str(caught.value) == text


def test_operands_lie_on_one_mesh() -> None:
    (t,) = typed("f32[8]")
    (u,) = typed("f32[8]", mesh=Mesh(x=2))
    with pytest.raises(TypingError) as caught:
        Elementwise("a + b").infer(t, u)
    assert str(caught.value) == "elementwise: operand 0 is on the mesh x=2, y=4, operand 1 on x=2; legal is one mesh"


# Rule 4, on the rule of a reshape [b, s] <-> [bs], which no op here has.
MERGE = FactorRule(((("b",), ("s",)),), ((("b", "s"),),), (Factor("b", 6), Factor("s", 4)))
SPLIT = FactorRule(((("b", "s"),),), ((("b",), ("s",)),), (Factor("b", 6), Factor("s", 4)))


@pytest.mark.parametrize(
    ("rule", "operand", "result"),
    [
        (MERGE, "f32[6@x, 4]", "f32[24@x]"),
        (MERGE, "f32[6@(x,z), 4@y]", "f32[24@(x,z,y)]"),
        (MERGE, "f32[6, 4@x]", "reshape: dim 0 of the result merges the factors b, s, of which s=4 is cut over x under "
         "a major factor that is not fully sharded; legal are even tilings, minor factors under full major ones"),
        (MERGE, "f32[6@y, 4]", "reshape: dim 0 of the result merges the factors b, s, of which b=6 is cut over y "
         "unevenly; legal are even tilings, minor factors under full major ones"),
        (SPLIT, "f32[24@x]", "f32[6@x, 4]"),
        (SPLIT, "f32[24@(z,x,y.0)]", "f32[6@(z,x), 4@y.0]"),
        (SPLIT, "f32[24@y]", "reshape: dim 0 of operand 0, f32[24@y], is over y, which does not fill its factor b=6 "
         "before the minor ones; legal are axes that multiply to it, then others"),
        (SPLIT, "f32[24@(y,y5)]", "reshape: dim 0 of operand 0, f32[24@(y,y5)], is unevenly tiled over (y,y5); legal "
         "to split is an even dim"),
    ],
)  # fmt: skip
def test_splits_and_merges(rule: FactorRule, operand: str, result: str) -> None:
    mesh = Mesh(x=2, y=4, z=3, y5=5)
    try:
        found = str(infer(rule, typed(operand, mesh=mesh), lambda partial, reduction: True, "reshape", ("f32",))[0])
    except LayoutError as error:
        found = str(error)
    assert found == result


def test_rules_print_as_shardy_prints_them() -> None:
    assert str(Einsum("ik,kj->ij").rule(*typed("f32[8, 4]", "f32[4, 16]"))) == "([i,k],[k,j])->([i,j]) {i=8,j=16,k=4}"
    assert (
        str(Elementwise("a + b").rule(*typed("f32[8, 4]", "f32[8, 1]")))
        == "([i,j],[i,k])->([i,j]) {i=8,j=4,k=1} need_replication={k}"
    )
    assert str(ReduceDims((0,), "max", keep=True).rule(*typed("f32[8, 4]"))) == "([i,j])->([k,j]) {k=1,j=4,i=8} max={i}"
    assert str(MERGE) == "([b,s])->([bs]) {b=6,s=4}"


def test_an_axis_of_size_one_shards_nothing() -> None:
    mesh = Mesh(x=2, one=1)
    a, b = typed("f32[8@one, 8@x]", "f32[8@x, 4@one]", mesh=mesh)
    assert str(Einsum("ik,kj->ij").infer(a, b)[0]) == "f32[8@one, 4]{+x}"
    assert str(Elementwise("exp(a)").infer(*typed("f32[8@x]{+one}", mesh=mesh))[0]) == "f32[8@x]"


def test_flops_and_bytes_are_those_of_the_worst_device() -> None:
    a, b = typed("bf16[9@x, 10@y]", "bf16[10@y, 7]")
    assert Einsum("ik,kj->ij").flops(a, b) == 2 * 5 * 3 * 7
    assert Einsum("ik,kj->ij").touched_bytes(a, b) == 2 * (5 * 3 + 3 * 7 + 5 * 7)
    assert Einsum("ij->ji").flops(a) == 0
    assert Elementwise("relu(a) + 2 * a").flops(a) == 3 * 15
    assert ReduceDims((0,)).flops(a) == 15
    assert ReduceDims((0,)).touched_bytes(a) == 2 * (15 + 3)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f8e4m3"])
def test_narrow_floats_are_summed_wide(dtype: str) -> None:
    mesh = Mesh(x=2)
    t = TensorType(dtype, (4096, 1), (), mesh)
    ones = np.full(t.shape, 2.0**-6).astype(numpy_dtype(dtype))
    for op, types in ((ReduceDims((0,)), [t]), (Einsum("kj,ki->ji"), [t, t])):
        value = 64.0 if len(types) == 1 else 1.0
        out = op.reference([distribute(ones, t)] * len(types), types)[0]
        assert [float(x.reshape(-1)[0]) for x in out] == [value] * 2
    for reduction in ("max", "min"):
        uneven = TensorType(dtype, (1, 3), ("x",), mesh)  # device 1 holds nothing
        array = np.array([[-2.0, 1.0, 3.0]]).astype(numpy_dtype(dtype))
        op = ReduceDims((0,), reduction)
        assert np.array_equal(
            collect(op.reference([distribute(array, uneven)], [uneven])[0], op.infer(uneven)[0]), array[0]
        )


def test_integers_wrap_and_masks_reduce() -> None:
    t = TensorType("i8", (4,), ("x",), Mesh(x=2))
    x = np.array([100, 100, 100, 1], dtype=np.int8)
    op = ReduceDims((0,))
    assert collect(op.reference([distribute(x, t)], [t])[0], op.infer(t)[0]) == np.int8(301 - 256)
    mask = TensorType("bool", (3,), ("y",), M)  # the last device holds nothing
    for reduction, expected in (("max", True), ("min", False)):
        op = ReduceDims((0,), reduction)
        shards = op.reference([distribute(np.array([True, False, True]), mask)], [mask])[0]
        assert collect(shards, op.infer(mask)[0]) == expected


TEXT = """program
  mesh data=2, tensor=3
  input %x: i64[4@data, 6]
  input %w: i64[6, 7@tensor]
  input %v: i64[7@tensor, 6]
  %h = einsum(%x, %w; spec="mk,kn->mn"): i64[4@data, 7@tensor]
  %a = elementwise(%h; expr="relu(a) * 2 + -1"): i64[4@data, 7@tensor]
  %p = einsum(%a, %v; spec="mk,kn->mn"): i64[4@data, 6]{+tensor}
  %y = all_reduce(%p; axes=(tensor)): i64[4@data, 6]
  %s = reduce_dims(%y; dims=(0,1), reduction=max, keep=True): i64[1, 1]{max:data}
  %m = all_reduce(%s; axes=(data), reduction=max): i64[1, 1]
  %d = elementwise(%y, %m; expr="a - b"): i64[4@data, 6]
  output %d, %p"""


def test_a_program_of_einsums_and_reductions_runs_right() -> None:
    program = Program.parse(TEXT)
    assert str(program) == TEXT
    assert Program.parse(str(program)) == program
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, t.shape) for t in program.input_types]
    x, w, v = arrays
    y = (np.maximum(x @ w, 0) * 2 - 1) @ v
    out = run_reference(program, [distribute(a, t) for a, t in zip(arrays, program.input_types, strict=True)])
    found = [collect(shards, t) for shards, t in zip(out, program.output_types, strict=True)]
    assert np.array_equal(found[0], y - y.max())
    assert np.array_equal(found[1], y)


def test_a_program_names_the_step_that_does_not_type() -> None:
    (t,) = typed("f32[8]{+x}")
    with pytest.raises(LayoutError, match=r"^step 1 \(elementwise\): elementwise: exactly operand 0"):
        Program({"0": t}, [Step(Slice(0, ("y",)), ("0",), ("1",)), Step(Elementwise("exp(a)"), ("1",), ("2",))], ("2",))
    fixed = [Step(AllReduce(("x",)), ("0",), ("1",)), Step(Elementwise("exp(a)"), ("1",), ("2",))]
    assert str(Program({"0": t}, fixed, ("2",)).output_types[0]) == "f32[8]"


def test_rooted_values_stay_at_the_root() -> None:
    (t,) = typed("f64[4@y]{root:x}")
    out = Elementwise("a + 1").reference([distribute(np.zeros(4), t)], [t])[0]
    assert [float(x[0]) for x in out[:4]] == [1.0] * 4
    assert all(np.isnan(x).all() for x in out[4:])
    (t,) = typed("i32[4@y]{root:x}")
    out = Elementwise("a + 1").reference([distribute(np.zeros(4, np.int32), t)], [t])[0]
    assert [int(x[0]) for x in out] == [1] * 4 + [np.iinfo(np.int32).max] * 4


# Expressions


LEAVES = ("a", "b", "c", "a", "b", "0", "2", "-1", "0.5")
FORMS = (
    *(f"({{}}) {op} ({{}})" for op in "+-*/"),
    *(f"{{}} {op} {{}}" for op in "+-*/"),
    "-({})",
    *(f"({{}}) ** {n}" for n in (2, 1, -1)),
    *(f"{f}({{}})" for f in ("relu", "tanh", "abs", "sin", "exp")),
    "maximum({}, {})",
    "minimum({}, {})",
    "where({} < {}, {}, {})",
    "where({} == {}, {}, {})",
)


@st.composite
def texts(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(LEAVES))
    form = draw(st.sampled_from(FORMS))
    return form.format(*(draw(texts(depth - 1)) for _ in range(form.count("{}"))))


@settings(max_examples=500, deadline=None)
@given(texts(), st.sets(st.sampled_from("abc"), min_size=1), st.integers(0, 2**32 - 1))
def test_degree_and_direction_hold_numerically(text: str, names: set[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    try:
        e = Expression.parse(text)
    except ParseError:
        return  # no operand, or a gap
    assert Expression.parse(str(e)) == e
    chosen = [n for n in e.names if n in names]
    fixed = {n: rng.integers(-3, 4, 16).astype(np.float64) for n in e.names}
    parts = [{n: rng.integers(-3, 4, 16).astype(np.float64) if n in names else fixed[n] for n in e.names} for _ in "12"]

    def stable(operands: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The value, and where it is finite and well conditioned: f32 agrees."""
        with np.errstate(all="ignore"):
            exact = np.broadcast_to(e.evaluate(NUMPY, list(operands.values()), np.dtype(np.float64)), (16,))
            narrow = [x.astype(np.float32) for x in operands.values()]
            rough = e.evaluate(NUMPY, narrow, np.dtype(np.float32))
        return exact, np.isfinite(exact) & np.isclose(exact, rough, rtol=1e-3, atol=1e-3)

    def holds(combine: np.ufunc) -> bool:
        joined, sane = stable({n: combine(parts[0][n], parts[1][n]) if n in names else fixed[n] for n in e.names})
        sane = sane & first[1] & second[1]
        with np.errstate(invalid="ignore"):
            expected = combine(first[0], second[0])
        return bool(np.all(~sane | np.isclose(joined, expected, rtol=1e-6, atol=1e-6)))

    first, second = (stable(p) for p in parts)
    try:
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            again = np.broadcast_to(np.asarray(eval(text, {}, MEANING | parts[0]), dtype=np.float64), (16,))
    except (ArithmeticError, ValueError):  # of constants alone, or at a pole
        again = first[0]
    np.testing.assert_allclose(first[0][first[1]], again[first[1]], rtol=1e-9, atol=1e-9)
    degree = e.degree(names)
    if degree == 1:
        assert holds(np.add)
    if degree == 0:
        assert np.array_equal(first[0], second[0], equal_nan=True)
    for reduction, combine in (("max", np.maximum), ("min", np.minimum)):
        if e.commutes(names, reduction):
            assert holds(combine)
    if len(chosen) == 1 and e.commutes(chosen, "max"):
        assert holds(np.maximum)
        assert holds(np.minimum)


@pytest.mark.parametrize(
    ("text", "increases"),
    [
        ("a", True),
        ("exp(2 * a - 1) / 3", True),
        ("a * -2", False),
        ("-2 * -a", True),
        ("a / -1", False),
        ("-exp(-a)", True),
        ("sigmoid(a) + tanh(a)", True),
        ("maximum(a, 0) + where(b > 0, a, 1)", True),
        ("log(a)", False),  # log(-inf) is not -inf: the fill of a max partial would become nan
        ("sqrt(a)", False),
        ("a * b", False),
        ("a - a", False),
        ("gelu(a)", False),
        ("a ** 2", False),
    ],
)
def test_monotone(text: str, increases: bool) -> None:
    e = Expression.parse(text)
    assert e.commutes("a", "max") is increases
    assert e.commutes("a", "max", finite=True) is (text == "a")


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("a + b", {"a": None, "b": None, "ab": 1}),
        ("a * b", {"a": 1, "b": 1, "ab": None}),
        ("where(b > 0, a, 0)", {"a": 1, "b": None, "ab": None}),
        ("a * exp(b) / 2 - a", {"a": 1, "b": None}),
        ("a ** 1 * b ** 2", {"a": 1, "b": None}),
        ("relu(a) + 0", {"a": None}),
        ("2 / a", {"a": None}),
    ],
)
def test_degrees(text: str, degrees: dict[str, int | None]) -> None:
    e = Expression.parse(text)
    assert {names: e.degree(names) for names in degrees} == degrees
    assert e.degree("z") == 0


@pytest.mark.parametrize(
    ("text", "canonical", "flops"),
    [
        ("a+-1", "a + -1", 1),
        ("a - (b - c)", "a - (b - c)", 2),
        ("(a - b) - c", "a - b - c", 2),
        ("-a ** 2", "-a ** 2", 2),
        ("(-a) ** 2", "(-a) ** 2", 2),
        ("-(2) * a", "-2 * a", 1),
        ("(-2) ** 2 * a", "(-2) ** 2 * a", 2),
        ("-(-2) * a", "2 * a", 1),
        ("a ** -0.5", "a ** -0.5", 1),
        (" gelu( a ) ", "gelu(a)", 9),
        ("where(a>=b, a, b)", "where(a >= b, a, b)", 2),
    ],
)
def test_canonical_text(text: str, canonical: str, flops: int) -> None:
    e = Expression.parse(text)
    assert (str(e), e.flops()) == (canonical, flops)
    assert Elementwise(text) == Elementwise(canonical)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("a + ", "an expression is malformed: invalid syntax", 3),
        ("a + atan(b)", "unknown function 'atan'; legal are exp, log", 4),
        ("a + x1", "unknown operand 'x1'; operands are a, b, c, ... in order", 4),
        ("a + c", "an expression uses its operands a, b, c, ... without a gap; this one uses a, c", 0),
        ("1 + 2", "an expression uses its operands a, b, c, ... without a gap; this one uses none", 0),
        ("a ** b", "the exponent of ** is a number", 5),
        ("a * (a > b)", "a comparison is legal only as the condition of where(condition, yes, no)", 5),
        ("exp(a, b)", "exp takes 1 arguments, not 2", 0),
        ("  a.real", "'a.real' is not an expression", 2),
        ("a + 1j", "the constant 1j is not a finite number", 4),
        ("a + 1e999", "the constant 1e309 is not a finite number", 4),
        ("a if a else b", "'a if a else b' is not an expression", 0),
    ],
)
def test_malformed_expressions_point_at_the_character(text: str, message: str, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        Elementwise(text)
    assert message in str(caught.value)
    assert caught.value.position == column


@pytest.mark.parametrize(
    ("spec", "message", "column"),
    [
        ("ik,kj", "an einsum spec names its result, as in ik,kj->ij", 5),
        ("ik,kj->il", "the factor l of the result is in no operand", 8),
        ("ik,kj->ii", "the factor i is twice in the result", 8),
        ("...k,kj->j", "'.' is not legal in an einsum spec; legal are letters, ',' and one '->'", 0),
    ],
)
def test_malformed_specs_point_at_the_character(spec: str, message: str, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        Einsum(spec)
    assert str(caught.value).startswith(message + "\n")
    assert caught.value.position == column
