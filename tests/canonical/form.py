"""`canonical`: one program for all that are written differently and compute the same in the same way.

The form, level by level, bodies of `repeat` first:

- What nobody reads is not there, and nothing is computed twice; what is the same in every run of a body is made
  before it.
- An expression is one step as long as one other expression reads it, and in normal form (`normal_expression`).
- Transpositions are parts of the products before or behind them; a reshape of a reshape is one; letters and dims are
  named by where they stand. A product has its given operands last; an input that one product alone reads has its dims
  in the order of that product's letters.
- What hangs on no input is an input, whose elements are said apart (`Canonical.constants`), as one source has a table
  where another one has its formula; a constant stays one.
- Ids of rows count from the first row (a wrap of negative ones is dropped, so ids are at least 0), and rows taken one
  after another are a part of the table.
- Steps stand in the order in which results ask for them, operands of sums and products by what they are, inputs where
  they are first read. Values are called by number.

What stays: a product of parameters stored as one is one product with its parts behind it, and which given value is
which input is said apart (`Canonical.inputs`), as names mean nothing. Values are equal up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from tests.canonical.order import Taken, ordered
from tests.canonical.rules import Rewriting, fused

from shardplan.core.attention_pattern import AttentionRule
from shardplan.core.composite_patterns import MOST_MASK, close_composites
from shardplan.core.nested import as_nested
from shardplan.core.ops.bodies import Repeat
from shardplan.core.ops.compute import computing
from shardplan.core.ops.indexing import Constant
from shardplan.core.ops.opaque import Opaque
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.core.step import Step
from shardplan.errors import TypingError

_MOST_ROUNDS = 16


class Canonical(NamedTuple):
    """A program in canonical form, of each input which given one it is, and the elements of those known."""

    program: Program
    inputs: Mapping[str, Taken]
    constants: Mapping[str, np.ndarray]

    def values(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what all inputs are, from the values of those of the program that it was made from."""
        return {name: given[t.name].transpose(t.dims) for name, t in self.inputs.items()} | dict(self.constants)


def canonical(program: Program, constants: Mapping[str, np.ndarray] | None = None) -> Canonical:
    """Return the canonical form of a program on one device, of whose inputs some may be `constants`.

    Raises `TypingError` for one on more devices, whose layouts are no part of the form.

    >>> texts = ["a * 2 + b", "b - -2.0 * a"]
    >>> from shardplan.core.ops import Elementwise
    >>> from shardplan.core.tensor import TensorType
    >>> t = {n: TensorType.parse("f32[4, 8]", "x=1") for n in "xy"}
    >>> programs = [Program(t, [Step(Elementwise(e), ("x", "y"), ("z",))], ("z",)) for e in texts]
    >>> len({str(canonical(p).program) for p in programs})
    1
    """
    if len(program.devices) > 1:
        raise TypingError(f"canonical: a program on {len(program.devices)} devices; legal is one")
    inputs = {name: Taken(name, tuple(range(t.ndim))) for name, t in program.inputs}
    known = dict(constants or {})
    text = ""
    for _ in range(_MOST_ROUNDS):
        simple, values = _folded(_simplified(program), known)
        program, order = ordered(fused(simple))
        taken = [inputs.get(t.name, Taken("", ())) for t in order]
        known = {new: values[t.name].transpose(t.dims) for (new, _), t in zip(program.inputs, order, strict=True)
                 if t.name in values}  # fmt: skip
        inputs = {new: old.then(t.dims) for (new, _), old, t in zip(program.inputs, taken, order, strict=True)
                  if new not in known}  # fmt: skip
        if text == (text := str(program)):
            break
    return Canonical(program, inputs, known)


def _folded(program: Program, constants: Mapping[str, np.ndarray]) -> tuple[Program, dict[str, np.ndarray]]:
    """Return a program whose values that hang on no input are inputs, and the elements of these and of `constants`."""
    known = {*constants}
    for step in program.steps:
        if computing(step.op) is not None and {*step.operands} <= known and not isinstance(step.op, Constant | Opaque):
            known |= {*step.results}
    rest = [step for step in program.steps if not {*step.results} <= known]
    read = dict.fromkeys([o for step in rest for o in step.operands] + [*program.outputs])
    wanted = [o for o in read if o in known and o not in constants]
    small = [o for o in wanted if math.prod(program.types[o].shape) <= MOST_MASK]
    if not small:
        return program, dict(constants)
    given = [(n, t) for n, t in program.inputs if n in constants]
    part = _live(Program(given, [s for s in program.steps if {*s.results} <= known], small))
    arrays = dict(zip(small, run_reference(part, [[constants[n]] for n, _ in given]), strict=True))
    made = {n: shards[0] for n, shards in arrays.items()}
    same = {n: x.flat[0].item() for n, x in made.items()
            if x.dtype.kind in "biuf" and (x == x.flat[0]).all() and np.isfinite(x.flat[0])}  # fmt: skip
    types = program.types
    fill = [Step(Constant(v, types[n].dtype, types[n].shape, types[n].layout, types[n].mesh), (), (n,))
            for n, v in same.items()]  # fmt: skip
    left = [step for step in program.steps if not {*step.results} & made.keys()]
    tables = {n: x for n, x in made.items() if n not in same}
    inputs = [*program.inputs, *((n, types[n]) for n in tables)]
    return _live(Program(inputs, [*fill, *left], program.outputs)), {**constants, **tables}


def _simplified(program: Program) -> Program:
    """A program by all rules, with an operation a step and in no order."""
    level = _hoisted(Program(program.inputs, [_inside(step) for step in program.steps], program.outputs))
    level = _live(close_composites(level, AttentionRule()))
    rules = Rewriting(level)
    outputs = [rules.names[o] for o in level.outputs]
    return _live(Program(level.inputs, rules.builder.steps, outputs))


def _live(program: Program) -> Program:
    """A program without what no output needs."""
    needed, steps = {*program.outputs}, list[Step]()
    for step in reversed(program.steps):
        if needed & {*step.results}:
            steps.append(step)
            needed |= {*step.operands}
    return Program(program.inputs, steps[::-1], program.outputs)


def _inside(step: Step) -> Step:
    """A step with its body by all rules; a value that enters the body twice enters once."""
    op = as_nested(step.op)
    if not isinstance(op, Repeat):
        return step
    body = op.body
    first: dict[tuple[str, bool], str] = {}
    same: dict[str, str] = {}
    kept = list[int]()
    for k, (name, _) in enumerate(body.inputs):
        key = (step.operands[k], k >= len(body.inputs) - op.sliced)
        if k >= op.carried and key in first:
            same[name] = first[key]
            continue
        kept.append(k)
        if k >= op.carried:
            first[key] = name
    steps = [Step(s.op, tuple(same.get(o, o) for o in s.operands), s.results, s.stopped) for s in body.steps]
    outputs = tuple(same.get(o, o) for o in body.outputs)
    body = fused(_simplified(Program([body.inputs[k] for k in kept], steps, outputs)))
    sliced = sum(k >= len(op.body.inputs) - op.sliced for k in kept)
    new = Repeat(op.n, body, op.carried, sliced, op.reverse)
    return Step(new, tuple(step.operands[k] for k in kept), step.results, step.stopped)


def _hoisted(program: Program) -> Program:
    """A program with what is the same in every run of a body made before it."""
    taken = {*program.types}
    steps = list[Step]()
    for step in program.steps:
        op = as_nested(step.op)
        if not isinstance(op, Repeat) or step.stopped:
            steps.append(step)
            continue
        body, fixed = op.body, len(op.body.inputs) - op.sliced
        outside = {body.inputs[k][0]: step.operands[k] for k in range(op.carried, fixed)}
        inner, more = list[Step](), list[str]()
        for s in body.steps:
            if not {*s.operands} <= outside.keys() or s.stopped:
                inner.append(s)
                continue
            for r in s.results:
                outside[r] = _free(taken)
                more.append(r)
            steps.append(Step(s.op, tuple(outside[o] for o in s.operands), tuple(outside[r] for r in s.results)))
        read = {o for s in inner for o in s.operands} | {*body.outputs}
        more = [r for r in more if r in read]
        given = [*body.inputs[:fixed], *((r, body.types[r]) for r in more), *body.inputs[fixed:]]
        operands = (*step.operands[:fixed], *(outside[r] for r in more), *step.operands[fixed:])
        new = Repeat(op.n, Program(given, inner, body.outputs), op.carried, op.sliced, op.reverse)
        steps.append(Step(new, operands, step.results))
    return Program(program.inputs, steps, program.outputs)


def _free(taken: set[str]) -> str:
    k = len(taken)
    while (name := f"before.{k}") in taken:
        k += 1
    taken.add(name)
    return name
