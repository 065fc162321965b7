"""Every reduction program up to a size, as published (arXiv 2110.10548, section 4), with its price.

Programs are enumerated over state matrices, so they include those in which a device that idled would later read an old
value: such a program is right as instructions but has no types, and its `program` is None. Candidates come from the
graph over sizes (2, .., 2). For unequal sizes the states of three digits and more are not quite the same: every program
returned was checked step by step with the checker of `state_matrix`, at the true sizes up to 64 members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.core import border
from shardplan.core.program import Program
from shardplan.errors import LayoutError, TypingError
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.alpha_beta import AlphaBeta, alpha_beta
from shardplan.hardware.prices.cost import checked_algorithm
from shardplan.hardware.prices.library import library
from shardplan.hardware.units import bytes_of
from shardplan.movement.redistribution.choice import chain
from shardplan.movement.reductions.instructions import Instruction, instruction_list_text
from shardplan.movement.reductions.interpreter import run_instructions
from shardplan.movement.reductions.payload import Payload, payload
from shardplan.movement.reductions.state_graph import InstructionEdge, StateGraph, state_graph
from shardplan.movement.reductions.state_matrix import Checker, State
from shardplan.movement.reductions.type_graph import STEP, digits_of
from shardplan.plans.certificate import Certificate, issue
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import placement_of

# Up to here programs are checked at their true sizes. A state has the third power of it in bits, 32 KiB, and every
# instruction of every program makes one; above, (2, .., 2) stands for the sizes.
CHECKED_MEMBERS = 64
LARGE_SIZE = 3  # of a digit over which random integers are reduced above that; 3 tells what 2 cannot: odd groups
DEFAULT_TOP = 10
MOST_INSTRUCTIONS = 32  # no valid program of at most 4 factors that repeats no state is longer


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction program."""

    instructions: tuple[Instruction, ...]  # in the paper's language, over the factors of `payload`
    seconds: float  # predicted, without overlap between steps
    payload: Payload
    placement: Placement
    algorithm: str = "auto"  # what the steps are priced under

    @property
    def plan(self) -> Plan | None:
        """The typed program with its certificate; None where the instructions do not type."""
        return _plan(self)

    @property
    def program(self) -> Program | None:
        """The typed program, or None."""
        plan = self.plan
        return None if plan is None else plan.program

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the typed program, or None."""
        plan = self.plan
        return None if plan is None else plan.certificate

    def __str__(self) -> str:
        """Return the instructions in the paper's form."""
        return instruction_list_text(self.instructions, len(self.payload.factors), self.payload.names)


@lru_cache(maxsize=4096)
def _plan(one: Reduction) -> Plan | None:
    ops = one.payload.instruction_ops(one.instructions)
    if ops is None:
        return None
    depth = len(one.payload.factors)
    source, target = one.payload.type("P" * depth), one.payload.type("U" * depth)
    program = chain(ops, source)
    return Plan(
        program, issue(program, (source,), (target,), one.placement, None, exact=False, algorithm=one.algorithm)
    )


def reductions(
    placement: Placement,
    axes: str | Sequence[str],
    nbytes: float | str,
    limit: int | None = 5,
    *,
    top: int | None = None,
    algorithm: str = "auto",
    uncollapsed: bool = False,
) -> list[Reduction]:
    """Return every valid reduction program of at most `limit` instructions, cheapest first.

    Args:
        placement: The mesh on the topology, or its text.
        axes: Mesh axes to reduce over, one or several.
        nbytes: Payload of every device, in bytes or as text such as `"64 MB"`.
        limit: Most instructions of a program; None for programs of any size, of which the `top` cheapest are returned.
        top: Most programs returned; all by default, 10 without a limit.
        algorithm: `auto`, the cheapest row of the library for each step, or an algorithm of it for all.
        uncollapsed: One factor for each sub-axis, instead of one for each level.

    Raises:
        TopologyError: An axis is unknown.
        LayoutError: The payload or the limit is not above 0, or an argument is of another kind.
        Infeasible: More than 4 factors; `reduce` has no such limit.

    Source: arXiv 2110.10548, section 4.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> placement = Placement(Mesh(data=16), Topology.load("gcp-v100x8", nodes=2), ((2, 8),))
    >>> found = reductions(placement, ("data",), nbytes=2**26, algorithm="ring")
    >>> len(found), str(found[0])
    (93, '(node, InsideGroup, ReduceScatter); (node, Parallel(root), AllReduce); (node, InsideGroup, AllGather)')
    """
    placement, axes, nbytes = (
        placement_of("placement", placement),
        border.names("axes", axes),
        bytes_of("nbytes", nbytes),
    )
    limit = None if limit is None else border.integer("limit", limit)
    top = None if top is None else border.integer("top", top)
    checked_algorithm(algorithm, library(placement.topology.library))
    uncollapsed = border.flag("uncollapsed", uncollapsed)
    if limit is not None and limit > MOST_INSTRUCTIONS:
        raise LayoutError(
            f"limit is {limit} instructions; legal are 1 to {MOST_INSTRUCTIONS}, or None for programs of any size"
        )
    if limit is not None and limit < 1:
        raise LayoutError(f"limit is {limit} instructions; legal are 1 or more, or None for programs of any size")
    if top is not None and top < 1:
        raise LayoutError(f"top is {top} programs; legal are 1 or more, or None")
    view = payload(placement, axes, nbytes, uncollapsed=uncollapsed)
    if not view.factors:
        return [Reduction((), 0.0, view, placement, algorithm)]
    graph = state_graph(len(view.factors))
    costs = instruction_costs(graph, view, alpha_beta(placement.topology, algorithm))
    if limit is None:
        ranked = _without_limit(graph, costs, view.sizes, DEFAULT_TOP if top is None else top)
    else:
        ranked = _ranked(graph.depth, limit, costs, view.sizes)[:top]
    return [
        Reduction(tuple(graph.edges[e].instruction for e in path), cost, view, placement, algorithm)
        for cost, path in ranked
    ]


@lru_cache(maxsize=16)
def _programs(depth: int, limit: int) -> tuple[tuple[tuple[int, ...], ...], NDArray[np.int64]]:
    """All programs up to a size, and the same as a table [programs, limit], padded with the number of edges."""
    graph = state_graph(depth)
    found = tuple(graph.programs(limit))
    table = np.full((len(found), limit), len(graph.edges), dtype=np.int64)
    for row, path in zip(table, found, strict=True):
        row[: len(path)] = path
    return found, table


def _without_limit(
    graph: StateGraph, costs: NDArray[np.float64], sizes: tuple[int, ...], top: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The `top` cheapest programs of any size that are valid at these sizes; of equal prices the shorter first."""
    asked = top  # doubled while too few of the cheapest are valid at these sizes
    charged = (costs + STEP * float(costs.max())).tolist()
    while True:
        found = [(float(costs[list(path)].sum()), path) for _, path in graph.best(charged, asked)]
        valid = verify([tuple(graph.edges[e].instruction for e in path) for _, path in found], sizes)
        kept = [one for one, right in zip(found, valid, strict=True) if right]
        if len(kept) >= top or len(found) < asked:
            return kept[:top]
        asked *= 2


def _ranked(
    depth: int, limit: int, costs: NDArray[np.float64], sizes: tuple[int, ...]
) -> list[tuple[float, tuple[int, ...]]]:
    """All programs up to a size that are valid at these sizes, cheapest first."""
    found, table = _programs(depth, limit)
    valid = _valid(depth, limit, sizes)
    totals = np.append(costs, 0.0)[table].sum(axis=1)
    # Of equal prices the shorter program first: the rounding of a sum, in its last few of 16 digits, must not decide.
    rounded = np.array([float(f"{x:.12g}") for x in totals.tolist()])
    order = np.lexsort((np.arange(len(found)), (table < len(costs)).sum(axis=1), rounded))
    return [(float(totals[k]), found[k]) for k in order[valid[order]].tolist()]


def instruction_costs(graph: StateGraph, view: Payload, prices: AlphaBeta) -> NDArray[np.float64]:
    """Return the price of every edge of the state graph in seconds, float64 [edges]."""
    known: dict[tuple[Instruction, tuple[int, ...]], float] = {}
    for edge in graph.edges:
        key = edge.instruction, edge.scattered
        if key not in known:
            known[key] = _edge_seconds(edge, view, prices)
    return np.array([known[edge.instruction, edge.scattered] for edge in graph.edges])


def _edge_seconds(edge: InstructionEdge, view: Payload, prices: AlphaBeta) -> float:
    """Price one instruction on what its groups hold before it."""
    grouping, collective = edge.instruction.grouping, edge.instruction.collective
    varies, zero = digits_of(grouping, view.factors)
    sizes = view.sizes
    held = [view.nbytes / math.prod(n for d, n in enumerate(sizes) if cut >> d & 1) for cut in edge.scattered]
    if len(set(held)) == 1:
        return prices.seconds(collective, varies, zero, held[0])
    # Groups hold different amounts: over sizes (2, .., 2) digit 1 stands for every coordinate but 0.
    ids = np.arange(prices.fabric.topology.size)
    for d in (*varies, *zero):
        ids = ids[ids // d.stride % d.size == 0]
    number = np.zeros(len(ids), dtype=np.int64)
    for k, factor in enumerate(view.factors):
        if k in grouping.varies or (grouping.master and k > grouping.varies[-1]):
            continue
        away = np.zeros(len(ids), dtype=bool)
        for d in factor.digits:
            away |= ids // d.stride % d.size > 0
        number = 2 * number + away
    return prices.uneven_seconds(collective, varies, ids, np.array(held)[number])


@lru_cache(maxsize=64)
def _valid(depth: int, limit: int, sizes: tuple[int, ...]) -> NDArray[np.bool_]:
    """Say of every program up to a size whether it is valid at these sizes, bool [programs]."""
    graph = state_graph(depth)
    found, _ = _programs(depth, limit)
    return np.array(verify([tuple(graph.edges[e].instruction for e in path) for path in found], sizes))


def verify(programs: Sequence[Sequence[Instruction]], sizes: tuple[int, ...]) -> list[bool]:
    """Say of each program whether it is valid: checked from scratch with the state-matrix checker.

    Programs that begin alike should stand side by side: common beginnings are checked once. Up to 64 members the states
    are those of these sizes; above, those of (2, .., 2), and random integers are reduced over sizes of at most 3.
    """
    large = math.prod(sizes) > CHECKED_MEMBERS
    checker = Checker((2,) * len(sizes) if large else sizes)
    numbers = _Numbers(tuple(min(n, LARGE_SIZE) for n in sizes)) if large else None
    verdicts: list[bool] = []
    # What holds after each instruction of the last program; None after one that was refused.
    trail: list[tuple[Instruction, State | None]] = []
    for program in programs:
        common = 0
        while common < min(len(trail), len(program)) and trail[common][0] == program[common]:
            common += 1
        del trail[common:]
        for instruction in program[common:]:
            before = trail[-1][1] if trail else checker.start
            trail.append((instruction, _after(checker, before, instruction)))
        right = trail[-1][1] == checker.goal if trail else False
        verdicts.append(right and (numbers is None or numbers.reduces(program)))
    return verdicts


def _after(checker: Checker, before: State | None, instruction: Instruction) -> State | None:
    """The state after an instruction; None where it, or one before it, is refused, or the goal was reached already."""
    if before is None or before == checker.goal:
        return None
    try:
        return checker.step(before, instruction)
    except TypingError:
        return None


class _Numbers:
    """Random integers, and whether a program reduces them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        count = math.prod(sizes)
        self.sizes = sizes
        self.addends = np.random.default_rng(count).integers(-1000, 1000, (count, count))

    def reduces(self, program: Sequence[Instruction]) -> bool:
        try:
            values, _ = run_instructions(self.sizes, program, self.addends)
        except ValueError:
            return False
        return bool((values == self.addends.sum(axis=0)).all())
