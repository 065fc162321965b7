"""`AtomView`: a value as a source sees it: its dims as groups of the dims that our value has, in any order.

What only looks at a value otherwise (a transposition, heads split off or joined, a dim of size 1, rows repeated) is no
step: it is another view. An op that cares asks the writer to lay its operands out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

BROADCAST = -1


class Descent(NamedTuple):
    """A factor of a dim of a parameter, as a checkpoint has it, or one of `parts` equal parts of it."""

    file: str
    dim: int
    factor: int
    parts: int = 1


class AxisFactor(NamedTuple):
    """A dim of our value, or one along which it is repeated; and the parameters' dims that it comes from."""

    size: int
    axis: int
    origins: frozenset[Descent] = frozenset()

    @property
    def has_axis(self) -> bool:
        """Whether our value has it."""
        return self.axis != BROADCAST


Group = tuple[AxisFactor, ...]


class AtomView(NamedTuple):
    """A value's name, and its dims major to minor; a dim of no atoms has size 1."""

    name: str
    dims: tuple[Group, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return tuple(size_of(group) for group in self.dims)

    @property
    def atoms(self) -> Group:
        """All atoms, in the order of the dims."""
        return tuple(a for group in self.dims for a in group)

    @property
    def size(self) -> int:
        """How many elements it shows."""
        return math.prod(self.shape)

    @property
    def tidy(self) -> AtomView:
        """Without atoms of size 1 in dims that are larger."""
        dims = (tuple(a for a in g if a.size > 1) if size_of(g) > 1 else g[:1] for g in self.dims)
        return AtomView(self.name, tuple(dims))

    def permute_dims(self, order: Iterable[int]) -> AtomView:
        """Its dims in another order."""
        return AtomView(self.name, tuple(self.dims[d] for d in order))

    def transpose_dims(self, x: int, y: int) -> AtomView:
        """Two dims in each other's place."""
        order = list(range(len(self.dims)))
        order[x], order[y] = order[y], order[x]
        return self.permute_dims(order)

    def with_one(self, at: int) -> AtomView:
        """One more dim, of size 1."""
        d = at % (len(self.dims) + 1)
        return AtomView(self.name, (*self.dims[:d], (), *self.dims[d:]))

    def squeeze_dims(self, dims: Iterable[int]) -> AtomView:
        """Without some dims of size 1."""
        gone = {d % len(self.dims) for d in dims} if self.dims else set[int]()
        kept = (g for d, g in enumerate(self.dims) if d not in gone or size_of(g) > 1)
        return AtomView(self.name, tuple(kept))

    def broadcast_dims(self, shape: Sequence[int]) -> AtomView:
        """Repeated along dims of size 1, and along new ones before all others; -1 keeps a size."""
        new = len(shape) - len(self.dims)
        dims = (*((),) * new, *self.dims)
        return AtomView(
            self.name,
            tuple(
                g if n in (-1, size_of(g)) else (*(a for a in g if a.has_axis), AxisFactor(n, BROADCAST))
                for g, n in zip(dims, shape, strict=True)
            ),
        )


class ComplexPair(NamedTuple):
    """A complex value: its real and its imaginary part."""

    real: AtomView
    imaginary: AtomView


def size_of(group: Iterable[AxisFactor]) -> int:
    """The size of a dim."""
    return math.prod(a.size for a in group)


def refinement(cuts: Iterable[Sequence[int]]) -> tuple[int, ...] | None:
    """The factors, major to minor, that several ways to cut one size have in common; None where they do not nest.

    >>> refinement([(12,), (3, 4)]), refinement([(6, 2), (3, 4)]), refinement([(4, 3), (3, 4)])
    ((3, 4), (3, 2, 2), None)
    """
    strides = sorted({math.prod(cut[k:]) for cut in cuts for k in range(len(cut) + 1)})
    if any(b % a for a, b in zip(strides, strides[1:], strict=False)):
        return None
    return tuple(b // a for a, b in zip(strides, strides[1:], strict=False))[::-1]
