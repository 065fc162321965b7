"""The verb `place`: every placement of a mesh on a topology, ranked for the traffic of a job (arXiv 2110.10548).

The price of a placement is the sum over the job's collectives of count times seconds. A reduction is priced at its best
program, or, with `programs="stock"`, as the one collective it is; all groups of all instances load the wires together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

from shardplan.core import border
from shardplan.core.mesh import Mesh
from shardplan.core.pattern import Pattern
from shardplan.core.program import Program
from shardplan.core.tensor import mesh_of
from shardplan.errors import LayoutError, TopologyError, shown
from shardplan.hardware.cost import ALGORITHM_NAMES, price
from shardplan.hardware.fabric import Fabric
from shardplan.hardware.level_factors import factors
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.topology import Topology, topology_of
from shardplan.movement.placing.demand import Programs, demand_bound, demand_plan, stock_seconds
from shardplan.movement.placing.traffic import OPS, Demand, Traffic, demands_of, program_traffic
from shardplan.movement.reductions.shortest_path import least_seconds
from shardplan.plans.plan import Plan

if TYPE_CHECKING:
    from shardplan.movement.placing.degraded import Degraded


@dataclass(frozen=True, slots=True)
class DemandShare:
    """What one demand of the traffic costs a step on a placement, its count included, in seconds.

    `stock_seconds` is the price of the collective as it is, `seconds` that of the program taken.
    """

    demand: Demand
    seconds: float
    stock_seconds: float


@dataclass(frozen=True)
class Placed:
    """A placement with its price.

    Args:
        placement: Where the mesh lies.
        seconds: Of a step's traffic.
        shares: Of each demand.
        other_seconds: Of communication that is no collective over whole axes (of a program).
        programs: `"best"` or `"stock"`.
        algorithm: What collectives are priced under.
    """

    placement: Placement
    seconds: float
    shares: tuple[DemandShare, ...]
    other_seconds: float
    programs: Programs
    algorithm: str

    @property
    def stock_seconds(self) -> float:
        """Of a step's traffic with every collective as it is."""
        return sum(share.stock_seconds for share in self.shares) + self.other_seconds

    @cached_property
    def plans(self) -> Mapping[tuple[str, ...], Plan | tuple[Plan, ...]]:
        """The program of every demand, by axes: a plan, or several where the axes have several demands.

        A permute to the next member has no plan: it is one message.
        """
        found: dict[tuple[str, ...], list[Plan]] = {}
        for share in self.shares:
            plan = demand_plan(self.placement, share.demand, self.programs, self.algorithm)
            if plan is not None:
                found.setdefault(share.demand.axes, []).append(plan)
        return {axes: plans[0] if len(plans) == 1 else tuple(plans) for axes, plans in found.items()}

    @cached_property
    def lower_bound_seconds(self) -> float:
        """What no point-to-point algorithm can beat on this placement: the sum over the demands."""
        return sum(share.demand.count * demand_bound(self.placement, share.demand) for share in self.shares)


class Ranking(Sequence[Placed]):
    """Placements, best first, and what placing well is worth."""

    def __init__(self, rows: Sequence[Placed]) -> None:
        """Keep the rows."""
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Placed: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Placed]: ...
    def __getitem__(self, index: int | slice) -> Placed | Sequence[Placed]:
        """Return a row, or rows."""
        return self.rows[index]

    def __len__(self) -> int:
        """Return the number of placements."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Placed]:
        """Yield the rows, best first."""
        return iter(self.rows)

    @property
    def placement_gain(self) -> float:
        """Worst over best placement, every collective as it is."""
        stock = [row.stock_seconds for row in self.rows]
        return max(stock) / min(stock) if min(stock) > 0 else 1.0

    def mitigation(self, row: Placed) -> float:
        """Return what the best programs leave of a placement's loss: its seconds over the best placement's."""
        return row.seconds / self.rows[0].seconds if self.rows[0].seconds > 0 else 1.0

    @cached_property
    def degraded(self) -> Degraded | None:
        """What degraded units cost, or None where there are none."""
        from shardplan.movement.placing.degraded import degraded

        return degraded(self)


def place(
    mesh: Mesh | Program | str,
    topology: Topology | str,
    traffic: Traffic | str | None = None,
    *,
    programs: Programs = "best",
    algorithm: str = "auto",
    bounds: Mapping[tuple[str, str], tuple[int, int]] | None = None,
    inside: Mapping[str, str] | None = None,
) -> Ranking:
    """Rank every placement of a mesh on a topology for the traffic of a job.

    Args:
        mesh: The mesh or its text, or a program, whose collectives are the traffic.
        topology: As many devices; a topology or its text, such as the name of a preset.
        traffic: For a tuple of axes the bytes of an all-reduce a step, or a list of (op, bytes, count); ops as in
            `traffic.OPS`, bytes those that a member holds before. Or the text that the command takes: `"data=2GB"`.
        programs: `"best"`: every reduction runs as its best program; `"stock"`: as one collective.
        algorithm: `auto`, the cheapest for each step, or ring, tree or halving-doubling.
        bounds: As for `placements`.
        inside: As for `placements`.

    Returns:
        Placements, best first; of equal prices those with less inside the outer levels first.

    Raises:
        TopologyError: Sizes differ, or an option names an unknown axis or level.
        LayoutError: The traffic is malformed, no placement satisfies the options, or an argument is of another kind.

    Source: arXiv 2110.10548.

    >>> best = place(Mesh(data=4, tensor=4), Topology.load("gcp-v100x8", nodes=2), {("data",): 2e9, ("tensor",): 5e8})
    >>> best[0].placement.describe(), round(best.placement_gain, 2)
    ('data=[1, 4], tensor=[2, 2]', 3.41)
    """
    others: tuple[Pattern, ...] = ()
    topology = topology_of("topology", topology)
    border.choice("algorithm", algorithm, ALGORITHM_NAMES, TopologyError)
    if isinstance(mesh, Program):
        if traffic is not None:
            raise LayoutError("a program says its own traffic; give a mesh with traffic, or a program without")
        mesh, found, others = program_traffic(mesh)
    elif traffic is None:
        raise LayoutError('a mesh needs its traffic: such as {("data",): 2e9}, all-reduce bytes a step')
    else:
        mesh = mesh_of("mesh", mesh)
        found = tuple(d for d in demands_of(traffic, mesh) if d.nbytes > 0 and d.count > 0)
        if not found:
            raise LayoutError("there is no traffic to place: give bytes above 0 for at least one tuple of axes")
    if not isinstance(programs, str) or programs not in ("best", "stock"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"programs={shown(programs)} is unknown; legal are 'best' and 'stock'")
    places = list(placements(mesh, topology, bounds, inside))
    if not places:
        raise LayoutError(f"no placement of {mesh} on {topology.describe()} satisfies the options")
    return rank(places, found, programs, algorithm, others)


def rank(
    places: Sequence[Placement],
    demands: Sequence[Demand],
    programs: Programs = "best",
    algorithm: str = "auto",
    others: Sequence[Pattern] = (),
) -> Ranking:
    """Rank placements of one mesh on one topology.

    Args:
        places: At least one.
        demands: The collectives of a step.
        programs: As for `place`.
        algorithm: As for `place`.
        others: All other communication of a step; device ids are the mesh's.

    Returns:
        The placements, best first.
    """
    shares = [_prices(places, demand, programs, algorithm) for demand in demands]
    rows: list[Placed] = []
    for k, where in enumerate(places):
        fabric = Fabric(where.topology, where.position()) if others else None
        rest = 0.0 if fabric is None else sum(price(p, fabric, algorithm).seconds for p in others)
        own = tuple(DemandShare(d, best[k], stock[k]) for d, (best, stock) in zip(demands, shares, strict=True))
        rows.append(Placed(where, sum(s.seconds for s in own) + rest, own, rest, programs, algorithm))
    return Ranking(sorted(rows, key=lambda row: row.seconds))


def _prices(
    places: Sequence[Placement], demand: Demand, programs: Programs, algorithm: str
) -> tuple[list[float], list[float]]:
    """Seconds of a demand on every placement: as the program taken, and stock."""
    topology = places[0].topology
    found = [factors(p, demand.axes) for p in places]
    stock = [demand.count * stock_seconds(f, topology, demand, algorithm) for f in found]
    letters = OPS[demand.op]
    if programs == "stock" or letters is None:
        return stock, stock
    amount = demand.payload(math.prod(f.size for f in found[0]))
    best = least_seconds(found, topology, amount, *letters, algorithm)
    return [demand.count * s for s in best], stock
