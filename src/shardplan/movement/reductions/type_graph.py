"""The graph of reductions over types: each factor of the reduced axes is partial, root, sharded or replicated.

A factor that is sharded is so on a dim of its own, so a type is one state a factor (`PRSU`), outermost first. Edges:

| op over factors A | from -> to, for all of A |
|---|---|
| all_reduce | partial -> replicated |
| reduce_scatter | partial -> sharded |
| all_gather | sharded -> replicated |
| reduce | partial -> root |
| broadcast | root or replicated, at least one root -> replicated |

An op runs while no other factor is root (`InsideGroup`, `Parallel`), or, in the Master form, while all factors inside
of A are and no other: those of them that are replicated are made root before, which costs nothing. In the paper's
language A is contiguous. The cheapest path is exact: costs of edges are affine in the payload (`prices.alpha_beta`)
and no bound on steps is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.hardware.digit_order import Digit
from shardplan.hardware.level_factors import LevelFactor
from shardplan.hardware.prices.alpha_beta import AlphaBeta
from shardplan.movement.reductions.instructions import COLLECTIVES, Grouping, Instruction

Floats = NDArray[np.float64]
State = str  # one letter a factor
STATES = "PRSU"
# A step costs this much of the dearest edge more, so that of equal programs the shortest is found: above the rounding
# of a sum of a few prices (1e-16 of each), far below any difference between prices.
STEP = 1e-13


@dataclass(frozen=True, slots=True)
class TypeEdge:
    """A collective, from one state to another."""

    source: State
    entered: State  # the source with the factors made root that the Master form needs
    target: State
    instruction: Instruction


@dataclass(frozen=True, slots=True, eq=False)
class ReductionSpace:
    """All states over some factors and the edges between them, in the order of their targets."""

    states: tuple[State, ...]
    edges: tuple[TypeEdge, ...]
    index: dict[State, int]
    source: NDArray[np.int64]
    first: NDArray[np.int64]  # of every state that has edges into it, where they begin
    entered: NDArray[np.int64]  # these states

    def reachable(self, start: State) -> set[State]:
        """Return the states that can be reached from one."""
        found = {start}
        stack = [start]
        while stack:
            here = stack.pop()
            for target in _leaving(self).get(here, ()):
                if target not in found:
                    found.add(target)
                    stack.append(target)
        return found

    def distances(self, start: State, costs: Floats) -> Floats:
        """Return the least cost from a state to every state, float64 [tables, states]; inf where there is no way.

        `costs` holds many tables at once, [tables, edges]. Bellman and Ford's algorithm on arrays: paths have few
        edges, so it ends after a few rounds over all of them.
        """
        reach = np.full((len(costs), len(self.states)), np.inf)
        reach[:, self.index[start]] = 0.0
        while True:
            through = np.minimum.reduceat(reach[:, self.source] + costs, self.first, axis=1)
            better = np.minimum(reach[:, self.entered], through)
            if np.array_equal(better, reach[:, self.entered]):
                return reach
            reach[:, self.entered] = better

    def path(self, start: State, goal: State, costs: Floats) -> list[TypeEdge] | None:
        """Return a cheapest path for one table of costs, [edges], or None where there is no way."""
        charged = costs + STEP * float(costs.max(initial=0.0))
        reach = self.distances(start, charged[None])[0]
        if not np.isfinite(reach[self.index[goal]]):
            return None
        path: list[TypeEdge] = []
        at = self.index[goal]
        stops = np.append(self.first, len(self.edges))
        while at != self.index[start]:
            k = int(np.searchsorted(self.entered, at))
            into = slice(int(stops[k]), int(stops[k + 1]))
            best = int(stops[k]) + int(np.argmin(reach[self.source[into]] + charged[into]))
            path.append(self.edges[best])
            at = int(self.source[best])
        return path[::-1]


@lru_cache(maxsize=32)
def reduction_space(depth: int, subsets: bool = False) -> ReductionSpace:
    """Return the graph over `depth` factors; `subsets` admits ops over any set of factors, not only contiguous ones.

    >>> [len(reduction_space(n).reachable("P" * n)) for n in (1, 2, 3, 4)]
    [4, 16, 61, 223]
    """
    states = [""]
    for _ in range(depth):
        states = [s + letter for s in states for letter in STATES]
    index = {s: i for i, s in enumerate(states)}
    sets = [tuple(d for d in range(depth) if mask >> d & 1) for mask in range(1, 1 << depth)]
    masters = [Grouping(varies, True) for varies in sets if varies[-1] + 1 < depth]
    groups = [g for g in (*map(Grouping, sets), *masters) if subsets or g.contiguous]
    edges = [edge for s in states for edge in _edges(s, groups)]
    edges.sort(key=lambda e: index[e.target])
    target = np.array([index[e.target] for e in edges], dtype=np.int64)
    entered, first = np.unique(target, return_index=True)
    source = np.array([index[e.source] for e in edges], dtype=np.int64)
    return ReductionSpace(tuple(states), tuple(edges), index, source, first, entered)


@lru_cache(maxsize=32)
def _leaving(space: ReductionSpace) -> dict[State, list[State]]:
    out: dict[State, list[State]] = {}
    for edge in space.edges:
        out.setdefault(edge.source, []).append(edge.target)
    return out


_BEFORE = {
    "all_reduce": frozenset("P"),
    "reduce_scatter": frozenset("P"),
    "all_gather": frozenset("S"),
    "reduce": frozenset("P"),
    "broadcast": frozenset("RU"),
}
_AFTER = {"all_reduce": "U", "reduce_scatter": "S", "all_gather": "U", "reduce": "R", "broadcast": "U"}


def letters(collective: str) -> tuple[str, str] | None:
    """Return what a device has of a factor before and after a collective; None where the language does not have it."""
    return (min(_BEFORE[collective]), _AFTER[collective]) if collective in COLLECTIVES else None


def step_state(state: State, instruction: Instruction) -> tuple[State, State] | None:
    """Return what a state is as an op begins and after it, or None where the op is illegal.

    As it begins the factors are root that the Master form needs to be.
    """
    varies, collective = instruction.grouping.varies, instruction.collective
    mine = {state[d] for d in varies}
    if not mine <= _BEFORE[collective] or (collective == "broadcast" and "R" not in mine):
        return None
    inner = varies[-1] + 1 if instruction.grouping.master else len(state)
    if any(letter == "R" and d not in varies for d, letter in enumerate(state[:inner])):
        return None
    if not set(state[inner:]) <= {"R", "U"}:
        return None
    entered = state[:inner] + "R" * (len(state) - inner)
    return entered, "".join(_AFTER[collective] if d in varies else letter for d, letter in enumerate(entered))


def _edges(state: State, groups: Sequence[Grouping]) -> list[TypeEdge]:
    found: list[TypeEdge] = []
    for grouping in groups:
        mine = {state[d] for d in grouping.varies}
        for collective in (c for c in COLLECTIVES if mine <= _BEFORE[c]):
            instruction = Instruction(grouping, collective)
            step = step_state(state, instruction)
            if step is not None:
                found.append(TypeEdge(state, *step, instruction))
    return found


def edge_costs(space: ReductionSpace, factors: Sequence[LevelFactor], nbytes: float, prices: AlphaBeta) -> Floats:
    """Return the price of every edge in seconds, float64 [edges]; `nbytes` is the payload of a device."""
    kinds, shares = _facets(space)
    sizes = np.array([f.size for f in factors], dtype=np.float64)
    held = nbytes / np.prod(np.where(shares, sizes, 1.0), axis=1)
    costs = np.zeros(len(space.edges))
    for instruction, at in kinds.items():
        varies, zero = digits_of(instruction.grouping, factors)
        # Of each algorithm latency and seconds per byte; the cheapest depends on what is held.
        offers = np.array(prices.offers(instruction.collective, varies, zero))
        costs[at] = (offers[:, :1] + offers[:, 1:] * held[at]).min(axis=0)
    return costs


def digits_of(grouping: Grouping, factors: Sequence[LevelFactor]) -> tuple[tuple[Digit, ...], tuple[Digit, ...]]:
    """Return the digits along which members of a grouping differ, and those at which only coordinate 0 takes part."""
    varies = tuple(d for f in grouping.varies for d in factors[f].digits)
    later = range(grouping.varies[-1] + 1, len(factors)) if grouping.master else ()
    return varies, tuple(d for f in later for d in factors[f].digits)


@lru_cache(maxsize=32)
def _facets(space: ReductionSpace) -> tuple[dict[Instruction, NDArray[np.int64]], NDArray[np.bool_]]:
    """The edges of every instruction, and which factors cut their rows."""
    depth = len(space.states[0])
    by: dict[Instruction, list[int]] = {}
    shares = np.zeros((len(space.edges), depth), dtype=bool)
    for number, edge in enumerate(space.edges):
        shares[number] = [letter == "S" for letter in edge.source]
        by.setdefault(edge.instruction, []).append(number)
    return {instruction: np.array(at) for instruction, at in by.items()}, shares
