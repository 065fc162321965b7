"""Whether the ranks of a schedule ever wait for each other in a circle.

A list is run in order. A computation waits for what it takes; a receive for its send, and under blocking messages a
send for its receive. Messages between two ranks in one direction meet in order, the k-th send the k-th receive.
Messages that are batched are posted together where they stand side by side, and done when each has met.

The schedule is run without time: when nothing moves, each rank that is not done stands at a slot that waits for one of
a rank that stands before it, and following these gives the circle.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from shardplan.strategy.schedules.action import RECEIVES, SENDS, Action
from shardplan.strategy.schedules.refusal import Place, Refusal, at, spots
from shardplan.strategy.schedules.schedule import Schedule

MODES = ("blocking", "batched", "buffered")


def waits(found: Schedule, messages: str) -> Refusal | None:
    """Return the pair that does not meet or the circle of a schedule that is complete and in order, or None."""
    return _unmet_pair(found) or _circle(found, messages)


def _unmet_pair(found: Schedule) -> Refusal | None:
    sends: dict[tuple[int, int], list[tuple[Place, Action]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[Place, Action]]] = defaultdict(list)
    for rank, row in enumerate(found.ranks):
        for slot, action in enumerate(row):
            if action is not None and action.kind in SENDS:
                sends[rank, found.owners[action.peer]].append(((rank, slot), action))
            elif action is not None and action.kind in RECEIVES:
                receives[found.owners[action.peer], rank].append(((rank, slot), action))
    for pair in sorted(sends.keys() | receives.keys()):
        for k, (sent, received) in enumerate(zip_longest(sends[pair], receives[pair])):
            if sent is None or received is None or sent[1].matching != received[1]:
                ends: list[tuple[Place, Action]] = [end for end in (sent, received) if end is not None]
                text = " meets ".join(at(place, action) for place, action in ends)
                says = f"message {k} from rank {pair[0]} to rank {pair[1]}: {text}"
                return Refusal("pair", says, tuple(place for place, _ in reversed(ends)))
    return None


def _grouped(row: tuple[Action | None, ...], batched: bool) -> list[list[tuple[int, Action]]]:
    """The slots of a rank, those of messages that are posted together in one."""
    groups: list[list[tuple[int, Action]]] = []
    talking = False
    for slot, action in enumerate(row):
        if action is not None:
            talks = action.kind in SENDS or action.kind in RECEIVES
            if batched and talks and talking:
                groups[-1].append((slot, action))
            else:
                groups.append([(slot, action)])
            talking = talks
    return groups


class _Run:
    """How far each rank is."""

    def __init__(self, found: Schedule, messages: str) -> None:
        self.found, self.mode, self.alone = found, messages, not found.has_messages
        self.rows = [_grouped(row, messages == "batched") for row in found.ranks]
        self.heads = [0] * len(self.rows)
        self.posted: set[Action] = set()
        self.done: set[Action] = set()
        self.placed = spots(found)

    def post(self, rank: int) -> None:
        self.posted.update(action for _, action in self.rows[rank][self.heads[rank]])

    def wanted(self, rank: int) -> tuple[Place, Action, Action] | None:
        """What the slot at which a rank stands waits for: its place, its action, and the other action."""
        earlier: set[Action] = set()
        for slot, action in self.rows[rank][self.heads[rank]]:
            for leaf in action.leaves:
                for other in self.needed(leaf):
                    ready = self.posted if other.kind in SENDS or other.kind in RECEIVES else self.done
                    if other not in ready and other not in earlier:
                        return (rank, slot), leaf, other
                earlier.add(leaf)
        return None

    def needed(self, action: Action) -> list[Action]:
        """The messages that must have been posted and the computations that must be done for an action to be done.

        Computations of other ranks where no messages are placed; with them, the receive stands before in the list.
        """
        if action.kind in RECEIVES or (action.kind in SENDS and self.mode != "buffered"):
            return [action.matching]
        stage = self.found.before(action.stage) if action.kind == "F" else self.found.after(action.stage)
        if stage is None or action.kind not in ("F", "B", "I"):
            return []
        if not self.alone and self.found.owners[stage] != self.found.owners[action.stage]:
            return []
        makers = (Action(stage, kind, action.microbatch) for kind in ("F" if action.kind == "F" else "BI"))
        return [maker for maker in makers if maker in self.placed]

    def stands(self, rank: int) -> bool:
        return self.heads[rank] < len(self.rows[rank])


def _circle(found: Schedule, messages: str) -> Refusal | None:
    run = _Run(found, messages)
    for rank in range(len(run.rows)):
        if run.stands(rank):
            run.post(rank)
    moved = True
    while moved:
        moved = False
        for rank in range(len(run.rows)):
            while run.stands(rank) and run.wanted(rank) is None:
                run.done.update(leaf for _, action in run.rows[rank][run.heads[rank]] for leaf in action.leaves)
                run.heads[rank] += 1
                moved = True
                if run.stands(rank):
                    run.post(rank)
    stuck = next((rank for rank in range(len(run.rows)) if run.stands(rank)), None)
    if stuck is None:
        return None
    seen: dict[int, tuple[Place, Action, Action]] = {}
    while stuck not in seen:
        step = run.wanted(stuck)
        assert step is not None, "a rank that stands waits for something"
        seen[stuck] = step
        stuck = run.placed[step[2]][0][0]
    circle = [seen[rank] for rank in list(seen)[list(seen).index(stuck) :]]
    text = "; ".join(
        f"{at(place, action)} waits for {at(run.placed[other][0], other)}" for place, action, other in circle
    )
    return Refusal("wait", f"a circle: {text}", tuple(place for place, _, _ in circle))
