"""Runs a `Job`: its programs in the order of its schedule, on any backend; global arrays by name, in and out.

One order of all actions is known to every process (`order`). A process does those of its own devices, in that order; a
movement to another stage starts where the stage that sends it has done its action, and is taken before the action that
reads it: or each where the schedule places it. Stages of one mesh hand on what they make as it is. A process waits for
what it sent only once it stands, in that order, behind the action that takes it. So the process that stands first in
the order waits for nobody who waits for it, and there is no circle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.core.reference import collect
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.execution.async_executor import Running, finish
from shardplan.execution.job_arrays import batch_dim, check_bound
from shardplan.execution.job_backend import JobBackend, JobLaunch, Shards
from shardplan.execution.record import Record
from shardplan.movement.redistribute import redistribute
from shardplan.strategy.partition.job import Job, Transfer
from shardplan.strategy.partition.job_order import Action, order
from shardplan.strategy.partition.programs import NEXT, TOTAL
from shardplan.strategy.partition.recomputed_layers import BEHIND, COPY, model_name
from shardplan.strategy.schedules.action import RECEIVES, SENDS, value_pass

Values = dict[str, Shards]  # by name


class Move(NamedTuple):
    """The movement of a transfer: on the mesh that it leaves, if anything, and on to the other, or all `at_once`.

    Between stages of one mesh there is none. `placed` says whether the schedule has its send and its receive.
    """

    before: Program | None
    rest: Program | None
    at_once: bool
    placed: bool = False


class Parts(NamedTuple):
    """A job as a backend sees it: its devices, the identity of all that it runs, the movements of its transfers.

    `chains` says of each microbatch which of the schedule's chains of stages it goes through.
    """

    devices: tuple[int, ...]
    digest: str
    moves: tuple[Move, ...]
    order: tuple[Action, ...]
    chains: tuple[int, ...]


@lru_cache(maxsize=16)
def parts(job: Job) -> Parts:
    """Return the parts of a job; remembered."""
    devices = tuple(sorted({d for mesh in job.programs.meshes for d in mesh.devices}))
    moves = tuple(_move(job, t) for t in job.transfers)
    told = [*map(str, job.programs.shared), *(str(m.rest) for m in moves), *map(str, _ends(job))]
    told += [str(sorted(job.programs.which.items())), str(job.schedule), str(devices)]
    told += [f"{key}: {t}" for key, t in job.state.items()]
    found = tuple(order(job))
    chains = {k: chain_of(job, stage) for stage, _, k in found}
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()
    return Parts(devices, digest, moves, found, tuple(chains[k] for k in sorted(chains)))


def chain_of(job: Job, stage: int) -> int:
    """Return which of the schedule's chains of stages one is in."""
    return stage * job.schedule.copies // job.schedule.stages


def _ends(job: Job) -> Iterator[tuple[Any, ...]]:
    return ((t.kind, t.source, t.target) for t in job.transfers)


def _move(job: Job, transfer: Transfer) -> Move:
    """Split a movement where it leaves its mesh; not between stages that share devices, or outside of the schedule."""
    if transfer.types[0] == transfer.types[1]:
        return Move(None, None, at_once=True)
    program, (source, target) = transfer.plan.program, (t.mesh for t in transfer.types)
    if transfer.kind not in ("F", "B") or set(source.devices) & set(target.devices):
        return Move(None, program, at_once=True)
    types = program.types
    leaves = next(k for k, s in enumerate(program.steps) if any(types[r].mesh != source for r in s.results))
    sent = program.steps[leaves].operands
    before = Program(program.inputs, program.steps[:leaves], sent) if leaves else None
    found, (stage, _), (to, _) = job.schedule, transfer.source, transfer.target
    near = to == (found.stage_after(stage) if transfer.kind == "F" else found.stage_before(stage))
    rest = Program([(n, types[n]) for n in sent], program.steps[leaves:], program.outputs)
    return Move(before, rest, at_once=False, placed=near and found.has_messages)


def offer(job: Job, problem: LayoutError | None) -> JobLaunch:
    """Return what backends are asked to run together."""
    found = parts(job)
    streams = not all(move.at_once for move in found.moves)
    return JobLaunch(found.devices, found.digest, lambda whole: programs(job, whole), streams, problem)


def programs(job: Job, whole: bool) -> Iterator[Program]:
    """Yield every program that a job runs, in one order: `whole` those too that give every device all results."""
    yield from (job.programs[key] for key in sorted(job.programs))
    for move in parts(job).moves:
        yield from (p for p in (move.before, move.rest) if p is not None)
    if whole:
        yield everywhere(tuple(job.state[key] for key in returned_state(job)), parts(job).devices)
        for chain in sorted({*parts(job).chains}):
            yield everywhere(tuple(t for *_, t in microbatch_results(job, chain)), parts(job).devices)


def returned_state(job: Job) -> Iterator[str]:
    """Yield which of the state a step returns: gradients, those of copies too, and what takes the place of inputs."""
    seen: set[tuple[str, int]] = set()
    for key, (stage, name, rows) in job.parts.items():
        chain = chain_of(job, stage)
        wanted = name.startswith(TOTAL) or (model_name(name) in job.model.replaced and COPY not in name and not chain)
        if wanted and (rows or (name, chain) not in seen):
            seen.add((name, chain))
            yield key


def microbatch_results(job: Job, chain: int = 0) -> Iterator[tuple[str, int, TensorType]]:
    """Yield the results of a microbatch that goes through a chain of stages, by name and stage, and their types."""
    for name in job.results:
        for stage in range(job.stages):
            program = job.programs[stage, "F"]
            for own in (name, name + BEHIND):
                if own in program.outputs and chain_of(job, stage) == chain:
                    yield own, stage, program.types[own]


@lru_cache(maxsize=64)
def everywhere(types: tuple[TensorType, ...], devices: tuple[int, ...]) -> Program:
    """Return the program that gives every device all of some values, by planned movements."""
    inputs: list[tuple[str, TensorType]] = []
    steps: list[Step] = []
    outputs: list[str] = []
    for k, t in enumerate(types):
        mesh = t.mesh if set(t.mesh.devices) == set(devices) else Mesh(device=len(devices), devices=devices)
        program = redistribute(t, TensorType(t.dtype, t.shape, Layout(((),) * t.ndim).dims, mesh)).program
        called = {name: f"{k}.{name}" for name in program.types}
        inputs += ((called[name], u) for name, u in program.inputs)
        for step in program.steps:
            operands, results = (tuple(called[n] for n in names) for names in (step.operands, step.results))
            steps.append(Step(step.op, operands, results))
        outputs += (called[o] for o in program.outputs)
    return Program(inputs, steps, outputs)


@dataclass(slots=True)
class JobRun:
    """A step of a job under way: shards by stage and name, those of a microbatch by its number too.

    `under_way` has what was sent and may not have been taken: where in the order it is taken, and what finishes it.
    """

    job: Job
    backend: JobBackend
    arrays: Mapping[str, np.ndarray]
    record: Record | None = None
    dealt: frozenset[str] = frozenset()  # the arrays of which only this process's part is given
    keeps_totals: bool = True  # whether gradients are there behind the optimizer that reads them
    values: dict[tuple[int, str], Shards] = field(default_factory=dict[tuple[int, str], Shards])
    own: dict[tuple[int, int], Values] = field(default_factory=dict[tuple[int, int], Values])
    results: dict[tuple[str, int, int], Shards] = field(default_factory=dict[tuple[str, int, int], Shards])
    under_way: list[tuple[int, int, Running]] = field(default_factory=list[tuple[int, int, Running]])
    parts: Parts = field(init=False)
    places: dict[Action, int] = field(init=False)  # in the order
    last: dict[tuple[int, int], int] = field(init=False)  # of a microbatch on a stage

    def __post_init__(self) -> None:
        """Take the order."""
        self.parts = parts(self.job)
        self.places = {(s, value_pass(kind), k): place for place, (s, kind, k) in enumerate(self.parts.order)}
        self.last = {(k, s): place for place, (s, _, k) in enumerate(self.parts.order)}

    def step(self) -> dict[str, np.ndarray]:
        """Run every program, and return results, gradients and what takes the place of inputs."""
        self.begin()
        place = self.actions()
        return self.gather_results(place) | self.gather_state(place + self.job.strategy.microbatches)

    def begin(self) -> None:
        """Lay out what the arrays have of state, and totals of nothing."""
        job = self.job
        for key, t in job.state.items():
            stage, name, rows = job.parts[key]
            of = model_name(name)
            if name.startswith(TOTAL):
                self.values[stage, name] = self.zeros(t)
            elif name not in job.batch and of in self.arrays:
                array = self.arrays[of]
                self.values[stage, name] = self.put(array if rows is None else array[slice(*rows)], t)

    def actions(self) -> int:
        """Run all actions, and behind them the optimizers; return the place in the order behind them."""
        job, end = self.job, len(self.parts.order)
        for place, action in enumerate(self.parts.order):
            self.perform_action(place, *action)
        self.finish_sends_before(end)
        for kind, taken in job.updates.items():
            self.send(end, taken, range(job.stages), 0)
            for stage in range(job.stages):
                if (stage, kind) in job.programs:
                    self.action(end + 1 + stage, stage, kind, 0)
            end += 1 + job.stages
        self.send(end, "OPT", range(job.stages), 0)
        return end + 1

    def gather_results(self, place: int) -> dict[str, np.ndarray]:
        """Return results over all microbatches, in every process."""
        job = self.job
        count = job.strategy.microbatches
        out: dict[str, np.ndarray] = {}
        found: dict[str, list[np.ndarray]] = {name: [] for name in job.results}
        for k in range(count):
            ends = list(microbatch_results(job, self.parts.chains[k]))
            rows: dict[str, list[np.ndarray]] = {}
            shards = [self.results.get((name, k, stage), []) for name, stage, _ in ends]
            for (name, _, _), array in zip(
                ends, self.gather_arrays(shards, [t for *_, t in ends], place + k), strict=True
            ):
                rows.setdefault(model_name(name), []).append(array)
            for name, pieces in rows.items():
                found[name].append(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])
        for name, dim in job.results.items():
            one = found[name]
            out[name] = sum(one[1:], one[0]) if dim is None else np.concatenate(one, dim)
            out[name] = out[name] if dim is None else np.take(out[name], range(job.strategy.sequences), dim)
        check_bound(job, out)
        return out

    def gather_state(self, place: int) -> dict[str, np.ndarray]:
        """Return gradients and what takes the place of inputs, in every process; stacks over stages."""
        job, out = self.job, dict[str, np.ndarray]()
        keys = list(returned_state(job))
        shards = [self.values.get(job.parts[key][:2], []) for key in keys]
        stacks: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        for key, array in zip(keys, self.gather_arrays(shards, [job.state[key] for key in keys], place), strict=True):
            stage, name, some = job.parts[key]
            stacks.setdefault((name.replace(BEHIND, ""), chain_of(job, stage)), {})[(some or (0,))[0]] = array
        for (name, chain), parts_of in stacks.items():
            of, found_rows = model_name(name), [parts_of[first] for first in sorted(parts_of)]
            array = np.concatenate(found_rows) if len(found_rows) > 1 else found_rows[0]
            # A copy's gradient is a part of its parameter's.
            out[of] = out[of] + array if COPY in name or chain else array
        return out

    def perform_action(self, place: int, stage: int, kind: str, microbatch: int) -> None:
        """Do a computation or a message of the order; behind the last of a microbatch on a stage nothing stays."""
        if kind in SENDS:
            self.send(self.places[stage, kind[-1], microbatch], kind[-1], (stage,), microbatch, placed=True)
        elif kind in RECEIVES and self.has_device(self.job.programs.meshes[stage].devices):
            self.finish_sends_before(place)
            self.take(stage, kind[-1], microbatch, placed=True)
        elif kind not in RECEIVES:
            self.action(place, stage, kind, microbatch)
        if self.last[microbatch, stage] == place:
            del self.own[microbatch, stage]
            if not any(s == stage for _, s in self.own):
                for name in self.job.saved_once(stage):
                    self.values.pop((stage, name), None)

    def action(self, place: int, stage: int, kind: str, microbatch: int) -> None:
        """Take what others send for an action, run its program, and send on what others need of it."""
        job, program = self.job, self.job.programs[stage, kind]
        own = self.own.setdefault((microbatch, stage), {})
        once = job.saved_once(stage) if kind == "F" else ()
        if self.has_device(program.devices):
            self.finish_sends_before(place)
            self.take(stage, value_pass(kind), microbatch)
            replaced = [o.removeprefix(NEXT) for o in program.outputs if o.startswith(NEXT)]
            given = [self.input(stage, name, t, microbatch) for name, t in program.inputs]
            read = job.let_go(stage, kind, self.keeps_totals)
            for name in (*once, *replaced, *read):  # what is given is the program's own from here on, and let go by it
                self.values.pop((stage, name), None)
            if self.last.get((microbatch, stage)) == place:
                own.clear()
            running = self.start_program(program, given, place, 0)
            del given
            found = finish(running)
            for name, shards in zip(program.outputs, found, strict=True):
                if name in once or kind in ("NORM", "CLIP"):
                    self.values[stage, name] = shards
                else:
                    own[name] = shards
                if name.startswith(NEXT):
                    self.values[stage, name.removeprefix(NEXT)] = shards
                if model_name(name) in job.results:
                    self.results[name, microbatch, stage] = shards
        if kind not in job.updates:
            self.send(place, value_pass(kind), (stage,), microbatch)
        if kind == "I" and not self.job.schedule.has_messages:
            read = {name for name, _ in job.programs[stage, "W"].inputs}
            self.own[microbatch, stage] = {name: shards for name, shards in own.items() if name in read}

    def send(self, place: int, kind: str, stages: Sequence[int], microbatch: int, placed: bool = False) -> None:
        """Start what goes to other stages after an action: those that take it run it there, or all of them now.

        What the schedule places is sent where it says, and all else behind the action.
        """
        for k, (transfer, move) in enumerate(zip(self.job.transfers, self.parts.moves, strict=True)):
            if transfer.kind != kind or transfer.source[0] not in stages or move.placed != placed:
                continue
            (stage, name), to = transfer.source, transfer.target
            own = self.own[microbatch, stage] if kind in ("F", "B") else {}
            shards = own.get(name) or self.values.get(transfer.source, [])
            if move.at_once or self.backend.devices is None:
                for program in (move.before, move.rest):
                    if program is not None and self.has_device(program.devices):
                        [shards] = finish(self.start_program(program, [shards], place, 1 + k))
                if kind in ("F", "B"):
                    self.own.setdefault((microbatch, to[0]), {})[to[1]] = shards
                else:
                    self.values[to] = shards
            elif self.has_device(transfer.types[0].mesh.devices) and move.rest is not None:
                if move.before is not None:
                    [shards] = finish(self.start_program(move.before, [shards], place, 1 + k))
                running = self.start_program(move.rest, [shards], place, 1 + k)
                next(running, None)  # the first messages are posted
                verb = f"RECV_{kind}" if placed else kind
                self.under_way.append((self.places[to[0], verb, microbatch], k, running))

    def take(self, stage: int, kind: str, microbatch: int, placed: bool = False) -> None:
        """Wait for what other stages send for an action, in the order in which each sends it."""
        for k, (transfer, move) in enumerate(zip(self.job.transfers, self.parts.moves, strict=True)):
            mine = transfer.kind == kind and transfer.target[0] == stage and move.placed == placed
            if mine and move.rest is not None and not move.at_once and self.backend.devices:
                place = self.places[transfer.source[0], kind, microbatch]
                [shards] = finish(self.start_program(move.rest, [[]], place, 1 + k))
                self.own.setdefault((microbatch, stage), {})[transfer.target[1]] = shards

    def finish_sends_before(self, place: int) -> None:
        """Wait for what was sent to actions before a place in the order."""
        self.under_way.sort(key=lambda sent: sent[:2])
        while self.under_way and self.under_way[0][0] < place:
            finish(self.under_way.pop(0)[2])

    def start_program(self, program: Program, given: Sequence[Shards], place: int, part: int) -> Running:
        """Start a program: an action's (part 0), or a movement after it."""
        record = None if self.record is None else Record()
        if self.record is not None and record is not None:
            self.record.runs.append((program, record))
        own = [list(shards) for shards in given]  # lists that the hand may empty, so that shards are let go
        return self.backend.start(program, own, place * (1 + len(self.job.transfers)) + part, record)

    def has_device(self, devices: Sequence[int]) -> bool:
        """Say whether this process has one of some devices."""
        return self.backend.devices is None or not self.backend.devices.isdisjoint(devices)

    def put(self, array: np.ndarray, t: TensorType) -> Shards:
        """Return this process's shards of an array."""
        boxes, dtype = (t.box(k) for k in self.own_places(t)), numpy_dtype(t.dtype)
        put = self.backend.put
        return [put(array[tuple(slice(a, b) for a, b in box)].astype(dtype)) for box in boxes]

    def zeros(self, t: TensorType) -> Shards:
        """Return this process's shards of a total of nothing."""
        return [np.zeros(t.local_shape(k), numpy_dtype(t.dtype)) for k in self.own_places(t)]

    def own_places(self, t: TensorType) -> Iterator[int]:
        """Yield the places of this process's devices in a type's mesh."""
        here = self.backend.devices
        return (k for k, d in enumerate(t.mesh.devices) if here is None or d in here)

    def gather_arrays(self, shards: Sequence[Shards], types: Sequence[TensorType], place: int) -> list[np.ndarray]:
        """Return the arrays of values: moved to every device, where no process has all of them."""
        array = self.backend.array
        if self.backend.devices is None:
            return [collect([array(x) for x in each], t) for each, t in zip(shards, types, strict=True)]
        found = finish(self.start_program(everywhere(tuple(types), self.parts.devices), shards, place, 0))
        return [np.array(array(x)) for [x] in found]

    def input(self, stage: int, name: str, t: TensorType, microbatch: int) -> Shards:
        """Return the shards of an input: rows of a batch, what was saved or sent of a microbatch, or state."""
        if name in self.job.batch:
            dim = batch_dim(self.job, name)
            if name in self.dealt:
                size = t.local_shape(next(self.own_places(t)))[dim]
                rows = (slice(None),) * dim + (slice(microbatch * size, (microbatch + 1) * size),)
                return [self.backend.put(self.arrays[name][rows].astype(numpy_dtype(t.dtype)))]
            rows = (slice(None),) * dim + (slice(microbatch * t.shape[dim], (microbatch + 1) * t.shape[dim]),)
            return self.put(self.arrays[name][rows], t)
        found = self.own[microbatch, stage].get(name)
        return self.values[stage, name] if found is None else found
