"""The factors of a reduction: what a placement makes of the axes reduced over, level by level (arXiv 2110.10548).

A *factor* is what the reduced axes have on one level together: their digits (see `digit_order`), in the order of the
level. Members of a reduction group are ordered by their digits, level-major.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import TopologyError
from shardplan.hardware.digit_order import Digit
from shardplan.hardware.placement import Placement

Digits = tuple[tuple[int, int], ...]  # size and stride of each: all that a price depends on


@dataclass(frozen=True, slots=True)
class LevelFactor:
    """The digits that are reduced over together, and their name: that of the level, or of the one digit."""

    name: str
    digits: tuple[Digit, ...]

    @property
    def size(self) -> int:
        """Members of a group over this factor."""
        return math.prod(d.size for d in self.digits)

    @property
    def axes(self) -> tuple[str, ...]:
        """The sub-axes, major first."""
        return tuple(d.name for d in self.digits)

    @property
    def strides(self) -> Digits:
        """Size and stride of every digit."""
        return tuple((d.size, d.stride) for d in self.digits)

    @property
    def units(self) -> tuple[Digits, ...]:
        """The same, each by itself: what a reduction may take apart."""
        return tuple((digit,) for digit in self.strides)


def checked_axes(placement: Placement, axes: str | Sequence[str]) -> tuple[str, ...]:
    """Return axes in mesh order; raises `TopologyError` for none, an unknown one, and one that is named twice."""
    asked = (axes,) if isinstance(axes, str) else tuple(axes)
    legal = ", ".join(f"{a}={n}" for a, n in zip(placement.mesh.axes, placement.mesh.sizes, strict=True))
    if not asked:
        raise TopologyError(f"a reduction needs at least one axis; the mesh has {legal}")
    for axis in asked:
        if axis not in placement.mesh.axes:
            raise TopologyError(f"cannot reduce over {axis!r}: the mesh has {legal}")
        if asked.count(axis) > 1:
            raise TopologyError(f"cannot reduce over {list(asked)}: {axis!r} is named twice")
    return tuple(axis for axis in placement.mesh.axes if axis in asked)


def factors(placement: Placement, axes: str | Sequence[str], uncollapsed: bool = False) -> tuple[LevelFactor, ...]:
    """Return the factors of a reduction over some axes, outermost first: above 1, their product that of the axes.

    With `uncollapsed` there is one factor for each digit, instead of one for each level. Raises `TopologyError` for an
    axis that is unknown or named twice.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> p = Placement(Mesh(data=8, tensor=2), Topology.load("dgx-a100", nodes=2), ((2, 4), (1, 2)))
    >>> [(f.name, f.axes, f.size) for f in factors(p, ("data",))]
    [('node', ('data.node',), 2), ('gpu', ('data.gpu',), 4)]
    """
    asked = checked_axes(placement, axes)
    found: list[LevelFactor] = []
    for level, every in zip(placement.topology.levels, placement.digits(), strict=True):
        digits = tuple(d for d in every if d.axis in asked)
        if uncollapsed:
            found += [LevelFactor(d.name, (d,)) for d in digits]
        elif digits:
            found.append(LevelFactor(level.name, digits))
    return tuple(found)


def groups_along(varies: Digits, zero: Digits, first: int) -> NDArray[np.int64]:
    """Return the groups whose members differ in the digits `varies` and are 0 in `zero`: topology ids, [groups, k].

    Members are in the order of the digits, major first; the first member of a group is below `first`.

    >>> groups_along(((2, 4),), ((2, 1),), 8).tolist()
    [[0, 4], [2, 6]]
    """
    ids = np.arange(first)
    for size, stride in (*varies, *zero):
        ids = ids[ids // stride % size == 0]
    members = ids[:, None]
    for size, stride in varies:
        members = (members[:, :, None] + np.arange(size) * stride).reshape(len(ids), -1)
    return members
