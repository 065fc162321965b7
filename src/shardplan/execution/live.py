"""`Live`: a job whose state stays in shards on its devices from step to step, on any backend.

A process holds the shards of its own devices and nothing else of the state. A step agrees with the other processes,
runs the job's programs on them, and brings results (the loss) to every process. What is replaced is let go by the
program that replaces it, so a device holds what the job's certificate says. Whoever opens a live job says where its
state comes from (`Source`) and how it is written (`Writer`): this room knows no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.mesh import Mesh
from shardplan.core.nested import row_type, stacked_type
from shardplan.core.program import Program
from shardplan.core.target_counts import COUNT, counting
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError, LayoutError, ShardplanError, excerpt
from shardplan.execution.async_executor import finish
from shardplan.execution.job_arrays import batch_dim, check_step_arrays
from shardplan.execution.job_backend import JobBackend, JobLaunch, Shards
from shardplan.execution.jobs import JobRun, chain_of, everywhere, offer, parts
from shardplan.execution.record import Record
from shardplan.execution.run import TIMEOUT, load_backend
from shardplan.movement.redistribute import redistribute
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.partition import partition
from shardplan.strategy.partition.programs import TOTAL
from shardplan.strategy.partition.recomputed_layers import COPY, model_name
from shardplan.strategy.strategy import Strategy

Box = tuple[tuple[int, int], ...]
Source = Callable[[str, TensorType, Box], np.ndarray]
"""What gives a box of an input of the model, by its name and its type on one device."""
Writer = Callable[["Live", str], None]


class StateBox(NamedTuple):
    """What a device holds of an input of the model: its box in the whole array, and its shard under a key of `state`.

    `device` is its id, `place` its index in the mesh of the key's type.
    """

    name: str
    key: str
    device: int
    place: int
    box: Box


def state_names(job: Job) -> tuple[str, ...]:
    """Return the inputs that live from step to step: parameters, and all that a step replaces."""
    model = job.model
    return tuple(n for n, _ in model.program.inputs if n in model.parameters or n in model.replaced)


def state_keys(job: Job) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    """Yield of a job's state each key, the input that it is (of a copy its parameter), and which rows of that."""
    names = set(state_names(job))
    for key, (_, name, some) in job.parts.items():
        if (of := model_name(name)) in names:
            yield key, of, some


def state_boxes(job: Job) -> Iterator[StateBox]:
    """Yield what every device holds of the state, those that hold the same one after another."""
    for key, name, some in state_keys(job):
        t = job.state[key]
        for place, device in enumerate(t.mesh.devices):
            box = tuple((int(a), int(b)) for a, b in t.box(place))
            if some is not None:
                box = ((box[0][0] + some[0], box[0][1] + some[0]), *box[1:])
            yield StateBox(name, key, device, place, box)


@dataclass(slots=True)
class Live:
    """A job under way; see `shardplan.start`, which makes one.

    `results` are all results of the last step by name, as global arrays, in every process that has a device; `record`,
    where it is set, takes what this process sees of the steps.
    """

    job: Job
    backend: str
    writer: Writer
    timeout: float = TIMEOUT
    results: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    record: Record | None = None
    _shards: dict[tuple[int, str], Shards] = field(default_factory=dict[tuple[int, str], Shards])
    _joined: JobBackend = field(default_factory=JobBackend)  # that of the last agreement
    _ended: str = ""  # why nothing can be run

    def lay_out(self, open_source: Callable[[], Source]) -> None:
        """Take this process's shards of the state; a source that does not open is an error of all processes."""
        problem: ShardplanError | None = None
        source: Source | None = None
        try:
            source = open_source()
        except ShardplanError as error:
            problem = error
        asked = offer(self.job, None if problem is None else LayoutError(str(problem)))
        joined = self._agree(asked)
        if problem is not None:
            raise problem
        assert source is not None
        types = self.job.model.program.types
        for each in state_boxes(self.job):
            if joined is not None and self.holds(each.device):
                stage, name, _ = self.job.parts[each.key]
                array = source(each.name, types[each.name], each.box)
                self._shards.setdefault((stage, name), []).append(joined.put(array))

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the state go."""
        self.close()

    def close(self) -> None:
        """Let the state go; nothing can be run afterwards, and closing again is no error."""
        self._shards.clear()
        self._ended = self._ended or "it is closed"

    def step(self, batch: Mapping[str, Any]) -> Any:
        """Run a step, and return the model's first result: the loss where it trains, else logits or outputs.

        Args:
            batch: What is no state, by name, each as a global array, or as this process's part of it (`part`): in all
                processes the same names are parts.

        Returns a global array, of a loss a number, in every process that has a device of the job; None in others.
        Raises as `shardplan.run`. A batch that is wrong on one process is an error on all, and the state is as it was;
        after any other error it is gone, and what was saved last is whole.
        """
        self._check_open()
        problem: LayoutError | None = None
        given: dict[str, np.ndarray] = {}
        shapes = self._part_shapes()
        try:
            given = check_step_arrays(self.job, batch, state_names(self.job), shapes)
        except LayoutError as error:
            problem = error
        dealt = frozenset(n for n in shapes if n in given and given[n].shape == shapes[n])
        joined = self._agree(offer(self.job, problem))
        if problem is not None:
            raise problem
        if joined is None:
            self.results = {}
            return None
        try:
            run = JobRun(self.job, joined, given, self.record, dealt, keeps_totals=False, values=self._shards)
            if COUNT in given and joined.devices is not None:
                run.arrays = given | {COUNT: self._count_of_all(joined, given[COUNT], dealt)}
            run.begin()
            self.results = run.gather_results(run.actions())
        except BaseException as error:
            self._end(error)
            raise
        for key in [key for key in self._shards if key[1].startswith(TOTAL) or key[1] == COUNT]:
            del self._shards[key]
        first = self.results[next(name for name in self.job.results)]
        return first if first.ndim else first[()]

    def part(self, name: str) -> tuple[np.ndarray, ...]:
        """Return which positions of an input of the batch this process takes, per dim: `array[np.ix_(*part)]`.

        Raises `LayoutError` for what is no such input, or of which this process reads no one box.
        """
        if name not in self.job.batch or name not in self.job.model.dims:
            legal = ", ".join(n for n in self.job.batch if n in self.job.model.dims)
            raise LayoutError(f"part of {excerpt(name)}; legal is an input of the batch: {legal}")
        found = self._part(name)
        if found is None:
            raise LayoutError(f"part of {name}: this process reads no one box of it; legal is the whole array in step")
        return found

    def shard(self, box: StateBox) -> np.ndarray:
        """Return the shard of a box of this process, on the host; it may be the one that lives."""
        places = [k for k, d in enumerate(self.job.state[box.key].mesh.devices) if self.holds(d)]
        return self._joined.array(self._shards[self.job.parts[box.key][:2]][places.index(box.place)])

    def collect(self, names: Sequence[str] | str | None = None) -> dict[str, np.ndarray]:
        """Return parameters and other state by name, by default all, as global arrays in every process.

        Every process calls it, with the same names: planned movements bring all of them to each, one name at a time.
        Raises `LayoutError` for a name that is no state.
        """
        self._check_open()
        legal = state_names(self.job)
        wanted = legal if names is None else (names,) if isinstance(names, str) else tuple(names)
        if strange := [n for n in wanted if n not in legal]:
            raise LayoutError(f"collect {excerpt(strange[0])}; legal are {', '.join(legal)}")
        out: dict[str, np.ndarray] = {}
        every = parts(self.job).devices
        for name in wanted:
            keys = [key for key, _ in self._first_keys(name)]
            types = tuple(self.job.state[key] for key in keys)
            joined = self._agree(_offer_of(everywhere(types, every), every))
            if joined is not None:
                shards = [self._shards.get(self.job.parts[key][:2], []) for key in keys]
                found = JobRun(self.job, joined, {}).gather_arrays(shards, types, 0)
                out[name] = found[0] if len(found) == 1 else np.concatenate(found)
        return out

    def save(self, folder: str) -> None:
        """Write the state to a new folder that all processes see; each writes what its devices hold, once.

        The folder gets its name when all of it is on disk. See `shardplan.interop.checkpoint.write_state`.
        """
        self._check_open()
        self.writer(self, folder)

    def reshard(self, strategy: Strategy | Job, memory_limit: float | str | None = None) -> None:
        """Change how the state lies, and how steps run, to those of a strategy of the same model, in memory.

        All of it moves as one batch plan, within `memory_limit` bytes a device (sources, results and staging). Devices
        may come and go. Rows of a stack that goes to several stages are held until the last of them has gone.

        Raises `Infeasible` for a limit within which there is no plan, and as `partition`; the state is then as it was.
        """
        self._check_open()
        after = strategy if isinstance(strategy, Job) else partition(self.job.model, strategy)
        moves = list(self._moves(after))
        plan = redistribute([m.source for m in moves], [m.target for m in moves], memory_limit=memory_limit)
        devices = tuple(sorted({*parts(self.job).devices, *parts(after).devices}))
        joined = self._agree(_offer_of(plan.program, devices))
        try:
            self._arrive(joined, moves, self._move(joined, moves, plan.program))
        except BaseException as error:
            self._end(error)
            raise
        self.job = after

    def _move(self, joined: JobBackend | None, moves: Sequence[_Move], program: Program) -> list[Shards]:
        """Run the movement of the state, which is this program's alone meanwhile."""
        given = [[x if m.take is None else x[slice(*m.take)] for x in self._shards.get(m.home, [])] for m in moves]
        self._shards.clear()
        if joined is None or not (joined.devices is None or joined.devices & {*program.devices}):
            return []
        running = joined.start(program, given, 0, None)
        del given
        return finish(running)

    def _arrive(self, joined: JobBackend | None, moves: Sequence[_Move], found: Sequence[Shards]) -> None:
        """Take what came: the pieces of a stack one after another."""
        pieces: dict[tuple[int, str], list[Shards]] = {}
        for m, shards in zip(moves, found, strict=bool(found)):
            if shards:
                pieces.setdefault(m.to, []).append(shards)
        for to, some in pieces.items():
            assert joined is not None
            whole = (list(each) for each in zip(*some, strict=True))
            self._shards[to] = [each[0] if len(each) == 1 else joined.join(each) for each in whole]

    def vote(self, mine: int) -> list[int]:
        """Return what every device's process says, a number each by ascending id: all wait here for all."""
        devices = parts(self.job).devices
        joined = self._agree(_offer_of(_poll(devices), devices))
        return [] if joined is None else _gather_numbers(joined, devices, mine)

    # In this process

    def _check_open(self) -> None:
        if self._ended:
            raise BackendError(f"{self.job!r}: {self._ended}; legal is to start again from what was saved")

    def _end(self, error: BaseException) -> None:
        """Let the state go, of which nobody knows how far it is."""
        self._shards.clear()
        self._ended = f"it failed ({type(error).__name__})"

    def holds(self, device: int) -> bool:
        """Say whether a device is one of this process's."""
        return self._joined.devices is None or device in self._joined.devices

    def _agree(self, asked: JobLaunch) -> JobBackend | None:
        """Agree with the other processes on what runs now."""
        joined = (
            JobBackend() if self.backend == "reference" else load_backend(self.backend).join_launch(asked, self.timeout)
        )
        self._joined = JobBackend(devices=frozenset()) if joined is None else joined
        return joined

    def _part(self, name: str) -> tuple[np.ndarray, ...] | None:
        """Positions of an input that this process reads, per dim; None where that is the whole, or no box."""
        job = self.job
        s = job.strategy
        if self._joined.devices is None or name not in job.model.dims or s.sequences % (s.data * s.microbatch):
            return None
        types = {t for key, p in job.programs.items() if key[1] != "OPT" for n, t in p.inputs if n == name}
        mine = {(t, k) for t in types for k, d in enumerate(t.mesh.devices) if d in self._joined.devices}
        boxes = {tuple((int(a), int(b)) for a, b in t.box(k)) for t, k in mine}
        dim, dims = batch_dim(job, name), job.model.dims[name]
        if len(boxes) != 1:
            whole = job.model.program.types[name].shape
            none = tuple(np.arange(0 if d == dim else n) for d, n in enumerate(whole))
            return None if boxes else none
        (box,), (t, _) = boxes, next(iter(mine))
        found = [np.arange(*ends) for ends in box]
        found[dim] = np.concatenate([k * t.shape[dim] + found[dim] for k in range(s.microbatches)])
        if job.order is not None and "sequence" in dims:
            at = dims.index("sequence")
            found[at] = job.order[found[at]]
        return tuple(found)

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this process's parts of a batch, of those that are less than the whole."""
        job, out = self.job, dict[str, tuple[int, ...]]()
        for name in job.batch:
            if (part := self._part(name)) is not None:
                shape, whole = tuple(map(len, part)), list(job.model.program.types[name].shape)
                whole[batch_dim(job, name)] = job.strategy.sequences
                out |= {name: shape} if shape != tuple(whole) else {}
        return out

    def _count_of_all(self, joined: JobBackend, mine: np.ndarray, dealt: frozenset[str]) -> np.ndarray:
        """How many targets count: whoever has all of them says so, else it is the sum over parts, each once."""
        devices, found = parts(self.job).devices, counting(self.job.model.program)
        assert found is not None
        whole = found.targets not in dealt
        told = _gather_numbers(joined, devices, 2 * int(mine) + whole)
        if any(n % 2 for n in told):
            return np.asarray(next(n // 2 for n in told if n % 2), mine.dtype)
        first: dict[object, int] = {}
        forward = [p for (_, kind), p in self.job.programs.items() if kind == "F"]
        for t in (t for p in forward for n, t in p.inputs if n == found.targets):
            for place, device in enumerate(t.mesh.devices):
                first.setdefault(t.box(place), device)
        return np.asarray(sum(told[devices.index(d)] // 2 for d in first.values()), mine.dtype)

    def _first_keys(self, name: str) -> list[tuple[str, tuple[int, int] | None]]:
        """The keys that have all of an input once, by rows."""
        seen: dict[tuple[int, int] | None, str] = {}
        for key, of, some in state_keys(self.job):
            stage, own, _ = self.job.parts[key]
            if of == name and COPY not in own and not chain_of(self.job, stage):
                seen.setdefault(some, key)
        return sorted(((key, some) for some, key in seen.items()), key=lambda x: x[1] or (0, 0))

    def _moves(self, after: Job) -> Iterator[_Move]:
        """What goes from every key of this job to every key of another: rows that both have."""
        for key, name, some in state_keys(after):
            t, to = after.state[key], after.parts[key][:2]
            for source, own in self._first_keys(name):
                u, home = self.job.state[source], self.job.parts[source][:2]
                if some is None and own is None:
                    yield _Move(home, to, u, t, None)
                    continue
                (a, b), (c, d) = (x or (0, self.job.model.program.types[name].shape[0]) for x in (own, some))
                low, high = max(a, c), min(b, d)
                if low < high:
                    u, v = (stacked_type(row_type(x), high - low) for x in (u, t))
                    yield _Move(home, to, u, v, None if (low, high) == (a, b) else (low - a, high - a))


class _Move(NamedTuple):
    """A piece of the state on its way: where it is and goes, its types, and which rows of what is there."""

    home: tuple[int, str]
    to: tuple[int, str]
    source: TensorType
    target: TensorType
    take: tuple[int, int] | None


def _offer_of(program: Program, devices: tuple[int, ...]) -> JobLaunch:
    """What runs by itself, beside steps."""
    return JobLaunch(
        devices, hashlib.sha256(str(program).encode()).hexdigest(), lambda whole: iter((program,)), False, None
    )


def _poll(devices: tuple[int, ...]) -> Program:
    """The program that brings a number of every device to every device."""
    mesh = Mesh(device=len(devices), devices=devices)
    return everywhere((TensorType("i64", (len(devices),), ("device",), mesh),), devices)


def _gather_numbers(joined: JobBackend, devices: tuple[int, ...], mine: int) -> list[int]:
    """What all devices say."""
    if joined.devices is None:
        return [mine] * len(devices)
    one = joined.put(np.array([mine], numpy_dtype("i64")))
    [[x]] = finish(joined.start(_poll(devices), [[one]], 0, None))
    return [int(n) for n in joined.array(x)]
