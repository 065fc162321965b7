"""Fitting a table: what made the samples comes back, and what they say nothing of stays."""

from dataclasses import replace
from itertools import product

import msgspec
import numpy as np
import pytest

from shardplan.errors import TopologyError
from shardplan.hardware.measured.fitting import fit
from shardplan.hardware.measured.sample_setup import System, pattern_of_sample, topology_of_sample
from shardplan.hardware.measured.samples import Sample
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric, Floats
from shardplan.hardware.prices.library import Library, LibraryRow

GATHERS = ("all_reduce", "all_gather", "reduce_scatter")
TRUTH = Library(
    "nccl",
    (
        LibraryRow("ring", "LL", GATHERS, base=0.0, base_far=4e-6, near_share=0.3, far_share=0.1),
        LibraryRow(
            "ring", "Simple", GATHERS, base=9e-6, base_far=30e-6, near=3.0, far=5e-6, near_share=0.8, far_share=0.9
        ),
        LibraryRow("tree", "Simple", ("all_reduce",), base=None, base_far=50e-6, near=3.0, far=5e-6, near_share=0.7),
    ),
    own_copy=0.5,
)
BYTES = [4**n for n in range(4, 16)]


def sample(op: str, nodes: int, members: int, nbytes: int) -> Sample:
    return Sample(
        id=f"{op}/{nodes}x{members}/{nbytes}",
        library="nccl",
        op=op,
        gpu="H100",
        nodes=nodes,
        gpus_per_node=members,
        nics_per_node=8,
        nic_gbps=400.0,
        nbytes=nbytes,
        seconds=1.0,
        system="H100-nebius-ib",
    )


def measured(table: Library, nodes: tuple[int, ...], ops: tuple[str, ...] = GATHERS) -> list[Sample]:
    """What nccl-tests would measure if the table were the truth."""
    samples: list[Sample] = []
    for what in product(ops, nodes, (2, 8), BYTES):
        topology = topology_of_sample(sample(*what))
        fabric = Fabric(topology)
        fabric.library = table
        seconds = price(pattern_of_sample(sample(*what), topology), fabric).seconds
        samples.append(msgspec.structs.replace(sample(*what), seconds=seconds))
    return samples


def off(table: Library, factor: float) -> Library:
    """A table with constants of every row off by a factor."""

    def times(number: float | None) -> float | None:
        return None if number is None else number * factor

    return replace(
        table,
        rows=tuple(
            replace(
                row,
                base=times(row.base),
                base_far=times(row.base_far),
                far=row.far * factor,
                near_share=row.near_share / factor,
            )
            for row in table.rows
        ),
    )


def constants(table: Library) -> Floats:
    rows = [
        (row.base or 0.0, row.base_far or 0.0, row.near, row.far, row.near_share, row.far_share) for row in table.rows
    ]
    return np.array([*(number for row in rows for number in row), table.own_copy])


def test_the_table_that_made_the_samples_has_no_error_and_stays() -> None:
    samples = measured(TRUTH, (1, 2, 4))
    fitted = fit(TRUTH, samples)
    assert fitted.before < 1e-9
    assert np.allclose(constants(fitted.table), constants(TRUTH), rtol=1e-6, atol=0)
    assert (fitted.rows, fitted.undetermined) == (len(samples), ())


def test_constants_come_back_from_a_start_that_is_off() -> None:
    start = off(TRUTH, 1.5)
    fitted = fit(start, measured(TRUTH, (1, 2, 4)))
    assert fitted.held_out > 0
    assert fitted.after < 0.4 * fitted.before
    assert np.allclose(constants(fitted.table), constants(TRUTH), rtol=0.05, atol=0)


def test_numbers_alike_are_one_constant_and_defaults_are_none() -> None:
    fitted = fit(off(TRUTH, 1.3), measured(TRUTH, (1, 2)))
    ring, tree = fitted.table.rows[1], fitted.table.rows[2]
    assert (ring.near, ring.far) == (tree.near, tree.far)
    assert (fitted.table.rows[0].near, tree.far_share, tree.base) == (1.0, 1.0, None)
    # base, near, far, 3 base_far, 3 near_share, 2 far_share, own_copy
    assert fitted.constants + len(fitted.undetermined) == 12


def test_what_samples_say_nothing_of_is_named_and_kept() -> None:
    start = off(TRUTH, 1.3)
    fitted = fit(start, measured(TRUTH, (1,), ("all_gather",)))
    assert "base_far of ring LL" in fitted.undetermined
    assert "far_share of ring Simple" in fitted.undetermined
    assert "base of ring Simple" not in fitted.undetermined
    assert [row.base_far for row in fitted.table.rows] == [row.base_far for row in start.rows]
    assert fitted.table.rows[1].base == pytest.approx(9e-6, rel=0.1)


def test_samples_in_place_say_nothing_of_own_copies() -> None:
    samples = [msgspec.structs.replace(one, in_place=True) for one in measured(replace(TRUTH, own_copy=0.0), (1, 2))]
    fitted = fit(TRUTH, samples)
    assert fitted.before < 1e-9
    assert fitted.undetermined == ("own_copy",) and fitted.table.own_copy == TRUTH.own_copy > 0


def test_one_wrong_sample_does_not_move_the_rest() -> None:
    samples = measured(TRUTH, (1, 2))
    good = fit(TRUTH, samples).table
    samples[20] = msgspec.structs.replace(samples[20], seconds=1.0)
    assert np.allclose(constants(fit(TRUTH, samples).table), constants(good), rtol=0.05, atol=0)


def test_a_sample_that_no_row_serves_is_an_error() -> None:
    with pytest.raises(TopologyError, match=r"^library nccl has no row for sample 'alltoall/1x2/1024'$"):
        fit(TRUTH, [sample("alltoall", 1, 2, 1024)])


def test_an_unknown_fabric_has_its_latency_and_delivered_rate_fitted() -> None:
    truth = System(27e-6, 0.71)
    samples: list[Sample] = []
    for known in measured(TRUTH, (1, 2, 4)):
        one = msgspec.structs.replace(known, system="here")
        topology = topology_of_sample(one)
        node = replace(topology.levels[0], latency=truth.latency, efficiency=truth.efficiency)
        fabric = Fabric(replace(topology, levels=(node, *topology.levels[1:])))
        fabric.library = TRUTH
        samples.append(msgspec.structs.replace(one, seconds=price(pattern_of_sample(one, topology), fabric).seconds))
    found = fit(TRUTH, samples)
    ((name, fabric),) = found.systems
    assert name == "here"
    assert fabric.latency == pytest.approx(truth.latency, rel=0.03)
    assert fabric.efficiency == pytest.approx(truth.efficiency, rel=0.03)
    # The library's own constants stay where they were.
    assert constants(found.table) == pytest.approx(constants(TRUTH), rel=0.05)
    # A system that is known keeps its fabric.
    assert fit(TRUTH, [msgspec.structs.replace(s, system="p5-efa") for s in samples[:40]]).systems == ()
