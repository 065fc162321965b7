"""Ops of routing, with static shapes: TopK, and tokens in slots of experts: ToSlots, FromSlots, Dispatch, Combine.

Each group of tokens has `capacity` slots an expert. A choice, one of k that a token makes, takes the next free slot of
its expert, in the order of tokens and then of choices; behind the last one it is dropped. Dropout is here too: what it
keeps hangs on the position alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.factor_rule import FactorRule, factor_names
from shardplan.core.layout import Layout
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.arithmetic import Elementwise, Expand, ReduceDims
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.compute import WHOLE, At, RuleTypedOp, Size, check_arity
from shardplan.core.ops.layers import OneHot
from shardplan.core.ops.placing import Cast
from shardplan.core.ops.products import Einsum
from shardplan.core.program_builder import Cotangents, ProgramBuilder, Values
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

_I32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class TopK(RuleTypedOp):
    """The k largest along the last dim, largest first, and their positions, i32; of equal ones the first."""

    name: ClassVar[str] = "top_k"
    k: int

    def rule(self, *operands: TensorType) -> FactorRule:
        """The last dim stays whole."""
        (t,) = check_arity(self.name, operands, 1)
        if not t.ndim or not 1 <= self.k <= t.shape[-1]:
            raise TypingError(f"top_k: {self.k} of {t}; legal are 1 to the size of the last dim")
        *lead, last, new = factor_names(t.ndim + 1)
        x, out = (f"[{' '.join((*lead, n))}]" for n in (last, f"{new}={self.k}"))
        return rule_of(self.name, f"{x} -> {out} {out} | fixed: {last}", operands)

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Values, and positions."""
        return operands[0].dtype, "i32"

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """It is not linear."""
        return False

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """The largest, k times, each time without those before."""
        (x,) = arrays
        *lead, n = size.operands[0]
        x = xp.astype(x, wide(xp.dtype(x)))
        places, last = xp.broadcast_to(xp.arange(n), (*lead, n)), (len(lead),)
        none, low = xp.full((), n, _I32), xp.full((), -math.inf, xp.dtype(x))
        left, values, found = x, list[Tensor](), list[Tensor]()
        for _ in range(self.k):
            top = xp.reduce("max", left, last, True, low)
            place = xp.reduce("min", xp.where(left == top, places, none), last, True, none)
            left = xp.where(places == place, low, left)
            values.append(top)
            found.append(place)
        return xp.concatenate(values, len(lead)), xp.concatenate(found, len(lead))

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The cotangent at the positions."""
        t = builder.types[operands[0]]
        letters = "".join(factor_names(t.ndim - 1))
        hot = builder(OneHot(t.shape[-1], t.dtype), results[1])
        return [builder(Einsum(f"{letters}K,{letters}KN->{letters}N"), cotangents[0], hot)]

    def flops(self, *operands: TensorType) -> float:
        """A comparison an element, k times."""
        return float(self.k * math.prod(operands[0].local_shape(0)))


def slots(xp: Namespace, ids: Tensor, shape: tuple[int, ...], experts: int, capacity: int) -> Tensor:
    """Return the slot of each choice, i32 [g, n * k]: expert * capacity + place; experts * capacity if dropped."""
    groups, many = shape[0], shape[1] * shape[2]
    flat = xp.astype(ids, _I32).reshape((groups, many, 1))
    hot = xp.astype(flat == xp.arange(experts), _I32)
    count, step = hot, 1
    while step < many:  # sums over all before, in steps that double
        zero = xp.full((groups, step, experts), 0, _I32)
        count, step = count + xp.concatenate([zero, count[:, : many - step]], 1), 2 * step
    place = xp.astype(xp.reduce("sum", count * hot, (2,), False, 0), _I32) - 1
    flat = flat.reshape((groups, many))
    kept = (place >= 0) & (place < capacity)
    return xp.where(kept, flat * capacity + place, xp.full((), experts * capacity, _I32))


def _rows(xp: Namespace, slot: Tensor, groups: int, start: Tensor, count: int) -> Tensor:
    """Return where slots are among `count` a group from `start` on, group after group; others are behind all."""
    here = slot - start
    row = xp.arange(groups).reshape((groups, 1)) * count + here
    return xp.where((here >= 0) & (here < count), row, xp.full((), groups * count, _I32)).reshape((-1,))


def _ids(op: str, ids: TensorType) -> None:
    if ids.dtype[0] not in "iu" or ids.ndim != 3:
        raise TypingError(f"{op} by the ids {ids}; legal are integers of three dims: group, token, choice")


def _same_tokens(op: str, capacity: int, before: TensorType, after: TensorType) -> None:
    if before.shape[1] != after.shape[1]:
        raise TypingError(f"{op}: {capacity} slots an expert hide a size: of {before}, which becomes {after}")


@dataclass(frozen=True, slots=True)
class ToSlots(RuleTypedOp):
    """Rows `[g n k h]` in the slots that their ids `[g n k]` take: `[g e c h]`, experts sharded `over` axes."""

    name: ClassVar[str] = "to_slots"
    experts: int
    capacity: int
    over: Layout = WHOLE

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """Refuse another number of tokens a group: the capacity is a share of it."""
        _same_tokens(self.name, self.capacity, before[0], after[0])
        return self

    def rule(self, *operands: TensorType) -> FactorRule:
        """Groups and features pass."""
        _, ids = check_arity(self.name, operands, 2)
        _ids(self.name, ids)
        text = "[g n k h] [g n k] -> [g e c h] | fixed: n k"
        return rule_of(self.name, text, operands, e=self.experts, c=self.capacity)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """It is linear in the rows."""
        return reduction == "sum" and partial == frozenset({0})

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Each slot is one row, or empty."""
        groups, experts, _, features = size.results[0]
        slot = slots(xp, arrays[1], size.operands[1], self.experts, self.capacity)
        count = experts * self.capacity
        row = _rows(xp, slot, groups, at.results[0][1] * self.capacity, count)
        values = xp.astype(arrays[0], wide(xp.dtype(arrays[0]))).reshape((math.prod(size.operands[1]), features))
        return (xp.scatter_add(groups * count, row, values).reshape(size.results[0]),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Back from the slots."""
        return [builder(FromSlots(), cotangents[0], operands[1]), None]

    def flops(self, *operands: TensorType) -> float:
        """None: rows are placed."""
        return 0.0


@dataclass(frozen=True, slots=True)
class FromSlots(RuleTypedOp):
    """The rows `[g n k h]` of slots `[g e c h]` that the ids `[g n k]` take; zeros where a choice was dropped."""

    name: ClassVar[str] = "from_slots"

    def rule(self, *operands: TensorType) -> FactorRule:
        """Experts are reduced with a sum."""
        _, ids = check_arity(self.name, operands, 2)
        _ids(self.name, ids)
        return rule_of(self.name, "[g e c h] [g n k] -> [g n k h] | sum: e | fixed: n k c", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """It is linear in the slots."""
        return reduction == "sum" and partial == frozenset({0})

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Gather, from a row of zeros where the slot is not here."""
        groups, experts, capacity, features = size.operands[0]
        slot = slots(xp, arrays[1], size.operands[1], size.whole[0][1], capacity)
        count = experts * capacity
        row = _rows(xp, slot, groups, at.operands[0][1] * capacity, count)
        zero = xp.full((1, features), 0, xp.dtype(arrays[0]))
        table = xp.concatenate([arrays[0].reshape((groups * count, features)), zero], 0)
        return (xp.take(table, row).reshape(size.results[0]),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """Into the slots."""
        t = builder.types[operands[0]]
        return [builder(ToSlots(t.shape[1], t.shape[2], Layout(t.layout.dims[1:2])), cotangents[0], operands[1]), None]

    def flops(self, *operands: TensorType) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Dispatch(Composed):
    """Tokens `[g n h]` in the slots that their ids `[g n k]` take, `[g e c h]`; how many were dropped, i32 `[g]`."""

    name: ClassVar[str] = "dispatch"
    experts: int
    capacity: int
    over: Layout = WHOLE

    def with_sizes(self, before: Sequence[TensorType], after: Sequence[TensorType], sizes: Mapping[str, int]) -> Self:
        """Refuse another number of tokens a group: the capacity is a share of it."""
        _same_tokens(self.name, self.capacity, before[0], after[0])
        return self

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """A row for each choice; what is dropped is what is over the capacity, expert by expert."""
        _, ids = check_arity(self.name, operands, 2)
        _ids(self.name, ids)
        rows = d(Expand(f"g n h -> g n k={ids.shape[2]} h", Layout(ids.layout.dims[2:])), "0")
        placed = d(ToSlots(self.experts, self.capacity, self.over), rows, "1")
        chosen = d(ReduceDims((1, 2)), d(OneHot(self.experts, "i32"), d(Cast("i32"), "1")))
        dropped = d(ReduceDims((1,)), d(Elementwise(f"maximum(a - {self.capacity}, 0)"), chosen))
        return [placed, dropped]


@dataclass(frozen=True, slots=True)
class Combine(Composed):
    """From slots `[g e c h]`, ids and weights `[g n k]` to tokens `[g n h]`: the weighted sums of what they chose."""

    name: ClassVar[str] = "combine"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Rows, and a product."""
        check_arity(self.name, operands, 3)
        return [d(Einsum("gnkh,gnk->gnh"), d(FromSlots(), "0", "1"), "2")]


@dataclass(frozen=True, slots=True)
class Dropout(RuleTypedOp):
    """Zeros for a part `rate` of the elements, the others by 1 / (1 - rate); drawn from an i32 key and the position.

    A key may have the first dims of what is dropped: then it says instead of the position which of these it is.
    """

    name: ClassVar[str] = "dropout"
    rate: float

    def rule(self, *operands: TensorType) -> FactorRule:
        """All dims pass."""
        t, key = check_arity(self.name, operands, 2)
        keyed = key.dtype == "i32" and key.shape == t.shape[: key.ndim]
        if not 0 <= self.rate < 1 or not keyed or numpy_dtype(t.dtype).kind not in "fV":
            raise TypingError(f"dropout({self.rate}) of {t} by {key}; legal are 0 <= rate < 1, floats and an i32 key")
        names = factor_names(t.ndim)
        whole, first = " ".join(names), " ".join(names[: key.ndim])
        return rule_of(self.name, f"[{whole}] [{first}] -> [{whole}]", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Equal positions are drawn alike."""
        return reduction == "sum" and partial == frozenset({0})

    def local(self, xp: Namespace, arrays: Sequence[Tensor], at: At, size: Size) -> tuple[Tensor, ...]:
        """Mix the key with the position, dim by dim."""
        x, key = arrays
        shape, first = size.operands
        bits = _mix_bits(key.reshape((*first, *(1,) * (len(shape) - len(first)))))
        for d in range(len(first), len(shape)):
            n = shape[d]
            here = (at.operands[0][d] + xp.arange(n)).reshape(tuple(n if j == d else 1 for j in range(len(shape))))
            bits = _mix_bits(bits ^ _mix_bits(here + d))
        kept = (bits & 0x3FFFFFFF) >= int(self.rate * 2**30)
        x = xp.astype(x, wide(xp.dtype(x)))
        return (xp.where(kept, x / (1 - self.rate), xp.full((), 0, xp.dtype(x))),)

    def gradient(self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values) -> Cotangents:
        """The same elements of the cotangent."""
        return [builder(Dropout(self.rate), cotangents[0], operands[1]), None]

    def flops(self, *operands: TensorType) -> float:
        """A product an element."""
        return float(math.prod(operands[0].local_shape(0)))


def _mix_bits(x: Tensor) -> Tensor:
    """Mix 32 bits; products wrap, and shifts of negative numbers are cut to what an unsigned one would give.

    The finalizer of MurmurHash3, whose constants are taken as signed numbers.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)
