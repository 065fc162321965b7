"""The fused grid, the emulated link and whole models: the port, the calibration, rows of all variants."""

from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.fused_emulated import LATENCY, EgressPort, row
from benchmarks.fused_grid import GRID, ratio, variant_of, variants
from benchmarks.fused_models import MODELS, pair_of
from benchmarks.fused_models import row as model_row
from benchmarks.fused_pairs import KINDS, Sizes
from benchmarks.fused_regret import drawn_shapes, regret_row

from shardplan.fused.deciding.calibrate import LEARNT


def test_a_port_sends_one_after_another() -> None:
    port = EgressPort(1e9)
    port.put(1.0, 10**9)
    port.put(1.5, 10**9)  # waits for the first
    assert port.last == pytest.approx(3.0 + LATENCY)
    port.put(5.0, 10**9)
    assert port.last == pytest.approx(6.0 + LATENCY)


def test_shapes_and_variants() -> None:
    """As many as the spec asks, none of them calibrated on."""
    assert [sum(s.kind == kind for s in GRID) for kind in KINDS] == [16, 12, 12]
    assert not {s.shape for s in GRID} & set(LEARNT)
    assert str(variant_of("two_shot 4")) == "two_shot n=4"
    assert "gloo_chunked" in variants("gemv")
    assert ratio({"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 1.0]}, "a", "b") == (2.0, 1.0)


def test_a_row_of_the_emulated_link() -> None:
    """The time is the larger of the ranks' in each repetition, the ratio a median."""
    one: dict[str, Any] = {"compute": 1.0, "times": {"1.0 unfused": [4.0, 4.0, 2.0], "1.0 natural 2": [2.0, 1.0, 2.0]}}
    two: dict[str, Any] = {"compute": 2.0, "times": {"1.0 unfused": [1.0, 2.0, 1.0], "1.0 natural 2": [1.0, 3.0, 1.0]}}
    found = row(Sizes("gemm", (1, 1, 1)), [one, two], 1.0, "natural", 2)
    assert found["ratio"] == pytest.approx(0.75)
    assert found["compute seconds"] == 2.0


@pytest.mark.parametrize("name", MODELS)
def test_something_of_each_model_is_fused(name: str) -> None:
    assert any(": fused, " in row for row in pair_of(name).rows)


def test_a_row_of_a_model() -> None:
    """Of a repetition the slowest rank counts, and ratios are of one repetition."""
    common = {"rows": (), "calls": {"unfused": 0, "fused": 2}, "bytes": {"unfused": 5, "fused": 7}}
    ranks = [
        common | {"seconds": {"unfused": [1.0, 4.0, 2.0], "fused": [2.0, 2.0, 1.0]}, "difference": 0.0},
        common | {"seconds": {"unfused": [2.0, 1.0, 1.0], "fused": [1.0, 1.0, 1.0]}, "difference": 1e-7},
    ]
    found = model_row(next(iter(MODELS)), ranks)
    assert found["seconds"] == {"unfused": 2.0, "fused": 2.0}
    assert found["fused / unfused"] == 0.5
    assert found["received bytes"] == {"unfused": 10, "fused": 14}
    assert (found["calls"], found["calls unfused"], found["difference"]) == ([2, 2], [0, 0], 1e-7)


def test_shapes_are_drawn_by_a_word() -> None:
    """The same by the same word, others by another; none that was learnt; as many as asked."""
    found = drawn_shapes("a", 40)
    assert len(set(found)) == 40
    assert found == drawn_shapes("a", 40) != drawn_shapes("b", 40)
    assert not set(found) & set(LEARNT)
    assert {kind for kind, _ in found} == {"product", "bags", "vector"}


def test_the_best_is_of_one_half_and_regret_of_the_other() -> None:
    """Even repetitions say which variant is best, odd ones what the choice costs beside it."""
    times = {"unfused": [(4.0, 9.0), (4.0, 9.0)] * 4, "fused n=1": [(1.0, 9.0), (8.0, 9.0)] * 4,
             "fused n=2": [(2.0, 9.0), (2.0, 3.0)] * 4, "kernel": [(1.0, 1.0)] * 8}  # fmt: skip
    found = regret_row(("product", (2, 2, 2)), times, "fused n=2", {}, 0)
    assert found["best"] == "fused n=1"
    assert found["regret"] == pytest.approx(2 / 8 - 1)
    assert found["chosen / unfused"] == pytest.approx(0.5)
    assert regret_row(("product", (2, 2, 2)), times, "fused n=2", {}, 1)["chosen / unfused"] == pytest.approx(1 / 3)
