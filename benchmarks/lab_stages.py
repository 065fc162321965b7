"""A batch over stages on real links: the joint plan beside stage by stage, and both beside their prices.

`python -m benchmarks.lab_stages [--mib 1] [--repetitions 5]`, about a minute. Runs on Linux with the privileges that
`shardplan lab` needs. Four stages of two ranks, each on a node of its own (8x2 at 100/500 Mbit/s), send `--count`
tensors each to eight other ranks: to as many tiles, to half as many held twice, gathered inside the nodes. *Joint* is
one plan of all tensors, *stage by stage* a plan for each stage, each run when the one before has ended: the sum of
their seconds. Every result is verified on every rank. Reported: seconds measured and claimed (`Plan.seconds` on the
cluster, with the payload's share and the latency fixed for the lab), and the ratio of the two ways, which must lie
within 1.15 of the claimed one.
"""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.common import arguments, record, table, write

from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.execution.lab import Cluster, Lab, Task, missing
from shardplan.execution.lab.experiments import emulated_topology
from shardplan.movement.redistribute import redistribute
from shardplan.plans.plan import Plan

SIZES, RATES = "8x2", (100.0, 500.0)
TARGETS = {"eight tiles": {"ep": 8}, "four tiles held twice": {"ep": 4, "dp": 2}}
RATIO, PRICE = 1.15, 1.10  # bars: measured ratio over the claimed one, and seconds over their price, either way round


def stages(tensors: int, mib: float, axes: dict[str, int]) -> tuple[list[TensorType], list[TensorType]]:
    """Tensors of four stages, each with `mib` MiB a source rank."""
    there = Mesh(axes, devices=range(8, 16))
    columns = max(1, round(mib * 2**20 / 4 / 8))
    sources = [
        TensorType.parse(f"f32[16@ep, {columns}]", Mesh({"ep": 2}, devices=(2 * stage, 2 * stage + 1)))
        for stage in range(4)
        for _ in range(tensors)
    ]
    return sources, [TensorType.parse(f"f32[16@ep, {columns}]", there)] * len(sources)


def main() -> None:
    """Plan, measure, print, write."""
    parser = arguments("lab_stages", "A batch over stages on real links.", 4, of="tensors of a stage")
    parser.add_argument("--mib", type=float, default=1.0, help="MiB of a tensor on a source rank (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs of each (default %(default)s)")
    given = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    cluster = Cluster.of(SIZES, RATES)
    topology = emulated_topology(cluster.topology)
    plans: dict[str, list[Plan]] = {}
    for name, axes in TARGETS.items():
        sources, targets = stages(given.count, given.mib, axes)
        parts = [slice(k, k + given.count) for k in range(0, len(sources), given.count)]
        plans[f"{name}, joint"] = [redistribute(sources, targets, topology=topology)]
        plans[f"{name}, stage by stage"] = [redistribute(sources[p], targets[p], topology=topology) for p in parts]
    tasks = [Task(plan.program, None, f"{name} {k}") for name, some in plans.items() for k, plan in enumerate(some)]
    rows: dict[str, dict[str, Any]] = {}
    with Lab(cluster) as lab:
        found = iter(lab.measure(tasks, given.repetitions))
    for name, some in plans.items():
        mine = list(itertools.islice(found, len(some)))
        measured, claimed = sum(m.seconds for m in mine), sum(plan.seconds for plan in some)
        rows[name] = {
            "measured": measured, "claimed": claimed, "over price": measured / claimed,
            "largest cv": max(m.cv for m in mine), "cpu share": max(m.cpu_share for m in mine), "load": mine[0].load,
            "verified": all(m.verified and m.payload == m.predicted_payload for m in mine),
            "steps": [[s.op.name for s in plan.program.steps] for plan in some],
            "repetitions": [[r.seconds for r in m.repetitions] for m in mine],
        }  # fmt: skip
    ratios: dict[str, Any] = {}
    for name in TARGETS:
        joint, apart = rows[f"{name}, joint"], rows[f"{name}, stage by stage"]
        ratio = {key: apart[key] / joint[key] for key in ("measured", "claimed")}
        off = max(ratio["measured"] / ratio["claimed"], ratio["claimed"] / ratio["measured"])
        ratios[name] = ratio | {"off": off, "holds": off <= RATIO}
    heads = ("measured", "claimed", "over price", "largest cv", "cpu share", "load")
    print(table(["seconds", *heads], [[name, *(r[k] for k in heads)] for name, r in rows.items()]))
    cells = [[name, *(r[k] for k in ("measured", "claimed", "off", "holds"))] for name, r in ratios.items()]
    print(table(["stage by stage over joint", "measured", "claimed", "off", "within 1.15"], cells))
    near = sum(1 / PRICE <= r["over price"] <= PRICE for r in rows.values())
    print(f"within {PRICE - 1:.0%} of their price: {near} of {len(rows)}; all verified: "
          f"{all(r['verified'] for r in rows.values())}")  # fmt: skip
    parameters = {"tensors": given.count, "mib": given.mib, "cluster": SIZES, "rates": RATES,
                  "repetitions": given.repetitions}  # fmt: skip
    write(given.out, record(parameters, {"ratios": ratios, "rows": rows}))


if __name__ == "__main__":
    main()
