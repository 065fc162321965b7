"""Where a program runs: from a topology or placement and the meshes of a program to the fabric that prices it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import lower_bound
from shardplan.core.mesh import Mesh
from shardplan.core.messages import has_box_table, overlap_elements
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import step_patterns
from shardplan.errors import TopologyError, excerpt
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.cost import Price, prices
from shardplan.hardware.prices.critical_path import Window, longest, windows
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.library import only_messages, without_reductions
from shardplan.hardware.topology import Topology, topology_of
from shardplan.plans.bounds import boxes_on, capacity, moves_bound
from shardplan.plans.nominal import DESCRIPTION, nominal_fabric, patterns
from shardplan.plans.reduction_bound import reduction_bound
from shardplan.plans.starts import Bound, bound_with_starts

Where = Topology | Placement
# Relative: seconds that a prediction does not tell apart. Of pairs of measured steps 32 % are off by more than that
# (`benchmarks/results/plan_ties.json`), and the same collective takes 1.05 to 1.19 times as long on another site.
NOISE = 0.1


def where_of(what: str, value: object) -> Where | None:
    """Return a topology, given as one or as text, a placement, or None; raises `TopologyError` for any other value."""
    return value if value is None or isinstance(value, Placement) else topology_of(what, value)


def placement_of(what: str, value: object) -> Placement:
    """Return a placement; raises `TopologyError` for any other value."""
    if not isinstance(value, Placement):
        raise TopologyError(
            f"{what} is {excerpt(value)}; legal is a Placement, such as placements(mesh, topology) or place() gives"
        )
    return value


def network_name(where: Where | None) -> str:
    """Return what predicted seconds are said to be on: the name of a topology, or the nominal switch in words."""
    if where is None:
        return DESCRIPTION
    return (where.topology if isinstance(where, Placement) else where).name or "an unnamed topology"


def fabric_of(where: Where | None, meshes: Sequence[Mesh]) -> Fabric:
    """Return the fabric: device ids are topology ids, or, under a placement, lie where it lays them.

    Without a topology it is the nominal switch, as large as the ids are.
    A placement lays device ids, so it serves every mesh whose ids are among those of its own mesh, whatever its axes
    and order. Raises `TopologyError` for a device id that is not on the topology, or that the placement does not place.
    """
    for mesh in meshes:
        if isinstance(where, Placement) and (strange := sorted(set(mesh.devices) - set(where.mesh.devices))):
            raise TopologyError(
                f"the mesh {mesh} has device {strange[0]}, which the placement of {where.mesh} does not place; "
                "legal are the device ids of that mesh"
            )
    if isinstance(where, Placement):
        return Fabric(where.topology, where.position())
    last = max((int(mesh.ids.max()) for mesh in meshes), default=0)
    if where is None:
        return nominal_fabric(1 + last)
    if last >= where.size:
        raise TopologyError(
            f"device {last} is not on the topology {where.name or '(unnamed)'} of {where.size} devices; "
            f"legal ids are 0 to {where.size - 1}"
        )
    return Fabric(where)


def occupied_fabric(where: Where, meshes: Sequence[Mesh]) -> Fabric:
    """Return the fabric of the units between the first device and the last: plans do not know of further ones.

    Errors as of `fabric_of`.
    """
    whole = fabric_of(where, meshes)
    if isinstance(where, Placement):
        return whole
    part, start = occupied_units(where, [device for mesh in meshes for device in mesh.devices])
    if start:
        return Fabric(part, np.concatenate([np.full(start, -1), np.arange(part.size)]))
    return whole if part == where else Fabric(part)


def occupied_units(topology: Topology, devices: Sequence[int]) -> tuple[Topology, int]:
    """Return the units of a topology from the first of some devices to the last as a topology, and its first device.

    A ring, torus or mesh stays whole: without some of its children its links are others.
    """
    levels, start, first, last = list(topology.levels), 0, min(devices, default=0), max(devices, default=0)
    for j, (level, stride) in enumerate(zip(topology.levels, topology.strides, strict=True)):
        a, b = (first - start) // stride, (last - start) // stride
        if level.link not in ("switch", "full") or (level.link == "full" and a == b):
            break
        levels[j] = replace(level, size=b - a + 1)
        start += a * stride
        if a < b:
            break
    size = math.prod(level.size for level in levels)
    for j, (level, stride) in enumerate(zip(levels, topology.strides, strict=True)):
        here = range(start // stride, 1 + (start + size - 1) // stride)
        slow = tuple((unit - here.start, factor) for unit, factor in level.degraded if unit in here)
        ports = tuple((unit - here.start, *rest) for unit, *rest in level.slow_ports if unit in here)
        levels[j] = replace(level, degraded=slow, slow_ports=ports)
    return replace(topology, levels=tuple(levels)), start


class Priced(NamedTuple):
    """What a program costs on a fabric."""

    seconds: float
    transfer: float  # seconds without latencies
    level_bytes: tuple[float, ...]  # that cross each level, outermost first


def price_program(program: Program, fabric: Fabric, algorithm: str = "auto") -> Priced:
    """Return what a program costs: the longest path through its steps."""
    steps = patterns(program)
    found = prices(steps, fabric, algorithm)
    loads = [p.load for p in found]
    seconds = longest(steps, [p.seconds for p in found], loads)
    transfer = longest(steps, [p.transfer for p in found], loads)
    levels = np.sum([np.zeros(len(fabric.wires)), *(np.asarray(p.level_bytes) for p in found)], axis=0)
    return Priced(seconds, transfer, tuple(levels.tolist()))


def step_prices(program: Program, fabric: Fabric, algorithm: str = "auto") -> list[Price]:
    """Return the price of every step."""
    return prices(step_patterns(program), fabric, algorithm)


def step_windows(program: Program, fabric: Fabric) -> tuple[list[Price], list[Window]]:
    """Return the price of every step, and when it runs."""
    steps = step_patterns(program)
    found = prices(steps, fabric)
    return found, windows(steps, [p.seconds for p in found], [p.load for p in found])


def seconds_bound(
    sources: Sequence[TensorType], destinations: Sequence[TensorType], fabric: Fabric, meshes: Sequence[Mesh] = ()
) -> Bound:
    """Return a lower bound of moves whose sources and destinations are paired in order, on their meshes and `meshes`.

    The largest of what each device must receive of all tensors over its own ports, and copy of what it has, of what
    must enter every unit of every level, and leave it and all holders of the same tiles, for tensors without addends,
    and of the cut and count bounds of each tensor that is reduced. A table of boxes is not cut. Of a partial
    destination nobody must receive anything: addends may be added up first, and zeros take their places.
    """
    own = {t.mesh: None for t in (*sources, *destinations)}
    ids = np.array(Mesh.devices_of(own), dtype=np.int64)
    at, last = fabric.topology_ids(ids), len(fabric.wires) - 1
    whole = ((s, t) for s, t in zip(sources, destinations, strict=True) if not t.layout.partial)
    least = sum((lower_bound(s, t, tuple(ids.tolist())) for s, t in whole), np.zeros(1))
    # What has no addends is moved, by no row that only reduces; and where no shard has room for a gather, by messages.
    rows = without_reductions if _has_room(sources, destinations, (*own, *meshes)) else only_messages
    moving = fabric.with_library(rows(fabric.library))
    every = fabric if any(x.layout.partial for x in (*sources, *destinations)) else moving
    least = np.broadcast_to(np.asarray(least, np.float64), len(ids))
    most = np.divide(least, capacity(every, last, at)[at], out=np.zeros(len(ids)), where=least > 0)
    most = most + _own_copies(sources, destinations, ids, most > 0, every)
    found = [bound_with_starts(every, last, float(most.max(initial=0.0)), at)]
    moves: list[tuple[np.ndarray, np.ndarray, float]] = []
    for s, t in zip(sources, destinations, strict=True):
        if s.layout.partial or t.layout.partial:
            found.append(reduction_bound(s, t, fabric, ids))
            continue
        if has_box_table(s, t):
            continue
        moves.append((boxes_on(s, ids), boxes_on(t, ids), s.itemsize))
    islands, alone = _islands((*own, *meshes), ids), len(sources) == 1
    return Bound.largest([*found, moves_bound(moves, ids, moving, islands, alone)])


def _has_room(sources: Sequence[TensorType], destinations: Sequence[TensorType], meshes: Sequence[Mesh]) -> bool:
    """Say whether something may be replicated on the way, as every gather does: whether two arrays fit within a bound.

    Behind a gather, or a broadcast, several devices hold each element. Of one tensor no shard on the way is larger than
    the larger end's, so all of a mesh have room for two.
    """
    if len(sources) != 1 or has_box_table(sources[0], destinations[0]):
        return True
    most = max(sources[0].local_bytes(), destinations[0].local_bytes())
    return any(mesh.size * most >= 2 * sources[0].nbytes for mesh in meshes)


def _own_copies(
    sources: Sequence[TensorType], destinations: Sequence[TensorType], ids: np.ndarray, busy: np.ndarray, fabric: Fabric
) -> np.ndarray | float:
    """Seconds of each device, [ids], in which it copies what it has to where it is joined by what it receives.

    The last step in which a device, `busy` ones, receives ends in a box around its destination's. What it has of that
    it copies, which is less than to receive it again. Of one tensor without addends; several share their copies.
    """
    plain = len(sources) == 1 and not any(x.layout.partial or x.layout.root for x in (*sources, *destinations))
    if not plain or has_box_table(sources[0], destinations[0]) or fabric.far >= len(fabric.wires):
        return 0.0
    s, t = sources[0], destinations[0]
    kept = np.zeros(len(ids))
    kept[np.searchsorted(ids, t.mesh.ids)] = overlap_elements(s, t) * t.itemsize
    rate = fabric.near_rate * fabric.library.best_share(False)
    return np.where(busy, kept * fabric.library.own_copy / rate, 0.0)


def _islands(meshes: Sequence[Mesh], ids: np.ndarray) -> np.ndarray:
    """Number devices, [n]: equal where meshes join them, directly or over others."""
    label = np.arange(len(ids))
    for mesh in dict.fromkeys(meshes):
        joined = np.unique(label[np.searchsorted(ids, mesh.ids)])
        label[np.isin(label, joined)] = joined[0]
    return label
