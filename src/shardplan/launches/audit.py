"""Audit: is an existing launch placed well, what does it cost, why, and what would be better.

The launch is read as a placement (`launches.launch`), its traffic is priced as stock collectives in the order in which
its groups list their members, and beside it every matrix of the same mesh; the cheapest is written as text that runs
(`fixes`). What is priced, loaded and felt is what the topology's library makes of that order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardplan.core import border
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import mesh_of
from shardplan.errors import TopologyError, shown
from shardplan.hardware.level import Level
from shardplan.hardware.placement import Matrix, Placement, orders, placements
from shardplan.hardware.prices.aggregate import units_spanned
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology, topology_of
from shardplan.hardware.units import format_bytes, format_rate, format_seconds
from shardplan.launches.fixes import Fix, fix, renumbered
from shardplan.launches.launch import Launch, Ring, crowding, detour_text, ring_of, sharing
from shardplan.launches.verdict import Findings, analyse
from shardplan.movement.placing.demand import demand_pattern
from shardplan.movement.placing.placed import SAME, ranked
from shardplan.movement.placing.traffic import Demand, Traffic, demands_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AxisRow:
    """What the groups over some axes cross."""

    axes: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]  # for each level the least and the greatest number of units that a group spans
    per_uplink: tuple[int, ...]  # for each level the groups that share an uplink of the busiest unit
    detours: tuple[int, ...]  # for each level the library's crossings beyond the least possible, over all groups


@dataclass(frozen=True, slots=True)
class CostShare:
    """What one demand costs."""

    demand: Demand
    seconds: float  # of a step, as launched
    best_seconds: float  # of a step, on the best matrix
    uplink_bytes: tuple[float, ...]  # for each level the bytes that leave its busiest unit in a step
    port_bytes: tuple[float, ...]  # for each level the bytes that leave by its busiest port or link in a step


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found."""

    launch: Launch
    findings: Findings
    rows: tuple[AxisRow, ...]  # one for each axis of more than one device, and one for each tuple of axes with traffic
    shares: tuple[CostShare, ...]  # one for each demand; none without traffic
    seconds: float | None  # of all demands, as launched; None without traffic
    # The cheapest placement; of equals this launch's matrix, then one that ranks in row-major order are. Without
    # traffic this launch's matrix, None where it has none.
    best: Placement | None
    best_seconds: float | None  # of all demands there; None without traffic
    causes: tuple[str, ...]  # sentences, one for each demand that loses, the worst first; else why none does
    fix: Fix | None  # how to launch `best`; None where nothing is to be gained and no order costs the library anything

    @property
    def placement(self) -> Placement | None:
        """The launch as a placement, up to renaming equal units; None where it is none."""
        return _own(self.launch, self.findings)

    @property
    def cause(self) -> str:
        """The first of the causes."""
        return self.causes[0]

    @property
    def fixes(self) -> dict[str, str]:
        """The fix by framework, as text that runs: torch, jax, megatron, mpi, nccl-tests; empty where there is none."""
        return {} if self.fix is None else self.fix.texts()

    @property
    def verdict(self) -> str:
        """The findings' verdict."""
        return self.findings.verdict

    @property
    def matrix(self) -> Matrix | None:
        """The findings' matrix."""
        return self.findings.matrix

    @property
    def ratio(self) -> float | None:
        """Seconds as launched over seconds on the best matrix; None without traffic."""
        if self.seconds is None or self.best_seconds is None:
            return None
        return self.seconds / self.best_seconds if self.best_seconds > 0 else 1.0


def audit(
    ids: ArrayLike | Launch,
    mesh: Mesh | str | None = None,
    topology: Topology | str | None = None,
    traffic: Traffic | str | Sequence[Demand] | None = None,
    hosts: Sequence[str] = (),
    device: str = "cuda",
) -> Audit:
    """Return whether a launch is placed well, what it costs, why, and what would be better.

    Args:
        ids: Topology ids, in the mesh's shape or in mesh order; or a `Launch`, which brings mesh, topology and hosts.
        mesh: The axes, as a mesh or its text; its device ids are the ranks at the coordinates.
        topology: The hardware, as a topology or its text; the mesh fills it, nothing is resized.
        traffic: What a step communicates: axes to all-reduce bytes or to a list of `(op, bytes, count)`, or its text
            such as `"data=2GB"`. Without it there are no seconds, and nothing is known to be better than another order
            of the same matrix.
        hosts: Names in the order of the topology's units.
        device: torch's device type in the fix.

    Raises:
        TopologyError: The ids are no permutation of the topology's devices, the mesh does not fill the topology, or one
            of the two is missing.
        LayoutError: Traffic names an axis that the mesh has not, or is malformed; an argument is of another kind.

    Source: the audit of placements after arXiv 2110.10548.

    >>> topology = Topology.load("gcp-a100x16", nodes=2)
    >>> found = audit(range(32), Mesh(tensor=2, data=16), topology, {"tensor": 2e9, "data": 1e6})
    >>> found.verdict, found.cause
    ('canonical', '`tensor` spans 2 nodes: 16 groups share each NIC')
    """
    launch = ids if isinstance(ids, Launch) else _launch(ids, mesh, topology, hosts)
    if ids is launch and (mesh is not None or topology is not None or hosts):
        raise TopologyError("a Launch brings its own mesh, topology and hosts; give none with it")
    border.text("device", device)
    mesh, topology = launch.mesh, launch.topology
    demands = () if traffic is None else _demands(traffic, mesh)
    together = tuple(dict.fromkeys(d.axes for d in demands if len(d.axes) > 1))
    findings = analyse(launch, together)
    fabric = Fabric(topology)
    wide = [ring for ring in findings.rings if math.prod(mesh.shape[a] for a in ring.axes) > 1]
    rows = tuple(_row(launch, ring, fabric) for ring in wide)
    if not demands:
        own = _own(launch, findings)
        text = fix(launch, own, (), device) if own is not None and findings.felt else None
        cause = findings.reason or "no traffic is given, so nothing is known to be better than this matrix"
        return Audit(launch, findings, rows, (), None, own, None, (cause,), text)
    seconds = [stock_seconds(launch.groups(d.axes), d, fabric) for d in demands]
    best, best_each = _best(launch, findings, stock_ranking(mesh, topology, demands))
    shares = tuple(
        CostShare(d, now, then, *_busiest(leaving_bytes(launch.groups(d.axes), d, fabric), fabric))
        for d, now, then in zip(demands, seconds, best_each, strict=True)
    )
    total, best_total = sum(seconds), sum(best_each)
    causes, text = ("no matrix is faster for this traffic",), None
    if total > best_total * (1 + SAME):
        losing = sorted(shares, key=lambda s: s.best_seconds - s.seconds)
        losing = [s for s in losing if s.seconds > s.best_seconds * (1 + SAME)]
        causes = tuple(dict.fromkeys(_cause(launch, findings, s, best) for s in losing))
        joint = all(len(s.demand.axes) > 1 for s in losing)
        if joint and _own(launch, findings) == best and not findings.felt:
            # What is left are joint axes, whose members come in the order of coordinates, not of devices.
            causes = tuple(f"{c}: list the members of these groups in the order of their devices" for c in causes)
        else:
            text = fix(launch, best, together, device)
    elif findings.felt and _own(launch, findings) == best:
        causes = (f"{findings.reason}; the cheapest algorithms for this traffic do not feel it",)
        text = fix(launch, best, together, device)
    return Audit(launch, findings, rows, shares, total, best, best_total, causes, text)


def _own(launch: Launch, findings: Findings) -> Placement | None:
    """The launch as a placement, None where it is none."""
    if findings.matrix is None:
        return None
    return Placement(launch.mesh, launch.topology, findings.matrix, findings.order)


def _demands(traffic: object, mesh: Mesh) -> tuple[Demand, ...]:
    """Traffic as demands, which it may be already."""
    if isinstance(traffic, (list, tuple)) and all(isinstance(d, Demand) for d in traffic):
        return tuple(traffic)
    return demands_of(traffic, mesh)  # pyright: ignore[reportArgumentType]


def _launch(ids: object, mesh: Mesh | str | None, topology: Topology | str | None, hosts: Sequence[str]) -> Launch:
    """The launch that an array of ids describes."""
    if mesh is None or topology is None:
        raise TopologyError("an array of device ids needs a mesh and a topology; a Launch brings its own")
    mesh, topology = mesh_of("mesh", mesh), topology_of("topology", topology)
    hosts = [border.text("a host's name", name) for name in border.items("hosts", hosts, "names of hosts")]
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        array = np.empty(0)
    if array.dtype.kind not in "iu":
        raise TopologyError(
            f"ids is {shown(ids)}; legal are a Launch, or topology ids, whole numbers in the mesh's shape"
        )
    if array.shape not in (mesh.sizes, (mesh.size,)):
        raise TopologyError(
            f"ids of shape {array.shape} for mesh {mesh}; legal are {mesh.sizes}, and {(mesh.size,)} in mesh order"
        )
    return Launch(mesh, topology, tuple(int(i) for i in array.reshape(-1)), tuple(hosts))


def stock_seconds(members: Ints, demand: Demand, fabric: Fabric) -> float:
    """Return the seconds that a demand takes a step as the library's own collective, all groups at once.

    `members` are topology ids, int64 [groups, k], in member order; the cheapest algorithm runs.
    """
    return demand.count * price(demand_pattern(demand.op, members, demand.nbytes), fabric).seconds


def stock_ranking(
    mesh: Mesh, topology: Topology, demands: Sequence[Demand]
) -> list[tuple[Placement, tuple[float, ...]]]:
    """Return every placement, in every order, with the seconds of each demand as a stock collective, cheapest first.

    Groups list their members in level-major order. Raises `TopologyError` where sizes differ.
    """
    rows = ranked([one for p in placements(mesh, topology) for one in orders(p)], demands, programs="stock")
    return [(row.placement, tuple(share.seconds for share in row.shares)) for row in rows]


def _best(
    launch: Launch, findings: Findings, ranking: Sequence[tuple[Placement, tuple[float, ...]]]
) -> tuple[Placement, tuple[float, ...]]:
    """Of the cheapest placements that are equal the one that asks least of the user: none, no renumbering, or any."""
    least = sum(ranking[0][1])
    equal = [row for row in ranking if sum(row[1]) <= least * (1 + SAME)]
    natural, own = np.arange(launch.mesh.size), _own(launch, findings)

    def effort(row: tuple[Placement, tuple[float, ...]]) -> int:
        if row[0] == own:
            return 0
        return 1 if np.array_equal(renumbered(launch, row[0]).reshape(-1), natural) else 2

    return min(equal, key=effort)


def _row(launch: Launch, one: Ring, fabric: Fabric) -> AxisRow:
    """What the groups of one ring cross."""
    groups = launch.groups(one.axes)
    counts = units_spanned(groups, launch.topology)
    spans = tuple((int(c.min()), int(c.max())) for c in counts)
    return AxisRow(one.axes, spans, crowding(groups, fabric), one.detours)


def _busiest(leaving: Sequence[Floats], fabric: Fabric) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each level the bytes that leave its busiest unit, and by its busiest port or link."""
    units = tuple(float(x.sum(axis=1).max()) for x in leaving)
    return units, tuple(float(x.max()) / w.parallel for x, w in zip(leaving, fabric.wires, strict=True))


def leaving_bytes(members: Ints, demand: Demand, fabric: Fabric) -> list[Floats]:
    """Return for each level the bytes that leave its units in a step, float64 [units, ports or links].

    They are the load that is priced. `members` are topology ids, int64 [groups, k], in member order. A port may stand
    for several that act as one, and what a unit of a ring, torus or mesh passes on counts as well.
    """
    paid = price(demand_pattern(demand.op, members, demand.nbytes), fabric)
    found: list[Floats] = []
    for j, wires in enumerate(fabric.wires):
        seconds = paid.load[j] if paid.load else None
        if seconds is None or paid.row is None:
            found.append(np.zeros((wires.units, 1)))
        else:
            found.append(demand.count * paid.row.share(j < fabric.far) * fabric.sent(j, seconds))
    return found


def uplink_word(level: Level, count: int = 1) -> str:
    """Return what uplinks of a level are called: those of a node are NICs."""
    several = "s" if count > 1 else ""
    if level.link != "switch":
        return f"link{several} of a {level.name}"
    return f"NIC{several}" if level.name in ("node", "host") else f"uplink{several} of a {level.name}"


def _cause(launch: Launch, findings: Findings, worst: CostShare, best: Placement) -> str:
    """Say in one sentence why a demand is slow; the outermost level first, where a crossing costs most."""
    axes, levels = worst.demand.axes, launch.topology.levels
    names = ", ".join(f"`{axis}`" for axis in axes)
    groups, target = launch.groups(axes), np.sort(Launch.of(best).groups(axes), axis=1)
    here, there = ([int(c.max()) for c in units_spanned(g, launch.topology)] for g in (groups, target))
    for stray in findings.strays:
        if set(stray.axes) <= set(axes):
            return findings.reason
    rings = ring_of(launch, axes)
    verb = "spans" if len(axes) == 1 else "together span"
    for j, level in enumerate(levels):
        if here[j] > there[j]:
            spans = f"{names} {verb} {here[j]} {level.name}s"
            n = sharing(groups, launch.topology)[j]
            if n > 1 and level.uplinks == 1:
                return f"{spans}: {n} groups share each {uplink_word(level)}"
            ports = f"{uplink_word(level, level.uplinks)} of {format_rate(level.bandwidth)}"
            if n > 1:
                return f"{spans}: {n} groups share {level.uplinks} {ports}; it could span {there[j]}"
            return f"{spans}, each over {ports}; it could span {there[j]}"
        if rings.detours[j]:
            return detour_text(rings, launch.topology, j)
        busy, idle = (sharing(g, launch.topology)[j] for g in (groups, target))
        if busy > idle > 0:
            return f"{names} {verb} {here[j]} {level.name}s: {busy} groups leave each {level.name}, where {idle} could"
    if findings.felt:
        return findings.reason
    return (
        f"{worst.demand.op} over {names} of {format_bytes(worst.demand.nbytes)} takes "
        f"{format_seconds(worst.seconds)}, {format_seconds(worst.best_seconds)} on the best matrix"
    )
