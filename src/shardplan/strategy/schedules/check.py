"""The checker: what a schedule must be before it is run.

- Each stage is on one rank, and each of its actions there.
- Each (stage, microbatch) has one F and one B, or one I and one W; forward only one F. They stand in this order.
- Where messages are placed, each value that crosses ranks has one send behind what makes it and one receive before
  what takes it, and nothing else is sent.
- The ranks never wait for each other in a circle, also not for messages (`waits`).
- Forwards whose B or W is not done are at most as many as declared, on each rank.

The first law that is broken is refused, with the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from shardplan.core import validation
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import COMPUTE, MESSAGES, Action
from shardplan.strategy.schedules.action_graph import FREE
from shardplan.strategy.schedules.action_lists import MODES, ActionLists, leaves
from shardplan.strategy.schedules.refusal import CounterExample, Place, action_place, places_by_action
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.waits import waits

ActionPlaces = dict[Action, list[Place]]


def check(found: Schedule, in_flight: Sequence[int] | None = None, messages: str = "blocking") -> Schedule:
    r"""Return the schedule, or raise `ScheduleError` with a counter-example in one line.

    `in_flight` bounds the forwards of each rank whose B or W is not done. `messages` says how messages are sent, where
    they are placed: `blocking`, both ends wait for each other; `batched`, those that stand side by side in a list are
    posted at once; `buffered`, a send waits for nobody.

    >>> check(Schedule.parse("schedule, 1 microbatches\n0: 0F0 0B0\n1: 1B0 1F0"))
    Traceback (most recent call last):
        ...
    shardplan.errors.ScheduleError: schedule: 1F0 (rank 1, slot 1) stands behind 1B0 (rank 1, slot 0)
    """
    if (refusal := broken_law(found, in_flight, messages)) is not None:
        raise ScheduleError(f"schedule {found.name}".rstrip() + f": {refusal.says}")
    return found


def broken_law(
    found: Schedule, in_flight: Sequence[int] | None = None, messages: str = "blocking"
) -> CounterExample | None:
    """Return the first law that a schedule breaks, as `check` has it, or None."""
    validation.choice("messages", messages, MODES, ScheduleError)
    if in_flight is not None:
        bounds = validation.items("in_flight", in_flight, "whole numbers, one a rank", ScheduleError)
        if len(bounds) != len(found.ranks):
            raise ScheduleError(
                f"in_flight has {len(bounds)} bounds; legal is one for each of {len(found.ranks)} ranks"
            )
        in_flight = [validation.whole_number("in_flight", n, kind=ScheduleError) for n in bounds]
    where = places_by_action(found)
    laws = (_owners(found, where), _complete(found, where), _messages(found, where))
    for law in laws:
        for refusal in law:
            return refusal
    return waits(found, messages) or next(_memory(found, in_flight), None)


def _owners(found: Schedule, where: ActionPlaces) -> Iterator[CounterExample]:
    for stage, rank in enumerate(found.owners):
        if rank < 0:
            yield CounterExample("complete", f"stage {stage} of {found.stages} has no action")
    for action, places in where.items():
        owner = found.owners[action.stage]
        for place in (p for p in places if p[0] != owner):
            first = min(p for a, ps in where.items() if a.stage == action.stage for p in ps if p[0] == owner)
            says = (
                f"{action_place(place, action)}, but stage {action.stage} is on rank {owner}, from slot {first[1]} on"
            )
            yield CounterExample("owner", says, (place, first))


def _complete(found: Schedule, where: ActionPlaces) -> Iterator[CounterExample]:
    for action, places in where.items():
        if action.microbatch is not None and action.microbatch >= found.microbatches:
            yield CounterExample(
                "complete",
                f"{action_place(places[0], action)} is of none of {found.microbatches} microbatches",
                (places[0],),
            )
        if action.microbatch is not None and len(places) > 1:
            yield CounterExample(
                "complete",
                f"{action_place(places[1], action)} stands also in slot {places[0][1]}",
                (places[1], places[0]),
            )
    length = found.stages // found.copies
    for m in range(found.microbatches):
        chains = [c for c in range(found.copies) if _is_touched(where, range(c * length, (c + 1) * length), m)]
        if len(chains) > 1:
            other = next(a for a in where if a.microbatch == m and a.stage // length == chains[1])
            yield CounterExample(
                "complete",
                f"{action_place(where[other][0], other)}, but microbatch {m} goes through another copy",
                (where[other][0],),
            )
        first = (chains or [0])[0] * length
        for stage in range(first, first + length):
            yield from _each_once(found, where, stage, m)


def _is_touched(where: ActionPlaces, stages: range, m: int) -> bool:
    return any(Action(s, kind, m) in where for s in stages for kind in "FBIW")


def _each_once(found: Schedule, where: ActionPlaces, stage: int, m: int) -> Iterator[CounterExample]:
    """One F, and one B or one I and one W, in order, as each of them is there once at most."""
    run = {kind: where[a][0] for kind in "FBIW" if (a := Action(stage, kind, m)) in where}
    if "F" not in run:
        yield CounterExample("complete", f"{stage}F{m} is missing (stage {stage} is on rank {found.owners[stage]})")
    if not found.forward_only:
        if "B" in run and (half := "I" if "I" in run else "W" if "W" in run else ""):
            yield CounterExample(
                "complete",
                f"{action_place(run[half], f'{stage}{half}{m}')} is part of {action_place(run['B'], f'{stage}B{m}')}",
                (run[half], run["B"]),
            )
        for kind in ("I", "W") if "I" in run or "W" in run else ("B",):
            if kind not in run:
                says = f"{stage}{kind}{m} is missing (stage {stage} is on rank {found.owners[stage]})"
                yield CounterExample("complete", says, (run["W"],) if kind == "I" else ())
    order = [Action(stage, kind, m) for kind in ("F", "OFFLOAD", "RELOAD", "B", "I", "W")]
    for first, second in pairwise(a for a in order if a in where):
        if _position(found, where, second) <= _position(found, where, first):
            early, late = where[second][0], where[first][0]
            yield CounterExample(
                "order", f"{action_place(late, first)} stands behind {action_place(early, second)}", (early, late)
            )


def _position(found: Schedule, where: ActionPlaces, action: Action) -> tuple[int, int]:
    """The slot of an action on its rank, and its place inside an overlap, whose parts run in order."""
    rank, slot = where[action][0]
    whole = found.ranks[rank][slot]
    return slot, 0 if whole is None else whole.leaves.index(action)


def _messages(found: Schedule, where: ActionPlaces) -> Iterator[CounterExample]:
    """Each value that crosses ranks has one send and one receive in their places, where any message is placed."""
    placed = [a for a in where if a.kind in MESSAGES]
    if not placed:
        return
    wanted: set[Action] = set()
    for made, taken, sent in crossings(found):
        for message, beside, behind in ((sent, made, True), (sent.matching, taken, False)):
            wanted.add(message)
            if message not in where:
                ends = (action_place(where[action][0], action) for action in (made, taken))
                says = f"{message} is missing: {' feeds '.join(ends)}"
                yield CounterExample("messages", says, (where[taken][0],))
            elif (where[beside][0] > where[message][0]) == behind:
                side, places = "before" if behind else "behind", (where[message][0], where[beside][0])
                says = f"{action_place(places[0], message)} stands {side} {action_place(places[1], beside)}"
                yield CounterExample("order", says, places if behind else places[::-1])
    for action in placed:
        if action not in wanted:
            yield CounterExample(
                "messages",
                f"{action_place(where[action][0], action)} carries nothing between ranks",
                (where[action][0],),
            )


def crossings(found: Schedule) -> Iterator[tuple[Action, Action, Action]]:
    """Yield each computation, the one on another rank that takes its value, and the send that carries it."""
    lists = ActionLists.of(
        ([each for each in leaves(row) if each[1] in COMPUTE] for row in found.ranks), found.owners, found.copies
    )
    source, lag = lists.sources()
    taken = np.flatnonzero((source >= 0) & (lag != FREE))
    for at in taken[np.argsort(source[taken])].tolist():
        made = lists.action(int(source[at]))
        yield made, lists.action(at), Action(made.stage, "SEND_F" if made.kind == "F" else "SEND_B", made.microbatch)


def in_flight(found: Schedule) -> tuple[int, ...]:
    """Return the most forwards of each rank whose B or W is not done, in stages times microbatches."""
    return ActionLists.of_schedule(found).in_flight()


def _memory(found: Schedule, bounds: Sequence[int] | None) -> Iterator[CounterExample]:
    for rank, bound in () if bounds is None or found.forward_only else enumerate(bounds):
        placed = [(slot, leaf) for slot, a in enumerate(found.ranks[rank]) if a is not None for leaf in a.leaves]
        [held] = ActionLists.of([leaves(found.ranks[rank])], found.owners, found.copies).held_counts()
        for k in np.flatnonzero(held > bound).tolist():
            slot, leaf = placed[k]
            says = f"{action_place((rank, slot), leaf)} makes {held[k]} in flight; the bound of rank {rank} is {bound}"
            yield CounterExample("memory", says, ((rank, slot),))
