"""Public generators of collectives beside ours: the all-reduces of MSCCL tools, and the optimum of ForestColl.

`python -m benchmarks.reduction_peers [--count 0]` (0: all rows). Neither is an installed package: what they answered,
at which commit and how it was obtained stands in `peers/collectives.json`, numbers only. Here our side is computed.

- *MSCCL tools* (microsoft/msccl-tools): from the bytes that one GPU's port and one node's NIC carry, at zero latency.
  `in steps` adds the part inside nodes and the part across, as our programs wait between steps (for the hierarchical
  ones); `overlapped` is the busiest of the two: what no schedule of these messages can beat. Where a node has as many
  NICs as GPUs each GPU uses its own.
- *ForestColl* (arXiv 2402.06787): its optimum for an all-gather of 1 GB beside our gather bound, on hierarchies of
  switches; twice that beside our bound of an all-reduce, and our best program and our all-gather beside both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from benchmarks.common import ROOT, arguments, record, table, write

import shardplan as sp
from shardplan.hardware.level import Level
from shardplan.hardware.prices.fabric import Fabric
from shardplan.plans.collective_bounds import all_gather_bound, all_reduce_bound

ANSWERS = ROOT / "benchmarks" / "peers" / "collectives.json"
PAYLOAD = 2**30
GB = 1e9
STEPPED = ("hierarchical_allreduce.py", "allreduce_a100_multinode_allpairs.py")
# On a ring of links only what a ring sends can be priced from the bytes of a port.
ON_RING = ("hierarchical_allreduce.py", "simple/allreduce_ring.py")
SYSTEMS = {(2, 8): ("gcp-v100x8", "dgx-a100"), (4, 8): ("gcp-v100x8", "dgx-a100"), (2, 16): ("gcp-a100x16",),
           (4, 16): ("gcp-a100x16",), (2, 6): ("six",)}  # fmt: skip


def still(topology: sp.Topology) -> sp.Topology:
    """The same without latencies."""
    return replace(topology, levels=tuple(replace(level, latency=0.0) for level in topology.levels))


def load(name: str, nodes: int) -> sp.Topology:
    """A preset, or nodes of six devices."""
    if name == "six":
        return hierarchy(((nodes, 25), (6, 150)))
    return still(sp.Topology.load(name, nodes=nodes))


def hierarchy(levels: Sequence[Sequence[int]]) -> sp.Topology:
    """Switches from (size, GB/s of a child), outermost first."""
    return sp.Topology("switches", tuple(Level(f"l{k}", n, "switch", GB * b, 0.0) for k, (n, b) in enumerate(levels)))


def whole(topology: sp.Topology) -> sp.Placement:
    """One axis over everything."""
    return next(sp.placements(sp.Mesh(a=topology.size), topology))


def msccl(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The programs of MSCCL tools and ours, on the systems they were made for."""
    out: list[dict[str, Any]] = []
    for row in rows:
        for name in SYSTEMS[row["nodes"], row["gpus"]]:
            topology = load(name, row["nodes"])
            node, gpu = topology.levels
            if gpu.link == "ring" and row["example"] not in ON_RING:
                continue
            port = {key: float(Fraction(row[key])) * PAYLOAD for key in row if key.endswith(("port", "GPU", "node"))}
            across = port["across a node"] if node.uplinks == 1 else port["across a GPU"]
            far = across / node.bandwidth
            stepped = port["inside a GPU port"] / gpu.bandwidth + far
            place = whole(topology)
            best = sp.reduce(place, "a", PAYLOAD, algorithm="ring")
            every = sp.reductions(place, "a", PAYLOAD, algorithm="ring")
            stock = next(r.seconds for r in every if [i.collective for i in r.instructions] == ["all_reduce"])
            price = stepped if row["example"] in STEPPED else None
            overlapped = max(port["all of a GPU port"] / gpu.bandwidth, far)
            out.append({
                "example": row["example"], "system": f"{name} x{row['nodes']}", "in steps": price,
                "overlapped": overlapped, "our best, ring": best.seconds, "our stock ring": stock,
                "our auto": sp.reduce(place, "a", PAYLOAD).seconds,
                "bound": best.certificate.lower_bound_seconds,
                "its steps / our best": None if price is None else price / best.seconds,
                "overlapped / our stock": overlapped / stock,
                "our program": " ".join(step.op.name for step in best.program.steps)})  # fmt: skip
    return out


def forestcoll(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Its optimum, and our bounds and programs."""
    out: list[dict[str, Any]] = []
    for row in rows:
        topology = hierarchy(row["levels"])
        fabric, n = Fabric(topology), topology.size
        members = np.arange(n)[None]
        theirs = float(Fraction(row["seconds for 1 GB"]))
        gather = all_gather_bound(members, np.array([GB / n]), fabric)
        reduction = all_reduce_bound(members, np.array([GB]), fabric)
        best = {a: sp.reduce(whole(topology), "a", GB, algorithm=a).seconds for a in ("ring", "auto")}
        traffic = {("a",): [("all_gather", GB / n, 1)]}
        gathered = sp.place(whole(topology).mesh, topology, traffic, algorithm="ring")[0].seconds
        out.append({
            "system": row["system"], "devices": n, "its optimum": theirs, "our gather bound": gather,
            "equal": math.isclose(theirs, gather, rel_tol=1e-9),
            "our all-gather, ring / it": gathered / theirs,
            "twice it": 2 * theirs, "our all-reduce bound": reduction,
            "bound equals twice it": math.isclose(reduction, 2 * theirs, rel_tol=1e-9),
            "our best all-reduce, ring / twice it": best["ring"] / (2 * theirs),
            "auto / twice it": best["auto"] / (2 * theirs)})  # fmt: skip
    return out


def main() -> None:
    parser = arguments("reduction_peers", "Public generators of collectives beside ours.", 0, of="rows each, 0: all")
    options = parser.parse_args()
    answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
    most = options.count or None
    theirs = msccl(answers["msccl-tools"]["rows"][:most])
    heads = [k for k in theirs[0] if k != "our program"]
    print(table(heads, [[r[h] for h in heads] for r in theirs], "MSCCL tools, 2^30 bytes, seconds at zero latency"))
    trees = forestcoll(answers["forestcoll"]["rows"][:most])
    print(table(tuple(trees[0]), [list(r.values()) for r in trees], "ForestColl, all-gather of 1 GB in total"))
    own: list[dict[str, Any]] = []
    for row in answers["forestcoll"]["its own topologies"]:
        nodes = 2 if "(2)" in row["system"] else 4
        topology = load("dgx-a100", nodes)
        n = topology.size
        ours = all_gather_bound(np.arange(n)[None], np.array([GB / n]), Fabric(topology))
        optimum = float(Fraction(row["seconds for 1 GB"]))
        own.append({"system": row["system"], "its optimum": optimum, "ours, dgx-a100": ours, "ratio": ours / optimum})
    print(table(tuple(own[0]), [list(r.values()) for r in own], "its A100 graph, whose NICs stand beside NVLink"))
    sources = {
        name: {k: answers[name][k] for k in ("repository", "commit", "how")} for name in ("msccl-tools", "forestcoll")
    }
    result = {"sources": sources, "gather bound equal": f"{sum(r['equal'] for r in trees)} of {len(trees)}",
              "msccl-tools": theirs, "forestcoll": trees, "its own topologies": own}  # fmt: skip
    write(options.out, record({"count": options.count, "payload": PAYLOAD}, result))


if __name__ == "__main__":
    main()
