"""Factors in any order: the same move on meshes that say the prime factors of their axes in other orders.

A dim over `a=12` and `b=6` lies in 12 or 6 equal parts in whatever order one thinks of their factors, but the tiles in
between differ: after a 3 come those that a 2 in front never makes. Types that name an axis whole are the same boxes on
every such mesh, so a program enters one by a `Send` that moves nothing, and leaves it by another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from shardplan.core.mesh import Mesh, primes
from shardplan.core.tensor import TensorType

# Meshes tried: two axes of 12 have eight besides their own, three have 26.
MOST_ORDERS = 12


@lru_cache(maxsize=1024)
def _orders(n: int) -> tuple[tuple[int, ...], ...]:
    """The orders of the prime factors, ascending first."""
    return tuple(sorted(set(itertools.permutations(primes(n)))))


def other_orders(s: TensorType, t: TensorType) -> Iterator[tuple[TensorType, TensorType]]:
    """Yield two types of one mesh, neither partial nor rooted, on its meshes with other orders of the factors.

    Reordered are axes that both types name whole, on even dims only.
    """
    mesh = s.mesh
    if any((*x.layout.partial, *x.layout.root) for x in (s, t)):
        return
    named = {n for x in (s, t) for names in x.layout.dims for n in names}
    stiff = {a for x in (s, t) for d, even in enumerate(x.even) if not even for a in x.atoms[d]}
    free = [
        a
        for a, split in zip(mesh.axes, mesh.parts, strict=True)
        if a in named and not split and not stiff & set(mesh.span(a).atoms) and len(_orders(mesh.span(a).size)) > 1
        if not any(n != a and set(mesh.span(n).atoms) <= set(mesh.span(a).atoms) for n in named)
    ]
    found = itertools.product(*(_orders(mesh.span(a).size) for a in free))
    for factors in itertools.islice(found, 1, MOST_ORDERS + 1):
        other: Mesh = mesh
        for a, order in zip(free, factors, strict=True):
            other = other.reorder_factors(a, *order)
        yield s.with_layout(s.layout, other), t.with_layout(t.layout, other)
