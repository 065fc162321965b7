"""Where sends and receives stand in the lists: placed where their time is, not as early as may be.

Point-to-point messages run in order, and a receive that is posted blocks its rank until the message has come (PyTorch
issues 172668 and 188833: torch's default lowering posts a receive where its sender stands in an order without times,
and computations that were ready wait behind it). Here each message is an event of the replay without such waits: a send
stands where its value is made, a receive where it arrives, in time, so that no computation that begins before waits for
it and it is there when it is wanted. Where ranks whose sends wait for their receives would then wait in a circle, a
receive moves ahead to the time of its send: were all there, the order of time would show that there is no circle. This
is repeated on the replay of what was placed, and the best is kept.
"""

from __future__ import annotations

import math
from collections.abc import Set

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import COMPUTE, MESSAGES, RECEIVES, SENDS, STATE, Action
from shardplan.strategy.schedules.check import broken_law, check, crossings
from shardplan.strategy.schedules.refusal import places_by_action
from shardplan.strategy.schedules.replay import Cost, Replayed, replay
from shardplan.strategy.schedules.schedule import Schedule

ROUNDS = 4  # of placing by the times of what was placed
_Row = list[Action]


def place_messages(
    found: Schedule, cost: Cost, message: float = 0, messages: str = "buffered", sharded: int = 3
) -> Schedule:
    """Return a schedule with its messages, as torch's format `compute_comms` has it; those it has are placed anew.

    `cost` gives what a computation takes, more than 0, and `message` what a message takes; `messages` how they are sent
    where it runs, as in `replay`: whatever that is, the result is free of deadlock under blocking messages. Gradients
    are reduced behind the last backward of each stage; at most `sharded` stages of a rank are unsharded at once, as
    torch does by default.

    >>> from shardplan.strategy.schedules import Times, schedule
    >>> print(place_messages(schedule("gpipe", 2, 1), Times(), sharded=0))
    schedule gpipe, 1 microbatches
    0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD
    1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD
    """
    bare = check(found.filter_actions(lambda a: a.kind not in (*MESSAGES, *STATE)))
    computed = (leaf for row in bare.ranks for a in row if a is not None for leaf in a.leaves if leaf.kind in COMPUTE)
    if any(cost(leaf) <= 0 for leaf in computed):
        raise ScheduleError("placed: a computation takes no time; legal are times above 0")

    def together(action: Action) -> float:
        return sum(map(cost, action.leaves))  # the parts of an overlap have one place for what they receive

    times = replay(bare, cost, message, together=together)
    best, least, ideal = bare, math.inf, times.makespan
    for _ in range(ROUNDS):
        tried = _safe(bare, times, message if messages == "buffered" else 0)
        again = replay(tried, cost, message, messages, together)
        if again.makespan >= least:
            break
        best, least, times = tried, again.makespan, _without_messages(bare, tried, again)
        if least <= ideal:
            break
    rows = tuple(
        tuple(_with_state([a for a in row if a is not None], found.microbatches, sharded)) for row in best.ranks
    )
    return Schedule(rows, found.microbatches, found.copies, found.name)


def _safe(bare: Schedule, times: Replayed, message: float) -> Schedule:
    """Place receives where messages arrive, but where they are sent those that would wait in a circle otherwise."""
    ahead: set[Action] = set()
    while True:
        tried = _by_time(bare, times, message, ahead)
        refusal = broken_law(tried)
        if refusal is None:
            return tried
        more = {a for rank, slot in refusal.places if (a := tried.ranks[rank][slot]) is not None}
        more = {a if a.kind in SENDS else a.matching for a in more if a.kind in MESSAGES} - ahead
        if not more:  # the circle is of receives that are ahead, and of others behind them
            return _by_time(bare, times, 0, ahead)
        ahead |= more


def _by_time(bare: Schedule, times: Replayed, message: float, ahead: Set[Action]) -> Schedule:
    """Place each send where its value is made in a replay, and its receive where it arrives, or, `ahead`, is sent."""
    span = {(rank, slot): (b, e) for rank, spans in enumerate(times.spans) for slot, b, e in spans}
    keyed: list[list[tuple[float, int, tuple[int, str, int], Action]]] = [[] for _ in bare.ranks]
    for (rank, slot), (b, _) in span.items():
        action = bare.ranks[rank][slot]
        assert action is not None
        keyed[rank].append((b, 1, (slot, "", 0), action))
    where = places_by_action(bare)
    for made, taken, sent in crossings(bare):
        end, key = span[where[made][0]][1], (sent.stage, sent.kind, sent.microbatch or 0)
        keyed[where[made][0][0]].append((end, 0, key, sent))
        # What is rounded when times are added must not put a receive behind what takes it.
        arrives = min(end + (0 if sent in ahead else message), span[where[taken][0]][0])
        keyed[where[taken][0][0]].append((arrives, 0, key, sent.matching))
    rows = tuple(tuple(action for *_, action in sorted(row, key=lambda each: each[:3])) for row in keyed)
    return Schedule(rows, bare.microbatches, bare.copies, bare.name)


def _without_messages(bare: Schedule, tried: Schedule, times: Replayed) -> Replayed:
    """What a replay with messages says of the slots without."""
    rows: list[tuple[tuple[int, float, float], ...]] = []
    for row, spans in zip(tried.ranks, times.spans, strict=True):
        kept = [(b, e) for slot, b, e in spans if (a := row[slot]) is not None and a.kind not in MESSAGES]
        rows.append(tuple((slot, b, e) for slot, (b, e) in enumerate(kept)))
    return Replayed(bare, tuple(rows))


def _with_state(row: _Row, microbatches: int, sharded: int) -> _Row:
    """Add the reductions of gradients, and where parameters are unsharded and sharded again."""
    done: dict[int, int] = {}
    reduced: _Row = []
    ready: _Row = []
    for action in row:
        if action.kind not in SENDS:  # what waits for a send goes first
            reduced, ready = reduced + ready, []
        reduced.append(action)
        for stage in (leaf.stage for leaf in action.leaves if leaf.kind in ("B", "W")):
            done[stage] = done.get(stage, 0) + 1
            ready += [Action(stage, "REDUCE_GRAD")] if done[stage] == microbatches else []
    reduced += ready
    if not sharded:
        return reduced
    active: list[int] = []
    found: _Row = []
    for k, action in enumerate(reduced):
        if action.kind not in (*MESSAGES, *STATE):
            wanted = _next_stages(reduced[k:], sharded)
            first = len(found)  # an unshard goes on while the rank waits for what it receives
            while first and found[first - 1].kind in RECEIVES:
                first -= 1
            found[first:first] = [
                *(Action(s, "RESHARD") for s in active if s not in wanted),
                *(Action(s, "UNSHARD") for s in wanted if s not in active),
            ]
            active = [s for s in active if s in wanted] + [s for s in wanted if s not in active]
        found.append(action)
    return found + [Action(s, "RESHARD") for s in active]


def _next_stages(row: _Row, most: int) -> list[int]:
    """The stages that are computed next; those that overlap are not separated."""
    found: list[int] = []
    for action in row:
        if action.kind not in (*MESSAGES, *STATE):
            found += [leaf.stage for leaf in action.leaves if leaf.stage not in found]
            if len(found) >= most:
                break
    return found
