"""The price of fused operators: laws, the file of constants, the decision."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import ParseError, TopologyError
from shardplan.hardware.prices.fused import (
    TILE_COUNTS,
    FusedConstants,
    FusedWork,
    decide,
    fused_seconds,
    one_shot_seconds,
    unfused_seconds,
    variant_seconds,
    variants,
)
from shardplan.hardware.prices.fused_kernels import KernelConstants, KernelRates

FREE = FusedConstants("free", 1e-6, 1e9, 4e9, 0.0)
# Tile tax and times of a loaded two-core machine: the prototype of the operators.
TAXED = FusedConstants(
    "shm", 2e-6, 5e9, 8e9, 1e-6, ((1, 1.0), (2, 1.06), (4, 1.09), (8, 1.16), (16, 1.26), (32, 1.59), (64, 2.22))
)

SHORT = 'latency = "1 us"\nsignal = "1 us"\n'
lengths = st.floats(0, 1)
sizes = st.floats(0, 1e9)
works = st.builds(
    lambda c, b, w, reduces: FusedWork(c, b, w, reduces, b if reduces else 0.0),
    lengths,
    sizes,
    st.integers(2, 64),
    st.booleans(),
)
constants = st.builds(
    lambda lat, bw, copy, s, tax: FusedConstants("x", lat, bw, copy, s, ((1, 1.0), (8, tax))),
    st.floats(0, 1e-3),
    st.floats(1e6, 1e12),
    st.floats(1e6, 1e12),
    st.floats(0, 1e-3),
    st.floats(1, 3),
)


@given(works, st.sampled_from(TILE_COUNTS))
def test_free_tiles_and_signals_never_cost(work: FusedWork, n: int) -> None:
    assert fused_seconds(work, n, FREE) <= unfused_seconds(work, FREE) * (1 + 1e-12)


@given(works, constants, st.floats(1, 10))
def test_every_variant_grows_with_the_bytes(work: FusedWork, c: FusedConstants, more: float) -> None:
    grown = FusedWork(work.seconds, work.nbytes * more, work.ranks, work.reduces, work.sum_bytes * more)
    for way in variants(work.reduces):
        assert variant_seconds(work, way, c) <= variant_seconds(grown, way, c) * (1 + 1e-12)


@given(works, constants)
def test_a_fused_choice_saves_enough_and_is_the_least(work: FusedWork, c: FusedConstants) -> None:
    found = decide(work, c)
    unfused, fused = float(found.seconds[0]), float(found.seconds[1:].min())
    assert float(found.seconds[found.index]) == (fused if fused <= 0.95 * unfused else unfused)
    assert (found.best_variant.kind == "unfused") == (fused > 0.95 * unfused)


@given(works, constants, st.sampled_from(TILE_COUNTS))
def test_the_formula_by_plain_loops(work: FusedWork, c: FusedConstants, n: int) -> None:
    w = int(work.ranks)
    f, l, busy = (w - 1) / w, c.latency, float(c.tax(n * w)) * float(work.seconds)  # noqa: E741
    x = float(work.nbytes) * f / c.bandwidth
    told = max(busy, busy / (n * w) + x, f * busy + x / (n * (w - 1))) + l + n * (w - 1) * c.signal
    told += (float(work.sum_bytes) * f / c.bandwidth + l) if work.reduces else 0
    assert fused_seconds(work, n, c) == pytest.approx(told)


def test_arrays_are_priced_as_their_elements_are() -> None:
    c, b = np.array([1e-3, 1e-4]), np.array([[1e6], [1e5], [1e3]])
    found = decide(FusedWork(c, b, 4), TAXED)
    assert found.seconds.shape == (6, 3, 2)
    assert found.index.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            one = decide(FusedWork(float(c[j]), float(b[i, 0]), 4), TAXED)
            assert one.best_variant == found.variants[found.index[i, j]]
            assert float(one.seconds[one.index]) == found.seconds[found.index[i, j], i, j]


def test_communication_as_long_as_computation_is_hidden_as_the_prototype_did() -> None:
    c = FusedConstants("emulated", 0, 1e9, np.inf, 0, TAXED.tile_tax)
    work = FusedWork(1.0, 2e9, 2)
    ratios = [float(fused_seconds(work, n, c) / unfused_seconds(work, c)) for n in (2, 4, 8, 16)]
    assert min(ratios) == pytest.approx(0.58, abs=0.02)


def test_small_sums_go_in_one_shot_and_large_ones_in_two() -> None:
    small = FusedWork(1e-6, 4e3, 4, True, 4e3)
    large = FusedWork(1e-3, 4e7, 4, True, 4e7)
    assert one_shot_seconds(small, TAXED) < fused_seconds(small, 1, TAXED)
    assert one_shot_seconds(large, TAXED) > fused_seconds(large, 1, TAXED)


def test_constants_are_read_back_as_written(tmp_path: Path) -> None:
    kernels = (
        KernelConstants("product", KernelRates(1e-6, 5e10), signal=2e-6, tile_tax=((1, 1.0), (2, 1.1))),
        KernelConstants("bags", KernelRates(reads=5e9), KernelRates(writes=2e9), result_bandwidth=1e9),
    )
    c = FusedConstants(
        "shm", 2e-6, 5.5e9, np.inf, 1.25e-6, ((1, 1.0), (8, 1.16)), kernels, 'measured "here"', result_bandwidth=7e9
    )
    (tmp_path / "c.toml").write_text(str(c))
    assert FusedConstants.load(tmp_path / "c.toml") == c
    assert FusedConstants.parse(str(TAXED)) == TAXED


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("latency = 3", "fused constants: latency is 3; legal is a string with a unit, as '2 us'"),
        ('latencies = "3 us"', "fused constants: unknown key 'latencies'; did you mean 'latency'?"),
        (
            SHORT + "[kernels.products]\nflops = 3",
            "fused constants: kernels 'products'; legal are product, vector",
        ),
        (
            SHORT + "[kernels.bags]\nread = 3",
            "bags: unknown key 'read'; did you mean 'reads'",
        ),
        (
            SHORT + "[kernels.bags]\nreads = 0",
            "'bags': reads 0.0; legal are seconds from 0, and rates",
        ),
        (
            SHORT + "[kernels.bags.library]\nflop = 1",
            "kernels: bags: library: unknown key 'flop'",
        ),
        ('latency = "1 us"\nsignal = "1 us"\n[tile_tax]\n2 = 1.1', "legal are rising numbers of tiles from 1"),
        ('latency = "1 us"\nsignal = "1 us"\n[tile_tax]\na = 1.1', "tile_tax of 'a'; legal are numbers of tiles"),
        ('latency = "1 us"\nsignal = "1 us"\nbandwidth = "0 B/s"', "bandwidth 0.0; legal are numbers above 0"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, says: str) -> None:
    with pytest.raises(TopologyError, match=says.replace("?", ".").replace("(", ".")):
        FusedConstants.parse(text)


def test_a_kind_has_kernels_and_a_transport_of_its_own() -> None:
    """Unfused the library computes, fused the kernels; what a kind has not of its own is the transport's."""
    own = KernelConstants("product", KernelRates(1.0, flops=2.0, reads=4.0, writes=8.0), KernelRates(3.0), signal=0.5)
    c = FusedConstants("x", 0.0, 1.0, 1.0, 0.25, kernels=(own,))
    library, kernel = own.seconds(2.0, 4.0, 8.0)
    assert (library, kernel) == (3.0, 4.0)
    assert c.of_kind("product").signal == 0.5
    assert c.of_kind("bags") == c
    work = FusedWork(library, 0.0, 2, kernel_seconds=kernel)
    assert float(unfused_seconds(work, c)) == 3.0
    assert float(fused_seconds(work, 1, c.of_kind("product"))) == 4.5
    assert float(one_shot_seconds(work, c)) == 4.25


@given(works, st.sampled_from(TILE_COUNTS), st.floats(1e6, 1e12))
def test_every_way_copies_its_result_out(work: FusedWork, n: int, rate: float) -> None:
    """By the same seconds: those of the result's bytes."""
    plain, slow = TAXED, replace(TAXED, result_bandwidth=rate)
    for way in variants(work.reduces):
        more = variant_seconds(work, way, slow) - variant_seconds(work, way, plain)
        assert more == pytest.approx(float(work.sum_bytes if work.reduces else work.nbytes) / rate, abs=1e-6)


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="is no TOML"):
        FusedConstants.parse("=")
    with pytest.raises(TopologyError, match="cannot be read"):
        FusedConstants.load(tmp_path / "none.toml")
