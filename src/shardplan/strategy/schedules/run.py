"""A run of a schedule's lists, in order, with or without time: who waits for whom, and when each action ends.

A computation waits for what it takes; a receive for its send, and under blocking messages a send for its receive.
Messages that are batched are posted together where they stand side by side, and done when each is. A rank that has
posted messages does nothing else until they are done, but for a buffered send, which is done at once.
"""

from __future__ import annotations

from collections.abc import Callable

from shardplan.strategy.schedules.action import RECEIVES, SENDS, Action
from shardplan.strategy.schedules.refusal import Place, spots
from shardplan.strategy.schedules.schedule import Schedule

MODES = ("blocking", "batched", "buffered")
Cost = Callable[[Action], float]
MESSAGES = (*SENDS, *RECEIVES)


def post_groups(row: tuple[Action | None, ...], batched: bool) -> list[list[tuple[int, Action]]]:
    """The slots of a rank, those of messages that are posted together in one."""
    groups: list[list[tuple[int, Action]]] = []
    talking = False
    for slot, action in enumerate(row):
        if action is not None:
            talks = action.kind in MESSAGES
            if batched and talks and talking:
                groups[-1].append((slot, action))
            else:
                groups.append([(slot, action)])
            talking = talks
    return groups


class ListRun:
    """How far each rank came: `spans` are the slots it did, with when they were begun and done.

    `cost` is what an action takes, `message` what a message takes from when both ends are posted, or, buffered, its
    send; without a schedule's own messages, it is what a value needs to the next rank. The parts of an overlap run in
    turn, unless `together` says what they take from when all of them can begin.
    """

    def __init__(
        self,
        found: Schedule,
        messages: str,
        cost: Cost = lambda action: 0,
        message: float = 0,
        together: Cost | None = None,
    ) -> None:
        self.found, self.mode, self.cost, self.message, self.together = found, messages, cost, message, together
        self.alone = not any(a is not None and a.kind in MESSAGES for row in found.ranks for a in row)
        self.rows = [post_groups(row, messages == "batched") for row in found.ranks]
        self.heads, self.clocks = [0] * len(self.rows), [message * 0] * len(self.rows)
        self.posted: dict[Action, float] = {}
        self.done: dict[Action, float] = {}
        self.spans: list[list[tuple[int, float, float]]] = [[] for _ in self.rows]
        self.placed = spots(found)
        for rank in range(len(self.rows)):
            self._post(rank)
        while sum(self._advance(rank) for rank in range(len(self.rows))):
            pass

    def stands(self, rank: int) -> bool:
        """Whether a rank is not done."""
        return self.heads[rank] < len(self.rows[rank])

    def awaited_action(self, rank: int) -> tuple[Place, Action, Action] | None:
        """What the slot at which a rank stands waits for: its place, its action, and the other action."""
        earlier: set[Action] = set()
        for slot, action in self.rows[rank][self.heads[rank]]:
            for leaf in action.leaves:
                for other in self.prerequisites(leaf):
                    ready = self.posted if other.kind in MESSAGES else self.done
                    if other not in ready and other not in earlier:
                        return (rank, slot), leaf, other
                earlier.add(leaf)
        return None

    def prerequisites(self, action: Action) -> list[Action]:
        """The messages that must have been posted and the computations that must be done for an action to be done.

        Computations of other ranks where no messages are placed; with them, the receive stands before in the list.
        """
        if action.kind in RECEIVES or (action.kind in SENDS and self.mode != "buffered"):
            return [action.matching]
        stage = self.found.stage_before(action.stage) if action.kind == "F" else self.found.stage_after(action.stage)
        if stage is None or action.kind not in ("F", "B", "I"):
            return []
        if not self.alone and self.found.owners[stage] != self.found.owners[action.stage]:
            return []
        makers = (Action(stage, kind, action.microbatch) for kind in ("F" if action.kind == "F" else "BI"))
        return [maker for maker in makers if maker in self.placed]

    def _post(self, rank: int) -> None:
        if self.stands(rank):
            for _, action in self.rows[rank][self.heads[rank]]:
                self.posted[action] = self.clocks[rank]

    def _advance(self, rank: int) -> int:
        """Do what a rank can do; return how many slots that was."""
        count = 0
        while self.stands(rank) and self.awaited_action(rank) is None:
            group = self.rows[rank][self.heads[rank]]
            for slot, action in group:
                start, end = self._span(rank, action)
                self.spans[rank].append((slot, start, end))
                self.clocks[rank] = max(self.clocks[rank], end)
            count += len(group)
            self.heads[rank] += 1
            self._post(rank)
        return count

    def _span(self, rank: int, action: Action) -> tuple[float, float]:
        """When a slot that can be done is begun and done."""
        clock = self.clocks[rank]
        if action.kind in MESSAGES:
            if self.mode == "buffered":
                sent = clock if action.kind in SENDS else self.posted[action.matching] + self.message
                return clock, max(clock, sent)
            # Those of a group are on their way at once: each from when both of its ends are posted.
            begun = self.posted[action]
            return begun, max([begun, *(self.posted[other] for other in self.prerequisites(action))]) + self.message
        if self.together is not None and action.parts:
            start = max(self._ready(leaf, action, clock) for leaf in action.leaves)
            self.done.update(dict.fromkeys(action.leaves, start + self.together(action)))
            return start, start + self.together(action)
        begin = self._ready(action.leaves[0], action, clock)
        for leaf in action.leaves:
            clock = self._ready(leaf, action, clock) + self.cost(leaf)
            self.done[leaf] = clock
        return begin, clock

    def _ready(self, leaf: Action, whole: Action, clock: float) -> float:
        """When a computation has what it takes."""
        for other in self.prerequisites(leaf):
            if self.together is None or other not in whole.leaves:
                far = self.found.owners[other.stage] != self.found.owners[leaf.stage]
                clock = max(clock, self.done[other] + (self.message if far else 0))
        return clock
