"""Bytes between nodes and idle NICs: what plans put there, over the least, beside what was planned by seconds alone.

    python -m benchmarks.slow_levels [--count 300] [--seed 0]

Drawn are elastic changes and repairs on dgx-h100: a tensor on 16 devices goes to some that stayed and some of other
nodes. `bytes` is what crosses over what is wanted in a node and not held there, each element once; `straight` the same
of a send from near holders alone. `kept` counts the plans within 1.05 of the least of all that was tried within 10 % of
the least seconds. Beside them five named movements, and reduce-scatters over two axes in either order.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from benchmarks.common import RESULTS, record, use_tests, write

import shardplan as sp
from shardplan.core.accounting import books_of
from shardplan.core.ops import Send
from shardplan.movement.redistribution.choice import FEW_BYTES, Chosen, chain
from shardplan.movement.redistribution.single_move import rules_of
from shardplan.plans.pricing import NOISE

NODE = 8
Ends = tuple[sp.TensorType, sp.TensorType]
NAMED = {
    "near parts gathered inside": ("f32[82975744@b]", "a=8,b=8", "f32[82975744@a]", "a=8,b=8"),
    "PP2 x DP2 x TP8 to FSDP32": ("bf16[28672@tp,8192]", "dp=2,tp=8", "bf16[28672@fsdp,8192]", "fsdp=32"),
    "the same, ids interleaved over nodes": (
        "bf16[28672@tp,8192]",
        "dp=2,tp=8 devices=[0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15]",
        "bf16[28672@fsdp,8192]",
        "fsdp=32",
    ),
    "a hot spare": (
        "bf16[8192,106496@tp]",
        "dp=2,tp=8",
        "bf16[8192,106496@tp]",
        "dp=2,tp=8 devices=[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,16]",
    ),
    "a node joins": ("bf16[8192,106496@tp]", "dp=2,tp=8", "bf16[8192,106496@tp]", "dp=3,tp=8"),
}


def elastic(seed: int, count: int) -> Iterator[Ends]:
    """Tensors of 16 devices on 2 nodes, and the same on as many, more or fewer of 4 nodes, some of them the same."""
    rng = random.Random(f"elastic {seed}")
    while count:
        dp, tp = rng.choice([(2, 8), (4, 4), (1, 16)])
        where = rng.choice(["[{}@tp,384]", "[{},384@tp]", "[{}@dp,384@tp]", "[{}@(dp,tp),384]", "[{}@(tp,dp),384]"])
        later = rng.choice((8, 16, 16, 24, 32))
        stayed = sorted(rng.sample(range(16), min(later, rng.randint(8, 16))))
        ids = [*stayed, *rng.sample(range(16, 32), later - len(stayed))] if later - len(stayed) <= 16 else []
        if len(ids) != later or later % tp:
            continue
        text = "f32" + where.format(384 * rng.choice((1, 20, 100)))
        yield (
            sp.TensorType.parse(text, sp.Mesh(dp=dp, tp=tp)),
            sp.TensorType.parse(text, sp.Mesh(dp=later // tp, tp=tp, devices=sorted(ids))),
        )
        count -= 1


def measured(ends: Ends, topology: sp.Topology) -> dict[str, Any]:
    """What a plan takes and puts between nodes, beside a send from near holders."""
    s, t = ends
    plan = sp.redistribute(s, t, topology)
    straight = chain([Send(t.layout, t.mesh, near=(NODE,))], s)
    direct = Chosen.of(straight, books_of(straight), False, rules_of(s, t, topology, False, False))
    within = direct.price <= plan.least_seconds * (1 + NOISE)
    crossed = plan.certificate.level_bytes[0]
    return {
        "steps": [step.op.name for step in plan.program.steps],
        "microseconds": round(plan.seconds * 1e6, 1),
        "least_microseconds": round(plan.least_seconds * 1e6, 1),
        "over_bound": round(plan.seconds / plan.certificate.lower_bound_seconds, 3) if plan.seconds else 1.0,
        "crossing_bytes": crossed,
        "kept": not within or crossed <= direct.crossing[0] * (1 + FEW_BYTES),
    }


def main() -> None:
    """Print and write them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    least_crossing = use_tests("oracle").least_crossing
    ratios, kept, slower = list[float](), 0, list[float]()
    for ends in elastic(given.seed, given.count):
        row, least = measured(ends, sp.Topology.load("dgx-h100", nodes=4)), float(least_crossing(*ends, NODE))
        kept += row["kept"]
        ratios += [row["crossing_bytes"] / least] if least else []
        slower.append(row["microseconds"] / row["least_microseconds"] if row["least_microseconds"] else 1.0)
    named: dict[str, Any] = {}
    for name, (text, mesh, goal, later) in NAMED.items():
        ends = sp.TensorType.parse(text, sp.Mesh.parse(mesh)), sp.TensorType.parse(goal, sp.Mesh.parse(later))
        named[name] = measured(ends, sp.Topology.load("dgx-h100", nodes=8))
    scatters = 0
    for dp, tp in ((2, 8), (4, 8), (8, 8), (4, 4), (8, 4)):
        topology = sp.Topology.load("dgx-h100", nodes=dp * tp // NODE)
        for axes in ("dp,tp", "tp,dp"):
            plan = sp.redistribute("bf16[16384,8192]{+dp,+tp}", f"bf16[16384@({axes}),8192]", topology,
                                   mesh=sp.Mesh(dp=dp, tp=tp))  # fmt: skip
            scatters += [step.op.name for step in plan.program.steps] == ["reduce_scatter"]
    found = np.array(ratios)
    result = {
        "problems": given.count,
        "kept": kept,
        "crossing_over_least": {
            "median": float(np.median(found)),
            "p90": float(np.quantile(found, 0.9)),
            "max": float(found.max()),
            "within_1.05_percent": float((found <= 1 + FEW_BYTES).mean() * 100),
        },
        "slower_than_least": {"median": float(np.median(slower)), "max": float(np.max(slower))},
        "named": named,
        "reduce_scatters_of_10_in_one_op": scatters,
    }
    print(result)
    write(RESULTS / "slow_levels.json", record({"count": given.count, "seed": given.seed}, result))


if __name__ == "__main__":
    main()
