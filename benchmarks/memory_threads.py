"""Public threads about memory: configurations that ran out of it, and such that ran, judged as a user would ask.

    python -m benchmarks.memory_threads

Rows are in `benchmarks/rows/oom_threads.jsonl`, typed with their sources and committed before any was judged; what a
thread leaves open is in `assumed`. `predicted` is what `validate` says (the closed form, which nine times in ten is off
by less than 10 %), `certified` what `plan --fit` says: the job's own account of memory. Nothing is fitted to them.
Asked are 80 % of each half; `looks` counts the runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import RESULTS, ROOT, record, table, write

from shardplan.errors import ShardplanError
from shardplan.simulation.accuracy.forecast import forecast
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.accuracy.subject import model_of, strategies_of, topology_of_row
from shardplan.simulation.closed.machines import machine_of
from shardplan.simulation.searching.certifier import Certifier

ROWS = ROOT / "benchmarks" / "rows" / "oom_threads.jsonl"
OUT = RESULTS / "memory_threads.json"
ASKED = 80.0  # percent of each half


def certified(row: StepRow) -> float | None:
    """The bytes that the job of a row holds at most; None where no job can be made of it."""
    where = topology_of_row(row.cluster)
    model = model_of(row.model)
    try:
        return Certifier(model, machine_of(where).parameters, where.device.memory).peak(strategies_of(row)[0]).nbytes
    except ShardplanError:
        return None


def halves(rows: Sequence[StepRow], fits: Mapping[str, bool | None]) -> dict[str, Any]:
    """How many of each half are judged right, in percent of those that are judged."""
    found: dict[str, Any] = {}
    for name, oom in (("ran out of memory", True), ("ran", False)):
        told = [fits[row.id] is not oom for row in rows if row.measured.oom is oom and fits.get(row.id) is not None]
        right = 100 * sum(told) / len(told) if told else None
        found[name] = {"rows": len(told), "right, percent": right, "reached": right is not None and right >= ASKED}
    return found


def main() -> None:
    rows = read_steps(ROWS)
    predicted, skipped = forecast(rows)
    by_id = {f.id: f for f in predicted}
    bytes_of = {row.id: certified(row) for row in rows}
    memory = {row.id: topology_of_row(row.cluster).device.memory for row in rows}
    told: dict[str, Any] = {}
    for row in rows:
        one, held = by_id.get(row.id), bytes_of[row.id]
        told[row.id] = {
            "ran out": row.measured.oom,
            "memory": memory[row.id],
            "predicted": one and one.peak_bytes,
            "predicted to fit": one and one.fits,
            "certified": held,
            "certified to fit": None if held is None else held <= memory[row.id],
        }
    words = {k: [t["ran out"], t["predicted to fit"], t["certified to fit"],
                 *(None if t[n] is None else t[n] / t["memory"] for n in ("predicted", "certified"))]
             for k, t in told.items()}  # fmt: skip
    columns = ["row", "ran out", "predicted fits", "certified fits", "predicted share", "certified share"]
    print(table(columns, [[k, *v] for k, v in words.items()], "threads"))
    result: dict[str, Any] = {
        "predicted": halves(rows, {k: t["predicted to fit"] for k, t in told.items()}),
        "certified": halves(rows, {k: t["certified to fit"] for k, t in told.items()}),
        "threads that ran out": len({row.source for row in rows if row.measured.oom}),
        "skipped": dict(skipped),
        "rows": told,
        "looks": (json.loads(OUT.read_text())["looks"] if OUT.is_file() else 0) + 1,
    }
    print(result["predicted"], result["certified"], skipped)
    write(OUT, record({"rows": len(rows), "asked, percent": ASKED}, result))


if __name__ == "__main__":
    main()
