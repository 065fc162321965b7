"""`resize_dims`: a program in which dims of some names have other sizes; every shape is derived again from factors.

Ops are given the new sizes of their factors (`Compute.with_sizes`), and types follow from the inputs. What does not
follow is an error that names it: a result of another size than the names of its dims say, rows of a table beyond its
end, and beside a sum along a dim that changes a number that stands for a size. A sum divided by the number of its
elements is a mean: see `counted_means`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardplan.core.dim_names import DimNames, Names, links
from shardplan.core.dtypes import stands_for
from shardplan.core.expression_tree import Binary, Name, Number, walk
from shardplan.core.nested import Nested, as_nested
from shardplan.core.op import Op, results_of
from shardplan.core.ops.arithmetic import Elementwise, Expand, ReduceDims
from shardplan.core.ops.compute import computing
from shardplan.core.ops.indexing import Constant, Gather, Iota
from shardplan.core.ops.placing import Cast, Reshape
from shardplan.core.program import Program
from shardplan.core.step import Step, live_steps
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError, TypingError


class Sizes(NamedTuple):
    """The sizes of some names, as they are and as they shall be."""

    before: Mapping[str, int]
    after: Mapping[str, int]

    def of(self, names: Names, size: int) -> int:
        """Return the new size of a dim or a factor; raises `TypingError` for one that is a factor of a changed dim."""
        for name in names:
            whole = name.partition(".")[0]
            if whole != name and whole in self.after:
                raise TypingError(f"a factor of {size} of {whole}={self.before[whole]} hides a size")
            if name in self.after and size % self.before[name] == 0:
                size = size // self.before[name] * self.after[name]
        return size


def resize_dims(program: Program, names: DimNames, sizes: Sizes) -> Program:
    """Return the program with dims of other sizes, on one device.

    Raises `TypingError` naming the step where a size does not follow.

    >>> from shardplan.core.dim_names import dim_names
    >>> from shardplan.core.ops import Expand
    >>> x = TensorType.parse("f32[3]", "x=1")
    >>> p = Program({"x": x}, [Step(Expand("h -> b=4 h"), ("x",), ("y",))], ("y",))
    >>> named = dim_names(p, {"x": ("h",)})
    >>> resize_dims(p, named, Sizes({"h": 3, "d0": 4}, {"h": 5, "d0": 2})).steps[0].op
    Expand(spec='h -> b=2 h', over=Layout(dims=(), partial=(), reduction=None, root=()))
    """
    return _Resizer(program, names, sizes, {}).program()


class SumExtent(NamedTuple):
    """Of how many elements a value is a sum, and whether along a dim that changes."""

    many: int
    changed: bool


class _Resizer:
    """The new steps and types of one program; `sums` has what values are sums of."""

    def __init__(self, program: Program, names: DimNames, sizes: Sizes, sums: Mapping[str, SumExtent]) -> None:
        self.old, self.names, self.sizes = program, names, sizes
        self.sums = dict(sums)
        self.made = {r: step for step in program.steps for r in step.results}
        self.types: dict[str, TensorType] = {}

    def program(self) -> Program:
        for name, t in self.old.inputs:
            self.types[name] = self.resized_type(name, t)
        steps = [self.step(number, step) for number, step in enumerate(self.old.steps)]
        return Program({n: self.types[n] for n, _ in self.old.inputs}, steps, self.old.outputs)

    def resized_type(self, name: str, t: TensorType) -> TensorType:
        """The type that a value shall have, by the names of its dims."""
        pairs = zip(self.names.values[name], t.shape, strict=True)
        return TensorType(t.dtype, tuple(self.sizes.of(n, size) for n, size in pairs), t.layout, t.mesh)

    def step(self, number: int, step: Step) -> Step:
        given = tuple(self.types[o] for o in step.operands)
        try:
            op = self.op(number, step, given)
            found = results_of(op, given)
            wanted = [self.resized_type(r, self.old.types[r]) for r in step.results]
        except ShardplanError as error:
            raise TypingError(f"step {number} ({step.op.name}): {error}") from None
        if list(found) != wanted:
            old, new, due = (
                ", ".join(map(str, side)) for side in (map(self.old.types.get, step.results), found, wanted)
            )
            raise TypingError(
                f"step {number} ({step.op.name}) hides a size: {old} comes to {new}, and its dims to {due}"
            )
        self.types |= zip(step.results, found, strict=True)
        self.check_lookup(number, step)
        self.check_count(number, step)
        return replace(step, op=op)

    def op(self, number: int, step: Step, given: Sequence[TensorType]) -> Op:
        inner, compute = as_nested(step.op), computing(step.op)
        if inner is not None:
            return self.body(number, step, inner)
        if compute is None:
            return step.op
        old = tuple(self.old.types[o] for o in step.operands)
        found = links(step.op, old).sizes
        sizes = {f: self.sizes.of(self.names.factors[number][f], n) for f, n in found.items()}
        return compute.with_sizes(old, given, sizes)

    def body(self, number: int, step: Step, op: Nested) -> Op:
        inside = {n: self.sums[o] for (n, _), o in zip(op.body.inputs, step.operands, strict=True) if o in self.sums}
        return replace(op, body=_Resizer(op.body, self.names.bodies[number], self.sizes, inside).program())

    def check_lookup(self, number: int, step: Step) -> None:
        """Refuse a table that is shorter than a count by which its rows are looked up."""
        if isinstance(step.op, Gather):
            table, ids = step.operands
            while (maker := self.made.get(ids)) is not None and isinstance(maker.op, (Reshape, Cast, Expand)):
                ids = maker.operands[0]
            many, rows = max(self.types[ids].shape, default=1), self.types[table].shape[0]
            if maker is not None and isinstance(maker.op, Iota) and many > rows:
                raise TypingError(f"step {number} (gather): {many} rows of {table}, which has {rows}")

    def check_count(self, number: int, step: Step) -> None:
        """Note how many elements a value is a sum of; where a dim of it changes refuse a number that may be of them."""
        many = math.prod(self.sums[o].many for o in step.operands if o in self.sums)
        changed = any(self.sums[o].changed for o in step.operands if o in self.sums)
        op = step.op
        if isinstance(op, ReduceDims) and op.reduction == "sum":
            old, new = (types[step.operands[0]].shape for types in (self.old.types, self.types))
            many *= math.prod(old[d] for d in op.dims)
            changed = changed or any(old[d] != new[d] for d in op.dims)
        elif isinstance(op, Elementwise) and changed:
            for value in self.numbers(step, op):
                if (size := self.hidden_multiple(value, many, self.old.types[step.results[0]].dtype)) is not None:
                    raise TypingError(
                        f"step {number} ({op.name}): {value:g} in {op.expr!r}, beside a sum of {many} elements, "
                        f"hides a size that changes, {size}"
                    )
        elif not isinstance(op, (Elementwise, Reshape, Cast)):
            many = 1
        if many > 1:
            self.sums |= dict.fromkeys(step.results, SumExtent(many, changed))

    def numbers(self, step: Step, op: Elementwise) -> list[float]:
        """The factors and divisors of an expression that are numbers, and operands that are one number."""
        products = [n for n in walk(op.expression.root) if isinstance(n, Binary) and n.symbol in "*/"]
        found = [float(x.value) for n in products for x in (n.left, n.right) if isinstance(x, Number)]
        used = {x.name for n in products for x in (n.left, n.right) if isinstance(x, Name)}
        letters = zip(op.expression.names, step.operands, strict=True)
        makers = [self.made[o].op for letter, o in letters if letter in used and o in self.made]
        return found + [float(c.value) for c in makers if isinstance(c, Constant)]

    def hidden_multiple(self, value: float, many: int, dtype: str) -> str | None:
        """Say which changed size a number may be a multiple of, or the inverse of one."""
        for x in (abs(value), 1 / abs(value) if value else 0.0):
            whole = round(x)
            for name, new in self.sizes.after.items():
                n = self.sizes.before[name]
                if n not in (1, new) and stands_for(x, whole, dtype) and whole % n == 0 < whole <= many:
                    return f"{name}={n}"
        return None


def counted_means(program: Program) -> Program:
    """Return a program in which a sum that is divided by the number of its elements is a mean, in bodies too.

    >>> x = TensorType.parse("f32[3, 4]", "x=1")
    >>> steps = [Step(ReduceDims((0, 1)), ("x",), ("y",)), Step(Elementwise("a / 12"), ("y",), ("z",))]
    >>> print(*(s.op for s in counted_means(Program({"x": x}, steps, ("z",))).steps))
    ReduceDims(dims=(0, 1), reduction='mean', keep=False)
    """
    made = {r: s for s in program.steps for r in s.results}
    steps: list[Step] = []
    for step in program.steps:
        op, sums = step.op, made.get(step.operands[0]) if step.operands else None
        if isinstance(op, Elementwise) and sums is not None and isinstance(sums.op, ReduceDims):
            t = program.types[sums.operands[0]]
            many = math.prod(t.shape[d] for d in sums.op.dims)
            if sums.op.reduction == "sum" and many > 1 and _divides(op, many, t.dtype):
                step = replace(step, op=replace(sums.op, reduction="mean"), operands=sums.operands)
        inner = as_nested(op)
        steps.append(step if inner is None else replace(step, op=replace(inner, body=counted_means(inner.body))))
    live = [steps[k] for k in live_steps(steps, program.outputs)]
    return Program(program.inputs, live, program.outputs)


def _divides(op: Elementwise, many: int, dtype: str) -> bool:
    """Whether an expression is its operand by a number, or times its inverse."""
    match op.expression.root:
        case Binary("/", Name(), Number(value)):
            return value == many
        case Binary("*", Name(), Number(value)) | Binary("*", Number(value), Name()):
            return stands_for(value * many, 1.0, dtype)
        case _:
            return False
