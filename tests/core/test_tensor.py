"""Types: boxes by the tiling rule, evenness, `same`, notation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings

import oracle
import strategies as some
from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllReduce
from shardplan.core.tensor import TensorType, same
from shardplan.errors import LayoutError, ParseError

ANY = some.types(dtypes=some.DTYPES)


@settings(max_examples=300)
@given(ANY)
def test_boxes_follow_the_tiling_rule(t: TensorType) -> None:
    boxes = t.boxes()
    for k in range(t.mesh.size):
        want = oracle.box(t, k)
        assert t.box(k) == want == t.box(t.mesh.coordinates(k)) == tuple(map(tuple, boxes[k].tolist()))
        assert t.local_shape(k) == tuple(hi - lo for lo, hi in want)
        assert t.elements()[k] == oracle.volume(want)
    assert t.local_bytes() == int(t.elements().max()) * t.itemsize
    assert t.nbytes == math.prod(t.shape) * t.itemsize


@given(ANY)
def test_the_tiles_cover_the_array_equally_often(t: TensorType) -> None:
    count = np.zeros(t.shape, dtype=int)
    for k in range(t.mesh.size):
        count[oracle.index(oracle.box(t, k))] += 1
    parts = math.prod(t.mesh.span(a).size for d in t.layout.dims for a in d)
    assert np.all(count == t.mesh.size // parts)


@given(ANY)
def test_even_is_divisible(t: TensorType) -> None:
    assert t.even == tuple(
        n % math.prod(t.mesh.span(a).size for a in d) == 0 for n, d in zip(t.shape, t.layout.dims, strict=True)
    )
    assert t.all_even == all(t.even)
    if t.all_even:
        assert len(set(t.elements().tolist())) == 1


@given(ANY)
def test_text_round_trip(t: TensorType) -> None:
    again = TensorType.parse(str(t), t.mesh)
    assert again == t and hash(again) == hash(t) and str(again) == str(t)


@settings(max_examples=300)
@given(some.pairs(("even", "uneven", "partial", "rooted")))
def test_same_is_equality_of_boxes_and_marks(pair: tuple[TensorType, TensorType]) -> None:
    t, u = pair
    boxes = all(oracle.box(t, k) == oracle.box(u, k) for k in range(t.mesh.size))
    marks = all(
        set(t.mesh.expand(x)) == set(t.mesh.expand(y))
        for x, y in ((t.layout.partial, u.layout.partial), (t.layout.root, u.layout.root))
    )
    live = [x.layout.reduction if x.mesh.expand(x.layout.partial) else None for x in pair]
    assert same(t, u) == same(u, t) == (boxes and marks and live[0] == live[1])
    assert same(t, t)


@given(some.cross_pairs(marked=False))
def test_same_across_meshes_goes_by_device_id(pair: tuple[TensorType, TensorType]) -> None:
    t, u = pair
    by_id = [{d: oracle.box(x, k) for k, d in enumerate(x.mesh.devices)} for x in pair]
    assert same(t, u) == (by_id[0] == by_id[1])


def test_same_tells_addends_and_roots_apart() -> None:
    mesh = Mesh(a=2, b=2)
    assert not same(TensorType("f32", (4,), (None,), mesh, root=("a",)), TensorType("f32", (4,), (None,), mesh))
    there, back = (
        TensorType("f32", (4,), (None,), Mesh({"x": 2}, devices=ids), {"x": "sum"}) for ids in ((0, 1), (1, 0))
    )
    assert not same(there, back), "the first addend is on device 0, or on device 1"


def test_the_bytes_of_a_type_are_those_of_its_largest_shard() -> None:
    assert TensorType("f32", (5, 3), ("a", None), Mesh(a=2)).local_bytes() == 3 * 3 * 4


def test_bytes_are_counted_exactly_beyond_64_bits() -> None:
    t = TensorType("f32", (2**31, 2**30), (None, None), Mesh(a=2), {"a": "sum"})
    # Of 2^63 bytes a device receives the addend of its half, and the other half reduced.
    assert AllReduce(("a",)).received_bytes(t).tolist() == [2**63] * 2


@pytest.mark.parametrize(
    ("n", "axes", "sizes"),
    [
        (10, ("a", "b"), [3, 2, 3, 2]),  # DTensor's nested Shard
        (10, ("b", "a"), [3, 3, 2, 2]),
        (5, ("a", "b"), [2, 1, 1, 1]),
        (3, ("a", "b"), [1, 1, 1, 0]),
        (1, ("a", "b"), [1, 0, 0, 0]),
        (9, ("a",), [5, 5, 4, 4]),
    ],
)
def test_nested_ceilings(n: int, axes: tuple[str, ...], sizes: list[int]) -> None:
    t = TensorType("f32", (n,), (axes,), Mesh(a=2, b=2))
    assert [t.local_shape(k)[0] for k in range(4)] == sizes


def test_axes_of_size_one_change_no_box() -> None:
    mesh = Mesh(a=2, one=1)
    t, u = TensorType("f32", (4,), (("a", "one"),), mesh), TensorType("f32", (4,), ("a",), mesh)
    assert same(t, u) and t != u
    assert same(TensorType("f32", (4,), (None,), mesh, {"one": "sum"}), TensorType("f32", (4,), (None,), mesh))
    assert same(TensorType("f32", (4,), (None,), mesh, root=("one",)), TensorType("f32", (4,), (None,), mesh))


MESH = Mesh(data=4, tensor=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorType("f33", (4,), (None,), MESH),
         "unknown dtype 'f33'; legal dtypes are bool, i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, "
         "f8e4m3, f8e5m2, c64, c128"),
        (lambda: TensorType("f32", (4, 0), (None,), MESH),
         "dim 1 of the shape (4, 0) has size 0; every dim has at least 1 element"),
        (lambda: TensorType("f32", (6,), ("data.0", ), Mesh(data=8)).box(9),
         "device 9 is outside the mesh data=8: places are 0 to 7"),
        (lambda: TensorType("f32", (7,), ("data.0",), MESH),
         "dim 0 of size 7 is uneven over data.0 (product 2), so the sub-axis 'data.0' is refused there; legal are "
         "whole axes, or a product that divides 7"),
        (lambda: TensorType("f32", (6,), (("tensor", "data.1"),), MESH),
         "dim 0 of size 6 is uneven over (tensor,data.1) (product 4), so the sub-axis 'data.1' is refused there; legal "
         "are whole axes, or a product that divides 6"),
    ],
)  # fmt: skip
def test_what_a_type_refuses(make: object, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        make()  # type: ignore[operator]
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a dtype, as in f32[64@data, 48]\n  \n  ^"),
        ("f32", "expected '[' in a type\n  f32\n     ^"),
        ("f32[@data]", "expected the size of a dim\n  f32[@data]\n      ^"),
        ("f32[4@dt]", "unknown axis 'dt': the mesh has data=4, tensor=2; did you mean 'data'\n  f32[4@dt]\n        ^"),
        ("f32[4 5]", "expected '@', ',' or ']' in a type\n  f32[4 5]\n        ^"),
        ("f32[4]{+data", "expected '}' in partial or root axes\n  f32[4]{+data\n              ^"),
        ("f32[4] x", "unexpected text after the type\n  f32[4] x\n         ^"),
    ],
)
def test_what_the_parser_refuses(text: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        TensorType.parse(text, MESH)
    assert str(error.value) == message


def test_an_unknown_axis_is_pointed_at_even_where_its_name_is_part_of_another() -> None:
    with pytest.raises(ParseError) as error:
        TensorType.parse("f32[4@(data,dat)]", MESH)
    assert str(error.value).splitlines()[-1].index("^") - 2 == "f32[4@(data,dat)]".index("dat)")


def test_dtypes_have_short_names() -> None:
    import ml_dtypes

    for given_, short in (("float32", "f32"), (np.float32, "f32"), (np.dtype("int64"), "i64"), ("s32", "i32"),
                          ("pred", "bool"), (ml_dtypes.bfloat16, "bf16"), ("bfloat16", "bf16")):  # fmt: skip
        assert TensorType(given_, (2,), (None,), MESH).dtype == short
