"""Predictions beside measured collectives: the errors of every stratum of library, op, one or several nodes, and bytes.

An error is `|predicted / measured - 1|` in percent; within a factor is the larger of predicted and measured over the
smaller.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from shardplan.errors import TopologyError
from shardplan.hardware.measured.sample_setup import pattern_of_sample, topology_of_sample, unknown_systems
from shardplan.hardware.measured.samples import Sample
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.library import Library
from shardplan.hardware.topology import Topology

KIB, MIB = 2**10, 2**20
# First bytes of each stratum but the first: bounds are inclusive up to 64 MiB, and 512 MiB belongs to the last.
_STARTS = (64 * KIB + 1, MIB + 1, 64 * MIB + 1, 512 * MIB)
_BOUNDS = (0, 64 * KIB, MIB, 64 * MIB, 512 * MIB, None)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A sample with the seconds that the model gives it."""

    sample: Sample
    seconds: float

    @property
    def error_percent(self) -> float:
        """How far the prediction is off, in percent of what was measured."""
        return 100 * abs(self.seconds / self.sample.seconds - 1)


@dataclass(frozen=True, slots=True)
class Stratum:
    """The errors of the samples of one library, op, one or several nodes, and range of bytes."""

    library: str  # without its version
    op: str
    nodes: str  # one | several
    bytes_from: int
    bytes_to: int | None  # None for the last range
    count: int
    median_error_percent: float
    p90_error_percent: float
    within_15_percent: float  # percent of the samples, as are the two below
    within_20_percent: float
    within_factor_1_5_percent: float


@dataclass(frozen=True, slots=True)
class CollectivesVerdict:
    """What a validation on measured collectives found."""

    rows: int
    strata: tuple[Stratum, ...]
    skipped: tuple[tuple[str, str], ...]  # ids and reasons
    unknown_systems: tuple[str, ...]  # of several nodes; priced by the default latency and NIC rate

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return {
            "rows": self.rows,
            "strata": [asdict(stratum) for stratum in self.strata],
            "skipped": [{"id": name, "reason": reason} for name, reason in self.skipped],
            "unknown_systems": list(self.unknown_systems),
        }


def predict_samples(
    samples: Sequence[Sample], tables: Sequence[Library] = ()
) -> tuple[list[Predicted], list[tuple[str, str]]]:
    """Return samples with their predicted seconds, and ids of those that cannot be priced, with the reason.

    `tables` price the samples of their libraries instead of those that ship.
    """
    others = {table.name: table for table in tables}
    fabrics: dict[Topology, Fabric] = {}
    found: list[Predicted] = []
    skipped: list[tuple[str, str]] = []
    for sample in samples:
        try:
            topology = topology_of_sample(sample)
            if topology not in fabrics:
                fabrics[topology] = Fabric(topology)
            fabric = fabrics[topology]
            table = others.get(sample.library_name, fabric.library)
            if sample.in_place:  # nothing is copied from a member's own part to its result
                table = replace(table, own_copy=0.0)
            found.append(
                Predicted(sample, price(pattern_of_sample(sample, topology), fabric.with_library(table)).seconds)
            )
        except TopologyError as error:
            skipped.append((sample.id, str(error)))
    return found, skipped


def of_library(name: str, samples: Sequence[Sample]) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Return the samples of a library that can be priced, and ids of the others with the reason.

    Raises `TopologyError` where none is left.
    """
    ours = [sample for sample in samples if sample.library_name == name]
    found, skipped = predict_samples(ours)
    skipped += [(s.id, f"measured of library {s.library_name!r}") for s in samples if s.library_name != name]
    if not found:
        reason = f"; {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise TopologyError(f"none of {len(samples)} rows can be used for library {name!r}{reason}")
    return [one.sample for one in found], skipped


def validate_samples(samples: Sequence[Sample]) -> CollectivesVerdict:
    """Return the errors of predictions on samples, by stratum; strata without samples are left out.

    >>> row = {"id": "x", "library": "nccl-2.27", "op": "all_reduce", "gpu": "H100", "nbytes": 2**20, "seconds": 1e-4}
    >>> verdict = validate_samples([Sample(**row, nodes=1, gpus_per_node=8)])
    >>> verdict.rows, verdict.strata[0].bytes_from, verdict.strata[0].bytes_to
    (1, 65536, 1048576)
    """
    found, skipped = predict_samples(samples)
    parts: dict[tuple[str, str, str, int], list[Predicted]] = defaultdict(list)
    for one in found:
        sample = one.sample
        parts[sample.library_name, sample.op, sample.node_scope, size_class(sample.nbytes)].append(one)
    strata = (stratum(*key, parts[key]) for key in sorted(parts))
    return CollectivesVerdict(len(samples), tuple(strata), tuple(skipped), tuple(unknown_systems(samples)))


def size_class(nbytes: int) -> int:
    """Return the number of the range of bytes: 0 to 64 KiB, 1 to 1 MiB, 2 to 64 MiB, 3 below 512 MiB, 4 above."""
    return int(np.searchsorted(_STARTS, nbytes, side="right"))


def stratum(library: str, op: str, nodes: str, size: int, found: Sequence[Predicted]) -> Stratum:
    """Return the errors of one part of the samples, of the range of bytes with this number."""
    errors = np.array([one.error_percent for one in found])
    factors = np.exp([abs(math.log(one.seconds / one.sample.seconds)) for one in found])
    return Stratum(
        library,
        op,
        nodes,
        _BOUNDS[size] or 0,
        _BOUNDS[size + 1],
        len(found),
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        100 * float(np.mean(errors <= 15)),
        100 * float(np.mean(errors <= 20)),
        100 * float(np.mean(factors <= 1.5)),
    )
