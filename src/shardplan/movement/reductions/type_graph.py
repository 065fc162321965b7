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
language A is contiguous. The cheapest path is exact: no bound on steps is set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.hardware.level_factors import Digits, groups_along
from shardplan.hardware.prices.cost import offers
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.movement.reductions.instructions import COLLECTIVES, Grouping, Instruction, groupings

Floats = NDArray[np.float64]
State = str  # one letter a factor
# What a device has of every factor before a collective, one of these letters, and after it.
_LETTERS = {
    "all_reduce": ("P", "U"),
    "reduce_scatter": ("P", "S"),
    "all_gather": ("S", "U"),
    "reduce": ("P", "R"),
    "broadcast": ("RU", "U"),
}
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
    """All states over some factors and the edges between them."""

    states: tuple[State, ...]
    edges: tuple[TypeEdge, ...]
    source: NDArray[np.int64]  # numbers of states, [edges]
    target: NDArray[np.int64]

    def distances(self, start: State, costs: Floats) -> Floats:
        """Return the least cost from a state to every state, float64 [states]; inf where there is no way.

        Bellman and Ford's algorithm on arrays: paths have few edges, so it ends after a few rounds over all of them.
        """
        reach, before = np.where(np.array(self.states) == start, 0.0, np.inf), None
        while before is None or not np.array_equal(before, reach):
            before = reach.copy()
            np.minimum.at(reach, self.target, before[self.source] + costs)
        return reach

    def path(self, start: State, goal: State, costs: Floats) -> list[int] | None:
        """Return the edges of a cheapest path, of equal ones a shortest; None where there is no way."""
        charged = costs + STEP * float(costs.max(initial=0.0))
        reach = self.distances(start, charged)
        path: list[int] = []
        at = self.states.index(goal)
        while np.isfinite(reach[at]) and self.states[at] != start:
            path.append(int(np.argmin(np.where(self.target == at, reach[self.source] + charged, np.inf))))
            at = int(self.source[path[-1]])
        return path[::-1] if np.isfinite(reach[at]) else None


@lru_cache(maxsize=32)
def reduction_space(depth: int, subsets: bool = False) -> ReductionSpace:
    """Return the graph over `depth` factors; `subsets` admits ops over any set of factors, not only contiguous ones.

    >>> [len(reduction_space(n).states) for n in (1, 2, 3, 4)]
    [4, 16, 64, 256]
    """
    states = tuple(map("".join, itertools.product("PRSU", repeat=depth)))
    alphabet = [Instruction(g, name) for g in groupings(depth, subsets) for name in COLLECTIVES]
    edges = [TypeEdge(s, *step, i) for s in states for i in alphabet if (step := step_state(s, i)) is not None]
    index = {s: k for k, s in enumerate(states)}
    ends = np.array([(index[e.source], index[e.target]) for e in edges]).reshape(-1, 2)
    return ReductionSpace(states, tuple(edges), ends[:, 0], ends[:, 1])


def letters(collective: str, factors: int = 1) -> tuple[State, State]:
    """Return what all factors are before and after a collective over them; empty where the language has no such."""
    before, after = _LETTERS.get(collective, ("", ""))
    return before[:1] * factors, after * factors


def step_state(state: State, instruction: Instruction) -> tuple[State, State] | None:
    """Return what a state is as an op begins and after it, or None where the op is illegal.

    As it begins the factors are root that the Master form needs to be.
    """
    varies = instruction.grouping.varies
    before, after = _LETTERS[instruction.collective]
    mine = {state[d] for d in varies}
    if not mine <= set(before) or mine == {"U"}:
        return None
    inner = varies[-1] + 1 if instruction.grouping.master else len(state)
    if any(letter == "R" and d not in varies for d, letter in enumerate(state[:inner])):
        return None
    if not set(state[inner:]) <= {"R", "U"}:
        return None
    entered = state[:inner] + "R" * (len(state) - inner)
    return entered, "".join(after if d in varies else letter for d, letter in enumerate(entered))


def path_of(program: Iterable[Instruction], state: State) -> tuple[TypeEdge, ...] | None:
    """Return the path of an instruction list, or None where it does not type: a device would read an old value."""
    path: list[TypeEdge] = []
    for instruction in program:
        step = step_state(state, instruction)
        if step is None:
            return None
        path.append(TypeEdge(state, *step, instruction))
        state = step[1]
    return tuple(path)


@lru_cache(maxsize=4096)  # many placements of a job have the same digits
def cheapest_path(
    factors: tuple[Digits, ...],
    nbytes: float,
    topology: Topology,
    before: State,
    after: State,
    algorithm: str = "auto",
    subsets: bool = False,
) -> tuple[float, tuple[TypeEdge, ...]]:
    """Return the seconds and the edges of the cheapest program from one state to another; inf where there is no way.

    Nothing cheaper exists in the graph. `nbytes` is the payload of a device; `subsets` admits ops over any set of
    factors; `algorithm` is as for `hardware.prices.cost.price`.
    """
    if not factors:
        return 0.0, ()
    space = reduction_space(len(factors), subsets)
    costs = edge_costs(space, factors, nbytes, topology, algorithm)
    path = space.path(before, after, costs)
    return (math.inf, ()) if path is None else (float(costs[path].sum()), tuple(space.edges[k] for k in path))


def edge_costs(
    space: ReductionSpace, factors: Sequence[Digits], nbytes: float, topology: Topology, algorithm: str = "auto"
) -> Floats:
    """Return the price of every edge in seconds, float64 [edges]; `nbytes` is the payload of a device."""
    sizes = [math.prod(n for n, _ in digits) for digits in factors]
    held = {s: nbytes / math.prod(n for n, x in zip(sizes, s, strict=True) if x == "S") for s in space.states}
    lines = {i: instruction_lines(i, factors, topology, algorithm) for i in {e.instruction: None for e in space.edges}}
    return np.array([min([a + b * held[e.source] for a, b in lines[e.instruction]]) for e in space.edges])


def digits_of(grouping: Grouping, factors: Sequence[Digits]) -> tuple[Digits, Digits]:
    """Return the digits along which members of a grouping differ, and those at which only coordinate 0 takes part."""
    later = range(grouping.varies[-1] + 1, len(factors)) if grouping.master else ()
    return tuple(d for f in grouping.varies for d in factors[f]), tuple(d for f in later for d in factors[f])


Lines = tuple[tuple[float, float], ...]


def instruction_lines(instruction: Instruction, factors: Sequence[Digits], topology: Topology, algorithm: str) -> Lines:
    """Return what rows of the library ask for an instruction, as `digit_lines`."""
    return digit_lines(instruction.collective, *digits_of(instruction.grouping, factors), topology, algorithm)


@lru_cache(maxsize=4096)
def digit_lines(kind: str, varies: Digits, zero: Digits, topology: Topology, algorithm: str) -> Lines:
    """Return seconds at 0 bytes, and per byte that a member holds before, of each row for a collective; see `offers`.

    Members differ in the digits `varies`, in this order, and of `zero` only coordinate 0 takes part.
    """
    looked_at = topology.size
    if all(level == level.sound() for level in topology.levels):
        # Groups in other units do the same, side by side: on a switch, where ports are each unit's own, in units of the
        # outermost level that is spanned, else in those that hold them.
        top = next(j for j, unit in enumerate(topology.strides) if unit < max(n * stride for n, stride in varies))
        looked_at = topology.strides[top] * (1 if topology.levels[top].link == "switch" else topology.levels[top].size)
    return offers(kind, groups_along(varies, zero, looked_at), Fabric(topology), algorithm)
