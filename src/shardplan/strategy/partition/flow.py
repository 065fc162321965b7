"""A model's program as what a settlement lays out: lines in blocks, with the names of their factors.

A `Line` is a step on one device, a `Loop` a `repeat` with its body as a `LineBlock`. A value is called by its block and
its name: a `Key`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardplan.core.dim_names import DimNames, Links, Names, links
from shardplan.core.nested import Nested, as_nested
from shardplan.core.ops.compute import Compute, computing
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

Path = tuple[int, ...]  # numbers of the steps with bodies, outermost first
Key = tuple[Path, str]


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A step of the model, as on one device; `names` are those of its factors, `number` that of its model's step."""

    number: int
    op: Compute
    operands: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[TensorType, ...]  # of the operands
    links: Links
    names: Mapping[str, Names]
    made: tuple[str, ...]  # the factors that only results have

    def __str__(self) -> str:
        """Return how errors and notes name it."""
        return f"step {self.number} ({self.op.name})"


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A `repeat`, with its body as a block; of one that stages share the rows `first` to `end` of one of them."""

    number: int
    op: Nested
    operands: tuple[str, ...]
    results: tuple[str, ...]
    block: LineBlock
    first: int
    end: int
    sources: tuple[tuple[int, str] | None, ...] = ()  # of what is carried, where another stage made it so far


@dataclass(frozen=True, slots=True, eq=False)
class LineBlock:
    """A program, or a body: its lines in order, how often it runs in all, and the names of its values' dims."""

    path: Path
    times: int
    inputs: tuple[tuple[str, TensorType], ...]
    lines: tuple[Line | Loop, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, tuple[Names, ...]]
    types: Mapping[str, TensorType]

    def every(self) -> Iterator[LineBlock]:
        """Yield it and those inside it."""
        yield self
        for line in self.lines:
            if isinstance(line, Loop):
                yield from line.block.every()


def flow(program: Program, names: DimNames, path: Path = (), times: int = 1) -> LineBlock:
    """Return the lines of a program."""
    lines: list[Line | Loop] = []
    for number, step in enumerate(program.steps):
        op = as_nested(step.op)
        if op is None:
            operands = tuple(program.types[o] for o in step.operands)
            lines.append(line_of(number, step, operands, names.factors[number]))
            continue
        block = flow(op.body, names.bodies[number], (*path, number), times * op.times)
        lines.append(Loop(number, op, step.operands, step.results, block, 0, op.times))
    return LineBlock(path, times, program.inputs, tuple(lines), program.outputs, names.values, program.types)


def line_of(number: int, step: Step, types: tuple[TensorType, ...], names: Mapping[str, Names]) -> Line:
    """Return a step as a line; raises `LayoutError` for one that moves data."""
    op = computing(step.op)
    if op is None:
        raise LayoutError(f"step {number} ({step.op.name}) of a model moves data; legal are ops that compute")
    found = links(op, types)
    held = {f for dims in found.operands for dim in dims for f in dim}
    made = tuple(dict.fromkeys(f for dims in found.results for dim in dims for f in dim if f not in held))
    return Line(number, op, step.operands, step.results, types, found, names, made)
