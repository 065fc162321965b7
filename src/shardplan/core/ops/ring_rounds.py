"""The rounds in which tiles of keys and values go round, and what is computed with the one at hand; see `ring`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.lowering import (
    Boxes,
    BufferBlock,
    Copy,
    Group,
    Ints,
    Kernel,
    LocalKernel,
    Put,
    Region,
    Round,
    Take,
    run_of,
)
from shardplan.core.namespace import Namespace, Tensor, wide
from shardplan.core.ops.zigzag import Zigzag, count_visible
from shardplan.core.tensor import TensorType

MASKED = -1e30  # what a masked score is set to
SEQUENCE = 1  # the dim of all operands along which they are cut


class KeyTile(NamedTuple):
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
    def blocks(self) -> tuple[BufferBlock, BufferBlock]:
        """Keys, and values."""
        first = BufferBlock(self.buffer, self.start, self.keys)
        return first, BufferBlock(self.buffer, self.start + first.elements, self.values)

    @property
    def region(self) -> Region:
        """Both."""
        return run_of(self.buffer, self.start, self.elements)


def whole_block(buffer: str, shape: Ints, *more: int) -> BufferBlock:
    """Return a whole buffer of a shape, int64 [devices, ndim], with `more` dims."""
    live = (shape.sum(axis=1) > 0)[:, None] * np.array(more, dtype=np.int64)
    return BufferBlock(buffer, np.zeros(len(shape), dtype=np.int64), np.concatenate([shape, live], axis=1))


class TileRing:
    """Who holds what in the rounds of some devices: in round r the tile of the r-th member before it is at hand.

    `size` is how many tiles there are, `most` the elements of the largest; `queries` the shape of a device's own. Where
    an `order` is given a query sees keys up to its own position.
    """

    def __init__(
        self, axes: tuple[str, ...], operands: Sequence[TensorType], devices: Ints, order: Zigzag | None
    ) -> None:
        queried, keyed, valued = operands[:3]
        self.group = Group(keyed, axes, devices)
        self.size = self.group.size
        cuts = keyed.boxes()[keyed.mesh.group_places(axes)[0], SEQUENCE]  # of every member
        self.starts, self.sizes = cuts[:, 0], cuts[:, 1] - cuts[:, 0]
        self.queries, self.keys, self.values = (self._shape(t) for t in (queried, keyed, valued))
        self.most = self._long(self.keys, self.sizes.max()).prod(axis=1) + self._long(
            self.values, self.sizes.max()
        ).prod(axis=1)
        pairs = self.sizes[:, None] * self.sizes
        self.seen = pairs > 0, pairs
        if order is not None:
            low, high = order.position_runs(self.starts, self.starts + self.sizes)
            self.seen = count_visible((low[:, None], high[:, None]), (low[None], high[None]))

    def _shape(self, t: TensorType) -> Ints:
        """The shapes of devices' own shards, 0 on idle ones."""
        held = Boxes(t, self.group.places)
        return (held.boxes[:, :, 1] - held.boxes[:, :, 0]) * self.group.live[:, None]

    def _long(self, shape: Ints, size: Ints) -> Ints:
        """Shapes with another part of the sequence."""
        found = shape.copy()
        found[:, SEQUENCE] = np.where(self.group.live, size, 0)
        return found

    def tile(self, r: int, buffer: str = "t0", start: Ints | int = 0) -> KeyTile:
        """Return the tile of round r where it lies in a buffer; that of as many rounds as tiles is the device's own."""
        at = np.zeros(len(self.queries), dtype=np.int64) + start
        size = self.sizes[(self.group.me - r) % self.size]
        return KeyTile(buffer, at, self._long(self.keys, size), self._long(self.values, size))

    def at_hand(self, r: int) -> tuple[BufferBlock, BufferBlock]:
        """Return the keys and values of round r."""
        if r:
            return self.tile(r, f"t{r % 2}").blocks
        found = self.tile(0)
        return whole_block("x1", found.keys), whole_block("x2", found.values)

    def load_rounds(self) -> Iterator[Round]:
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
        self, run: LocalKernel, sources: tuple[BufferBlock, ...], targets: tuple[BufferBlock, ...], r: int, work: float
    ) -> Kernel:
        """Return what computes with the tile of round r, of so many operations a pair; no device a masked tile."""
        mine, other = self.group.me % self.size, (self.group.me - r) % self.size
        live, pairs = (table[mine, other] for table in self.seen)
        heads = self.queries[:, 0] * self.queries[:, 2] * self.queries[:, 3]
        numbers = np.stack([self.starts[mine], self.starts[other]], axis=1)
        return Kernel(run, sources, targets, numbers, live & self.group.live, work * heads * pairs)

    def write_round(self, sources: tuple[BufferBlock, ...], targets: tuple[BufferBlock, ...]) -> Round:
        """Return a round that writes blocks into results."""
        none = np.zeros((len(self.queries), 0), dtype=np.int64)
        live = np.any([b.elements > 0 for b in sources], axis=0)
        return Round(kernels=(Kernel(return_arrays, sources, targets, none, live, np.zeros(len(live))),))


def return_arrays(xp: Namespace, arrays: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
    """Return what is given, to be rounded."""
    return arrays


class ScoreRule(NamedTuple):
    """How scores are made: their scale, in what order positions are, where they are causal, a window and a cap."""

    scale: float
    order: Zigzag | None
    window: int = 0
    cap: float = 0.0

    def score_tile(
        self, xp: Namespace, q: Tensor, k: Tensor, numbers: Sequence[Any], apart: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return scores `[b s g r t]`, and of capped ones what they are beside the cap.

        `numbers` are the indices of the first query and key; pairs that are `apart` do not count.
        """
        x, bent = xp.einsum("bsgrd,btgd->bsgrt", q, k) * self.scale, None
        if self.cap:
            bent = xp.tanh(x / self.cap)
            x = bent * self.cap
        masked = xp.full((), MASKED, xp.dtype(x))
        if self.order is not None:
            row, column = (
                self.order.positions(xp, xp.arange(y.shape[1]) + first)
                for y, first in zip((q, k), numbers, strict=True)
            )
            row = row[:, None, None, None]
            late = row < column
            x = xp.where(late | (row - column >= self.window) if self.window else late, masked, x)
        return (x if apart is None else xp.where(apart, masked, x)), bent


def tile_forward(
    xp: Namespace, arrays: Sequence[Tensor], numbers: Sequence[Any], rule: ScoreRule, apart: Tensor | None = None
) -> Sequence[Tensor]:
    """Fold attention to a tile into what was found so far."""
    q, k, v, *state = (xp.astype(x, wide(xp.dtype(x))) for x in arrays)
    x, _ = rule.score_tile(xp, q, k, numbers, apart)
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


def tile_backward(
    xp: Namespace, arrays: Sequence[Tensor], numbers: Sequence[Any], rule: ScoreRule, apart: Tensor | None = None
) -> Sequence[Tensor]:
    """Add to the cotangents of queries what a tile brings, and return the tile's own."""
    q, k, v, lse, less, came, *before = (xp.astype(x, wide(xp.dtype(x))) for x in arrays)
    x, bent = rule.score_tile(xp, q, k, numbers, apart)
    p = xp.exp(x - lse[..., None])
    ds = p * (xp.einsum("bsgre,btge->bsgrt", came, v) - less[..., None]) * rule.scale
    ds = ds if bent is None else ds * (1 - bent * bent)
    dq = xp.einsum("bsgrt,btgd->bsgrd", ds, k)
    dk, dv = xp.einsum("bsgrt,bsgrd->btgd", ds, q), xp.einsum("bsgrt,bsgre->btge", p, came)
    return (dq + before[0] if before else dq), dk, dv
