"""Every reduction on every dtype that has it: the ops that reduce and those that make partial, against the oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies as some
from shardplan.core.dtypes import COMBINE, IDEMPOTENT, identity, numpy_dtype, reduces
from shardplan.core.layout import REDUCTIONS
from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllReduce, Op, Reduce, ReduceScatter, ToPartial
from shardplan.core.reference import collect, distribute
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

MESH = Mesh(a=2, b=3)


@given(st.sampled_from(REDUCTIONS), st.sampled_from(some.DTYPES), st.integers(0, 99))
def test_the_identity_changes_nothing_and_equal_addends_say_whether_they_may(kind: str, dtype: str, seed: int) -> None:
    if not reduces(kind, dtype):
        return
    x = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 9, 5).astype(numpy_dtype(dtype))
    unit = identity(kind, x.dtype)
    assert unit.dtype == x.dtype and np.array_equal(COMBINE[kind](x, unit).astype(x.dtype), x)
    if kind in IDEMPOTENT:
        assert np.array_equal(COMBINE[kind](x, x), x)


@settings(deadline=None)
@given(
    st.sampled_from(REDUCTIONS),
    st.sampled_from(("i32", "i64", "i8", "bool", "f32")),
    st.sampled_from((AllReduce(("a",)), Reduce(("a",)), ReduceScatter(0, ("a",)), ReduceScatter((0, 1), ("a", "b")))),
    st.integers(0, 99),
)
def test_ops_reduce(kind: str, dtype: str, op: Op, seed: int) -> None:
    if not reduces(kind, dtype) or (dtype == "bool" and kind == "sum"):
        return
    op = type(op)(*(getattr(op, f) for f in ("dim", "axes") if hasattr(op, f)), reduction=kind)  # pyright: ignore
    t = TensorType(dtype, (4, 6), (), MESH, partial=dict.fromkeys(op.axes, kind))  # pyright: ignore
    array = oracle.content(t)
    (u,) = op.infer(t)
    (shards,) = op.reference([distribute(array, t)], [t])
    assert oracle.wrong(shards, u, array) is None
    assert np.array_equal(collect(shards, u), array)
    assert TensorType.parse(str(t), MESH) == t


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_what_becomes_partial_reduces_to_itself(kind: str, axes: tuple[str, ...]) -> None:
    for spec in ((), ("a",) if axes == ("b",) else ("b",) if axes == ("a",) else ()):
        t = TensorType("i32", (4, 6), spec, MESH)
        op = ToPartial(axes, kind)
        (u,) = op.infer(t)
        array = oracle.content(t)
        (shards,) = op.reference([distribute(array, t)], [t])
        assert oracle.wrong(shards, u, array) is None


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_off_coordinate_0_lies_the_identity_where_a_copy_would_count_twice(kind: str) -> None:
    t = TensorType("i32", (4,), (), Mesh(a=2))
    array = np.array([1, 2, 3, 5], np.int32)
    ((first, second),) = ToPartial(("a",), kind).reference([[array, array]], [t])
    assert np.array_equal(first, array)
    once = np.array_equal(COMBINE[kind](array, array), array)
    assert np.array_equal(second, array if once else np.full_like(array, identity(kind, array.dtype)))


def test_bits_of_floats_are_refused() -> None:
    with pytest.raises(LayoutError) as error:
        TensorType("f32", (4,), (), MESH, partial={"a": "bxor"})
    assert str(error.value) == "bxor of f32 is not defined; legal are integers and bool"
