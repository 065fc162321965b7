"""A placement as text: a box for every host, a cell for every device with its rank and its coordinates in the mesh.

Above the boxes stand the matrix and what each axis crosses; on the boxes, what leaves them in a step: the load that is
priced. Of many hosts, those in a row that hold the mesh in the same way are one box with their number, and so are the
pods of alike hosts. `scene` gathers it for this picture and for the SVG (`placement_svg`).
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.level import Level
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes
from shardplan.launches.audit import leaving_bytes
from shardplan.launches.causes import uplink_word
from shardplan.launches.hostfile import host_level
from shardplan.launches.launch import Launch, sharing
from shardplan.launches.verdict import Findings, analyse
from shardplan.movement.placing.traffic import Demand, Traffic, demands_of
from shardplan.report.contents import device_text
from shardplan.report.fold import WIDTH

MOST_BOXES = 6  # hosts drawn
MOST_CELLS = 32  # devices drawn of a host


@dataclass(frozen=True, slots=True)
class Cell:
    """A device: its rank and coordinates; for each axis the number of its group, and whether that leaves the host."""

    rank: int
    coordinates: tuple[int, ...]
    groups: tuple[int, ...]
    leaves: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class HostBox:
    """A host, or several alike: their devices in order, and what leaves one in a step.

    `out` are bytes of each demand, `busiest` those of the busiest port. The cells `cells` are of the first of `units`;
    `least` and `greatest` have the numbers between which those of all units are; `pods` are the units of the next outer
    level that these hosts are in.
    """

    units: tuple[int, ...]
    name: str
    cells: tuple[Cell, ...]
    least: tuple[Cell, ...]
    greatest: tuple[Cell, ...]
    out: tuple[float, ...]
    busiest: float
    pods: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture of a placement shows."""

    launch: Launch
    findings: Findings
    demands: tuple[Demand, ...]
    level: Level | None  # the level whose units are boxes; None where all devices are in one
    boxes: tuple[HostBox, ...]  # those drawn: the first ones and the last
    pod: Level | None  # the next outer level, whose units are named above the boxes; None where there is but one
    hidden: int  # hosts left out before the last box
    crossing: tuple[tuple[int, ...], ...]  # for each axis and level the groups that leave the busiest unit


def scene(
    subject: Placement | Launch, traffic: Traffic | Sequence[Demand] | None = None, most: int = MOST_BOXES
) -> Scene:
    """Return what a picture of a placement or a launch shows.

    `traffic` is what a step communicates, for the loads. Of more than `most` hosts those in a row that are alike are
    one box; of more boxes than that the first ones and the last are drawn. Raises `LayoutError` for malformed traffic.
    """
    launch = Launch.of(subject) if isinstance(subject, Placement) else subject
    mesh, topology = launch.mesh, launch.topology
    if traffic is None:
        demands: tuple[Demand, ...] = ()
    else:
        demands = tuple(traffic) if isinstance(traffic, Sequence) else demands_of(traffic, mesh)
    j = host_level(topology, len(launch.hosts) or None)
    room = topology.size if j < 0 else topology.strides[j]
    count = topology.size // room
    place = np.empty(topology.size, dtype=np.int64)
    place[list(launch.ids)] = np.arange(mesh.size)
    group = np.empty((len(mesh.axes), mesh.size), dtype=np.int64)
    leaves = np.zeros((len(mesh.axes), mesh.size), dtype=bool)
    for i, axis in enumerate(mesh.axes):
        places = launch.places((axis,))
        group[i][places] = np.arange(len(places))[:, None]
        inside = launch.groups((axis,)) // room
        leaves[i][places] = (inside != inside[:, :1]).any(axis=1)[:, None]
    fabric = Fabric(topology)
    out = [leaving_bytes(launch.groups(d.axes), d, fabric)[j] if j >= 0 else np.zeros((1, 1)) for d in demands]
    ports = sum(out, np.zeros((count, 1))) / fabric.wires[j].parallel
    cells = [
        tuple(
            Cell(mesh.devices[p], mesh.coordinates(p), tuple(group[:, p].tolist()), tuple(leaves[:, p].tolist()))
            for p in place[unit * room : (unit + 1) * room].tolist()
        )
        for unit in range(count)
    ]
    pod = topology.levels[j - 1] if j > 0 and topology.levels[j - 1].size > 1 else None
    in_pod = topology.levels[j].size if pod is not None else count
    if count <= most:
        rows = [((unit // in_pod,), (unit,)) for unit in range(count)]
    else:
        slow = _slow_parts(topology, j)
        patterns = [
            (_pattern(cells[u]), tuple(x[u].sum() for x in out), ports[u].max(), slow.get(u)) for u in range(count)
        ]
        rows = _alike_rows(patterns, in_pod)
    kept = rows if len(rows) <= most else [*rows[: most - 1], rows[-1]]
    names = launch.hosts
    boxes = tuple(
        HostBox(
            units,
            ("" if not names else names[units[0]] if len(units) == 1 else f"{names[units[0]]} to {names[units[-1]]}"),
            cells[units[0]],
            *_span_cells([cells[unit] for unit in units]),
            tuple(float(x[units[0]].sum()) for x in out),
            float(ports[units[0]].max()),
            pods if pod is not None else (),
        )
        for pods, units in kept
    )
    crossing = tuple(sharing(launch.groups((axis,)), topology) for axis in mesh.axes)
    level = topology.levels[j] if j >= 0 else None
    hidden = count - sum(len(box.units) for box in boxes)
    return Scene(launch, analyse(launch), demands, level, boxes, pod, hidden, crossing)


def _span_cells(hosts: Sequence[tuple[Cell, ...]]) -> tuple[tuple[Cell, ...], tuple[Cell, ...]]:
    """The devices of alike hosts with the least of their numbers, and with the greatest."""

    def by(pick: Callable[[Iterable[int]], int]) -> tuple[Cell, ...]:
        return tuple(
            Cell(
                pick(cell.rank for cell in alike),
                tuple(map(pick, zip(*(cell.coordinates for cell in alike), strict=True))),
                tuple(map(pick, zip(*(cell.groups for cell in alike), strict=True))),
                alike[0].leaves,
            )
            for alike in zip(*hosts, strict=True)
        )

    return by(min), by(max)


def _pattern(cells: Sequence[Cell]) -> Hashable:
    """How a host holds the mesh, whichever part of it: coordinates beside its first device's, and what leaves it."""
    first = cells[0].coordinates
    numbers: list[dict[int, int]] = [{} for _ in first]
    return tuple(
        (
            tuple(a - b for a, b in zip(cell.coordinates, first, strict=True)),
            tuple(n.setdefault(g, len(n)) for n, g in zip(numbers, cell.groups, strict=True)),
            cell.leaves,
        )
        for cell in cells
    )


def _slow_parts(topology: Topology, host: int) -> dict[int, tuple[tuple[int, int, str, float], ...]]:
    """What is slow of each host that is not sound: level, unit inside the host, port if it is one, and the factor."""
    found: dict[int, tuple[tuple[int, int, str, float], ...]] = {}
    for k, level in enumerate(topology.levels[host:], host):
        inside = topology.strides[host] // topology.strides[k]
        for name, unit, factor in level.slow():
            part = (k, unit % inside, name.partition("]")[2], factor)
            found[unit // inside] = (*found.get(unit // inside, ()), part)
    return found


def _alike_rows(patterns: Sequence[Hashable], in_pod: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pods, and hosts of them in a row, that hold the mesh in the same way; each host is in one of the rows."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    pods = [tuple(patterns[k : k + in_pod]) for k in range(0, len(patterns), in_pod)]
    for row, same in itertools.groupby(range(len(pods)), pods.__getitem__):
        numbers = tuple(same)
        for _, hosts in itertools.groupby(range(in_pod), row.__getitem__):
            mine = tuple(hosts)
            found.append((numbers, tuple(pod * in_pod + host for pod in numbers for host in mine)))
    return found


def heading(drawn: Scene) -> str:
    """Return what is drawn: the mesh, the topology, the verdict."""
    launch = drawn.launch
    axes = ", ".join(f"{axis}={size}" for axis, size in launch.mesh.shape.items())
    return f"{axes} on {launch.topology.name or 'topology'} ({launch.topology.describe()}): {drawn.findings.verdict}"


def crossed(drawn: Scene) -> list[str]:
    """Return for each axis what it crosses, of the levels down to the boxes'."""
    launch, rows = drawn.launch, list[str]()
    for shared, spans in zip(drawn.crossing, drawn.findings.spans, strict=True):
        words: list[str] = []
        for level, n, (low, high) in zip(launch.topology.levels, shared, spans, strict=True):
            if n and level.size > 1 and level is not launch.topology.levels[-1]:
                ports = f" over {level.uplinks} {uplink_word(level, level.uplinks)}" if level.uplinks > 1 else ""
                several = str(high) if low == high else f"{low} to {high}"
                words.append(f"spans {several} {level.name}s, {n} group{'s leave' if n > 1 else ' leaves'} each{ports}")
        rows.append("; ".join(words) or "stays inside")
    return rows


def load_text(box: HostBox, drawn: Scene) -> str:
    """Return what leaves a box in a step, and how much of it its busiest uplink carries; empty without traffic."""
    if drawn.level is None or not drawn.demands:
        return ""
    total = sum(box.out)
    several = drawn.level.uplinks > 1 and total
    each = f", up to {format_bytes(box.busiest)} a {uplink_word(drawn.level)}" if several else ""
    return f"{format_bytes(total)} out{' of each' if len(box.units) > 1 else ''}{each}"


def pod_name(box: HostBox, drawn: Scene) -> str:
    """Return the name of the pods that a box's hosts are in; empty where there is but one."""
    if drawn.pod is None:
        return ""
    first, last = box.pods[0], box.pods[-1]
    return f"{drawn.pod.name} {first}" if first == last else f"{drawn.pod.name}s {first}-{last}: {len(box.pods)} alike"


def span_text(least: Sequence[int], greatest: Sequence[int]) -> str:
    """Return the numbers between which those of a device of alike hosts are: `0-63,1`."""
    return ",".join(map(_span, least, greatest))


def _span(least: int, greatest: int) -> str:
    return f"{least}" if least == greatest else f"{least}-{greatest}"


def box_name(box: HostBox, drawn: Scene) -> str:
    """Return the name of a box: the unit's number with the host's name."""
    word = drawn.level.name if drawn.level is not None else drawn.launch.topology.name or "all devices"
    if drawn.level is None:
        number = ""
    elif len(box.units) == 1:
        number = f" {box.units[0]}"
    elif box.units[-1] - box.units[0] + 1 == len(box.units):
        number = f"s {box.units[0]}-{box.units[-1]}: {len(box.units)} alike"
    else:  # some of each pod
        last = box.units[len(box.units) // len(box.pods) - 1]
        number = f"{'s' * (last > box.units[0])} {span_text(box.units[:1], (last,))} of each: {len(box.units)} alike"
    return f"{word}{number}" + (f" ({box.name})" if box.name else "")


def text_placement(subject: Placement | Launch, traffic: Traffic | Sequence[Demand] | None = None) -> str:
    """Return a picture of where a mesh lies, in lines of at most 80 characters, but for long names.

    `traffic` is what a step communicates: axes to all-reduce bytes or to a list of `(op, bytes, count)`. Raises
    `LayoutError` for malformed traffic.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> small = Topology.load("dgx-a100").resize(nodes=2, gpus=2)
    >>> print(text_placement(Placement(Mesh(data=2, tensor=2), small, ((2, 1), (1, 2)))))
    data=2, tensor=2 on dgx-a100 (node=2 x gpu=2): canonical
    <BLANKLINE>
    axis    node  gpu
    data       2    1  spans 2 nodes, 2 groups leave each over 8 NICs
    tensor     1    2  stays inside
    <BLANKLINE>
    + node 0 ------------+
    | 0 (0, 0)  1 (0, 1) |
    +--------------------+
    + node 1 ------------+
    | 2 (1, 0)  3 (1, 1) |
    +--------------------+
    a cell is rank (data, tensor)
    """
    drawn = scene(subject, traffic)
    mesh = drawn.launch.mesh
    lines = [*textwrap.wrap(heading(drawn), WIDTH), "", *_matrix(drawn), ""]
    labels = [
        [
            device_text(span_text((a.rank,), (b.rank,)), map(_span, a.coordinates, b.coordinates))
            for a, b in zip(box.least[:MOST_CELLS], box.greatest, strict=False)
        ]
        for box in drawn.boxes
    ]
    width = max(len(text) for row in labels for text in row)
    across = max(1, (WIDTH - 4 + 2) // (width + 2))
    longest = max(len(row) for row in labels)
    # As many rows as needed, of equal length; a power of two reads best on 8 or 16 devices.
    if longest > across:
        across = next((n for n in (16, 8, 4, 2) if n <= across and longest % n == 0), across)
    else:
        across = longest
    tops = [(box_name(box, drawn), load_text(box, drawn)) for box in drawn.boxes]
    wide = max(across * (width + 2) - 2, *(len(name) + 2 + (len(load) + 2 if load else 0) for name, load in tops))
    above = ""
    for box, row, (name, load) in zip(drawn.boxes, labels, tops, strict=True):
        if drawn.hidden and box is drawn.boxes[-1]:
            word = drawn.level.name if drawn.level is not None else "host"
            lines.append(f"... {drawn.hidden} more {word}s")
        if (pods := pod_name(box, drawn)) != above:
            lines.append(pods)
            above = pods
        end = f" {load} +" if load else "+"
        lines.append(f"+ {name} " + "-" * (wide + 4 - len(name) - 3 - len(end)) + end)
        for start in range(0, len(row), across):
            cells = "  ".join(f"{text:<{width}}" for text in row[start : start + across])
            lines.append(f"| {cells:<{wide}} |")
        if len(box.cells) > MOST_CELLS:
            more = f"... {len(box.cells) - MOST_CELLS} more devices"
            lines.append(f"| {more:<{wide}} |")
        lines.append("+" + "-" * (wide + 2) + "+")
    folded = any(len(box.units) > 1 for box in drawn.boxes)
    of = ", least-greatest of alike hosts" if folded else ""
    lines += textwrap.wrap(f"a cell is {device_text('rank', mesh.axes)}{of}", WIDTH)
    return "\n".join(lines)


def _matrix(drawn: Scene) -> list[str]:
    """The matrix, or the units spanned where there is none, with what each axis crosses."""
    mesh, levels = drawn.launch.mesh, drawn.launch.topology.levels
    if drawn.findings.matrix is not None:
        table = [[str(x) for x in row] for row in drawn.findings.matrix]
    else:
        table = [[f"{a}" if a == b else f"{a}-{b}" for a, b in row] for row in drawn.findings.spans]
    widths = [max(len(level.name), *(len(row[j]) for row in table)) for j, level in enumerate(levels)]
    first = max(4, *(len(axis) for axis in mesh.axes))
    head = f"{'axis':<{first}}" + "".join(f"  {x.name:>{w}}" for x, w in zip(levels, widths, strict=True))
    lines = [head + ("" if drawn.findings.matrix is not None else "  (units spanned: no matrix)")]
    for axis, row, words in zip(mesh.axes, table, crossed(drawn), strict=True):
        cells = "".join(f"  {x:>{w}}" for x, w in zip(row, widths, strict=True))
        start = f"{axis:<{first}}{cells}  "
        indent = " " * min(len(start), WIDTH // 2)
        lines += textwrap.wrap(start + words, WIDTH, subsequent_indent=indent, drop_whitespace=True)
    return lines
