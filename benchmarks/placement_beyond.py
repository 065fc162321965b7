"""Placements and reduction programs beyond the published systems: four levels, many NICs, NVL72, a torus, odd nodes.

`python -m benchmarks.placement_beyond [--count 0]`: on each system all placements of a few meshes, every set of axes
reduced, 2^30 bytes a device (`--count` limits the meshes of a system; 0 takes all). Each system is priced by its
library: `ring` under a ring and a tree, `nccl` and `xla` under all that they have (`auto`), `nccl` also under its rings
and trees alone.

- *placement ratio*: slowest over fastest stock AllReduce among the placements of a mesh and a reduction;
- *gain*: stock AllReduce over the exact best program (`sp.place`: a shortest path over types, no limit on its size);
- *bound / best*: the lower bound in seconds (cut, count and gather) over the best program; within 10 % means >= 0.9;
- *missed by limit 5*: among reductions over three levels and more, those whose best program has more than five steps
  and beats every program of at most five.

Also: payloads from 1 KiB to 1 GiB, and where plain AllReduce is best; contiguous collectives, one factor a sub-axis
(`uncollapsed`) and any set of them (`subsets`) on a torus; a NIC at a half and a tenth of its rate. All seconds are a
model's.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import arguments, geomean, record, table, write

import shardplan as sp
from shardplan.hardware.level import Level
from shardplan.hardware.level_factors import factors

ALGORITHMS = {"ring": ("ring", "tree"), "nccl": ("auto", "ring", "tree"), "xla": ("auto",)}  # by library
PAYLOAD = 2**30
GAIN = 1.005
NEAR = 0.9
PAYLOADS = tuple(2**k for k in range(10, 31, 2))
FACTORS = (0.5, 0.1)


def switches(name: str, *levels: tuple[str, int, float]) -> sp.Topology:
    """A hierarchy of switches with latencies of the presets."""
    return sp.Topology(
        name, tuple(Level(n, size, "switch", rate, 2e-6 if n == "gpu" else 5e-6) for n, size, rate in levels)
    )


FOUR = switches("four levels", ("pod", 4, 5e9), ("rack", 4, 1e10), ("node", 2, 2.5e10), ("gpu", 8, 3e11))
SIX = switches("6-device nodes", ("node", 4, 2.5e10), ("gpu", 6, 1.5e11))
SYSTEMS: tuple[tuple[sp.Topology, tuple[tuple[int, ...], ...]], ...] = (
    (FOUR, ((256,), (32, 8), (8, 32), (16, 16), (4, 8, 8), (16, 4, 4))),
    (sp.Topology.load("dgx-a100", nodes=4), ((32,), (8, 4), (4, 8), (2, 16), (2, 4, 4))),
    (sp.Topology.load("dgx-h100", nodes=16), ((128,), (16, 8), (8, 16), (4, 32), (4, 4, 8))),
    (sp.Topology.load("nvl72", nodes=4), ((288,), (36, 8), (4, 72), (12, 24), (9, 4, 8))),
    (sp.Topology.load("tpu-v7"), ((128,), (16, 8), (8, 16), (4, 32), (4, 4, 8), (4, 4, 4, 2))),
    (SIX, ((24,), (4, 6), (6, 4), (2, 12), (3, 8), (2, 3, 4))),
)  # fmt: skip
TORUS = ((4, 4, 4, 2), (8, 16), (2, 4, 16), (16, 8), (2, 8, 8))


@dataclass(frozen=True, slots=True)
class Case:
    """A placement and the axes reduced over, under one algorithm; `five` is the best of at most five steps."""

    group: tuple[Any, ...]
    crossing: bool
    factors: int
    stock: float
    best: float
    bound: float
    five: float | None


def axes_of(sizes: Sequence[int]) -> tuple[sp.Mesh, list[tuple[str, ...]]]:
    """A mesh, and all sets of its axes."""
    mesh = sp.Mesh({f"a{k}": n for k, n in enumerate(sizes)})
    return mesh, [a for r in range(1, len(sizes) + 1) for a in itertools.combinations(mesh.axes, r)]


def cases(topology: sp.Topology, meshes: Sequence[tuple[int, ...]], algorithm: str) -> Iterator[Case]:
    """Yield every placement of some meshes on a system with its prices, for all sets of axes to reduce over."""
    for sizes in meshes:
        mesh, sets = axes_of(sizes)
        for axes in sets:
            for row in sp.place(mesh, topology, {axes: PAYLOAD}, algorithm=algorithm):
                found = factors(row.placement, axes)
                five = None
                if len(found) > 2:
                    every = sp.reductions(row.placement, axes, PAYLOAD, limit=5, top=1, algorithm=algorithm)
                    five = every[0].seconds
                outer = len(found) > 0 and found[0].name != topology.levels[-1].name
                yield Case((sizes, axes), outer, len(found), row.stock_seconds, row.seconds,
                           row.lower_bound_seconds, five)  # fmt: skip


def spread_of(rows: Sequence[Case]) -> list[float]:
    """Slowest over fastest stock AllReduce, of every mesh and reduction that has several placements."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for case in rows:
        groups.setdefault(case.group, []).append(case.stock)
    return [max(g) / min(g) for g in groups.values() if len(g) > 1]


def summary(topology: sp.Topology, meshes: Sequence[tuple[int, ...]], algorithm: str) -> dict[str, Any]:
    """The figures of a system under an algorithm."""
    rows = list(cases(topology, meshes, algorithm))
    gains = [c.stock / c.best for c in rows]
    near = [c.bound / c.best for c in rows]
    deep = [c for c in rows if c.five is not None]
    missed = [c.five / c.best for c in deep if c.five is not None and c.five > c.best * (1 + 1e-9)]
    ratio = spread_of(rows)
    return {
        "system": topology.name,
        "devices": topology.size,
        "algorithm": algorithm,
        "placements": sum(sum(1 for _ in sp.placements(axes_of(m)[0], topology)) for m in meshes),
        "reductions": len(rows),
        "crossing": sum(c.crossing for c in rows),
        "improved": sum(g > GAIN for g in gains),
        "mean gain": statistics.fmean(gains),
        "geomean gain": geomean(gains),
        "max gain": max(gains),
        "placement ratio": max(ratio),
        "geomean ratio": geomean(ratio),
        "bound / best": statistics.median(near),
        "least": min(near),
        "within 10 %": sum(x >= NEAR for x in near) / len(near),
        "over 3 levels and more": len(deep),
        "missed by limit 5": len(missed),
        "at most by": max(missed, default=1.0),
    }


def payloads(topology: sp.Topology, sizes: tuple[int, ...], algorithm: str) -> dict[str, Any]:
    """How often plain AllReduce is best, by payload, where a reduction spans at least two levels."""
    mesh, sets = axes_of(sizes)
    plain: dict[int, float] = {}
    gains: dict[int, float] = {}
    rows: list[float] = []
    for nbytes in PAYLOADS:
        rows = [
            row.stock_seconds / row.seconds
            for axes in sets
            for row in sp.place(mesh, topology, {axes: nbytes}, algorithm=algorithm)
            if len(factors(row.placement, axes)) > 1
        ]
        plain[nbytes] = sum(g <= 1 + 1e-9 for g in rows) / len(rows)
        gains[nbytes] = max(rows)
    first = next((n for n in PAYLOADS if plain[n] < 0.5), None)
    return {"system": topology.name, "mesh": sizes, "algorithm": algorithm, "reductions": len(rows),
            "share where plain is best": plain, "largest gain": gains,
            "most are better as programs from": first}  # fmt: skip


def torus(sizes: tuple[int, ...]) -> dict[str, Any]:
    """What one factor a sub-axis, and any set of factors, are worth on a torus."""
    topology = sp.Topology.load("tpu-v7")
    mesh, sets = axes_of(sizes)
    better: dict[str, list[float]] = {"uncollapsed": [], "subsets": [], "both": []}
    near: list[float] = []
    for axes in sets:
        for placement in sp.placements(mesh, topology):
            plan = sp.reduce(placement, axes, PAYLOAD)
            found = {
                name: sp.reduce(placement, axes, PAYLOAD, uncollapsed=single, subsets=free)
                for name, single, free in (("uncollapsed", True, False), ("subsets", False, True), ("both", True, True))
            }
            for name, other in found.items():
                better[name].append(plan.seconds / other.seconds)
            near.append(found["both"].certificate.lower_bound_seconds / found["both"].seconds)
    out: dict[str, Any] = {"mesh": sizes, "reductions": len(near)}
    for name, values in better.items():
        out |= {f"{name}: better": sum(v > GAIN for v in values), f"{name}: geomean": geomean(values),
                f"{name}: max": max(values)}  # fmt: skip
    over = [u / b for u, b in zip(better["both"], better["uncollapsed"], strict=True)]
    return out | {"both over uncollapsed: max": max(over), "bound / best of both": statistics.median(near)}


def degraded(topology: sp.Topology, sizes: tuple[int, ...], factor: float) -> list[dict[str, Any]]:
    """The regret of the choice that is best when healthy, and what renaming gives, with one slow unit outermost."""
    slow = replace(topology.levels[0], degraded=((1, factor),))
    sick = replace(topology, levels=(slow, *topology.levels[1:]))
    mesh = sp.Mesh({f"a{k}": n for k, n in enumerate(sizes)})
    heavy: dict[tuple[str, ...], float] = {(a,): 1e9 / 4**k for k, a in enumerate(mesh.axes)}
    light: dict[tuple[str, ...], float] = {(a,): 1e9 * 4**k for k, a in enumerate(mesh.axes)}
    out: list[dict[str, Any]] = []
    for traffic in (heavy, light):
        for algorithm, programs in itertools.product(ALGORITHMS[topology.library], ("best", "stock")):
            well = sp.place(mesh, topology, traffic, algorithm=algorithm, programs=programs)
            ranking = sp.place(mesh, sick, traffic, algorithm=algorithm, programs=programs)
            found = ranking.degraded
            assert found is not None
            out.append({
                "system": topology.name, "mesh": sizes, "factor": factor, "algorithm": algorithm, "programs": programs,
                "bytes": list(traffic.values()), "placements": len(ranking),
                "slower than healthy": ranking[0].seconds / well[0].seconds,
                "healthy choice": found.healthy.describe(), "best": ranking[0].placement.describe(),
                "regret": found.regret, "renaming": found.renaming is not None, "gain": found.gain})  # fmt: skip
    return out


def main() -> None:
    parser = arguments("placement_beyond", "Placements beyond the published systems.", 0, of="meshes a system, 0: all")
    options = parser.parse_args()
    most = options.count or None
    systems = [summary(t, m[:most], a) for t, m in SYSTEMS for a in ALGORITHMS[t.library] if not _say(t.name, a)]
    heads = tuple(systems[0])
    print(table(heads, [[r[h] for h in heads] for r in systems], "systems, 2^30 bytes a device"))
    two = [(t, m[1]) for t, m in SYSTEMS if t.name in ("dgx-a100", "dgx-h100", "four levels", "6-device nodes")]
    two.append((sp.Topology.load("gcp-a100x16", nodes=4), (8, 8)))
    sweeps = [payloads(t, m, a) for t, m in two for a in ALGORITHMS[t.library] if not _say(t.name, "payloads")]
    lines = [[r["system"], r["algorithm"], r["reductions"], *r["share where plain is best"].values()] for r in sweeps]
    sizes_ = [f"{n >> 10} KiB" if n < 2**20 else f"{n >> 20} MiB" for n in PAYLOADS]
    print(table(("plain is best", "algorithm", "reductions", *sizes_), lines, "share of reductions over two levels"))
    tori = [torus(sizes) for sizes in TORUS[:most] if not _say("torus", str(sizes))]
    heads = tuple(tori[0])
    print(table(heads, [[r[h] for h in heads] for r in tori], "tpu-v7: contiguous over the two levels beside"))
    sick: list[dict[str, Any]] = []
    for topology, meshes in (SYSTEMS[0], SYSTEMS[1], SYSTEMS[5]):
        for sizes, factor in itertools.product(meshes[1:][:most], FACTORS):
            _say(topology.name, f"degraded {sizes}")
            sick += degraded(topology, sizes, factor)
    worst = sorted(sick, key=lambda r: -max(r["regret"], r["gain"]))[:8]
    heads = ("system", "mesh", "factor", "algorithm", "programs", "slower than healthy", "regret", "gain")
    print(table(heads, [[r[h] for h in heads] for r in worst], f"a degraded unit: worst of {len(sick)}"))
    short = {
        "cases": len(sick),
        "regret above 1.005": sum(r["regret"] > GAIN for r in sick),
        "largest regret": max(r["regret"] for r in sick),
        "renaming gains above 1.005": sum(r["gain"] > GAIN for r in sick),
        "largest gain of renaming": max(r["gain"] for r in sick),
    }
    print(short)
    parameters = {"count": options.count, "payload": PAYLOAD, "meshes": {t.name: m for t, m in SYSTEMS},
                  "degraded factors": FACTORS, "payloads": PAYLOADS}  # fmt: skip
    result = {"systems": systems, "payloads": sweeps, "torus": tori, "degraded in short": short, "degraded": sick}
    write(options.out, record(parameters, result))


def _say(*words: str) -> None:
    print(*words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
