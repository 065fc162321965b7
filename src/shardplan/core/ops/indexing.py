"""Ops on positions: Gather, ScatterAdd and Write, by ids; Iota and Constant, which have no operands."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.factor_rule import FactorRule, factor_names
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.compute import WHOLE, At, IdRange, RuleTypedOp, Size, check_arity
from shardplan.core.ops.placing import check_value
from shardplan.core.program_builder import Cotangents, ProgramBuilder, Values
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

_INDEX = np.dtype(np.int64)


def _words(prefix: str, ndim: int) -> str:
    return " ".join(f"{prefix}{d}" for d in range(ndim))


def _check_rows(op: str, ids: TensorType, dtype: str) -> None:
    """Refuse ids that are no integers, and elements that cannot be summed."""
    if numpy_dtype(ids.dtype).kind not in "iu":
        raise TypingError(f"{op}: the ids are {ids}; legal is an integer dtype")
    if dtype == "bool":
        raise TypingError(f"{op}: sums are not defined for bool; legal is a numeric dtype")


@dataclass(frozen=True, slots=True)
class Gather(RuleTypedOp):
    """Rows of a table (its dim 0) by ids of any shape; an id that no row has gives zeros, and is refused of an input.

    A table whose rows are sharded gives partial sums.

    >>> from shardplan.core.mesh import Mesh
    >>> m = Mesh(x=2, y=3)
    >>> print(*Gather().infer(TensorType("f32", (10, 4), ("x",), m), TensorType("i32", (6, 5), ("y",), m)))
    f32[6@y, 5, 4]{+x}
    """

    name: ClassVar[str] = "gather"

    def rule(self, *operands: TensorType) -> FactorRule:
        """Rows are reduced with a sum."""
        table, ids = check_arity(self.name, operands, 2)
        _check_rows(self.name, ids, table.dtype)
        rest, many = _words("h", table.ndim - 1), _words("b", ids.ndim)
        return rule_of(self.name, f"[v {rest}] [{many}] -> [{many} {rest}] | sum: v", operands)

    def ids(self, *operands: TensorType) -> Mapping[int, IdRange]:
        """Each is a row of the table."""
        return {1: IdRange(operands[0].shape[0])}

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """The table may be partial: rows are chosen, and zeros reduce to zero."""
        return 0 in partial and len(partial) == 1

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Rows of ids that are here, zeros elsewhere."""
        table, ids = arrays
        rows = size.operands[0][0]
        zero = xp.full((), 0, xp.dtype(table))
        if not rows:
            return (zero,)
        here = xp.astype(ids, _INDEX) - at.operands[0][0]
        mine = (here >= 0) & (here < rows)
        found = xp.take(table, xp.where(mine, here, 0 * here))
        return (xp.where(mine.reshape((*size.operands[1], *(1,) * (len(size.operands[0]) - 1))), found, zero),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The rows added up by their ids."""
        table = builder.types[operands[0]]
        back = ScatterAdd(table.shape[0], Layout(table.layout.dims[:1]))
        return [builder(back, cotangents[0], operands[1]), None]

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0

    def touched_bytes(self, *operands: TensorType) -> int:
        """Ids, and each row that is gathered twice: read and written; not the table."""
        (t,) = self.infer(*operands)
        return operands[1].local_bytes() + 2 * t.local_bytes()


@dataclass(frozen=True, slots=True)
class ScatterAdd(RuleTypedOp):
    """Add rows up by their ids, the inverse of `Gather`: the sums are `rows` in number, dim 0 of the result.

    Ids without a row are left out. The rows may be sharded `over` axes that the operands do not use.

    >>> from shardplan.core.mesh import Mesh
    >>> m = Mesh(x=2, y=3)
    >>> t = TensorType("f32", (6, 4), ("y",), m), TensorType("i32", (6,), ("y",), m)
    >>> print(*ScatterAdd(10).infer(*t), *ScatterAdd(10, Layout((("x",),))).infer(*t))
    f32[10, 4]{+y} f32[10@x, 4]{+y}
    """

    name: ClassVar[str] = "scatter_add"
    rows: int
    over: Layout = WHOLE

    def rule(self, *operands: TensorType) -> FactorRule:
        """The dims of the ids are reduced with a sum."""
        values, ids = check_arity(self.name, operands, 2)
        _check_rows(self.name, ids, values.dtype)
        if self.rows < 1 or values.ndim < ids.ndim:
            raise TypingError(f"{self.name}: {self.rows} rows of {values} by {ids}; legal are a row and a dim for each")
        many, rest = _words("b", ids.ndim), _words("h", values.ndim - ids.ndim)
        marks = f" | sum: {many}" if many else ""
        return rule_of(self.name, f"[{many} {rest}] [{many}] -> [v {rest}]{marks}", operands, v=self.rows)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """It is linear in the values."""
        return reduction == "sum" and 0 in partial and len(partial) == 1

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Sum those that are here."""
        values, ids = arrays
        rows, count = size.results[0][0], math.prod(size.operands[1])
        here = (xp.astype(ids, _INDEX) - at.results[0][0]).reshape((count,))
        index = xp.where((here >= 0) & (here < rows), here, 0 * here + rows)
        values = xp.astype(values, wide(xp.dtype(values))).reshape((count, *size.results[0][1:]))
        return (xp.scatter_add(rows, index, values),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The rows of the sums."""
        return [builder(Gather(), cotangents[0], operands[1]), None]

    def flops(self, *operands: TensorType) -> float:
        """One a local element of the values."""
        return float(math.prod(operands[0].local_shape(0)))


@dataclass(frozen=True, slots=True)
class Write(RuleTypedOp):
    """Put values in the places of `dim` that their ids name, one along each; in place, and the ids are distinct.

    Values whose id has no place are left out. It has no gradient.

    >>> from shardplan.core.mesh import Mesh
    >>> m = Mesh(x=2)
    >>> t = TensorType("f32", (3, 10, 4), (None, "x"), m), TensorType("f32", (3, 2, 4), (), m)
    >>> print(*Write(1).infer(*t, TensorType("i32", (2,), (), m)))
    f32[3, 10@x, 4]
    """

    name: ClassVar[str] = "write"
    aliases = ((0, 0),)
    dim: int = 0

    def rule(self, *operands: TensorType) -> FactorRule:
        """The places pass, and all other dims; the ids stay whole."""
        target, values, ids = check_arity(self.name, operands, 3)
        _check_rows(self.name, ids, "")
        if not 0 <= self.dim < target.ndim or values.dtype != target.dtype:
            raise TypingError(f"write {values} along dim {self.dim} of {target}; legal are one dtype and a dim it has")
        lead, rest = _words("g", self.dim), _words("h", target.ndim - self.dim - 1)
        return rule_of(self.name, f"[{lead} v {rest}] [{lead} i {rest}] [i] -> [{lead} v {rest}] | fixed: i", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Each element is one of the target or of the values."""
        return partial == frozenset({0, 1})

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Find for each place which value it takes, if any."""
        target, values, ids = arrays
        shape, many = size.results[0], size.operands[2][0]
        lead, places = math.prod(shape[: self.dim]), shape[self.dim]
        here = xp.astype(ids, _INDEX) - at.results[0][self.dim]
        index = xp.where((here >= 0) & (here < places), here, 0 * here + places)
        number = xp.scatter_add(places, index, xp.arange(many) + 1)
        taken = xp.where((number > 0) & (number <= many), number - 1, 0 * number)
        found = xp.take(
            values.reshape((lead * many, *shape[self.dim + 1 :])), xp.arange(lead).reshape((lead, 1)) * many + taken
        )
        new = (number > 0).reshape((places, *(1,) * (len(shape) - self.dim - 1)))
        return (xp.where(new, found.reshape(shape), target),)

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0

    def touched_bytes(self, *operands: TensorType) -> int:
        """Ids, and each value twice: read and written; not the target."""
        return operands[2].local_bytes() + 2 * operands[1].local_bytes()


@dataclass(frozen=True, slots=True)
class OperandlessOp(RuleTypedOp):
    """An op without operands: all factors are its results', `over` also says root axes, and it says the mesh."""

    @abc.abstractmethod
    def stated_type(self) -> TensorType:
        """Return the type as the fields say it, checked but for addends, which are not said."""

    def rule(self, *operands: TensorType) -> FactorRule:
        """A result only."""
        shape = self.stated_type().shape
        names = factor_names(len(shape))
        return rule_of(self.name, f"-> [{' '.join(names)}]", operands, **dict(zip(names, shape, strict=True)))

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """A shape of these sizes."""
        said: dict[str, object] = {"shape": tuple(sizes[n] for n in factor_names(len(self.stated_type().shape)))}
        return replace(self, **said)

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Refuse operands, and a value whose addends are not said."""
        check_arity(self.name, operands, 0)
        t = self.stated_type()
        if t.layout.partial:
            raise TypingError(f"{self.name}: {t} is partial; legal are sharded, replicated and rooted values")
        return (t,)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """No operands."""
        return False

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Iota(OperandlessOp):
    """0, 1, 2, ... along a dim, the same along all others.

    >>> from shardplan.core.mesh import Mesh
    >>> print(*Iota("i32", (8, 4), 0, Layout((("x",), ())), Mesh(x=2)).infer())
    i32[8@x, 4]
    """

    name: ClassVar[str] = "iota"
    dtype: str
    shape: tuple[int, ...]
    dim: int
    over: Layout = field()  # without the default that it has elsewhere
    mesh: Mesh

    def stated_type(self) -> TensorType:
        """As the fields say."""
        t = TensorType(self.dtype, self.shape, self.over, self.mesh)
        if not 0 <= self.dim < t.ndim:
            raise TypingError(f"iota: {t} has no dim {self.dim}; legal are 0 to {t.ndim - 1}")
        check_value(self.name, t.shape[self.dim] - 1, t.dtype)
        return t

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Count on from where the box starts."""
        shape = size.results[0]
        along = at.results[0][self.dim] + xp.arange(shape[self.dim])
        return (along.reshape(tuple(n if d == self.dim else 1 for d, n in enumerate(shape))),)


@dataclass(frozen=True, slots=True)
class Constant(OperandlessOp):
    """One value everywhere."""

    name: ClassVar[str] = "constant"
    value: float
    dtype: str
    shape: tuple[int, ...]
    over: Layout = field()  # without the default that it has elsewhere
    mesh: Mesh

    def stated_type(self) -> TensorType:
        """As the fields say."""
        t = TensorType(self.dtype, self.shape, self.over, self.mesh)
        check_value(self.name, self.value, t.dtype)
        return t

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Fill."""
        return (xp.full((), self.value, numpy_dtype(short_name(self.dtype))),)
