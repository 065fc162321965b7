"""A `StepProfile` with sizes: what a layer, and what is before and behind all, takes on a device, at many degrees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardplan.core.pattern import Work
from shardplan.hardware.level import DeviceSpec
from shardplan.hardware.prices.kernels import kernel_seconds
from shardplan.simulation.closed.collectives import CollectivePrices
from shardplan.simulation.closed.dispatch import Routing
from shardplan.simulation.closed.kernel_classes import cast_work, narrow_bytes
from shardplan.simulation.closed.lifetimes import life_bytes
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.move_prices import MovePrices
from shardplan.simulation.closed.work import FORWARD, LocalKernel, LocalMove, StepProfile
from shardplan.strategy.held_cuts import SHARING

Floats = np.ndarray
PHASES = ("forward", "backward")
EXPERT_AXES = frozenset(SHARING.values())  # those over which experts are dealt out
CONTEXT_AXES = ("context", SHARING["context"])  # axes around which a ring sends keys and values
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


class KernelsAsked(NamedTuple):
    """What kernels of a device run at: its rates and what is reached of them, and what the strategy says of kernels."""

    device: DeviceSpec
    product_dtype: str  # of products with the layers' parameters
    attention: str  # its class
    whole_loss: bool = True  # else it reads its logits once, and once more to write their gradient
    ring: bool = False  # whether keys go round, past queries that lie in the order of the sequence
    routing: Routing = Routing()
    rotates: bool = False  # whether keys and values go round beside attention, in whatever order
    loops: bool = False  # whether the host issues a product for each expert


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
    """Return how many kernels the host issues: one, but for attention in steps, and casts before narrow products.

    And for products of experts in a loop, of which each is issued. Alone those of 20 to 256 experts take 9 us each at
    least on a B200 (half of 52 kernels of SimuMax's tables; the other half is then 12.6 % off, and else 18.1).
    """
    several = sizes.volume([k.extents[f] for f in k.roles[0]]) if asked.loops and k.weighs and k.roles else 1.0
    if k.casts and k.run >= 0 and narrow_bytes(asked.product_dtype):
        return several + len(k.casts)
    if k.kind != "scores" or not unfused(asked):
        return several
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
    moments: float = 1.0  # as in `StepProfile`
    slots: Floats = field(default_factory=lambda: np.ones((2, 1)))  # as in `LocalSizes`, [2, n] or [2, 1]

    def on_processors(self, phase: int) -> Floats:
        """Return what part of a phase's kernels, but for casts, products and attention take, [runs + 2, n]."""
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
            np.broadcast_to(self.slots, (2, len(self.carried)))[:, back],
        )


def whole_over_context(kind: str) -> str:
    """Return the row of those parameters of a kind whose gradients every device of a context makes whole."""
    return f"{kind} whole over context"


def exchanges_tokens(move: LocalMove) -> bool:
    """Say whether a movement takes tokens to slots of their experts, or back."""
    slots = any(e.sharing is not None for e in move.value.extents)
    return slots and not move.summed and not move.whole and not EXPERT_AXES.isdisjoint(move.axes)


def layer_costs(
    reading: StepProfile,
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
        # Sums for biases, and what a norm finds beside its cotangent, come with that: products come later, and tables.
        if k.gradient and (k.kind == "product" or k.run == -1):
            add("gradients", k.run, seconds)
        if k.joins:
            add("joined gradients", k.run, seconds)
        if k.kind == "scores" and k.phase == FORWARD:
            add("attention", k.run, seconds)
            add("scores", k.run, scores_of(k, sizes, asked))
        if k.kind == "loss" and k.phase == FORWARD:
            add("logits", k.run, logits_of(k, sizes))
            add("logit bytes", k.run, max((sizes.bytes(v) for v in k.values), key=lambda x: float(np.max(x))))
        if k.kind == "loss" and k.phase != FORWARD:
            add("gradients of a loss", k.run, seconds)
        if k.phase == FORWARD and k.run == -2 and k.kind == "product":
            add("again of a loss", k.run, seconds)
        if k.phase == FORWARD and not k.joined:
            add("again needed" if k.needed else "again rest", k.run, seconds)
            add("again launches", k.run, launches_of(k, sizes, asked))
    moved = MovePrices(collectives, sizes, strides, asked.routing)
    turned: dict[int, list[LocalMove]] = {}  # by run what goes round
    for m in reading.moves:
        if asked.rotates and m.attention and {*m.axes} <= {*CONTEXT_AXES}:
            if m.phase == FORWARD:
                turned.setdefault(m.run, []).append(m)
            continue
        seconds, phase = moved.seconds(m), PHASES[m.phase]
        add(f"moves {phase}", m.run, seconds)
        if exchanges_tokens(m):
            add(f"exchanges {phase}", m.run, seconds)
            if m.phase == FORWARD:
                add(f"again exchanges {'needed' if m.needed else 'rest'}", m.run, seconds)
        if m.beside:
            add("beside gradients", m.run, np.minimum(seconds, sum(each[k] for k in m.beside)))
        if m.early:
            add("early", m.run, seconds)
        elif m.gradient:
            add("moves of gradients", m.run, seconds)
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
        add("held", h.run, 1.0)
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
    return LayerCost(rows, carried, dict(sizes.degrees), reading.moments, sizes.slots)
