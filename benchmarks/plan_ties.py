"""How far two predictions must be apart to tell two strategies apart: pairs of measured steps of one group.

    python -m benchmarks.plan_ties ROWS.jsonl..

Rows of one group have one model, machine, precision, devices and batch, and differ in their strategy alone. Of each
pair with both predicted, by how much its measured ratio differs from its predicted one, in logarithms: what all rows of
a machine are off by together cancels. `deviation` is what 68 % of pairs are within, and `wrong_percent` by how far
apart two predictions are, how often the one predicted slower was measured faster.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
from benchmarks.common import RESULTS, record, write

from shardplan.simulation.accuracy.forecast import forecast
from shardplan.simulation.accuracy.step_rows import read_steps

BINS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)


def main(paths: list[str]) -> None:
    """Print and write them."""
    rows = [
        r for path in paths for r in read_steps(Path(path)) if r.measured.seconds_per_step and r.status == "verified"
    ]
    told = {one.id: one for one in forecast(rows)[0] if not one.assumed}
    groups: dict[object, list[tuple[float, float]]] = {}
    for row in rows:
        if row.id in told:
            pair = np.log(told[row.id].seconds_per_step), np.log(row.measured.seconds_per_step or np.nan)
            groups.setdefault(row.group, []).append(pair)
    apart: list[tuple[float, float]] = []
    for members in groups.values():
        for (p, m), (q, n) in itertools.combinations(members, 2):
            apart.append((p - q, m - n) if p >= q else (q - p, n - m))
    found = np.array(apart)
    bins = []
    for low, high in itertools.pairwise((*BINS, np.inf)):
        some = found[(found[:, 0] >= low) & (found[:, 0] < high)]
        if len(some):
            off = np.abs(some[:, 1] - some[:, 0])
            bins.append({"predicted_apart": low, "pairs": len(some), "deviation": float(np.quantile(off, 0.6827)),
                         "wrong_percent": float((some[:, 1] < 0).mean()) * 100})  # fmt: skip
    result = {"rows": len(told), "groups": len(groups), "pairs": len(found), "bins": bins}
    write(RESULTS / "plan_ties.json", record({"files": [Path(p).name for p in paths]}, result))


if __name__ == "__main__":
    main(sys.argv[1:])
