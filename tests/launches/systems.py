"""Systems, placements and launches for the tests of launches and audits, with oracles in plain loops."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from hardware.topologies import any_topology, factorisations, switches
from shardplan.core.mesh import Mesh
from shardplan.hardware import placements

LEVELS = (1, 2, 3, 4, 6, 8)


@st.composite
def systems(draw, most=64, names=("data", "tensor", "pipeline", "context")):
    """A topology of one to three switch levels and a mesh on it."""
    sizes = draw(st.lists(st.sampled_from(LEVELS), min_size=1, max_size=3).filter(lambda x: math.prod(x) <= most))
    topology = switches(*sizes, uplinks=draw(st.integers(1, 3)))
    parts = draw(st.integers(1, len(names)))
    axes = draw(st.sampled_from(sorted(factorisations(topology.size, parts))))
    return Mesh(dict(zip(names, axes, strict=False))), topology


@st.composite
def linked_systems(draw, most=24, names=("data", "tensor")):
    """A topology of any links, nothing slow, and a mesh of two axes on it."""
    topology = draw(any_topology(most))
    topology = replace(topology, levels=tuple(level.sound() for level in topology.levels))
    return Mesh(
        dict(zip(names, draw(st.sampled_from(sorted(factorisations(topology.size, 2)))), strict=False))
    ), topology


@st.composite
def placed(draw, most=64):
    """One placement of a random system."""
    mesh, topology = draw(systems(most))
    return draw(st.sampled_from(list(placements(mesh, topology))))


def renaming(topology, random):
    """Rename the children of every unit: an array, device -> device."""
    renamed = np.zeros(topology.size, dtype=np.int64)

    def shuffle(level, old, new):
        if level == len(topology.levels):
            renamed[old] = new
            return
        children = list(range(topology.level_sizes[level]))
        random.shuffle(children)
        for a, b in enumerate(children):
            shuffle(level + 1, old * len(children) + a, new * len(children) + b)

    shuffle(0, 0, 0)
    return renamed


def plain_groups(mesh, ids, axes):
    """The groups over axes in member order, by loops over coordinates: lists of topology ids."""
    array = np.array(ids).reshape(mesh.sizes)
    found = []
    fixed = [range(n) if a not in axes else [None] for a, n in mesh.shape.items()]
    for base in itertools.product(*fixed):
        group = []
        for moving in itertools.product(*(range(mesh.shape[a]) for a in axes)):
            at = dict(zip(axes, moving, strict=True))
            group.append(int(array[tuple(at[a] if b is None else b for a, b in zip(mesh.axes, base, strict=True))]))
        found.append(group)
    return found


def plain_matrix(mesh, ids, topology):
    """The matrix of a launch by sets, or None."""
    spans = {}
    for size in range(1, len(mesh.axes) + 1):
        for axes in itertools.combinations(mesh.axes, size):
            for j, stride in enumerate(topology.strides):
                counts = {len({d // stride for d in g}) for g in plain_groups(mesh, ids, axes)}
                if len(counts) > 1:
                    return None
                spans[axes, j] = counts.pop()
            if size > 1 and any(spans[axes, j] != math.prod(spans[(a,), j] for a in axes) for j in range(j + 1)):
                return None
    rows = []
    for axis in mesh.axes:
        row = [1, *(spans[(axis,), j] for j in range(len(topology.levels)))]
        if any(b % a for a, b in itertools.pairwise(row)):
            return None
        rows.append(tuple(b // a for a, b in itertools.pairwise(row)))
    return tuple(rows)


def plain_detour(mesh, ids, topology):
    """Whether some ring visits a unit twice, by loops."""
    for axis in mesh.axes:
        for g in plain_groups(mesh, ids, (axis,)):
            for stride in topology.strides:
                units = [d // stride for d in g]
                crossings = sum(a != b for a, b in zip(units, units[1:] + units[:1], strict=True))
                if crossings > (len(set(units)) if len(set(units)) > 1 else 0):
                    return True
    return False


def plain_renaming(mesh, ids, canonical, topology):
    """Whether renaming units inside their parents turns one numbering into the other, by dicts."""
    for stride in topology.strides:
        new = {}
        for a, b in zip(canonical, ids, strict=True):
            if new.setdefault(a // stride, b // stride) != b // stride:
                return False
    return True
