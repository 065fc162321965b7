"""`Compute`: what the ops that compute share; `FactorTyped` and `RuleTypedOp` are those typed by a factor rule.

Each says what it means on one device, in any array namespace; every backend runs what `bind` returns, and knows no op.
Products and sums are taken in f32 or wider, integers wrap as their dtype does, and results are rounded once.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.factor_rule import FactorRule, infer
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.messages import at_root
from shardplan.core.namespace import NUMPY, Namespace, Tensor
from shardplan.core.op import Array, Op, Shards, base_array, own_array, poison, results_of
from shardplan.core.ops.blocks import run_in_blocks
from shardplan.core.pattern import Pattern, Work
from shardplan.core.program_builder import Cotangents, Decomposition, ProgramBuilder, Values
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

Shape = tuple[int, ...]
Where = Callable[[TensorType], tuple[tuple[Any, ...], Shape]]  # start and shape of this device's box of a type
LocalRun = Callable[[Namespace, Sequence[Tensor]], list[Tensor]]
KernelClass = Literal["product", "scores", "loss", "streamed"]
WHOLE = Layout(())  # no axes on any dim


class At(NamedTuple):
    """Where the boxes of this device start, an integer a dim; in JAX it is traced, so nothing may branch on it."""

    operands: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[Any, ...], ...]


class Size(NamedTuple):
    """The shapes of this device's shards, and of the whole operands."""

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    whole: tuple[Shape, ...]


class IdRange(NamedTuple):
    """What ids may be: 0, 1, ... below `rows`, and `ignored`, where there is such a one."""

    rows: int
    ignored: int | None = None


@dataclass(frozen=True, slots=True)
class Compute(Op):
    """An op that computes, on every device alone unless it says otherwise."""

    pointwise: ClassVar[bool] = False  # whether an element of a result is of the elements at its place alone
    alone: ClassVar[bool] = True  # else its lowering says what goes between devices, and what they compute meanwhile

    @abc.abstractmethod
    def bind(self, operands: Sequence[TensorType], where: Where) -> LocalRun:
        """Return the op on one device: from a namespace and the operands' shards to new or shared results."""

    @abc.abstractmethod
    def flops(self, *operands: TensorType) -> float:
        """Return the floating-point operations of the worst device."""

    def share(self, *operands: TensorType) -> float:
        """Return the part of its operations that one kernel does; less than 1 where it skips what is masked."""
        return 1.0

    @property
    def kernel_class(self) -> KernelClass:
        """The class of its kernel: `product`, `scores` (attention), `loss`, or, by what it touches, `streamed`."""
        return "streamed"

    def kernel_sides(self, *operands: TensorType) -> tuple[float, ...]:
        """Return what the price of a product or of attention asks, on the worst device (`core.pattern.Work.sides`).

        Of other kernels, and of products of more than two operands, nothing is said.
        """
        return ()

    @property
    def product_sides(self) -> tuple[tuple[str, ...], str] | None:
        """The factors of two operands' dims, and of the result's, where it multiplies them as they are; else None."""
        return None

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Say whether the results are partial with `reduction` when exactly the operands `partial` are."""
        return False

    def ids(self, *operands: TensorType) -> Mapping[int, IdRange]:
        """Return what operands that are ids may be where they come from outside, by their numbers; most have none."""
        return {}

    @property
    def pinned_layout(self) -> Layout | None:
        """The layout that its author wants its operand and result in, where there are these axes; else None."""
        return None

    def on_mesh(self, mesh: Mesh, over: Sequence[tuple[str, ...]] = ()) -> Self:
        """Return it on a mesh, with the axes of the factors that only results have, in their order.

        Raises `TypingError` where axes are said and the op cannot have them.
        """
        said = {f.name for f in fields(self)}
        changed: dict[str, object] = {"mesh": mesh} if "mesh" in said else {}
        if "over" in said:
            changed["over"] = Layout(tuple(over) if "mesh" in said or any(over) else ())
        elif any(over):
            raise TypingError(f"{self.name}: over={tuple(over)}; legal are no axes, as it has no such attribute")
        return replace(self, **changed) if changed else self

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """Return it with other `sizes` of its factors, as `dim_names.links` calls them, for operands of new types.

        What says no size is as it is. Raises `TypingError` where one that it says does not follow.
        """
        return self

    def decomposition(self, *operands: TensorType) -> Decomposition | None:
        """Return the op as steps of others that mean the same, None where it has no such form."""
        return None

    def in_rounds(self, *operands: TensorType) -> Compute | None:
        """Return an op whose first results are this one's, and that sends around what this one needs whole.

        None where there is no such op for operands of these types.
        """
        return None

    def in_one_pass(self) -> Compute | None:
        """Return an op that means the same, and keeps nothing wider than its operands in the steps that it comes to.

        None where there is no such op.
        """
        return None

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Write the steps of the gradient, and return the cotangents of the operands; None of what has none.

        All are names of the builder, `cotangents` those of the results. Every step is linear in them.
        """
        raise TypingError(f"{self.name} has no gradient")

    def pull(
        self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values, wanted: Sequence[bool]
    ) -> Cotangents:
        """Write what of the gradient is wanted."""
        return self.gradient(builder, operands, results, cotangents)

    def touched_bytes(self, *operands: TensorType) -> int:
        """Return the bytes that the worst device reads and writes; a view touches none."""
        return 0 if self.view else sum(t.local_bytes() for t in (*operands, *self.infer(*operands)))

    def reference(self, operands: Sequence[Shards], types: Sequence[TensorType]) -> list[list[Array]]:
        """Compute on every device that holds the value."""
        results = self.infer(*types)
        out: list[list[Array]] = [[] for _ in results]
        for k, held in enumerate(at_root(results[0])):
            if held:
                with np.errstate(all="ignore"):
                    found = self.bind(types, at_place(k))(NUMPY, [x[k] for x in operands])
            else:
                found = [poison(t.local_shape(k), numpy_dtype(t.dtype)) for t in results]
            others = set() if self.view else {id(base_array(x[k])) for x in operands}
            for shards, x in zip(out, map(np.asarray, found), strict=True):
                shards.append(own_array(x, others))
        return out

    def received_bytes(self, *operands: TensorType) -> np.ndarray:
        """Nothing: it is local."""
        return np.zeros(self.infer(*operands)[0].mesh.size, dtype=np.int64)

    def sent_bytes(self, *operands: TensorType) -> tuple[np.ndarray, np.ndarray]:
        """Nothing."""
        ids = self.infer(*operands)[0].mesh.ids
        return ids, np.zeros(len(ids), dtype=np.int64)

    def rounds(self, *operands: TensorType) -> int:
        """None."""
        return 0

    def staging(self, *operands: TensorType) -> int:
        """None."""
        return 0

    def pattern(self, *operands: TensorType) -> Pattern:
        """One kernel."""
        dtype = (operands or self.infer())[0].dtype
        nbytes, sides = float(self.touched_bytes(*operands)), self.kernel_sides(*operands)
        return Work(self.flops(*operands), dtype, nbytes, self.kernel_class, sides)


def score_sides(share: float, *operands: TensorType) -> tuple[float, ...]:
    """Return what the price of attention asks of queries `[b s g r d]`, keys `[b t g d]` and values `[b t g e]`.

    `share` is the part of the keys that a query sees; see `core.pattern.Work.sides`.
    """
    q, k, v = (t.local_shape() for t in operands[:3])
    return tuple(map(float, (q[0] * q[2] * q[3], q[1], k[1], q[4], v[3], share, 2)))


def at_place(place: int) -> Where:
    """Return where the boxes of the device at a place in mesh order lie."""

    def where(t: TensorType) -> tuple[tuple[int, ...], Shape]:
        box = t.box(place)
        return tuple(lo for lo, _ in box), tuple(hi - lo for lo, hi in box)

    return where


def check_arity(what: str, operands: Sequence[TensorType], count: int) -> Sequence[TensorType]:
    """Return the operands, or raise `TypingError` where they are not `count` in number."""
    if len(operands) != count:
        raise TypingError(f"{what} takes {count} operands, not {len(operands)}")
    return operands


def common_dtype(op: str, operands: Sequence[TensorType]) -> str:
    """Return the dtype of all operands, or raise `TypingError`."""
    kinds = sorted({t.dtype for t in operands})
    if len(kinds) > 1:
        raise TypingError(f"{op}: operands of the dtypes {', '.join(kinds)}; legal is one dtype")
    return kinds[0]


def computing(op: Op) -> Compute | None:
    """Return the op if it computes."""
    return op if isinstance(op, Compute) else None


@dataclass(frozen=True, slots=True)
class FactorTyped(Compute):
    """An op that is typed by a factor rule.

    Of an op with factors that only results have, the field `over` says what these carry, in the order in which the
    results name them; none where it ends before.
    """

    over = WHOLE  # unannotated, so that it is no field before an op's own

    @abc.abstractmethod
    def rule(self, *operands: TensorType) -> FactorRule:
        """Return the factors of operands and results (see `rule_of`), or raise `TypingError` where they do not fit."""

    @abc.abstractmethod
    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Say whether the results are partial with `reduction` when exactly the operands `partial` are."""

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Return the dtypes of the results: one, that of the first operand, unless the op says others."""
        return (operands[0].dtype,)

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Apply the factor rule."""
        rule, kinds = self.rule(*operands), self.dtypes(*operands)
        if len(kinds) != len(rule.results):
            raise TypingError(f"{self.name}: its rule has {len(rule.results)} results, but it says {len(kinds)} dtypes")
        over = self.over
        if over.partial or over.root or over.boxes is not None:
            raise TypingError(f"{self.name}: over={over}; legal are axes of dims alone")
        return infer(rule, operands, lambda p, r: self.passes(p, r, operands), self.name, kinds, over.dims)


@dataclass(frozen=True, slots=True)
class RuleTypedOp(FactorTyped):
    """An op that is typed by a factor rule, and says what it does to the shards of one device."""

    @abc.abstractmethod
    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Return the results on one device, given its shards; the caller rounds and broadcasts them."""

    def has_temporaries(self, operands: Sequence[TensorType]) -> bool:
        """Say whether arrays as large as the results lie between the calls that it comes to."""
        return False

    def bind(self, operands: Sequence[TensorType], where: Where) -> LocalRun:
        """Work out starts and sizes, once."""
        results = results_of(self, tuple(operands))
        ins, outs = [where(t) for t in operands], [where(t) for t in results]
        at = At(tuple(start for start, _ in ins), tuple(start for start, _ in outs))
        shapes = tuple(shape for _, shape in outs)
        size = Size(tuple(shape for _, shape in ins), shapes, tuple(t.shape for t in operands))
        kinds = [numpy_dtype(t.dtype) for t in results]

        blocks = self.pointwise and self.has_temporaries(operands)

        def rounded(xp: Namespace, arrays: Sequence[Tensor]) -> list[Tensor]:
            return [xp.astype(x, dtype) for x, dtype in zip(self.local(xp, arrays, at, size), kinds, strict=True)]

        def run(xp: Namespace, arrays: Sequence[Tensor]) -> list[Tensor]:
            if blocks:
                return run_in_blocks(xp, rounded, arrays, shapes[0], kinds)
            return [xp.broadcast_to(x, shape) for x, shape in zip(rounded(xp, arrays), shapes, strict=True)]

        return run
