"""Dims that axes do not divide, against the next larger ones that all of them divide.

`python -m benchmarks.uneven_dims [--count 300] [--seed 40]`: moves of arrays of 16 MB to 4 GB on meshes of one and two
axes, on dgx-h100 of 2 to 8 nodes and without a topology; some from addends, some between meshes; and the cases that
were named when this was asked for. Every dim that is cut misses, most often, a multiple of its axes. The even problem
has each dim as the next multiple of every product of axes that either type has there.

The law: seconds(n) <= 1.05 * seconds(even) + a launch, and a pass over the largest shard at the memory's rate where the
parts of one size, one behind the other, do not hold the array in its own order. Plans made without a topology are also
priced where they would run, on dgx-h100.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.common import Progress, arguments, geomean, record, spread, table, told, write
from benchmarks.over_bound import crossed, grown

import shardplan as sp
from benchmarks import suites
from shardplan.errors import LayoutError
from shardplan.plans.pricing import fabric_of, price_program

RATIO = 1.05
NODES = (2, 4, 8)
WIDE = 8  # devices of a node
LEAST, MOST = 16e6, 4e9  # bytes of an array
BARE: tuple[tuple[int, ...], ...] = ((8,), (16,), (64,), (2, 4), (2, 8), (4, 4), (8, 8))
NONE = "no topology"
KINDS = ("one mesh", "one mesh", "one mesh", "one mesh", "addends", "two meshes")


class Case(NamedTuple):
    """A move, where it is planned (None: nowhere), and what it counts for."""

    kind: str
    nodes: int  # 0 without a topology
    source: sp.TensorType
    target: sp.TensorType


NAMED = (  # mesh, source, destination, nodes
    ("d=16", "bf16[50257@d, 8192]", "bf16[50257, 8192]", 2),
    ("d=16", "bf16[50257, 8192]{+d}", "bf16[50257@d, 8192]", 2),
    ("a=8, b=8", "f32[1, 230058156@a]", "f32[1, 230058156@b]", 8),
    ("d=2, t=8", "bf16[50257@(d,t), 4096]", "bf16[50257, 4096]", 2),
    ("d=2, t=8", "bf16[50257@(d,t), 4096]", "bf16[50257, 4096]", 0),
    ("d=16", "bf16[50257@d, 8192]", "bf16[50257, 8192]", 0),
)


def named() -> Iterator[Case]:
    """The cases of the request; the send is to four replicas of 64 devices, nine elements above a multiple."""
    for mesh, s, t, nodes in NAMED:
        yield Case("named", nodes, *(sp.TensorType.parse(x, mesh) for x in (s, t)))
    ours, theirs = sp.Mesh(a=32), sp.Mesh({"p": 8, "q": 4}, devices=range(32, 64))
    for text in ("bf16[262153@a, 4096]", "f32[4096, 65545@a]"):
        s = sp.TensorType.parse(text, ours)
        target = text.replace("@a", "@q")
        yield Case("named", 8, s, sp.TensorType.parse(target, theirs))


def sizes_of(devices: int) -> list[tuple[int, ...]]:
    """The meshes of one and two axes on some devices."""
    return [(devices,), *((k, devices // k) for k in (2, 4, 8, 16) if k < devices and devices % k == 0)]


def steps_of(source: sp.TensorType, target: sp.TensorType) -> list[int]:
    """The least number that every product of axes of either type divides, dim by dim."""
    ends = (source, target)
    return [math.lcm(*(suites.cuts(x.mesh, x.layout.dims[d]) for x in ends)) for d in range(source.ndim)]


def drawn(rng: random.Random) -> Case:
    """One problem; raises `LayoutError` for a layout that no type allows."""
    nodes, kind = rng.choice((0, *NODES)), rng.choice(KINDS)
    mesh = suites.make_mesh(rng.choice(sizes_of(nodes * WIDE) if nodes else BARE))
    other = crossed(rng, mesh) if kind == "two meshes" else mesh
    ndim, dtype = rng.randint(1, 3), rng.choice(("bf16", "f32"))
    reduced = [x for x in mesh.axes if rng.random() < 0.6] if kind == "addends" else []
    names = (
        suites.pick_names(rng, [x for x in mesh.axes if x not in reduced], ndim, 0.75),
        suites.pick_names(rng, other.axes, ndim, 0.6),
    )
    cuts = [math.lcm(suites.cuts(mesh, a), suites.cuts(other, b)) for a, b in zip(*names, strict=True)]
    base = [max(n, 16) if n > 1 else rng.choice((1, 64, 1024)) for n in cuts]
    shape = grown(rng, base, cuts, 2 if dtype == "bf16" else 4)
    missed = tuple(
        n - rng.randrange(q) if q > 1 and rng.random() < 0.9 else n for n, q in zip(shape, cuts, strict=True)
    )
    source = sp.TensorType(dtype, missed, names[0], mesh, partial=dict.fromkeys(reduced, "sum"))
    return Case(kind, nodes, source, sp.TensorType(dtype, missed, names[1], other))


def problems(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` problems with an uneven dim, the same for the same arguments."""
    rng = random.Random(f"uneven dims {seed}")
    found = 0
    while found < count:
        try:
            case = drawn(rng)
        except LayoutError:
            continue
        s, t = case.source, case.target
        if s == t or (s.all_even and t.all_even) or not LEAST <= s.nbytes <= 2 * MOST:
            continue
        found += 1
        yield case


def evened(case: Case) -> Case:
    """The even problem."""
    shape = tuple(-(-n // q) * q for n, q in zip(case.source.shape, steps_of(case.source, case.target), strict=True))
    s, t = case.source, case.target
    partial = dict.fromkeys(s.layout.partial, s.layout.reduction or "sum")
    return case._replace(
        source=sp.TensorType(s.dtype, shape, s.layout.dims, s.mesh, partial=partial),
        target=sp.TensorType(t.dtype, shape, t.layout.dims, t.mesh),
    )


def padding_ends(t: sp.TensorType) -> bool:
    """Say whether parts of the largest one's size, one behind the other, hold the array in its own order.

    One dim is cut, all before it have extent 1, and every part begins where so many of the largest end.
    """
    boxes, cut = t.boxes(), [d for d, names in enumerate(t.layout.dims) if names]
    if not cut or t.all_even:
        return True
    if len(cut) > 1 or any(n > 1 for n in t.shape[: cut[0]]):
        return False
    low, high = boxes[:, cut[0], 0], boxes[:, cut[0], 1]
    most = int((high - low).max())
    return bool((low[high > low] % most == 0).all())


def topology_of(case: Case) -> sp.Topology | None:
    """Where it is planned."""
    last = 1 + max(d for x in (case.source, case.target) for d in x.mesh.devices)
    need = -(-last // WIDE)
    return sp.Topology.load("dgx-h100", nodes=max(case.nodes, need)) if case.nodes else None


def on_nodes(plan: sp.Plan) -> float:
    """The seconds of a plan on dgx-h100."""
    last = 1 + max(d for mesh in plan.program.meshes for d in mesh.devices)
    topology = sp.Topology.load("dgx-h100", nodes=-(-last // WIDE))
    return price_program(plan.program, fabric_of(topology, plan.program.meshes)).seconds


def row_of(case: Case) -> dict[str, Any]:
    """Both plans of one problem in numbers."""
    even, where = evened(case), topology_of(case)
    ours, theirs = (sp.redistribute(x.source, x.target, topology=where) for x in (case, even))
    device = (where or sp.Topology.load("dgx-h100")).device
    shard = max(x.local_bytes() for x in (case.source, case.target))
    ends = padding_ends(case.source) and padding_ends(case.target)
    passes = 0.0 if ends else 2 * shard / (device.memory_bandwidth * device.kernels.stream)
    found = {"seconds": (ours.seconds, theirs.seconds)}
    if where is None:
        found["on dgx-h100"] = on_nodes(ours), on_nodes(theirs)
    row: dict[str, Any] = {"kind": case.kind, "nodes": case.nodes or NONE}
    for name, (uneven, least) in found.items():
        launch = 5e-6 if where is None and name == "seconds" else device.launch
        allowed = RATIO * least + launch + passes
        row |= {name: uneven, f"{name}, even": least, f"{name}, ratio": uneven / least if least else 1.0,
                f"{name}, over": uneven / allowed if allowed else 1.0}  # fmt: skip
    got = max(ours.certificate.received_bytes)
    return row | {
        "pass": passes,
        "received over even": got / max(1, *theirs.certificate.received_bytes),
        "received over bound": got / max(1, *ours.certificate.lower_bound_bytes),
        "array": case.source.nbytes,
        "steps": " ".join(steps_text(ours)),
        "even steps": " ".join(steps_text(theirs)),
        "problem": told(case.source, case.target),
    }


def steps_text(plan: sp.Plan) -> list[str]:
    """The ops of a plan, with the algorithms that they name."""
    return [f"{s.op.name}{f'({s.op.algorithm})' if s.op.algorithm else ''}" for s in plan.program.steps]


def summary(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The distribution of the ratio, and how many keep the law."""
    rows = [r for r in rows if f"{name}, ratio" in r]
    ratios = [r[f"{name}, ratio"] for r in rows]
    within = [r[f"{name}, over"] <= 1 + 1e-9 for r in rows]
    return {"kept": sum(within), "geomean": geomean(ratios), **spread(ratios)}


def main() -> None:
    """Plan, print tables, write the result."""
    parser = arguments("uneven_dims", __doc__ or "", 300, of="problems")
    parser.add_argument("--seed", type=int, default=40)
    given = parser.parse_args()
    progress, rows = Progress("uneven dims", given.count), list[dict[str, Any]]()
    for case in problems(given.seed, given.count):
        rows.append(row_of(case))
        progress.add()
    asked = [row_of(case) for case in named()]
    parts = {
        "all": rows,
        **{str(n): [r for r in rows if r["nodes"] == n] for n in (NONE, *NODES)},
        **{kind: [r for r in rows if r["kind"] == kind] for kind in dict.fromkeys(KINDS)},
    }
    result: dict[str, Any] = {"summary": {}, "over": {}}
    lines: list[list[Any]] = []
    for name in ("seconds", "on dgx-h100"):
        for part, some in parts.items():
            found = summary(some, name)
            if found["count"]:
                result["summary"][f"{name}, {part}"] = found
                lines.append([f"{name}, {part}", *found.values()])
        beyond = Counter(r["steps"] for r in rows if r.get(f"{name}, over", 0) > 1 + 1e-9)
        result["over"][name] = dict(beyond.most_common())
    print(table(["uneven over even", *next(iter(result["summary"].values()))], lines))
    for name, found in result["over"].items():
        print(table([f"above the law, {name}", "problems"], list(found.items())[:12]))
    worst = sorted(rows, key=lambda r: -max(r["seconds, over"], r.get("on dgx-h100, over", 0)))
    print(table(["worst", "over", "ratio", "steps"], [
        [r["problem"], max(r["seconds, over"], r.get("on dgx-h100, over", 0)), r["seconds, ratio"], r["steps"]]
        for r in worst[:12]]))  # fmt: skip
    print(table(["named", "ms", "even", "over"], [
        [f"{r['problem']} ({r['nodes']})", 1e3 * r["seconds"], 1e3 * r["seconds, even"], r["seconds, over"]]
        for r in asked]))  # fmt: skip
    write(given.out, record({"count": given.count, "seed": given.seed}, result | {"named": asked, "problems": worst}))


if __name__ == "__main__":
    main()
