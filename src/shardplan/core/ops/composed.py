"""`Composed`: an op that says only its decomposition; `Backward`, its gradient as one kernel; and the reverse walk.

A cotangent has the layout of its value's dims. It is never partial over an axis that the value's type uses: what comes
so is reduced first. Over other axes it may be partial: the cotangent of what every device holds is the sum of what each
found, and steps are linear in it. That of a value partial over an axis is the same for all its addends.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.layout import Layout
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.nested import Nested, as_nested
from shardplan.core.op import Op, results_of
from shardplan.core.ops.arithmetic import Elementwise
from shardplan.core.ops.blocks import run_in_blocks
from shardplan.core.ops.collective import moving
from shardplan.core.ops.compute import (
    At,
    Compute,
    IdRange,
    KernelClass,
    LocalRun,
    RuleTypedOp,
    Size,
    Where,
    computing,
    score_sides,
)
from shardplan.core.ops.indexing import Constant
from shardplan.core.program_builder import Cotangents, Decomposition, ProgramBuilder, Values
from shardplan.core.reshard_cotangent import reshard_cotangent
from shardplan.core.step import Step, last_uses
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError, TypingError


@dataclass(frozen=True, slots=True)
class Composed(Compute):
    """An op that says only its decomposition: typing, meaning and flops follow. It is priced as one kernel."""

    @abc.abstractmethod
    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Write the steps, on operands called "0", "1", ..., and return the names of the results."""

    def decomposition(self, *operands: TensorType) -> Decomposition:
        """Return the steps."""
        builder = ProgramBuilder.of(operands)
        return builder.decomposition(*self.write(builder, *operands))

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Type the steps."""
        return self._typed_steps(operands)[1]

    def flops(self, *operands: TensorType) -> float:
        """Add up the steps."""
        return self.share(*operands) * sum(op.flops(*types) for op, _, types in self._typed_steps(operands)[0])

    def bind(self, operands: Sequence[TensorType], where: Where) -> LocalRun:
        """Bind the steps; what none of those to come reads is let go."""
        typed, found = self._typed_steps(operands)
        steps = [(step, op.bind(types, where)) for op, step, types in typed]
        results = self.decomposition(*operands).results
        ends = last_uses([step for step, _ in steps], results)

        def run(xp: Namespace, arrays: Sequence[Tensor]) -> list[Tensor]:
            values = {str(k): x for k, x in enumerate(arrays)}
            for (step, bound), ended in zip(steps, ends, strict=True):
                values.update(zip(step.results, bound(xp, [values[o] for o in step.operands]), strict=True))
                for name in ended:
                    del values[name]
            return [values[name] for name in results]

        shapes = {where(t)[1] for t in found}
        ops = [op for op, _, _ in typed if isinstance(op, RuleTypedOp) and op.pointwise]
        if len(shapes) > 1 or len(ops) < len(typed):
            return run
        # All of a block before the next one: what goes from step to step is no larger than a block.
        (shape,), kinds = shapes, [numpy_dtype(t.dtype) for t in found]
        makes = [[numpy_dtype(t.dtype) for t in results_of(op, types)] for op, _, types in typed]
        nowhere, any_size = At((), ()), Size((), (), ())  # pointwise, an op asks neither

        def run_block(xp: Namespace, arrays: Sequence[Tensor]) -> list[Tensor]:
            values = {str(k): x for k, x in enumerate(arrays)}
            for op, (_, step, _), dtypes in zip(ops, typed, makes, strict=True):
                made = op.local(xp, [values[o] for o in step.operands], nowhere, any_size)
                values.update(zip(step.results, map(xp.astype, made, dtypes), strict=True))
            return [values[name] for name in results]

        return lambda xp, arrays: run_in_blocks(xp, run_block, arrays, shape, kinds)

    def bind_gradient(self, operands: Sequence[TensorType], where: Where, needs: Sequence[int]) -> LocalRun | None:
        """Return the gradient on one device, of the operands and the results' cotangents; None: as its steps say."""
        return None

    def _typed_steps(
        self, operands: Sequence[TensorType]
    ) -> tuple[list[tuple[Compute, Step, tuple[TensorType, ...]]], tuple[TensorType, ...]]:
        """The steps with the types of their operands, and the types of the results."""
        return _steps(self, tuple(operands))

    def kernel_sides(self, *operands: TensorType) -> tuple[float, ...]:
        """Of attention what its price asks."""
        return score_sides(self.share(*operands), *operands) if self.kernel_class == "scores" else ()

    def pull(
        self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values, wanted: Sequence[bool]
    ) -> Cotangents:
        """One kernel, which computes again what it needs of the forward one."""
        needs = tuple(k for k, want in enumerate(wanted) if want)
        found = builder.write_step(Backward(self, needs, len(cotangents)), *operands, *cotangents)
        made = dict(zip(needs, found, strict=True))
        return [made.get(k) for k in range(len(operands))]


@lru_cache(maxsize=1024)  # typed, priced and bound, and laid again on every axis: the same steps
def _steps(
    of: Composed, operands: tuple[TensorType, ...]
) -> tuple[list[tuple[Compute, Step, tuple[TensorType, ...]]], tuple[TensorType, ...]]:
    values = {str(k): t for k, t in enumerate(operands)}
    steps: list[tuple[Compute, Step, tuple[TensorType, ...]]] = []
    try:
        body = of.decomposition(*operands)
        for step in body.steps:
            op = computing(step.op)
            if op is None:
                raise TypingError(f"{step.op.name} in its decomposition moves data; legal are compute ops")
            types = tuple(values[o] for o in step.operands)
            values.update(zip(step.results, results_of(op, types), strict=True))
            steps.append((op, step, types))
    except ShardplanError as error:
        said = str(error)
        raise type(error)(said if said.startswith(f"{of.name} ") else f"{of.name}: {said}") from None
    return steps, tuple(values[name] for name in body.results)


@dataclass(frozen=True, slots=True)
class Backward(Composed):
    """From the operands of an op, and the cotangents of its results, to those of the operands `needs`."""

    name: ClassVar[str] = "backward"
    of: Op
    needs: tuple[int, ...]
    results: int = 1

    @property
    def kernel_class(self) -> KernelClass:
        """That of the op."""
        return self.of.kernel_class if isinstance(self.of, Compute) else "streamed"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """The steps of the op, and back."""
        count = len(operands) - self.results
        if not isinstance(self.of, Composed):
            raise TypingError(f"{self.of.name} has no decomposition; its gradient is steps of its own")
        if not all(0 <= k < count for k in (0, *self.needs)):
            raise TypingError(f"needs={self.needs} of {count} operands and {self.results} cotangents of {self.of.name}")
        made = self.of.write(d, *operands[:count])
        shapes = [d.types[name].shape for name in made]
        if shapes != [t.shape for t in operands[count:]]:
            raise TypingError(
                f"cotangents {', '.join(map(str, operands[count:]))}; the results have the shapes {shapes}"
            )
        steps, wanted = tuple(d.steps), [str(k) for k in self.needs]
        found = {name: str(count + k) for k, name in enumerate(made)}
        Reverse(d, d.types, lambda name: name).fill_cotangents(steps, found, needing(steps, d.types, wanted))
        return [found[w] if w in found else zeros(d, d.types[w], w) for w in wanted]

    def bind(self, operands: Sequence[TensorType], where: Where) -> LocalRun:
        """As the op says, or bind the steps."""
        given = operands[: len(operands) - self.results]
        found = self.of.bind_gradient(given, where, self.needs) if isinstance(self.of, Composed) else None
        return Composed.bind(self, operands, where) if found is None else found

    def ids(self, *operands: TensorType) -> Mapping[int, IdRange]:
        """Those of the op."""
        return self.of.ids(*operands[: len(operands) - self.results]) if isinstance(self.of, Compute) else {}

    def kernel_sides(self, *operands: TensorType) -> tuple[float, ...]:
        """Of attention three products more: scores again, and two for each of its own."""
        found = super(Backward, self).kernel_sides(*operands)
        return (*found[:-1], found[-1] + 3) if found else ()

    def share(self, *operands: TensorType) -> float:
        """That of the op."""
        return self.of.share(*operands[: len(operands) - self.results]) if isinstance(self.of, Composed) else 1.0

    def pull(
        self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values, wanted: Sequence[bool]
    ) -> Cotangents:
        """None: a gradient of a gradient is not said, as what is stopped in the op is not stopped in its gradient."""
        raise TypingError(f"the gradient of {self.of.name} has no gradient")


class DecomposingBuilder(ProgramBuilder):
    """A builder that decomposes ops whose operands do not type on it, and reduces what a step does not take partial."""

    def write_step(self, op: Op, *operands: str, stopped: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Write a step, or those that it comes to."""
        try:
            return super().write_step(op, *operands, stopped=stopped)
        except LayoutError:
            if isinstance(op, Composed):
                body = decompose_sharded(op, [self.types[o] for o in operands])
                names = self.copy(body.steps, lambda name: operands[int(name)])
                return tuple(names[r] for r in body.results)
            whole = [self.reduce_axes(o, self.types[o].layout.partial) for o in operands]
            if tuple(whole) == operands:
                raise
            return super().write_step(op, *whole, stopped=stopped)


def decompose_sharded(op: Composed, types: Sequence[TensorType]) -> Decomposition:
    """Return the steps of an op on operands that may be sharded where the whole op does not type, with reductions."""
    builder = DecomposingBuilder.of(types)
    return builder.decomposition(*op.write(builder, *types))


def differs(t: TensorType) -> bool:
    """Say whether values of a type have cotangents: those of real floats have."""
    return numpy_dtype(t.dtype).kind in "fV"


def needing(steps: Iterable[Step], types: Mapping[str, TensorType], wanted: Iterable[str]) -> set[str]:
    """Return `wanted` and the values of steps that hang on them, through floats and by no stopped use."""
    found = set(wanted)
    for step in steps:
        if any(o in found and k not in step.stopped for k, o in enumerate(step.operands)):
            found |= {r for r in step.results if differs(types[r])}
    return found


def zeros(builder: ProgramBuilder, t: TensorType, of: str) -> str:
    """Write a cotangent of zeros of a value."""
    name = builder(Constant(0, t.dtype, t.shape, without_partial(t), t.mesh))
    builder.alike[name] = of
    return name


def without_partial(t: TensorType) -> Layout:
    """Return the layout of a type's dims, which is that of a cotangent."""
    return Layout(t.layout.dims)


def plus(builder: ProgramBuilder, x: str, y: str) -> str:
    """Write a sum; where one addend is partial and the other is not, that one is reduced first."""
    over = [builder.types[v].mesh.expand(builder.types[v].layout.partial) for v in (x, y)]
    mesh, both = builder.types[x].mesh, set(over[0]) & set(over[1])
    found = [
        builder.reduce_axes(v, mesh.fold(tuple(a for a in own if a not in both)))
        for v, own in zip((x, y), over, strict=True)
    ]
    return builder(Elementwise("a + b"), *found)


class Reverse:
    """The walk from the cotangents of what steps make to those of what they read; one walks over one program.

    `types` are those of the forward values, and `value` says what a forward value is called in the builder, where it is
    asked for one.
    """

    def __init__(self, builder: ProgramBuilder, types: dict[str, TensorType], value: Callable[[str], str]) -> None:
        """Begin."""
        self.builder, self.types, self.value = builder, types, value

    def fill_cotangents(
        self, steps: Sequence[Step], cotangents: dict[str, str], needed: set[str], origin: int | None = None
    ) -> None:
        """Fill in the cotangents of the values `needed`, given those of what the steps make.

        What is written is of step `origin` where it is said, as of the steps of a body.
        """
        builder = self.builder
        builder.alike.update((c, name) for name, c in cotangents.items())
        for number in reversed(range(len(steps))):
            step = steps[number]
            wants = [o in needed and k not in step.stopped for k, o in enumerate(step.operands)]
            if not any(wants) or not any(r in cotangents for r in step.results):
                continue
            builder.origin = number if origin is None else origin
            came = [
                builder.reduce_axes(cotangents[r], self.types[r].layout.used_axes) if r in cotangents else None
                for r in step.results
            ]
            try:
                found = self.step_gradient(number, step, came, wants)
            except ShardplanError as error:
                raise type(error)(f"the gradient of step {number} ({step.op.name}): {error}") from None
            for o, want, new in zip(step.operands, wants, found, strict=True):
                if want and new is not None:
                    cotangents[o] = plus(builder, cotangents[o], new) if o in cotangents else new
                    builder.alike.setdefault(cotangents[o], o)

    def step_gradient(self, number: int, step: Step, came: Cotangents, wants: Sequence[bool]) -> Cotangents:
        """Write the gradient of a step: of a move the way back, else the part of what its op says that is wanted."""
        if moving(step.op) is not None and as_nested(step.op) is None:
            pairs = zip(step.operands, came, strict=True)
            return [c and reshard_cotangent(self.builder, c, self.types[o], step.op.name) for o, c in pairs]
        inner = as_nested(step.op)
        if inner is not None and inner.overlaps:
            return self._body_gradient(number, inner, step, came, wants)
        op = computing(step.op)
        if op is None:
            raise TypingError(f"{step.op.name} has no gradient")
        dy = [c or zeros(self.builder, self.types[r], r) for c, r in zip(came, step.results, strict=True)]
        outside = (*step.operands, *step.results, *dy)
        types = [self.types[n] for n in (*step.operands, *step.results)] + [self.builder.types[c] for c in dy]
        part, many = ProgramBuilder.of(types), len(step.operands)
        names = [str(k) for k in range(len(outside))]
        said = op.pull(part, names[:many], names[many : many + len(dy)], names[many + len(dy) :], wants)
        found = [x if want else None for x, want in zip(said, wants, strict=True)]

        def read(name: str) -> str:
            k = int(name)
            return self.value(outside[k]) if k < many + len(dy) else outside[k]

        made = self.builder.copy(part.decomposition(*filter(None, found)).steps, read)
        return [None if x is None else made[x] if x in made else read(x) for x in found]

    def _body_gradient(
        self, number: int, op: Nested, step: Step, came: Cotangents, wants: Sequence[bool]
    ) -> Cotangents:
        """Write the gradient of a body that runs once; of what it makes, what is needed is made again."""
        body, alike = op.body, dict(self.builder.alike)
        names = [name for name, _ in body.inputs]
        outside, makers = dict(zip(names, step.operands, strict=True)), {r: s for s in body.steps for r in s.results}
        made: dict[str, str] = {}

        def value(name: str) -> str:
            if name in outside:
                return self.value(outside[name])
            if name not in made:
                maker = makers[name]
                copies = self.builder.write_step(maker.op, *map(value, maker.operands))
                made.update(zip(maker.results, copies, strict=True))
            return made[name]

        found = {name: c for name, c in zip(body.outputs, came, strict=True) if c is not None}
        needed = needing(body.steps, body.types, [n for n, want in zip(names, wants, strict=True) if want])
        Reverse(self.builder, dict(body.types), value).fill_cotangents(body.steps, found, needed, number)
        self.builder.alike = alike  # names of the body are not of this walk
        return [found.get(name) for name in names]
