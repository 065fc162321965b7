"""Runs the steps of a program on one device, for every backend that goes step by step: liveness, bodies, loops.

A backend says how an op without a body is bound to its device (`bind`) and how a shard is allocated (`make`). What is
bound is a generator, which yields while messages travel; `wrap_blocking` makes one of a function that blocks. Bodies
are bound once; one that runs at once is bound like an op without. Every result is made anew, but for those of a
relabel, of a view, and of a loop that takes an operand's place, which the account says; an input is never written.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from shardplan.core.accounting import shared_values
from shardplan.core.nested import Nested
from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.reference import take_values
from shardplan.core.tensor import TensorType
from shardplan.core.text import op_text
from shardplan.core.walk import walk
from shardplan.errors import ShardplanError
from shardplan.execution.lower import place_of


class Counting(Protocol):
    """A wire, as far as it matters here."""

    received: int  # bytes so far


Wire = TypeVar("Wire", bound=Counting)
Running = Generator[None, None, list[Any]]
Bound = Callable[[list[Any], Wire], Running]
Types = Sequence[TensorType]


class BoundStep(NamedTuple, Generic[Wire]):
    """A step of a program on one device: what it runs, on which values, and which are dropped after it."""

    run: Bound[Wire] | None  # None: the results are the operands under other types
    operands: tuple[str, ...]
    results: tuple[str, ...]
    freed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hands(Generic[Wire]):
    """What a backend brings: its device's id, how it binds an op, and how it allocates a shard."""

    device: int
    bind: Callable[[Op, Types, Types], Bound[Wire]]
    make: Callable[[TensorType], Callable[[Wire], Any]]
    # What a body of computations and a move is as one kernel, None where there is none; else it is a loop of one run.
    overlap: Callable[[Nested, Types, Types], Bound[Wire] | None] | None = None

    def steps(self, program: Program) -> tuple[BoundStep[Wire], ...]:
        """Bind the steps of a program; an error names its step."""
        found: list[BoundStep[Wire]] = []
        of = shared_values(program)
        for visit in walk(program):
            step, run = visit.step, None
            if not visit.relabels:
                homes = [of[o] for o in step.operands]
                places = {k: homes.index(of[r]) for k, r in enumerate(step.results) if of[r] in homes}
                try:
                    if step.op.view and len(places) == len(step.results):
                        run = self.bind_view(visit.results, places)
                    elif visit.nested_op is None or visit.nested_op.at_once:
                        run = self.bind(step.op, visit.operands, visit.results)
                    else:
                        one = self.overlap if visit.nested_op.overlaps else None
                        run = one and one(visit.nested_op, visit.operands, visit.results)
                        run = run or self.bind_loop(visit.nested_op, visit.results, places)
                except ShardplanError as error:
                    text = op_text(step.op, step.operands)
                    raise type(error)(f"step {visit.number} ({text}): {error}") from None
            found.append(BoundStep(run, step.operands, step.results, tuple(visit.freed)))
        return tuple(found)

    def bind_view(self, results: Types, places: Mapping[int, int]) -> Bound[Wire]:
        """Bind an op whose results are operands under another shape; `places` says which."""
        at = [place_of(t, self.device) for t in results]
        shapes = [None if k is None else t.local_shape(k) for t, k in zip(results, at, strict=True)]

        def run(arrays: list[Any], wire: Wire) -> list[Any]:
            taken = (arrays[places[k]] for k in range(len(shapes)))
            return [x if shape is None else x.reshape(shape) for x, shape in zip(taken, shapes, strict=True)]

        return wrap_blocking(run)

    def bind_loop(self, op: Nested, results: Types, places: Mapping[int, int]) -> Bound[Wire]:
        """Bind an op that runs its body again and again; `places` says which results take which operands' place."""
        body, steps, carried = op.body, self.steps(op.body), op.carried_count
        names = [name for name, _ in body.inputs]
        whole = len(names) - op.cut
        cut, stacked = (  # whether this device has a shard: what stands for one has no rows
            [place_of(t, self.device) is not None for t in types]
            for types in (body.input_types[whole:], body.output_types[carried:])
        )
        makers = [self.make(u) for u in results[carried:]]
        of = shared_values(body)
        lent = {  # carried results that would lie where another value does, which may be written later
            k: self.make(u)
            for k, u in enumerate(results[:carried])
            if k not in places and (not op.times or of[body.outputs[k]] in names)
            if place_of(u, self.device) is not None
        }

        def begun(arrays: list[Any], wire: Wire, k: int | None) -> Generator[None, None, dict[str, Any]]:
            if k is None:
                return {}
            rows = [x[k, ...] if here else x for x, here in zip(arrays[whole:], cut, strict=True)]
            values = dict(zip(names[carried:], [*arrays[carried:whole], *rows], strict=True))
            yield from drive_steps(steps[: op.ahead], values, (), wire)
            return values

        def run(arrays: list[Any], wire: Wire) -> Running:
            state = arrays[:carried]
            arrays[:carried] = [None] * carried  # let go by the first run, which replaces it
            stacks = [arrays[places[k]] if k in places else make(wire) for k, make in enumerate(makers, carried)]
            order = (*op.order, None)
            coming = yield from begun(arrays, wire, order[0])
            for k, after in itertools.pairwise(order):
                values = coming
                coming = yield from begun(arrays, wire, after)
                values |= zip(names, state, strict=False)
                del state  # else what the body frees would live on
                state = yield from drive_steps(steps[op.ahead :], values, body.outputs, wire)
                for stack, here in zip(reversed(stacks), reversed(stacked), strict=True):
                    row = state.pop()
                    if here:
                        stack[k, ...] = row
                    del row
            for k, make in lent.items():
                own = make(wire)
                own[...] = state[k]
                state[k] = own
            return [*state, *stacks]

        return run


def wrap_blocking(bound: Callable[[list[Any], Wire], list[Any]]) -> Bound[Wire]:
    """Return a bound step that blocks as one that a driver runs."""

    def run(arrays: list[Any], wire: Wire) -> Running:
        yield from ()
        return bound(arrays, wire)

    return run


def drive_steps(
    steps: Sequence[BoundStep[Wire]],
    values: dict[str, Any],
    outputs: Sequence[str],
    wire: Wire,
    begin: Callable[[int], None] | None = None,
    note: Callable[[int, float, int], None] | None = None,
) -> Running:
    """Run steps on `values`, the inputs by name, which is emptied on the way; yields while messages travel.

    `begin(number)` is called before a step; `note(number, start, before)` after it, with the monotonic clock and the
    bytes received at its start.
    """
    for number, (run, operands, results, freed) in enumerate(steps):
        if begin is not None:
            begin(number)
        arrays = take_values(values, operands, freed)
        start, before = time.monotonic(), wire.received
        out = arrays if run is None else (yield from run(arrays, wire))
        if note is not None:
            note(number, start, before)
        values.update(zip(results, out, strict=True))
        del arrays, out  # else what is freed below would live to the end of the next step
        for name in freed:
            values.pop(name, None)
    return [values[name] for name in outputs]


def finish(running: Running) -> list[Any]:
    """Run a generator to its end, blocked in its waits, and return its results."""
    try:
        while True:
            next(running)
    except StopIteration as stop:
        return stop.value


class Stepping(Protocol):
    """A watch, as far as it matters here: the step that runs, and the texts of all, for messages."""

    step: int
    steps: Sequence[str]


def run_under_watch(running: Running, watch: Stepping, steps: Sequence[str]) -> Running:
    """Run under a watch that others share: whenever it goes on, the watch says its step."""
    step = -1
    while True:
        watch.steps, watch.step = steps, step
        try:
            next(running)
        except StopIteration as stop:
            return stop.value
        step = watch.step
        yield
