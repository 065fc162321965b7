"""The verb: `redistribute(source, destination)` returns the cheapest certified plan found.

Without a topology the price is the bytes that the worst device receives, summed over steps, plus 0.2 % of
`bound_bytes` per round; with one it is predicted seconds. Plans are deterministic, and cached by request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from shardplan.core import border
from shardplan.core.accounting import account, bound_bytes
from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType, same, type_of
from shardplan.errors import Infeasible, LayoutError
from shardplan.hardware.certificate import issue
from shardplan.hardware.cost import Fabric, linear_cost
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.plan import Plan
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import limit_of
from shardplan.hardware.where import Where, fabric_of, where_of
from shardplan.movement.candidates import Candidate, Request, candidates, make_problem
from shardplan.movement.crossmesh import crossings
from shardplan.movement.fit import Choice, Chosen, Rules, consider, offer, price, too_little
from shardplan.movement.payload import recognise
from shardplan.movement.reduction_path import reduction_ops
from shardplan.movement.units import Problem

MOST_PLACEMENTS = 64


def redistribute(
    src: TensorType | str | Sequence[TensorType | str],
    dst: TensorType | str | Sequence[TensorType | str],
    topology: Topology | Placement | str | None = None,
    memory_limit: float | str | None = None,
    portable: bool = False,
    *,
    mesh: Mesh | str | None = None,
) -> Plan:
    """Return a certified plan from `src` to `dst`; two lists are a batch and become one plan.

    With `mesh` types may be texts; a topology (`"dgx-h100"`), a mesh and `memory_limit` (`"1 GB"`) may be texts too.
    `memory_limit` (bytes) bounds the workspace of every device; without it only shards between steps are bounded, by
    the larger of source and destination. `portable` admits no exchange over more than half of the devices. With a
    `Topology` the best placement of a default mesh is taken, with a `Placement` that one; it serves every mesh of the
    devices that it places. Raises `LayoutError` for types that do not describe one array, `Infeasible` for a limit
    below `absolute_least_bytes`; from there to `least_bytes` a plan needs more than 64 chunks a step.
    Source: arXiv 2112.01075; `docs/paper-2112.01075.md` says how the search differs.

    >>> from shardplan.core.mesh import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> plan = redistribute(TensorType("f32", (8, 8), ("x", "y"), mesh), TensorType("f32", (8, 8), ("y", "x"), mesh))
    >>> [step.op.name for step in plan.program.steps], plan.certificate.status
    (['permute'], 'floor')
    >>> plan == redistribute("f32[8@x, 8@y]", "f32[8@y, 8@x]", mesh="x=2,y=2")
    True
    """
    return plan_kept(src, dst, topology, memory_limit, portable, mesh=mesh, keep=False)


def plan_kept(
    src: TensorType | str | Sequence[TensorType | str],
    dst: TensorType | str | Sequence[TensorType | str],
    topology: Topology | Placement | str | None = None,
    memory_limit: float | str | None = None,
    portable: bool = False,
    *,
    mesh: Mesh | str | None = None,
    keep: bool | Sequence[bool] = True,
) -> Plan:
    """Return the plan of `redistribute` for a caller who keeps sources: under a limit they count to the end.

    `keep` says it of all sources, or of each. The program of a plan under a limit then lists the kept inputs as further
    outputs, behind those of the destinations; without a limit there is nothing to count, and it lists none.
    """
    where, limit = where_of("topology", topology), limit_of("memory limit", memory_limit)
    portable = border.flag("portable", portable)
    keep = keep if limit is not None else False
    if isinstance(src, (TensorType, str)) != isinstance(dst, (TensorType, str)):
        raise LayoutError("redistribute takes two types, or two lists of types of equal length")
    if isinstance(src, (TensorType, str)):
        source, destination = type_of("the source", src, mesh), type_of("the destination", dst, mesh)
        check_pair(source, destination)
        return _cached(source, destination, where, limit, portable, _each(keep, 1)[0])
    sources = tuple(type_of(f"source {k}", t, mesh) for k, t in enumerate(border.items("src", src, "types")))
    destinations = tuple(type_of(f"destination {k}", t, mesh) for k, t in enumerate(border.items("dst", dst, "types")))
    if len(sources) != len(destinations):
        raise LayoutError(
            f"a batch of {len(sources)} sources and {len(destinations)} destinations; give as many of each"
        )
    for s, t in zip(sources, destinations, strict=True):
        check_pair(s, t)
    return _cached_batch(sources, destinations, where, limit, portable, _each(keep, len(sources)))


def _each(keep: bool | Sequence[bool], count: int) -> tuple[bool, ...]:
    kept = (keep,) * count if isinstance(keep, bool) else tuple(keep)
    if len(kept) != count:
        raise LayoutError(f"keep says something of {len(kept)} sources, but there are {count}; give one for each")
    return kept


@lru_cache(maxsize=64)
def _cached_batch(
    sources: tuple[TensorType, ...],
    destinations: tuple[TensorType, ...],
    where: Where | None,
    limit: int | None,
    portable: bool,
    keep: tuple[bool, ...],
) -> Plan:
    from shardplan.movement.batch import plan_batch

    return plan_batch(sources, destinations, where, limit, portable, keep)


def check_pair(s: TensorType, t: TensorType) -> None:
    """Raise `LayoutError` unless the two types describe one array."""
    if s.shape != t.shape or s.dtype != t.dtype:
        raise LayoutError(f"cannot redistribute {s} to {t}: dtype and global shape must be equal")
    kinds = {x.layout.reduction for x in (s, t) if x.layout.partial}
    if len(kinds) > 1 and s.layout.partial and t.layout.partial and s.mesh == t.mesh:
        common = set(s.mesh.expand(s.layout.partial)) & set(t.mesh.expand(t.layout.partial))
        if common:
            raise LayoutError(f"cannot redistribute {s} to {t}: an axis is partial with two different reductions")


@lru_cache(maxsize=4096)
def _cached(s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool, keep: bool) -> Plan:
    choice, place = best_program(s, t, where, limit, portable, keep)
    return Plan(choice.program, issue(choice.program, (s,), (t,), place, limit, choice.exact, choice.books))


def spots(where: Where | None, s: TensorType, t: TensorType) -> Iterator[Where | None]:
    """Yield where to price a plan: every placement of a default mesh on a topology of its size, else `where` itself."""
    mesh = s.mesh
    free = mesh == t.mesh and isinstance(where, Topology) and mesh.devices == tuple(range(where.size))
    if free and isinstance(where, Topology):
        for k, place in enumerate(placements(mesh, where)):
            if k >= MOST_PLACEMENTS:
                return
            yield place
    else:
        yield where


@lru_cache(maxsize=4096)
def best_program(
    s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool, keep: bool = False
) -> tuple[Chosen, Where | None]:
    """Return the cheapest program and the placement it was priced on; raises `Infeasible`.

    Of programs of more than 64 chunks a step only where none of fewer keeps the limit.
    """
    few, many = _everywhere(s, t, where, limit, portable, keep)
    if few.best is not None:
        return few.best
    least = None if limit is None else least_workspaces(s, t, where, portable, keep)
    if limit is None or least is None:
        raise _infeasible(s, t, portable)
    for best, (low, tightest) in zip((None, many.best), least, strict=True):
        if best is not None:
            return best
        if low <= limit:
            return tightest
    raise too_little(f"redistribute {s} to {t}", limit, *(low for low, _ in least))


@dataclass(slots=True)
class _Found:
    """The best of a pick over placements, the least workspace, and the program that has it."""

    best: tuple[Chosen, Where | None] | None = None
    least_bytes: float = math.inf
    least: tuple[Chosen, Where | None] | None = None


def _everywhere(
    s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool, keep: bool
) -> tuple[_Found, _Found]:
    """Return what is found with few chunks a step, and with many, on any of the `spots`."""
    bound = bound_bytes((s,), (t,))
    out = _Found(), _Found()
    for place in spots(where, s, t):
        fabric = None if place is None else fabric_of(place, (s.mesh, t.mesh))
        rules = Rules(bound, limit, portable, fabric, place if isinstance(place, Placement) else None, keep)
        choice = choose(s, t, rules)
        for found, pick in zip(out, (choice.few, choice.many), strict=True):
            if pick.best is not None and (found.best is None or pick.best.price < found.best[0].price):
                found.best = pick.best, place
            if pick.least is not None and pick.least_bytes < found.least_bytes:
                books = account(pick.least)
                found.least_bytes = pick.least_bytes
                found.least = Chosen(pick.least, books, False, price(pick.least, books, rules), ()), place
    return out


Least = tuple[int, tuple[Chosen, Where | None]]


@lru_cache(maxsize=1024)
def least_workspaces(
    s: TensorType, t: TensorType, where: Where | None, portable: bool, keep: bool = False
) -> tuple[Least, Least] | None:
    """Return the least workspace of plans with few chunks a step, and of any, each with its plan; None: no plan at all.

    A limit decides which candidates there are, so each is searched again just below until nothing is left.
    """
    known: dict[int, tuple[_Found, _Found]] = {}

    def lowest(kind: int) -> Least | None:
        low: Least | None = None
        limit = 1
        while True:
            if limit not in known:
                known[limit] = _everywhere(s, t, where, limit, portable, keep)
            found = known[limit][kind]
            if found.least is None or (low is not None and found.least_bytes >= low[0]):
                return low
            low = int(found.least_bytes), found.least
            limit = max(1, low[0] - 1)

    few, many = lowest(0), lowest(1)
    return None if few is None or many is None else (few, many)


def choose(s: TensorType, t: TensorType, rules: Rules) -> Choice:
    """Return the cheapest of all candidates under the rules."""
    choice = Choice()
    if same(s, t):
        offer(choice, Program({"0": s}, (), ("0",)), True, rules)
        return choice
    if rules.place is not None and s.mesh == t.mesh and (payload := recognise(s, t, rules.place)) is not None:
        # A reduction of a payload is searched over its factors: exact, with the prices of every algorithm.
        view, before, after = payload
        ops = reduction_ops(view, rules.place.topology, before, after)
        if ops is not None:
            consider(choice, [Candidate(tuple(ops), exact=True)], s, t, rules)
        if choice.few.best is not None:
            return choice
    if s.mesh == t.mesh:
        consider(choice, on_one_mesh(s, t, rules), s, t, rules)
    else:
        consider(choice, crossings(s, t, partial(on_one_mesh, rules=rules)), s, t, rules)
    return choice


def on_one_mesh(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    """Yield the candidates of one mesh."""
    p = make_problem(s, t)
    rates = None if rules.fabric is None or p is None else _rates(p, rules.fabric)
    return candidates(s, t, Request(rules.bound, rules.limit, rules.portable, rates), p)


def _rates(p: Problem, fabric: Fabric) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Seconds and seconds per byte of every kind of collective over every set of units.

    `all_gather`, `reduce_scatter` and `all_reduce` are per byte held before the op; `messages` per byte received.
    """
    mesh = p.source.mesh
    count = 1 << len(p.units)
    out = {
        kind: (np.zeros(count), np.zeros(count)) for kind in ("all_gather", "reduce_scatter", "all_reduce", "messages")
    }
    for mask in range(1, count):
        members = mesh.ids[mesh.group_places(mesh.fold(p.atoms_of(mask)))]
        q = members.shape[1]
        for kind, (fixed, rate) in out.items():
            name = "all_to_all" if kind == "messages" else kind
            fixed[mask], rate[mask] = linear_cost(name, members, fabric)
            if kind == "messages":
                rate[mask] *= q / (q - 1)
    return out


def _infeasible(s: TensorType, t: TensorType, portable: bool) -> Infeasible:
    asked = f"redistribute {s} to {t}"
    if portable:
        return Infeasible(f"{asked} with portable=True: no plan without an exchange over more than half of the devices")
    return Infeasible(f"{asked}: no plan within the memory bound")
