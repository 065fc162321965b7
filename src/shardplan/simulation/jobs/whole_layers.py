"""What a checkpoint computes again beside what a backward pass reads: to the layer's end, as Megatron and DeepSpeed do.

A job's programs stop at the last value that is needed, as non-reentrant checkpoints of torch (FSDP's) do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from shardplan.core.nested import as_nested
from shardplan.core.program import Program
from shardplan.simulation.jobs.framework_ops import as_part, names_read
from shardplan.simulation.jobs.timing import Node, TimedLoop, TimedOp, is_movement
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


def with_kept_tokens(
    nodes: Sequence[Node], program: Program, forward: Sequence[Node], source: Program
) -> tuple[Node, ...]:
    """Return the ops of a backward program that has what its forward program sent to experts.

    Where a job keeps what enters a layer, and would send tokens to their experts once more for the gradients of these,
    frameworks keep the tokens that came (Megatron's dispatchers, torchtitan's experts: inputs of grouped products).
    """
    runs = [(node, _body(source, node)) for node in forward if isinstance(node, TimedLoop)]
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, TimedLoop) and runs and runs[-1][0].times == node.times:
            loop, body = runs.pop()
            again = _sent_again(node, _body(program, node), {
                _key(op, body) for op in (*loop.early, *loop.late) if isinstance(op, TimedOp)
            })  # fmt: skip
            node = replace(
                node, late=tuple(as_part(op) if isinstance(op, TimedOp) and id(op) in again else op for op in node.late)
            )
        found.append(node)
    return tuple(found)


def _sent_again(back: TimedLoop, inside: Program, known: set[Hashable]) -> set[int]:
    """The ids of ops that put into slots of experts, of saved values alone, what the forward pass put there."""
    made = _handed_to(back)
    again: list[TimedOp] = []
    fresh: set[str] = set()  # what is made again
    for op in back.late:
        if not isinstance(op, TimedOp) or not op.reads or not made.union(fresh) >= {*op.reads}:
            continue
        if is_movement(op) and fresh.isdisjoint(op.reads):
            made |= {*op.results}  # what is kept, elsewhere
        elif is_movement(op) or not op.issued or _key(op, inside) in known:
            again.append(op)
            fresh |= {*op.results}
    slots = {r for op in again if _routes(op, inside) for r in op.results}
    for op in again:  # what goes on with what is in slots
        slots |= {*op.results} if not slots.isdisjoint(op.reads) else set()
    gone = {id(op) for op in again if not slots.isdisjoint(op.results)}
    for op in reversed(again):  # what was made for that, and for nothing else
        readers = [other for other in back.late if not {*op.results}.isdisjoint(names_read(other))]
        if readers and all(id(other) in gone for other in readers):
            gone.add(id(op))
    return gone


def _routes(op: TimedOp, inside: Program) -> bool:
    """Say whether a kernel deals values out by numbers that it reads: none of its operands has the shape it makes."""
    step = inside.steps[op.number]
    types = [inside.types[name] for name in step.operands]
    shapes = {inside.types[name].shape for name in step.results}
    return op.issued and any(t.dtype.startswith("i") for t in types) and shapes.isdisjoint(t.shape for t in types)


def _left_out(back: TimedLoop, inside: Program, loop: TimedLoop, body: Program) -> list[TimedOp]:
    """Ops of a layer that its backward pass has not, of these operands or at all, and all that is made of them."""
    there, made = Counter[Hashable](), _handed_to(back)
    for op in (*back.early, *back.late):
        if isinstance(op, TimedOp) and made >= {*op.reads}:  # of no cotangent: others may be alike
            there[_key(op, inside)] += 1
            made |= {*op.results}
    weights = _handed_to(loop)
    gone: set[str] = set()
    found: list[TimedOp] = []
    for op in (*loop.early, *loop.late):
        if not isinstance(op, TimedOp):
            continue
        if weights >= {*op.reads} and (is_movement(op) or not op.issued):
            weights |= {*op.results}  # gathered for what is read of them, however many at once
            continue
        reads = tuple(name for name in op.reads if name in gone)
        if not reads:
            key = _key(op, body)
            there[key] -= 1
            if there[key] >= 0:
                continue
        gone |= {*op.results}
        found.append(replace(op, reads=tuple(map(_again_name, reads)), results=tuple(map(_again_name, op.results))))
    return found


def _handed_to(loop: TimedLoop) -> set[str]:
    """The values of a loop's body that each layer has of its own, or all have alike: all but what goes from one on."""
    return {inner for _, inner in loop.enters} - {inner for inner, _ in loop.carried}


def _again_name(name: str) -> str:
    return f"again.{name}"


def _key(op: TimedOp, body: Program) -> Hashable:
    step = body.steps[op.number]
    return step.op, tuple(body.types[name] for name in step.operands)


def _body(program: Program, loop: TimedLoop) -> Program:
    op = as_nested(program.steps[loop.number].op)
    assert op is not None  # which it was made of
    return op.body
