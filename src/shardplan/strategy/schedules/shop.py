"""`Shop`: stages on ranks with their times and bounds of memory, for which an order is sought.

Microbatches are alike, so a stage does them in order: the k-th F, I and W of a stage are of microbatch k. (Sort when
any schedule does them, and what waited for its value still does.) An order is a list of passes, (stage, kind), a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.core import validation
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action import Action
from shardplan.strategy.schedules.action_lists import ActionLists, F, I, W
from shardplan.strategy.schedules.schedule import Schedule

Pass = tuple[int, int]
Orders = list[list[Pass]]


@dataclass(frozen=True, slots=True)
class Shop:
    """`owners`: the rank of each stage of a chain; `times`: what F, I and W of each stage take.

    `bounds`: how many forwards of a rank may wait for their W, in stages times microbatches; fewer than a rank has
    stages are too few for any order.
    """

    owners: tuple[int, ...]
    microbatches: int
    times: tuple[tuple[float, float, float], ...]
    bounds: tuple[int, ...]
    waits: tuple[int, ...] = field(init=False, repr=False, compare=False)  # by pass, 3 * stage + kind, -1 for none

    def __post_init__(self) -> None:
        validation.whole_number("microbatches", self.microbatches, 1, kind=ScheduleError)
        if not self.owners or set(self.owners) != set(range(len(self.bounds))):
            raise ScheduleError(
                f"stages lie on ranks {self.owners}, with bounds for {len(self.bounds)}; legal is one a rank"
            )
        if len(self.times) != len(self.owners) or any(len(t) != 3 or min(t) < 0 for t in self.times):
            raise ScheduleError(
                f"times of {len(self.times)} stages; legal are F, I and W, 0 or more, of each of {len(self.owners)}"
            )
        for rank, stages in enumerate(self.stages):
            least = min(len(stages), len(stages) * self.microbatches)
            if validation.whole_number("a bound", self.bounds[rank], kind=ScheduleError) < least:
                raise ScheduleError(
                    f"rank {rank} may hold {self.bounds[rank]} forwards; its {least} stages need as many"
                )
        # Of a rank for each stage: a pass waits for what it takes, or for the one before it. That both are done says
        # the former, since no value comes back that did not go there.
        alone = range(len(self.owners))
        first, second, *_ = ActionLists.of(([(s, kind, 0) for kind in "FIW"] for s in alone), alone).edges()
        object.__setattr__(self, "waits", tuple(np.where(second < 0, first, second).tolist()))

    @property
    def stages(self) -> list[list[int]]:
        """The stages of each rank, in order."""
        return [[s for s, owner in enumerate(self.owners) if owner == rank] for rank in range(len(self.bounds))]

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return self.microbatches * sum(sum(self.times[s]) for s in self.stages[rank])

    def schedule(self, orders: Sequence[Sequence[Pass]], name: str) -> Schedule:
        """Return an order as a schedule."""
        rows: list[tuple[Action, ...]] = []
        for order in orders:
            counts: dict[Pass, int] = {}
            row: list[Action] = []
            for each in order:
                row.append(Action(each[0], "FIW"[each[1]], counts.get(each, 0)))
                counts[each] = counts.get(each, 0) + 1
            rows.append(tuple(row))
        return Schedule(tuple(rows), self.microbatches, name=name)

    def orders(self, found: Schedule) -> Orders:
        """Return the order of a schedule's passes; a B is an I and its W."""
        return [
            [
                (leaf.stage, kind)
                for a in row
                if a
                for leaf in a.leaves
                for kind in {"F": (F,), "B": (I, W), "I": (I,), "W": (W,)}[leaf.kind]
            ]
            for row in found.compute_only().ranks
        ]

    def fits(self, order: Sequence[Pass], rank: int) -> bool:
        """Whether a rank's order keeps F before I before W, and its bound."""
        counts = [[0, 0, 0] for _ in self.owners]
        held = 0
        for s, kind in order:
            mine = counts[s]
            if kind and mine[kind] >= mine[kind - 1]:
                return False
            mine[kind] += 1
            held += (kind == F) - (kind == W)
            if held > self.bounds[rank]:
                return False
        return True

    def ends(self, orders: Sequence[Sequence[Pass]]) -> list[float]:
        """Return when each rank is done, run in order and as soon as possible; infinity where they wait in a circle."""
        done: list[list[float]] = [[] for _ in self.waits]
        clocks, heads = [0.0] * len(orders), [0] * len(orders)
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(orders):
                head, clock = heads[rank], clocks[rank]
                while head < len(order):
                    s, kind = order[head]
                    mine, source = done[3 * s + kind], self.waits[3 * s + kind]
                    if source >= 0:
                        if len(done[source]) <= len(mine):
                            break
                        clock = max(clock, done[source][len(mine)])
                    clock += self.times[s][kind]
                    mine.append(clock)
                    head += 1
                moved |= head > heads[rank]
                heads[rank], clocks[rank] = head, clock
        return [c if heads[r] == len(orders[r]) else math.inf for r, c in enumerate(clocks)]
