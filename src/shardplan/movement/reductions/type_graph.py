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
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardplan.hardware.level_factors import Digits, groups_along
from shardplan.hardware.prices.affine_costs import affine_costs_by_kind
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
LETTERS = "PRSU"  # by their numbers
# Factors up to which units are factors of their own: the graph of six has 4,096 states and takes a tenth of a second,
# once, and its 180 instructions are priced, once for the same digits.
MOST_FACTORS = 6
MOST_ORDERS = 24  # of the units of all factors that are searched
TIE = 1e-9  # relative: prices closer than this are equal


@dataclass(frozen=True, slots=True)
class TypeEdge:
    """A collective, from one state to another."""

    source: State
    entered: State  # the source with the factors made root that the Master form needs
    target: State
    instruction: Instruction


@dataclass(frozen=True, eq=False)
class ReductionSpace:
    """All states over some factors and the edges between them, by source; states and instructions by their numbers."""

    states: tuple[State, ...]
    instructions: tuple[Instruction, ...]
    source: NDArray[np.int64]  # [edges]
    entered: NDArray[np.int64]  # [edges]
    target: NDArray[np.int64]  # [edges]
    instruction: NDArray[np.int64]  # [edges]

    @cached_property
    def astray(self) -> Floats:
        """How far every edge is from scattering inner factors first, and gathering them last, [edges].

        Of equal programs that one is taken whose scattered factors are a stack: any dim is cut so, and needs no view.
        """
        codes = np.array([[LETTERS.index(letter) for letter in state] for state in self.states])
        early = np.zeros((len(self.instructions), codes.shape[1], 2), dtype=np.int64)
        for k, i in enumerate(self.instructions):
            first, last = i.grouping.varies[0], i.grouping.varies[-1]
            early[k, last + 1 :, 0] = i.collective == "reduce_scatter"
            early[k, :first, 1] = i.collective == "all_gather"
        left = np.stack([codes == LETTERS.index("P"), codes == LETTERS.index("S")], axis=2)
        return (left[self.source] * early[self.instruction]).sum(axis=(1, 2), dtype=np.float64)

    def edge(self, k: int) -> TypeEdge:
        """Return an edge."""
        source, entered, target = (self.states[numbers[k]] for numbers in (self.source, self.entered, self.target))
        return TypeEdge(source, entered, target, self.instructions[self.instruction[k]])

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
        charged = costs + STEP * float(costs.max(initial=0.0)) * (1 + self.astray / 64)
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
    codes = np.array(list(itertools.product(range(len(LETTERS)), repeat=depth)), dtype=np.int64)
    instructions = tuple(Instruction(g, name) for g in groupings(depth, subsets) for name in COLLECTIVES)
    steps = [_steps(codes, instruction) for instruction in instructions]
    number = np.repeat(np.arange(len(steps)), [len(rows) for rows, _, _ in steps])
    source = np.concatenate([rows for rows, _, _ in steps])
    entered, target = (
        np.concatenate([one[k] for one in steps]) @ len(LETTERS) ** np.arange(depth)[::-1] for k in (1, 2)
    )
    order = np.lexsort((number, source))
    states = tuple("".join(LETTERS[c] for c in row) for row in codes.tolist())
    return ReductionSpace(states, instructions, source[order], entered[order], target[order], number[order])


def factor_states(collective: str, factors: int = 1) -> tuple[State, State]:
    """Return what all factors are before and after a collective over them; empty where the language has no such."""
    before, after = _LETTERS.get(collective, ("", ""))
    return before[:1] * factors, after * factors


@lru_cache(maxsize=1 << 14)  # programs that are enumerated ask for the same few
def step_state(state: State, instruction: Instruction) -> tuple[State, State] | None:
    """Return what a state is as an op begins and after it, or None where the op is illegal.

    As it begins the factors are root that the Master form needs to be.
    """
    rows, *ends = _steps(np.array([[LETTERS.index(letter) for letter in state]]), instruction)
    if not len(rows):
        return None
    entered, after = ("".join(LETTERS[code] for code in end[0]) for end in ends)
    return entered, after


def _steps(
    states: NDArray[np.int64], instruction: Instruction
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return of states, [n, factors] of numbers of letters, those in which an op is legal, as it begins, and after."""
    varies = list(instruction.grouping.varies)
    before, after = ([LETTERS.index(letter) for letter in word] for word in _LETTERS[instruction.collective])
    root, whole = LETTERS.index("R"), LETTERS.index("U")
    mine = states[:, varies]
    legal = np.isin(mine, before).all(axis=1) & (mine != whole).any(axis=1)
    inner = varies[-1] + 1 if instruction.grouping.master else states.shape[1]
    others = [d for d in range(inner) if d not in varies]
    legal &= (states[:, others] != root).all(axis=1) & np.isin(states[:, inner:], (root, whole)).all(axis=1)
    entered = states[legal]
    entered[:, inner:] = root
    target = entered.copy()
    target[:, varies] = after
    return np.flatnonzero(legal), entered, target


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


class CheapestPath(NamedTuple):
    """The cheapest program of a reduction; its edges are over factors of their own, the parts of those asked for."""

    seconds: float  # inf where there is no way
    edges: tuple[TypeEdge, ...]
    parts: tuple[tuple[int, int, int], ...]  # of every factor of the edges: which was asked for, its units from, to
    whole: bool  # every unit was a factor: none is searched together that could be taken apart


Units = tuple[Digits, ...]  # of a factor: what can be taken apart, each with its digits


@lru_cache(maxsize=4096)  # many placements of a job have the same digits
def cheapest_path(
    factors: tuple[Units, ...],
    nbytes: float,
    topology: Topology,
    before: State,
    after: State,
    algorithm: str = "auto",
    subsets: bool = False,
    apart: bool = True,
) -> CheapestPath:
    """Return the cheapest program from one state to another.

    Args:
        factors: What is reduced, outermost first, with a letter each in `before` and `after`. The units of a factor are
            factors by themselves where there are few enough (`MOST_FACTORS`), else each is taken as it is.
        nbytes: The payload of a device.
        topology: What prices are taken on.
        before: The state to start from.
        after: The state to reach.
        algorithm: As for `hardware.prices.cost.price`.
        subsets: Admit ops over any set of factors, not only over contiguous ones.
        apart: Take factors apart, where they are few enough.

    Nothing cheaper exists in the graph of the factors.
    """
    if not factors:
        return CheapestPath(0.0, (), (), True)
    whole = (apart and sum(map(len, factors)) <= MOST_FACTORS) or all(len(units) == 1 for units in factors)
    parts = [tuple((k, 0, len(units)) for k, units in enumerate(factors))]
    if whole:
        # Which units of a factor stand side by side with the next factor decides what is contiguous.
        several = math.prod(math.factorial(len(units)) for units in factors) <= MOST_ORDERS
        orders = itertools.product(*(itertools.permutations(range(len(units))) for units in factors))
        parts = [tuple((k, u, u + 1) for k, order in enumerate(chosen) for u in order) for chosen in orders]
        parts, whole = parts if several else parts[:1], several
    best: CheapestPath | None = None
    for one in parts:
        start, goal = ("".join(state[k] for k, _, _ in one) for state in (before, after))
        space = reduction_space(len(one), subsets)
        costs = edge_costs(space, [_digits(factors, part) for part in one], nbytes, topology, algorithm)
        path = space.path(start, goal, costs)
        seconds = math.inf if path is None else float(costs[path].sum())
        if best is None or seconds < best.seconds * (1 - TIE):
            best = CheapestPath(seconds, *join_factors(tuple(map(space.edge, path or ())), one), whole)
    assert best is not None  # there is an order
    return best


def _digits(factors: Sequence[Units], part: tuple[int, int, int]) -> Digits:
    """The digits of a part."""
    k, start, stop = part
    return tuple(digit for unit in factors[k][start:stop] for digit in unit)


def join_factors(
    edges: tuple[TypeEdge, ...], parts: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[TypeEdge, ...], tuple[tuple[int, int, int], ...]]:
    """Return a path and its factors with those as one that are of one factor and do the same in every step."""

    def same(f: int) -> bool:
        return (parts[f][0], parts[f][1]) == (parts[f - 1][0], parts[f - 1][2]) and all(
            (f in e.instruction.grouping.varies) == (f - 1 in e.instruction.grouping.varies) for e in edges
        )

    heads = [f for f in range(len(parts)) if not f or not same(f)]
    number = {f: k for k, f in enumerate(heads)}

    def short(state: State) -> State:
        return "".join(state[f] for f in heads)

    found: list[TypeEdge] = []
    for e in edges:
        varies = tuple(number[f] for f in e.instruction.grouping.varies if f in number)
        instruction = Instruction(Grouping(varies, e.instruction.grouping.master), e.instruction.collective)
        found.append(TypeEdge(short(e.source), short(e.entered), short(e.target), instruction))
    stops = [*heads[1:], len(parts)]
    return tuple(found), tuple((*parts[f][:2], parts[n - 1][2]) for f, n in zip(heads, stops, strict=True))


def edge_costs(
    space: ReductionSpace, factors: Sequence[Digits], nbytes: float, topology: Topology, algorithm: str = "auto"
) -> Floats:
    """Return the price of every edge in seconds, float64 [edges]; `nbytes` is the payload of a device."""
    sizes = [math.prod(n for n, _ in digits) for digits in factors]
    held = nbytes / np.array([math.prod(n for n, x in zip(sizes, s, strict=True) if x == "S") for s in space.states])
    lines = [instruction_lines(i, factors, topology, algorithm) for i in space.instructions]
    rows = max(map(len, lines))
    # Every instruction has as many rows as that with the most: the others repeat one of theirs.
    table = np.array([[*each, *[each[0]] * (rows - len(each))] for each in lines])[space.instruction]
    return (table[:, :, 0] + table[:, :, 1] * held[space.source][:, None]).min(axis=1)


def digits_of(grouping: Grouping, factors: Sequence[Digits]) -> tuple[Digits, Digits]:
    """Return the digits along which members of a grouping differ, and those at which only coordinate 0 takes part."""
    later = range(grouping.varies[-1] + 1, len(factors)) if grouping.master else ()
    return tuple(d for f in grouping.varies for d in factors[f]), tuple(d for f in later for d in factors[f])


Lines = tuple[tuple[float, float], ...]


def instruction_lines(instruction: Instruction, factors: Sequence[Digits], topology: Topology, algorithm: str) -> Lines:
    """Return what rows of the library ask for an instruction, as `digit_lines`."""
    varies, zero = map(merge_digits, digits_of(instruction.grouping, factors))
    return digit_lines(instruction.collective, varies, zero, topology, algorithm)


def merge_digits(digits: Digits) -> Digits:
    """Return digits with neighbours as one that count on from each other: they say the same, and cost the same.

    >>> merge_digits(((2, 8), (2, 4), (4, 1)))
    ((16, 1),)
    """
    found: list[tuple[int, int]] = []
    for size, stride in digits:
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return tuple(found)


def digit_lines(kind: str, varies: Digits, zero: Digits, topology: Topology, algorithm: str) -> Lines:
    """Return seconds at 0 bytes, and per byte that a member holds before, of each row for a collective: `affine_costs`.

    Members differ in the digits `varies`, in this order, and of `zero` only coordinate 0 takes part.
    """
    return _every_line(varies, zero, topology, algorithm)[COLLECTIVES.index(kind)]


@lru_cache(maxsize=4096)
def _every_line(varies: Digits, zero: Digits, topology: Topology, algorithm: str) -> tuple[Lines, ...]:
    """Those of all collectives."""
    looked_at = topology.size
    if all(level == level.sound() for level in topology.levels):
        # Groups in other units do the same, side by side: on a switch, where ports are each unit's own, in units of the
        # outermost level that is spanned, else in those that hold them.
        top = next(j for j, unit in enumerate(topology.strides) if unit < max(n * stride for n, stride in varies))
        looked_at = topology.strides[top] * (1 if topology.levels[top].link == "switch" else topology.levels[top].size)
        rails = (unit for unit, level in zip(topology.strides, topology.levels, strict=True) if level.rails)
        looked_at = max(looked_at, *rails, 0)  # groups of one unit share its leaves
    return affine_costs_by_kind(COLLECTIVES, groups_along(varies, zero, looked_at), Fabric(topology), algorithm)
