"""`distribute`, `collect` and the reference run against the oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import shardplan as sp
import strategies as some
from shardplan.core.dtypes import identity, numpy_dtype
from shardplan.core.ops import AllGather
from shardplan.core.program import Program
from shardplan.core.step import Step

ANY = some.types(dtypes=("i32", "f32", "i64"))


@settings(max_examples=200, deadline=None)
@given(ANY)
def test_distribute_gives_every_device_its_part(t: sp.TensorType) -> None:
    array = oracle.content(t)
    shards = sp.distribute(array, t)
    assert oracle.wrong(shards, t, array) is None
    assert all(not np.shares_memory(x, array) for x in shards)


@settings(max_examples=200, deadline=None)
@given(ANY, st.integers(0, 99))
def test_collect_undoes_any_way_to_spread(t: sp.TensorType, seed: int) -> None:
    array = oracle.content(t)
    again = sp.collect(oracle.spread(array, t, np.random.default_rng(seed)), t)
    assert again.dtype == array.dtype and np.array_equal(again, array)
    assert np.array_equal(sp.collect(sp.distribute(array, t), t), array)


@settings(max_examples=100, deadline=None)
@given(some.types(("even", "uneven")), st.integers(0, 99))
def test_collect_sees_a_replica_that_differs(t: sp.TensorType, seed: int) -> None:
    shards = sp.distribute(oracle.content(t), t)
    k = seed % len(shards)
    copies = [j for j in range(len(shards)) if oracle.box(t, j) == oracle.box(t, k)]
    if len(copies) == 1 or not shards[k].size:
        return
    shards[k] = shards[k] + 1
    with pytest.raises(sp.LayoutError, match="holds other values than its replica, under"):
        sp.collect(shards, t)


@pytest.mark.parametrize("dtype", some.DTYPES)
def test_every_dtype_goes_round(dtype: str) -> None:
    mesh = sp.Mesh(a=2, b=3)
    t = sp.TensorType(dtype, (5, 6), ("a", "b"), mesh)
    array = oracle.content(t)
    assert np.array_equal(sp.collect(sp.distribute(array, t), t), array)
    for reduction in ("max", "min"):
        u = sp.TensorType(dtype, (4,), (None,), mesh, partial={"a": reduction})
        part = oracle.content(u)
        assert np.array_equal(sp.collect(sp.distribute(part, u), u), part)
        assert identity(reduction, numpy_dtype(dtype)).dtype == numpy_dtype(dtype)


def test_shards_away_from_the_root_are_poison() -> None:
    t = sp.TensorType("f32", (2,), (None,), sp.Mesh(a=2), root=("a",))
    first, second = sp.distribute(np.ones(2, np.float32), t)
    assert np.array_equal(first, [1, 1]) and np.isnan(second).all()


T = sp.TensorType("i32", (4,), ("x",), sp.Mesh(x=2))
P = Program({"0": T}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",))
ARRAY = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sp.distribute(np.arange(4), T),
         "an array of dtype int64 and shape (4,) is not of type i32[4@x]"),
        (lambda: sp.distribute(ARRAY[:2], T), "an array of dtype int32 and shape (2,) is not of type i32[4@x]"),
        (lambda: sp.collect([ARRAY[:2]], T), "1 shards for the 2 devices of TensorType(i32[4@x] on x=2)"),
        (lambda: sp.collect([ARRAY, ARRAY], T), "device 0: shard of shape (4,), but i32[4@x] has (2,)"),
        (lambda: sp.collect([ARRAY, ARRAY + 1], P.types["1"]),
         "device 1 holds other values than its replica, under i32[4]"),
        (lambda: sp.run(P, [ARRAY[:2]]), "input %0: 1 shards for the 2 devices of i32[4@x]"),
        (lambda: sp.run(P, [ARRAY, ARRAY]),
         "input %0, device 0: a shard of dtype int32 and shape (4,), but i32[4@x] needs i32 and (2,)"),
        (lambda: sp.run(P, [[ARRAY[:2]] * 2] * 2), "2 inputs given, but the program has 1"),
    ],
)  # fmt: skip
def test_what_is_refused(call: object, message: str) -> None:
    with pytest.raises(sp.LayoutError) as error:
        call()  # type: ignore[operator]
    assert str(error.value) == message


def test_run_takes_and_returns_one_list_or_several() -> None:
    shards = sp.distribute(ARRAY, T)
    single = sp.run(P, shards)
    assert [x.tolist() for x in single] == [[0, 1, 2, 3]] * 2
    two = Program({"0": T, "1": T}, [], ("0", "1"))
    assert len(sp.run(two, [shards, shards])) == 2
    with pytest.raises(sp.BackendError, match="unknown backend 'cuda'; legal are "):
        sp.run(P, shards, backend="cuda")


def test_shards_of_an_uneven_dim_are_run_as_they_are() -> None:
    """Each has the shape of its own device, not of the first."""
    t = sp.TensorType.parse("i32[5@x]", sp.Mesh(x=3))
    program = Program({"0": t}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",))
    array = np.arange(5, dtype=np.int32)
    shards = sp.distribute(array, t)
    assert [x.shape for x in shards] == [(2,), (2,), (1,)]
    assert all(np.array_equal(x, array) for x in sp.run(program, shards))
    with pytest.raises(sp.LayoutError, match=r"device 2: a shard of dtype int32 and shape \(2,\)"):
        sp.run(program, [shards[0], shards[1], shards[1]])
