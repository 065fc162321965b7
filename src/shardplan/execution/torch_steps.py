"""The ops of a program bound to one rank of torch.distributed: what it allocates, packs, sends, adds and copies.

Everything about a step that follows from types is worked out once, in `bind`; a run only makes views, posts messages
and waits. A bound step is a generator: it yields once its first messages are under way, so that a caller may do
something else before it goes on. Collectives are composed from point-to-point messages in member order, so sums come
out in the reference's order, and every rank receives what the op says: gloo's own `reduce_scatter` moves the traffic
of an all-reduce, and its `reduce` and `broadcast` that of a star.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from shardplan.core.messages import at_root
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Permute,
    Reduce,
    ReduceScatter,
    Send,
    Slice,
    ToPartial,
)
from shardplan.core.ops.base import Collective, Op
from shardplan.core.ops.compute import Compute
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.lower import (
    Moving,
    View,
    box_elements,
    chunk_of,
    flat_boxes,
    group_of,
    parts,
    place_of,
    ranges,
    view_of,
)
from shardplan.execution.torch_dtypes import fold, identity_of, torch_dtype
from shardplan.execution.torch_wire import Wire

Arrays = list[torch.Tensor]
Running = Generator[None, None, Arrays]
Bound = Callable[[Arrays, Wire], Running]
SEGMENT = 2**18  # bytes of a segment that a chain passes on


def bind(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound:
    """Return the step of `device`; raises `BackendError` for an op that torch cannot run."""
    match op:
        case Slice() | AllGather() | AllToAll() | Permute() | Exchange() | Send():
            return _moving(op, operands, results, device)
        case ReduceScatter():
            return _one_by_one([_reduce_scatter(op, t, u, device) for t, u in zip(operands, results, strict=True)])
        case AllReduce():
            return _one_by_one([_all_reduce(op, t, device) for t in operands])
        case Reduce():
            return _one_by_one([_reduce(op, t, device) for t in operands])
        case Broadcast():
            return _one_by_one([_broadcast(op, t, u, device) for t, u in zip(operands, results, strict=True)])
        case ToPartial():
            return _one_by_one([_to_partial(op, t, u, device) for t, u in zip(operands, results, strict=True)])
        case Compute():
            from shardplan.execution.torch_compute import bind_compute

            return bind_compute(op, operands, results, device)
        case _:
            raise BackendError(f"torch cannot run {op.name}")


def _at(x: torch.Tensor, view: View) -> torch.Tensor:
    return x.as_strided(view.size, view.stride, x.storage_offset() + view.offset)


def _make(t: TensorType, device: int) -> Callable[[Wire], torch.Tensor]:
    """Return how the shard of `device` is allocated."""
    place = place_of(t, device)
    shape = (0,) if place is None else t.local_shape(place)
    dtype = torch_dtype(t.dtype)

    def make(wire: Wire) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=wire.device)

    return make


# Moving ops: all operands packed into one message a peer (and element width), straight from and into the arrays where
# a part is contiguous.


@dataclass(frozen=True, slots=True)
class _Message:
    """What one peer gets, or gives, in one round: parts of arrays, and where they lie in the staging buffer."""

    peer: int
    runs: tuple[tuple[int, View, int], ...]  # array, part, offset in the staging buffer
    start: int
    stop: int  # of the staging buffer, in elements; equal where the message is one contiguous part
    packs: bool = True  # False where an earlier message has packed the same parts


@dataclass(frozen=True, slots=True)
class _Lane:
    """The messages of one round between arrays of one element width."""

    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]


def _moving(op: Moving, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound:
    chunks: int = getattr(op, "chunks", 1)
    found = [parts(op, t, u, device) for t, u in zip(operands, results, strict=True)]
    befores, afters = ([_shape(t, device) for t in side] for side in (operands, results))
    copies = [
        (k, view_of(befores[k], old), view_of(afters[k], new)) for k, p in enumerate(found) for old, new in p.keeps
    ]
    lanes: dict[int, list[_Lane]] = {}
    stages: dict[int, tuple[int, int]] = {}
    for width in sorted({t.itemsize for t in operands}):
        chosen = [k for k, t in enumerate(operands) if t.itemsize == width]
        sends = [(peer, k, befores[k], box) for k in chosen for peer, box in found[k].sends]
        receives = [(peer, k, afters[k], box) for k in chosen for peer, box in found[k].receives]
        lanes[width] = [_Lane(_pack(sends, c, chunks, True), _pack(receives, c, chunks, False)) for c in range(chunks)]
        stages[width] = (
            max(_staged(lane.sends) for lane in lanes[width]),
            max(_staged(lane.receives) for lane in lanes[width]),
        )
    kinds = {t.itemsize: torch_dtype(t.dtype) for t in operands}
    makers = [_make(u, device) for u in results]
    rounds = [[(w, lanes[w][c]) for w in lanes if lanes[w][c].sends or lanes[w][c].receives] for c in range(chunks)]
    rounds = [lane for lane in rounds if lane]

    def run(arrays: Arrays, wire: Wire) -> Running:
        out = [make(wire) for make in makers]
        if not rounds:
            for k, old, new in copies:
                _at(out[k], new).copy_(_at(arrays[k], old))
            return out
        buffers = {w: tuple(wire.empty(n, kinds[w]) if n else None for n in stages[w]) for w in stages}
        for number, lanes_now in enumerate(rounds):
            under_way: list[tuple[_Lane, torch.Tensor | None, Any, Any]] = []
            for width, lane in lanes_now:
                outgoing, incoming = buffers[width]
                ins = [(m.peer, _target(m, out, incoming)) for m in lane.receives]
                outs = [(m.peer, _source(m, arrays, outgoing)) for m in lane.sends]
                under_way.append((lane, incoming, *wire.post(ins, outs)))
            if number == 0:
                for k, old, new in copies:
                    _at(out[k], new).copy_(_at(arrays[k], old))
                yield
            for lane, incoming, ins, outs in under_way:
                if wire.batched:
                    wire.wait(ins)
                for j, m in enumerate(lane.receives):
                    if not wire.batched:
                        wire.wait_one(*ins[j])
                    if m.stop > m.start:
                        _unpack(m, out, cast("torch.Tensor", incoming))
                wire.wait(outs)
        return out

    return run


def _shape(t: TensorType, device: int) -> tuple[int, ...]:
    place = place_of(t, device)
    return () if place is None else t.local_shape(place)


def _pack(
    entries: list[tuple[int, int, tuple[int, ...], Any]], chunk: int, chunks: int, shared: bool
) -> tuple[_Message, ...]:
    """Lay out the messages of one round; `shared`: equal messages (of a sender) lie in the buffer once."""
    by_peer: dict[int, list[tuple[int, View]]] = {}
    for peer, k, shape, box in entries:
        for piece in flat_boxes(box, *chunk_of(box_elements(box), chunk, chunks)):
            by_peer.setdefault(peer, []).append((k, view_of(shape, piece)))
    out: list[_Message] = []
    packed: dict[tuple[tuple[int, View], ...], _Message] = {}
    offset = 0
    for peer, runs in by_peer.items():
        twin = packed.get(tuple(runs)) if shared else None
        if twin is not None:
            out.append(replace(twin, peer=peer, packs=False))
            continue
        start = offset
        placed: list[tuple[int, View, int]] = []
        for k, view in runs:
            placed.append((k, view, offset))
            offset += view.elements
        if len(runs) == 1 and runs[0][1].contiguous:
            offset = start
        packed[tuple(runs)] = message = _Message(peer, tuple(placed), start, offset)
        out.append(message)
    return tuple(out)


def _staged(messages: Sequence[_Message]) -> int:
    return max((m.stop for m in messages), default=0)


def _target(m: _Message, out: Arrays, stage: torch.Tensor | None) -> torch.Tensor:
    if stage is None or m.stop == m.start:
        k, view, _ = m.runs[0]
        return _flat(out[k], view)
    return stage[m.start : m.stop]


def _source(m: _Message, arrays: Arrays, stage: torch.Tensor | None) -> torch.Tensor:
    if stage is None or m.stop == m.start:
        k, view, _ = m.runs[0]
        return _flat(arrays[k], view)
    for k, view, offset in m.runs if m.packs else ():
        x = arrays[k]
        here = stage[offset : offset + view.elements]
        (here if here.dtype == x.dtype else here.view(x.dtype)).view(view.size).copy_(_at(x, view))
    return stage[m.start : m.stop]


def _unpack(m: _Message, out: Arrays, stage: torch.Tensor) -> None:
    for k, view, offset in m.runs:
        y = out[k]
        here = stage[offset : offset + view.elements]
        _at(y, view).copy_((here if here.dtype == y.dtype else here.view(y.dtype)).view(view.size))


def _flat(x: torch.Tensor, view: View) -> torch.Tensor:
    return x.as_strided((view.elements,), (1,), x.storage_offset() + view.offset)


# Reductions, one operand after the other.

One = Callable[[torch.Tensor, Wire], Generator[None, None, torch.Tensor]]


def _one_by_one(steps: Sequence[One]) -> Bound:
    def run(arrays: Arrays, wire: Wire) -> Running:
        out: Arrays = []
        for step, x in zip(steps, arrays, strict=True):
            out.append((yield from step(x, wire)))
        return out

    return run


def _idle(u: TensorType, device: int) -> One:
    """A device that holds nothing of the value: its result must not be read."""
    make = _make(u, device)

    def run(x: torch.Tensor, wire: Wire) -> Generator[None, None, torch.Tensor]:
        return make(wire)
        yield

    return run


def _group(op: Collective, t: TensorType, device: int) -> tuple[list[int], int] | None:
    """Return the device ids of the group in member order and the own index, or None where nothing is held."""
    place = place_of(t, device)
    if place is None or not at_root(t)[place]:
        return None
    members = group_of(op, t, place)
    return [t.mesh.devices[m] for m in members], members.index(place)


def _reduce_scatter(op: ReduceScatter, t: TensorType, u: TensorType, device: int) -> One:
    """Every member sends each other its addend of that one's part, and adds up what it gets, in member order."""
    found = _group(op, t, device)
    if found is None:
        return _idle(u, device)
    members, me = found
    p = parts(op, t, u, device)
    shape, make, chunks, reduction = _shape(t, device), _make(u, device), op.chunks, op.reduction
    after = _shape(u, device)
    n = box_elements(tuple((0, k) for k in after))
    whole = tuple((0, k) for k in after)
    own = p.keeps[0][0] if p.keeps else None
    senders = [peer for peer, _ in p.receives]
    order = [-1 if d == device else senders.index(d) for d in members] if n else []
    rounds: list[Any] = []
    for c in range(chunks):
        start, stop = chunk_of(n, c, chunks)
        sends = _pack([(peer, 0, shape, box) for peer, box in p.sends], c, chunks, True)
        mine = flat_boxes(own, start, stop) if own else []
        result = flat_boxes(whole, start, stop)
        pairs = [(view_of(shape, a), view_of(after, b)) for a, b in zip(mine, result, strict=True)] if n else []
        if sends or stop > start:
            rounds.append((start, stop, sends, pairs))
    most_in = max((stop - start for start, stop, _, _ in rounds), default=0) * len(senders)
    most_out = max((_staged(sends) for _, _, sends, _ in rounds), default=0)

    def run(x: torch.Tensor, wire: Wire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        flat = out.view(-1)
        incoming = wire.empty(most_in, out.dtype)
        outgoing = wire.empty(most_out, out.dtype) if most_out else None
        for start, stop, sends, pairs in rounds:
            size = stop - start
            addends = [incoming[k * size : (k + 1) * size] for k in range(len(senders))]
            ins, outs = wire.post(
                list(zip(senders, addends, strict=True)) if size else [],
                [(m.peer, _source(m, [x], outgoing)) for m in sends],
            )
            yield
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
                        fold(_at(out, b), _at(x, a), reduction)
                    else:
                        _at(out, b).copy_(_at(x, a))
            wire.wait(outs)
        return out

    return run


def _all_reduce(op: AllReduce, t: TensorType, device: int) -> One:
    """A reduce-scatter of the flat shard, cut by the tiling rule, and an all-gather of its parts."""
    found = _group(op, t, device)
    if found is None:
        return _idle(t, device)
    members, me = found
    make, chunks, reduction = _make(t, device), op.chunks, op.reduction
    n = box_elements(tuple((0, k) for k in _shape(t, device)))
    owned = ranges(n, len(members))
    others = [(k, d) for k, d in enumerate(members) if k != me]
    rounds = [[_shift(owned[k], c, chunks) for k in range(len(members))] for c in range(chunks)]
    most = max(r[me][1] - r[me][0] for r in rounds) * len(others)

    def run(x: torch.Tensor, wire: Wire) -> Generator[None, None, torch.Tensor]:
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
            yield
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


def _shift(span: tuple[int, int], chunk: int, chunks: int) -> tuple[int, int]:
    start, stop = chunk_of(span[1] - span[0], chunk, chunks)
    return span[0] + start, span[0] + stop


def _segments(n: int, itemsize: int, chunks: int) -> list[tuple[int, int]]:
    count = max(chunks, -(-n * itemsize // SEGMENT))
    return [s for s in (chunk_of(n, c, count) for c in range(count)) if s[1] > s[0]]


def _reduce(op: Reduce, t: TensorType, device: int) -> One:
    """A pipelined chain towards the first member; what the others have no use for takes the partial sums."""
    found = _group(op, t, device)
    if found is None:
        return _idle(t, device)
    members, me = found
    make, reduction = _make(t, device), op.reduction
    n = box_elements(tuple((0, k) for k in _shape(t, device)))
    segments = _segments(n, t.itemsize, op.chunks)
    before = members[me + 1] if me + 1 < len(members) else None  # adds up what comes after it
    after = members[me - 1] if me else None

    def run(x: torch.Tensor, wire: Wire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        source, flat = x.view(-1), out.view(-1)
        sums = flat if before is not None else source
        ins, _ = wire.post([(before, flat[a:b]) for a, b in segments] if before is not None else [], [])
        yield
        sent: list[Any] = []
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


def _broadcast(op: Broadcast, t: TensorType, u: TensorType, device: int) -> One:
    """A pipelined chain from the first member on."""
    found = _group(op, u, device)
    if found is None:
        return _idle(u, device)
    members, me = found
    make = _make(u, device)
    n = box_elements(tuple((0, k) for k in _shape(u, device)))
    segments = _segments(n, t.itemsize, op.chunks)
    before = members[me - 1] if me else None
    after = members[me + 1] if me + 1 < len(members) else None

    def run(x: torch.Tensor, wire: Wire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        flat = out.view(-1)
        whole = x.view(-1) if before is None else flat
        ins, _ = wire.post([(before, flat[a:b]) for a, b in segments] if before is not None else [], [])
        sent: list[Any] = []
        if before is None:
            sent = wire.post([], [(after, whole[a:b]) for a, b in segments])[1] if after is not None else []
            out.copy_(x)
        yield
        for k, (a, b) in enumerate(segments if before is not None else []):
            wire.wait_one(*ins[k])
            if after is not None:
                sent += wire.post([], [(after, whole[a:b])])[1]
        wire.wait(sent)
        return out

    return run


def _to_partial(op: ToPartial, t: TensorType, u: TensorType, device: int) -> One:
    """Keep, fill or drop; a dim that grows keeps the own part."""
    place = place_of(t, device)
    make = _make(u, device)
    if place is None or not at_root(u)[place]:
        return _idle(u, device)
    before, after = t.boxes()[place], u.boxes()[place]
    inside = tuple((int(b[0] - a[0]), int(b[1] - a[0])) for a, b in zip(after, before, strict=True))
    grows = not np.array_equal(before, after)
    keeps = grows or op.reduction in ("max", "min", "root") or int(t.mesh.index(op.axes)[place]) == 0
    part = view_of(u.local_shape(place), inside)
    blank: Any = None if op.reduction == "root" else identity_of(op.reduction, u.dtype)

    def run(x: torch.Tensor, wire: Wire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        if grows or not keeps:
            out.copy_(blank.to(wire.device))
        if keeps:
            _at(out, part).copy_(x)
        return out
        yield

    return run

