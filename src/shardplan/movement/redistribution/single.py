"""The cheapest program of one tensor on the best placement, within a limit; and the least limit that works."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from shardplan.core.accounting import account, bound_bytes
from shardplan.core.messages import tabled
from shardplan.core.ops import Exchange, Send
from shardplan.core.program import Program
from shardplan.core.registry import every_op
from shardplan.core.tensor import TensorType, same
from shardplan.errors import Infeasible, LayoutError, TypingError
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.prices.cost import Fabric, linear_cost
from shardplan.hardware.topology import Topology
from shardplan.movement.batches.crossings import crossings
from shardplan.movement.redistribution.candidates import Candidate, Request, candidates, make_problem
from shardplan.movement.redistribution.choice import Choice, Chosen, Rules, consider, offer, price, too_little
from shardplan.movement.redistribution.problem import Problem
from shardplan.movement.redistribution.reduced import reducing, settled, with_levels
from shardplan.movement.redistribution.search import Rates
from shardplan.plans.pricing import Where, fabric_of

# A tensor is planned on each, which takes tens of milliseconds, and many axes on many levels have thousands.
MOST_PLACEMENTS = 64


def priced_on(where: Where | None, s: TensorType, t: TensorType) -> Iterator[Where | None]:
    """Yield what to price a plan on: each placement of a default mesh on a topology of its size, else `where` itself.

    The placements come in the order of `placements`, which a plan's ties go by, and at most `MOST_PLACEMENTS` of them.
    """
    mesh = s.mesh
    if mesh == t.mesh and isinstance(where, Topology) and mesh.devices == tuple(range(where.size)):
        yield from itertools.islice(placements(mesh, where), MOST_PLACEMENTS)
    else:
        yield where


@lru_cache(maxsize=4096)
def best_program(
    s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool, keep: bool = False
) -> tuple[Chosen, Where | None]:
    """Return the cheapest program and the placement it was priced on; raises `Infeasible`.

    Of programs of more than 64 chunks a step only where none of fewer keeps the limit.
    """
    few, many = _on_all(s, t, where, limit, portable, keep)
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
    """The best of a pick over placements, the least workspace, and the program that has it; each with its placement."""

    best: tuple[Chosen, Where | None] | None = None
    least_bytes: float = math.inf
    least: tuple[Chosen, Where | None] | None = None


def _on_all(
    s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool, keep: bool
) -> tuple[_Found, _Found]:
    """Return what is found with few chunks a step, and with many, on all that `priced_on` yields."""
    bound = bound_bytes((s,), (t,))
    out = _Found(), _Found()
    for one in priced_on(where, s, t):
        fabric = None if one is None else fabric_of(one, (s.mesh, t.mesh))
        rules = Rules(bound, limit, portable, fabric, one if isinstance(one, Placement) else None, keep)
        choice = choose(s, t, rules)
        for found, pick in zip(out, (choice.few, choice.many), strict=True):
            if pick.best is not None and (found.best is None or pick.best.price < found.best[0].price):
                found.best = pick.best, one
            if pick.least is not None and pick.least_bytes < found.least_bytes:
                books = account(pick.least)
                found.least_bytes = pick.least_bytes
                found.least = Chosen(pick.least, books, False, price(pick.least, books, rules)), one
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
                known[limit] = _on_all(s, t, where, limit, portable, keep)
            found = known[limit][kind]
            if found.least is None or (low is not None and found.least_bytes >= low[0]):
                return low
            low = int(found.least_bytes), found.least
            limit = max(1, low[0] - 1)

    few, many = lowest(0), lowest(1)
    return None if few is None or many is None else (few, many)


def choose(s: TensorType, t: TensorType, rules: Rules) -> Choice:
    """Return the cheapest of all candidates under the rules."""
    choice = _searched(s, t, rules)
    if not same(s, t) and not rules.portable:
        consider(choice, offered(s, t, rules, choice.few.best), s, t, rules)
    return choice


def _searched(s: TensorType, t: TensorType, rules: Rules) -> Choice:
    """The cheapest of the candidates that a search finds."""
    choice = Choice()
    if same(s, t):
        offer(choice, Program({"0": s}, (), ("0",)), True, rules)
        return choice
    if tabled(s, t):  # no other op takes a table
        direct = Exchange(t.layout) if s.mesh == t.mesh else Send(t.layout, t.mesh)
        consider(choice, [Candidate((direct,))], s, t, rules)
        return choice
    if rules.fabric is not None:
        consider(choice, reducing(s, t, rules.fabric, rules.placement), s, t, rules)
        if choice.few.best is not None and settled(s):
            return choice
    consider(choice, _ways(s, t, rules), s, t, rules)
    return choice


def _ways(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    if s.mesh == t.mesh:
        return on_one_mesh(s, t, rules)
    return crossings(s, t, partial(on_one_mesh, rules=rules), rules.fabric)


def offered(s: TensorType, t: TensorType, rules: Rules, best: Chosen | None) -> Iterator[Candidate]:
    """Yield the candidates with one op that its class offers (`Op.moves`).

    It comes first, or behind any step of the best program found; the way that is left behind it is searched.
    """
    steps = () if best is None else best.program.steps
    ops = tuple(step.op for step in steps)
    kinds, heres = every_op().values(), [s]
    if best is not None:
        heres += [best.program.types[step.results[0]] for step in steps]
    for k, here in enumerate(heres):
        for op in (op for kind in kinds for op in kind.moves(here, t)):
            try:
                (there,) = op.infer(here)
            except (TypingError, LayoutError):  # candidates are proposed without regard to whether they type
                continue
            ways = [Candidate(())] if same(there, t) else _ways(there, t, rules)
            yield from (Candidate((*ops[:k], op, *way.ops)) for way in ways)


def on_one_mesh(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    """Yield the candidates of one mesh, in the order of `candidates`."""
    p = make_problem(s, t)
    rates = None if rules.fabric is None or p is None else _rates(p, rules.fabric)
    found = candidates(s, t, Request(rules.bound, rules.limit, rules.portable, rates), p)
    return found if rules.fabric is None else with_levels(found, s, rules.fabric, rules.placement)


def _rates(p: Problem, fabric: Fabric) -> Rates:
    """Seconds and seconds per byte of every kind of collective over every set of runs."""
    mesh = p.source.mesh
    out = Rates(*np.zeros((len(Rates._fields), 2, 1 << len(p.runs))))
    held = float(p.source.elements().max()) * p.source.itemsize
    for mask in range(1, 1 << len(p.runs)):
        members = mesh.ids[mesh.group_places(mesh.fold(p.atoms_of(mask)))]
        for table, kind in zip(out, ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), strict=True):
            table[:, mask] = linear_cost(kind, members, fabric, held)
        q = members.shape[1]
        out.messages[1, mask] *= q / (q - 1)  # of what a member of an all-to-all holds it receives all but its q-th
    return out


def _infeasible(s: TensorType, t: TensorType, portable: bool) -> Infeasible:
    asked = f"redistribute {s} to {t}"
    if portable:
        return Infeasible(f"{asked} with portable=True: no plan without an exchange over more than half of the devices")
    return Infeasible(f"{asked}: no plan within the memory bound")
