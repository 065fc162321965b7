"""The command that finds the best strategy of a model on a topology, judges one, and hands over what launches it."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardplan.cli.fixed import read_fixed
from shardplan.cli.handing import Handing
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
from shardplan.cli.own_model import is_own_model, read_own_model
from shardplan.cli.statuses import IMPOSSIBLE
from shardplan.errors import ParseError, ShardplanError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from shardplan.hardware.topology import Topology
    from shardplan.simulation.closed.machines import MachineFit
    from shardplan.simulation.searching.answer import Judge
    from shardplan.simulation.searching.own_plans import OwnParts
    from shardplan.strategy.asked_model import AskedModel
    from shardplan.strategy.model import Model

MODEL_HELP = (
    "A preset, with changes or without (llama3-70b,seq=4096); a config.json or its folder; an .onnx or .pt2 file; or "
    "module:function, which returns a torch module with its example."
)
GOALS = ("step", "memory", "latency", "tokens")
CANDIDATES = 60  # strategies that an answer is chosen from


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
    from shardplan.core import border
    from shardplan.strategy.asked_model import parse_model
    from shardplan.strategy.strategy import NARROW, PREDICTED
    from shardplan.strategy.training import PRECISIONS

    border.choice("plan: --goal", goal, GOALS, ShardplanError)
    if precision is not None:
        border.choice("plan: --precision", precision, (*PRECISIONS, *PREDICTED), ShardplanError)
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
    from shardplan.report.text import json_text
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
        print(json_text(answer.to_dict() | ({"own": mine.to_dict()} if mine else {})))
    else:
        print("\n\n".join([answer_text(answer), *([own_text(mine)] if mine else [])]))


def _find_serving(model: Model, where: Topology, workers: int, options: dict[str, Any], as_json: bool) -> None:
    """Search for what serves requests."""
    from shardplan.cli.bar import progress_bar
    from shardplan.report.fold import fold_lines
    from shardplan.report.text import json_text
    from shardplan.simulation.searching.search import search

    with worker_pool(workers) as executor, progress_bar() as tell:
        done = (lambda now, whole: tell(now, whole, "frames of strategies")) if tell else None
        found = search(model, where, executor=executor, done=done, **options)
    print(json_text(found.to_dict()) if as_json else fold_lines(str(found)))


def _judge_one(
    asked: AskedModel, model: Model, where: Topology, machine: MachineFit | None, text: str, batch: int | None,
    precision: str | None, top: int, as_json: bool, handing: Handing,
) -> None:  # fmt: skip
    """Judge one strategy: whether it fits, what it holds, how long a step takes and what bounds it."""
    from shardplan.report.fold import fold_lines
    from shardplan.report.plan import fit_text
    from shardplan.report.text import json_text
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
    print(json_text(object_) if as_json else fold_lines(fit_text(asked.title, told, one, judge, notes)))
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
