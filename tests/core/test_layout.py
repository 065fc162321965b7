"""Layouts: notation, canonical form, invariants."""

import pytest
from hypothesis import given

import strategies as some
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError

MESH = Mesh(a=4, b=2, c=1).split("a", x=2, y=2)


def made(*spec: object, **marks: object) -> Layout:
    return TensorType("f32", (64,) * len(spec), spec, MESH, **marks).layout  # type: ignore[arg-type]


@given(some.types())
def test_text_round_trip(t: TensorType) -> None:
    assert Layout.parse(str(t.layout)) == t.layout


@given(some.types())
def test_a_layout_is_its_own_canonical_form(t: TensorType) -> None:
    assert t.with_layout(t.layout).layout == t.layout
    partial = dict.fromkeys(t.layout.partial, t.layout.reduction or "")
    again = TensorType(t.dtype, t.shape, t.layout.spec, t.mesh, partial, t.layout.root)
    assert again == t


@given(some.types(("even", "partial", "rooted")))
def test_prime_sub_axes_fold_into_the_same_type(t: TensorType) -> None:
    names = lambda axes: tuple(t.mesh.atoms[k].name for k in t.mesh.expand(axes))  # noqa: E731
    dims = tuple(names(d) for d in t.layout.dims)
    fine = Layout(dims, names(t.layout.partial), t.layout.reduction, names(t.layout.root))
    ones = [a for a in t.layout.used_axes if t.mesh.span(a).size == 1]
    if not ones:
        assert t.with_layout(fine) == t


def test_runs_of_sub_axes_are_folded() -> None:
    assert made(("a.x", "a.y"), "b").dims == (("a",), ("b",))
    assert made(("a.y", "a.x")).dims == (("a.y", "a.x"),)
    assert made(("b", "a.x", "a.y")).dims == (("b", "a"),)
    assert made("a.x", "a.y").dims == (("a.x",), ("a.y",))
    assert made(None, partial={"a.y": "sum", "a.x": "sum"}).partial == ("a",)
    assert made(None, root=("b", "a.y")).root == ("a.y", "b")


def test_the_spec_is_a_partition_spec() -> None:
    assert made("b", ("a", "c"), None, ()).spec == ("b", ("a", "c"), None, None)
    assert str(made("b", None, partial={"a": "max"}, root=("c",))) == "[@b, _]{max:a}{root:c}"


@pytest.mark.parametrize(
    ("text", "same"),
    [("[@a, _]{U:b}", "[@a, _]{+b}"), ("[ @a ,_ ]", "[@a, _]"), ("[]", "[]"), ("[@(a,b)]{root:c}", "[@(a,b)]{root:c}"),
     ("[,@a]", "[_, @a]")],
)  # fmt: skip
def test_loose_texts(text: str, same: str) -> None:
    assert str(Layout.parse(text)) == same


@pytest.mark.parametrize(
    ("spec", "marks", "message"),
    [
        (("d",), {}, "unknown axis 'd': the mesh has a=4, b=2, c=1"),
        (("b", "b"), {}, "axis 'b' is used twice in [@b, @b]; each axis is used at most once in a type"),
        (("a", "a.x"), {}, "axes 'a' and 'a.x' overlap in [@a, @a.x]; each axis is used at most once in a type"),
        (("c", "c"), {}, "axis 'c' is used twice in [@c, @c]; each axis is used at most once in a type"),
        (("b",), {"root": ("b",)}, "axis 'b' is used twice in [@b]{root:b}; each axis is used at most once in a type"),
        (("b",), {"partial": {"a": "mean"}}, "unknown reduction 'mean'; legal are sum, max, min, product, band, bor, bxor"),  # noqa: E501
        ((None,), {"partial": {"a": "sum", "b": "max"}},
         "one type has the reductions max, sum; all its partial axes carry one"),
    ],
)  # fmt: skip
def test_what_a_layout_refuses(spec: tuple[object, ...], marks: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError) as error:
        made(*spec, **marks)
    assert str(error.value) == message


def test_more_entries_than_dims() -> None:
    with pytest.raises(LayoutError) as error:
        TensorType("f32", (4,), ("b", ("a", "c")), MESH)
    assert str(error.value) == "the layout (b, (a,c)) names 2 dims, but the tensor has 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@a", "expected '[' in a layout\n  @a\n  ^"),
        ("[a]", "expected '@axis', '_' or ']' in a layout\n  [a]\n   ^"),
        ("[@]", "expected an axis after '@'\n  [@]\n    ^"),
        ("[@a _]", "expected ',' or ']' in a layout\n  [@a _]\n      ^"),
        ("[_]{mean:a}", "unknown reduction 'mean'; legal are sum, max, min, product, band, bor, bxor, root\n  [_]{mean:a}\n      ^"),  # noqa: E501
        ("[_]{+a}{max:b}",
         "one type has the reductions sum and max; all its partial axes carry one\n  [_]{+a}{max:b}\n               ^"),
        ("[_] x", "unexpected text after the layout\n  [_] x\n      ^"),
    ],
)  # fmt: skip
def test_what_the_parser_refuses(text: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        Layout.parse(text)
    assert str(error.value) == message
