"""The ops that compute: Einsum, Elementwise, ReduceDims, typed by factor rules.

Each says its rule, which operands may be partial, and what it does to the shards of one device; the rest follows.
Numbers narrower than 32 bits are computed in f32 and rounded once at the end; integers wrap as their dtype does.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardplan.core.dtypes import identity, numpy_dtype
from shardplan.core.expression import Expression
from shardplan.core.factor_rule import Factor, FactorRule, factor_names, infer
from shardplan.core.messages import at_root
from shardplan.core.op import Array, Op, Shards, poison
from shardplan.core.pattern import Local, Pattern
from shardplan.core.tensor import TensorType
from shardplan.errors import ParseError, TypingError

_REDUCTIONS = ("sum", "max", "min", "mean")


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that sums of `dtype` are accumulated in: at least f32, i64, u64."""
    if dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)
    # ml_dtypes' formats (bf16, f8) are of kind V to numpy.
    return np.dtype(np.float32) if dtype.itemsize < 4 and dtype.kind in "fV" else dtype


@dataclass(frozen=True, slots=True)
class Compute(Op):
    """A local op with one result whose typing is a factor rule."""

    @abc.abstractmethod
    def rule(self, *operands: TensorType) -> FactorRule:
        """Return the factors of operands and result, or raise `TypingError` where shapes or dtypes do not fit."""

    @abc.abstractmethod
    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Say whether the result is partial with `reduction` when exactly the operands `partial` are."""

    @abc.abstractmethod
    def local(self, arrays: Sequence[Array], operands: Sequence[TensorType], dtype: np.dtype[Any]) -> Array:
        """Return the result on one device, given its shards; the caller rounds it to `dtype`."""

    def result_dtype(self, *operands: TensorType) -> str:
        """Return the dtype of the result."""
        return operands[0].dtype

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Apply the factor rule."""
        rule = self.rule(*operands)
        return infer(rule, operands, lambda p, r: self.passes(p, r, operands), self.name, self.result_dtype(*operands))

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Compute on every device that holds the value."""
        (t,) = self.infer(*types)
        dtype, held = numpy_dtype(t.dtype), at_root(t)
        out: list[Array] = []
        for k in range(t.mesh.size):
            shape = t.local_shape(k)
            if not held[k]:
                out.append(poison(shape, dtype))
                continue
            with np.errstate(all="ignore"):
                found = self.local([x[k] for x in operands], types, dtype).astype(dtype)
            out.append(np.array(np.broadcast_to(found, shape)))
        return [out]

    def received(self, *operands: TensorType) -> np.ndarray:
        """Nothing: it is local."""
        return np.zeros(self.infer(*operands)[0].mesh.size, dtype=np.int64)

    def rounds(self, *operands: TensorType) -> int:
        """None."""
        return 0

    def staging(self, *operands: TensorType) -> int:
        """None."""
        return 0

    def pattern(self, *operands: TensorType) -> Pattern:
        """No communication; what it computes has no price yet."""
        return Local(0.0)

    @abc.abstractmethod
    def flops(self, *operands: TensorType) -> float:
        """Return the floating-point operations of the worst device."""

    def touched(self, *operands: TensorType) -> int:
        """Return the bytes that the worst device reads and writes."""
        return sum(t.local_bytes() for t in (*operands, *self.infer(*operands)))


def _common_dtype(op: str, operands: Sequence[TensorType]) -> str:
    kinds = sorted({t.dtype for t in operands})
    if len(kinds) > 1:
        raise TypingError(f"{op}: operands of the dtypes {', '.join(kinds)}; legal is one dtype")
    return kinds[0]


def _count(op: str, operands: Sequence[TensorType], count: int) -> None:
    if len(operands) != count:
        raise TypingError(f"{op} takes {count} operands, not {len(operands)}")


@dataclass(frozen=True, slots=True)
class Einsum(Compute):
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
        sides, result = self.sides
        _count(f"einsum {self.spec}", operands, len(sides))
        if _common_dtype(self.name, operands) == "bool":
            raise TypingError("einsum: products and sums are not defined for bool; legal is a numeric dtype")
        sizes: dict[str, int] = {}
        for k, (letters, t) in enumerate(zip(sides, operands, strict=True)):
            if len(letters) != t.ndim:
                raise TypingError(f"einsum {self.spec}: operand {k}, {t}, has {t.ndim} dims; legal is {len(letters)}")
            for letter, n in zip(letters, t.shape, strict=True):
                if sizes.setdefault(letter, n) != n:
                    raise TypingError(
                        f"einsum {self.spec}: operand {k}, {t}, has {letter}={n}; legal is {sizes[letter]}"
                    )
        order = [*result, *(x for x in sizes if x not in result)]
        return FactorRule(
            tuple(tuple((x,) for x in letters) for letters in sides),
            (tuple((x,) for x in result),),
            tuple(Factor(x, sizes[x]) if x in result else Factor(x, sizes[x], "reduce", "sum") for x in order),
        )

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """A product is linear in one operand at a time; a mere transposition passes everything."""
        sides, result = self.sides
        if reduction == "sum":
            return len(partial) == 1
        return len(sides) == 1 and set(sides[0]) == set(result)

    def local(self, arrays: Sequence[Array], operands: Sequence[TensorType], dtype: np.dtype[Any]) -> Array:
        """Numpy's einsum in the wide dtype."""
        return np.asarray(np.einsum(self.spec, *(x.astype(wide(dtype)) for x in arrays), optimize=len(arrays) > 1))

    def flops(self, *operands: TensorType) -> float:
        """2 x the product of the local factor sizes; of one operand, its additions."""
        sides, result = self.sides
        self.infer(*operands)
        sizes: dict[str, int] = {}
        for letters, t in zip(sides, operands, strict=True):
            sizes.update(zip(letters, t.local_shape(0), strict=True))  # place 0 has the largest tile of every dim
        per = int(not set(sides[0]) <= set(result)) if len(sides) == 1 else 2
        return float(per * math.prod(sizes.values()))


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
class Elementwise(Compute):
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

    def result_dtype(self, *operands: TensorType) -> str:
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
        return _common_dtype(self.name, values)

    def rule(self, *operands: TensorType) -> FactorRule:
        """Dims of the result are factors that pass; a dim of size 1 that broadcasts has its own, not to be sharded."""
        expression = self.expression
        _count(f'elementwise: "{self.expr}"', operands, expression.arity)
        dtype = self.result_dtype(*operands)
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
        factors = [Factor(name, n) for name, n in zip(names, shape, strict=True)]
        sides: list[tuple[tuple[str, ...], ...]] = []
        for t in operands:
            dims: list[tuple[str, ...]] = []
            for d, n in enumerate(t.shape, ndim - t.ndim):
                if n == shape[d]:
                    dims.append((names[d],))
                else:
                    (extra,) = factor_names(1, len(factors))
                    factors.append(Factor(extra, 1, "replicate"))
                    dims.append((extra,))
            sides.append(tuple(dims))
        return FactorRule(tuple(sides), (tuple((x,) for x in names),), tuple(factors))

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Sums pass where the expression is linear in them; max and min where it increases."""
        expression = self.expression
        names = [expression.names[k] for k in partial]
        if reduction == "sum":
            return expression.degree(names) == 1
        fill = identity(reduction, numpy_dtype(self.result_dtype(*operands)))
        return expression.commutes(names, reduction, finite=bool(np.isfinite(fill)))

    def local(self, arrays: Sequence[Array], operands: Sequence[TensorType], dtype: np.dtype[Any]) -> Array:
        """Evaluate; floats in f32 or wider, integers in their own dtype."""
        up = dtype if dtype.kind in "iub" else wide(dtype)
        values = [x if t.dtype == "bool" else x.astype(up) for x, t in zip(arrays, operands, strict=True)]
        return self.expression.evaluate(values)

    def flops(self, *operands: TensorType) -> float:
        """Return the operations of the expression x the local elements of the result."""
        (t,) = self.infer(*operands)
        return float(self.expression.flops() * math.prod(t.local_shape(0)))


@dataclass(frozen=True, slots=True)
class ReduceDims(Compute):
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
        _count(self.name, operands, 1)
        t = operands[0]
        for d in self.dims:
            if not 0 <= d < t.ndim:
                raise TypingError(f"reduce_dims: {t} has no dim {d}; legal are 0 to {t.ndim - 1}")
        kind = numpy_dtype(t.dtype).kind
        if (self.combine == "sum" and kind == "b") or (self.reduction == "mean" and kind in "iu"):
            raise TypingError(f"reduce_dims({self.reduction}) is not defined for {t.dtype}; legal is a floating dtype")
        if self.combine != "sum" and kind == "c":
            raise TypingError(f"reduce_dims({self.reduction}) is not defined for {t.dtype}; legal is a real dtype")
        names = factor_names(t.ndim)
        ones = factor_names(len(self.dims) if self.keep else 0, t.ndim)
        factors = [
            Factor(n, s, "reduce", self.combine) if d in self.dims else Factor(n, s)
            for d, (n, s) in enumerate(zip(names, t.shape, strict=True))
        ]
        fresh = iter(ones)
        result = [
            (next(fresh),) if d in self.dims else (n,) for d, n in enumerate(names) if self.keep or d not in self.dims
        ]
        return FactorRule((tuple((n,) for n in names),), (tuple(result),), (*factors, *(Factor(n, 1) for n in ones)))

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """A partial operand passes when it is partial with the same reduction."""
        return reduction == self.combine

    def local(self, arrays: Sequence[Array], operands: Sequence[TensorType], dtype: np.dtype[Any]) -> Array:
        """Reduce in the wide dtype; an empty shard gives the identity."""
        (x,) = arrays
        if self.combine == "sum":
            total = np.sum(x.astype(wide(dtype)), axis=self.dims, keepdims=self.keep)
            if self.reduction == "mean":
                total = total / wide(dtype).type(math.prod(operands[0].shape[d] for d in self.dims))
            return np.asarray(total)
        up = np.dtype(np.float32) if dtype.kind == "V" else dtype
        reducer = np.maximum if self.reduction == "max" else np.minimum
        start = up.type(identity(self.reduction, dtype))
        return np.asarray(reducer.reduce(x.astype(up), axis=self.dims, keepdims=self.keep, initial=start))

    def flops(self, *operands: TensorType) -> float:
        """One operation an element of the operand, on the worst device."""
        self.infer(*operands)
        return float(math.prod(operands[0].local_shape(0))) if self.dims else 0.0
