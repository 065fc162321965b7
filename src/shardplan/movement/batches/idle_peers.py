"""Moves over idle peers: of what leaves a node every device there sends an equal part.

Where the few devices of a node that hold what others want have to send all of it, the ways of the others stay idle. So
they hand parts on inside the node first, by an exchange to a table of boxes: what stays, where it is wanted, and what
leaves, dealt out evenly. The move itself follows from there.
"""

from __future__ import annotations

import math

import numpy as np

from shardplan.core.box_table import BoxTable, split, strides
from shardplan.core.messages import has_box_table, message_count, messages, own_places
from shardplan.core.ops import Exchange, Op, Send
from shardplan.core.tensor import TensorType
from shardplan.hardware.prices.fabric import Fabric
from shardplan.plans.pricing import NOISE

_MOST_MESSAGES = 1 << 11  # that are dealt out one by one
Held = dict[int, list[np.ndarray]]  # by device id the boxes that it is to hold, which do not overlap


def relayed_ops(s: TensorType, t: TensorType, fabric: Fabric | None) -> tuple[Op, ...]:
    """Return the ops of a move from `s` to `t`, neither of them partial, over idle peers; none where it cannot pay."""
    if fabric is None or not fabric.far or has_box_table(s, t) or s.layout.root or message_count(s, t) > _MOST_MESSAGES:
        return ()
    stride = fabric.wires[fabric.far - 1].stride
    if stride < 2 or not s.ndim:
        return ()
    blocks = fabric.blocks(np.union1d(s.mesh.ids, t.mesh.ids))
    senders, receivers, sizes = messages(s, t, blocks)
    node, there = (fabric.topology_ids(x.mesh.ids) // stride for x in (s, t))
    crosses = node[senders] != there[receivers]
    load = np.bincount(senders[crosses], sizes[crosses], s.mesh.size)
    mean = {n: float(load[node == n].mean()) for n in np.unique(node).tolist()}
    if not _worth(load * s.itemsize, max(mean.values()) * s.itemsize, fabric):
        return ()
    table = _table(s, t, (senders, receivers, crosses), node, mean)
    last = Exchange(t.layout, near=blocks) if s.mesh == t.mesh else Send(t.layout, t.mesh, near=blocks)
    return Exchange(boxes=table, near=blocks), last


def _worth(load: np.ndarray, evenly: float, fabric: Fabric) -> bool:
    """Whether what the busiest device sends out of its node, in bytes, over what all do evenly pays for a step more."""
    far = fabric.wires[fabric.far - 1]
    rate = float(fabric.capacity(fabric.far - 1).max()) / far.stride
    over, most = float(load.max()) - evenly, float(load.max()) / rate
    return over / rate > NOISE * most + fabric.first_hop() + over / fabric.near_rate


def _table(
    s: TensorType,
    t: TensorType,
    sent: tuple[np.ndarray, np.ndarray, np.ndarray],
    node: np.ndarray,
    mean: dict[int, float],
) -> BoxTable:
    """What every device holds before the move: what it needs of its node, and its part of what leaves."""
    before, after, ids = s.boxes(), t.boxes(), s.mesh.ids.tolist()
    held: Held = {d: [] for d in ids}
    for place, own in enumerate(own_places(s, t).tolist()):
        if own >= 0:
            _hold(held[ids[own]], _meet(before[own], after[place]))
    crossing, inside = list[tuple[int, np.ndarray]](), list[tuple[int, int, np.ndarray]]()
    for sender, receiver, crosses in zip(*(x.tolist() for x in sent), strict=True):
        box = _meet(before[sender], after[receiver])
        if crosses:
            crossing.append((sender, box))
        else:
            inside.append((ids[sender], t.mesh.devices[receiver], box))
    room = {k: mean[n] for k, n in enumerate(node.tolist())}
    peers = {n: np.flatnonzero(node == n).tolist() for n in mean}
    over: list[tuple[int, np.ndarray]] = []
    for sender, box in crossing:  # a device sends what it holds itself, up to its share
        mine, rest = _split_box(box, room[sender])
        _hold(held[ids[sender]], mine)
        room[sender] -= _volume(mine)
        over += [(sender, rest)] if _volume(rest) else []
    for sender, rest in over:
        others = sorted(peers[int(node[sender])], key=lambda k: -room[k])
        for n, k in enumerate(others):
            if not _volume(rest):
                break
            part, rest = _split_box(rest, room[k] if n + 1 < len(others) else math.inf)
            _hold(held[ids[k]], part)
            room[k] -= _volume(part)
    most = max(int(x.elements().max()) for x in (s, t))
    fill = {d: sum(map(_volume, boxes)) for d, boxes in held.items()}
    for sender, _, box in inside:
        fill[sender] += _volume(box)
    # What its sender has no room for beside the parts goes straight on, to where there is most.
    for sender, receiver, box in sorted(inside, key=lambda one: fill.get(one[1], most)):
        early = fill[sender] > most and fill.get(receiver, most) + _volume(box) <= most
        at = receiver if early else sender
        fill[sender] -= _volume(box)
        fill[at] += _volume(box)
        _hold(held[at], box)
    return BoxTable(_rows(held))


def _meet(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The box that two have in common."""
    return np.stack([np.maximum(a[:, 0], b[:, 0]), np.minimum(a[:, 1], b[:, 1])], axis=1)


def _volume(box: np.ndarray) -> int:
    return int(np.maximum(box[:, 1] - box[:, 0], 0).prod())


def _split_box(box: np.ndarray, room: float) -> tuple[np.ndarray, np.ndarray]:
    """A box of at most about `room` elements, and what is left: cut along the longest dim, to the nearest index."""
    whole = _volume(box)
    dim = int(np.argmax(box[:, 1] - box[:, 0]))
    start, stop = box[dim].tolist()
    at = stop if whole <= room else start + round((stop - start) * max(0.0, room) / whole)
    first, rest = box.copy(), box.copy()
    first[dim, 1] = rest[dim, 0] = at
    return first, rest


def _hold(boxes: list[np.ndarray], box: np.ndarray) -> None:
    """Add what a device does not hold yet of a box."""
    rest = box[None] if _volume(box) else box[None][:0]
    for one in tuple(boxes):
        rest = split(rest, one)[1]
    boxes += list(rest)


def _rows(held: Held) -> list[tuple[int, tuple[tuple[int, int], ...], int, tuple[int, ...]]]:
    """The rows of a table, box behind box."""
    rows: list[tuple[int, tuple[tuple[int, int], ...], int, tuple[int, ...]]] = []
    for device, boxes in held.items():
        offset = 0
        for box in boxes:
            size = (box[:, 1] - box[:, 0]).tolist()
            rows.append((device, tuple((int(lo), int(hi)) for lo, hi in box), offset, strides(size)))
            offset += math.prod(size)
    return rows
