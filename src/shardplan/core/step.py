"""`Step`: one op applied to named values, the line of a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardplan.core.op import Op


@dataclass(frozen=True, slots=True)
class Step:
    """One op applied to named values; no gradient goes through the uses `stopped`, indices of operands."""

    op: Op
    operands: tuple[str, ...]
    results: tuple[str, ...]
    stopped: tuple[int, ...] = ()


def last_uses(steps: Sequence[Step], outputs: Iterable[str]) -> list[set[str]]:
    """Return, per step, the values that no later step or output reads (operands it frees, results never read)."""
    alive = set(outputs)
    freed: list[set[str]] = []
    for step in reversed(steps):
        freed.append({*step.operands, *step.results} - alive)
        alive |= {*step.operands}
    return freed[::-1]


def live_steps(steps: Sequence[Step], results: Iterable[str]) -> list[int]:
    """Return the numbers of the steps that some results need, in order."""
    needed, found = set(results), list[int]()
    for k in reversed(range(len(steps))):
        if needed & {*steps[k].results}:
            found.append(k)
            needed |= {*steps[k].operands}
    return found[::-1]
