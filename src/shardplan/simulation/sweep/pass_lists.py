"""The graph of lists of computations alone: order on a rank, values from chunk to chunk, messages that hold nobody.

`PassLists` are the lists as arrays. A forward waits for that of the chunk before, a backward for that of the chunk
behind; the last chunk turns around by order alone. From rank to rank a value is on its way for the time of a message,
which occupies no rank; on one rank it is there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.simulation.sweep.graph import FREE, KINDS, ActionGraph, code, levelled, message_code
from shardplan.strategy.schedules import Action

F, I, W, B = range(4)  # noqa: E741


@dataclass(frozen=True, slots=True, eq=False)
class PassLists:
    """Computations by rank, in order: `rank`, `kind` (place in `KINDS`), `stage` and `microbatch`, int [passes].

    `owners` [stages] says the rank of a stage; stages form `copies` chains that hold the same chunks. A microbatch may
    be the number of its turn at the stage: only passes of neighbours with equal numbers belong together.
    """

    rank: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    owners: np.ndarray
    copies: int
    ranks: int

    @property
    def chunks(self) -> int:
        """How many stages a chain has."""
        return len(self.owners) // self.copies

    @property
    def starts(self) -> np.ndarray:
        """The index of the first pass of each rank, and the number of passes, int [ranks + 1]."""
        return np.searchsorted(self.rank, np.arange(self.ranks + 1))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How many forwards and how many backwards each rank does of each chunk, int [ranks, chunks] each."""
        found = np.zeros((2, self.ranks, self.chunks), dtype=np.int64)
        for back in (0, 1):
            chosen = np.isin(self.kind, (I, B)) if back else self.kind == F
            np.add.at(found[back], (self.rank[chosen], self.stage[chosen] % self.chunks), 1)
        return found[0], found[1]

    def in_flight(self) -> tuple[int, ...]:
        """The most forwards of each rank whose B or W is not done, in stages times microbatches."""
        steps = np.where(self.kind == F, 1, np.where(self.kind == I, 0, -1))
        return tuple(int(np.cumsum(part).max(initial=0)) for part in np.split(steps, self.starts[1:-1]))

    def sources(self) -> tuple[np.ndarray, np.ndarray]:
        """The pass whose value each pass takes, -1 for none, and the code of its message, int [passes] each."""
        stages, n = len(self.owners), len(self.rank)
        turns = np.full((2, stages, int(self.microbatch.max(initial=0)) + 1), -1)
        ways = ((0, self.kind == F, -1), (1, np.isin(self.kind, (I, B)), 1))
        source, lag = np.full(n, -1), np.full(n, FREE)
        for back, chosen, _ in ways:
            turns[back, self.stage[chosen], self.microbatch[chosen]] = np.flatnonzero(chosen)
        for back, chosen, step in ways:
            chunk = self.stage % self.chunks + step
            taken = np.flatnonzero(chosen & (chunk >= 0) & (chunk < self.chunks))
            at = self.stage[taken] + step
            source[taken] = turns[back, at, self.microbatch[taken]]
            far = self.owners[at] != self.owners[self.stage[taken]]
            lag[taken] = np.where(far, message_code(back, chunk[taken] - back, self.chunks), FREE)
        return source, lag

    def graph(self, late: np.ndarray | None = None, actions: Sequence[tuple[int, Action]] = ()) -> ActionGraph:
        """The graph of the lists; `late` [passes] says which passes a sweep may leave for later."""
        n, starts = len(self.rank), self.starts
        before = np.arange(n) - 1
        empty = starts[:-1] == starts[1:]
        before[starts[:-1][~empty]] = -1
        source, lag = self.sources()
        cost = code(self.kind, self.stage % self.chunks, self.chunks)
        told = tuple((rank, action, node) for node, (rank, action) in enumerate(actions))
        return levelled(
            before, source, lag, cost, np.where(empty, -1, starts[:-1]), np.where(empty, -1, starts[1:] - 1), late, told
        )


def of_actions(ranks: Sequence[Sequence[Action | None]], owners: Sequence[int], copies: int) -> PassLists:
    """Return the computations of lists of actions as arrays, the parts of an overlap in turn."""
    places = {kind: place for place, kind in enumerate(KINDS)}
    found = [
        (rank, places[leaf.kind], leaf.stage, leaf.microbatch)
        for rank, row in enumerate(ranks)
        for action in row
        if action is not None
        for leaf in action.leaves
        if leaf.kind in places
    ]
    rank, kind, stage, microbatch = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return PassLists(rank, kind, stage, microbatch, np.asarray(owners, dtype=np.int64), copies, len(ranks))
