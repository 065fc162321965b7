"""The program of one microbatch: forward, and backward where the model trains; cut into stages by its layers.

Composed ops that an axis cannot serve are opened before gradients are taken, so that sums and maxima are kept and not
asked for again. The loss is a microbatch's part of the step's mean: over the targets that count, whose number in the
whole step is an input, or over all sequences. A parameter that several stages read is an input
of its own on each: its copies have gradients of their own, which the optimizer's program adds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardplan.core.dim_names import dim_names
from shardplan.core.gradients import Keep, Origin
from shardplan.core.loss_weights import weight_loss_rows
from shardplan.core.nested import Nested, as_nested
from shardplan.core.ops import Elementwise
from shardplan.core.ops.composed import differs
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.target_counts import COUNT, take_count_as_input
from shardplan.errors import LayoutError
from shardplan.strategy.model import Model
from shardplan.strategy.partition.balance import balanced
from shardplan.strategy.partition.decomposition import Refused, decompose_refused, in_rounds
from shardplan.strategy.partition.flow import LineBlock, flow
from shardplan.strategy.partition.loss import with_loss
from shardplan.strategy.partition.recomputed_layers import COPY, Rows, SplitLayers, check_names, split_layers
from shardplan.strategy.training import SCALE, rename_values, training_program

WEIGHT = "weight"  # the input that says what every sequence counts
Recompute = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageCuts:
    """Of the steps of a forward program the stage of each, None where all that read it make it; of loops the rows.

    `starts` are the first layers of the stages. A step is on the stage where the loop before it ends, and what adds to
    the cotangents of a loop, with it, before it. Where loops were split (`recomputed_layers`), `stacks` has what their
    rows are in the model's stacks, and `behind` by loop the one that follows it in every stage.
    """

    stages: tuple[int | None, ...]
    rows: Mapping[int, tuple[Rows, ...]]
    starts: tuple[int, ...]
    stacks: Mapping[int, tuple[Rows, ...]] = field(default_factory=dict[int, tuple[Rows, ...]])
    behind: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The lines of a microbatch, of which the first `count` are forward.

    `gradients` has the value that is an input's gradient, `copies` the parameter that an input copies, `dims` the names
    of every input's dims; `behind` has the stack of which an input has the rows that are not computed again.
    """

    block: LineBlock
    count: int
    cuts: StageCuts
    origins: tuple[Origin | None, ...]
    gradients: Mapping[str, str]
    copies: Mapping[str, str]
    dims: Mapping[str, tuple[str, ...]]
    behind: Mapping[str, str] = field(default_factory=dict[str, str])


def microbatch(
    model: Model,
    stages: int,
    count: int,
    recompute: Recompute,
    refused: Refused,
    *,
    again: int | None = None,
    even: bool = True,
    rounds: bool = False,
    starts: Sequence[int] | None = None,
    loss_chunks: int | None = None,
) -> Microbatch:
    """Return the program of one of `count` microbatches, cut into stages, which begin with the layers `starts`.

    Of a stage the first `again` layers are computed again, by default all. Where microbatches are not `even`, an input
    `weight` says what every sequence counts in a loss over all of them. With
    `rounds` ops are in rounds where they can be; with `loss_chunks` the loss is in one pass, over so many parts.
    """
    program = model.forward or model.program
    program = in_rounds(program) if rounds else program
    dims = {name: model.dims[name] for name, _ in program.inputs}
    check_names([*dims, *program.outputs])
    program = program if loss_chunks is None else with_loss(program, dims, loss_chunks)
    told = take_count_as_input(program)
    if told is not program:
        program, dims[COUNT] = told, ()
    elif not even:
        program = _weighted(program, dims)
        dims[WEIGHT] = ("batch",)
    program, inside = decompose_refused(program, dims, refused)
    cuts = cut(program, stages, starts)
    kept, behind = frozenset[int](), dict[str, str]()
    if again is not None:
        halves = split_layers(program, cuts.rows, again)
        inside = {*inside, *_like(halves, program, inside)}
        program, kept, behind = halves.program, halves.kept, dict(halves.inputs)
        where = tuple(cuts.stages[number] for number in halves.numbers)
        cuts = StageCuts(where, halves.loops, cuts.starts, halves.rows, halves.behind)
        dims = {name: dims[behind.get(name, name)] for name, _ in program.inputs}
    program, copies = _with_copies(program, cuts, model.parameters)
    dims |= {copy: dims[name] for copy, name in copies.items()}
    if not model.fields["training"]:
        names = dim_names(program, dims)
        return Microbatch(flow(program, names), len(program.steps), cuts, (), {}, copies, dims)
    if count > 1 and even and COUNT not in dims:
        program = _scaled(program, count)
        cuts = replace(cuts, stages=(*cuts.stages, stages - 1))
    wanted = {name: model.parameters[name] for name in model.gradients if name in dims}
    apart = (*copies.items(), *behind.items())
    wanted |= {name: model.parameters[of] for name, of in apart if of in model.gradients}
    scale = {SCALE: model.fields.get(SCALE, 0.0)}
    made = training_program(program, wanted, settings=scale, keep=_keep(program, recompute, inside, kept))
    dims |= {name: () for name, _ in made.program.inputs if name not in dims}
    names = {g: f"new.{g}" for g in made.gradients.values()}  # `gradient.w` is what they are added to
    found = {w: names[g] for w, g in made.gradients.items()}
    whole = rename_values(made.program, names)
    block = flow(whole, dim_names(whole, dims, made.origins))
    return Microbatch(block, len(program.steps), cuts, made.origins, found, copies, dims, behind)


def cut(program: Program, stages: int, starts: Sequence[int] | None = None) -> StageCuts:
    """Return which stage makes what: by default so that the one of the most operations has as few as can be.

    A stage has one layer at least. Raises `LayoutError` for more stages than layers, and for others than `starts` say.
    """
    if stages == 1 and starts is None:
        return StageCuts((0,) * len(program.steps), {k: ((0, op.times),) for k, op in _loops(program)}, (0,))
    loops = _layers(program)
    weights = [w for _, op in loops for w in [_flops(op.body)] * op.times]
    if len(weights) < stages:
        raise LayoutError(f"{stages} stages of a model of {len(weights)} layers; legal are 1 to {len(weights)}")
    if starts is not None and (len(starts) != stages or starts[-1] >= len(weights)):
        raise LayoutError(
            f"cuts before the layers {list(starts[1:])} of a model of {len(weights)}, for {stages} stages; legal are "
            f"{stages - 1} of the layers 1 to {len(weights) - 1}"
        )
    first, last = (loops[0][0], loops[-1][0]) if loops else (0, 0)
    ends = [sum(_step_flops(program, k) for k in part) for part in (range(first), range(last + 1, len(program.steps)))]
    weights[0] += ends[0]
    weights[-1] += ends[1]
    starts = balanced(weights, stages) if starts is None else tuple(starts)
    rows: dict[int, tuple[Rows, ...]] = {}
    begin = 0
    for k, op in loops:
        bounds = [min(max(s - begin, 0), op.times) for s in (*starts, len(weights))]
        rows[k] = tuple(zip(bounds, bounds[1:], strict=False))
        begin += op.times
    rows |= {k: (*((0, 0),) * (stages - 1), (0, op.times)) for k, op in _loops(program) if k not in rows}
    where: list[int | None] = []
    for k, step in enumerate(program.steps):
        types = program.step_types(step)
        light = not any(differs(t) for side in types for t in side)
        ends_at = [max(s for s, (a, b) in enumerate(rows[j]) if a < b) for j, op in loops if j < k and op.times]
        where.append(None if light else ends_at[-1] if ends_at else 0)
    return StageCuts(tuple(where), rows, tuple(starts))


def _like(halves: SplitLayers, program: Program, inside: set[Step]) -> Iterator[Step]:
    """Yield the steps of loops that are kept which stand for some of the program's."""
    for k in halves.kept:
        pairs = zip(*(dict(_loops(p))[n].body.steps for p, n in ((program, halves.numbers[k]), (halves.program, k))),
                    strict=True)  # fmt: skip
        yield from (new for old, new in pairs if old in inside)


def _loops(program: Program) -> list[tuple[int, Nested]]:
    return [(k, op) for k, step in enumerate(program.steps) if (op := as_nested(step.op)) is not None]


def _layers(program: Program) -> list[tuple[int, Nested]]:
    """Those that hand on a value: other loops are parts of one value, one after another."""
    return [(k, op) for k, op in _loops(program) if op.carried_count]


def _flops(program: Program) -> float:
    return sum(_step_flops(program, k) for k in range(len(program.steps)))


def _step_flops(program: Program, number: int) -> float:
    step = program.steps[number]
    op, inner = computing(step.op), as_nested(step.op)
    if inner is not None:
        return inner.times * _flops(inner.body)
    return op.flops(*program.step_types(step)[0]) if op else 0.0


def _with_copies(program: Program, cuts: StageCuts, parameters: Mapping[str, object]) -> tuple[Program, dict[str, str]]:
    """A program in which a parameter that is read on several stages is an input for each; and what copies what."""
    readers: dict[str, set[int]] = {}
    for step, stage in zip(program.steps, cuts.stages, strict=True):
        if stage is None or as_nested(step.op) is not None:
            continue
        for o in step.operands:
            if o in parameters:
                readers.setdefault(o, set()).add(stage)
    copies = {(o, s): f"{o}{COPY}{s}" for o, found in readers.items() for s in sorted(found)[1:]}
    if not copies:
        return program, {}
    types = program.types
    inputs = [*program.inputs, *((copy, types[o]) for (o, _), copy in copies.items())]
    steps = [
        step if stage is None else replace(step, operands=tuple(copies.get((o, stage), o) for o in step.operands))
        for step, stage in zip(program.steps, cuts.stages, strict=True)
    ]
    return Program(inputs, steps, program.outputs), {copy: o for (o, _), copy in copies.items()}


def _weighted(program: Program, dims: Mapping[str, tuple[str, ...]]) -> Program:
    """A program whose sequences have weights in its loss."""
    mean = next(step for step in program.steps if "loss" in step.results).operands[0]
    names = dim_names(program, dims).values[mean]
    if ("batch",) not in names:
        raise LayoutError(f"microbatches that are not even, of a model whose loss is no mean over a batch: {names}")
    return weight_loss_rows(program, "loss", names.index(("batch",)), WEIGHT)


def _scaled(program: Program, count: int) -> Program:
    """A program whose loss is its part of the mean over so many microbatches."""
    inner = rename_values(program, {"loss": "loss.whole"})
    step = Step(Elementwise(f"a / {count}"), ("loss.whole",), ("loss",))
    outputs = tuple("loss" if o == "loss.whole" else o for o in inner.outputs)
    return Program(inner.inputs, (*inner.steps, step), outputs)


def _keep(program: Program, recompute: Recompute, inside: set[Step], kept: Collection[int]) -> Keep:
    """Which results are kept for the backward pass: of opened ops those that are smaller than what they are made of.

    Of steps in bodies `full` keeps none, `selective` all but attention's, `selective_op` attention and every second
    product (the first, the third), names all but those of ops of these names; but loops that are `kept`. What is as
    large as the parameter that it is made of is not kept: each microbatch would have it, and the parameter is there. Of
    a loss in parts nothing large is kept, nor the head as it is gathered for it.
    """
    every = [op.body for _, op in _layers(program)]
    bodies = [op.body for k, op in _layers(program) if k not in kept]
    parts = [(k, op.body) for k, op in _loops(program) if not op.carried_count]
    steps = {step for body in bodies for step in body.steps}
    small = {
        step
        for one in (program, *every, *(body for _, body in parts))
        for step in one.steps
        if step in inside and _size(one, step.results) < _size(one, step.operands)
    }
    names = ("attention",) if recompute == "selective" else () if isinstance(recompute, str) else recompute
    again = {step for step in steps if recompute == "full" or step.op.name in names}
    if recompute == "selective_op":
        again = steps - {step for body in bodies for step in _every_second(body)}
    if recompute != "none" and (not again or not {*names} <= {step.op.name for step in again}):
        legal = ", ".join(sorted({step.op.name for step in steps})) or "none"
        raise LayoutError(f"recompute={recompute!r}: not all of it is in a layer; legal are ops of layers: {legal}")
    for _, op in _layers(program):
        held = {name: op.body.types[name].shape for name, _ in op.body.inputs[len(op.body.inputs) - op.cut :]}
        again |= {s for s in op.body.steps if op.body.types[s.results[0]].shape in {held.get(o) for o in s.operands}}
    for k, body in parts:
        heads = {*program.steps[k].operands}
        again |= {step for step in program.steps if heads & {*step.results} and step.op.view}
        again |= {*body.steps} - small
    return lambda step, moved: not moved and step not in again and (step not in inside or step in small)


def _every_second(body: Program) -> set[Step]:
    """Return attention and every second product of a layer (torchtitan, `per_op_sac_force_recompute`'s counter)."""
    kinds = [(step, op.kernel_class) for step in body.steps if (op := computing(step.op)) is not None]
    products = [step for step, kind in kinds if kind == "product"]
    return {*products[::2], *(step for step, kind in kinds if kind == "scores")}


def _size(program: Program, names: Sequence[str]) -> int:
    return max((math.prod(program.types[n].shape) for n in names), default=0)
