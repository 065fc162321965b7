"""What a lowering costs, counted from its rounds: for ops that say nothing shorter, and for algorithms they do not say.

What is staged serves a stage: the rounds up to one that closes, whose receives may be posted at once. A message that is
one contiguous part of a shard is not staged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.core.lowering import Ints, Lowering, Region
from shardplan.core.messages import Packed
from shardplan.core.tensor import TensorType


class RoundMessages(NamedTuple):
    """The messages of a round, one for each pair of devices."""

    sender: Ints  # int64 [messages] ids
    receiver: Ints
    amount: Ints  # elements, or bytes

    @staticmethod
    def merge_parts(parts: list[RoundMessages]) -> RoundMessages:
        """Return what several of them are together, in order of senders, then receivers."""
        sender, receiver, amount = (np.concatenate(x) for x in zip(*parts, strict=True))
        width = 1 + int(receiver.max(initial=0))
        pairs, at = np.unique(sender * width + receiver, return_inverse=True)
        total = np.zeros(len(pairs), dtype=amount.dtype)
        np.add.at(total, at.reshape(-1), amount)
        return RoundMessages(pairs // width, pairs % width, total)


@dataclass(frozen=True, slots=True, eq=False)
class MessageCounts:
    """The elements that a lowering of one operand, on all devices, moves; devices in order of their ids."""

    devices: Ints
    received: Ints  # int64 [devices]
    rounds: int  # of every round, the most peers that one device hears from
    packed: Packed  # in a stage
    pieces: tuple[int, int]  # the most that a device puts, and takes, in a stage, with the parts of its buffers
    written: int  # copied by the busiest device
    turns: tuple[RoundMessages, ...]  # of every round that has messages, in elements

    def received_by(self, t: TensorType) -> Ints:
        """Return the elements that each device of a type's mesh receives, int64 [devices] in mesh order."""
        return self.received[np.searchsorted(self.devices, t.mesh.ids)]

    def sent_by(self, t: TensorType) -> Ints:
        """Return the elements that each device of a type's mesh sends, int64 [devices] in mesh order."""
        sent = np.zeros_like(self.received)
        for one in self.turns:
            np.add.at(sent, np.searchsorted(self.devices, one.sender), one.amount)
        return sent[np.searchsorted(self.devices, t.mesh.ids)]


def count(t: TensorType, u: TensorType, lower: Callable[[Ints], Lowering]) -> MessageCounts:
    """Count the lowering from type `t` to `u` that `lower` gives for devices."""
    ids = np.unique(np.concatenate([t.mesh.ids, u.mesh.ids]))
    lowering = lower(ids)
    shapes = {"x": _shapes(t, ids), "y": _shapes(u, ids)}
    received, written, slots = np.zeros((3, len(ids)), dtype=np.int64)
    sides = np.zeros((2, len(ids)), dtype=np.int64)  # elements put and taken in this stage
    numbers = np.zeros((2, len(ids)), dtype=np.int64)  # pieces of them
    most, pieces, runs = [0, 0], [0, 0], [True, True]
    staged = {name: np.zeros_like(ids) for name in lowering.buffers}  # elements taken into them in this stage
    room = {name: b.elements for name, b in lowering.buffers.items()}
    rounds = 0
    turns: list[RoundMessages] = []
    for one in lowering.rounds():
        heard = np.zeros_like(ids)
        messages: list[RoundMessages] = []
        for put in one.puts:
            amount = put.source.elements()
            there = np.flatnonzero(amount)
            messages.append(RoundMessages(ids[there], put.peer[there], amount[there]))
        together = RoundMessages.merge_parts(messages) if messages else None
        if together is not None:
            turns.append(together)
        # A message of several parts is packed, wherever they lie.
        joined = together is not None and len(together.sender) < sum(len(m.sender) for m in messages)
        for side, regions in enumerate(([put.source for put in one.puts], [take.target for take in one.takes])):
            for region in regions:
                n = region.elements()
                numbers[side] += n > 0
                if region.buffer in shapes or not side:
                    sides[side] += n
                    runs[side] &= not joined and _is_run(region, shapes.get(region.buffer))
                else:  # where receives are posted early none may land on another
                    slots += n > 0
                    staged[region.buffer] = staged[region.buffer] + n
                    room[region.buffer] = np.maximum(room[region.buffer], staged[region.buffer])
        for take in one.takes:
            n = take.target.elements()
            heard += n > 0
            received += n
        for copy in (*one.meanwhile, *one.then):
            written += copy.target.elements()
            if copy.target.buffer not in shapes:
                slots += copy.target.elements() > 0
        rounds += int(heard.max(initial=0))
        for side in (0, 1):
            most[side] = max(most[side], int(sides[side].max(initial=0)))
            pieces[side] = max(pieces[side], int(numbers[side].max(initial=0)))
        if one.closes:
            sides[:], numbers[:] = 0, 0
            staged = {name: np.zeros_like(ids) for name in staged}
    buffers = int(sum(room.values(), np.zeros_like(ids)).max(initial=0))
    packed = Packed(most[0], most[1], runs[0], runs[1], buffers)
    pieces[1] += int(slots.max(initial=0))
    return MessageCounts(
        ids, received, rounds, packed, (pieces[0], pieces[1]), int(written.max(initial=0)), tuple(turns)
    )


def _shapes(t: TensorType, ids: Ints) -> Ints:
    """The shapes of the shards of some devices, 0 on one that is not of the mesh: int64 [devices, ndim]."""
    found = np.zeros((len(ids), t.ndim), dtype=np.int64)
    found[np.searchsorted(ids, t.mesh.ids)] = t.boxes()[:, :, 1] - t.boxes()[:, :, 0]
    return found


def _is_run(region: Region, shapes: Ints | None) -> bool:
    """Say whether a region is one contiguous part of its buffer on every device; None for a flat one."""
    extent = region.box[:, :, 1] - region.box[:, :, 0]
    if region.strides is not None or region.chunk[1] > 1:
        return False
    if shapes is None or extent.shape[1] == 1 or extent.shape[1] != shapes.shape[1]:
        return True
    some = (extent > 0).all(axis=1)
    # Behind the first dim that is longer than 1 every dim is whole.
    before = np.logical_and.accumulate(extent <= 1, axis=1)[:, :-1]
    return bool((before | (extent == shapes)[:, 1:])[some].all())
