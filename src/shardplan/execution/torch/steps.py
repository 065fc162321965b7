"""The ops of a program bound to one rank of torch.distributed: what it allocates, packs, sends and copies.

Everything about a step that follows from types is worked out once, in `bind`; a run only makes views, posts messages
and waits. A bound step is a generator: it yields nothing, once its first messages are under way, so that a caller may
do something else before it goes on; whoever resumes it is then blocked in its waits. Collectives are composed from
point-to-point messages, so every rank receives what the op says.

Messages between two ranks meet in the order in which they are posted: there is one tag for a run. So all ranks go
through the operands, rounds and element widths of a step in one order, which follows from its types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from shardplan.core.op import Op
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
from shardplan.core.ops.compute import Compute
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.lower import Moving, parts, shape_of, view_of
from shardplan.execution.torch.dtypes import torch_dtype
from shardplan.execution.torch.pack import (
    Arrays,
    Message,
    PackedRounds,
    PeerPart,
    at,
    largest_round,
    maker,
    pack,
    receive_buffer,
    send_buffer,
    unpack,
)
from shardplan.execution.torch.sums import (
    Bound,
    Running,
    all_reduce,
    broadcast,
    one_by_one,
    reduce,
    reduce_scatter,
    to_partial,
)
from shardplan.execution.torch.wire import Pending, TorchWire


def bind(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound:
    """Return the step of the device of that id; raises `BackendError` for an op that torch cannot run."""
    match op:
        case Slice() | AllGather() | AllToAll() | Permute() | Exchange() | Send():
            return _moving(op, operands, results, device)
        case ReduceScatter():
            return one_by_one([reduce_scatter(op, t, u, device) for t, u in zip(operands, results, strict=True)])
        case AllReduce():
            return one_by_one([all_reduce(op, t, device) for t in operands])
        case Reduce():
            return one_by_one([reduce(op, t, device) for t in operands])
        case Broadcast():
            return one_by_one([broadcast(op, t, u, device) for t, u in zip(operands, results, strict=True)])
        case ToPartial():
            return one_by_one([to_partial(op, t, u, device) for t, u in zip(operands, results, strict=True)])
        case Compute():
            from shardplan.execution.torch.compute import bind_compute

            return bind_compute(op, operands, results, device)
        case _:
            raise BackendError(f"torch cannot run {op.name}")


# Moving ops: all operands packed into one message a peer (and element width), straight from and into the arrays where
# a part is contiguous.


@dataclass(frozen=True, slots=True)
class _Lane:
    """The messages of one round between arrays of one element width."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class _PostedLane(NamedTuple):
    """A lane under way."""

    lane: _Lane
    incoming: torch.Tensor | None  # its staging buffer
    ins: Pending
    outs: Pending


def _moving(op: Moving, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound:
    chunks: int = getattr(op, "chunks", 1)
    found = [parts(op, t, u, device) for t, u in zip(operands, results, strict=True)]
    befores, afters = ([shape_of(t, device) for t in side] for side in (operands, results))
    copies = [
        (k, view_of(befores[k], old), view_of(afters[k], new)) for k, p in enumerate(found) for old, new in p.keeps
    ]
    traffic: dict[int, tuple[list[PeerPart], list[PeerPart]]] = {}  # by element width: what is sent, and received
    for width in sorted({t.itemsize for t in operands}):
        chosen = [k for k, t in enumerate(operands) if t.itemsize == width]
        sends = [PeerPart(peer, k, befores[k], box) for k in chosen for peer, box in found[k].sends]
        receives = [PeerPart(peer, k, afters[k], box) for k in chosen for peer, box in found[k].receives]
        if sends or receives:
            traffic[width] = sends, receives

    def build(chunk: int) -> list[tuple[int, _Lane]] | None:
        lanes = [
            (width, _Lane(pack(sends, chunk, chunks, True), pack(receives, chunk, chunks, False)))
            for width, (sends, receives) in traffic.items()
        ]
        return [(width, lane) for width, lane in lanes if lane.sends or lane.receives] or None

    rounds = PackedRounds.of(build, chunks if traffic else 0)
    stages = {
        width: (largest_round(sends, chunks, True), largest_round(receives, chunks, False))
        for width, (sends, receives) in traffic.items()
    }
    kinds = {t.itemsize: torch_dtype(t.dtype) for t in operands}  # of a width any dtype will do: bytes are moved
    makers = [maker(u, device) for u in results]

    def run(arrays: Arrays, wire: TorchWire) -> Running:
        out = [make(wire) for make in makers]
        buffers = {w: tuple(wire.empty(n, kinds[w]) if n else None for n in stages[w]) for w in stages}
        started = False
        for lanes_now in rounds:
            under_way: list[_PostedLane] = []
            for width, lane in lanes_now:
                outgoing, incoming = buffers[width]
                ins = [(m.peer, receive_buffer(m, out, incoming)) for m in lane.receives]
                outs = [(m.peer, send_buffer(m, arrays, outgoing)) for m in lane.sends]
                under_way.append(_PostedLane(lane, incoming, *wire.post(ins, outs)))
            if not started:
                for k, old, new in copies:  # while the first messages travel
                    at(out[k], new).copy_(at(arrays[k], old))
                started = True
                yield  # the messages of the first round are under way in both directions; next they are waited for
            for lane, incoming, ins, outs in under_way:
                for j, m in enumerate(lane.receives):
                    wire.wait_one(*ins[j])
                    if m.stop > m.start:
                        unpack(m, out, cast("torch.Tensor", incoming))
                wire.wait(outs)  # the next round packs into the same buffer
        if not started:  # nothing was posted, so there was nothing to yield for
            for k, old, new in copies:
                at(out[k], new).copy_(at(arrays[k], old))
        return out

    return run
