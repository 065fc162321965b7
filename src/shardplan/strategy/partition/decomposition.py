"""Ops in other forms: composed ones as the steps that they come to, where the whole op cannot be laid as axes serve.

And ops in rounds, which send around what they would need whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardplan.core.dim_names import DimNames, Names, dim_names
from shardplan.core.mesh import Mesh
from shardplan.core.nested import Nested, as_nested
from shardplan.core.op import results_of
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.errors import LayoutError
from shardplan.strategy.partition.choices import Choice, Layer, served
from shardplan.strategy.partition.flow import line_of
from shardplan.strategy.partition.tables import Layouts

Refused = Callable[[Step, Program, Mapping[str, Names]], bool]  # a step of a program, and the names of its factors
DEPTH = 8  # of composed ops inside each other


def decompose_refused(
    program: Program, dims: Mapping[str, tuple[str, ...]], refused: Refused
) -> tuple[Program, set[Step]]:
    """Return a program in which no composed op is refused, and the steps that such ops came to.

    A value inside an op is called after the op's first result, behind which `_` stand where the name is taken.
    """
    inside = set[Step]()
    for _ in range(DEPTH):
        names = dim_names(program, dims)
        found = _once(program, names, refused, inside)
        if found is program:
            break
        program = found
    return program, inside


def refuses(mesh: Mesh, layouts: Layouts, step: Step, program: Program, names: Mapping[str, Names]) -> bool:
    """Say whether an op's own rule refuses what an axis would serve on a mesh; `names` are those of its factors."""
    layer, line = Layer(mesh), line_of(0, step, program.step_types(step)[0], names)
    for _, groups in layouts.serve:
        for factors in served(line, groups)[:1]:
            axes = [axis for axis, mine in layouts.serve if mine == groups]
            if not any(layer.laid(line, c) for f in factors for a in axes for c in Choice().serving(a, f)):
                return True
    return False


def _once(program: Program, names: DimNames, refused: Refused, inside: set[Step]) -> Program:
    steps: list[Step] = []
    for number, step in enumerate(program.steps):
        op = as_nested(step.op)
        if op is not None:
            body = _once(op.body, names.bodies[number], refused, inside)
            steps.append(step if body is op.body else _with_body(step, op, body))
        elif refused(step, program, names.factors[number]) and (parts := _parts(step, program)):
            inside.discard(step)
            inside.update(parts)
            steps += parts
        else:
            steps.append(step)
    return program if tuple(steps) == program.steps else Program(program.inputs, steps, program.outputs)


def in_rounds(program: Program) -> Program:
    """Return a program in which ops are in rounds, where they have such a form; raises `LayoutError` where none has."""
    found = _in_rounds(program)
    if found is program:
        raise LayoutError(
            "context_kind='ring': no op of the model goes round; legal are models with attention of a whole sequence "
            "to itself, and no cache; for others ulysses and gather"
        )
    return found


def _in_rounds(program: Program) -> Program:
    steps: list[Step] = []
    for step in program.steps:
        op, inner = computing(step.op), as_nested(step.op)
        types = program.step_types(step)[0]
        if inner is not None and (body := _in_rounds(inner.body)) is not inner.body:
            step = _with_body(step, inner, body)
        elif op is not None and (other := op.in_rounds(*types)) is not None:
            more = range(len(step.results), len(results_of(other, types)))
            names = (*step.results, *(f"{step.results[0]}.{k}" for k in more))
            step = replace(step, op=other, results=names)
        steps.append(step)
    return program if tuple(steps) == program.steps else Program(program.inputs, steps, program.outputs)


def _with_body(step: Step, op: Nested, body: Program) -> Step:
    return replace(step, op=replace(op, body=body))


def _parts(step: Step, program: Program) -> list[Step]:
    """The steps of an op's decomposition, none where it has none."""
    op = computing(step.op)
    body = op.decomposition(*program.step_types(step)[0]) if op else None
    if body is None:
        return []
    called = {str(k): name for k, name in enumerate(step.operands)}
    inner, after = [r for s in body.steps for r in s.results], step.results[0]
    while any(f"{after}.{r}" in program.types for r in inner):  # of the op that this one was opened from
        after += "_"
    called |= {r: f"{after}.{r}" for r in inner}
    called |= zip(body.results, step.results, strict=True)
    return [
        Step(s.op, tuple(called[o] for o in s.operands), tuple(called[r] for r in s.results), s.stopped)
        for s in body.steps
    ]
