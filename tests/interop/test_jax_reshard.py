"""`interop.jax.reshard`: outside and inside jit, gradients, other meshes, errors; and types of shardings.

What needs eight devices runs once, in a child process (`jax_reshard_checks.py`).
"""

from typing import Any

import pytest

import shardplan as sp
from execution.jax_child import said_to_tests
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.interop.jax.plans import plan_of
from shardplan.interop.jax.types import spec_of

pytest.importorskip("jax")


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    return said_to_tests(request, "interop/jax_reshard_checks.py")


def test_outside_jit(seen: dict[str, Any]) -> None:
    """Between pairs of twelve shardings: one mesh, other axes, order and devices, one device, explicit axes."""
    assert seen["outside"] == {}


def test_dtypes_and_empty_arrays(seen: dict[str, Any]) -> None:
    assert seen["dtypes"] == {}


def test_nothing_to_do(seen: dict[str, Any]) -> None:
    """The array itself; the caller's own sharding where it only differs in words; no communication inside jit."""
    assert seen["identity"] == [True, True, True]


def test_inside_jit(seen: dict[str, Any]) -> None:
    assert seen["inside"] == {}


def test_gradients(seen: dict[str, Any]) -> None:
    assert seen["gradients"] == {}


def test_compiled(seen: dict[str, Any]) -> None:
    """Inside jit: the collectives' bytes are the program's, no array is over the bound, the values are right."""
    assert seen["compiled"] == {"wrong": [], "checked": 20}


ERRORS = {
    "no source": "BackendError: reshard: inside jit, in auto mode, an array does not carry its sharding (its type is "
    "float32[48,24]); pass source=, the NamedSharding that it has",
    "order": "BackendError: reshard: a jit has one list of devices, but the source is on the mesh x=2, y=4 and the "
    "destination on z=8 devices=[7,6,5,4,3,2,1,0]; reshard outside jit",
    "refinement": "BackendError: reshard: no mesh refines both, but the source is on the mesh u=2, v=3 and the "
    "destination on s=3, t=2; reshard outside jit",
    "explicit mesh": "BackendError: reshard: P('q', 'p') is on the mesh p=4, q=2, but inside jit JAX takes one mesh "
    "only, the array's own: x=2, y=4; reshard to another mesh outside jit",
    "unconstrained": "LayoutError: dim 0 of P(UNCONSTRAINED,) is unconstrained; legal are None, an axis, and a tuple "
    "of axes, since a plan needs to know both ends",
    "uneven": "LayoutError: f32[7@y, 2@x] on the mesh x=2, y=4: dim 0 of size 7 is uneven over 4 devices; JAX shards "
    "evenly: legal are sizes that 4 divides",
    "limit": "Infeasible: reshard f32[48@x, 24@y] to f32[48, 24] within 1000 bytes a device, where the source is kept: "
    "the least found is 5324 bytes; legal is a larger limit, or donate=True",
    "unreduced": "BackendError: reshard: P(unreduced={'x'}) is unreduced over x; legal is a reduced array",
    "no dtype": "LayoutError: type_of: the shape (4, 4) has no dtype; pass dtype=",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(seen: dict[str, Any], name: str) -> None:
    assert seen["errors"][name] == ERRORS[name]


def test_types(seen: dict[str, Any]) -> None:
    assert seen["types"]["types"] == [
        "f32[48@x, 24@y] on x=2, y=4",
        "f32[48@(y,x), 24] on x=2, y=4",
        "bf16[8@z, 8] on z=8 devices=[7,6,5,4,3,2,1,0]",
        "f32[48, 24] on device=1 devices=3:4",
        "f32[48@y, 24] on x=2, y=4",
        "f32[48@y, 24]{+x} on x=2, y=4",
    ]
    assert seen["types"]["specs"] == [
        "P('x', 'y')", "P(('y', 'x'), None)", "P('z', None)", "P('y', None)", "P('y', None, unreduced={'x'})",
    ]  # fmt: skip


def test_shardings_in_place_of_types(seen: dict[str, Any]) -> None:
    """`sp.redistribute` between `NamedSharding`s, on one mesh and others, is the plan between their types."""
    assert seen["shardings"] == {"wrong": [], "checked": 49}


COMPARED = {
    "gather": "f32[48@x, 24@y] to f32[48, 24]: all devices receive 32.3 kB by the plan (all_gather), 32.3 kB by XLA "
    "(2 all-gather)",
    "swap": "f32[48@x, 24@y] to f32[48@y, 24@x]: all devices receive 4.61 kB by the plan (all_to_all, permute), 4.61 "
    "kB by XLA (all-to-all, collective-permute)",
    "order": "BackendError: compare_with_xla: f32[48@x, 24@y] on the mesh x=2, y=4 and f32[48@z, 24] on z=8 "
    "devices=[7,6,5,4,3,2,1,0] meet in no jit; legal are shardings of the same devices in the same order, on meshes "
    "that one mesh refines",
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_xla_sends_beside_ours(seen: dict[str, Any], name: str) -> None:
    assert seen["beside"]["lines"][name].startswith(COMPARED[name])


def test_the_bytes_of_xla_are_those_that_a_peer_reads(seen: dict[str, Any]) -> None:
    assert seen["beside"]["wrong"] == []


# Without eight devices.


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("f32[8@a.0]", "the sub-axis 'a.0'"),
        ("f32[7@a]", "an uneven dim"),
        ("f32[8]{root:a}", "{root:a}"),
        ("f32[8]{max:a}", "{max:a}"),
    ],
)
def test_what_a_partition_spec_cannot_say(text: str, what: str) -> None:
    t = TensorType.parse(text, sp.Mesh(a=4))
    with pytest.raises(LayoutError) as caught:
        spec_of(t)
    legal = "legal are whole axes of even dims, and {+axis}"
    assert str(caught.value) == f"{t}: a PartitionSpec cannot say {what}; {legal}"


def test_plans_are_portable_where_they_can_be() -> None:
    """A limit that only the general exchange keeps is kept by it."""
    mesh = sp.Mesh(a=2, b=2, c=2)
    s, t = (TensorType.parse(x, mesh) for x in ("f32[16@(a,b), 16@c]", "f32[16@c, 16@(b,a)]"))
    plan = plan_of(s, t)
    assert all(step.op.name != "exchange" or 2 * 2 ** len(step.op.axes) <= 8 for step in plan.program.steps)
    assert plan_of(s, t) is plan
