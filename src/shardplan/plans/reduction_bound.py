"""Lower bounds in seconds for a move that reduces: addends on many devices become values where the target wants them.

For every *class* of devices that hold addends of the same elements: a unit in which an addend is missing must take in
every element wanted there (cut); a unit that alone holds an addend must give out every element wanted elsewhere; and at
a level where the addends lie in n units, an element that w units want crosses at least n + w - 2 times, n - 1 to be
combined and w - 1 to be handed out (count). All classes load the wires together. The bounds hold for point-to-point
algorithms; where a level reduces in the network there is no count bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.core.messages import at_root
from shardplan.core.tensor import TensorType
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.plans.bounds import capacity, most_over, summed_capacity
from shardplan.plans.collective_bounds import all_reduce_bound, reduce_scatter_bound
from shardplan.plans.starts import Bound, bound_with_starts

# Pairs of a class and a device that are held together, in arrays of 32 bytes a dim each: above, a coarser bound.
_MOST_PAIRS = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class _Demand:
    """Who holds which addend of which class, and who wants which part of it; devices are topology ids."""

    addends: Ints  # unique rows (class, addend, device)
    wants: Ints  # unique rows (part, device)
    label: Ints  # the class of every part
    nbytes: Floats  # of every part
    need: Ints  # how many addends every class has


def reduction_bound(source: TensorType, target: TensorType, fabric: Fabric, ids: Ints | None = None) -> Bound:
    """Return a lower bound of a move from a type with addends, in which the devices `ids` take part, or its mesh's.

    It is 0 where nothing is claimed: the target keeps all addends, has others, or has some on another mesh.

    Source: arXiv 2110.10548 for the problem; cut and count as in `bounds`.
    """
    mesh = source.mesh
    kept = set(mesh.expand(target.layout.partial)) if target.mesh == mesh else set[int]()
    if target.mesh != mesh and target.mesh.expand(target.layout.partial):
        return Bound(0.0, 0.0)
    partial = set(mesh.expand(source.layout.partial))
    gone = mesh.fold(tuple(sorted(partial - kept)))
    if not gone or kept - partial:
        return Bound(0.0, 0.0)
    demand = _demand(source, target, gone, mesh.fold(tuple(sorted(kept))), fabric)
    # Where an addend has several holders, not all units that hold one need take part: what crosses cannot be counted.
    single = len(demand.addends) == int(demand.need.sum())
    found: list[Bound] = []
    at = fabric.topology_ids(np.union1d(mesh.ids, target.mesh.ids) if ids is None else ids)
    for j, wires in enumerate(fabric.wires):
        own = capacity(fabric, j, at)
        found.append(bound_with_starts(fabric, j, most_over(_cut(demand, wires.stride, wires.units), own), at))
        if single and not any(w.level.reduces for w in fabric.wires):
            found.append(bound_with_starts(fabric, j, _count(demand, j, fabric, own), at))
    worst = 0.0
    if single and mesh == target.mesh and not source.layout.root and not target.layout.root:
        # The plain collectives have bounds of their own, which also cut rings into arcs.
        places = mesh.group_places(gone)
        nbytes = (source.elements()[places].min(axis=1) * source.itemsize).astype(np.float64)
        if target.layout.dims == source.layout.dims:
            worst = max(worst, all_reduce_bound(mesh.ids[places], nbytes, fabric))
        elif len(demand.label) == mesh.size and source.all_even and target.all_even and _is_inside(target, source):
            worst = max(worst, reduce_scatter_bound(mesh.ids[places], nbytes, fabric))
    return Bound.largest([*found, Bound(worst + fabric.first_hop() if worst > 0 else 0.0, worst)])


def _keys(rows: Ints) -> Ints:
    """Numbers that are equal for equal rows and stand in their order: [rows]. Sorting those is far less work."""
    keys, room = np.zeros(len(rows), dtype=np.int64), 1
    for column in rows.reshape(len(rows), -1).T if len(rows) else ():
        width = int(column.max() - column.min()) + 1
        if room * width >= 2**62:
            keys, column = (np.unique(x, return_inverse=True)[1] for x in (keys, column))
            room, width = len(rows), len(rows)
        keys, room = keys * width + (column - column.min()), room * width
    return keys


def _number(rows: Ints) -> Ints:
    """Numbers of rows, equal for equal rows: [rows]."""
    return np.unique(_keys(rows), return_inverse=True)[1]


def _distinct(*columns: Ints) -> Ints:
    """The distinct rows of some columns, in order: [rows, columns]."""
    rows = np.stack(columns, axis=1)
    return rows[np.unique(_keys(rows), return_index=True)[1]]


def _is_inside(target: TensorType, source: TensorType) -> bool:
    """Say whether every device wants part of its own box."""
    ours, theirs = source.boxes(), target.boxes()
    return bool(((theirs[..., 0] >= ours[..., 0]) & (theirs[..., 1] <= ours[..., 1])).all())


def _demand(
    source: TensorType, target: TensorType, gone: tuple[str, ...], kept: tuple[str, ...], fabric: Fabric
) -> _Demand:
    """The demand of a move that reduces over `gone` and leaves `kept` partial.

    A device wants parts of all classes, or, where addends are kept or pairs are many, of its own.
    """
    mesh, at = source.mesh, fabric.topology_ids(source.mesh.ids)
    # One class: equal boxes, and equal coordinates along what stays partial.
    label = _number(np.stack([_number(source.boxes()), mesh.index(kept)], axis=1))
    held = at_root(source)
    addends = _distinct(label[held], mesh.index(gone)[held], at[held])
    there = fabric.topology_ids(target.mesh.ids)
    classes = int(label.max()) + 1
    if not kept and classes * target.mesh.size <= _MOST_PAIRS:
        _, one = np.unique(label, return_index=True)
        holder, wanter = (x.reshape(-1) for x in np.meshgrid(one, np.arange(target.mesh.size), indexing="ij"))
    elif target.mesh == mesh:
        holder = wanter = np.arange(mesh.size)
    else:
        holder = wanter = np.zeros(0, dtype=np.int64)
    ours, theirs, label = source.boxes()[holder], target.boxes()[wanter], label[holder]
    part = np.stack([np.maximum(ours[..., 0], theirs[..., 0]), np.minimum(ours[..., 1], theirs[..., 1])], axis=-1)
    volume = np.maximum(part[..., 1] - part[..., 0], 0).prod(axis=1) * source.itemsize
    wanting = np.flatnonzero(at_root(target)[wanter] & (volume > 0))
    number = _number(np.stack([label, _number(part)], axis=1)[wanting])
    _, first = np.unique(number, return_index=True)
    wants = _distinct(number, there[wanter][wanting])
    need = np.bincount(_distinct(*addends[:, :2].T)[:, 0], minlength=classes)
    return _Demand(addends, wants, label[wanting][first], volume[wanting][first].astype(np.float64), need)


def _cut(d: _Demand, stride: int, units: int) -> Floats:
    """Bytes that must enter or leave every unit, the larger: [units]."""
    classes = len(d.need)
    # (unit, class) pairs as numbers, with how many of the class's addends the unit holds; then what it wants of it.
    pairs = _distinct(d.wants[:, 0], d.wants[:, 1] // stride)
    part, unit = pairs[:, 0], pairs[:, 1]
    holds = _distinct(d.addends[:, 2] // stride, d.addends[:, 0], d.addends[:, 1])
    key, present = np.unique(holds[:, 0] * classes + holds[:, 1], return_counts=True)
    asked = unit * classes + d.label[part]
    found = np.minimum(np.searchsorted(key, asked), len(key) - 1)
    there = np.where(key[found] == asked, present[found], 0)
    enter = np.bincount(unit, np.where(there < d.need[d.label[part]], d.nbytes[part], 0.0), units)
    # A unit that alone holds an addend gives out what is wanted, but for parts that only it wants.
    _, first, owners = np.unique(_keys(holds[:, 1:]), return_index=True, return_counts=True)
    alone = np.unique(holds[first[owners == 1], 0] * classes + holds[first[owners == 1], 1])
    total = np.bincount(d.label, d.nbytes, classes)
    leave = np.bincount(alone // classes, total[alone % classes], units)
    own = (np.bincount(part)[part] == 1) & np.isin(asked, alone)
    leave = leave - np.bincount(unit[own], d.nbytes[part[own]], units)
    return np.maximum(enter, leave)


def _count(d: _Demand, j: int, fabric: Fabric, own: Floats) -> float:
    """Seconds of what crosses level j in total over the summed capacity of the units concerned."""
    stride = fabric.wires[j].stride
    holds = _distinct(d.addends[:, 0], d.addends[:, 2] // stride)
    spans = np.bincount(holds[:, 0], minlength=len(d.need))
    pairs = _distinct(d.wants[:, 0], d.wants[:, 1] // stride)
    times = np.bincount(pairs[:, 0], minlength=len(d.label)) + spans[d.label] - 2
    crossing = float((np.maximum(times, 0) * d.nbytes).sum())
    if crossing <= 0:
        return 0.0
    busy = times > 0
    classes = np.unique(d.label[busy])
    involved = [holds[np.isin(holds[:, 0], classes)][:, 1], pairs[busy[pairs[:, 0]]][:, 1]]
    return crossing / float(summed_capacity(fabric, j, np.unique(np.concatenate(involved)), own))
