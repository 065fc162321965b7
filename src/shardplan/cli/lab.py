"""The commands of `lab`: a program measured beside its prediction, a sweep, a validation.

They take what the command line takes, as texts, and give what it prints and exits with; a picture is written to the
file that is named. Times are those of sockets between processes on one machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np

from shardplan.core.decoding import read_text
from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError, TopologyError
from shardplan.execution.lab import CONSTANTS, Cluster, Lab, Task, needs
from shardplan.execution.lab.cluster import Leaf, Rate
from shardplan.execution.lab.experiments import LIMIT, Experiment, emulated_topology
from shardplan.execution.lab.results import Sweep
from shardplan.execution.lab.session import REPETITIONS
from shardplan.execution.lab.standard import STANDARD
from shardplan.execution.lab.sweep import MOST_LATE, Progress, estimate, measure_experiments
from shardplan.execution.lab.validate import validate
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.units import parse_bytes
from shardplan.movement.redistribute import redistribute
from shardplan.movement.reductions.enumeration import reductions
from shardplan.plans.plan import Plan
from shardplan.report.lab_picture import save_points, save_timelines
from shardplan.report.lab_text import LabAnswer, done_object, run_answer, sweep_text, validate_object, validate_text
from shardplan.simulation.replay import replayed
from shardplan.simulation.scripts import ENGINES, Engine, script_of
from shardplan.simulation.timeline import Timeline

# Mbit/s by the cluster's sizes: what a small machine's processors can carry, the outer level slower, as it is.
RATES = {"2x4": (200.0, 1000.0), "2x2x2": (100.0, 200.0, 1000.0), "4x4": (100.0, 500.0), "4x2": (200.0, 1000.0)}
DEFAULT_OUT = "lab_sweep.json"


# shardplan lab run


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to run, and where its devices sit on the cluster."""

    title: str
    program: Program
    placement: Placement

    def predict(self, cluster: Cluster, engine: Engine) -> Timeline:
        """Return its timeline on an engine, predicted event-wise."""
        script = script_of(self.program, engine=engine)
        return replayed(script, self.placement, constants=CONSTANTS, shared=cluster.leaf == "lo")


def lab_run_command(
    what: Sequence[str],
    *,
    reduce: str | None = None,
    mesh: str | None = None,
    cluster: str = "2x4",
    rates: str | None = None,
    nbytes: str = "4MiB",
    engine: str = "ring",
    leaf: str = "ns",
    repetitions: int = REPETITIONS,
    png: Path | str | None = None,
    portable: bool = False,
    most_late: float = MOST_LATE,
    progress: Progress | None = None,
) -> LabAnswer:
    """Run what the command line describes on an emulated cluster, and return it beside its prediction.

    A warning says where the processors were busy.

    Args:
        what: A file of a program or a plan; or source and destination type; or nothing, with `reduce`.
        reduce: Axes of the mesh to reduce over, with commas between them: the best program and the flat all_reduce.
        mesh: Axes and sizes; needed but for a file. Device k of its order is rank k.
        cluster: Sizes of the levels, outermost first.
        rates: Mbit/s of every level, with commas between them; by default those of `RATES`.
        nbytes: Payload of every device, with `reduce`.
        engine: Of `ENGINES`.
        leaf: `ns`, a namespace a rank, or `lo`, one loopback for the ranks of a node.
        repetitions: Timed runs.
        png: File for a picture of both timelines of the first program.
        portable: Plan with MPI-style collectives only.
        most_late: As for `Lab`.
        progress: Called often, for a bar.

    Raises:
        ParseError: A file cannot be read or a text is malformed.
        LayoutError: What is given does not fit together.
        TopologyError: The program does not fit on the cluster.
        Unavailable: This machine cannot run it.
        BackendError: A result differs from the reference, or a rank failed.
    """
    built = Cluster.of(cluster, read_rates(cluster, rates), read_leaf(leaf))
    runs_on = read_engine(engine)
    subjects = _subjects(what, reduce, mesh, built, nbytes, portable, runs_on)
    predicted = [s.predict(built, runs_on) for s in subjects]

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, "runs")

    with Lab(built, engine=runs_on, most_late=most_late) as lab:
        tasks = [Task(s.program, s.placement, s.title) for s in subjects]
        measured = lab.measure(tasks, repetitions, progress=tell)
    if png is not None:
        save_timelines(Path(png), predicted[0], measured[0].timeline)
    return run_answer(built, predicted, measured)


def _subjects(
    what: Sequence[str],
    reduce: str | None,
    mesh: str | None,
    cluster: Cluster,
    nbytes: str,
    portable: bool,
    engine: Engine,
) -> list[Subject]:
    """What to run: of a reduction two programs, else one."""
    forms = "a program or plan file, two types with --mesh, or --reduce AXES with --mesh"
    if reduce is not None:
        if what or mesh is None:
            raise LayoutError(f"lab run takes {forms}")
        return _reductions(_mesh(mesh), reduce, cluster, nbytes, engine)
    if len(what) == 2:
        if mesh is None:
            raise LayoutError("two types need --mesh, such as --mesh data=2,tensor=4")
        ours = _mesh(mesh)
        source, target = (TensorType.parse(text.strip(), ours) for text in what)
        placement = in_order(ours, cluster)
        plan = redistribute(source, target, topology=placement, portable=portable)
        return [Subject(f"{what[0].strip()} -> {what[1].strip()}", plan.program, placement)]
    if len(what) != 1 or mesh is not None:
        raise LayoutError(f"lab run takes {forms}")
    return [_file(Path(what[0]), cluster)]


def _reductions(mesh: Mesh, axes: str, cluster: Cluster, nbytes: str, engine: Engine) -> list[Subject]:
    """The best program and the flat all_reduce."""
    placement = in_order(mesh, cluster)
    names = [a.strip() for a in axes.split(",")]
    found = [r for r in reductions(placement, names, parse_bytes(nbytes), LIMIT, algorithm="ring") if r.program]
    every = [
        Subject("; ".join(s.op.name for s in r.program.steps) or "nothing", r.program, placement)
        for r in found
        if r.program is not None
    ]
    timed = sorted(every, key=lambda s: s.predict(cluster, engine).seconds)
    best = timed[0]
    flat = [s for s in every if len(s.program.steps) == 1 and s is not best]
    return [Subject(f"best of {len(every)}: {best.title}", best.program, placement),
            *(Subject("flat all_reduce", s.program, placement) for s in flat[:1])]  # fmt: skip


def _file(path: Path, cluster: Cluster) -> Subject:
    """A program or plan file; a plan's own placement where it is one on a cluster of these sizes."""
    text = read_text(path, legal="a program or a plan file")
    if not text.lstrip().startswith("{"):
        program = Program.parse(text)
        return Subject(path.name, program, ranks_in_order(program, cluster))
    plan = Plan.load(path)
    where = plan.certificate.where
    if isinstance(where, Placement) and where.topology.level_sizes == cluster.topology.level_sizes:
        return Subject(path.name, plan.program, where)
    return Subject(path.name, plan.program, ranks_in_order(plan.program, cluster))


def ranks_in_order(program: Program, cluster: Cluster) -> Placement:
    """Return the placement that lays a program's device ids, ascending, on the ranks.

    Raises `TopologyError` where it has more devices than the cluster ranks.
    """
    ids = sorted(program.devices)
    size = cluster.ranks
    if len(ids) > size:
        raise TopologyError(
            f"the program runs on {len(ids)} devices, the cluster has {size} ranks; use --cluster with as many"
        )
    spare = [d for d in range(max(ids, default=0) + 1 + size) if d not in set(ids)]
    mesh = Mesh({"rank": size}, devices=[*ids, *spare[: size - len(ids)]])
    return Placement(mesh, cluster.topology, (cluster.topology.level_sizes,))


def in_order(mesh: Mesh, cluster: Cluster) -> Placement:
    """Return the placement in which the k-th device of a mesh is rank k, where there is one, else the first.

    Its topology has the payload's share and the latency of the lab: what plans are priced on. Raises `TopologyError`
    where the mesh has another number of devices than the cluster ranks.
    """
    every = list(placements(mesh, emulated_topology(cluster.topology)))
    return next((p for p in every if np.array_equal(p.device_mesh().reshape(-1), np.arange(mesh.size))), every[0])


def _mesh(text: str) -> Mesh:
    """The mesh of a text; an error names the option."""
    try:
        return Mesh.parse(text)
    except ParseError as error:
        raise ParseError(f"--mesh: {error}") from None


def read_rates(cluster: str, text: str | None) -> tuple[Rate, ...]:
    """Return rates in Mbit/s, as `Cluster.of` takes them; without a text those of `RATES`.

    >>> read_rates("2x4", "4*50, 1000")
    ('4*50', 1000.0)
    """
    if text is None:
        if cluster in RATES:
            return RATES[cluster]
        raise LayoutError(f"cluster {cluster} has no default rates; give --rates, in Mbit/s, outermost first")
    try:
        return tuple(part.strip() if "*" in part else float(part) for part in text.split(","))
    except ValueError:
        raise ParseError(
            f"--rates {text!r}; legal are numbers in Mbit/s with commas between them, such as 200,1000, and with "
            "uplinks before them, such as 4*50,1000"
        ) from None


def read_leaf(text: str) -> Leaf:
    """Return the kind of leaf that a text names."""
    if text not in get_args(Leaf):
        raise LayoutError(f"--leaf {text!r}; legal are {', '.join(get_args(Leaf))}")
    return cast(Leaf, text)


def read_engine(text: str) -> Engine:
    """Return the engine that a text names."""
    if text not in ENGINES:
        raise LayoutError(f"--engine {text!r}; legal are {', '.join(ENGINES)}")
    return text


# shardplan lab sweep


def lab_sweep_command(
    *,
    cluster: str | None = None,
    rates: str | None = None,
    mesh: str | None = None,
    axes: str | None = None,
    nbytes: str = "1MiB",
    engine: str = "ring",
    leaf: str = "ns",
    limit: int = LIMIT,
    repetitions: int = REPETITIONS,
    out: Path | str = DEFAULT_OUT,
    png: Path | str | None = None,
    most_late: float = MOST_LATE,
    busy: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> LabAnswer:
    """Measure every placement and reduction program, and return what was found.

    The result file grows with every experiment, and is gone on with.

    Args:
        cluster: Sizes of the levels, outermost first; None for the standard sweep of an hour, which reads no
            option but `engine`, `repetitions` and `out`.
        rates: Mbit/s of every level, with commas between them; by default those of `RATES`.
        mesh: Axes and sizes; by default one axis over all ranks, and two axes of which the first has size 2.
        axes: The reduced axes, with commas between them and ';' between experiments; by default each axis alone.
        nbytes: Payload of every device.
        engine: Of `ENGINES`.
        leaf: `ns`, a namespace a rank, or `lo`, one loopback for the ranks of a node.
        limit: Most instructions of a program.
        repetitions: Timed runs of every pair.
        out: The result file.
        png: File for a picture of predicted against measured.
        most_late: As for `Lab`.
        busy: Whether to measure on a busy machine, too.
        progress: Called often, for a bar.
        say: Called with a line before the first run: what is to do, and about how long it takes.

    Raises:
        ParseError: The file is there and is no result of a sweep, or a text is malformed.
        LayoutError: The options do not fit together.
        Unavailable: This machine cannot run it.
        BackendError: The file is of another engine or number of repetitions.
    """
    path = Path(out)
    chosen = list(STANDARD) if cluster is None else _experiments(cluster, rates, mesh, axes, nbytes, leaf, limit)
    if cluster is None and not rates == mesh == axes == None:  # noqa: E711
        raise LayoutError("--rates, --mesh and --axes need --cluster; without it the standard sweep is run")
    found = _run_sweep(chosen, path, read_engine(engine), repetitions, most_late, busy, progress, say)
    if png is not None:
        save_points(Path(png), found.experiments)
    object_ = {"out": str(path), "noise_floor": found.floor, "experiments": [done_object(d) for d in found.experiments]}
    return LabAnswer(sweep_text(found, path.name), object_)


def _run_sweep(
    chosen: Sequence[Experiment],
    path: Path,
    engine: Engine,
    repetitions: int,
    most_late: float,
    busy: bool,
    progress: Progress | None,
    say: Callable[[str], None] | None,
) -> Sweep:
    """Run the experiments that the file has not, and keep it up to date."""
    before = Sweep.load(path) if path.exists() else None
    have = {d.experiment for d in before.experiments if not d.error} if before else set[Experiment]()
    todo = [e for e in chosen if e not in have]
    if todo:
        needs.require()  # before the estimate, which takes a minute for the standard sweep
    if say is not None and todo:
        minutes = estimate(todo, repetitions, engine) / 60
        say(f"{len(todo)} experiments of {len(chosen)} to measure, about {minutes:.0f} minutes; result in {path.name}")
    return measure_experiments(
        chosen,
        engine=engine,
        repetitions=repetitions,
        before=before,
        keep=lambda found: found.save(path),
        progress=progress,
        most_late=most_late,
        busy=busy,
    )


def _experiments(
    cluster: str, rates: str | None, mesh: str | None, axes: str | None, nbytes: str, leaf: str, limit: int
) -> list[Experiment]:
    """The experiments of a sweep that is no standard one, mesh by mesh."""
    speeds, kind, payload = read_rates(cluster, rates), read_leaf(leaf), int(parse_bytes(nbytes))
    n = Cluster.of(cluster, speeds, kind).ranks
    if mesh is not None:
        meshes = [_mesh(mesh)]
    else:
        meshes = [Mesh({"a": n}), *([Mesh({"a": 2, "b": n // 2})] if n % 2 == 0 and n > 2 else [])]
    out: list[Experiment] = []
    for one in meshes:
        chosen = [(a,) for a in one.axes]
        if axes is not None:
            chosen = [tuple(a.strip() for a in part.split(",")) for part in axes.split(";")]
        out += [Experiment(cluster, speeds, str(one), c, payload, kind, limit) for c in chosen]
    return out


# shardplan lab validate


def lab_validate_command(
    results: Sequence[Path | str] = (),
    *,
    png: Path | str | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> LabAnswer:
    """Score the models on result files, and return the scores; without any the standard sweep is run first.

    The status is 0 also where a target is missed.

    Args:
        results: Files of `lab sweep`, or of the benchmark.
        png: File for a picture of predicted against measured.
        progress: Called often, for a bar.
        say: Called with a line before the first run.

    Raises:
        ParseError: A file cannot be read, or holds no experiment.
        Unavailable: This machine cannot run the standard sweep.
    """
    if results:
        found = [Sweep.load(Path(p)) for p in results]
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sweep"
            found = [_run_sweep(STANDARD, path, "ring", REPETITIONS, MOST_LATE, False, progress, say)]
    verdict = validate(found)
    if png is not None:
        save_points(Path(png), verdict.experiments)
    return LabAnswer(validate_text(verdict), validate_object(verdict))
