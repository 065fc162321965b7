"""`Job`: what a strategy makes of a model: programs by stage and kind, what lives between them, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.strategy.model import Model
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.partition.write import Movement
from shardplan.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, repr=False)
class Job:
    """Programs on the meshes of stages, which run in the order of a schedule.

    `programs` has by stage and kind of action (F, B, OPT) a program whose inputs are named in `state`; of its outputs
    `next.x` takes the place of x. `saved` values are made by F and read by B, one set a microbatch.
    """

    model: Model
    strategy: Strategy
    layouts: Layouts
    programs: Mapping[tuple[int, str], Program]
    state: Mapping[str, TensorType]
    batch: tuple[str, ...]  # inputs of which every microbatch has its own rows
    saved: tuple[str, ...]
    totals: tuple[str, ...]  # gradients, zeros at first
    replaced: tuple[str, ...]  # inputs that a step replaces
    results: Mapping[str, int | None]  # what F makes besides, with its dim `batch`; a sum over microbatches without
    movements: Mapping[tuple[int, str], tuple[Movement, ...]]
    settled: Settled = field(repr=False)

    def actions(self) -> Iterator[tuple[int, str, int]]:
        """Yield stage, kind and microbatch of every action in an order in which one process may run them."""
        training = (0, "B") in self.programs
        for k in range(self.strategy.microbatches):
            yield 0, "F", k
            if training:
                yield 0, "B", k
        if training:
            yield 0, "OPT", 0
