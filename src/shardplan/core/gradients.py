"""`gradients`: from a program and one of its values to a program that also makes its gradients.

What the backward steps read of the forward ones is *kept*, or computed again by a copy of the steps that made it. By
default a value that a movement only laid out anew is not kept: the movement is done again. The gradient of a `repeat`
is one in reverse: what is kept are stacked results of the forward one, cotangents of invariants are carried sums, those
of sliced operands are stacked. For the types of cotangents see `core.ops.composed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardplan.core.layout import Layout
from shardplan.core.nested import row_type, stacked_type
from shardplan.core.ops.bodies import Repeat
from shardplan.core.ops.collective import moving
from shardplan.core.ops.composed import Reverse, differs, needing, plus, zeros
from shardplan.core.ops.indexing import Constant
from shardplan.core.ops.reduction import ToPartial
from shardplan.core.program import Program
from shardplan.core.program_builder import Cotangents, ProgramBuilder
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

Keep = Callable[[Step, bool], bool]  # of a forward step, and whether it only lays a value out anew


def keep_computed(step: Step, moved: bool) -> bool:
    """Keep all that no movement only laid out anew."""
    return not moved


class Origin(NamedTuple):
    """Of a backward step: the number of the forward step that it is of.

    `inner` are the origins of the steps of its body, if it has one. `alike` has for each result the forward value that
    it is the cotangent, or a copy, of; None where it is neither.
    """

    forward: int | None
    inner: tuple[Origin, ...] = ()
    alike: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Gradients:
    """A program with its gradients: its outputs are the forward ones, then one gradient for each value asked for.

    `origins` has an entry a step: None for a forward one.
    """

    program: Program
    origins: tuple[Origin | None, ...]


def gradients(
    program: Program, loss: str, wanted: Sequence[str], keep: Keep = keep_computed, scale: float | str = 1.0
) -> Gradients:
    """Return the program with the gradients of `loss`, a scalar, in the values `wanted`.

    A gradient has the layout of its value's dims, and may be partial over axes that the value does not use. `keep` says
    of which forward steps the results are kept; gradients are those of the loss times `scale`, a number or a scalar
    input of the loss's dtype. Raises `TypingError` for an op that has no gradient, and for another scale.

    >>> from shardplan.core.ops import Einsum
    >>> t = TensorType.parse("f32[8@x]", "x=2")
    >>> p = Program({"a": t, "b": t}, [Step(Einsum("i,i->"), ("a", "b"), ("loss",))], ("loss",))
    >>> found = gradients(p, "loss", ["b"]).program
    >>> print(*found.output_types, found.steps[-1].op)
    f32[]{+x} f32[8@x] Einsum(spec=',i->i')
    """
    for name in (loss, *wanted):
        if name not in program.types or not differs(program.types[name]):
            raise TypingError(f"gradients: %{name} is no value of the program, or no real float; legal are such values")
    t = program.types[loss]
    if t.shape or t.layout.root or t.layout.reduction not in (None, "sum"):
        raise TypingError(f"gradients: the loss %{loss} is {t}; legal is a scalar, whole or a sum")
    builder = ProgramBuilder(program.types)
    if isinstance(scale, str) and builder.types.get(scale) != TensorType(t.dtype, (), (), t.mesh):
        raise TypingError(f"gradients: the scale %{scale} is {builder.types.get(scale)}; legal is a whole {t.dtype}[]")
    level = _Level(builder, program, keep)
    cotangents = {loss: scale if isinstance(scale, str) else builder(Constant(scale, t.dtype, (), Layout(()), t.mesh))}
    level.fill_cotangents(program.steps, cotangents, needing(program.steps, program.types, wanted))
    builder.origin = None
    found = [
        builder.reduce_axes(cotangents[n], program.types[n].layout.used_axes)
        if n in cotangents
        else zeros(builder, program.types[n], n)
        for n in wanted
    ]
    live = builder.live(found)
    steps = [*level.forward, *(builder.steps[k] for k in live)]
    made = Program(program.inputs, steps, (*program.outputs, *found))
    return Gradients(made, (*(None for _ in level.forward), *level.origins(live)))


class _Level(Reverse):
    """The backward walk over a program.

    `forward` are its steps, in which a repeat whose gradient was written also stacks what is kept of its runs; `bodies`
    has, by the first result of a repeat in reverse, the origins inside it.
    """

    def __init__(self, builder: ProgramBuilder, program: Program, keep: Keep) -> None:
        super().__init__(builder, dict(program.types), self.read)
        self.keep = keep
        self.forward = list(program.steps)
        self.makers = {r: k for k, step in enumerate(program.steps) for r in step.results}
        self.known: dict[str, str] = {}
        self.bodies: dict[str, tuple[Origin, ...]] = {}

    def saved_name(self, name: str) -> str:
        """Return what a value that is kept, or came from outside, is called in the builder."""
        self.builder.types[name] = self.types[name]
        return name

    def read(self, name: str) -> str:
        """Return what a forward value is called in the builder, where it is made again unless it is kept."""
        if name not in self.known:
            number = self.makers.get(name)
            if number is None or self._is_saved(self.forward[number]):
                self.known[name] = self.saved_name(name)
            else:
                step, before = self.forward[number], self.builder.origin
                operands = [self.read(o) for o in step.operands]
                self.builder.origin = number
                copies = self.builder.write_step(step.op, *operands)
                self.known.update(zip(step.results, copies, strict=True))
                self.builder.alike.update(zip(copies, step.results, strict=True))
                self.builder.origin = before
        return self.known[name]

    def _is_saved(self, step: Step) -> bool:
        """What has no operands is made again."""
        types = [self.types[n] for n in (*step.operands, *step.results)]
        moved = moving(step.op) is not None and not any(t.layout.partial for t in types)
        return bool(step.operands) and self.keep(step, moved)

    def origins(self, steps: Iterable[int]) -> tuple[Origin, ...]:
        """Return the origins of steps of the builder, given by number."""
        builder, found = self.builder, list[Origin]()
        for k in steps:
            results = builder.steps[k].results
            alike = tuple(map(builder.alike.get, results))
            found.append(Origin(builder.origins[k], self.bodies.get(results[0], ()), alike))
        return tuple(found)

    def step_gradient(self, number: int, step: Step, came: Cotangents, wants: Sequence[bool]) -> Cotangents:
        """Of a repeat one in reverse."""
        if isinstance(step.op, Repeat):
            return self._repeat(number, step.op, came, wants) if step.op.n else came
        return super().step_gradient(number, step, came, wants)

    def _repeat(self, number: int, op: Repeat, came: Cotangents, wants: Sequence[bool]) -> Cotangents:
        builder, step, outputs = self.builder, self.forward[number], op.body.outputs
        names = [name for name, _ in op.body.inputs]
        wanted = [n for n, want in zip(names, wants, strict=True) if want]
        stacked = {k: builder.types[c] for k, c in enumerate(came) if c and k >= op.carried}
        invariants = names[op.carried : len(names) - op.sliced]
        trial = _Body(op, self.keep, wanted, stacked, {})
        sums = {n: trial.builder.types[trial.found[n]] for n in invariants if n in trial.found}
        back = _Body(op, self.keep, wanted, stacked, sums)
        if not back.outputs:  # nothing that is wanted has a part in what came
            return [None for _ in names]

        operand = dict(zip(names, step.operands, strict=True))
        more: list[str] = []
        for name in back.residuals:
            more.append(f"{number}.{name}")
            while more[-1] in self.types or more[-1] in builder.types:
                more[-1] += "_"
            self.makers[more[-1]] = number
            self.types[more[-1]] = stacked_type(back.types[name], op.n)
            operand[name] = more[-1]
        body = Program(op.body.inputs, back.forward, (*outputs, *back.residuals))
        self.forward[number] = Step(replace(op, body=body), step.operands, (*step.results, *more), step.stopped)

        starts: list[str] = []
        for j in back.carried:
            c = came[j]
            starts.append(
                zeros(builder, self.types[step.operands[j]], step.operands[j])
                if c is None
                else builder.reduce_axes(c, builder.types[c].layout.partial)
            )
        for n, t in sums.items():
            zero = zeros(builder, t, operand[n])
            starts.append(builder(ToPartial(t.layout.partial), zero) if t.layout.partial else zero)
        read = [self.read(operand[n]) for n in (*back.invariants, *back.rows)]
        reverse = Repeat(op.n, back.program(), len(starts), len(back.rows) + len(stacked), not op.reverse)
        found = builder.write_step(reverse, *starts, *read, *(c for k, c in enumerate(came) if k in stacked and c))
        self.bodies[found[0]] = back.origins(back.live)
        made = [*(names[j] for j in back.carried), *sums, *back.slices]
        cotangents: dict[str, str | None] = dict(zip(made, found, strict=True))
        return [cotangents.get(n) for n in names]


class _Body(_Level):
    """The backward walk over the body of a repeat, as a body of its own.

    Its inputs are the cotangents of what is carried, then the `sums` of those of invariants, which are carried too;
    the invariants that it reads; and rows: those of sliced operands and residuals that it reads, and the cotangents of
    the rows that the forward body made.
    """

    def __init__(
        self,
        op: Repeat,
        keep: Keep,
        wanted: Iterable[str],
        stacked: Mapping[int, TensorType],
        sums: Mapping[str, TensorType],
    ) -> None:
        super().__init__(ProgramBuilder({}), op.body, keep)
        body, builder = op.body, self.builder
        names, needed = [name for name, _ in body.inputs], set(wanted)
        while True:  # what is carried may come to hang on what is needed in the next run
            inside = needing(body.steps, body.types, needed)
            more = {names[j] for j in range(op.carried) if body.outputs[j] in inside} - needed
            if not more:
                break
            needed |= more
        whole = len(names) - op.sliced
        self.outside = names[op.carried : whole]
        self.sliced = names[whole:]
        self.invariants: dict[str, str] = {}
        self.rows: dict[str, str] = {}
        self.carried = [j for j in range(op.carried) if names[j] in needed]
        self.entering = [
            builder.add_input(t.with_layout(Layout(t.layout.dims))) for t in (body.input_types[j] for j in self.carried)
        ]
        totals = {n: builder.add_input(t) for n, t in sums.items()}
        self.coming = [builder.add_input(row_type(t)) for t in stacked.values()]
        found: dict[str, str] = {}
        for k, c in zip((*self.carried, *stacked), (*self.entering, *self.coming), strict=True):
            name = body.outputs[k]
            if name in inside:
                found[name] = plus(builder, found[name], c) if name in found else c
        self.fill_cotangents(body.steps, found, inside)
        self.found = {n: builder.reduce_axes(found[n], body.types[n].layout.used_axes) for n in names if n in found}
        self.leaving: list[str] = []
        for j in self.carried:
            c = self.found.get(names[j])
            self.leaving.append(
                zeros(builder, body.input_types[j], names[j])
                if c is None
                else builder.reduce_axes(c, builder.types[c].layout.partial)
            )
        self.leaving += [plus(builder, totals[n], self.found[n]) for n in sums]
        self.entering += totals.values()
        self.slices = [n for n in self.sliced if n in self.found]
        self.outputs = (*self.leaving, *(self.found[n] for n in self.slices))
        self.live = builder.live(self.outputs)

    @property
    def residuals(self) -> list[str]:
        """The forward values whose rows are kept."""
        return [n for n in self.rows if n not in self.sliced]

    def saved_name(self, name: str) -> str:
        """An invariant, or a row."""
        into = self.invariants if name in self.outside else self.rows
        into[name] = self.builder.add_input(self.types[name])
        return into[name]

    def program(self) -> Program:
        """Return the body."""
        given = (*self.entering, *self.invariants.values(), *self.rows.values(), *self.coming)
        steps = [self.builder.steps[k] for k in self.live]
        return Program([(n, self.builder.types[n]) for n in given], steps, self.outputs)
