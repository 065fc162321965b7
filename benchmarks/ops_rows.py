"""Measured steps op by op: what ops and the closed form say of rows that others published, with the same parameters.

`python -m benchmarks.ops_rows ROWS [--tables torchtitan simumax]`: rows whose table begins so. A row that leaves fields
open is read as the strategy that the closed form predicts to take least, as `benchmarks.step_accuracy` does; stages are
cut alike. Rows that the machine's parameters were fitted to are among them: what is compared is ops with the closed
form, and both with what was measured.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import RESULTS, Progress, record, table, write

import shardplan as sp
from shardplan.errors import ShardplanError
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.accuracy.subject import form_of, strategies_of
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.machines import of_machine
from shardplan.simulation.jobs.job_timeline import simulate_job
from shardplan.simulation.searching.certifier import even_cuts
from shardplan.simulation.steps import derate

TABLES = ("torchtitan", "simumax")
NEAR = 0.10  # of what was measured: asked


def predicted(row: StepRow) -> dict[str, Any]:
    """Seconds of a row: measured, by the closed form, and by ops; raises `ShardplanError` where it is no job."""
    form = form_of(row.model, row.cluster)
    where = form.topology
    form = form.on(where, of_machine(where))
    tried = strategies_of(row)
    seconds = form(Configurations.of(tried)).seconds
    strategy = tried[int(np.argmin(seconds))]
    job = sp.partition(form.model, replace(strategy, cuts=even_cuts(form.model, strategy)), where)
    ops = simulate_job(job, derate(where, attention=strategy.software.attention)).seconds
    told = {"row": row.id, "table": row.table, "measured": row.measured.seconds_per_step}
    return told | {"closed": float(seconds.min()), "ops": ops}


def main() -> None:
    """Predict, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops_rows", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS", help="files of measured steps, JSON lines")
    parser.add_argument("--tables", nargs="+", default=TABLES, help="how their tables begin")
    parser.add_argument("--out", type=Path, default=RESULTS / "ops_rows.json", help="the result file")
    options = parser.parse_args()
    rows = [row for path in options.rows for row in read_steps(path)]
    rows = [row for row in rows if row.table.startswith(tuple(options.tables)) and row.measured.seconds_per_step]
    found: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    progress = Progress("rows", len(rows))
    for row in rows:
        try:
            found.append(predicted(row))
        except ShardplanError as error:
            refused[row.id] = str(error)
        progress.add(1)
    told: list[list[Any]] = []
    for name in options.tables:
        mine = [one for one in found if one["table"].startswith(name)]
        for fidelity in ("closed", "ops"):
            ratios = np.array([one[fidelity] / one["measured"] for one in mine])
            beside = np.array([one["ops"] / one["closed"] for one in mine])
            if mine:
                near = float(np.mean(abs(ratios - 1) <= NEAR))
                told.append([name, fidelity, len(mine), near, float(ratios.min()), float(np.median(ratios)),
                             float(ratios.max()), float(beside.min()), float(beside.max())])  # fmt: skip
    heads = ("table", "fidelity", "rows", "within 10 %", "least", "median", "most", "least ops/closed", "most")
    print(table(heads, told, "Seconds over those measured"))
    parameters = {"files": [path.name for path in options.rows], "tables": list(options.tables)}
    summary = [dict(zip((*heads[:-1], "most ops/closed"), row, strict=True)) for row in told]
    write(options.out, record(parameters, {"summary": summary, "rows": found, "refused": refused}))


if __name__ == "__main__":
    main()
