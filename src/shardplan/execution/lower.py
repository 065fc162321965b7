"""What one device does in an op: the parts of its arrays that it sends, receives and keeps.

Backends share this view. A part is a box in the indices of a device's own, contiguous array; sender and receiver pack
it in row-major order. An op in C chunks moves, of every part of n elements, the elements n c // C to n (c + 1) // C in
its c-th round, so a round packs at most ceil(n / C) of each part.

Here `device` is a device id, as everywhere outside of a mesh; a place is an index in mesh order, a member of a group is
given by its place or its id, and `frame` is the box of the whole array in which a part is local.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.core.messages import at_root, messages, own_places, permutation
from shardplan.core.ops import AllGather, AllToAll, Exchange, Permute, ReduceScatter, Send, Slice
from shardplan.core.ops.collective import Collective, meet
from shardplan.core.program import Program
from shardplan.core.tensor import Box, TensorType
from shardplan.errors import LayoutError

SEGMENT = 2**18  # bytes of a segment that a chain passes on: little beside a tensor, much beside a message's latency


@dataclass(frozen=True, slots=True)
class Parts:
    """The traffic of one operand on one device."""

    sends: tuple[tuple[int, Box], ...]  # device id of the receiver, part of the operand
    receives: tuple[tuple[int, Box], ...]  # device id of the sender, part of the result
    keeps: tuple[tuple[Box, Box], ...]  # part of the operand, part of the result that it becomes


Moving = Slice | AllGather | AllToAll | ReduceScatter | Permute | Exchange | Send


def place_of(t: TensorType, device: int) -> int | None:
    """Return the place of a device id in the mesh of a type, or None where it is not in it."""
    found = np.flatnonzero(t.mesh.ids == device)
    return int(found[0]) if len(found) else None


def group_of(op: Collective, t: TensorType, place: int) -> list[int]:
    """Return the places of the group of `place` in an op on a value of type `t`, in member order."""
    groups = t.mesh.group_places(op.members(t))
    return groups[np.flatnonzero((groups == place).any(axis=1))[0]].tolist()


def members_of(op: Collective, t: TensorType, device: int) -> tuple[int, ...]:
    """Return the device ids of the group in member order; nothing where the device does not hold the value."""
    place = place_of(t, device)
    if place is None or not at_root(t)[place]:
        return ()
    return tuple(t.mesh.devices[m] for m in group_of(op, t, place))


def shape_of(t: TensorType, device: int) -> tuple[int, ...]:
    """Return the shape of the shard of a device; empty arrays stand for values on meshes without it."""
    place = place_of(t, device)
    return (0,) if place is None else t.local_shape(place)


def own_shards(program: Program, inputs: Sequence[Sequence[Any]], rank: int) -> dict[str, tuple[int, Any] | None]:
    """Return, by input, the place and the shard that the process of `rank` passes; None for a mesh without it.

    Raises `LayoutError` for a wrong number of inputs or shards.
    """
    if len(inputs) != len(program.inputs):
        raise LayoutError(f"{len(inputs)} inputs given, but the program has {len(program.inputs)}")
    found: dict[str, tuple[int, Any] | None] = {}
    for (name, t), shards in zip(program.inputs, inputs, strict=True):
        place = place_of(t, rank)
        if len(shards) != (place is not None):
            raise LayoutError(
                f"input %{name}: rank {rank} passes {len(shards)} shards of {t}; legal is "
                f"{'1, its own' if place is not None else '0, since its mesh does not have this rank'}"
            )
        found[name] = None if place is None else (place, shards[0])
    return found


def parts(op: Moving, t: TensorType, u: TensorType, device: int) -> Parts:
    """Return what the device of that id sends, receives and keeps of one operand of type `t` that becomes `u`.

    Of a `ReduceScatter` every part received, and the one kept, is an addend of the whole result.
    """
    match op:
        case Slice() | AllGather() | AllToAll() | ReduceScatter():
            return _in_group(op, t, u, device)
        case Permute():
            pairs = permutation(t, u)
            assert pairs is not None  # the op's typing has found them
            home = np.ones(u.mesh.size, dtype=bool)
            home[pairs[1]] = False
            return _by_message(t, u, device, *pairs, home)
        case Exchange() | Send():
            senders, receivers, _ = messages(t, u)
            return _by_message(t, u, device, senders, receivers, np.ones(u.mesh.size, dtype=bool))


def _in_group(op: Collective, t: TensorType, u: TensorType, device: int) -> Parts:
    """The parts of an op among the members of a group, each of whom sends to all others what they lack."""
    me = place_of(t, device)
    if me is None or not at_root(t)[me]:
        return Parts((), (), ())
    before, after = t.boxes(), u.boxes()
    ids = t.mesh.devices
    sends: list[tuple[int, Box]] = []
    receives: list[tuple[int, Box]] = []
    keeps: list[tuple[Box, Box]] = []
    for m in [me] if isinstance(op, Slice) else group_of(op, t, me):
        out, into = _meet(before[me], after[m]), _meet(before[m], after[me])
        if m == me:
            if into is not None:
                keeps.append((_local(before[me], into), _local(after[me], into)))
            continue
        if out is not None:
            sends.append((ids[m], _local(before[me], out)))
        if into is not None:
            receives.append((ids[m], _local(after[me], into)))
    return Parts(tuple(sends), tuple(receives), tuple(keeps))


def _by_message(
    t: TensorType, u: TensorType, device: int, senders: np.ndarray, receivers: np.ndarray, keeps: np.ndarray
) -> Parts:
    """The parts of a move whose messages are listed by places: `senders` in `t`, `receivers` in `u`.

    `keeps` says of every place in `u` whether it keeps what it holds.
    """
    mine, ours = place_of(t, device), place_of(u, device)
    before, after = t.boxes(), u.boxes()
    sends: list[tuple[int, Box]] = []
    receives: list[tuple[int, Box]] = []
    kept: list[tuple[Box, Box]] = []
    if mine is not None:
        for r in receivers[senders == mine].tolist():
            part = _meet(before[mine], after[r])
            if part is not None:
                sends.append((u.mesh.devices[r], _local(before[mine], part)))
    if ours is not None and at_root(u)[ours]:
        for s in senders[receivers == ours].tolist():
            part = _meet(before[s], after[ours])
            if part is not None:
                receives.append((t.mesh.devices[s], _local(after[ours], part)))
        own = int(own_places(t, u)[ours])
        if own >= 0 and keeps[ours] and at_root(t)[own]:
            part = _meet(before[own], after[ours])
            if part is not None:
                kept.append((_local(before[own], part), _local(after[ours], part)))
    return Parts(tuple(sends), tuple(receives), tuple(kept))


def _meet(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """The intersection of two boxes, None where it is empty; without dims there is one element, in both."""
    return meet(a, b) if len(a) else a


def _local(frame: np.ndarray, part: np.ndarray) -> Box:
    """A box of the global array in the indices of the array that holds the box `frame`."""
    return tuple((int(lo - start), int(hi - start)) for (start, _), (lo, hi) in zip(frame, part, strict=True))


def box_elements(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(hi - lo for lo, hi in box)


def chunk_of(n: int, chunk: int, chunks: int) -> tuple[int, int]:
    """Return the elements of a part of `n` that its round `chunk` moves: start and stop."""
    return n * chunk // chunks, n * (chunk + 1) // chunks


def flat_boxes(box: Box, start: int, stop: int) -> list[Box]:
    """Return boxes that hold, in row-major order, the elements `start` to `stop` of a box.

    >>> flat_boxes(((0, 3), (5, 9)), 2, 8)
    [((0, 1), (7, 9)), ((1, 2), (5, 9))]
    """
    if stop <= start:
        return []
    if (start, stop) == (0, box_elements(box)):
        return [box]
    (lo, _), *rest = box
    inner = math.prod(hi - low for low, hi in rest)
    row, out = start // inner, list[Box]()
    if start % inner:  # the end of a row
        end = min(stop, (row + 1) * inner)
        tail = flat_boxes(tuple(rest), start - row * inner, end - row * inner)
        out += [((lo + row, lo + row + 1), *b) for b in tail]
        row, start = row + 1, end
    last = stop // inner
    if last > row:  # whole rows
        out.append(((lo + row, lo + last), *rest))
        start = last * inner
    if start < stop:  # the start of a row
        head = flat_boxes(tuple(rest), 0, stop - start)
        out += [((lo + last, lo + last + 1), *b) for b in head]
    return out


@dataclass(frozen=True, slots=True)
class View:
    """A box of a contiguous array as size, stride and offset, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    @property
    def contiguous(self) -> bool:
        """Whether the box is one run of the array."""
        step = 1
        for n, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and stride != step:
                return False
            step *= n
        return True


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array, in elements.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def view_of(shape: Sequence[int], box: Box) -> View:
    """Return the view of a box of a contiguous array of `shape`."""
    stride = strides(shape)
    offset = sum(lo * s for (lo, _), s in zip(box, stride, strict=True))
    return View(tuple(hi - lo for lo, hi in box), stride, offset)


def ranges(n: int, members: int) -> list[tuple[int, int]]:
    """Return the part of n elements that each of `members` owns by the tiling rule, as (start, stop).

    >>> ranges(10, 4)
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    chunk = -(-n // members)
    return [(min(k * chunk, n), min((k + 1) * chunk, n)) for k in range(members)]


def shifted(span: tuple[int, int], chunk: int, chunks: int) -> tuple[int, int]:
    """Return the elements of a part, given as (start, stop), that the round `chunk` moves."""
    start, stop = chunk_of(span[1] - span[0], chunk, chunks)
    return span[0] + start, span[0] + stop


def segments_of(n: int, itemsize: int, chunks: int) -> list[tuple[int, int]]:
    """Return the segments of n elements that a pipelined chain passes on: at least `chunks`, none above `SEGMENT`.

    >>> segments_of(10, 4, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    count = max(chunks, -(-n * itemsize // SEGMENT))
    return [s for s in (chunk_of(n, c, count) for c in range(count)) if s[1] > s[0]]
