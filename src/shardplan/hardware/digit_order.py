"""The order of the digits of a level: which dims of a torus a mesh axis lies on.

A *digit* is the part of one axis on one level: a device's topology id, divided by the digit's stride and taken modulo
its size, is its coordinate there. A level's units are numbered by the digits of the axes, major first: in mesh order
(arXiv 2110.10548) where nothing else is said. On a ring, torus or mesh the order decides which units are near each
other.

On a torus or mesh an axis may stand in the order several times: every time but the last it takes one whole dim, and
the last time the rest. On the shape [4, 8, 16], `data` of 64 lies on the dims 0 and 2 in (data, tensor, data), with
`tensor` of 8 between; in (data, tensor) it lies on the dims 0 and 1 and on the two halves of dim 2.

Not said by any order: an axis on two parts of one dim with another axis between them, and a part of a dim that is not
the last of its axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardplan.errors import TopologyError, near_text
from shardplan.hardware.level import Level


@dataclass(frozen=True, slots=True)
class Digit:
    """The part of an axis on a level, or one of its parts there."""

    name: str  # of the sub-axis in `Placement.mesh_split()`
    axis: str
    level: int
    size: int  # above 1
    stride: int  # topology ids between neighbours


def normal_order(level: Level, sizes: Mapping[str, int], given: Sequence[str]) -> tuple[str, ...]:
    """Return an order as it is kept: without axes of size 1, and without repetitions that change nothing.

    `sizes` are those of the mesh axes on the level. Raises `TopologyError` where it is no order of these axes.
    """
    order = tuple(axis for axis in given if sizes.get(axis) != 1)
    where = f"order ({', '.join(given)}) of level {level.name!r}"
    several = [axis for axis, size in sizes.items() if size > 1]
    for axis in order:
        if axis not in sizes:
            raise TopologyError(
                f"{where}: {axis!r} is no axis of the mesh; axes: {', '.join(sizes)}{near_text(axis, sizes)}"
            )
    for axis in several:
        if axis not in order:
            raise TopologyError(f"{where} lacks {axis!r}, which is split over {sizes[axis]} there")
    last = {axis: n for n, axis in enumerate(order)}
    order = tuple(axis for n, axis in enumerate(order) if n == last[axis] or set(order[n : last[axis]]) != {axis})
    if len(order) > len(several):
        _check_repeats(where, level, sizes, order)
    return order


def _check_repeats(where: str, level: Level, sizes: Mapping[str, int], order: tuple[str, ...]) -> None:
    """Refuse an axis that stands again where it cannot take a whole dim before."""
    need, done = dict(sizes), 1
    for n, axis in enumerate(order):
        size = need[axis]
        if axis in order[n + 1 :]:
            dims = _dims_from(level, done)
            size = dims[0] if dims else 0
            if not size or need[axis] % size or need[axis] == size:
                what = f"the dim there has {size}" if size else "no dim of a torus or mesh begins there"
                raise TopologyError(
                    f"{where}: {axis!r} stands at place {n} and again later, so it takes a whole dim at place {n} and "
                    f"has some of its {need[axis]} left; {what}"
                )
        need[axis] //= size
        done *= size


def level_digits(level: Level, sizes: Mapping[str, int], order: Sequence[str]) -> list[tuple[str, int]]:
    """Return the axes and sizes of the digits of a level in a normal order; neighbours of one axis are one digit."""
    need, done = dict(sizes), 1
    found: list[tuple[str, int]] = []
    for n, axis in enumerate(order):
        size = _dims_from(level, done)[0] if axis in order[n + 1 :] else need[axis]
        need[axis] //= size
        done *= size
        if found and found[-1][0] == axis:
            found[-1] = axis, found[-1][1] * size
        else:
            found.append((axis, size))
    return found


def level_orders(level: Level, sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield every normal order of the axes on a level, that of the mesh first.

    >>> torus = Level("chip", 64, "torus", 1e11, 1e-6, shape=(4, 4, 4))
    >>> list(level_orders(torus, {"data": 16, "tensor": 4}))
    [('data', 'tensor'), ('data', 'tensor', 'data'), ('tensor', 'data')]
    """

    def rest(need: dict[str, int], done: int, last: str) -> Iterator[tuple[str, ...]]:
        """Yield the orders of what is needed when the digits so far multiply to `done` and end with axis `last`."""
        if all(n == 1 for n in need.values()):
            yield ()
            return
        for axis, n in need.items():
            if n == 1 or axis == last:
                continue
            for others in rest(need | {axis: 1}, done * n, axis):
                yield (axis, *others)
            dims = _dims_from(level, done)
            for k in range(1, len(dims)):
                taken = math.prod(dims[:k])
                if n % taken or n == taken:
                    break
                for others in rest(need | {axis: n // taken}, done * taken, axis):
                    yield (*(axis,) * k, *others)

    return rest(dict(sizes), 1, "")


def _dims_from(level: Level, done: int) -> list[int]:
    """Return the extents above 1 of the dims that are left when those before multiply to `done`; none inside a dim."""
    left = [extent for extent in level.shape if extent > 1]
    while left and done > 1 and done % left[0] == 0:
        done //= left.pop(0)
    return left if done == 1 else []
