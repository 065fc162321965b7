"""`StageMessage`: a movement from stage to stage, as the ops that its plan has, one after another.

The steps of a plan run one after another. What goes from one stage to another keeps its order, value by value, as on
one connection; it holds up no stream of either end, since nobody computes on what is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core.walk import open_together
from shardplan.simulation.jobs.timing import OpCost, Pricing
from shardplan.strategy.partition.job import Transfer

MESSAGES = "messages"


@dataclass(frozen=True, slots=True, eq=False)
class StageMessage:
    """A transfer: the number of the one that is planned for all alike, its steps, and what they take."""

    transfer: Transfer
    steps: tuple[OpCost, ...]
    seconds: float
    level: str  # the outermost that it crosses; empty where nothing is moved
    lane: int = 0  # among messages of this kind between these stages

    @property
    def stream(self) -> str:
        """Return where its intervals lie, at either end."""
        (a, _), (b, _) = self.transfer.source, self.transfer.target
        return f"{self.transfer.kind} {a}-{b}" + (f" ({self.lane})" if self.lane else "")


def message(transfer: Transfer, pricing: Pricing) -> tuple[tuple[OpCost, ...], float, str]:
    """Return the steps of a transfer's plan, their seconds, and the outermost level that they cross."""
    source, target = transfer.types
    if source == target:
        return (), 0.0, ""
    program, _ = open_together(transfer.plan.program)
    steps: list[OpCost] = []
    for step in program.steps:
        operands, results = program.step_types(step)
        found = pricing.cost(step.op, operands, results)
        if found.price.seconds > 0:
            steps.append(found)
    free = MESSAGES in pricing.settings.free
    names = [w.level.name for w in pricing.fabric.wires]
    crossed = [names.index(s.stream.rpartition(", ")[2]) for s in steps if ", " in s.stream]
    return tuple(steps), 0.0 if free else sum(s.seconds for s in steps), names[min(crossed)] if crossed else ""
