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
from collections.abc import Sequence

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
    matrix = np.array(placement.matrix, dtype=np.int64).reshape(len(mesh.axes), -1)
    if kind == "row":
        return _sizes(matrix.reshape(-1)), tuple(groups.tolist())
    on_topology = np.empty_like(groups)
    on_topology[placement.device_mesh().reshape(-1)] = groups
    entries = np.array(placement.topology.level_sizes) if kind == "system" else matrix.T.reshape(-1)
    return _sizes(entries), tuple(on_topology.tolist())


def _sizes(entries: np.ndarray) -> tuple[int, ...]:
    return tuple(int(x) for x in entries if x > 1)
