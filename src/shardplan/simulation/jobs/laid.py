"""`LaidJob`: a job on a fabric: the maps of its actions and its messages, each made once for stages that are alike.

Stages are alike where their devices lie alike: equal up to the names of the units that they are in, level by level,
and in which of a unit's ways they leave it. Where a topology has slow links, none is like another.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.core.program import Program
from shardplan.hardware.prices.fabric import Fabric, Ints
from shardplan.simulation.jobs.framework_ops import as_frameworks
from shardplan.simulation.jobs.maps import ActionMap, copied, mapped
from shardplan.simulation.jobs.messages import StageMessage, message
from shardplan.simulation.jobs.settings import Fold, JobSettings
from shardplan.simulation.jobs.timing import COMPUTE, COPY, Node, OpCost, Pricing, TimedOp, copying, streams_of
from shardplan.simulation.trace import HOST
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.memory import OFFLOADS, rank_actions
from shardplan.strategy.partition.programs import NEXT, SAVED, TOTAL
from shardplan.strategy.partition.stage_work import loss_logits

Key = tuple[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class LaidJob:
    """A job where it runs; `rows` are the actions of every rank in order: stage, kind and microbatch."""

    job: Job
    fabric: Fabric
    settings: JobSettings
    fold: Fold
    launch: float
    streams: tuple[str, ...]
    maps: Mapping[Key, ActionMap]
    messages: tuple[StageMessage, ...]
    rows: tuple[tuple[tuple[int, str, int], ...], ...]

    @property
    def even(self) -> bool:
        """Whether the devices of every stage take equally long, so that each stands for all."""
        return all(m.even for m in self.maps.values())

    def sends(self, stage: int, kind: str) -> list[int]:
        """Return the numbers of the messages that an action sends, in the order of its map's results."""
        sent = self.maps[stage, kind].sent
        found = [
            k for k, m in enumerate(self.messages) if m.transfer.kind == way(kind) and m.transfer.source[0] == stage
        ]
        return [k for name in sent for k in found if self.messages[k].transfer.source[1] == name]


def way(kind: str) -> str:
    """Return the pass whose messages an action takes and sends."""
    return "B" if kind == "I" else "" if kind == "W" else kind


def laid(job: Job, fabric: Fabric, settings: JobSettings, fold: Fold) -> LaidJob:
    """Return a job laid on a fabric."""
    return _Laying(job, fabric, settings, fold).laid()


def alike(fabric: Fabric, devices: Ints) -> Hashable:
    """Return what is equal for devices, in order, that lie alike."""
    ids = fabric.topology_ids(devices)
    if any(w.factors is not None or w.port_factors is not None for w in fabric.wires):
        return ids.tobytes()
    found: list[bytes] = []
    for j, wires in enumerate(fabric.wires):
        unit = ids // wires.stride
        found.append(_renamed(unit))
        switched = wires.level.link == "switch"
        found.append(_renamed(fabric.rail(j, ids)) if switched else (unit % wires.level.size).tobytes())
    return tuple(found)


def _renamed(names: Ints) -> bytes:
    """Names, each by how many came before it."""
    _, first, number = np.unique(names, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[number].tobytes()


class _Laying:
    def __init__(self, job: Job, fabric: Fabric, settings: JobSettings, fold: Fold) -> None:
        self.job, self.fabric, self.settings, self.fold = job, fabric, settings, fold
        self.launch = fabric.topology.device.launch if settings.launch is None else settings.launch
        self.pricing: dict[Hashable, Pricing] = {}
        self.ids = [mesh.ids for mesh in job.programs.meshes]
        self.places = [alike(fabric, ids) if fold.prices else s for s, ids in enumerate(self.ids)]
        self.takes: dict[Key, list[str]] = {}
        self.gives: dict[Key, list[str]] = {}
        for t in job.transfers:
            self.takes.setdefault((t.target[0], t.kind), []).append(t.target[1])
            self.gives.setdefault((t.source[0], t.kind), []).append(t.source[1])

    def laid(self) -> LaidJob:
        job = self.job
        nodes: dict[tuple[int, Hashable], tuple[Node, ...]] = {}
        for (stage, kind), number in job.programs.which.items():
            key = number, self.places[stage]
            if key not in nodes:
                nodes[key] = self._nodes(stage, kind, job.programs.shared[number])
        streams: dict[str, None] = {HOST: None, COMPUTE: None}
        streams |= streams_of([n for found in nodes.values() for n in found])
        rows = rank_actions(job)
        if any(kind in OFFLOADS for row in rows for _, kind, _ in row):
            streams[COPY] = None
        names = tuple(streams)
        maps: dict[Key, ActionMap] = {}
        known: dict[Hashable, ActionMap] = {}
        for (stage, kind), number in job.programs.which.items():
            called = self._names(stage, kind, job.programs.shared[number])
            key = number, self.places[stage], called
            if key not in known:
                mine = nodes[number, self.places[stage]]
                known[key] = mapped(mine, names, called, self.settings, self.launch, self.fold.layers, _even(mine))
            maps[stage, kind] = known[key]
        for stage, kind in sorted({(s, kind) for row in rows for s, kind, _ in row if kind in OFFLOADS}):
            copy = copying(kind.lower(), self._saved(stage), self.settings)
            maps[stage, kind] = copied(copy, names, self.settings.overlap)
        messages = tuple(self._messages())
        return LaidJob(job, self.fabric, self.settings, self.fold, self.launch, names, maps, messages, rows)

    def _nodes(self, stage: int, kind: str, program: Program) -> tuple[Node, ...]:
        """The ops of a program of a stage; an optimizer's are one after another in all frameworks."""
        pricing = self._pricing(stage)
        nodes = pricing.nodes(program)
        if kind == "OPT" or not self.settings.frameworks:
            return nodes
        job = self.job
        parameters = {n for n, _ in program.inputs if job.key(stage, n) in job.state} - {*job.batch}
        totals = {o for o in program.outputs if o.startswith(NEXT + TOTAL)}
        last = "loss" in job.programs.shared[job.programs.which[stage, "F"]].outputs and job.strategy.loss == "whole"
        return as_frameworks(nodes, program, pricing, parameters, totals, loss_logits(job) if last else ())

    def _names(
        self, stage: int, kind: str, program: Program
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Inputs from earlier actions, those from other stages, and results for others."""
        job = self.job
        inputs = [name for name, _ in program.inputs]
        passing = "total" if kind == "OPT" else way(kind)
        taken = [n for n in self.takes.get((stage, passing), []) if n in inputs]
        local = {n for n in inputs if n not in taken and n not in job.batch}
        earlier = [
            n
            for n in inputs
            if n in local and (job.key(stage, n) not in job.state or (kind == "OPT" and n.startswith(TOTAL)))
        ]
        sent = self.gives.get((stage, way(kind)), []) if kind != "OPT" else []
        return tuple(earlier), tuple(taken), tuple(dict.fromkeys(n for n in sent if n in program.types))

    def _saved(self, stage: int) -> int:
        program = self.job.programs.shared[self.job.programs.which[stage, "F"]]
        once = self.job.saved_once(stage)
        return sum(program.types[o].local_bytes() for o in program.outputs if o.startswith(SAVED) and o not in once)

    def _pricing(self, stage: int) -> Pricing:
        """What prices the programs of a stage, which are written on the mesh of stage 0."""
        place = self.places[stage]
        if place not in self.pricing:
            first = self.ids[0]
            position = np.full(int(first.max(initial=0)) + 1, -1, dtype=np.int64)
            position[first] = self.fabric.topology_ids(self.ids[stage])
            fabric = Fabric(self.fabric.topology, position, launch=self.fabric.launch)
            self.pricing[place] = Pricing(fabric.with_library(self.fabric.library), self.settings, None, self._memory())
        return self.pricing[place]

    def _memory(self) -> dict[Hashable, OpCost] | None:
        return {} if self.fold.prices else None

    def _messages(self) -> list[StageMessage]:
        known: dict[Hashable, tuple[tuple[OpCost, ...], float, str]] = {}
        pricing = Pricing(self.fabric, self.settings, None, self._memory())
        found: list[StageMessage] = []
        lanes: dict[tuple[str, int, int], int] = {}
        for t in self.job.transfers:
            ends = [x.mesh for x in t.types]
            ids = np.concatenate([m.ids for m in ends])
            told = tuple((x.dtype, x.shape, x.layout, x.mesh.axes, x.mesh.sizes) for x in t.types)
            key = (told, ends[0] == ends[1], alike(self.fabric, ids)) if self.fold.prices else len(found)
            if key not in known:
                known[key] = message(t, pricing)
            way = t.kind, t.source[0], t.target[0]
            lanes[way] = lanes.get(way, -1) + 1
            found.append(StageMessage(t, *known[key], lanes[way]))
        return found


def _even(nodes: Sequence[Node]) -> bool:
    return all(n.cost.even if isinstance(n, TimedOp) else _even((*n.early, *n.late)) for n in nodes)
