"""The ops that make, reduce or spread partial and root values, bound to one rank; one operand after the other.

Sums are taken in member order, as the reference takes them. gloo's own `reduce_scatter` moves the traffic of an
all-reduce, and its `reduce` and `broadcast` that of a star; these are composed from point-to-point messages and move
what the op says.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shardplan.core.dtypes import IDEMPOTENT
from shardplan.core.messages import at_root
from shardplan.core.ops import AllReduce, Broadcast, Reduce, ReduceScatter, ToPartial
from shardplan.core.tensor import TensorType
from shardplan.execution.lower import (
    View,
    box_elements,
    chunk_of,
    flat_boxes,
    members_of,
    parts,
    place_of,
    ranges,
    segments_of,
    shape_of,
    shifted,
    view_of,
)
from shardplan.execution.torch.dtypes import fold, identity_of
from shardplan.execution.torch.pack import (
    Arrays,
    Message,
    PackedRounds,
    PeerPart,
    at,
    largest_round,
    maker,
    pack,
    send_buffer,
)
from shardplan.execution.torch.wire import Pending, TorchWire

Running = Generator[None, None, Arrays]  # yields while messages travel; its value is the results
Bound = Callable[[Arrays, TorchWire], Running]  # a step bound to a rank
One = Callable[[torch.Tensor, TorchWire], Generator[None, None, torch.Tensor]]  # the same of one operand


def one_by_one(steps: Sequence[One]) -> Bound:
    """Return the step that treats its operands one after another, each to its end: no two are under way at once."""

    def run(arrays: Arrays, wire: TorchWire) -> Running:
        out: Arrays = []
        for step, x in zip(steps, arrays, strict=True):
            out.append((yield from step(x, wire)))
        return out

    return run


def _idle(u: TensorType, device: int) -> One:
    """A device that holds nothing of the value: its result must not be read."""
    make = maker(u, device)

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        return make(wire)
        yield  # never reached: it makes this a generator, and no message is waited for

    return run


class _ScatterRound(NamedTuple):
    """One round of a reduce-scatter."""

    start: int  # of the elements of the result that the round makes
    stop: int
    sends: tuple[Message, ...]
    own: list[tuple[View, View]]  # of the own addend: part of the operand, part of the result


def reduce_scatter(op: ReduceScatter, t: TensorType, u: TensorType, device: int) -> One:
    """Every member sends each other its addend of that one's part, and adds up what it gets, in member order."""
    members = members_of(op, t, device)
    if not members:
        return _idle(u, device)
    p = parts(op, t, u, device)
    shape, make, chunks, reduction = shape_of(t, device), maker(u, device), op.chunks, op.reduction
    after = shape_of(u, device)
    n = box_elements(tuple((0, k) for k in after))
    whole = tuple((0, k) for k in after)
    own = p.keeps[0][0] if p.keeps else None
    senders = [peer for peer, _ in p.receives]
    order = [-1 if d == device else senders.index(d) for d in members] if n else []  # by member, whose addend; -1: own
    gives = [PeerPart(peer, 0, shape, box) for peer, box in p.sends]

    def build(chunk: int) -> _ScatterRound | None:
        start, stop = chunk_of(n, chunk, chunks)
        sends = pack(gives, chunk, chunks, True)
        mine = flat_boxes(own, start, stop) if own else []
        result = flat_boxes(whole, start, stop)
        pairs = [(view_of(shape, a), view_of(after, b)) for a, b in zip(mine, result, strict=True)] if n else []
        return _ScatterRound(start, stop, sends, pairs) if sends or stop > start else None

    rounds = PackedRounds.of(build, chunks)
    most_in, most_out = -(-n // chunks) * len(senders), largest_round(gives, chunks, True)

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        flat = out.view(-1)
        incoming = wire.empty(most_in, out.dtype)
        outgoing = wire.empty(most_out, out.dtype) if most_out else None
        for start, stop, sends, pairs in rounds:
            size = stop - start
            addends = [incoming[k * size : (k + 1) * size] for k in range(len(senders))]
            ins, outs = wire.post(
                list(zip(senders, addends, strict=True)) if size else [],
                [(m.peer, send_buffer(m, [x], outgoing)) for m in sends],
            )
            yield  # a round's addends travel, in and out; next they are waited for, all before the first is added
            wire.wait(ins)
            for number, which in enumerate(order):
                if which >= 0:
                    if number:
                        fold(flat[start:stop], addends[which], reduction)
                    else:
                        flat[start:stop].copy_(addends[which])
                    continue
                for a, b in pairs:
                    if number:
                        fold(at(out, b), at(x, a), reduction)
                    else:
                        at(out, b).copy_(at(x, a))
            wire.wait(outs)
        return out

    return run


def all_reduce(op: AllReduce, t: TensorType, device: int) -> One:
    """A reduce-scatter of the flat shard, cut by the tiling rule, and an all-gather of its parts."""
    members = members_of(op, t, device)
    if not members:
        return _idle(t, device)
    me = members.index(device)
    make, chunks, reduction = maker(t, device), op.chunks, op.reduction
    n = box_elements(tuple((0, k) for k in shape_of(t, device)))
    owned = ranges(n, len(members))
    others = [(k, d) for k, d in enumerate(members) if k != me]
    rounds = PackedRounds.of(lambda chunk: [shifted(span, chunk, chunks) for span in owned], chunks)
    most = -(-(owned[me][1] - owned[me][0]) // chunks) * len(others)

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        source, flat = x.view(-1), out.view(-1)
        incoming = wire.empty(most, out.dtype)
        for spans in rounds:
            start, stop = spans[me]
            size = stop - start
            addends = {k: incoming[j * size : (j + 1) * size] for j, (k, _) in enumerate(others)}
            ins, outs = wire.post(
                [(d, addends[k]) for k, d in others] if size else [],
                [(d, source[slice(*spans[k])]) for k, d in others if spans[k][1] > spans[k][0]],
            )
            yield  # the reduce-scatter's addends travel; next they are waited for, and the all-gather is not yielded in
            wire.wait(ins)
            here = flat[start:stop]
            for k in range(len(members)):
                addend = source[start:stop] if k == me else addends[k]
                if k == 0:
                    here.copy_(addend)
                else:
                    fold(here, addend, reduction)
            wire.wait(outs)
            ins, outs = wire.post(
                [(d, flat[slice(*spans[k])]) for k, d in others if spans[k][1] > spans[k][0]],
                [(d, here) for _, d in others] if size else [],
            )
            wire.wait(ins)
            wire.wait(outs)
        return out

    return run


def reduce(op: Reduce, t: TensorType, device: int) -> One:
    """A pipelined chain towards the first member; what the others have no use for takes the partial sums."""
    members = members_of(op, t, device)
    if not members:
        return _idle(t, device)
    me = members.index(device)
    make, reduction = maker(t, device), op.reduction
    n = box_elements(tuple((0, k) for k in shape_of(t, device)))
    segments = segments_of(n, t.itemsize, op.chunks)
    before = members[me + 1] if me + 1 < len(members) else None  # adds up what comes after it
    after = members[me - 1] if me else None

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        source, flat = x.view(-1), out.view(-1)
        sums = flat if before is not None else source
        ins, _ = wire.post([(before, flat[a:b]) for a, b in segments] if before is not None else [], [])
        yield  # all receives are posted, nothing is sent; next come the segments, in order: receive, add, send on
        sent: Pending = []
        for k, (a, b) in enumerate(segments):
            if before is not None:
                wire.wait_one(*ins[k])
                fold(flat[a:b], source[a:b], reduction)
            if after is not None:
                sent += wire.post([], [(after, sums[a:b])])[1]
        wire.wait(sent)
        if before is None and after is None:
            flat.copy_(source)
        return out

    return run


def broadcast(op: Broadcast, t: TensorType, u: TensorType, device: int) -> One:
    """A pipelined chain from the first member on."""
    members = members_of(op, u, device)
    if not members:
        return _idle(u, device)
    me = members.index(device)
    make = maker(u, device)
    n = box_elements(tuple((0, k) for k in shape_of(u, device)))
    segments = segments_of(n, t.itemsize, op.chunks)
    before = members[me - 1] if me else None
    after = members[me + 1] if me + 1 < len(members) else None

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        flat = out.view(-1)
        whole = x.view(-1) if before is None else flat
        ins, _ = wire.post([(before, flat[a:b]) for a, b in segments] if before is not None else [], [])
        sent: Pending = []
        if before is None:
            sent = wire.post([], [(after, whole[a:b]) for a, b in segments])[1] if after is not None else []
            out.copy_(x)
        yield  # all receives are posted, and the first member's sends; next come the segments: receive, send on
        for k, (a, b) in enumerate(segments if before is not None else []):
            wire.wait_one(*ins[k])
            if after is not None:
                sent += wire.post([], [(after, whole[a:b])])[1]
        wire.wait(sent)
        return out

    return run


def to_partial(op: ToPartial, t: TensorType, u: TensorType, device: int) -> One:
    """Keep, fill or drop; a dim that grows keeps the own part."""
    place = place_of(t, device)
    make = maker(u, device)
    if place is None or not at_root(u)[place]:
        return _idle(u, device)
    before, after = t.boxes()[place], u.boxes()[place]
    inside = tuple((int(b[0] - a[0]), int(b[1] - a[0])) for a, b in zip(after, before, strict=True))
    grows = not np.array_equal(before, after)
    keeps = grows or op.reduction in (*IDEMPOTENT, "root") or int(t.mesh.index(op.axes)[place]) == 0
    part = view_of(u.local_shape(place), inside)
    blank: Any = None if op.reduction == "root" else identity_of(op.reduction, u.dtype)

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        if grows or not keeps:
            out.copy_(blank.to(wire.device))
        if keeps:
            at(out, part).copy_(x)
        return out
        yield  # never reached: it makes this a generator, and no message is waited for

    return run
