"""The ops of a program bound to one rank of MPI: what it allocates, sends, receives, adds and copies.

Everything about a step that follows from types is worked out once, in `bind`, datatypes included (of an op in very
many rounds, see `binding.MOST_KEPT`, when a round's turn comes). Every op is composed of all-to-alls and point-to-point
messages, so that what is counted is what is moved. Messages meet in the order in which they are posted, under one tag
on the program's communicator: all ranks go through operands and rounds in one order, which follows from the types.

An all-to-all is one `Ialltoallw` a round among the members of the group, in member order, where most members have
something for most others: gathers, all-to-alls, reduce-scatters, all-reduces and dense exchanges. Permutes, sends,
sparse exchanges and the chains of `Reduce` and `Broadcast` are point-to-point messages: an all-to-all would go through
an entry of every member, and needs a communicator of its own for every set of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.core.dtypes import IDEMPOTENT, identity, numpy_dtype
from shardplan.core.messages import at_root, messages
from shardplan.core.namespace import NUMPY
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
from shardplan.core.ops.compute import Compute, at_place
from shardplan.core.tensor import Box, TensorType
from shardplan.errors import BackendError
from shardplan.execution.lower import Moving, group_of, members_of, parts, place_of, shape_of
from shardplan.execution.mpi.binding import (
    Arrays,
    Binding,
    Bound,
    One,
    at,
    bound_rounds,
    idle,
    maker,
    messages_of,
)
from shardplan.execution.mpi.sums import all_reduce, broadcast, reduce, reduce_scatter
from shardplan.execution.mpi.wire import Messages, MpiWire, Types


def bind(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding) -> Bound:
    """Return the step of the device of `binding`; raises `BackendError` for an op that MPI cannot run."""
    match op:
        case Slice() | AllGather() | AllToAll() | Permute() | Exchange() | Send():
            return _moving(op, operands, results, binding)
        case ReduceScatter():
            return _one_by_one([reduce_scatter(op, t, u, binding) for t, u in zip(operands, results, strict=True)])
        case AllReduce():
            return _one_by_one([all_reduce(op, t, binding) for t in operands])
        case Reduce():
            return _one_by_one([reduce(op, t, binding) for t in operands])
        case Broadcast():
            return _one_by_one([broadcast(op, t, u, binding) for t, u in zip(operands, results, strict=True)])
        case ToPartial():
            return _one_by_one([_to_partial(op, t, u, binding) for t, u in zip(operands, results, strict=True)])
        case Compute():
            return _compute(op, operands, results, binding)
        case _:
            raise BackendError(f"MPI cannot run {op.name}")


def _one_by_one(steps: Sequence[One]) -> Bound:
    def run(arrays: Arrays, wire: MpiWire) -> Arrays:
        return [step(x, wire) for step, x in zip(steps, arrays, strict=True)]

    return run


# Moving ops: all operands in one transfer, one message a peer and round.


def _members(op: Moving, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> tuple[int, ...]:
    """Return who takes part in the all-to-alls of a moving op, in member order; nothing where messages do it."""
    match op:
        case AllGather() | AllToAll():
            found = [g for t in operands if len(g := members_of(op, t, device)) > 1]
            return found[0] if found else ()
        case Exchange():
            return _dense(op, operands, results, device)
        case _:
            return ()


def _dense(op: Exchange, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> tuple[int, ...]:
    """Return the devices of the group that send or receive, if they make half of all pairs; they all find the same.

    From half on an all-to-all is taken to be worth an entry, mostly of no bytes, for each pair that has no message.
    """
    t = operands[0]
    place = place_of(t, device)
    if place is None:
        return ()
    group = group_of(op, t, place)
    pairs: set[tuple[int, int]] = set()
    for s, u in zip(operands, results, strict=True):
        senders, receivers, _ = messages(s, u)
        inside = np.isin(senders, group)
        pairs |= set(zip(senders[inside].tolist(), receivers[inside].tolist(), strict=True))
    busy = {p for pair in pairs for p in pair}
    if place not in busy or 2 * len(pairs) < len(busy) * (len(busy) - 1):
        return ()
    return tuple(t.mesh.devices[m] for m in group if m in busy)


def _moving(op: Moving, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding) -> Bound:
    chunks: int = getattr(op, "chunks", 1)
    device = binding.device
    found = [parts(op, t, u, device) for t, u in zip(operands, results, strict=True)]
    befores, afters = ([shape_of(t, device) for t in side] for side in (operands, results))
    widths = [t.itemsize for t in operands]
    copies = [(k, old, new) for k, p in enumerate(found) for old, new in p.keeps]
    sends = [(peer, k, box) for k, p in enumerate(found) for peer, box in p.sends]
    receives = [(peer, k, box) for k, p in enumerate(found) for peer, box in p.receives]
    members = _members(op, operands, results, device)
    if members:
        binding.groups.append(members)

    def work_out(c: int, types: Types) -> tuple[Messages, Messages]:
        outs = messages_of(sends, befores, widths, c, chunks, types)
        return outs, messages_of(receives, afters, widths, c, chunks, types)

    rounds = bound_rounds(chunks if members or sends or receives else 0, work_out, binding.types)
    group = members or tuple(sorted({device, *(peer for peer, *_ in (*sends, *receives))}))  # for messages of failures
    makers = [maker(u, device) for u in results]

    def run(arrays: Arrays, wire: MpiWire) -> Arrays:
        out = [make() for make in makers]
        left = list(copies)
        for outs, ins in rounds():
            if members:  # they run all rounds, empty ones too
                pending = wire.all_to_all(members, arrays, outs, out, ins)
            else:
                pending = wire.messages(arrays, outs, out, ins)
            _keep(left, arrays, out)  # in the first round, while its messages travel
            left.clear()
            wire.wait(pending, group)
        _keep(left, arrays, out)  # where there was no round
        return out

    return run


def _keep(copies: Sequence[tuple[int, Box, Box]], arrays: Arrays, out: Arrays) -> None:
    """Copy what stays on the device: of the k-th operand a box, into a box of the k-th result."""
    for k, old, new in copies:
        at(out[k], new)[...] = at(arrays[k], old)


# Local ops. Computing is the reference's own arithmetic, on this device only.


def _to_partial(op: ToPartial, t: TensorType, u: TensorType, binding: Binding) -> One:
    """Keep, fill or drop; a dim that grows keeps the own part."""
    place = place_of(t, binding.device)
    make = maker(u, binding.device)
    if place is None or not at_root(u)[place]:
        return idle(u, binding.device)
    before, after = t.boxes()[place], u.boxes()[place]
    inside = tuple((int(b[0] - a[0]), int(b[1] - a[0])) for a, b in zip(after, before, strict=True))
    grows = not np.array_equal(before, after)
    keeps = grows or op.reduction in (*IDEMPOTENT, "root") or int(t.mesh.index(op.axes)[place]) == 0
    blank = None if op.reduction == "root" else identity(op.reduction, numpy_dtype(u.dtype))

    def run(x: np.ndarray, wire: MpiWire) -> np.ndarray:
        out = make()
        if grows or not keeps:
            out[...] = blank
        if keeps:
            at(out, inside)[...] = x
        return out

    return run


def _compute(op: Compute, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding) -> Bound:
    makers = [maker(u, binding.device) for u in results]
    place = place_of(results[0], binding.device)
    held = place is not None and bool(at_root(results[0])[place])
    bound = op.bind(operands, at_place(place)) if place is not None and held else None

    def run(arrays: Arrays, wire: MpiWire) -> Arrays:
        out = [make() for make in makers]
        if bound:
            with np.errstate(all="ignore"):
                for x, y in zip(out, bound(NUMPY, arrays), strict=True):
                    x[...] = y
        return out

    return run
