"""Planted faults in refits between shipped tables: who finds each, and that none stays silent.

`python -m benchmarks.weights_faults [--count 9]`: `count` faults of each of twelve kinds that do harm, in random
sessions: a pair of tables, shapes, degrees, and what the frameworks hold, by the slow converters of the tests. A faulty
session goes through what a user has, in its order: the proof of coverage, the binding of live tensors, the live handles
(all ranks as threads on gloo), a probe of the tables with the converters as the frameworks' loaders, and `diff` of the
target with the checkpoint, both as files. What the target would have held decides whether a fault does harm: those that
do none are counted apart; what is refused before anything moves counts as found. Every session is also run without its
fault, where nothing may be found.
"""

from __future__ import annotations

import random
from collections import Counter
from time import process_time
from typing import Any

from benchmarks.common import Progress, arguments, record, table, write
from tests.movement.weights_faulted import KINDS, drawn
from tests.movement.weights_judged import FINDERS, alarms, judged

COUNT = 9


def planted(kind: str, count: int, seed: int) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Faults of a kind that do harm, how many more did none, and what was found where there was no fault."""
    rng = random.Random(f"{kind} {seed}")
    rows: list[dict[str, Any]] = []
    harmless, false = 0, list[str]()
    while len(rows) < count:
        s, fault = drawn(kind, rng)
        false += [f"{s.names}: {said}" for said in alarms(s)]
        found = judged(s, fault)
        if not found.harm:
            harmless += 1
            continue
        rows.append(
            {"kind": kind, "from": s.names[0], "to": s.names[1], "fault": fault.says, "found by": found.by or "nobody",
             "every": found.every, "says": found.words[:300]}
        )  # fmt: skip
    return rows, harmless, false


def main() -> None:
    """Plant the faults, print a line a kind, and write the result."""
    options = arguments("weights_faults", "Planted faults in refits, and who finds them.", COUNT, of="faults a kind")
    options.add_argument("--seed", type=int, default=0, help="of the drawing (default %(default)s)")
    given = options.parse_args()
    started = process_time()
    kinds: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    false: list[str] = []
    progress = Progress("faults", given.count * len(KINDS))
    for kind in KINDS:
        found, harmless, more = planted(kind, given.count, given.seed)
        by = Counter(row["found by"] for row in found)
        silent = by.get("nobody", 0)
        kinds.append({"kind": kind, "faults": len(found)} | {f: by.get(f, 0) for f in FINDERS})
        kinds[-1] |= {"silent": silent, "harmless": harmless}
        rows += found
        false += more
        progress.add(given.count)
    total = {"kind": "all"} | {key: sum(row[key] for row in kinds) for key in kinds[0] if key != "kind"}
    print(table(list(total), [list(row.values()) for row in [*kinds, total]], "Who is first to find a fault"))
    result = {"kinds": kinds, "total": total, "alarms without a fault": false, "faults": rows}
    seconds = {"processor seconds": process_time() - started}
    write(given.out, record({"count": given.count, "seed": given.seed}, result | seconds))


if __name__ == "__main__":
    main()
