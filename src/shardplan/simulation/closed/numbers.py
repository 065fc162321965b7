"""A `Reading` with sizes: what a layer, and what is before and behind all, takes on a device, at many degrees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardplan.core.pattern import Work
from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.prices.kernels import kernel_seconds
from shardplan.simulation.closed.collectives import AffineCosts, CollectivePrices
from shardplan.simulation.closed.kernel_classes import cast_work, narrow_bytes
from shardplan.simulation.closed.lifetimes import life_bytes
from shardplan.simulation.closed.work import FORWARD, Extent, LocalKernel, LocalMove, LocalValue, Reading
from shardplan.strategy.strategy import HEADS, RATIO, SHARING

Floats = np.ndarray
AskedLines = tuple[bool, bool, tuple[str, ...]]  # whether a move sums, whether it makes whole, and its axes
PHASES = ("forward", "backward")
TENSOR_AXES = HEADS + RATIO
CONTEXT_AXES = ("context", SHARING["context"])  # axes around which a ring sends keys and values
SUM_BYTES = 4.0  # of an element of cotangents of keys and values that go round: sums are in f32, or wider
EXPERTS = frozenset(("expert", "expert_context"))  # axes over which tokens go to experts
# Bytes that unfused attention streams for a score of 16 bits, beside what its two products read and write: scaled,
# masked and normed in one kernel, dropped out in another (arXiv 2205.05198, section 4.1).
SCORE_BYTES = (9.0, 13.0)  # in the forward pass, and back
# Kernels of unfused attention: its products, softmax and dropout; back, two products for each.
IN_STEPS = (4.0, 6.0)
# Bytes that a loss in steps reads and writes for a logit: widened to f32, its largest subtracted, exponentials summed
# and divided (Megatron's vocabulary-parallel loss), or one softmax in f32 (PyTorch's); in the forward pass, and back.
LOSS_BYTES = {"unfused": (38.0, 14.0), "": (14.0, 14.0)}
# Rows of so many bytes are what tensor cores read; a product along a head of another size runs on other units.
ALIGNED, ITEMSIZE = 16, 2
# Megatron's fused softmax takes blocks of so many heads and sequences; else there is a kernel each to widen, scale,
# mask, norm and narrow the scores (fused_softmax.py, `is_kernel_available`): more kernels, and more bytes a score,
# forward and back.
BLOCK, APART = 4, ((4.0, 32.0), (4.0, 30.0))


@dataclass(slots=True, eq=False)
class LocalSizes:
    """The degrees of axes, and sequences on a device, as arrays of one length."""

    degrees: Mapping[str, Floats]
    microbatch: Floats
    batch: int  # of the program
    data: tuple[str, ...]  # axes over which sequences are dealt out
    known: dict[Extent, Floats] = field(default_factory=dict[Extent, "Floats"])
    _volumes: dict[tuple[Extent, ...], Floats] = field(default_factory=dict["tuple[Extent, ...]", "Floats"])

    def extent(self, e: Extent) -> Floats:
        """Return the size of an extent on a device."""
        found = self.known.get(e)
        if found is None:
            whole: Floats = np.asarray(float(e.size))
            if e.batch:
                whole = e.size / self.batch * self.microbatch
                for axis in self.data:
                    if axis not in e.axes and axis in self.degrees:
                        whole = whole * self.degrees[axis]
                found = whole
                for axis in e.axes:
                    if axis not in self.data:
                        found = np.ceil(found / self.degrees[axis])
            else:
                degree = np.asarray(1.0)
                for axis in e.axes:
                    degree = degree * self.degrees[axis]
                found = np.ceil(whole / degree)
            self.known[e] = found
        return found

    def volume(self, extents: Sequence[Extent]) -> Floats:
        """Return the product of some."""
        key = tuple(extents)
        found = self._volumes.get(key)
        if found is None:
            found = np.asarray(1.0)
            for e in extents:
                found = found * self.extent(e)
            self._volumes[key] = found
        return found

    def bytes(self, value: LocalValue) -> Floats:
        """Return the bytes of a value on a device."""
        return value.itemsize * self.volume(value.extents)


class KernelsAsked(NamedTuple):
    """What kernels of a device run at: its rates and what is reached of them, and what the strategy says of kernels."""

    device: DeviceSpec
    product_dtype: str  # of products with the layers' parameters
    attention: str  # its class
    whole_loss: bool = True  # else it reads its logits once, and once more to write their gradient
    ring: bool = False  # whether keys go round, past queries that lie in the order of the sequence
    copies: int = 0  # experts to which a token goes; 0 where there are none
    rotates: bool = False  # whether keys and values go round beside attention, in whatever order


def kernel_works(k: LocalKernel, sizes: LocalSizes, asked: KernelsAsked) -> list[Work]:
    """Return what a device does for a kernel, at many sizes: one kernel, or two, for unfused attention.

    Raises `TopologyError` where the device states no operations per second for a product.
    """
    flops = k.flops * (sizes.volume(k.extents) / math.prod(e.size for e in k.extents))
    nbytes = sum((sizes.bytes(v) for v in k.values), np.asarray(0.0)) * k.touched
    if k.kind == "product":
        dtype = asked.product_dtype if k.weighs and k.run >= 0 else k.dtype
        asked.device.peak(dtype)
        sides = tuple(sizes.volume([k.extents[f] for f in side]) for side in k.roles[1:])
        narrow = narrow_bytes(dtype)
        if not narrow:
            return [Work(flops, dtype, nbytes, k.kind, sides)]
        read, made = [sizes.volume(v.extents) for v in k.values[:-1]], sizes.bytes(k.values[-1])
        product = Work(flops, dtype, sum(read, made / narrow) * narrow, k.kind, sides)
        return [product, *(cast_work(k.values[v].itemsize, narrow, read[v], k.dtype) for v in k.casts)]
    if k.kind == "scores":
        asked.device.peak(k.dtype)
        flops = flops * _busiest_in_ring(k, sizes) if asked.ring else flops
        if unfused(asked):
            return _unfused(k, sizes, asked, nbytes)
        return [Work(flops, k.dtype, nbytes, k.kind, _score_sides(k, sizes))]
    if k.kind == "loss" and asked.whole_loss:
        nbytes = logits_of(k, sizes) * LOSS_BYTES.get(asked.attention, LOSS_BYTES[""])[k.phase]
    return [Work(0.0, k.dtype, nbytes, k.kind)]


def seconds_of(k: LocalKernel, sizes: LocalSizes, asked: KernelsAsked) -> Floats:
    """Return the seconds of a kernel on a device, as `hardware` prices them."""
    works = kernel_works(k, sizes, asked)
    return sum((np.asarray(kernel_seconds(work, asked.device)) for work in works), np.asarray(0.0))


def unfused(asked: KernelsAsked) -> bool:
    """Say whether attention is in steps."""
    return asked.attention == "unfused"


def _unfused(k: LocalKernel, sizes: LocalSizes, asked: KernelsAsked, nbytes: Floats) -> list[Work]:
    """Two products, and scores read and written."""
    b, s, g, r, d, t, e = (sizes.extent(x) for x in k.extents)
    back = k.phase == 1
    scores = b * g * r * s * t
    unaligned = k.extents[4].size * ITEMSIZE % ALIGNED > 0
    dtype = "f32" if unaligned and asked.device.peak("f32") < asked.device.peak(k.dtype) else k.dtype
    streamed = scores * (SCORE_BYTES[back] + APART[back][1] * ((b * g * r) % BLOCK > 0))
    flops = scores * (d + e) * 2 * (2 if back else 1)
    return [Work(flops, dtype, nbytes, "product", (s, t, d)), Work(0.0, dtype, streamed)]


def _score_sides(k: LocalKernel, sizes: LocalSizes) -> tuple[Floats | float, ...]:
    """What the price of attention asks, as ops say it (`core.ops.ring.score_sides`)."""
    b, s, g, r, d, t, e = (sizes.extent(x) for x in k.extents)
    return b * g * r, s, t, d, e, k.seen, 5.0 if k.phase == 1 else 2.0


def _busiest_in_ring(k: LocalKernel, sizes: LocalSizes) -> Floats:
    """How many times the mean of pairs the device has whose queries are last: all tiles of keys whole, but its own."""
    around = np.prod([sizes.degrees[axis] for axis in k.extents[1].axes if axis in CONTEXT_AXES], axis=0)
    return (1 - (1 - k.seen) / around) / k.seen


def scores_of(k: LocalKernel, sizes: LocalSizes, asked: KernelsAsked) -> Floats:
    """Return how many scores attention has on a device, where they are written to memory; else 0."""
    b, s, g, r, _, t, _ = (sizes.extent(x) for x in k.extents)
    return b * g * r * s * t * unfused(asked)


def launches_of(k: LocalKernel, sizes: LocalSizes, asked: KernelsAsked) -> Floats | float:
    """Return how many kernels the host issues: one, but for attention in steps, and casts before narrow products."""
    if k.casts and k.run >= 0 and narrow_bytes(asked.product_dtype):
        return 1.0 + len(k.casts)
    if k.kind != "scores" or not unfused(asked):
        return 1.0
    b, _, g, r, *_ = (sizes.extent(x) for x in k.extents)
    return IN_STEPS[k.phase == 1] + APART[k.phase == 1][0] * ((b * g * r) % BLOCK > 0)


def logits_of(k: LocalKernel, sizes: LocalSizes) -> Floats:
    """Return the elements of the largest value that a loss reads, on a device."""
    return max((sizes.volume(v.extents) for v in k.values), key=lambda v: float(np.max(v)))


@dataclass(frozen=True, slots=True, eq=False)
class LayerCost:
    """What a microbatch takes of each part of a model on a device; a row a run of layers, then before and behind them.

    `rows` are arrays [runs + 2, n]: seconds (`compute`, `moves`, `again` of what full recomputation repeats), kernels
    (`launches`), elements and bytes.
    """

    rows: Mapping[str, Floats]
    carried: Floats  # bytes that go from layer to layer, [n]
    degrees: Mapping[str, Floats]
    moments: float = 1.0  # as in `Reading`

    def on_processors(self, phase: int) -> Floats:
        """Return the part of a phase's kernels that products and attention take, [runs + 2, n]."""
        whole, some = (self.rows.get(f"{what} {PHASES[phase]}", np.zeros(1)) for what in ("compute", "on processors"))
        return np.divide(some, whole, out=np.zeros(np.shape(whole)), where=whole > 0)

    def split(self) -> LayerCost:
        """Return it with two rows a run: of layers that are computed again, and of those behind them."""
        twice = {name: np.concatenate([np.repeat(x[:-2], 2, axis=0), x[-2:]]) for name, x in self.rows.items()}
        return replace(self, rows=twice)

    def at(self, back: np.ndarray) -> LayerCost:
        """Return it for configurations of which `back` says whose cost each has."""
        return LayerCost(
            {name: x[:, back] for name, x in self.rows.items()},
            self.carried[back],
            {axis: d[back] for axis, d in self.degrees.items()},
            self.moments,
        )


@dataclass(slots=True, eq=False)
class MovePrices:
    """Prices movements of layers at many sizes; lines of costs are found once for all movements over the same axes."""

    collectives: CollectivePrices
    sizes: LocalSizes
    strides: Mapping[str, Floats]
    copies: int = 0
    known: dict[AskedLines, AffineCosts] = field(default_factory=dict["AskedLines", AffineCosts])

    def seconds(self, move: LocalMove) -> Floats:
        """Return the seconds of a movement, [n].

        What tensor axes do not cut all of them have alike: each moves a part of it, which they gather after that, where
        it takes less time.
        """
        nbytes = self.sizes.bytes(move.value)
        found = self._lines(move.summed, move.whole, move.axes).seconds(nbytes)
        if not move.summed and not move.whole and self.copies > 1 and {*move.axes} <= EXPERTS:
            found = np.minimum(found, self._over_levels(move.axes, nbytes))
        used = {*move.axes, *(a for e in move.value.extents for a in e.axes)}
        alike = tuple(a for a in TENSOR_AXES if a in self.sizes.degrees and a not in used)
        if not alike:
            return found
        parts, group = (np.prod([self.sizes.degrees[a] for a in axes], axis=0) for axes in (alike, move.axes))
        apart = self._lines(move.summed, move.whole, move.axes).seconds(nbytes / parts)
        after = nbytes if move.whole else nbytes / group
        return np.minimum(found, apart + self._lines(False, True, alike).seconds(after))

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

        Of `copies` experts, drawn at will over a group's nodes, so many nodes are expected to have one; both ways run
        at once, chunk after chunk (DeepSeek-V3, arXiv 2412.19437, section 3.2.2; the deepseek-ai/DeepEP kernels).
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
        once = nodes * (1 - (1 - 1 / nodes) ** self.copies) / self.copies
        sent = self.collectives.lines(False, False, far).seconds(nbytes / parts * once)
        return np.maximum(sent, self.collectives.lines(False, False, near).seconds(nbytes / nodes))

    def _lines(self, summed: bool, whole: bool, axes: tuple[str, ...]) -> AffineCosts:
        key = summed, whole, axes
        if key not in self.known:
            group = [(self.sizes.degrees[a], self.strides[a]) for a in axes]
            self.known[key] = self.collectives.lines(summed, whole, group)
        return self.known[key]


def whole_over_context(kind: str) -> str:
    """Return the row of those parameters of a kind whose gradients every device of a context makes whole."""
    return f"{kind} whole over context"


def layer_costs(
    reading: Reading,
    asked: KernelsAsked,
    collectives: CollectivePrices,
    sizes: LocalSizes,
    strides: Mapping[str, Floats],
) -> LayerCost:
    """Return what each part of a reading costs, at many sizes."""
    runs, n = len(reading.layers), len(sizes.microbatch)
    rows: dict[str, Floats] = {}

    def add(name: str, run: int, x: Floats | float) -> None:
        if name not in rows:
            rows[name] = np.zeros((runs + 2, n))
        rows[name][run if run >= 0 else runs - 1 - run] += x

    each = [seconds_of(k, sizes, asked) for k in reading.kernels]
    for k, seconds in zip(reading.kernels, each, strict=True):
        phase = PHASES[k.phase]
        if not k.joined:
            add(f"compute {phase}", k.run, seconds)
            add(f"launches {phase}", k.run, launches_of(k, sizes, asked))
        if k.kind in ("product", "scores"):
            add(f"on processors {phase}", k.run, seconds)
        if k.gradient:
            add("gradients", k.run, seconds)
        if k.kind == "scores" and k.phase == FORWARD:
            add("attention", k.run, seconds)
            add("scores", k.run, scores_of(k, sizes, asked))
        if k.kind == "loss" and k.phase == FORWARD:
            add("logits", k.run, logits_of(k, sizes))
            add("logit bytes", k.run, max((sizes.bytes(v) for v in k.values), key=lambda x: float(np.max(x))))
        if k.phase == FORWARD and k.run == -2 and k.kind == "product":
            add("again of a loss", k.run, seconds)
        if k.phase == FORWARD and not k.joined:
            add("again needed" if k.needed else "again rest", k.run, seconds)
            add("again launches", k.run, launches_of(k, sizes, asked))
    moved = MovePrices(collectives, sizes, strides, asked.copies)
    turned: dict[int, list[LocalMove]] = {}  # by run what goes round
    for m in reading.moves:
        if asked.rotates and m.attention and {*m.axes} <= {*CONTEXT_AXES}:
            if m.phase == FORWARD:
                turned.setdefault(m.run, []).append(m)
            continue
        seconds, phase = moved.seconds(m), PHASES[m.phase]
        add(f"moves {phase}", m.run, seconds)
        if m.beside:
            add("beside gradients", m.run, np.minimum(seconds, sum(each[k] for k in m.beside)))
        if m.early:
            add("early", m.run, seconds)
        add(f"launches {phase}", m.run, 1.0)
        if m.phase == FORWARD:
            add("again moves needed" if m.needed else "again moves rest", m.run, seconds)
            add("again launches", m.run, 1.0)
    for run, tiles in turned.items():
        for p, phase in enumerate(PHASES):
            of_run = zip(reading.kernels, each, strict=True)
            kernel = sum((x for k, x in of_run if k.kind == "scores" and (k.phase, k.run) == (p, run)), np.zeros(1))
            if kernel.any():
                waited = moved.waited_rounds(p, tiles[0].axes, [m.value for m in tiles], kernel)
                add(f"moves {phase}", run, waited)
                add("again moves needed", run, waited * (p == FORWARD))
    for h in reading.parameters:
        apart = h.shared and any(a.startswith("expert") for e in h.value.extents for a in e.axes)
        kind = "experts" if apart else "parameters"
        add(kind, h.run, sizes.volume(h.value.extents))
        if not {*h.sums} & {*CONTEXT_AXES}:
            add(whole_over_context(kind), h.run, sizes.volume(h.value.extents))
    for name, some in (("copies", reading.copies), ("tables", reading.tables)):
        for h in some:
            add(name, h.run, sizes.volume(h.value.extents))
    for s in (*reading.saved, *reading.outside):
        add("saved", s.run, sizes.bytes(s.value))
        if s.into == "product":
            add("saved for products", s.run, sizes.bytes(s.value))
        if s.kind == "scores":
            add("saved scores", s.run, sizes.bytes(s.value))
    for run, value in reading.second:
        add("second products", run, sizes.bytes(value))
    for life in reading.lives:
        for name, nbytes in life_bytes(life, sizes, n).items():
            add(name, life.run, nbytes)
    for s in reading.factored:
        add(f"sums over {s.over}", s.run, 1.0)
        add(f"summed over {s.over}", s.run, sizes.bytes(s.value))
    for name in ("copies", "logits", "logit bytes", "saved"):
        if name not in rows:
            add(name, -2, 0.0)
    carried = sizes.bytes(reading.carried) + np.zeros(n)
    return LayerCost(rows, carried, dict(sizes.degrees), reading.moments)
