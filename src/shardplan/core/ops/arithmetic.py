"""Products, sums and expressions: Einsum, Elementwise, ReduceDims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from shardplan.core.dtypes import identity, numpy_dtype
from shardplan.core.expression import Expression
from shardplan.core.factor_rule import FactorRule, factor_names
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.compute import At, Ruled, Size, counted
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import ParseError, TypingError

_REDUCTIONS = ("sum", "max", "min", "mean")


def _common_dtype(op: str, operands: Sequence[TensorType]) -> str:
    kinds = sorted({t.dtype for t in operands})
    if len(kinds) > 1:
        raise TypingError(f"{op}: operands of the dtypes {', '.join(kinds)}; legal is one dtype")
    return kinds[0]


@dataclass(frozen=True, slots=True)
class Einsum(Ruled):
    """Products and sums of any number of operands in Einstein's notation, `ik,kj->ij`; no ellipsis.

    Raises `ParseError` at the character for a malformed spec.

    >>> from shardplan.core.mesh import Mesh
    >>> m = Mesh(x=2)
    >>> a, b = TensorType("f32", (8, 8), (None, "x"), m), TensorType("f32", (8, 16), ("x",), m)
    >>> print(*Einsum("ik,kj->ij").infer(a, b), Einsum("ik,kj->ij").flops(a, b))
    f32[8, 16]{+x} 1024.0
    """

    name: ClassVar[str] = "einsum"
    spec: str

    def __post_init__(self) -> None:
        """Check the spec."""
        text = self.spec
        arrow = text.find("->")
        if arrow < 0:
            raise ParseError("an einsum spec names its result, as in ik,kj->ij", text, len(text))
        for k, c in enumerate(text):
            if not (c.isascii() and c.isalpha()) and k not in (arrow, arrow + 1) and (c != "," or k > arrow):
                raise ParseError(f"{c!r} is not legal in an einsum spec; legal are letters, ',' and one '->'", text, k)
        for k in range(arrow + 2, len(text)):
            if text[k] not in text[:arrow]:
                raise ParseError(f"the factor {text[k]} of the result is in no operand", text, k)
            if text[k] in text[arrow + 2 : k]:
                raise ParseError(f"the factor {text[k]} is twice in the result", text, k)

    @property
    def sides(self) -> tuple[tuple[str, ...], str]:
        """The factors of the operands' dims, and of the result's."""
        left, right = self.spec.split("->")
        return tuple(left.split(",")), right

    def rule(self, *operands: TensorType) -> FactorRule:
        """Contracted factors are reduced with a sum, the others pass."""
        found = rule_of(f"einsum {self.spec}", _einsum_rule(self.spec), operands)
        if _common_dtype(self.name, operands) == "bool":
            raise TypingError("einsum: products and sums are not defined for bool; legal is a numeric dtype")
        return found

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """A product is linear in one operand at a time; a mere transposition passes everything."""
        sides, result = self.sides
        if reduction == "sum":
            return len(partial) == 1
        return len(sides) == 1 and set(sides[0]) == set(result)

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Einsum in the wide dtype."""
        return (xp.einsum(self.spec, *(xp.astype(x, wide(xp.dtype(x))) for x in arrays)),)

    def flops(self, *operands: TensorType) -> float:
        """2 x the product of the local factor sizes; of one operand, its additions."""
        sides, result = self.sides
        self.infer(*operands)
        sizes: dict[str, int] = {}
        for letters, t in zip(sides, operands, strict=True):
            sizes.update(zip(letters, t.local_shape(0), strict=True))  # place 0 has the largest tile of every dim
        per = int(not set(sides[0]) <= set(result)) if len(sides) == 1 else 2
        return float(per * math.prod(sizes.values()))


@lru_cache(maxsize=1024)
def _einsum_rule(spec: str) -> str:
    """The text of the rule: `ik,kj->ij` is `[i k] [k j] -> [i j] | sum: k`."""
    left, right = spec.split("->")
    summed = "".join(dict.fromkeys(x for x in left if x != "," and x not in right))
    sides = " ".join(f"[{' '.join(letters)}]" for letters in left.split(","))
    return f"{sides} -> [{' '.join(right)}]" + (f" | sum: {' '.join(summed)}" if summed else "")


def matmul(ndim: int = 2) -> Einsum:
    """Return the matrix product of operands of `ndim` dims, the leading ones being batches.

    >>> matmul().spec, matmul(3).spec, matmul(4).spec
    ('mk,kn->mn', 'bmk,bkn->bmn', 'bcmk,bckn->bcmn')
    """
    letters = "bcdefghijlopqrstuvwxyz"  # without those of the matrix dims, and without a
    if not 2 <= ndim <= len(letters) + 2:
        raise TypingError(f"a matrix product of {ndim} dims; legal are 2 to {len(letters) + 2}")
    batch = letters[: ndim - 2]
    return Einsum(f"{batch}mk,{batch}kn->{batch}mn")


@dataclass(frozen=True, slots=True)
class Elementwise(Ruled):
    """One expression of the operands a, b, c, ... on every element, with numpy's broadcasting (trailing alignment).

    `expr` is kept in its canonical text (see `Expression`). The operands and the result are of one dtype, except that
    an operand which is itself the condition of a `where` is bool. Raises `ParseError` at the character.

    >>> from shardplan.core.mesh import Mesh
    >>> t = TensorType("f32", (8, 4), ("x",), Mesh(x=2))
    >>> print(*Elementwise("relu(a)+b").infer(t, TensorType("f32", (4,), (), t.mesh)))
    f32[8@x, 4]
    """

    name: ClassVar[str] = "elementwise"
    expr: str

    def __post_init__(self) -> None:
        """Parse, and keep the canonical text."""
        object.__setattr__(self, "expr", str(Expression.parse(self.expr)))

    @property
    def expression(self) -> Expression:
        """The parsed expression."""
        return Expression.parse(self.expr)

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Return the common dtype of the operands that are no condition."""
        expression = self.expression
        values: list[TensorType] = []
        for name, t in zip(expression.names, operands, strict=True):
            if name not in expression.conditions:
                values.append(t)
            elif t.dtype != "bool":
                raise TypingError(f'elementwise: "{self.expr}": the condition {name} is a {t}; legal is bool')
        if not values:
            raise TypingError(f'elementwise: "{self.expr}": all operands are conditions; one must be a value')
        return (_common_dtype(self.name, values),)

    def rule(self, *operands: TensorType) -> FactorRule:
        """Dims of the result are factors that pass; a dim of size 1 that broadcasts has its own, not to be sharded."""
        expression = self.expression
        counted(f'elementwise: "{self.expr}"', operands, expression.arity)
        (dtype,) = self.dtypes(*operands)
        expression.check(numpy_dtype(dtype), dtype)
        ndim = max(t.ndim for t in operands)
        shape = [1] * ndim
        for k, t in enumerate(operands):
            for d, n in enumerate(t.shape, ndim - t.ndim):
                if n != 1 and shape[d] not in (1, n):
                    raise TypingError(
                        f"elementwise: operand {k}, {t}, does not broadcast: its dim {d - ndim + t.ndim} has size {n}; "
                        f"legal are 1 and {shape[d]}"
                    )
                shape[d] = max(shape[d], n)
        names = factor_names(ndim)
        spare = iter(factor_names(ndim * len(operands), ndim))
        fixed: list[str] = []
        sides: list[str] = []
        for t in operands:
            dims = list(names[ndim - t.ndim :])
            for d, n in enumerate(t.shape):
                if n != shape[d + ndim - t.ndim]:
                    dims[d] = next(spare)
                    fixed.append(dims[d])
            sides.append(f"[{' '.join(dims)}]")
        text = f"{' '.join(sides)} -> [{' '.join(names)}]" + (f" | fixed: {' '.join(fixed)}" if fixed else "")
        return rule_of(self.name, text, operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Sums pass where the expression is linear in them; max and min where it increases."""
        expression = self.expression
        names = [expression.names[k] for k in partial]
        if reduction == "sum":
            return expression.degree(names) == 1
        fill = identity(reduction, numpy_dtype(self.dtypes(*operands)[0]))
        return expression.commutes(names, reduction, finite=bool(np.isfinite(fill)))

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Evaluate; floats in f32 or wider, integers in their own dtype."""
        kinds = [xp.dtype(x) for x in arrays]
        dtype = next((kind for kind in kinds if kind.kind != "b"), kinds[0])
        up = dtype if dtype.kind in "iub" else wide(dtype)
        values = [x if kind.kind == "b" else xp.astype(x, up) for x, kind in zip(arrays, kinds, strict=True)]
        return (self.expression.evaluate(xp, values, up),)

    def flops(self, *operands: TensorType) -> float:
        """Return the operations of the expression x the local elements of the result."""
        (t,) = self.infer(*operands)
        return float(self.expression.flops() * math.prod(t.local_shape(0)))


@dataclass(frozen=True, slots=True)
class ReduceDims(Ruled):
    """Reduce some dims away, or with `keep` to size 1. A mean is the sum divided by the global size.

    >>> from shardplan.core.mesh import Mesh
    >>> t = TensorType("f32", (8, 4), ("x",), Mesh(x=2))
    >>> print(*ReduceDims((0,), "max").infer(t), *ReduceDims((1,), keep=True).infer(t))
    f32[4]{max:x} f32[8@x, 1]
    """

    name: ClassVar[str] = "reduce_dims"
    dims: tuple[int, ...]
    reduction: str = "sum"
    keep: bool = False

    def __post_init__(self) -> None:
        """Sort the dims, check the reduction."""
        if self.reduction not in _REDUCTIONS:
            raise TypingError(f"reduce_dims: unknown reduction {self.reduction!r}; legal are {', '.join(_REDUCTIONS)}")
        if len(set(self.dims)) != len(self.dims):
            raise TypingError(f"reduce_dims: the dims {self.dims} name one twice; legal are distinct dims")
        object.__setattr__(self, "dims", tuple(sorted(self.dims)))

    @property
    def combine(self) -> str:
        """The reduction over devices: a mean is linear, so its parts are summed."""
        return "sum" if self.reduction == "mean" else self.reduction

    def rule(self, *operands: TensorType) -> FactorRule:
        """Reduced dims are reduced, the others pass; a kept dim is a new factor of size 1."""
        (t,) = counted(self.name, operands, 1)
        for d in self.dims:
            if not 0 <= d < t.ndim:
                raise TypingError(f"reduce_dims: {t} has no dim {d}; legal are 0 to {t.ndim - 1}")
        kind = numpy_dtype(t.dtype).kind
        if (self.combine == "sum" and kind == "b") or (self.reduction == "mean" and kind in "iu"):
            raise TypingError(f"reduce_dims({self.reduction}) is not defined for {t.dtype}; legal is a floating dtype")
        if self.combine != "sum" and kind == "c":
            raise TypingError(f"reduce_dims({self.reduction}) is not defined for {t.dtype}; legal is a real dtype")
        names = factor_names(t.ndim)
        ones = iter(factor_names(len(self.dims), t.ndim))
        kept = [
            f"{next(ones)}=1" if d in self.dims else n for d, n in enumerate(names) if self.keep or d not in self.dims
        ]
        marks = f" | {self.combine}: {' '.join(names[d] for d in self.dims)}" if self.dims else ""
        return rule_of(self.name, f"[{' '.join(names)}] -> [{' '.join(kept)}]{marks}", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """A partial operand passes when it is partial with the same reduction."""
        return reduction == self.combine

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Reduce in the wide dtype; an empty shard gives the identity."""
        (x,) = arrays
        dtype = xp.dtype(x)
        if self.combine == "sum":
            total = xp.reduce("sum", xp.astype(x, wide(dtype)), self.dims, self.keep, 0)
            return (total / math.prod(size.whole[0][d] for d in self.dims) if self.reduction == "mean" else total,)
        up = np.dtype(np.float32) if dtype.kind == "V" else dtype
        nothing = up.type(identity(self.reduction, dtype))
        return (xp.reduce(self.reduction, xp.astype(x, up), self.dims, self.keep, nothing),)

    def flops(self, *operands: TensorType) -> float:
        """One operation an element of the operand, on the worst device."""
        self.infer(*operands)
        return float(math.prod(operands[0].local_shape(0))) if self.dims else 0.0
