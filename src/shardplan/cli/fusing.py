"""The command that fuses a plan, a program or a model's programs where that pays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardplan.cli.answers import print_answer
from shardplan.cli.options import Json, Nodes, PlansTopology, check_writable, read_topology
from shardplan.cli.plans import load_plan
from shardplan.errors import LayoutError, ShardplanError, excerpt

if TYPE_CHECKING:
    from shardplan.strategy.partition.job import Job

FILES = (".json", ".txt", ".program")


def fuse(
    what: Annotated[
        str, typer.Argument(metavar="MODEL|PLAN|PROGRAM", help="A preset of a model, a plan file or a program file.")
    ],
    topology: PlansTopology = None,
    nodes: Nodes = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="STRATEGY", help="Of a model how it runs, such as 'tensor=8 data=2'."),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Of a model sequences of a step.")] = None,
    cache: Annotated[
        int | None, typer.Option("--cache", min=1, help="Of a model that serves: one token behind so many.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="Of a model fp32, bf16 or fp16.")] = "bf16",
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Constants of the transport, by default the topology's."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's constants first, and write them to that file.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the program.")] = None,
    as_json: Json = False,
) -> None:
    """Fuse collectives with the computations beside them where that pays, and say for each why or why not."""
    from shardplan.fused.deciding.fuse import fuse as fused
    from shardplan.plans.plan import Plan
    from shardplan.plans.plan_file import write_atomic
    from shardplan.report.fusion import fusion_text

    check_writable(out, calibration if measure else None)
    where: Any = read_topology(topology, nodes)
    subject: Any
    if Path(what).suffix in FILES or Path(what).exists():
        if asked := [n for n, v in (("strategy", strategy), ("batch", batch), ("cache", cache)) if v is not None]:
            raise ShardplanError(f"--{asked[0]} is of a model; legal with the file {excerpt(what)} are the others")
        read = load_plan(what)
        where = read.certificate.where if where is None and isinstance(read, Plan) else where
        subject = read.program if isinstance(read, Plan) else read
    else:
        if out is not None:
            raise ShardplanError("--out writes one program; legal is a plan or a program file with it")
        subject = _job(what, strategy, batch, cache, precision, where)
    if where is None:
        raise LayoutError("no topology is known to fuse for: give --on, as --on dgx-h100 --nodes 2")
    if measure:
        from shardplan.fused.deciding.calibrate import calibrate

        if calibration is None:
            raise ShardplanError("--measure writes the file of --calibration; legal is --measure with it")
        write_atomic(calibration, str(calibrate()).encode())
    found = fused(subject, where, calibration)
    if out is not None:
        write_atomic(out, f"{found.program}\n".encode())
    print_answer(as_json, found.to_dict, lambda: fusion_text(found))


def _job(what: str, strategy: str | None, batch: int | None, cache: int | None, precision: str, where: Any) -> Job:
    """The programs of a model under a strategy."""
    from shardplan.strategy.model import Model
    from shardplan.strategy.partition.partition import partition
    from shardplan.strategy.strategy_text import parse_strategy

    if strategy is None:
        raise ShardplanError(
            f"fuse of the model {excerpt(what)}: no --strategy; legal is one, such as 'tensor=8 data=2'"
        )
    fields: dict[str, Any] = {"precision": precision}
    known: dict[str, Any] = {} if batch is None else {"global_batch": batch}
    if cache is not None:
        fields |= {"training": False, "seq": 1, "cache": cache, "batch": batch or 1}
        known |= {"microbatch": batch or 1, "global_batch": batch or 1}
    return partition(Model.load(what, **fields), parse_strategy(strategy, **known), where)
