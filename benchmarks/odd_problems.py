"""The seeded problems that the suites leave out: suites of `random_problems` with names of more than one letter.

| suite | problems |
|---|---|
| edge | dims of size 1, scalars, 5 or 6 dims |
| marks | two reductions, several axes partial and at a root, at both ends |
| table | an end, or both, in a table of boxes |
| order | any of the suites U, P, N, V, M on devices with gaps and in any order, axes in parts, factors in any order |
| limit | limits at the least that works, a byte more and a little more; batches, sources kept |
| where | a topology or a placement, a third with a slow unit; some with a limit |
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from benchmarks.claimed_seconds import loaded
from benchmarks.common import listed, use_tests

import shardplan as sp
from benchmarks import suites
from shardplan.core.layout import Layout
from shardplan.core.mesh import primes
from shardplan.movement.redistribute import plan_kept

SUITES = ("edge", "marks", "table", "order", "limit", "where")
BASES = ("U", "P", "N", "V", "M")
ABOVE = (1.0, 1.0, 1.0001, 1.01, 1.1)  # limits, over the least that works
ROOM = 64  # devices of a topology


def problems(suite: str, seed: int, count: int, most_devices: int, most_tensors: int) -> Iterator[suites.Case]:
    """Yield `count` problems of a suite, the same for the same arguments; never equal ends."""
    rng, found = random.Random(f"{suite} {seed}"), 0
    bases = {
        s: suites.problems(s, seed, 1 << 30, most_devices=most_devices, most_tensors=most_tensors) for s in "UPNVMB"
    }
    while found < count:
        try:
            case = _draw(suite, rng, bases, most_devices)
        except sp.LayoutError:  # as in `suites.problems`
            continue
        if case is not None and case[0] != case[1]:
            found += 1
            yield case


def _draw(suite: str, rng: random.Random, bases: dict[str, Iterator[suites.Case]], most: int) -> suites.Case | None:
    """The next problem of a suite; None where what was drawn is none."""
    match suite:
        case "edge":
            return _edge(rng, suites.pick_mesh(rng, most))
        case "marks":
            return _marks(rng, suites.pick_mesh(rng, most))
        case "table":
            mesh = suites.pick_mesh(rng, 8)
            other = rng.choice((mesh, mesh, suites.other_mesh(rng, mesh, 8)))
            shape, make = [rng.randint(1, 7) for _ in range(rng.randint(0, 3))], use_tests("strategies").random_end
            return make(rng, shape, mesh), make(rng, shape, other), {}
        case "order":
            s, t, keywords = next(bases[rng.choice(BASES)])
            ids = rng.sample(range(3 * most), 3 * most)
            state = rng.random()
            return _moved(s, ids, random.Random(state)), _moved(t, ids, random.Random(state)), keywords
        case "limit":
            return _limit(rng, next(bases[rng.choice("UNVMB")]))
        case _:
            s, t, _ = next(bases[rng.choice("UPNVMB")])
            keywords: dict[str, Any] = {"topology": _where(rng, s, t)}
            return _limit(rng, (s, t, keywords)) if rng.random() < 0.2 else (s, t, keywords)


def _edge(rng: random.Random, mesh: sp.Mesh) -> suites.Case:
    """Dims of size 1 and many dims, on whole axes."""
    ndim = rng.choice((0, 1, 2, 5, 6))
    names = [suites.pick_names(rng, mesh.axes, ndim, keep=0.7) if ndim else [] for _ in range(2)]
    shape = [rng.choice((1, 1, 2, 3, suites.cuts(mesh, names[rng.randrange(2)][d]))) for d in range(ndim)]
    free = [a for a in mesh.axes if not any(a in dim for dim in names[0])]
    partial = {a: "sum" for a in free if rng.random() < 0.5}
    return sp.TensorType("i32", shape, names[0], mesh, partial), sp.TensorType("i32", shape, names[1], mesh), {}


def _marks(rng: random.Random, mesh: sp.Mesh) -> suites.Case | None:
    """Types of which most axes are partial or at a root, the reductions of both ends drawn apart."""
    ndim = rng.randint(1, 3)
    marks = [
        suites.mark(rng, mesh, mesh.axes, 0.5, 0.3),
        suites.mark(rng, mesh, mesh.axes, *rng.choice(((0.4, 0.3), (0, 0.5), (0, 0)))),
    ]
    names = [suites.pick_names(rng, m[0], ndim) for m in marks]
    even = rng.random() < 0.7
    shape = suites.even_shape(rng, mesh, names, 2) if even else suites.uneven_shape(rng, (mesh, mesh), names)
    kinds = [rng.choice(suites.REDUCTIONS) for _ in range(2)]
    s, t = (
        sp.TensorType("i32", shape, n, mesh, partial=dict.fromkeys(m[1], kind), root=m[2])
        for n, m, kind in zip(names, marks, kinds, strict=True)
    )
    return None if kinds[0] != kinds[1] and set(marks[0][1]) & set(marks[1][1]) else (s, t, {})


def _moved(ends: suites.Ends, ids: list[int], rng: random.Random) -> suites.Ends:
    """The types on other devices, with axes in parts or their factors in another order where the layout allows it."""
    if isinstance(ends, list):
        return [t for end in ends for t in listed(_moved(end, ids, rng))]
    mesh = sp.Mesh(ends.mesh.shape, devices=[ids[d] for d in ends.mesh.devices])
    plain = all(a in mesh.axes for dim in ends.layout.dims for a in dim)
    for axis, n in mesh.shape.items():
        found = primes(n)
        how = rng.random()
        if len(found) > 1 and plain and how < 0.6:
            p = rng.choice(found)
            parts = {"outer": p, "inner": n // p}
            mesh = (
                mesh.split(axis, **parts) if how < 0.3 else mesh.reorder_factors(axis, *rng.sample(found, len(found)))
            )
    layout = Layout(ends.layout.dims, ends.layout.partial, ends.layout.reduction, ends.layout.root)
    return sp.TensorType(ends.dtype, ends.shape, layout, mesh)


def _limit(rng: random.Random, case: suites.Case) -> suites.Case:
    """The problem under a limit near the least that works, at times with sources that are kept."""
    s, t, keywords = case
    if rng.random() < 0.3 and "topology" not in keywords:
        keywords = keywords | {"keep": [rng.random() < 0.5 for _ in listed(s)]}
    try:
        planned(s, t, **keywords, memory_limit=1)
    except sp.Infeasible as refusal:
        least = refusal.absolute_least_bytes if rng.random() < 0.3 else refusal.least_bytes
        return s, t, keywords | {"memory_limit": int((least or 1) * rng.choice(ABOVE)) + rng.choice((0, 0, 1))}
    return s, t, keywords


def _where(rng: random.Random, s: suites.Ends, t: suites.Ends) -> sp.Topology | sp.Placement:
    """A topology, or a placement of the first mesh where it has all devices."""
    meshes = [x.mesh for x in (*listed(s), *listed(t))]
    name, mesh = rng.choice(("nominal", "dgx-h100", "gcp-v100x8")), meshes[0]
    if {d for m in meshes for d in m.devices} <= set(mesh.devices) and rng.random() < 0.5:
        if name == "nominal" or mesh.size % 8 == 0:
            return rng.choice(list(sp.placements(mesh, loaded(name, mesh.size, rng))))
    return loaded(name, ROOM, rng)


def planned(s: suites.Ends, t: suites.Ends, **keywords: Any) -> sp.Plan:
    """Plan a request, one whose sources are kept too."""
    if "keep" not in keywords:
        return sp.redistribute(s, t, **keywords)
    keep = keywords["keep"] if isinstance(s, list) else keywords["keep"][0]
    return plan_kept(s, t, **keywords | {"keep": keep})
