"""`StepEvents`: the steps of many strategies by the events of their stages, from the closed form's times of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.form import ClosedForm, PricedSteps
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.scheduled_steps import StageTimes
from shardplan.simulation.sweep import StageSeconds, compile_schedule, sweep
from shardplan.strategy.schedules.table import is_rendezvous

Floats = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """Prices many strategies as `ClosedForm` does, but that their passes follow each other event by event.

    Args:
        form: What says what chunks take, and what is held.
        forward: Whether only the forward passes are counted, each chunk's as soon as it has what it needs.

    >>> from shardplan.strategy.model import Model
    >>> from shardplan.strategy.strategy import Strategy
    >>> model = Model.load("gpt", layers=4, hidden=256, heads=4, seq=128, vocab=1000, precision="bf16")
    >>> form = ClosedForm(model, Topology.load("dgx-a100-80g", nodes=1))
    >>> c = Configurations.of([Strategy(data=4, pipeline=2, global_batch=64)])
    >>> round(float(StepEvents(form)(c).seconds[0] / form(c).seconds[0]), 1)
    1.0
    """

    form: ClosedForm
    forward: bool = False

    def on(self, topology: Topology, parameters: Parameters) -> StepEvents:
        """Return it on another topology, or with other parameters; what was read stays."""
        return StepEvents(self.form.on(topology, parameters), self.forward)

    def __call__(self, c: Configurations) -> PricedSteps:
        """Price them; `floor_seconds` are of the busiest rank at work, which no order of its passes is below."""
        out = self.form(c)
        seconds, floor = np.zeros(len(c)), np.zeros(len(c))
        for at, made, many in self._alike(c):
            seconds[at] = self._swept(c[at[:1]], made, many)
            floor[at] = self._busiest(c[at[:1]], made) * many
        return PricedSteps(seconds, out.peak_bytes, floor, out.floor_bytes, out.parts)

    def alike(self, c: Configurations) -> list[np.ndarray]:
        """Return numbers, [n] each: strategies that differ in the order of axes, and not in these, are priced alike."""
        return self.form.alike(c)

    def floors(self, c: Configurations) -> tuple[Floats, Floats]:
        """Return seconds and bytes, [n] each, that none is below, however it recomputes and deals out state."""
        return self.form.floors(c, events=True)

    def stages(self, c: Configurations) -> StageSeconds:
        """Return what the chunks take; all of `c` have one number of ranks and of chunks a rank."""
        return self._seconds(self.form.stages(c))

    def _alike(self, c: Configurations) -> list[tuple[np.ndarray, StageTimes, int]]:
        """Strategies of one schedule: their places, what their chunks take, and their microbatches."""
        col = c.columns
        keys = [col[name] for name in ("pipeline", "interleave", "schedule", "expert_overlap")]
        keys = np.stack([*keys, c.microbatches], axis=1)
        chunks, of_chunks = np.unique(keys[:, :2], axis=0, return_inverse=True)
        found: list[tuple[np.ndarray, StageTimes, int]] = []
        for k in range(len(chunks)):
            where = np.flatnonzero(of_chunks.reshape(-1) == k)
            made = self.form.stages(c[where])
            rest, of_rest = np.unique(keys[where, 2:], axis=0, return_inverse=True)
            for j in range(len(rest)):
                at = np.flatnonzero(of_rest.reshape(-1) == j)
                found.append((where[at], StageTimes(*(x[at] for x in made)), int(rest[j, 2])))
        return found

    def _swept(self, one: Configurations, made: StageTimes, many: int) -> Floats:
        """The seconds of strategies that have the schedule of one."""
        col = {name: int(x[0]) for name, x in one.columns.items()}
        name = "gpipe" if self.forward and col["interleave"] == 1 else CODES["schedule"][col["schedule"]]
        together = bool(col["expert_overlap"]) and not self.forward
        order = compile_schedule(name, col["pipeline"], many, col["interleave"], together=together)
        return sweep(order, self._seconds(made, is_rendezvous(name, col["interleave"]))).makespan

    def _seconds(self, made: StageTimes, rendezvous: bool = False) -> StageSeconds:
        found = made.of_chunks(rendezvous)
        if not self.forward:
            return found
        nothing = np.zeros_like(found.forward)
        return StageSeconds(found.forward, nothing, nothing, found.send, np.zeros_like(found.send))

    def _busiest(self, one: Configurations, made: StageTimes) -> Floats:
        """The seconds of a microbatch on the busiest rank."""
        pipeline = int(one.columns["pipeline"][0])
        total = made.forward if self.forward else made.forward + made.backward - made.hidden_seconds
        if pipeline > 1 and not self.forward:
            total = total - made.ahead - made.ahead_back
        return total.reshape(len(total), -1, pipeline).sum(axis=1).max(axis=1)
