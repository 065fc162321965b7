"""The seconds that certificates claim, against a replay of their flows; and one move written on several meshes.

`python -m benchmarks.claimed_seconds [--count 1000] [--seed 0]`: problems on one mesh, on two, and
batches on one or two, drawn from the suites of `suites.py` on up to 16 devices, some with a memory limit
or `portable`. Arrays get a further dim of 1, 10^3 or 10^6 elements, so that latency matters in some and bytes in
others. A fifth is planned on no topology, the others on a topology (a third with a
slow unit) or on a placement of it. The replay
(`tests/replay.py`) walks every step in plain Python loops: the messages that lowerings put, ring, tree and switch
traffic of collectives, a clock for each device, port and value. It shares no code with the price.

The second part plans the same boxes on the same devices from meshes written otherwise: axes permuted, renamed,
factored into sub-axes, and with the factors of an axis in another order; and compares what the plans cost, and what
the move costs in one step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.common import (
    Progress,
    arguments,
    charged,
    geomean,
    listed,
    record,
    table,
    timed,
    told,
    use_tests,
    write,
)

import shardplan as sp
from benchmarks import suites
from shardplan.core.mesh import primes
from shardplan.core.ops import Exchange, Send
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.plans.pricing import fabric_of, price_program

RELATIVE = 1e-9  # up to which two prices are called equal
SUITES = {"U": 3, "P": 2, "S": 2, "N": 3, "V": 3, "L": 1, "M": 10, "B": 4}
LENGTHS = (1, 10**3, 10**6)
MOST = 16
ROOM = 64  # devices of a topology: room for two disjoint meshes
NODE = 8  # devices of a node in every preset that has nodes
PRESETS = ("nominal", "dgx-h100", "dgx-a100", "gcp-v100x8")
NONE = "no topology"
LISTED = 50  # exceptions that a result file lists
Where = sp.Topology | sp.Placement | None


class Asked(NamedTuple):
    """A request, and the rows that it counts for."""

    kind: str
    place: str
    source: suites.Ends
    target: suites.Ends
    where: Where
    keywords: dict[str, Any]

    def __str__(self) -> str:
        """Return it as text."""
        return f"{told(self.source, self.target, **self.keywords)} on {self.place}"


def loaded(name: str, devices: int, rng: random.Random) -> sp.Topology:
    """A preset of so many devices; one in three has a slow unit."""
    sizes = {"devices": devices} if name == "nominal" else {"nodes": devices // NODE}
    topology = sp.Topology.load(name, **sizes)
    outer = topology.levels[0]
    if rng.random() < 1 / 3:
        outer = replace(outer, degraded=((rng.randrange(outer.size), 0.5),))
    return replace(topology, levels=(outer, *topology.levels[1:]))


def placed(rng: random.Random, meshes: list[sp.Mesh]) -> tuple[str, Where]:
    """Draw where a request is planned, and what it is called."""
    name = rng.choice((NONE, *PRESETS))
    if name == NONE:
        return name, None
    mesh = meshes[0]
    fits = {d for m in meshes for d in m.devices} <= set(mesh.devices) and (name == "nominal" or mesh.size % NODE == 0)
    if fits and rng.random() < 0.5:
        topology = loaded(name, mesh.size, rng)
        found = rng.choice(list(sp.placements(mesh, topology)))
        return f"{name}, placement", found
    return name, loaded(name, ROOM, rng)


def longer(t: sp.TensorType, n: int) -> sp.TensorType:
    """The type of an array with one more dim of n elements, which no axis cuts."""
    partial = dict.fromkeys(t.layout.partial, t.layout.reduction or "sum")
    return sp.TensorType(t.dtype, (*t.shape, n), (*t.layout.dims, ()), t.mesh, partial, t.layout.root)


def stretched(rng: random.Random, ends: Sequence[suites.Ends]) -> list[Any]:
    """Both ends of a request with one more dim, of a drawn length for each tensor."""
    lengths = [rng.choice(LENGTHS) for _ in listed(ends[0])]
    out = [[longer(t, n) for t, n in zip(listed(end), lengths, strict=True)] for end in ends]
    return out if isinstance(ends[0], list) else [end[0] for end in out]


def requests(seed: int, count: int) -> Iterator[Asked]:
    """Yield the problems."""
    rng = random.Random(f"claimed seconds {seed}")
    drawn = {s: suites.problems(s, seed, count, most_devices=MOST, most_tensors=6) for s in SUITES}
    for suite in rng.choices(list(SUITES), list(SUITES.values()), k=count):
        *ends, keywords = next(drawn[suite])
        n = keywords.get("memory_limit")
        if n is None:
            ends = stretched(rng, ends)
        meshes = list(dict.fromkeys(t.mesh for end in ends for t in listed(end)))
        one = all(s.mesh == t.mesh for s, t in zip(*map(listed, ends), strict=True))
        kind = ("batch, " if suite == "B" else "") + ("one mesh" if one else "two meshes")
        place, where = placed(rng, meshes)
        if rng.random() < 0.1 and suite in ("U", "P", "S"):
            keywords = keywords | {"portable": True}
        yield Asked(kind, place, *ends, where, keywords)


def replayed(plan: sp.Plan) -> float:
    """The seconds of the flows of a plan's program."""
    replay, where, program = use_tests("replay"), plan.certificate.where, plan.program
    if where is None:
        where = sp.Topology.load("nominal", devices=1 + max(program.devices, default=0))
    if isinstance(where, sp.Topology):
        return float(replay.Replay(where, list(range(where.size))).seconds(program))
    lies = [0] * (1 + max(where.mesh.devices))
    for device, at in zip(where.mesh.devices, where.device_mesh().reshape(-1).tolist(), strict=True):
        lies[device] = at
    return float(replay.Replay(where.topology, lies).seconds(program))


def deviation(a: float, b: float) -> float:
    """How far two prices are apart, relative to the larger."""
    return abs(a - b) / max(a, b) if max(a, b) else 0.0


def claims(seed: int, count: int) -> dict[str, Any]:
    """Hold every claim against its replay."""
    rows: dict[tuple[str, str], list[float]] = {}
    exceptions: list[dict[str, Any]] = []
    over: dict[str, list[float]] = {}
    refused = 0
    progress = Progress("problems", count)
    for asked in requests(seed, count):
        progress.add()
        try:
            plan = sp.redistribute(asked.source, asked.target, asked.where, **asked.keywords)
        except sp.Infeasible:
            refused += 1
            continue
        claimed, found = plan.seconds, replayed(plan)
        rows.setdefault((asked.kind, asked.place), []).append(deviation(claimed, found))
        if bound := plan.certificate.lower_bound_seconds:
            over.setdefault(f"{asked.kind}, {asked.place}", []).append(claimed / bound)
        if deviation(claimed, found) > RELATIVE:
            exceptions.append({"problem": str(asked), "claimed": claimed, "replayed": found,
                               "ops": [str(step.op) for step in plan.program.steps]})  # fmt: skip
    lines = [{"problems": kind, "on": place, "count": len(found), "largest deviation": max(found),
              "seconds over bound, geomean": geomean(over.get(f"{kind}, {place}", []))}
             for (kind, place), found in sorted(rows.items())]  # fmt: skip
    return {
        "count": sum(map(len, rows.values())),
        "refused": refused,
        "equal": sum(x <= RELATIVE for found in rows.values() for x in found),
        "largest deviation": max(x for found in rows.values() for x in found),
        "rows": lines,
        "exceptions": exceptions[:LISTED],
    }


# One move, written on several meshes.


def renamed(rng: random.Random, mesh: sp.Mesh) -> tuple[sp.Mesh, dict[str, tuple[str, ...]]]:
    """The mesh with other names, in another order of the alphabet."""
    names = rng.sample("klmnopqr", len(mesh.axes))
    made = sp.Mesh(dict(zip(names, mesh.sizes, strict=True)), devices=mesh.devices)
    return made, {a: (n,) for a, n in zip(mesh.axes, names, strict=True)}


def permuted(rng: random.Random, mesh: sp.Mesh) -> tuple[sp.Mesh, dict[str, tuple[str, ...]]]:
    """The mesh with its axes in another order."""
    order = rng.sample(range(len(mesh.axes)), len(mesh.axes))
    ids = mesh.ids.reshape(mesh.sizes).transpose(order).reshape(-1).tolist()
    made = sp.Mesh({mesh.axes[k]: mesh.sizes[k] for k in order}, devices=ids)
    return made, {a: (a,) for a in mesh.axes}


def factored(rng: random.Random, mesh: sp.Mesh) -> tuple[sp.Mesh, dict[str, tuple[str, ...]]]:
    """The mesh with every axis as two, where it has two factors."""
    shape: dict[str, int] = {}
    named: dict[str, tuple[str, ...]] = {}
    for axis, n in mesh.shape.items():
        p = rng.choice([p for p in range(2, n) if n % p == 0] or [n])
        parts = {axis: n} if p >= n else {f"{axis}1": p, f"{axis}2": n // p}
        shape |= parts
        named[axis] = tuple(parts)
    return sp.Mesh(shape, devices=mesh.devices), named


def ordered(rng: random.Random, mesh: sp.Mesh) -> tuple[sp.Mesh, dict[str, tuple[str, ...]]]:
    """The mesh with the factors of its axes in another order: `a=12(3,2,2)`."""
    made = mesh
    for axis, n in mesh.shape.items():
        if len(found := primes(n)) > 1:
            made = made.reorder_factors(axis, *rng.sample(found, len(found)))
    return made, {a: (a,) for a in mesh.axes}


WRITTEN = {"renamed": renamed, "permuted": permuted, "factored": factored, "factors ordered": ordered}


def rewritten(how: str, rng: random.Random, t: sp.TensorType) -> sp.TensorType | None:
    """The type on a mesh written otherwise; None where the boxes would be others, as on uneven dims."""
    mesh, named = WRITTEN[how](rng, t.mesh)
    names = [tuple(n for axis in dim for n in named[axis]) for dim in t.layout.dims]
    partial = {n: t.layout.reduction or "sum" for axis in t.layout.partial for n in named[axis]}
    made = sp.TensorType(t.dtype, t.shape, names, mesh, partial, [n for axis in t.layout.root for n in named[axis]])
    here, there = ({d: x.boxes()[k].tolist() for k, d in enumerate(x.mesh.devices)} for x in (t, made))
    return made if here == there else None


def direct_seconds(
    s: sp.TensorType, t: sp.TensorType, where: sp.Topology | None, near: tuple[int, ...] = ()
) -> float | None:
    """The seconds of the move in one step, whose price no search chooses; None where addends must be combined."""
    if any(x.layout.partial or x.layout.root for x in (s, t)):
        return None
    op = (Exchange(t.layout) if s.mesh == t.mesh else Send(t.layout, t.mesh)).nearest(near)
    program = Program({"0": s}, [Step(op, ("0",), ("1",))], ("1",))
    return price_program(program, fabric_of(where, program.meshes)).seconds


def spelled(seed: int, count: int) -> dict[str, Any]:
    """Plan the same moves on meshes written otherwise, and compare what the plans cost."""
    rng = random.Random(f"spelled {seed}")
    drawn = {s: suites.problems(s, seed + 1, count, most_devices=MOST) for s in ("U", "N", "V", "M")}
    found: dict[tuple[str, str], list[float]] = {}
    one_step: list[float] = []
    worst: list[dict[str, Any]] = []
    progress = Progress("pairs", count)
    done = 0
    while done < count:
        how = rng.choice(list(WRITTEN))
        *ends, _ = next(drawn[rng.choice(list(drawn))])
        ends = stretched(rng, ends)
        state = rng.randrange(1 << 30)
        same = ends[0].mesh == ends[1].mesh  # both ends of one mesh stay on one
        others = [rewritten(how, random.Random(state + k * (not same)), t) for k, t in enumerate(ends)]
        if None in others or others == ends:
            continue
        done += 1
        progress.add()
        place = rng.choice((NONE, *PRESETS))
        where = None if place == NONE else loaded(place, ROOM, rng)
        plans = [sp.redistribute(*pair, where) for pair in (ends, others)]
        costs = [charged(p) if where is None else p.seconds for p in plans]
        found.setdefault((how, place), []).append(deviation(*costs))
        direct = [x for x in (direct_seconds(*pair, where) for pair in (ends, others)) if x is not None]
        one_step += [deviation(*direct)] if direct else []
        if deviation(*costs) > RELATIVE:
            worst.append({"deviation": deviation(*costs), "one": f"{told(*ends)} on {place}", "other": told(*others),
                          "costs": costs, "ops": [[str(s.op) for s in p.program.steps] for p in plans],
                          "status": [p.certificate.status for p in plans]})  # fmt: skip
    everything = [x for some in found.values() for x in some]
    lines = [{"written": how, "on": place, "count": len(some), "equal": sum(x <= RELATIVE for x in some),
              "largest deviation": max(some)} for (how, place), some in sorted(found.items())]  # fmt: skip
    return {
        "count": len(everything),
        "equal": sum(x <= RELATIVE for x in everything),
        "largest deviation": max(everything),
        "as one exchange or send": {"count": len(one_step), "largest deviation": max(one_step)},
        "rows": lines,
        "exceptions": sorted(worst, key=lambda row: -row["deviation"])[:LISTED],
    }


def main() -> None:
    parser = arguments("claimed_seconds", "Claimed seconds against a replay of flows.", 1000, of="problems")
    parser.add_argument("--pairs", type=int, default=400, help="moves written twice (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    (replay, its), (twice, other) = (timed(lambda: claims(options.seed, options.count)),
                                     timed(lambda: spelled(options.seed, options.pairs)))  # fmt: skip
    for name, result in (("claimed seconds against the replay", replay), ("one move written twice", twice)):
        print(table(tuple(result["rows"][0]), ([*row.values()] for row in result["rows"]), name))
        print(f"{result['equal']} of {result['count']} equal, largest deviation {result['largest deviation']:.3g}")
        for row in result["exceptions"][:5]:
            print(f"  {row}")
    parameters = {"count": options.count, "pairs": options.pairs, "seed": options.seed, "suites": SUITES,
                  "devices": MOST, "equal to": RELATIVE}  # fmt: skip
    result = {"seconds": [its, other], "replay": replay, "written twice": twice}
    write(options.out, record(parameters, result))


if __name__ == "__main__":
    main()
