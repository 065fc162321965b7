"""What results of searches have in common: a strategy as text and as JSON, and why strategies were left out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shardplan.simulation.closed.configurations import ORDERS
from shardplan.strategy.strategy import FIELDS, Strategy
from shardplan.strategy.strategy_text import strategy_text

Ints = np.ndarray


class PrunedClass(NamedTuple):
    """How many strategies were left out, and why."""

    rule: str
    strategies: int


def plan_object(strategy: Strategy, seconds: float, peak_bytes: float) -> dict[str, Any]:
    """Return a strategy with its price as an object of JSON."""
    said = {name: getattr(strategy, name) for name in FIELDS if getattr(strategy, name) is not None}
    return {"strategy": said, "seconds": seconds, "peak_bytes": peak_bytes}


class RankedPlan(NamedTuple):
    """A strategy, its seconds a step, its peak bytes, and how its axes lie on the hardware, outermost first.

    The peak is certified where the search certifies: what its job holds by its own account, with what the runtime has
    at work and the allocator and the driver hold beside.
    """

    strategy: Strategy
    seconds: float
    peak_bytes: float
    order: tuple[str, ...] = ORDERS[0]

    def device_mesh(self) -> Ints:
        """Return ids of the topology, int64 [pipeline, data, context, tensor]: who has which place of the strategy.

        Ids count from the innermost level; those of a stage are in the order of the strategy's own devices.

        >>> one = RankedPlan(Strategy(data=2, tensor=2), 1.0, 1.0, ("tensor", "pipeline", "data", "context"))
        >>> one.device_mesh()[0, :, 0].tolist()
        [[0, 2], [1, 3]]
        """
        sizes = [getattr(self.strategy, block) for block in self.order]
        ids = np.arange(self.strategy.devices).reshape(sizes)
        return ids.transpose([self.order.index(block) for block in ORDERS[0]])


def plan_text(one: RankedPlan) -> str:
    """Return a strategy and, where it is not that of its devices, the order of its axes on the hardware."""
    sizes = ((block, getattr(one.strategy, block)) for block in one.order)
    alive = [block for block, n in sizes if n > 1]
    usual = [block for block in ORDERS[0] if block in alive]
    return strategy_text(one.strategy) + (f" order={','.join(alive)}" if alive != usual else "")


def ranked_object(one: RankedPlan) -> dict[str, Any]:
    """Return it as an object of JSON."""
    return plan_object(one.strategy, one.seconds, one.peak_bytes) | {"order": list(one.order)}
