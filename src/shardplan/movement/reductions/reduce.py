"""The verb `reduce`: the exact best reduction program on a placement, without a limit on its size.

It is `redistribute` on the types of the payload: one search, one set of ops, one cost. What it returns was checked with
state matrices too, which know neither types nor costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shardplan.core import validation
from shardplan.errors import CertificateError, LayoutError, TypingError, excerpt
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import checked_algorithm
from shardplan.hardware.prices.library import library
from shardplan.hardware.units import bytes_of
from shardplan.movement.redistribute import redistribute
from shardplan.movement.redistribution.choice import chain
from shardplan.movement.reductions.instructions import instruction_list_text
from shardplan.movement.reductions.payload import Payload, payload
from shardplan.movement.reductions.state_matrix import check
from shardplan.movement.reductions.type_graph import MOST_FACTORS, CheapestPath, TypeEdge, factor_states
from shardplan.plans.certificate import issue
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import placement_of

Target = Literal["replicated", "sharded", "root"]
# The one collective that leads there.
TARGETS: dict[str, str] = {"replicated": "all_reduce", "sharded": "reduce_scatter", "root": "reduce"}


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
        uncollapsed: A dim of the payload for each sub-axis, instead of one for each level; the search takes what axes
            have on a level apart either way.

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
    placement, axes = placement_of("placement", placement), validation.names("axes", axes)
    checked_algorithm(algorithm, library(placement.topology.library))
    subsets, uncollapsed = validation.flag("subsets", subsets), validation.flag("uncollapsed", uncollapsed)
    view = payload(placement, axes, bytes_of("nbytes", nbytes), uncollapsed)
    ends = factor_states(stock_op(target), len(view.factors))
    found = checked_path(view, placement, *ends, algorithm, subsets)
    source, wanted = map(view.type, ends)
    if algorithm == "auto" and not subsets and not uncollapsed and len(view.factors) <= MOST_FACTORS:
        return redistribute(source, wanted, topology=placement)
    program = chain(view.path_ops(*ends, found), source)
    return Plan(program, issue(program, (source,), (wanted,), placement, None, found.whole, algorithm=algorithm))


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
    view = payload(placement, axes, nbytes)
    ends = factor_states(stock_op(target), len(view.factors))
    found = checked_path(view, placement, *ends, algorithm, subsets)
    return instruction_list_text([edge.instruction for edge in found.edges], len(found.parts), view.part_names(found))


def stock_op(target: object) -> str:
    """Return the one collective that leads to a target; raises `LayoutError` for one that is unknown."""
    if not isinstance(target, str) or target not in TARGETS:
        raise LayoutError(f"target {excerpt(target)} is unknown; legal are {', '.join(TARGETS)}")
    return TARGETS[target]


def checked_path(
    view: Payload, placement: Placement, before: str, after: str, algorithm: str = "auto", subsets: bool = False
) -> CheapestPath:
    """Return the cheapest path of a payload; one that reduces is checked on state matrices.

    Raises `CertificateError` where they refuse it.
    """
    found = view.cheapest(placement.topology, before, after, algorithm, subsets)
    if set(before) == {"P"}:  # not of no factors
        check_path(view.part_sizes(found), found.edges, after[:1] * len(found.parts))
    return found


def check_path(sizes: tuple[int, ...], path: Sequence[TypeEdge], after: str) -> None:
    """Check that a path over factors of these sizes reduces, on state matrices; raises `CertificateError` if not."""
    try:
        check(sizes, [edge.instruction for edge in path], after)
    except TypingError as error:
        raise CertificateError(f"the state-matrix checker refuses the program found: {error}") from None
