"""What a checkpoint computes again beside what a backward pass reads: to the layer's end, as Megatron and DeepSpeed do.

A job's programs stop at the last value that is needed, as non-reentrant checkpoints of torch (FSDP's) do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from shardplan.core.nested import as_nested
from shardplan.core.program import Program
from shardplan.simulation.jobs.framework_ops import is_movement
from shardplan.simulation.jobs.timing import Node, TimedLoop, TimedOp
from shardplan.strategy.partition.recomputed_layers import has_rows_behind


def with_whole_layers(
    nodes: Sequence[Node], program: Program, forward: Sequence[Node], source: Program
) -> tuple[Node, ...]:
    """Return the ops of a backward program whose layers run all that they computed, each before what it is for.

    Layers behind those that are computed again run nothing of it.

    Args:
        nodes: Its ops.
        program: Which it is.
        forward: The ops of the forward program.
        source: That program.
    """
    runs = [(node, _body(source, node)) for node in forward if isinstance(node, TimedLoop)]
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, TimedLoop) and runs and runs[-1][0].times == node.times:
            loop, body = runs.pop()
            if not has_rows_behind(source.steps[loop.number].operands):
                node = replace(node, late=(*_left_out(node, _body(program, node), loop, body), *node.late))
        found.append(node)
    return tuple(found)


def _left_out(back: TimedLoop, inside: Program, loop: TimedLoop, body: Program) -> list[TimedOp]:
    """Ops of a layer that its backward pass has not, of these operands or at all, and all that is made of them."""
    there = Counter(_key(op, inside) for op in (*back.early, *back.late) if isinstance(op, TimedOp))
    gone: set[str] = set()
    found: list[TimedOp] = []
    for op in (*loop.early, *loop.late):
        if not isinstance(op, TimedOp):
            continue
        reads = tuple(name for name in op.reads if name in gone)
        if not reads:
            key = _key(op, body)
            there[key] -= 1
            # What only moves is gathered anew in its own way, and is no part of what is computed again.
            if there[key] >= 0 or is_movement(op):
                continue
        gone |= {*op.results}
        found.append(replace(op, reads=tuple(map(_again_name, reads)), results=tuple(map(_again_name, op.results))))
    return found


def _again_name(name: str) -> str:
    return f"again.{name}"


def _key(op: TimedOp, body: Program) -> Hashable:
    step = body.steps[op.number]
    return step.op, tuple(body.types[name] for name in step.operands)


def _body(program: Program, loop: TimedLoop) -> Program:
    op = as_nested(program.steps[loop.number].op)
    assert op is not None  # which it was made of
    return op.body
