"""Published requests to models that serve, beside what is predicted of them.

    python -m benchmarks.request_accuracy [--open]

Rows are in `benchmarks/rows/requests_*.jsonl`, each with its source and what was taken that it does not say. A row is
one model on so many devices cut by `tensor`, so many requests at once, and one quantity measured: the seconds to the
first token, those of a whole request, or tokens a second. Nothing is fitted to the rows of sources whose name has an
even first byte of its SHA-256; their measurements are in a file of their own, which `--open` alone reads, and counts.
`parts` are means by source; the mean over sources counts each once. `before` keeps the first figures of open sources.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.common import RESULTS, ROOT, record, table, write

from shardplan.simulation.accuracy.metrics import errors
from shardplan.simulation.accuracy.step_rows import RowCluster, RowModel
from shardplan.simulation.accuracy.subject import model_of, topology_of_row
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.machines import machine_fit
from shardplan.simulation.inference.form import RequestForm
from shardplan.simulation.inference.requests import Requests
from shardplan.strategy.strategy import Strategy

ROWS = ROOT / "benchmarks" / "rows"
OUT = RESULTS / "request_accuracy.json"
COLUMNS = ("count", "mean_error_percent", "median_error_percent", "signed_mean_error_percent", "max_error_percent")


class RowRequests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a prompt and of an answer, and requests in flight."""

    prompt: int
    output: int
    concurrency: int


class RequestRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row; `measured` has one of `first_token`, `latency` and `tokens_per_second`, and is {} where it is locked.

    `issued` is as `RequestForm` has it.
    """

    id: str
    source: str
    model: RowModel
    cluster: RowCluster
    tensor: int
    precision: str
    requests: RowRequests
    issued: str = "graph"
    measured: dict[str, float] = {}
    assumed: tuple[str, ...] = ()
    notes: str = ""

    @property
    def table(self) -> str:
        """Its source, in a word."""
        return self.id.partition("/")[0]


def read_requests(path: Path) -> list[RequestRow]:
    """The rows of a file."""
    return [msgspec.json.decode(text, type=RequestRow) for text in path.read_text().splitlines()]


def predict(row: RequestRow) -> dict[str, float]:
    """What is predicted of it, by the name of the quantity."""
    asked = Requests(row.requests.prompt, row.requests.output, row.requests.concurrency)
    topology, machine = topology_of_row(row.cluster), machine_fit(row.cluster.preset)
    form = RequestForm.of(model_of(row.model), topology, machine.parameters, asked, issued=row.issued)
    strategy = Strategy(tensor=row.tensor, microbatch=asked.concurrency, global_batch=asked.concurrency)
    out = form.priced(Configurations.of([strategy]))
    return {name: float(getattr(out, name)[0]) for name in ("first_token", "token", "latency", "tokens_per_second")}


def compared(rows: Sequence[RequestRow], measured: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Errors by source, all quantities as seconds, and every row."""
    every: dict[str, dict[str, float | str]] = {}
    for row in rows:
        ((name, value),) = measured[row.id].items()
        told = predict(row)[name]
        pair = (1 / told, 1 / value) if name == "tokens_per_second" else (told, value)
        every[row.id] = {"quantity": name, "predicted_over_measured": round(pair[0] / pair[1], 4)}
    sources: dict[str, dict[str, float]] = {}
    for source in sorted({row.table for row in rows}):
        ratios = [float(every[r.id]["predicted_over_measured"]) for r in rows if r.table == source]
        sources[source] = errors(np.array(ratios), np.ones(len(ratios)))
    mean = float(np.mean([one["mean_error_percent"] for one in sources.values()]))
    print(table(["source", *COLUMNS], [[s, *(e[c] for c in COLUMNS)] for s, e in sources.items()], "requests"))
    print(f"mean over sources {mean:.1f} %")
    return {"sources": sources, "mean over sources": mean, "rows": every}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_accuracy", description=__doc__)
    parser.add_argument("--open", action="store_true", help="read the measurements of the locked rows, and say so")
    parser.add_argument("--out", type=Path, default=OUT, help="the result file")
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if options.open:
        told = [json.loads(text) for text in (ROWS / "requests_locked_measured.jsonl").read_text().splitlines()]
        measured = {one["id"]: one["measured"] for one in told}
        found = compared(read_requests(ROWS / "requests_locked.jsonl"), measured)
        write(options.out, known | {"locked": found, "openings": known.get("openings", 0) + 1})
        return
    rows = read_requests(ROWS / "requests_open.jsonl")
    found = compared(rows, {row.id: row.measured for row in rows})
    first = known.get("before") or {name: found[name] for name in ("sources", "mean over sources")}
    kept = {name: known[name] for name in ("locked", "openings") if name in known}
    looks = known.get("looks", 0) + 1
    write(options.out, record({"rows": len(rows)}, {"before": first, "open": found, "looks": looks} | kept))


if __name__ == "__main__":
    main()
