"""Attention whose keys and values go round: ring attention, arXiv 2310.01889, and its gradient.

The sequence of queries, keys and values is cut alike. In every round a device computes with the tile of keys and values
at hand while that goes on to the next device and another one comes: a device receives every other tile once, and stages
two. Results of tiles are folded by their log-sum-exp. Causal tiles that a device's queries do not see are passed on
and not computed.

In the gradient the tiles go round again, each followed by the sum of its cotangents, to which every device adds its
part, and which come home in the last round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from shardplan.core import validation
from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.factor_rule import FactorRule, infer
from shardplan.core.lowering import Buffer, Copy, Ints, Lowering, Round
from shardplan.core.namespace import wide
from shardplan.core.ops.arithmetic import Elementwise, ReduceDims
from shardplan.core.ops.compute import KernelClass, common_dtype, score_sides
from shardplan.core.ops.movement import AllGather, Slice
from shardplan.core.ops.overlapped import Overlapped
from shardplan.core.ops.placing import Cast, Reshape, cast_to, widened
from shardplan.core.ops.products import Einsum
from shardplan.core.ops.reduction import ReduceScatter
from shardplan.core.ops.ring_rounds import (
    MASKED,
    SEQUENCE,
    KeyTile,
    ScoreRule,
    TileRing,
    tile_backward,
    tile_forward,
    whole_block,
)
from shardplan.core.ops.zigzag import Zigzag
from shardplan.core.program_builder import Cotangents, Decomposition, ProgramBuilder, Values
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

_PAIRS = 6  # operations on a score beside products: scale, maximum, difference, exponential, sum, quotient; and a mask
_PAIRS_BACK = 6  # in the gradient: scale, two differences, exponential, two products; and a mask


def wide_name(dtype: str) -> str:
    """Return the dtype in which sums of a dtype are kept."""
    return short_name(wide(numpy_dtype(dtype)))


@dataclass(frozen=True, slots=True)
class _Rotating(Overlapped):
    """What attention and its gradient share."""

    causal: bool = True
    scale: float = 0.0
    zigzag: int = 1
    window: int = 0
    cap: float = 0.0

    def __post_init__(self) -> None:
        """Check the order."""
        validation.whole_number(f"{self.name}: zigzag", self.zigzag, 1, kind=TypingError)

    @property
    def kernel_class(self) -> KernelClass:
        """Attention."""
        return "scores"

    def members(self, t: TensorType) -> tuple[str, ...]:
        """Return the axes of the sequence, round which tiles go."""
        return t.layout.dims[SEQUENCE]

    def kernel_sides(self, *operands: TensorType) -> tuple[float, ...]:
        """Of a round: all keys that are at hand, but in one of them."""
        found = score_sides(1.0, *operands)
        return (*found[:-1], found[-1] + 3 * (len(operands) > 3))

    def _order(self, q: TensorType) -> Zigzag | None:
        return Zigzag(q.shape[SEQUENCE], self.zigzag) if self.causal else None

    def _score_rule(self, q: TensorType) -> ScoreRule:
        return ScoreRule(self._scale(q), self._order(q), self.window, self.cap)

    def _scale(self, q: TensorType) -> float:
        return self.scale or q.shape[-1] ** -0.5

    def _scores(self, d: ProgramBuilder, q: str, k: str) -> str:
        """Write scaled scores `[b s g r t]` of queries and all keys."""
        t, u = d.types[q], d.types[k]
        x = d(Elementwise(f"a * {self._scale(t)}"), d(Einsum("bsgrd,btgd->bsgrt"), q, k))
        x = cap_scores(d, self.cap, x)
        if not self.causal:
            return x
        column = Zigzag(u.shape[1], self.zigzag).write_positions(d, t.mesh)
        axes = self.members(t)
        row = d(Reshape("s -> s g=1 r=1 t=1"), d(Slice(0, axes), column) if axes else column)
        return mask_scores(d, row, column, x, self.window)

    def _gather_sequence(self, d: ProgramBuilder, name: str) -> str:
        axes = self.members(d.types[name])
        return d(AllGather(SEQUENCE, axes), name) if axes else name


def cap_scores(d: ProgramBuilder, cap: float, scores: str) -> str:
    """Write scores that are bent to be below a cap; 0: none."""
    return d(Elementwise(f"{cap} * tanh(a / {cap})"), scores) if cap else scores


def mask_scores(d: ProgramBuilder, row: str, column: str, scores: str, window: int = 0) -> str:
    """Write scores of which those of a position `column` behind `row`, or a `window` before it, do not count."""
    seen = f"where(a - b < {window}, 0, 1)" if window else "0"
    late = d(Cast("bool"), d(Elementwise(f"where(a < b, 1, {seen})"), row, column))
    return d(Elementwise(f"where(a, {MASKED}, b)"), late, scores)


@dataclass(frozen=True, slots=True)
class RingAttention(_Rotating):
    """As `Attention` of queries `[b s g r d]`, keys `[b s g d]` and values `[b s g e]`, the sequence cut alike.

    Results are `[b s g r e]` and the log-sum-exp of the scores `[b s g r]`, in f32 or wider. What is causal goes by
    positions, of which the sequence has the zigzag order over so many tiles (`zigzag`): cut into as many, every device
    has as much to do, and else the last has most.

    >>> q, k = (TensorType.parse(f"f32[2, 12@c, 4, {dims}8]", "c=3") for dims in ("2, ", ""))
    >>> op = RingAttention()
    >>> print(*op.infer(q, k, k), op.received_bytes(q, k, k))
    f32[2, 12@c, 4, 2, 8] f32[2, 12@c, 4, 2] [4096 4096 4096]
    """

    name: ClassVar[str] = "ring_attention"

    def rule(self, *operands: TensorType) -> FactorRule:
        """Everything but what is contracted may be cut."""
        common_dtype(self.name, operands)
        return rule_of(self.name, "[b s g r d] [b s g d] [b s g e] -> [b s g r e] [b s g r] | fixed: d e", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """No sums: scores are exponentiated."""
        return False

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """That of the operands, and a wide one."""
        return operands[0].dtype, wide_name(operands[0].dtype)

    def decomposition(self, *operands: TensorType) -> Decomposition:
        """Keys and values gathered, and attention."""
        self.infer(*operands)
        d = ProgramBuilder.of(operands)
        x = self._scores(d, widened(d, "0"), self._gather_sequence(d, widened(d, "1")))
        top = d(ReduceDims((4,), "max", keep=True), x)
        e = d(Elementwise("exp(a - b)"), x, top, stopped=(1,))
        total = d(ReduceDims((4,), keep=True), e)
        out = d(
            Einsum("bsgrt,btge->bsgre"), d(Elementwise("a / b"), e, total), self._gather_sequence(d, widened(d, "2"))
        )
        lse = d(Elementwise("log(a) + b"), total, top, stopped=(1,))
        return d.decomposition(cast_to(d, out, operands[0].dtype), d(Reshape("b s g r one=1 -> b s g r"), lse))

    def pull(
        self, builder: ProgramBuilder, operands: Values, results: Values, cotangents: Values, wanted: Sequence[bool]
    ) -> Cotangents:
        """One ring back; what it takes of the results is made before: their product with the cotangents."""
        came, more = (builder.reduce_axes(c, builder.types[c].layout.partial) for c in cotangents)
        inner = builder(Einsum("bsgre,bsgre->bsgr"), widened(builder, came), widened(builder, results[0]))
        inner = builder(Elementwise("a - b"), inner, more)
        return builder.write_step(
            RingAttentionBackward(self.causal, self.scale, self.zigzag, self.window, self.cap),
            *operands,
            results[1],
            inner,
            came,
        )

    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering:
        """As many rounds as tiles, in all but the last of which they go on."""
        ring = TileRing(self.members(operands[1]), operands, devices, self._order(operands[0]))
        kind = wide_name(operands[0].dtype)
        out = whole_block("y0" if kind == operands[0].dtype else "sum", ring.queries[:, :4], operands[2].shape[-1])
        state = out, whole_block("y1", ring.queries[:, :4])
        buffers = {f"t{k}": Buffer(ring.most * (ring.size > 1), operands[1].dtype) for k in (0, 1)}
        if out.buffer == "sum":
            buffers["sum"] = Buffer(out.elements, kind)
        run = partial(tile_forward, rule=self._score_rule(operands[0]))
        work = 2 * sum(t.shape[-1] for t in (operands[0], operands[2])) + _PAIRS + self.causal

        def rounds() -> Iterator[Round]:
            yield from ring.load_rounds()
            for r in range(ring.size):
                sources = whole_block("x0", ring.queries), *ring.at_hand(r), *(state if r else ())
                n, more = (ring.tile(r + k).elements * (r < ring.size - 1) for k in (0, 1))
                yield Round(
                    (ring.put(f"t{r % 2}", n),),
                    takes=(ring.take(f"t{(r + 1) % 2}", more),),
                    kernels=(ring.kernel(run, sources, state, r, work),),
                )
            if out.buffer == "sum":
                yield ring.write_round((out,), (out._replace(buffer="y0"),))

        return Lowering(devices, buffers, rounds)


@dataclass(frozen=True, slots=True)
class RingAttentionBackward(_Rotating):
    """The gradient of `RingAttention`: cotangents of queries, keys and values.

    Operands are these; the log-sum-exp; what each of its elements' cotangent is less, the product of the result with
    its cotangent; and that cotangent `[b s g r e]`.
    """

    name: ClassVar[str] = "ring_attention_backward"

    def rule(self, *operands: TensorType) -> FactorRule:
        """As forward."""
        return self._rule(False, *operands)

    def _rule(self, summed: bool, *operands: TensorType) -> FactorRule:
        common_dtype(self.name, (*operands[:3], *operands[5:]))
        common_dtype(self.name, operands[3:5])
        given = "[b s g r d] [b s g d] [b s g e] [b s g r] [b s g r] [b s g r e]"
        results = "[b s g d] [b s g e] | sum: r" if summed else "[b s g r d] [b s g d] [b s g e]"
        return rule_of(self.name, f"{given} -> {results} | fixed: d e", operands)

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """Sums of both cotangents."""
        return reduction == "sum" and partial == frozenset({4, 5})

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """Those of the values."""
        return (operands[0].dtype,) * 3

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Apply the rule; over the axes of query heads cotangents of keys and values are sums."""
        kinds = self.dtypes(*operands)

        def typed(rule: FactorRule) -> tuple[TensorType, ...]:
            kind = kinds[: len(rule.results)]
            return infer(rule, operands, lambda p, r: self.passes(p, r, operands), self.name, kind)

        return typed(self.rule(*operands))[0], *typed(self._rule(True, *operands))

    def decomposition(self, *operands: TensorType) -> Decomposition:
        """Keys and values gathered; their cotangents reduced and scattered."""
        self.infer(*operands)
        d, axes = ProgramBuilder.of(operands), self.members(operands[1])
        q, k, v = widened(d, "0"), self._gather_sequence(d, widened(d, "1")), self._gather_sequence(d, widened(d, "2"))
        came, of = widened(d, "5"), operands[0].dtype
        one = " ".join("bsgr")
        lse, less = (d(Reshape(f"{one} -> {one} one=1"), name) for name in ("3", "4"))
        scores = self._scores(d, q, k)
        p = d(Elementwise("exp(a - b)"), scores, lse)
        ds = d(Elementwise("a - b"), d(Einsum("bsgre,btge->bsgrt"), came, v), less)
        ds = d(Elementwise(f"a * b * {self._scale(operands[0])}"), p, ds)
        if self.cap:  # the slope of the bend, 0 where a score is masked
            ds = d(Elementwise(f"a * (1 - (maximum(b, -{self.cap}) / {self.cap}) ** 2)"), ds, scores)
        found = [d(Einsum("bsgrt,btgd->bsgrd"), ds, k)]
        for spec, x, y in (("bsgrt,bsgrd->btgd", ds, q), ("bsgrt,bsgre->btge", p, came)):
            made = d(Einsum(spec), x, y)
            found.append(d(ReduceScatter(SEQUENCE, axes), made) if axes else made)
        return d.decomposition(*(cast_to(d, name, of) for name in found))

    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering:
        """As many rounds as tiles, and one in which the last cotangents come home.

        In a round the cotangents of the tile before go on behind the tile: in one message with it where they are of its
        dtype. What a device adds to those that come it computes meanwhile.
        """
        ring = TileRing(self.members(operands[1]), operands, devices, self._order(operands[0]))
        dtype, kind = operands[0].dtype, wide_name(operands[0].dtype)
        joint, alone = dtype == kind, ring.size == 1
        buffers = {f"t{k}": Buffer((1 + joint) * ring.most * (k or not alone), dtype) for k in (0, 1)}
        if not joint:
            buffers |= {f"d{k}": Buffer(ring.most * (k or not alone), kind) for k in (0, 1)}
            buffers["sum"] = Buffer(np.prod(ring.queries, axis=1), kind)
        buffers["part"] = Buffer(ring.most * (not alone), kind)
        dq = whole_block("y0" if joint else "sum", ring.queries)
        run = partial(tile_backward, rule=self._score_rule(operands[0]))
        work = 2 * (3 * operands[0].shape[-1] + 2 * operands[2].shape[-1]) + _PAIRS_BACK + self.causal

        def sums(r: int) -> KeyTile:
            """The cotangents of the tile of round r, behind it."""
            ahead = ring.tile(r + 1).elements * (r < ring.size - 1)
            return ring.tile(r, f"t{(r + 1) % 2}", ahead) if joint else ring.tile(r, f"d{(r + 1) % 2}")

        def rounds() -> Iterator[Round]:
            yield from ring.load_rounds()
            for r in range(ring.size):
                made = ring.tile(r, "part") if r else sums(0)
                sources = (whole_block("x0", ring.queries), *ring.at_hand(r),
                           *(whole_block(f"x{k}", ring.queries[:, :4]) for k in (3, 4)),
                           whole_block("x5", ring.queries[:, :4], operands[2].shape[-1]),
                           *([dq] if r else []))  # fmt: skip
                kernel = ring.kernel(run, sources, (dq, *made.blocks), r, work)
                n, more = (ring.tile(r + k).elements * (r < ring.size - 1) for k in (0, 1))
                puts, takes = [ring.put(f"t{r % 2}", n)], [ring.take(f"t{(r + 1) % 2}", more)]
                then: tuple[Copy, ...] = ()
                if r:
                    gone, came = sums(r - 1), sums(r)
                    puts.append(ring.put(gone.buffer, gone.elements, gone.start))
                    takes.append(ring.take(came.buffer, came.elements, came.start))
                    then = (Copy(made.region.restrict(kernel.live), came.region.restrict(kernel.live), "sum"),)
                yield Round(tuple(puts), (), tuple(takes), then, kernels=(kernel,))
            home, last = ring.tile(ring.size, f"{'t' if joint else 'd'}{(ring.size + 1) % 2}"), sums(ring.size - 1)
            if not alone:
                yield Round((ring.put(last.buffer, last.elements, last.start),), (),
                            (ring.take(home.buffer, home.elements),))  # fmt: skip
            found = (last if alone else home).blocks
            into = whole_block("y1", found[0].shape), whole_block("y2", found[1].shape)
            yield ring.write_round(
                (dq, *found) if not joint else found, (whole_block("y0", ring.queries), *into) if not joint else into
            )

        return Lowering(devices, buffers, rounds)
