"""The cheapest program of one tensor within a limit; and the least limit that works."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import MANY_CHUNKS, account, books_of, bound_bytes
from shardplan.core.messages import has_box_table
from shardplan.core.ops import Exchange, Op, Send
from shardplan.core.registry import every_op
from shardplan.core.tensor import TensorType, same
from shardplan.errors import Infeasible, LayoutError, TypingError
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.affine_costs import affine
from shardplan.hardware.prices.cost import Fabric
from shardplan.movement.batches.crossings import crossings, near_moves
from shardplan.movement.redistribution.candidates import Candidate, Request, candidates, make_problem
from shardplan.movement.redistribution.choice import (
    Chosen,
    Contest,
    Rules,
    chain,
    keeping,
    programs,
    too_little,
    with_names,
)
from shardplan.movement.redistribution.cuts import Cuts
from shardplan.movement.redistribution.problem import Problem
from shardplan.movement.redistribution.reducing_candidates import (
    is_settled,
    reducing,
    slice_then_scatter,
    with_levels,
)
from shardplan.movement.redistribution.search import Rates
from shardplan.plans.pricing import Where, occupied_fabric

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")  # in the order of `Rates`


def rules_of(s: TensorType, t: TensorType, where: Where | None, portable: bool, even: bool) -> Rules:
    """Return the rules of one tensor; device ids are places on a topology."""
    fabric = None if where is None else occupied_fabric(where, (s.mesh, t.mesh))
    placement = where if isinstance(where, Placement) else None
    return Rules(bound_bytes((s,), (t,)), portable, even, fabric, placement)


@lru_cache(maxsize=4096)
def best_program(
    s: TensorType,
    t: TensorType,
    where: Where | None,
    limit: int | None,
    portable: bool,
    keep: bool = False,
    even: bool = False,
) -> Chosen:
    """Return the cheapest program on the devices that the types name; raises `Infeasible`.

    Under a limit it is the best without one if that keeps the limit as it is. Else programs are cut into chunks, and of
    those with more than 64 a step one is only taken where none of fewer keeps the limit.
    """
    rules = rules_of(s, t, where, portable, even)
    if limit is None:
        best = choose(s, t, rules)
        if best is None:
            raise _infeasible(s, t, portable)
        return best
    free = best_program(s, t, where, None, portable, False, even)
    program = keeping(free.program, ("0",)) if keep else free.program
    if (books := account(program)).workspace_bytes <= limit:
        return replace(free, program=program, books=books)
    narrow = _narrow(s, t, where, portable, keep, even)
    most = next((most for most, least in narrow.least if least <= limit), None)
    if most is None:
        raise too_little(f"redistribute {s} to {t}", limit, *(least for _, least in narrow.least))
    fitting = [(cuts, chunks) for cuts in narrow.ways if cuts.workspace(chunks := cuts.chunks(limit, most)) <= limit]
    contest = Contest(rules)
    for program in (cuts.cut(chunks) for cuts, chunks in fitting):
        contest.add(Chosen.of(program, account(program), False, rules))
    best = contest.winner
    assert best is not None
    return best


class _Narrow(NamedTuple):
    """The programs that a limit chooses among, and the least workspace of any in few chunks a step, and in many."""

    ways: tuple[Cuts, ...]
    least: tuple[tuple[float, int], tuple[float, int]]  # the most chunks, bytes


@lru_cache(maxsize=1024)
def _narrow(s: TensorType, t: TensorType, where: Where | None, portable: bool, keep: bool, even: bool) -> _Narrow:
    """Return what every limit chooses among: what a program needs does not depend on the limit."""
    free = best_program(s, t, where, None, portable, False, even)
    rules = replace(rules_of(s, t, where, portable, even), narrow=True, keep=keep)
    found = itertools.chain(_searched_candidates(s, t, rules), offered_candidates(s, t, rules, free))
    ways: list[Cuts] = []
    for program, _ in itertools.chain([(free.program, True)], programs(found, s, t, rules, set())):
        books = books_of(program)
        if books.peak_bytes <= rules.bound:
            kept = keeping(program, ("0",)) if keep else program
            ways.append(Cuts.of(kept, account(kept) if keep else books))
    few, many = ((most, min(x.workspace(x.chunks(0, most)) for x in ways)) for most in (MANY_CHUNKS, math.inf))
    return _Narrow(tuple(ways), (few, many))


def narrowest(
    s: TensorType, t: TensorType, where: Where | None, portable: bool, keep: bool, even: bool
) -> tuple[Op, ...]:
    """Return the ops, uncut, of the program that in at most 64 chunks a step needs the least workspace."""
    ways = _narrow(s, t, where, portable, keep, even).ways
    least = min(ways, key=lambda cuts: cuts.workspace(cuts.chunks(0, MANY_CHUNKS)))
    return tuple(step.op for step in least.program.steps)


def choose(s: TensorType, t: TensorType, rules: Rules, below: float = math.inf) -> Chosen | None:
    """Return the best of all candidates under the rules, or None where none can be cheaper than `below`."""
    seen: set[tuple[Op, ...]] = set()
    contest = Contest(rules, below)

    def enter(found: Iterator[Candidate]) -> None:
        contest.enter(programs(found, s, t, rules, seen))

    enter(_reductions(s, t, rules))
    if contest.cheapest is None or not is_settled(s):
        enter(_searched_candidates(s, t, rules))
        if not (rules.portable or rules.fabric or (s.all_even and t.all_even)):
            # Of uneven types the search is no proof, and under other rules it finds other ways.
            enter(_searched_candidates(s, t, replace(rules, portable=True)))
    enter(offered_candidates(s, t, rules, contest.cheapest))
    best = contest.winner
    return None if best is None else with_names(best, rules)


def _reductions(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    """Yield the reductions that are cut at the levels of the hardware."""
    if rules.fabric is None or same(s, t) or has_box_table(s, t):
        return iter(())
    return reducing(s, t, rules.fabric, rules.placement)


def _searched_candidates(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    """Yield the candidates that a search finds."""
    if same(s, t):
        return iter([Candidate((), exact=True)])
    if has_box_table(s, t):  # no other op takes a table
        return iter([Candidate((Exchange(t.layout) if s.mesh == t.mesh else Send(t.layout, t.mesh),))])
    if s.mesh == t.mesh:
        return on_one_mesh(s, t, rules)
    first, later = (partial(on_one_mesh, rules=one) for one in (rules, replace(rules, keep=False)))
    return crossings(s, t, first, later, rules.fabric)


def offered_candidates(s: TensorType, t: TensorType, rules: Rules, best: Chosen | None) -> Iterator[Candidate]:
    """Yield the candidates with one op that its class offers (`Op.moves`).

    It comes first, or behind any step of the best program found; the way that is left behind it is searched.
    """
    if same(s, t) or rules.portable:
        return
    steps = () if best is None else best.program.steps
    ops = tuple(step.op for step in steps)
    kinds, heres = every_op().values(), [s]
    if best is not None:
        heres += [best.program.types[step.results[0]] for step in steps]
    for k, here in enumerate(heres):
        if here.shape != t.shape:  # a view
            continue
        for op in (op for kind in kinds for op in kind.moves(here, t)):
            try:
                (there,) = op.infer(here)
            except (TypingError, LayoutError):  # candidates are proposed without regard to whether they type
                continue
            yield from (
                Candidate((*ops[:k], op, *way.ops))
                for way in _searched_candidates(there, t, replace(rules, keep=False))
            )


def on_one_mesh(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    """Yield the candidates of one mesh, in the order of `candidates`; then those that no path of the graph has."""
    found = itertools.chain(_graph_candidates(s, t, rules), _sliced_first(s, t, rules))
    if rules.fabric is None:
        return found
    return with_levels(itertools.chain(found, near_moves(s, t, rules.fabric)), s, rules.fabric, rules.placement)


def _graph_candidates(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    p = make_problem(s, t)
    rates = None if rules.fabric is None or p is None else _rates(p, rules.fabric)
    return candidates(s, t, Request(rules.bound, rules.portable, rates, rules.narrow, rules.keep), p)


def _sliced_first(s: TensorType, t: TensorType, rules: Rules) -> Iterator[Candidate]:
    """Yield candidates that slice inside of what they scatter, before they do, with the ways on from there."""
    for ops in slice_then_scatter(s, t):
        there = chain(ops, s).output_types[0]
        ways = [Candidate(())] if same(there, t) else _graph_candidates(there, t, rules)
        yield from (Candidate((*ops, *way.ops)) for way in ways)


def _rates(p: Problem, fabric: Fabric) -> Rates:
    """Seconds and seconds per byte received of every kind of collective over every set of runs."""
    out = Rates(*np.zeros((len(Rates._fields), 2, 1 << len(p.runs))))
    held = float(p.source.elements().max()) * p.source.itemsize
    for mask, members in enumerate(_groups(p), start=1):
        q = members.shape[1]
        share = 1 - 1 / q  # of what a member of an all-to-all holds it receives all but its q-th
        received = q - 1, share, 2 * share, share
        for table, lines, each in zip(out, affine(_COLLECTIVES, members, fabric), received, strict=True):
            start, slope = min(lines, key=lambda line: line[0] + line[1] * held)
            table[:, mask] = start, slope / each
    return out


@lru_cache(maxsize=8)  # asked for again on every placement, when a better one is looked for
def _groups(p: Problem) -> list[np.ndarray]:
    """The device ids of the groups over every set of runs but none, [groups, members]."""
    mesh = p.source.mesh
    return [mesh.ids[mesh.group_places(mesh.fold(p.atoms_of(mask)))] for mask in range(1, 1 << len(p.runs))]


def _infeasible(s: TensorType, t: TensorType, portable: bool) -> Infeasible:
    asked = f"redistribute {s} to {t}"
    if portable:
        return Infeasible(f"{asked} with portable=True: no plan without an exchange over more than half of the devices")
    return Infeasible(f"{asked}: no plan within the memory bound")
