"""The command that says why a plan moves what it moves, and why a measured step takes another time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardplan.cli.answers import print_answer
from shardplan.cli.options import AnyTopology, Json, Nodes, check_writable, read_topology
from shardplan.errors import ParseError, ShardplanError, excerpt, line

if TYPE_CHECKING:
    from shardplan.hardware.topology import Topology


def why(
    what: Annotated[
        str, typer.Argument(metavar="PLAN|PROGRAM", help="What plan --out wrote; a .pt2, .onnx, .hlo; module:function.")
    ],
    where: Annotated[
        list[str] | None, typer.Argument(metavar="WHERE", help="Words that a movement is told with: stage 0 B, loss.")
    ] = None,
    topology: AnyTopology = None,
    nodes: Nodes = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="MESH", help="Of a program: axes and sizes, x=4,y=2.")
    ] = None,
    annotate: Annotated[
        list[str] | None,
        typer.Option("--annotate", metavar="NAME=TYPE", help="How an input or a result lies: 'a=f32[16@x, 16]'."),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option("--measured", metavar="TRACE", help="PyTorch profiler traces, a rank each: why they take longer."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of the traces the profiler's step.")] = None,
    rows: Annotated[
        Path | None,
        typer.Option("--rows", metavar="FILE", help="Of traces: add the step to these rows, for calibrate --steps."),
    ] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Movements told in full; by default 8.")] = None,
    as_json: Json = False,
) -> None:
    """Say of every movement who asks for it, what it costs and what removes it; or why a measured step is longer."""
    from shardplan.interop.importers.source_text import is_source
    from shardplan.launches.handover.handed_job import job_of
    from shardplan.launches.handover.handed_plan import find_handed
    from shardplan.launches.handover.measured_row import add_row, row_told
    from shardplan.report.why import SHOWN, gap_text, why_object, why_text
    from shardplan.simulation.simulate import simulate
    from shardplan.simulation.why import why as movements_of

    for name, given in (("--step", step), ("--rows", rows)):
        if given is not None and not measured:
            raise ShardplanError(f"why: {name} is of traces; legal with it is --measured")
    check_writable(rows)
    if measured and where:
        raise ShardplanError(f"why: --measured with {line(' '.join(where))}; legal is one of them")
    if top is not None and (measured or as_json):
        other = "--measured, which tells no movement" if measured else "--json, which has every movement in full"
        raise ShardplanError(f"why: --top {top} with {other}; legal is one of them")
    words = " ".join(where or ())
    if is_source(what):
        if measured:
            raise ShardplanError(f"why: --measured with {line(what)}; legal is what plan --out wrote")
        _why_program(what, words, read_topology(topology, nodes), mesh, annotate or [], top or SHOWN, as_json)
        return
    for name, given in (("--on", topology), ("--nodes", nodes), ("--mesh", mesh), ("--annotate", annotate)):
        if given:
            raise ShardplanError(f"why: {name} with {line(what)}; legal is a program of one's own with it")
    plan = find_handed(Path(what))
    if plan is None:
        raise ParseError(f"{line(what)} is no folder or plan.json that plan --out wrote, and no program")
    job, machine = job_of(plan)
    if measured:
        from shardplan.simulation.jobs.kineto import read_kineto
        from shardplan.simulation.step_gap import step_gap

        gap = step_gap(simulate(job, machine), read_kineto(measured, step))
        added = None if rows is None else add_row(rows, plan, gap.measured_seconds)
        told = [] if added is None or rows is None else [row_told(added, rows, plan.topology.name)]
        print_answer(
            as_json,
            lambda: gap.to_dict() | ({} if added is None else {"row": added.id}),
            lambda: "\n".join([gap_text(gap), *told]),
        )
        return
    found = movements_of(job, machine).select(words)
    print_answer(as_json, lambda: why_object(found), lambda: why_text(found, top or SHOWN))


def _why_program(
    what: str, words: str, where: Topology | None, mesh: str | None, annotate: Sequence[str], top: int, as_json: bool
) -> None:
    """Say it of a program with annotations, or of a module that XLA compiled."""
    from shardplan.interop.hlo_trace import HloTrace, hlo_movements, hlo_why_text
    from shardplan.interop.importers.source_text import load_source
    from shardplan.report.why import why_object, why_text
    from shardplan.simulation.why import why as movements_of

    source = load_source(what)
    if isinstance(source, HloTrace):
        if words or mesh or annotate:
            raise ShardplanError(f"why: words, --mesh or --annotate with {line(what)}, a trace; legal is --on")
        if where is None:
            raise ShardplanError(f"why: {line(what)} is a trace, and takes as long as its links; legal is with --on")
        told = hlo_movements(source, where)
        print_answer(as_json, lambda: {"movements": [m.to_dict() for m in told]}, lambda: hlo_why_text(told, top))
        return
    said: dict[str, str] = {}
    for one in annotate:
        name, equals, text = one.partition("=")
        if not equals or name.strip() in said:
            raise ParseError(f"why: --annotate {excerpt(one)}; legal is NAME=TYPE, each name once: 'a=f32[16@x, 16]'")
        said[name.strip()] = text.strip()
    found = movements_of(source, where, said, mesh).select(words)
    print_answer(as_json, lambda: why_object(found), lambda: why_text(found, top))
