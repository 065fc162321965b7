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
from typing import Any, ClassVar, NamedTuple

import numpy as np

from shardplan.core.draft import Decomposition, Draft
from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.factor_rule import FactorRule, infer
from shardplan.core.layout import Layout
from shardplan.core.lowering import (
    Block,
    Boxes,
    Buffer,
    Copy,
    Group,
    Ints,
    Kernel,
    LocalKernel,
    Lowering,
    Put,
    Region,
    Round,
    Take,
    run_of,
)
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.arithmetic import Elementwise, ReduceDims
from shardplan.core.ops.compute import common_dtype
from shardplan.core.ops.indexing import Iota
from shardplan.core.ops.movement import AllGather
from shardplan.core.ops.overlapped import Overlapped
from shardplan.core.ops.placing import Cast, Reshape
from shardplan.core.ops.products import Einsum
from shardplan.core.ops.reduction import ReduceScatter
from shardplan.core.rule_text import rule_of
from shardplan.core.tensor import TensorType

MASKED = -1e30  # what a masked score is set to
_PAIRS = 6  # operations on a score beside products: scale, mask, maximum, difference, exponential, sum
_PAIRS_BACK = 5  # and in the gradient: scale, mask, difference, exponential, product
_SEQUENCE = 1  # the dim of all operands


def wide_name(dtype: str) -> str:
    """Return the dtype in which sums of a dtype are kept."""
    return short_name(wide(numpy_dtype(dtype)))


@dataclass(frozen=True, slots=True)
class _Rotating(Overlapped):
    """What attention and its gradient share."""

    causal: bool = True
    scale: float = 0.0

    def members(self, t: TensorType) -> tuple[str, ...]:
        """Return the axes of the sequence, round which tiles go."""
        return t.layout.dims[_SEQUENCE]

    def _scale(self, q: TensorType) -> float:
        return self.scale or q.shape[-1] ** -0.5

    def _scores(self, d: Draft, q: str, k: str) -> str:
        """Write scaled scores `[b s g r t]` of queries and all keys."""
        t, u = d.types[q], d.types[k]
        x = d(Elementwise(f"a * {self._scale(t)}"), d(Einsum("bsgrd,btgd->bsgrt"), q, k))
        if not self.causal:
            return x
        row = d(Iota("i32", (t.shape[1], 1, 1, 1), 0, Layout((t.layout.dims[1], (), (), ())), t.mesh))
        column = d(Iota("i32", (u.shape[1],), 0, Layout(((),)), t.mesh))
        late = d(Cast("bool"), d(Elementwise("where(a < b, 1, 0)"), row, column))
        return d(Elementwise(f"where(a, {MASKED}, b)"), late, x)

    def _gathered(self, d: Draft, name: str) -> str:
        axes = self.members(d.types[name])
        return d(AllGather(_SEQUENCE, axes), name) if axes else name


def _wide(d: Draft, name: str) -> str:
    to = wide_name(d.types[name].dtype)
    return name if d.types[name].dtype == to else d(Cast(to), name)


def _as(d: Draft, name: str, dtype: str) -> str:
    return name if d.types[name].dtype == dtype else d(Cast(dtype), name)


@dataclass(frozen=True, slots=True)
class RingAttention(_Rotating):
    """As `Attention` of queries `[b s g r d]`, keys `[b s g d]` and values `[b s g e]`, the sequence cut alike.

    Results are `[b s g r e]` and the log-sum-exp of the scores `[b s g r]`, in f32 or wider.

    >>> q, k = (TensorType.parse(f"f32[2, 12@c, 4, {dims}8]", "c=3") for dims in ("2, ", ""))
    >>> op = RingAttention()
    >>> print(*op.infer(q, k, k), op.received(q, k, k))
    f32[2, 12@c, 4, 2, 8] f32[2, 12@c, 4, 2] [4096 4096 4096]
    """

    name: ClassVar[str] = "ring_attention"

    def rule(self, *operands: TensorType) -> FactorRule:
        """Everything but what is contracted may be cut."""
        common_dtype(self.name, operands)
        return rule_of(
            self.name, "[b s g r d] [b s g d] [b s g e] -> [b s g r e] [b s g r] | fixed: d e", operands
        )

    def passes(self, partial: frozenset[int], reduction: str, operands: Sequence[TensorType]) -> bool:
        """No sums: scores are exponentiated."""
        return False

    def dtypes(self, *operands: TensorType) -> tuple[str, ...]:
        """That of the operands, and a wide one."""
        return operands[0].dtype, wide_name(operands[0].dtype)

    def decomposition(self, *operands: TensorType) -> Decomposition:
        """Keys and values gathered, and attention."""
        self.infer(*operands)
        d = Draft.of(operands)
        x = self._scores(d, _wide(d, "0"), self._gathered(d, _wide(d, "1")))
        top = d(ReduceDims((4,), "max", keep=True), x)
        e = d(Elementwise("exp(a - b)"), x, top, stopped=(1,))
        total = d(ReduceDims((4,), keep=True), e)
        out = d(Einsum("bsgrt,btge->bsgre"), d(Elementwise("a / b"), e, total), self._gathered(d, _wide(d, "2")))
        lse = d(Elementwise("log(a) + b"), total, top, stopped=(1,))
        return d.done(_as(d, out, operands[0].dtype), d(Reshape("b s g r one=1 -> b s g r"), lse))

    def pull(
        self,
        draft: Draft,
        operands: Sequence[str],
        results: Sequence[str],
        cotangents: Sequence[str],
        wanted: Sequence[bool],
    ) -> Sequence[str | None]:
        """One ring back; what it takes of the results is made before: their product with the cotangents."""
        came, more = (draft.reduced(c, draft.types[c].layout.partial) for c in cotangents)
        inner = draft(Einsum("bsgre,bsgre->bsgr"), _wide(draft, came), _wide(draft, results[0]))
        inner = draft(Elementwise("a - b"), inner, more)
        return draft.every(RingAttentionBackward(self.causal, self.scale), *operands, results[1], inner, came)

    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering:
        """As many rounds as tiles, in all but the last of which they go on."""
        ring = _Ring(self.members(operands[1]), operands, devices, self.causal)
        kind = wide_name(operands[0].dtype)
        out = own("y0" if kind == operands[0].dtype else "sum", ring.queries[:, :4], operands[2].shape[-1])
        state = out, own("y1", ring.queries[:, :4])
        buffers = {f"t{k}": Buffer(ring.most * (ring.size > 1), operands[1].dtype) for k in (0, 1)}
        if out.buffer == "sum":
            buffers["sum"] = Buffer(out.elements, kind)
        run = partial(_tile, causal=self.causal, scale=self._scale(operands[0]))
        work = 2 * sum(t.shape[-1] for t in (operands[0], operands[2])) + _PAIRS

        def rounds() -> Iterator[Round]:
            yield from ring.loaded()
            for r in range(ring.size):
                sources = own("x0", ring.queries), *ring.at_hand(r), *(state if r else ())
                n, more = (ring.tile(r + k).elements * (r < ring.size - 1) for k in (0, 1))
                yield Round(
                    (ring.put(f"t{r % 2}", n),),
                    takes=(ring.take(f"t{(r + 1) % 2}", more),),
                    kernels=(ring.kernel(run, sources, state, r, work),),
                )
            if out.buffer == "sum":
                yield ring.rounded((out,), (out._replace(buffer="y0"),))

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
        return reduction == "sum" and partial == {4, 5}

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
        d, axes = Draft.of(operands), self.members(operands[1])
        q, k, v = _wide(d, "0"), self._gathered(d, _wide(d, "1")), self._gathered(d, _wide(d, "2"))
        came, of = _wide(d, "5"), operands[0].dtype
        one = " ".join("bsgr")
        lse, less = (d(Reshape(f"{one} -> {one} one=1"), name) for name in ("3", "4"))
        p = d(Elementwise("exp(a - b)"), self._scores(d, q, k), lse)
        ds = d(Elementwise("a - b"), d(Einsum("bsgre,btge->bsgrt"), came, v), less)
        ds = d(Elementwise(f"a * b * {self._scale(operands[0])}"), p, ds)
        found = [d(Einsum("bsgrt,btgd->bsgrd"), ds, k)]
        for spec, x, y in (("bsgrt,bsgrd->btgd", ds, q), ("bsgrt,bsgre->btge", p, came)):
            made = d(Einsum(spec), x, y)
            found.append(d(ReduceScatter(_SEQUENCE, axes), made) if axes else made)
        return d.done(*(_as(d, name, of) for name in found))

    def lowering(self, operands: Sequence[TensorType], devices: Ints, algorithm: str = "") -> Lowering:
        """As many rounds as tiles, and one in which the last cotangents come home.

        In a round the cotangents of the tile before go on behind the tile: in one message with it where they are of its
        dtype. What a device adds to those that come it computes meanwhile.
        """
        ring = _Ring(self.members(operands[1]), operands, devices, self.causal)
        dtype, kind = operands[0].dtype, wide_name(operands[0].dtype)
        joint, alone = dtype == kind, ring.size == 1
        buffers = {f"t{k}": Buffer((1 + joint) * ring.most * (k or not alone), dtype) for k in (0, 1)}
        if not joint:
            buffers |= {f"d{k}": Buffer(ring.most * (k or not alone), kind) for k in (0, 1)}
            buffers["sum"] = Buffer(np.prod(ring.queries, axis=1), kind)
        buffers["part"] = Buffer(ring.most * (not alone), kind)
        dq = own("y0" if joint else "sum", ring.queries)
        run = partial(_tile_back, causal=self.causal, scale=self._scale(operands[0]))
        work = 2 * (3 * operands[0].shape[-1] + 2 * operands[2].shape[-1]) + _PAIRS_BACK

        def sums(r: int) -> Tile:
            """The cotangents of the tile of round r, behind it."""
            ahead = ring.tile(r + 1).elements * (r < ring.size - 1)
            return ring.tile(r, f"t{(r + 1) % 2}", ahead) if joint else ring.tile(r, f"d{(r + 1) % 2}")

        def rounds() -> Iterator[Round]:
            yield from ring.loaded()
            for r in range(ring.size):
                made = ring.tile(r, "part") if r else sums(0)
                sources = (own("x0", ring.queries), *ring.at_hand(r),
                           *(own(f"x{k}", ring.queries[:, :4]) for k in (3, 4)),
                           own("x5", ring.queries[:, :4], operands[2].shape[-1]), *([dq] if r else []))  # fmt: skip
                kernel = ring.kernel(run, sources, (dq, *made.blocks), r, work)
                n, more = (ring.tile(r + k).elements * (r < ring.size - 1) for k in (0, 1))
                puts, takes = [ring.put(f"t{r % 2}", n)], [ring.take(f"t{(r + 1) % 2}", more)]
                then: tuple[Copy, ...] = ()
                if r:
                    gone, came = sums(r - 1), sums(r)
                    puts.append(ring.put(gone.buffer, gone.elements, gone.start))
                    takes.append(ring.take(came.buffer, came.elements, came.start))
                    then = (Copy(made.region.only(kernel.live), came.region.only(kernel.live), "sum"),)
                yield Round(tuple(puts), (), tuple(takes), then, kernels=(kernel,))
            home, last = ring.tile(ring.size, f"{'t' if joint else 'd'}{(ring.size + 1) % 2}"), sums(ring.size - 1)
            if not alone:
                yield Round((ring.put(last.buffer, last.elements, last.start),), (),
                            (ring.take(home.buffer, home.elements),))  # fmt: skip
            found = (last if alone else home).blocks
            into = own("y1", found[0].shape), own("y2", found[1].shape)
            yield ring.rounded((dq, *found) if not joint else found, (own("y0", ring.queries), *into) if not joint else into)

        return Lowering(devices, buffers, rounds)


class Tile(NamedTuple):
    """Keys and values, or their cotangents, one behind the other in a buffer."""

    buffer: str
    start: Ints  # int64 [devices]
    keys: Ints  # the shapes, int64 [devices, 4]
    values: Ints

    @property
    def elements(self) -> Ints:
        """Of both."""
        return np.prod(self.keys, axis=1) + np.prod(self.values, axis=1)

    @property
    def blocks(self) -> tuple[Block, Block]:
        """Keys, and values."""
        first = Block(self.buffer, self.start, self.keys)
        return first, Block(self.buffer, self.start + first.elements, self.values)

    @property
    def region(self) -> Region:
        """Both."""
        return run_of(self.buffer, self.start, self.elements)


def own(buffer: str, shape: Ints, *more: int) -> Block:
    """Return a whole buffer of a shape, int64 [devices, ndim], with `more` dims."""
    live = shape.any(axis=1)[:, None] * np.array(more, dtype=np.int64)
    return Block(buffer, np.zeros(len(shape), dtype=np.int64), np.concatenate([shape, live], axis=1))


class _Ring:
    """Who holds what in the rounds of some devices: in round r the tile of the r-th member before it is at hand.

    `size` is how many tiles there are, `most` the elements of the largest; `queries` the shape of a device's own.
    """

    def __init__(
        self, axes: tuple[str, ...], operands: Sequence[TensorType], devices: Ints, causal: bool
    ) -> None:
        self.queried, self.keyed, self.valued = operands[:3]
        self.group, self.causal = Group(self.keyed, axes, devices), causal
        self.size = self.group.size
        self.queries, self.first = self._box(self.queried, 0)
        self.most = np.max([self.tile(r).elements for r in range(self.size)], axis=0)

    def _box(self, t: TensorType, r: int) -> tuple[Ints, Ints]:
        """The shape of a tile, 0 on idle devices, and where it begins in the sequence."""
        held = Boxes(t, self.group.place(self.group.me - r))
        shape = (held.boxes[:, :, 1] - held.boxes[:, :, 0]) * held.live[:, None]
        return shape, held.boxes[:, _SEQUENCE, 0]

    def tile(self, r: int, buffer: str = "t0", start: Ints | int = 0) -> Tile:
        """Return the tile of round r where it lies in a buffer; that of as many rounds as tiles is the device's own."""
        at = np.zeros(len(self.queries), dtype=np.int64) + start
        return Tile(buffer, at, self._box(self.keyed, r)[0], self._box(self.valued, r)[0])

    def at_hand(self, r: int) -> tuple[Block, Block]:
        """Return the keys and values of round r."""
        if r:
            return self.tile(r, f"t{r % 2}").blocks
        found = self.tile(0)
        return own("x1", found.keys), own("x2", found.values)

    def loaded(self) -> Iterator[Round]:
        """Yield what puts a device's own keys and values one behind the other, so that they go in one message."""
        if self.size > 1:
            zero = np.zeros(len(self.queries), dtype=np.int64)
            into = (run_of(b.buffer, b.start, b.elements) for b in self.tile(0).blocks)
            given = (run_of(b.buffer, zero, b.elements) for b in self.at_hand(0))
            yield Round(meanwhile=tuple(map(Copy, given, into)))

    def put(self, buffer: str, elements: Ints, start: Ints | int = 0) -> Put:
        """Send to the next member."""
        return self.group.put(self.group.me + 1, run_of(buffer, start + 0 * elements, elements))

    def take(self, buffer: str, elements: Ints, start: Ints | int = 0) -> Take:
        """Receive from the member before."""
        return self.group.take(self.group.me - 1, run_of(buffer, start + 0 * elements, elements))

    def kernel(
        self, run: LocalKernel, sources: tuple[Block, ...], targets: tuple[Block, ...], r: int, work: float
    ) -> Kernel:
        """Return what computes with the tile of round r, of so many operations a pair; no device a masked tile."""
        shape, start = self._box(self.keyed, r)
        low, high = self.first, self.first + self.queries[:, _SEQUENCE]
        end = start + shape[:, _SEQUENCE]
        live = self.queries.all(axis=1) & shape.all(axis=1)
        pairs = (high - low) * (end - start)
        if self.causal:
            live &= start < high
            pairs = _seen(high, start, end) - _seen(low, start, end)
        heads = self.queries[:, 0] * self.queries[:, 2] * self.queries[:, 3]
        return Kernel(run, sources, targets, np.stack([low, start], axis=1), live, work * heads * pairs)

    def rounded(self, sources: tuple[Block, ...], targets: tuple[Block, ...]) -> Round:
        """Return a round that writes blocks into results."""
        none = np.zeros((len(self.queries), 0), dtype=np.int64)
        live = np.any([b.elements > 0 for b in sources], axis=0)
        return Round(kernels=(Kernel(_same, sources, targets, none, live, np.zeros(len(live))),))


def _seen(end: Ints, start: Ints, stop: Ints) -> Ints:
    """How many pairs of a query before `end` and a key from `start` to `stop` are not masked; half on the diagonal."""
    inside = np.clip(end, start, stop) - start
    return inside * inside / 2 + np.maximum(end - stop, 0) * (stop - start)


def _same(xp: Namespace, arrays: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
    return arrays


def _scores(xp: Namespace, q: Tensor, k: Tensor, numbers: Sequence[Any], causal: bool, scale: float) -> Tensor:
    """Scaled scores `[b s g r t]`; `numbers` are the positions of the first query and key."""
    x = xp.einsum("bsgrd,btgd->bsgrt", q, k) * scale
    if not causal:
        return x
    row, column = (xp.arange(y.shape[1]) + first for y, first in zip((q, k), numbers, strict=True))
    late = row[:, None, None, None] < column
    return xp.where(late, xp.full((), MASKED, xp.dtype(x)), x)


def _tile(
    xp: Namespace, arrays: Sequence[Tensor], numbers: Sequence[Any], causal: bool, scale: float
) -> Sequence[Tensor]:
    """Fold attention to a tile into what was found so far."""
    q, k, v, *state = (xp.astype(x, wide(xp.dtype(x))) for x in arrays)
    x = _scores(xp, q, k, numbers, causal, scale)
    top = xp.reduce("max", x, (4,), True, -np.inf)
    e = xp.exp(x - top)
    total = xp.reduce("sum", e, (4,), True, 0)
    out, lse = xp.einsum("bsgrt,btge->bsgre", e / total, v), (top + xp.log(total))[..., 0]
    if state:
        before, known = state
        most = xp.maximum(known, lse)
        joint = most + xp.log(xp.exp(known - most) + xp.exp(lse - most))
        out = before * xp.exp(known - joint)[..., None] + out * xp.exp(lse - joint)[..., None]
        lse = joint
    return out, lse


def _tile_back(
    xp: Namespace, arrays: Sequence[Tensor], numbers: Sequence[Any], causal: bool, scale: float
) -> Sequence[Tensor]:
    """Add to the cotangents of queries what a tile brings, and return the tile's own."""
    q, k, v, lse, less, came, *before = (xp.astype(x, wide(xp.dtype(x))) for x in arrays)
    p = xp.exp(_scores(xp, q, k, numbers, causal, scale) - lse[..., None])
    ds = p * (xp.einsum("bsgre,btge->bsgrt", came, v) - less[..., None]) * scale
    dq = xp.einsum("bsgrt,btgd->bsgrd", ds, k)
    dk, dv = xp.einsum("bsgrt,bsgrd->btgd", ds, q), xp.einsum("bsgrt,bsgre->btge", p, came)
    return (dq + before[0] if before else dq), dk, dv
