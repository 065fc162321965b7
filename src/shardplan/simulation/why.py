"""`why`: of every movement of a job who asks for it, what it costs and what of that nothing hides, and what removes it.

A movement is there because what makes a value and what wants it do not agree (`Job.alternatives`). What it takes is
that of the step as simulated op by op: of a kind of action a middle one is looked at, and counts as often as the kind
runs. Stages that run one program say the same, and are one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardplan.core.mesh import Mesh
from shardplan.core.nested import as_nested
from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError, excerpt
from shardplan.notebook import notebook_html
from shardplan.plans.pricing import Where, where_of
from shardplan.simulation.jobs.job_timeline import JobTimeline, simulate_job
from shardplan.simulation.jobs.messages import MESSAGES
from shardplan.simulation.jobs.spans import joined, length, uncovered_stretches
from shardplan.simulation.jobs.streams import OpSpan
from shardplan.simulation.jobs.timing import COMPUTE
from shardplan.strategy.model import Model
from shardplan.strategy.partition.alternatives import Alternative
from shardplan.strategy.partition.annotated import partition_annotated, read_annotations
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.remedies import AnnotationRemedy, annotation_remedies
from shardplan.strategy.partition.write import Movement


@dataclass(frozen=True, slots=True)
class MovementWhy:
    """A movement of a stage, or of stages that run one program.

    Args:
        stages: Which they are.
        action: Whose program it is in: F, B, I, W, OPT; of what goes to other stages the action that makes it.
        place: Where in the model: `layers` in a body; of a program where its source has what asks.
        value: What moves, as the program calls it.
        asks: Who wants it: a step with its op, a table, an update.
        dims: What is asked otherwise than it is made, a dim a text: `sequence tensor -> whole`.
        made: The type that it is made in.
        wanted: The type that it is wanted in.
        ops: The ops that move it.
        streams: On which axes, and the outermost level that each crosses, once each: `tensor, gpu`.
        runs: How often it runs in a step.
        received_bytes: In a step, at the worst device.
        seconds: In a step.
        exposed_seconds: Of them those beside which the device computes nothing.
        remedy: What removes it: of a program the annotations with which all takes least, else the cheapest option of
            the choices at its ends, in the seconds of a microbatch.
    """

    stages: tuple[int, ...]
    action: str
    place: str
    value: str
    asks: str
    dims: tuple[str, ...]
    made: TensorType
    wanted: TensorType
    ops: tuple[str, ...]
    streams: tuple[str, ...]
    runs: int
    received_bytes: int
    seconds: float
    exposed_seconds: float
    remedy: Alternative | AnnotationRemedy | None

    @property
    def location(self) -> str:
        """Where it is, in words that `why PLAN where` matches."""
        several = f"stages {self.stages[0]} to {self.stages[-1]}"
        stage = f"stage {self.stages[0]}" if len(self.stages) == 1 else several
        return f"{stage} {self.action}{' ' + self.place if self.place else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        names = ("action", "place", "value", "asks", "runs", "received_bytes", "seconds", "exposed_seconds", "location")
        told = self.remedy.to_dict() if isinstance(self.remedy, AnnotationRemedy) else None
        remedy = told if told or self.remedy is None else self.remedy._asdict()
        said = {"stages": list(self.stages), "dims": list(self.dims), "ops": list(self.ops), "remedy": remedy}
        return {k: getattr(self, k) for k in names} | said | {"made": str(self.made), "wanted": str(self.wanted)}


class WhyMovements(NamedTuple):
    """The movements of a job's step, what is exposed most first, and the step as simulated."""

    movements: tuple[MovementWhy, ...]
    timeline: JobTimeline

    _repr_html_ = notebook_html

    def select(self, where: str) -> WhyMovements:
        """Return those of a place: all words are in what is said of them; raises `ShardplanError` where none is."""
        words = where.lower().split()
        found = tuple(m for m in self.movements if all(w in _words_of(m) for w in words))
        if words and not found:
            places = sorted({m.location for m in self.movements})
            raise ShardplanError(f"why: no movement is at {excerpt(where)}; there are {', '.join(places) or 'none'}")
        return self._replace(movements=found)


def _words_of(m: MovementWhy) -> str:
    return " ".join((m.location, m.value, m.asks, *m.dims, *m.ops, str(m.made), str(m.wanted))).lower()


def why(
    job: Job | Model, topology: Where | str | None = None, annotations: Mapping[str, Any] | None = None,
    mesh: Mesh | str | None = None,
) -> WhyMovements:  # fmt: skip
    """Return why a job, or an annotated program, moves what it moves, the most exposed seconds first.

    Args:
        job: Of `partition`; or a model of `load`: a program of JAX, torch or ONNX with its annotations.
        topology: On what it runs: a topology or its text, or a placement; by default what a job was partitioned for,
            of a program a nominal switch.
        annotations: Of a program by the name of an input, a result or a pinned value how it lies: a type, its text, or
            a JAX sharding. What `in_shardings`, `out_shardings` and constraints of its source say is known.
        mesh: Of a program the mesh, where they do not have it.

    Raises `LayoutError` where it is neither, and for annotations that do not fit it, and as `simulate` does.

    >>> from shardplan import Strategy, partition
    >>> model = Model.load("llama", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16, vocab=64)
    >>> first = why(partition(model, Strategy(tensor=2))).movements[0]
    >>> first.ops, first.action, first.place, first.dims
    (('all_reduce',), 'F', 'layers', ('sum over tensor -> added',))
    """
    if isinstance(job, Model):
        where = where_of("why: topology", topology)
        said = read_annotations(job, annotations, mesh)
        made = partition_annotated(job, said, where)
        remedies = annotation_remedies(made, said, where)
        line = simulate_job(made, made.settled.prices.fabric.topology if where is None else where)
        rows = [replace(m, remedy=remedies.get((m.value, m.asks), m.remedy)) for m in _movements(line)]
        return _ranked_movements(rows, line)
    if not isinstance(job, Job):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"why: {excerpt(job)}; legal is a Job, such as partition gives, or a Model with annotations")
    if annotations is not None or mesh is not None:
        raise LayoutError("why: annotations and mesh are of a program; legal with a Job is a topology")
    line = simulate_job(job, job.settled.prices.fabric.topology if topology is None else topology)
    return _ranked_movements([*_movements(line), *_transfers(line)], line)


def _ranked_movements(rows: list[MovementWhy], line: JobTimeline) -> WhyMovements:
    rows.sort(key=lambda m: (-m.exposed_seconds, -m.seconds, m.stages, m.action, m.value))
    return WhyMovements(tuple(rows), line)


@dataclass(slots=True)
class _Actions:
    """The ops of a middle action of a kind on a stage, with what is computed meanwhile; those taken are out."""

    line: JobTimeline
    stage: int
    kind: str
    ops: list[OpSpan] = field(init=False)
    computed: list[tuple[float, float]] = field(init=False)
    left: dict[tuple[bool, Op, tuple[TensorType, ...]], list[list[OpSpan]]] = field(init=False)

    def __post_init__(self) -> None:
        sweep, opened = self.line.swept, self.line.opened
        rank = self.line.job.schedule.owners[self.stage]
        run = sweep.ranks[rank]
        mine = [i for i, (stage, kind, _) in enumerate(run.actions) if (stage, kind) == (self.stage, self.kind)]
        middle = mine[len(mine) // 2]
        self.ops = opened.ops(rank, middle)
        near = range(max(0, middle - 1), min(len(run.actions), middle + 2))
        spans = ((op.start, op.end) for i in near for op in opened.ops(rank, i) if op.op.cost.stream == COMPUTE)
        self.computed = joined(spans)
        programs = self.line.job.programs  # movements are on the mesh of the first of the stages that share one
        steps = dict(_steps(programs.shared[programs.which[self.stage, self.kind]]))
        alike: dict[tuple[bool, int, tuple[str, ...]], list[OpSpan]] = {}
        for op in self.ops:
            alike.setdefault((bool(op.runs), op.op.number, op.op.results), []).append(op)
        self.left = {}
        for key, spans in alike.items():
            if key in steps:
                self.left.setdefault((key[0], *steps[key]), []).append(spans)

    def take(self, m: Movement) -> list[OpSpan]:
        """Return the ops of a movement in all runs of its body: of those that are left the first of its ops and types.

        Where several movements have the same ops on the same types, it does not matter whose they are.
        """
        found: list[OpSpan] = []
        for step in m.plan.program.steps:
            wanted = bool(m.path), step.op, m.plan.program.step_types(step)[0]
            for spans in self.left.get(wanted, [])[:1]:
                found += spans
                self.left[wanted].remove(spans)
        return found

    def exposed_seconds(self, op: OpSpan) -> float:
        """Return the seconds of an op beside which nothing is computed."""
        if op.op.cost.stream == COMPUTE:
            return 0.0
        return length(uncovered_stretches([(op.start, op.end)], self.computed))


def _steps(
    program: Program, inside: bool = False
) -> Iterator[tuple[tuple[bool, int, tuple[str, ...]], tuple[Op, tuple[TensorType, ...]]]]:
    """The ops of a program and its bodies with the types of their operands, by number and results."""
    for number, step in enumerate(program.steps):
        yield (inside, number, step.results), (step.op, program.step_types(step)[0])
        if (inner := as_nested(step.op)) is not None:
            yield from _steps(inner.body, True)


def _movements(line: JobTimeline) -> Iterator[MovementWhy]:
    job, runs = line.job, line.job.runs
    seen: dict[tuple[int, str], list[int]] = {}
    for stage, kind in job.programs:
        seen.setdefault((job.programs.which[stage, kind], kind), []).append(stage)
    for (_, kind), stages in seen.items():
        actions = _Actions(line, stages[0], kind)
        times = runs[stages[0], kind]
        for m in job.movements.get((stages[0], "B" if kind in ("I", "W") else kind), ()):
            found = actions.take(m)
            if not found:
                continue  # of B's movements in the other of I and W, or a cut that takes no time
            made, wanted = m.plan.program.input_types[0], m.plan.program.output_types[0]
            remedy = next((a for a in job.alternatives(m) if a.removes), None)
            yield MovementWhy(
                tuple(stages), kind, _place(job, m), m.value, m.by, _dims(job, m, made, wanted), made,
                wanted, tuple(step.op.name for step in m.plan.program.steps),
                tuple(dict.fromkeys(op.op.cost.stream for op in found if op.op.cost.stream != COMPUTE)),
                times * m.times,
                times * sum(op.op.cost.received_bytes for op in found),
                times * sum(op.end - op.start for op in found), times * sum(map(actions.exposed_seconds, found)),
                remedy,
            )  # fmt: skip


def _place(job: Job, m: Movement) -> str:
    """Where in the model: `layers` in a body; of a source the place that asks, or that makes what is asked for."""
    line = None if m.asks is None else m.asks.line
    source = job.model.places.get(m.value if line is None else line.results[0], "")
    return " ".join(word for word in ("layers" if m.path else "", source) if word)


def _transfers(line: JobTimeline) -> Iterator[MovementWhy]:
    """What goes from stage to stage: `exposed` is what the receiving rank waits for messages, dealt out by seconds."""
    job = line.job
    found: dict[int, list[float]] = {}
    for place, (start, end, _, _) in line.opened.messages.items():
        found.setdefault(place.number, []).append(end - start)
    ranks = {r: line.exposed_of(r).get(MESSAGES, 0.0) for r in range(len(line.swept.ranks))}
    total: dict[int, float] = {}
    for number, times in found.items():
        to = job.schedule.owners[line.compiled.messages[number].transfer.target[0]]
        total[to] = total.get(to, 0.0) + sum(times)
    for number, times in found.items():
        m = line.compiled.messages[number]
        made, wanted = m.transfer.types
        if not sum(times):
            continue
        to = job.schedule.owners[m.transfer.target[0]]
        yield MovementWhy(
            (m.transfer.source[0],), m.transfer.kind, "", m.transfer.source[1], f"stage {m.transfer.target[0]}",
            (f"stage {m.transfer.source[0]} -> {m.transfer.target[0]}",), made, wanted,
            tuple(step.kind for step in m.steps) or ("send",), (f"{MESSAGES}, {m.level}",), len(times),
            len(times) * sum(step.received_bytes for step in m.steps), sum(times),
            ranks[to] * sum(times) / total[to], None,
        )  # fmt: skip


def _dims(job: Job, m: Movement, made: TensorType, wanted: TensorType) -> tuple[str, ...]:
    """What is asked otherwise than it is made, dim by dim, and sums."""
    names = _names(job, m, made.ndim)
    found = [f"{name} {_axes(a)} -> {_axes(b)}" for name, a, b in
             zip(names, made.layout.dims, wanted.layout.dims, strict=True) if a != b]  # fmt: skip
    summed = [a for a in made.layout.partial if a not in wanted.layout.partial]
    if summed:
        found.append(f"{made.layout.reduction} over {', '.join(summed)} -> added")
    return tuple(found)


def _names(job: Job, m: Movement, ndim: int) -> Sequence[str]:
    """What the dims of a value are called: by the factors of the op that asks, or of a parameter by the model."""
    if m.asks is not None and m.asks.line is not None:
        line = m.asks.line
        dims = line.links.operands[m.operand]
        return [
            " ".join(str(n) for f in dim for n in line.names.get(f, ())) or f"dim {k}" for k, dim in enumerate(dims)
        ]
    of = m.value.removeprefix("gradient.").partition(".master")[0]
    known = job.model.dims.get(of, ())
    return known if len(known) == ndim else [f"dim {k}" for k in range(ndim)]


def _axes(axes: tuple[str, ...]) -> str:
    return ",".join(axes) or "whole"
