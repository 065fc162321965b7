"""The commands about placements: place, reduce, audit; and the list of topologies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shardplan.cli.answers import print_answer, print_object, print_text
from shardplan.cli.options import (
    MESH_HELP,
    TOPOLOGY_HELP,
    Algorithm,
    AnyTopology,
    Hostfile,
    Inside,
    Json,
    Megatron,
    NeededTopology,
    Nodes,
    RankOrder,
    Report,
    Svg,
    check_report,
    check_writable,
    read_bytes,
    read_mesh,
    read_topology,
    read_traffic,
)
from shardplan.cli.plans import load_plan
from shardplan.errors import LayoutError, ParseError

if TYPE_CHECKING:
    from shardplan.core.mesh import Mesh
    from shardplan.hardware.placement import Placement
    from shardplan.hardware.topology import Topology
    from shardplan.movement.placing.demand import Programs
    from shardplan.movement.reductions.reduce import Target

NeededMesh = Annotated[str, typer.Option("--mesh", metavar="MESH", help=MESH_HELP)]
TRAFFIC_HELP = "All-reduce bytes a step by axes: data=2GB behind 120ms, tensor=500MB; or data=all_gather:64MB*24."
TrafficText = Annotated[str | None, typer.Option("--traffic", metavar="TRAFFIC", help=TRAFFIC_HELP)]


def place(
    program: Annotated[
        str | None,
        typer.Argument(metavar="[PROGRAM]", help="A program or plan, whose collectives are the traffic."),
    ] = None,
    topology: AnyTopology = None,
    nodes: Nodes = None,
    mesh: Annotated[str | None, typer.Option("--mesh", metavar="MESH", help=MESH_HELP)] = None,
    traffic: TrafficText = None,
    programs: Annotated[str, typer.Option("--programs", help="best, or stock: every collective as one op.")] = "best",
    algorithm: Algorithm = "auto",
    inside: Inside = None,
    top: Annotated[int, typer.Option("--top", help="How many placements to print.")] = 10,
    show_picture: Annotated[bool, typer.Option("--show", help="Draw the best placement.")] = False,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Rank every placement of a mesh on a topology for the traffic of a job."""
    from shardplan.core.program import Program
    from shardplan.movement.placing.place import place as rank
    from shardplan.plans.plan_file import write_atomic
    from shardplan.report.place import ranking_object, ranking_text
    from shardplan.report.placement_picture import text_placement
    from shardplan.report.placement_svg import svg_placement

    check_writable(svg)
    cluster = _needed(topology, nodes)
    subject: Mesh | Program
    notes: tuple[str, ...] = ()
    if program is not None:
        if mesh is not None or traffic is not None:
            raise LayoutError("a program says its own mesh and traffic; give it, or --mesh with --traffic")
        loaded = load_plan(program)
        subject, demands = (loaded if isinstance(loaded, Program) else loaded.program), None
    elif mesh is None or traffic is None:
        raise LayoutError("place needs --mesh with --traffic, such as --traffic data=2GB,tensor=500MB, or a program")
    else:
        subject, (demands, notes) = read_mesh("--mesh", mesh), read_traffic(traffic)
    if top < 1:
        raise LayoutError(f"--top {top}: at least 1 placement is printed")
    kind = cast("Programs", programs)
    found = rank(subject, cluster, demands, programs=kind, algorithm=algorithm, inside=_parse_inside(inside))
    if svg is not None:
        write_atomic(svg, svg_placement(found[0].placement, demands).encode())
    if as_json:
        print_object(ranking_object(found, top) | {"traffic": list(notes)})
        return
    print_text(ranking_text(found, top, notes))
    if show_picture:
        print(f"\n{text_placement(found[0].placement, demands)}")


def reduce(
    axes: Annotated[str, typer.Argument(metavar="AXES", help="Axes to reduce over: data, or data,tensor.")],
    topology: NeededTopology,
    mesh: NeededMesh,
    nbytes: Annotated[str, typer.Option("--bytes", metavar="BYTES", help="Payload of every device: 64MiB, 2GB.")],
    nodes: Nodes = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", metavar="MATRIX", help="data=[2,4],tensor=[1,2]; by default the best for this."),
    ] = None,
    hostfile: Hostfile = None,
    rank_order: RankOrder = None,
    megatron: Megatron = None,
    target: Annotated[str, typer.Option("--target", help="replicated, sharded or root.")] = "replicated",
    algorithm: Algorithm = "auto",
    subsets: Annotated[bool, typer.Option("--subsets", help="Collectives over any set of levels.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List every valid program up to --limit instructions.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="Most instructions of a program of --all; 0 for any.")] = 5,
    top: Annotated[int, typer.Option("--top", help="How many programs of --all to print.")] = 10,
    export: Annotated[
        str | None, typer.Option("--export", metavar="FORMAT", help="Print as torch, jax, mpi or msccl code instead.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a plan file.")] = None,
    as_json: Json = False,
) -> None:
    """Find the best program that reduces over some axes of a placement."""
    from shardplan.hardware.level_factors import factors
    from shardplan.movement.placing.demand import stock_seconds
    from shardplan.movement.placing.traffic import Demand
    from shardplan.movement.reductions.enumeration import reductions
    from shardplan.movement.reductions.reduce import instructions_text, stock_op
    from shardplan.movement.reductions.reduce import reduce as best
    from shardplan.report import place as told
    from shardplan.report.text import json_text

    check_writable(out)
    amount = read_bytes("--bytes", nbytes)
    names = tuple(a.strip() for a in axes.split(","))
    if every and (export is not None or out is not None or target != "replicated" or subsets):
        raise LayoutError(
            "--all lists all-reduces over contiguous levels; --export, --out, --target and --subsets do not go with it"
        )
    if hostfile is not None or rank_order is not None or megatron is not None:
        if placement is not None:
            raise LayoutError("--placement says where, and so does a launch; give one of them")
        launch = (topology, mesh, nodes, hostfile, rank_order, megatron)
        chosen, origin = _launched(launch, export is not None)
    else:
        chosen = _placement(placement, read_mesh("--mesh", mesh), _needed(topology, nodes), names, amount, algorithm)
        origin = "as asked" if placement is not None else "the best for this; --placement says another"
    if every:
        if top < 1:
            raise LayoutError(f"--top {top}: at least 1 program is printed")
        found = reductions(chosen, names, amount, limit or None, top=None if limit else top, algorithm=algorithm)
        print_answer(as_json, lambda: told.reductions_object(found, top), lambda: told.reductions_text(found, top))
        return
    wanted = cast("Target", target)
    plan = best(chosen, names, amount, target=wanted, algorithm=algorithm, subsets=subsets)
    if out is not None:
        plan.save(out)
    if export is not None:
        from shardplan.interop.exports.export import export_text

        code = export_text(export, plan.program, chosen)
        print(json_text({"export": export, "code": code}) if as_json else code)
        return
    paper = instructions_text(chosen, names, amount, target=wanted, algorithm=algorithm, subsets=subsets)
    one = Demand(names, stock_op(wanted), amount)
    stock = stock_seconds(factors(chosen, names), chosen.topology, one, algorithm)
    print_answer(
        as_json,
        lambda: told.reduction_object(plan, paper, stock, chosen),
        lambda: told.reduction_text(plan, paper, stock, chosen, origin),
    )


def audit(
    topology: NeededTopology,
    mesh: Annotated[str | None, typer.Option("--mesh", metavar="MESH", help=MESH_HELP)] = None,
    nodes: Nodes = None,
    hostfile: Hostfile = None,
    rank_order: RankOrder = None,
    megatron: Megatron = None,
    switches: Annotated[
        Path | None, typer.Option("--topology-conf", metavar="FILE", help="Slurm's: where the hosts stand.")
    ] = None,
    traffic: TrafficText = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="As plan takes it: its job's traffic.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="TEXT|FILE", help="'tp=8 pp=4', or Megatron's or torchtitan's arguments."),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences of a training step.")] = None,
    inside: Inside = None,
    algorithm: Algorithm = "auto",
    fail_above: Annotated[
        float | None, typer.Option("--fail-above", metavar="RATIO", help="Exit 1 if the launch takes longer than that.")
    ] = None,
    framework: Annotated[
        str, typer.Option("--fix", help="Whose: torch, jax, megatron, torchrun, slurm, mpi, nccl-tests or all.")
    ] = "all",
    show_picture: Annotated[bool, typer.Option("--show", help="Draw the launch.")] = False,
    svg: Svg = None,
    report: Report = None,
    as_json: Json = False,
) -> int:
    """Say how a launch that exists is placed, what that costs, and how to do better."""
    from shardplan.cli.audit import audit_command
    from shardplan.plans.plan_file import write_atomic

    check_writable(svg, report)
    if report is not None:
        check_report()
    found = audit_command(
        topology,
        mesh,
        nodes,
        hostfile,
        rank_order,
        megatron,
        traffic,
        fail_above,
        framework,
        show_picture,
        svg is not None or report is not None,
        _parse_inside(inside),
        algorithm,
        model,
        strategy,
        batch,
        switches,
    )
    if svg is not None:
        write_atomic(svg, found.svg.encode())
    if report is not None:
        from shardplan.report.page.other_pages import audit_page

        write_atomic(report, audit_page(f"audit of {mesh or model} on {topology}", found.text, found.svg).encode())
    print_answer(as_json, lambda: found.object, lambda: found.text)
    return found.status


def _needed(name: str | None, nodes: int | None) -> Topology:
    """The topology that a command cannot do without."""
    found = read_topology(name, nodes)
    if found is None:
        raise LayoutError("--topology is needed: a preset, a .toml file or NCCL's .xml file")
    return found


def _parse_inside(text: str | None) -> dict[str, str] | None:
    """The level of each axis that is to stay inside one."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(sep and name.strip() and level.strip() for name, sep, level in pairs):
        raise LayoutError(f"--inside {text!r}: legal is AXIS=LEVEL, such as tensor=gpu, several with commas between")
    return {name.strip(): level.strip() for name, _, level in pairs}


def _launched(
    launch: tuple[str, str, int | None, Path | None, str | None, str | None], exported: bool
) -> tuple[Placement, str]:
    """The placement that a launch is, and in words where it comes from; the texts are those of `read_launch`."""
    from shardplan.cli.audit import read_launch
    from shardplan.hardware.placement import Placement
    from shardplan.launches.verdict import analyse

    read = read_launch(*launch)
    found = analyse(read)
    if found.matrix is None:
        raise LayoutError(f"the launch is no placement: {found.reason}; audit says more, --placement chooses one")
    placed = Placement(read.mesh, read.topology, found.matrix, found.order)
    if exported and list(read.mesh.devices) != placed.device_mesh().reshape(-1).tolist():
        raise LayoutError("an export has the ranks of --placement, host by host; those of this launch are others")
    return placed, "that of the launch" + (", its members in a better order" if found.felt else "")


def _placement(
    text: str | None, mesh: Mesh, topology: Topology, axes: tuple[str, ...], nbytes: float, algorithm: str
) -> Placement:
    """The placement of a text; without one the best for an all-reduce over the axes."""
    from shardplan.hardware.placement import Placement
    from shardplan.movement.placing.place import place as rank

    if text is None:
        return rank(mesh, topology, {axes: nbytes}, algorithm=algorithm)[0].placement
    try:
        return Placement.parse(f"mesh {mesh}\nplacement {text}\n{topology}")
    except ParseError as error:
        reason = str(error).split("\n", 1)[0]
        raise ParseError(f"--placement {text!r}: {reason}; legal is such as data=[2,4], tensor=[1,2]") from None


def topologies(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help=f"Print its text. {TOPOLOGY_HELP}")] = None,
    nodes: Nodes = None,
    as_json: Json = False,
) -> None:
    """List the topologies that ship with shardplan and those that installed packages bring, or print one."""
    from shardplan.hardware.topology import Topology
    from shardplan.hardware.topology_file import outside_topologies, presets
    from shardplan.report.place import topologies_object, topologies_text

    one = read_topology(name, nodes)
    found = [Topology.load(every) for every in (*presets(), *outside_topologies())] if one is None else [one]
    if as_json:
        print_object(topologies_object(found))
    else:
        print(topologies_text(found) if one is None else str(one).rstrip("\n"))
