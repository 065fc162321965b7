"""`DistirGraph`: a model as DistIR lists it for one device of a tensor group and one microbatch, with its costs.

Values are numbers from 0; those that no op makes are the function's inputs. A value is a tensor, or a number known
while simulating (a shape, an index), which DistIR counts by elements where it counts a tensor's bytes. Blocks are runs
of ops, each on one place of the pipeline, in the order in which a microbatch goes through them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardplan.simulation.parity.machine import LAUNCH, DistirMachine


@dataclass(frozen=True, slots=True)
class DistirValue:
    """A tensor, or a number that is known: its shape and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int
    known: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes, which count where it is an input of the function."""
        return self.itemsize * math.prod(self.shape)

    @property
    def counted(self) -> int:
        """What it adds to live memory where an op makes it: elements, not bytes, of a number that is known."""
        return math.prod(self.shape) if self.known else self.nbytes


@dataclass(frozen=True, slots=True)
class DistirOp:
    """An op: DistIR's name of it, its values, its seconds, and whether the tensor group adds up its first result."""

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    seconds: float
    summed: bool = False


@dataclass(frozen=True, slots=True)
class DistirBlock:
    """The ops from `start` to before `stop`, which run without a break on one place of the pipeline."""

    start: int
    stop: int
    place: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class DistirGraph:
    """A model on one device of a tensor group, for one microbatch.

    `merged` are the function's results, each with the op that joins it over microbatches and that op's seconds; `dealt`
    are the inputs that microbatches share out; `weights` and their `gradients` are in the order of SGD's operands.
    """

    values: tuple[DistirValue, ...]
    ops: tuple[DistirOp, ...]
    blocks: tuple[DistirBlock, ...]
    merged: tuple[tuple[int, str, float], ...]
    dealt: frozenset[int]
    weights: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


@dataclass(slots=True)
class GraphWriter:
    """Writes a graph op by op, each with DistIR's cost; the state of one function, never kept."""

    machine: DistirMachine
    itemsize: int = 4
    values: list[DistirValue] = field(default_factory=list[DistirValue])
    ops: list[DistirOp] = field(default_factory=list[DistirOp])

    def value(self, shape: Sequence[int], itemsize: int | None = None, known: bool = False) -> int:
        """Add a value, and return its number."""
        self.values.append(DistirValue(tuple(shape), itemsize or self.itemsize, known))
        return len(self.values) - 1

    def shape(self, value: int) -> tuple[int, ...]:
        """Return a value's shape."""
        return self.values[value].shape

    def op(
        self, kind: str, operands: Sequence[int], result: int | tuple[int, ...], seconds: float, summed: bool = False
    ) -> None:
        """Add an op that makes a value or values."""
        results = (result,) if isinstance(result, int) else result
        self.ops.append(DistirOp(kind, tuple(operands), results, seconds, summed))

    def launched(self, kind: str, operands: Sequence[int], like: DistirValue) -> int:
        """Add an op that costs a launch."""
        return self.costing(kind, operands, like, LAUNCH)

    def costing(self, kind: str, operands: Sequence[int], like: DistirValue, seconds: float) -> int:
        """Add an op of these seconds that makes a value like this one; return the value."""
        self.values.append(like)
        self.op(kind, operands, len(self.values) - 1, seconds)
        return len(self.values) - 1

    def elementwise(self, kind: str, first: int, *others: int) -> int:
        """Add an elementwise op, priced by its first operand; the result has the shape that both broadcast to."""
        value = self.values[first]
        seconds = self.machine.elementwise(value.shape, value.itemsize, 1 + len(others))
        like = [self.shape(x) for x in (first, *others)]
        length = max(map(len, like))
        padded = [(1,) * (length - len(x)) + x for x in like]
        shape = tuple(max(extents) for extents in zip(*padded, strict=True))
        return self.costing(kind, (first, *others), DistirValue(shape, value.itemsize, value.known), seconds)
