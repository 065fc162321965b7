"""`CompiledJob`: a job on a fabric: the maps of its actions and its messages, each made once for stages that are alike.

Stages are alike where their devices lie alike: equal up to the names of the units that they are in, level by level,
and in which of a unit's ways they leave it. Where a topology has slow links, none is like another.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardplan.core.program import Program
from shardplan.hardware.prices.fabric import Fabric, Ints
from shardplan.simulation.jobs.framework_ops import as_frameworks, as_updates, beside_collectives
from shardplan.simulation.jobs.joint_passes import Passes, beside_another, joint_actions
from shardplan.simulation.jobs.maps import ActionMap, copied, mapped
from shardplan.simulation.jobs.messages import StageMessage, message
from shardplan.simulation.jobs.settings import Fold, JobSettings
from shardplan.simulation.jobs.step_traffic import StepTraffic, with_gathers, with_reductions
from shardplan.simulation.jobs.timing import COMPUTE, COPY, Node, OpCost, Pricing, TimedOp, copying, streams_of
from shardplan.simulation.jobs.whole_layers import with_kept_tokens, with_whole_layers
from shardplan.simulation.trace import HOST
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.memory import OFFLOADS, rank_actions
from shardplan.strategy.partition.programs import NEXT, SAVED, TOTAL
from shardplan.strategy.partition.stage_work import loss_logits
from shardplan.strategy.schedules.action import value_pass
from shardplan.strategy.schedules.action_lists import ActionLists
from shardplan.strategy.schedules.table import is_rendezvous

Key = tuple[int, str]
Row = tuple[tuple[int, str, int], ...]  # stage, kind and microbatch
MAKES_GRADIENTS = ("B", "W")


@dataclass(frozen=True, eq=False)  # no slots: what is worked out once is remembered
class CompiledJob:
    """A job where it runs; `rows` are the actions of every rank in order: stage, kind and microbatch.

    `maps` are of actions by stage and kind, and so are `taken` and `sent`, numbers of messages in the order of a map's
    inputs and results: they carry what the graph of the schedule has an action wait for. `ends` are maps of the first
    forward and the last backward of a stage, with what moves once a step (`step_traffic`), where they have it beside;
    `joint` of passes that run together with one of another microbatch, where exchanges with experts are hidden there.
    """

    job: Job
    fabric: Fabric
    settings: JobSettings
    fold: Fold
    launch: float
    streams: tuple[str, ...]
    maps: Mapping[Key, ActionMap]
    messages: tuple[StageMessage, ...]
    taken: Mapping[Key, list[int]]
    sent: Mapping[Key, list[int]]
    rows: tuple[Row, ...]
    ends: Mapping[Key, ActionMap] = field(default_factory=dict[Key, ActionMap])
    joint: Mapping[Key, ActionMap] = field(default_factory=dict[Key, ActionMap])

    @cached_property
    def lists(self) -> ActionLists:
        """The same actions as arrays, which know what each waits for."""
        return ActionLists.of(self.rows, self.job.schedule.owners, self.job.schedule.copies)

    @cached_property
    def ends_at(self) -> list[Mapping[int, ActionMap]]:
        """By rank the maps of first forwards, last backwards and passes in pairs, by their places in its list."""
        pairs = joint_actions(self.job) if self.joint else ()
        return [
            {at: self.joint[one[:2]] for at, one in enumerate(row) if one in pairs}
            | {at: self.ends[key] for key, at in turning_places(row).items() if key in self.ends}
            for row in self.rows
        ]

    def map_at(self, rank: int, action: int, key: Key) -> ActionMap:
        """Return the map of an action of a rank, by its place in the whole list, its stage and its kind."""
        return self.ends_at[rank].get(action) or self.maps[key]

    @cached_property
    def is_rendezvous(self) -> bool:
        """Whether messages of passes begin once their receivers wait for them, as training frameworks run the job."""
        s = self.job.strategy
        trains = any(kind != "F" for row in self.rows for _, kind, _ in row)
        named = isinstance(s.schedule, str) and is_rendezvous(s.schedule, s.interleave or 1)
        return self.settings.frameworks and trains and named

    @property
    def every_map(self) -> tuple[ActionMap, ...]:
        """All maps, each once."""
        found = (*self.maps.values(), *self.ends.values(), *self.joint.values())
        return tuple({id(m): m for m in found}.values())

    @property
    def even(self) -> bool:
        """Whether the devices of every stage take equally long, so that each stands for all."""
        return all(m.even for m in self.every_map)


def turning_places(row: Row) -> dict[Key, int]:
    """Return where in a rank's list the first forward of a stage is, and its last backward (W where it is halved)."""
    found: dict[Key, int] = {}
    for at, (stage, kind, _) in enumerate(row):
        if kind == "F":
            found.setdefault((stage, kind), at)
        elif kind in MAKES_GRADIENTS:
            for other in MAKES_GRADIENTS:
                found.pop((stage, other), None)
            found[stage, kind] = at
    return found


def compile_job(job: Job, fabric: Fabric, settings: JobSettings, fold: Fold) -> CompiledJob:
    """Return a job on a fabric: its maps and messages, once for stages that are alike."""
    return _JobCompiler(job, fabric, settings, fold).compile()


def equivalence_key(fabric: Fabric, devices: Ints) -> Hashable:
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


class _JobCompiler:
    def __init__(self, job: Job, fabric: Fabric, settings: JobSettings, fold: Fold) -> None:
        self.job, self.fabric, self.settings, self.fold = job, fabric, settings, fold
        self.launch = fabric.topology.device.issue_seconds if settings.launch is None else settings.launch
        self.pricing: dict[Hashable, Pricing] = {}
        self.ids = [mesh.ids for mesh in job.programs.meshes]
        self.places = [equivalence_key(fabric, ids) if fold.prices else s for s, ids in enumerate(self.ids)]
        self.takes: dict[Key, list[str]] = {}
        self.gives: dict[Key, list[str]] = {}
        for t in job.transfers:
            self.takes.setdefault((t.target[0], t.kind), []).append(t.target[1])
            self.gives.setdefault((t.source[0], t.kind), []).append(t.source[1])

    def compile(self) -> CompiledJob:
        job = self.job
        nodes: dict[tuple[int, Hashable], tuple[Node, ...]] = {}
        for (stage, kind), number in job.programs.which.items():
            key = number, self.places[stage]
            if key not in nodes:
                nodes[key] = self._nodes(stage, kind, job.programs.shared[number])
        rows = rank_actions(job)
        ends = self._ends(nodes, rows)
        streams: dict[str, None] = {HOST: None, COMPUTE: None}
        streams |= streams_of([n for found in (*nodes.values(), *ends.values()) for n in found])
        if any(kind in OFFLOADS for row in rows for _, kind, _ in row):
            streams[COPY] = None
        names = tuple(streams)
        maps: dict[Key, ActionMap] = {}
        known: dict[Hashable, ActionMap] = {}
        for (stage, kind), number in job.programs.which.items():
            called = self._names(stage, kind, job.programs.shared[number])
            key = number, self.places[stage], called
            if key not in known:
                mine = self._with_contention(nodes[number, self.places[stage]])
                known[key] = self._action_map(mine, names, called, kind)
            maps[stage, kind] = known[key]
        turned, joint = dict[Key, ActionMap](), dict[Key, ActionMap]()
        pairs = self._joint(nodes)
        for found, into in ((ends, turned), (pairs, joint)):
            for (stage, kind), mine in found.items():
                called = self._names(stage, kind, job.programs.shared[job.programs.which[stage, kind]])
                key = id(mine), called
                if key not in known:
                    known[key] = self._action_map(mine, names, called, kind)
                (maps if kind in job.updates else into)[stage, kind] = known[key]
        for stage, kind in sorted({(s, kind) for row in rows for s, kind, _ in row if kind in OFFLOADS}):
            copy = copying(kind.lower(), self._saved(stage), self.settings)
            maps[stage, kind] = copied(copy, names, self.settings.overlap)
        messages = tuple(self._messages())
        links = self._links(maps)
        return CompiledJob(
            job, self.fabric, self.settings, self.fold, self.launch, names, maps, messages, *links, rows, turned, joint
        )

    def _action_map(
        self,
        nodes: tuple[Node, ...],
        streams: tuple[str, ...],
        called: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]],
        kind: str,
    ) -> ActionMap:
        """The map of a pass, or of an update; as frameworks run it a pass begins with what it receives."""
        waits = self.settings.frameworks and kind not in self.job.updates
        return mapped(nodes, streams, called, self.settings, self.launch, self.fold.layers, _even(nodes), waits)

    def _links(self, maps: Mapping[Key, ActionMap]) -> tuple[dict[Key, list[int]], dict[Key, list[int]]]:
        """The messages that each action takes, and sends."""
        to, of = dict[tuple[str, int, str], int](), dict[tuple[str, int, str], list[int]]()
        for k, t in enumerate(self.job.transfers):
            to[t.kind, *t.target] = k
            of.setdefault((t.kind, *t.source), []).append(k)
        taken = {
            (s, kind): [to[self._message_kind(kind), s, name] for name in one.taken] for (s, kind), one in maps.items()
        }
        sent = {(s, kind): [k for n in one.sent for k in of[value_pass(kind), s, n]] for (s, kind), one in maps.items()}
        return taken, sent

    def _ends(
        self, nodes: dict[tuple[int, Hashable], tuple[Node, ...]], rows: Sequence[Row]
    ) -> dict[Key, tuple[Node, ...]]:
        """The ops of first forwards and last backwards, with what they do beside; optimizers are left without that.

        Software without fused attention runs it behind the last backward pass: see `closed.stages`.
        """
        job, found = self.job, dict[Key, tuple[Node, ...]]()
        if not self.settings.frameworks or job.strategy.software.attention == "unfused":
            return found
        known: dict[Hashable, tuple[dict[str, StepTraffic], tuple[Node, ...], tuple[Node, ...]]] = {}
        sent = {t.source for t in job.transfers if t.kind not in ("F", "B")} | {t.target for t in job.transfers}
        lasts = {stage: kind for row in rows for stage, kind in turning_places(row) if kind != "F"}
        for stage, last in lasts.items():
            if (stage, "OPT") not in job.programs.which:
                continue
            place = self.places[stage]
            forward, backward = (job.programs.which[stage, kind] for kind in ("F", last))
            updates = {kind: n for kind in job.updates if (n := job.programs.which.get((stage, kind))) is not None}
            apart = tuple(name for at, name in sorted(sent) if at == stage)
            key = place, forward, backward, *updates.values(), apart
            if key not in known:
                programs = [job.programs.shared[n] for n in (forward, backward)]
                made = {o.removeprefix(NEXT) for o in programs[1].outputs if o.startswith(NEXT + TOTAL)}
                read = {n for n, _ in programs[0].inputs}
                traffic = {
                    kind: StepTraffic.of(
                        nodes[n, place], job.programs.shared[n].meshes, made - {*apart}, read - {*apart}
                    )
                    for kind, n in updates.items()
                }
                reductions = {name: chain for one in traffic.values() for name, chain in one.reductions.items()}
                pricing = self._pricing(stage)
                known[key] = (
                    traffic,
                    self._with_contention(
                        with_gathers(nodes[forward, place], programs[0], traffic["OPT"].gathers, pricing)
                    ),
                    self._with_contention(with_reductions(nodes[backward, place], reductions, pricing)),
                )
            traffic, first, final = known[key]
            if any(one.gathers or one.reductions for one in traffic.values()):
                found |= {(stage, "F"): first, (stage, last): final}
                found |= {(stage, kind): one.left for kind, one in traffic.items()}
        return found

    def _joint(self, nodes: dict[tuple[int, Hashable], tuple[Node, ...]]) -> dict[Key, tuple[Node, ...]]:
        """The ops of forwards and backwards that run together with one of another microbatch."""
        job, found, known = self.job, dict[Key, tuple[Node, ...]](), dict[Hashable, Passes]()
        if not self.settings.frameworks or not job.strategy.software.expert_overlap:
            return found
        for stage in sorted({stage for stage, _, _ in joint_actions(job)}):
            place, numbers = self.places[stage], [job.programs.which[stage, kind] for kind in "FB"]
            key = place, *numbers
            if key not in known:
                there, back = (self._with_contention(nodes[number, place]) for number in numbers)
                known[key] = beside_another(there, back, self.fabric.topology.device.processors)
            found |= {(stage, kind): mine for kind, mine in zip("FB", known[key], strict=True)}
        return found

    def _nodes(self, stage: int, kind: str, program: Program) -> tuple[Node, ...]:
        """The ops of a program of a stage."""
        pricing = self._pricing(stage)
        nodes = pricing.nodes(program)
        if not self.settings.frameworks:
            return nodes
        if kind in self.job.updates:
            return as_updates(nodes, program, pricing)
        job = self.job
        state = {n for n, _ in program.inputs if job.key(stage, n) in job.state}
        parameters = {n for n in state - {*job.batch} if not n.startswith(TOTAL)}
        totals = {o for o in program.outputs if o.startswith(NEXT + TOTAL)}
        last = "loss" in job.programs.shared[job.programs.which[stage, "F"]].outputs and job.strategy.loss == "whole"
        found = as_frameworks(nodes, program, pricing, parameters, totals, loss_logits(job) if last else ())
        source = job.programs.shared[job.programs.which[stage, "F"]]
        if kind in ("B", "I") and job.strategy.recompute == "full" and not job.strategy.fsdp:
            found = with_whole_layers(found, program, self._nodes(stage, "F", source), source)
        if kind in ("B", "I", "W") and job.strategy.recompute in ("none", "selective"):
            found = with_kept_tokens(found, program, self._nodes(stage, "F", source), source)
        return found

    def _with_contention(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Ops that lose processors to collectives beside them, where frameworks run them."""
        return beside_collectives(nodes, self.fabric.topology.device.processors) if self.settings.frameworks else nodes

    def _names(
        self, stage: int, kind: str, program: Program
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Inputs from earlier actions, those from other stages, and results for others."""
        job = self.job
        inputs = [name for name, _ in program.inputs]
        taken = [n for n in self.takes.get((stage, self._message_kind(kind)), []) if n in inputs]
        local = {n for n in inputs if n not in taken and n not in job.batch}
        earlier = [
            n
            for n in inputs
            if n in local and (job.key(stage, n) not in job.state or (kind in job.updates and n.startswith(TOTAL)))
        ]
        sent = self.gives.get((stage, value_pass(kind)), []) if kind not in job.updates else []
        return tuple(earlier), tuple(taken), tuple(dict.fromkeys(n for n in sent if n in program.types))

    def _message_kind(self, kind: str) -> str:
        """What the messages that an action takes are of."""
        return self.job.updates.get(kind) or value_pass(kind)

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
            key = (told, ends[0] == ends[1], equivalence_key(self.fabric, ids)) if self.fold.prices else len(found)
            if key not in known:
                known[key] = message(t, pricing)
            way = t.kind, t.source[0], t.target[0]
            lanes[way] = lanes.get(way, -1) + 1
            found.append(StageMessage(t, *known[key], lanes[way]))
        return found


def _even(nodes: Sequence[Node]) -> bool:
    return all(n.cost.even if isinstance(n, TimedOp) else _even((*n.early, *n.late)) for n in nodes)
