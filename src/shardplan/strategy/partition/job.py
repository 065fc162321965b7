"""`Job`: what a strategy makes of a model: programs by stage and kind, what lives between them, and their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.plans.plan import Plan
from shardplan.strategy.model import Model
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.partition.write import Movement
from shardplan.strategy.schedules import Schedule
from shardplan.strategy.strategy import Strategy


class Part(NamedTuple):
    """Of a value on a stage: the model's name of it, and which of its rows are there, None for all."""

    stage: int
    name: str
    rows: tuple[int, int] | None


class Transfer(NamedTuple):
    """A movement of a value from a stage to another, by its names there, after an action of a kind."""

    kind: str
    source: tuple[int, str]
    target: tuple[int, str]
    plan: Plan


@dataclass(frozen=True, slots=True, repr=False)
class Job:
    """Programs on the meshes of stages, which run in the order of a schedule.

    `programs` has by stage and kind of action (F, B, OPT) a program. Its inputs are state, by name; rows of a batch;
    what the stage's F saved; and what comes from other stages. Of its results `next.x` takes the place of x.
    `results` are the model's, each with its dim `batch`, or None where microbatches add up.
    """

    model: Model
    strategy: Strategy
    layouts: Layouts
    schedule: Schedule
    programs: Mapping[tuple[int, str], Program]
    state: Mapping[str, TensorType]
    parts: Mapping[str, Part]  # by name of `state`
    transfers: tuple[Transfer, ...]
    batch: tuple[str, ...]
    results: Mapping[str, int | None]
    movements: Mapping[tuple[int, str], tuple[Movement, ...]]
    settled: Settled

    @property
    def stages(self) -> int:
        """How many stages it has."""
        return 1 + max(stage for stage, _ in self.programs)

    def key(self, stage: int, name: str) -> str:
        """Return what a stage's value is called in `state`."""
        return name if self.stages == 1 else f"s{stage}.{name}"

    def __repr__(self) -> str:
        """Show the programs' sizes."""
        kinds = ", ".join(f"{s}{kind}: {len(p.steps)} steps" for (s, kind), p in self.programs.items())
        return f"<Job {self.model.name} on {self.strategy.devices} devices; {kinds}>"
