"""All-gather + GEMM and GEMM + reduce-scatter: values, gradients, traces, on CPUs and by Triton in the interpreter."""

from importlib.util import find_spec
from typing import Any

import pytest
from tests.fused.forked import run

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")


@pytest.fixture(scope="module", params=["2", "3", pytest.param("3 triton", marks=needs_triton)])
def said(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found = run("tensor_parallel_child", *request.param.split(), seconds=300)
    assert len(found) == int(request.param[0]) and all(isinstance(each, dict) for each in found), found
    return found


def test_values_and_gradients_are_those_of_torch_on_all_operands(said: list[dict[str, Any]]) -> None:
    """Even and uneven rows, none at all, two dtypes and more, depths and columns of their own on every rank."""
    for each in said:
        assert each["wrong"] == [] and each["count"] >= 36


def test_a_layer_of_both_compiles_and_is_equal(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each.get("compiled", True) and each.get("opcheck", "right") == "right"


def test_what_does_not_fit_is_refused(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each["refused"].startswith("TypingError: all_gather_gemm: float")
        assert each["refused"].endswith("and float32[3, 3]; legal are [M, K] and [K, N] of one dtype")
        assert each["uneven"].endswith("legal is as many on every rank, or splits on all")
