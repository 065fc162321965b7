"""The verb: `redistribute(source, destination)` returns the cheapest certified plan found.

Without a topology the price is the bytes that the worst device receives, summed over steps, plus 0.2 % of
`bound_bytes` per round; with one it is predicted seconds, and what lies within 10 % of the least is told apart by bytes
on the slowest level, then by convenience (`redistribution.choice`). Without one a plan's `seconds` are what its program
takes on the topology `nominal`. Plans are deterministic, and cached by request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from shardplan.core import validation
from shardplan.core.mesh import Mesh
from shardplan.core.messages import has_box_table
from shardplan.core.shardings import Sharding, is_sharding, types_between
from shardplan.core.tensor import TensorType, type_of
from shardplan.errors import LayoutError, excerpt
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import limit_of
from shardplan.movement.batches.batch import plan_batch
from shardplan.movement.better_placement import better_text
from shardplan.movement.idle_stop import stop_text
from shardplan.movement.redistribution.single_move import best_program
from shardplan.plans.certificate import issue
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import Where, where_of


def redistribute(
    src: TensorType | str | Sharding | Sequence[TensorType | str],
    dst: TensorType | str | Sharding | Sequence[TensorType | str],
    topology: Topology | Placement | str | None = None,
    memory_limit: float | str | None = None,
    portable: bool = False,
    *,
    mesh: Mesh | str | None = None,
    shape: Sequence[int] | None = None,
    dtype: object = None,
) -> Plan:
    """Return a certified plan from `src` to `dst`; two lists are a batch and become one plan.

    Each is a `TensorType`, or both are shardings of JAX, `x.sharding`, of an array of this `shape` and `dtype`. With
    `mesh` types may be texts; a topology (`"dgx-h100"`), a mesh and `memory_limit` (`"1 GB"`) may be texts too.
    `memory_limit` (bytes) bounds the workspace of every device; without it only shards between steps are bounded, by
    the larger of source and destination. `portable` admits no exchange over more than half of the devices. Device ids
    are places on a `Topology`; a `Placement` says where the devices of its mesh lie, whatever axes they have in the
    types. `plan.better` says what a better placement, or a stop on idle devices, would take. Raises `LayoutError` for
    types that do not describe one array, `Infeasible` for a limit below `absolute_least_bytes`; from there to
    `least_bytes` a plan needs more than 64 chunks a step.
    Source: arXiv 2112.01075; `docs/paper-2112.01075.md` says how the search differs.

    >>> from shardplan.core.mesh import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> plan = redistribute(TensorType("f32", (8, 8), ("x", "y"), mesh), TensorType("f32", (8, 8), ("y", "x"), mesh))
    >>> [step.op.name for step in plan.program.steps], plan.certificate.status
    (['permute'], 'floor')
    >>> plan == redistribute("f32[8@x, 8@y]", "f32[8@y, 8@x]", mesh="x=2,y=2")
    True
    """
    ends: Any = src, dst
    if is_sharding(src) or is_sharding(dst) or shape is not None or dtype is not None:
        ends, mesh = _types_of_shardings(src, dst, mesh, shape, dtype), None
    return plan_kept(ends[0], ends[1], topology, memory_limit, portable, mesh=mesh, keep=False)


def _types_of_shardings(
    src: object, dst: object, mesh: object, shape: Sequence[int] | None, dtype: object
) -> tuple[TensorType, TensorType]:
    """Return the types of two shardings of one array; raises `LayoutError` for what is none, or not wholly said."""
    if not (is_sharding(src) and is_sharding(dst)):
        what, end = ("the destination", dst) if is_sharding(src) else ("the source", src)
        raise LayoutError(
            f"{what} is {excerpt(end)}; legal is a sharding at both ends, where one of them or shape= or dtype= is "
            "given"
        )
    if shape is None or dtype is None or mesh is not None:
        raise LayoutError(
            f"shardings with shape={excerpt(shape)}, dtype={excerpt(dtype)}, mesh={excerpt(mesh)}; legal are the shape "
            "and the dtype of an array, whose mesh the shardings say"
        )
    sizes = tuple(validation.whole_number("shape", n) for n in validation.items("shape", shape, "sizes"))
    return types_between(sizes, dtype, src, dst)


def plan_kept(
    src: TensorType | str | Sequence[TensorType | str],
    dst: TensorType | str | Sequence[TensorType | str],
    topology: Topology | Placement | str | None = None,
    memory_limit: float | str | None = None,
    portable: bool = False,
    *,
    mesh: Mesh | str | None = None,
    keep: bool | Sequence[bool] = True,
    even: bool = False,
) -> Plan:
    """Return the plan of `redistribute` for a caller who keeps sources: under a limit they count to the end.

    `keep` says it of all sources, or of each. The program of a plan under a limit then lists the kept inputs as further
    outputs, behind those of the destinations; without a limit there is nothing to count, and it lists none.
    """
    where, limit = where_of("topology", topology), limit_of("memory limit", memory_limit)
    portable = validation.flag("portable", portable)
    keep = keep if limit is not None else False
    if isinstance(src, (TensorType, str)) != isinstance(dst, (TensorType, str)):
        raise LayoutError("redistribute takes two types, or two lists of types of equal length")
    if isinstance(src, (TensorType, str)):
        source, destination = type_of("the source", src, mesh), type_of("the destination", dst, mesh)
        check_pair(source, destination)
        return _cached_plan(source, destination, where, limit, portable, _keep_flags(keep, 1)[0], even)
    sources = tuple(type_of(f"source {k}", t, mesh) for k, t in enumerate(validation.items("src", src, "types")))
    destinations = tuple(
        type_of(f"destination {k}", t, mesh) for k, t in enumerate(validation.items("dst", dst, "types"))
    )
    if len(sources) != len(destinations):
        raise LayoutError(
            f"a batch of {len(sources)} sources and {len(destinations)} destinations; give as many of each"
        )
    for s, t in zip(sources, destinations, strict=True):
        check_pair(s, t)
    kept = _keep_flags(keep, len(sources))
    if len(sources) == 1:
        return _cached_plan(*sources, *destinations, where, limit, portable, *kept, even)
    return _cached_batch(sources, destinations, where, limit, portable, kept, even)


def _keep_flags(keep: bool | Sequence[bool], count: int) -> tuple[bool, ...]:
    """Say of each source whether it is kept."""
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
    even: bool,
) -> Plan:
    def planned(where: Where | None) -> Plan:
        return plan_batch(sources, destinations, where, limit, portable, keep, even)

    ends = list(zip(sources, destinations, strict=True))
    return replace(planned(where), _better=lambda: better_text(ends, where, planned))


def check_pair(s: TensorType, t: TensorType) -> None:
    """Raise `LayoutError` unless the two types describe one array."""
    if s.shape != t.shape or s.dtype != t.dtype:
        raise LayoutError(f"cannot redistribute {s} to {t}: dtype and global shape must be equal")
    if has_box_table(s, t) and any(x.layout.partial or x.layout.root for x in (s, t)):
        raise LayoutError(f"cannot redistribute {s} to {t}: beside a table of boxes nothing is partial or at a root")
    kinds = {x.layout.reduction for x in (s, t) if x.layout.partial}
    if len(kinds) > 1 and s.layout.partial and t.layout.partial and s.mesh == t.mesh:
        common = set(s.mesh.expand(s.layout.partial)) & set(t.mesh.expand(t.layout.partial))
        if common:
            raise LayoutError(f"cannot redistribute {s} to {t}: an axis is partial with two different reductions")


@lru_cache(maxsize=4096)
def _cached_plan(
    s: TensorType, t: TensorType, where: Where | None, limit: int | None, portable: bool, keep: bool, even: bool
) -> Plan:
    def planned(where: Where | None) -> Plan:
        chosen = best_program(s, t, where, limit, portable, keep, even)
        claims = issue(chosen.program, (s,), (t,), where, limit, chosen.exact, chosen.books, least=chosen.least)
        return Plan(chosen.program, claims)

    def price(s: TensorType, t: TensorType) -> float:
        return best_program(s, t, where, limit, portable, False, even).price

    def better() -> str:
        return better_text([(s, t)], where, planned) or stop_text(s, t, where, plan.seconds, price)

    plan = planned(where)
    return replace(plan, _better=better)
