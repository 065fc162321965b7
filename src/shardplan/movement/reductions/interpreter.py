"""Instruction lists of 2110.10548 on numbers: a numpy interpreter that knows neither bitmasks nor types.

A member has one value a row, and knows which rows it holds; what it does not hold is poisoned, so that a use shows in
the sums. Collectives do what they say and check nothing but their operands' shapes: a wrong program gives wrong sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.movement.reductions.instructions import Instruction

Ints = NDArray[np.int64]
POISON = np.int64(-(10**15))  # far below any sum of addends, and no sum of 9,000 of them overflows


def run_instructions(sizes: Sequence[int], program: Sequence[Instruction], values: Ints) -> tuple[Ints, list[Ints]]:
    """Run a program on numbers.

    Args:
        sizes: Sizes of the digits, major first; K members in all.
        program: The instructions.
        values: Addends, [K, K]: row r of member d at [d, r].

    Returns:
        What the members have at the end, int64 [K, K], poisoned where they hold nothing, and the rows that each holds.

    Raises:
        ValueError: The rows that the members of a group hold do not fit together.

    >>> from shardplan.movement.reductions.instructions import Grouping
    >>> run_instructions((2,), [Instruction(Grouping((0,)), "all_reduce")], np.array([[1, 2], [3, 4]]))[0].tolist()
    [[4, 6], [4, 6]]
    """
    out = np.array(values, dtype=np.int64)
    rows = [np.arange(out.shape[1]) for _ in range(math.prod(sizes))]
    for instruction in program:
        for group in instruction.grouping.members(sizes).tolist():
            _collective(instruction.collective, group, out, rows)
    return out, rows


def _collective(name: str, group: Sequence[int], out: Ints, rows: list[Ints]) -> None:
    """Run one collective in one group, in place."""
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        mine = rows[group[0]]
        if any(not np.array_equal(rows[m], mine) for m in group):
            raise ValueError(f"{name}: members {list(group)} hold different rows")
        total = out[group][:, mine].sum(axis=0)
        parts = np.split(mine, len(group)) if name == "reduce_scatter" else [mine] * len(group)
        if name == "reduce":
            parts[1:] = [mine[:0]] * (len(group) - 1)
        for m, part in zip(group, parts, strict=True):
            _store(m, part, total[np.searchsorted(mine, part)], out, rows)
        return
    if name == "broadcast":
        mine = rows[group[0]]
        values = out[group[0], mine].copy()
    else:
        mine = np.concatenate([rows[m] for m in group])
        values = np.concatenate([out[m, rows[m]] for m in group])
        order = np.argsort(mine, kind="stable")
        mine, values = mine[order], values[order]
        if np.unique(mine).size != mine.size:
            raise ValueError(f"{name}: members {list(group)} hold a row twice")
    for m in group:
        _store(m, mine, values, out, rows)


def _store(member: int, mine: Ints, values: Ints, out: Ints, rows: list[Ints]) -> None:
    out[member] = POISON
    out[member, mine] = values
    rows[member] = mine
