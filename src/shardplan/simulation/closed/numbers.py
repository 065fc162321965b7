"""A `Reading` with sizes: what a layer, and what is before and behind all, takes on a device, at many degrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.hardware.level import DeviceSpec
from shardplan.simulation.closed.links import LevelRates
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.work import FORWARD, Extent, LocalKernel, LocalValue, Reading

Floats = np.ndarray
PHASES = ("forward", "backward")
# Bytes that unfused attention streams for a score of 16 bits, beside what its two products read and write: scaled,
# masked and normed in one kernel, dropped out in another (arXiv 2205.05198, section 4.1).
SCORE_BYTES = (9.0, 13.0)  # in the forward pass, and back
# Kernels of unfused attention: its products, softmax and dropout; back, two products for each.
IN_STEPS = (4.0, 6.0)
# Bytes that a loss in steps reads and writes for a logit: widened to f32, its largest subtracted, exponentials summed
# and divided (Megatron's vocabulary-parallel loss), or one softmax in f32 (PyTorch's); in the forward pass, and back.
LOSS_BYTES = {"unfused": (38.0, 14.0), "": (14.0, 14.0)}
# How much faster later kernels of attention are than the first: arXiv 2307.08691 (about twice, less backward), and
# fused attention of cuDNN 9 beside FlashAttention 2 on H100 (arXiv 2407.08608, figure 5).
FASTER = {"flash1": 1.0, "flash2": 1.6, "cudnn": 2.2}
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
        out: Floats = np.asarray(1.0)
        for e in extents:
            out = out * self.extent(e)
        return out

    def bytes(self, value: LocalValue) -> Floats:
        """Return the bytes of a value on a device."""
        return value.itemsize * self.volume(value.extents)


@dataclass(frozen=True, slots=True, eq=False)
class KernelPrice:
    """Prices kernels on a device, as arrays.

    `bounded` says that none is sooner done than its values are read and written: so are products of few rows, which a
    forward step has and a training step does not.
    """

    device: DeviceSpec
    parameters: Parameters
    product_dtype: str
    attention: str
    bounded: bool = False

    def seconds(self, k: LocalKernel, sizes: LocalSizes) -> Floats:
        """Return the seconds of a kernel on a device."""
        found = self._alone(k, sizes)
        if not self.bounded or k.kind == "streamed":
            return found
        return np.maximum(found, self.streamed(sum((sizes.bytes(v) for v in k.values), np.asarray(0.0)) * k.touched))

    def _alone(self, k: LocalKernel, sizes: LocalSizes) -> Floats:
        p = self.parameters
        whole = float(np.prod([float(e.size) for e in k.extents]))
        flops = k.flops * (sizes.volume(k.extents) / whole)
        if k.kind == "product":
            dtype = self.product_dtype if k.weighs and k.run >= 0 else k.dtype
            m, n, c = (sizes.volume([k.extents[f] for f in side]) for side in k.roles[1:]) if k.roles else (1e9,) * 3
            return flops / (self.device.peak(dtype) * p.product) * (1 + p.half * (1 / m + 1 / n + 1 / c))
        if k.kind == "scores":
            return self._attention(k, sizes, flops)
        if k.kind == "loss":
            return self.streamed(logits_of(k, sizes) * LOSS_BYTES.get(self.attention, LOSS_BYTES[""])[k.phase])
        return self.streamed(sum((sizes.bytes(v) for v in k.values), np.asarray(0.0)) * k.touched)

    def scores(self, k: LocalKernel, sizes: LocalSizes) -> Floats:
        """Return how many scores attention has on a device, where they are written to memory; else 0."""
        b, s, g, r, _, t, _ = (sizes.extent(x) for x in k.extents)
        return b * g * r * s * t * (self.attention == "unfused")

    def streamed(self, nbytes: Floats) -> Floats:
        """Return the seconds of reading and writing."""
        return nbytes / (self.device.memory_bandwidth * self.parameters.stream)

    def _attention(self, k: LocalKernel, sizes: LocalSizes, flops: Floats) -> Floats:
        """Attention: fused, at a part of the peak; else two products, and scores read and written."""
        p, (b, s, g, r, d, t, e) = self.parameters, (sizes.extent(x) for x in k.extents)
        peak = self.device.peak(k.dtype)
        if self.attention != "unfused":
            return flops / (peak * p.attention * FASTER[self.attention])
        back = k.phase == 1
        scores = b * g * r * s * t
        flops = scores * (d + e) * 2 * (2 if back else 1)
        if k.extents[4].size * ITEMSIZE % ALIGNED:
            peak = min(peak, self.device.peak("f32"))
        products = flops / (peak * p.product) * (1 + p.half * (1 / s + 1 / t + 1 / d))
        return products + self.streamed(scores * (SCORE_BYTES[back] + APART[back][1] * ((b * g * r) % BLOCK > 0)))

    def launches(self, k: LocalKernel, sizes: LocalSizes) -> Floats | float:
        """Return how many kernels the host issues: one, but for attention in steps."""
        if k.kind != "scores" or self.attention != "unfused":
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

    def at(self, back: np.ndarray) -> LayerCost:
        """Return it for configurations of which `back` says whose cost each has."""
        return LayerCost(
            {name: x[:, back] for name, x in self.rows.items()},
            self.carried[back],
            {axis: d[back] for axis, d in self.degrees.items()},
        )


def layer_costs(
    reading: Reading, price: KernelPrice, rates: LevelRates, sizes: LocalSizes, strides: Mapping[str, Floats]
) -> LayerCost:
    """Return what each part of a reading costs, at many sizes."""
    runs, n = len(reading.layers), len(sizes.microbatch)
    rows: dict[str, Floats] = {}

    def add(name: str, run: int, x: Floats | float) -> None:
        if name not in rows:
            rows[name] = np.zeros((runs + 2, n))
        rows[name][run if run >= 0 else runs - 1 - run] += x

    for k in reading.kernels:
        seconds, phase = price.seconds(k, sizes), PHASES[k.phase]
        if not k.joined:
            add(f"compute {phase}", k.run, seconds)
            add(f"launches {phase}", k.run, price.launches(k, sizes))
        if k.gradient:
            add("gradients", k.run, seconds)
        if k.kind == "scores" and k.phase == FORWARD:
            add("attention", k.run, seconds)
            add("scores", k.run, price.scores(k, sizes))
        if k.kind == "loss" and k.phase == FORWARD:
            add("logits", k.run, logits_of(k, sizes))
        if k.phase == FORWARD and not k.joined:
            add("again needed" if k.needed else "again rest", k.run, seconds)
            add("again launches", k.run, price.launches(k, sizes))
    for m in reading.moves:
        group = [(sizes.degrees[a], strides[a]) for a in m.axes]
        seconds = rates.seconds(m.summed, m.whole, group, sizes.bytes(m.value), price.parameters)
        phase = PHASES[m.phase]
        add(f"moves {phase}", m.run, seconds)
        add(f"launches {phase}", m.run, 1.0)
        if m.phase == FORWARD:
            add("again moves needed" if m.needed else "again moves rest", m.run, seconds)
            add("again launches", m.run, 1.0)
    for h in reading.parameters:
        kind = "experts" if any(a.startswith("expert") for e in h.value.extents for a in e.axes) else "parameters"
        add(kind, h.run, sizes.volume(h.value.extents))
    for s in reading.saved:
        add("saved", s.run, sizes.bytes(s.value))
        if s.into == "product":
            add("saved for products", s.run, sizes.bytes(s.value))
        if s.kind == "product":
            add("saved products", s.run, sizes.bytes(s.value))
    if "logits" not in rows:
        add("logits", -2, 0.0)
    if "saved" not in rows:
        add("saved", -2, 0.0)
    carried = sizes.bytes(reading.carried) + np.zeros(n)
    return LayerCost(rows, carried, dict(sizes.degrees))
