"""`ClosedForm`: the seconds and bytes of a step for many strategies at once, without partitioning any.

A model is read once for every kind of strategy (`reading`); what a layer takes is worked out once for all strategies
that are alike in it; a stage is a sum of layers, and a schedule a formula of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.links import LevelRates
from shardplan.simulation.closed.memory import memory
from shardplan.simulation.closed.numbers import KernelPrice, LayerCost, LocalSizes, layer_costs
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.reading import read
from shardplan.simulation.closed.stages import Dealt, layer_rows, layers_of, recipe
from shardplan.simulation.closed.work import BACKWARD, FORWARD, Reading
from shardplan.strategy.model import Model
from shardplan.strategy.strategy import NARROW, SHARING, Strategy

Floats = np.ndarray
Ints = np.ndarray
INNER = (
    "group",
    "tensor",
    "context",
    "data",
)  # axes, innermost on the hardware first; experts have the inner part of each
SPREAD = ("data", "expert")  # axes over which sequences are dealt out


class PricedSteps(NamedTuple):
    """Of every configuration: seconds of a step and by cause, bytes of the worst device, bounds of both from below."""

    seconds: Floats
    peak_bytes: Floats
    floor_seconds: Floats
    floor_bytes: Floats
    parts: Mapping[str, Floats]


class StageTimes(NamedTuple):
    """Seconds of a microbatch by chunk: arrays [n, chunks]; of messages between chunks [n]; and of once a step [n]."""

    forward: Floats
    backward: Floats
    send: Floats
    after: Floats


@dataclass(slots=True, eq=False)
class ClosedForm:
    """The closed form of a model on a topology.

    >>> from shardplan.simulation.closed.configurations import Configurations
    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> form = ClosedForm(model, Topology.load("dgx-a100-80g", nodes=1))
    >>> out = form(Configurations.of([Strategy(data=8, global_batch=64), Strategy(data=4, tensor=2, global_batch=64)]))
    >>> out.seconds.shape, bool((out.floor_seconds <= out.seconds).all())
    ((2,), True)
    """

    model: Model
    topology: Topology
    parameters: Parameters = field(default_factory=Parameters)
    _readings: dict[tuple[object, ...], Reading] = field(default_factory=dict["tuple[object, ...]", Reading])
    _bases: dict[str | None, Model] = field(default_factory=dict["str | None", Model])

    def __call__(self, c: Configurations) -> PricedSteps:
        """Price them."""
        n = len(c)
        out = {name: np.zeros(n) for name in ("seconds", "peak", "floor")}
        parts: dict[str, Floats] = {}
        for reading, where, cost in self._classes(c):
            one = c[where]
            found = self._steps(reading, one, cost)
            for name, values in found.items():
                (out[name] if name in out else parts.setdefault(name, np.zeros(n)))[where] = values
        return PricedSteps(out["seconds"], out["peak"], out["floor"], out["peak"], parts)

    def stages(self, c: Configurations) -> StageTimes:
        """Return what chunks take; all of `c` have one schedule, pipeline, interleave and number of microbatches."""
        chunks = int(c.columns["pipeline"][0] * c.columns["interleave"][0])
        grid, column = (len(c), chunks), len(c)
        made = StageTimes(np.zeros(grid), np.zeros(grid), np.zeros(column), np.zeros(column))
        for reading, where, cost in self._classes(c):
            one = c[where]
            found = self._stages(reading, one, cost, layers_of(reading.layers, chunks))
            for whole, part in zip(made, found, strict=True):
                whole[where] = part
        return made

    def _steps(self, reading: Reading, c: Configurations, cost: LayerCost) -> dict[str, Floats]:
        """Every group of one number of chunks."""
        col = c.columns
        found: dict[str, Floats] = {}
        key = col["pipeline"] * (int(col["interleave"].max()) + 1) + col["interleave"]
        for value in np.unique(key):
            at = np.flatnonzero(key == value)
            one, mine = c[at], cost.at(at)
            pipeline, interleave = int(one.columns["pipeline"][0]), int(one.columns["interleave"][0])
            counts = layers_of(reading.layers, pipeline * interleave)
            stages = self._stages(reading, one, mine, counts)
            m = one.microbatches
            total = (stages.forward + stages.backward).reshape(len(one), interleave, pipeline).sum(axis=1)
            busiest, whole = total.max(axis=1), total.sum(axis=1)
            step = m * busiest + (whole - busiest) / interleave
            values = {
                "seconds": step + stages.after,
                "floor": m * busiest,
                "peak": memory(one, mine, counts, self.parameters),
                "bubble": step - m * whole / pipeline,
                "once": stages.after,
            }
            for name, x in values.items():
                found.setdefault(name, np.zeros(len(c)))[at] = x
        return found

    def _stages(self, reading: Reading, c: Configurations, cost: LayerCost, counts: Floats) -> StageTimes:
        """What the chunks of configurations with one number of them take."""
        p, col = self.parameters, c.columns
        rates = LevelRates.of(self.topology, p)
        dealt = Dealt.of(c, cost, rates, p)
        stream = self.topology.device.memory_bandwidth * p.stream
        made: list[Floats] = []
        for phase in (FORWARD, BACKWARD):
            rows = layer_rows(c, cost, p, phase, dealt.gathered(phase), stream)
            made.append(np.einsum("rc,rn->nc", counts, rows))
        send = np.zeros(len(c))
        if col["pipeline"][0] > 1:
            # Each of a tensor group sends its part, and what is not sharded is gathered behind (arXiv 2104.04473, 4.1).
            parts = np.where(col["sequence_parallel"], 1, col["tensor"])
            stage = c.devices // col["pipeline"]
            send = rates.message(stage, cost.carried / parts, p)
            send = send + rates.seconds(False, True, parts, np.ones(len(c)), cost.carried, p)
            waits = np.where(col["interleave"] == 1, send, 0.0)[:, None]  # interleaved ones have other chunks meanwhile
            made[0][:, 1:] += waits
            made[1][:, :-1] += waits
        return StageTimes(made[0], made[1], send, dealt.once(counts, self.topology.device, made[1].max(axis=1)))

    def _classes(self, c: Configurations) -> Iterator[tuple[Reading, Ints, LayerCost]]:
        """Yield configurations that a reading serves, with what their layers cost."""
        col = c.columns
        code = np.zeros(len(c), dtype=np.int64)
        degrees = self.degrees(c)
        kinds = [
            *(d > 1 for d in degrees.values()),
            col["sequence_parallel"] & (col["tensor"] > 1),
            np.where(col["context"] > 1, col["context_kind"] + 1, 0),
            col["attention"],
            col["precision"],
        ]
        for values in kinds:
            code = code * 8 + values
        for key in np.unique(code):
            where = np.flatnonzero(code == key)
            one = c[where]
            mine = {a: d[where] for a, d in degrees.items() if d[where[0]] > 1}
            reading = self._reading(one.strategy(0), tuple(mine))
            yield reading, where, self._cost(reading, one, mine)

    def degrees(self, c: Configurations) -> dict[str, Ints]:
        """Return the sizes of the axes of a stage, as `Strategy.axes` has them: arrays [n] by axis."""
        col = c.columns
        heads = {n for p in self.model.parameters.values() for dim, n in p.dims if dim == "kv_heads"}
        tensor, group = col["tensor"].copy(), np.ones(len(c), dtype=np.int64)
        for n in heads:
            few = n < col["tensor"]
            tensor = np.where(few, np.gcd(tensor, n), tensor)
        group = col["tensor"] // tensor
        experts = any("experts" in dims for dims in self.model.dims.values())
        left = col["expert"].copy() if experts else group * 0 + 1
        found: dict[str, Ints] = {}
        for axis, n in (("data", col["data"]), ("context", col["context"]), ("tensor", tensor), ("group", group)):
            part = np.gcd(left, n)
            left = left // part
            found |= {axis: n // part, SHARING[axis]: part}
        return found

    def _reading(self, s: Strategy, axes: tuple[str, ...]) -> Reading:
        key = axes, s.sequence_parallel, s.context_kind if s.context > 1 else "", s.precision
        if key not in self._readings:
            base = self._base(s.precision)
            plain = Strategy(
                data=s.data,
                tensor=s.tensor,
                context=s.context,
                expert=s.expert,
                sequence_parallel=s.sequence_parallel,
                context_kind=s.context_kind,
            )
            self._readings[key] = read(base, plain.layouts(base), axes)
        return self._readings[key]

    def _base(self, precision: str | None) -> Model:
        """The model in a precision, with two sequences: a dim of size 1 has no factor."""
        if precision not in self._bases:
            kind = "bf16" if precision in NARROW else precision
            model = self.model
            if kind is not None and model.fields.get("precision") != kind:
                model = model.mixed(kind)
            types = model.program.types
            sizes = (zip(dims, types[v].shape, strict=True) for v, dims in model.dims.items() if v in types)
            small = any(dim == "batch" and n == 1 for pairs in sizes for dim, n in pairs)
            self._bases[precision] = model.resize(batch=2) if small else model
        return self._bases[precision]

    def _cost(self, reading: Reading, c: Configurations, degrees: Mapping[str, Ints]) -> LayerCost:
        """What layers cost: worked out for those that differ in it."""
        columns = {**degrees, "microbatch": c.columns["microbatch"]}
        code = np.zeros(len(c), dtype=np.int64)
        for values in columns.values():
            code = code * (int(values.max()) + 1) + values
        _, places, back = np.unique(code, return_index=True, return_inverse=True)
        few = {a: d[places].astype(float) for a, d in degrees.items()}
        strides: dict[str, Floats] = {}
        inside: Floats = np.ones(len(places))
        for axis in INNER:
            for a in (SHARING[axis], axis):
                strides[a] = inside
                inside = inside * few.get(a, 1.0)
        sizes = LocalSizes(few, c.columns["microbatch"][places].astype(float), reading.batch, SPREAD)
        attention = CODES["attention"][int(c.columns["attention"][0])] or "flash2"
        precision = CODES["precision"][int(c.columns["precision"][0])]
        dtype = recipe(precision)[3] or str(self._base(precision).fields["dtype"])
        price = KernelPrice(self.topology.device, self.parameters, dtype, attention)
        rates = LevelRates.of(self.topology, self.parameters)
        return layer_costs(reading, price, rates, sizes, strides).at(back)
