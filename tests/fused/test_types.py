"""Dtypes of operands: sums of f64 in f64, what is refused, autocast's, and tangents."""

import pytest
from tests.fused.forked import run

NAMES = ("gemm_all_to_all", "gemv_all_reduce", "all_gather_gemm", "gemm_reduce_scatter", "bags")


@pytest.fixture(scope="module")
def said() -> list[dict[str, dict[str, str]]]:
    found = run("types_child", seconds=100)
    assert [len(each) for each in found] == [1, 2]
    return [each for ranks in found for each in ranks]


def test_sums_of_f64_are_of_f64(said: list[dict[str, dict[str, str]]]) -> None:
    for each in said:
        assert all(0 <= float(error) < 1e-15 for error in each["f64"].values()), each


def test_other_dtypes_are_refused(said: list[dict[str, dict[str, str]]]) -> None:
    legal = "an operand of int64; legal are float32, bfloat16, float16, float64"
    for each in said:
        assert sorted(each["refused"]) == sorted(NAMES)
        assert all(text.startswith("TypingError: ") and text.endswith(legal) for text in each["refused"].values()), each


def test_a_derivative_of_forward_mode_is_refused(said: list[dict[str, dict[str, str]]]) -> None:
    for each in said:
        assert sorted(each["tangent"]) == sorted(NAMES)
        legal = "a derivative of forward mode; legal are gradients, backward"
        assert all(text.endswith(legal) for text in each["tangent"].values())


def test_products_are_of_autocasts_dtype(said: list[dict[str, dict[str, str]]]) -> None:
    for each in said:
        assert set(each["autocast"].values()) == {"torch.bfloat16"}
