"""The communication of one op, all devices at once, as `hardware` prices it.

Devices are ids. A `Groups` is a collective whose algorithm (ring, tree, ...) the cost chooses; a `Messages` is explicit
point-to-point traffic; a `Local` only copies.
"""

from __future__ import annotations

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


Pattern = Groups | Messages | Local
