"""The commands of the lab: run, sweep, validate; `lab` holds what they do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardplan.cli.answers import print_answer
from shardplan.cli.bar import progress_bar
from shardplan.cli.command_group import command_help
from shardplan.cli.options import MESH_HELP, Json, check_writable

app = typer.Typer(
    name="lab",
    help="An emulated cluster on this machine: programs on real processes and shaped links, beside their prediction.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RATES_HELP = "Mbit/s of every level, outermost first: 100,1000."
Rates = Annotated[str | None, typer.Option("--rates", metavar="RATES", help=RATES_HELP)]
MeshText = Annotated[str | None, typer.Option("--mesh", metavar="MESH", help=MESH_HELP)]
Engine = Annotated[str, typer.Option("--engine", help="ring, tree, direct, or gloo: its own collectives.")]
Leaf = Annotated[str, typer.Option("--leaf", help="ns: a namespace a rank; lo: a node's ranks share one loopback.")]
Repetitions = Annotated[int, typer.Option("--repetitions", help="Timed runs of every program.")]
Png = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw predicted beside measured.")]


@app.command(**command_help("lab run"))
def run(
    what: Annotated[list[str] | None, typer.Argument(metavar="[PROGRAM|PLAN|SRC DST]", help="What to run.")] = None,
    reduce: Annotated[
        str | None,
        typer.Option("--reduce", metavar="AXES", help="The best reduction over axes, and the flat one."),
    ] = None,
    mesh: MeshText = None,
    cluster: Annotated[str, typer.Option("--cluster", help="Sizes of the levels, outermost first.")] = "2x4",
    rates: Rates = None,
    nbytes: Annotated[str, typer.Option("--bytes", help="Payload of every device, with --reduce.")] = "4MiB",
    engine: Engine = "ring",
    leaf: Leaf = "ns",
    repetitions: Repetitions = 5,
    portable: Annotated[bool, typer.Option("--portable", help="MPI-style collectives only.")] = False,
    png: Png = None,
    as_json: Json = False,
) -> int:
    """Run a program on an emulated cluster, and print it beside its prediction."""
    from shardplan.cli.lab import lab_run_command

    check_writable(png)
    with progress_bar() as bar:
        answer = lab_run_command(
            what or [],
            reduce=reduce,
            mesh=mesh,
            cluster=cluster,
            rates=rates,
            nbytes=nbytes,
            engine=engine,
            leaf=leaf,
            repetitions=repetitions,
            png=png,
            portable=portable,
            progress=bar,
        )
    print_answer(as_json, lambda: answer.object, lambda: answer.text)
    return answer.status


@app.command(**command_help("lab sweep"))
def sweep(
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Sizes of the levels; the standard sweep of an hour without.")
    ] = None,
    rates: Rates = None,
    mesh: MeshText = None,
    axes: Annotated[
        str | None, typer.Option("--axes", metavar="AXES", help="Reduced axes, ';' between experiments: b;a,b.")
    ] = None,
    nbytes: Annotated[str, typer.Option("--bytes", help="Payload of every device.")] = "1MiB",
    engine: Engine = "ring",
    leaf: Leaf = "ns",
    limit: Annotated[int, typer.Option("--limit", help="Most instructions of a program.")] = 3,
    repetitions: Repetitions = 5,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The result file; it is gone on with.")] = Path(
        "lab_sweep.json"
    ),
    png: Png = None,
    busy: Annotated[bool, typer.Option("--busy", help="Measure on a busy machine, too.")] = False,
    as_json: Json = False,
) -> int:
    """Measure every placement and reduction program of an experiment, or of the standard sweep."""
    from shardplan.cli.lab import lab_sweep_command

    check_writable(out, png)
    with progress_bar() as bar:
        answer = lab_sweep_command(
            cluster=cluster,
            rates=rates,
            mesh=mesh,
            axes=axes,
            nbytes=nbytes,
            engine=engine,
            leaf=leaf,
            limit=limit,
            repetitions=repetitions,
            out=out,
            png=png,
            busy=busy,
            progress=bar,
            say=_say,
        )
    print_answer(as_json, lambda: answer.object, lambda: answer.text)
    return answer.status


@app.command(**command_help("lab validate"))
def validate(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RESULT..]", help="Result files; the standard sweep without."),
    ] = None,
    png: Png = None,
    as_json: Json = False,
) -> int:
    """Score the simulator on result files of sweeps."""
    from shardplan.cli.lab import lab_validate_command

    check_writable(png)
    with progress_bar() as bar:
        answer = lab_validate_command(results or [], png=png, progress=bar, say=_say)
    print_answer(as_json, lambda: answer.object, lambda: answer.text)
    return answer.status


def _say(line: str) -> None:
    """Print what is to be done, beside the result on stdout."""
    print(line, file=sys.stderr)
