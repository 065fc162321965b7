"""The planner against exhaustive search over all typed ops, on at most 3 prime axes and 3 dims (law T8).

`python -m benchmarks.exhaustive [--count 6000] [--seed 0]`: pairs of types, all of them on small meshes and a seeded
sample on the others. The search (`tests/exhaustive.py`: Dijkstra over op instances, each typed by the op's own rule)
runs in three vocabularies, within the bound of each pair:

- typed: Slice, AllGather, AllToAll in every order, Permute of whole tiles. Ours (default and portable) must not cost
  more: it has more moves.
- portable: as well cutting Permutes and Exchanges over at most half of the mesh. `portable=True` must cost the same.
- all: as well the Exchange over the whole mesh. The default must cost the same.

Costs are the larger of what a device sends and receives, summed over steps, plus 0.2 % of the bound a round. A pair
where they differ is a counterexample and listed. `roomy` shapes are multiples of the mesh in every dim; `tight` ones
only of what a pair needs, so that many intermediate types are uneven; `uneven` ones are no multiples: there the planner
claims nothing, and `ours over the least` shows what is true.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from benchmarks.common import Progress, arguments, charged, record, spread, table, told, use_tests, write

import shardplan as sp
from benchmarks import suites
from shardplan.core.accounting import bound_bytes

MESHES: tuple[tuple[int, ...], ...] = (
    (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 3), (5, 2),
    (8,), (12,), (4, 2), (2, 6), (2, 2, 2), (2, 3, 2), (3, 2, 3), (5, 3, 2), (7, 2, 2),
)  # fmt: skip
MODES = ("typed", "portable", "all")  # numbered as `tests/exhaustive.py` numbers them
CLAIMS = (
    ("default", "typed", "<="), ("portable", "typed", "<="), ("portable", "portable", "=="), ("default", "all", "=="),
)  # fmt: skip
TIE = 1e-9
KINDS = {"roomy": 0.85, "tight": 0.06, "uneven": 0.09}


@dataclass(slots=True)
class Tally:
    """Pairs compared of one kind, and where a claim fails."""

    pairs: int = 0
    equal: dict[str, int] = field(default_factory=lambda: {_name(c): 0 for c in CLAIMS})
    broken: dict[str, int] = field(default_factory=lambda: {_name(c): 0 for c in CLAIMS})
    undercut: dict[str, int] = field(default_factory=lambda: {_name(c): 0 for c in CLAIMS})
    ratios: dict[str, list[float]] = field(default_factory=lambda: {_name(c): [] for c in CLAIMS})
    infeasible: int = 0


def _name(claim: tuple[str, str, str]) -> str:
    return f"{claim[0]} {claim[2]} {claim[1]}"


def pairs(kind: str, seed: int, count: int) -> Iterator[tuple[sp.TensorType, sp.TensorType]]:
    """Yield pairs of a kind, shared by meshes and numbers of dims; what small ones cannot use goes to others.

    Pairs of a kind that is drawn go through the grids in turn; roomy ones come grid by grid.
    """
    rng = random.Random(f"exhaustive {kind} {seed}")
    grids = [(sizes, ndim) for ndim in (1, 2, 3) for sizes in MESHES]
    if kind != "roomy":
        for k in range(count):
            sizes, ndim = grids[k % len(grids)] if kind == "uneven" else grids[k % (len(grids) * 2 // 3)]
            yield _drawn(kind, rng, suites.make_mesh(sizes), ndim)
        return
    left = count
    for k, (sizes, ndim) in enumerate(grids):
        taken = _sample(rng, suites.make_mesh(sizes), ndim, -(-left // (len(grids) - k)))
        left -= len(taken)
        yield from taken


def _sample(rng: random.Random, mesh: sp.Mesh, ndim: int, most: int) -> list[tuple[sp.TensorType, sp.TensorType]]:
    """All pairs of types of one roomy array, or a sample."""
    shape = tuple(mesh.size * (k + 1) for k in range(ndim))
    whole = sp.TensorType("f32", shape, (None,) * ndim, mesh)
    found = graph(whole).types
    everything = [(s, t) for s in found for t in found if s != t]
    return everything if len(everything) <= most else rng.sample(everything, most)


def _drawn(kind: str, rng: random.Random, mesh: sp.Mesh, ndim: int) -> tuple[sp.TensorType, sp.TensorType]:
    """The next pair of two different types that can be made."""
    while True:
        try:
            if kind == "tight":
                s, t = suites.even_pair(rng, mesh, ndim, axes=suites.atoms(mesh), most_multiple=1)
            else:
                s, t = suites.uneven_pair(rng, mesh, ndim, "f32")
        except sp.LayoutError:
            continue
        if s != t:
            return s, t


@lru_cache(maxsize=4)
def graph(whole: sp.TensorType) -> Any:
    """The graph of all types of an array; its edges are found as they are asked for."""
    return use_tests("exhaustive").Graph(whole)


def least(s: sp.TensorType, t: sp.TensorType, mode: str, even: bool = False) -> float:
    """The cost of the cheapest sequence of ops in a vocabulary; infinite when there is none within the bound.

    `even` leaves out intermediate types with an uneven dim.
    """
    whole = sp.TensorType(s.dtype, s.shape, (None,) * s.ndim, s.mesh)
    cost = graph(whole).cheapest(s, t, bound_bytes((s,), (t,)), MODES.index(mode), even=even)
    return float(cost)


def ours(s: sp.TensorType, t: sp.TensorType) -> dict[str, tuple[float, str, str]]:
    """The cost of our plans, how they are certified, and their ops; infinite where refused."""
    out: dict[str, tuple[float, str, str]] = {}
    for name in ("default", "portable"):
        try:
            plan = sp.redistribute(s, t, portable=name == "portable")
        except sp.Infeasible:
            out[name] = math.inf, "infeasible", ""
            continue
        out[name] = charged(plan), plan.certificate.status, " | ".join(step.op.name for step in plan.program.steps)
    return out


def compare(s: sp.TensorType, t: sp.TensorType, tally: Tally) -> list[dict[str, Any]]:
    """Count one pair; returns the claims that it breaks."""
    tally.pairs += 1
    found, best = ours(s, t), {mode: least(s, t, mode) for mode in MODES}
    tally.infeasible += any(math.isinf(cost) for cost, _, _ in found.values())
    out: list[dict[str, Any]] = []
    for claim in CLAIMS:
        name, mode, _ = claim
        mine, its = found[name][0], best[mode]
        same = math.isclose(mine, its, rel_tol=TIE, abs_tol=1e-9) or mine == its
        tally.ratios[_name(claim)].append(1.0 if same else mine / its if its else math.inf)
        if same:
            tally.equal[_name(claim)] += 1
        elif mine < its:
            tally.undercut[_name(claim)] += 1  # legal against `typed`; else the oracle lacks a move, and we list it too
        else:
            tally.broken[_name(claim)] += 1
        if mine > its + TIE * abs(its) or (claim[2] == "==" and mine < its * (1 - TIE)):
            row = {"problem": told(s, t), "claim": _name(claim), "ours": mine, "exhaustive": its}
            if s.all_even and t.all_even:
                row["exhaustive over even types"] = least(s, t, mode, even=True)
            out.append(
                row | {"status": found[name][1], "ops": found[name][2], "ratio": mine / its if its else math.inf}
            )
    return out


def main() -> None:
    parser = arguments("exhaustive", "The planner against exhaustive search over typed ops.", 6000, of="pairs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    tallies = {kind: Tally() for kind in KINDS}
    counterexamples: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    progress = Progress("pairs", sum(round(share * options.count) for share in KINDS.values()))
    for kind, share in KINDS.items():
        for s, t in pairs(kind, options.seed, round(share * options.count)):
            counterexamples[kind] += compare(s, t, tallies[kind])
            progress.add(1, f"({sum(map(len, counterexamples.values()))} counterexamples)")
    rows = [
        [f"{kind}: {name}", tally.pairs, tally.equal[name], tally.undercut[name], tally.broken[name]]
        for kind, tally in tallies.items()
        for name in tally.equal
    ]
    print(table(("claim", "pairs", "equal", "ours cheaper", "ours dearer"), rows, "ours against exhaustive search"))
    for kind, listed in counterexamples.items():
        listed.sort(key=lambda row: -row["ratio"])
        for row in listed[:10]:
            print(f"  {kind}: {row}")
    result = {
        "seconds": time.perf_counter() - started,
        "kinds": {
            kind: {"pairs": t.pairs, "equal": t.equal, "ours cheaper": t.undercut, "ours dearer": t.broken,
                   "ours over the least": {name: spread(found) for name, found in t.ratios.items()},
                   "refused": t.infeasible}
            for kind, t in tallies.items()
        },
        "counterexamples": counterexamples,
    }  # fmt: skip
    parameters = {"count": options.count, "seed": options.seed, "meshes": MESHES, "dims": [1, 2, 3]}
    write(options.out, record(parameters, result))


if __name__ == "__main__":
    main()
