"""The communication of one op, all devices at once, as `hardware` prices it.

Devices are ids. A `Groups` is a collective whose algorithm (ring, tree, ...) the cost chooses; a `Messages` is explicit
point-to-point traffic; a `Local` only copies; an `InTurn` is what the steps of a body do, again and again, and an
`AtOnce` what moves do that are posted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A collective over disjoint groups, all running at once."""

    kind: str  # all_gather | all_reduce | reduce_scatter | all_to_all | reduce | broadcast
    members: np.ndarray  # int64 [G, k] device ids in member order
    nbytes: np.ndarray  # float64 [G] bytes a member holds before the op (the largest member)
    chunks: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Point-to-point messages, all at once; sender and receiver always differ."""

    sender: np.ndarray  # int64 [M] device ids
    receiver: np.ndarray  # int64 [M] device ids
    nbytes: np.ndarray  # float64 [M]
    chunks: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """No communication: bytes written on the worst device (0 for a view)."""

    nbytes: float


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One kernel on every device: its operations in a dtype, and the bytes it reads and writes, on the worst device."""

    flops: float
    dtype: str
    nbytes: float


@dataclass(frozen=True, slots=True, eq=False)
class InTurn:
    """Patterns one after another, all of them `times` times."""

    times: int
    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AtOnce:
    """Patterns that run at once."""

    parts: tuple[Pattern, ...]


Pattern = Groups | Messages | Local | Work | InTurn | AtOnce


def communicates(pattern: Pattern) -> bool:
    """Say whether anything goes from one device to another."""
    if isinstance(pattern, InTurn | AtOnce):
        return any(map(communicates, pattern.parts))
    return isinstance(pattern, Groups | Messages)


def in_turn(times: int, parts: Sequence[Pattern]) -> Pattern:
    """Return patterns one after another, all of them `times` times; where all are copies, as one."""
    copied = [part.nbytes for part in parts if isinstance(part, Local)]
    if not times or len(copied) == len(parts):
        return Local(times * sum(copied))
    return parts[0] if times == len(parts) == 1 else InTurn(times, tuple(parts))
