"""What a framework has on a device in a stage of a job beside what programs say: what `Runtime` asks, read off them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from shardplan.core.accounting import books_of, held_inside
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.nested import Nested, as_nested
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.programs import SAVED, SENT, TOTAL, values_of
from shardplan.strategy.partition.recomputed_layers import has_rows_behind, model_name
from shardplan.strategy.partition.split import KEPT
from shardplan.strategy.partition.tables import LAYER
from shardplan.strategy.runtimes import READS_ROWS, Runtime
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.training import MASTER


class StageWork(NamedTuple):
    """Bytes that a runtime has in a stage: always, of every microbatch in flight, and at work by kind of action.

    `state` is by owner, beside what lives there between programs: less where it has less of it.
    """

    state: Mapping[str, int]
    saved: int
    work: Mapping[str, int]


class HeldStack(NamedTuple):
    """Of a value that lives between programs bytes of an element, and how many layers of it a stage has, or 1."""

    itemsize: int
    layers: int


def held_stacks(job: Job) -> list[dict[str, HeldStack]]:
    """Return by stage what lives there between programs, by name."""
    found: list[dict[str, HeldStack]] = [{} for _ in range(job.stages)]
    for key, part in job.parts.items():
        t, stacked = job.state[key], job.model.dims.get(_plain(part.name), ())[:1] == (LAYER,)
        first, end = part.rows or (0, t.shape[0] if stacked else 1)
        found[part.stage][part.name] = HeldStack(t.itemsize, end - first if stacked else 1)
    return found


def stage_work(
    job: Job, runtime: Runtime, programs: Mapping[str, Program], held: Mapping[str, HeldStack], state: Mapping[str, int]
) -> StageWork:
    """Return what a runtime has in a stage beside the state and the saved values of its programs.

    Args:
        job: Of which it is.
        runtime: Who runs it.
        programs: Those of the stage, by kind.
        held: What lives there between programs; see `held_stacks`.
        state: Its bytes, by name.
    """
    forward, strategy, parameters = programs["F"], job.strategy, job.model.parameters
    mine = [name for name in held if _plain(name) in parameters]
    weight, gradient = _widths(held, mine)
    loops = list(_loops(forward))
    unit = max((sum(_held_elements(job, o) for o in _stacks(job, names)) for _, names in loops), default=0)
    read = job.model.forward or job.model.program
    tables = {s.operands[0] for s in read.steps if s.op.name in READS_ROWS and s.operands[0] in parameters}
    embedding = max((_held_elements(job, name) for name in tables if name in mine), default=0)
    # A loss in one pass, or in parts, has no more at work than its own steps.
    logits = math.prod(loss_logits(job)) if "loss" in forward.outputs and strategy.loss == "whole" else 0
    layers = [(op, names) for op, names in loops if op.carried_count]
    scores = [runtime.score * _scores(op.body) for op, _ in layers]
    masks = [runtime.mask * math.prod(op.body.input_types[0].local_shape(0)) for op, _ in layers]
    # What of it is computed again; of layers behind those nothing.
    hows = ["none" if has_rows_behind(names) else strategy.recompute for _, names in layers]
    outputs = [_attention_bytes(op.body) for op, _ in layers]  # which Megatron keeps, and our programs make again
    kept = [
        op.times * (s * (again == "none") + m * (again != "full") + o * (again == "selective"))
        for (op, _), s, m, o, again in zip(layers, scores, masks, outputs, hows, strict=True)
    ]
    busy = (s * (a != "none") + m * (a == "full") for s, m, a in zip(scores, masks, hows, strict=True))
    beside = max(busy, default=0)
    summed = gradient if strategy.reduce_dtype is None else numpy_dtype(strategy.reduce_dtype).itemsize
    whole = {n: _held_elements(job, n) * held[n].layers for n in mine}
    more = {"parameters": 0, "gradients": 0}
    if runtime.apart and strategy.zero > 0 and gradient != weight:
        more["gradients"] += weight * sum(whole.values())
    if runtime.alone:
        more["parameters"] -= sum(state[n] for n in mine if f"{n}.{MASTER}" in state)
    if runtime.late and keeps_gradients_whole(strategy) and any(TOTAL + n in state for n in mine):
        more["gradients"] += sum(summed * whole[n] - state.get(TOTAL + n, 0) for n in mine)
    sent = sum(forward.types[n].local_bytes() for n in forward.outputs if n.startswith(SENT)) * runtime.ends
    more["saved"] = sent * strategy.microbatches if "B" in programs or "I" in programs else 0
    # Of parameters that stay gathered programs have all but tables that nothing else reads.
    alone = {n for n in tables if SAVED + n not in forward.outputs}
    once = [n for n in mine if job.model.dims[_plain(n)][:1] != (LAYER,) and (strategy.zero != 2 or n in alone)]
    outside = sum(_held_elements(job, n) for n in once) if strategy.fsdp else 0
    cut = strategy.tensor * strategy.sequence_parallel if strategy.tensor > 1 else 0
    carried = max((op.body.input_types[0].local_bytes() for op, _ in layers), default=0) * cut
    found: dict[str, int] = {}
    for kind, program in programs.items():
        found[kind] = int(
            runtime.work_bytes(
                layer=layer_work(job, program) + beside,
                unit=unit if strategy.fsdp or strategy.zero == 3 else 0,
                gathers=strategy.zero != 2,
                outside=outside,
                weight=weight,
                summed=summed,
                logits=0 if kind == "W" else logits,
                cut=strategy.tensor > 1,
                carried=0 if kind == "F" else carried,
                embedding=0 if kind == "F" else embedding,
            )
        )
    return StageWork(more, int(sum(kept)) + sent, found)


def keeps_gradients_whole(strategy: Strategy) -> bool:
    """Say whether stages keep parameters gathered over several microbatches, so that gradients may be whole as long."""
    return strategy.fsdp and strategy.zero == 2 and strategy.pipeline > 1 and strategy.microbatches > 1


def layer_work(job: Job, program: Program) -> int:
    """Return what a layer of a program holds beside what it reads and leaves; of one without layers all of it.

    Gathered parameters and their gradients are not counted, but for that of a head in parts: where they lie is the
    runtime's affair.
    """
    loops = list(_loops(program))
    if not loops:
        books = books_of(program)
        return max(0, books.workspace_bytes - books.input_bytes)
    work: list[int] = []
    for op, operands in loops:
        inside = [name for name, _ in op.body.inputs]
        kept = {n for o, n in zip(operands, inside, strict=True) if o.startswith(KEPT)}  # cotangents that W reads
        parameters = frozenset[str]()
        if not _makes_loss(op):
            parameters = _of_parameters(op, _reads(job, op, operands), {*inside[: op.carried_count], *kept})
        work.append(held_inside(op.body, op.carried_count, op.ahead, parameters))
    return max(work)


def _makes_loss(op: Nested) -> bool:
    """Whether the runs are parts of a loss, or of its gradient, and no layers."""
    return any((one := computing(step.op)) is not None and one.kernel_class == "loss" for step in op.body.steps)


def _loops(program: Program) -> Iterator[tuple[Nested, tuple[str, ...]]]:
    """Yield the ops with layers, and what they read."""
    for step in program.steps:
        if (op := as_nested(step.op)) is not None:
            yield op, step.operands


def _reads(job: Job, op: Nested, operands: Iterable[str]) -> frozenset[str]:
    """Return the inputs of a body that are parameters."""
    names = zip(operands, (name for name, _ in op.body.inputs), strict=True)
    return frozenset(inside for o, inside in names if _plain(o) in job.model.parameters)


def _of_parameters(op: Nested, parameters: frozenset[str], cotangents: set[str]) -> frozenset[str]:
    """Return the values of a body that parameters alone are made to, and those that lead to their gradients alone.

    Of a forward pass also what is saved: a framework keeps it where it was made.
    """
    body = op.body
    inputs = [name for name, _ in body.inputs]
    others = values_of(body, {*inputs} - parameters)
    passing = {*body.outputs[: op.carried_count]}  # what leads to what is carried
    for step in reversed(body.steps):
        if passing & {*step.results}:
            passing |= {*step.operands}
    made = {r for step in body.steps for r in step.results}
    if not op.backwards:
        return frozenset({n for n in made if n not in others} | (made & {*body.outputs[op.carried_count :]}))
    back = values_of(body, cotangents)
    return frozenset(n for n in made if n not in others or (n in back and n not in passing))


def _plain(name: str) -> str:
    """Return the name of a parameter, of which this is a copy, or what the forward pass gathered of it."""
    return model_name(name.removeprefix("saved."))


def _widths(held: Mapping[str, HeldStack], parameters: Iterable[str]) -> tuple[int, int]:
    """Bytes of a parameter, and of its gradient in the sum; the parameter's where nothing is summed."""
    for name in parameters:
        return held[name].itemsize, held.get(TOTAL + name, held[name]).itemsize
    return 0, 0


def _stacks(job: Job, operands: Iterable[str]) -> list[str]:
    """Return the parameters among some values that are stacks of layers'."""
    names = [_plain(o) for o in operands]
    return [o for o in names if o in job.model.parameters and job.model.dims[o][:1] == (LAYER,)]


def _held_elements(job: Job, name: str) -> int:
    """Elements of a parameter, of a stack of a layer's, as a device holds it where it is read."""
    name = _plain(name)
    degrees = job.strategy.axes(job.model)
    line = next((one for one in job.layouts.held if one.matches(name)), None)
    cut = {dim: math.prod(degrees.get(a, 1) for a in axes) for dim, axes in line.dims} if line else {}
    shape = job.model.program.types[name].shape
    return math.prod(-(-n // cut.get(d, 1)) for d, n in zip(job.model.dims[name], shape, strict=True) if d != LAYER)


def loss_logits(job: Job) -> tuple[int, ...]:
    """Return the shape on a device of the largest value that the loss reads; one of no elements where there is none."""
    program = job.model.forward or job.model.program
    steps = [s for s in program.steps if (op := computing(s.op)) is not None and op.kernel_class == "loss"]
    types = [job.settled.type_of(((), o)) for s in steps for o in s.operands if ((), o) in job.settled.sources]
    return max((t.local_shape(0) for t in types), key=math.prod, default=(0,))


def _attention(body: Program) -> list[Step]:
    """Return the steps of a layer that are attention."""
    return [s for s in body.steps if (op := computing(s.op)) is not None and op.kernel_class == "scores"]


def _attention_bytes(body: Program) -> int:
    """Bytes of what a layer's attention makes, on a device."""
    return sum(body.types[step.results[0]].local_bytes() for step in _attention(body))


def _scores(body: Program) -> int:
    """Elements of the scores of a layer's attention, on a device: queries by heads by keys."""
    for step in _attention(body):
        b, s, g, r, _ = body.types[step.operands[0]].local_shape(0)
        return b * s * g * r * body.types[step.operands[1]].local_shape(0)[1]
    return 0
