"""What a device holds: the closed form beside the certificates of jobs, on drawn strategies; both beside measured rows.

`python -m benchmarks.memory_agreement [--count 200] [--rows FILE ...]`: models and strategies are drawn as
`tests/simulation/drawn_strategies.py` draws them, with the schedules that `search` tries, and half as many with all
others; stages are cut alike on both sides, and what the allocator and the driver hold is left out of both. Of files of
measured steps (`--rows`) every row with a peak that can be partitioned is compared with both, the allocator's and the
driver's part, which the machine's parameters say, included. A strategy takes about a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import Progress, arguments, record, table, write
from tests.simulation.drawn_strategies import ALL, SEARCHED, DrawnMemory, drawn_memory

from shardplan.errors import ShardplanError
from shardplan.simulation.accuracy.step_rows import StepRow, read_steps
from shardplan.simulation.accuracy.subject import form_of, model_of, strategies_of
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.machines import machine_fit
from shardplan.simulation.searching.certifier import Certifier
from shardplan.strategy.strategy_text import strategy_text

COUNT = 200
SEED = 20261126


def agreement(name: str, found: Sequence[DrawnMemory]) -> dict[str, Any]:
    """Return how far the closed form is from certificates."""
    ratios = np.array([one.ratio for one in found])
    return {
        "schedules": name, "strategies": len(found), "within 5 %": float(np.mean(abs(ratios - 1) <= 0.05)),
        "within 10 %": float(np.mean(abs(ratios - 1) <= 0.10)), "2 % and more below": float(np.mean(ratios < 0.98)),
        "least": float(ratios.min()), "median": float(np.median(ratios)), "most": float(ratios.max()),
    }  # fmt: skip


def drawn(name: str, count: int, schedules: Sequence[str]) -> list[DrawnMemory]:
    """Draw so many, saying how far it is."""
    progress, found = Progress(name, count), list[DrawnMemory]()
    for one in drawn_memory(SEED, count, schedules):
        found.append(one)
        progress.add(1)
    return found


def measured(row: StepRow) -> dict[str, Any] | None:
    """Return the peak of a row as measured, as the closed form says, and as certified; None without a job."""
    strategies, fit = strategies_of(row), machine_fit(row.cluster.preset)
    form = form_of(row.model, row.cluster)
    form = form.on(form.topology, fit.parameters)
    out = form(Configurations.of(strategies))
    best = int(np.argmin(out.seconds))
    try:
        certified = Certifier(model_of(row.model), fit.parameters, np.inf).peak(strategies[best]).nbytes
    except ShardplanError as error:
        print(f"{row.id}: no job: {error}")
        return None
    peak = float(row.measured.peak_bytes or 0)
    return {"id": row.id, "table": row.table, "measured": peak, "closed": float(out.peak_bytes[best]),
            "certified": certified, "error of the certificate": certified / peak - 1}  # fmt: skip


def by_table(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean and the largest error of certificates, and the mean of the closed form's, by table."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["table"]].append(row)
    found: list[dict[str, Any]] = []
    for name, mine in groups.items():
        errors = np.array([abs(row["error of the certificate"]) for row in mine])
        closed = np.array([abs(row["closed"] / row["measured"] - 1) for row in mine])
        found.append({"table": name, "rows": len(mine), "certified, mean": float(errors.mean()),
                      "certified, most": float(errors.max()), "closed, mean": float(closed.mean())})  # fmt: skip
    return found


def main() -> None:
    """Draw, compare, print and write the result."""
    options = arguments("memory_agreement", "The memory of strategies: closed form, certificates, measurements.", COUNT)
    options.add_argument("--rows", type=Path, nargs="*", default=[], help="files of measured steps")
    given = options.parse_args()
    others = tuple(name for name in dict.fromkeys(ALL) if name not in SEARCHED)
    found = {"searched": drawn("searched", given.count, SEARCHED), "others": drawn("others", given.count // 2, others)}
    told = [agreement(name, mine) for name, mine in found.items() if mine]
    print(table(list(told[0]), [list(row.values()) for row in told], "Closed form over certificate"))
    rows = [row for row in chain.from_iterable(map(read_steps, given.rows)) if row.measured.peak_bytes]
    compared = [one for row in rows if (one := measured(row)) is not None]
    tables = by_table(compared)
    if tables:
        print(table(list(tables[0]), [list(row.values()) for row in tables], "Beside measured peaks"))
    far = [
        {"ratio": one.ratio, "certified": one.certified, "model": one.kind, "fields": one.fields,
         "strategy": strategy_text(one.strategy)}
        for mine in found.values() for one in mine if not 0.98 <= one.ratio <= 1.05
    ]  # fmt: skip
    result = {"agreement": told, "measured": tables, "rows": compared, "beyond 5 % or 2 % below": far}
    write(given.out, record({"count": given.count, "seed": SEED, "rows": [p.name for p in given.rows]}, result))


if __name__ == "__main__":
    main()
