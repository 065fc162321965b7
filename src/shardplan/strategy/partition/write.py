"""Writes a settled program: every line as it was laid, and a planned movement where types do not meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardplan.core.nested import row, rows
from shardplan.core.op import Op, results_of
from shardplan.core.ops import Cast, Elementwise
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.plans.plan import Plan
from shardplan.strategy.partition.flow import Key, Line, Loop, Path
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.problem import Maker
from shardplan.strategy.partition.settle import Settled

Totals = Mapping[Key, tuple[str, TensorType]]
Planner = Callable[[Any, Any], Plan]  # of a type and another, or as many of each


class Movement(NamedTuple):
    """A movement that was inserted: the block and the value, which line wanted it, its plan, how often it runs.

    `asks` is the choice that wanted it, as its operand `operand`; None where a table or a result did.
    """

    path: Path
    value: str
    by: str
    plan: Plan
    times: int
    asks: Maker | None = None
    operand: int = 0


@dataclass(slots=True)
class Writer:
    """A program, or a body, being written; `values` has by name of the model the types in which a value is there."""

    settled: Settled
    prices: Prices
    plan: Planner
    movements: list[Movement]
    path: Path = ()
    times: int = 1
    steps: list[Step] = field(default_factory=list[Step])
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    inputs: list[tuple[str, TensorType]] = field(default_factory=list[tuple[str, TensorType]])
    values: dict[str, dict[TensorType, str]] = field(default_factory=dict[str, dict[TensorType, str]])
    stems: dict[str, str] = field(default_factory=dict[str, str])  # what names were made of

    def given(self, name: str, t: TensorType) -> None:
        """Declare an input."""
        self.inputs.append((name, t))
        self.types[name] = t
        self.values[name] = {t: name}

    def made(self, name: str) -> TensorType:
        """Return the type in which a value was made, or came."""
        return next(iter(self.values[name]))

    def op(self, op: Op, operands: Sequence[str], results: Sequence[str] = ()) -> str:
        """Write a step on names of this program, and return the first result."""
        found = results_of(op, tuple(self.types[o] for o in operands))
        names = list(results)
        for t in found[len(names) :]:
            names.append(self.free(operands[0] if operands else op.name))
            self.types[names[-1]] = t
        self.types.update(zip(names, found, strict=True))
        self.steps.append(Step(op, tuple(operands), tuple(names)))
        return names[0]

    def free(self, name: str) -> str:
        """Return a name that no value has, made of one that has."""
        stem, k = self.stems.get(name, name), 1
        while f"{stem}.{k}" in self.types:
            k += 1
        self.stems[f"{stem}.{k}"] = stem
        return f"{stem}.{k}"

    def want(self, name: str, t: TensorType, by: str, asks: Maker | None = None, operand: int = 0) -> str:
        """Return what a value is called in a type, into which it is moved the first time that it is wanted."""
        have = self.values[name]
        if t not in have:
            source = min(have, key=lambda u: self.prices.move(u, t))  # the first of equal ones: as it was made
            plan = self.plan(source, t)
            (have[t],) = self.inline(plan.program, [have[source]])
            self.movements.append(Movement(self.path, name, by, plan, self.times, asks, operand))
        return have[t]

    def want_together(self, names: Sequence[str], types: Sequence[TensorType], by: str) -> None:
        """Move several values at once."""
        plan = self.plan([self.made(n) for n in names], types)
        found = self.inline(plan.program, [self.values[n][self.made(n)] for n in names])
        for name, t, value in zip(names, types, found, strict=True):
            self.values[name][t] = value
        self.movements.append(Movement(self.path, ", ".join(names), by, plan, self.times))

    def inline(self, program: Program, operands: Sequence[str]) -> list[str]:
        """Write the steps of a plan, and return what its outputs are called."""
        names = dict(zip((name for name, _ in program.inputs), operands, strict=True))
        for step in program.steps:
            stem = names[step.operands[0]]
            fresh: list[str] = []
            for r in step.results:
                names[r] = self.free(stem)
                self.types[names[r]] = program.types[r]
                fresh.append(names[r])
            self.steps.append(Step(step.op, tuple(names[o] for o in step.operands), tuple(fresh)))
        return [names[o] for o in program.outputs]

    def line(self, line: Line) -> None:
        """Write a line as it was laid."""
        laid = self.settled.laid(line)
        pairs = enumerate(zip(line.operands, laid.operands, strict=True))
        operands = [self.want(o, t, str(line), self.settled.lines[line], k) for k, (o, t) in pairs]
        self.op(laid.op, operands, line.results)
        for name, t in zip(line.results, laid.results, strict=True):
            self.values[name] = {t: name}

    def accumulated(self, gradient: str, t: TensorType, total: str | None, by: str) -> str:
        """Return a gradient in a type and its dtype, added to the total where there is one."""
        name = self.want(gradient, TensorType(self.made(gradient).dtype, t.shape, t.layout, t.mesh), by)
        if self.types[name].dtype != t.dtype:
            name = self.op(Cast(t.dtype), [name])
        return self.op(Elementwise("a + b"), [total, name]) if total else name

    def loop(self, loop: Loop, totals: Totals, add: bool) -> None:
        """Write a repeat; `totals` has of rows that are gradients the name and a row's type of what they are added to.

        Totals enter, and leave as sums, where `add` says that there are any.
        """
        op: Any = loop.op
        block, by = loop.block, f"step {loop.number} (repeat)"
        inner = Writer(
            self.settled, self.prices, self.plan, self.movements, block.path, self.times * (loop.end - loop.first)
        )
        names = [name for name, _ in block.inputs]
        whole = len(names) - op.cut
        operands: list[str] = []
        for k, (outside, name) in enumerate(zip(loop.operands, names, strict=True)):
            if k < op.kept:
                t = self.settled.type_of((block.path, name))
                operands.append(self.want(outside, t, by, self.settled.carries[block.path, k]))
            else:
                t = self.made(outside)
                operands.append(self.values[outside][t])
                t = t if k < whole else row(t)
            inner.given(name, t)
        inner.lines(block.lines, totals, add)
        leaving = [
            inner.want(o, self.settled.type_of((block.path, n)), by, self.settled.carries[block.path, k])
            for k, (o, n) in enumerate(zip(block.outputs[: op.kept], names, strict=False))
        ]
        entering = 0
        for name in block.outputs[op.kept :]:
            found = totals.get((block.path, name))
            if found is None:
                key = block.path, name
                leaving.append(inner.want(name, self.settled.saved(key), by, self.settled.saves.get(key)))
                continue
            stack, t = found
            total = None
            if add:
                total = inner.free("total")
                inner.given(total, t)
                self.given(stack, rows(t, loop.end - loop.first))
                operands.append(stack)
                entering += 1
            leaving.append(inner.accumulated(name, t, total, by))
        count = loop.end - loop.first
        made = replace(op, n=count, body=inner.program(leaving), sliced=op.cut + entering)
        self.op(made, operands, loop.results)
        for name in loop.results:
            self.values[name] = {self.types[name]: name}

    def lines(self, lines: Iterable[Line | Loop], totals: Totals, add: bool) -> None:
        """Write lines in order; see `loop`."""
        for line in lines:
            if isinstance(line, Loop):
                self.loop(line, totals, add)
            else:
                self.line(line)

    def program(self, outputs: Sequence[str]) -> Program:
        """Return what was written."""
        return Program(self.inputs, self.steps, outputs)
