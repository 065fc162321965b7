"""Plans end in the very types asked for, and their shards in the order of the destination's mesh.

`python -m benchmarks.destinations [--count 2000] [--seed 37]`: pairs whose meshes differ in their axes, their order or
their devices, or in nothing but names (`suites.ends_pair`), each planned alone, portable, under a limit, or in a batch.
Of every plan: the types of the outputs equal the destinations, the certificate holds, and `collect` under the
destinations gives the arrays back, from shards run on the reference.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
from benchmarks.common import Progress, arguments, record, table, write

import shardplan as sp
from benchmarks import suites
from shardplan.errors import LayoutError

WAYS = ("alone", "portable", "limited", "batch")


def drawn(rng: random.Random, way: str) -> tuple[list[sp.TensorType], list[sp.TensorType]] | None:
    """The ends of one plan; None where no types of one array were drawn."""
    try:
        pairs = [suites.ends_pair(rng, 8) for _ in range(rng.randint(2, 4) if way == "batch" else 1)]
    except LayoutError:
        return None
    return [s for s, _ in pairs], [t for _, t in pairs]


def planned(sources: list[sp.TensorType], targets: list[sp.TensorType], way: str) -> sp.Plan | None:
    """The plan; None where there is none that is portable, or no pair describes one array."""
    ends: Any = (sources, targets) if way == "batch" else (sources[0], targets[0])
    try:
        if way == "portable":
            return sp.redistribute(*ends, portable=True)
        if way == "limited":
            return sp.redistribute(*ends, memory_limit=1)
        return sp.redistribute(*ends)
    except sp.Infeasible as error:
        return None if error.least_bytes is None else sp.redistribute(*ends, memory_limit=error.least_bytes)
    except LayoutError:
        return None


def wrong(plan: sp.Plan, targets: list[sp.TensorType]) -> str:
    """What is wrong with a plan; empty where nothing is."""
    program = plan.program
    if program.output_types[: len(targets)] != tuple(targets) or plan.certificate.destinations != tuple(targets):
        return f"it ends in {', '.join(map(repr, program.output_types))}"
    plan.certificate.check()
    arrays = [np.arange(np.prod(t.shape), dtype=np.int32).reshape(t.shape) for t in targets]
    given = [sp.distribute(x, s) for x, s in zip(arrays, program.input_types, strict=True)]
    results: Any = sp.run(program, given if len(given) > 1 else given[0])
    for x, t, shards in zip(arrays, targets, results if len(given) > 1 else [results], strict=True):
        if not np.array_equal(sp.collect(shards, t), x):
            return f"{t} on {t.mesh} is collected as another array"
    return ""


def main() -> None:
    """Draw, check, and write the result."""
    parser = arguments("destinations", __doc__ or "", 2000, of="plans")
    parser.add_argument("--seed", type=int, default=37)
    options = parser.parse_args()
    rng, progress = random.Random(options.seed), Progress("plans", options.count)
    counts = {way: Counter[str]() for way in WAYS}
    failures: list[dict[str, str]] = []
    while progress.done < options.count:
        way = WAYS[progress.done % len(WAYS)]
        ends = drawn(rng, way)
        plan = None if ends is None else planned(*ends, way)
        if ends is None or plan is None:
            counts[way]["none"] += 1
            continue
        reason = wrong(plan, ends[1])
        still = all(sp.same(s, t) and s != t for s, t in zip(*ends, strict=True))
        counts[way] += Counter({"plans": 1, "names alone": still, "wrong": bool(reason)})
        if reason:
            failures.append({"way": way, "ends": repr(ends), "reason": reason})
        progress.add()
    rows = [{"way": way} | {k: counts[way][k] for k in ("plans", "names alone", "wrong", "none")} for way in WAYS]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    for failure in failures[:5]:
        print(failure)
    write(options.out, record({"count": options.count, "seed": options.seed}, {"ways": rows, "failures": failures}))


if __name__ == "__main__":
    main()
