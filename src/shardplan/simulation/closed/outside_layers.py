"""What is outside of a model's layers: values that are saved there, and parameters that are read behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardplan.core.nested import as_nested
from shardplan.core.ops.composed import differs
from shardplan.core.program import Program
from shardplan.strategy.runtimes import READS_ROWS


class OutsideLayers(NamedTuple):
    """Values that are saved, with their run (-1 before the layers, -2 behind); what is read behind; tables of rows."""

    saved: Mapping[str, int]
    late: frozenset[str]
    tables: frozenset[str]


def outside_layers(program: Program, forwards: int, end: int) -> OutsideLayers:
    """Read a program of which the first `forwards` steps are forward, and those up to `end` backward."""
    made: dict[str, int] = {}
    late, tables = set[str](), set[str]()
    run = -1
    for step in program.steps[:forwards]:
        op = as_nested(step.op)
        if op is not None:
            run = -2
            made |= dict.fromkeys(step.results[: op.carried_count], run)
            continue
        made |= dict.fromkeys((r for r in step.results if differs(program.types[r])), run)
        late |= {*step.operands} if run == -2 else set()
        tables |= {step.operands[0]} if step.op.name in READS_ROWS else set()
    read = {o for step in program.steps[forwards:end] if as_nested(step.op) is None for o in step.operands}
    return OutsideLayers({name: at for name, at in made.items() if name in read}, frozenset(late), frozenset(tables))


def run_of(program: Program, forwards: int, name: str) -> int:
    """Return which run of layers reads a value, 0 where none does."""
    loops = [step for step in program.steps[:forwards] if as_nested(step.op) is not None]
    return next((k for k, step in enumerate(loops) if name in step.operands), 0)


def is_read_early(program: Program, forwards: int, name: str) -> bool:
    """Say whether a value is read before the layers."""
    first = next((k for k, step in enumerate(program.steps[:forwards]) if as_nested(step.op) is not None), forwards)
    return any(name in step.operands for step in program.steps[:first])
