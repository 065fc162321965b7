"""What ranks agree on: shapes that each knows alone, gradients that one rank needs, threads; and random sequences."""

import importlib.util
from typing import Any

import pytest
from tests.fused.forked import run

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

GEMM, GEMV, BAGS = "gemm_all_to_all", "gemv_all_reduce", "embedding_bag_all_to_all"
SAME = "legal is the same call on all"
CASES = (
    "apart:2",
    "some_splits:2",
    "tables:2",
    "needs:2",
    "differing:4",
    "threads:2",
    "few:2",
    "wraps:3",
    "words:3",
    "absent:2",
)
WAYS: list[tuple[str, ...]] = [(), ("net",)]
if importlib.util.find_spec("triton") is not None:
    WAYS.append(("triton",))


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "".join(way) or "shm")
def said(request: pytest.FixtureRequest) -> dict[str, Any]:
    cases = CASES[:1] + CASES[2:4] if request.param == ("triton",) else CASES
    return dict(zip(cases, run("calls_child", *request.param, *cases), strict=True))


def of(said: dict[str, Any], case: str) -> list[Any]:
    if case not in said:
        pytest.skip("on CPUs' kernels")
    return said[case]


def test_shapes_that_each_rank_knows_alone(said: dict[str, Any]) -> None:
    refusal = f"HeapMismatch: {GEMV}: rank 0 calls {GEMV} with M %d, rank 1 calls {GEMV} with M %d; {SAME}"
    for shapes, vectors, after in of(said, "apart:2"):
        assert shapes == [[[m, 3], True] for m in (8, 16, 12, 9, 12)]
        assert vectors == ["no error", "no error", refusal % (8, 16), "no error", refusal % (9, 8)]
        assert after == [4.0, 4.0]


def test_splits_of_one_rank(said: dict[str, Any]) -> None:
    assert of(said, "some_splits:2") == [[[[3, 3]] * 3, 3], [[[5, 3]] * 3, 3]]


def test_a_rank_without_tables_learns_and_trains(said: dict[str, Any]) -> None:
    for rank, (steps, free) in enumerate(of(said, "tables:2")):
        assert steps == [[[2, 1, dim], [[1.0, 3.0, 2.0], None][rank]] for dim in (2, 5, 2, 3)]
        assert free == [[[4, 3], True], False], "without autograd nothing needs a gradient"


def test_a_gradient_that_one_rank_needs(said: dict[str, Any]) -> None:
    bare = (
        f"HeapMismatch: {GEMM}: rank 0 calls {GEMM} with backward True, rank 1 calls {GEMM} with backward False; "
        "legal is a function of shardplan.fused, which has every rank take part in backward"
    )
    gradient = [[3.0, 3.0], [3.0, 3.0], [6.0, 6.0], [6.0, 6.0]]
    assert of(said, "needs:2") == [[True, gradient, bare, False], [True, None, bare, False]]


def test_ranks_that_differ_are_named(said: dict[str, Any]) -> None:
    for rank, (columns, rows, tables, other, after) in enumerate(of(said, "differing:4")):
        assert (
            columns == f"HeapMismatch: {GEMM}: ranks 0, 1, 3 call {GEMM} with N 3, rank 2 calls {GEMM} with N 4; {SAME}"
        )
        assert rows == (
            f"HeapMismatch: {GEMM}: ranks 0, 2 call {GEMM} with rows 2, ranks 1, 3 call {GEMM} with rows 3; "
            "legal is as many on every rank, or recv_splits on all"
        )
        of_ranks = "; ".join(f"rank {r}: {2 + r % 2}, torch.float32" for r in range(4))
        legal = "legal are one dim and dtype on all ranks that have some"
        assert tables == f"HeapMismatch: {BAGS}: tables of {of_ranks}; {legal}"
        asking = GEMV if rank == 1 else GEMM
        assert other == f"HeapMismatch: {asking}: ranks 0, 2, 3 call {GEMM}, rank 1 calls {GEMV}; {SAME}"
        assert after is True


def test_a_heap_serves_one_thread(said: dict[str, Any]) -> None:
    refusal = (
        f"BackendError: {GEMM}: called in thread second, on a heap of thread MainThread; legal is the thread that made "
        "the heap, or reset it last, or a group and a heap for each thread"
    )
    assert of(said, "threads:2") == [[refusal, True, "no error", True]] * 2


def test_the_oldest_agreement_goes_first(said: dict[str, Any]) -> None:
    assert of(said, "few:2") == [[[True] * 12, 2]] * 2


def test_stamps_wrap(said: dict[str, Any]) -> None:
    assert of(said, "wraps:3") == [[[True] * 8, 5]] * 3


def test_all_ranks_see_the_same_words(said: dict[str, Any]) -> None:
    each = [[one + rank for rank in range(3)] for one in (1, 2, 1, 1 << 40, 1, 3, 3, 3)]
    assert of(said, "words:3") == [each] * 3


def test_a_rank_that_makes_no_call_is_named(said: dict[str, Any]) -> None:
    who = f"FusedTimeout: {GEMM}: rank 0 waited 0.5 s for rank 1"
    assert of(said, "absent:2") == [
        f"{who}, which has not begun call 2 of this heap; legal is the same call on all", ""
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [(2, 40, 3), (4, 15, 3)])
def test_random_sequences(arguments: tuple[int, ...]) -> None:
    """The full count is `benchmarks.fused_sequences`."""
    for each in run("sequences", *arguments):
        assert each["wrong"] == [] and each["late"] == 0
        assert each["count"]["sequences"] == arguments[1]
