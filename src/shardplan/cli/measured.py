"""The commands about measured collectives: validate and calibrate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardplan.cli.options import Json, check_writable
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
System = Annotated[str | None, typer.Option("--system", help="Of a log: the cluster's name; the file's without.")]


def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=FILE_HELP)],
    gpu: Gpu = None,
    op: Op = None,
    gpus_per_node: PerNode = None,
    nics: Nics = None,
    system: System = None,
    as_json: Json = False,
) -> None:
    """Predict measured collectives, and print the errors by library, op, nodes and bytes."""
    from shardplan.report.measured import validation_text
    from shardplan.report.text import json_text
    from shardplan.simulation.validation import validate_samples

    verdict = validate_samples(_samples([file], gpu, op, gpus_per_node, nics, system))
    if as_json:
        print(json_text(verdict.to_dict()))
        return
    _say_unknown(verdict.unknown_systems)
    print(validation_text(verdict))


def calibrate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE..", help=FILE_HELP)],
    library: Annotated[
        str, typer.Option("--library", metavar="NAME|TABLE", help="The table to start from: a library or a .toml file.")
    ] = "nccl",
    gpu: Gpu = None,
    op: Op = None,
    gpus_per_node: PerNode = None,
    nics: Nics = None,
    system: System = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="TABLE", help="Write the fitted table, a .toml.")] = None,
    as_json: Json = False,
) -> None:
    """Fit the constants of a library's table to measured collectives."""
    from shardplan.hardware.measured.fitting import fit
    from shardplan.hardware.measured.sample_setup import unknown_systems
    from shardplan.hardware.prices.library import library as load
    from shardplan.hardware.prices.library import library_text
    from shardplan.plans.plan_file import write_atomic
    from shardplan.report.measured import calibration_object, calibration_text
    from shardplan.report.text import json_text
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
        print(json_text(calibration_object(fitted, skipped, unknown)))
        return
    _say_unknown(unknown)
    print(calibration_text(fitted, skipped))


def _samples(
    files: list[Path], gpu: str | None, op: str | None, gpus_per_node: int | None, nics: str | None, system: str | None
) -> list[Sample]:
    """The samples of files of rows and of logs, of which the options say what they do not."""
    from shardplan.hardware.measured.nccl_log import LogFacts, parse_log
    from shardplan.hardware.measured.samples import parse_rows

    facts = LogFacts(system or "", op, gpu, gpus_per_node, (0, 0.0) if nics is None else _nics(nics))
    samples: list[Sample] = []
    logs = 0
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ParseError(f"{line(path)} is no UTF-8 text; legal are rows of JSON and logs of nccl-tests") from None
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
