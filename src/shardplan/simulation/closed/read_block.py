"""A program, or a body, while it is read: in which state every value is, and which are needed behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardplan.core.dim_names import DimNames
from shardplan.core.nested import Nested
from shardplan.core.ops.compute import Compute
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.simulation.closed.work import Saved
from shardplan.strategy.partition.axis_propagation import PARTIAL, State
from shardplan.strategy.partition.tables import TableLine


@dataclass(slots=True, eq=False)
class ReadBlock:
    """Values of a program, or of a body, while it is read."""

    program: Program
    names: DimNames
    run: int
    state: dict[str, State] = field(default_factory=dict[str, State])
    made: dict[str, list[State]] = field(default_factory=dict[str, "list[State]"])  # each state that a value was in
    maker: dict[str, str] = field(default_factory=dict[str, str])  # the kind of kernel that made it
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])  # what that read
    held: dict[str, tuple[str, State]] = field(default_factory=dict[str, "tuple[str, State]"])  # parameters
    saved: dict[str, tuple[tuple[int, str], Saved]] = field(
        default_factory=dict[str, "tuple[tuple[int, str], Saved]"]
    )  # by the value that has it again, what was kept
    needed: set[str] = field(default_factory=set[str])
    kept: set[str] = field(default_factory=set[str])  # what the backward pass has, too
    parts: dict[str, State] = field(default_factory=dict[str, State])  # addends of the gradients of parameters
    number: int = 0  # of the step that is read
    narrow: set[str] = field(default_factory=set[str])  # what a narrow product before it has cast
    made_at: dict[str, int] = field(default_factory=dict[str, int])  # by value how many kernels there were then
    copies: dict[tuple[str, frozenset[tuple[str, int]]], tuple[int, int]] = field(
        default_factory=dict[tuple[str, "frozenset[tuple[str, int]]"], tuple[int, int]]
    )  # by value and state in which steps want it otherwise than it was made: the first of these steps and the last

    def want(self, name: str, wanted: State) -> None:
        """Note that the step that is read wants a value in a state."""
        key = name, frozenset(wanted.items())
        self.copies[key] = self.copies.get(key, (self.number,))[0], self.number


def table_state(lines: Sequence[TableLine], name: str, dims: Sequence[str], axes: Sequence[str]) -> State:
    """Return where axes have a value, as the first line of a table that names it says; nowhere, where none does."""
    for line in lines:
        if line.matches(name):
            return {a: dims.index(d) for d, cut in line.dims if d in dims for a in cut if a in axes}
    return {}


def canonical_state(block: ReadBlock, name: str, serve: Mapping[str, Sequence[Sequence[str]]]) -> State:
    """Return a state without sums: where an axis has one, the first dim that it serves, if any."""
    found: dict[str, int] = {}
    for axis, dim in block.state.get(name, {}).items():
        if dim != PARTIAL:
            found[axis] = dim
            continue
        names = block.names.values[name]
        serves = [d for group in serve[axis] for d, called in enumerate(names) if any(n in group for n in called)]
        if serves:
            found[axis] = serves[0]
    return found


def needed_values(program: Program, forwards: int) -> set[str]:
    """The values of the forward steps that a backward step reads, and what they are made of."""
    wanted = {o for step in program.steps[forwards:] for o in step.operands}
    for step in reversed(program.steps[:forwards]):
        if wanted & {*step.results}:
            wanted |= {*step.operands}
    return wanted


def needed_inside(op: Nested, step: Step, block: ReadBlock) -> set[str]:
    """The values of a body that what is stacked is made of: not those that only go on to the next layer."""
    wanted = {
        name for k, name in enumerate(op.body.outputs) if k >= op.carried_count and step.results[k] in block.needed
    }
    for one in reversed(op.body.steps):
        if wanted & {*one.results}:
            wanted |= {*one.operands}
    return wanted


def joins_product(
    block: ReadBlock, step: Step, op: Compute, types: Sequence[TensorType], results: Sequence[TensorType]
) -> bool:
    """Say whether a step adds a parameter to what a product makes, and no more: libraries do it in the product."""
    one = [o for o in step.operands if o not in block.held]
    adds = op.kernel_class == "streamed" and op.flops(*types) <= results[0].local_bytes() / results[0].itemsize
    return adds and len(step.operands) == 2 and len(one) == 1 and block.maker.get(one[0]) == "product"


def made_of(block: ReadBlock, name: str) -> str | None:
    """Return the largest value that a kernel which streams has made a value of, where that is smaller; else None."""
    types, sources = block.program.types, block.sources.get(name, ())
    largest = max(sources, key=lambda o: types[o].local_bytes(), default=None)
    if largest is None or block.maker.get(name) != "streamed":
        return None
    return largest if types[largest].local_bytes() < types[name].local_bytes() else None


def move_steps(
    kinds: Mapping[tuple[bool, bool], Sequence[str]], t: TensorType, now: State, wanted: State
) -> Iterator[tuple[bool, bool, tuple[str, ...], State]]:
    """Yield the movements of a value: whether each sums, and makes whole, over which axes, and where others have it.

    `kinds` has the axes that move by whether they sum, and make whole; `now` and `wanted` are where all axes have it.
    What is summed over some axes and exchanged over others is summed by parts, which are exchanged, and gathered then.
    """
    free = [d for d in range(t.ndim) if d not in (*now.values(), *wanted.values())]
    by_parts = (True, True) in kinds and (False, False) in kinds and free
    parts = tuple(kinds[True, True]) if by_parts else ()
    between = {**now, **dict.fromkeys(parts, max(free, key=t.shape.__getitem__, default=0))}
    if parts:
        yield True, False, parts, now
    for (summed, whole), axes in kinds.items():
        if not (parts and summed and whole):
            yield summed, whole, tuple(axes), between
    if parts:
        yield False, True, parts, wanted
