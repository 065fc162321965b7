"""The ops of a program bound to one rank of MPI: what it allocates, sends, receives, adds and copies.

A movement op is its lowering (`execution.rank_rounds`), interpreted: rounds of messages straight from and into the
rank's buffers, with copies while the messages travel and folds after them. Everything that follows from types is worked
out once, in `bind_step`, datatypes included. A round is one `Ialltoallw` where `all_to_all_members` says so, else
point-to-point messages. They meet in the order in which they are posted, under one tag on the program's communicator:
all ranks go through rounds in one order, which follows from the types. What is counted is what is moved, and sums come
out in the order of the lowering: MPI's own reductions know neither bf16 nor parts of a dim that is not major, do not
fix the order of addends, and hide what they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.core.dtypes import COMBINE, identity, numpy_dtype
from shardplan.core.namespace import NUMPY
from shardplan.core.op import Op
from shardplan.core.ops.collective import moving
from shardplan.core.tensor import TensorType
from shardplan.execution.async_executor import Bound, Running, wrap_blocking
from shardplan.execution.lower import bind_local, group_of, place_of, shape_of
from shardplan.execution.mpi.wire import Messages, MpiWire, Pending, Types
from shardplan.execution.rank_rounds import PeerPiece, Piece, PieceCopy, RankKernel, RankRound, RankRounds, rank_rounds

MOST_KEPT = 2**14  # an op of more messages and copies than these makes each round, and its datatypes, in its turn
# By the algorithm of a lowering: from which part on, of all pairs of members that send or receive, an all-to-all is
# taken to be worth an entry, mostly of no bytes, for each pair that has no message.
NATIVE = {"direct": 0.5}


Arrays = list[np.ndarray]


@dataclass(slots=True)
class Binding:
    """What the steps of a program share on one device: their datatypes, and the groups that need a communicator."""

    device: int  # its id
    types: Types = field(default_factory=Types)
    groups: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # device ids, in member order


class MpiRound(NamedTuple):
    """A round of a movement op, its messages with their datatypes."""

    sends: Messages
    meanwhile: tuple[PieceCopy, ...]
    receives: Messages
    then: tuple[PieceCopy, ...]
    closes: bool
    group: tuple[int, ...]  # device ids, for messages of failures
    kernels: tuple[RankKernel, ...]


def bind_step(
    op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding
) -> Bound[MpiWire]:
    """Return the step of the device of `binding`; raises `BackendError` for an op that MPI cannot run."""
    found = rank_rounds(op, operands, results, binding.device)
    if found is None:
        return wrap_blocking(compute(op, operands, results, binding))
    return _move(op, operands, results, binding, found)


def _move(
    op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding, found: RankRounds
) -> Bound[MpiWire]:
    device, place = binding.device, place_of(operands[0], binding.device)
    near = [device] if place is None else [operands[0].mesh.devices[m] for m in group_of(op, operands[0], place)]
    members = all_to_all_members(op, operands, near)
    native = device in members
    if native:
        binding.groups.append(members)
    given, made = ([f"{letter}{k}" for k in range(len(side))] for letter, side in (("x", operands), ("y", results)))
    shapes, dtypes, start = found
    new = {name: (shapes[name], numpy_dtype(dtypes[name])) for name in shapes if name not in given}

    def with_types(one: RankRound, types: Types) -> MpiRound:
        def messages(pieces: Sequence[PeerPiece]) -> Messages:
            out: Messages = {}
            for peer, piece in pieces:
                itemsize = numpy_dtype(dtypes[piece.buffer]).itemsize
                out[peer] = (*out.get(peer, ()), types.piece(piece.buffer, piece.shape, itemsize, piece.boxes))
            return out

        group = tuple(sorted({device, *near, *one.peers}))
        return MpiRound(
            messages(one.puts), one.meanwhile, messages(one.takes), one.then, one.closes, group, one.kernels
        )

    rounds = _bound_rounds(start, with_types, binding.types)

    def run(arrays: Arrays, wire: MpiWire) -> Running:
        held = dict(zip(given, arrays, strict=True)) | {name: np.empty(*what) for name, what in new.items()}
        unsent: list[Pending] = []
        started = False
        for one in rounds():
            if native:  # all members run all rounds, empty ones too
                coming = wire.all_to_all(members, held, one.sends, one.receives)
            else:
                coming = wire.messages(held, {}, one.receives)
                unsent += wire.messages(held, one.sends, {})
            for copy in one.meanwhile:
                write(held, copy)
            for kernel in one.kernels:
                compute_kernel(held, kernel)
            if not started and (coming or unsent):
                started = True
                yield  # the first messages are under way in both directions; next they are waited for
            wire.wait(coming, one.group)
            for copy in one.then:
                write(held, copy)
            if one.closes:
                wire.wait(unsent, one.group)
                unsent.clear()
        wire.wait(unsent, near)  # the last round may leave them open
        return [held[name] for name in made]

    return run


def _bound_rounds(
    start: Callable[[], Iterator[RankRound]], with_types: Callable[[RankRound, Types], MpiRound], types: Types
) -> Callable[[], Iterator[MpiRound]]:
    """Return how a run goes through the rounds that `start` yields."""
    kept: list[RankRound] = []
    actions = 0
    for one in start():
        actions += sum(map(len, (one.puts, one.meanwhile, one.takes, one.then)))
        if actions > MOST_KEPT:
            return lambda: _in_turn(start(), with_types)
        kept.append(one)
    made = [with_types(one, types) for one in kept]
    return lambda: iter(made)


def _in_turn(rounds: Iterator[RankRound], with_types: Callable[[RankRound, Types], MpiRound]) -> Iterator[MpiRound]:
    for one in rounds:
        own = Types()
        try:
            yield with_types(one, own)  # its datatypes are freed once the next is asked for: MPI keeps those in use
        finally:
            own.free_datatypes()


# The copies and folds of a round on one rank, with numpy, between views of its buffers.


def write(arrays: Mapping[str, np.ndarray], copy: PieceCopy) -> None:
    """Write, fold or fill a piece, in the dtype of its buffer."""
    targets = _views(arrays, copy.target)
    if copy.source is None:
        for target in targets:
            target[...] = identity(copy.fold or "sum", target.dtype)
        return
    sources = _views(arrays, copy.source)
    if [x.shape for x in sources] != [x.shape for x in targets]:
        if _run(targets):
            targets = _cut(targets[0], sources)
        else:
            sources = _cut(sources[0] if _run(sources) else np.concatenate([x.reshape(-1) for x in sources]), targets)
    for source, target in zip(sources, targets, strict=True):
        if copy.fold is None:
            target[...] = source
        else:
            with np.errstate(all="ignore"):
                COMBINE[copy.fold](target, source, out=target)


def _views(arrays: Mapping[str, np.ndarray], piece: Piece) -> list[np.ndarray]:
    whole = arrays[piece.buffer].reshape(piece.shape)
    # Without the ellipsis no view of an array without dims.
    return [whole[(*(slice(lo, hi) for lo, hi in box), ...)] for box in piece.boxes]


def _run(views: Sequence[np.ndarray]) -> bool:
    """Whether the views are one run of elements, which can be cut anywhere."""
    return len(views) == 1 and views[0].flags.c_contiguous


def _cut(run: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the elements of a run in order, as views of these shapes."""
    ends = np.cumsum([x.size for x in like])
    return [run.reshape(-1)[end - x.size : end].reshape(x.shape) for x, end in zip(like, ends.tolist(), strict=True)]


def compute(
    op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding
) -> Callable[[Arrays, MpiWire], Arrays]:
    """Return the step of the device of `binding`; raises `BackendError` for an op that MPI cannot run."""
    bound = bind_local(op, operands, results[0], binding.device, "MPI")
    makers = [maker(u, binding.device) for u in results]

    def run(arrays: Arrays, wire: MpiWire) -> Arrays:
        out = [make() for make in makers]
        if bound:
            with np.errstate(all="ignore"):
                for x, y in zip(out, bound(NUMPY, arrays), strict=True):
                    x[...] = y
        return out

    return run


def compute_kernel(held: Mapping[str, np.ndarray], kernel: RankKernel) -> None:
    """Run what is computed between messages, on buffers."""
    with np.errstate(all="ignore"):
        found = kernel.target_elements(NUMPY, [block.flat(held) for block in kernel.sources])
    for block, y in zip(kernel.targets, found, strict=True):
        block.flat(held)[...] = y


def all_to_all_members(op: Op, operands: Sequence[TensorType], group: Sequence[int]) -> tuple[int, ...]:
    """Return the members of a group, device ids, whose rounds are all-to-alls; nothing where all is messages.

    All members of the group find the same, since all look at the lowering of the whole group.
    """
    move = moving(op)
    least = None if move is None else NATIVE.get(move.algorithm or move.algorithms[0])
    if move is None or least is None or len(group) < 2:
        return ()
    ids = np.array(group)
    pairs: set[tuple[int, int]] = set()
    for one in move.lowering(operands, ids).rounds():
        if not one.closes:  # an all-to-all waits for all members: nobody would be ahead
            return ()
        for put in one.puts:
            there = put.source.elements() > 0
            pairs |= set(zip(ids[there].tolist(), put.peer[there].tolist(), strict=True))
        if len(pairs) == len(group) * (len(group) - 1):
            break  # most often after one round
    busy = {d for pair in pairs for d in pair}
    return tuple(d for d in group if d in busy) if len(pairs) >= least * len(busy) * (len(busy) - 1) else ()


def maker(t: TensorType, device: int) -> Callable[[], np.ndarray]:
    """Return how the shard of a device, given by id, is allocated."""
    shape, dtype = shape_of(t, device), numpy_dtype(t.dtype)
    return lambda: np.empty(shape, dtype=dtype)
