"""The communication of one op, all devices at once, as `hardware` prices it.

Devices are ids. A `Groups` is a collective whose algorithm (ring, tree, ...) the cost chooses; a `Messages` is explicit
point-to-point traffic; a `Local` only copies; an `InTurn` is what the steps of a program, or the rounds of a step, do,
again and again, and an `AtOnce` what moves do that are posted together, or a kernel beside messages. An `Overlap` is
kernels whose result goes out tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, assert_never

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A collective over disjoint groups, all running at once."""

    kind: str  # all_gather | all_reduce | reduce_scatter | all_to_all | reduce | broadcast
    members: np.ndarray  # int64 [G, k] device ids in member order
    nbytes: np.ndarray  # float64 [G] bytes a member holds before the op (the largest member)
    chunks: int = 1
    # The messages that run instead where a library has it only for equal parts, and for reductions that all libraries
    # have; None where it is one of those. The same object at every call.
    composed: Callable[[], Pattern] | None = None
    copied: float = 0.0  # bytes that the busiest device copies to pad its parts, or to take padding out, and only then


class MessageTotals(NamedTuple):
    """What every device that takes part in some messages does: arrays [n], by ascending device id."""

    devices: np.ndarray  # int64 ids
    sent: np.ndarray  # messages, float64
    received: np.ndarray  # messages, float64
    sent_bytes: np.ndarray  # float64
    received_bytes: np.ndarray  # float64


@dataclass(frozen=True, init=False, eq=False, match_args=False)
class Messages:
    """Point-to-point messages, all at once; sender and receiver always differ.

    Given are their senders and receivers, device ids, int64 [M], and bytes, float64 [M]; or (`from_totals`) what every
    device does in all of them, with what lists them: those of large meshes are too many to list where totals are
    enough.
    """

    chunks: int
    own: float  # bytes that a device copies of what it had to where it has them then, the most of any
    totals: MessageTotals | None  # None where they are listed
    _list: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]] = field(repr=False)

    def __init__(
        self, sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray, chunks: int = 1, own: float = 0.0
    ) -> None:
        self._set(chunks, own, None, lambda: (sender, receiver, nbytes))

    @staticmethod
    def from_totals(
        totals: MessageTotals,
        listed: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]],
        chunks: int = 1,
        own: float = 0.0,
    ) -> Messages:
        """Return messages of which the totals are known; they are listed when they are asked for."""
        found = object.__new__(Messages)
        found._set(chunks, own, totals, listed)
        return found

    def _set(self, *values: object) -> None:
        for name, value in zip(("chunks", "own", "totals", "_list"), values, strict=True):
            object.__setattr__(self, name, value)

    @cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Senders, receivers and bytes, all [M]."""
        return self._list()

    @property
    def sender(self) -> np.ndarray:
        """Device ids, int64 [M]."""
        return self.ends[0]

    @property
    def receiver(self) -> np.ndarray:
        """Device ids, int64 [M]."""
        return self.ends[1]

    @property
    def nbytes(self) -> np.ndarray:
        """Float64 [M]."""
        return self.ends[2]


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """No communication: bytes written on the worst device (0 for a view)."""

    nbytes: float


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One kernel on every device: its operations in a dtype, and the bytes it reads and writes, on the worst device.

    Numbers may be arrays of one length, [n], of the same kernel at n sizes.
    """

    flops: np.ndarray | float
    dtype: str
    nbytes: np.ndarray | float
    kind: str = "streamed"  # its class, as ops name it: product, scores (attention), loss or streamed
    # Of a product of two operands: rows, columns, and what is summed over. Of attention: heads of all sequences,
    # queries, keys, widths of a key and of a value, what part of the keys a query sees, products of a pair (2, back 5).
    sides: tuple[np.ndarray | float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepPattern:
    """A step of several: what it does, who takes part in it, and which of the steps before it made what it reads."""

    pattern: Pattern
    devices: np.ndarray  # int64 [devices] ids that compute, copy, send or receive, ascending
    reads: tuple[int, ...] = ()  # numbers of earlier steps


@dataclass(frozen=True, slots=True, eq=False)
class InTurn:
    """Steps in program order, all of them `times` times; those that do not wait for each other overlap in a run."""

    times: int
    steps: tuple[StepPattern, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AtOnce:
    """Steps that run at once."""

    steps: tuple[StepPattern, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Kernels whose result goes out tile by tile, or whose operand comes so: the steps of the kernels, and of the move.

    `nbytes` are those of a device's result before the move, or of its operand once it has come, `whole` those of the
    sums of an all-reduce, else 0. `tiles` are those of a destination, 0 where whoever prices it chooses; in one shot
    addends go to all, and nothing is gathered. `addends` are the bytes of those of a sum as kernels send them, 0 where
    nothing is summed, `written` those of the kernels' result.
    """

    kernels: tuple[StepPattern, ...]
    move: StepPattern
    nbytes: int
    whole: int
    tiles: int = 0
    one_shot: bool = False
    kind: str = "product"  # of the kernels: product, vector (of a matrix and a thin one) or bags
    addends: int = 0
    written: int = 0


Pattern = Groups | Messages | Local | Work | InTurn | AtOnce | Overlap


def communicates(pattern: Pattern) -> bool:
    """Say whether anything goes from one device to another."""
    if isinstance(pattern, InTurn | AtOnce):
        return any(communicates(step.pattern) for step in pattern.steps)
    return isinstance(pattern, Groups | Messages | Overlap)


def computes(pattern: Pattern) -> bool:
    """Say whether it is kernels, and nothing else."""
    if isinstance(pattern, InTurn | AtOnce):
        return bool(pattern.steps) and all(computes(step.pattern) for step in pattern.steps)
    return isinstance(pattern, Work)


def taking_part(pattern: Pattern, devices: np.ndarray) -> np.ndarray:
    """Return the ids that take part in a step with this pattern whose op is on these devices, ascending.

    They are the members of its groups, the senders and receivers of its messages, or, where nothing is communicated,
    all devices.
    """
    match pattern:
        case Groups():
            ids = pattern.members.reshape(-1)
        case Messages():
            ids = pattern.totals.devices if pattern.totals else np.concatenate([pattern.sender, pattern.receiver])
        case InTurn() | AtOnce():
            ids = np.concatenate([devices[:0], *(step.devices for step in pattern.steps)])
        case Local() | Work() | Overlap():
            ids = devices
        case _:
            assert_never(pattern)
    found = np.zeros(1 + int(max(ids.max(initial=0), devices.max(initial=0))), dtype=bool)
    found[ids if ids.size else devices] = True
    return np.flatnonzero(found)
