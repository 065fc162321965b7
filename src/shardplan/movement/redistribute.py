"""The verb: `redistribute(source, destination)` returns the cheapest certified plan found.

Without a topology the price is the bytes that the worst device receives, summed over steps, plus 0.2 % of
`bound_bytes` per round; with one it is predicted seconds. Plans are deterministic, and cached by request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from shardplan.movement.fit import Choice, Chosen, Rules, consider, offer, price
from shardplan.movement.payload import recognise
from shardplan.movement.reduction_path import reduction_ops
from shardplan.movement.units import Problem

MOST_PLACEMENTS = 64
MOST_DESCENTS = 8


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
    `Topology` the best placement of a default mesh is taken, with a `Placement` that one. Raises `LayoutError` for
    types that do not describe one array, `Infeasible` (with `least_bytes`) for a limit that cannot be met.
    Source: arXiv 2112.01075; `docs/paper-2112.01075.md` says how the search differs.

    >>> from shardplan.core.mesh import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> plan = redistribute(TensorType("f32", (8, 8), ("x", "y"), mesh), TensorType("f32", (8, 8), ("y", "x"), mesh))
    >>> [step.op.name for step in plan.program.steps], plan.certificate.status
    (['permute'], 'floor')
    >>> plan == redistribute("f32[8@x, 8@y]", "f32[8@y, 8@x]", mesh="x=2,y=2")
    True
    """
    where, limit = where_of("topology", topology), limit_of("memory limit", memory_limit)
    portable = border.flag("portable", portable)
    if isinstance(src, (TensorType, str)) != isinstance(dst, (TensorType, str)):
        raise LayoutError("redistribute takes two types, or two lists of types of equal length")
    if isinstance(src, (TensorType, str)):
        source, destination = type_of("the source", src, mesh), type_of("the destination", dst, mesh)
        check_pair(source, destination)
        return _cached(source, destination, where, limit, portable)
    sources = tuple(type_of(f"source {k}", t, mesh) for k, t in enumerate(border.items("src", src, "types")))
    destinations = tuple(type_of(f"destination {k}", t, mesh) for k, t in enumerate(border.items("dst", dst, "types")))
    if len(sources) != len(destinations):
        raise LayoutError(
            f"a batch of {len(sources)} sources and {len(destinations)} destinations; give as many of each"
        )
    for s, t in zip(sources, destinations, strict=True):
        check_pair(s, t)
    return _cached_batch(sources, destinations, where, limit, portable)


@lru_cache(maxsize=64)
def _cached_batch(
    sources: tuple[TensorType, ...],
    destinations: tuple[TensorType, ...],
    where: Where | None,
    limit: int | None,
    portable: bool,
) -> Plan:
    from shardplan.movement.batch import plan_batch

    return plan_batch(sources, destinations, where, limit, portable)


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
def _cached(s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool) -> Plan:
    choice, place = best_program(s, t, where, limit, portable)
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
    s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool
) -> tuple[Chosen, Where | None]:
    """Return the cheapest program and the placement it was priced on; raises `Infeasible`."""
    bound = bound_bytes((s,), (t,))
    best: tuple[Chosen, Where | None] | None = None
    for place in spots(where, s, t):
        fabric = None if place is None else fabric_of(place, (s.mesh, t.mesh))
        choice = choose(s, t, Rules(bound, limit, portable, fabric, place if isinstance(place, Placement) else None))
        if choice.best is not None and (best is None or choice.best.price < best[0].price):
            best = choice.best, place
    if best is not None:
        return best
    least = None if limit is None else least_workspace(s, t, portable)
    if limit is None or least is None or least[0] > limit:
        raise _infeasible(s, t, limit, portable, least)
    place = next(spots(where, s, t))
    fabric = None if place is None else fabric_of(place, (s.mesh, t.mesh))
    rules = Rules(bound, limit, portable, fabric)
    program, books = least[1], account(least[1])
    return Chosen(program, books, False, price(program, books, rules), ()), place


@lru_cache(maxsize=1024)
def least_workspace(s: TensorType, t: TensorType, portable: bool) -> tuple[int, Program] | None:
    """Return the smallest workspace of any plan, and that plan: searched again just below until nothing is left."""
    bound = bound_bytes((s,), (t,))
    low: tuple[int, Program] | None = None
    limit = 1
    for _ in range(MOST_DESCENTS):
        choice = choose(s, t, Rules(bound, limit, portable))
        if choice.least is None or (low is not None and choice.least_bytes >= low[0]):
            break
        low = int(choice.least_bytes), choice.least
        limit = max(1, low[0] - 1)
    return low


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
        if choice.best is not None:
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


def _infeasible(
    s: TensorType, t: TensorType, limit: int | None, portable: bool, least: tuple[int, Program] | None
) -> Infeasible:
    asked = f"redistribute {s} to {t}"
    if limit is not None and least is not None:
        return Infeasible(
            f"{asked} within {limit} bytes a device: no plan; the least that works is {least[0]} bytes", least[0]
        )
    if portable:
        return Infeasible(f"{asked} with portable=True: no plan without an exchange over more than half of the devices")
    return Infeasible(f"{asked}: no plan within the memory bound")
