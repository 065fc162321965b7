"""The hops of a refit: from owners to receivers, and, in a plan with relays, from receivers to others of their node.

A hop says which regions a rank lists, what pairs of ranks exchange in it, and in which dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardplan.core.dtypes import itemsize
from shardplan.execution.torch.dtypes import torch_dtype
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.regions import RefitRegions


@dataclass(frozen=True, slots=True, eq=False)
class RefitHop:
    """One hop of a plan; `inside` that between receivers, from target to target, as the target stores it."""

    plan: RefitPlan
    inside: bool

    def regions(self, rank: int) -> RefitRegions:
        """Return what a rank sends and receives."""
        return self.plan.passed_on(rank) if self.inside else self.plan.regions(rank)

    @property
    def traffic(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Who sends how much to whom: ids and bytes, int64, a row a pair."""
        return self.plan.relay_traffic if self.inside else self.plan.traffic

    @property
    def widths(self) -> np.ndarray:
        """The bytes of an element under way, by move."""
        plan = self.plan
        if self.inside:
            of = [itemsize(plan.target.families[m.target_family].dtype) for m in plan.relays]
        else:
            of = [plan.itemsizes(k)[2] for k in range(len(plan.moves))]
        return np.array(of, dtype=np.int64)

    def dtypes(self, move: int, sends: bool) -> tuple[torch.dtype, torch.dtype, int]:
        """Return the dtype of a rank's own parameter and that which travels, and what is added on this side."""
        m = (self.plan.relays if self.inside else self.plan.moves)[move]
        target = self.plan.target.families[m.target_family]
        if self.inside:
            return torch_dtype(target.dtype), torch_dtype(target.dtype), 0
        source = self.plan.source.families[m.source_family]
        casts = itemsize(target.dtype) < itemsize(source.dtype)  # the sender does
        plus = source.entry.plus - target.entry.plus if casts == sends else 0
        own = torch_dtype(source.dtype if sends else target.dtype)
        return own, torch_dtype(target.dtype if casts else source.dtype), plus


def hops(plan: RefitPlan, rank: int) -> tuple[RefitHop, ...]:
    """Return the hops that a rank has a part in, in order."""
    inside = (RefitHop(plan, True),) if plan.relays and rank in plan.target.devices else ()
    return (RefitHop(plan, False), *inside)
