"""Reduction programs written once more: on sets of addends, on numbers, and over other hierarchies.

Three oracles of `movement.reductions`, and what the paper compares: `step_sets` is the semantics of the checker in
Python's sets, `run_instructions` runs a program on integers, `hierarchy` are the four hierarchies over which
2110.10548 synthesises programs (its section 4).
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from shardplan.hardware.level_factors import checked_axes, factors
from shardplan.hardware.placement import Placement
from shardplan.movement.reductions.instructions import Instruction
from shardplan.movement.reductions.state_graph import Exploration

POISON = np.int64(-(10**15))  # far below any sum of addends, and no sum of 9,000 of them overflows
Held = dict[int, frozenset[int]]  # by row whose addends are in the value


def begin(count: int) -> tuple[Held, ...]:
    """Every member has its own addend of every row."""
    return tuple({row: frozenset([d]) for row in range(count)} for d in range(count))


def step_sets(state: Sequence[Held], sizes: Sequence[int], instruction: Instruction) -> tuple[Held, ...] | None:
    """The state after an instruction, or None where a precondition does not hold or nothing changes."""
    name, after = instruction.collective, list(state)
    for group in instruction.grouping.members(sizes).tolist():
        held = [state[m] for m in group]
        rows = [set(h) for h in held]
        union = {row: frozenset().union(*(h[row] for h in held if row in h)) for row in sorted(set().union(*rows))}
        if name == "broadcast":
            if not rows[0] or any(not h[row] <= held[0].get(row, set()) for h in held for row in h):
                return None
            if all(h == held[0] for h in held):
                return None
        elif name == "all_gather":
            if not rows[0] or len({len(r) for r in rows}) > 1 or sum(map(len, rows)) > len(union):
                return None
        else:
            if not rows[0] or any(r != rows[0] for r in rows):
                return None
            if any(sum(len(h[row]) for h in held) > len(union[row]) for row in union):
                return None
        parts = [union] * len(group)
        if name == "reduce":
            parts = [union, *[{}] * (len(group) - 1)]
        if name == "reduce_scatter":
            each, rest = divmod(len(union), len(group))
            if rest:
                return None
            ascending = list(union.items())
            parts = [dict(ascending[i * each : (i + 1) * each]) for i in range(len(group))]
        for m, part in zip(group, parts, strict=True):
            after[m] = dict(part)
    return tuple(after) if after != list(state) else None


def is_sum(state: Sequence[Held]) -> bool:
    """Whether every member holds every addend of every row."""
    every = frozenset(range(len(state)))
    return all(len(h) == len(state) and set(h.values()) == {every} for h in state)


def run_instructions(
    sizes: Sequence[int], program: Sequence[Instruction], values: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Run a program on addends [K, K], row r of member d at [d, r]; a member has one value a row.

    Returns what the members have at the end, poisoned where they hold nothing, and the rows that each holds. Checks
    nothing but that rows fit together (`ValueError`): a wrong program gives wrong sums.
    """
    out = np.array(values, dtype=np.int64)
    rows = [np.arange(out.shape[1]) for _ in range(math.prod(sizes))]
    for instruction in program:
        for group in instruction.grouping.members(sizes).tolist():
            _collective(instruction.collective, group, out, rows)
    return out, rows


def _collective(name: str, group: Sequence[int], out: np.ndarray, rows: list[np.ndarray]) -> None:
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


def _store(member: int, mine: np.ndarray, values: np.ndarray, out: np.ndarray, rows: list[np.ndarray]) -> None:
    out[member] = POISON
    out[member, mine] = values
    rows[member] = mine


def count_programs(found: Exploration, limit: int) -> int:
    """The number of programs of at most `limit` instructions that end in the goal."""
    ways = [1] + [0] * (found.count - 1)
    total = 0
    for _ in range(limit if found.goal >= 0 else 0):
        after = [0] * found.count
        for a, b in zip(found.source.tolist(), found.target.tolist(), strict=True):
            after[b] += ways[a]
        ways = after
        total += ways[found.goal]
    return total


def hierarchy(placement: Placement, axes: str, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of the digits, without ones, and the reduction group of every member, as `explore` takes them.

    `system` are the levels of the topology; `column` and `row` the entries of the matrix, level by level and axis by
    axis; `factors` those of the reduced axes alone, as one reduction group sees them. The first three are over all
    devices, so that most of their instructions mix reduction groups and lead nowhere; the last has as many members as
    one group, is the smallest, and expresses every program that the others do.
    """
    asked = checked_axes(placement, axes)
    if kind == "factors":
        sizes = tuple(f.size for f in factors(placement, asked))
        return sizes, (0,) * math.prod(sizes)
    mesh = placement.mesh
    groups = np.zeros(mesh.size, dtype=np.int64)
    for number, places in enumerate(mesh.group_places(asked)):
        groups[places] = number
    if kind == "row":
        return _sizes(x for row in placement.matrix for x in row), tuple(groups.tolist())
    on_topology = np.empty_like(groups)
    on_topology[placement.device_mesh().reshape(-1)] = groups
    if kind == "system":
        return _sizes(placement.topology.level_sizes), tuple(on_topology.tolist())
    return tuple(d.size for level in placement.digits() for d in level), tuple(on_topology.tolist())


def _sizes(entries: Iterable[int]) -> tuple[int, ...]:
    return tuple(x for x in entries if x > 1)
