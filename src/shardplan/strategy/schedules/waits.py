"""Whether the ranks of a schedule ever wait for each other in a circle.

Messages between two ranks in one direction meet in order, the k-th send the k-th receive. Then the lists are run
without time (`run`): when nothing moves, each rank that is not done stands at a slot that waits for one of a rank that
stands before it, and following these gives the circle.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from shardplan.strategy.schedules.action import RECEIVES, SENDS, Action
from shardplan.strategy.schedules.refusal import CounterExample, Place, action_place
from shardplan.strategy.schedules.run import ListRun
from shardplan.strategy.schedules.schedule import Schedule


def waits(found: Schedule, messages: str) -> CounterExample | None:
    """Return the pair that does not meet or the circle of a schedule that is complete and in order, or None."""
    return _unmet_pair(found) or _circle(ListRun(found, messages))


def _unmet_pair(found: Schedule) -> CounterExample | None:
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
                text = " meets ".join(action_place(place, action) for place, action in ends)
                says = f"message {k} from rank {pair[0]} to rank {pair[1]}: {text}"
                return CounterExample("pair", says, tuple(place for place, _ in reversed(ends)))
    return None


def _circle(run: ListRun) -> CounterExample | None:
    stuck = next((rank for rank in range(len(run.rows)) if run.stands(rank)), None)
    if stuck is None:
        return None
    seen: dict[int, tuple[Place, Action, Action]] = {}
    while stuck not in seen:
        step = run.awaited_action(stuck)
        assert step is not None, "a rank that stands waits for something"
        seen[stuck] = step
        stuck = run.placed[step[2]][0][0]
    circle = [seen[rank] for rank in list(seen)[list(seen).index(stuck) :]]
    text = "; ".join(
        f"{action_place(place, action)} waits for {action_place(run.placed[other][0], other)}"
        for place, action, other in circle
    )
    return CounterExample("wait", f"a circle: {text}", tuple(place for place, _, _ in circle))
