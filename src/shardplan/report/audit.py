"""What `audit` prints: the verdict, the matrix, a table of the axes, the cause, the cost and the fix; and its JSON.

`audit_command` takes what the command line takes, as texts, and gives what it prints and exits with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, ParseError, TopologyError, line
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.launches.audit import SAME, Audit, audit, uplink_word
from shardplan.launches.hostfile import Hosts, host_level, launch_of, parse_hostfile, parse_rankfile
from shardplan.launches.megatron import fastest_first, order_ranks
from shardplan.launches.verdict import Stray
from shardplan.movement.placing.traffic import parse_traffic
from shardplan.report.placement_picture import text_placement
from shardplan.report.placement_svg import svg_placement

MOST_STRAYS = 4  # offending groups printed
MOST_LINES = 12  # lines of a rankfile or hostfile printed
_NUMBERS = "--rank-order"


def audit_text(found: Audit, framework: str = "all") -> str:
    """Print an audit.

    Args:
        found: The audit.
        framework: Whose fix to print: torch, jax, megatron, mpi or nccl-tests; or all.

    Returns:
        Lines of text.

    Raises:
        LayoutError: No such framework.

    >>> topology = Topology.load("gcp-a100x16", nodes=2)
    >>> print(audit_text(audit(range(32), Mesh(data=2, tensor=16), topology)))
    verdict  canonical
    matrix   data=[2, 1], tensor=[1, 16]
    on       gcp-a100x16: node=2 x gpu=16, 32 devices
    <BLANKLINE>
    axes    node  gpu  groups a NIC
    data       2    1            16
    tensor     1   16             -
    <BLANKLINE>
    cause    no traffic is given, so nothing is known to be better than this matrix
    """
    if framework not in FRAMEWORKS:
        raise LayoutError(f"fix for {framework!r} is unknown; legal: {', '.join(FRAMEWORKS)}")
    launch, findings = found.launch, found.findings
    lines = [f"verdict  {found.verdict}"]
    if findings.matrix is not None:
        rows = zip(launch.mesh.axes, findings.matrix, strict=True)
        lines.append("matrix   " + ", ".join(f"{axis}={list(row)}" for axis, row in rows))
    topology = launch.topology
    lines.append(f"on       {topology.name or 'a topology'}: {topology.describe()}, {topology.size} devices")
    if findings.reason:
        lines.append(f"why      {findings.reason}")
    lines += [f"         {_stray(s)}" for s in findings.strays[:MOST_STRAYS]]
    if len(findings.strays) > MOST_STRAYS:
        lines.append(f"         ... and {len(findings.strays) - MOST_STRAYS} more groups")
    lines += ["", *_table(found), ""]
    if found.seconds is not None and found.best_seconds is not None and found.ratio is not None:
        cost = f"cost     {format_seconds(found.seconds)} a step"
        if found.ratio < 1 - 1e-9:
            cost += f", less than on the best matrix ({format_seconds(found.best_seconds)})"
        elif found.ratio < 1 + 1e-9:
            cost += ", as on the best matrix"
        else:
            cost += f", {found.ratio:.2f} times the {format_seconds(found.best_seconds)} of the best matrix"
        lines.append(cost)
    lines += [f"{'cause' if number == 0 else '':<9}{cause}" for number, cause in enumerate(found.causes)]
    if found.fix is not None:
        best = found.fix.placement
        lines.append(f"best     {best.describe()}")
        for name, text in found.fixes.items():
            if framework in ("all", name):
                lines += ["", f"{name}:", *(f"  {line}" for line in _short(text))]
    return "\n".join(lines)


FRAMEWORKS = ("all", "torch", "jax", "megatron", "mpi", "nccl-tests")


def _short(text: str) -> list[str]:
    lines = text.rstrip("\n").split("\n")
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 1], f"... {len(lines) - MOST_LINES + 1} more lines (--json has all)"]


def _stray(stray: Stray) -> str:
    ranks = ", ".join(map(str, stray.ranks[:8])) + (", ..." if len(stray.ranks) > 8 else "")
    return f"{', '.join(stray.axes)}: ranks {ranks} span {stray.spans} {stray.level}s, not {stray.expected}"


def _table(found: Audit) -> list[str]:
    levels = found.launch.topology.levels
    ops = list(dict.fromkeys(s.demand.op for s in found.shares))
    shared = [j for j, level in enumerate(levels[:-1]) if level.size > 1]
    rows: list[list[str]] = []
    for row in found.rows:
        cells = [str(a) if a == b else f"{a}-{b}" for a, b in row.spans]
        if found.matrix is not None:
            # The factor of each level: of one axis its row of the matrix.
            factors = [row.spans[0][0]] + [b[0] // a[0] for a, b in zip(row.spans, row.spans[1:], strict=False)]
            cells = [str(x) for x in factors]
        cells += [str(row.per_uplink[j]) if row.per_uplink[j] else "-" for j in shared]
        words: list[str] = []
        for share in found.shares:
            if share.demand.axes == row.axes:
                demand = share.demand
                op = f"{demand.op} " if len(ops) > 1 else ""
                times = "" if demand.count == 1 else f" x {demand.count:g}"
                better = share.seconds > share.best_seconds * 1.005
                best = f" (best {format_seconds(share.best_seconds)})" if better else ""
                words.append(f"{op}{format_bytes(demand.nbytes)}{times} in {format_seconds(share.seconds)}{best}")
        rows.append([", ".join(row.axes), *cells, "; ".join(words)])
    head = ["axes", *(level.name for level in levels), *(f"groups a {uplink_word(levels[j])}" for j in shared)]
    head.append("" if not ops else f"a step ({ops[0]})" if len(ops) == 1 else "a step")
    widths = [max(len(r[k]) for r in [head, *rows]) for k in range(len(head))]
    out: list[str] = []
    for r in [head, *rows]:
        middle = "".join(f"  {x:>{w}}" for x, w in zip(r[1:-1], widths[1:-1], strict=True))
        out.append(f"{r[0]:<{widths[0]}}{middle}  {r[-1]}".rstrip())
    if found.matrix is None:
        out.append(f"{'':<{widths[0]}}  (units of each level that a group spans: there is no matrix)")
    return out


def audit_object(found: Audit) -> dict[str, Any]:
    """Return an audit as an object: its keys are the attribute names."""
    findings, text = found.findings, found.fix
    return {
        "verdict": found.verdict,
        "reason": findings.reason or None,
        "matrix": None if findings.matrix is None else [list(row) for row in findings.matrix],
        "mesh": str(found.launch.mesh),
        "placement": None if found.placement is None else found.placement.describe(),
        "topology": found.launch.topology.describe(),
        "topology_name": found.launch.topology.name,
        "topology_size": found.launch.topology.size,
        "ids": list(found.launch.ids),
        "strays": [
            {
                "axes": list(s.axes),
                "level": s.level,
                "ranks": list(s.ranks),
                "spans": s.spans,
                "expected": s.expected,
            }
            for s in findings.strays
        ],
        "rows": [
            {
                "axes": list(r.axes),
                "spans": [list(x) for x in r.spans],
                "per_uplink": list(r.per_uplink),
                "detours": list(r.detours),
            }
            for r in found.rows
        ],
        "shares": [
            {
                "axes": list(s.demand.axes),
                "op": s.demand.op,
                "bytes": s.demand.nbytes,
                "count": s.demand.count,
                "seconds": s.seconds,
                "best_seconds": s.best_seconds,
                "uplink_bytes": list(s.uplink_bytes),
            }
            for s in found.shares
        ],
        "seconds": found.seconds,
        "best": None if found.best is None else [list(row) for row in found.best.matrix],
        "best_seconds": found.best_seconds,
        "ratio": found.ratio,
        "cause": found.cause,
        "causes": list(found.causes),
        "fixes": found.fixes,
        "fix": None
        if text is None
        else {
            "torch": text.torch,
            "torch_note": text.torch_note or None,
            "jax": text.jax,
            "megatron": text.megatron,
            "megatron_order": text.megatron_order,
            "megatron_rankfile": text.megatron_rankfile,
            "rankfile": text.rankfile,
            "hostfile": text.hostfile,
            "nccl_tests": {",".join(axes): split for axes, split in text.nccl_tests},
        },
    }


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    """What the command prints and exits with: text, JSON object, the picture as SVG where asked for, exit status."""

    text: str
    object: dict[str, Any]
    svg: str
    status: int


def audit_command(
    topology: str,
    mesh: str,
    nodes: int | None = None,
    hostfile: Path | str | None = None,
    rank_order: Path | str | None = None,
    megatron: str | None = None,
    traffic: str | None = None,
    fail_above: float | None = None,
    framework: str = "all",
    show: bool = False,
    svg: bool = False,
) -> AuditAnswer:
    """Audit what the command line describes.

    Args:
        topology: A preset's name or a file.
        mesh: Axes and sizes; `devices=` says which rank has which coordinates, row-major without it.
        nodes: Size of the level called node; without it as many as the hostfile names, else the topology's own.
        hostfile: File of hosts in the order of the topology's units, see `launches.hostfile`.
        rank_order: `block` or `cyclic`, the device of every rank as numbers with commas between them, or a file: a
            rankfile, or a hostfile that orders the ranks where `hostfile` orders the units.
        megatron: An order string such as `tp-cp-ep-dp-pp`, which numbers the ranks of the mesh.
        traffic: What a step communicates, `data=2GB,tensor=500MB`.
        fail_above: Ratio of seconds to those of the best matrix above which the status is 1.
        framework: Whose fix to print.
        show: Whether the text ends with the picture.
        svg: Whether to draw the picture as SVG.

    Returns:
        Text, object, picture and status.

    Raises:
        ParseError: A file cannot be read or a text is malformed.
        TopologyError: What is given does not fit together.
        LayoutError: An option is unknown or lacks another.
    """
    if fail_above is not None and traffic is None:
        raise LayoutError("--fail-above compares seconds, which need --traffic, such as data=2GB,tensor=500MB")
    if fail_above is not None and not 1 <= fail_above < math.inf:
        raise LayoutError(f"--fail-above {fail_above:g} is below 1, the ratio of the best matrix; legal is 1 or more")
    try:
        ours = Mesh.parse(mesh)
    except ParseError as error:
        raise ParseError(f"--mesh: {error}") from None
    hosts = None if hostfile is None else parse_hostfile(_read(hostfile), str(hostfile))
    place = _sized(Topology.load(topology), nodes, hosts)
    order, hosts = _rank_order(rank_order, hosts, place)
    ranks = None
    if megatron is not None:
        if ours.devices != tuple(range(ours.size)):
            raise LayoutError("--megatron numbers the ranks of the mesh; give no devices= with it")
        ranks = order_ranks(ours, fastest_first(megatron, ours))
    launch = launch_of(ours, place, order if order is not None else hosts, ranks)
    if hosts is None and order is not None and order.source == _NUMBERS:
        launch = replace(launch, hosts=())  # names made up here are no hosts'
    demands = None
    if traffic is not None:
        try:
            demands = parse_traffic(traffic)
        except ParseError as error:
            raise ParseError(f"--traffic: {error}") from None
    found = audit(launch, traffic=demands)
    text = audit_text(found, framework)
    if show:
        text += "\n\n" + text_placement(launch, demands)
    status = 1 if fail_above is not None and found.ratio is not None and found.ratio > fail_above * (1 + SAME) else 0
    if status:
        text += f"\nabove    the ratio {found.ratio:.4g} is above --fail-above {fail_above:g}"
    picture = svg_placement(launch, demands) if svg else ""
    return AuditAnswer(text, audit_object(found) | {"fail_above": fail_above, "status": status}, picture, status)


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ParseError(f"cannot read {line(path)}: {error.strerror}") from None
    except ValueError:
        raise ParseError(f"{line(path)} is no UTF-8 text; legal is a hostfile or a rank order") from None


def _sized(topology: Topology, nodes: int | None, hosts: Hosts | None) -> Topology:
    """Give the topology as many hosts as are asked for, or as the hostfile names; a mesh does not resize it."""
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
    rank_order: Path | str | None, hosts: Hosts | None, topology: Topology
) -> tuple[Hosts | None, Hosts | None]:
    """Read where ranks run: the words block and cyclic, numbers of devices, or a rankfile."""
    if rank_order is None:
        return None, hosts
    text = str(rank_order)
    j = host_level(topology, None if hosts is None else len(hosts.names))
    room = topology.size if j < 0 else topology.strides[j]
    count = topology.size // room
    names = hosts.names if hosts is not None else tuple(f"{topology.levels[max(j, 0)].name}{k}" for k in range(count))
    devices: Sequence[int] | None = None
    if text == "block":
        devices = range(topology.size)
    elif text == "cyclic":
        devices = [r % count * room + r // count for r in range(topology.size)]
    elif text.replace(",", "").replace(" ", "").isdigit():
        devices = [int(word) for word in text.split(",")]
        if sorted(devices) != list(range(topology.size)):
            raise TopologyError(
                f"--rank-order {text}: legal is the device of every rank, each of 0 to {topology.size - 1} once"
            )
    if devices is None:
        found = _read(rank_order)
        first = next((line for line in found.splitlines() if line.partition("#")[0].strip()), "").split()[:1]
        # A rank order counts ranks; what begins with a host is a hostfile, which orders them by its lines.
        counts = first == ["rank"] or "".join(first).isdigit()
        return (parse_rankfile if counts else parse_hostfile)(found, text, hosts), hosts
    return Hosts(names, (room,) * count, tuple(divmod(d, room) for d in devices), _NUMBERS), hosts
