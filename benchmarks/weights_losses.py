"""Planted losses in refits between shipped tables: what a target does not take, copies that differ, other configs.

`python -m benchmarks.weights_losses [--count 15]`: `count` losses of each of seven kinds, in random sessions: a
parameter that the target's table lacks, tensors of a larger family, a layer on no stage, an expert on no rank, a copy
of a tied embedding or of any element that is another number, a field of a config. Each is tried in four ways (copies in
the first three): `sp.refit` and its reference, `checkpoint.reshard` of the source's ranks as files, the command, and a
live join of both sides. A way is silent where it does not refuse, or does not name what is lost. Every session is also
refitted without its loss, and every loss but those of copies with what makes it legal (`drop=`, `differ=`), where
nothing may be refused.
"""

from __future__ import annotations

import random
from time import process_time
from typing import Any

from benchmarks.common import Progress, arguments, record, table, write
from tests.movement.weights_lost import KINDS, WAYS, alarm, allowed, planted

COUNT = 15


def main() -> None:
    """Plant the losses, print a line a kind, and write the result."""
    options = arguments("weights_losses", "Planted losses in refits, and who refuses them.", COUNT, of="losses a kind")
    options.add_argument("--seed", type=int, default=0, help="of the drawing (default %(default)s)")
    given = options.parse_args()
    started = process_time()
    kinds: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    false: list[str] = []
    progress = Progress("losses", given.count * len(KINDS))
    for kind in KINDS:
        rng = random.Random(f"{kind} {given.seed}")
        found = []
        for _ in range(given.count):
            loss = planted(kind, rng)
            found.append(loss)
            false += [f"{loss.session.names}: {said}" for said in [alarm(loss.session)] if said]
            if loss.drop or loss.differ:
                false += [f"{loss.says}, which is said: {said}" for said in [allowed(loss)] if said]
            rows.append({"kind": kind, "loss": loss.says, "silent": [w for w, said in loss.found.items() if not said],
                         "says": loss.found["refit"][:300]})  # fmt: skip
        refused = {way: sum(bool(loss.found.get(way)) for loss in found) for way in WAYS}
        silent = sum(not all(loss.found.values()) for loss in found)
        kinds.append({"kind": kind, "losses": len(found)} | refused | {"silent": silent})
        progress.add(given.count)
    total = {"kind": "all"} | {key: sum(row[key] for row in kinds) for key in kinds[0] if key != "kind"}
    print(table(list(total), [list(row.values()) for row in [*kinds, total]], "Losses refused and named, by way"))
    result = {"kinds": kinds, "total": total, "alarms without a loss": false, "losses": rows}
    seconds = {"processor seconds": process_time() - started}
    write(given.out, record({"count": given.count, "seed": given.seed}, result | seconds))


if __name__ == "__main__":
    main()
