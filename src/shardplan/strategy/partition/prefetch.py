"""A pass on programs: what a layer gathers of its parameters, it gathers a layer early."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.ops.collective import moving
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import LayoutError
from shardplan.strategy.partition.programs import StageProgram


def prefetched(program: Program, stacks: Collection[str]) -> Program:
    """Return a program whose repeats move the rows of some of its inputs one run ahead.

    Values and bytes are the same; the last run moves nothing ahead. Two layers of what is moved are there at once.
    """
    return Program(program.inputs, [_prefetched(step, stacks) for step in program.steps], program.outputs)


def early(
    written: Mapping[tuple[int, str], StageProgram], stacks: Collection[str], *, asked: bool
) -> dict[tuple[int, str], StageProgram]:
    """Return programs of stages whose layers gather ahead; those that stages share they share.

    Raises `LayoutError` where no layer does, and it was `asked` for.
    """
    found = {id(one): one._replace(program=prefetched(one.program, stacks)) for one in written.values()}
    ops = (as_nested(step.op) for one in found.values() for step in one.program.steps)
    if asked and not any(op is not None and op.ahead for op in ops):
        raise LayoutError("prefetch: no layer gathers parameters; legal is it where they are dealt out, as by fsdp")
    return {key: found[id(one)] for key, one in written.items()}


def _prefetched(step: Step, stacks: Collection[str]) -> Step:
    op: Any = as_nested(step.op)
    if op is None or op.at_once:
        return step
    names = [name for name, _ in op.body.inputs]
    rows = range(len(names) - op.cut, len(names))
    there = {names[k] for k in rows if step.operands[k] in stacks}
    first: list[Step] = []
    for inner in op.body.steps:
        if _moves(inner.op) and there >= {*inner.operands}:
            first.append(inner)
            there |= {*inner.results}
    rest = [inner for inner in op.body.steps if inner not in first]
    body = Program(op.body.inputs, [*first, *rest], op.body.outputs)
    return replace(step, op=replace(op, body=body, ahead=len(first)))


def _moves(op: Op) -> bool:
    """Say whether an op moves what it reads, one value or several at once."""
    several = as_nested(op)
    return moving(op) is not None or (several is not None and several.at_once)
