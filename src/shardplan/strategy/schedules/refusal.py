"""`CounterExample`: why a schedule is refused, and the places where it cannot go on, or goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.schedule import Schedule

Place = tuple[int, int]  # rank and slot in its list


@dataclass(frozen=True, slots=True)
class CounterExample:
    """What is wrong, in one line, and the `places` (rank, slot) of it, the first of which is where a run stops.

    `rule` is the law that is broken: `owner`, `complete`, `order`, `messages`, `pair`, `wait` or `memory`. Where
    something is missing there is no place.
    """

    rule: str
    says: str
    places: tuple[Place, ...] = ()


def action_place(place: Place, action: Action | str) -> str:
    """An action and where it stands, as refusals say it."""
    return f"{action} (rank {place[0]}, slot {place[1]})"


def places_by_action(found: Schedule) -> dict[Action, list[Place]]:
    """Where each action stands, those inside an overlap too."""
    where: dict[Action, list[Place]] = {}
    for rank, row in enumerate(found.ranks):
        for slot, action in enumerate(row):
            if action is not None:
                for leaf in action.leaves:
                    where.setdefault(leaf, []).append((rank, slot))
    return where
