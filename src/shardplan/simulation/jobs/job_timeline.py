"""`simulate_job` and its `JobTimeline`: a step of a job, op by op, and what it says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from shardplan.core import validation
from shardplan.errors import ShardplanError, excerpt
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.units import format_seconds
from shardplan.notebook import notebook_html
from shardplan.plans.pricing import Where, fabric_of, where_of
from shardplan.simulation.interval import Interval, MemoryCurve, seconds_by_kind
from shardplan.simulation.jobs.compiled_job import CompiledJob, compile_job
from shardplan.simulation.jobs.holdings import HeldPeak, attributed
from shardplan.simulation.jobs.messages import MESSAGES
from shardplan.simulation.jobs.op_intervals import HostPlace, MessagePlace, OpenedOps, OpPlace, Place
from shardplan.simulation.jobs.per_device_events import per_device_events
from shardplan.simulation.jobs.settings import Fold, JobSettings
from shardplan.simulation.jobs.spans import busy, exposed
from shardplan.simulation.jobs.sweep import JobSweep, sweep
from shardplan.simulation.jobs.timing import COMPUTE, Node, TimedOp, issued_of, loaded
from shardplan.simulation.timeline import Timeline
from shardplan.simulation.trace import HOST, save_traces
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.memory import Holdings, holdings

MOST_DRAWN = 1 << 17  # intervals: some seconds to write, and as many as a browser shows


@dataclass(frozen=True, repr=False, eq=False)
class JobTimeline:
    """A step of a job, op by op: what a `Timeline` says, worked out when it is asked for.

    The devices of a stage do the same at the same times, so one stands for all: `stands_for` has which. Intervals and
    curves are of those that stand; where there are more than `MOST_DRAWN`, of as many ranks as that allows.

    >>> import shardplan as sp
    >>> model = sp.Model.load("gpt", layers=4, hidden=64, heads=4, seq=32, vocab=96)
    >>> job = sp.partition(model, sp.Strategy(pipeline=2, global_batch=4))
    >>> line = simulate_job(job, sp.Topology.load("dgx-a100", nodes=1))
    >>> abs(sum(i.seconds for i in line.critical_path) - line.seconds) < 1e-12
    True
    """

    job: Job
    where: Where
    compiled: CompiledJob
    swept: JobSweep
    opened: OpenedOps  # its ops, opened action by action
    title: str = ""
    source: str = field(default="predicted", init=False)

    _repr_html_ = notebook_html

    @property
    def seconds(self) -> float:
        """The makespan of the step."""
        return self.swept.seconds

    @cached_property
    def held(self) -> Holdings:
        """The bytes of every rank, action by action."""
        return holdings(self.compiled.job)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any device holds at any time."""
        return max(self.held.peak_bytes, default=0)

    @cached_property
    def peak(self) -> HeldPeak:
        """Where and when a device holds most, and of what."""
        return attributed(self.compiled.job, self.held)

    @cached_property
    def stands_for(self) -> Mapping[int, tuple[int, ...]]:
        """By device that is followed those for which it stands, itself among them."""
        meshes = self.job.programs.meshes
        return {m.devices[0]: tuple(m.devices) for m in dict.fromkeys(meshes)}

    @property
    def even(self) -> bool:
        """Whether all devices of a stage take equally long in each op; else the slowest of them is what stands."""
        return self.compiled.even

    @cached_property
    def shared_levels(self) -> Mapping[str, tuple[str, ...]]:
        """By level the streams and messages that load it, where there are several: they may be under way at once.

        Without `contention` each has the whole of the links.
        """
        found: dict[str, dict[str, None]] = {}
        for one in self.compiled.every_map:
            for stream, level in _loads(one.nodes, self.compiled.fabric):
                found.setdefault(level, {})[stream] = None
        for m in self.compiled.messages:
            for cost in m.steps:
                for level in loaded(cost, self.compiled.fabric):
                    found.setdefault(level, {})[MESSAGES] = None
        return {level: tuple(names) for level, names in found.items() if len(names) > 1 or MESSAGES in names}

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids of the devices that stand for others, ascending."""
        return tuple(sorted(self.stands_for))

    @cached_property
    def _busy(self) -> tuple[tuple[float, float, float], ...]:
        """By rank when it starts, ends, and how long any stream of it is busy."""
        return busy(self.opened)

    @property
    def bubble_seconds(self) -> float:
        """The largest over devices: from the device's first start to its last end, minus the time it is busy."""
        return max((last - first - own for first, last, own in self._busy), default=0.0)

    @property
    def idle_seconds(self) -> float:
        """The largest over devices: the makespan minus the time the device is busy."""
        return max((self.seconds - own for _, _, own in self._busy), default=0.0)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The chain of ops, messages and issues that the makespan consists of, as places of `opened`."""
        return tuple(self.opened.path())

    @cached_property
    def critical_path(self) -> tuple[Interval, ...]:
        """A contiguous chain of intervals from 0 to the makespan: what to shorten to shorten the step."""
        found: list[Interval] = []
        at = 0.0
        for k, place in enumerate(self.places):
            one = self.opened.interval(place)
            end = self.seconds if k == len(self.places) - 1 else one.end
            found.append(replace(one, start=at, end=max(at, end)))
            at = found[-1].end
        return tuple(found)

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds per kind of interval on the critical path, largest first; they sum to the makespan."""
        return seconds_by_kind(self.critical_path)

    @cached_property
    def causes(self) -> dict[tuple[str, str, int], float]:
        """Seconds on the critical path by kind, stream and stage, largest first; a message's stage is its sender's."""
        found: dict[tuple[str, str, int], float] = {}
        for place, link in zip(self.places, self.critical_path, strict=True):
            if isinstance(place, MessagePlace):
                m = self.compiled.messages[place.number]
                key = MESSAGES, m.level, m.transfer.source[0]
            else:
                stage = self.swept.ranks[place.rank].actions[place.action][0]
                stream = HOST
                if isinstance(place, OpPlace):
                    stream = self.opened.ops(place.rank, place.action)[place.op].op.cost.stream
                key = link.kind, stream, stage
            found[key] = found.get(key, 0.0) + link.seconds
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def explained(self, most: int = 5) -> str:
        """Return in words what the step's seconds are, the largest `most` causes first.

        A collective is told with its axes and the outermost level that it crosses: `41 % tensor all_reduce on gpu,
        stage 3`.
        """
        told: list[str] = []
        for (kind, stream, stage), seconds in [*self.causes.items()][:most]:
            axes, _, level = stream.rpartition(", ")
            what = f"{axes} {kind} on {level}" if axes else f"{kind} on {stream}" if kind == MESSAGES else kind
            told.append(f"{100 * seconds / self.seconds:.0f} % {what}, stage {stage}")
        return f"{format_seconds(self.seconds)}: " + "; ".join(told) if told else format_seconds(0.0)

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds of communication by axes and level, beside which the device computes nothing.

        Of the rank that ends last, with what it waits for messages in its own span as `messages`. The names are those
        of streams: `tensor, gpu`.
        """
        late = max(range(len(self.swept.ranks)), key=lambda r: float(self.swept.ranks[r].done.max(initial=0.0)))
        return self.exposed_of(late)

    def exposed_of(self, rank: int) -> dict[str, float]:
        """Return the same of a rank."""
        validation.whole_number("simulate: rank", rank, 0, len(self.swept.ranks) - 1, ShardplanError)
        return exposed(self.opened, rank)

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The ranks whose intervals are drawn: all, or as many as are few enough, the first and the last among them."""
        count = len(self.swept.ranks)
        ops = (
            sum(self._ops(r, i, (s, kind)) for i, (s, kind, _) in enumerate(run.actions))
            for r, run in enumerate(self.swept.ranks)
        )
        fit = max(2, MOST_DRAWN // max(1, max(ops, default=1)))
        chosen = (
            range(count) if fit >= count else np.unique(np.linspace(0, count - 1, fit).round().astype(int)).tolist()
        )
        return tuple(chosen)

    def _ops(self, rank: int, action: int, key: tuple[int, str]) -> int:
        return issued_of(self.compiled.map_at(rank, action, key).nodes) or 1

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The intervals of the devices that stand for the ranks `drawn`, each behind its cause."""
        return self._intervals

    @cached_property
    def _intervals(self) -> tuple[Interval, ...]:
        found: list[Interval] = []
        numbers: dict[Place, int] = {}
        received: dict[Place, int] = {}
        hosts: dict[int, int] = {}
        for place, cause in self.opened.every(self.drawn):
            causes: tuple[int, ...] = ()
            if isinstance(cause, HostPlace):
                last = hosts.get(cause.rank)
                begin = 0.0 if last is None else found[last].end
                if last is None or cause.until > begin + self.opened.slack:
                    one = self.opened.interval(cause, causes=() if last is None else (last,))
                    hosts[cause.rank] = len(found)
                    found.append(replace(one, start=begin))
                causes = (hosts[cause.rank],)
            elif cause is not None:
                at = received.get(cause) if isinstance(place, OpPlace) else numbers.get(cause)
                at = numbers.get(cause) if at is None else at
                causes = () if at is None else (at,)
            numbers[place] = len(found)
            found.append(self._snapped(self.opened.interval(place, causes=causes), found))
            if isinstance(place, MessagePlace):
                received[place] = len(found)
                found.append(self._snapped(self.opened.interval(place, causes=causes, there=True), found))
        return tuple(found)

    def _snapped(self, one: Interval, found: list[Interval]) -> Interval:
        """An interval that starts where its cause ends, but for rounding: as it does."""
        if one.causes and abs(found[one.causes[0]].end - one.start) <= self.opened.slack:
            start = found[one.causes[0]].end
            return replace(one, start=start, end=max(start, one.end))
        return replace(one, start=0.0) if not one.causes and one.start <= self.opened.slack else one

    @property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """The bytes of the devices that stand for the ranks `drawn`: during an action, and after it."""
        return self._memory

    @cached_property
    def _memory(self) -> tuple[MemoryCurve, ...]:
        found: list[MemoryCurve] = []
        for r in self.drawn:
            run, state = self.swept.ranks[r], self.held.state[r]
            if not len(run.done):
                continue
            times = np.maximum.accumulate(np.stack([run.begin, run.done], axis=1).reshape(-1))
            rows = np.stack([self.held.during[r], self.held.after[r]], axis=1).reshape(-1)
            samples = ((0.0, state), *zip(times.tolist(), rows.tolist(), strict=True))
            found.append(MemoryCurve(self.job.programs.meshes[run.actions[0][0]].devices[0], samples))
        return tuple(found)

    @property
    def timeline(self) -> Timeline:
        """The same as a `Timeline`, whose invariants are checked; raises `ShardplanError` where not all is drawn."""
        if len(self.drawn) < len(self.swept.ranks):
            raise ShardplanError(
                f"simulate: the step has more than {MOST_DRAWN} intervals; legal is a timeline of fewer, or `save`"
            )
        return Timeline(self.intervals, self.memory, "predicted", self.title)

    def save(self, path: str | Path) -> None:
        """Write a trace file, atomically; Perfetto and Chrome open it, and `load_timelines` reads it."""
        save_traces(path, [self])

    def without(self, *names: str) -> JobTimeline:
        """Return the step with some things at no cost: what it would be worth to be rid of them.

        `names` are of ops (`all_reduce`), axes (`tensor`), levels (`node`), or `messages` between stages. Raises
        `ShardplanError` for a name of nothing that takes part.
        """
        legal = self.names
        for name in names:
            if name not in legal:
                raise ShardplanError(
                    f"without {excerpt(name)}: nothing of the step is called so; legal: {', '.join(legal)}"
                )
        settings = replace(self.compiled.settings, free=(*self.compiled.settings.free, *names))
        return _simulated(self.job, self.where, settings, self.compiled.fold)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What of the step can be taken at no cost: names of ops, of axes and levels, and `messages`."""
        found: set[str] = set()
        for one in self.compiled.every_map:
            found |= _names(one.nodes) | ({one.copy.cost.kind} if one.copy else set())
        found |= {MESSAGES} if any(m.steps for m in self.compiled.messages) else set()
        return tuple(sorted(found))

    def __repr__(self) -> str:
        """Say what it is, not all that is in it."""
        return f"<JobTimeline {self.title!r}: {len(self.swept.ranks)} ranks, {format_seconds(self.seconds)}>"


def _names(nodes: Sequence[Node]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, TimedOp):
            axes, _, level = node.cost.stream.rpartition(", ")
            found |= {node.cost.kind, *(axes.split(".") if axes else ()), *((level,) if level != COMPUTE else ())}
        else:
            found |= _names((*node.early, *node.late))
    return found


def _loads(nodes: Sequence[Node], fabric: Fabric) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, TimedOp):
            yield from ((node.cost.stream, level) for level in loaded(node.cost, fabric))
        else:
            yield from _loads((*node.early, *node.late), fabric)


def simulate_job(
    job: Job,
    where: Where | str,
    *,
    fold: Fold | bool = True,
    overlap: bool = True,
    launch: float | None = None,
    contention: bool = False,
    rendezvous: bool = False,
    algorithm: str = "auto",
) -> JobTimeline:
    """Return the timeline of a step of a job: every stage's ops on streams, in the order of the schedule.

    Args:
        job: Of `partition`.
        where: A topology whose ids are the device ids, its text, or a placement.
        fold: What is worked out once for all that is alike, all of it by default; no result changes.
        overlap: Whether collectives have streams of their own, and ops go as training frameworks run them (see
            `framework_ops`); else each rank does one op after another, as our executors do.
        launch: Seconds in which a host issues an op; by default the device's.
        contention: Whether stages and streams share links fairly; then every device and op is followed, and the time
            that takes grows with their number. Without, groups of one collective share them, and nothing else does;
            `shared` says which levels that leaves out.
        rendezvous: Whether a message between stages goes once its receiver waits for it, as gloo and NCCL send; every
            device and op is followed then, in the order of the programs, as our executors run them. Else it goes as
            soon as it is made, into a buffer of the receiver; under GPipe and 1F1B, where ops go as training
            frameworks run them, once its receiver has computed all before.
        algorithm: `auto` for the library's cheapest row of every collective, or an algorithm of the library.

    Raises:
        TopologyError: A device is not on the topology; an unknown algorithm.
        ShardplanError: There is too much to follow device by device.
        ScheduleError: The ranks wait for each other in a circle.
    """
    if not isinstance(job, Job):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardplanError(f"simulate: the job is {excerpt(job)}; legal is a Job, such as partition gives")
    found = where_of("the placement", where)
    if found is None:
        raise ShardplanError("the placement is None; legal are a placement, a topology, and a topology's text")
    if not isinstance(fold, Fold):
        fold = Fold() if validation.flag("simulate: fold", fold) else Fold.nothing()
    if contention and job.strategy.software.expert_overlap:
        raise ShardplanError(
            "simulate: contention with expert_overlap, which says what of exchanges other passes hide; legal is one"
        )
    settings = JobSettings(
        overlap,
        launch,
        algorithm=algorithm,
        contention=validation.flag("simulate: contention", contention),
        rendezvous=validation.flag("simulate: rendezvous", rendezvous),
        frameworks=overlap and not rendezvous,
    )
    return _simulated(job, found, settings, fold)


def _simulated(job: Job, where: Where, settings: JobSettings, fold: Fold) -> JobTimeline:
    fabric = fabric_of(where, job.programs.meshes)
    title = f"ops, {fabric.topology.name or 'topology'}"
    if fold.ranks and not (settings.contention or settings.rendezvous):
        found = compile_job(job, fabric, settings, fold)
        swept = sweep(found)
        return JobTimeline(job, where, found, swept, OpenedOps(found, swept), title)
    found = compile_job(job, fabric, settings, replace(fold, prices=False) if settings.contention else fold)
    swept, spans = per_device_events(found, settings.contention)
    return JobTimeline(job, where, found, swept, OpenedOps(found, swept, spans, apart=True), title)
