"""The checker of tile schedules beside a judge that tries every interleaving, on wrong and on right protocols.

Protocols are those of small random schedules (two or three ranks, at most six tiles a rank, three epochs), altered in
eight ways, in equal shares of the wrong ones. What is wrong is the judge's word (`tests/fused/judge.py`), in one of the
three modes of running; an alteration that does no harm counts among the right ones, beside unaltered ones.
"""

from __future__ import annotations

import time

from benchmarks.common import arguments, record, table, write
from tests.fused.tried import tally


def main() -> None:
    parser = arguments("tile_mutants", __doc__ or "", 1000, of="wrong protocols, and right ones")
    parser.add_argument("--seed", type=int, default=20261201)
    options = parser.parse_args()
    started = time.monotonic()
    found = tally(options.seed, options.count, options.count)
    keys = ("wrong", "missed", "right", "rejected", "ranks", "virtual", "resident")
    rows = [{"kind": kind} | {key: count[key] for key in keys} for kind, count in found.items()]
    total = {"kind": "all"} | {key: sum(count[key] for count in found.values()) for key in keys}
    print(table(("kind", *keys), [list(row.values()) for row in (*rows, total)]))
    result = {"seconds": time.monotonic() - started, "total": total, "rows": rows}
    write(options.out, record({"count": options.count, "seed": options.seed}, result))


if __name__ == "__main__":
    main()
