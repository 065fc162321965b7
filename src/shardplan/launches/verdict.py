"""Verdicts: what a launch is as a placement, and where it is none, which of its groups do not fit.

The matrix is read backwards (arXiv 2110.10548): the units that every group spans give the rows. The order of a group's
members tells whether its ring visits a unit once. The verdict is about how units nest and link; how fast they are
(`degraded`) is the business of seconds. Whether an order costs anything is the library's to say: some order a group's
members themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardplan.core.pattern import Groups
from shardplan.hardware.placement import Matrix, Order, Placement, reorder_level
from shardplan.hardware.prices.aggregate import GroupLayout, units_spanned
from shardplan.hardware.prices.cost import KINDS, seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.recognise import matrix_of, order_of
from shardplan.hardware.topology import Topology
from shardplan.launches.launch import Ints, Launch, Ring, article, count_units, detour_text, plural, quote_axes, ring_of
from shardplan.movement.placing.placement_price import SAME

Verdict = Literal["canonical", "equivalent", "interleaved", "not a placement"]
_SIZES = (2.0**10, 2.0**20, 2.0**30)  # bytes at which an order may be felt


@dataclass(frozen=True, slots=True)
class Stray:
    """A group that keeps a launch from being a placement."""

    axes: tuple[str, ...]  # that it varies over
    level: str  # the name of the one where it does not fit
    ranks: tuple[int, ...]  # its members
    spans: int  # units of the level that it spans
    expected: int  # units that it would span in a placement


@dataclass(frozen=True, slots=True)
class Findings:
    """What a launch is as a placement."""

    # `canonical`: it is `device_mesh()`; `equivalent`: up to renaming equal units (on a ring, torus or mesh also the
    # order of a level's digits, where no axis takes more hops); `interleaved`: the right groups in an order that costs
    # rings or chains in that order more; or `not a placement`.
    verdict: Verdict
    matrix: Matrix | None  # None where there is none
    spans: tuple[tuple[tuple[int, int], ...], ...]  # by axis and level the least and the most units that groups span
    rings: tuple[Ring, ...]  # one for each axis, and for each tuple of axes that was asked for
    strays: tuple[Stray, ...]  # the offending groups, of the smallest set of axes that has some
    reason: str  # why it is interleaved or no placement, one sentence; else empty
    felt: bool  # whether it is interleaved, and its topology's library takes longer for that
    order: Order = ()  # of the digits of each level, where it is one that a placement can have; else the mesh's


def analyse(launch: Launch, together: Sequence[tuple[str, ...]] = ()) -> Findings:
    """Return what a launch is as a placement.

    `together` are further tuples of axes whose rings to follow; the verdict takes no notice of them. Raises
    `LayoutError` where they name an axis that the mesh has not.

    Source: arXiv 2110.10548, read backwards.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> analyse(Launch(Mesh(data=8, tensor=2), Topology.load("dgx-a100", nodes=2), tuple(range(16)))).verdict
    'canonical'
    """
    mesh, topology = launch.mesh, launch.topology
    counts = [units_spanned(launch.groups((axis,)), topology) for axis in mesh.axes]
    spans = tuple(tuple((int(row.min()), int(row.max())) for row in count) for count in counts)
    rings = tuple(ring_of(launch, axes) for axes in [*((axis,) for axis in mesh.axes), *together])
    matrix = matrix_of(launch.array, topology)
    if matrix is None:
        reason, strays = _strays(launch)
        return Findings("not a placement", None, spans, rings, strays, reason, False)
    plain = Placement(mesh, topology, matrix)
    placed, order = Launch.of(plain), order_of(launch.array, plain).order
    listed = [ring_of(launch, (axis,), listed=True) for axis in mesh.axes]
    reason = _detour(listed, topology) or _long_way(launch, matrix) or _misaligned_level(launch, placed.array)
    reason = reason or _leaf_changes(launch, placed)
    if reason:
        felt = _is_slower(launch, Launch.of(replace(plain, order=order)))
        if not felt:
            reason += f"; {topology.library} orders members itself and does not feel it"
        return Findings("interleaved", matrix, spans, rings, (), reason, felt, order)
    canonical = np.array_equal(launch.array, placed.array)
    return Findings("canonical" if canonical else "equivalent", matrix, spans, rings, (), "", False, order)


def _is_slower(launch: Launch, placed: Launch) -> bool:
    """Whether the topology's library takes longer for some collective over an axis than in the order of the numbering.

    A slow unit is no matter of order.
    """
    topology = replace(launch.topology, levels=tuple(level.sound() for level in launch.topology.levels))
    fabric = Fabric(topology)
    if fabric.library.member_order:
        return True
    for axis, kind in itertools.product(launch.mesh.axes, KINDS):
        groups, ordered = launch.groups((axis,)), placed.groups((axis,))
        for nbytes in (np.full(len(groups), size) for size in _SIZES):
            here, there = (seconds(Groups(kind, members, nbytes), fabric) for members in (groups, ordered))
            if here > there * (1 + SAME):
                return True
    return False


def _detour(rings: Sequence[Ring], topology: Topology) -> str:
    """Say where rings pass between units too often; empty if nowhere."""
    found = [ring for ring in rings if any(ring.detours)]
    if not found:
        return ""
    # The outermost level first: there a detour costs most.
    outermost = min(found, key=lambda ring: next(j for j, n in enumerate(ring.detours) if n))
    return detour_text(outermost, topology)


def _leaf_changes(launch: Launch, placed: Launch) -> str:
    """Say which groups go from leaf to leaf of a level of rails, and as placed less; empty where none do."""
    fabric = Fabric(launch.topology)
    for j, level in enumerate(launch.topology.levels):
        for axis in launch.mesh.axes if level.rails else ():
            here, there = (GroupLayout(one.groups((axis,)), fabric).stray_parts(j).sum() for one in (launch, placed))
            if here > there * (1 + SAME):
                return (
                    f"groups over `{axis}` have other NICs in other nodes: what they send goes from leaf to leaf of "
                    f"{article(level.name)}"
                )
    return ""


def _misaligned_level(launch: Launch, placed: Ints) -> str:
    """Say at which outermost level units are not those of the numbering under other names; empty if at none."""
    renamed = np.empty(placed.size, dtype=np.int64)
    renamed[placed.reshape(-1)] = launch.ids
    for level, stride in zip(launch.topology.levels, launch.topology.strides, strict=True):
        units = renamed.reshape(-1, stride) // stride
        if bool((units != units[:, :1]).any()):
            return (
                f"the groups are right, but some begin inside {article(level.name)}: their rings cross no more, their "
                "chains do"
            )
    return ""


def _strays(launch: Launch) -> tuple[str, tuple[Stray, ...]]:
    """The smallest set of axes whose groups fit no matrix, as a sentence, and those groups."""
    mesh, levels = launch.mesh, launch.topology.levels
    counts = {axis: units_spanned(launch.groups((axis,)), launch.topology) for axis in mesh.axes}
    for axis in mesh.axes:
        for j in range(len(levels)):
            # What most groups span, the fewest of equally frequent numbers.
            expected = int(np.bincount(counts[axis][j]).argmax())
            if bool((counts[axis][j] != expected).any()):
                return _stray_reason(launch, (axis,), j, counts[axis][j], expected)
    for axis in mesh.axes:
        row = [1, *(int(found[0]) for found in counts[axis])]
        for j, level in enumerate(levels):
            if row[j + 1] % row[j]:
                reason = (
                    f"every group over `{axis}` spans {count_units(row[j], levels[j - 1].name)} but "
                    f"{count_units(row[j + 1], level.name)}, which is no multiple"
                )
                return reason, _stray_groups(launch, (axis,), level.name, counts[axis][j], row[j])
    for size in range(2, len(mesh.axes) + 1):
        for axes in itertools.combinations(mesh.axes, size):
            joint = units_spanned(launch.groups(axes), launch.topology)
            for j in range(len(levels)):
                expected = math.prod(int(counts[axis][j][0]) for axis in axes)
                if bool((joint[j] != expected).any()):
                    return _stray_reason(launch, axes, j, joint[j], expected)
    # All counts are products of the rows, so the whole mesh, too, spans them; its sizes are the topology's.
    raise AssertionError("a launch without a matrix has an offending group")


def _stray_reason(
    launch: Launch, axes: tuple[str, ...], j: int, found: Ints, expected: int
) -> tuple[str, tuple[Stray, ...]]:
    """The sentence and the groups, of those that span another number of units of level j than expected."""
    name, wrong = launch.topology.levels[j].name, found[found != expected]
    some = f"{len(wrong)} of the {len(found)} groups" if len(found) > 1 else "the group"
    reason = (
        f"{some} over {quote_axes(axes)} {'span' if len(wrong) > 1 else 'spans'} {count_units(_range(wrong), name)} "
        f"where a placement has {expected}"
    )
    return reason, _stray_groups(launch, axes, name, found, expected)


def _stray_groups(launch: Launch, axes: tuple[str, ...], level: str, found: Ints, expected: int) -> tuple[Stray, ...]:
    """The groups over axes that span another number of units than expected."""
    ranks = launch.mesh.ids[launch.places(axes)]
    return tuple(
        Stray(axes, level, tuple(ranks[g].tolist()), int(found[g]), expected)
        for g in np.flatnonzero(found != expected).tolist()
    )


def _range(numbers: Ints) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


def _long_way(launch: Launch, matrix: Matrix) -> str:
    """Say where hops on rings, toruses and meshes are more than those of the numbering, in the best order of digits."""
    mesh, topology = launch.mesh, launch.topology
    for j, level in enumerate(topology.levels):
        if level.link in ("switch", "full") or level.size < 4:  # of three or fewer, every order is as good
            continue
        found = [_hops(launch, axis, j) for axis in mesh.axes]
        orders = [Launch.of(one) for one in reorder_level(Placement(mesh, topology, matrix), j)]
        offers = [[_hops(one, axis, j) for axis in mesh.axes] for one in orders]
        if not any(all(a <= b for a, b in zip(found, offer, strict=True)) for offer in offers):
            best = min(offers, key=sum)
            i = max(range(len(found)), key=lambda k: found[k] - best[k])
            return (
                f"the rings over `{mesh.axes[i]}` take {found[i]} hops between {plural(level.name)} on their "
                f"{level.link}, {best[i]} would do"
            )
    return ""


def _hops(launch: Launch, axis: str, j: int) -> int:
    """Hops between neighbours of all rings over an axis, on level j where they stay inside its parents."""
    level, stride = launch.topology.levels[j], launch.topology.strides[j]
    out = launch.groups((axis,)) // stride
    into = np.roll(out, -1, axis=1)
    keep = out // level.size == into // level.size
    start = np.array(np.unravel_index(out[keep] % level.size, level.extents))
    end = np.array(np.unravel_index(into[keep] % level.size, level.extents))
    ahead = np.abs(end - start)
    if level.link != "mesh":
        ahead = np.minimum(ahead, np.array(level.extents)[:, None] - ahead)
    return int(ahead.sum())
