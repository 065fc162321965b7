"""Grouped GEMM + all-to-all: values and gradients beside numpy, traces, on CPUs and by Triton in the interpreter."""

from importlib.util import find_spec
from typing import Any

import pytest
from tests.fused.forked import run

TORCH = find_spec("torch") is not None and find_spec("triton") is not None
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")


@pytest.fixture(scope="module", params=["1", "2", "3", pytest.param("2 triton", marks=needs_triton)])
def said(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found = run("grouped_child", *request.param.split(), seconds=300)
    assert len(found) == int(request.param[0]) and all(isinstance(each, dict) for each in found), found
    return found


def test_values_and_gradients_are_those_of_numpy(said: list[dict[str, Any]]) -> None:
    """Several experts and one, ranks without rows, rows that nobody wants, two dtypes, other counts at every call."""
    for each in said:
        assert each["wrong"] == [] and each["count"] == 27


def test_it_compiles_and_is_equal(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each["compiled"] and each["opcheck"] == "right"


def test_what_does_not_fit_is_refused(said: list[dict[str, Any]]) -> None:
    """Counts of another kind; and more rows than a result has, which kernels see when they run."""
    ranks = len(said)
    for each in said:
        assert each["kind"].startswith(f"TypingError: grouped_gemm_all_to_all: counts torch.int32[1, {ranks}]; legal")
        assert each["few"].startswith("TypingError: grouped_gemm_all_to_all: ")
        legal = f"legal are at most the capacity, {ranks - 1}", f"legal are 0 to {ranks - 2}"
        assert each["few"].endswith(legal)


@pytest.mark.skipif(not TORCH, reason="torch and triton are not installed")
def test_rows_beyond_the_capacity_are_cut_off() -> None:
    """Of what goes to a rank, by source, the last rows."""
    import torch

    from shardplan.fused.triton.grouped import matrix_of

    counts = torch.tensor([[[1, 4], [2, 0]], [[3, 1], [0, 3]]])  # by source, expert and destination
    assert matrix_of(counts, 99).tolist() == [3, 4, 3, 4, 0]
    assert matrix_of(counts, 5).tolist() == [3, 4, 2, 1, 0]
    assert matrix_of(counts, 2).tolist() == [2, 2, 0, 0, 0]
