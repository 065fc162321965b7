"""`ClosedForm`: the seconds and bytes of a step for many strategies at once, without partitioning any.

A model is read once for every kind of strategy (`reading`); what a layer takes is worked out once for all strategies
that are alike in it; a stage is a sum of layers, and a schedule a formula of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardplan.core.dim_names import DimNames, dim_names
from shardplan.errors import ShardplanError
from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.axis_degrees import deal_degrees
from shardplan.simulation.closed.chunk_kinds import ChunkKinds
from shardplan.simulation.closed.collectives import CollectivePrices
from shardplan.simulation.closed.configurations import CODES, Configurations, distinct
from shardplan.simulation.closed.dispatch import Routing, tokens_of_slots
from shardplan.simulation.closed.element_bytes import recipe
from shardplan.simulation.closed.kernel_classes import with_kernels
from shardplan.simulation.closed.local_sizes import LocalSizes
from shardplan.simulation.closed.memory import holdings, least_memory, memory, of_layers
from shardplan.simulation.closed.numbers import KernelsAsked, LayerCost, layer_costs
from shardplan.simulation.closed.pair_overlap import hidden_exchanges
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.part_seconds import (
    apart_share,
    at_once,
    is_halved,
    paired_rows,
    pass_rows,
    weight_rows,
)
from shardplan.simulation.closed.pass_overlap import PassOrder, PassWork, settled_seconds, waiting_seconds
from shardplan.simulation.closed.reading import read
from shardplan.simulation.closed.scheduled_steps import StageTimes, joint_shares, scheduled_steps
from shardplan.simulation.closed.stages import ShardedState, sent
from shardplan.simulation.closed.work import BACKWARD, FORWARD, LocalMove, StepProfile
from shardplan.strategy.held_cuts import SHARING
from shardplan.strategy.model import Model
from shardplan.strategy.strategy import NARROW, Strategy

Floats = np.ndarray
Ints = np.ndarray
# Schedules whose step is that of its busiest rank, and of what the others do before and behind it, where there are
# microbatches for all; others are asked.
FORMULA = tuple(
    CODES["schedule"].index(name) for name in ("1f1b", "gpipe", "interleaved", "combined-1f1b", "looped-bfs")
)
# Axes of each block, innermost first; experts have the inner part of each.
INNER = {"tensor": ("group", "tensor"), "context": ("context",), "data": ("data",)}
MOST_COSTS = 1024  # of single strategies: what their layers cost is remembered, for others that differ elsewhere
SPREAD = ("data", "expert")  # axes over which sequences are dealt out
OF_KERNELS = ("attention", "precision", "context_kind", "loss", "dispatch", "expert_products")


class PricedSteps(NamedTuple):
    """Of every configuration: seconds of a step and by cause, bytes of the worst device, bounds of both from below."""

    seconds: Floats
    peak_bytes: Floats
    floor_seconds: Floats
    floor_bytes: Floats
    parts: Mapping[str, Floats]


@dataclass(slots=True, eq=False)
class ClosedForm:
    """The closed form of a model on a topology.

    `captured` is of collectives (see `CollectivePrices`), as forward steps have them.

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
    _readings: dict[tuple[object, ...], StepProfile] = field(default_factory=dict["tuple[object, ...]", StepProfile])
    _bases: dict[str | None, Model] = field(default_factory=dict["str | None", Model])
    _names: dict[str | None, DimNames] = field(default_factory=dict["str | None", DimNames])
    captured: bool = False
    _costs: dict[tuple[object, ...], LayerCost] = field(default_factory=dict["tuple[object, ...]", LayerCost])

    def on(self, topology: Topology, parameters: Parameters) -> ClosedForm:
        """Return the closed form of the model on another topology, or with other parameters; what was read stays."""
        known = self._readings, self._bases, self._names
        return ClosedForm(self.model, topology, parameters, *known, self.captured)

    def __call__(self, c: Configurations) -> PricedSteps:
        """Price them."""
        n = len(c)
        out = {name: np.zeros(n) for name in ("seconds", "peak", "floor", "least")}
        parts: dict[str, Floats] = {}
        for where, one, cost, kinds in self._parts(c):
            found = self._steps(one, cost, kinds)
            for name, values in found.items():
                (out[name] if name in out else parts.setdefault(name, np.zeros(n)))[where] = values
        return PricedSteps(out["seconds"], out["peak"], out["floor"], out["least"], parts)

    def seconds(self, c: Configurations) -> Floats:
        """Return the seconds alone, [n]."""
        out = np.zeros(len(c))
        for where, one, cost, kinds in self._parts(c):
            stages = self._stages(one, cost, kinds)
            out[where] = _formula(one, kinds, stages)[0] + stages.after
        return out

    def stages(self, c: Configurations) -> StageTimes:
        """Return what chunks take, [n, chunks], without messages; all of `c` have one number of ranks and chunks."""
        chunks = int(c.columns["pipeline"][0] * c.columns["interleave"][0])
        grid, column = (len(c), chunks), len(c)
        made = StageTimes(*(np.zeros(shape) for shape in (*[grid] * 7, *[column] * 4)))
        for where, one, cost, kinds in self._parts(c):
            found = self._stages(one, cost, kinds)
            of_chunk = kinds.pipelines[0].of_chunk
            for whole, part in zip(made, found, strict=True):
                whole[where] = part if part.ndim == 1 else part[of_chunk].T
        return made

    def layers(self, c: Configurations) -> tuple[Floats, Floats]:
        """Return the bytes of state, and of what waits for its backward pass, of the layers alone, [n] each."""
        out = np.zeros((2, len(c)))
        for where, one, cost, kinds in self._parts(c):
            out[:, where] = of_layers(one, cost, kinds)
        return out[0], out[1]

    def peak_bytes(self, c: Configurations) -> Floats:
        """Return the bytes of the worst device alone, [n]."""
        out = np.zeros(len(c))
        for where, one, cost, kinds in self._parts(c):
            out[where] = memory(one, cost, kinds, self.parameters)
        return out

    def holdings(self, c: Configurations) -> dict[str, Floats]:
        """Return the bytes on each pipeline rank of the first of `c`, by what they are, [ranks]; see `memory`."""
        reading, _, one, cost = next(iter(self.classes(c[:1])))
        kinds = ChunkKinds.of(reading.layers, one, every=True)
        return {what: x[:, 0] for what, x in holdings(one, cost, kinds, self.parameters).items()}

    def alike(self, c: Configurations) -> list[Ints]:
        """Return numbers, [n] each: strategies that differ in the order of axes, and not in these, are priced alike.

        How far apart devices of a group are matters up to the largest child of a level: beyond, each is in another.
        """
        most = max(self.topology.strides)
        return [np.minimum(x, most).astype(np.int64) for x in c.strides().values()]

    def floors(self, c: Configurations, events: bool = False) -> tuple[Floats, Floats]:
        """Return seconds and bytes, [n] each, that none is below, however it recomputes and deals out state.

        Seconds are of layers computed once, parameters at hand, nothing accumulated and nothing once a step; with
        `events` of the busiest rank alone, which no order of passes is below. Bytes are of state dealt out to all
        replicas, of layers the inputs that wait, and a layer at work.
        """
        bare = Configurations({**c.without_recompute().columns, "zero": np.full(len(c), 2),
                               "fsdp": np.zeros(len(c), dtype=bool)})  # fmt: skip
        out = np.zeros((2, len(c)))
        for where, one, cost, kinds in self._parts(bare):
            step, busiest, _ = _formula(one, kinds, self._stages(one, cost, kinds, bare=True), not events)
            out[0, where] = one.microbatches * busiest if events else step
            out[1, where] = least_memory(one, cost, kinds, self.parameters)
        return out[0], out[1]

    def work_seconds(
        self, c: Configurations, keeps: Callable[[LocalMove], bool], waiting: bool = True, bare: bool = False
    ) -> Floats:
        """Return the seconds that the mean rank is at work in the microbatches of a step, [n].

        With the movements of layers that `keeps` says alone, with messages between stages where `waiting`, and where it
        is not `bare` with the parameters and gradients that layers gather and reduce.
        """
        out = np.zeros(len(c))
        for reading, where, one, cost in self.classes(c):
            degrees = {axis: d.astype(np.int64) for axis, d in cost.degrees.items()}
            some = replace(reading, moves=tuple(m for m in reading.moves if keeps(m)))
            kinds = ChunkKinds.of(reading.layers, one)
            stages = self._stages(one, self._cost(some, one, degrees), kinds, bare)
            out[where] = one.microbatches * _formula(one, kinds, stages, waiting)[2] / one.columns["pipeline"]
        return out

    def _steps(self, c: Configurations, cost: LayerCost, kinds: ChunkKinds) -> dict[str, Floats]:
        stages = self._stages(c, cost, kinds)
        step, busiest, whole = _formula(c, kinds, stages)
        m = c.microbatches
        return {
            "seconds": step + stages.after,
            "floor": m * busiest,
            "peak": memory(c, cost, kinds, self.parameters),
            "least": least_memory(c, cost, kinds, self.parameters),
            "bubble": step - m * whole / c.columns["pipeline"],
            "once": stages.after,
        }

    def _stages(self, c: Configurations, cost: LayerCost, kinds: ChunkKinds, bare: bool = False) -> StageTimes:
        """What chunks take, without messages."""
        device, p = self.topology.device, self.parameters
        dealt = ShardedState.of(c, cost, self.collectives(), p)
        forward, back = pass_rows(c, kinds, cost, p, device)
        weight = np.minimum(weight_rows(c, cost, p, device), back)
        halved, nothing = is_halved(c), np.zeros_like(back)
        gathers, again, reduces = (
            nothing if bare else rows
            for rows in (dealt.gather_seconds(FORWARD), dealt.gather_seconds(BACKWARD), dealt.reduce_seconds(device))
        )
        ahead = dealt.with_contention(PassWork(forward, gathers, nothing), FORWARD, device)
        behind = PassWork(
            back - weight * halved, again, reduces * ~halved, cost.rows.get("gradients of a loss", nothing)
        )
        behind = dealt.with_contention(behind, BACKWARD, device, casts=~halved)
        last = dealt.with_contention(
            PassWork(weight * halved, nothing, reduces * halved), BACKWARD, device, casts=halved
        )
        order = PassOrder(
            at_once=at_once(c),
            apart=apart_share(c) * gathers.any(axis=0),
            steady=(c.microbatches > 1) | ((c.columns["interleave"] > 1) & (c.columns["pipeline"] == 1)),
        )
        taken, first, later, left = settled_seconds(kinds.counts, ahead, behind, last, order)
        less = waiting_seconds(kinds.counts, ahead, behind, (taken, first))
        send = sent(c, cost, self.collectives())
        after = left + dealt.once(kinds, device, forward, np.where(halved, weight, back))
        hidden = np.zeros((2, *taken.shape))
        if (joint := c.columns["expert_overlap"]).any():
            there, back = (
                paired_rows(c, cost, p, phase, device).sum_parts(kinds.sums) for phase in (FORWARD, BACKWARD)
            )
            hidden = joint * np.array(hidden_exchanges(there, back, device.processors))
        return StageTimes(
            taken, first + later, later, *less, hidden[0], hidden[1], send.far, after, send.near, send.stages
        )

    def classes(self, c: Configurations) -> Iterator[tuple[StepProfile, Ints, Configurations, LayerCost]]:
        """Yield readings, the places of the configurations that each serves, these, and what their layers cost.

        A precision that is not said is the model's own, with gradients as parameters are.
        """
        c = c.with_precision_of(self.model.fields)
        col = c.columns
        code = np.zeros(len(c), dtype=np.int64)
        degrees = deal_degrees(self.model, c)
        kinds = [
            *(d > 1 for d in degrees.values()),
            col["sequence_parallel"] & (col["tensor"] > 1),
            np.where(col["context"] > 1, col["context_kind"] + 1, 0),
            col["attention"],
            col["precision"],
            col["loss"] > 0,
            col["dispatch"],
            col["expert_products"],
        ]
        for values in kinds:
            code = code * 8 + values
        for key in np.unique(code):
            where = np.flatnonzero(code == key)
            one = c[where]
            mine = {a: d[where] for a, d in degrees.items() if d[where[0]] > 1}
            reading = self._reading(one.strategy(0), tuple(mine))
            yield reading, where, one, self._cost(reading, one, mine)

    def _parts(self, c: Configurations) -> Iterator[tuple[Ints, Configurations, LayerCost, ChunkKinds]]:
        """Yield of each of `classes` what there is but the reading, and its kinds of chunks."""
        for reading, where, one, cost in self.classes(c):
            yield where, one, cost, ChunkKinds.of(reading.layers, one)

    def _reading(self, s: Strategy, axes: tuple[str, ...]) -> StepProfile:
        key = axes, s.sequence_parallel, s.context_kind if s.context > 1 else "", s.precision
        if key not in self._readings:
            base = self._base(s.precision)
            plain = Strategy(data=s.shard or s.data, tensor=s.tensor, context=s.context, expert=s.expert,
                             sequence_parallel=s.sequence_parallel, context_kind=s.context_kind,
                             expert_from=s.expert_from)  # fmt: skip
            if s.precision not in self._names:
                self._names[s.precision] = dim_names(base.program, base.dims, base.origins)
            found = read(base, plain.layouts(base), axes, self._names[s.precision])
            if not found.layers:
                raise ShardplanError(
                    f"the closed form of {base.name}, which has no layers; legal are models that repeat some, and "
                    "fidelity='ops'"
                )
            self._readings[key] = found
        return self._readings[key]

    def _base(self, precision: str | None) -> Model:
        """The model in a precision as jobs run it, with two sequences: a dim of size 1 has no factor."""
        if precision not in self._bases:
            kind = "bf16" if precision in NARROW else precision
            model = self.model
            if kind is not None and model.fields.get("precision") != kind:
                model = model.with_precision(kind)
            types = model.program.types
            sizes = (zip(dims, types[v].shape, strict=True) for v, dims in model.dims.items() if v in types)
            small = any(dim == "batch" and n == 1 for pairs in sizes for dim, n in pairs)
            self._bases[precision] = (model.resize(batch=2) if small else model).with_given_count()
        return self._bases[precision]

    def _cost(self, reading: StepProfile, c: Configurations, degrees: Mapping[str, Ints]) -> LayerCost:
        """What layers cost: worked out for those that differ in it."""
        blocks = c.strides()
        # Of a strategy without an order its degrees say where its axes may lie.
        apart = [blocks[b].astype(np.int64) for b in INNER] if blocks["data"].ndim == 1 else [c.columns["pipeline"]]
        places, back = distinct([*degrees.values(), c.columns["microbatch"], c.columns["imbalance"], *apart])
        few = {a: d[places].astype(float) for a, d in degrees.items()}
        strides: dict[str, Floats] = {}
        for block, axes in INNER.items():
            inside = blocks[block][..., places]
            for a in (part for axis in axes for part in (SHARING[axis], axis)):
                strides[a] = inside
                inside = inside * few.get(a, 1.0)
        micro = c.columns["microbatch"][places].astype(float)
        slots = tokens_of_slots(self.model.fields, c.columns["imbalance"][places] / 1000)
        kernels = tuple(int(c.columns[name][0]) for name in OF_KERNELS)
        key = reading, kernels, *few, *(x.tobytes() for x in (micro, slots, *few.values(), *strides.values()))
        found = self._costs.get(key) if len(places) == 1 else None
        if found is None:
            sizes = LocalSizes(few, micro, reading.batch, SPREAD, slots)
            found = layer_costs(reading, self._kernels_asked(*kernels), self.collectives(), sizes, strides)
            if len(places) == 1:
                if len(self._costs) >= MOST_COSTS:
                    self._costs.clear()
                self._costs[key] = found
        found = found.at(back)
        return found.split() if c.splits else found

    def _kernels_asked(self, *codes: int) -> KernelsAsked:
        """What kernels run at, by the codes of what strategies say of them."""
        attention, recipe_name, around, loss, dispatch, products = (
            CODES[name][code] for name, code in zip(OF_KERNELS, codes, strict=True)
        )
        kind, routing = attention or "flash2", Routing.of(self.model.fields, dispatch)
        dtype = recipe(recipe_name)[3] or str(self._base(recipe_name).fields["dtype"])
        device = with_kernels(self.topology.device, self.parameters, kind)
        whole, rotates, loops = loss == "whole", around in ("ring", "zigzag"), products == "loop"
        return KernelsAsked(device, dtype, kind, whole, around == "ring", routing, rotates, loops)

    def collectives(self) -> CollectivePrices:
        """Return what collectives are priced by."""
        return CollectivePrices.of(self.topology, self.parameters, self.captured)


def _with_messages(c: Configurations, kinds: ChunkKinds, stages: StageTimes) -> StageTimes:
    """What chunks take with what they wait for messages.

    Interleaved ones have other chunks meanwhile, and take no less than a message does. Of the stages between first and
    last the busiest counts, which gets one from another unit where there is any, and one from its own.
    """
    messages, first, last = stages.messages, kinds.counts[-2] > 0, kinds.counts[-1] > 0
    to_last = np.where((c.columns["pipeline"] - 1) % messages.stages == 0, messages.far, messages.near)
    several = c.columns["interleave"] > 1

    def waited(seconds: Floats, message: Floats) -> Floats:
        return np.where(several, np.maximum(seconds, message), seconds + message)

    forward = waited(stages.forward, np.where(last, to_last, messages.far) * ~first)
    return stages._replace(forward=forward, backward=waited(stages.backward, messages.near * ~last))


def _formula(
    c: Configurations, kinds: ChunkKinds, stages: StageTimes, waiting: bool = True
) -> tuple[Floats, Floats, Floats]:
    """The seconds of steps without what comes once; a microbatch's on the busiest rank; and on all, [n] each.

    With messages between stages where `waiting`.
    """
    alone = stages if waiting else stages._replace(send=np.zeros(len(c)), send_near=np.zeros(len(c)))
    stages = _with_messages(c, kinds, alone) if alone.send.any() else alone
    both = stages.forward + stages.backward
    busiest = np.einsum("pkn,kn->pn", kinds.ranks, both).max(axis=0) / kinds.owners
    whole = (kinds.chunks * both).sum(axis=0)
    less = (kinds.chunks * (stages.ahead + stages.ahead_back)).sum(axis=0)
    others = np.maximum(0.0, whole - busiest - less * (1 - 1 / c.columns["pipeline"]))
    step = c.microbatches * busiest + others / c.columns["interleave"]
    few = (c.columns["interleave"] > 1) & (c.microbatches < c.columns["pipeline"])  # a rank waits for its own chunks
    rounds = at_once(c) & (c.columns["interleave"] > 1)  # each waits for its longest chunk
    other = few | rounds | ~np.isin(c.columns["schedule"], FORMULA)
    if other.any():
        step[other] = scheduled_steps(c, kinds, alone, np.flatnonzero(other))
    together = np.asarray(stages.hidden_seconds.any(axis=0))
    if together.any():
        busiest = np.einsum("pkn,kn->pn", kinds.ranks, both - stages.hidden_seconds).max(axis=0) / kinds.owners
        share, hidden = joint_shares(c, kinds, alone, np.flatnonzero(together))
        step[together] = np.maximum(step[together] * share, (c.microbatches * busiest)[together])
        whole[together] -= hidden / c.microbatches[together]
    return step, busiest, whole
