"""Updates of parameters, in place: Sgd, AdamW, Adafactor. A gradient is taken in the parameter's dtype.

Settings named in `inputs` are operands behind the others, scalars in that order, in the place of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.ops.arithmetic import Elementwise, ReduceDims
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.compute import check_arity
from shardplan.core.ops.placing import cast_to
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


@dataclass(frozen=True, slots=True)
class Sgd(Composed):
    """A parameter less `lr` times its gradient."""

    name: ClassVar[str] = "sgd"
    aliases = ((0, 0),)
    lr: float
    inputs: tuple[str, ...] = ()

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """One expression."""
        _check_operands(self.name, operands, 2, self.inputs, ("lr",))
        lr, more = ("c", [_like(d, "2", "0")]) if self.inputs else (self.lr, [])
        return [d(Elementwise(f"a - {lr} * b"), "0", _like(d, "1", "0"), *more)]


@dataclass(frozen=True, slots=True)
class AdamW(Composed):
    """From parameter, gradient, both moments and the number of this step (i32, from 1): parameter and both moments.

    arXiv 1711.05101, as torch has it: the decay is `lr * decay` of the parameter.
    """

    name: ClassVar[str] = "adamw"
    aliases = ((0, 0), (1, 2), (2, 3))
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.01
    inputs: tuple[str, ...] = ()

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Moments, their corrections by 1 - beta**step, the update."""
        _check_operands(self.name, operands, 5, self.inputs, ("lr", "decay"))
        said = {"lr": str(self.lr), "decay": str(self.decay)} | dict(zip(self.inputs, "ef", strict=False))
        g = _like(d, "1", "2")
        m = d(Elementwise(f"{self.beta1} * a + {1 - self.beta1} * b"), "2", g)
        v = d(Elementwise(f"{self.beta2} * a + {1 - self.beta2} * b * b"), "3", g)
        step = _like(d, "4", "0")
        first, second = (f"(1 - exp({math.log(b)} * d))" for b in (self.beta1, self.beta2))
        text = f"a - {said['lr']} * ({said['decay']} * a + b / {first} / (sqrt(c / {second}) + {self.eps}))"
        more = [_like(d, str(5 + k), "0") for k in range(len(self.inputs))]
        w = d(Elementwise(text), "0", _like(d, m, "0"), _like(d, v, "0"), step, *more)
        return [w, m, v]


@dataclass(frozen=True, slots=True)
class Adafactor(Composed):
    """From parameter, gradient, what is kept of squares and the number of this step (i32, from 1) to the first and it.

    arXiv 1804.04235, as torch has it: of a matrix the means of its squares along the dims `cols` are kept, and along
    `rows`, both with dims of 1; without them those of every element. The first `each` dims number tensors of their own.
    The step is at most `lr`, and 1/sqrt(step), of the parameter's root mean square, or of `eps2`; an update of a root
    mean square above `clip_threshold` is scaled down to it. `eps1` of 0 is what the dtype tells apart from 1.
    """

    name: ClassVar[str] = "adafactor"
    lr: float
    beta2_decay: float = -0.8
    eps1: float = 0.0
    eps2: float = 1e-3
    clip_threshold: float = 1.0
    decay: float = 0.0
    inputs: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    each: int = 0

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """The parameter, and what is kept."""
        return ((0, 0), (1, 2), (2, 3))[: 3 if self.rows else 2]

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Means of squares, the update by their roots, its root mean square, the step; in the dtype of what is kept."""
        count = 5 if self.rows else 4
        given = check_arity(self.name, operands, count + len(self.inputs))
        sides = (self.cols, self.rows) if self.rows else ((),)
        shape = given[0].shape
        kept = [tuple(1 if k in side else n for k, n in enumerate(shape)) for side in sides]
        _check_inputs(self.name, self.inputs, ("lr", "decay"))
        if [t.shape for t in given[1:]] != [shape, *kept, *[()] * (1 + len(self.inputs))]:
            raise TypingError(
                f"{self.name} of {', '.join(map(str, given))}; legal are a gradient and means of the shape"
            )
        w, g = _like(d, "0", "2"), _like(d, "1", "2")
        now = _like(d, str(count - 1), "2")
        more = {name: _like(d, str(count + k), "2") for k, name in enumerate(self.inputs)}
        eps = self.eps1 or float(ml_dtypes.finfo(numpy_dtype(d.types["2"].dtype)).eps)
        square, share = d(Elementwise("a * a"), g), d(Elementwise(f"exp({self.beta2_decay} * log(a))"), now)
        means = [d(ReduceDims(side, "mean", keep=True), square) if side else square for side in sides]
        found = [d(Elementwise("a + c * (b - a)"), str(2 + k), x, share) for k, x in enumerate(means)]
        if self.rows:
            over = d(ReduceDims(self.rows, "mean", keep=True), found[0])
            text = f"a * rsqrt(maximum(b * c / maximum(d, {eps}), {eps * eps}))"
            update = d(Elementwise(text), g, *found, over)
        else:
            update = d(Elementwise(f"a * rsqrt(maximum(b, {eps * eps}))"), g, found[0])
        inner = tuple(range(self.each, len(shape)))
        size, length = (d(ReduceDims(inner, "mean", keep=True), d(Elementwise("a * a"), x)) for x in (w, update))
        said = {"lr": str(self.lr), "decay": str(self.decay)} | dict(zip(more, "fg", strict=False))
        step = f"maximum({self.eps2}, sqrt(b)) * minimum({said['lr']}, rsqrt(e))"
        clipped = f"d / maximum(1, sqrt(c) / {self.clip_threshold})"
        text = f"a * (1 - {said['lr']} * {said['decay']}) - {step} * {clipped}"
        return [_like(d, d(Elementwise(text), w, size, length, update, now, *more.values()), "0"), *found]


def _check_inputs(op: str, inputs: tuple[str, ...], legal: tuple[str, ...]) -> None:
    """Refuse other inputs than some of those that are legal, in their order."""
    if inputs not in ((), *((name,) for name in legal), legal):
        raise TypingError(f"{op}: inputs={inputs}; legal are some of {', '.join(legal)}, in this order")


def _check_operands(
    op: str, operands: Sequence[TensorType], count: int, inputs: tuple[str, ...], legal: tuple[str, ...]
) -> None:
    """Refuse another number of operands, those that are not of one shape, but for scalars, and other inputs."""
    _check_inputs(op, inputs, legal)
    given = check_arity(op, operands, count + len(inputs))
    if len({t.shape for t in given[: min(count, 4)]}) > 1 or any(t.shape for t in given[count:]):
        raise TypingError(f"{op} of {', '.join(map(str, operands))}; legal are a gradient and moments of the shape")


def _like(d: ProgramBuilder, name: str, other: str) -> str:
    return cast_to(d, name, d.types[other].dtype)
