"""The command that finds the best strategy of a model on a topology, judges one, and hands over what launches it."""

from __future__ import annotations

import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardplan.cli.answers import print_answer, print_object
from shardplan.cli.options import (
    Json,
    NeededTopology,
    Nodes,
    Report,
    check_report,
    check_writable,
    complete_model,
    read_bytes,
    read_topology,
)
from shardplan.cli.plan_folder import Handing
from shardplan.cli.statuses import IMPOSSIBLE
from shardplan.errors import ParseError, ShardplanError, line

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from shardplan.hardware.topology import Topology
    from shardplan.simulation.closed.machines import MachineFit
    from shardplan.simulation.searching.answer import Judge
    from shardplan.simulation.searching.own_plans import OwnParts
    from shardplan.strategy.asked_model import AskedModel
    from shardplan.strategy.model import Model
    from shardplan.strategy.partition.tables import Layouts

MODEL_HELP = (
    "A preset, with changes or without (llama3-70b,seq=4096); a config.json or its folder; an .onnx or .pt2 file; or "
    "module:function, which returns a torch module with its example."
)
GOALS = ("step", "memory", "latency", "tokens")
CANDIDATES = 60  # strategies that an answer is chosen from
TABLES = ("serve", "stored", "held")  # of a file of layouts


@contextmanager
def worker_pool(workers: int) -> Generator[ProcessPoolExecutor | None]:
    """Yield an executor of so many processes, none of one; what waits in it at the end is dropped."""
    if workers == 1:
        yield None
        return
    pool = quiet_pool(workers)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def quiet_pool(workers: int) -> ProcessPoolExecutor:
    """Return an executor of processes that an interrupt ends without a word.

    That of a terminal goes to every process; here they end by it as a program in C does.
    """
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)],
    topology: NeededTopology,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences of a training step.")] = None,
    nodes: Nodes = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Tokens of a sequence.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="fp32, bf16 (by default), fp16, fp8; nvfp4 is predicted.")
    ] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="BYTES", help="Of a device, such as 72GB.")] = None,
    reserve: Annotated[
        str | None, typer.Option("--reserve", metavar="PERCENT", help="Of a device's memory what stays free, as 10%.")
    ] = None,
    params: Annotated[
        Path | None, typer.Option("--params", metavar="FILE", help="The machine's, as calibrate writes them.")
    ] = None,
    fix: Annotated[
        str | None,
        typer.Option(
            "--fix", metavar="STRATEGY", help="What is given, 'tp=8 zero=1'; schedule=FILE.csv, layouts=FILE."
        ),
    ] = None,
    goal: Annotated[
        str, typer.Option("--goal", "--objective", help="step, memory, or of a model that serves latency or tokens.")
    ] = "step",
    prompt: Annotated[int | None, typer.Option("--prompt", min=1, help="Tokens of a request's prompt.")] = None,
    output: Annotated[int | None, typer.Option("--output", min=1, help="Tokens of its answer.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests in flight in each replica.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many that differ are told.")] = 5,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="FILE", help="Keep what is done; go on with it.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that search.")] = 1,
    no_prune: Annotated[bool, typer.Option("--no-prune", help="Price every strategy.")] = False,
    placements: Annotated[
        bool, typer.Option("--placements", help="Also try other orders of the axes on the hardware.")
    ] = False,
    fit: Annotated[
        str | None,
        typer.Option("--fit", metavar="STRATEGY", help="Judge this one, such as 'tp=8 pp=2'; status 3 if too large."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write what launches it, and a report."),
    ] = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Find the best strategy of training or serving, and say why others lost; or judge one."""
    from shardplan.core import validation
    from shardplan.strategy.asked_model import parse_model
    from shardplan.strategy.strategy import NARROW, PREDICTED
    from shardplan.strategy.training import PRECISIONS

    validation.choice("plan: --goal", goal, GOALS, ShardplanError)
    if precision is not None:
        validation.choice("plan: --precision", precision, (*PRECISIONS, *PREDICTED), ShardplanError)
    if goal in ("step", "memory") and batch is None:
        raise ShardplanError("plan: no --batch; legal is one, or --goal latency or tokens")
    check_writable(resume, report)
    if report is not None:
        check_report()
    handing = Handing(out, report)
    if out is not None or report is not None:
        from shardplan.launches.handover.folder import check_folder

        if out is not None:
            check_folder(out)
        if goal not in ("step", "memory"):
            name = "--report" if out is None else "--out"
            raise ShardplanError(f"plan: {name} with --goal {goal}; legal is --goal step or memory")
    where = _with_memory(read_topology(topology, nodes), memory, reserve)
    if is_own_model(model):
        without = {"--out": out, "--report": report, "--resume": resume, "--workers": workers > 1,
                   "--precision": precision, f"--goal {goal}": goal not in ("step", "memory")}  # fmt: skip
        asked, loaded = read_own_model(model, seq, without)
    else:
        precision = precision or "bf16"
        asked = parse_model(model, seq)
        loaded = asked.load(precision="bf16" if precision in NARROW else precision)
    machine = None if params is None else _read_machine(params)
    own = None if fix is None else read_fixed(fix)
    fixed = {} if own is None else dict(own.fields)
    if own is not None and not own.is_plain and goal != "step":
        raise ShardplanError(f"plan: --fix {own.called} with --goal {goal}; legal is --goal step")
    if fit is not None:
        served = prompt is not None or output is not None or concurrency is not None
        if resume is not None or workers > 1 or no_prune or placements or own or goal != "step" or served:
            raise ShardplanError(
                "--fit looks at one strategy: legal with it are --batch, --seq, --precision, --memory, --reserve, "
                "--params, --top and --json"
            )
        _judge_one(asked, loaded, where, machine, fit, batch, precision, top, as_json, handing)
        return
    options: dict[str, Any] = {"prune": not no_prune, "resume": resume, "params": machine and machine.parameters}
    if goal in ("step", "memory"):
        options |= {"placements": placements, "precision": precision, "fixed": fixed, "partial": True}
        for name, value in (("prompt", prompt), ("output", output), ("concurrency", concurrency)):
            if value is not None:
                raise ShardplanError(f"plan: --{name} with --goal {goal}; legal is --goal latency or tokens")
        _find_training(
            asked, loaded, where, machine, int(batch or 1), goal, top, workers, options, as_json, handing, own
        )
        return
    training = {"--fix": bool(fixed), "--placements": placements, f"--precision {precision}": precision in NARROW}
    for name in [name for name, said in training.items() if said]:
        raise ShardplanError(f"plan: {name} with --goal {goal}; legal is --goal step or memory")
    options |= {"objective": goal, "prompt": prompt, "output": output, "concurrency": concurrency, "top": top}
    _find_serving(loaded, where, workers, options | {"global_batch": batch}, as_json)


def _find_training(
    asked: AskedModel, model: Model, where: Topology, machine: MachineFit | None, batch: int, goal: str, top: int,
    workers: int, options: dict[str, Any], as_json: bool, handing: Handing, own: OwnParts | None,
) -> None:  # fmt: skip
    """Search for a training step, and tell the answer."""
    from shardplan.cli.bar import progress_bar
    from shardplan.report.plan import answer_text, own_text
    from shardplan.simulation.searching.answer import answer_plan, find_changes
    from shardplan.simulation.searching.own_plans import judge_own
    from shardplan.simulation.searching.search import search

    with worker_pool(workers) as executor, progress_bar() as tell:
        done = (lambda now, whole: tell(now, whole, "frames of strategies")) if tell else None
        found = search(model, where, batch, executor=executor, top=CANDIDATES, done=done, **options)
        assert found.certifier is not None  # it certifies, unless it is told not to
        judge = _judge(model, where, machine)
        answer = answer_plan(found, replace(judge, certifier=found.certifier), top, goal, asked.title)
        notes = asked.notes + _precision_notes(options["precision"])
        changes: tuple[str, ...] = ()
        with suppress(KeyboardInterrupt):  # what would change it may be left out
            if goal == "step" and not found.frames_left:
                changes = find_changes(answer, (lambda k, n: tell(k, n, "what would change it")) if tell else None)
        answer = replace(answer, notes=notes, changes=changes)
        notes += handing.write(asked, where, judge, answer.plans[0], answer_text(answer), answer)
        answer = replace(answer, notes=notes)
        mine = None
        if own is not None and not own.is_plain:
            ours = [one.plan for one in answer.plans]
            mine = judge_own(answer.judge, own, batch, options["precision"], ours)
    if as_json:
        print_object(answer.to_dict() | ({"own": mine.to_dict()} if mine else {}))
    else:
        print("\n\n".join([answer_text(answer), *([own_text(mine)] if mine else [])]))


def _find_serving(model: Model, where: Topology, workers: int, options: dict[str, Any], as_json: bool) -> None:
    """Search for what serves requests."""
    from shardplan.cli.bar import progress_bar
    from shardplan.simulation.searching.search import search

    with worker_pool(workers) as executor, progress_bar() as tell:
        done = (lambda now, whole: tell(now, whole, "frames of strategies")) if tell else None
        found = search(model, where, executor=executor, done=done, **options)
    print_answer(as_json, found.to_dict, lambda: str(found))


def _judge_one(
    asked: AskedModel, model: Model, where: Topology, machine: MachineFit | None, text: str, batch: int | None,
    precision: str | None, top: int, as_json: bool, handing: Handing,
) -> None:  # fmt: skip
    """Judge one strategy: whether it fits, what it holds, how long a step takes and what bounds it."""
    from shardplan.report.plan import fit_text
    from shardplan.simulation.searching.fit import fit as fits
    from shardplan.strategy.strategy_text import parse_strategy

    strategy = parse_strategy(text, where.size, global_batch=batch)
    if strategy.precision is None:
        strategy = replace(strategy, precision=precision)
    judge = _judge(model, where, machine)
    told = fits(model, strategy, where, judge.machine.parameters, top)
    one = judge.judge_fit(told)
    notes = asked.notes + _precision_notes(str(strategy.precision))
    notes += handing.write(asked, where, judge, one, fit_text(asked.title, told, one, judge, notes))
    object_ = told.to_dict() | one.to_dict() | {"strategy": told.to_dict()["strategy"], "notes": list(notes)}
    print_answer(as_json, lambda: object_, lambda: fit_text(asked.title, told, one, judge, notes))
    if not told.fits:
        raise typer.Exit(IMPOSSIBLE)


def _judge(model: Model, where: Topology, machine: MachineFit | None) -> Judge:
    from shardplan.simulation.closed.machines import machine_of
    from shardplan.simulation.searching.answer import Judge
    from shardplan.simulation.searching.certifier import Certifier

    known = machine or machine_of(where)
    return Judge(model, where, known, Certifier(model, known.parameters, where.device.memory))


def _with_memory(where: Topology | None, memory: str | None, reserve: str | None) -> Topology:
    """Return a topology with what of a device's memory may be taken."""
    assert where is not None  # an option that must be given
    nbytes = where.device.memory if memory is None else read_bytes("--memory", memory)
    if reserve is not None:
        try:
            share = float(reserve.rstrip("% "))
        except ValueError:
            share = -1.0
        if not 0 <= share < 100:
            raise ParseError(f"--reserve {reserve!r}; legal is a number of percent from 0 to below 100, such as 10%")
        nbytes *= 1 - share / 100
    if not nbytes > 0:
        raise ParseError(f"--memory {memory!r}; legal is more than 0 bytes")
    return replace(where, device=replace(where.device, memory=nbytes))


def _read_machine(path: Path) -> MachineFit:
    from shardplan.core.decoding import read_text
    from shardplan.simulation.closed.machines import parse_fit

    return parse_fit(read_text(path), str(path))


def _precision_notes(precision: str | None) -> tuple[str, ...]:
    """What is said of a precision that no program runs in."""
    from shardplan.strategy.strategy import PREDICTED

    said = f"{precision} is predicted: no program has its products, and memory is certified in fp8, which keeps more"
    return (said,) if precision in PREDICTED else ()


def read_fixed(text: str) -> OwnParts:
    """Return what is given: `tp=8 zero=1`, with `schedule=FILE.csv` and `layouts=FILE` among it, or one file alone.

    Raises `ParseError` and `ScheduleError` for a file that cannot be read, or says neither.
    """
    from shardplan.simulation.searching.own_plans import OwnParts, check_fixed
    from shardplan.strategy.schedules.schedule import Schedule
    from shardplan.strategy.strategy_text import strategy_fields

    words = text.replace(",", " ").split()
    if len(words) == 1 and "=" not in words[0] and Path(words[0]).is_file():
        words = [f"{'schedule' if words[0].endswith('.csv') else 'layouts'}={words[0]}"]
    files: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "layouts" or (name == "schedule" and "." in value):
            if name in files:
                raise ParseError(f"--fix: {name} is said twice; legal is once")
            files[name] = value
        else:
            rest.append(word)
    schedule = Schedule.from_csv(files["schedule"]) if "schedule" in files else None
    layouts = _read_layouts(files["layouts"]) if "layouts" in files else None
    fields = strategy_fields(" ".join(rest))
    if schedule is not None and "schedule" in fields:
        raise ParseError("--fix: schedule is said twice; legal is once")
    called = " and ".join(f"{name} {line(value)}" for name, value in files.items())
    own = OwnParts(fields, schedule, layouts, called)
    check_fixed(own)
    return own


def _read_layouts(path: str) -> Layouts:
    from shardplan.core.decoding import read_text
    from shardplan.strategy.partition.tables import Layouts

    text = read_text(Path(path), legal="a file of the tables serve, stored and held, as str(Layouts) writes it")
    found = Layouts.parse(text)
    if not (found.serve or found.stored or found.held):
        raise ParseError(
            f"--fix: {line(path)} has no table; legal are {', '.join(TABLES)}, as str(Layouts) writes them"
        )
    return found


def is_own_model(text: str) -> bool:
    """Say whether a text is of a program of one's own, and no preset or config."""
    from shardplan.interop.importers.source_text import is_source

    return is_source(text.partition(",")[0])


def read_own_model(text: str, seq: int | None, without: Mapping[str, object]) -> tuple[AskedModel, Model]:
    """Return a training step of a program with one scalar result, its loss, and how it is called.

    `seq` is the size of its dim `sequence`; of `without`, options by name, none may be given: they make a model anew,
    by its name.

    Raises `ShardplanError` for such an option, a change that is no `seq=N`, and as `load_source` does.
    """
    from shardplan.interop.importers.source_text import load_source
    from shardplan.strategy.asked_model import AskedModel, parse_model
    from shardplan.strategy.model import Model

    for name in (name for name, given in without.items() if given):
        raise ShardplanError(f"plan: {name} with {text}, a program of its own; legal is a preset, or a config, with it")
    source, comma, rest = text.partition(",")
    changes = dict(parse_model(f"gpt{comma}{rest}", seq).fields)
    size = changes.pop("seq", None)
    if changes:
        raise ShardplanError(f"plan: {next(iter(changes))} of {source}, a program of its own; legal is seq")
    model = load_source(source, training=True)
    if not isinstance(model, Model):
        raise ShardplanError(f"plan: {source} is a trace, no model")
    model = model if size is None else model.resize(seq=size)
    named = [name for name, dims in model.dims.items() if "batch" in dims and name not in model.parameters]
    batch = f"the batch is a dim of {', '.join(named)}" if named else "no dim is called batch"
    note = f"{source} is a program of its own: in {model.fields['dtype']}, as it is, with AdamW; {batch}"
    return AskedModel(source, model.name, {}, (note,)), model
