"""`MovePrices`: what movements of layers take on a device, tokens that go to experts among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.hardware.prices.kernels import stream_seconds
from shardplan.simulation.closed.collectives import AffineCosts, CollectivePrices
from shardplan.simulation.closed.dispatch import Routing
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.work import FORWARD, LocalMove, LocalValue
from shardplan.strategy.held_cuts import HEADS, RATIO, SHARING

Floats = np.ndarray
TENSOR_AXES = HEADS + RATIO
SUM_BYTES = 4.0  # of an element of cotangents of keys and values that go round: sums are in f32, or wider


@dataclass(slots=True, eq=False)
class MovePrices:
    """Prices movements of layers at many sizes; lines of costs are found once for all movements over the same axes."""

    collectives: CollectivePrices
    sizes: LocalSizes
    strides: Mapping[str, Floats]
    routing: Routing = field(default_factory=Routing)
    known: dict[tuple[bool, bool, tuple[str, ...]], AffineCosts] = field(
        default_factory=dict[tuple[bool, bool, tuple[str, ...]], AffineCosts]
    )

    def seconds(self, move: LocalMove) -> Floats:
        """Return the seconds of a movement, [n].

        What tensor axes do not cut all of them have alike: each moves a part of it, which they gather after that, where
        it takes less time. Or what a larger value is made of is gathered over all these axes, unless software says how
        tokens go (Megatron-Core's dispatchers: `alltoall`, `allgather`).
        """
        nbytes = self.sizes.bytes(move.value)
        found = self._move_seconds(move, nbytes)
        alike = self._uncut_axes(move, move.value)
        parts, group = (np.prod([self.sizes.degrees[a] for a in axes], axis=0) for axes in (alike, move.axes))
        if move.made_of is not None and self.routing.dispatch is None:
            both = (*move.axes, *self._uncut_axes(move, move.made_of))
            gathered = self._lines(False, True, both).seconds(self.sizes.bytes(move.made_of))
            more = stream_seconds(2 * nbytes * (1 - 1 / group), self.collectives.fabric.topology.device)
            found = np.minimum(found, gathered + more)  # which writes all of the larger value, and reads it
        if not alike:
            return found
        apart = self._move_seconds(move, nbytes / parts)
        after = nbytes if move.whole else nbytes / group
        return np.minimum(found, apart + self._lines(False, True, alike).seconds(after))

    def _uncut_axes(self, move: LocalMove, value: LocalValue) -> tuple[str, ...]:
        """The tensor axes over which devices have a value alike: they neither cut it nor are moved over."""
        used = {*move.axes, *(a for e in value.extents for a in e.axes)}
        return tuple(a for a in TENSOR_AXES if a in self.sizes.degrees and a not in used)

    def _move_seconds(self, move: LocalMove, nbytes: Floats) -> Floats:
        """Return the seconds of a movement of so many bytes, whoever else has them, [n]."""
        direct, routing = self._lines(move.summed, move.whole, move.axes).seconds(nbytes), self.routing
        if not routing.taken or (move.summed and move.whole):
            return direct
        slots = any(e.sharing is not None for e in move.value.extents)
        if not move.summed and not move.whole:
            return self._exchange_seconds(move.axes, nbytes) if slots else direct
        if move.attention or move.run < 0 or {*move.axes} != {SHARING["context"]}:
            return direct
        # Jobs gather all tokens of a context for experts; frameworks exchange copies, fewer bytes where few are taken.
        mean, most = self.sizes.slots
        return np.minimum(
            direct, self._exchange_seconds(move.axes, nbytes * (1 if slots else routing.taken * most / mean))
        )

    def _exchange_seconds(self, axes: tuple[str, ...], nbytes: Floats) -> Floats:
        """Return the seconds of tokens that go to their experts, or back, of so many bytes in all copies, [n]."""
        direct, routing = self._lines(False, False, axes).seconds(nbytes), self.routing
        if routing.dispatch == "direct":
            return direct
        levels = self._over_levels(axes, nbytes)
        return levels if routing.dispatch == "levels" else np.minimum(direct, levels)

    def waited_rounds(self, phase: int, axes: tuple[str, ...], values: Sequence[LocalValue], kernel: Floats) -> Floats:
        """Return the seconds that attention waits for tiles of keys and values that go round, [n].

        A round is a kernel and a message beside it. Back, the sums of the tiles' cotangents follow them a round later,
        and come home in one round more, beside nothing (Liu et al., arXiv 2310.01889, section 3; as `ring_attention`).

        Args:
            phase: Forward or backward.
            axes: Those around which they go.
            values: Keys and values, whole over these axes.
            kernel: Seconds of attention in all rounds, [n].
        """
        lines = self.collectives.round_lines([(self.sizes.degrees[a], self.strides[a]) for a in axes])
        around = np.prod([self.sizes.degrees[a] for a in axes], axis=0)
        tile, sums = (sum((self.sizes.volume(v.extents) * width(v) for v in values), np.zeros(1)) / around
                      for width in (lambda v: v.itemsize, lambda v: max(v.itemsize, SUM_BYTES)))  # fmt: skip

        def waited(nbytes: Floats, rounds: Floats | float) -> Floats:
            return rounds * np.maximum(0.0, lines.seconds(nbytes) - kernel / around)

        if phase == FORWARD:
            return waited(tile, around - 1)
        several = around > 1
        both = waited(tile + sums, np.maximum(0.0, around - 2))
        return several * (waited(tile, 1.0) + both + waited(sums, 1.0) + lines.seconds(sums))

    def _over_levels(self, axes: tuple[str, ...], nbytes: Floats) -> Floats:
        """Return the seconds of tokens that go once to each node that has experts of theirs, and on from there, [n].

        To so many nodes as `Routing.copies` says; both ways run at once, chunk after chunk (DeepSeek-V3, arXiv
        2412.19437, section 3.2.2; the deepseek-ai/DeepEP kernels).
        """
        inside = self.collectives.fabric.topology.levels[-1].size
        far: list[tuple[Floats, Floats]] = []
        near: list[tuple[Floats, Floats]] = []
        nodes = parts = np.asarray(1.0)
        for axis in axes:
            size, stride = self.sizes.degrees[axis], self.strides[axis]
            own = np.gcd(size.astype(np.int64), np.maximum(1, inside // stride).astype(np.int64)).astype(float)
            own = own.max(axis=0) if own.ndim > 1 else own  # in an order that is not said, as many as may be near
            near.append((own, stride))
            far.append((size / own, stride * own))
            nodes, parts = nodes * size / own, parts * own
        once = self.routing.copies(nodes) / self.routing.taken
        sent = self.collectives.lines(False, False, far).seconds(nbytes / parts * once)
        return np.maximum(sent, self.collectives.lines(False, False, near).seconds(nbytes / nodes))

    def _lines(self, summed: bool, whole: bool, axes: tuple[str, ...]) -> AffineCosts:
        key = summed, whole, axes
        if key not in self.known:
            self.known[key] = self.collectives.lines(
                summed, whole, [(self.sizes.degrees[a], self.strides[a]) for a in axes]
            )
        return self.known[key]
