"""A placement with its price: the sum over a job's collectives of count times seconds (arXiv 2110.10548).

A reduction is priced at its best program, or, with `programs="stock"`, as the one collective it is; all groups of all
instances load the wires together.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardplan.core.pattern import Pattern
from shardplan.hardware.level_factors import factors
from shardplan.hardware.placement import Matrix, Placement
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.placing.demand import Programs, demand_bound, demand_plan, stock_seconds
from shardplan.movement.placing.traffic import Demand
from shardplan.movement.reductions.type_graph import cheapest_path, factor_states
from shardplan.notebook import notebook_html
from shardplan.plans.plan import Plan

SAME = 1e-9  # relative: seconds closer than this are equal, whatever the order in which they were summed


@dataclass(frozen=True, slots=True)
class DemandShare:
    """What one demand of the traffic costs a step on a placement, its count included, in seconds.

    `stock_seconds` is the price of the collective as it is, `seconds` that of the program taken, both without what
    compute hides.
    """

    demand: Demand
    seconds: float
    stock_seconds: float


@dataclass(frozen=True)
class PricedPlacement:
    """A placement with its price."""

    placement: Placement
    seconds: float  # of a step's traffic
    shares: tuple[DemandShare, ...]  # one for each demand
    other_seconds: float  # of communication that is no collective over whole axes (of a program)
    programs: Programs
    algorithm: str  # what collectives are priced under

    _repr_html_ = notebook_html

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
        demands = [share.demand for share in self.shares]
        return sum(d.exposed_seconds(d.count * demand_bound(self.placement, d)) for d in demands)

    @property
    def crossing_bytes(self) -> tuple[float, ...]:
        """For each level the least bytes that leave its units in a step, over all groups: the less, the more local.

        A reduction's or a gather's groups of n units pass its payload n - 1 times, an all-reduce's twice that.
        """
        mesh, found = self.placement.mesh, [0.0] * len(self.placement.topology.levels)
        for share in self.shares:
            d = share.demand
            rows = [self.placement.matrix[mesh.axes.index(a)] for a in d.axes]
            members = math.prod(mesh.shape[a] for a in d.axes)
            units = itertools.accumulate((math.prod(column) for column in zip(*rows, strict=True)), operator.mul)
            for j, n in enumerate(units):
                passes = (n - 1) * (2 if d.letters == ("P", "U") else 1)
                if not all(d.letters) and not d.shifts:  # every member has a part for each that is elsewhere
                    passes = members * (n - 1) / n
                found[j] += d.count * d.payload(members) * passes * (mesh.size // members)
        return tuple(found)


def rank_placements(
    candidates: Sequence[Placement],
    demands: Sequence[Demand],
    programs: Programs = "best",
    algorithm: str = "auto",
    others: Sequence[tuple[int, Pattern]] = (),
) -> list[PricedPlacement]:
    """Return placements of one mesh on one topology with their prices, best first; of equal prices the more local.

    There is at least one. `others` is what moves beside the demands, with how often; its device ids are the mesh's.
    """
    shares = [_prices(candidates, demand, programs, algorithm) for demand in demands]
    rows: list[PricedPlacement] = []
    for k, placement in enumerate(candidates):
        fabric = Fabric(placement.topology, placement.position()) if others else None
        rest = 0.0 if fabric is None else sum(n * price(p, fabric, algorithm).seconds for n, p in others)
        own = tuple(DemandShare(d, best[k], stock[k]) for d, (best, stock) in zip(demands, shares, strict=True))
        rows.append(PricedPlacement(placement, sum(s.seconds for s in own) + rest, own, rest, programs, algorithm))
    return _local_first(rows)


def _local_first(rows: Sequence[PricedPlacement]) -> list[PricedPlacement]:
    """Rows by seconds, and of equal ones those first from whose outer units less must leave."""
    found: list[PricedPlacement] = []
    equal: list[PricedPlacement] = []
    for row in sorted(rows, key=lambda row: row.seconds):
        if equal and row.seconds > equal[0].seconds * (1 + SAME):
            found += sorted(equal, key=lambda row: row.crossing_bytes)
            equal = []
        equal.append(row)
    return found + sorted(equal, key=lambda row: row.crossing_bytes)


def in_best_order(rows: Sequence[PricedPlacement]) -> list[PricedPlacement]:
    """Return of rows, best first, every matrix in its best order of axes on each level; of equals in the mesh's."""
    best: dict[Matrix, PricedPlacement] = {}
    for row in rows:
        first = best.setdefault(row.placement.matrix, row)
        if row.placement == replace(row.placement, order=()) and row.seconds <= first.seconds * (1 + SAME):
            best[row.placement.matrix] = row
    return _local_first(list(best.values()))


def _prices(
    candidates: Sequence[Placement], demand: Demand, programs: Programs, algorithm: str
) -> tuple[list[float], list[float]]:
    """Seconds of a demand on every placement: as the program taken, and stock."""
    topology = candidates[0].topology
    found = [factors(p, demand.axes) for p in candidates]
    stock = [demand.exposed_seconds(demand.count * stock_seconds(f, topology, demand, algorithm)) for f in found]
    if programs == "stock" or not all(demand.letters):
        return stock, stock
    amount = demand.payload(math.prod(f.size for f in found[0]))
    best = [
        cheapest_path(
            tuple(f.units for f in one), amount, topology, *factor_states(demand.op, len(one)), algorithm
        ).seconds
        for one in found
    ]
    return [demand.exposed_seconds(demand.count * s) for s in best], stock
