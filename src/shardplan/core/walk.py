"""The walk over a program: its steps with their types and what each is the last to use, and the bodies inside them.

What reads a program for its meaning stands on these few: `walk` goes through one program; `leaves` finds every op that
holds no body, with how often it runs; `turns` plays them in the order of a run; `open_together` puts the moves of a
`together` in its place, one after another; `step_patterns` says what every step does to whom, and what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardplan.core.nested import Nested, as_nested
from shardplan.core.op import Op
from shardplan.core.ops.general import Send
from shardplan.core.pattern import StepPattern, taking_part
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType, same


class Visit(NamedTuple):
    """A step as the walk meets it."""

    number: int
    step: Step
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    freed: set[str]  # the values that no later step or output reads: operands, and results that are never read

    @property
    def nested_op(self) -> Nested | None:
        """The op, where it has a body."""
        return as_nested(self.step.op)

    @property
    def relabels(self) -> bool:
        """Whether it gives values another type and leaves every byte where it is, its operands not used again."""
        return (
            isinstance(self.step.op, Send)
            and set(self.step.operands) <= self.freed
            and not set(self.step.results) & self.freed
            and all(same(t, u) for t, u in zip(self.operands, self.results, strict=True))
        )


def walk(program: Program) -> Iterator[Visit]:
    """Yield the steps of a program in order; bodies are not entered."""
    for number, (step, freed) in enumerate(zip(program.steps, program.last_uses(), strict=True)):
        yield Visit(number, step, *program.step_types(step), freed)


def programs(program: Program) -> Iterator[Program]:
    """Yield a program and all bodies inside it."""
    yield program
    for step in program.steps:
        if isinstance(step.op, Nested):
            yield from programs(step.op.body)


class LeafOp(NamedTuple):
    """An op without a body, and how often it runs."""

    times: int
    op: Op
    operands: tuple[TensorType, ...]


def leaves(op: Op, operands: tuple[TensorType, ...]) -> Iterator[LeafOp]:
    """Yield the ops without a body that an op on operands of these types comes down to: itself, or those inside it."""
    if not isinstance(op, Nested):
        yield LeafOp(1, op, operands)
        return
    for step in op.body.steps:
        for leaf in leaves(step.op, op.body.step_types(step)[0]):
            yield leaf._replace(times=op.times * leaf.times)


def program_leaves(program: Program) -> Iterator[LeafOp]:
    """Yield the ops without a body that a program comes down to."""
    for step in program.steps:
        yield from leaves(step.op, program.step_types(step)[0])


def turns(program: Program) -> Iterator[tuple[int, Visit]]:
    """Yield every step as often as it runs, in order, with the number of the program's step it is in.

    A body that runs again and again is opened, with the steps that are run ahead before the run that they precede; one
    that runs at once is one step.
    """
    for visit in walk(program):
        if visit.nested_op is None or visit.nested_op.at_once:
            yield visit.number, visit
            continue
        every = [
            (number < visit.nested_op.ahead, (visit.number, inner)) for number, inner in turns(visit.nested_op.body)
        ]
        early, late = ([one for ahead, one in every if ahead is side] for side in (True, False))
        for left in range(visit.nested_op.times, -1, -1):
            yield from early if left else ()
            yield from late if left < visit.nested_op.times else ()


def posted_steps(step: Step) -> Sequence[Step]:
    """Return the moves of a step whose body runs at once, under the names of the step's values; else the step."""
    op = step.op
    if not isinstance(op, Nested) or not op.at_once:
        return (step,)
    names = dict(zip((name for name, _ in op.body.inputs), step.operands, strict=True))
    names |= zip(op.body.outputs, step.results, strict=True)
    return [Step(s.op, tuple(names[o] for o in s.operands), tuple(names[r] for r in s.results)) for s in op.body.steps]


def open_together(program: Program) -> tuple[Program, tuple[int, ...]]:
    """Return a program with the moves of every `together` as steps of its own, and for each step the number it had."""
    found = [(number, inner) for number, step in enumerate(program.steps) for inner in posted_steps(step)]
    return Program(program.inputs, (s for _, s in found), program.outputs), tuple(number for number, _ in found)


def step_patterns(program: Program) -> tuple[StepPattern, ...]:
    """Return the pattern of every step, who takes part, and the steps whose results it reads; equal steps share one."""
    known: dict[tuple[Op, tuple[TensorType, ...]], StepPattern] = {}
    made: dict[str, int] = {}
    found: list[StepPattern] = []
    for number, step in enumerate(program.steps):
        operands, results = program.step_types(step)
        one = known.get((step.op, operands))
        if one is None:
            pattern = step.op.pattern(*operands)
            one = known[step.op, operands] = StepPattern(pattern, taking_part(pattern, step.op.devices(*results)))
        found.append(replace(one, reads=tuple(sorted({made[o] for o in step.operands if o in made}))))
        made |= dict.fromkeys(step.results, number)
    return tuple(found)
