"""The operators as PyTorch's, on real process groups; results in the heap; what puts really moved."""

from typing import Any

import pytest
import torch
from tests.fused.forked import run

from shardplan import fused
from shardplan.errors import BackendError

RANKS = 2


@pytest.fixture(scope="module")
def into() -> list[dict[str, Any]]:
    return run("library_child", RANKS, "into")


@pytest.fixture(scope="module")
def traced() -> list[dict[str, str]]:
    return run("library_child", RANKS, seconds=300.0)


@pytest.mark.parametrize("what", ["opcheck", "compiled", "dynamic", "exported"])
@pytest.mark.parametrize("name", ["gemm rows", "gemm columns", "gemv", "bags"])
def test_traced(traced: list[dict[str, str]], name: str, what: str) -> None:
    assert [each[f"{name} {what}"] for each in traced] == ["good"] * RANKS


def test_backward_of_a_compiled_graph_takes_all_ranks(traced: list[dict[str, str]]) -> None:
    assert [each["one rank"] for each in traced] == ["good"] * RANKS


def test_a_result_in_the_heap_lasts_until_the_next_call(into: list[dict[str, Any]]) -> None:
    assert all(each["late"] and each["vector"] for each in into)


def test_results_in_two_places_of_the_heap_lie_apart(into: list[dict[str, Any]]) -> None:
    assert [each["apart"] for each in into] == [[True, True]] * RANKS


def test_out_must_lie_in_the_heap(into: list[dict[str, Any]]) -> None:
    for each in into:
        for name, shape in (("elsewhere", [6, 4]), ("middle", [5, 4])):
            assert each[name] == (
                f"TypingError: gemm_all_to_all: out {shape}; legal is a contiguous tensor that begins where one of "
                "symmetric heap into does: heap.alloc(...).local, or its first rows"
            )


def test_a_vector_goes_into_any_tensor_of_its_shape(into: list[dict[str, Any]]) -> None:
    legal = "legal is a contiguous [6] of the dtype of the operands"
    wrong = ("float32[7]", "float32[6, 1]", "float64[6]", "float32[6]")
    for each in into:
        assert each["vector"]
        assert each["vectors"] == [f"TypingError: gemv_all_reduce: out is {one}; {legal}" for one in wrong]


def test_what_moved_is_what_the_schedule_says(into: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(into):
        gemm = 3 * RANKS * 4 * 4  # 3 rows of every rank
        bags = (2 if rank == 0 else 1) * 2 * RANKS * 4 * 4
        gemv = RANKS * 300 * 4 + 600 * 4  # everybody's addends for this owner, and all sums
        assert each["moved"][0] == gemm + gemv + bags


def test_a_put_that_does_nothing_is_named(into: list[dict[str, Any]]) -> None:
    tile = "tile 2 of rank 0, result[0:2, 0:4]"
    assert into[1]["nothing"] == f"BackendError: gemm_all_to_all: {tile}: 0 of 32 bytes moved; legal are all"


def test_a_group_without_a_heap() -> None:
    with pytest.raises(BackendError) as refused:
        fused.gemv_all_reduce(torch.ones(2, 2), torch.ones(2), group="nobody")
    assert str(refused.value) == (
        "group 'nobody' has no open symmetric heap; bound are none yet: bind(group, heap)"
    )  # fmt: skip
