"""The ring engine: collectives composed from point-to-point messages in member order, bound to one rank.

What is sent when is said in `simulation.ring`, which predicts it; this is the doing. Local parts (slices, packing,
identities, the general exchange, chains) are those of the torch backend; rings and pairwise exchanges are here. A ring
adds along the ring, not in member order: the same for integers, and for sums that are exact.

The order of messages is that of the prediction: a member posts all receives of a ring first, then sends in order, each
block as soon as it has it; `before` and `after` are its neighbours in the ring.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

import torch

from shardplan.core.messages import at_root
from shardplan.core.op import Op
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from shardplan.core.tensor import TensorType
from shardplan.execution.lower import (
    View,
    box_elements,
    chunk_of,
    group_of,
    members_of,
    parts,
    place_of,
    ranges,
    shape_of,
    shifted,
    view_of,
)
from shardplan.execution.torch.dtypes import fold
from shardplan.execution.torch.pack import (
    Arrays,
    Message,
    PeerPart,
    at,
    flat_view,
    maker,
    pack,
    receive_buffer,
    send_buffer,
    unpack,
)
from shardplan.execution.torch.steps import bind as bind_direct
from shardplan.execution.torch.sums import Bound, One, Running, one_by_one
from shardplan.execution.torch.wire import Pending, TorchWire
from shardplan.simulation.ring import SEGMENT

Going = Generator[None, None, None]
ALIGNED = (
    16  # bytes, of the widest dtype, c128: a packed block takes a multiple, so that every dtype can be viewed in it
)


def bind(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound:
    """Return the step of the device of that id; raises `BackendError` for an op that torch cannot run."""
    pairs = list(zip(operands, results, strict=True)) if len(operands) == len(results) else []
    match op:
        case AllGather():
            return _all_gather(op, operands, results, device)
        case ReduceScatter():
            return one_by_one([_reduce_scatter(op, t, u, device) for t, u in pairs])
        case AllReduce():
            return one_by_one([_all_reduce(op, t, device) for t in operands])
        case AllToAll():
            return one_by_one([_all_to_all(op, t, u, device) for t, u in pairs])
        case Reduce() | Broadcast():
            # the torch backend's chains, in our segments; operands one after another
            found = [(replace(op, chunks=_segments(op, t, device)), t, u) for t, u in pairs]
            return one_by_one([_only(bind_direct(o, [t], [u], device)) for o, t, u in found])
        case _:
            return bind_direct(op, operands, results, device)


def _segments(op: Reduce | Broadcast, t: TensorType, device: int) -> int:
    nbytes = math.prod(shape_of(t, device)) * t.itemsize
    return max(op.chunks, -(-nbytes // SEGMENT))


def _only(bound: Bound) -> One:
    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        return (yield from bound([x], wire))[0]

    return run


def pass_on(blocks: Sequence[torch.Tensor], members: Sequence[int], me: int, wire: TorchWire) -> Going:
    """Fill every member's flat block of `blocks`, of which the own one is filled, by a ring.

    `members` are device ids, `me` is the index of this one among them.
    """
    q = len(members)
    after, before = members[(me + 1) % q], members[(me - 1) % q]
    coming = [blocks[(me - s - 1) % q] for s in range(q - 1)]
    ins = iter(wire.post([(before, x) for x in coming if x.numel()], [])[0])
    sent: Pending = []
    for s in range(q - 1):
        going = blocks[(me - s) % q]
        if going.numel():
            sent += wire.post([], [(after, going)])[1]
        if s == 0:
            yield  # all receives are posted, and the own block is on its way; next the one from before is waited for
        if coming[s].numel():
            wire.wait_one(*next(ins))
    wire.wait(sent)


def add_up(
    addends: Sequence[torch.Tensor],
    total: torch.Tensor,
    members: Sequence[int],
    me: int,
    reduction: str,
    wire: TorchWire,
) -> Going:
    """Reduce every member's flat part by a ring: `addends` are the own ones, by member; `total` gets the own part.

    The part of a member starts at the one after it in the ring, and ends there with its own addend.
    """
    q = len(members)
    if q == 1:
        total.copy_(addends[0])
        return
    after, before = members[(me + 1) % q], members[(me - 1) % q]
    which = [(me - s - 2) % q for s in range(q - 1)]
    sums = [total if k == me else wire.empty(addends[k].numel(), total.dtype) for k in which]
    ins = iter(wire.post([(before, x) for x in sums if x.numel()], [])[0])
    sent: Pending = []
    going = addends[(me - 1) % q]
    for s, k in enumerate(which):
        if going.numel():
            sent += wire.post([], [(after, going)])[1]
        if s == 0:
            yield  # all receives are posted, and the first addend is on its way; next come sums from before, in order
        if sums[s].numel():
            wire.wait_one(*next(ins))
            fold(sums[s], addends[k], reduction)
        going = sums[s]
    wire.wait(sent)


def _all_gather(op: AllGather, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound:
    """All operands in one ring: a member's block is what it holds of each, widest elements first."""
    t = operands[0]
    place = place_of(t, device)
    makers = [maker(u, device) for u in results]
    members = [] if place is None else [t.mesh.devices[m] for m in group_of(op, t, place)]
    me = members.index(device) if members else -1
    befores, afters = ([shape_of(x, device) for x in side] for side in (operands, results))
    inside: dict[int, list[tuple[int, View]]] = {d: [] for d in members}  # by member: operand, part of the result
    copies: list[tuple[int, View, View]] = []
    for k in sorted(range(len(operands)), key=lambda k: -operands[k].itemsize):
        p = parts(op, operands[k], results[k], device)
        for peer, box in p.receives:
            inside[peer].append((k, view_of(afters[k], box)))
        for old, new in p.keeps:
            inside[device].append((k, view_of(afters[k], new)))
            copies.append((k, view_of(befores[k], old), view_of(afters[k], new)))
    sizes = [sum(v.elements * operands[k].itemsize for k, v in inside[d]) for d in members]
    direct = len(operands) == 1 and all(v.contiguous for own in inside.values() for _, v in own)

    def run(arrays: Arrays, wire: TorchWire) -> Running:
        out = [make(wire) for make in makers]
        for k, old, new in copies:
            at(out[k], new).copy_(at(arrays[k], old))
        if len(members) < 2 or not sum(sizes):
            return out
        if direct:
            blocks = [_bytes(flat_view(out[0], own[0][1]) if own else out[0].view(-1)[:0]) for own in inside.values()]
        else:
            blocks = [wire.empty(-(-n // ALIGNED) * ALIGNED, torch.uint8)[:n] for n in sizes]
            for x, (k, view) in _fields(blocks[me], inside[device], out):
                x.copy_(at(out[k], view))
        for c in range(op.chunks):
            yield from pass_on([b[slice(*chunk_of(len(b), c, op.chunks))] for b in blocks], members, me, wire)
        if not direct:
            for block, peer in zip(blocks, members, strict=True):
                for x, (k, view) in _fields(block, inside[peer] if peer != device else [], out):
                    at(out[k], view).copy_(x)
        return out

    return run


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _fields(
    block: torch.Tensor, fields: Sequence[tuple[int, View]], out: Arrays
) -> list[tuple[torch.Tensor, tuple[int, View]]]:
    """The parts that lie one after another in a packed block, each as an array of its dtype and shape."""
    found: list[tuple[torch.Tensor, tuple[int, View]]] = []
    start = 0
    for k, view in fields:
        stop = start + view.elements * out[k].itemsize
        found.append((block[start:stop].view(out[k].dtype).view(view.size), (k, view)))
        start = stop
    return found


def _reduce_scatter(op: ReduceScatter, t: TensorType, u: TensorType, device: int) -> One:
    members = members_of(op, t, device)
    make, shape = maker(u, device), shape_of(t, device)
    if not members:
        return _idle(u, device)
    me = members.index(device)
    p = parts(op, t, u, device)
    boxes = dict(p.sends) | ({device: p.keeps[0][0]} if p.keeps else {})
    views = [view_of(shape, boxes[d]) if d in boxes else None for d in members]

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        flat = [_flat(x, view) for view in views]
        for c in range(op.chunks):
            addends = [a[slice(*chunk_of(len(a), c, op.chunks))] for a in flat]
            total = out.view(-1)[slice(*chunk_of(out.numel(), c, op.chunks))]
            yield from add_up(addends, total, members, me, op.reduction, wire)
        return out

    return run


def _flat(x: torch.Tensor, view: View | None) -> torch.Tensor:
    """A part of an array as a flat one; a copy unless it is contiguous."""
    if view is None:
        return x.view(-1)[:0]
    return flat_view(x, view) if view.contiguous else at(x, view).reshape(-1)


def _idle(u: TensorType, device: int) -> One:
    """A device that holds nothing of the value: its result must not be read."""
    make = maker(u, device)

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        return make(wire)
        yield  # never reached: it makes this a generator, and no message is waited for

    return run


def _all_reduce(op: AllReduce, t: TensorType, device: int) -> One:
    """A reduce-scatter of the flat shard, cut by the tiling rule, and an all-gather of its parts."""
    members = members_of(op, t, device)
    if not members:
        return _idle(t, device)
    me = members.index(device)
    make = maker(t, device)
    owned = ranges(box_elements(tuple((0, n) for n in shape_of(t, device))), len(members))
    rounds = [[shifted(span, c, op.chunks) for span in owned] for c in range(op.chunks)]

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        addend, flat = x.view(-1), out.view(-1)
        for spans in rounds:
            blocks = [flat[a:b] for a, b in spans]
            yield from add_up([addend[a:b] for a, b in spans], blocks[me], members, me, op.reduction, wire)
            if len(members) > 1:
                yield from pass_on(blocks, members, me, wire)
        return out

    return run


def _all_to_all(op: AllToAll, t: TensorType, u: TensorType, device: int) -> One:
    """In its r-th stage a member sends to the r-th after it and receives from the r-th before it."""
    place = place_of(t, device)
    if place is None or not at_root(t)[place]:
        return _idle(u, device)
    members = members_of(op, t, device)
    me, q = members.index(device), len(members)
    make, before, after = maker(u, device), shape_of(t, device), shape_of(u, device)
    p = parts(op, t, u, device)
    gives, takes = dict(p.sends), dict(p.receives)
    copies = [(view_of(before, old), view_of(after, new)) for old, new in p.keeps]
    stages: list[tuple[tuple[Message, ...], tuple[Message, ...]]] = []
    for c in range(op.chunks):
        for r in range(1, q):
            to, frm = members[(me + r) % q], members[(me - r) % q]
            sends = pack([PeerPart(to, 0, before, gives[to])], c, op.chunks, True) if to in gives else ()
            receives = pack([PeerPart(frm, 0, after, takes[frm])], c, op.chunks, False) if frm in takes else ()
            if sends or receives:
                stages.append((sends, receives))

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        for old, new in copies:
            at(out, new).copy_(at(x, old))
        for sends, receives in stages:
            staged = [wire.empty(m.stop, out.dtype) for m in receives]
            ins, outs = wire.post(
                [(m.peer, receive_buffer(m, [out], s)) for m, s in zip(receives, staged, strict=True)],
                [(m.peer, send_buffer(m, [x], wire.empty(m.stop, x.dtype))) for m in sends],
            )
            yield  # the stage's message in each direction is under way; both end before the next stage begins
            wire.wait(ins)
            for m, s in zip(receives, staged, strict=True):
                if m.stop > m.start:
                    unpack(m, [out], s)
            wire.wait(outs)
        return out

    return run
