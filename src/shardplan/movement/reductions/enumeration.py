"""Every reduction program up to a size, as published (arXiv 2110.10548, section 4), with its price.

Programs are enumerated over state matrices, so they include those in which a device that idled would later read an old
value: such a program is right as instructions but has no types, and its `program` is None. Candidates come from the
graph over sizes (2, .., 2). For unequal sizes the states of three digits and more are not quite the same: every program
returned was checked step by step, at the true sizes up to 64 members.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.core import validation
from shardplan.core.pattern import Groups
from shardplan.core.program import Program
from shardplan.errors import LayoutError
from shardplan.hardware.level_factors import groups_along
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import checked_algorithm, price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.library import library
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import bytes_of
from shardplan.movement.redistribution.choice import chain
from shardplan.movement.reductions.instructions import Instruction, instruction_list_text
from shardplan.movement.reductions.payload import Payload, payload
from shardplan.movement.reductions.state_graph import InstructionEdge, StateGraph, state_graph
from shardplan.movement.reductions.state_matrix import Bits, checked_sizes, ends, rows_held, step
from shardplan.movement.reductions.type_graph import STEP, TypeEdge, digits_of, instruction_lines, path_of
from shardplan.notebook import notebook_html
from shardplan.plans.certificate import Certificate, issue
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import placement_of

DEFAULT_TOP = 10
MOST_INSTRUCTIONS = 32  # no valid program of at most 4 factors that repeats no state is longer
Path = tuple[int, ...]  # numbers of edges of a state graph


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction program."""

    instructions: tuple[Instruction, ...]  # in the paper's language, over the factors of `payload`
    seconds: float  # predicted, without overlap between steps
    payload: Payload
    placement: Placement
    algorithm: str = "auto"  # what the steps are priced under

    _repr_html_ = notebook_html

    @property
    def path(self) -> tuple[TypeEdge, ...] | None:
        """The instructions as a path over types; None where they do not type."""
        return path_of(self.instructions, "P" * len(self.payload.factors))

    @property
    def plan(self) -> Plan | None:
        """The typed program with its certificate; None where the instructions do not type."""
        return _plan(self)

    @property
    def program(self) -> Program | None:
        """The typed program, or None."""
        return None if self.plan is None else self.plan.program

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the typed program, or None."""
        return None if self.plan is None else self.plan.certificate

    def __str__(self) -> str:
        """Return the instructions in the paper's form."""
        return instruction_list_text(self.instructions, len(self.payload.factors), self.payload.names)


@lru_cache(maxsize=4096)
def _plan(one: Reduction) -> Plan | None:
    view, path = one.payload, one.path
    if path is None:
        return None
    program = chain(view.ops(path), view.type("P" * len(view.factors)))
    source, target = program.input_types, program.output_types
    return Plan(program, issue(program, source, target, one.placement, None, exact=False, algorithm=one.algorithm))


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
    placement, axes = placement_of("placement", placement), validation.names("axes", axes)
    limit = None if limit is None else validation.integer("limit", limit)
    top = None if top is None else validation.integer("top", top)
    checked_algorithm(algorithm, library(placement.topology.library))
    if limit is not None and limit > MOST_INSTRUCTIONS:
        raise LayoutError(
            f"limit is {limit} instructions; legal are 1 to {MOST_INSTRUCTIONS}, or None for programs of any size"
        )
    if limit is not None and limit < 1:
        raise LayoutError(f"limit is {limit} instructions; legal are 1 or more, or None for programs of any size")
    if top is not None and top < 1:
        raise LayoutError(f"top is {top} programs; legal are 1 or more, or None")
    view = payload(placement, axes, bytes_of("nbytes", nbytes), validation.flag("uncollapsed", uncollapsed))
    if not view.factors:
        return [Reduction((), 0.0, view, placement, algorithm)]
    graph, sizes = state_graph(len(view.factors)), checked_sizes(view.sizes)
    costs = instruction_costs(graph, view, placement.topology, algorithm)

    def seconds(path: Path) -> float:
        return math.fsum(costs[e] for e in path)

    if limit is None:
        ranked = _without_limit(graph, costs, sizes, DEFAULT_TOP if top is None else top)
    else:
        # Of equal prices the shorter first: the rounding of a sum, in its last few of 16 digits, must not decide.
        ranked = sorted(_programs(sizes, limit), key=lambda path: (float(f"{seconds(path):.12g}"), len(path)))[:top]
    return [Reduction(graph.instructions(p), seconds(p), view, placement, algorithm) for p in ranked]


@lru_cache(maxsize=64)
def _programs(sizes: tuple[int, ...], limit: int) -> list[Path]:
    """All programs up to a length that are valid at some sizes."""
    graph = state_graph(len(sizes))
    return valid(graph, graph.programs(limit), sizes)


def _without_limit(graph: StateGraph, costs: list[float], sizes: tuple[int, ...], top: int) -> list[Path]:
    """The `top` cheapest programs of any length that are valid at these sizes; of equal prices the shorter first."""
    asked = top  # doubled while too few of the cheapest are valid at these sizes
    charge = STEP * max(costs)
    charged = [cost + charge for cost in costs]
    while True:
        found = graph.best(charged, asked)
        kept = valid(graph, found, sizes)
        if len(kept) >= top or len(found) < asked:
            return kept[:top]
        asked *= 2


def valid(graph: StateGraph, paths: Iterable[Path], sizes: tuple[int, ...]) -> list[Path]:
    """Return the programs of a graph that are valid at these sizes, checked from scratch on state matrices.

    Programs that begin alike should stand side by side: common beginnings are checked once.
    """
    start, goal = ends(sizes)

    @lru_cache(maxsize=256)
    def after(path: Path) -> Bits:
        """The state after a program, [1, members, rows]; no state where a step is refused."""
        if not path:
            return start
        before = after(path[:-1])
        return step(graph.edges[path[-1]].instruction, sizes, before, rows_held(before))[1]

    return [path for path in paths if np.array_equal(after(path), goal)]


def instruction_costs(graph: StateGraph, view: Payload, topology: Topology, algorithm: str) -> list[float]:
    """Return the price of every edge of the state graph in seconds."""
    known: dict[tuple[Instruction, tuple[int, ...]], float] = {}
    for edge in graph.edges:
        key = edge.instruction, edge.scattered
        if key not in known:
            known[key] = _edge_seconds(edge, view, topology, algorithm)
    return [known[edge.instruction, edge.scattered] for edge in graph.edges]


def _edge_seconds(edge: InstructionEdge, view: Payload, topology: Topology, algorithm: str) -> float:
    """Price one instruction on what its groups hold before it."""
    held = [view.nbytes / math.prod(n for d, n in enumerate(view.sizes) if cut >> d & 1) for cut in edge.scattered]
    if len(set(held)) == 1:
        lines = instruction_lines(edge.instruction, view.strides, topology, algorithm)
        return min(alpha + beta * held[0] for alpha, beta in lines)
    # Groups hold different amounts: over sizes (2, .., 2) digit 1 stands for every coordinate but 0.
    varies, zero = digits_of(edge.instruction.grouping, view.strides)
    members = groups_along(varies, zero, topology.size)
    number = np.zeros(len(members), dtype=np.int64)
    for factor in view.strides:
        if not set(factor) & {*varies, *zero}:
            away = [members[:, 0] // stride % size > 0 for size, stride in factor]
            number = 2 * number + np.any(away, axis=0)
    groups = Groups(edge.instruction.collective, members, np.array(held)[number])
    return price(groups, Fabric(topology), algorithm).seconds
