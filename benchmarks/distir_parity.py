"""DistIR's simulator, as we reproduce it, beside the committed results of DistIR itself.

`python -m benchmarks.distir_parity [--count 0]`: every configuration of `results/distir_peer.json`, where DistIR ran as
a peer in an environment of its own; seconds within 1e-9, peak bytes equal, failures alike, and for lists of up to
`--longest` ops the ops themselves, name and devices, by their hash. Times are of the processor.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import Any

from benchmarks.common import RESULTS, arguments, record, table, write

from shardplan.simulation.parity import DistirMachine, DistirModel, DistirPoint, distir, distir_listing

PEER = RESULTS / "distir_peer.json"
PARTS = ("gpt", "mlp", "more_mlp", "other")
TOLERANCE = 1e-9


def point_of(row: dict[str, Any]) -> DistirPoint:
    """The configuration of a row."""
    model = row["model"] if isinstance(row["model"], str) else DistirModel(*row["model"])
    return DistirPoint(model, *(row[k] for k in ("data", "tensor", "pipeline", "microbatches", "global_batch")))


def machine_of(row: dict[str, Any]) -> DistirMachine:
    """The machine of a row; DistIR's default where it names none."""
    fields: dict[str, Any] = dict(row.get("machine") or {})
    if "allreduce" in fields:
        fields["allreduce"] = {int(k): tuple(v) for k, v in fields["allreduce"].items()}
    return DistirMachine(**fields)


def digest(point: DistirPoint, machine: DistirMachine) -> tuple[int, str]:
    """The length of a list of ops and the hash of their names and devices."""
    count, text = 0, hashlib.sha256()
    for action in distir_listing(point, machine):
        count += 1
        text.update(f"{action.kind} {','.join(map(str, sorted(action.devices)))}\n".encode())
    return count, text.hexdigest()[:16]


def compared(rows: list[dict[str, Any]], longest: int) -> dict[str, Any]:
    """How one part of the peer's file agrees, and the processor time of both."""
    found: dict[str, Any] = {"configurations": len(rows), "seconds_agree": 0, "equal_to_the_bit": 0, "peaks_equal": 0}
    found |= {"failures": 0, "lists": 0, "lists_equal": 0, "operations": 0, "differ": []}
    ours = theirs = 0.0
    for row in rows:
        point, machine = point_of(row), machine_of(row)
        started = time.process_time()
        result = distir(point, machine)
        ours += time.process_time() - started
        theirs += row.get("processor_seconds", 0.0)
        seconds = float(row["seconds"])
        near = math.isclose(result.seconds, seconds, rel_tol=TOLERANCE, abs_tol=0.0)
        same = result.peak_bytes == row["peak_bytes"]
        found["seconds_agree"] += near
        found["equal_to_the_bit"] += result.seconds == seconds
        found["peaks_equal"] += same
        found["failures"] += result.failure is not None
        found["operations"] += row["operations"]
        if 0 < row["operations"] <= longest:
            found["lists"] += 1
            found["lists_equal"] += digest(point, machine) == (row["operations"], row["digest"])
        if not (near and same):
            found["differ"].append({k: row[k] for k in ("model", "data", "tensor", "pipeline", "microbatches")})
    return found | {"our_seconds": ours, "distir_seconds": theirs or None}


def main() -> None:
    parser = arguments("distir_parity", "DistIR reproduced, beside DistIR.", 0, of="rows of a part, 0 for all")
    parser.add_argument("--longest", type=int, default=100_000, help="ops of the longest list compared")
    options = parser.parse_args()
    peer = json.loads(PEER.read_text(encoding="utf-8"))
    parts = {name: compared(peer[name][: options.count or None], options.longest) for name in PARTS}
    head = ("part", "configurations", "seconds agree", "peaks equal", "failures", "lists equal", "ours, s", "DistIR, s")
    lines = [
        [name, x["configurations"], x["seconds_agree"], x["peaks_equal"], x["failures"],
         f"{x['lists_equal']} of {x['lists']}", x["our_seconds"], x["distir_seconds"]]
        for name, x in parts.items()
    ]  # fmt: skip
    print(table(head, lines, "DistIR's simulator, reproduced"))
    parameters = {"count": options.count, "longest": options.longest, "tolerance": TOLERANCE, "peer": peer["peer"]}
    write(options.out, record(parameters, {"not_run_by_the_peer": len(peer["not_run"])} | parts))


if __name__ == "__main__":
    main()
