"""The command that simulates a plan or a program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardplan.cli.options import Algorithm, Json, Nodes, PlansTopology, check_writable, read_topology
from shardplan.cli.plans import load_plan
from shardplan.errors import LayoutError


def simulate(
    what: Annotated[str, typer.Argument(metavar="PLAN|PROGRAM", help="A plan file or a program file.")],
    topology: PlansTopology = None,
    nodes: Nodes = None,
    algorithm: Algorithm = "auto",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the timeline, for Perfetto.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a plan or a program event by event, and print its timeline."""
    from shardplan.plans.plan import Plan
    from shardplan.report.fold import fold_lines
    from shardplan.report.text import json_text
    from shardplan.report.timeline import timeline_object, timeline_text
    from shardplan.simulation.events import simulate as simulated

    check_writable(out)
    subject = load_plan(what)
    where = read_topology(topology, nodes)
    if where is None and isinstance(subject, Plan):
        where = subject.certificate.where
    if where is None:
        raise LayoutError("no topology is known to simulate on: give --topology, as --topology dgx-h100 --nodes 2")
    found = simulated(subject.program if isinstance(subject, Plan) else subject, where, algorithm)
    if out is not None:
        found.save(out)
    print(json_text(timeline_object(found)) if as_json else fold_lines(timeline_text(found)))
