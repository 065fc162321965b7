"""A pass on programs: what a layer gathers of its parameters, it gathers a layer early."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from shardplan.core.nested import nested
from shardplan.core.ops.collective import moving
from shardplan.core.program import Program
from shardplan.core.step import Step


def prefetched(program: Program, stacks: Collection[str]) -> Program:
    """Return a program whose repeats move the rows of some of its inputs one run ahead.

    Values and bytes are the same; the last run moves nothing ahead. Two layers of what is moved are there at once.
    """
    return Program(program.inputs, [_prefetched(step, stacks) for step in program.steps], program.outputs)


def runs_ahead(program: Program) -> bool:
    """Say whether a repeat of a program runs anything ahead."""
    return any(op.ahead for step in program.steps if (op := nested(step.op)) is not None)


def _prefetched(step: Step, stacks: Collection[str]) -> Step:
    op: Any = nested(step.op)
    if op is None or op.at_once:
        return step
    names = [name for name, _ in op.body.inputs]
    rows = range(len(names) - op.cut, len(names))
    there = {names[k] for k in rows if step.operands[k] in stacks}
    early: list[Step] = []
    for inner in op.body.steps:
        if moving(inner.op) is not None and there >= {*inner.operands}:
            early.append(inner)
            there |= {*inner.results}
    rest = [inner for inner in op.body.steps if inner not in early]
    body = Program(op.body.inputs, [*early, *rest], op.body.outputs)
    return replace(step, op=replace(op, body=body, ahead=len(early)))
