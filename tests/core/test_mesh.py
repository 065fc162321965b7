"""Meshes: places, names, groups, splits, text."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
import strategies as some
from shardplan.core.mesh import Mesh, primes
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError


@given(some.meshes())
def test_text_round_trip(mesh: Mesh) -> None:
    again = Mesh.parse(str(mesh))
    assert again == mesh and hash(again) == hash(mesh) and str(again) == str(mesh)


@given(some.meshes())
def test_every_name_is_a_digit_of_the_place(mesh: Mesh) -> None:
    for name, (size, stride) in oracle.digits(mesh).items():
        span = mesh.span(name)
        assert (span.size, span.size == 1 or span.stride == stride) == (size, True)
        assert mesh.coordinate(name).tolist() == [k // stride % size for k in range(mesh.size)]


@given(some.meshes())
def test_places_are_row_major_coordinates(mesh: Mesh) -> None:
    found = [mesh.coordinates(k) for k in range(mesh.size)]
    assert found == list(np.ndindex(*mesh.sizes))
    assert [mesh.place(c) for c in found] == list(range(mesh.size)) == [mesh.place(k) for k in range(mesh.size)]


@given(some.meshes(), some.rngs())
def test_groups_are_ordered_major_to_minor(mesh: Mesh, rng: object) -> None:
    axes = rng.sample(mesh.axes, rng.randint(0, len(mesh.axes)))  # type: ignore[attr-defined]
    groups = mesh.group_places(axes)
    assert sorted(groups.reshape(-1).tolist()) == list(range(mesh.size))
    for group in groups.tolist():
        keys = [tuple(oracle.coordinate(mesh, a, k) for a in axes) for k in group]
        assert keys == list(np.ndindex(*(mesh.shape[a] for a in axes)))
        others = {tuple(oracle.coordinate(mesh, a, k) for a in mesh.axes if a not in axes) for k in group}
        assert len(others) == 1


@given(some.meshes())
def test_folding_undoes_expanding(mesh: Mesh) -> None:
    live = [a for a in mesh.axes if mesh.shape[a] > 1]
    assert mesh.fold(mesh.expand(live)) == tuple(live)
    for k, atom in enumerate(mesh.atoms):
        assert mesh.expand((atom.name,)) == (k,)
    assert np.prod([a.size for a in mesh.atoms], dtype=int) == mesh.size


@given(st.integers(1, 3000))
def test_primes(n: int) -> None:
    assert list(primes(n)) == oracle.factors(n)


def test_a_split_names_parts_and_their_primes() -> None:
    mesh = Mesh(data=8, tensor=3).split("data", node=2, gpu=4)
    assert [a.name for a in mesh.atoms] == ["data.node", "data.gpu.0", "data.gpu.1", "tensor"]
    assert (mesh.span("data.gpu").size, mesh.span("data.gpu").stride) == (4, 3)
    assert str(mesh) == "data=(node=2,gpu=4), tensor=3"
    assert mesh.size == 24 and mesh.shape == {"data": 8, "tensor": 3}
    assert mesh != Mesh(data=8, tensor=3)


def test_a_mesh_line_says_the_order_of_factors() -> None:
    """In `data=12(3,2,2)` `data.0` is the 3; the ascending order is the one that needs no saying."""
    mesh = Mesh.parse("data=12(3,2,2), tensor=2")
    assert [(a.name, a.size, a.stride) for a in mesh.atoms] == [
        ("data.0", 3, 8), ("data.1", 2, 4), ("data.2", 2, 2), ("tensor", 2, 1)
    ]  # fmt: skip
    assert mesh == Mesh(data=12, tensor=2).reorder_factors("data", 3, 2, 2) != Mesh(data=12, tensor=2)
    assert str(mesh) == "data=12(3,2,2), tensor=2" and mesh.fold((0, 1, 2)) == ("data",)
    assert Mesh.parse("data=12(2,2,3)") == Mesh(data=12) == Mesh(data=12).reorder_factors("data", 2, 2, 3)
    with pytest.raises(LayoutError, match=r"cannot order 'data' as \(4, 3\): legal are the factors \(2, 2, 3\)"):
        Mesh(data=12).reorder_factors("data", 4, 3)
    with pytest.raises(LayoutError, match="a factor of data is 'x'; legal is a whole number of at least 2"):
        Mesh(data=12).reorder_factors("data", 3, "x")  # type: ignore[arg-type]
    with pytest.raises(ParseError, match="expected the prime factors of 12, in any order"):
        Mesh.parse("data=12(4,3)")


def test_devices_are_printed_when_they_are_not_the_default() -> None:
    assert str(Mesh(a=2)) == "a=2"
    assert str(Mesh({"a": 2}, devices=range(4, 6))) == "a=2 devices=4:6"
    assert str(Mesh({"a": 2}, devices=[3, 1])) == "a=2 devices=[3,1]"
    assert Mesh(a=2) == Mesh({"a": 2}, devices=[0, 1]) != Mesh({"a": 2}, devices=[1, 0])


def test_a_mesh_without_axes_is_one_device() -> None:
    assert Mesh().size == 1 and Mesh().coordinates(0) == () and Mesh().group_places(()).tolist() == [[0]]


REFUSED = [
    (lambda: Mesh({"1a": 2}), "axis name '1a' is not an identifier"),
    (lambda: Mesh(a=0), "axis 'a' has size 0: sizes are integers of at least 1"),
    (lambda: Mesh(a=2.0), "axis 'a' has size 2.0: sizes are integers of at least 1"),  # type: ignore[arg-type]
    (lambda: Mesh(a=True), "axis 'a' has size True: sizes are integers of at least 1"),
    (lambda: Mesh({"a": 2}, b=2), "a mesh takes its axes as one mapping or as keywords, not both"),
    (lambda: Mesh({"a": 2}, devices=[0]), "the mesh {'a': 2} has 2 places, but 1 devices are given"),
    (lambda: Mesh({"a": 2}, devices=[1, 1]), "device 1 is listed twice; the device ids of a mesh are distinct"),
    (lambda: Mesh({"a": 2}, devices=[0, -1]), "device -1 is negative; device ids are 0 or more"),
    (lambda: Mesh(a=2).span("b"), "unknown axis 'b': the mesh has a=2"),
    (lambda: Mesh(a=2).place(2), "device 2 is outside the mesh a=2: places are 0 to 1"),
    (lambda: Mesh(a=2).place((0, 0)), "device (0, 0) is outside the mesh a=2"),
    (lambda: Mesh(a=2).split("b", x=2), "cannot split 'b': the mesh has a=2"),
    (lambda: Mesh(a=4).split("a", x=3), "cannot split 'a' of size 4 into {'x': 3}: the parts must multiply to 4"),
    (lambda: Mesh(a=4).split("a", **{"0": 4}), "cannot split 'a': the part name '0' is not an identifier"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_a_mesh_refuses(make: object, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        make()  # type: ignore[operator]
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "expected '=' in an axis\n  a\n   ^"),
        ("a=x", "expected the size of an axis\n  a=x\n    ^"),
        ("a=2, a=2", "axis 'a' is named twice\n  a=2, a=2\n       ^"),
        ("a=2 b=2", "unexpected text after the mesh\n  a=2 b=2\n      ^"),
        ("a=2 devices=0", "expected ':' in a range of devices\n  a=2 devices=0\n               ^"),
        ("a=(x=2 y=2)", "expected ',' or ')' in the parts of an axis\n  a=(x=2 y=2)\n         ^"),
    ],
)
def test_what_the_parser_refuses(text: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        Mesh.parse(text)
    assert str(error.value) == message


def test_what_another_process_pickled_is_equal_here() -> None:
    """Hashes of names differ between processes: none comes along."""
    made = (
        "import pickle, sys, shardplan as sp; m = sp.Mesh(data=4, tensor=2).split('data', node=2, gpu=2);"
        "o = sp.Mesh({'a': 2, 'b': 2}, devices=[3, 1, 0, 2]);"
        "t = [sp.TensorType.parse('f32[8@data.node, 6@tensor]{+data.gpu}', m), sp.TensorType.parse('i8[4@(a,b)]', o)];"
        "sys.stdout.buffer.write(pickle.dumps((m, o, *t)))"
    )
    m, o = Mesh(data=4, tensor=2).split("data", node=2, gpu=2), Mesh({"a": 2, "b": 2}, devices=[3, 1, 0, 2])
    here = (
        m, o, TensorType.parse("f32[8@data.node, 6@tensor]{+data.gpu}", m), TensorType.parse("i8[4@(a,b)]", o),
    )  # fmt: skip
    for seed in ("1", "2"):
        away = subprocess.run(
            [sys.executable, "-c", made], capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        found = pickle.loads(away.stdout)
        assert found == here and [hash(x) for x in found] == [hash(x) for x in here]
