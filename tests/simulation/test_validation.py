"""Predictions beside measured collectives: errors by hand, the bounds of strata, and what is skipped."""

from pathlib import Path

import msgspec
import pytest

from shardplan.hardware import Topology
from shardplan.hardware.measured.samples import Sample, parse_rows
from shardplan.hardware.prices.library import library
from shardplan.simulation.validation import predict_samples, validate_samples

ROWS = Path(__file__).parents[1] / "data" / "collectives_sample.jsonl"
KIB, MIB = 2**10, 2**20


def sample(**changed: object) -> Sample:
    row: dict[str, object] = {
        "id": "a", "library": "nccl-2.29", "op": "all_reduce", "gpu": "H100", "nodes": 1, "gpus_per_node": 8,
        "nbytes": MIB, "seconds": 1e-4,
    }  # fmt: skip
    return Sample(**row | changed)  # type: ignore[arg-type]


def off_by(ratio: float, **changed: object) -> Sample:
    """A sample whose prediction is so many times what was measured."""
    (found,), _ = predict_samples([sample(**changed)])
    return msgspec.structs.replace(found.sample, seconds=found.seconds / ratio)


def test_errors_by_hand() -> None:
    verdict = validate_samples([off_by(ratio) for ratio in (1.0, 1.1, 0.82, 1.19, 1.6, 0.6)])
    (one,) = verdict.to_dict()["strata"]
    # Errors 0, 10, 18, 19, 60 and 40 %; all but the last two are within 1.5 times.
    assert one["count"] == 6
    assert one["median_error_percent"] == pytest.approx(18.5)
    assert one["p90_error_percent"] == pytest.approx(50)
    assert one["within_15_percent"] == pytest.approx(100 * 2 / 6)
    assert one["within_20_percent"] == pytest.approx(100 * 4 / 6)
    assert one["within_factor_1_5_percent"] == pytest.approx(100 * 4 / 6)


@pytest.mark.parametrize(
    ("nbytes", "low", "high"),
    [
        (1, 0, 64 * KIB),
        (64 * KIB, 0, 64 * KIB),
        (64 * KIB + 1, 64 * KIB, MIB),
        (MIB, 64 * KIB, MIB),
        (64 * MIB, MIB, 64 * MIB),
        (64 * MIB + 1, 64 * MIB, 512 * MIB),
        (512 * MIB - 1, 64 * MIB, 512 * MIB),
        (512 * MIB, 512 * MIB, None),
    ],
)
def test_bounds_of_strata(nbytes: int, low: int, high: int | None) -> None:
    (one,) = validate_samples([sample(nbytes=nbytes)]).strata
    assert (one.bytes_from, one.bytes_to) == (low, high)


def test_strata_are_by_library_op_and_nodes() -> None:
    far = {"nodes": 2, "nics_per_node": 8, "nic_gbps": 400.0, "system": "nobody's"}
    rows = [
        sample(),
        sample(library="nccl-2.30"),
        sample(library="ring"),
        sample(op="all_gather"),
        sample(**far),
        sample(op="sendrecv", **far),
    ]
    verdict = validate_samples(rows)
    assert [(s.library, s.op, s.nodes, s.count) for s in verdict.strata] == [
        ("nccl", "all_gather", "one", 1),
        ("nccl", "all_reduce", "one", 2),
        ("nccl", "all_reduce", "several", 1),
        ("nccl", "sendrecv", "several", 1),
        ("ring", "all_reduce", "one", 1),
    ]
    assert verdict.unknown_systems == ("nobody's",)


def test_nothing_is_skipped_silently() -> None:
    rows = [
        sample(),
        sample(id="b", gpu="abacus"),
        sample(id="c", op="gossip"),
        sample(id="d", library="mine-1"),
        sample(id="e", gpus_per_node=16),
    ]
    found = validate_samples(rows).to_dict()
    assert found["rows"] == 5 and sum(one["count"] for one in found["strata"]) == 1
    assert [one["id"] for one in found["skipped"]] == ["b", "c", "d", "e"]
    assert [one["reason"].partition(";")[0] for one in found["skipped"]] == [
        "GPU 'abacus' is unknown",
        "op 'gossip' is unknown",
        "library 'mine' is unknown",
        "16 GPUs of a node take part",
    ]


def test_in_place_nothing_is_copied() -> None:
    """Out of place the part that a member brings is copied too, partly hidden, at the rate that the ring reaches."""
    (there, here), _ = predict_samples([
        sample(op="all_gather", nbytes=2**30, in_place=flag) for flag in (False, True)
    ])  # fmt: skip
    nccl, gpu = library("nccl"), Topology.load("dgx-h100").levels[-1]
    (share,) = (row.near_share for row in nccl.serving("all_gather", "ring Simple"))
    copied = nccl.own_copy * 2**30 / 8 / (gpu.bandwidth * gpu.efficiency * share)
    assert copied > 0 and there.seconds - here.seconds == pytest.approx(copied)
    # A switch that reduces copies none, and messages have no own part.
    for op in ("all_reduce", "sendrecv"):
        (there, here), _ = predict_samples([sample(op=op, nbytes=2**30, in_place=flag) for flag in (False, True)])
        assert there.seconds == here.seconds


def test_published_rows() -> None:
    rows = parse_rows(ROWS.read_text())
    verdict = validate_samples(rows)
    assert verdict.rows == len(rows) == sum(s.count for s in verdict.strata) + len(verdict.skipped)
    assert {(s.op, s.nodes) for s in verdict.strata} >= {("all_reduce", "one"), ("all_reduce", "several")}
    assert verdict.unknown_systems == ()
