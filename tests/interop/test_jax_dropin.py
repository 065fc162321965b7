"""`interop.jax.reshard` in `jax.device_put`'s place: pytrees, ends, limits, donation, transformations, dtypes, a hunt.

What needs eight devices runs once, in a child process (`jax_dropin_checks.py`). `HUNT=3000 HUNT_SEED=1 python
jax_dropin_checks.py hunt` looks longer, elsewhere.
"""

from typing import Any

import pytest

from execution.jax_child import said_to_tests
from shardplan.errors import BackendError, LayoutError

jax = pytest.importorskip("jax")


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    return said_to_tests(request, "interop/jax_dropin_checks.py")


def test_as_device_put(seen: dict[str, Any]) -> None:
    """Pytrees and prefixes, host arrays, specs, devices, None and formats: what device_put gives, in all its facts."""
    assert seen["like_device_put"] == {}


def test_a_limit_holds_for_the_whole_pytree(seen: dict[str, Any]) -> None:
    """Two f32[8, 8] on 8 devices, 32 bytes a shard, one to be whole: 64 + 288, and 16 of staging if both are kept."""
    found = seen["limits"]
    assert (found["kept"], found["donated"], found["one"]) == (368, 320, 320)
    assert found["unmoved counts"] == 352, "one array stays where it is: 32 more than the other alone"
    assert found["values"] is None
    assert found["after a larger one"] == (
        "Infeasible: reshard f32[8@x, 8@y] to f32[8, 8] within 300 bytes a device, where the source is kept: the least "
        "found is 320 bytes; legal is a larger limit, or donate=True"
    )
    assert found["host"] == ("Infeasible: reshard within 200 bytes a device: the arrays placed from the host take 260")
    assert found["host, cut"] == (
        "Infeasible: reshard within 31 bytes a device: the arrays placed from the host take 32"
    )
    assert found["host, moved"] == (
        "Infeasible: reshard f32[8@x, 8@y] to f32[8@y, 8@x] within 44 bytes a device, where the source is kept: the "
        "least found is 80 bytes; legal is a larger limit, or donate=True"
    )
    assert found["too little"] == (
        "Infeasible: reshard 2 arrays within 300 bytes a device, where the source is kept: the least found is 368 "
        "bytes; legal is a larger limit, or donate=True"
    )


def test_what_is_kept_counts_to_the_end(seen: dict[str, Any]) -> None:
    assert seen["chained"] == []


def test_donation(seen: dict[str, Any]) -> None:
    assert seen["donation"] == {}


def test_sums_by_a_reduction_plan(seen: dict[str, Any]) -> None:
    assert seen["sums_by_a_plan"] == {}


def test_transformations_outside_jit(seen: dict[str, Any]) -> None:
    assert seen["transforms"] == {}


def test_transformations_inside_jit(seen: dict[str, Any]) -> None:
    assert seen["transforms_inside"] == {}


def test_every_kind_of_element(seen: dict[str, Any]) -> None:
    assert seen["kinds"] == {}


def test_small_arrays(seen: dict[str, Any]) -> None:
    assert seen["small"] == {}


def test_random_moves_are_those_of_device_put(seen: dict[str, Any]) -> None:
    assert seen["hunt"] == []


def test_executables_are_kept_by_bytes(seen: dict[str, Any]) -> None:
    """132 shapes, and none is compiled again; with room for three, the fourth drives out the first."""
    found = seen["executables"]
    assert found["first"] >= 132
    assert found["second"] == 0
    assert 132 * 2**14 < found["bytes"] < 2**29
    assert found["third"] == 12 and found["left"] == [3, True]


# On one device.


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"sharding": jax.sharding.PartitionSpec("x")}, BackendError,
            "reshard: P('x',) names axes of no mesh; legal is a NamedSharding, or a PartitionSpec under "
            "jax.set_mesh(mesh)",
        ),
        (
            {"sharding": "x"}, LayoutError,
            "reshard: 'x' (str) is no place for an array; legal are a Sharding, a PartitionSpec, a device, a Format, "
            "None, or a pytree of them",
        ),
        (
            {"sharding": {"b": None}}, LayoutError,
            "reshard: sharding is no prefix of the arrays' pytree: PyTreeDef({'b': None}) of PyTreeDef({'a': *}); "
            "legal is one value, or a pytree that ends where the other goes on",
        ),
        (
            {"sharding": None, "donate": True, "may_alias": True}, LayoutError,
            "reshard: donate=True and may_alias=True; legal is one of them",
        ),
        (
            {"sharding": None, "memory_limit": float("nan")}, LayoutError,
            "the memory limit is nan; legal is a whole number of bytes, its text such as '1 GB', or None",
        ),
        (
            {"sharding": None, "memory_limit": 0}, LayoutError,
            "the memory limit is 0 bytes; it must be at least 1",
        ),
    ],
)  # fmt: skip
def test_errors(given: dict[str, Any], error: type[Exception], text: str) -> None:
    from shardplan.interop.jax import reshard

    with pytest.raises(error) as caught:
        reshard({"a": jax.numpy.ones(4)}, **given)
    assert str(caught.value) == text


def test_errors_inside_jit_and_of_formats() -> None:
    from jax.experimental.layout import Format, Layout
    from jax.sharding import NamedSharding, PartitionSpec

    from shardplan.interop.jax import reshard

    end = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec("x"))
    a = jax.numpy.ones((4, 4))

    def told(call: Any) -> str:
        with pytest.raises(BackendError) as caught:
            call()
        return str(caught.value)

    assert told(lambda: jax.jit(lambda t: reshard(t, end, end, memory_limit=99))([a, a])) == (
        "reshard: memory_limit=99 over 2 arrays of which 2 are traced; legal is one array, or a call outside jit"
    )
    assert told(lambda: jax.jit(lambda t: reshard(t, end, end, donate=True))(a)) == (
        "reshard: donate=True of an array that is traced; legal is donate_argnums of jax.jit"
    )
    assert told(lambda: reshard(a, NamedSharding(end.mesh.abstract_mesh, end.spec))) == (
        "reshard: P('x',) is on an AbstractMesh, which names no devices; outside jit legal is a NamedSharding on a Mesh"
    )
    said = told(lambda: reshard(a, Format(Layout(major_to_minor=(1, 0)), end), memory_limit=9999))
    assert said.startswith("reshard: memory_limit=9999 with the layout Layout(major_to_minor=(1, 0)")
    assert said.endswith(
        "whose change no plan counts; legal is its sharding here, and jax.device_put to the layout then"
    )


def test_one_array_in_two_layouts_is_two_results() -> None:
    from jax.experimental.layout import Format, Layout
    from jax.sharding import NamedSharding, PartitionSpec

    from shardplan.interop.jax import reshard

    end = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec("x"))
    a = jax.numpy.arange(12.0).reshape(3, 4)
    orders = [(0, 1), (1, 0), (0, 1)]
    found = reshard([a] * 3, [Format(Layout(major_to_minor=order), end) for order in orders])
    assert [x.format.layout.major_to_minor for x in found] == orders
    assert all((x == a).all() for x in found)


@pytest.mark.parametrize(("at", "left"), [(0, (None, "y")), (1, ("x", "y")), (2, ("x", None)), (3, ("x", None, "y"))])
def test_a_batch_dim_is_left_out_of_a_sharding(at: int, left: tuple[str | None, ...]) -> None:
    from jax.sharding import NamedSharding, PartitionSpec

    from shardplan.interop.jax.primitive import _drop_dim

    whole = NamedSharding(jax.make_mesh((1, 1), ("x", "y")), PartitionSpec("x", None, "y"))
    assert tuple(_drop_dim(whole, at).spec) == left
