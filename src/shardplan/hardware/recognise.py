"""An existing mesh read as a placement: its matrix (arXiv 2110.10548, backwards), and the order of its digits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import TopologyError
from shardplan.hardware.placement import Matrix, Placement, reorder_level
from shardplan.hardware.prices.aggregate import units_spanned
from shardplan.hardware.topology import Topology


def matrix_of(ids: NDArray[np.int64], topology: Topology) -> Matrix | None:
    """Return the placement matrix of an existing mesh, up to renaming equal units.

    Args:
        ids: Topology ids in the mesh's shape, every device once.
        topology: The hardware.

    Returns:
        The matrix, or None when the mesh is no placement: along some set of axes the groups span different numbers of
        units, or the counts are no product of rows.

    Raises:
        TopologyError: The ids are not a permutation of the topology's devices.

    Source: arXiv 2110.10548, read backwards: rows are ratios of the units a group spans.

    >>> matrix_of(np.arange(16).reshape(8, 2), Topology.load("dgx-a100", nodes=2))
    ((2, 4), (1, 2))
    """
    array = topology.check_ids(ids)
    if array.size != topology.size or np.unique(array).size != array.size:
        raise TopologyError(
            f"the mesh names {np.unique(array).size} distinct devices in {array.size} places; "
            f"topology {topology.name!r} has {topology.size}, each must stand once"
        )
    counts: list[list[int]] = []
    for i in range(array.ndim):
        units = _units_spanned(array, (i,), topology)
        if units is None or any(units[j] % units[j - 1] for j in range(1, len(units))):
            return None
        counts.append([units[0]] + [units[j] // units[j - 1] for j in range(1, len(units))])
    matrix = tuple(tuple(row) for row in counts)
    for j, size in enumerate(topology.level_sizes):
        if math.prod(row[j] for row in matrix) != size:
            return None
    # Rows that fit axis by axis may still not fit together: two axes that go over the same units do not multiply.
    for subset in range(1, 1 << array.ndim):
        axes = tuple(i for i in range(array.ndim) if subset >> i & 1)
        if len(axes) > 1:
            expected = [math.prod(math.prod(matrix[i][: j + 1]) for i in axes) for j in range(len(topology.levels))]
            if _units_spanned(array, axes, topology) != expected:
                return None
    return matrix


def order_of(ids: NDArray[np.int64], placement: Placement) -> Placement:
    """Return a placement in the order that an existing mesh of its matrix has, level by level; else in the mesh's.

    `ids` are topology ids in the mesh's shape.
    """
    found = replace(placement, order=())
    for j, (stride, size) in enumerate(zip(placement.topology.strides, placement.topology.level_sizes, strict=True)):
        own = ids // stride % size
        candidates = (p for p in reorder_level(found, j) if np.array_equal(p.device_mesh() // stride % size, own))
        found = next(candidates, found)
    return found


def _units_spanned(array: NDArray[np.int64], axes: tuple[int, ...], topology: Topology) -> list[int] | None:
    """The number of distinct units of each level in every group along `axes`; None where the groups disagree."""
    others = [i for i in range(array.ndim) if i not in axes]
    groups = array.transpose([*others, *axes]).reshape(-1, math.prod(array.shape[i] for i in axes))
    distinct = units_spanned(groups, topology)
    return None if (distinct != distinct[:, :1]).any() else cast(list[int], distinct[:, 0].tolist())
