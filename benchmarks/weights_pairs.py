"""Every ordered pair of shipped tables of a family of models, at random shapes and degrees, bit for bit.

`python -m benchmarks.weights_pairs [--count 20]`: `count` cases a pair. What a side holds is made by slow converters
after each framework's own code (`tests/movement/weights_frameworks.py`, `weights_more.py`), which import nothing of
shardplan; a case is moved by the reference of `refit`, and every byte of every target parameter is compared.
"""

from __future__ import annotations

from time import process_time
from typing import Any

from benchmarks.common import arguments, record, table, write
from tests.movement.weights_cases import PAIRS, differing

COUNT = 20


def main() -> None:
    """Run the pairs, print a line a family, and write the result."""
    options = arguments("weights_pairs", "Every ordered pair of shipped tables, bit for bit.", COUNT, of="cases a pair")
    given = options.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    started = process_time()
    for kind, a, b in PAIRS:
        row = rows.setdefault(kind, {"family": kind, "tables": set(), "pairs": 0, "cases": 0, "bytes": 0, "wrong": 0})
        row["tables"] |= {a, b}
        row["pairs"] += 1
        for seed in range(given.count):
            total, differs = differing(kind, a, b, seed)
            for key, more in (("cases", 1), ("bytes", total), ("wrong", len(differs))):
                row[key] += more
            wrong += [f"{a} -> {b}: {d}" for d in differs]
    found = [row | {"tables": len(row["tables"])} for row in rows.values()]
    print(table(list(found[0]), [list(row.values()) for row in found], "Parameters that differ are in the last column"))
    seconds = process_time() - started
    write(given.out, record({"count": given.count}, {"rows": found, "wrong": wrong, "processor seconds": seconds}))


if __name__ == "__main__":
    main()
