"""Prices beside published measurements of nccl-tests and rccl-tests: errors by library, generation, op and bytes.

`python -m benchmarks.collectives FILE`: a file of rows as `shardplan validate` reads it. The shipped constants were
fitted on such rows, so whole curves (GPU, op, one or several nodes, system) are told apart by a hash: *held out* are a
third of them, priced by tables that are fitted here to the other rows, starting from those that ship; *fitted* are
these others, and *all* are all rows, both under the tables that ship. What topologies say (launch, latencies, delivered
rates, by generation and by system) is not fitted again. `--count` limits the rows read. Strata of bytes are those of
`shardplan validate`; the targets are those of the reductions, all-gathers and reduce-scatters: AllToAll and sendrecv
are only reported.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, record, table, write

from shardplan.hardware.measured.fitting import fit
from shardplan.hardware.measured.samples import parse_rows
from shardplan.hardware.prices.library import library
from shardplan.simulation.validation import Predicted, Stratum, predict_samples, size_class, stratum

GATED = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = ("to 64 KiB", "to 1 MiB", "to 64 MiB", "below 512 MiB", "512 MiB and more")


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of a stratum: at most a median, or at least a share of its rows within a bound; percent."""

    size: int
    where: str
    measure: str  # a field of `Stratum`
    bar: float

    def holds(self, found: Stratum) -> bool:
        """Whether the errors are as asked."""
        value = getattr(found, self.measure)
        return bool(value <= self.bar if self.measure.endswith("error_percent") else value >= self.bar)


def both(size: int, measure: str, one: float, several: float) -> tuple[Target, Target]:
    return Target(size, "one", measure, one), Target(size, "several", measure, several)


TARGETS = (
    *both(0, "within_factor_1_5_percent", 98, 85),
    *both(1, "median_error_percent", 15, 30),
    *both(2, "median_error_percent", 10, 25),
    *both(3, "median_error_percent", 12, 12),
    *both(3, "within_20_percent", 80, 80),
    *both(4, "median_error_percent", 6, 6),
    *both(4, "within_15_percent", 85, 85),
)
KEYS: dict[str, Callable[[Predicted], Sequence[str]]] = {
    "library": lambda one: (one.sample.library_name,),
    "generation": lambda one: (one.sample.library_name, one.sample.gpu),
    "op": lambda one: (one.sample.library_name, one.sample.op),
    "decade": lambda one: (one.sample.library_name, f"10^{int(math.log10(one.sample.nbytes)):02}"),
    "stratum": lambda one: (one.sample.library_name, one.sample.op, SIZES[size_class(one.sample.nbytes)]),
}
MEASURES = ("count", "median_error_percent", "p90_error_percent", "within_15_percent", "within_20_percent",
            "within_factor_1_5_percent")  # fmt: skip


def judged(found: Iterable[Predicted]) -> dict[str, Any]:
    """The errors of some rows, in the measures of `shardplan validate`."""
    one = stratum("", "", "", 0, list(found))
    return {measure: getattr(one, measure) for measure in MEASURES}


def by(found: Sequence[Predicted], key: Callable[[Predicted], Sequence[str]]) -> list[dict[str, Any]]:
    """The errors by a key, on one and on several nodes, held out beside fitted."""
    parts: dict[tuple[str, ...], list[Predicted]] = defaultdict(list)
    for one in found:
        parts[(*key(one), one.sample.node_scope, "held out" if one.sample.held_out else "fitted")].append(one)
    return [{"of": ", ".join(part), **judged(parts[part])} for part in sorted(parts)]


def targets(judging: Sequence[Predicted], every: Sequence[Predicted]) -> list[dict[str, Any]]:
    """What the held-out rows, and all, reach of every target."""
    rows: list[dict[str, Any]] = []
    for target in TARGETS:
        row: dict[str, Any] = {"size": SIZES[target.size], "nodes": target.where, "measure": target.measure}
        row["bar"] = target.bar
        for name, found in (("held out", judging), ("all", every)):
            part = [
                one
                for one in found
                if one.sample.op in GATED
                and one.sample.node_scope == target.where
                and size_class(one.sample.nbytes) == target.size
            ]
            if part:
                errors = stratum("", "", "", target.size, part)
                row |= {f"rows {name}": len(part), name: getattr(errors, target.measure)}
                row[f"{name} holds"] = target.holds(errors)
        rows.append(row)
    return rows


def main() -> None:
    parser = arguments("collectives", __doc__ or "", 0, of="rows of the file, 0 for all")
    parser.add_argument("file", type=Path, metavar="FILE", help="rows of measured collectives")
    given = parser.parse_args()
    text = given.file.read_text(encoding="utf-8")
    samples = parse_rows(text, given.file.name)[: given.count or None]
    every, skipped = predict_samples(samples)
    rest = [one.sample for one in every if not one.sample.held_out]
    names = dict.fromkeys(one.library_name for one in rest)
    refitted = [fit(library(name), [one for one in rest if one.library_name == name]).table for name in names]
    judging, _ = predict_samples([one.sample for one in every if one.sample.held_out], refitted)
    found = [*judging, *(one for one in every if not one.sample.held_out)]
    print(f"{len(samples)} rows, {len(skipped)} skipped")
    result: dict[str, Any] = {"rows": len(samples), "skipped": [{"id": i, "reason": why} for i, why in skipped]}
    result["targets"] = targets(judging, every)
    headings = ("size", "nodes", "measure", "bar", "rows held out", "held out", "held out holds", "all", "all holds")
    print(table(headings, [[row.get(h) for h in headings] for row in result["targets"]], "targets"))
    for name, key in KEYS.items():
        result[name] = by(found, key)
        print(table(("of", *MEASURES), [list(row.values()) for row in result[name]], f"by {name}"))
    parameters = {"file": given.file.name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "count": given.count}
    write(given.out, record(parameters, result))


if __name__ == "__main__":
    main()
