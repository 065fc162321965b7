"""Megatron's order strings, such as `tp-cp-ep-dp-pp`, as placements and back.

The first name is the fastest: ranks are numbered through it first. On ranks that stand host by host an order string is
the *greedy* matrix, which fills levels from the innermost out with axes in the string's order. It exists where every
axis boundary divides a level boundary or the other way round (3-way tensor parallelism on hosts of 8 devices is no
placement).

Source: NVIDIA/Megatron-LM `megatron/core/parallel_state.py`, `RankGenerator`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.core.mesh import Mesh
from shardplan.errors import ParseError, TopologyError
from shardplan.hardware.placement import Matrix, Placement
from shardplan.hardware.topology import Topology
from shardplan.movement.placing.traffic import DATA, PIPELINE

# Megatron's names in its default order, each with the names that an axis of a mesh may bear.
NAMES: dict[str, tuple[str, ...]] = {
    "tp": ("tp", "tensor", "model"),
    "cp": ("cp", "context", "sequence", "seq"),
    "ep": ("ep", "expert"),
    "dp": DATA,
    "pp": PIPELINE,
}
DEFAULT = "-".join(NAMES)
MAPPING = "tp-cp-ep-pp-dp"  # the order of Megatron-LM's option
MAPPING_OPTION = "--use-tp-pp-dp-mapping"


def name_of(axis: str) -> str | None:
    """Return Megatron's name of an axis, None where it has none.

    >>> name_of("tensor")
    'tp'
    """
    return next((name for name, words in NAMES.items() if axis in words), None)


def fastest_first(order: str, mesh: Mesh) -> tuple[str, ...]:
    """Return all axes of a mesh in the order that an order string says, the fastest first.

    The string is such as `"tp-cp-ep-dp-pp"`; names of degree 1 may be left out. Axes are called tp, cp, ep, dp, pp, or
    tensor, context, expert, data, pipeline (`NAMES` has all).

    Raises `ParseError` where a name is unknown or stands twice, or an axis of the mesh is missing.

    >>> fastest_first("tp-dp", Mesh(data=4, tensor=2))
    ('tensor', 'data')
    """
    table: dict[str, str] = {}
    for axis in mesh.axes:
        name = name_of(axis)
        if name is None:
            words = "; ".join(f"{n}: {', '.join(w[1:])}" for n, w in NAMES.items())
            raise ParseError(f"order {order!r}: axis {axis!r} of mesh {mesh} has no name in Megatron; legal: {words}")
        if name in table:
            raise ParseError(f"order {order!r}: the axes {table[name]!r} and {axis!r} of mesh {mesh} are both {name}")
        table[name] = axis
    names = order.strip().lower().split("-")
    for name in names:
        if name not in NAMES:
            raise ParseError(f"order {order!r}: {name!r} is unknown; legal is a row such as {DEFAULT}, fastest first")
        if names.count(name) > 1:
            raise ParseError(f"order {order!r}: {name!r} stands twice")
    for name, axis in table.items():
        if name not in names and mesh.shape[axis] > 1:
            raise ParseError(
                f"order {order!r} leaves out {name}, but axis {axis!r} has size {mesh.shape[axis]}; legal is to name "
                "every axis of more than one device"
            )
    rest = [axis for name, axis in table.items() if name not in names]
    return (*(table[name] for name in names if name in table), *rest)


def order_ranks(mesh: Mesh, fastest: Sequence[str]) -> NDArray[np.int64]:
    """Return the ranks of a mesh numbered in an order of its axes, int64 in the mesh's shape.

    `fastest` holds all its axes, the fastest first; the devices that the mesh names play no part.

    >>> order_ranks(Mesh(data=2, tensor=3), ("data", "tensor")).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    slowest = list(reversed(fastest))
    grid = np.arange(mesh.size).reshape([mesh.shape[axis] for axis in slowest])
    return grid.transpose([slowest.index(axis) for axis in mesh.axes])


def takes_order(order: str, mesh: Mesh) -> bool:
    """Say whether Megatron takes an order of a mesh: its pipelines are the same of dense and of expert layers.

    Dense layers know no expert axis: its devices are among their data parallel ones. Expert layers have no context
    axis: its devices are among theirs. Megatron asserts that an order ends in `pp`, or the two have equal data degrees.

    Source: NVIDIA/Megatron-LM `megatron/core/parallel_state.py`, `initialize_model_parallel`.

    >>> [takes_order("tp-pp-dp", Mesh(dp=4, pp=2)), takes_order("tp-cp-pp-ep-dp", Mesh(dp=16, ep=8, pp=2))]
    [True, False]
    """
    sizes = {name_of(axis): n for axis, n in mesh.shape.items()}
    tp, cp, ep, dp, pp = (sizes.get(name, 1) for name in NAMES)
    names = order.split("-")
    if pp == 1 or names[-1] == "pp":
        return True
    before = names[: names.index("pp")]
    dense, expert = {"tp": tp, "cp": cp, "dp": dp * ep}, {"tp": tp, "ep": ep, "dp": dp * cp}
    strides = [math.prod(degrees.get(name, 1) for name in before) for degrees in (dense, expert)]
    return dense["dp"] == expert["dp"] and strides[0] == strides[1]


def greedy_matrix(mesh: Mesh, topology: Topology, fastest: Sequence[str]) -> Matrix:
    """Return the matrix that fills the levels from the innermost out with axes in an order, the fastest first.

    Raises `TopologyError` where an axis ends inside a unit whose boundary it does not divide, so that the order is no
    placement, or where sizes differ.

    Source: NVIDIA/Megatron-LM `RankGenerator`, read on levels.

    >>> greedy_matrix(Mesh(data=4, tensor=4), Topology.load("dgx-a100", nodes=2), ("tensor", "data"))
    ((2, 2), (1, 4))
    """
    if mesh.size != topology.size:
        raise TopologyError(
            f"mesh {mesh} has {mesh.size} devices, topology {topology.name!r} has {topology.size} "
            f"({topology.describe()}); an order needs equal counts"
        )
    rows = {axis: [1] * len(topology.levels) for axis in mesh.axes}
    j, room = len(topology.levels) - 1, topology.levels[-1].size
    for axis in fastest:
        need = mesh.shape[axis]
        while need > 1:
            if room == 1:
                j -= 1
                room = topology.levels[j].size
                continue
            part = math.gcd(need, room)
            if part not in (need, room):
                level = topology.levels[j]
                done = topology.strides[j] * level.size // room
                raise TopologyError(
                    f"axis {axis!r} of size {mesh.shape[axis]} in the order {', '.join(fastest)} is no placement on "
                    f"{topology.describe()}: {need} more after {done} devices neither divide nor are a multiple of "
                    f"the {room} that are left of level {level.name!r}"
                )
            rows[axis][j] *= part
            need //= part
            room //= part
    return tuple(tuple(rows[axis]) for axis in mesh.axes)


def orders_of(placement: Placement) -> tuple[str, ...]:
    """Return the order strings that give a placement's matrix on ranks that stand host by host.

    They have all five names. Of those that differ only in degrees of 1 it is the one that permutes the last names of
    Megatron's default. None gives the matrix where an axis has no name there (see `fastest_first`).

    >>> topology = Topology.load("dgx-a100", nodes=2)
    >>> orders_of(Placement(Mesh(data=4, tensor=4), topology, ((2, 2), (1, 4))))
    ('tp-cp-ep-dp-pp',)
    >>> orders_of(Placement(Mesh(data=4, tensor=4), topology, ((1, 4), (2, 2))))
    ('cp-ep-dp-tp-pp',)
    """
    mesh, topology = placement.mesh, placement.topology
    names = [name_of(axis) for axis in mesh.axes]
    if None in names or len(set(names)) < len(names):
        return ()
    found: dict[tuple[str, ...], str] = {}
    for order in itertools.permutations(NAMES):
        text = "-".join(order)
        fastest = fastest_first(text, mesh)
        wide = tuple(axis for axis in fastest if mesh.shape[axis] > 1)
        if wide in found:
            continue
        try:
            if greedy_matrix(mesh, topology, fastest) == placement.matrix and _orders_agree(placement, fastest):
                found[wide] = text
        except TopologyError:
            continue
    return tuple(found.values())


def _orders_agree(placement: Placement, fastest: Sequence[str]) -> bool:
    """Say whether axes of which the first is fastest share each level as they do in a placement.

    On a switch, and where all children are linked, every order is as good.
    """
    return all(
        level.link in ("switch", "full") or list(own) == [a for a in reversed(fastest) if a in own]
        for level, own in zip(placement.topology.levels, placement.order, strict=True)
    )
