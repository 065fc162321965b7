"""The commands about plans: redistribute, check, show, run, simulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardplan.cli.answers import print_answer, print_object, print_text
from shardplan.cli.options import (
    MESH_HELP,
    TOPOLOGY,
    Algorithm,
    AnyTopology,
    Json,
    Nodes,
    PlansTopology,
    Report,
    Svg,
    check_report,
    check_writable,
    read_bytes,
    read_mesh,
    read_topology,
    read_types,
)
from shardplan.cli.plan_folder import check_handed, run_handed, show_handed
from shardplan.cli.statuses import FAILED, complain
from shardplan.errors import LayoutError, ParseError, line

if TYPE_CHECKING:
    from shardplan.core.program import Program
    from shardplan.core.tensor import TensorType
    from shardplan.hardware.topology import Topology
    from shardplan.plans.plan import Plan


def redistribute(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A type, as f32[64@data, 48@tensor]; several with ';'.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A type of the same dtype and shape.")],
    mesh: Annotated[str, typer.Option("--mesh", metavar="MESH", help=MESH_HELP)],
    dst_mesh: Annotated[
        str | None, typer.Option("--dst-mesh", metavar="MESH", help="The destination's mesh, if it is another.")
    ] = None,
    topology: AnyTopology = None,
    nodes: Nodes = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", metavar="BYTES", help="Workspace of a device: 4GB, 512 MiB.")
    ] = None,
    portable: Annotated[bool, typer.Option("--portable", help="MPI-style collectives only.")] = False,
    show_picture: Annotated[
        bool, typer.Option("--show", help="Draw what each device holds before and after each step.")
    ] = False,
    svg: Svg = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a plan file.")] = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Plan how arrays get from one sharding to another."""
    from shardplan.movement.redistribute import redistribute as plan_move
    from shardplan.report.text import plan_object, shown

    check_writable(out, svg, report)
    if report is not None:
        check_report()
    sources = read_types(source, read_mesh("--mesh", mesh))
    targets = read_types(
        destination, read_mesh("--mesh", mesh) if dst_mesh is None else read_mesh("--dst-mesh", dst_mesh)
    )
    single = len(sources) == len(targets) == 1
    plan = plan_move(
        sources[0] if single else sources,
        targets[0] if single else targets,
        topology=read_topology(topology, nodes),
        memory_limit=None if memory_limit is None else int(read_bytes("--memory-limit", memory_limit)),
        portable=portable,
    )
    if out is not None:
        plan.save(out)
    if report is not None:
        from shardplan.plans.plan_file import write_atomic
        from shardplan.report.page.other_pages import movement_page

        write_atomic(report, movement_page(plan, f"{source.strip()} to {destination.strip()}").encode())
    if svg is not None:
        _write_svg(svg, plan.program, f"{source.strip()} to {destination.strip()}", plan)
    print_answer(as_json, lambda: plan_object(plan), lambda: shown(plan) if show_picture else str(plan))


def check(
    path: Annotated[Path, typer.Argument(metavar="PLAN|DIR", help="A plan file, or what plan --out wrote.")],
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Of what plan --out wrote: run scaled down to so many.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a plan's certificate without the planner, run it on the reference, and compare every shard.

    What plan --out wrote is run scaled down: the same strategy on small sizes, beside the whole model.
    """
    from shardplan.execution.verify import verify
    from shardplan.launches.handover.handed_plan import find_handed
    from shardplan.plans.plan import Plan
    from shardplan.report.text import check_object, check_text

    if (handed := find_handed(path)) is not None:
        check_handed(path, handed, devices, as_json)
        return
    if devices is not None:
        raise LayoutError(
            "--devices belongs to a folder that plan --out wrote; a plan file says itself how many it has"
        )
    plan = Plan.load(path)
    verdict = verify(plan)
    print_answer(as_json, lambda: check_object(path, plan, verdict), lambda: check_text(plan, verdict))


def show(
    what: Annotated[
        str,
        typer.Argument(metavar="PLAN|PROGRAM|TYPE|DIR", help="A plan, a program, a type, or what plan --out wrote."),
    ],
    mesh: Annotated[str | None, typer.Option("--mesh", metavar="MESH", help=f"A type's mesh. {MESH_HELP}")] = None,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Print a plan, a program or a type, with what each device holds before and after each step."""
    from shardplan.core.tensor import TensorType
    from shardplan.launches.handover.handed_plan import find_handed
    from shardplan.plans.plan import Plan
    from shardplan.report.text import plan_object, program_object, shown, type_object

    check_writable(svg)
    if (handed := find_handed(what)) is not None:
        if mesh is not None or svg is not None:
            raise LayoutError(
                "--mesh and --svg belong to types, plans and programs; a folder of plan --out has a report"
            )
        show_handed(Path(what), handed, as_json)
        return
    subject: Plan | Program | TensorType
    if "[" in what and not Path(what).exists():
        if mesh is None:
            raise LayoutError(f"a type needs a mesh: shardplan show {what!r} --mesh data=4,tensor=2")
        subject = TensorType.parse(what, read_mesh("--mesh", mesh))
    else:
        if mesh is not None:
            raise LayoutError("--mesh belongs to a type; a plan or a program says itself what its mesh is")
        subject = load_plan(what)
    program = subject.program if isinstance(subject, Plan) else subject
    if svg is not None:
        _write_svg(svg, program, what if isinstance(subject, TensorType) else Path(what).name, subject)
    if not as_json:
        print_text(shown(subject))
    elif isinstance(program, TensorType):
        print_object(type_object(program))
    else:
        print_object((plan_object(subject) if isinstance(subject, Plan) else {}) | program_object(program))


def run(
    what: Annotated[
        str, typer.Argument(metavar="PLAN|PROGRAM|DIR", help="A plan file, a program file, or what plan --out wrote.")
    ],
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", help="reference, by default, or torch, jax, mpi under their launcher; a DIR is torch."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that any wait may take.")] = 300.0,
    topology: Annotated[
        str | None,
        typer.Option(*TOPOLOGY, metavar="NAME|FILE", help="What the ranks run on; by default it is measured."),
    ] = None,
    nodes: Nodes = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write the predicted and the measured timeline, for Perfetto."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a plan or a program on index data, and print the checksum of every output.

    Under a launcher every process compares its shards with the reference's, and the one with the first device prints
    what was predicted for these links beside what was measured. What plan --out wrote runs scaled down under torchrun.
    """
    from shardplan.execution.run import BACKENDS
    from shardplan.execution.verify import run_index_data
    from shardplan.launches.handover.handed_plan import find_handed
    from shardplan.plans.plan import Plan
    from shardplan.report.text import run_object, run_text

    if (handed := find_handed(what)) is not None:
        if backend not in (None, "torch"):
            raise LayoutError(f"--backend {backend} of a plan that was handed over; legal is torch, under torchrun")
        check_writable(trace)
        run_handed(Path(what), handed, timeout, read_topology(topology, nodes), trace, as_json)
        return
    backend = backend or "reference"
    if backend not in BACKENDS:
        raise LayoutError(f"unknown backend {backend!r}; legal are {', '.join(BACKENDS)}")
    if trace is not None and backend == "reference":
        raise LayoutError(
            "--trace writes what a real run took; the reference has no time: give --backend torch, jax or mpi"
        )
    if topology is not None and backend == "reference":
        raise LayoutError("--topology predicts what a real run takes; give --backend torch, jax or mpi")
    check_writable(trace)
    cluster = read_topology(topology, nodes)
    subject = load_plan(what)
    program = subject.program if isinstance(subject, Plan) else subject
    if backend != "reference":
        _run_launched(subject, backend, timeout, cluster, trace, as_json)
        return
    sums, ok = run_index_data(program)
    found = run_object(program, backend, sums, ok)
    print_answer(as_json, lambda: found, lambda: run_text(found))
    if ok is False:  # the answer says so, and stays the one object
        raise typer.Exit(complain(f"{line(what)}: an output that was only moved differs from its input", FAILED))


def _run_launched(
    subject: Plan | Program, backend: str, timeout: float, cluster: Topology | None, trace: Path | None, as_json: bool
) -> None:
    """Run as one process of a launcher; the one with the first device prints."""
    from shardplan.execution.measure import measured_links
    from shardplan.execution.trial import join_launcher, trial
    from shardplan.plans.plan import Plan
    from shardplan.report.fold import fold_lines
    from shardplan.report.text import run_object, run_text
    from shardplan.report.timeline import comparison_text, links_text, timeline_text
    from shardplan.simulation.predict import predict
    from shardplan.simulation.trace import save_traces

    program = subject.program if isinstance(subject, Plan) else subject
    with join_launcher(backend):
        found = trial(program, backend, timeout)
        links = measured_links(program.devices, backend, timeout) if cluster is None else cluster
    if not found.first:
        return
    where = subject.certificate.where if isinstance(subject, Plan) and cluster is not None else None
    if links is None:
        predicted = None
    else:  # a plan's placement says where on the cluster its devices are
        predicted = predict(program, where if getattr(where, "topology", None) == links else links)
    if trace is not None:
        save_traces(trace, [found.timeline] if predicted is None else [predicted, found.timeline])
    told = run_object(program, backend, found.sums, True) | {
        "seconds": found.timeline.seconds,
        "predicted_seconds": None if predicted is None else predicted.seconds,
        "predicted_on": None if links is None else str(links),
    }
    if as_json:
        print_object(told)
        return
    print(fold_lines(run_text(told)).rpartition("\n")[0])
    print(f"ok: every shard of this process ({found.shards}) equals the reference's\n")
    if predicted is None or links is None:
        print("one device has no links to predict: --topology gives the time of its kernels")
        print_text(timeline_text(found.timeline))
        return
    told_here = f"predicted on {links_text(links)}\n{comparison_text(predicted, found.timeline)}"
    print_text(told_here)


def load_plan(what: str) -> Plan | Program:
    """Return the plan of a plan file (JSON), or the program of a program file (text)."""
    from shardplan.core.decoding import read_text
    from shardplan.core.program import Program
    from shardplan.plans.plan import Plan

    path = Path(what)
    text = read_text(path, legal="a plan file or a program")
    if text.lstrip().startswith("program"):
        try:
            return Program.parse(text)
        except ParseError as error:
            raise ParseError(f"{line(what)}: {error}") from None
    return Plan.load(path)


def _write_svg(path: Path, program: Program | TensorType, title: str, subject: Plan | Program | TensorType) -> None:
    """Write the picture; below its title stand the bytes of a plan."""
    from shardplan.hardware.units import format_bytes
    from shardplan.plans.plan import Plan
    from shardplan.plans.plan_file import write_atomic
    from shardplan.report.svg import svg_picture

    note = ""
    if isinstance(subject, Plan):
        c = subject.certificate
        received, least = max(c.received_bytes, default=0), max(c.lower_bound_bytes, default=0)
        note = (
            f"{format_bytes(received)} received at the worst device, lower bound {format_bytes(least)}; peak "
            f"{format_bytes(c.peak_bytes)}, bound {format_bytes(c.bound_bytes)}"
        )
    write_atomic(path, svg_picture(program, title, note).encode())


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
    from shardplan.report.timeline import timeline_object, timeline_text
    from shardplan.simulation.events import simulate as simulate_program

    check_writable(out)
    subject = load_plan(what)
    where = read_topology(topology, nodes)
    if where is None and isinstance(subject, Plan):
        where = subject.certificate.where
    if where is None:
        raise LayoutError("no topology is known to simulate on: give --topology, as --topology dgx-h100 --nodes 2")
    found = simulate_program(subject.program if isinstance(subject, Plan) else subject, where, algorithm)
    if out is not None:
        found.save(out)
    print_answer(as_json, lambda: timeline_object(found), lambda: timeline_text(found))
