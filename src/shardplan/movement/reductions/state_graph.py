"""The graph of all state matrices that reduction programs reach, and the programs in it (arXiv 2110.10548, section 4).

`explore` is the semantics of `state_matrix`, over many states at once in numpy; the two are written apart and compared
in tests. Programs hardly depend on the sizes of the digits (up to six instructions over three digits not at all), so
the graph is explored on sizes (2, .., 2), once, and what is taken from it is checked at the true ones. Of its states
only the live ones lie on a way to the goal; the live part has no cycles, so the k best programs without a bound on
their size are found by one sweep in topological order.

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

Ints = NDArray[np.int64]
Bits = NDArray[np.unsignedinteger]
MOST_DIGITS = 4  # 20,285 states, explored in a second; each digit less has about 25 times fewer
MOST_EXPLORED = 64  # members: the addends of a row are the bits of one integer


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """All states reached, in the order of their discovery: 0 is the start."""

    count: int  # of the states
    goal: int  # its number, or -1 where it is never reached
    source: Ints  # of every edge the state before, [edges]
    target: Ints  # the state after
    step: Ints  # the instruction, as a number in `steps`
    steps: tuple[Instruction, ...]

    def live(self) -> NDArray[np.bool_]:
        """Return which states lie on a way to the goal, bool [states]."""
        alive = np.zeros(self.count, dtype=bool)
        if self.goal < 0:
            return alive
        alive[self.goal] = True
        while True:
            more = np.unique(self.source[alive[self.target] & ~alive[self.source]])
            if not more.size:
                return alive
            alive[more] = True

    def count_programs(self, limit: int) -> int:
        """Return the number of programs of at most `limit` instructions that end in the goal."""
        if self.goal < 0:
            return 0
        ways: list[int] = [1] + [0] * (self.count - 1)
        total = 0
        for _ in range(limit):
            after = [0] * self.count
            for a, b in zip(self.source.tolist(), self.target.tolist(), strict=True):
                after[b] += ways[a]
            ways = after
            total += ways[self.goal]
        return total


def explore(sizes: Sequence[int], owner: Sequence[int] | None = None) -> Exploration:
    """Return the graph of every state that legal instructions reach from the start; the goal is not left.

    Args:
        sizes: Sizes of the digits, major first; at most 64 members in all.
        owner: The reduction group of every member, [members], all of one size; one group by default. A member's goal is
            the addends of its own group.

    Raises:
        Infeasible: More than 64 members.

    >>> found = explore((2, 2))
    >>> found.count, int(found.live().sum()), found.count_programs(5)
    (40, 25, 93)
    """
    members = math.prod(sizes)
    if members > MOST_EXPLORED:
        raise Infeasible(f"states of {members} members are not explored; at most {MOST_EXPLORED} are")
    groups = np.zeros(members, dtype=np.int64) if owner is None else np.asarray(owner)
    rows = int(np.bincount(groups).max())
    dtype = np.uint16 if members <= 16 else np.uint64  # a bit a member; the narrow ones take a quarter
    own = np.left_shift(1, np.arange(members, dtype=np.uint64)).astype(dtype)
    start = np.repeat(own[:, None], rows, axis=1)
    whole = np.array([np.bitwise_or.reduce(own[groups == g]) for g in groups], dtype=dtype)
    goal = np.repeat(whole[:, None], rows, axis=1).tobytes()
    steps = alphabet(len(sizes))
    known = {start.tobytes(): 0}
    edges: list[tuple[int, int, int]] = []
    frontier, names = start[None], np.zeros(1, dtype=np.int64)
    bits = np.left_shift(1, np.arange(rows, dtype=np.uint64))
    while len(frontier):
        fresh: list[Bits] = []
        numbers: list[int] = []
        held = (frontier != 0) @ bits
        for number, step in enumerate(steps):
            at, after = _apply(step, step.grouping.members(sizes), frontier, held)
            for a, state in zip(names[at].tolist(), after, strict=True):
                key = state.tobytes()
                if key not in known:
                    known[key] = len(known)
                    if key != goal:
                        fresh.append(state)
                        numbers.append(known[key])
                edges.append((a, known[key], number))
        frontier = np.array(fresh, dtype=dtype).reshape(-1, members, rows)
        names = np.array(numbers, dtype=np.int64)
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)  # also of no edges
    return Exploration(len(known), known.get(goal, -1), table[:, 0], table[:, 1], table[:, 2], steps)


def _apply(step: Instruction, groups: Ints, states: Bits, held: NDArray[np.uint64]) -> tuple[Ints, Bits]:
    """Apply one instruction to states [n, members, rows] that hold the rows [n, members] (a bit each).

    Returns which of them allow it and change, and what they become. The preconditions are those of `state_matrix`,
    first on the rows, which are few bits, and on the addends only for states that pass; all groups of a state must
    allow it.
    """
    name, k = step.collective, groups.shape[1]
    rows = held[:, groups]  # [n, groups, k]
    size = np.bitwise_count(rows)
    if name == "broadcast":
        possible = (rows[:, :, :1] != 0) & (rows & ~rows[:, :, :1] == 0)
    elif name == "all_gather":
        apart = np.bitwise_count(np.bitwise_or.reduce(rows, axis=2)) == size.sum(axis=2)
        possible = (size > 0) & (size == size[:, :, :1]) & apart[:, :, None]
    else:
        possible = (size > 0) & (rows == rows[:, :, :1])
        if name == "reduce_scatter":
            possible &= size % k == 0
    at = np.flatnonzero(possible.all(axis=(1, 2)))
    part = states[at][:, groups]  # [n, groups, k, rows]
    union = part[:, :, 0] if name == "broadcast" else np.bitwise_or.reduce(part, axis=2)
    if name == "broadcast":
        within = (part & ~union[:, :, None] == 0).all(axis=(1, 2, 3))
        legal = within & (part != union[:, :, None]).any(axis=(2, 3)).all(axis=1)
    elif name == "all_gather":
        legal = np.ones(len(at), dtype=bool)
    else:
        once = np.bitwise_count(part).sum(axis=2, dtype=np.int64) == np.bitwise_count(union)
        legal = once.all(axis=(1, 2))
    at, union = at[legal], union[legal]
    after = states[at].copy()
    if name == "reduce":
        after[:, groups[:, 1:]] = 0
        after[:, groups[:, 0]] = union
    elif name == "reduce_scatter":
        mine = union != 0
        run = (np.cumsum(mine, axis=2) - 1) // (mine.sum(axis=2, keepdims=True) // k)
        for i in range(k):
            after[:, groups[:, i]] = np.where(mine & (run == i), union, 0)
    else:
        after[:, groups] = union[:, :, None]
    changed = (after != states[at]).any(axis=(1, 2))
    return at[changed], after[changed]


@dataclass(frozen=True, slots=True, eq=False)
class InstructionEdge:
    """A step of a live program."""

    source: int  # live states, in topological order
    target: int
    instruction: Instruction
    scattered: tuple[int, ...]  # for each group over sizes (2, .., 2) the digits that cut its rows before, a bit mask


@dataclass(frozen=True, slots=True, eq=False)
class StateGraph:
    """The live states over `depth` digits, numbered so that edges ascend; 0 is the start and the last the goal."""

    depth: int
    states: int  # how many
    edges: tuple[InstructionEdge, ...]  # by ascending source
    explored: int  # states of the whole graph, live or not

    def programs(self, limit: int) -> Iterator[tuple[int, ...]]:
        """Yield every program of at most `limit` instructions, as numbers of edges.

        Depth first by ascending edges, so that programs that begin alike come one after another, as `verify` wants
        them. A branch is cut where the goal is further than what is left of the limit.
        """
        leaving: list[list[int]] = [[] for _ in range(self.states)]
        left = [math.inf] * self.states
        left[-1] = 0
        for number in range(len(self.edges) - 1, -1, -1):
            edge = self.edges[number]
            left[edge.source] = min(left[edge.source], left[edge.target] + 1)
            leaving[edge.source].append(number)

        def follow(state: int, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            """Yield the programs that go on from a path to `state`."""
            if state == self.states - 1:
                yield path
                return
            for number in reversed(leaving[state]):
                target = self.edges[number].target
                if len(path) + 1 + left[target] <= limit:
                    yield from follow(target, (*path, number))

        yield from follow(0, ())

    def best(self, costs: Sequence[float], top: int) -> list[tuple[float, tuple[int, ...]]]:
        """Return the `top` cheapest programs of any size with their costs, cheapest first; of equal costs the shorter.

        `costs` are those of every edge; a program is a row of numbers of edges.
        """
        # Without cycles the k best ways to a state extend the k best ways to those before it.
        # A way is (cost, length, edges): compared as it stands. It stays a plain tuple, of which a million are made.
        ways: list[list[tuple[float, int, tuple[int, ...]]]] = [[] for _ in range(self.states)]
        ways[0] = [(0.0, 0, ())]
        for number, edge in enumerate(self.edges):
            if edge.target > 0:
                grown = ((c + costs[number], n + 1, (*path, number)) for c, n, path in ways[edge.source])
                ways[edge.target] = heapq.nsmallest(top, [*ways[edge.target], *grown])
        return [(cost, path) for cost, _, path in ways[-1]]


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
    keep = np.flatnonzero(alive[found.source] & alive[found.target])
    source, target, step = found.source[keep], found.target[keep], found.step[keep]
    order = _topological(np.flatnonzero(alive), source, target)
    number = np.full(found.count, -1, dtype=np.int64)
    number[order] = np.arange(len(order))
    cut: dict[int, Ints] = {0: np.zeros(2**depth, dtype=np.int64)}
    edges: list[InstructionEdge] = []
    by_source = np.lexsort((number[target], number[source]))
    for e in by_source.tolist():
        instruction = found.steps[int(step[e])]
        before = cut[int(source[e])]
        groups = instruction.grouping.members(sizes)
        edges.append(
            InstructionEdge(
                int(number[source[e]]), int(number[target[e]]), instruction, tuple(before[groups[:, 0]].tolist())
            )
        )
        if int(target[e]) not in cut:
            cut[int(target[e])] = _cut_after(instruction, groups, before)
    return StateGraph(depth, len(order), tuple(edges), found.count)


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


def _topological(nodes: Ints, source: Ints, target: Ints) -> list[int]:
    """Nodes in an order in which every edge ascends, the start first and the goal last.

    A node is ready when all edges into it are behind; the one that became ready last goes next, which is one order of
    many, the same on every run.
    """
    waiting = dict.fromkeys(nodes.tolist(), 0)
    leaving: dict[int, list[int]] = {n: [] for n in waiting}
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        waiting[b] += 1
        leaving[a].append(b)
    ready = [n for n, k in waiting.items() if k == 0]
    order: list[int] = []
    while ready:
        node = ready.pop()
        order.append(node)
        for b in leaving[node]:
            waiting[b] -= 1
            if waiting[b] == 0:
                ready.append(b)
    if len(order) < len(waiting):
        raise AssertionError("the live states have a cycle")
    return order
