"""Ops that place elements: Reshape, Pad, Crop, Cast, Pin."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from shardplan.core.dtypes import COMBINE, identity, numpy_dtype, short_name
from shardplan.core.factor_rule import FactorRule, factor_names
from shardplan.core.layout import Layout
from shardplan.core.namespace import Namespace, Tensor
from shardplan.core.ops.compute import At, RuleTypedOp, Size, check_arity
from shardplan.core.program_builder import Cotangents, ProgramBuilder, Values
from shardplan.core.rule_text import parse_rule, rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

_SAID = re.compile(r"(\w+)=\d+")


@dataclass(frozen=True, slots=True)
class Reshape(RuleTypedOp):
    """Split or merge dims, as `(b s) h -> b s h`; the order of elements stays, `one=1` adds or drops a dim of size 1.

    A size that the shape does not tell stands in the text: `(b=4 s) -> b s`.

    >>> from shardplan.core.mesh import Mesh
    >>> t = TensorType("f32", (8, 6, 4), ("x",), Mesh(x=2))
    >>> print(*Reshape("b s h -> (b s) h").infer(t), *Reshape("b (s=2 t) h -> b s t h").infer(t))
    f32[48@x, 4] f32[8@x, 2, 3, 4]
    """

    name: ClassVar[str] = "reshape"
    aliases = ((0, 0),)
    view = True
    spec: str

    def __post_init__(self) -> None:
        """Check that nothing changes places."""
        rule = parse_rule(add_brackets(self.spec))
        ones = {name for name, n in rule.sizes if n == 1}
        before, after = (
            [name for tensor in side for dim in tensor for name in dim if name not in ones]
            for side in (rule.operands, rule.results)
        )
        if before != after:
            raise TypingError(f"reshape: {self.spec!r} does not keep the order of its factors; an einsum transposes")

    def rule(self, *operands: TensorType) -> FactorRule:
        """All factors pass but those of size 1 that are dropped."""
        return rule_of(self.name, add_brackets(self.spec), operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Elements are not changed."""
        return True

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Reshape to the shape of the shard."""
        return (arrays[0].reshape(size.results[0]),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The sizes of the operand."""
        rule = self.rule(builder.types[operands[0]])
        sizes = {f.name: f.size for f in rule.factors}
        back = (" ".join(_word(dim, sizes) for dim in dims) for (dims,) in (rule.results, rule.operands))
        return [builder(Reshape(" -> ".join(back)), cotangents[0])]

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """The same factors; sizes that the text says are the new ones."""
        return replace(self, spec=said_anew(self.spec, sizes))

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0


def _word(dim: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    """A dim of a spec; a size is said where it is 1, or of a minor factor."""
    words = [f"{n}={sizes[n]}" if k or sizes[n] == 1 else n for k, n in enumerate(dim)]
    return words[0] if len(words) == 1 else f"({' '.join(words)})"


def add_brackets(spec: str) -> str:
    """The rule that a spec without brackets says."""
    left, arrow, right = spec.partition("->")
    return f"[{left.strip()}]{arrow}[{right.strip()}]" if arrow else spec


def said_anew(spec: str, sizes: Mapping[str, int]) -> str:
    """The spec with other sizes of the factors whose sizes it says."""
    return _SAID.sub(lambda found: f"{found[1]}={sizes[found[1]]}", spec)


def _resizing_rule(op: str, t: TensorType, sizes: Sequence[int]) -> FactorRule:
    """The rule of an op that changes the sizes of some dims: those stay whole, the others pass."""
    names, others = factor_names(t.ndim), factor_names(t.ndim, t.ndim)
    changed = [d for d in range(t.ndim) if sizes[d] != t.shape[d]]
    after = [f"{others[d]}={sizes[d]}" if d in changed else names[d] for d in range(t.ndim)]
    fixed = f" | fixed: {' '.join(names[d] for d in changed)}" if changed else ""
    return rule_of(op, f"[{' '.join(names)}] -> [{' '.join(after)}]{fixed}", (t,))


def check_value(op: str, value: float, name: str) -> None:
    """Raise `TypingError` for a value that a dtype does not have."""
    dtype = numpy_dtype(name)
    if dtype.kind in "iu":
        lo, hi = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        fits, legal = isinstance(value, int) and lo <= value <= hi, f"an integer from {lo} to {hi}"
    elif dtype.kind == "b":
        fits, legal = value in (0, 1), "0 or 1"
    else:
        fits, legal = math.isfinite(value), "a finite number"
    if not fits:
        raise TypingError(f"{op}: the value {value} of {name}; legal is {legal}")


@dataclass(frozen=True, slots=True)
class Pad(RuleTypedOp):
    """Put `lo` elements of a value before each dim and `hi` after it; a dim that grows is not sharded."""

    name: ClassVar[str] = "pad"
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    value: float = 0

    def rule(self, *operands: TensorType) -> FactorRule:
        """Dims that grow stay whole."""
        (t,) = check_arity(self.name, operands, 1)
        if not len(self.lo) == len(self.hi) == t.ndim or min((*self.lo, *self.hi), default=0) < 0:
            raise TypingError(
                f"pad: lo={self.lo} and hi={self.hi} of {t}; legal are {t.ndim} numbers from 0 on in each"
            )
        check_value(self.name, self.value, t.dtype)
        return _resizing_rule(self.name, t, [a + n + b for a, n, b in zip(self.lo, t.shape, self.hi, strict=True)])

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Where the value reduced with itself is itself: 0 in a sum, any in a max."""
        if not any((*self.lo, *self.hi)):
            return True
        value = numpy_dtype(operands[0].dtype).type(self.value)
        return bool(COMBINE[reduction](value, value) == value)

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Join a block before and one after, dim by dim."""
        (x,) = arrays
        for d, (lo, hi) in enumerate(zip(self.lo, self.hi, strict=True)):
            before, after = (xp.full((*x.shape[:d], n, *x.shape[d + 1 :]), self.value, xp.dtype(x)) for n in (lo, hi))
            x = xp.concatenate([before, x, after], d) if lo or hi else x
        return (x,)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The part that is not padding."""
        hi = tuple(a + n for a, n in zip(self.lo, builder.types[operands[0]].shape, strict=True))
        return [builder(Crop(self.lo, hi), cotangents[0])]

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Crop(RuleTypedOp):
    """Keep the elements from `start` to before `stop` of each dim; a dim that shrinks is not sharded."""

    name: ClassVar[str] = "crop"
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def rule(self, *operands: TensorType) -> FactorRule:
        """Dims that shrink stay whole."""
        (t,) = check_arity(self.name, operands, 1)
        fits = len(self.start) == len(self.stop) == t.ndim
        if not fits or not all(0 <= a < b <= n for a, b, n in zip(self.start, self.stop, t.shape, strict=True)):
            raise TypingError(
                f"crop: {self.start} to {self.stop} of {t}; legal are 0 <= start < stop <= size in each dim"
            )
        return _resizing_rule(self.name, t, [b - a for a, b in zip(self.start, self.stop, strict=True)])

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """A dim that is whole stays so; of one that is cut the start stays, where the dim itself does."""
        rule, stop = self.rule(*before), list[int]()
        whole = zip(self.start, self.stop, before[0].shape, after[0].shape, rule.results[0], strict=True)
        for a, b, n, new, (kept,) in whole:
            if b - a < n != new:
                raise TypingError(f"crop: {a} to {b} of {n}, which becomes {new}, hides a size")
            stop.append(a + sizes[kept])
        return replace(self, stop=tuple(stop))

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Elements are not changed."""
        return True

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Slice; of a dim that is kept all that is here lies in the bounds."""
        return (arrays[0][tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))],)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Zeros around."""
        rest = tuple(n - b for n, b in zip(builder.types[operands[0]].shape, self.stop, strict=True))
        return [builder(Pad(self.start, rest), cotangents[0])]

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Cast(RuleTypedOp):
    """The values in another dtype."""

    name: ClassVar[str] = "cast"
    pointwise: ClassVar[bool] = True
    dtype: str

    def __post_init__(self) -> None:
        """Check the dtype."""
        object.__setattr__(self, "dtype", short_name(self.dtype))

    def rule(self, *operands: TensorType) -> FactorRule:
        """All dims pass."""
        (t,) = check_arity(self.name, operands, 1)
        if t.dtype.startswith("c") and not self.dtype.startswith("c"):
            raise TypingError(f"cast: {t} to {self.dtype} would lose imaginary parts; legal is a complex dtype")
        return _resizing_rule(self.name, t, t.shape)

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Return the dtype."""
        return (self.dtype,)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Between floats: sums, up to rounding, and max and min where the fill of no addend stays what it is."""
        kinds = [numpy_dtype(d) for d in (operands[0].dtype, self.dtype)]
        if not all(kind.kind in "fV" for kind in kinds):
            return kinds[0].kind == kinds[1].kind == "c" and reduction == "sum"
        if reduction not in ("max", "min"):
            return reduction == "sum"
        infinite = [bool(np.isinf(identity(reduction, kind))) for kind in kinds]
        return infinite[0] == infinite[1]

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """The caller rounds."""
        return (arrays[0],)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Of a float, in its dtype."""
        kind = builder.types[operands[0]].dtype
        return [builder(Cast(kind), cotangents[0]) if numpy_dtype(kind).kind in "fV" else None]

    def flops(self, *operands: TensorType) -> float:
        """One a local element."""
        return float(math.prod(operands[0].local_shape(0)))


def cast_to(d: ProgramBuilder, name: str, dtype: str) -> str:
    """Write a value in a dtype, and return its name; one that is of it already stays."""
    return name if d.types[name].dtype == dtype else d(Cast(dtype), name)


def widened(d: ProgramBuilder, name: str) -> str:
    """Write a value in f32 where its dtype is narrower; what is made of it is rounded at the end."""
    t = d.types[name]
    return cast_to(d, name, "f32") if numpy_dtype(t.dtype).kind in "fV" and t.itemsize < 4 else name


@dataclass(frozen=True, slots=True)
class Pin(RuleTypedOp):
    """The same values, of which a program's author says `to` which axes of a larger mesh their dims are to be cut.

    On a mesh it is as its operand; what partitions a program gives it this layout, over the axes that there are.

    >>> from shardplan.core.mesh import Mesh
    >>> print(*Pin(Layout((("data",), ()))).infer(TensorType("f32", (8, 4), (), Mesh(data=2))))
    f32[8, 4]
    """

    name: ClassVar[str] = "pin"
    aliases = ((0, 0),)
    view = True
    to: Layout

    @property
    def pinned_layout(self) -> Layout:
        """The layout."""
        return self.to

    def rule(self, *operands: TensorType) -> FactorRule:
        """All dims pass."""
        (t,) = check_arity(self.name, operands, 1)
        if len(self.to.dims) != t.ndim or self.to.partial or self.to.root or self.to.boxes is not None:
            raise TypingError(f"pin: {self.to} of {t}; legal are axes of its {t.ndim} dims alone")
        return _resizing_rule(self.name, t, t.shape)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """What is pinned is no sum."""
        return False

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """As they are."""
        return (arrays[0],)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Pinned alike, as JAX does it."""
        return [builder(self, cotangents[0])]

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0
