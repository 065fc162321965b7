"""The ops that reduce, and the broadcast, bound to one rank of MPI, one operand after the other.

Everything is composed of all-to-alls and point-to-point messages. MPI's own reductions know neither bf16 nor parts of a
dim that is not major, do not fix the order of addends, and hide what they move; here every rank receives what the op
says, and sums come out in the reference's order, member by member. Only `Reduce` adds from the last member on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardplan.core.dtypes import COMBINE
from shardplan.core.ops import AllReduce, Broadcast, Reduce, ReduceScatter
from shardplan.core.tensor import Box, TensorType
from shardplan.execution.lower import (
    box_elements,
    chunk_of,
    flat_boxes,
    members_of,
    parts,
    ranges,
    segments_of,
    shape_of,
    shifted,
)
from shardplan.execution.mpi.binding import Binding, One, at, bound_rounds, idle, maker, messages_of
from shardplan.execution.mpi.wire import Messages, MpiWire, Pending, Piece, Types


def _fold(total: np.ndarray, addend: np.ndarray, reduction: str, first: bool) -> None:
    """Reduce `addend` into `total`, in the dtype of both."""
    if first:
        total[...] = addend
    else:
        with np.errstate(all="ignore"):
            COMBINE[reduction](total, addend, out=total)


def _run_of(start: int, stop: int, total: int, itemsize: int, types: Types) -> tuple[Piece, ...]:
    """Return the message of the elements `start` to `stop` of a flat array of `total`."""
    return (types.piece(0, (total,), itemsize, [((start, stop),)]),)


class _ScatterMessages(NamedTuple):
    """One round of a reduce-scatter."""

    start: int  # of the elements of the result that the round makes
    stop: int
    sends: Messages
    receives: Messages  # into the staging buffer, one slot a sender
    own: list[tuple[Box, Box]]  # of the own addend: part of the operand, part of the result


def reduce_scatter(op: ReduceScatter, t: TensorType, u: TensorType, binding: Binding) -> One:
    """Every member sends each other its addend of that one's part, and adds up what it gets, in member order."""
    device = binding.device
    members = members_of(op, t, device)
    if not members:
        return idle(u, device)
    p = parts(op, t, u, device)
    before, after, make, reduction = shape_of(t, device), shape_of(u, device), maker(u, device), op.reduction
    whole = tuple((0, k) for k in after)
    n = box_elements(whole)
    senders = [peer for peer, _ in p.receives]
    order = [-1 if d == device else senders.index(d) for d in members] if n else []  # by member, whose addend; -1: own
    sizes = [b - a for a, b in (chunk_of(n, c, op.chunks) for c in range(op.chunks))]
    most = max(sizes)
    cuts = [(peer, 0, box) for peer, box in p.sends]

    def work_out(c: int, types: Types) -> _ScatterMessages:
        start, stop = chunk_of(n, c, op.chunks)
        size = stop - start
        sends = messages_of(cuts, [before], [t.itemsize], c, op.chunks, types)
        slots = enumerate(senders if size else [])
        receives = {d: _run_of(k * size, k * size + size, most * len(senders), t.itemsize, types) for k, d in slots}
        mine = flat_boxes(p.keeps[0][0], start, stop) if n else []
        own = list(zip(mine, flat_boxes(whole, start, stop), strict=True))
        return _ScatterMessages(start, stop, sends, receives, own)

    rounds = bound_rounds(op.chunks, work_out, binding.types)
    alone = len(members) == 1
    if not alone:
        binding.groups.append(members)

    def run(x: np.ndarray, wire: MpiWire) -> np.ndarray:
        out = make()
        flat = out.reshape(-1)
        stage = np.empty(most * len(senders), dtype=out.dtype)
        for start, stop, sends, receives, own in rounds():
            if not alone:
                wire.wait(wire.all_to_all(members, [x], sends, [stage], receives), members)
            for number, which in enumerate(order):
                if which >= 0:
                    addend = stage[which * (stop - start) : (which + 1) * (stop - start)]
                    _fold(flat[start:stop], addend, reduction, number == 0)
                    continue
                for old, new in own:
                    _fold(at(out, new), at(x, old), reduction, number == 0)
        return out

    return run


class _ReduceMessages(NamedTuple):
    """One round of an all-reduce: a reduce-scatter of the flat shard, then an all-gather of its parts."""

    start: int  # of the elements that this member makes in the round
    stop: int
    theirs: Messages  # the others' parts of the flat shard: addends sent at first, then received whole
    addends: Messages  # what the others send of the own part, into the staging buffer, one slot each
    gives: Messages  # the own part, made, to all others


def all_reduce(op: AllReduce, t: TensorType, binding: Binding) -> One:
    """A reduce-scatter of the flat shard, cut by the tiling rule, and an all-gather of its parts."""
    device = binding.device
    members = members_of(op, t, device)
    if not members:
        return idle(t, device)
    make, reduction, width = maker(t, device), op.reduction, t.itemsize
    me = members.index(device)
    n = box_elements(tuple((0, k) for k in shape_of(t, device)))
    owned = ranges(n, len(members))
    others = [(k, d) for k, d in enumerate(members) if k != me]
    most = max(b - a for a, b in (chunk_of(owned[me][1] - owned[me][0], c, op.chunks) for c in range(op.chunks)))
    total = most * len(others)

    def work_out(c: int, types: Types) -> _ReduceMessages:
        spans = [shifted(span, c, op.chunks) for span in owned]
        start, stop = spans[me]
        size = stop - start
        theirs = {d: _run_of(*spans[k], n, width, types) for k, d in others if spans[k][1] > spans[k][0]}
        slots = enumerate(others if size else [])
        addends = {d: _run_of(j * size, j * size + size, total, width, types) for j, (_, d) in slots}
        gives = {d: _run_of(0, size, size, width, types) for _, d in (others if size else [])}
        return _ReduceMessages(start, stop, theirs, addends, gives)

    rounds = bound_rounds(op.chunks, work_out, binding.types)
    if others:
        binding.groups.append(members)

    def run(x: np.ndarray, wire: MpiWire) -> np.ndarray:
        out = make()
        source, flat = x.reshape(-1), out.reshape(-1)
        stage = np.empty(total, dtype=out.dtype)
        for start, stop, theirs, addends, gives in rounds():
            here, size = flat[start:stop], stop - start
            if others:
                wire.wait(wire.all_to_all(members, [source], theirs, [stage], addends), members)
            for k in range(len(members)):
                j = k - (k > me)
                addend = source[start:stop] if k == me else stage[j * size : (j + 1) * size]
                _fold(here, addend, reduction, k == 0)
            if others:  # the own part to all, and the parts of the others into theirs
                wire.wait(wire.all_to_all(members, [here], gives, [flat], theirs), members)
        return out

    return run


def reduce(op: Reduce, t: TensorType, binding: Binding) -> One:
    """A pipelined chain towards the first member; what the others have no use for takes the partial sums."""
    members = members_of(op, t, binding.device)
    if not members:
        return idle(t, binding.device)
    me = members.index(binding.device)
    make, reduction = maker(t, binding.device), op.reduction
    n = box_elements(tuple((0, k) for k in shape_of(t, binding.device)))
    segments = segments_of(n, t.itemsize, op.chunks)
    before = members[me + 1] if me + 1 < len(members) else None  # adds up what comes after it
    after = members[me - 1] if me else None

    def run(x: np.ndarray, wire: MpiWire) -> np.ndarray:
        out = make()
        source, flat = x.reshape(-1), out.reshape(-1)
        sums = source if before is None else flat
        coming = [] if before is None else [wire.receive(before, flat[a:b]) for a, b in segments]
        sent: list[Pending] = []
        for k, (a, b) in enumerate(segments):
            if before is not None:
                wire.wait([coming[k]], members)
                _fold(flat[a:b], source[a:b], reduction, False)
            if after is not None:
                sent.append(wire.send(after, sums[a:b]))
        wire.wait(sent, members)
        if before is None and after is None:
            flat[...] = source
        return out

    return run


def broadcast(op: Broadcast, t: TensorType, u: TensorType, binding: Binding) -> One:
    """A pipelined chain from the first member on."""
    members = members_of(op, u, binding.device)
    if not members:
        return idle(u, binding.device)
    me = members.index(binding.device)
    make = maker(u, binding.device)
    n = box_elements(tuple((0, k) for k in shape_of(u, binding.device)))
    segments = segments_of(n, t.itemsize, op.chunks)
    before = members[me - 1] if me else None
    after = members[me + 1] if me + 1 < len(members) else None

    def run(x: np.ndarray, wire: MpiWire) -> np.ndarray:
        out = make()
        flat = out.reshape(-1)
        whole = x.reshape(-1) if before is None else flat
        coming = [] if before is None else [wire.receive(before, flat[a:b]) for a, b in segments]
        sent: list[Pending] = []
        for k, (a, b) in enumerate(segments):
            if before is not None:
                wire.wait([coming[k]], members)
            if after is not None:
                sent.append(wire.send(after, whole[a:b]))
        if before is None:
            flat[...] = whole
        wire.wait(sent, members)
        return out

    return run
