"""The graph of all state matrices that reduction programs reach, and the programs in it (arXiv 2110.10548, section 4).

Programs hardly depend on the sizes of the digits (up to six instructions over three digits not at all), so the graph is
explored on sizes (2, .., 2), once, and what is taken from it is checked at the true ones. Of its states only the live
ones lie on a way to the goal; the live part has no cycles, so the k best programs without a bound on their size are
found by one sweep in topological order.

What an instruction moves depends on how its groups' rows were cut before: every live edge carries, for each group, the
digits that were scattered. Groups differ in that where devices that idled in a Master form hold old values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import Infeasible
from shardplan.movement.reductions.instructions import Instruction, alphabet
from shardplan.movement.reductions.state_matrix import MOST_MEMBERS, Bits, ends, rows_held, step

Ints = NDArray[np.int64]
MOST_DIGITS = 4  # 20,285 states, explored in a second; each digit less has about 25 times fewer


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """All states reached, in the order of their discovery: 0 is the start."""

    count: int  # of the states
    goal: int  # its number, or -1 where it is never reached
    source: Ints  # of every edge the state before, [edges]
    target: Ints  # the state after
    step: Ints  # the instruction, as a number in `alphabet`

    def live(self) -> NDArray[np.bool_]:
        """Return which states lie on a way to the goal, bool [states]."""
        alive = np.arange(self.count) == self.goal
        while (more := self.source[alive[self.target] & ~alive[self.source]]).size:
            alive[more] = True
        return alive


def explore(sizes: Sequence[int], owner: Sequence[int] | None = None) -> Exploration:
    """Return the graph of every state that legal instructions reach from the start; the goal is not left.

    Args:
        sizes: Sizes of the digits, major first; at most 64 members in all.
        owner: The reduction group of every member, [members], all of one size; one group by default.

    Raises:
        Infeasible: More than 64 members.

    >>> found = explore((2, 2))
    >>> found.count, int(found.live().sum())
    (40, 25)
    """
    if math.prod(sizes) > MOST_MEMBERS:
        raise Infeasible(f"states of {math.prod(sizes)} members are not explored; at most {MOST_MEMBERS} are")
    frontier, goal = ends(sizes, owner)
    known = {frontier[0].tobytes(): 0}
    edges: list[tuple[int, int, int]] = []
    names = [0]
    while names:
        fresh: list[Bits] = []
        numbers: list[int] = []
        held = rows_held(frontier)
        for number, instruction in enumerate(alphabet(len(sizes))):
            at, after = step(instruction, sizes, frontier, held)
            for a, state in zip(at.tolist(), after, strict=True):
                key = state.tobytes()
                if key not in known:
                    known[key] = len(known)
                    if key != goal.tobytes():
                        fresh.append(state)
                        numbers.append(known[key])
                edges.append((names[a], known[key], number))
        frontier, names = np.array(fresh), numbers
    source, target, taken = np.array(edges, dtype=np.int64).reshape(-1, 3).T  # also of no edges
    return Exploration(len(known), known.get(goal.tobytes(), -1), source, target, taken)


@dataclass(frozen=True, slots=True, eq=False)
class InstructionEdge:
    """A step of a live program."""

    source: int  # live states, in topological order
    target: int
    instruction: Instruction
    scattered: tuple[int, ...]  # for each group over sizes (2, .., 2) the digits that cut its rows before, a bit mask


@dataclass(frozen=True, slots=True, eq=False)
class StateGraph:
    """The live states over some digits, numbered so that edges ascend; 0 is the start and the last the goal."""

    states: int  # how many
    edges: tuple[InstructionEdge, ...]  # by ascending source

    def instructions(self, path: Sequence[int]) -> tuple[Instruction, ...]:
        """Return the program that some edges are."""
        return tuple(self.edges[e].instruction for e in path)

    def programs(self, limit: int) -> Iterator[tuple[int, ...]]:
        """Yield every program of at most `limit` instructions, as numbers of edges, those that begin alike together.

        A branch is cut where the goal is further than what is left of the limit.
        """
        leaving: list[list[int]] = [[] for _ in range(self.states)]
        left = [math.inf] * (self.states - 1) + [0]
        for number in range(len(self.edges) - 1, -1, -1):
            edge = self.edges[number]
            left[edge.source] = min(left[edge.source], left[edge.target] + 1)
            leaving[edge.source].append(number)

        def follow(state: int, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            """Yield the programs that go on from a path to `state`."""
            if state == self.states - 1:
                yield path
            for number in reversed(leaving[state]):
                target = self.edges[number].target
                if len(path) + 1 + left[target] <= limit:
                    yield from follow(target, (*path, number))

        yield from follow(0, ())

    def best(self, costs: Sequence[float], top: int) -> list[tuple[int, ...]]:
        """Return the `top` cheapest programs of any size, as numbers of edges; of equal costs the shorter first."""
        # Without cycles the k best ways to a state extend the k best ways to those before it.
        # A way is (cost, length, edges): compared as it stands. It stays a plain tuple, of which a million are made.
        ways: list[list[tuple[float, int, tuple[int, ...]]]] = [[] for _ in range(self.states)]
        ways[0] = [(0.0, 0, ())]
        for number, edge in enumerate(self.edges):
            grown = ((c + costs[number], n + 1, (*path, number)) for c, n, path in ways[edge.source])
            ways[edge.target] = heapq.nsmallest(top, [*ways[edge.target], *grown])
        return [path for _, _, path in ways[-1]]


@lru_cache(maxsize=MOST_DIGITS + 1)
def state_graph(depth: int) -> StateGraph:
    """Return the live graph over `depth` digits, built once.

    Raises `Infeasible` above 4 digits; the shortest path over types has no such limit.

    >>> [state_graph(n).states for n in (1, 2, 3)]
    [4, 25, 236]
    """
    if depth > MOST_DIGITS:
        raise Infeasible(
            f"programs over {depth} levels are not enumerated, at most {MOST_DIGITS} levels are; "
            "reduce finds the best over any number"
        )
    sizes = (2,) * depth
    found = explore(sizes)
    alive = found.live()
    keep = alive[found.source] & alive[found.target]
    source, target, taken = found.source[keep], found.target[keep], found.step[keep]
    layer, deeper = np.zeros(found.count, dtype=np.int64), np.zeros(found.count, dtype=np.int64)
    while True:  # the longest way to a state is longer than those to all before it
        np.maximum.at(deeper, target, layer[source] + 1)
        if np.array_equal(layer, deeper):
            break
        layer = deeper.copy()
    number = np.empty(found.count, dtype=np.int64)
    # Those found last first: of equal programs one that starts inside.
    number[np.lexsort((-np.arange(found.count), layer, ~alive))] = np.arange(found.count)
    cut = {0: np.zeros(2**depth, dtype=np.int64)}
    edges: list[InstructionEdge] = []
    order = np.lexsort((number[target], number[source]))
    for a, b, n in zip(number[source][order].tolist(), number[target][order].tolist(), taken[order], strict=True):
        instruction = alphabet(depth)[n]
        groups = instruction.grouping.members(sizes)
        edges.append(InstructionEdge(a, b, instruction, tuple(cut[a][groups[:, 0]].tolist())))
        cut.setdefault(b, _cut_after(instruction, groups, cut[a]))
    return StateGraph(int(alive.sum()), tuple(edges))


def _cut_after(instruction: Instruction, groups: Ints, before: Ints) -> Ints:
    """The digits that every member's rows are cut by after a step, as bit masks [members]."""
    mask = sum(1 << d for d in instruction.grouping.varies)
    after = before.copy()
    match instruction.collective:
        case "reduce_scatter":
            after[groups] |= mask
        case "all_gather":
            after[groups] &= ~mask
        case "reduce":
            after[groups[:, 1:]] = 0
        case "broadcast":
            after[groups] = before[groups[:, :1]]
        case _:
            pass
    return after
