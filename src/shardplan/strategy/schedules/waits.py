"""Whether the ranks of a schedule ever wait for each other in a circle.

Messages between two ranks in one direction meet in order, the k-th send the k-th receive. Where the graph of the
actions has no level for some, each rank that is not done stands at one that waits for one of a rank that stands before
it, and following these gives the circle.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from shardplan.strategy.schedules.action import RECEIVES, SENDS, Action
from shardplan.strategy.schedules.action_lists import ActionLists
from shardplan.strategy.schedules.refusal import CounterExample, Place, action_place
from shardplan.strategy.schedules.schedule import Schedule


def waits(found: Schedule, messages: str) -> CounterExample | None:
    """Return the pair that does not meet or the circle of a schedule that is complete and in order, or None."""
    return _unmet_pair(found) or _circle(found, messages)


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


def _circle(found: Schedule, messages: str) -> CounterExample | None:
    lists = ActionLists.of_schedule(found)
    stands = sorted({*range(len(lists.rank))}.difference(lists.edges(messages).sequence()), reverse=True)
    if not stands:
        return None
    source, _ = lists.sources()
    at = {int(lists.rank[k]): k for k in stands}  # the first of each rank
    seen: list[int] = []
    stuck = min(at)
    while stuck not in seen:
        seen.append(stuck)
        stuck = int(lists.rank[source[at[stuck]]])
    places = [(rank, slot) for rank, row in enumerate(found.ranks) for slot, a in enumerate(row) if a for _ in a.leaves]
    circle = [at[rank] for rank in seen[seen.index(stuck) :]]
    ends = ([action_place(places[k], lists.action(k)) for k in (each, source[each])] for each in circle)
    text = "; ".join(" waits for ".join(pair) for pair in ends)
    return CounterExample("wait", f"a circle: {text}", tuple(places[k] for k in circle))
