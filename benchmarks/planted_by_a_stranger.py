"""Faults that somebody planted who had not seen the tests: which of them are found, and what came of the others.

`python -m benchmarks.planted_by_a_stranger [--count 200] [--survivors]`: `planted_by_a_stranger.toml` holds small
mistakes in five rooms (planner, drop-ins, fused, weights and jobs), written from the sources alone, in the format of
`tests/faults`. `room` says which; `first` what the nearest tests said when it was planted: `caught`, `survived` (a test
was written then, which is what `tests` names), or `undecided`, which none is any more.
`instead` says of a fault why another one stood in its place first: that changes nothing that anybody can observe. Of
the first `count`, those that are decided are planted again, one at a time, as `python -m tests.planted` does it, with
`--survivors` those alone that survived. It takes some ten minutes on a quiet core.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.common import Progress, arguments, record, table, write
from tests.planted import CAUGHT, SURVIVED, Fault, Server

COUNT = 200
FAULTS = Path(__file__).with_suffix(".toml")


def listed() -> list[dict[str, Any]]:
    """The faults, in the order in which they were tried: round robin over the rooms."""
    return tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]


def main() -> None:
    """Plant the faults, print a line a room, and write the result."""
    options = arguments("planted_by_a_stranger", "Faults of somebody who had not seen the tests.", COUNT)
    options.add_argument("--survivors", action="store_true", help="plant those again alone that survived at first")
    given = options.parse_args()
    started = process_time()
    every = listed()[: given.count]
    chosen = [f for f in every if f["first"] != "undecided"]
    rows: list[dict[str, Any]] = []
    server, progress = Server(), Progress("faults", len(chosen))
    for f in chosen:
        status, said = CAUGHT, ""
        if f["first"] == "survived" or not given.survivors:
            status, said = server.outcome(Fault(f["in"], f["says"], f["old"], f["new"], tuple(f["tests"].split())))
        now = {CAUGHT: "caught", SURVIVED: "survived"}.get(status, "not run")
        row = {"room": f["room"], "in": f["in"].removeprefix("shardplan."), "says": f["says"], "first": f["first"]}
        rows.append(row | {"now": now} | {k: f[k] for k in ("instead",) if k in f})
        if now == "not run":
            rows[-1]["why"] = said[-300:]
        progress.add(1)
    server.close()
    rooms: list[dict[str, Any]] = []
    for room in dict.fromkeys(row["room"] for row in rows):
        mine = [row for row in rows if row["room"] == room]
        first, now = (Counter(row[key] for row in mine) for key in ("first", "now"))
        rooms.append(
            {"room": room, "planted": len(mine), "caught at once": first["caught"], "survived": first["survived"],
             "without effect, replaced": sum("instead" in row for row in mine), "caught now": now["caught"],
             "silent now": now["survived"], "not run": now["not run"]}
        )  # fmt: skip
    total = {"room": "all"} | {key: sum(row[key] for row in rooms) for key in rooms[0] if key != "room"}
    print(table(list(total), [list(row.values()) for row in [*rooms, total]], "Faults planted by a stranger"))
    undecided = [f"{f['in'].removeprefix('shardplan.')}: {f['says']}" for f in every if f["first"] == "undecided"]
    result = {"rooms": rooms, "total": total, "undecided": len(undecided), "faults": rows, "not decided": undecided}
    parameters = {"count": given.count, "survivors": given.survivors}
    write(given.out, record(parameters, result | {"processor seconds": process_time() - started}))


if __name__ == "__main__":
    main()
