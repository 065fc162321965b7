"""The checker of reduction programs: Hoare triples on state matrices (arXiv 2110.10548), independent of every planner.

K members reduce K chunks (rows) of equal size. The state of a member says, for every row, whose addends its value
holds: a K x K matrix of booleans, here K integers of K bits, 0 for a row that it does not hold. Member d starts with
its own addend of every row; the goal is every addend of every row on every member. Groups step at once; members of no
group keep their state.

| op | precondition, in every group | result |
|---|---|---|
| AllReduce | equal non-empty row sets; in each row the addends are pairwise disjoint | all get the union |
| ReduceScatter | as AllReduce; k divides the number of rows | member i keeps the i-th k-th of the ascending rows |
| AllGather | row sets non-empty, pairwise disjoint, of equal size | all get the union |
| Reduce | as AllReduce | member 0 gets the union, the others are empty |
| Broadcast | member 0 is not empty; every state is part of its state, one strictly | all get its state |

A step that changes nothing is refused. Nothing is imported from planners, types or costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import TypingError
from shardplan.movement.reductions.instructions import Instruction

Ints = NDArray[np.int64]
Bits = NDArray[np.unsignedinteger]
Bools = NDArray[np.bool_]
MOST_MEMBERS = 64  # checked at their true sizes: the addends of a row are the bits of one integer


def checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes at which programs over these are checked: the same, or for many members 3 and 2.

    3 tells what 2 cannot: odd groups.

    >>> checked_sizes((2, 8)), checked_sizes((16, 2, 8)), checked_sizes((16, 8, 8, 8))
    ((2, 8), (3, 2, 3), (2, 3, 3, 3))
    """
    found = list(sizes) if math.prod(sizes) <= MOST_MEMBERS else [min(n, 3) for n in sizes]
    for d in range(len(sizes)):
        found[d] = 2 if math.prod(found) > MOST_MEMBERS else found[d]
    return tuple(found)


def ends(sizes: Sequence[int], owner: Sequence[int] | None = None) -> tuple[Bits, Bits]:
    """Return the start and the goal, each [1, members, rows].

    `owner` is the reduction group of every member, all of one size; a member's goal is the addends of its own group.
    """
    members = math.prod(sizes)
    groups = np.zeros(members, dtype=np.int64) if owner is None else np.asarray(owner)
    rows = int(np.bincount(groups).max())
    # A bit a member; the narrow ones take a quarter, and Python's integers have any number.
    dtype = np.uint16 if members <= 16 else np.uint64 if members <= 64 else object
    own = np.array([1 << d for d in range(members)], dtype=dtype)
    goal = np.array([np.bitwise_or.reduce(own[groups == g]) for g in groups], dtype=dtype)
    start, goal = (np.repeat(x[None, :, None], rows, axis=2) for x in (own, goal))
    return start, goal


def rows_held(states: Bits) -> NDArray[np.uint64]:
    """Return the rows that members hold, a bit each: [states, members]."""
    rows = states.shape[2]
    bits = np.array([1 << r for r in range(rows)], dtype=np.uint64 if rows <= 64 else object)
    return (states != 0) @ bits


def step(instruction: Instruction, sizes: Sequence[int], states: Bits, held: NDArray[np.uint64]) -> tuple[Ints, Bits]:
    """Return which of some states [n, members, rows] allow an instruction and change, and what they become.

    `held` is `rows_held`. Preconditions are tried on the rows, which are few bits, and on the addends only of states
    that pass; all groups of a state must allow it.
    """
    name, groups = instruction.collective, instruction.grouping.members(sizes)
    k = groups.shape[1]
    at = np.arange(len(states))[_all_rules(_on_rows(name, held[:, groups]), len(states))]
    part = states[at][:, groups]  # [n, groups, k, rows]
    union = part[:, :, 0] if name == "broadcast" else np.bitwise_or.reduce(part, axis=2)
    legal = _all_rules(_on_addends(name, part, union), len(at))
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


def _all_rules(rules: dict[str, Bools], count: int) -> Bools:
    return np.logical_and.reduce([np.ones(count, dtype=bool), *(rule.all(axis=1) for rule in rules.values())])


def _on_rows(name: str, rows: NDArray[np.uint64]) -> dict[str, Bools]:
    """Say of every group whether the rows of its members [n, groups, k] hold each precondition, bool [n, groups]."""
    first, size = rows[:, :, :1], np.bitwise_count(rows).astype(np.int64)
    if name == "broadcast":
        within = (rows & ~first == 0).all(axis=2)
        return {"the first member holds nothing": first[:, :, 0] != 0, "a member holds what the first does not": within}
    if name == "all_gather":
        apart = np.bitwise_count(np.bitwise_or.reduce(rows, axis=2)) == size.sum(axis=2)
        alike = ((size > 0) & (size == size[:, :, :1])).all(axis=2)
        return {"the row sets are empty or of different size": alike, "the row sets overlap": apart}
    alike = ((rows != 0) & (rows == first)).all(axis=2)
    cut = size[:, :, 0] % (rows.shape[2] if name == "reduce_scatter" else 1) == 0
    return {"the row sets are empty or differ": alike, "the rows are not cut by the members": cut}


def _on_addends(name: str, part: Bits, union: Bits) -> dict[str, Bools]:
    """The same of the addends of members [n, groups, k, rows] and what results [n, groups, rows]."""
    if name == "broadcast":
        within, news = part & ~union[:, :, None] == 0, part != union[:, :, None]
        return {
            "a member holds what the first does not": within.all(axis=(2, 3)),
            "all hold the same already": news.any(axis=(2, 3)),
        }
    if name == "all_gather":
        return {}
    once = np.bitwise_count(part).astype(np.int64).sum(axis=2) == np.bitwise_count(union)
    return {"an addend would be counted twice": once.all(axis=2)}


def check(sizes: Sequence[int], program: Sequence[Instruction], after: str) -> None:
    """Check that a program ends with complete rows where the letters of the digits say, and with none elsewhere.

    Of a digit `U` every member has all of them, `S` its part, and `R` only coordinate 0. Raises `TypingError` for a
    step, or an end, that does not hold.

    >>> from shardplan.movement.reductions.instructions import Grouping
    >>> check((2, 2), [Instruction(Grouping((0, 1)), "all_reduce")], "UU")
    """
    sizes = checked_sizes(sizes)
    states, goal = ends(sizes)
    for number, instruction in enumerate(program):
        _, states = step(instruction, sizes, states, rows_held(states))
        if not len(states):
            raise TypingError(f"step {number}: {instruction.form(len(sizes))} is refused")
    digits = np.indices(sizes).reshape(len(sizes), -1)
    holds = (digits[[d for d, letter in enumerate(after) if letter == "R"]] == 0).all(axis=0)
    parts = math.prod(n for n, letter in zip(sizes, after, strict=True) if letter == "S")
    held, right = states[0] != 0, states[0] == goal[0]
    count = np.where(holds, len(holds) // parts, 0)
    if not (np.array_equal(held, held & right) and np.array_equal(held.sum(axis=1), count) and held.any(axis=0).all()):
        raise TypingError(f"the end is not {after}: a member has other rows, or a sum is not complete")
