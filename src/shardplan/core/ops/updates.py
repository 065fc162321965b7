"""Updates of parameters, in place: Sgd, AdamW. A gradient is taken in the parameter's dtype.

Settings named in `inputs` are operands behind the others, scalars in that order, in the place of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardplan.core.draft import Draft
from shardplan.core.ops.arithmetic import Elementwise
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.compute import check_arity
from shardplan.core.ops.placing import Cast
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


@dataclass(frozen=True, slots=True)
class Sgd(Composed):
    """A parameter less `lr` times its gradient."""

    name: ClassVar[str] = "sgd"
    aliases = ((0, 0),)
    lr: float
    inputs: tuple[str, ...] = ()

    def write(self, d: Draft, *operands: TensorType) -> Sequence[str]:
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

    def write(self, d: Draft, *operands: TensorType) -> Sequence[str]:
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


def _check_operands(
    op: str, operands: Sequence[TensorType], count: int, inputs: tuple[str, ...], legal: tuple[str, ...]
) -> None:
    """Refuse another number of operands, those that are not of one shape, but for scalars, and other inputs."""
    if inputs not in ((), *((name,) for name in legal), legal):
        raise TypingError(f"{op}: inputs={inputs}; legal are some of {', '.join(legal)}, in this order")
    given = check_arity(op, operands, count + len(inputs))
    if len({t.shape for t in given[: min(count, 4)]}) > 1 or any(t.shape for t in given[count:]):
        raise TypingError(f"{op} of {', '.join(map(str, operands))}; legal are a gradient and moments of the shape")


def _like(d: Draft, name: str, other: str) -> str:
    kind = d.types[other].dtype
    return name if d.types[name].dtype == kind else d(Cast(kind), name)
