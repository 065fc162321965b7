"""What a lowering costs, counted from its rounds: for ops that say nothing shorter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardplan.core.lowering import Ints, Lowering
from shardplan.core.tensor import TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """The elements that a lowering of one operand, on all devices, moves; devices in order of their ids."""

    devices: Ints
    received: Ints  # int64 [devices]
    rounds: int  # of every round, the most peers that one device hears from
    sent_at_once: int  # by the busiest device in a round
    staged_at_once: int  # what the busiest device takes in a round, and its staging buffers
    pieces: tuple[int, int]  # the most that a device puts, and takes, in a round
    written: int  # copied by the busiest device
    messages: tuple[Ints, Ints, Ints]  # senders and receivers by id, elements: all rounds together

    def received_by(self, t: TensorType) -> Ints:
        """Return the elements that each device of a type's mesh receives, int64 [devices] in mesh order."""
        return self.received[np.searchsorted(self.devices, t.mesh.ids)]

    def sent_by(self, t: TensorType) -> Ints:
        """Return the elements that each device of a type's mesh sends, int64 [devices] in mesh order."""
        sent = np.zeros_like(self.received)
        np.add.at(sent, np.searchsorted(self.devices, self.messages[0]), self.messages[2])
        return sent[np.searchsorted(self.devices, t.mesh.ids)]


def count(t: TensorType, u: TensorType, lower: Callable[[Ints], Lowering]) -> Counted:
    """Count the lowering from type `t` to `u` that `lower` gives for devices."""
    ids = np.unique(np.concatenate([t.mesh.ids, u.mesh.ids]))
    lowering = lower(ids)
    received, written = np.zeros_like(ids), np.zeros_like(ids)
    staging = sum((b.elements for b in lowering.buffers.values()), np.zeros_like(ids))
    rounds = sent = staged = 0
    pieces = [0, 0]
    pairs: Counter[tuple[int, int]] = Counter()
    for one in lowering.rounds():
        given, taken = np.zeros_like(ids), np.zeros_like(ids)
        numbers = np.zeros((2, len(ids)), dtype=np.int64)
        for put in one.puts:
            n = put.source.elements()
            given += n
            numbers[0] += n > 0
            for k in np.flatnonzero(n).tolist():
                pairs[int(ids[k]), int(put.peer[k])] += int(n[k])
        for take in one.takes:
            n = take.target.elements()
            taken += n
            numbers[1] += n > 0
        for copy in (*one.meanwhile, *one.then):
            written += copy.target.elements()
        received += taken
        rounds += int(numbers[1].max(initial=0))
        sent, staged = max(sent, int(given.max(initial=0))), max(staged, int((taken + staging).max(initial=0)))
        pieces = [max(a, int(b)) for a, b in zip(pieces, numbers.max(axis=1, initial=0), strict=True)]
    ends = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
    sizes = np.array([pairs[a, b] for a, b in ends.tolist()], dtype=np.int64)
    return Counted(
        ids, received, rounds, sent, staged, (pieces[0], pieces[1]), int(written.max(initial=0)),
        (ends[:, 0], ends[:, 1], sizes),
    )  # fmt: skip
