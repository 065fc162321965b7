"""The checker of reduction programs: Hoare triples on state matrices (arXiv 2110.10548), independent of every planner.

K members reduce K chunks (rows) of equal size. The state of a member says, for every row, whose addends its value
holds: a K x K matrix of booleans, here the set of rows it holds and one integer of K bits a row, rows side by side.
Member d starts with its own addend of every row; the goal is every addend of every row on every member. Groups step at
once; members of no group keep their state.

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
from dataclasses import dataclass

from shardplan.errors import TypingError
from shardplan.movement.reductions.instructions import Instruction, instruction_list_text

MOST_MEMBERS = 256  # a state has the third power of it in bits: 2 MiB


@dataclass(frozen=True, slots=True)
class HeldRows:
    """What one member holds: `rows`, a bit a row, and `addends`, K bits a row, row 0 in the lowest."""

    rows: int
    addends: int


State = tuple[HeldRows, ...]
EMPTY = HeldRows(0, 0)


class Checker:
    """The semantics over one hierarchy, of sizes major first; their product K is the number of members, and of rows.

    Raises `TypingError` for more than 256 members.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Write down the start and the goal."""
        self.sizes = tuple(sizes)
        self.count = k = math.prod(self.sizes)
        if k > MOST_MEMBERS:
            raise TypingError(f"state matrices are checked up to {MOST_MEMBERS} members; {list(sizes)} has {k}")
        every = (1 << k) - 1
        self._ones = sum(1 << row * k for row in range(k))  # bit 0 of every row
        self.start: State = tuple(HeldRows(every, self._ones << d) for d in range(k))
        self.goal: State = (HeldRows(every, self._ones * every),) * k
        self._wide: dict[int, int] = {}

    def _widen(self, rows: int) -> int:
        """All addends of some rows."""
        found = self._wide.get(rows)
        if found is None:
            full = (1 << self.count) - 1
            found = self._wide[rows] = sum(full << r * self.count for r in range(self.count) if rows >> r & 1)
        return found

    def step(self, state: State, instruction: Instruction) -> State:
        """Return what every member holds after one instruction.

        Raises `TypingError` where a precondition does not hold; says which, and in which group.
        """
        after = list(state)
        for group in instruction.grouping.members(self.sizes).tolist():
            held = [state[m] for m in group]
            reason = _refused(instruction.collective, held)
            if reason:
                raise TypingError(f"{instruction.form(len(self.sizes))} on members {group}: {reason}")
            union = HeldRows(_union([h.rows for h in held]), _union([h.addends for h in held]))
            match instruction.collective:
                case "reduce_scatter":
                    for m, rows in zip(group, _parts(union.rows, len(group)), strict=True):
                        after[m] = HeldRows(rows, union.addends & self._widen(rows))
                case "reduce":
                    for m in group:
                        after[m] = EMPTY
                    after[group[0]] = union
                case _:
                    for m in group:
                        after[m] = union
        if tuple(after) == state:
            raise TypingError(f"{instruction.form(len(self.sizes))} changes nothing")
        return tuple(after)

    def run(self, program: Sequence[Instruction]) -> State:
        """Return what every member holds after a program.

        Raises `TypingError` as `step`, with the number of the step.
        """
        state = self.start
        for number, instruction in enumerate(program):
            if state == self.goal:
                raise TypingError(f"step {number}: the goal was reached before")
            try:
                state = self.step(state, instruction)
            except TypingError as error:
                raise TypingError(f"step {number}: {error}") from None
        return state

    def check(self, program: Sequence[Instruction]) -> None:
        """Check that a program reduces; raises `TypingError` for the first thing that does not hold.

        >>> from shardplan.movement.reductions.instructions import Grouping
        >>> Checker((2, 2)).check([Instruction(Grouping((0, 1)), "all_reduce")])
        """
        if self.run(program) != self.goal:
            raise TypingError(
                f"{instruction_list_text(program, len(self.sizes))} ends before every member holds every addend"
            )

    def check_parts(self, program: Sequence[Instruction], holders: Sequence[int], parts: int) -> None:
        """Check that a program ends with complete rows, 1/`parts` of them on each of `holders` and none elsewhere.

        Raises `TypingError` where a step or the end does not hold.
        """
        state = self.run(program)
        for d, held in enumerate(state):
            rows = self.count // parts if d in holders else 0
            if held.rows.bit_count() != rows or held.addends != self._widen(held.rows):
                raise TypingError(f"member {d} ends with {held.rows.bit_count()} rows, not {rows} complete ones")
        if _union([h.rows for h in state]) != (1 << self.count) - 1:
            raise TypingError("a row is held by no member at the end")


def _refused(collective: str, held: Sequence[HeldRows]) -> str:
    """Name the precondition that a group breaks, or nothing."""
    first = held[0]
    match collective:
        case "all_reduce" | "reduce_scatter" | "reduce":
            if not first.rows or any(h.rows != first.rows for h in held):
                return "the row sets are empty or differ"
            if not _disjoint([h.addends for h in held]):
                return "an addend would be counted twice"
            if collective == "reduce_scatter" and first.rows.bit_count() % len(held):
                return f"{first.rows.bit_count()} rows are not cut by {len(held)}"
        case "all_gather":
            count = first.rows.bit_count()
            if not count or any(h.rows.bit_count() != count for h in held):
                return "the row sets are empty or of different size"
            if not _disjoint([h.rows for h in held]):
                return "the row sets overlap"
        case "broadcast":
            if not first.rows:
                return "the first member holds nothing"
            if any(h.addends & ~first.addends for h in held):
                return "a member holds what the first does not"
            if all(h == first for h in held):
                return "all hold the same already"
        case _:
            return f"{collective!r} is no collective"
    return ""


def _union(sets: Sequence[int]) -> int:
    out = 0
    for x in sets:
        out |= x
    return out


def _disjoint(sets: Sequence[int]) -> bool:
    seen = 0
    for x in sets:
        if seen & x:
            return False
        seen |= x
    return True


def _parts(rows: int, k: int) -> list[int]:
    """Cut a set of rows into k consecutive runs of the ascending rows."""
    ascending = [r for r in range(rows.bit_length()) if rows >> r & 1]
    size = len(ascending) // k
    return [sum(1 << r for r in ascending[i * size : (i + 1) * size]) for i in range(k)]
