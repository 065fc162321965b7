"""Writes a settled program: every line as it was laid, and a planned movement where types do not meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardplan.core.nested import row_type, stacked_type
from shardplan.core.op import Op, results_of
from shardplan.core.ops import Cast, Elementwise
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.plans.plan import Plan
from shardplan.strategy.partition.flow import Key, Line, LineBlock, Loop, Path
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
    together: bool = False  # of several values, joined by a bucket


class WantedValue(NamedTuple):
    """A value, the type in which it is there, or will be, and the type that is wanted."""

    value: str
    there: TensorType
    wanted: TensorType


def buckets(wishes: Iterable[WantedValue], most: float) -> Iterator[list[WantedValue]]:
    """Yield wishes that are moved together: in order, those whose larger sides have at most so many bytes."""
    bucket: list[WantedValue] = []
    size = 0
    for wish in wishes:
        more = max(wish.there.local_bytes(), wish.wanted.local_bytes())
        if bucket and size + more > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(wish)
        size += more
    if bucket:
        yield bucket


@dataclass(slots=True)
class Writer:
    """A program, or a body, being written; `values` has by name of the model the types in which a value is there.

    `sum_dtype`: in which gradients are summed over devices, None for their own. `bucket`: bytes up to which parameters
    of a body are gathered, and their gradients reduced, together; by default all.
    """

    settled: Settled
    prices: Prices
    plan: Planner
    movements: list[Movement]
    sum_dtype: str | None = None
    bucket: float = math.inf
    path: Path = ()
    times: int = 1
    steps: list[Step] = field(default_factory=list[Step])
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    inputs: list[tuple[str, TensorType]] = field(default_factory=list[tuple[str, TensorType]])
    values: dict[str, dict[TensorType, str]] = field(default_factory=dict[str, dict[TensorType, str]])
    stems: dict[str, str] = field(default_factory=dict[str, str])  # what names were made of
    early: dict[str, list[WantedValue]] = field(
        default_factory=dict[str, list[WantedValue]]
    )  # by parameter what is gathered with it
    addends: dict[str, str] = field(default_factory=dict[str, str])  # by gradient its name in the dtype of sums
    late: dict[str, list[WantedValue]] = field(
        default_factory=dict[str, list[WantedValue]]
    )  # by the last gradient of a bucket
    joins: bool = False  # whether there are several in a body that a bucket may join

    def given(self, name: str, t: TensorType, called: str | None = None) -> str:
        """Declare an input: a value, or the value in one more type."""
        called = called or (self.free(name) if name in self.types else name)
        self.inputs.append((called, t))
        self.types[called] = t
        self.values.setdefault(name, {})[t] = called
        return called

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
        if t not in have and name in self.early:
            self.want_together(self.early.pop(name), by)
        if t not in have:
            source = min(have, key=lambda u: self.prices.move(u, t))  # the first of equal ones: as it was made
            plan = self.plan(source, t)
            (have[t],) = self.inline(plan.program, [have[source]])
            self.movements.append(Movement(self.path, name, by, plan, self.times, asks, operand))
        return have[t]

    def want_together(self, wishes: Sequence[WantedValue], by: str) -> None:
        """Move several values at once, where that takes less time than one by one."""
        names, there, wanted = zip(*wishes, strict=True)
        plan = self.plan(there, wanted)
        alone = sum(self._seconds(self.plan(t, u)) for t, u in zip(there, wanted, strict=True))
        if self._seconds(plan) >= alone:
            return
        found = self.inline(plan.program, [self.values[n][t] for n, t, _ in wishes])
        for name, t, value in zip(names, wanted, found, strict=True):
            self.values[name][t] = value
        self.movements.append(Movement(self.path, ", ".join(names), by, plan, self.times, together=len(names) > 1))

    def _seconds(self, plan: Plan) -> float:
        program = plan.program
        return sum(self.prices.op(step.op, program.step_types(step)[0]) for step in program.steps)

    def join(self, block: LineBlock, totals: Totals) -> None:
        """Say what lines will be moved together: parameters at the first that is read, gradients behind the last."""
        reads = [x for line in block.lines if isinstance(line, Line)
                 for x in zip(line.operands, self.settled.laid(line).operands, strict=True)]  # fmt: skip
        held = {n for n in self.values if self.settled.sources[block.path, n].maker is None}
        wishes = dict.fromkeys(
            WantedValue(n, self.made(n), t) for n, t in reads if n in held and t not in self.values[n]
        )
        for bucket in buckets(wishes, self.bucket):
            self.early |= {wish.value: bucket for wish in bucket}
        made = [r for line in block.lines for r in line.results if (block.path, r) in totals]
        types = [(r, self.settled.type_of((block.path, r)), totals[block.path, r][1]) for r in made]
        sums = [wish for r, t, u in types if (wish := WantedValue(r, t, t.with_layout(u.layout))).there != wish.wanted]
        self.joins = max(len(wishes), len(sums)) > 1
        for bucket in buckets(sums, self.bucket):
            self.late[bucket[-1].value] = bucket

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
            if name in self.late:
                self.sum_together(self.late[name])

    def addend(self, gradient: str) -> str:
        """Return a gradient in the dtype in which it is summed over devices, cast once."""
        made = self.made(gradient)
        if self.sum_dtype in (None, made.dtype):
            return gradient
        if gradient not in self.addends:
            name = self.addends[gradient] = self.op(Cast(self.sum_dtype or made.dtype), [self.values[gradient][made]])
            self.values[name] = {self.types[name]: name}
        return self.addends[gradient]

    def sum_together(self, wishes: Sequence[WantedValue]) -> None:
        """Sum several gradients over devices at once, where that takes less time than one by one."""
        names = [self.addend(wish.value) for wish in wishes]
        there = [self.made(name) for name in names]
        wanted = [t.with_layout(wish.wanted.layout) for t, wish in zip(there, wishes, strict=True)]
        self.want_together(
            [WantedValue(*one) for one in zip(names, there, wanted, strict=True)], "a bucket of gradients"
        )

    def summed(self, gradient: str, t: TensorType, by: str) -> str:
        """Return a gradient in a type: summed over devices where that is asked for, then in the type's dtype."""
        name = gradient if self.made(gradient).layout == t.layout else self.addend(gradient)
        called = self.want(name, self.made(name).with_layout(t.layout), by)
        return called if self.types[called].dtype == t.dtype else self.op(Cast(t.dtype), [called])

    def accumulated(self, gradient: str, t: TensorType, total: str | None, by: str) -> str:
        """Return a gradient in a type, added to the total where there is one."""
        name = self.summed(gradient, t, by)
        return self.op(Elementwise("a + b"), [total, name]) if total else name

    def loop(self, loop: Loop, totals: Totals, add: bool) -> None:
        """Write a repeat; `totals` has of rows that are gradients the name and a row's type of what they are added to.

        Totals enter, and leave as sums, where `add` says that there are any.
        """
        op: Any = loop.op
        block, by = loop.block, f"step {loop.number} (repeat)"
        count = loop.end - loop.first
        inner = Writer(
            self.settled,
            self.prices,
            self.plan,
            self.movements,
            self.sum_dtype,
            self.bucket,
            block.path,
            self.times * count,
        )
        names = [name for name, _ in block.inputs]
        whole = len(names) - op.cut
        operands: dict[str, str] = {}  # by input of the body
        sliced: dict[str, str] = {}
        extra: list[tuple[str, str, TensorType]] = []  # what is kept: a stack, its value inside, and a row's type
        for k, (outside, name) in enumerate(zip(loop.operands, names, strict=True)):
            if k < op.carried_count:
                t = self.settled.type_of((block.path, name))
                operands[inner.given(name, t)] = self.want(outside, t, by, self.settled.carries[block.path, k])
                continue
            kept = self.settled.saved((block.path, name))
            for t, value in self.values[outside].items():
                seen = row_type(t) if k >= whole else t
                if seen in kept or t == self.made(outside):
                    (sliced if k >= whole else operands)[inner.given(name, seen)] = value
            if k >= whole:
                extra += [(outside, name, t) for t in kept if t not in inner.values[name]]
        inner.join(block, totals)
        self.joins |= inner.joins
        inner.lines(block.lines, totals, add)
        leaving = [
            inner.want(o, self.settled.type_of((block.path, n)), by, self.settled.carries[block.path, k])
            for k, (o, n) in enumerate(zip(block.outputs[: op.carried_count], names, strict=False))
        ]
        for outside, name in zip(loop.results[op.carried_count :], block.outputs[op.carried_count :], strict=True):
            found = totals.get((block.path, name))
            if found is None:
                key = block.path, name
                first, *more = self.settled.saved(key)
                leaving.append(inner.want(name, first, by, self.settled.saves.get(key)))
                extra += [(outside, name, t) for t in more]
                continue
            stack, t = found
            total = None
            if add:
                total = inner.given(inner.free("total"), t)
                sliced[total] = self.given(stack, stacked_type(t, count))
            leaving.append(inner.accumulated(name, t, total, by))
        leaving += [inner.want(name, t, by) for _, name, t in extra]
        read = {o for step in inner.steps for o in step.operands} | {*leaving}
        for k in [k for k in (operands | sliced) if k not in read and k not in names[: op.carried_count]]:
            sliced.pop(k, operands.pop(k, ""))
        inner.inputs = [(k, inner.types[k]) for k in (*operands, *sliced)]
        made = replace(op, n=count, body=inner.program(leaving), sliced=len(sliced))
        self.op(made, [*operands.values(), *sliced.values()], loop.results)
        for name in loop.results:
            self.values[name] = {self.types[name]: name}
        for (outside, _, t), value in zip(extra, self.steps[-1].results[len(loop.results) :], strict=True):
            self.values[outside][stacked_type(t, count)] = value

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
