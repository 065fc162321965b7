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
from shardplan.simulation.closed.memory import least_memory, memory, of_layers
from shardplan.simulation.closed.numbers import KernelPrice, LayerCost, LocalSizes, layer_costs
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.reading import read
from shardplan.simulation.closed.stages import Dealt, layer_rows, layers_of, recipe, weight_parts
from shardplan.simulation.closed.work import BACKWARD, FORWARD, Reading
from shardplan.simulation.sweep import StageSeconds, closed_step, compiled
from shardplan.strategy.model import Model
from shardplan.strategy.strategy import NARROW, SHARING, Strategy

Floats = np.ndarray
Ints = np.ndarray
# Schedules whose step is that of its busiest rank, and of what the others do before and behind it; others are asked.
FORMULA = tuple(CODES["schedule"].index(name) for name in ("1f1b", "gpipe", "interleaved", "looped-bfs"))
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
    """Seconds of a microbatch by chunk: arrays [n, chunks]; of messages between chunks [n]; and of once a step [n].

    `weight` is the part of `backward` that makes gradients of parameters.
    """

    forward: Floats
    backward: Floats
    weight: Floats
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

    def on(self, topology: Topology, parameters: Parameters) -> ClosedForm:
        """Return the closed form of the model on another topology, or with other parameters; what was read stays."""
        return ClosedForm(self.model, topology, parameters, self._readings, self._bases)

    def __call__(self, c: Configurations) -> PricedSteps:
        """Price them."""
        n = len(c)
        out = {name: np.zeros(n) for name in ("seconds", "peak", "floor", "least")}
        parts: dict[str, Floats] = {}
        for reading, where, cost in self._classes(c):
            one = c[where]
            found = self._steps(reading, one, cost)
            for name, values in found.items():
                (out[name] if name in out else parts.setdefault(name, np.zeros(n)))[where] = values
        return PricedSteps(out["seconds"], out["peak"], out["floor"], out["least"], parts)

    def seconds(self, c: Configurations) -> Floats:
        """Return the seconds alone, [n]."""
        out = np.zeros(len(c))
        for reading, where, cost in self._classes(c):
            for at, one, mine, counts in _groups(reading, c[where], cost):
                stages = self._stages(reading, one, mine, counts)
                out[where[at]] = _formula(one, stages)[0] + stages.after
        return out

    def stages(self, c: Configurations) -> StageTimes:
        """Return what chunks take, without messages; all of `c` have one number of ranks and of chunks a rank."""
        chunks = int(c.columns["pipeline"][0] * c.columns["interleave"][0])
        grid, column = (len(c), chunks), len(c)
        made = StageTimes(*(np.zeros(shape) for shape in (grid, grid, grid, column, column)))
        for reading, where, cost in self._classes(c):
            one = c[where]
            found = self._stages(reading, one, cost, layers_of(reading.layers, chunks), waiting=False)
            for whole, part in zip(made, found, strict=True):
                whole[where] = part
        return made

    def layers(self, c: Configurations) -> tuple[Floats, Floats]:
        """Return the bytes of state, and of what waits for its backward pass, of the layers alone, [n] each."""
        out = np.zeros((2, len(c)))
        for reading, where, cost in self._classes(c):
            for at, one, mine, counts in _groups(reading, c[where], cost):
                out[:, where[at]] = of_layers(one, mine, counts)
        return out[0], out[1]

    def floors(self, c: Configurations) -> tuple[Floats, Floats]:
        """Return seconds and bytes, [n] each, that none is below, however it recomputes and deals out state.

        Seconds are of layers computed once, parameters at hand, nothing accumulated and nothing once a step; bytes of
        state dealt out to all replicas, of layers the inputs that wait, and a layer at work.
        """
        plain = {"recompute": np.zeros(len(c), dtype=np.int64), "zero": np.full(len(c), 2)}
        bare = Configurations({**c.columns, **plain, "fsdp": np.zeros(len(c), dtype=bool)})
        out = np.zeros((2, len(c)))
        for reading, where, cost in self._classes(bare):
            for at, one, mine, counts in _groups(reading, bare[where], cost):
                stages = self._stages(reading, one, mine, counts, bare=True)
                out[0, where[at]] = _formula(one, stages)[0]
                out[1, where[at]] = least_memory(one, mine, counts, self.parameters)
        return out[0], out[1]

    def _steps(self, reading: Reading, c: Configurations, cost: LayerCost) -> dict[str, Floats]:
        """Every group of one number of chunks."""
        found: dict[str, Floats] = {}
        for at, one, mine, counts in _groups(reading, c, cost):
            stages = self._stages(reading, one, mine, counts)
            step, busiest, whole = _formula(one, stages)
            m = one.microbatches
            values = {
                "seconds": step + stages.after,
                "floor": m * busiest,
                "peak": memory(one, mine, counts, self.parameters),
                "least": least_memory(one, mine, counts, self.parameters),
                "bubble": step - m * whole / one.columns["pipeline"],
                "once": stages.after,
            }
            for name, x in values.items():
                found.setdefault(name, np.zeros(len(c)))[at] = x
        return found

    def _stages(
        self,
        reading: Reading,
        c: Configurations,
        cost: LayerCost,
        counts: Floats,
        waiting: bool = True,
        bare: bool = False,
    ) -> StageTimes:
        """What the chunks of configurations with one number of them take."""
        p, col = self.parameters, c.columns
        rates = LevelRates.of(self.topology, p)
        dealt = Dealt.of(c, cost, rates, p)
        nothing: Floats = np.zeros((1, len(c)))
        stream = self.topology.device.memory_bandwidth * p.stream
        made: list[Floats] = []
        for phase in (FORWARD, BACKWARD):
            rows = layer_rows(c, cost, p, phase, nothing if bare else dealt.gathered(phase), stream)
            made.append(np.einsum("rc,rn->nc", counts, rows))
            if phase == BACKWARD:
                made.append(np.einsum("rc,rn->nc", counts, rows * weight_parts(c, cost)))
        send = np.zeros(len(c))
        if col["pipeline"][0] > 1:
            # Each of a tensor group sends its part, and what is not sharded is gathered behind (arXiv 2104.04473, 4.1).
            parts = np.where(col["sequence_parallel"], 1, col["tensor"])
            stage = c.devices // col["pipeline"]
            send = rates.message(stage, cost.carried / parts, p)
            send = send + rates.seconds(False, True, parts, np.ones(len(c)), cost.carried, p)
            # Interleaved ones have other chunks meanwhile.
            waits = waiting * np.where(col["interleave"] == 1, send, 0.0)[:, None]
            made[0][:, 1:] += waits
            made[1][:, :-1] += waits
        return StageTimes(
            made[0], made[1], made[2], send, dealt.once(counts, self.topology.device, made[1].max(axis=1))
        )

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


def _groups(
    reading: Reading, c: Configurations, cost: LayerCost
) -> Iterator[tuple[Ints, Configurations, LayerCost, Floats]]:
    """Configurations of one number of ranks and chunks: their places, columns and cost, and who has which layers."""
    col = c.columns
    key = col["pipeline"] * (int(col["interleave"].max()) + 1) + col["interleave"]
    for value in np.unique(key):
        at = np.flatnonzero(key == value)
        chunks = int(col["pipeline"][at[0]] * col["interleave"][at[0]])
        yield at, c[at], cost.at(at), layers_of(reading.layers, chunks)


def _formula(c: Configurations, stages: StageTimes) -> tuple[Floats, Floats, Floats]:
    """The seconds of steps without what comes once; a microbatch's on the busiest rank; and on all, [n] each."""
    pipeline, interleave = int(c.columns["pipeline"][0]), int(c.columns["interleave"][0])
    total = (stages.forward + stages.backward).reshape(len(c), interleave, pipeline).sum(axis=1)
    busiest, whole = total.max(axis=1), total.sum(axis=1)
    step = c.microbatches * busiest + (whole - busiest) / interleave
    other = ~np.isin(c.columns["schedule"], FORMULA)
    if other.any():
        step[other] = _scheduled(c[other], stages, other)
    return step, busiest, whole


def _scheduled(c: Configurations, stages: StageTimes, where: Floats) -> Floats:
    """The seconds of steps under schedules that have formulas of their own, [n]."""
    names, many = c.columns["schedule"], c.microbatches
    found = np.zeros(len(c))
    pipeline, interleave = int(c.columns["pipeline"][0]), int(c.columns["interleave"][0])
    rows = [x[where] for x in (stages.forward, stages.backward, stages.weight)]
    nothing = np.zeros((len(c), rows[0].shape[1] - 1))
    for name, m in {*zip(names.tolist(), many.tolist(), strict=True)}:
        at = np.flatnonzero((names == name) & (many == m))
        forward, backward, weight = (x[at] for x in rows)
        seconds = StageSeconds(forward, backward - weight, weight, nothing[at])
        order = compiled(CODES["schedule"][name], pipeline, m, interleave)
        found[at] = closed_step(order, seconds, near=False)
    return found
