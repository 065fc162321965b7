"""Threads in which users ask why their program moves data: what `why` names, done, and compiled by JAX, moves nothing.

jax-ml/jax 21562 and openxla/xla 15207 (one program), pytorch/pytorch 167106, meta-pytorch/autoparallel 462,
openxla/shardy 1449. On eight CPU devices, in a child process.
"""

from __future__ import annotations

from typing import Any

import pytest

import shardplan as sp
from execution.jax_child import said


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What every check says."""
    return said("interop/jax_why_checks.py")


def test_every_thread_is_there(found: dict[str, dict[str, Any]]) -> None:
    products = {"batched_product", "batched_product_backward"}
    assert set(found) == products | {"full_rematerialization", "norm_gradient", "shard_to_shard", "slow_axis"}
    assert not [one["raised"] for one in found.values() if "raised" in one]


@pytest.mark.parametrize("name", ["full_rematerialization", "norm_gradient", "shard_to_shard"])
def test_with_what_is_named_nothing_is_moved(found: dict[str, dict[str, Any]], name: str) -> None:
    """JAX's program has collectives as it was asked, none with the annotations, and computes the same."""
    one = found[name]
    assert sum(one["before"]["kinds"].values()) > 0
    assert one["after"]["kinds"] == {} and one["then"] == []
    assert one["after"]["sums"] == pytest.approx(one["before"]["sums"], rel=1e-6)
    for m in one["movements"]:
        assert m["received_bytes"] > 0 and m["seconds"] > 0 and 0 <= m["exposed_seconds"] <= m["seconds"]
        assert m["remedy"]["more"] < 0, m


@pytest.mark.parametrize("name", ["batched_product", "batched_product_backward"])
def test_what_needs_no_movement_is_shown_none(found: dict[str, dict[str, Any]], name: str) -> None:
    assert found[name]["movements"] == [] and found[name]["before"]["kinds"] == {}


def test_who_asks_and_where(found: dict[str, dict[str, Any]]) -> None:
    """Both proposals, the op and its dims, and the line of the source."""
    first = found["full_rematerialization"]["movements"][0]
    assert (first["asks"], first["ops"]) == ("step 1 (pin)", ["exchange"])
    assert first["dims"] == ["d1 whole -> x,y", "d2 x -> whole"]
    assert (first["made"], first["wanted"]) == ("f32[16, 16, 16@x]", "f32[16, 16@(x,y), 16]")
    assert "jax_why_checks.py:" in first["place"] and first["place"].endswith("(full_rematerialization.<locals>.f)")
    names = {"a": "f32[16, 16@(x,y), 16]", "b": "f32[16, 16@(x,y), 16]"}
    assert first["remedy"]["annotations"] == names
    (one,) = found["shard_to_shard"]["movements"]
    assert one["asks"] == "the result output" and one["received_bytes"] == 128  # of a device's part, and no more


def test_a_movement_over_the_slow_axis_comes_first(found: dict[str, dict[str, Any]]) -> None:
    """shardy 1449: what crosses nodes costs more than four times its bytes inside, and what is named for it removes it.

    What JAX then compiles sums inside nodes alone.
    """
    one = found["slow_axis"]
    across, inside = one["movements"]
    assert (across["value"], inside["value"]) == ("output.0", "output.1") and "dcn" in across["dims"][0]
    assert across["received_bytes"] * 3 < inside["received_bytes"] and across["exposed_seconds"] > inside["seconds"]
    assert one["flat"][-1]["value"] == "output.0"  # where all links are alike it is the last
    assert across["remedy"]["annotations"] == {"x": "f32[1024, 512]", "w": "f32[512, 256]"}
    assert one["before"]["kinds"] == {"all-reduce": 2} and one["after"]["kinds"] == {"all-reduce": 1}
    assert one["before"]["of"] == ["f32[1024,1024]", "f32[1024,256]"] and one["after"]["of"] == ["f32[1024,1024]"]
    assert [m["value"] for m in one["then"]] == ["output.1"] and one["after"]["sums"] == one["before"]["sums"]


def test_the_product_of_the_thread_in_torch() -> None:
    """pytorch 167106 as torch exports it: nothing is moved, and with the hidden dim cut a sum is."""
    torch = pytest.importorskip("torch")

    class Product(torch.nn.Module):
        def forward(self, v: Any, s: Any) -> Any:
            return torch.matmul(v, s)

    model = sp.load(Product(), (torch.ones(4, 4, 4), torch.ones(4, 1)))
    names = [name for name, _ in model.program.inputs]
    v, s = names
    cut = {v: "f32[4@cp0, 4@cp1, 4]", "output": "f32[4@cp0, 4@cp1, 1]"}
    assert sp.why(model, annotations=cut, mesh="cp0=2,cp1=2").movements == ()
    hidden = {v: "f32[4@cp0, 4, 4@cp1]", s: "f32[4@cp1, 1]", "output": "f32[4@cp0, 4, 1]"}
    (moved,) = sp.why(model, annotations=hidden, mesh="cp0=2,cp1=2").movements
    assert moved.ops[0] == "all_reduce" and moved.made.layout.partial == ("cp1",)
