"""Sums over axes that a dim has outside of others: values are sliced before they are summed, on a view of the shard."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
from tests import oracle

import shardplan as sp
from shardplan.core.accounting import books_of
from shardplan.movement.redistribution.candidates import ROUND_CHARGE
from shardplan.movement.redistribution.choice import Rules, price
from shardplan.movement.redistribution.single_move import rules_of

AXES, DIGITS = "abc", 6
LENGTH = 2**DIGITS
Places = tuple[int | str, ...]  # of every axis the binary digit of the index that it cuts, "P" partial, "U" unused


def least_cost(start: Places, goal: Places, turn: float) -> float:
    """The cheapest program over one axis at a time, by Dijkstra's algorithm: any digit may be cut at any time.

    Bytes that a device receives, and `turn` a round; no view, dim or order of axes is known here.
    """
    order = itertools.count()
    frontier, reach = [(0.0, next(order), start)], {start: 0.0}
    while frontier:
        cost, _, here = heapq.heappop(frontier)
        if here == goal:
            return cost
        shard = 4 * LENGTH / 2 ** sum(isinstance(place, int) for place in here)
        free = [digit for digit in range(DIGITS) if digit not in here]
        for k, place in enumerate(here):
            steps = {
                "U": [(digit, 0.0) for digit in free],
                "P": [("U", shard + 2 * turn), *((digit, shard / 2 + turn) for digit in free)],
            }.get(str(place), [("U", shard + turn)])
            for after, more in steps:
                there = (*here[:k], after, *here[k + 1 :])
                if cost + more < reach.get(there, math.inf):
                    reach[there] = cost + more
                    heapq.heappush(frontier, (cost + more, next(order), there))
    raise AssertionError


def orders(pool: str) -> list[str]:
    return ["".join(axes) for r in range(len(pool) + 1) for axes in itertools.permutations(pool, r)]


def dim(axes: str) -> str:
    return f"f32[{LENGTH}{'@(' + ','.join(axes) + ')' if axes else ''}]"


@pytest.mark.parametrize("old", orders(AXES)[:-6])
def test_no_program_over_any_digits_is_cheaper(old: str) -> None:
    mesh = sp.Mesh(a=2, b=2, c=2)
    rest = [axis for axis in AXES if axis not in old]
    for r in range(1, len(rest) + 1):
        for partial, new in itertools.product(itertools.combinations(rest, r), orders(AXES)):
            plan = sp.redistribute(dim(old) + "{+" + ",+".join(partial) + "}", dim(new), mesh=mesh)
            rules: Rules = rules_of(plan.program.input_types[0], plan.program.output_types[0], None, False, False)
            start = tuple(old.index(a) if a in old else "P" if a in partial else "U" for a in AXES)
            goal = tuple(new.index(a) if a in new else "U" for a in AXES)
            least = least_cost(start, goal, ROUND_CHARGE * rules.bound)
            assert price(plan.program, books_of(plan.program), rules) <= least + 1e-6, (old, partial, new)
            assert oracle.unsound(plan.program, plan.program.output_types) is None


@pytest.mark.parametrize(
    ("shard", "asked"),
    [
        ("f32[16,8192,4096@tensor]{+data}", "f32[16@(data,context),8192,4096@tensor]"),
        ("f32[16384,4096@tensor]{+data}", "f32[16384@(data,context),4096@tensor]"),
        ("f32[16384]{+data}", "f32[16384@(data,context)]"),
    ],
)
def test_tokens_of_a_context_over_nodes_are_sliced_before_their_sums_cross(shard: str, asked: str) -> None:
    """Of the gradient of gathered tokens a device receives what it keeps, and nothing is exchanged (2.617 ms was)."""
    cluster = sp.Topology.load("dgx-h100", nodes=4)
    plan = sp.redistribute(shard, asked, cluster, mesh="data=2,context=4,tensor=4")
    assert [step.op.name for step in plan.program.steps] == ["reshape", "slice", "reduce_scatter", "reshape"]
    assert max(plan.certificate.received_bytes) == plan.program.output_types[0].local_bytes()


def test_uneven_dims_have_no_view() -> None:
    plan = sp.redistribute("f32[15]{+a}", "f32[15@(a,b)]", mesh="a=2,b=2")
    assert oracle.unsound(plan.program, plan.program.output_types) is None
    assert "reshape" not in [step.op.name for step in plan.program.steps]
