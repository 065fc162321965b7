"""The commands about measured collectives: validate and calibrate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardplan.cli.answers import print_answer, print_object, print_text
from shardplan.cli.options import TOPOLOGY, Json, check_writable
from shardplan.cli.statuses import VERDICT
from shardplan.errors import LayoutError, ParseError, line

if TYPE_CHECKING:
    from shardplan.hardware.measured.samples import Sample

FILE_HELP = "Rows of measured collectives (.jsonl), or a log of nccl-tests or rccl-tests."
Gpu = Annotated[str | None, typer.Option("--gpu", help="Of a log: the GPU, such as H100.")]
Op = Annotated[str | None, typer.Option("--op", help="Of a log: what it measured, such as all_reduce.")]
PerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", min=1, help="Of a log: GPUs of a node, where a host is not one.")
]
Nics = Annotated[
    str | None,
    typer.Option("--nics", metavar="COUNTxGBIT", help="Of a log: NICs of a node, Gbit/s of each: 8x400."),
]
Params = Annotated[
    Path | None, typer.Option("--params", metavar="FILE", help="Of steps: parameters, as calibrate writes them.")
]
System = Annotated[str | None, typer.Option("--system", help="Of a log: the cluster's name; the file's without.")]


def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=FILE_HELP)],
    gpu: Gpu = None,
    op: Op = None,
    gpus_per_node: PerNode = None,
    nics: Nics = None,
    system: System = None,
    params: Params = None,
    source: Annotated[str | None, typer.Option("--source", help="Of steps: only this source of rows.")] = None,
    explain: Annotated[str | None, typer.Option("--explain", metavar="ID", help="Of steps: one row's parts.")] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            "--gate", metavar="PERCENT", help="Of steps: the most mean error of a source's seconds; else exit 1."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict measured collectives, or measured training steps, and print the errors."""
    if _steps([file]):
        _validate_steps(file, params, source, explain, gate, as_json)
        return
    from shardplan.report.measurements import validation_text
    from shardplan.simulation.validation import validate_samples

    verdict = validate_samples(_samples([file], gpu, op, gpus_per_node, nics, system))
    if as_json:
        print_object(verdict.to_dict())
        return
    _say_unknown(verdict.unknown_systems)
    print_text(validation_text(verdict))


def _steps(files: list[Path]) -> bool:
    """Whether files have rows of measured steps; all do, or none."""
    from shardplan.simulation.accuracy.step_rows import is_steps

    found = {path.is_file() and is_steps(path) for path in files}
    if len(found) > 1:
        raise LayoutError("files of steps and of collectives together; legal are files of one kind")
    return True in found


def _validate_steps(
    file: Path, params: Path | None, source: str | None, explain: str | None, gate: str | None, as_json: bool
) -> None:
    from shardplan.cli.bar import progress_bar
    from shardplan.core.decoding import read_text
    from shardplan.report.measurements import explained, steps_text
    from shardplan.simulation.accuracy.step_rows import read_steps
    from shardplan.simulation.accuracy.step_validation import validate_steps
    from shardplan.simulation.closed.machines import machine_fit, parse_fit

    rows = read_steps(file)
    tables = sorted({row.table for row in rows})
    if source is not None:
        rows = [row for row in rows if row.table == source]
        if not rows:
            raise LayoutError(f"--source {source}: no row of it; legal are {', '.join(tables)}")
    limit = None if gate is None else _percent(gate)
    given = None if params is None else parse_fit(read_text(params), str(params))
    fit_of = machine_fit if given is None else lambda preset: given
    if explain is not None:
        row = next((row for row in rows if row.id == explain), None)
        if row is None:
            raise LayoutError(f"--explain {explain}: no row has that id; legal is one such as {rows[0].id}")
        print_answer(as_json, lambda: explained(row, fit_of)[0], lambda: explained(row, fit_of)[1])
        return
    with progress_bar() as tell:
        done = iter(range(1, len(rows) + 1))
        verdict = validate_steps(rows, fit_of, lambda row: tell and tell(next(done), len(rows), row.id))
    print_answer(as_json, verdict.to_dict, lambda: steps_text(verdict))
    worse = [s for s in verdict.sources if s.gate and s.quantity == "seconds_per_step" and limit is not None
             and (s.numbers["mean_error_percent"] or 0.0) > limit]  # fmt: skip
    if worse:
        print(f"{worse[0].source}: {worse[0].numbers['mean_error_percent']:.1f} % is above {gate} %", file=sys.stderr)
        raise typer.Exit(VERDICT)


def _percent(text: str) -> float:
    try:
        found = float(text.rstrip("% "))
    except ValueError:
        raise ParseError(f"--gate {text!r}; legal is a number of percent, such as 6") from None
    if not found >= 0:
        raise ParseError(f"--gate {text!r}; legal is 0 and more")
    return found


def calibrate(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE..]", help=FILE_HELP)] = None,
    steps: Annotated[
        list[Path] | None, typer.Option("--steps", metavar="FILE", help="Rows of measured steps (.jsonl), as FILE.")
    ] = None,
    on: Annotated[
        str | None, typer.Option(*TOPOLOGY, metavar="FILE", help="Of steps: the machine that all rows are of, a file.")
    ] = None,
    library: Annotated[
        str, typer.Option("--library", metavar="NAME|TABLE", help="The table to start from: a library or a .toml file.")
    ] = "nccl",
    gpu: Gpu = None,
    op: Op = None,
    gpus_per_node: PerNode = None,
    nics: Nics = None,
    system: System = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="PRESET", help="Of steps: the machine whose rows are fitted.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of steps: of the groups that are held out.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="TABLE", help="Write the fitted table, a .toml.")] = None,
    as_json: Json = False,
) -> None:
    """Fit the constants of a library's table to measured collectives, or of a machine to measured steps."""
    files = [*(files or ()), *(steps or ())]
    if not files:
        raise LayoutError("no file of measurements; legal is one and more, such as --steps rows.jsonl")
    if steps or _steps(files):
        _calibrate_steps(files, machine, on, seed, out, as_json)
        return
    if on is not None:
        raise LayoutError(f"--on {on} of measured collectives; legal is a file of measured steps")
    from shardplan.hardware.measured.fitting import fit
    from shardplan.hardware.measured.sample_setup import unknown_systems
    from shardplan.hardware.prices.library import library as load
    from shardplan.hardware.prices.library import library_text
    from shardplan.plans.plan_file import write_atomic
    from shardplan.report.measurements import calibration_object, calibration_text
    from shardplan.simulation.validation import of_library

    check_writable(out)
    table = load(library)
    used, skipped = of_library(table.name, _samples(files, gpu, op, gpus_per_node, nics, system))
    fitted = fit(table, used)
    about = f"{fitted.rows} rows of {', '.join(path.name for path in files)}, from {table.measured or table.name}"
    fitted = replace(fitted, table=replace(fitted.table, measured=about))
    if out is not None:
        write_atomic(out, library_text(fitted.table).encode())
    unknown = unknown_systems(used)
    if as_json:
        print_object(calibration_object(fitted, skipped, unknown))
        return
    _say_unknown(unknown)
    print_text(calibration_text(fitted, skipped))


def _calibrate_steps(
    files: list[Path], machine: str | None, on: str | None, seed: int, out: Path | None, as_json: bool
) -> None:
    from shardplan.plans.plan_file import write_atomic
    from shardplan.report.measurements import step_fit_text
    from shardplan.simulation.accuracy.calibration import calibrated
    from shardplan.simulation.accuracy.step_rows import read_steps, rows_on

    check_writable(out)
    rows = [row for path in files for row in read_steps(path)]
    if on is not None:
        if machine is not None:
            raise LayoutError(f"--machine {machine} and --on {on}; legal is one of them")
        rows, machine = rows_on(rows, on), on
    presets = sorted({row.cluster.preset for row in rows})
    if machine not in presets:
        said = "neither --on nor --machine" if machine is None else f"--machine {machine}"
        legal = f"--on with the topology of all rows, or --machine with one that they name: {', '.join(presets)}"
        raise LayoutError(f"{said}; legal is {legal}")
    found = calibrated(rows, str(machine), seed)
    if out is not None:
        write_atomic(out, found.text.encode())
    print_answer(as_json, found.to_dict, lambda: step_fit_text(found))


def _samples(
    files: list[Path], gpu: str | None, op: str | None, gpus_per_node: int | None, nics: str | None, system: str | None
) -> list[Sample]:
    """The samples of files of rows and of logs, of which the options say what they do not."""
    from shardplan.core.decoding import read_text
    from shardplan.hardware.measured.nccl_log import LogFacts, parse_log
    from shardplan.hardware.measured.samples import parse_rows

    facts = LogFacts(system or "", op, gpu, gpus_per_node, (0, 0.0) if nics is None else _nics(nics))
    samples: list[Sample] = []
    logs = 0
    for path in files:
        text = read_text(path, legal="rows of JSON, or a log of nccl-tests")
        what = line(path.name)
        if path.suffix in (".jsonl", ".json") or text.lstrip().startswith("{"):
            samples += parse_rows(text, what)
        else:
            samples += parse_log(text, replace(facts, system=facts.system or path.stem), what)
            logs += 1
    if not logs and facts != LogFacts():
        raise LayoutError("--gpu, --op, --gpus-per-node, --nics and --system are of logs; rows of JSON say all of it")
    return samples


def _nics(text: str) -> tuple[int, float]:
    count, _, rate = text.partition("x")
    try:
        found = int(count), float(rate)
    except ValueError:
        found = (0, 0.0)
    if not (found[0] > 0 and 0 < found[1] < 1e6):
        raise ParseError(f"--nics {text!r}: legal is the NICs of a node and the Gbit/s of each, such as 8x400")
    return found


def _say_unknown(systems: Sequence[str]) -> None:
    """Name the clusters whose fabric is not known, beside the result on stdout."""
    for name in systems:
        print(f"system {name!r} is not known: its fabric has the default latency and delivered rate", file=sys.stderr)
