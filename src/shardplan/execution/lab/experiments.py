"""Experiments of the lab: what is measured together, its pairs with their predictions, and the standard list.

An experiment is a cluster with its rates, a mesh, the reduced axes and a payload. Its pairs are all programs that the
planner knows of up to a number of instructions, on every placement of the mesh. They are predicted before anything is
measured:

- `events` by `simulation.replay` of the engine's messages, with `cluster.CONSTANTS`: the prediction that is scored;
- `barrier` by the closed form of the plan's certificate (algorithm "ring", a barrier after every step), on the
  cluster's topology with the same payload share and latency. It knows full-duplex links only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardplan.core.mesh import Mesh
from shardplan.core.program import Program
from shardplan.errors import LayoutError
from shardplan.execution.lab.cluster import CONSTANTS, Cluster, Leaf
from shardplan.execution.lab.session import Task
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.topology import Topology
from shardplan.movement.reductions.enumeration import reductions
from shardplan.simulation.replay import replayed
from shardplan.simulation.scripts import Engine, script_of

MIB = 2**20
LIMIT = 3  # instructions of a program: over two factors there are 29 programs up to it
LabKey = tuple[str, Leaf, tuple[float, ...]]  # what a lab is built from: sizes, leaves, rates


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is measured together.

    >>> Experiment("2x4", (200.0, 1000.0), "a=2, b=4", ("b",)).name
    '2x4 ns 200/1000; a=2, b=4 over b; 1 MiB'
    """

    cluster: str  # sizes, outermost first
    rates: tuple[float, ...]  # of every level, in Mbit/s, outermost first
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
        return f"{self.cluster} {self.leaf} {'/'.join(f'{r:g}' for r in self.rates)}"

    @property
    def key(self) -> LabKey:
        """What a lab is built from."""
        return self.cluster, self.leaf, self.rates

    @property
    def whole(self) -> bool:
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
    cluster = experiment.build()
    mesh = Mesh.parse(experiment.mesh)
    unknown = [a for a in experiment.axes if a not in mesh.axes]
    if unknown or not experiment.axes:
        raise LayoutError(f"{experiment.name}: axes to reduce over are of {', '.join(mesh.axes)}, got {unknown}")
    priced = emulated(cluster.topology)
    out: list[Pair] = []
    for slow in placements(mesh, priced):
        where = Placement(mesh, cluster.topology, slow.matrix)
        for one in reductions(slow, experiment.axes, experiment.nbytes, experiment.limit, algorithm="ring"):
            program = one.program
            if program is None or not program.steps:
                continue
            timed = replayed(script_of(program, engine=engine), where, constants=CONSTANTS, shared=cluster.leaf == "lo")
            names = tuple(s.op.name for s in program.steps)
            out.append(Pair(where, program, str(one), names, timed.seconds, one.seconds))
    if not out:
        raise LayoutError(f"{experiment.name}: no placement has a program")
    return out


def emulated(topology: Topology) -> Topology:
    """Return a topology with what the emulation adds: of bandwidth the payload's share, and latency."""
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * CONSTANTS.payload_share, latency=CONSTANTS.latency or 0.0)
        for level in topology.levels
    )
    return replace(topology, levels=levels)


def _cells(cluster: str, rates: tuple[float, ...], leaf: Leaf, cells: str) -> list[Experiment]:
    """Read cells such as `8 a 1`: axis sizes, reduced axes, MiB; axes are named a, b, c."""
    out: list[Experiment] = []
    for cell in cells.split(","):
        sizes, axes, mib = cell.split()
        mesh = ", ".join(f"{a}={n}" for a, n in zip("abc", sizes.split("x"), strict=False))
        out.append(Experiment(cluster, rates, mesh, tuple(axes), int(mib) * MIB, leaf))
    return out


# The standard sweep, half an hour. Reductions over two factors have 29 programs of up to 3 instructions; with one there
# are 3, and being right is luck. The last two of the first cluster are the placement ratio, the second cluster is that
# of the best program against a flat all_reduce.
STANDARD: tuple[Experiment, ...] = (
    *_cells("2x4", (200.0, 1000.0), "ns",
            "8 a 1, 2x4 b 1, 2x2x2 ab 1, 8 a 2, 2x4 a 1, 4x2 b 1, 2x2x2 a 1, 2x4 a 4, 4x2 b 4"),
    *_cells("2x4", (100.0, 1000.0), "ns", "8 a 1, 2x4 b 1, 2x4 a 1, 4x2 b 1, 2x2x2 b 1"),
    *_cells("2x4", (50.0, 250.0), "ns", "2x4 a 2"),
    *_cells("2x4", (200.0, 1000.0), "lo", "8 a 1, 2x4 b 1, 4x2 a 1, 2x4 a 2, 4x2 b 2, 2x2x2 c 1"),
    *_cells("2x2x2", (400.0, 200.0, 800.0), "ns",
            "2x4 b 1, 8 a 1, 2x4 a 1, 4x2 b 1, 2x2x2 a 1, 2x2x2 c 2, 2x4 a 2"),
    *_cells("2x2x2", (100.0, 200.0, 1000.0), "ns", "4x2 a 1, 2x4 a 1, 4x2 b 1, 2x2x2 b 1"),
    *_cells("4x2", (200.0, 1000.0), "ns", "8 a 1, 4x2 a 1, 2x4 a 1, 4x2 b 1, 2x2x2 c 2"),
    *_cells("4x4", (100.0, 500.0), "ns", "16 a 1, 4x4 a 1, 8x2 b 1, 2x8 a 1"),
)  # fmt: skip
