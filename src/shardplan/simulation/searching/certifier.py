"""`Certifier`: whether strategies that the closed form says fit do fit: their jobs' own accounts of memory.

The closed form prices thousands of strategies; of the few that are shown the job is made, and its memory added up
action by action (`strategy.partition.memory`), with what the runtime has at work and what its allocator and driver
hold beside. What is refused is said, and not shown as fitting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardplan.core.nested import as_nested
from shardplan.errors import ShardplanError
from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes
from shardplan.simulation.closed.chunk_kinds import layers_of
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.jobs.holdings import attributed
from shardplan.strategy.model import Model
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.memory import holdings
from shardplan.strategy.partition.partition import make_job
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.runtimes import runtime_of
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import GENERATORS
from shardplan.strategy.strategy import PREDICTED, Strategy

ROOM = 1 / 0.95  # times the memory up to which the closed form lets through what is certified then
WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "kept for backward passes",
    "under way": "at work in one layer, or the loss",
}


class CertifiedPeak(NamedTuple):
    """The most that a device of any pipeline rank holds: bytes, the rank, and what they are, largest first."""

    nbytes: float
    rank: int
    parts: tuple[tuple[str, float], ...]


class RefusedPlan(NamedTuple):
    """A strategy that the closed form says fits, why its certificate does not, and the bytes that one says."""

    strategy: Strategy
    why: str
    nbytes: float | None = None


@dataclass(slots=True, eq=False)
class Certifier:
    """Certifies strategies of one model on one kind of device; what was found is remembered.

    Args:
        model: What is trained.
        parameters: Of the machine: what its allocator and driver hold.
        memory: Bytes of a device.
        layouts: Tables instead of those of the strategies.
    """

    model: Model
    parameters: Parameters
    memory: float
    layouts: Layouts | None = None
    refused: list[RefusedPlan] = field(default_factory=list[RefusedPlan])
    _known: dict[Strategy, CertifiedPeak | str] = field(default_factory=dict["Strategy", "CertifiedPeak | str"])

    def with_layouts(self, layouts: Layouts | None) -> Certifier:
        """Return a certifier of jobs under other tables."""
        return Certifier(self.model, self.parameters, self.memory, layouts)

    def on(self, memory: float) -> Certifier:
        """Return a certifier of devices with other memory; what jobs hold is known to both."""
        return replace(self, memory=memory, refused=[])

    def peak(self, strategy: Strategy) -> CertifiedPeak:
        """Return the certified peak of a strategy; raises `ShardplanError` where no job can be made of it."""
        if strategy not in self._known:
            try:
                self._known[strategy] = self._certified(strategy)
            except ShardplanError as error:
                self._known[strategy] = str(error)
        found = self._known[strategy]
        if isinstance(found, str):
            raise ShardplanError(found)
        return found

    def fits(self, strategy: Strategy) -> CertifiedPeak | None:
        """Return the certified peak where it is within the memory; what is not is noted in `refused`."""
        try:
            found = self.peak(strategy)
        except ShardplanError as error:
            refused = RefusedPlan(strategy, str(error))
        else:
            if found.nbytes <= self.memory:
                return found
            why = f"needs {format_bytes(found.nbytes)}, and a device has {format_bytes(self.memory)}"
            refused = RefusedPlan(strategy, why, found.nbytes)
        if all(one.strategy != strategy for one in self.refused):
            self.refused.append(refused)
        return None

    def _certified(self, strategy: Strategy) -> CertifiedPeak:
        """Make the job of a strategy, cut as the closed form cuts, and add up what it holds.

        What `partition` refuses is refused here, and so are layers that wait on the host, which no program has: their
        job holds more than is asked about.
        """
        if (layers := strategy.software.offload_layers) > 0:
            raise ShardplanError(f"offload_layers={layers} is predicted, and in no program; legal is 0")
        job = priced_job(self.model, strategy, layouts=self.layouts)
        found, p = holdings(job, runtime_of(strategy)), self.parameters
        held = [s + p.fragmentation * (n - s) + p.context for n, s in zip(found.peak_bytes, found.state, strict=True)]
        rank = int(np.argmax(held))
        one = attributed(job, found, rank)
        parts = {WORDS[what]: float(nbytes) for what, nbytes in one.parts.items()}
        parts["more that the allocator holds"] = (p.fragmentation - 1) * (found.peak_bytes[rank] - found.state[rank])
        parts["driver and libraries"] = p.context
        return CertifiedPeak(held[rank], rank, tuple(sorted(parts.items(), key=lambda part: -part[1])))


def priced_job(model: Model, strategy: Strategy, where: Topology | None = None, layouts: Layouts | None = None) -> Job:
    """Return the job of a strategy, cut as it is priced; what a prediction alone has is that of fp8, which keeps more.

    Raises what `partition` raises.
    """
    s = replace(strategy, precision="fp8") if strategy.precision in PREDICTED else strategy
    return make_job(model, replace(s, cuts=even_cuts(model, s)), where, layouts=layouts)


def even_cuts(model: Model, strategy: Strategy) -> tuple[int, ...] | None:
    """Return the first layers of a strategy's stages but the first, as frameworks cut: as many layers each.

    What is before and behind the layers counts as a layer each where that makes them divide; see `layers_of`.
    """
    said = strategy.schedule
    if strategy.cuts is not None:
        return strategy.cuts
    copies = said.copies if isinstance(said, Schedule) else GENERATORS[str(said)].copies
    stages = strategy.pipeline * (strategy.interleave or 1) // copies
    if stages == 1:
        return None
    steps = (model.forward or model.program).steps
    counts = layers_of(tuple(op.times for s in steps if (op := as_nested(s.op)) is not None), stages)[:-2].sum(axis=0)
    return tuple(int(n) for n in np.cumsum(counts)[:-1]) if counts.all() else None


def certified_first(certifier: Certifier, strategies: Iterable[Strategy], most: int) -> list[tuple[int, CertifiedPeak]]:
    """Return the places of the first strategies that are certified to fit, at most so many, and their peaks."""
    found: list[tuple[int, CertifiedPeak]] = []
    for k, strategy in enumerate(strategies):
        if len(found) == most:
            break
        if (peak := certifier.fits(strategy)) is not None:
            found.append((k, peak))
    return found
