"""`ActionLists`: the lists of a schedule as arrays, and what each of their actions waits for, which nobody else says.

A rank does its list in order. A forward takes what that of the stage before made, a backward what that of the stage
behind made; the last stage turns around by order alone. On one rank such a value is there at once. From rank to rank it
is on its way for the time of a message, which occupies no rank, unless sends and receives are placed: then these are
what waits, and a receive stands before what takes its value.

- `blocking`: both ends of a message wait for each other;
- `batched`: those that stand side by side in a list are posted at once, and done when each is;
- `buffered`: a send waits for nobody, and is done at once; a receive is done when its message is there.

A rank that has posted messages does nothing else until they are done. Who needs an edge asks here: the check and the
replay of written schedules, the orders that are sought, sweeps of many configurations, and jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import MESSAGES, SENDS, Action
from shardplan.strategy.schedules.action_graph import (
    FREE,
    PASSES,
    ActionEdges,
    ActionGraph,
    Ints,
    code,
    joint_code,
    levelled,
    message_code,
)  # fmt: skip
from shardplan.strategy.schedules.schedule import Schedule

MODES = ("blocking", "batched", "buffered")
F, I, W, B = range(4)  # noqa: E741
SENDING = 4  # the place in `CODED` from which on messages stand
OTHER = 8  # what moves or holds state: it waits for its rank alone
CODED = (*PASSES, *MESSAGES)
_PLACES = {kind: place for place, kind in enumerate(CODED)}
# By kind: which of six things an action makes (values forward and back, and messages), which it takes of the stage so
# many away (a message its other end), and whether that goes back.
_MAKES = np.array([0, 1, -1, 1, 2, 3, 4, 5, -1])
_TAKES = np.array([0, 1, -1, 1, 4, 5, 2, 3, -1])
_STEP = np.array([-1, 1, 0, 1, 1, -1, -1, 1, 0])
_BACK = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0])


@dataclass(frozen=True, slots=True, eq=False)
class ActionLists:
    """Actions by rank, in order: `rank`, `kind` (its place in `CODED`), `stage` and `microbatch`, int [actions].

    `owners` [stages] says the rank of a stage; stages form `copies` chains that hold the same chunks. A microbatch may
    be the number of its turn at the stage: only passes of neighbours with equal numbers belong together. `joint`
    [actions] says which run beside another one, a forward and a B in an overlap, where that has times of its own.
    """

    rank: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    owners: Ints
    copies: int
    ranks: int
    joint: Ints | None = None

    @staticmethod
    def of(
        rows: Iterable[Iterable[tuple[int, str, int | None]]], owners: Sequence[int] | Ints, copies: int = 1
    ) -> ActionLists:
        """Return the lists of stages, kinds and microbatches, a row for each rank."""
        found: list[tuple[int, int, int, int]] = []
        ranks = 0
        for row in rows:
            found += [(ranks, _PLACES.get(kind, OTHER), stage, k or 0) for stage, kind, k in row]
            ranks += 1
        rank, kind, stage, microbatch = np.array(found, dtype=np.int64).reshape(-1, 4).T
        return ActionLists(rank, kind, stage, microbatch, np.asarray(owners, dtype=np.int64), copies, ranks)

    @staticmethod
    def of_schedule(found: Schedule, together: bool = False) -> ActionLists:
        """Return the lists of a schedule, the parts of an overlap in turn, without idle slots.

        With `together` a forward and a B that overlap are `joint`.
        """
        made = ActionLists.of((leaves(row) for row in found.ranks), found.owners, found.copies)
        if not together:
            return made
        cells = (action for row in found.ranks for action in row if action is not None)
        joint = [action.is_pair for action in cells for _ in action.leaves]
        return replace(made, joint=np.array(joint, dtype=bool))

    @property
    def chunks(self) -> int:
        """How many stages a chain has."""
        return len(self.owners) // self.copies

    @property
    def starts(self) -> Ints:
        """The index of the first action of each rank, and the number of actions, int [ranks + 1]."""
        return np.searchsorted(self.rank, np.arange(self.ranks + 1))

    @property
    def computes(self) -> Ints:
        """Which actions are computations, bool [actions]."""
        return self.kind < SENDING

    @property
    def sends(self) -> Ints:
        """Which actions are sends, bool [actions]."""
        return (self.kind >= SENDING) & (self.kind < SENDING + len(SENDS))

    @property
    def talks(self) -> Ints:
        """Which actions are sends or receives, bool [actions]: none where messages are not placed."""
        return (self.kind >= SENDING) & (self.kind < OTHER)

    def action(self, at: int) -> Action:
        """Return the computation or message at an index."""
        return Action(int(self.stage[at]), CODED[self.kind[at]], int(self.microbatch[at]))

    def counts(self) -> tuple[Ints, Ints]:
        """How many forwards and how many backwards each rank does of each chunk, int [ranks, chunks] each."""
        return self._chunk_counts(self.kind == F), self._chunk_counts(np.isin(self.kind, (I, B)))

    def joint_counts(self) -> tuple[Ints, Ints]:
        """How many forwards and how many B of each chunk each rank runs beside another, int [ranks, chunks] each."""
        joint = np.zeros(len(self.kind), dtype=bool) if self.joint is None else self.joint
        return self._chunk_counts(joint & (self.kind == F)), self._chunk_counts(joint & (self.kind == B))

    def _chunk_counts(self, chosen: Ints) -> Ints:
        """How many of the chosen actions, bool [actions], each rank does of each chunk, int [ranks, chunks]."""
        found = np.zeros((self.ranks, self.chunks), dtype=np.int64)
        np.add.at(found, (self.rank[chosen], self.stage[chosen] % self.chunks), 1)
        return found

    def held_counts(self) -> list[Ints]:
        """By rank how many forwards wait for their B or W behind each action, in stages times microbatches."""
        steps = np.where(self.kind == F, 1, np.where(np.isin(self.kind, (B, W)), -1, 0))
        return [np.cumsum(part) for part in np.split(steps, self.starts[1:-1])]

    def in_flight(self) -> tuple[int, ...]:
        """The most forwards of each rank whose B or W is not done, in stages times microbatches."""
        return tuple(int(row.max(initial=0)) for row in self.held_counts())

    def sources(self) -> tuple[Ints, Ints]:
        """The action whose value each one takes, of a message its other end; and the code of the message between them.

        Int [actions] each: -1 and `FREE` where there is none. A value from another rank is taken with the message's
        code, or by its receive, where messages are placed.
        """
        n, chunks, placed = len(self.rank), self.chunks, self.talks.any()
        turns = np.full((6, len(self.owners), int(self.microbatch.max(initial=0)) + 1), -1)
        makes, takes, step = _MAKES[self.kind], _TAKES[self.kind], _STEP[self.kind]
        made = np.flatnonzero(makes >= 0)
        turns[makes[made], self.stage[made], self.microbatch[made]] = made
        chunk = self.stage % chunks
        taken = np.flatnonzero((takes >= 0) & (chunk + step >= 0) & (chunk + step < chunks))
        at = self.stage[taken] + step[taken]
        source, lag = np.full(n, -1), np.full(n, FREE)
        found = turns[takes[taken], at, self.microbatch[taken]]
        far = self.owners[at] != self.owners[self.stage[taken]]
        received = far & self.computes[taken] if placed else np.zeros(len(taken), dtype=bool)
        source[taken] = np.where(received, -1, found)
        low = np.minimum(chunk[taken], chunk[taken] + step[taken])
        lag[taken] = np.where(far & ~received, message_code(_BACK[self.kind[taken]], low, chunks), FREE)
        return source, lag

    def edges(self, messages: str = "buffered", whole: Ints | None = None) -> ActionEdges:
        """Return what each action waits for, with messages sent as `messages` says.

        `whole` [actions], the last part of the overlap that each action is of, has the parts begin together. Raises
        `ScheduleError` for a message without another end.
        """
        n, (second, lag) = len(self.rank), self.sources()
        cost = np.where(self.computes, code(self.kind, self.stage % self.chunks, self.chunks), FREE)
        if self.joint is not None:
            both = joint_code((self.kind == B).astype(np.int64), self.stage % self.chunks, self.chunks)
            cost = np.where(self.joint, both, cost)
        before = np.arange(-1, n - 1)
        opening = np.ones(n, dtype=bool)
        opening[1:] = self.rank[1:] != self.rank[:-1]
        before[opening] = -1
        if whole is not None:
            inside = (second >= 0) & (whole[second] == whole)
            second = np.where(inside | (second < 0), -1, whole[second])
        talks, sends = self.talks, self.sends
        if not talks.any():
            return ActionEdges(before, second, lag, cost)
        if (lone := np.flatnonzero(talks & (second < 0) & ~(sends & (messages == "buffered")))).size:
            raise ScheduleError(f"{self.action(int(lone[0]))} has no other end; see check")
        joined = np.zeros(n, dtype=bool)  # posted with the message before it
        if messages == "batched":
            joined[1:] = talks[1:] & talks[:-1] & ~opening[1:]
        # Behind the second message of a batch, and each further one, a node that waits for all so far.
        more = np.flatnonzero(joined)
        done = np.arange(n)
        done[more] = n + np.arange(len(more))
        before = np.where(before < 0, -1, done[before])
        posted = before[np.maximum.accumulate(np.where(joined, 0, np.arange(n)))]
        if messages == "buffered":
            second = np.where(sends, -1, second)
            lag = np.where(sends, FREE, lag)
        else:
            second, cost = np.where(talks, posted[second], second), np.where(talks, lag, cost)
            lag = np.where(talks, FREE, lag)
        free = np.full(len(more), FREE)
        first, second = np.concatenate([posted, done[more - 1]]), np.concatenate([second, more])
        return ActionEdges(first, second, np.concatenate([lag, free]), np.concatenate([cost, free]))

    def graph(self, messages: str = "buffered", late: Ints | None = None) -> ActionGraph:
        """Return the graph of the lists; `late` [actions] says which ones a sweep may leave for later.

        Raises `ScheduleError` where ranks wait for each other in a circle.
        """
        passes = np.flatnonzero(self.computes)
        bounds = np.searchsorted(self.rank[passes], np.arange(self.ranks + 1))
        ends = np.array([bounds[:-1], bounds[1:] - 1])
        heads, tails = np.where(bounds[:-1] < bounds[1:], np.append(passes, -1)[ends], -1)
        return levelled(self.edges(messages), heads, tails, late)

    def turns(self) -> list[int]:
        """Return ranks in an order in which each can do the next action of its list.

        Raises `ScheduleError` where they wait for each other in a circle.
        """
        found = self.edges().sequence()
        if len(found) < len(self.rank):
            raise ScheduleError("the ranks of a schedule wait for each other in a circle; see check")
        return self.rank[found].tolist()


def leaves(row: Sequence[Action | None]) -> Iterable[tuple[int, str, int | None]]:
    """Yield stage, kind and microbatch of the actions of a list, the parts of an overlap in turn."""
    return ((a.stage, a.kind, a.microbatch) for action in row if action is not None for a in action.leaves)
