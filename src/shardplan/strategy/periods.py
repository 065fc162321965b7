"""Where a list of steps may repeat itself: periods, and where a cut between two periods leaves least to carry.

Steps are compared by tokens, numbers that are equal where op and types are. That is a hint alone: `repeats` verifies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardplan.core.program import Program

_LAGS = 16  # how far apart, among the steps of one token, two of them are looked at
_PERIODS = 32  # that are tried
_CUTS = 4  # that are tried of a period
Ints = np.ndarray


class Guess(NamedTuple):
    """Steps from `start` on that may be `times` bodies of `period` steps."""

    start: int
    period: int
    times: int

    @property
    def saved_steps(self) -> int:
        """How many steps a repeat is shorter."""
        return (self.times - 1) * self.period


class Flat(NamedTuple):
    """A program's steps as numbers: tokens, and for each operand that a step makes the maker and the reader."""

    tokens: Ints
    makers: Ints
    readers: Ints

    @staticmethod
    def of(program: Program) -> Flat:
        """Number the steps."""
        known: dict[object, int] = {}
        made = {r: k for k, step in enumerate(program.steps) for r in step.results}
        tokens = [
            known.setdefault((s.op, tuple(program.types[o] for o in s.operands), s.stopped), len(known))
            for s in program.steps
        ]
        edges = [(made[o], k) for k, s in enumerate(program.steps) for o in s.operands if o in made]
        ends = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
        return Flat(np.asarray(tokens, dtype=np.int64), ends[:, 0], ends[:, 1])

    def guesses(self, lo: int, hi: int) -> list[Guess]:
        """Return what steps `lo` to before `hi` may be, what saves most first; of a period its best cuts."""
        found = [g for p in _periods(self.tokens[lo:hi]) for g in self._of_period(lo, hi, p)]
        return sorted(found, key=lambda g: -g.saved_steps)  # stable: the better cut first

    def _of_period(self, lo: int, hi: int, p: int) -> Iterator[Guess]:
        same = self.tokens[lo : hi - p] == self.tokens[lo + p : hi]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        stretches = [(lo + int(a), lo + int(b) + p) for a, b in edges.reshape(-1, 2) if b - a >= p]
        if not stretches:
            return
        carried, uses = self._crossing(p)
        for a, b in stretches:
            starts = range(a, min(a + p, b - 2 * p + 1))
            # A residual stream is read more than once behind a cut: that tells it from what a norm hands on.
            order = sorted(starts, key=lambda s: (carried[s], uses[s] < 2, -((b - s) // p), s))
            yield from (Guess(s, p, (b - s) // p) for s in order[:_CUTS])

    def _crossing(self, p: int) -> tuple[Ints, Ints]:
        """For bodies that would begin at each step: how many values, and uses, one hands on to the next."""
        n = len(self.tokens)
        # Made in [s, s + p), and read in [s + p, s + 2p).
        first = np.maximum(self.makers - p, self.readers - 2 * p) + 1
        last = np.minimum(self.makers, self.readers - p)
        some = (first <= last) & (last >= 0)
        makers, first, last = self.makers[some], np.maximum(first[some], 0), last[some]
        low, high = np.full(n, n), np.full(n, -1)
        np.minimum.at(low, makers, first)
        np.maximum.at(high, makers, last)
        made = np.flatnonzero(high >= 0)
        return _cover_counts(n, low[made], high[made]), _cover_counts(n, first, last)


def _cover_counts(n: int, first: Ints, last: Ints) -> Ints:
    """How many spans, both ends included, each number is in."""
    found = np.zeros(n + 2, dtype=np.int64)
    np.add.at(found, first, 1)
    np.add.at(found, last + 1, -1)
    return np.cumsum(found)


def _periods(tokens: Ints) -> list[int]:
    """Distances at which equal tokens stand often, those that would save most first."""
    order = np.argsort(tokens, kind="stable")
    votes = np.zeros(len(tokens) + 1, dtype=np.int64)
    for lag in range(1, min(_LAGS, len(tokens) - 1) + 1):
        same = tokens[order[lag:]] == tokens[order[:-lag]]
        np.add.at(votes, (order[lag:] - order[:-lag])[same], 1)
    weight = votes * np.arange(len(votes))
    best = np.argsort(-weight, kind="stable")[:_PERIODS]
    return [int(p) for p in best if votes[p]]
