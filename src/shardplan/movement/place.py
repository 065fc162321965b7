"""The verb `place`: every placement of a mesh on a topology, ranked for the traffic of a job (arXiv 2110.10548).

The price of a placement is the sum over the job's collectives of count times seconds. A reduction is priced at its best
program, or, with `programs="stock"`, as the one collective it is; all groups of all instances load the wires together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from shardplan.core.mesh import Mesh
from shardplan.core.ops import AllToAll
from shardplan.core.pattern import Groups, Messages, Pattern
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError
from shardplan.hardware.bounds import all_gather_bound, all_reduce_bound, reduce_scatter_bound
from shardplan.hardware.certificate import issue
from shardplan.hardware.cost import price
from shardplan.hardware.fabric import Fabric
from shardplan.hardware.factors import Factor, factors
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.plan import Plan
from shardplan.hardware.tariff import offsets, tariff
from shardplan.hardware.topology import Topology
from shardplan.hardware.where import step_prices
from shardplan.movement.fit import chain
from shardplan.movement.instructions import Grouping, Instruction
from shardplan.movement.payload import payload
from shardplan.movement.reduce import check_path
from shardplan.movement.reduction_path import cheapest_path, least_seconds
from shardplan.movement.traffic import OPS, Demand, Traffic, demands_of, program_traffic

Programs = Literal["best", "stock"]
ELEMENT = 4  # bytes: the payloads of plans are padded to whole f32 elements for each member
# Devices up to which renamings around a degraded unit are tried.
MOST_RENAMED = 1024


@dataclass(frozen=True, slots=True)
class Share:
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
    shares: tuple[Share, ...]
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


@dataclass(frozen=True)
class Degraded:
    """What a slow unit costs.

    Args:
        units: Names of the degraded units, such as `node[2]`.
        healthy: The placement that is best without the degradation.
        regret: Its seconds over those of the best, with the degradation.
        renaming: Topology id to use in place of each, `[devices]`: swaps a degraded unit with a sibling. None where no
            swap helps.
        gain: Seconds of the best placement over those after the renaming.
    """

    units: tuple[str, ...]
    healthy: Placement
    regret: float
    renaming: tuple[int, ...] | None
    gain: float


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
        return _degraded(self)


def place(
    mesh: Mesh | Program,
    topology: Topology,
    traffic: Traffic | None = None,
    *,
    programs: Programs = "best",
    algorithm: str = "auto",
    bounds: Mapping[tuple[str, str], tuple[int, int]] | None = None,
    inside: Mapping[str, str] | None = None,
) -> Ranking:
    """Rank every placement of a mesh on a topology for the traffic of a job.

    Args:
        mesh: The mesh, or a program, whose collectives are the traffic.
        topology: As many devices.
        traffic: For a tuple of axes the bytes of an all-reduce a step, or a list of (op, bytes, count); ops as in
            `traffic.OPS`, bytes those that a member holds before.
        programs: `"best"`: every reduction runs as its best program; `"stock"`: as one collective.
        algorithm: `auto`, the cheapest for each step, or ring, tree or halving-doubling.
        bounds: As for `placements`.
        inside: As for `placements`.

    Returns:
        Placements, best first; of equal prices those with less inside the outer levels first.

    Raises:
        TopologyError: Sizes differ, or an option names an unknown axis or level.
        LayoutError: The traffic is malformed, or no placement satisfies the options.

    Source: arXiv 2110.10548.

    >>> best = place(Mesh(data=4, tensor=4), Topology.load("gcp-v100x8", nodes=2), {("data",): 2e9, ("tensor",): 5e8})
    >>> best[0].placement.describe(), round(best.placement_gain, 2)
    ('data=[1, 4], tensor=[2, 2]', 3.41)
    """
    others: tuple[Pattern, ...] = ()
    if isinstance(mesh, Program):
        if traffic is not None:
            raise LayoutError("a program says its own traffic; give a mesh with traffic, or a program without")
        mesh, found, others = program_traffic(mesh)
    elif traffic is None:
        raise LayoutError('a mesh needs its traffic: such as {("data",): 2e9}, all-reduce bytes a step')
    else:
        found = tuple(d for d in demands_of(traffic, mesh) if d.nbytes > 0 and d.count > 0)
        if not found:
            raise LayoutError("there is no traffic to place: give bytes above 0 for at least one tuple of axes")
    if programs not in ("best", "stock"):
        raise LayoutError(f"programs={programs!r} is unknown; legal are 'best' and 'stock'")
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
        own = tuple(Share(d, best[k], stock[k]) for d, (best, stock) in zip(demands, shares, strict=True))
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


def stock_seconds(found: tuple[Factor, ...], topology: Topology, demand: Demand, algorithm: str = "auto") -> float:
    """Price a demand as the one collective that it is.

    Args:
        found: The factors of its axes on a placement.
        topology: The hardware.
        demand: The collective; its count is not applied.
        algorithm: As for `hardware.cost.price`.

    Returns:
        Seconds.
    """
    digits = tuple(d for f in found for d in f.digits)
    members = math.prod(d.size for d in digits)
    if members == 1:
        return 0.0
    if OPS[demand.op] is None:
        fixed, rate = _message_price(tuple((d.size, d.stride) for d in digits), topology, demand.op)
        return fixed + rate * demand.nbytes
    return tariff(topology, algorithm).seconds(demand.op, digits, (), demand.nbytes)


@lru_cache(maxsize=4096)
def _message_price(digits: tuple[tuple[int, int], ...], topology: Topology, op: str) -> tuple[float, float]:
    """Seconds of an all-to-all, or of a shift to the next member, at 0 bytes, and a byte."""
    ids = np.arange(topology.size)
    for size, stride in digits:
        ids = ids[ids // stride % size == 0]
    members = ids[:, None] + offsets(digits)
    if op == "all_to_all":
        one = price(Groups("all_to_all", members, np.ones(len(members))), Fabric(topology))
    else:
        sender, receiver = members[:, :-1].reshape(-1), members[:, 1:].reshape(-1)
        one = price(Messages(sender, receiver, np.ones(len(sender))), Fabric(topology))
    return one.alpha, one.transfer


def demand_plan(
    placement: Placement, demand: Demand, programs: Programs = "best", algorithm: str = "auto"
) -> Plan | None:
    """Return the program of a demand on a placement; None for a permute, which is one message.

    Args:
        placement: Where.
        demand: The collective.
        programs: `"best"`, or `"stock"` for the one collective.
        algorithm: As for `hardware.cost.price`.

    Returns:
        A plan on the types of the payload.
    """
    members = math.prod(placement.mesh.span(a).size for a in demand.axes)
    if demand.op == "permute":
        return None
    letters = OPS[demand.op]
    if letters is None:
        mesh = placement.mesh_split()
        each = max(1, math.ceil(demand.nbytes / (ELEMENT * members)))
        others = tuple(a for a in mesh.axes if a not in demand.axes)
        groups = mesh.size // members
        axes = tuple(a for f in factors(placement, demand.axes) for a in f.axes)
        source = TensorType("f32", (members, members, each * groups), (axes, (), others), mesh)
        ops = [AllToAll(0, 1, axes)] if members > 1 else []
        program = chain(ops, source)
        return Plan(program, issue(program, (source,), program.output_types, placement, None, False, None, algorithm))
    view = payload(placement, demand.axes, demand.payload(members))
    before, after = (letter * len(view.factors) for letter in letters)
    source, target = view.type(before), view.type(after)
    if programs == "stock" and view.factors:
        ops = [view.op(Instruction(Grouping(tuple(range(len(view.factors)))), demand.op))]
    else:
        path = cheapest_path(view, placement.topology, before, after, algorithm) or []
        if letters[0] == "P":
            check_path(view, path, after)
        ops = view.path_ops(path)
    program = chain(ops, source)
    return Plan(program, issue(program, (source,), (target,), placement, None, programs == "best", None, algorithm))


def demand_bound(placement: Placement, demand: Demand) -> float:
    """Return a lower bound in seconds of a demand, all groups together, by cut, count and gather; see `bounds`."""
    fabric = Fabric(placement.topology)
    ids = placement.device_mesh()
    at = [placement.mesh.axes.index(a) for a in demand.axes]
    rest = [i for i in range(ids.ndim) if i not in at]
    members = np.ascontiguousarray(ids.transpose([*rest, *at])).reshape(-1, math.prod(ids.shape[i] for i in at))
    nbytes = np.full(len(members), demand.nbytes)
    match demand.op:
        case "all_reduce":
            least = all_reduce_bound(members, nbytes, fabric)
        case "reduce_scatter":
            least = reduce_scatter_bound(members, nbytes, fabric)
        case "all_gather":
            least = all_gather_bound(members, nbytes, fabric)
        case _:
            return 0.0
    return least + fabric.launch + float(fabric.latencies().min()) if least > 0 else 0.0


def _degraded(ranking: Ranking) -> Degraded | None:
    best = ranking[0]
    topology = best.placement.topology
    slow = [(level, unit) for level in topology.levels for unit, _ in level.degraded]
    if not slow:
        return None
    levels = tuple(replace(level, degraded=()) for level in topology.levels)
    sound = replace(topology, levels=levels)
    demands = [share.demand for share in best.shares]
    healthy = min(ranking, key=lambda row: _total(replace(row.placement, topology=sound), demands, row))
    names = tuple(f"{level.name}[{unit}]" for level, unit in slow)
    renaming, saved = None, 0.0
    if topology.size <= MOST_RENAMED:
        plans = [(demand_plan(best.placement, d, best.programs, best.algorithm), d.count) for d in demands]

        def total(ids: NDArray[np.int64]) -> float:
            """Seconds of the programs after a renaming; what has no program is left out."""
            fabric = Fabric(topology, ids[best.placement.position()])
            return sum(
                count * sum(p.seconds for p in step_prices(plan.program, fabric, best.algorithm))
                for plan, count in plans
                if plan is not None
            )

        now = total(np.arange(topology.size))
        for ids in _swaps(topology):
            gained = now - total(ids)
            if gained > max(saved, 1e-9 * now):
                renaming, saved = tuple(ids.tolist()), gained
    regret = healthy.seconds / best.seconds if best.seconds > 0 else 1.0
    gain = best.seconds / (best.seconds - saved) if best.seconds > saved else 1.0
    return Degraded(names, healthy.placement, regret, renaming, gain)


def _total(placement: Placement, found: Sequence[Demand], row: Placed) -> float:
    return sum(sum(_prices([placement], e, row.programs, row.algorithm)[0]) for e in found)


def _swaps(topology: Topology) -> Iterator[NDArray[np.int64]]:
    """Yield renamings of devices that swap a degraded unit with one of its siblings."""
    ids = np.arange(topology.size)
    for level, stride in zip(topology.levels, topology.strides, strict=True):
        for unit, _ in level.degraded:
            parent = unit // level.size * level.size
            for sibling in range(parent, parent + level.size):
                if sibling == unit:
                    continue
                swapped = ids.copy()
                one, two = (slice(u * stride, (u + 1) * stride) for u in (unit, sibling))
                swapped[one], swapped[two] = ids[two], ids[one]
                yield swapped
