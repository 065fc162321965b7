"""Audit: is an existing launch placed well, what does it cost, why, and what would be better.

The launch is read as a placement (`launches.launch`), its traffic is priced as stock collectives in the order in which
its groups list their members, and beside it every matrix of the same mesh; the best is written as text that runs
(`fixes`). What is priced, loaded and felt is what the topology's library makes of that order. What compute hides costs
nothing; a difference below `WORTH` is none: then the launch is as good as the best, and among other placements the one
is best that keeps the most traffic inside inner units. From `ADVISED` on the best is advised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardplan.core import validation
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import mesh_of
from shardplan.errors import TopologyError, excerpt
from shardplan.hardware.placement import Matrix, Placement, orders
from shardplan.hardware.prices.aggregate import units_spanned
from shardplan.hardware.prices.cost import Price, checked_algorithm, price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology, topology_of
from shardplan.launches.causes import CostShare, cause_of
from shardplan.launches.fixes import Fix, fix, ranks_by_coordinate
from shardplan.launches.launch import Launch, Ring, article, count_units, crowding
from shardplan.launches.megatron import name_of
from shardplan.launches.verdict import Findings, analyse
from shardplan.movement.placing.demand import demand_pattern
from shardplan.movement.placing.place import candidates, outermost
from shardplan.movement.placing.placement_price import SAME, PricedPlacement, rank_placements
from shardplan.movement.placing.traffic import Demand, Traffic, demands_of
from shardplan.notebook import notebook_html

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
WORTH = 0.01  # relative: seconds closer than this are no difference
# Tensor parallelism is taken out of a node only for a gain that is left where every price is 20 % off.
SURE = 1.2 / 0.8
ADVISED = 0.02  # relative: a gain of less is said, and nobody would start a job anew for it


@dataclass(frozen=True, slots=True)
class AxisRow:
    """What the groups over some axes cross."""

    axes: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]  # for each level the least and the greatest number of units that a group spans
    per_uplink: tuple[int, ...]  # for each level the groups that share an uplink of the busiest unit
    detours: tuple[int, ...]  # for each level the library's crossings beyond the least possible, over all groups


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found."""

    launch: Launch
    findings: Findings
    rows: tuple[AxisRow, ...]  # one for each axis of more than one device, and one for each tuple of axes with traffic
    shares: tuple[CostShare, ...]  # one for each demand; none without traffic
    seconds: float | None  # that a step waits for all demands, as launched; None without traffic
    # The cheapest placement that keeps axes where they are to stay, and tensor parallelism in its nodes but for a gain
    # of `SURE`. Of those within `WORTH` this launch's matrix, then
    # the most local, then one that ranks in row-major order are. Without traffic this launch's matrix, None where it
    # has none.
    best: Placement | None
    best_seconds: float | None  # of all demands there; None without traffic
    causes: tuple[str, ...]  # sentences, one for each demand that loses, the worst first; else why none does
    fix: Fix | None  # how to launch `best`; None where less than `ADVISED` is to be gained
    inside: tuple[tuple[str, str], ...] = ()  # axes that are to stay inside a unit of a level

    _repr_html_ = notebook_html

    @property
    def placement(self) -> Placement | None:
        """The launch as a placement, up to renaming equal units; None where it is none."""
        return _own_placement(self.launch, self.findings)

    @property
    def answer(self) -> str:
        """The audit in a line: well placed, or how many times the best it takes, why, and what to use."""
        why = self.cause.split(": ")[0]
        use = "" if self.fix is None else f"; use {self.fix.use}"
        if self.ratio is None:
            return f"{why}{use}"
        if self.seconds is None or self.best_seconds is None or (self.fix is None and not self.is_advised):
            return "well placed"
        times = f"{self.ratio:.2f} times the best" if self.is_advised else "as fast as the best"
        return f"{times}: {why}{use}"

    @property
    def is_advised(self) -> bool:
        """Whether the best matrix is faster by `ADVISED` or more."""
        return self.ratio is not None and self.ratio > 1 + ADVISED

    @property
    def cause(self) -> str:
        """The first of the causes."""
        return self.causes[0]

    @property
    def fixes(self) -> dict[str, str]:
        """The fix by framework (`report.audit.FRAMEWORKS`), as text that runs; empty where there is none."""
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
        """Seconds as launched over seconds on the best matrix; infinite where compute hides all there.

        None without traffic.
        """
        if self.seconds is None or self.best_seconds is None:
            return None
        if self.best_seconds > 0:
            return self.seconds / self.best_seconds
        return math.inf if self.seconds > 0 else 1.0

    @property
    def slower(self) -> bool:
        """Whether the best matrix is faster by `WORTH` or more."""
        return self.ratio is not None and self.ratio > 1 + WORTH


def audit(
    ids: ArrayLike | Launch,
    mesh: Mesh | str | None = None,
    topology: Topology | str | None = None,
    traffic: Traffic | str | Sequence[Demand] | None = None,
    hosts: Sequence[str] = (),
    device: str = "cuda",
    inside: Mapping[str, str] | None = None,
    algorithm: str = "auto",
) -> Audit:
    """Return whether a launch is placed well, what it costs, why, and what would be better.

    Args:
        ids: Topology ids, in the mesh's shape or in mesh order; or a `Launch`, which brings mesh, topology and hosts.
        mesh: The axes, as a mesh or its text; its device ids are the ranks at the coordinates.
        topology: The hardware, as a topology or its text; the mesh fills it, nothing is resized.
        traffic: What a step communicates: axes to all-reduce bytes or to a list of `(op, bytes, count)`, or its text
            such as `"data=2GB"`. What runs behind compute costs what sticks out: `"data=2GB behind 120ms"`. Without
            it there are no seconds, and nothing is known to be better than another order of the same matrix.
        hosts: Names in the order of the topology's units.
        device: torch's device type in the fix.
        inside: By axis the level within one unit of which it must stay, `{"tensor": "node"}`, as `place` takes it.
        algorithm: `auto`, the library's cheapest row for each collective, or an algorithm of it for all.

    Raises:
        TopologyError: The ids are no permutation of the topology's devices, the mesh does not fill the topology, or one
            of the two is missing; an unknown axis, level or algorithm.
        LayoutError: Traffic names an axis that the mesh has not, or is malformed; no placement keeps axes where they
            are to stay; an argument is of another kind.

    Source: the audit of placements after arXiv 2110.10548.

    >>> topology = Topology.load("gcp-a100x16", nodes=2)
    >>> found = audit(range(32), Mesh(tensor=2, data=16), topology, {"tensor": 2e9, "data": 1e6})
    >>> found.verdict, found.cause
    ('canonical', '`tensor` spans 2 nodes: 16 groups share each NIC')
    """
    launch = ids if isinstance(ids, Launch) else _launch(ids, mesh, topology, hosts)
    if ids is launch and (mesh is not None or topology is not None or hosts):
        raise TopologyError("a Launch brings its own mesh, topology and hosts; give none with it")
    validation.text("device", device)
    mesh, topology = launch.mesh, launch.topology
    checked_algorithm(algorithm, library(topology.library))
    demands = () if traffic is None else _demands(traffic, mesh)
    together = tuple(dict.fromkeys(d.axes for d in demands if len(d.axes) > 1))
    findings = analyse(launch, together)
    fabric = Fabric(topology)
    wide = [ring for ring in findings.rings if math.prod(mesh.shape[a] for a in ring.axes) > 1]
    rows = tuple(_row(launch, ring, fabric) for ring in wide)
    kept = tuple((inside or {}).items())
    torn = _torn_axes(launch, inside)
    ranking = stock_ranking(mesh, topology, demands, inside, algorithm) if demands or torn else []
    if not demands:
        best = _easiest(launch, ranking).placement if torn else _own_placement(launch, findings)
        text = fix(launch, best, (), device) if best is not None and (torn or findings.felt) else None
        reason = findings.reason or "no traffic is given, so nothing is known to be better than this matrix"
        return Audit(launch, findings, rows, (), None, best, None, torn or (reason,), text, kept)
    paid = [price(demand_pattern(d.op, launch.groups(d.axes), d.nbytes), fabric, algorithm) for d in demands]
    whole = [d.count * p.seconds for d, p in zip(demands, paid, strict=True)]
    waited = [d.exposed_seconds(s) for d, s in zip(demands, whole, strict=True)]
    total = sum(waited)
    fastest, ranking = ranking[0], _steady_rows(launch, ranking, total)
    best = _best(launch, findings, ranking, total)
    shares = tuple(
        CostShare(d, now, all_of - now, then.seconds, p.algorithm, *_busiest(_leaving(p, d, fabric), fabric))
        for d, now, all_of, then, p in zip(demands, waited, whole, best.shares, paid, strict=True)
    )
    causes, text = torn, None
    if total > best.seconds * (1 + ADVISED):
        losing = sorted(shares, key=lambda s: s.best_seconds - s.seconds)
        # One that loses next to nothing is no cause; the worst always is one.
        losing = [s for s in losing if s.seconds - s.best_seconds > best.seconds * WORTH] or losing[:1]
        causes += tuple(dict.fromkeys(cause_of(launch, findings, s, best.placement, algorithm) for s in losing))
        joint = all(len(s.demand.axes) > 1 for s in losing)
        if joint and _own_placement(launch, findings) == best.placement and not findings.felt:
            # What is left are joint axes, whose members come in the order of coordinates, not of devices.
            causes = tuple(f"{c}: list the members of these groups in the order of their devices" for c in causes)
        else:
            text = fix(launch, best.placement, together, device)
    elif torn:
        text = fix(launch, best.placement, together, device)
    if not causes:
        kept_text = "".join(f" that keeps `{axis}` inside {article(level)}" for axis, level in kept[:1])
        least = next((x for x in (SAME, WORTH) if total <= fastest.seconds * (1 + x)), ADVISED)
        worth = "" if least == SAME else f" by {100 * least:g} % or more"
        causes = (f"no matrix{kept_text} is faster for this traffic{worth}",)
        if total > fastest.seconds * (1 + ADVISED):
            causes = (
                f"only a matrix that takes tensor parallelism out of a node is faster, by {total / fastest.seconds:.2f}"
                f" times, where prices that are 20 % off take {SURE:g}",
            )
    return Audit(launch, findings, rows, shares, total, best.placement, best.seconds, causes, text, kept)


def _torn_axes(launch: Launch, inside: Mapping[str, str] | None) -> tuple[str, ...]:
    """A sentence for each axis that spans several of the units inside one of which it is to stay."""
    found: list[str] = []
    for axis, j in outermost(inside, launch.mesh, launch.topology).items():
        spans = units_spanned(launch.groups((axis,)), launch.topology)
        if j and (most := int(spans[j - 1].max())) > 1:
            unit = launch.topology.levels[j - 1].name
            found.append(f"`{axis}` spans {count_units(most, unit)}, and is to stay inside one")
    return tuple(found)


def _own_placement(launch: Launch, findings: Findings) -> Placement | None:
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
    hosts = [validation.text("a host's name", name) for name in validation.items("hosts", hosts, "names of hosts")]
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        array = np.empty(0)
    if array.dtype.kind not in "iu":
        raise TopologyError(
            f"ids is {excerpt(ids)}; legal are a Launch, or topology ids, whole numbers in the mesh's shape"
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
    mesh: Mesh,
    topology: Topology,
    demands: Sequence[Demand],
    inside: Mapping[str, str] | None = None,
    algorithm: str = "auto",
) -> list[PricedPlacement]:
    """Return every placement, in every order, with its price where every demand is a stock collective, cheapest first.

    Groups list their members in level-major order. Raises as `movement.placing.place.candidates`.
    """
    every = [row for p in candidates(mesh, topology, inside) for row in orders(p)]
    return rank_placements(every, demands, "stock", algorithm)


def _steady_rows(launch: Launch, ranking: Sequence[PricedPlacement], total: float) -> Sequence[PricedPlacement]:
    """The rows that leave tensor parallelism in the nodes where it is, or gain `SURE`; all where that leaves none."""
    mesh, topology = launch.mesh, launch.topology
    names = [level.name for level in topology.levels]
    axes = [k for k, axis in enumerate(mesh.axes) if name_of(axis) == "tp"]
    if "node" not in names or not axes:
        return ranking
    j = names.index("node")
    now = [int(units_spanned(launch.groups((mesh.axes[k],)), topology)[j].max()) for k in axes]
    return [
        row
        for row in ranking
        if total > row.seconds * SURE
        or all(math.prod(row.placement.matrix[k][: j + 1]) <= n for k, n in zip(axes, now, strict=True))
    ] or ranking


def _best(launch: Launch, findings: Findings, ranking: Sequence[PricedPlacement], total: float) -> PricedPlacement:
    """Of the placements that are as good as the cheapest the launch's own, else the most local one.

    Where some of them are worth a new launch, which takes `total` seconds now, it is one of those.
    """
    equal = [row for row in ranking if row.seconds <= ranking[0].seconds * (1 + WORTH)]
    better = [row for row in equal if total > row.seconds * (1 + ADVISED)] or equal
    own = _own_placement(launch, findings)
    least = min(row.crossing_bytes for row in better)
    local = [row for row in better if row.crossing_bytes == least]
    return next((row for row in better if row.placement == own), None) or _easiest(launch, local)


def _easiest(launch: Launch, rows: Sequence[PricedPlacement]) -> PricedPlacement:
    """The first that ranks in row-major order are, else the first."""
    natural = np.arange(launch.mesh.size)
    return next(
        (r for r in rows if np.array_equal(ranks_by_coordinate(launch, r.placement).reshape(-1), natural)), rows[0]
    )


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
    return _leaving(price(demand_pattern(demand.op, members, demand.nbytes), fabric), demand, fabric)


def _leaving(paid: Price, demand: Demand, fabric: Fabric) -> list[Floats]:
    """The bytes that leave units, of a price."""
    found: list[Floats] = []
    for j, wires in enumerate(fabric.wires):
        seconds = paid.load[j] if paid.load else None
        if seconds is None or paid.row is None:
            found.append(np.zeros((wires.units, 1)))
        else:
            found.append(demand.count * paid.row.share(j < fabric.far) * fabric.unit_bytes(j, seconds))
    return found
