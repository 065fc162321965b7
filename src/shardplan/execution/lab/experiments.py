"""Experiments of the lab: what is measured together, and its pairs with their predictions.

An experiment is a cluster with its rates, a mesh, the reduced axes and a payload. Its pairs are all programs that the
planner knows of up to a number of instructions, on every placement of the mesh. They are predicted before anything is
measured:

- `events` by `simulation.replay` of the engine's messages, with `cluster.CONSTANTS`: the prediction that is scored;
- `barrier` by the closed form of the plan's certificate (algorithm "ring", a barrier after every step), on the
  cluster's topology with the same payload share and latency. It knows full-duplex links only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.errors import LayoutError
from shardplan.execution.lab.cluster import CONSTANTS, Cluster, Leaf, Rate, rates_text
from shardplan.execution.lab.session import Task
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.topology import Topology
from shardplan.movement.reductions.enumeration import Reduction, reductions
from shardplan.simulation.replay import replayed
from shardplan.simulation.scripts import Engine, script_of

MIB = 2**20
LIMIT = 3  # instructions of a program: over two factors there are 29 programs up to it
LabKey = tuple[str, Leaf, tuple[Rate, ...]]  # what a lab is built from: sizes, leaves, rates


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is measured together.

    >>> Experiment("2x4", (200.0, 1000.0), "a=2, b=4", ("b",)).name
    '2x4 ns 200/1000; a=2, b=4 over b; 1 MiB'
    """

    cluster: str  # sizes, outermost first
    rates: tuple[Rate, ...]  # of every level, in Mbit/s, outermost first, as of `Cluster.of`
    mesh: str  # axes and sizes
    axes: tuple[str, ...]  # the reduced ones
    nbytes: int = MIB  # payload of every device
    leaf: Leaf = "ns"  # as of `Cluster`
    limit: int = LIMIT  # most instructions of a program

    @property
    def name(self) -> str:
        """For people; two experiments of one limit have two names."""
        return f"{self.cluster_name}; {self.mesh} over {', '.join(self.axes)}; {self.nbytes / MIB:g} MiB"

    @property
    def cluster_name(self) -> str:
        """The cluster, its leaves and rates, such as `2x4 ns 200/1000`."""
        return f"{self.cluster} {self.leaf} {rates_text(self.rates, '/')}"

    @property
    def key(self) -> LabKey:
        """What a lab is built from."""
        return self.cluster, self.leaf, self.rates

    @property
    def is_full_reduction(self) -> bool:
        """Whether it reduces over all axes."""
        return len(self.axes) == len(Mesh.parse(self.mesh).axes)

    def build(self) -> Cluster:
        """Return the cluster."""
        return Cluster.of(self.cluster, self.rates, self.leaf)


@dataclass(frozen=True, slots=True)
class Pair:
    """A program on a placement with its predictions, before it is measured."""

    placement: Placement
    program: Program
    text: str  # its instructions
    ops: tuple[str, ...]  # names of its steps
    events: float  # seconds predicted; see the module
    barrier: float

    def task(self) -> Task:
        """What the lab measures."""
        return Task(self.program, self.placement, self.text)


def pairs(experiment: Experiment, engine: Engine = "ring") -> list[Pair]:
    """Return the pairs of an experiment: placements in order, programs of each cheapest first by the barrier form.

    Raises:
        LayoutError: The mesh has no placement on the cluster, or axes that it does not have.
    """
    shared = experiment.leaf == "lo"
    out: list[Pair] = []
    for where, one, program in competitors(experiment):
        timed = replayed(script_of(program, engine=engine), where, constants=CONSTANTS, shared=shared)
        names = tuple(s.op.name for s in program.steps)
        out.append(Pair(where, program, str(one), names, timed.seconds, one.seconds))
    if not out:
        raise LayoutError(f"{experiment.name}: no placement has a program")
    return out


def competitors(experiment: Experiment) -> Iterator[tuple[Placement, Reduction, Program]]:
    """Yield the placements of an experiment with their programs, as `pairs` has them; raises as that does."""
    cluster = experiment.build()
    mesh = Mesh.parse(experiment.mesh)
    unknown = [a for a in experiment.axes if a not in mesh.axes]
    if unknown or not experiment.axes:
        raise LayoutError(f"{experiment.name}: axes to reduce over are of {', '.join(mesh.axes)}, got {unknown}")
    for slow in placements(mesh, emulated_topology(cluster.topology)):
        where = Placement(mesh, cluster.topology, slow.matrix)
        for one in reductions(slow, experiment.axes, experiment.nbytes, experiment.limit, algorithm="ring"):
            if one.program is not None and one.program.steps:
                yield where, one, one.program


def emulated_topology(topology: Topology) -> Topology:
    """Return a topology with what the emulation adds: of bandwidth the payload's share, and latency."""
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * CONSTANTS.payload_share, latency=CONSTANTS.latency or 0.0)
        for level in topology.levels
    )
    return replace(topology, levels=levels)
