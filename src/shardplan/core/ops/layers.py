"""What a transformer's layers are made of, said by decomposition alone: norms, softmax, losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_lowercase
from typing import ClassVar

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.layout import Layout
from shardplan.core.ops.arithmetic import Elementwise, Expand, ReduceDims
from shardplan.core.ops.composed import Backward, Composed
from shardplan.core.ops.compute import WHOLE, IdRange, KernelClass, LocalRun, Where, check_arity
from shardplan.core.ops.indexing import Gather, Iota
from shardplan.core.ops.placing import Cast, Crop, Pad, Reshape, cast_to, widened
from shardplan.core.ops.row_tiles import tile_rows
from shardplan.core.program_builder import Cotangents, ProgramBuilder, Values
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError


def _softmax(d: ProgramBuilder, x: str, dim: int) -> str:
    top = d(ReduceDims((dim,), "max", keep=True), x)
    e = d(Elementwise("exp(a - b)"), x, top, stopped=(1,))
    return d(Elementwise("a / b"), e, d(ReduceDims((dim,), keep=True), e))


@dataclass(frozen=True, slots=True)
class Softmax(Composed):
    """The exponentials along a dim, divided by their sum."""

    name: ClassVar[str] = "softmax"
    dim: int

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Less the largest."""
        (t,) = check_arity(self.name, operands, 1)
        return [cast_to(d, _softmax(d, widened(d, "0"), self.dim), t.dtype)]


@dataclass(frozen=True, slots=True)
class LayerNorm(Composed):
    """Less the mean over the last dim, by the standard deviation, times a gain, plus a bias: arXiv 1607.06450."""

    name: ClassVar[str] = "layer_norm"
    eps: float = 1e-5

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Mean, then variance of what is left."""
        t, _, _ = check_arity(self.name, operands, 3)
        x, last = widened(d, "0"), (t.ndim - 1,)
        x = d(Elementwise("a - b"), x, d(ReduceDims(last, "mean", keep=True), x))
        variance = d(ReduceDims(last, "mean", keep=True), d(Elementwise("a * a"), x))
        y = d(Elementwise(f"a * rsqrt(b + {self.eps}) * c + d"), x, variance, widened(d, "1"), widened(d, "2"))
        return [cast_to(d, y, t.dtype)]


@dataclass(frozen=True, slots=True)
class RmsNorm(Composed):
    """By the root of the mean square over the last dim, times a gain: arXiv 1910.07467."""

    name: ClassVar[str] = "rms_norm"
    eps: float = 1e-6

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """The mean of squares, and a product."""
        t, _ = check_arity(self.name, operands, 2)
        x = widened(d, "0")
        square = d(ReduceDims((t.ndim - 1,), "mean", keep=True), d(Elementwise("a * a"), x))
        return [cast_to(d, d(Elementwise(f"a * rsqrt(b + {self.eps}) * c"), x, square, widened(d, "1")), t.dtype)]


@dataclass(frozen=True, slots=True)
class OneHot(Composed):
    """1 where a new last dim, sharded `over` axes, equals the id, 0 elsewhere."""

    name: ClassVar[str] = "one_hot"
    classes: int
    dtype: str
    over: Layout = WHOLE

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Compare with 0, 1, 2, ..."""
        check_arity(self.name, operands, 1)
        return [d(Cast(self.dtype), _hot(d, "0", self.classes, (*self.over.dims, ())[0]))]


def _hot(d: ProgramBuilder, ids: str, classes: int, over: tuple[str, ...]) -> str:
    """Whether a new last dim equals the ids: integers of their dtype."""
    t = d.types[ids]
    dims = " ".join(f"d{k}" for k in range(t.ndim))
    row = d(Iota(t.dtype, (classes,), 0, Layout((over,)), t.mesh))
    return d(Elementwise("where(a == b, 1, 0)"), d(Expand(f"{dims} -> {dims} one=1"), ids), row)


IGNORED = -100  # the target that counts for nothing, as torch has it


def _counts(d: ProgramBuilder, targets: str) -> str:
    """Whether each of some targets counts: an integer of their dtype; none of unsigned ones is ignored."""
    signed = numpy_dtype(d.types[targets].dtype).kind == "i"
    return d(Elementwise(f"where(a == {IGNORED}, 0, 1)" if signed else "0 * a + 1"), targets)


@dataclass(frozen=True, slots=True)
class CrossEntropy(Composed):
    """Of logits, whose last dim are classes, and targets: the negative logarithm of the target's probability.

    It is 0 where the target is -100 (`IGNORED`), and so is its gradient. Where it is `narrow`, the steps that it comes
    to under a sharding of the classes keep no copy of the logits in a wider dtype, which else every step reads.
    """

    name: ClassVar[str] = "cross_entropy"
    narrow: bool = False

    @property
    def kernel_class(self) -> KernelClass:
        """A loss."""
        return "loss"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Of classes that are sharded the maximum and both sums are partial; no logit is gathered."""
        t, ids = check_arity(self.name, operands, 2)
        if not t.ndim or ids.shape != t.shape[:-1]:
            raise TypingError(f"logits {t} and targets {ids}; legal are targets of the shape of all dims but the last")
        if self.narrow:
            top = widened(d, d(ReduceDims((t.ndim - 1,), "max", keep=True), "0"))
            total, chosen = d.write_step(ClassSums(), "0", top, "1", stopped=(1,))
        else:
            x = widened(d, "0")
            top = d(ReduceDims((t.ndim - 1,), "max", keep=True), x)
            total, chosen = _class_sums(d, x, top, "1", t.layout.dims[-1], stopped=(1,))
        loss = d(Elementwise("log(a) + b - c"), total, top, chosen, stopped=(1,))
        dims = " ".join(f"d{k}" for k in range(t.ndim - 1))
        loss = d(Reshape(f"{dims} one=1 -> {dims}"), loss)
        loss = d(Elementwise("where(a, b, 0)"), d(Cast("bool"), _counts(d, "1")), loss)
        return [cast_to(d, loss, t.dtype)]

    def bind(self, operands: Sequence[TensorType], where: Where) -> LocalRun:
        """Some targets at a time, so that few logits are there in a wider dtype, or as exponentials."""
        plain = super(CrossEntropy, self).bind
        return tile_rows(plain, operands, self.infer(*operands), where) or plain(operands, where)

    def bind_gradient(self, operands: Sequence[TensorType], where: Where, needs: Sequence[int]) -> LocalRun | None:
        """The same back: from the cotangent of each target to those of its logits."""
        back, given = Backward(self, tuple(needs)), (*operands, *self.infer(*operands))
        return tile_rows(partial(Composed.bind, back), given, back.infer(*given), where) if needs else None

    def ids(self, *operands: TensorType) -> Mapping[int, IdRange]:
        """A target is a class, or ignored."""
        return {1: IdRange(operands[0].shape[-1], IGNORED)}

    def in_one_pass(self) -> CrossEntropy:
        """As steps that keep no copy."""
        return replace(self, narrow=True)


@dataclass(frozen=True, slots=True)
class ClassSums(Composed):
    """Of logits `[.. v]`, a maximum `[.. 1]` and targets `[..]` the sums over classes that a cross entropy is made of.

    Results, in f32 or wider `[.. 1]`, are the sum of the exponentials of what logits are beside the maximum, and the
    logit of the target, 0 where that is no class.
    """

    name: ClassVar[str] = "class_sums"

    @property
    def kernel_class(self) -> KernelClass:
        """A part of a loss."""
        return "loss"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Of classes that are sharded both sums are partial."""
        t, _, _ = check_arity(self.name, operands, 3)
        return _class_sums(d, widened(d, "0"), "1", "2", t.layout.dims[-1])


def _class_sums(
    d: ProgramBuilder, x: str, top: str, targets: str, over: tuple[str, ...], stopped: tuple[int, ...] = ()
) -> list[str]:
    """The sum of exponentials of what logits are beside `top`, which counts as a constant if stopped; the target's."""
    t = d.types[x]
    total = d(ReduceDims((t.ndim - 1,), keep=True), d(Elementwise("exp(a - b)"), x, top, stopped=stopped))
    hot = d(Cast("bool"), _hot(d, targets, t.shape[-1], over))
    return [total, d(ReduceDims((t.ndim - 1,), keep=True), d(Elementwise("where(a, b, 0)"), hot, x))]


@dataclass(frozen=True, slots=True)
class TargetCount(Composed):
    """How many targets count, of any shape: all that are not -100 (`IGNORED`). A scalar of the dtype."""

    name: ClassVar[str] = "target_count"
    dtype: str

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """One for each, summed."""
        (t,) = check_arity(self.name, operands, 1)
        return [d(ReduceDims(tuple(range(t.ndim))), d(Cast(self.dtype), _counts(d, "0")))]


@dataclass(frozen=True, slots=True)
class EmbeddingBag(Composed):
    """Rows of a table `[v h]` by ids `[b l]`, added up over l: `[b h]`."""

    name: ClassVar[str] = "embedding_bag"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Gather, and sum."""
        check_arity(self.name, operands, 2)
        return [d(ReduceDims((1,)), d(Gather(), "0", "1"))]

    def ids(self, *operands: TensorType) -> Mapping[int, IdRange]:
        """Each is a row of the table."""
        return {1: IdRange(operands[0].shape[0])}

    def touched_bytes(self, *operands: TensorType) -> int:
        """Ids, the rows that are read, and their sums; not the table."""
        table, ids = operands
        rows = math.prod(ids.local_shape(0)) * math.prod(table.local_shape(0)[1:]) * table.itemsize
        return ids.local_bytes() + rows + self.infer(*operands)[0].local_bytes()


@dataclass(frozen=True, slots=True)
class Concat(Composed):
    """Values after one another along a dim."""

    name: ClassVar[str] = "concat"
    dim: int

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Zeros around each, and a sum."""
        if not operands or not all(0 <= self.dim < t.ndim for t in operands):
            given = ", ".join(map(str, operands)) or "nothing"
            raise TypingError(f"concat along dim {self.dim} of {given}; legal is one that all have")
        at, total = 0, sum(t.shape[self.dim] for t in operands)
        parts: list[str] = []
        for k, t in enumerate(operands):
            before = tuple(at * (j == self.dim) for j in range(t.ndim))
            at += t.shape[self.dim]
            parts.append(d(Pad(before, tuple((total - at) * (j == self.dim) for j in range(t.ndim))), str(k)))
        while len(parts) > 1:  # an expression has a letter for each of its operands
            some, parts = parts[: len(ascii_lowercase)], parts[len(ascii_lowercase) :]
            parts.append(d(Elementwise(" + ".join(ascii_lowercase[: len(some)])), *some))
        return parts

    def pull(
        self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values, wanted: Sequence[bool]
    ) -> Cotangents:
        """The cotangent in parts: of the operands only the sizes are read, so that none is saved for it."""
        sizes = tuple(builder.types[o].shape[self.dim] for o in operands)
        found = builder.write_step(Split(self.dim, sizes), cotangents[0])
        return [part if want else None for part, want in zip(found, wanted, strict=True)]


@dataclass(frozen=True, slots=True)
class Split(Composed):
    """Parts of some sizes along a dim, one after another."""

    name: ClassVar[str] = "split"
    dim: int
    sizes: tuple[int, ...]

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """A part each."""
        (t,) = check_arity(self.name, operands, 1)
        if not 0 <= self.dim < t.ndim or sum(self.sizes) != t.shape[self.dim]:
            raise TypingError(f"the sizes {self.sizes} along dim {self.dim} of {t}; legal are those that add up to its")
        at, parts = 0, list[str]()
        for n in self.sizes:
            start, stop = [0] * t.ndim, [*t.shape]
            start[self.dim], stop[self.dim] = at, at + n
            parts.append(d(Crop(tuple(start), tuple(stop)), "0"))
            at += n
        return parts
