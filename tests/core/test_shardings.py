"""Shardings of JAX as types, by their attributes alone: JAX is not imported."""

from types import SimpleNamespace
from typing import Any

import pytest

import shardplan as sp
from shardplan.core.shardings import common_mesh, is_sharding, type_of
from shardplan.errors import LayoutError


class AbstractMesh:
    def __init__(self, **sizes: int) -> None:
        self.shape_tuple = tuple(sizes.items())

    @property
    def devices(self) -> Any:
        raise ValueError("an abstract mesh has none")


class NamedSharding:
    def __init__(self, mesh: Any, *spec: Any) -> None:
        self.mesh, self.spec = mesh, spec

    @property
    def device_set(self) -> Any:
        raise ValueError("of an abstract mesh there is none")


MESH = AbstractMesh(x=2, y=4)
ROWS, COLUMNS = NamedSharding(MESH, ("x", "y")), NamedSharding(MESH, None, "y")


def test_a_plan_between_shardings_is_that_between_types() -> None:
    assert is_sharding(ROWS) and not is_sharding("f32[8]") and not is_sharding(SimpleNamespace())
    plan = sp.redistribute(ROWS, COLUMNS, shape=(16, 8), dtype="bf16", memory_limit="1 kB")
    assert plan == sp.redistribute("bf16[16@(x,y), 8]", "bf16[16, 8@y]", mesh="x=2,y=4", memory_limit="1 kB")


def test_shardings_on_two_meshes_meet_on_one_that_refines_both() -> None:
    other = NamedSharding(AbstractMesh(p=4, q=2), "q", "p")
    plan = sp.redistribute(ROWS, other, shape=(16, 8), dtype="f32")
    assert plan.program.input_types[0].mesh == sp.Mesh(c0=2, c1=2, c2=2) == plan.program.output_types[0].mesh
    assert [str(t) for t in (*plan.program.input_types, *plan.program.output_types)] == [
        "f32[16@(c0,c1,c2), 8]", "f32[16@c2, 8@(c0,c1)]",
    ]  # fmt: skip


def test_a_concrete_mesh_says_the_ids_of_its_devices() -> None:
    devices = SimpleNamespace(flat=[SimpleNamespace(id=k) for k in (3, 1, 2, 0)])
    mesh = SimpleNamespace(shape_tuple=(("x", 4),), devices=devices)
    assert type_of((8,), NamedSharding(_Hashed(mesh), "x"), "f32").mesh == sp.Mesh({"x": 4}, devices=[3, 1, 2, 0])


class _Hashed:
    def __init__(self, mesh: Any) -> None:
        self.shape_tuple, self.devices = mesh.shape_tuple, mesh.devices


LEGAL = "legal is a sharding at both ends, where one of them or shape= or dtype= is given"
AN_ARRAY = "legal are the shape and the dtype of an array, whose mesh the shardings say"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((ROWS, "f32[8]"), {"shape": (8,), "dtype": "f32"}), f"the destination is 'f32[8]'; {LEGAL}"),
        ((("f32[8]", "f32[8]"), {"mesh": "x=2", "shape": (8,)}), f"the source is 'f32[8]'; {LEGAL}"),
        (((ROWS, COLUMNS), {"shape": (8, 8)}), f"shardings with shape=(8, 8), dtype=None, mesh=None; {AN_ARRAY}"),
        (
            ((ROWS, COLUMNS), {"shape": (8, 8), "dtype": "f32", "mesh": "x=2"}),
            f"shardings with shape=(8, 8), dtype='f32', mesh='x=2'; {AN_ARRAY}",
        ),
        (((ROWS, COLUMNS), {"shape": (8.5, 8), "dtype": "f32"}), "shape is 8.5; legal is a whole number of at least 0"),
        (
            ((ROWS, COLUMNS), {"shape": (12, 8), "dtype": "f32"}),
            "f32[12@(x,y), 8] on the mesh x=2, y=4: dim 0 of size 12 is uneven over 8 devices; JAX shards evenly: "
            "legal are sizes that 8 divides",
        ),
        (
            ((NamedSharding(MESH, object()), COLUMNS), {"shape": (8, 8), "dtype": "f32"}),
            "is unconstrained; legal are None, an axis, and a tuple of axes, since a plan needs to know both ends",
        ),
    ],
)
def test_what_no_plan_is_made_between(arguments: Any, said: str) -> None:
    ends, keywords = arguments
    with pytest.raises(LayoutError) as caught:
        sp.redistribute(*ends, **keywords)
    assert str(caught.value).endswith(said)


def test_common_meshes() -> None:
    """Axes of two meshes over one list of devices, as runs of the axes of their common refinement."""
    found = common_mesh(sp.Mesh(x=2, y=6), sp.Mesh(p=4, q=3))
    assert found is not None
    mesh, of_a, of_b = found
    assert (mesh.shape, of_a, of_b) == (
        {"c0": 2, "c1": 2, "c2": 3}, {"x": ("c0",), "y": ("c1", "c2")}, {"p": ("c0", "c1"), "q": ("c2",)},
    )  # fmt: skip
    assert common_mesh(sp.Mesh(x=2, y=3), sp.Mesh(p=3, q=2)) is None
    assert common_mesh(sp.Mesh(x=2), sp.Mesh({"x": 2}, devices=[1, 0])) is None
    same = sp.Mesh(x=2, y=1)
    assert common_mesh(same, same) == (same, {"x": ("x",), "y": ("y",)}, {"x": ("x",), "y": ("y",)})
    ones = common_mesh(sp.Mesh(x=2, y=1), sp.Mesh(z=2))
    assert ones is not None and ones[1] == {"x": ("c0",), "y": ()}
