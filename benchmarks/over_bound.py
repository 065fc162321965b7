"""Claimed seconds over their lower bound, of problems as users have them: on one mesh, and between two.

`python -m benchmarks.over_bound [--count 120] [--seed 14] [--topology nominal dgx-h100]`: per topology `--count` pairs
between two meshes (trainer to server: disjoint, overlapping, the same devices in another order, other numbers) and as
many on one mesh, a fifth of them uneven, and of those on one mesh a fifth from addends. Arrays have 1 MB to 16 GB,
evenly on a logarithmic scale, in bf16 or f32; meshes 4 to 64 devices, on nodes of 8 where there are nodes. Beside them
Kimi-K2's experts, eight stages of 32 devices each to 128 others, as one batch.

Of each the ratio of seconds to `lower_bound_seconds` is the product of two that are reported as well: seconds over
those without latencies, on both sides (`rounds`), and the ratio without latencies (`bytes`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.common import Progress, arguments, geomean, record, spread, table, timed, told, write

import shardplan as sp
from benchmarks import suites
from shardplan.errors import LayoutError
from shardplan.plans.pricing import fabric_of, price_program, seconds_bound

MESHES: tuple[tuple[int, ...], ...] = (
    (4,), (8,), (16,), (32,), (64,), (2, 4), (4, 2), (2, 8), (4, 4), (4, 8), (8, 4), (8, 8), (2, 2, 8), (2, 4, 4),
    (4, 2, 8), (2, 4, 8), (6,), (6, 4), (3, 8),
)  # fmt: skip
LEAST, MOST = 1e6, 16e9  # bytes of an array
SMALL = 64e6  # below it latencies count
NODES, DEVICES = 16, 128
KINDS = ("two meshes", "one mesh")
Pair = tuple[sp.TensorType, sp.TensorType]


def topology_of(name: str, devices: int = DEVICES) -> sp.Topology:
    """The topology with room for two meshes."""
    found = sp.Topology.load(name)
    return found.resize(**{found.levels[0].name: math.ceil(devices * found.levels[0].size / found.size)})


def grown(rng: random.Random, shape: Sequence[int], step: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape with its dims grown by multiples of their steps to about a size drawn."""
    asked = math.exp(rng.uniform(math.log(LEAST), math.log(MOST))) / itemsize
    sizes = list(shape)
    for d in rng.sample(range(len(sizes)), len(sizes)):
        factor = (
            (asked / math.prod(sizes)) ** (1 / (len(sizes) - d)) if d < len(sizes) - 1 else asked / math.prod(sizes)
        )
        sizes[d] += step[d] * max(0, round((factor - 1) * sizes[d] / step[d]))
    return tuple(sizes)


def drawn(kind: str, rng: random.Random) -> Pair:
    """One problem; raises `LayoutError` for a layout that no type allows."""
    mesh = suites.make_mesh(rng.choice(MESHES))
    ndim, dtype, what = rng.randint(1, 3), rng.choice(("bf16", "f32")), rng.random()
    two = kind == KINDS[0]
    other = crossed(rng, mesh) if two else mesh
    partial = 0.5 if not two and what > 0.8 else 0.0
    marks = suites.mark(rng, mesh, mesh.axes, partial, 0.0), suites.mark(rng, other, other.axes, 0.0, 0.0)
    names = [suites.pick_names(rng, m[0], ndim) for m in marks]
    step = [math.lcm(suites.cuts(mesh, a), suites.cuts(other, b)) for a, b in zip(*names, strict=True)]
    shape = grown(rng, step, step, 2 if dtype == "bf16" else 4)
    if what < 0.2:  # uneven
        shape = tuple(
            n + rng.choice((-1, 1)) * rng.randint(0, max(1, q // 2)) or 1 for n, q in zip(shape, step, strict=True)
        )
    source = sp.TensorType(dtype, shape, names[0], mesh, partial=dict.fromkeys(marks[0][1], "sum"))
    return source, sp.TensorType(dtype, shape, names[1], other)


def crossed(rng: random.Random, mesh: sp.Mesh) -> sp.Mesh:
    """Another mesh: most often disjoint, else overlapping, or of the same devices in another order."""
    how = rng.choice(("disjoint", "disjoint", "disjoint", "overlap", "order"))
    sizes = mesh.sizes if rng.random() < 0.3 else rng.choice(MESHES)
    wide = 8 if max(mesh.size, math.prod(sizes)) >= 8 else 4  # what fills a node starts at one
    first = -(-mesh.size // wide) * wide if how == "disjoint" else mesh.size // 2
    ids: Sequence[int] = range(first, first + math.prod(sizes))
    if how == "order":
        sizes = rng.choice([m for m in MESHES if math.prod(m) == mesh.size])
        ids = sp.Mesh(dict(zip("abc", sizes[::-1], strict=False))).devices
        ids = [ids[k] for k in sorted(range(mesh.size), key=lambda k: (k % sizes[-1], k // sizes[-1]))]
    return sp.Mesh(dict(zip("pqr", sizes, strict=False)), devices=ids)


def problems(kind: str, seed: int, count: int) -> Iterator[Pair]:
    """Yield `count` problems, the same for the same arguments."""
    rng = random.Random(f"over bound {kind} {seed}")
    found = 0
    while found < count:
        try:
            pair = drawn(kind, rng)
        except LayoutError:
            continue
        if pair[0] != pair[1] and LEAST / 4 <= pair[0].nbytes <= 4 * MOST:
            found += 1
            yield pair


def kimi(tensors: int, target: str, **serving: int) -> tuple[list[sp.TensorType], list[sp.TensorType]]:
    """Experts of Kimi-K2 (384 of 7168 x 2048, three matrices a layer): 8 stages of 32 devices to 128 others."""
    there = sp.Mesh(serving, devices=range(256, 384))
    stages = [sp.Mesh({"ep": 32}, devices=range(32 * k, 32 * k + 32)) for k in range(8)]
    sources = [sp.TensorType.parse("bf16[384@ep, 7168, 2048]", mesh) for mesh in stages for _ in range(tensors)]
    return sources, [sp.TensorType.parse(target, there)] * len(sources)


BATCHES: dict[str, Callable[[], tuple[list[sp.TensorType], list[sp.TensorType]]]] = {
    "experts to experts": lambda: kimi(24, "bf16[384@ep, 7168, 2048]", ep=128),
    "experts, tensor parallel in four": lambda: kimi(24, "bf16[384@ep, 7168, 2048@tp]", ep=32, tp=4),
    "experts, four replicas": lambda: kimi(24, "bf16[384@ep, 7168, 2048]", ep=32, dp=4),
}


def row_of(s: Any, t: Any, topology: sp.Topology) -> dict[str, Any]:
    """The plan of one problem in numbers."""
    plan, planning = timed(lambda: sp.redistribute(s, t, topology=topology))
    c = plan.certificate
    fabric = fabric_of(c.where, plan.program.meshes)  # pyright: ignore[reportArgumentType]
    found, bound = (
        price_program(plan.program, fabric),
        seconds_bound(c.sources, c.destinations, fabric, plan.program.meshes),
    )
    row: dict[str, Any] = {"ratio": None, "bytes": None, "rounds": None}
    if bound.seconds > 0:
        row["ratio"] = c.seconds / c.lower_bound_seconds
        row["bytes"] = found.transfer / bound.transfer
        row["rounds"] = row["ratio"] / row["bytes"]
    ops = [type(step.op).__name__ for step in plan.program.steps]
    return row | {"array": sum(x.nbytes for x in c.sources), "seconds": c.seconds, "planning": planning,
                  "status": c.status, "steps": " ".join(ops[:8]), "problem": told(s, t)}  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means, median and maximum of rows whose bound is not 0."""
    rows = [r for r in rows if r["ratio"]]
    return {
        "count": len(rows),
        "ratio": geomean(r["ratio"] for r in rows),
        "rounds": geomean(r["rounds"] for r in rows),
        "bytes": geomean(r["bytes"] for r in rows),
        **{k: v for k, v in spread([r["ratio"] for r in rows]).items() if k != "count"},
        "at most 1.2": sum(r["ratio"] <= 1.2 for r in rows) / max(1, len(rows)),
        "planning median": spread([r["planning"] for r in rows])["median"],
        "planning max": spread([r["planning"] for r in rows])["max"],
    }


def main() -> None:
    """Plan, print tables, write the result."""
    parser = arguments("over_bound", __doc__ or "", 120, of="problems of a kind")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--topology", nargs="+", default=["nominal", "dgx-h100"])
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--no-batches", action="store_true")
    given = parser.parse_args()
    result: dict[str, Any] = {"summary": {}, "batches": {}, "problems": {}}
    lines: list[list[Any]] = []
    for name in given.topology:
        topology = topology_of(name)
        for kind in given.kind:
            progress, rows = Progress(f"{name}, {kind}", given.count), list[dict[str, Any]]()
            for s, t in problems(kind, given.seed, given.count):
                one = topology_of(name, s.mesh.size) if kind == "one mesh" else topology
                rows.append(row_of(s, t, one))
                progress.add()
            parts = {
                "all": rows,
                f"below {SMALL / 1e6:g} MB": [r for r in rows if r["array"] < SMALL],
                f"from {SMALL / 1e6:g} MB": [r for r in rows if r["array"] >= SMALL],
            }
            for part, some in parts.items():
                result["summary"][f"{name}, {kind}, {part}"] = found = summary(some)
                lines.append([f"{name}, {kind}, {part}", *found.values()])
            result["problems"][f"{name}, {kind}"] = sorted(rows, key=lambda r: -(r["ratio"] or 0))
        if not given.no_batches:
            wide = topology_of(name, 384)
            result["batches"][name] = {k: row_of(*make(), wide) for k, make in BATCHES.items()}
    heads = list(next(iter(result["summary"].values())))
    print(table(["seconds over the bound", *heads], lines))
    for name, found in result["batches"].items():
        cells = [[k, r["ratio"], r["rounds"], r["bytes"], r["seconds"], r["planning"]] for k, r in found.items()]
        print(table([f"Kimi-K2, {name}", "ratio", "rounds", "bytes", "seconds", "planning"], cells))
    parameters = {"count": given.count, "seed": given.seed, "topology": given.topology}
    write(given.out, record(parameters, result))


if __name__ == "__main__":
    main()
