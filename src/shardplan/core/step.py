"""`Step`: one op applied to named values, the line of a program."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core.op import Op


@dataclass(frozen=True, slots=True)
class Step:
    """One op applied to named values; no gradient goes through the uses `stopped`, indices of operands."""

    op: Op
    operands: tuple[str, ...]
    results: tuple[str, ...]
    stopped: tuple[int, ...] = ()
