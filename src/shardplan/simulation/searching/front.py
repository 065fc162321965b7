"""The best few, and the front: points that nothing found is better than in seconds and in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Floats = np.ndarray
Ints = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Strategies that were priced: their places in the space, seconds and bytes, [n] each."""

    index: Ints
    seconds: Floats
    nbytes: Floats

    @staticmethod
    def none() -> Points:
        """Return no points."""
        return Points(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.index)

    def at(self, where: Ints) -> Points:
        """Return some of them."""
        return Points(self.index[where], self.seconds[where], self.nbytes[where])

    def and_(self, other: Points) -> Points:
        """Return these and others."""
        pairs = zip((self.index, self.seconds, self.nbytes), (other.index, other.seconds, other.nbytes), strict=True)
        return Points(*(np.concatenate(pair) for pair in pairs))

    def best(self, most: int) -> Points:
        """Return those of least seconds, then bytes, then of the first places."""
        return self.at(np.lexsort((self.index, self.nbytes, self.seconds))[:most])

    def front(self) -> Points:
        """Return those that no other equals or betters in both, in order of seconds; of equal ones the first place."""
        order = np.lexsort((self.index, self.nbytes, self.seconds))
        sorted_ = self.at(order)
        before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_.nbytes)[:-1]]) if len(self) else self.nbytes
        return sorted_.at(np.flatnonzero(sorted_.nbytes < before))

    def better(self, seconds: Floats, nbytes: Floats) -> np.ndarray:
        """Say for seconds and bytes whether a point of this front is quicker and has no more bytes, bool [n]."""
        if not len(self):
            return np.zeros(len(seconds), dtype=bool)
        # The front is in order of seconds, and its bytes fall: the last that is quicker has the fewest.
        last = np.searchsorted(self.seconds, seconds, side="left") - 1
        return (last >= 0) & (self.nbytes[np.maximum(last, 0)] <= nbytes)
