"""Writes the programs of a stage on the mesh of stage 0: forward, backward, and the optimizer's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardplan.core.layout import Layout
from shardplan.core.nested import as_nested, row_type, stacked_type
from shardplan.core.ops import Cast, Elementwise, ToPartial
from shardplan.core.ops.composed import Composed, decompose_sharded
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.strategy.model import Model
from shardplan.strategy.partition.flow import Key, Loop
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.recomputed_layers import model_name
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.partition.stages import Boundary, PipelineStage
from shardplan.strategy.partition.tables import drop_summed, update_layout
from shardplan.strategy.partition.write import Movement, Planner, WantedValue, Writer, buckets
from shardplan.strategy.training import (
    CLIP,
    INPUT,
    MASTER,
    OPTIMIZERS,
    SCALE,
    SKIPPED,
    TAKEN,
    factor_expression,
    multiply,
    rename_values,
    sum_squares,
)

NEXT, TOTAL, SAVED, SENT, RECEIVED = "next.", "gradient.", "saved.", "sent.", "received."
REDUCED, NORM, FACTOR = "reduced.", "clipping.norm", "clipping.factor"
# Kinds of action behind all microbatches, in order, each with that of the messages that it takes. Where gradients are
# clipped over stages, NORM reduces a stage's and adds up their squares, and CLIP, of stage 0, makes of all one factor.
UPDATES = {"OPT": "total"}
CLIPPED_UPDATES = {"NORM": "total", "CLIP": "norm", "OPT": "clip"}
Types = Mapping[str, TensorType]


class StageProgram(NamedTuple):
    """A program, the movements in it, what goes to other stages, and what is saved, by its name in the model.

    `joins` says that layers have several movements that a bucket may join.
    """

    program: Program
    movements: tuple[Movement, ...]
    sent: Mapping[str, str]
    saved: Mapping[str, Mapping[TensorType, str]]
    joins: bool = False


class Update(NamedTuple):
    """Of a parameter what is updated of it, and what its gradient is called, as its state lies."""

    name: str
    kept: Sequence[str]
    total: str


@dataclass(frozen=True, slots=True)
class Writers:
    """What all programs are written with; `state` has the types of inputs as stage 0 would have them.

    `ends` has by gradient its parameter and the type of its total, of rows of a body that of a row.
    """

    model: Model
    settled: Settled
    prices: Prices
    plan: Planner
    state: Types
    replaced: Mapping[str, str]  # by output the input whose place it takes
    ends: Mapping[Key, tuple[str, TensorType]]
    add: bool  # whether gradients are added to totals
    bucket: float | None  # bytes up to which parameters are gathered, and gradients reduced, together
    sum_dtype: str | None  # in which gradients are summed over devices; None for their own

    def _writer(self, stage: PipelineStage, kind: str, boundaries: Sequence[Boundary]) -> Writer:
        """A writer with the inputs that lines read; of stacks that are cut into rows those of their loop."""
        most = math.inf if self.bucket is None else self.bucket
        writer = Writer(self.settled, self.prices, self.plan, [], self.sum_dtype, most)
        self._receive(writer, stage, kind, boundaries)
        for line in stage.forward if kind == "F" else stage.backward:
            for k, name in enumerate(line.operands):
                if name in self.state and name not in writer.values:
                    t = self.state[name]
                    if isinstance(line, Loop) and k >= len(line.operands) - line.op.cut:
                        t = stacked_type(row_type(t), line.end - line.first)
                    writer.given(name, t)
        return writer

    def forward(self, stage: PipelineStage, outputs: Sequence[str], boundaries: Sequence[Boundary]) -> StageProgram:
        """Write F: its results are results of the model, what is saved, and what goes on."""
        writer = self._writer(stage, "F", boundaries)
        writer.lines(stage.forward, {}, add=False)
        called = {writer.want(o, self._left(writer, o), "output"): o for o in outputs}
        saved: dict[str, dict[TensorType, str]] = {}
        for v in (*stage.saved, *(name for name, _ in writer.inputs if name in self.state)):
            for k, t in enumerate(self._saved(writer, v)):
                value = writer.want(v, t, "the backward pass", self.settled.saves.get(((), v)))
                name = called.setdefault(value, f"{SAVED}{v}" + (f".{k}" if k else ""))
                saved.setdefault(v, {})[writer.types[value]] = name
        sent = self._send(writer, stage, "F", boundaries, called)
        program = named(writer.program(list(called)), called)
        return StageProgram(program, tuple(writer.movements), sent, saved, writer.joins)

    def _saved(self, writer: Writer, name: str) -> Iterator[TensorType]:
        """The types in which a value is saved, which has as many rows as this stage has layers."""
        made = writer.made(name)
        for t in self.settled.saved(((), name)):
            yield made.with_layout(t.layout)
        yield from self.settled.saved_rows(((), name), made)

    def backward(self, stage: PipelineStage, forward: StageProgram, boundaries: Sequence[Boundary]) -> StageProgram:
        """Write B: its results are totals of gradients, and what goes back."""
        writer = self._writer(stage, "B", boundaries)
        for v, found in forward.saved.items():
            for t, name in found.items():
                writer.given(v, t, name)
        for v in stage.received:  # it is still there
            self._received(writer, v, v)
        inner = {key: (f"{TOTAL}{name}", t) for key, (name, t) in self.ends.items() if key[0]}
        summed: dict[str, str] = {}  # by gradient outside loops what it is added up to, as soon as it is made
        for line in stage.backward:
            writer.lines([line], inner, self.add)
            for value in line.results if not isinstance(line, Loop) else ():
                if ((), value) in self.ends:
                    name, t = self.ends[(), value]
                    total = writer.given(f"{TOTAL}{name}", t) if self.add else None
                    summed[value] = writer.accumulated(value, t, total, f"gradient of {name}")
        called: dict[str, str] = {}
        loops = {line.block.path: line for line in stage.backward if isinstance(line, Loop)}
        for (path, value), (name, _) in self.ends.items():
            total = f"{TOTAL}{name}"
            if path in loops:
                loop = loops[path]
                stack = loop.results[loop.block.outputs.index(value)]
                called[writer.values[stack][writer.made(stack)]] = NEXT + total
            elif not path and value in summed:
                called[summed[value]] = NEXT + total
        sent = self._send(writer, stage, "B", boundaries, called)
        read = {o for step in writer.steps for o in step.operands} | {*called}
        writer.inputs = [(name, t) for name, t in writer.inputs if name in read or name not in forward.saved]
        program = named(writer.program(list(called)), called)
        return StageProgram(program, tuple(writer.movements), sent, {}, writer.joins)

    def norm(self, parameters: Mapping[str, Sequence[str]], types: Types) -> StageProgram:
        """Write NORM: the sum of the squares of a stage's gradients, and those of them that it reduces, for OPT."""
        writer = Writer(self.settled, self.prices, self.plan, [], self.sum_dtype)
        if self.bucket is not None:
            self._bucketed(writer, parameters, types, self.bucket)
        updates = [self._given_update(writer, name, types, copies) for name, copies in parameters.items()]
        called = {_squares(writer, updates): NORM}
        called |= {u.total: REDUCED + u.name for u in updates if u.total != TOTAL + u.name}
        read = {o for step in writer.steps for o in step.operands}
        writer.inputs = [(name, t) for name, t in writer.inputs if name in read]
        return StageProgram(named(writer.program(list(called)), called), tuple(writer.movements), {}, {})

    def clip(self, norms: Sequence[TensorType], types: Types) -> StageProgram:
        """Write CLIP: of the sums of all stages what gradients are multiplied with."""
        writer = Writer(self.settled, self.prices, self.plan, [], self.sum_dtype)
        total, *others = [writer.given(f"{NORM}.{k}", t) for k, t in enumerate(norms)]
        for one in others:
            total = writer.op(Elementwise("a + b"), [total, one])
        factor = self._factor(writer, total, types)
        return StageProgram(named(writer.program([factor]), {factor: FACTOR}), (), {}, {})

    def optimizer(
        self, parameters: Mapping[str, Sequence[str]], types: Types, reduced: Types | None = None
    ) -> StageProgram:
        """Write OPT: updates of parameters where their state is stored; `parameters` has the copies of each.

        Totals of copies are added, and copies get what their parameter becomes: both as the parameter's own lie. Where
        a program NORM goes before it, `reduced` has what that makes, and the factor.
        """
        model = self.model
        rule = OPTIMIZERS[model.fields["optimizer"]]
        writer = Writer(self.settled, self.prices, self.plan, [], self.sum_dtype)
        called: dict[str, str] = {}
        now: list[str] = []
        if rule.counts:
            writer.given("step", types["step"])
            now = [writer.op(Elementwise("a + 1"), ["step"])]
        now += [writer.given(name, types[name]) for name in rule.given(model.fields)]
        factor = ""
        if reduced is not None:
            factor = writer.given(FACTOR, reduced[FACTOR])
            updates = [self._reduced_update(writer, name, types, reduced) for name in parameters]
        else:
            if self.bucket is not None:
                self._bucketed(writer, parameters, types, self.bucket)
            updates = (self._given_update(writer, n, types, copies) for n, copies in parameters.items())
            if self.has_factor:
                updates = [*updates]
                factor = self._factor(writer, _squares(writer, updates), types)
        scaled = bool(model.fields.get(SCALE))
        self._count_steps(writer, types, factor if scaled else "", now[0] if rule.counts else "", called)
        for update in _multiplied(writer, updates, factor) if factor else updates:
            name, kept = update.name, update.kept
            by, layout = f"the update of {name}", update_layout(kept, types)
            lie = {n: types[n].with_layout(drop_summed(layout, types[n], types[name].shape)) for n in kept}
            first, *others = [writer.want(n, t, by) for n, t in lie.items()]
            op = rule.made(model.fields, model.parameters[model_name(name)])
            made = dict(zip(kept, _write_update(writer, op, [first, update.total, *others, *now]), strict=True))
            if scaled:  # a step whose gradients are not all finite changes nothing
                pairs = zip(made.items(), (first, *others), strict=True)
                made = {n: writer.op(Elementwise(TAKEN), [v, old, _cast(writer, factor, v)]) for (n, v), old in pairs}
            if name not in made:
                made[name] = writer.op(Cast(types[name].dtype), [made[kept[0]]])
            for n, value in made.items():
                writer.values[value] = {writer.types[value]: value}
                called[writer.want(value, types[n], by)] = NEXT + n
        program = named(writer.program(list(called)), called)
        return StageProgram(program, tuple(writer.movements), {}, {})

    @property
    def has_factor(self) -> bool:
        """Whether gradients are multiplied with a factor that hangs on all of them."""
        return bool(self.model.fields.get(CLIP) or self.model.fields.get(SCALE))

    def _factor(self, writer: Writer, squares: str, types: Types) -> str:
        scale = [writer.given(SCALE, types[SCALE])] if self.model.fields.get(SCALE) == INPUT else []
        return writer.op(Elementwise(factor_expression(self.model.fields)), [squares, *scale])

    def _count_steps(self, writer: Writer, types: Types, factor: str, now: str, called: dict[str, str]) -> None:
        """Let leave how many steps were done, of which this would be `now`, and were skipped."""
        if not factor:
            called |= {now: f"{NEXT}step"} if now else {}
            return
        taken = writer.op(Cast("i32"), [writer.op(Elementwise("where(a > 0, 1, 0)"), [factor])])
        skipped = writer.op(Elementwise("a + 1 - b"), [writer.given(SKIPPED, types[SKIPPED]), taken])
        called[skipped] = NEXT + SKIPPED
        if now:
            done = writer.op(Elementwise("a + b"), ["step", taken])
            called[done] = f"{NEXT}step"

    def _given_update(self, writer: Writer, name: str, types: Types, copies: Sequence[str]) -> Update:
        """Declare what an update reads, and sum the gradient over copies and devices."""
        kept = self._kept_names(name, types)
        for n in (TOTAL + name, *kept):
            if n not in writer.values:
                writer.given(n, types[n])
        for copy in copies:
            writer.given(TOTAL + copy, types[TOTAL + name])
            both = [writer.values[n][types[TOTAL + name]] for n in (TOTAL + name, TOTAL + copy)]
            writer.values[TOTAL + name] = {types[TOTAL + name]: writer.op(Elementwise("a + b"), both)}
        t = types[TOTAL + name].with_layout(update_layout(kept, types))
        return Update(name, kept, writer.summed(TOTAL + name, t, f"the update of {name}"))

    def _reduced_update(self, writer: Writer, name: str, types: Types, reduced: Types) -> Update:
        """Declare what an update reads of a gradient that is reduced, or has nothing to reduce."""
        kept = self._kept_names(name, types)
        for n in kept:
            if n not in writer.values:
                writer.given(n, types[n])
        made, total = REDUCED + name, TOTAL + name
        return Update(name, kept, writer.given(*((made, reduced[made]) if made in reduced else (total, types[total]))))

    def _kept_names(self, name: str, types: Types) -> list[str]:
        """What an optimizer updates of a parameter: itself or its copy in f32, and the state."""
        state = OPTIMIZERS[self.model.fields["optimizer"]].state_shapes(self.model.parameters[model_name(name)])
        master = f"{name}.{MASTER}"
        return [master if master in types else name, *(f"{name}.{part}" for part in state)]

    def _bucketed(self, writer: Writer, parameters: Mapping[str, Sequence[str]], types: Types, most: float) -> None:
        """Reduce gradients together, in the order of the backward pass, in buckets; those with copies stay apart."""
        wishes: list[WantedValue] = []
        for name in [n for n, copies in reversed([*parameters.items()]) if not copies]:
            total = types[TOTAL + name]
            t = total.with_layout(update_layout(self._kept_names(name, types), types))
            if t != total:
                writer.given(TOTAL + name, total)
                wishes.append(WantedValue(TOTAL + name, total, t))
        for bucket in buckets(wishes, most):
            writer.sum_together(bucket)

    def _left(self, writer: Writer, name: str) -> TensorType:
        """The type in which a result leaves: what replaces an input lies as that, and nothing is partial."""
        t = writer.made(name)
        if name in self.replaced:
            return t.with_layout(self.state[self.replaced[name]].layout)
        return t.with_layout(Layout(t.layout.dims))

    def _receive(self, writer: Writer, stage: PipelineStage, kind: str, boundaries: Sequence[Boundary]) -> None:
        """Declare what comes from other stages."""
        for b in boundaries:
            if b.kind == kind and b.target[0] == stage.number:
                self._received(writer, b.target[1], b.source[1])

    def _received(self, writer: Writer, name: str, source: str) -> None:
        writer.given(RECEIVED + name, self.crossing(source))
        writer.values[name] = writer.values.pop(RECEIVED + name)

    def _send(
        self, writer: Writer, stage: PipelineStage, kind: str, boundaries: Sequence[Boundary], called: dict[str, str]
    ) -> dict[str, str]:
        """Let leave what goes to other stages, and return what it is called."""
        sent: dict[str, str] = {}
        for b in boundaries:
            if b.kind == kind and b.source[0] == stage.number:
                value = writer.want(b.source[1], self.crossing(b.source[1]), "another stage")
                sent[b.source[1]] = called.setdefault(value, f"{SENT}{b.source[1]}")
        return sent

    def crossing(self, name: str) -> TensorType:
        """Return the type in which a value goes to another stage: as it was made, but never partial."""
        t = self.settled.type_of(((), name))
        return t.with_layout(Layout(t.layout.dims))


def _squares(writer: Writer, updates: Sequence[Update]) -> str:
    """Write the sum of the squares of all gradients: one all-reduce of one number.

    A sum of squares is partial over what its gradient is cut over; over other axes one device alone counts it.
    """
    inputs = {update.total: writer.types[update.total] for update in updates}
    builder = ProgramBuilder(inputs)
    squares = [sum_squares(builder, update.total) for update in updates]
    over = dict.fromkeys(a for name in squares for a in builder.types[name].layout.partial)
    total = ""
    for name in squares:
        rest = tuple(a for a in over if a not in builder.types[name].layout.partial)
        name = builder(ToPartial(rest), name) if rest else name
        total = builder(Elementwise("a + b"), total, name) if total else name
    (total,) = writer.inline(Program(tuple(inputs.items()), builder.steps, (total,)), list(inputs))
    writer.values[total] = {writer.types[total]: total}
    t = writer.types[total]
    return writer.want(total, t.with_layout(Layout(t.layout.dims)), "the norm of all gradients")


def _multiplied(writer: Writer, updates: Iterable[Update], factor: str) -> Iterator[Update]:
    """Yield updates by gradients times a factor."""
    for update in updates:
        builder = ProgramBuilder({name: writer.types[name] for name in (update.total, factor)})
        made = multiply(builder, update.total, factor)
        whole = Program([(name, writer.types[name]) for name in (update.total, factor)], builder.steps, (made,))
        yield update._replace(total=writer.inline(whole, [update.total, factor])[0])


def _cast(writer: Writer, name: str, like: str) -> str:
    kind = writer.types[like].dtype
    return name if writer.types[name].dtype == kind else writer.op(Cast(kind), [name])


def _write_update(writer: Writer, op: Composed, operands: Sequence[str]) -> Sequence[str]:
    """Write an update, and return its results: as one op, or where it reduces what is cut as its steps."""
    types = [writer.types[o] for o in operands]
    try:
        writer.op(op, operands)
    except LayoutError:
        body = decompose_sharded(op, types)
        inputs = [(str(k), t) for k, t in enumerate(types)]
        return writer.inline(Program(inputs, body.steps, body.results), operands)
    return writer.steps[-1].results


@lru_cache(maxsize=1024)
def saved_of_state(forward: Program, batch: tuple[str, ...]) -> frozenset[str]:
    """Return what a forward pass saves that hangs on state alone: gathered parameters, alike for all microbatches."""
    varying = values_of(forward, {name for name, _ in forward.inputs if name in batch or name.startswith(RECEIVED)})
    return frozenset(o for o in forward.outputs if o.startswith(SAVED) and o not in varying)


def values_of(program: Program, inputs: set[str]) -> set[str]:
    """Return the values of a program that any of some inputs has a part in, and these."""
    found = {*inputs}
    for step in program.steps:
        op = as_nested(step.op)
        if op is None:
            found |= {*step.results} if found & {*step.operands} else set()
            continue
        names = [name for name, _ in op.body.inputs]
        entered = {name for o, name in zip(step.operands, names, strict=True) if o in found}
        while True:  # what is carried goes round
            inside = values_of(op.body, entered)
            more = {names[k] for k in range(op.carried_count) if op.body.outputs[k] in inside} - entered
            if not more:
                break
            entered |= more
        found |= {r for r, o in zip(step.results, op.body.outputs, strict=True) if o in inside}
    return found


def named(program: Program, names: Mapping[str, str]) -> Program:
    """Return a program in which some values have names, which others that had them give away."""
    moved = {name: f"{name}." for name in names.values() if name in program.types and names.get(name, "") != name}
    return rename_values(program, moved | dict(names))
