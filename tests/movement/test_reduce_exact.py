"""`reduce` says `exact` only of the cheapest program over all factors of a placement, which is sought here by itself.

Dijkstra's algorithm over states of factors, written apart: any set of factors, groups listed by loops, and nothing
shared with the planner but the price of a collective. (Factors are those of the placement, not their primes.)
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

import shardplan as sp
from shardplan.core.pattern import Groups
from shardplan.hardware.level import Level
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.reductions.type_graph import MOST_FACTORS

# What members have before and after: partial, root, scattered, whole.
STEPS = {
    "all_reduce": ("P", "U"),
    "reduce_scatter": ("P", "S"),
    "all_gather": ("S", "U"),
    "reduce": ("P", "R"),
    "broadcast": ("RU", "U"),
}
TARGETS = {"replicated": "U", "sharded": "S", "root": "R"}
CLUSTERS = {"gcp-a100x16": (2, 4), "gcp-v100x8": (2, 4), "dgx-a100": (2,), "dgx-h100": (2, 4), "mi300x": (2,)}
BYTES = (2**12, 2**14, 2**17, 2**20, 2**24, 2**28)


class Problem(NamedTuple):
    placement: sp.Placement
    axes: tuple[str, ...]
    nbytes: int
    target: str


def factors(placement: sp.Placement, axes: tuple[str, ...]) -> list[tuple[int, int]]:
    """Size and stride of what each of the axes has on each level, outermost first."""
    found: list[tuple[int, int]] = []
    stride = placement.topology.size
    for level in range(len(placement.topology.levels)):
        for axis, row in zip(placement.mesh.axes, placement.matrix, strict=True):
            stride //= row[level]
            found += [(row[level], stride)] if axis in axes and row[level] > 1 else []
    return found


def cheapest(problem: Problem) -> float:
    """The seconds of the cheapest program."""
    cut = factors(problem.placement, problem.axes)
    fabric, every = Fabric(problem.placement.topology), range(len(cut))
    known: dict[object, float] = {}

    def seconds(kind: str, varied: tuple[int, ...], rooted: tuple[int, ...], held: float) -> float:
        key = kind, varied, rooted, held
        if key not in known:
            still = [cut[f] for f in (*varied, *rooted)]
            first = [d for d in range(fabric.topology.size) if all(d // stride % n == 0 for n, stride in still)]
            offsets = [0]
            for n, stride in (cut[f] for f in varied):
                offsets = [o + k * stride for o in offsets for k in range(n)]
            members = np.array([[d + o for o in offsets] for d in first])
            known[key] = price(Groups(kind, members, np.full(len(members), held)), fabric).seconds
        return known[key]

    sets = [chosen for n in every for chosen in itertools.combinations(every, n + 1)]
    goal = TARGETS[problem.target] * len(cut)
    best, heap, done = {"P" * len(cut): 0.0}, [(0.0, "P" * len(cut))], set[str]()
    while heap:
        spent, state = heapq.heappop(heap)
        if state == goal:
            return spent
        if state in done:
            continue
        done.add(state)
        held = problem.nbytes / math.prod(cut[f][0] for f in every if state[f] == "S")
        for varied in sets:
            others = [f for f in every if f not in varied]
            ways = {tuple(f for f in others if state[f] == "R")}
            inner = tuple(f for f in others if f > varied[-1])
            if all(state[f] in "RU" for f in inner) and all(state[f] != "R" for f in others if f < varied[-1]):
                ways.add(inner)  # replicated values further in are dropped but at coordinate 0, which costs nothing
            for rooted, (kind, (before, after)) in itertools.product(sorted(ways), STEPS.items()):
                mine = {state[f] for f in varied}
                if not mine <= set(before) or mine == {"U"}:
                    continue
                there = "".join(after if f in varied else "R" if f in rooted else state[f] for f in every)
                cost = spent + seconds(kind, varied, rooted, held)
                if cost < best.get(there, math.inf):
                    best[there] = cost
                    heapq.heappush(heap, (cost, there))
    raise AssertionError("no program")


def problems(seed: int, count: int, most: int = 4) -> Iterator[Problem]:
    rng = random.Random(seed)
    while count:
        name = rng.choice(list(CLUSTERS))
        topology = sp.Topology.load(name, nodes=rng.choice(CLUSTERS[name]))
        sizes, left = list[int](), topology.size
        while left > 1 and len(sizes) < 3:
            sizes.append(rng.choice([n for n in range(2, left + 1) if left % n == 0]))
            left //= sizes[-1]
        sizes[-1] *= left
        mesh = sp.Mesh(dict(zip("abc", sizes, strict=False)))
        placement = rng.choice(list(sp.placements(mesh, topology)))
        axes = tuple(sorted(rng.sample(mesh.axes, rng.randint(1, len(mesh.axes)))))
        if len(factors(placement, axes)) <= most:
            count -= 1
            yield Problem(placement, axes, rng.choice(BYTES), rng.choice(list(TARGETS)))


def test_nothing_is_cheaper_than_what_is_said_to_be_exact() -> None:
    """120 drawn problems; on 11 of them levels whole would be dearer, by up to 2.3 times."""
    seen = Counter[str]()
    for problem in problems(7, 120):
        placement, axes, nbytes, target = problem
        plan = sp.reduce(placement, axes, nbytes, target=target)  # pyright: ignore[reportArgumentType]
        assert plan.seconds == pytest.approx(cheapest(problem), rel=1e-9), (placement.describe(), problem)
        assert plan.certificate.status in ("exact", "floor"), (placement.describe(), problem)
        levels = {stride for _, stride in factors(placement, axes)}
        seen["several axes"] += len(axes) > 1
        seen["several factors"] += len(levels) > 1
    assert min(seen.values()) > 40, seen


def test_the_case_of_two_axes_in_one_node() -> None:
    """Sixteen devices of two nodes reduce 16 KiB: rings of four, twice, start sooner than rings of sixteen."""
    placement = sp.Placement(sp.Mesh(a=8, b=4), sp.Topology.load("gcp-a100x16", nodes=2), ((2, 4), (1, 4)))
    plan = sp.reduce(placement, ("a", "b"), 2**14)
    names = [step.op.name for step in plan.program.steps if step.op.name != "reshape"]
    assert names == ["reduce_scatter", "reduce_scatter", "all_reduce", "all_gather", "all_gather"]
    assert plan.seconds * 1e6 == pytest.approx(62.16, abs=0.01) and plan.certificate.status == "exact"
    for keywords in ({"uncollapsed": True}, {"subsets": True}, {"algorithm": "ring"}):
        assert sp.reduce(placement, ("a", "b"), 2**14, **keywords).seconds == pytest.approx(plan.seconds, rel=1e-9)
    (best, *_) = sp.place(placement.mesh, placement.topology, {("a", "b"): [("all_reduce", 2**14, 1)]})
    assert best.seconds <= plan.seconds * (1 + 1e-9)


def test_of_factors_that_are_too_many_nothing_is_said_to_be_exact() -> None:
    """Nine factors on three levels: levels are whole, and something cheaper may exist."""
    levels = tuple(Level(name, 8, "switch", 1e10, 1e-5) for name in ("rack", "node", "gpu"))
    mesh = sp.Mesh(a=8, b=8, c=8)
    placement = sp.Placement(mesh, sp.Topology("t", levels), ((2, 2, 2),) * 3)
    assert len(factors(placement, ("a", "b", "c"))) > MOST_FACTORS
    for keywords in ({}, {"algorithm": "ring"}, {"subsets": True}):
        assert sp.reduce(placement, ("a", "b", "c"), 2**14, **keywords).certificate.status == "heuristic"
    # As many as a graph holds are all in it.
    assert sp.reduce(placement, ("a", "b"), 2**14).certificate.status == "exact"
