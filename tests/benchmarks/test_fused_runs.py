"""The fused grid, the emulated link and whole models: the port, the calibration, rows of all variants."""

from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.fused_constants import KindConstants, calibrated, chosen, predicted, variant_of
from benchmarks.fused_emulated import LATENCY, EgressPort, row
from benchmarks.fused_grid import GRID, LEARNT, ratio, variants
from benchmarks.fused_models import MODELS, pair_of
from benchmarks.fused_models import row as model_row
from benchmarks.fused_pairs import KINDS, Sizes

TRUE = KindConstants((1e-5, 1e-11, 0.0, 0.0), 2e-5, 5e9, 4e10, 1e-5, 0.01)


def test_a_port_sends_one_after_another() -> None:
    port = EgressPort(1e9)
    port.put(1.0, 10**9)
    port.put(1.5, 10**9)  # waits for the first
    assert port.last == pytest.approx(3.0 + LATENCY)
    port.put(5.0, 10**9)
    assert port.last == pytest.approx(6.0 + LATENCY)


def test_a_calibration_finds_what_times_were_made_of() -> None:
    """Of times that the price itself gives, the decision is that of the true constants."""
    shapes = [
        Sizes("gemm", (m, n, k)) for m, n, k in ((256, 1024, 64), (1024, 1024, 32), (512, 512, 512), (64, 64, 64))
    ]
    names = ["unfused", "fused 1", "fused 2", "fused 8"]

    def times(sizes: Sizes) -> dict[str, list[float]]:
        seconds = TRUE.seconds(sizes)
        told = {name: [predicted(sizes, name, seconds, TRUE.price(), 2)] for name in names}
        return told | {"compute_only": [seconds]}

    found = calibrated([(s, times(s)) for s in shapes], 2)
    other = Sizes("gemm", (512, 2048, 128))
    said = chosen(other, names, found, 2)[1]
    wanted = chosen(other, names, TRUE, 2)[1]
    assert all(said[name] == pytest.approx(wanted[name], rel=0.1) for name in names)
    assert chosen(other, names, found, 2)[0] == chosen(other, names, TRUE, 2)[0]


def test_shapes_and_variants() -> None:
    """As many as the spec asks, none of them calibrated on."""
    assert [sum(s.kind == kind for s in GRID) for kind in KINDS] == [16, 12, 12]
    assert not set(GRID) & set(LEARNT)
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
