"""Options of drawn strategies that are not as by default: how many do nothing, by family of models.

Without such an option the job is the same, to the last program and type, or what is predicted, of an option that no
program knows (`tests/strategy/idle_options.py`); the number asked for is 0.
"""

from __future__ import annotations

import time

from benchmarks.common import arguments, record, table, write
from tests.strategy.idle_options import MODELS, tally


def main() -> None:
    parser = arguments("idle_options", __doc__ or "", 100, of="strategies a family")
    parser.add_argument("--seed", type=int, default=20261126)
    options = parser.parse_args()
    started, rows = time.monotonic(), []
    for name in MODELS:
        counts, idle = tally(name, options.seed, options.count)
        rows.append({"family": name, "strategies": options.count, **counts, "idle": len(idle), "examples": idle[:5]})
        print(name, dict(counts), len(idle), flush=True)
    keys = ("family", "strategies", "a job", "predicted alone", "refused", "idle")
    print(table(keys, [[row.get(key, 0) for key in keys] for row in rows]))
    result = {"seconds": time.monotonic() - started, "idle": sum(row["idle"] for row in rows), "rows": rows}
    write(options.out, record({"count": options.count, "seed": options.seed}, result))


if __name__ == "__main__":
    main()
