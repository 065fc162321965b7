"""Published times of fused kernels: rows are as published, and the third that gives the constants is a hash's."""

import pytest
from benchmarks.fused_published import Pair, fit, read, regrets, split, tried

TABLES = {
    "pytorch-179770": (10, 0.29, 0.39),
    "iris-397": (24, 0.69, 1.35),
    "vllm-53053": (11, 0.81, 1.11),
    "pytorch-184116": (6, 0.16, 1.04),
    "pytorch-183509": (6, 0.58, 1.32),
    "flagtree-861": (7, 1.19, 1.57),
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_as_published(name: str) -> None:
    """Their number, the range of speeds that the thread says, and its own column of speeds where it has one."""
    count, least, most = TABLES[name]
    pairs = read()[name]
    assert len(pairs) == count
    for pair in pairs:
        speed = pair.row["unfused"] / pair.row["fused"]
        assert least < speed < most
        assert speed == pytest.approx(pair.row.get("speedup", speed), rel=0.007)
        assert pair.row["source"].startswith("https://github.com/")


def test_a_third_is_fitted_and_no_row_of_the_rest() -> None:
    pairs = read()["iris-397"]
    learnt, rest = split(pairs, 1)
    assert len(learnt) == 8
    assert {p.name for p in learnt} | {p.name for p in rest} == {p.name for p in pairs}
    assert split(pairs, 2)[0] != learnt
    altered = [Pair({**p.row, "fused": 1.0}) if p in rest else p for p in pairs]
    assert fit(split(altered, 1)[0]) == fit(learnt)


def test_regret_and_a_table() -> None:
    pairs = read()["pytorch-179770"]
    assert regrets(pairs[:2], [False, True]) == {
        "mean": pytest.approx((0.243963 / 0.073858 - 1) / 2),
        "worst": pytest.approx(0.243963 / 0.073858 - 1),
    }
    found = tried("pytorch-179770", pairs, 20, 1)
    assert found["regret"]["worst"] == 0
    assert len(found["rows"]) + len(found["fitted on"]) == 10
