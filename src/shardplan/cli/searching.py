"""The command that searches for the best strategy of a model on a topology."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardplan.cli.options import Json, NeededTopology, Nodes, check_writable, read_topology
from shardplan.cli.statuses import IMPOSSIBLE
from shardplan.errors import ShardplanError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


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
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A preset of a model, such as llama3-70b.")],
    topology: NeededTopology,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences of a training step.")] = None,
    nodes: Nodes = None,
    objective: Annotated[
        str, typer.Option("--objective", help="step, or of a model that serves latency or tokens.")
    ] = "step",
    prompt: Annotated[int | None, typer.Option("--prompt", min=1, help="Tokens of a request's prompt.")] = None,
    output: Annotated[int | None, typer.Option("--output", min=1, help="Tokens of its answer.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests in flight in each replica.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16.")] = "bf16",
    top: Annotated[int, typer.Option("--top", min=1, help="How many are printed.")] = 10,
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
        typer.Option(
            "--fit",
            metavar="STRATEGY",
            help="Say whether this one fits, such as 'tensor=8 data=2'; else status 3.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the best strategies of training or serving, and say what was left out and why; or say whether one fits."""
    from shardplan.cli.bar import progress_bar
    from shardplan.report.text import json_text
    from shardplan.simulation.searching.search import search
    from shardplan.strategy.model import Model

    if objective == "step" and batch is None:
        raise ShardplanError("plan: no --batch; legal is one, or --objective latency or tokens")
    requests = {"prompt": prompt, "output": output, "concurrency": concurrency}
    asked: dict[str, Any] = {"global_batch": batch, "objective": objective, **requests}
    check_writable(resume)
    where = read_topology(topology, nodes)
    assert where is not None  # an option that must be given
    found_model = Model.load(model, precision=precision)
    if fit is not None:
        from shardplan.simulation.searching.fit import fit as fits
        from shardplan.strategy.strategy_text import parse_strategy

        if resume is not None or workers > 1 or no_prune or placements:
            raise ShardplanError(
                "--fit looks at one strategy: legal with it are --batch, --precision, --top and --json"
            )
        strategy = parse_strategy(fit, global_batch=batch)
        if strategy.precision is None:
            strategy = replace(strategy, precision=precision)
        told = fits(found_model, strategy, where, top=top)
        print(json_text(told.to_dict()) if as_json else str(told))
        if not told.fits:
            raise typer.Exit(IMPOSSIBLE)
        return
    with worker_pool(workers) as executor, progress_bar() as tell:
        found = search(
            found_model,
            where,
            **asked,
            prune=not no_prune,
            executor=executor,
            resume=resume,
            top=top,
            placements=placements,
            done=(lambda now, whole: tell(now, whole, "frames")) if tell else None,
        )
    print(json_text(found.to_dict()) if as_json else str(found))
