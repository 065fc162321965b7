"""The graph of lists in which sends and receives are placed: a rank does them in order, and they hold it.

As `strategy.schedules.run` has them: `blocking`, both ends of a message wait for each other; `batched`, those that
stand side by side are posted together and done when each is; `buffered`, a send is done at once, a receive when its
message is there. A rank that has posted messages does nothing else until they are done.
"""

from __future__ import annotations

import numpy as np

from shardplan.simulation.sweep.graph import FREE, KINDS, ActionGraph, code, levelled, message_code
from shardplan.strategy.schedules import Action, Schedule
from shardplan.strategy.schedules.action import RECEIVES, SENDS
from shardplan.strategy.schedules.run import post_groups


def graph_of_placed(found: Schedule, messages: str) -> ActionGraph:
    """Return the graph of a schedule with messages, sent as `messages` says."""
    return _Places(found, messages).graph()


class _Places:
    """Nodes as they are met along the lists: a message is one, known by its send, whichever end is met first."""

    def __init__(self, found: Schedule, messages: str) -> None:
        self.found, self.buffered = found, messages == "buffered"
        self.chunks = found.stages // found.copies
        self.nodes: list[list[int]] = []  # first, second, lag, cost
        self.message: dict[Action, int] = {}
        self.actions: list[tuple[int, Action, int]] = []
        self.ends: list[list[int]] = []  # first and last node of a rank
        for rank, row in enumerate(found.ranks):
            own: list[int] = []
            clock = -1
            for group in post_groups(row, messages == "batched"):
                clock = self._done(rank, [action for _, action in group], clock, own)
            self.ends.append(own[:1] + own[-1:] if own else [-1, -1])

    def graph(self) -> ActionGraph:
        """The graph, in levels."""
        first, second, lag, cost = np.array(self.nodes, dtype=np.int64).reshape(-1, 4).T
        heads, tails = np.array(self.ends, dtype=np.int64).T
        return levelled(first, second, lag, cost, heads, tails, None, tuple(self.actions))

    def _node(self, first: int, second: int, cost: int) -> int:
        self.nodes.append([first, second, FREE, cost])
        return len(self.nodes) - 1

    def _done(self, rank: int, group: list[Action], clock: int, own: list[int]) -> int:
        """The node at whose end a rank is done with a group of slots; `own` are those of its computations."""
        posted = clock
        for action in (leaf for whole in group for leaf in whole.leaves):
            if action.kind in KINDS:
                cost = code(KINDS.index(action.kind), action.stage % self.chunks, self.chunks)
                clock = self._node(clock, -1, cost)
                self.actions.append((rank, action, clock))
                own.append(clock)
            elif action.kind in SENDS or action.kind in RECEIVES:
                clock = self._message(action, posted, clock)
        return clock

    def _message(self, action: Action, posted: int, clock: int) -> int:
        sends = action.kind in SENDS
        sent = action if sends else action.matching
        if sent not in self.message:
            back = int(sent.kind == "SEND_B")
            cost = message_code(back, sent.stage % self.chunks - back, self.chunks)
            self.message[sent] = self._node(-1, -1, cost)
        event = self.message[sent]
        if sends or not self.buffered:
            self.nodes[event][0 if sends else 1] = posted
        return clock if sends and self.buffered else self._node(clock, event, FREE)
