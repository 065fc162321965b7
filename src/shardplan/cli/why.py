"""The command that says why a plan moves what it moves, and why a measured step takes another time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardplan.cli.options import Json
from shardplan.errors import ParseError, ShardplanError, line


def why(
    what: Annotated[Path, typer.Argument(metavar="PLAN", help="What plan --out wrote: the folder, or its plan.json.")],
    where: Annotated[
        list[str] | None, typer.Argument(metavar="WHERE", help="Words that a movement is told with: stage 0 B, loss.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option("--measured", metavar="TRACE", help="PyTorch profiler traces, a rank each: why they take longer."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of the traces the profiler's step.")] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Movements told in full; by default 8.")] = None,
    as_json: Json = False,
) -> None:
    """Say of every movement who asks for it, what it costs and what removes it; or why a measured step is longer."""
    from shardplan.launches.handover.handed_job import job_of
    from shardplan.launches.handover.handed_plan import find_handed
    from shardplan.report.text import json_text
    from shardplan.report.why import SHOWN, gap_text, why_object, why_text
    from shardplan.simulation.simulate import simulate
    from shardplan.simulation.why import why as movements_of

    plan = find_handed(what)
    if plan is None:
        raise ParseError(f"{line(what)} is no folder or plan.json that plan --out wrote")
    if step is not None and not measured:
        raise ShardplanError("why: --step is of traces; legal with it is --measured")
    if measured and where:
        raise ShardplanError(f"why: --measured with {line(' '.join(where))}; legal is one of them")
    if top is not None and (measured or as_json):
        other = "--measured, which tells no movement" if measured else "--json, which has every movement in full"
        raise ShardplanError(f"why: --top {top} with {other}; legal is one of them")
    job, topology = job_of(plan)
    if measured:
        from shardplan.simulation.jobs.kineto import read_kineto
        from shardplan.simulation.step_gap import step_gap

        gap = step_gap(simulate(job, topology), read_kineto(measured, step))
        print(json_text(gap.to_dict()) if as_json else gap_text(gap))
        return
    found = movements_of(job, topology).select(" ".join(where or ()))
    print(json_text(why_object(found)) if as_json else why_text(found, top or SHOWN))
