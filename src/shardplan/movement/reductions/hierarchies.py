"""The four hierarchies over which 2110.10548 synthesises reductions (its section 4); the last is what we use.

- `system`: the levels of the topology;
- `column`: the entries of the matrix, level by level;
- `row`: the entries of the matrix, axis by axis;
- `factors`: the factors of the reduced axes alone, as one reduction group sees them.

The first three are over all devices, so that most of their instructions mix reduction groups and lead nowhere; the last
has as many members as one group, is the smallest, and expresses every program that the others do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from shardplan.errors import LayoutError
from shardplan.hardware.level_factors import checked_axes, factors
from shardplan.hardware.placement import Placement

HIERARCHIES = ("system", "column", "row", "factors")


def hierarchy(placement: Placement, axes: str | Sequence[str], kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of the digits (without ones, major first) and the reduction group of every member.

    That is what `state_graph.explore` takes; `kind` is one of `HIERARCHIES`.

    Raises:
        LayoutError: The hierarchy is unknown.
        TopologyError: An axis is unknown.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> p = Placement(Mesh(a=2, b=8), Topology.load("dgx-a100", nodes=2), ((2, 1), (1, 8)))
    >>> hierarchy(p, "a", "factors")
    ((2,), (0, 0))
    """
    if kind not in HIERARCHIES:
        raise LayoutError(f"hierarchy {kind!r} is unknown; legal are {', '.join(HIERARCHIES)}")
    asked = checked_axes(placement, axes)
    if kind == "factors":
        sizes = tuple(f.size for f in factors(placement, asked))
        return sizes, (0,) * math.prod(sizes)
    mesh = placement.mesh
    groups = np.zeros(mesh.size, dtype=np.int64)
    for number, places in enumerate(mesh.group_places(asked)):
        groups[places] = number
    if kind == "row":
        return _sizes(x for row in placement.matrix for x in row), tuple(groups.tolist())
    on_topology = np.empty_like(groups)
    on_topology[placement.device_mesh().reshape(-1)] = groups
    if kind == "system":
        return _sizes(placement.topology.level_sizes), tuple(on_topology.tolist())
    return tuple(d.size for level in placement.digits() for d in level), tuple(on_topology.tolist())


def _sizes(entries: Iterable[int]) -> tuple[int, ...]:
    return tuple(x for x in entries if x > 1)
