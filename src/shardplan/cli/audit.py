"""The command `audit`: what the command line says of a launch, read from texts and files, and audited."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardplan.cli.options import read_traffic
from shardplan.core.decoding import read_text
from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, ParseError, TopologyError, line
from shardplan.hardware.topology import Topology
from shardplan.launches.arguments import read_arguments
from shardplan.launches.audit import audit
from shardplan.launches.host_order import order_by_name, order_by_switch, parse_switches, read_allocation, stand_hosts
from shardplan.launches.hostfile import Hosts, host_level, launch_of, parse_hostfile, parse_rankfile
from shardplan.launches.job_traffic import JobTraffic, job_traffic, with_axes
from shardplan.launches.launch import Launch
from shardplan.launches.megatron import DEFAULT, MAPPING, fastest_first, order_ranks
from shardplan.movement.placing.placement_price import SAME
from shardplan.report.audit import audit_object, audit_text
from shardplan.report.placement_picture import text_placement
from shardplan.report.placement_svg import svg_placement
from shardplan.strategy.asked_model import parse_model
from shardplan.strategy.partition.partition import partition
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.strategy_text import parse_strategy, strategy_text

_DIGITS = 10  # of a device's number, and more than any has
_SLURM = "slurm"  # for a hostfile: that of the job that this runs in
_WAYS = ("block", "cyclic")
_NUMBERS = "--rank-order"  # the source of hosts that no file names


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    """What the command prints and exits with: text, JSON object, the picture as SVG where asked for, exit status."""

    text: str
    object: dict[str, Any]
    svg: str
    status: int


def audit_command(
    topology: str,
    mesh: str | None = None,
    nodes: int | None = None,
    hostfile: Path | str | None = None,
    rank_order: Path | str | None = None,
    megatron: str | None = None,
    traffic: str | None = None,
    fail_above: float | None = None,
    framework: str = "all",
    show: bool = False,
    svg: bool = False,
    inside: Mapping[str, str] | None = None,
    algorithm: str = "auto",
    model: str | None = None,
    strategy: str | None = None,
    batch: int | None = None,
    switches: Path | str | None = None,
) -> AuditAnswer:
    """Return the answer to what the command line asks, in its texts.

    Args:
        topology: A preset's name or a file.
        mesh: Axes and sizes; `devices=` says which rank has which coordinates, row-major without it. Of a job by
            default the strategy's axes, the pipeline outermost.
        nodes: Size of the level called node; without it as many as the hostfile names, else the topology's own.
        hostfile: File of hosts in the order of ranks, see `launches.hostfile`, a list as Slurm writes it, `h[00-03]`,
            or `slurm`: the allocation that this runs in. They are units in the order of their names.
        rank_order: `block` or `cyclic` over the hosts as listed; or the device of every rank as numbers with commas
            between them, or a file: a rankfile or a hostfile, and then `hostfile` has the hosts in the order of units.
        megatron: An order string such as `tp-cp-ep-dp-pp`, which numbers the ranks of the mesh.
        traffic: What a step communicates, `data=2GB behind 120ms,tensor=500MB`; sizes are a step's totals unless they
            have a count (`usual_calls`).
        fail_above: Ratio of seconds to those of the best matrix above which the status is 1.
        framework: Whose fix to print.
        show: Whether the text ends with the picture.
        svg: Whether to draw the picture as SVG.
        inside: By axis the level within one unit of which it must stay.
        algorithm: `auto`, or an algorithm of the topology's library for all traffic.
        model: A model as `plan` takes it, whose job's traffic it is.
        strategy: The job's: `tensor=8 pipeline=4`, or arguments of Megatron-LM or torchtitan, or a file with either.
        batch: Sequences of a step, where the strategy says none.
        switches: Slurm's `topology.conf`: hosts are units leaf switch by leaf switch.

    Raises:
        ParseError: A file cannot be read or a text is malformed.
        TopologyError: What is given does not fit together.
        LayoutError: An option is unknown or lacks another, or no placement keeps axes where they are to stay.
    """
    if fail_above is not None and traffic is None and model is None:
        raise LayoutError("--fail-above compares seconds, which need --traffic, such as data=2GB,tensor=500MB")
    if fail_above is not None and not 1 <= fail_above < math.inf:
        raise LayoutError(f"--fail-above {fail_above:g} is below 1, the ratio of the best matrix; legal is 1 or more")
    job = None if model is None and strategy is None else _read_job(topology, nodes, hostfile, model, strategy, batch)
    demands, notes = None, ()
    if job is not None:
        if traffic is not None:
            raise LayoutError("a job says its own traffic; give --traffic, or --model with --strategy")
        mesh, megatron = _mesh_of_job(job, mesh, megatron)
        notes = job.notes
    elif mesh is None:
        raise LayoutError("audit needs --mesh, such as data=4,tensor=8, or --model with --strategy")
    launch = read_launch(topology, mesh, nodes, hostfile, rank_order, megatron, switches)
    if job is not None:
        demands = with_axes(job.traffic, launch.mesh).demands
    elif traffic is not None:
        demands, notes = read_traffic(traffic)
    found = audit(launch, traffic=demands, inside=inside, algorithm=algorithm)
    text = audit_text(found, framework, notes)
    if show:
        text += "\n\n" + text_placement(launch, demands)
    ratio = found.ratio if found.ratio is not None and found.slower else 1.0
    status = int(fail_above is not None and ratio > fail_above * (1 + SAME))
    if status:
        text += f"\nabove    the ratio {ratio:.4g} is above --fail-above {fail_above:g}"
    picture = svg_placement(launch, demands) if svg else ""
    more = {"job": list(notes), "fail_above": fail_above, "status": status}
    return AuditAnswer(text, audit_object(found) | more, picture, status)


@dataclass(frozen=True, slots=True)
class _AuditedJob:
    """A job's traffic, the order of its ranks as Megatron says it, and lines that say what was read."""

    traffic: JobTraffic
    order: str
    notes: tuple[str, ...]


def _read_job(
    topology: str, nodes: int | None, hostfile: Path | str | None, model: str | None, strategy: str | None,
    batch: int | None,
) -> _AuditedJob:  # fmt: skip
    """The job that a model and a strategy, or arguments, make on the cluster."""
    if model is None or strategy is None:
        raise LayoutError("a job is --model, such as llama3-70b, with --strategy, such as 'tensor=8 pipeline=4'")
    hosts, _ = _read_hosts(hostfile)
    cluster = _with_nodes(Topology.load(topology), nodes, hosts)
    asked = parse_model(model)
    text = read_text(strategy, legal="a strategy, or a file of arguments") if Path(strategy).is_file() else strategy
    known: dict[str, Any] = {} if batch is None else {"global_batch": batch}
    order, notes = DEFAULT, [*asked.notes]
    if "--" in text:
        read = read_arguments(text, cluster.size, asked.fields.get("layers") or asked.load().fields.get("layers"))
        fields: dict[str, Any] = {**read.fields, **known}
        chosen, order = Strategy(**fields), read.order
        if read.others:
            notes.append(f"options that say nothing of traffic: {', '.join(read.others)}")
    else:
        chosen = parse_strategy(text, cluster.size, **known)
    loaded = asked.load(**({} if chosen.precision else {"precision": "bf16"}))
    found = job_traffic(partition(loaded, chosen), cluster)
    where = f", of rank {found.rank} of the pipeline" if chosen.pipeline > 1 else ""
    told = f"{asked.title}, {strategy_text(chosen)}, {chosen.sequences} sequences a step{where}"
    return _AuditedJob(found, order, (told, *notes))


def _mesh_of_job(job: _AuditedJob, mesh: str | None, megatron: str | None) -> tuple[str, str | None]:
    """The mesh, and Megatron's order: what was asked, else what the job says."""
    ours = job.traffic.mesh
    if mesh is None:
        return str(ours), megatron or (MAPPING if job.order == MAPPING else None)
    asked = Mesh.parse(mesh)
    if dict(asked.shape) != dict(ours.shape):
        raise LayoutError(f"--mesh {mesh}: the job's axes are {ours}; legal are those, in any order")
    return mesh, megatron


def read_launch(
    topology: str,
    mesh: str,
    nodes: int | None = None,
    hostfile: Path | str | None = None,
    rank_order: Path | str | None = None,
    megatron: str | None = None,
    switches: Path | str | None = None,
) -> Launch:
    """Return the launch that texts and files say; arguments and errors as for `audit_command`."""
    try:
        ours = Mesh.parse(mesh)
    except ParseError as error:
        raise ParseError(f"--mesh: {error}") from None
    hosts, spread = _read_hosts(hostfile)
    cluster = _with_nodes(Topology.load(topology), nodes, hosts)
    listed = hosts
    if hosts is not None:
        hosts = stand_hosts(hosts, _units(hosts, rank_order, switches, cluster))
    elif switches is not None:
        raise LayoutError("--topology-conf says where hosts stand; give --hostfile too")
    order, hosts = _rank_order(spread if rank_order is None else rank_order, hosts, cluster, listed)
    ranks = None
    if megatron is not None:
        if ours.devices != tuple(range(ours.size)):
            raise LayoutError("--megatron numbers the ranks of the mesh; give no devices= with it")
        ranks = order_ranks(ours, fastest_first(megatron, ours))
    launch = launch_of(ours, cluster, order if order is not None else hosts, ranks)
    if hosts is None and order is not None and order.source == _NUMBERS:
        launch = replace(launch, hosts=())  # names made up here are no hosts'
    return launch


def _read_hosts(hostfile: Path | str | None) -> tuple[Hosts | None, str | None]:
    """The hosts in the order of ranks, and how Slurm spreads ranks over them, where it says so."""
    if hostfile is None:
        return None, None
    text = str(hostfile)
    if text == _SLURM:
        return read_allocation(os.environ)
    if "[" in text and not Path(text).exists():
        return parse_hostfile(text, "--hostfile"), None
    return parse_hostfile(_read(hostfile), text), None


def _units(
    hosts: Hosts, rank_order: Path | str | None, switches: Path | str | None, topology: Topology
) -> tuple[str, ...]:
    """The hosts as they are units of the topology: by switches, as listed where ranks are ordered apart, or by name."""
    if switches is not None:
        found = parse_switches(read_text(switches, legal="Slurm's topology.conf"), str(switches))
        return order_by_switch(hosts.names, found, topology)
    if rank_order is not None and str(rank_order) not in _WAYS:
        return hosts.names
    return order_by_name(hosts.names)


def _read(path: Path | str) -> str:
    return read_text(path, legal="a hostfile or a rank order")


def _with_nodes(topology: Topology, nodes: int | None, hosts: Hosts | None) -> Topology:
    """The topology with as many hosts as are asked for, or as the hostfile names; a mesh does not resize it."""
    if nodes is not None:
        return topology.resize(node=nodes)
    j = max(host_level(topology), 0)
    level = topology.levels[j]
    if hosts is None or len(hosts.names) == topology.size // topology.strides[j]:
        return topology
    outer = math.prod(level.size for level in topology.levels[:j])
    if level.shape or len(hosts.names) % outer:
        return topology
    return topology.resize(**{level.name: len(hosts.names) // outer})


def _rank_order(
    rank_order: Path | str | None, hosts: Hosts | None, topology: Topology, listed: Hosts | None
) -> tuple[Hosts | None, Hosts | None]:
    """Where ranks run, and the hosts: by the words block and cyclic, numbers of devices, or a rankfile."""
    if rank_order is None:
        return None, hosts
    text = str(rank_order)
    j = host_level(topology, None if hosts is None else len(hosts.names))
    room = topology.size if j < 0 else topology.strides[j]
    count = topology.size // room
    names = hosts.names if hosts is not None else tuple(f"{topology.levels[max(j, 0)].name}{k}" for k in range(count))
    devices: Sequence[int] | None = None
    # Ranks go through the hosts as they are listed, wherever those stand.
    first = range(count) if listed is None else [names.index(name) for name in listed.names]
    if text == "block":
        devices = [host * room + k for host in first for k in range(room)]
    elif text == "cyclic":
        devices = [first[r % count] * room + r // count for r in range(topology.size)]
    elif set(text) <= {*"0123456789, "}:
        words = [word.strip() for word in text.split(",")]
        devices = [int(word) if word.isdecimal() and len(word) < _DIGITS else -1 for word in words]
        if sorted(devices) != list(range(topology.size)):
            raise TopologyError(
                f"--rank-order {line(text)}: legal is the device of every rank, each of 0 to {topology.size - 1} once"
            )
    if devices is None:
        found = _read(rank_order)
        begin = next((line for line in found.splitlines() if line.partition("#")[0].strip()), "").split()[:1]
        # A rank order counts ranks; what begins with a host is a hostfile, which orders them by its lines.
        counts = begin == ["rank"] or "".join(begin).isdigit()
        return (parse_rankfile if counts else parse_hostfile)(found, text, hosts), hosts
    return Hosts(names, (room,) * count, tuple(divmod(d, room) for d in devices), _NUMBERS), hosts
