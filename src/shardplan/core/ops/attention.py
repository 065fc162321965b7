"""`Attention`, said by decomposition: causal, in windows, of packed sequences, with capped scores and with sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from shardplan.core import validation
from shardplan.core.layout import Layout
from shardplan.core.ops.arithmetic import Elementwise, Expand, ReduceDims
from shardplan.core.ops.composed import Composed
from shardplan.core.ops.compute import KernelClass, LocalRun, Where, check_arity
from shardplan.core.ops.indexing import Iota
from shardplan.core.ops.placing import Cast, Reshape, cast_to, widened
from shardplan.core.ops.products import Einsum
from shardplan.core.ops.query_tiles import QueryTiles
from shardplan.core.ops.ring import RingAttention, cap_scores, mask_scores
from shardplan.core.ops.ring_rounds import MASKED, ScoreRule
from shardplan.core.ops.zigzag import Zigzag
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, TypingError


@dataclass(frozen=True, slots=True)
class Attention(Composed):
    """Queries `[b s g r d]`, keys `[b t g d]` and values `[b t g e]`, r query heads to a key head: `[b s g r e]`.

    With `causal` a query sees keys up to its own position, which is its index, plus a last operand where there is one
    more: an i32 scalar, how many positions came before (a cache of keys). Scores are scaled by `scale`, by default the
    root of 1/d. A sequence that attends to itself may be in `zigzag` order, over so many tiles: see `zigzag`.

    Args:
        causal: Whether a query sees nothing that comes later.
        scale: Of scores; 0: the root of 1/d.
        zigzag: Tiles of the order.
        window: Of what is causal so many keys that a query sees, its own the last (arXiv 2310.06825, 2); 0: all.
        cap: Scores s become `cap * tanh(s / cap)` before they are masked (arXiv 2408.00118, 2.2); 0: they stay.
        segments: Whether two operands behind the values, integers `[b s]` and `[b t]`, say to which sequence a query
            and a key belong: several are packed into one row, and none sees another.
        sinks: Whether an operand behind these, `[g r]`, is a score more of every query, whose value is nothing
            (arXiv 2508.10925, 2.2).
    """

    name: ClassVar[str] = "attention"
    causal: bool = True
    scale: float = 0.0
    zigzag: int = 1
    window: int = 0
    cap: float = 0.0
    segments: bool = False
    sinks: bool = False

    @property
    def kernel_class(self) -> KernelClass:
        """Attention."""
        return "scores"

    def write(self, d: ProgramBuilder, *operands: TensorType) -> Sequence[str]:
        """Scores, softmax over the keys, and their mean of the values."""
        self._check(operands)
        q, k = operands[:2]
        scores = d(Einsum("bsgrd,btgd->bgrst"), widened(d, "0"), widened(d, "1"))
        scores = d(Elementwise(f"a * {self._scale(q)}"), scores)
        scores = cap_scores(d, self.cap, scores)
        if self.causal and self.zigzag > 1:
            column = Zigzag(q.shape[1], self.zigzag).write_positions(d, q.mesh)
            row = d(Reshape("s -> s one=1"), column)
            scores = mask_scores(d, row, column, scores, self.window)
        elif self.causal:
            row = d(Iota("i32", (q.shape[1], 1), 0, Layout((q.layout.dims[1], ())), q.mesh))
            if len(operands) > self._fixed_count:
                row = d(Elementwise("a + b"), row, str(self._fixed_count))
            column = d(Iota("i32", (k.shape[1],), 0, Layout((k.layout.dims[1],)), k.mesh))
            scores = mask_scores(d, row, column, scores, self.window)
        if self.segments:
            mine, theirs = d(Expand("b s -> b g=1 r=1 s t=1"), "3"), d(Expand("b t -> b g=1 r=1 s=1 t"), "4")
            apart = d(Cast("bool"), d(Elementwise("where(a == b, 0, 1)"), mine, theirs))
            scores = d(Elementwise(f"where(a, {MASKED}, b)"), apart, scores)
        top = d(ReduceDims((4,), "max", keep=True), scores)
        sink = d(Reshape("g r -> g r s=1 t=1"), widened(d, str(self._fixed_count - 1))) if self.sinks else ""
        if sink:
            top = d(Elementwise("maximum(a, b)"), top, sink)
        e = d(Elementwise("exp(a - b)"), scores, top, stopped=(1,))
        total = d(ReduceDims((4,), keep=True), e)
        if sink:
            total = d(Elementwise("a + exp(b - c)"), total, sink, top, stopped=(2,))
        out = d(Einsum("bgrst,btge->bsgre"), d(Elementwise("a / b"), e, total), widened(d, "2"))
        return [cast_to(d, out, q.dtype)]

    @property
    def _fixed_count(self) -> int:
        """How many operands there are before the count of positions."""
        return 3 + 2 * self.segments + self.sinks

    def _scale(self, q: TensorType) -> float:
        return self.scale or q.shape[-1] ** -0.5

    def _check(self, operands: Sequence[TensorType]) -> None:
        """Refuse what hangs together otherwise."""
        check_arity(self.name, operands[: self._fixed_count], self._fixed_count)
        q, k = operands[:2]
        validation.whole_number(f"{self.name}: zigzag", self.zigzag, 1, kind=TypingError)
        validation.whole_number(f"{self.name}: window", self.window, 0, kind=TypingError)
        if self.zigzag > 1 and (len(operands) > self._fixed_count or q.shape[1] != k.shape[1]):
            raise TypingError(f"zigzag={self.zigzag} of {q} with keys {k}; legal is 1, or a sequence and itself")
        if self.window and not self.causal:
            raise TypingError(f"window={self.window} of what is not causal; legal is 0")
        if self.segments and any(t.dtype[0] not in "iu" or t.ndim != 2 for t in operands[3:5]):
            raise TypingError(f"segments {operands[3]} and {operands[4]}; legal are integers [b s] and [b t]")
        if self.sinks and operands[self._fixed_count - 1].shape != q.shape[2:4]:
            raise TypingError(f"sinks {operands[self._fixed_count - 1]} of {q}; legal is one for each head")

    def bind(self, operands: Sequence[TensorType], where: Where) -> LocalRun:
        """Rows of queries at a time, so that few scores are there at once."""
        tiles = self._tiles(operands, where)
        return super(Attention, self).bind(operands, where) if tiles is None else tiles.forward

    def bind_gradient(self, operands: Sequence[TensorType], where: Where, needs: Sequence[int]) -> LocalRun | None:
        """The same back."""
        tiles = self._tiles(operands, where)
        return None if tiles is None else partial(tiles.backward, needs)

    def _tiles(self, operands: Sequence[TensorType], where: Where) -> QueryTiles | None:
        order = Zigzag(operands[0].shape[1], self.zigzag) if self.causal else None
        rule = ScoreRule(self._scale(operands[0]), order, self.window, self.cap)
        return QueryTiles.of(operands, where, rule, segments=self.segments, sinks=self.sinks)

    def in_rounds(self, *operands: TensorType) -> RingAttention | None:
        """Keys and values go round where a sequence attends to itself, and not to a cache; without segments and sinks.

        Raises `LayoutError` for these two, which would have to go round, too.
        """
        alike = len(operands) == self._fixed_count and operands[0].shape[1] == operands[1].shape[1]
        if alike and (self.segments or self.sinks):
            raise LayoutError("attention of segments, or with sinks, does not go round; legal are ulysses and gather")
        return RingAttention(self.causal, self.scale, self.zigzag, self.window, self.cap) if alike else None

    def share(self, *operands: TensorType) -> float:
        """A causal kernel skips keys after the queries, and those before a window; segments are not known."""
        s, t = operands[0].shape[1], operands[1].shape[1]
        if not self.causal:
            return 1.0
        if not 0 < self.window < t:
            return 1 - s / (2 * t)
        begun = max(0, self.window - (t - s))  # queries that see less than a window
        return self.window / t - begun * begun / (2 * s * t)
