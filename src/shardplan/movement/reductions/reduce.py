"""The verb `reduce`: the exact best reduction program on a placement, without a limit on its size.

It is `redistribute` on the types of the payload: one search, one set of ops, one cost. What it returns was checked with
the state-matrix checker too, which knows neither types nor costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from shardplan.core import border
from shardplan.errors import CertificateError, LayoutError, TypingError, shown
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import checked_algorithm
from shardplan.hardware.prices.library import library
from shardplan.hardware.units import bytes_of
from shardplan.movement.redistribute import redistribute
from shardplan.movement.redistribution.choice import chain
from shardplan.movement.redistribution.reduced import MOST_FACTORS
from shardplan.movement.reductions.enumeration import CHECKED_MEMBERS, LARGE_SIZE
from shardplan.movement.reductions.instructions import Instruction, instruction_list_text
from shardplan.movement.reductions.interpreter import run_instructions
from shardplan.movement.reductions.payload import Payload, payload
from shardplan.movement.reductions.shortest_path import cheapest_path
from shardplan.movement.reductions.state_matrix import MOST_MEMBERS, Checker
from shardplan.movement.reductions.type_graph import State, TypeEdge
from shardplan.plans.certificate import issue
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import placement_of

Target = Literal["replicated", "sharded", "root"]
# The letter of every factor at the end, and the one collective that leads there.
TARGETS: dict[str, tuple[str, str]] = {
    "replicated": ("U", "all_reduce"),
    "sharded": ("S", "reduce_scatter"),
    "root": ("R", "reduce"),
}


def reduce(
    placement: Placement,
    axes: str | Sequence[str],
    nbytes: float | str,
    *,
    target: Target = "replicated",
    algorithm: str = "auto",
    subsets: bool = False,
    uncollapsed: bool = False,
) -> Plan:
    """Return the cheapest program that reduces a payload over some axes of a placement, with its certificate.

    The plan starts from `f32[h_0, .., c]{+axes}`; with the defaults it is what `redistribute` returns for its types.

    Args:
        placement: The mesh on the topology, or its text.
        axes: Mesh axes to reduce over, one or several.
        nbytes: Payload of every device, in bytes or as text such as `"64 MB"`.
        target: Where the sums go: `replicated` to every member, `sharded` in equal parts (as ZeRO wants them), `root`
            to coordinate 0.
        algorithm: `auto`, the cheapest row of the library for each step, or an algorithm of it for all.
        subsets: Admit collectives over any set of levels, not only contiguous ones; never dearer.
        uncollapsed: One factor for each sub-axis, instead of one for each level.

    Raises:
        TopologyError: An axis is unknown.
        LayoutError: The payload is not above 0, the target is unknown, or an argument is of another kind.

    Source: arXiv 2110.10548; the search is over types, as in arXiv 2112.01075.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> placement = Placement(Mesh(data=16), Topology.load("gcp-v100x8", nodes=2), ((2, 8),))
    >>> plan = reduce(placement, ("data",), nbytes=2**26, algorithm="ring")
    >>> [step.op.name for step in plan.program.steps]
    ['reduce_scatter', 'all_reduce', 'all_gather']
    """
    placement, axes, nbytes = (
        placement_of("placement", placement),
        border.names("axes", axes),
        bytes_of("nbytes", nbytes),
    )
    checked_algorithm(algorithm, library(placement.topology.library))
    subsets, uncollapsed = border.flag("subsets", subsets), border.flag("uncollapsed", uncollapsed)
    view, path, after = _best(placement, axes, nbytes, target, algorithm, subsets, uncollapsed)
    source, wanted = view.type("P" * len(view.factors)), view.type(after)
    if algorithm == "auto" and not subsets and not uncollapsed and len(view.factors) <= MOST_FACTORS:
        return redistribute(source, wanted, topology=placement)
    program = chain(view.path_ops(path), source)
    return Plan(program, issue(program, (source,), (wanted,), placement, None, exact=True, algorithm=algorithm))


def _best(
    placement: Placement,
    axes: str | Sequence[str],
    nbytes: float,
    target: str,
    algorithm: str,
    subsets: bool,
    uncollapsed: bool,
) -> tuple[Payload, list[TypeEdge], State]:
    """Return the payload, the cheapest path, checked, and the state it ends in."""
    if not isinstance(target, str) or target not in TARGETS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"target {shown(target)} is unknown; legal are {', '.join(TARGETS)}")
    view = payload(placement, axes, nbytes, uncollapsed=uncollapsed)
    before, after = (letter * len(view.factors) for letter in ("P", TARGETS[target][0]))
    path = cheapest_path(view.factors, view.nbytes, placement.topology, before, after, algorithm, subsets) or []
    check_path(view, path, after)
    return view, path, after


def instructions_text(
    placement: Placement,
    axes: str | Sequence[str],
    nbytes: float,
    *,
    target: Target = "replicated",
    algorithm: str = "auto",
    subsets: bool = False,
) -> str:
    """Return the program that `reduce` finds in the paper's language; arguments and errors as there."""
    view, path, _ = _best(placement, axes, nbytes, target, algorithm, subsets, False)
    return instruction_list_text([edge.instruction for edge in path], len(view.factors), view.names)


def stock_op(target: Target) -> str:
    """Return the one collective that leads to a target."""
    return TARGETS[target][1]


def check_path(view: Payload, path: Sequence[TypeEdge], after: State) -> None:
    """Check a path with the state-matrix checker, and on random integers; raises `CertificateError` if it is wrong."""
    program = [edge.instruction for edge in path]
    depth = len(view.factors)
    if not depth:
        return
    sizes = view.sizes if math.prod(view.sizes) <= CHECKED_MEMBERS else (2,) * depth
    try:
        if math.prod(sizes) <= MOST_MEMBERS:
            _check_states(sizes, program, after)
        if sizes != view.sizes:
            _check_numbers(tuple(min(n, LARGE_SIZE) for n in view.sizes), program, after)
    except (TypingError, ValueError) as error:
        raise CertificateError(f"the state-matrix checker refuses the program found: {error}") from None


def _check_states(sizes: tuple[int, ...], program: Sequence[Instruction], after: State) -> None:
    """Check that every member ends with what the state says, by state matrices; raises `TypingError`."""
    checker = Checker(sizes)
    if set(after) == {"U"}:
        checker.check(program)
        return
    holders, parts = _ends(sizes, after)
    checker.check_parts(program, holders, parts)


def _ends(sizes: tuple[int, ...], after: State) -> tuple[list[int], int]:
    """Members that hold rows at the end, and into how many parts the rows are cut."""
    digits = np.indices(sizes).reshape(len(sizes), -1)
    rooted = [d for d, letter in enumerate(after) if letter == "R"]
    holders = np.flatnonzero((digits[rooted] == 0).all(axis=0)).tolist()
    return holders, math.prod(n for n, letter in zip(sizes, after, strict=True) if letter == "S")


def _check_numbers(sizes: tuple[int, ...], program: Sequence[Instruction], after: State) -> None:
    """The same on random integers; raises `ValueError`."""
    count = math.prod(sizes)
    addends = np.random.default_rng(count).integers(-1000, 1000, (count, count))
    values, rows = run_instructions(sizes, program, addends)
    holders, parts = _ends(sizes, after)
    for d in range(count):
        if len(rows[d]) != (count // parts if d in holders else 0):
            raise ValueError(f"member {d} ends with {len(rows[d])} rows")
        if not np.array_equal(values[d, rows[d]], addends.sum(axis=0)[rows[d]]):
            raise ValueError(f"member {d} ends with wrong sums")
