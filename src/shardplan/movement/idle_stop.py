"""What a stop on idle devices would gain: one line, worked out when it is asked for.

A plan moves over the devices of its two ends alone: those of others have memory and work of their own. Where a node of
one end has devices that neither names, and with them network ports that stay idle, whoever may use them moves to all
devices of that node first, or from all of them: two plans, each with its certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.messages import has_box_table
from shardplan.core.tensor import TensorType
from shardplan.errors import Infeasible
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_seconds
from shardplan.movement.better_placement import GAIN
from shardplan.plans.pricing import Where

AXIS = "stop"  # over which a stop cuts what a device of the end has


class IdleStop(NamedTuple):
    """A type on all devices of the nodes of one end, and the seconds of the moves to it and from it."""

    type: TensorType
    seconds: float


def stop_text(s: TensorType, t: TensorType, where: Where | None, now: float, price: Callable[..., float]) -> str:
    """Return the line that says what a stop on idle devices takes, where that is `GAIN` less than `now`; else nothing.

    `now` are the seconds of the plan from `s` to `t`, `price` says those between two types.
    """
    found = best_stop(s, t, where, price)
    if found is None or found.seconds * GAIN > now:
        return ""
    idle = sorted(set(found.type.mesh.devices) - {*s.mesh.devices, *t.mesh.devices})
    named = f"{idle[0]} to {idle[-1]}" if idle[-1] - idle[0] == len(idle) - 1 > 0 else ", ".join(map(str, idle))
    return (
        f"better     over the idle device{'s' * (len(idle) > 1)} {named} two plans would take "
        f"{format_seconds(found.seconds)}: to `{found.type}` on `{found.type.mesh}`, and from there"
    )


def best_stop(s: TensorType, t: TensorType, where: Where | None, price: Callable[..., float]) -> IdleStop | None:
    """Return the stop of fewest seconds in the nodes of either end; None where no node has idle devices."""
    plain = not (has_box_table(s, t) or any(x.layout.partial or x.layout.root for x in (s, t)))
    if not isinstance(where, Topology) or set(s.mesh.devices) == set(t.mesh.devices) or not plain:
        return None
    fabric = Fabric(where)
    found: list[IdleStop] = []
    for end in (s, t):
        for stop in _stops(end, {*s.mesh.devices, *t.mesh.devices}, fabric):
            try:
                found.append(IdleStop(stop, price(s, stop) + price(stop, t)))
            except Infeasible:  # within the memory limit
                continue
    return min(found, key=lambda stop: stop.seconds, default=None)


def _stops(end: TensorType, busy: set[int], fabric: Fabric) -> Iterator[TensorType]:
    """Yield types on the nodes of an end in which each of its tiles is cut along one dim over as many devices.

    Nodes must have as many devices of the end each, and no other that is busy.
    """
    if not fabric.far or AXIS in end.mesh.axes:
        return
    stride = fabric.wires[fabric.far - 1].stride
    ids = end.mesh.ids
    nodes, own = np.unique(ids // stride, return_counts=True)
    count = int(own[0])
    every = {int(node) * stride + k for node in nodes for k in range(stride)}
    if count == stride or (own != count).any() or stride % count or busy & every != set(end.mesh.devices):
        return
    each = stride // count
    place = np.zeros(len(ids), dtype=np.int64)  # of every device among those of its node, in the order of ids
    for node in nodes:
        mine = np.flatnonzero(ids // stride == node)
        place[mine] = np.argsort(np.argsort(ids[mine]))
    devices = (ids // stride * stride + place * each)[:, None] + np.arange(each)
    mesh = Mesh({**end.mesh.shape, AXIS: each}, devices=devices.reshape(-1).tolist())
    for d, (names, n) in enumerate(zip(end.layout.dims, end.local_shape(), strict=True)):
        if end.even[d] and n % each == 0:
            dims = (*end.layout.dims[:d], (*names, AXIS), *end.layout.dims[d + 1 :])
            yield end.with_layout(replace(end.layout, dims=dims), mesh)
