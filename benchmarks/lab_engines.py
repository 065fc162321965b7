"""Predictions of trees and of several uplinks, and of every other engine, beside real links: cells that are drawn.

`python -m benchmarks.lab_engines [--count 20] [--repetitions 3] [--seed 42] [--busy]`. A cell is an engine, a cluster
with its rates, a mesh, a payload, and one placement and program of those that the planner knows. Links are slow (25 to
100 Mbit/s outside a node), so that a run takes a third of a second to some seconds, beside which what keeps the
processors busy weighs little; on a machine that others keep busy it is refused all the same without `--busy`, and the
result says what share of the processors was busy in the mean. No constant was fitted on these cells; those of seed 41
were seen before an op without a tree went round a ring.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from typing import Any

from benchmarks.common import arguments, record, table, write

from shardplan.execution.lab import Lab, missing
from shardplan.execution.lab.cluster import Rate
from shardplan.execution.lab.experiments import MIB, Experiment, Pair, pairs
from shardplan.execution.lab.machine import require_idle
from shardplan.simulation.scripts import Engine

KINDS: tuple[tuple[str, Engine, bool], ...] = (  # in turn: a name, the engine, whether nodes have two uplinks
    ("tree", "tree", False),
    ("tree, two uplinks", "tree", True),
    ("ring, two uplinks", "ring", True),
    ("tree", "tree", False),
    ("ring", "ring", False),
)
CLUSTERS = {"2x4": ("a=8", "a=2, b=4", "a=4, b=2"), "4x2": ("a=8", "a=4, b=2"), "2x3": ("a=6", "a=2, b=3")}
ONE: tuple[Rate, ...] = (50.0, 75.0, 100.0)
TWO: tuple[Rate, ...] = ("2*25", "2*40", "2*50")
INNER = (150.0, 200.0)
PAYLOADS = (1, 2)  # MiB of every device
LIMIT = 2  # instructions of a program


def draw_cells(count: int, seed: int) -> list[tuple[str, Engine, Experiment, Pair]]:
    """So many cells, kind by kind in turn."""
    draw = random.Random(seed)
    found: list[tuple[str, Engine, Experiment, Pair]] = []
    for k in range(count):
        kind, engine, two = KINDS[k % len(KINDS)]
        cluster = draw.choice(list(CLUSTERS))
        mesh = draw.choice(CLUSTERS[cluster])
        axes = draw.choice([("a",), tuple(part.split("=")[0] for part in mesh.split(", "))])
        rates = (draw.choice(TWO if two else ONE), draw.choice(INNER))
        experiment = Experiment(cluster, rates, mesh, axes, draw.choice(PAYLOADS) * MIB, limit=LIMIT)
        found.append((kind, engine, experiment, draw.choice(pairs(experiment, engine))))
    return found


def main() -> None:
    parser = arguments("lab_engines", "Trees and several uplinks beside real links.", 20, of="cells")
    parser.add_argument("--repetitions", type=int, default=3, help="timed runs of a cell (default %(default)s)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine, too")
    options = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    if not options.busy:
        require_idle()
    rows: list[dict[str, Any]] = []
    for kind, engine, experiment, pair in draw_cells(options.count, options.seed):
        with Lab(experiment.build(), engine=engine, most_late=0.05) as lab:
            (m,) = lab.measure([pair.task()], options.repetitions)
        rows.append(
            {
                "kind": kind,
                "experiment": experiment.name,
                "placement": pair.placement.describe(),
                "program": pair.text,
                "predicted": pair.events,
                "seconds": m.seconds,
                "cv": m.cv,
                "error": pair.events / m.seconds - 1,
                "cpu share": m.cpu_share,
                "verified": m.verified,
            }
        )
        print(f"{kind:18} {pair.events:.3f} s predicted, {m.seconds:.3f} s ({rows[-1]['error']:+.1%})  {pair.text}")
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        errors[row["kind"]].append(row["error"])
        errors["all"].append(row["error"])
    summary = {
        kind: {
            "cells": len(found),
            "mean": statistics.fmean(map(abs, found)),
            "worst": max(map(abs, found)),
            "bias": statistics.fmean(found),
        }
        for kind, found in errors.items()
    }
    print(table(("kind", "cells", "mean error", "worst", "bias"), [[k, *v.values()] for k, v in summary.items()]))
    parameters = {"count": options.count, "repetitions": options.repetitions, "seed": options.seed}
    result = {"busy, mean": statistics.fmean(r["cpu share"] for r in rows), "errors": summary, "rows": rows}
    write(options.out, record(parameters, result))


if __name__ == "__main__":
    main()
