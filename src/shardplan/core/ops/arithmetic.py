"""Expressions, sums along dims, and new dims: Elementwise, ReduceDims, Expand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from shardplan.core.derivative import NOTHING, derivative, substitute, times
from shardplan.core.dtypes import identity, numpy_dtype
from shardplan.core.expression import Expression
from shardplan.core.expression_tree import Name
from shardplan.core.factor_rule import FactorRule, factor_names
from shardplan.core.layout import Layout
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.compute import WHOLE, At, RuleTypedOp, Size, check_arity, common_dtype
from shardplan.core.ops.placing import add_brackets, said_anew
from shardplan.core.program_builder import Cotangents, ProgramBuilder, Values
from shardplan.core.rule_text import parse_rule, rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

_REDUCTIONS = ("sum", "max", "min", "mean", "absmax")


@dataclass(frozen=True, slots=True)
class Elementwise(RuleTypedOp):
    """One expression of the operands a, b, c, ... on every element, with numpy's broadcasting (trailing alignment).

    `expr` is kept in its canonical text (see `Expression`). The operands and the result are of one dtype, except that
    an operand which is itself the condition of a `where` is bool. Raises `ParseError` at the character.

    >>> from shardplan.core.mesh import Mesh
    >>> t = TensorType("f32", (8, 4), ("x",), Mesh(x=2))
    >>> print(*Elementwise("relu(a)+b").infer(t, TensorType("f32", (4,), (), t.mesh)))
    f32[8@x, 4]
    """

    name: ClassVar[str] = "elementwise"
    pointwise: ClassVar[bool] = True
    expr: str

    def __post_init__(self) -> None:
        """Parse, and keep the canonical text."""
        object.__setattr__(self, "expr", str(Expression.parse(self.expr)))

    @property
    def expression(self) -> Expression:
        """The parsed expression."""
        return Expression.parse(self.expr)

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """Any operand as large as the result: each element is read before its place is written."""
        return tuple((0, k) for k in range(self.expression.arity))

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
        return (common_dtype(self.name, values),)

    def rule(self, *operands: TensorType) -> FactorRule:
        """Dims of the result are factors that pass; a dim of size 1 that broadcasts has its own, not to be sharded."""
        expression = self.expression
        check_arity(f'elementwise: "{self.expr}"', operands, expression.arity)
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

    def has_temporaries(self, operands: Sequence[TensorType]) -> bool:
        """Of more than one operation, and of floats that are computed wider than they are."""
        kind = numpy_dtype(self.dtypes(*operands)[0])
        return self.expression.flops() > 1 or (kind.kind not in "iub" and wide(kind) != kind)

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Evaluate; floats in f32 or wider, integers in their own dtype."""
        kinds = [xp.dtype(x) for x in arrays]
        dtype = next((kind for kind in kinds if kind.kind != "b"), kinds[0])
        up = dtype if dtype.kind in "iub" else wide(dtype)
        values = [x if kind.kind == "b" else xp.astype(x, up) for x, kind in zip(arrays, kinds, strict=True)]
        return (self.expression.evaluate(xp, values, up),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The derivative times the cotangent, summed over the dims that broadcast."""
        expression = self.expression
        last = chr(ord("a") + expression.arity)
        values = {**dict(zip(expression.names, operands, strict=True)), last: cotangents[0]}
        found: list[str | None] = []
        for name, x in zip(expression.names, operands, strict=True):
            tree = times(derivative(expression.root, name), Name(last))
            if name in expression.conditions or tree == NOTHING:
                found.append(None)
                continue
            dx = cotangents[0]
            if tree != Name(last):
                names = Expression(tree).names
                short = {old: Name(chr(ord("a") + k)) for k, old in enumerate(names)}
                dx = builder(Elementwise(str(Expression(substitute(tree, short)))), *(values[n] for n in names))
            shape, more = builder.types[x].shape, builder.types[dx].ndim - builder.types[x].ndim
            dx = builder(ReduceDims(tuple(range(more))), dx) if more else dx
            ones = tuple(d for d, n in enumerate(builder.types[dx].shape) if n != shape[d])
            found.append(builder(ReduceDims(ones, keep=True), dx) if ones else dx)
        return found

    def flops(self, *operands: TensorType) -> float:
        """Return the operations of the expression x the local elements of the result."""
        (t,) = self.infer(*operands)
        return float(self.expression.flops() * math.prod(t.local_shape(0)))


@dataclass(frozen=True, slots=True)
class ReduceDims(RuleTypedOp):
    """Reduce some dims away, or with `keep` to size 1. A mean is the sum divided by the global size.

    `absmax` is the largest of the absolute values.

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
        return {"mean": "sum", "absmax": "max"}.get(self.reduction, self.reduction)

    def rule(self, *operands: TensorType) -> FactorRule:
        """Reduced dims are reduced, the others pass; a kept dim is a new factor of size 1."""
        (t,) = check_arity(self.name, operands, 1)
        for d in self.dims:
            if not 0 <= d < t.ndim:
                raise TypingError(f"reduce_dims: {t} has no dim {d}; legal are 0 to {t.ndim - 1}")
        kind = numpy_dtype(t.dtype).kind
        if (self.combine == "sum" and kind == "b") or (self.reduction in ("mean", "absmax") and kind in "biu"):
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
        """A partial operand passes when it is partial with the same reduction, but for absolute values."""
        return reduction == self.combine and self.reduction != "absmax"

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Reduce in the wide dtype; an empty shard gives the identity."""
        (x,) = arrays
        dtype = xp.dtype(x)
        if self.combine == "sum":
            total = xp.reduce("sum", xp.astype(x, wide(dtype)), self.dims, self.keep, 0)
            return (total / math.prod(size.whole[0][d] for d in self.dims) if self.reduction == "mean" else total,)
        up = np.dtype(np.float32) if dtype.kind == "V" else dtype
        nothing = up.type(identity(self.combine, dtype))
        x = xp.astype(x, up)
        x = xp.maximum(x, -x) if self.reduction == "absmax" else x
        return (xp.reduce(self.combine, x, self.dims, self.keep, nothing),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The cotangent along the dims; of a maximum shared by the elements that have it."""
        t, dx = builder.types[operands[0]], cotangents[0]
        if self.reduction == "absmax":
            raise TypingError("reduce_dims(absmax) has no gradient: it is a scale, and no value")
        names = [f"d{d}" for d in range(t.ndim)]
        if not self.dims:
            return [dx]
        rest = [n for d, n in enumerate(names) if d not in self.dims]
        ones = [f"o{d}=1" if d in self.dims else n for d, n in enumerate(names)]
        if self.combine == "sum":
            if self.reduction == "mean":
                dx = builder(Elementwise(f"a / {math.prod(t.shape[d] for d in self.dims)}"), dx)
            return [expand_dims(builder, dx, ones if self.keep else rest, names, t)]
        y, dx = (
            v if self.keep else builder(Expand(f"{' '.join(rest)} -> {' '.join(ones)}"), v) for v in (results[0], dx)
        )
        hit = builder(Elementwise("where(a == b, 1, 0)"), operands[0], y)
        return [builder(Elementwise("a * b / c"), hit, dx, builder(ReduceDims(self.dims, keep=True), hit))]

    def flops(self, *operands: TensorType) -> float:
        """One operation an element of the operand, on the worst device."""
        self.infer(*operands)
        return float(math.prod(operands[0].local_shape(0))) if self.dims else 0.0


@dataclass(frozen=True, slots=True)
class Expand(RuleTypedOp):
    """The same values along new dims, as `h -> b=4 s=3 h`, which may be sharded `over` axes, in their order.

    >>> from shardplan.core.mesh import Mesh
    >>> t = TensorType("f32", (8,), (), Mesh(x=2))
    >>> print(*Expand("h -> b=4 s=3 h", Layout((("x",),))).infer(t))
    f32[4@x, 3, 8]
    """

    name: ClassVar[str] = "expand"
    spec: str
    over: Layout = WHOLE

    def __post_init__(self) -> None:
        """Check that nothing changes places, and dims are not of several factors."""
        rule = parse_rule(add_brackets(self.spec))
        (before,), (after,) = rule.operands, rule.results
        if [d for d in after if d in before] != [d for d in before if d in after] or any(
            len(d) != 1 for d in (*before, *after)
        ):
            raise TypingError(f"expand: {self.spec!r} does not keep its dims in order; an einsum transposes")

    def rule(self, *operands: TensorType) -> FactorRule:
        """The dims of the operand pass."""
        return rule_of(self.name, add_brackets(self.spec), operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Elements are not changed."""
        return True

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Dims of size 1, which the caller broadcasts."""
        rule = parse_rule(add_brackets(self.spec))
        held = dict(zip(rule.operands[0], size.operands[0], strict=True))
        return (arrays[0].reshape(tuple(held.get(d, 1) for d in rule.results[0])),)

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """New dims of these sizes."""
        return replace(self, spec=said_anew(self.spec, sizes))

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Sums along the new dims."""
        rule = parse_rule(add_brackets(self.spec))
        before, after = ([n for (n,) in side] for (side,) in (rule.operands, rule.results))
        dx, held = cotangents[0], [n for n in before if n in after]
        if len(held) < len(after):
            dx = builder(ReduceDims(tuple(d for d, n in enumerate(after) if n not in before)), dx)
        if len(held) < len(before):
            dx = builder(Expand(f"{' '.join(held)} -> {' '.join(n if n in held else f'{n}=1' for n in before)}"), dx)
        return [dx]

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0


def expand_dims(builder: ProgramBuilder, name: str, held: Sequence[str], dims: Sequence[str], t: TensorType) -> str:
    """Return a value of the dims `held` along all `dims`, which are those of `t`, over whose axes it is sharded."""
    if tuple(held) == tuple(dims):
        return name
    new = [d for d, c in enumerate(dims) if c not in held]
    spec = " ".join(f"{c}={t.shape[d]}" if d in new else c for d, c in enumerate(dims))
    return builder(Expand(f"{' '.join(held)} -> {spec}", Layout(tuple(t.layout.dims[d] for d in new))), name)
