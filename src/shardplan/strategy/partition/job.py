"""`Job`: what a strategy makes of a model: programs by stage and kind, what lives between them, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.core.mesh import Mesh
from shardplan.core.ops.zigzag import Zigzag
from shardplan.core.program import Program
from shardplan.core.rebase import rebase_program
from shardplan.core.tensor import TensorType
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.movement.redistribute import redistribute
from shardplan.notebook import notebook_html
from shardplan.plans.plan import Plan
from shardplan.strategy.model import Model
from shardplan.strategy.partition.alternatives import Alternative, alternatives
from shardplan.strategy.partition.programs import (
    CLIPPED_UPDATES,
    FACTOR,
    NORM,
    REDUCED,
    TOTAL,
    UPDATES,
    saved_of_state,
)
from shardplan.strategy.partition.recomputed_layers import model_name
from shardplan.strategy.partition.settle import Settled
from shardplan.strategy.partition.shares import AxisShare, axis_shares
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.partition.write import Movement
from shardplan.strategy.schedules import Schedule
from shardplan.strategy.strategy import Strategy


class StatePart(NamedTuple):
    """Of a value on a stage: its name there (`model_name` is the model's), and which of its rows, None for all."""

    stage: int
    name: str
    rows: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A movement of a value from a stage to another, by its names there, after an action of a kind.

    It is planned when it is asked for.
    """

    kind: str
    source: tuple[int, str]
    target: tuple[int, str]
    types: tuple[TensorType, TensorType]
    where: Topology | Placement | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return redistribute(*self.types, self.where)


@dataclass(frozen=True, slots=True)
class Programs(Mapping[tuple[int, str], Program]):
    """Programs by stage and kind: those of stages that differ in nothing but their mesh are one, laid when asked for.

    `shared` are programs on the mesh of stage 0, `which` has the number of each stage's.
    """

    shared: tuple[Program, ...]
    which: Mapping[tuple[int, str], int]
    meshes: tuple[Mesh, ...]
    laid: dict[tuple[int, str], Program] = field(default_factory=dict[tuple[int, str], Program])

    def __getitem__(self, key: tuple[int, str]) -> Program:
        """Return the program of a stage on its mesh."""
        if key not in self.laid:
            self.laid[key] = rebase_program(self.shared[self.which[key]], {self.meshes[0]: self.meshes[key[0]]})
        return self.laid[key]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Return the keys."""
        return iter(self.which)

    def __len__(self) -> int:
        """Return how many there are, those that are one counted as often as they are used."""
        return len(self.which)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Job:
    """Programs on the meshes of stages, which run in the order of a schedule.

    `programs` has a program by stage and kind of action (F, B, I, W of those that the schedule has, and `updates`). Its
    inputs are state, by name; rows of a batch; what the stage's F saved, and its I kept; and what comes from others. Of
    its results `next.x` takes the place of x. `movements` of I and W are those of their B. `results` are the model's,
    each with its dim `batch`, or None where microbatches add up. Arrays are given in the order of positions, and go to
    programs in that of `order`.
    """

    model: Model
    strategy: Strategy
    layouts: Layouts
    schedule: Schedule
    programs: Programs
    state: Mapping[str, TensorType]
    parts: Mapping[str, StatePart]  # by name of `state`
    transfers: tuple[Transfer, ...]
    batch: tuple[str, ...]
    results: Mapping[str, int | None]
    movements: Mapping[tuple[int, str], tuple[Movement, ...]]
    settled: Settled

    _repr_html_ = notebook_html

    @property
    def stages(self) -> int:
        """How many stages it has."""
        return len(self.programs.meshes)

    @property
    def updates(self) -> Mapping[str, str]:
        """The kinds of action behind all microbatches, in order, each with that of the messages that it takes."""
        return CLIPPED_UPDATES if (0, "CLIP") in self.programs.which else UPDATES

    @property
    def order(self) -> np.ndarray | None:
        """The positions of the elements of a sequence as programs take them, int64; None where in their own order."""
        fields = self.model.fields
        return Zigzag(fields["seq"], fields["zigzag"]).order() if self.strategy.context_kind == "zigzag" else None

    @property
    def runs(self) -> Counter[tuple[int, str]]:
        """How often each program runs in a step, by stage and kind."""
        rows = self.schedule.compute_only().ranks
        found = Counter((a.stage, a.kind) for row in rows for action in row if action for a in action.leaves)
        return Counter({key: found[key] or 1 for key in self.programs})

    def shares(self) -> tuple[AxisShare, ...]:
        """Return what each axis of a stage deals out of operations, bytes held and bytes touched.

        >>> from shardplan import Model, Strategy, partition
        >>> print(partition(Model.load("mlp", layers=2, hidden=8, batch=2), Strategy(tensor=2)).shares()[0])
        tensor=2: 0.500 of operations, 0.500 of bytes held, 0.601 of bytes touched; even is 0.500; whole: no parameter
        """
        parameters = self.model.parameters.keys()
        named = ((model_name(part.name.removeprefix(TOTAL)), self.state[key]) for key, part in self.parts.items())
        state = [(name, t) for name, t in named if name in parameters or name.rpartition(".")[0] in parameters]
        return axis_shares(self.model, self.settled, state)

    def key(self, stage: int, name: str) -> str:
        """Return what a stage's value is called in `state`."""
        return name if self.stages == 1 else f"s{stage}.{name}"

    def let_go(self, stage: int, kind: str, keeps_totals: bool = False) -> tuple[str, ...]:
        """Return which inputs of a program are not there behind it, and are not replaced.

        Those are of updates: sums of gradients where they are not kept, and what an earlier update made.
        """
        which, shared = self.programs.which, self.programs.shared
        if kind not in self.updates:
            return ()
        inputs = [name for name, _ in shared[which[stage, kind]].inputs]
        later = {name for name, _ in shared[which[stage, "OPT"]].inputs} if kind == "NORM" else ()
        totals = () if keeps_totals else (n for n in inputs if n.startswith(TOTAL) and n not in later)
        between = (n for n in inputs if n.startswith((REDUCED, NORM, FACTOR)) and self.key(stage, n) not in self.state)
        return (*totals, *between)

    def saved_once(self, stage: int) -> frozenset[str]:
        """Return what a stage's forward pass saves once for all microbatches: gathered parameters that are kept.

        Every F makes it anew in the place of the last one's; it goes when no microbatch is in flight on the stage.
        """
        return saved_of_state(self.programs.shared[self.programs.which[stage, "F"]], self.batch)

    def alternatives(self, movement: Movement) -> tuple[Alternative, ...]:
        """Return what else the choices at both ends of a movement could have been, the cheapest first.

        Each comes with the seconds of a microbatch if it alone were so; none where tables say both ends.
        """
        return alternatives(self.settled, movement)

    def __repr__(self) -> str:
        """Show the programs' sizes."""
        count = len(self.programs.shared)
        return f"<Job {self.model.name}: {self.stages} stages on {self.strategy.devices} devices, {count} programs>"
