"""What the ops that place elements refuse, what compute ops cost, their text, and ops made of others."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import oracle
from compute_examples import MESH, MeanSquare, Moments
from shardplan.core.layout import Layout
from shardplan.core.namespace import NUMPY, Namespace
from shardplan.core.ops import (
    AllReduce,
    Cast,
    Concat,
    Constant,
    Crop,
    Einsum,
    Elementwise,
    Expand,
    Gather,
    Iota,
    Op,
    Pad,
    ReduceDims,
    Reshape,
    ScatterAdd,
    Write,
)
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.compute import RuleTypedOp
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.reference import distribute
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError, TypingError

FLAT = Layout(((),))


def typed(*texts: str) -> list[TensorType]:
    return [TensorType.parse(t, MESH) for t in texts]


@pytest.mark.parametrize(
    ("op", "types", "text"),
    [
        (Pad((1,), (0,)), ("f32[4, 2]",),
         "pad: lo=(1,) and hi=(0,) of f32[4, 2]; legal are 2 numbers from 0 on in each"),
        (Pad((1,), (-1,)), ("f32[4]",), "pad: lo=(1,) and hi=(-1,) of f32[4]; legal are 1 numbers from 0 on in each"),
        (Pad((1,), (0,), 0.5), ("i8[4]",), "pad: the value 0.5 of i8; legal is an integer from -128 to 127"),
        (Pad((1,), (0,), float("inf")), ("f32[4]",), "pad: the value inf of f32; legal is a finite number"),
        (Pad((1,), (0,)), ("f32[4@x]",),
         "pad: dim 0 of operand 0, f32[4@x], is over x, but its factor i=4 may not be sharded; legal is no axes"),
        (Pad((1,), (0,), 2), ("f32[4]{+x}",), "pad: exactly operand 0, f32[4]{+x}, is partial (sum) over x, and the op "
         "does not pass that on; legal as partial there: no operand"),
        (Crop((1,), (5,)), ("f32[4]",),
         "crop: (1,) to (5,) of f32[4]; legal are 0 <= start < stop <= size in each dim"),
        (Crop((0,), (1,)), ("f32[]",), "crop: (0,) to (1,) of f32[]; legal are 0 <= start < stop <= size in each dim"),
        (Cast("f32"), ("c64[4]",), "cast: c64[4] to f32 would lose imaginary parts; legal is a complex dtype"),
        (Cast("f8e4m3"), ("f32[4]{max:x}",), "cast: exactly operand 0, f32[4]{max:x}, is partial (max) over x, and the "
         "op does not pass that on; legal as partial there: no operand"),
        (Gather(), ("f32[4]", "f32[2]"), "gather: the ids are f32[2]; legal is an integer dtype"),
        (Gather(), ("bool[4]", "i32[2]"), "gather: sums are not defined for bool; legal is a numeric dtype"),
        (Gather(), ("f32[]", "i32[2]"), "gather: operand 0, f32[], has 0 dims; legal is 1"),
        (ScatterAdd(0), ("f32[4]", "i32[4]"),
         "scatter_add: 0 rows of f32[4] by i32[4]; legal are a row and a dim for each"),
        (ScatterAdd(4), ("f32[4]", "i32[4, 2]"),
         "scatter_add: 4 rows of f32[4] by i32[4, 2]; legal are a row and a dim for each"),
        (ScatterAdd(4, Layout((("x",),))), ("f32[4@x]", "i32[4@x]"),
         "scatter_add: the axis x serves the factors v (over) and b0 (operand 0, dim 0); an axis serves at most one "
         "factor"),
        (ScatterAdd(4, Layout((("x",),))), ("f32[4]{+x}", "i32[4]"),
         "scatter_add: the axis x serves the factor v (over) and is partial in operand 0, f32[4]{+x}; legal is one of "
         "the two"),
        (ScatterAdd(4, Layout((("x",), ("y",)))), ("f32[4]", "i32[4]"),
         "scatter_add: over=(x, y), but 1 factors are in results only; legal is one each"),
        (ScatterAdd(4, Layout((), ("x",), "sum")), ("f32[4]", "i32[4]"),
         "scatter_add: over=[]{+x}; legal are axes of dims alone"),
        (Expand("i -> k=3 i"), ("f32[4, 2]",), "expand: operand 0, f32[4, 2], has 2 dims; legal is 1"),
        (ScatterAdd(4, Layout((("q",),))), ("f32[4]", "i32[4]"), "unknown axis 'q': the mesh has x=2, y=3"),
        (Iota("i8", (300,), 0, FLAT, MESH), (), "iota: the value 299 of i8; legal is an integer from -128 to 127"),
        (Iota("i32", (300,), 1, FLAT, MESH), (), "iota: i32[300] has no dim 1; legal are 0 to 0"),
        (Iota("i32", (300,), 0, FLAT, MESH), ("f32[4]",), "iota takes 0 operands, not 1"),
        (Constant(0, "i32", (3,), Layout(((),), ("x",), "sum"), MESH), (),
         "constant: i32[3]{+x} is partial; legal are sharded, replicated and rooted values"),
        (Constant(2, "bool", (3,), FLAT, MESH), (), "constant: the value 2 of bool; legal is 0 or 1"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(op: Op, types: tuple[str, ...], text: str) -> None:
    with pytest.raises(ShardplanError) as caught:
        op.infer(*typed(*types))
    assert str(caught.value) == text
    assert isinstance(caught.value, TypingError | LayoutError)


def test_what_they_cost() -> None:
    table, ids = typed("f32[100@x, 8]", "i32[6@y]")
    assert Gather().touched_bytes(table, ids) == 4 * (2 + 2 * 2 * 8)  # the rows that are read, not the table
    assert (Gather().flops(table, ids), ScatterAdd(9).flops(*typed("f32[6@y, 8]", "i32[6@y]"))) == (0, 16)
    assert Reshape("(a=4 b) c -> a b c").touched_bytes(table) == 0  # it shares the storage of its operand
    assert Cast("bf16").touched_bytes(table) == 50 * 8 * 6
    assert Iota("i32", (8,), 0, Layout((("x",),)), MESH).touched_bytes() == 16
    for op in (Pad((0, 1), (0, 1)), Crop((0, 1), (100, 2)), Reshape("(a=4 b) c -> a b c")):
        assert op.flops(table) == 0
    assert Constant(0, "i32", (8,), FLAT, MESH).flops() == 0


TEXT = """program
  mesh x=2, y=3
  input %t: f32[8@x, 4]
  input %i: i32[6@y]
  %r = gather(%t, %i): f32[6@y, 4]{+x}
  %s = scatter_add(%r, %i; rows=8): f32[8, 4]{+x,+y}
  %n = iota(; dtype=i32, shape=(6,2), dim=0, over=[@x, _], mesh=m0): i32[6@x, 2]
  %c = constant(; value=-1.5, dtype=bf16, shape=(), over=[], mesh=m0): bf16[]
  %p = pad(%t; lo=(0,1), hi=(0,0), value=1e-07): f32[8@x, 5]
  %q = reshape(%t; spec="a (b=2 c) -> a b c"): f32[8@x, 2, 2]
  %z = cast(%t; dtype=bf16): bf16[8@x, 4]
  %e = expand(%i; spec="i -> k=4 i", over=[@x]): i32[4@x, 6@y]
  %w = crop(%t; start=(0,1), stop=(8,2)): f32[8@x, 1]
  output %s, %n, %c, %p, %q, %z, %e, %w"""


def test_programs_of_them_are_read_and_written() -> None:
    program = Program.parse(TEXT)
    assert str(program) == TEXT
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("value=1e-07", "value=large", "pad: value='large' is no float"),
        ("rows=8", "rows=8.5", "scatter_add: rows=8.5 is no int"),
        ("dtype=bf16): bf16[8", "dtype=bf17): bf16[8", "cast: unknown dtype 'bf17'; legal dtypes are bool, i8"),
        ("(b=2 c) -> a b c", "(b=2 c) -> a c b", "reshape: reshape: 'a (b=2 c) -> a c b' does not keep the order"),
    ],
)
def test_what_their_text_may_not_say(old: str, new: str, text: str) -> None:
    with pytest.raises(ShardplanError) as caught:
        Program.parse(TEXT.replace(old, new, 1))
    assert str(caught.value).startswith(text)


def test_an_op_of_two_results_gives_both() -> None:
    t = TensorType("f64", (6, 7), (None, "x"), MESH)
    assert list(map(str, Moments().infer(t))) == ["f64[7@x]", "i32[7@x]"]
    array = np.random.default_rng(0).integers(-9, 10, t.shape).astype(np.float64)
    sums, places = Moments().reference([distribute(array, t)], [t])
    u, v = Moments().infer(t)
    assert oracle.wrong(sums, u, array.sum(axis=0)) is None
    assert oracle.wrong(places, v, (array.argmax(axis=0) * 7 + np.arange(7)).astype(np.int32)) is None


def test_what_a_composed_op_means_follows_from_its_steps() -> None:
    (t,) = typed("f64[6@x, 8@y]")
    op = MeanSquare()
    assert list(map(str, op.infer(t))) == ["f64[6@x]{+y}"]
    assert op.flops(t) == Elementwise("a * a").flops(t) + ReduceDims((1,), "mean").flops(t)
    assert op.touched_bytes(t) == 8 * (3 * 3 + 3)  # one kernel: what is between is not written
    array = np.arange(48.0).reshape(6, 8)
    (shards,) = op.reference([distribute(array, t)], [t])
    assert oracle.wrong(shards, op.infer(t)[0], (array * array).mean(axis=1)) is None
    assert Einsum("i->i").decomposition(t) is None
    with pytest.raises(LayoutError, match=r"^mean_square: elementwise: exactly operand 0"):
        op.infer(*typed("f64[6, 8]{+x}"))


@dataclass(frozen=True, slots=True)
class Moving(Composed):
    name: ClassVar[str] = "moving"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        return [d(AllReduce(("x",)), "0")]


class Bare(RuleTypedOp):
    name: ClassVar[str] = "bare"
    rule: Any = None
    passes: Any = None


class Empty(Composed):
    name: ClassVar[str] = "empty"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Bare, "Can't instantiate abstract class Bare with abstract methods flops, local"),
        (Empty, "Can't instantiate abstract class Empty with abstract method write"),
        (lambda: Moving().infer(*typed("f32[4]{+x}")),
         "moving: all_reduce in its decomposition moves data; legal are compute ops"),
    ],
)  # fmt: skip
def test_an_op_that_does_not_say_enough_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises((TypeError, TypingError)) as caught:
        make()
    assert str(caught.value) == text


def test_results_and_dtypes_are_of_one_number() -> None:
    class Fewer(Moments):
        def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
            return ("f32",)

    with pytest.raises(TypingError, match="moments: its rule has 2 results, but it says 1 dtypes"):
        Fewer().infer(*typed("f32[4, 2]"))


def test_a_namespace_is_small() -> None:
    assert len(dataclasses.fields(Namespace)) <= 21
    assert isinstance(NUMPY, Namespace)


def test_new_dims_are_sharded_in_their_order() -> None:
    (t,) = typed("f32[8]")
    over = Layout((("x",), ("y",)))
    assert list(map(str, Expand("h -> b=4 h s=3", over).infer(t))) == ["f32[4@x, 8, 3@y]"]
    with pytest.raises(TypingError, match="does not keep its dims in order"):
        Expand("a b -> b c=2 a")


def test_more_values_than_letters_are_joined() -> None:
    arrays = [np.arange(k, k + 2 + k % 3)[None] for k in range(61)]
    types = [TensorType("i64", x.shape, (), MESH) for x in arrays]
    (found,) = Concat(1).reference([[x] * MESH.size for x in arrays], types)
    np.testing.assert_array_equal(found[0], np.concatenate(arrays, 1))


def test_a_write_refuses_what_it_cannot_place() -> None:
    t, v, ids = typed("f32[4, 6]", "f32[4, 2]", "i32[2]")
    for op, operands, message in (
        (Write(2), (t, v, ids), "write f32[4, 2] along dim 2 of f32[4, 6]; legal are one dtype and a dim it has"),
        (Write(1), (t, *typed("i32[4, 2]"), ids), "write i32[4, 2] along dim 1 of f32[4, 6]"),
        (Write(1), (t, v, *typed("f32[2]")), "the ids are f32[2]; legal is an integer dtype"),
    ):
        with pytest.raises(TypingError) as caught:
            op.infer(*operands)
        assert message in str(caught.value)
    assert Write(1).touched_bytes(t, v, ids) == 8 + 2 * 32
